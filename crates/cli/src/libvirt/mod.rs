//! libvirt domains: read for an import, and printed for a running VM.

mod interfaces;
mod machine;
mod node;
mod read;
mod write;

pub use read::{Disk, read};
pub use write::domain;
