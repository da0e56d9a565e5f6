//! The header of a qcow2 image, read strictly before anything else of the image is trusted: what it is,
//! or why it cannot be used (QEMU's docs/interop/qcow2.txt, versions 2 and 3).
//!
//! For an import only an image passes that is whole in itself: no backing file, no external data file, no
//! encryption of its own, no internal snapshots, nothing unfinished, and no feature that the reader of its
//! data (crate imago) does not have. A disk may have a backing file, if one is given; the name of it that is
//! in the image is for messages only. What is to be written has nothing that writing would make wrong.

mod header;
mod reach;

pub use header::{
    EXAMINED_MAX, Header, Layout, Refusal, Use, examine, examine_disk, parse, parse_for,
};
pub use reach::check_reach;
