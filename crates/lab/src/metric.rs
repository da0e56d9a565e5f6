//! What of the measurements is compared and shown.

use serde::{Deserialize, Serialize};

use crate::idle::{IDLE, Idle};
use crate::outcome::Cell;

/// The metric that is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Requests per second.
    Iops,
    /// Bytes per second.
    Throughput,
    /// The server's CPU time for a request, in nanoseconds.
    CpuPerIo,
    /// The median time of a request, in nanoseconds.
    P50,
    /// What 99 of 100 requests do not exceed, in nanoseconds.
    P99,
    /// The longest time in which no request ended, in nanoseconds; of a system with which something is done, only then; of a
    /// migration, how long the guest stood still, or the longest that a client waited for its answer.
    Gap,
    /// The server's own memory, in bytes.
    Memory,
    /// The server's CPU time for a second without work, in nanoseconds.
    IdleCpu,
    /// How often the server woke up in a second without work.
    IdleWakeups,
    /// The work of CPU-bound neighbours in a second.
    Neighbour,
    /// How long an operation takes, in seconds.
    Seconds,
    /// How much an operation reads of the disks, in bytes.
    ReadBytes,
    /// The CPU time of a migration for a GiB of memory, in nanoseconds.
    CpuPerGib,
    /// The 99th percentile of the latency by the median: 1 is what is fair to all requests.
    Spread,
    /// The requests of a client that a guest answers in a second before it moves.
    RequestsBefore,
    /// Those while it moves.
    RequestsDuring,
    /// Those afterwards.
    RequestsAfter,
}

impl Metric {
    /// Its name, for people.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Iops => "requests per second",
            Self::Throughput => "throughput",
            Self::CpuPerIo => "CPU time of a request",
            Self::P50 => "median latency",
            Self::P99 => "latency, 99th percentile",
            Self::Gap => "longest gap between requests",
            Self::Memory => "memory of the server",
            Self::IdleCpu => "CPU time without work",
            Self::IdleWakeups => "wake-ups without work",
            Self::Neighbour => "work of a neighbour",
            Self::Seconds => "time",
            Self::ReadBytes => "bytes read",
            Self::CpuPerGib => "CPU time for a GiB of memory",
            Self::Spread => "99th percentile by median",
            Self::RequestsBefore => "requests per second before",
            Self::RequestsDuring => "requests per second meanwhile",
            Self::RequestsAfter => "requests per second afterwards",
        }
    }

    /// The values of a system under a load, with their rounds.
    #[must_use]
    pub fn of(
        self,
        cells: &[Cell],
        idle: &[Idle],
        system: &str,
        workload: &str,
    ) -> Vec<(u32, f64)> {
        let (all_cells, all_idle) = (cells, idle);
        let cells = |value: fn(&Cell) -> f64| {
            let wanted = |cell: &&Cell| cell.system == system && cell.workload == workload;
            all_cells.iter().filter(wanted).map(|cell| (cell.round, value(cell))).collect()
        };
        let idle = |value: fn(&Idle) -> f64| {
            let wanted = |idle: &&Idle| idle.system == system && workload == IDLE;
            all_idle.iter().filter(wanted).map(|idle| (idle.round, value(idle))).collect()
        };
        match self {
            Self::Iops => cells(|cell| cell.iops),
            Self::Throughput => cells(|cell| cell.throughput),
            Self::CpuPerIo => cells(|cell| cell.cpu_per_io),
            Self::P50 => cells(|cell| cell.p50),
            Self::P99 => cells(|cell| cell.p99),
            Self::Gap => cells(|cell| cell.gap),
            Self::Memory => cells(|cell| cell.memory),
            Self::Neighbour => cells(|cell| cell.neighbour.unwrap_or(f64::NAN)),
            Self::Seconds => cells(|cell| cell.seconds),
            Self::ReadBytes => cells(|cell| cell.read_bytes),
            Self::CpuPerGib => cells(|cell| cell.cpu_per_gib.unwrap_or(f64::NAN)),
            Self::Spread => cells(|cell| cell.p99 / cell.p50),
            Self::RequestsBefore => {
                cells(|cell| cell.served.as_ref().map_or(f64::NAN, |it| it.before))
            }
            Self::RequestsDuring => {
                cells(|cell| cell.served.as_ref().map_or(f64::NAN, |it| it.during))
            }
            Self::RequestsAfter => {
                cells(|cell| cell.served.as_ref().map_or(f64::NAN, |it| it.after))
            }
            Self::IdleCpu => idle(|idle| idle.cpu / idle.seconds),
            Self::IdleWakeups => idle(|idle| idle.waits / idle.seconds),
        }
    }

    pub(crate) fn is_a_rate(self) -> bool {
        matches!(self, Self::Iops | Self::Throughput)
    }

    /// How it is shown: the size of its unit, the number of decimals, and the unit's name.
    pub(crate) fn unit(self) -> (f64, usize, &'static str) {
        match self {
            Self::Iops => (1e3, 1, "kIOPS"),
            Self::Throughput => (1e6, 0, "MB/s"),
            Self::CpuPerIo | Self::P50 | Self::P99 => (1e3, 2, "µs"),
            Self::Gap => (1e6, 2, "ms"),
            Self::Memory | Self::ReadBytes => (1_048_576.0, 1, "MiB"),
            Self::Neighbour => (1e6, 1, "M/s"),
            Self::Seconds => (1.0, 3, "s"),
            Self::CpuPerGib => (1e9, 2, "s/GiB"),
            Self::Spread => (1.0, 2, "times"),
            Self::RequestsBefore | Self::RequestsDuring | Self::RequestsAfter => (1.0, 0, "per s"),
            Self::IdleCpu => (1.0, 0, "ns/s"),
            Self::IdleWakeups => (1.0, 1, "per s"),
        }
    }

    /// A value with its unit, for people.
    #[must_use]
    pub fn show(self, value: f64) -> String {
        let (one, decimals, unit) = self.unit();
        format!("{:.decimals$} {unit}", value / one)
    }

    /// An interval with its unit, for people.
    #[must_use]
    pub fn show_interval(self, interval: &Interval) -> String {
        let (one, decimals, unit) = self.unit();
        format!("{} {unit}", interval.show(|value| format!("{:.decimals$}", value / one)))
    }
}
