//! The filter `fault`: errors, torn writes and lost requests, by rule. For tests and drills.
//!
//! Each rule counts the requests that it matches, on any queue, and the seed decides which of them it
//! strikes: the same requests in the same order get the same faults.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vmseal_api::filter::{CRYPT_SECTOR, FaultKind, FaultRule, FaultSpec};

use crate::stack::chain::{Filter, Io, Limits};
use crate::stack::layer::{Counter, Layer, Place};
use crate::stack::memory::Cursor;
use crate::stack::request::{IoError, Operation, Request, RequestId};

/// How many torn writes can be in flight in a queue; further ones fail without a byte written.
const TORN_MAX: usize = 32;

/// The layer.
#[derive(Clone, Debug)]
pub struct Fault(Arc<FaultState>);

#[derive(Debug)]
struct FaultState {
    seed: u64,
    rules: Vec<Rule>,
}

#[derive(Debug)]
struct Rule {
    rule: FaultRule,
    /// How many requests it has matched.
    matched: AtomicU64,
    struck: Counter,
}

impl Fault {
    /// A layer with these rules.
    #[must_use]
    pub fn new(spec: FaultSpec) -> Self {
        let rule = |rule| Rule { rule, matched: AtomicU64::new(0), struck: Counter::default() };
        let rules = spec.rules.into_iter().map(rule).collect();
        Self(Arc::new(FaultState { seed: spec.seed, rules }))
    }
}

impl Layer for Fault {
    fn kind(&self) -> &'static str {
        "fault"
    }

    fn filter(&self, _place: &Place) -> std::io::Result<Box<dyn Filter>> {
        Ok(Box::new(FaultFilter(Arc::clone(&self.0))))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let of = |kind: fn(FaultKind) -> bool| {
            let rules = self.0.rules.iter().filter(|rule| kind(rule.rule.kind));
            rules.map(|rule| rule.struck.get()).sum()
        };
        vec![
            ("errors", of(|kind| matches!(kind, FaultKind::Error { .. }))),
            ("torn_writes", of(|kind| kind == FaultKind::Torn)),
            ("lost_requests", of(|kind| kind == FaultKind::Lost)),
        ]
    }
}

impl Rule {
    /// Whether it strikes a request.
    fn strikes(&self, request: &Request, seed: u64) -> bool {
        let rule = &self.rule;
        let within = rule.range.is_none_or(|range| {
            let end = range.offset.saturating_add(range.length);
            request.offset < end && range.offset < request.offset.saturating_add(request.length)
        });
        let elsewhere = request.operation != Operation::Flush && !within;
        if !request.operation.is_one_of(&rule.operations) || elsewhere {
            return false;
        }
        let nth = self.matched.fetch_add(1, Ordering::Relaxed);
        let chosen = fastrand::Rng::with_seed(seed ^ nth).u64(..rule.one_in.max(1)) == 0;
        if nth < rule.after || !chosen {
            return false;
        }
        if rule.times.is_some_and(|times| self.struck.get() >= times) {
            return false;
        }
        self.struck.add(1);
        true
    }
}

struct FaultFilter(Arc<FaultState>);

impl FaultFilter {
    fn fault(&self, request: &Request) -> Option<FaultKind> {
        let seeded = self.0.rules.iter().zip(0u64..);
        let mut striking = seeded.filter(|(rule, index)| {
            rule.strikes(request, self.0.seed.wrapping_add(index.rotate_left(32)))
        });
        striking.next().map(|(rule, _)| rule.rule.kind)
    }
}

impl Filter for FaultFilter {
    fn limits(&self) -> Limits {
        Limits { children: TORN_MAX }
    }

    fn prepare(&mut self, _capacity: usize) {}

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        match self.fault(io.request(id)) {
            None => io.pass(id),
            Some(FaultKind::Error { errno }) => io.complete(id, Err(IoError::from_errno(errno))),
            Some(FaultKind::Lost) => io.complete(id, Ok(())),
            Some(FaultKind::Torn) => tear(id, io),
        }
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        match io.parent(id) {
            None => io.complete(id, io.request(id).result),
            Some(torn) => {
                io.release(id);
                io.complete(torn, Err(IoError::Device(libc::EIO)));
            }
        }
    }
}

/// Writes the first half, in whole sectors, and fails.
fn tear(id: RequestId, io: &mut Io<'_>) {
    let sector = u64::from(CRYPT_SECTOR);
    let (offset, kept) = (io.request(id).offset, io.request(id).length / 2 / sector * sector);
    let child = (kept > 0).then(|| io.child(id, Operation::Write, offset, kept)).flatten();
    let Some(child) = child else { return io.complete(id, Err(IoError::Device(libc::EIO))) };
    let length = usize::try_from(kept).unwrap_or(usize::MAX);
    io.add_from_parent(id, child, &mut Cursor::default(), length);
    io.pass(child);
}
