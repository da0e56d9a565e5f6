//! Numbers that are counted by threads that serve, and read by others.

use crate::sync::atomic::{AtomicU64, Ordering};

/// Counts without a locked instruction. Only one thread may add; any may look.
#[derive(Debug, Default)]
pub struct Tally(AtomicU64);

impl Tally {
    /// Counts so many more.
    pub fn add(&self, value: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
    }

    /// How many there were.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counts; shared by the queues of a disk, and off the path of requests that nothing happens to.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Counts so many more.
    pub fn add(&self, value: u64) {
        self.0.fetch_add(value, Ordering::Relaxed);
    }

    /// How many there were.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
