//! A budget that several queues draw on.

use vmseal_api::filter::Budget;

use crate::sync::atomic::{AtomicU64, Ordering};

/// A time in nanoseconds.
pub(crate) const SECOND: u128 = 1_000_000_000;

/// The rest of a budget, as the time at which it will be full again: nanoseconds since the layer was
/// made.
#[derive(Debug)]
pub(crate) struct Bucket {
    budget: Budget,
    full_at: AtomicU64,
}

impl Bucket {
    pub(crate) fn new(budget: Budget) -> Self {
        Self { budget, full_at: AtomicU64::new(0) }
    }

    /// How long this many units take to come in.
    fn time_of(&self, units: u64) -> u64 {
        let time = (u128::from(units) * SECOND).div_ceil(u128::from(self.budget.per_second.max(1)));
        u64::try_from(time).unwrap_or(u64::MAX)
    }

    /// How long this many units have to wait; zero if they may go.
    pub(crate) fn wait(&self, now: u64, units: u64) -> u64 {
        let full_at = self.full_at.load(Ordering::Acquire);
        let after = full_at.max(now).saturating_add(self.time_of(units));
        let within = after.saturating_sub(now.saturating_add(self.time_of(self.budget.burst)));
        within.min(full_at.saturating_sub(now))
    }

    pub(crate) fn charge(&self, now: u64, units: u64) {
        let time = self.time_of(units);
        let charged = |full_at: u64| Some(full_at.max(now).saturating_add(time));
        let _ = self.full_at.fetch_update(Ordering::AcqRel, Ordering::Acquire, charged);
    }
}
