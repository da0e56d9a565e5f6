//! The filter `limit`: at most this many requests and bytes a second, for all queues of a disk together.
//!
//! ```text
//!   arrives ── within the budget, nobody waiting ──> goes on, is charged
//!      └───── otherwise ──> waits in its queue, first come first served ── in time ──> goes on, is charged
//! ```
//! A request is charged when it is admitted, whatever its result. A budget is a bucket that fills at its rate
//! and holds its burst (the generic cell rate algorithm of ITU-T I.371, in nanoseconds): after a pause the
//! burst may go at once. A request larger than the whole burst goes when the bucket is full, and leaves the
//! bucket in debt. Flushes are free, as holding them back protects nobody. While a chain is drained
//! no request waits.

mod bucket;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmseal_api::filter::LimitSpec;

use crate::layers::limit::bucket::Bucket;
use crate::stack::chain::{Filter, Io, Limits};
use crate::stack::layer::{Counter, Layer, Place};
use crate::stack::request::{Operation, Request, RequestId};

/// The layer: the budgets that a disk's queues share.
#[derive(Clone, Debug)]
pub struct Limit(Arc<LimitState>);

#[derive(Debug)]
struct LimitState {
    since: Instant,
    requests: Option<Bucket>,
    bytes: Option<Bucket>,
    held: Counter,
    held_nanoseconds: Counter,
}

impl Limit {
    /// A layer with full budgets.
    #[must_use]
    pub fn new(spec: &LimitSpec) -> Self {
        Self(Arc::new(LimitState {
            since: Instant::now(),
            requests: spec.requests.map(Bucket::new),
            bytes: spec.bytes.map(Bucket::new),
            held: Counter::default(),
            held_nanoseconds: Counter::default(),
        }))
    }
}

impl Layer for Limit {
    fn kind(&self) -> &'static str {
        "limit"
    }

    fn filter(&self, _place: &Place) -> std::io::Result<Box<dyn Filter>> {
        Ok(Box::new(LimitFilter {
            shared: Arc::clone(&self.0),
            waiting: VecDeque::new(),
            hastened: false,
        }))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("held_requests", self.0.held.get()),
            ("held_nanoseconds", self.0.held_nanoseconds.get()),
        ]
    }
}

impl LimitState {
    fn now(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// How long a request has to wait; if not at all, it is charged. Queues that ask at the same
    /// instant may both go: the budget is in debt by one request then, and recovers.
    fn admit(&self, now: u64, request: &Request, hastened: bool) -> u64 {
        let bytes = match request.operation {
            Operation::Read | Operation::Write => request.length,
            // A discard moves none of its bytes.
            Operation::Flush | Operation::Discard | Operation::WriteZeroes { .. } => 0,
        };
        let charges = [(&self.requests, 1), (&self.bytes, bytes)];
        let buckets =
            || charges.iter().filter_map(|(bucket, units)| Some((bucket.as_ref()?, *units)));
        let wait = buckets().map(|(bucket, units)| bucket.wait(now, units)).max().unwrap_or(0);
        if wait == 0 || hastened {
            buckets().for_each(|(bucket, units)| bucket.charge(now, units));
            return 0;
        }
        wait
    }
}

struct LimitFilter {
    shared: Arc<LimitState>,
    /// The waiting requests, and since when each waits.
    waiting: VecDeque<(RequestId, u64)>,
    hastened: bool,
}

impl Filter for LimitFilter {
    fn limits(&self) -> Limits {
        Limits { children: 0 }
    }

    fn prepare(&mut self, capacity: usize) {
        self.waiting.reserve(capacity);
    }

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        if io.request(id).operation == Operation::Flush {
            return io.pass(id);
        }
        let now = self.shared.now();
        if self.waiting.is_empty() && self.shared.admit(now, io.request(id), self.hastened) == 0 {
            return io.pass(id);
        }
        self.shared.held.add(1);
        io.hold_back(id);
        self.waiting.push_back((id, now));
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        io.complete(id, io.request(id).result);
    }

    fn tick(&mut self, io: &mut Io<'_>) -> Option<Instant> {
        if self.waiting.is_empty() {
            return None;
        }
        let now = self.shared.now();
        while let Some(&(id, since)) = self.waiting.front() {
            let wait = self.shared.admit(now, io.request(id), self.hastened);
            if wait > 0 {
                return Some(self.shared.since + Duration::from_nanos(now.saturating_add(wait)));
            }
            self.waiting.pop_front();
            self.shared.held_nanoseconds.add(now.saturating_sub(since));
            io.let_go(id, self.shared.since + Duration::from_nanos(now));
        }
        None
    }

    fn hasten(&mut self, hastened: bool) {
        self.hastened = hastened;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use vmseal_api::filter::Budget;

    use super::*;
    use crate::layers::limit::bucket::SECOND;

    proptest! {
        /// In no period is more let through than its rate allows and one burst; and a request that
        /// waits as long as told may go.
        #[test]
        fn a_bucket_lets_through_what_its_budget_has(
            per_second in 1u64..2_000_000_000,
            burst in 1u64..10_000,
            asks in prop::collection::vec((0u64..5_000_000_000, 1u64..20_000), 1..80),
        ) {
            let bucket = Bucket::new(Budget { per_second, burst });
            let (mut now, mut gone) = (0u64, Vec::new());
            for (pause, units) in asks {
                now += pause;
                let wait = bucket.wait(now, units);
                now += wait;
                prop_assert_eq!(bucket.wait(now, units), 0);
                if wait > 0 && units <= burst {
                    prop_assert!(bucket.wait(now - 1, units) > 0, "it could have gone earlier");
                }
                bucket.charge(now, units);
                gone.push((now, units));
            }
            for from in 0..gone.len() {
                let mut sum = 0u128;
                for &(at, units) in &gone[from..] {
                    // The largest may go into debt; what came before it is within the budget.
                    let earned = u128::from(at - gone[from].0) * u128::from(per_second) / SECOND;
                    prop_assert!(sum <= earned + u128::from(burst) + 1);
                    sum += u128::from(units.min(burst));
                }
            }
        }
    }

    #[test]
    fn after_a_pause_there_is_one_burst_and_no_more() {
        let bucket = Bucket::new(Budget { per_second: 10, burst: 3 });
        let now = 60_000_000_000;
        for _ in 0..3 {
            assert_eq!(bucket.wait(now, 1), 0);
            bucket.charge(now, 1);
        }
        assert_eq!(bucket.wait(now, 1), 100_000_000);
        let large = Bucket::new(Budget { per_second: 10, burst: 3 });
        assert_eq!(large.wait(0, 100), 0, "larger than the burst, and the bucket is full");
        large.charge(0, 100);
        assert_eq!(large.wait(0, 1), 9_800_000_000, "the debt is paid back");
    }
}
