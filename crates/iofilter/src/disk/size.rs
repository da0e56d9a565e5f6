//! The size of a disk, which may grow while it is served.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// The size of now, in bytes.
#[derive(Debug)]
pub struct CurrentSize(AtomicU64);

impl From<u64> for CurrentSize {
    fn from(bytes: u64) -> Self {
        Self(AtomicU64::new(bytes))
    }
}

impl CurrentSize {
    /// In bytes.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(SeqCst)
    }

    /// The disk has so many bytes from now on.
    pub fn set(&self, bytes: u64) {
        self.0.store(bytes, SeqCst);
    }
}
