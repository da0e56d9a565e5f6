//! A migration that has been measured, as the goals take it.

use std::time::Duration;

use super::meter::Spent;
use crate::outcome::{Cell, Served};
use crate::subject::Point;

/// A GiB, in bytes.
const GIB: f64 = 1_073_741_824.0;

/// How it went.
#[derive(Clone, Debug)]
pub(super) struct Moved {
    /// From the beginning until the guest ran at the other host and what was left was done, in seconds.
    pub seconds: f64,
    /// What was sent of the memory, and of disks that were copied, in bytes.
    pub sent: u64,
    /// How long the guest stood still; or the longest that a client waited for an answer.
    pub gap: Duration,
    /// What was seen from outside.
    pub spent: Spent,
    /// What it answered, where it was asked.
    pub served: Option<Served>,
}

impl Moved {
    /// As the goals take it.
    pub fn cell(&self, point: &Point) -> Cell {
        Cell {
            requests: 1,
            seconds: self.seconds,
            throughput: self.spent.rate(),
            gap: self.gap.as_nanos() as f64,
            // With a client a part of it is for what it asks.
            cpu_per_gib: (self.served.is_none())
                .then(|| self.spent.cpu.as_nanos() as f64 * GIB / self.sent as f64),
            served: self.served.clone(),
            ..Cell::unmeasured(point.round, point.system, point.workload)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_for_a_gib_and_a_gap_in_nanoseconds() {
        let spent = Spent { cpu: Duration::from_secs(3), ..Spent::default() };
        let gap = Duration::from_millis(120);
        let moved = Moved { seconds: 4.0, sent: 1 << 29, gap, spent, served: None };
        let cell = moved.cell(&Point { round: 1, system: "encrypted", workload: "w" });
        assert_eq!((cell.seconds, cell.gap, cell.cpu_per_gib), (4.0, 120e6, Some(6e9)));
        assert!(cell.throughput.is_nan(), "nothing has gone over a line");
        let asked = Moved { served: Some(Served::default()), ..moved };
        let cell = asked.cell(&Point { round: 1, system: "encrypted", workload: "w" });
        assert_eq!((cell.cpu_per_gib, cell.served), (None, Some(Served::default())));
    }
}
