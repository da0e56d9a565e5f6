//! libvirt domains: read for an import, and printed for a running VM.

mod read;
mod write;

pub use read::{Disk, read};
pub use write::domain;
