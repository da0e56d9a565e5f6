//! How the copies of a VM's disks are sent to another host.
//!
//! ```text
//!  begin ── bytes, in milliseconds ──► the memory follows ── later bytes: what the guest has changed ──► all is sent
//! ```
//! What the connections of the disks have carried is counted: also what goes before the disks, and what the filters of the disks add to
//! it. Holes cost next to nothing.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vmseal_api::host::{DisksSent, MigrationProgress};

use super::sealing_meter::SealingMeter;
use crate::migration::transport::Handle;

/// How long is measured before there is another rate: filters are asked every 500 ms how far their copies are.
const MEASURED_OVER: Duration = Duration::from_millis(500);

/// See the module.
pub struct DisksMeter {
    session: Handle,
    /// The number of the first connection that carries a disk. All that follow do.
    first: usize,
    began: Instant,
    of_late: Mutex<OfLate>,
    /// What had been sent when the memory followed, in bytes, and in which time.
    before: Option<(u64, Duration)>,
}

struct OfLate {
    sent: Rate,
    sealing: SealingMeter,
}

impl DisksMeter {
    /// Begins to measure this session, whose connections from the `first` one on carry disks.
    pub fn begin(session: Handle, first: usize) -> Self {
        let (began, sealing) = (Instant::now(), SealingMeter::new(session.clone()));
        let of_late = Mutex::new(OfLate { sent: Rate::begin(0, began), sealing });
        Self { session, first, began, of_late, before: None }
    }

    /// How far the disks are, with how fast they are sent, and what that needs of the processor.
    pub fn measured(&self, progress: MigrationProgress) -> MigrationProgress {
        let carried = self.carried();
        let mut of_late = self.of_late();
        let rate = of_late.sent.measure(carried, Instant::now());
        let sealing = Some(of_late.sealing.read());
        MigrationProgress { rate, sealing, disks: Some(self.sent_of(carried)), ..progress }
    }

    /// The memory follows.
    pub fn memory_follows(&mut self) {
        self.before = Some((self.carried(), self.began.elapsed()));
    }

    /// What has been sent.
    pub fn sent(&self) -> DisksSent {
        self.sent_of(self.carried())
    }

    fn sent_of(&self, carried: u64) -> DisksSent {
        sent(carried, self.began.elapsed(), self.before)
    }

    fn carried(&self) -> u64 {
        self.session.counters().iter().skip(self.first).map(|stream| stream.sent_bytes).sum()
    }

    fn of_late(&self) -> MutexGuard<'_, OfLate> {
        self.of_late.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What has been sent when so many bytes were carried in all, in this time; `before`, that of it which the memory followed.
fn sent(carried: u64, took: Duration, before: Option<(u64, Duration)>) -> DisksSent {
    let (bytes, took) = before.unwrap_or((carried, took));
    let milliseconds = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    DisksSent { bytes, milliseconds, later_bytes: carried.saturating_sub(bytes) }
}

/// How fast a counter has grown of late.
pub struct Rate {
    since: Instant,
    before: u64,
    bytes_per_second: u64,
}

impl Rate {
    /// Begins when so many bytes are counted.
    pub fn begin(counted: u64, now: Instant) -> Self {
        Self { since: now, before: counted, bytes_per_second: 0 }
    }

    /// So many bytes are counted by now. Returns the rate of late, in bytes a second; 0 until it has been measured for a while.
    pub fn measure(&mut self, counted: u64, now: Instant) -> u64 {
        let elapsed = now.saturating_duration_since(self.since);
        if elapsed >= MEASURED_OVER {
            let more = counted.saturating_sub(self.before);
            self.bytes_per_second = (more as f64 / elapsed.as_secs_f64()) as u64;
            (self.since, self.before) = (now, counted);
        }
        self.bytes_per_second
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_after_the_memory_has_followed_is_counted_apart() {
        let took = Duration::from_millis(1500);
        let until_now = DisksSent { bytes: 70, milliseconds: 1500, later_bytes: 0 };
        assert_eq!(sent(70, took, None), until_now);
        let later = Duration::from_secs(60);
        assert_eq!(sent(70, later, Some((70, took))), until_now);
        let more = DisksSent { later_bytes: 5, ..until_now };
        assert_eq!(sent(75, later, Some((70, took))), more);
    }

    #[test]
    fn a_rate_is_that_of_the_time_since_the_last_one() {
        let begin = Instant::now();
        let at = |milliseconds| begin + Duration::from_millis(milliseconds);
        let mut rate = Rate::begin(1000, begin);
        assert_eq!(rate.measure(2000, at(100)), 0, "it is too early to say");
        assert_eq!(rate.measure(3000, at(500)), 4000);
        assert_eq!(rate.measure(9000, at(600)), 4000, "the last one stands");
        assert_eq!(rate.measure(5000, at(1500)), 2000);
        assert_eq!(rate.measure(10, at(2500)), 0, "another filter has begun to count");
    }
}
