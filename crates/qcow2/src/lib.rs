//! The header of a qcow2 image, read strictly before anything else of the image is trusted: what it is,
//! or why it cannot be imported (QEMU's docs/interop/qcow2.txt, versions 2 and 3).
//!
//! Only an image that is whole in itself passes: no backing file, no external data file, no encryption
//! of its own, no internal snapshots, nothing unfinished, and no feature that the reader of its data
//! (crate imago) does not have.

mod header;

pub use header::{EXAMINED_MAX, Header, Refusal, examine, parse};
