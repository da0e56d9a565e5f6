//! Layers: what a disk has of each filter. A layer makes one filter for each of the disk's queues, and
//! holds what they share: a budget, counters.

use std::fmt::Debug;
use std::sync::Arc;

use vmseal_api::filter::{FilterSpec, LayerFigures};

use crate::cache::Cache;
use crate::chain::Filter;
use crate::delay::Delay;
use crate::fault::Fault;
use crate::limit::Limit;
pub use crate::tally::Counter;

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

/// What a layer has done, for the control socket.
#[must_use]
pub fn figures(layer: &dyn Layer) -> LayerFigures {
    let counters = layer.counters().into_iter().map(|(name, value)| (name.to_owned(), value));
    LayerFigures { kind: layer.kind().to_owned(), counters: counters.collect() }
}

/// The layer that a configuration asks for; none for encryption and replication, which need what is opened for
/// them and are the disk's own.
#[must_use]
pub fn of(spec: &FilterSpec) -> Option<Arc<dyn Layer>> {
    match spec {
        FilterSpec::Crypt { .. } | FilterSpec::Replicate(_) => None,
        FilterSpec::Limit(limit) => Some(Arc::new(Limit::new(limit))),
        FilterSpec::Delay(delay) => Some(Arc::new(Delay::new(delay.clone()))),
        FilterSpec::Fault(fault) => Some(Arc::new(Fault::new(fault.clone()))),
        FilterSpec::Cache(cache) => Some(Arc::new(Cache::new(cache))),
    }
}
