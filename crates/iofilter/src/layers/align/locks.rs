//! Which stretches of a disk are being written whole (shared) or read-modified-written (exclusive),
//! over all its queues.
//!
//! ```text
//!   count n, unclaimed --try_shared--> n+1          count n, unclaimed --claim--> count n, claimed
//!   count n, claimed   --try_shared--> refused      count n, claimed   --claim--> refused
//!   count 0, claimed   = held exclusively, until release_exclusive
//! ```
//! A claim keeps new writers out and waits for those in flight, so it is never starved. A holder of a lock
//! never waits for another lock; a refused caller holds nothing.
//!
//! A caller that must wait says so ([`SectorLocks::wait`]) and tries once more. It is woken when a claim is released,
//! or when the last writer leaves a claimed stretch; both can tell from the counter alone whether that is the case.
//!
//! Readers of whole sectors take no lock. Claims are counted, and comparing [`SectorLocks::claims`] before and after
//! the read shows whether the data may have been modified meanwhile: one load in most cases, and no store, so
//! queues that only read do not contend for the counter.

use crate::stack::waker::{Waiters, Waker};
use crate::sync::atomic::{AtomicU64, Ordering};

/// How many counters there are; stretches this many apart share one.
const COUNTERS: usize = 1024;

/// The length of a stretch, in bytes: most requests are in one, and a bulk write in few.
const STRETCH: u64 = 256 * 1024;

/// Set while a writer waits for, or has, the stretch exclusively.
const CLAIMED: u64 = 1 << 31;

/// Adds one claim to the count. The count wraps after 2^32 claims, more than there are during a read.
const CLAIM: u64 = 1 << 32;

/// The bits that are not the count of claims: the claim and the number of sharers.
const HELD: u64 = CLAIM - 1;

/// The counters of one disk, shared by its queues.
#[derive(Debug)]
pub struct SectorLocks {
    counters: Box<[AtomicU64]>,
    waiters: Waiters,
}

impl Default for SectorLocks {
    fn default() -> Self {
        let counters = (0..COUNTERS).map(|_| AtomicU64::new(0)).collect();
        Self { counters, waiters: Waiters::default() }
    }
}

impl SectorLocks {
    /// Tries to share the range with other whole writes: all of it or nothing.
    pub fn try_shared(&self, offset: u64, length: u64) -> bool {
        for (taken, index) in stretches(offset, length).enumerate() {
            if !self.enter(index) {
                stretches(offset, length).take(taken).for_each(|index| self.leave(index));
                return false;
            }
        }
        true
    }

    /// Releases the locks that [`Self::try_shared`] took.
    pub fn release_shared(&self, offset: u64, length: u64) {
        stretches(offset, length).for_each(|index| self.leave(index));
    }

    /// How often parts of the range have been claimed; none while a claim is held.
    pub fn claims(&self, offset: u64, length: u64) -> Option<u64> {
        let mut claims = 0u64;
        for index in stretches(offset, length) {
            let value = self.counters[index].load(Ordering::Acquire);
            if value & CLAIMED != 0 {
                return None;
            }
            claims = claims.wrapping_add(value / CLAIM);
        }
        Some(claims)
    }

    /// Claims the stretch at `offset` exclusively; refused while another claim exists.
    pub fn claim(&self, offset: u64) -> bool {
        let claimed =
            |value: u64| (value & CLAIMED == 0).then_some((value | CLAIMED).wrapping_add(CLAIM));
        self.at(offset).fetch_update(Ordering::AcqRel, Ordering::Acquire, claimed).is_ok()
    }

    /// Whether the claimed stretch has no sharers left.
    pub fn is_exclusive(&self, offset: u64) -> bool {
        self.at(offset).load(Ordering::Acquire) & HELD == CLAIMED
    }

    /// Releases the lock that [`Self::claim`] took.
    pub fn release_exclusive(&self, offset: u64) {
        self.at(offset).fetch_and(!CLAIMED, Ordering::Release);
        self.waiters.wake();
    }

    /// Registers a chain that was refused, or whose claim is not yet exclusive, to be woken when that may have changed.
    pub fn wait(&self, waker: &Waker) {
        self.waiters.add(waker);
    }

    fn at(&self, offset: u64) -> &AtomicU64 {
        &self.counters[(offset / STRETCH) as usize % COUNTERS]
    }

    fn enter(&self, index: usize) -> bool {
        let free = |value: u64| (value & CLAIMED == 0).then_some(value + 1);
        self.counters[index].fetch_update(Ordering::AcqRel, Ordering::Acquire, free).is_ok()
    }

    fn leave(&self, index: usize) {
        let before = self.counters[index].fetch_sub(1, Ordering::Release);
        debug_assert_ne!(before & HELD & !CLAIMED, 0, "released more often than taken");
        if before & HELD == CLAIMED + 1 {
            self.waiters.wake();
        }
    }
}

/// The counters that a range needs, each once.
fn stretches(offset: u64, length: u64) -> impl Iterator<Item = usize> {
    let first = offset / STRETCH;
    let last = offset.saturating_add(length.max(1) - 1) / STRETCH;
    let count = (last - first + 1).min(COUNTERS as u64);
    (first..first + count).map(|stretch| stretch as usize % COUNTERS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_writes_share_and_a_claim_waits_for_them_and_keeps_new_ones_out() {
        let locks = SectorLocks::default();
        assert!(locks.try_shared(0, STRETCH * 3));
        assert!(locks.try_shared(STRETCH, 4096));
        assert!(locks.claim(STRETCH + 4096));
        assert!(!locks.is_exclusive(STRETCH + 4096));
        assert!(!locks.try_shared(STRETCH * 2 - 4096, 8192), "the claim keeps new ones out");
        assert!(!locks.claim(STRETCH), "one claim at a time");
        locks.release_shared(0, STRETCH * 3);
        assert!(!locks.is_exclusive(STRETCH));
        locks.release_shared(STRETCH, 4096);
        assert!(locks.is_exclusive(STRETCH));
        locks.release_exclusive(STRETCH);
        assert!(locks.try_shared(0, STRETCH * COUNTERS as u64 * 5), "larger than the table");
        locks.release_shared(0, STRETCH * COUNTERS as u64 * 5);
        assert!(locks.counters.iter().all(|counter| counter.load(Ordering::Relaxed) & HELD == 0));
    }

    #[test]
    fn a_reader_notices_claims_before_and_during_the_read_and_no_others() {
        let locks = SectorLocks::default();
        let (at, length) = (STRETCH - 4096, 8192);
        let before = locks.claims(at, length);
        assert!(before.is_some() && locks.try_shared(at, length));
        locks.release_shared(at, length);
        assert!(locks.claim(STRETCH * 3));
        assert_eq!(locks.claims(at, length), before, "elsewhere");
        for claimed in [0, STRETCH] {
            let before = locks.claims(at, length);
            assert!(locks.claim(claimed));
            assert_eq!(locks.claims(at, length), None, "under way");
            locks.release_exclusive(claimed);
            assert_ne!(locks.claims(at, length), before, "over");
        }
    }

    #[test]
    fn a_refused_share_leaves_nothing_behind() {
        let locks = SectorLocks::default();
        assert!(locks.claim(STRETCH * 2));
        assert!(!locks.try_shared(0, STRETCH * 4));
        locks.release_exclusive(STRETCH * 2);
        assert!(locks.counters.iter().all(|counter| counter.load(Ordering::Relaxed) & HELD == 0));
    }
}
