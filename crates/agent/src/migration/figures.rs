//! What the migrations of this agent have moved since it started, for its metrics.

use std::sync::atomic::{AtomicU64, Ordering};

/// One direction: all that this host sends, or all that it receives.
#[derive(Debug)]
pub struct Figures {
    running: AtomicU64,
    bytes: AtomicU64,
    cpu_nanoseconds: AtomicU64,
}

/// VMs that are sent, and what goes out.
pub static OUT: Figures = Figures::new();
/// VMs that are received, and what comes in.
pub static IN: Figures = Figures::new();

impl Figures {
    const fn new() -> Self {
        let (running, bytes, cpu_nanoseconds) =
            (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        Self { running, bytes, cpu_nanoseconds }
    }

    /// One more migration, until the result is dropped.
    pub fn begin(&'static self) -> Running {
        self.running.fetch_add(1, Ordering::Relaxed);
        Running(self)
    }

    /// So many bytes more.
    pub fn moved(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So much more CPU time of threads that move them.
    pub fn worked(&self, nanoseconds: u64) {
        self.cpu_nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// Migrations at work.
    pub fn running(&self) -> u64 {
        self.running.load(Ordering::Relaxed)
    }

    /// Bytes of content, without heads and tags.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// CPU time of the threads that read, seal and send, or receive, open and write.
    pub fn cpu_nanoseconds(&self) -> u64 {
        self.cpu_nanoseconds.load(Ordering::Relaxed)
    }
}

/// A migration at work.
pub struct Running(&'static Figures);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migration_is_counted_until_it_ends() {
        static FIGURES: Figures = Figures::new();
        let (one, other) = (FIGURES.begin(), FIGURES.begin());
        assert_eq!(FIGURES.running(), 2);
        drop(one);
        assert_eq!(FIGURES.running(), 1);
        drop(other);
        assert_eq!(FIGURES.running(), 0);
    }
}
