//! Where a disk's bytes are stored.

pub mod channel;
pub mod extent;
pub mod file;
pub mod kinds;
pub mod mem;
pub mod nbd;
pub mod own;
pub mod qcow2;
pub mod rings;
mod served;
mod statx;
pub mod sync;
pub mod target;
pub mod uring;

pub use crate::storage::kinds::DiskStorage;
