//! The filter `delay`: holds requests back for a time before it passes them. For tests and drills: it imitates
//! a slow datastore.
//!
//! With a variation (`jitter`) requests overtake each other, as they may anywhere below a guest.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmseal_api::filter::DelaySpec;

use crate::stack::chain::{Filter, Io, Limits};
use crate::stack::layer::{Counter, Layer, Place};
use crate::stack::request::RequestId;

/// The layer.
#[derive(Clone, Debug)]
pub struct Delay(Arc<DelayState>);

#[derive(Debug)]
struct DelayState {
    spec: DelaySpec,
    delayed: Counter,
}

impl Delay {
    /// A layer with this delay.
    #[must_use]
    pub fn new(spec: DelaySpec) -> Self {
        Self(Arc::new(DelayState { spec, delayed: Counter::default() }))
    }
}

impl Layer for Delay {
    fn kind(&self) -> &'static str {
        "delay"
    }

    fn holds_back(&self) -> bool {
        self.0.spec.microseconds + self.0.spec.jitter_microseconds > 0
    }

    fn filter(&self, _place: &Place) -> std::io::Result<Box<dyn Filter>> {
        let random = fastrand::Rng::with_seed(self.0.spec.seed);
        let (held, hastened) = (BinaryHeap::new(), false);
        Ok(Box::new(DelayFilter { shared: Arc::clone(&self.0), random, held, hastened }))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("delayed_requests", self.0.delayed.get())]
    }
}

struct DelayFilter {
    shared: Arc<DelayState>,
    random: fastrand::Rng,
    held: BinaryHeap<Reverse<(Instant, RequestId)>>,
    hastened: bool,
}

impl Filter for DelayFilter {
    fn limits(&self) -> Limits {
        Limits { children: 0 }
    }

    fn prepare(&mut self, capacity: usize) {
        self.held.reserve(capacity);
    }

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        let spec = &self.shared.spec;
        if self.hastened || !io.request(id).operation.is_one_of(&spec.operations) {
            return io.pass(id);
        }
        let jitter = self.random.u64(0..=spec.jitter_microseconds);
        let until = Instant::now() + Duration::from_micros(spec.microseconds + jitter);
        self.shared.delayed.add(1);
        io.hold(id);
        self.held.push(Reverse((until, id)));
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        io.complete(id, io.request(id).result);
    }

    fn tick(&mut self, io: &mut Io<'_>) -> Option<Instant> {
        if self.held.is_empty() {
            return None;
        }
        let now = Instant::now();
        while let Some(&Reverse((until, id))) = self.held.peek() {
            if until > now && !self.hastened {
                return Some(until);
            }
            self.held.pop();
            io.pass(id);
        }
        None
    }

    fn hasten(&mut self, hastened: bool) {
        self.hastened = hastened;
    }
}
