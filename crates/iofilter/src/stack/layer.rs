//! Layers: what a disk has of each filter. A layer makes one filter for each of the disk's queues, and
//! holds what they share: a budget, counters.

use std::fmt::Debug;

use crate::stack::chain::Filter;
pub use crate::stack::tally::Counter;

/// A layer of a disk's chains, other than encryption.
pub trait Layer: Debug + Send + Sync {
    /// What it is called in configurations and figures.
    fn kind(&self) -> &'static str;

    /// The filter of one more queue.
    ///
    /// # Errors
    /// The system refuses what it needs.
    fn filter(&self) -> std::io::Result<Box<dyn Filter>>;

    /// What it has counted since the process started, and how it stands, by name.
    fn counters(&self) -> Vec<(&'static str, u64)>;
}
