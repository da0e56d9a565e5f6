//! The state of a disk that its queues share: whether its requests fail, and how many requests storage has.
//!
//! All of it is one word, so that a request is counted only while the disk serves, and the disk serves again only while none is.
//! A queue that knew the one and looked for the other later could fail a request of which storage is not waited for.
//!
//! ```text
//!  bit 0      the requests of the disk fail
//!  bit 1      the guest's next flush fails
//!  from 2 on  how many requests storage has
//! ```

use std::time::{Duration, Instant};

use crate::stack::tally::Counter;
use crate::stack::waker::{Waiters, Waker};
use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};

const REPORTED: u64 = 1;
const OWED: u64 = 2;
const ONE: u64 = 4;

/// See the module.
#[derive(Debug)]
pub(super) struct StallState {
    timeout: Duration,
    word: AtomicU64,
    epoch: Instant,
    /// The nanoseconds from the epoch to the beginning of the request that was too old at the last stall.
    since: AtomicU64,
    stalls: AtomicU64,
    waiters: Waiters,
    /// How many requests have failed.
    pub(super) failed: Counter,
}

impl StallState {
    pub(super) fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            word: AtomicU64::new(0),
            epoch: Instant::now(),
            since: AtomicU64::new(0),
            stalls: AtomicU64::new(0),
            waiters: Waiters::default(),
            failed: Counter::default(),
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// How often requests of the disk began to fail.
    pub(super) fn stalls(&self) -> u64 {
        self.stalls.load(SeqCst)
    }

    /// Whether requests of the disk fail.
    pub(super) fn is_reported(&self) -> bool {
        self.word.load(SeqCst) & REPORTED != 0
    }

    /// For how long storage has not answered, while requests of the disk fail.
    pub(super) fn fails_for(&self) -> Option<Duration> {
        let age = self.epoch.elapsed();
        self.is_reported()
            .then(|| age.saturating_sub(Duration::from_nanos(self.since.load(SeqCst))))
    }

    /// Counts a request that storage gets; false if it must fail instead.
    pub(super) fn admit(&self) -> bool {
        let counted = |word: u64| (word & REPORTED == 0).then_some(word + ONE);
        self.word.fetch_update(SeqCst, SeqCst, counted).is_ok()
    }

    /// Whether a flush of the guest must fail, while the disk serves, for what has failed before: once.
    pub(super) fn owes_failure(&self) -> bool {
        let owes = |word: u64| (word & (REPORTED | OWED) == OWED).then_some(word & !OWED);
        self.word.fetch_update(SeqCst, SeqCst, owes).is_ok()
    }

    /// Storage has answered a request that was counted.
    pub(super) fn answered(&self) {
        let without = |word: u64| match word - ONE {
            left if left < ONE => Some(left & !REPORTED),
            left => Some(left),
        };
        let before = self.word.fetch_update(SeqCst, SeqCst, without);
        if before.is_ok_and(|word| word & REPORTED != 0 && word - ONE < ONE) {
            tracing::info!("storage has answered all that it was given; the disk is served again");
        }
    }

    /// Has requests of the disk fail, as one is of this age; false where storage has none.
    pub(super) fn report(&self, age: Duration) -> bool {
        let since = self.epoch.elapsed().saturating_sub(age).as_nanos();
        let has_some =
            |word: u64| (word & REPORTED == 0 && word >= ONE).then_some(word | REPORTED | OWED);
        // Before anybody can see that it is so. Of two queues that find it at once either is right.
        self.since.store(u64::try_from(since).unwrap_or(u64::MAX), SeqCst);
        match self.word.fetch_update(SeqCst, SeqCst, has_some) {
            Ok(word) => {
                self.waiters.wake();
                // After that: a chain that sees another number asks to be woken again, and this must not take that back.
                self.stalls.fetch_add(1, SeqCst);
                tracing::error!(
                    seconds = age.as_secs(),
                    requests = word / ONE,
                    "storage does not answer; requests of the disk fail until it has answered all that it was given"
                );
                true
            }
            Err(word) => word & REPORTED != 0,
        }
    }

    /// Wakes this chain at the next stall. It must look once more whether there is one.
    pub(super) fn wake_at_stall(&self, waker: &Waker) {
        self.waiters.add(waker);
    }
}
