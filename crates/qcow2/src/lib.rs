//! The header of a qcow2 image, read strictly before anything else of the image is trusted: its properties,
//! or why it cannot be used (QEMU's docs/interop/qcow2.txt, versions 2 and 3).
//!
//! An import accepts only an image that is complete in itself: no backing file, no external data file, no
//! encryption of its own, no internal snapshots, nothing unfinished, and no feature that the reader of its
//! data (crate imago) lacks. A disk may have a backing file, if one is given; the name in the image is used
//! for messages only. A writable image must not have anything that writing would invalidate.

mod clusters;
mod create;
mod header;
mod reach;

pub use clusters::{Clusters, Content, MAPPED_MAX};
pub use create::{Below, create_overlay, create_overlay_beginning};
pub use header::{
    EXAMINED_MAX, Header, Layout, Refusal, Use, examine, examine_disk, parse, parse_for,
};
pub use reach::check_reach;
