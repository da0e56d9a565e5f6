//! Domains of libvirt: read to bring a VM in, and printed to show what runs.

mod interfaces;
mod read;
mod write;

pub use read::{Disk, read};
pub use write::domain;
