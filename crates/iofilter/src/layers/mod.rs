//! The layers of a disk, what stands of them in each chain, a filter that passes, completes or splits requests, and what they
//! make together: stacks, which disks are, and layers own as legs.

pub mod align;
pub mod bounce;
pub mod cache;
pub mod crypt;
pub mod delay;
pub mod fault;
pub mod leg;
pub mod limit;
pub mod replicate;
pub mod stack;
pub mod stall;

use std::sync::Arc;

use vmseal_api::filter::{FilterSpec, LayerFigures};

use crate::layers::bounce::Bounce;
use crate::layers::cache::Cache;
use crate::layers::delay::Delay;
use crate::layers::fault::Fault;
use crate::layers::limit::Limit;
use crate::layers::stall::Stall;
use crate::stack::layer::Layer;

/// What a layer has done, for the control socket.
#[must_use]
pub fn figures(layer: &dyn Layer) -> LayerFigures {
    let counters = layer.counters().into_iter().map(|(name, value)| (name.to_owned(), value));
    LayerFigures { kind: layer.kind().to_owned(), counters: counters.collect() }
}

/// Whether a layer is of what the guest may do, and not of where the disk is: then it stays when the disk pivots.
#[must_use]
pub fn stays_above_a_mirror(layer: &dyn Layer) -> bool {
    matches!(layer.kind(), "limit" | "delay" | "fault" | stall::KIND)
}

/// Makes the layer that a configuration asks for; none for encryption and copies, which need a key or open legs.
#[must_use]
pub fn of(spec: &FilterSpec) -> Option<Arc<dyn Layer>> {
    match spec {
        FilterSpec::Crypt { .. } | FilterSpec::Replicate(_) | FilterSpec::Mirror(_) => None,
        FilterSpec::Limit(limit) => Some(Arc::new(Limit::new(limit))),
        FilterSpec::Delay(delay) => Some(Arc::new(Delay::new(delay.clone()))),
        FilterSpec::Fault(fault) => Some(Arc::new(Fault::new(fault.clone()))),
        FilterSpec::Bounce {} => Some(Arc::new(Bounce::default())),
        FilterSpec::Stall(stall) => Some(Arc::new(Stall::new(*stall))),
        FilterSpec::Cache(cache) => Some(Arc::new(Cache::new(cache))),
    }
}
