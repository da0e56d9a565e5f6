//! Layers: the shared part of a disk's filters. A layer makes one filter for each of the disk's queues, and
//! holds what they share: a budget, counters.

use std::fmt::Debug;

use crate::stack::chain::Filter;
pub use crate::stack::tally::Counter;

/// A layer of a disk's chains, other than encryption.
pub trait Layer: Debug + Send + Sync {
    /// Its name in configurations and metrics.
    fn kind(&self) -> &'static str;

    /// Makes the filter for one more queue.
    ///
    /// # Errors
    /// The system refuses what it needs.
    fn filter(&self) -> std::io::Result<Box<dyn Filter>>;

    /// Its counters since the process started, and its status, by name.
    fn counters(&self) -> Vec<(&'static str, u64)>;
}
