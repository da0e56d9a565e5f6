//! Since when the requests of a queue are in flight: written by its thread, read by the control socket.
//!
//! The thread writes one word when a request begins and one when it ends, and reads no clock for that: it has read one for all requests
//! of a pass. Who asks for the oldest one reads the whole table.

use std::time::{Duration, Instant};

use crate::sync::atomic::{AtomicU64, Ordering};

/// The requests of a queue that are in flight. Only one thread may write.
#[derive(Debug)]
pub struct Flight {
    epoch: Instant,
    /// By slot: the nanoseconds from the epoch to its beginning, and one more; 0 while nothing is in flight there.
    began: Box<[AtomicU64]>,
}

impl Flight {
    /// No request is in flight, in that many slots.
    #[must_use]
    pub fn new(slots: usize) -> Self {
        let began = (0..slots).map(|_| AtomicU64::new(0)).collect();
        Self { epoch: Instant::now(), began }
    }

    /// The request in this slot is in flight since then.
    pub fn began(&self, slot: usize, at: Instant) {
        let since = at.saturating_duration_since(self.epoch).as_nanos();
        let since = u64::try_from(since).unwrap_or(u64::MAX).saturating_add(1);
        self.began[slot].store(since, Ordering::Relaxed);
    }

    /// The request in this slot is not in flight any more, or is kept back on purpose.
    pub fn ended(&self, slot: usize) {
        self.began[slot].store(0, Ordering::Relaxed);
    }

    /// Since when the request in this slot is in flight; none if there is none.
    #[must_use]
    pub fn since(&self, slot: usize) -> Option<Instant> {
        let since = self.began[slot].load(Ordering::Relaxed).checked_sub(1)?;
        self.epoch.checked_add(Duration::from_nanos(since))
    }

    /// For how long the oldest request is in flight; none if there is none.
    #[must_use]
    pub fn oldest(&self, now: Instant) -> Option<Duration> {
        let began = self.began.iter().map(|slot| slot.load(Ordering::Relaxed));
        let since = began.filter(|since| *since > 0).min()? - 1;
        Some(now.saturating_duration_since(self.epoch).saturating_sub(Duration::from_nanos(since)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_request_that_has_not_ended_counts() {
        let flight = Flight::new(3);
        let at = |seconds| flight.epoch + Duration::from_secs(seconds);
        assert_eq!(flight.oldest(at(9)), None);
        // As old as the table itself.
        flight.began(2, flight.epoch);
        flight.began(0, at(2));
        flight.began(1, at(5));
        assert_eq!(flight.oldest(at(9)), Some(Duration::from_secs(9)));
        assert_eq!((flight.since(2), flight.since(1)), (Some(flight.epoch), Some(at(5))));
        flight.ended(2);
        assert_eq!(flight.since(2), None);
        assert_eq!(flight.oldest(at(9)), Some(Duration::from_secs(7)), "a later one hides it");
        // The slot is used again.
        flight.ended(0);
        flight.began(0, at(8));
        assert_eq!(flight.oldest(at(9)), Some(Duration::from_secs(4)));
        flight.ended(0);
        flight.ended(1);
        assert_eq!(flight.oldest(at(9)), None);
    }
}
