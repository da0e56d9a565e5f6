//! A migration that has been measured, as the goals take it.

use std::time::Duration;

use super::meter::Spent;
use crate::outcome::{Cell, Served};
use crate::subject::Point;

/// A GiB, in bytes.
const GIB: f64 = 1_073_741_824.0;

/// CPU time for what was sent, in nanoseconds for a GiB.
fn for_a_gib(cpu: Duration, sent: u64) -> f64 {
    cpu.as_nanos() as f64 * GIB / sent as f64
}

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
        // With a client a part of it is for what it asks.
        let cpu = Some(self.spent.cpu).filter(|_| self.served.is_none());
        let of = |cpu: Duration| for_a_gib(cpu, self.sent);
        Cell {
            requests: 1,
            seconds: self.seconds,
            throughput: self.spent.rate(),
            gap: self.gap.as_nanos() as f64,
            cpu_per_gib: cpu.map(|cpu| of(cpu.source + cpu.destination)),
            source_cpu_per_gib: cpu.map(|cpu| of(cpu.source)),
            destination_cpu_per_gib: cpu.map(|cpu| of(cpu.destination)),
            served: self.served.clone(),
            ..Cell::unmeasured(point.round, point.system, point.workload)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::meter::Ends;
    use super::*;

    #[test]
    fn processor_time_is_for_a_gib_and_a_gap_in_nanoseconds() {
        let cpu = Ends { source: Duration::from_secs(2), destination: Duration::from_secs(1) };
        let spent = Spent { cpu, ..Spent::default() };
        let gap = Duration::from_millis(120);
        let moved = Moved { seconds: 4.0, sent: 1 << 29, gap, spent, served: None };
        let cell = moved.cell(&Point { round: 1, system: "encrypted", workload: "w" });
        assert_eq!((cell.seconds, cell.gap, cell.cpu_per_gib), (4.0, 120e6, Some(6e9)));
        assert_eq!((cell.source_cpu_per_gib, cell.destination_cpu_per_gib), (Some(4e9), Some(2e9)));
        assert!(cell.throughput.is_nan(), "nothing has gone over a line");
        let asked = Moved { served: Some(Served::default()), ..moved };
        let cell = asked.cell(&Point { round: 1, system: "encrypted", workload: "w" });
        assert_eq!((cell.cpu_per_gib, cell.served), (None, Some(Served::default())));
        assert_eq!((cell.source_cpu_per_gib, cell.destination_cpu_per_gib), (None, None));
    }
}
