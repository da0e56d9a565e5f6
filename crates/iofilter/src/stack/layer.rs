//! Layers: the shared part of a disk's filters. A layer makes one filter for each of the disk's queues, and
//! holds what they share: a budget, a key, locks, counters.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use crate::stack::chain::Filter;
use crate::stack::figures::CipherTime;
use crate::stack::request::LOGICAL_BLOCK;
pub use crate::stack::tally::Counter;

/// What a layer, or storage, presents to what is above it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boundary {
    /// Its size, in bytes.
    pub size: u64,
    /// The unit in which it takes requests, in bytes; a power of two.
    pub block: u32,
    /// The alignment of memory that it takes, in bytes; a power of two.
    pub memory: u32,
}

impl Boundary {
    /// Whether it takes what guests give.
    #[must_use]
    pub fn suits_guests(&self) -> bool {
        u64::from(self.block) == LOGICAL_BLOCK && self.memory == 1
    }
}

/// Where in which chain a filter is to stand.
#[derive(Clone, Debug)]
pub struct Place {
    /// What is below it.
    pub below: Boundary,
    /// Whether what is below it completes requests as they are submitted.
    pub works_at_once: bool,
    /// Whether the chain's storage moves what is in shared memory without copying it ([`Pool::shared`]). Nothing but
    /// what storage gets may be in such memory.
    ///
    /// [`Pool::shared`]: crate::stack::pool::Pool::shared
    pub shares: bool,
    /// Whether it leaves what was read in its own buffers: only of the filter directly above it.
    pub lends: bool,
    /// What the chain's buffers may use in all, in bytes: a quarter for `align`, the rest for `crypt`.
    pub pool_bytes: usize,
    /// What the disk's cipher takes.
    pub cipher_time: Arc<CipherTime>,
}

impl Place {
    /// Above storage of this size that takes what guests give and completes at once, without buffers: for a filter
    /// that needs none, on its own.
    #[must_use]
    pub fn simple(size: u64) -> Self {
        let below = Boundary { size, block: LOGICAL_BLOCK as u32, memory: 1 };
        let (works_at_once, shares, lends, pool_bytes) = (true, false, false, 0);
        Self { below, works_at_once, shares, lends, pool_bytes, cipher_time: Arc::default() }
    }
}

/// A layer of a disk's chains.
pub trait Layer: Debug + Send + Sync {
    /// Its name in configurations and metrics.
    fn kind(&self) -> &'static str;

    /// What it presents to what is above it, given what is below it: the same, unless it takes some of its space, or other
    /// blocks.
    fn presents(&self, below: Boundary) -> Boundary {
        below
    }

    /// Whether zeroes below it are zeroes above it, and nothing else is.
    fn keeps_zeroes(&self) -> bool {
        true
    }

    /// Whether it holds back requests, so that what is below it takes its time as a device does.
    fn holds_back(&self) -> bool {
        false
    }

    /// Makes the filter for one more queue, at this place.
    ///
    /// # Errors
    /// The system refuses what it needs, or a key is not usable.
    fn filter(&self, place: &Place) -> std::io::Result<Box<dyn Filter>>;

    /// For how long storage has not answered, where requests of the disk fail for that ([`crate::layers::stall`]).
    fn fails_for(&self) -> Option<Duration> {
        None
    }

    /// Its counters since the process started, and its status, by name.
    fn counters(&self) -> Vec<(&'static str, u64)>;
}
