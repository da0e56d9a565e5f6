//! What of the measurements is compared and shown.

use serde::{Deserialize, Serialize};

use crate::idle::{IDLE, Idle};
use crate::outcome::{Cell, Served, Times};
use crate::statistics::Interval;

/// How long a line of 10 Gb/s takes for a GiB, in nanoseconds.
const GIB_AT_10_GBIT: f64 = 1_073_741_824.0 * 8.0 / 10.0;

/// The cores that are busy while a GiB, which takes so many nanoseconds of CPU time, is sent at 10 Gb/s.
fn cores_at_10_gbit(cpu_per_gib: f64) -> f64 {
    cpu_per_gib / GIB_AT_10_GBIT
}

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
    /// What 95 of 100 requests do not exceed, in nanoseconds.
    P95,
    /// The mean time of a request, in nanoseconds.
    Mean,
    /// The mean time of a read, in nanoseconds.
    ReadMean,
    /// The median time of a read, in nanoseconds.
    ReadP50,
    /// What 95 of 100 reads do not exceed, in nanoseconds.
    ReadP95,
    /// The mean time of a write, in nanoseconds.
    WriteMean,
    /// The median time of a write, in nanoseconds.
    WriteP50,
    /// What 95 of 100 writes do not exceed, in nanoseconds.
    WriteP95,
    /// The 95th percentile of the latency by the mean.
    P95ByMean,
    /// The mean time of a read by that of a write.
    ReadByWrite,
    /// The CPU time of the storage below the server for a request, in nanoseconds.
    StorageCpuPerIo,
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
    /// The cores that are busy at the host from which a guest moves while 10 Gb/s are sent.
    SourceCores,
    /// The same at the host to which it moves.
    DestinationCores,
    /// The 99th percentile of the latency by the median: 1 is what is fair to all requests.
    Spread,
    /// The requests of a client that a guest answers in a second before it moves.
    RequestsBefore,
    /// Those while it moves.
    RequestsDuring,
    /// Those afterwards.
    RequestsAfter,
    /// The median time of those that it answers before, in nanoseconds.
    LatencyBefore,
    /// Of those while it moves.
    LatencyDuring,
    /// Of those afterwards.
    LatencyAfter,
    /// How long a guest that a client asks stands still by what the task says, in seconds.
    SwitchOver,
    /// How long it takes from a switch-over until a guest answers as much as before it moved, in seconds.
    Recovery,
    /// How long no client gets an answer at a switch-over, by how long the guest stands still.
    DipByStandstill,
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
            Self::P95 => "latency, 95th percentile",
            Self::Mean => "mean latency",
            Self::ReadMean => "mean latency of reads",
            Self::ReadP50 => "median latency of reads",
            Self::ReadP95 => "latency of reads, 95th percentile",
            Self::WriteMean => "mean latency of writes",
            Self::WriteP50 => "median latency of writes",
            Self::WriteP95 => "latency of writes, 95th percentile",
            Self::P95ByMean => "95th percentile by mean",
            Self::ReadByWrite => "mean latency of reads by writes",
            Self::StorageCpuPerIo => "CPU time of the storage for a request",
            Self::Gap => "longest gap between requests",
            Self::Memory => "memory of the server",
            Self::IdleCpu => "CPU time without work",
            Self::IdleWakeups => "wake-ups without work",
            Self::Neighbour => "work of a neighbour",
            Self::Seconds => "time",
            Self::ReadBytes => "bytes read",
            Self::CpuPerGib => "CPU time for a GiB of memory",
            Self::SourceCores => "cores of the source for 10 Gb/s",
            Self::DestinationCores => "cores of the destination for 10 Gb/s",
            Self::Spread => "99th percentile by median",
            Self::RequestsBefore => "requests per second before",
            Self::RequestsDuring => "requests per second meanwhile",
            Self::RequestsAfter => "requests per second afterwards",
            Self::LatencyBefore => "median latency before",
            Self::LatencyDuring => "median latency meanwhile",
            Self::LatencyAfter => "median latency afterwards",
            Self::SwitchOver => "time of the switch-over",
            Self::Recovery => "time until requests are as before",
            Self::DipByStandstill => "time without an answer by that of the switch-over",
        }
    }

    /// The values of a system under a load, with their rounds. Rounds in which no request was of the kind that a measure is
    /// about are left out.
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
        let served = |value: fn(&Served) -> f64| {
            let wanted = |cell: &&Cell| cell.system == system && cell.workload == workload;
            let value = |cell: &Cell| cell.served.as_ref().map_or(f64::NAN, value);
            all_cells.iter().filter(wanted).map(|cell| (cell.round, value(cell))).collect()
        };
        let times = |value: fn(&Times) -> Option<f64>| {
            let wanted = |cell: &&Cell| cell.system == system && cell.workload == workload;
            let value = |cell: &Cell| Some((cell.round, value(cell.times.as_ref()?)?));
            all_cells.iter().filter(wanted).filter_map(value).collect()
        };
        match self {
            Self::Iops => cells(|cell| cell.iops),
            Self::Throughput => cells(|cell| cell.throughput),
            Self::CpuPerIo => cells(|cell| cell.cpu_per_io),
            Self::P50 => cells(|cell| cell.p50),
            Self::P99 => cells(|cell| cell.p99),
            Self::P95 => times(|it| Some(it.all.p95)),
            Self::Mean => times(|it| Some(it.all.mean)),
            Self::ReadMean => times(|it| Some(it.reads?.mean)),
            Self::ReadP50 => times(|it| Some(it.reads?.p50)),
            Self::ReadP95 => times(|it| Some(it.reads?.p95)),
            Self::WriteMean => times(|it| Some(it.writes?.mean)),
            Self::WriteP50 => times(|it| Some(it.writes?.p50)),
            Self::WriteP95 => times(|it| Some(it.writes?.p95)),
            Self::P95ByMean => times(|it| Some(it.all.p95 / it.all.mean)),
            Self::ReadByWrite => times(|it| Some(it.reads?.mean / it.writes?.mean)),
            Self::StorageCpuPerIo => cells(|cell| cell.storage_cpu_per_io.unwrap_or(f64::NAN)),
            Self::Gap => cells(|cell| cell.gap),
            Self::Memory => cells(|cell| cell.memory),
            Self::Neighbour => cells(|cell| cell.neighbour.unwrap_or(f64::NAN)),
            Self::Seconds => cells(|cell| cell.seconds),
            Self::ReadBytes => cells(|cell| cell.read_bytes),
            Self::CpuPerGib => cells(|cell| cell.cpu_per_gib.unwrap_or(f64::NAN)),
            Self::SourceCores => {
                cells(|cell| cell.source_cpu_per_gib.map_or(f64::NAN, cores_at_10_gbit))
            }
            Self::DestinationCores => {
                cells(|cell| cell.destination_cpu_per_gib.map_or(f64::NAN, cores_at_10_gbit))
            }
            Self::Spread => cells(|cell| cell.p99 / cell.p50),
            Self::RequestsBefore => served(|it| it.before),
            Self::RequestsDuring => served(|it| it.during),
            Self::RequestsAfter => served(|it| it.after),
            Self::LatencyBefore => served(|it| it.latency_before),
            Self::LatencyDuring => served(|it| it.latency_during),
            Self::LatencyAfter => served(|it| it.latency_after),
            Self::SwitchOver => served(|it| it.stood_still),
            Self::Recovery => served(|it| it.recovery),
            Self::DipByStandstill => served(|it| it.silence / it.stood_still),
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
            Self::CpuPerIo
            | Self::StorageCpuPerIo
            | Self::P50
            | Self::P95
            | Self::P99
            | Self::Mean
            | Self::ReadMean
            | Self::ReadP50
            | Self::ReadP95
            | Self::WriteMean
            | Self::WriteP50
            | Self::WriteP95 => (1e3, 2, "µs"),
            Self::Gap | Self::LatencyBefore | Self::LatencyDuring | Self::LatencyAfter => {
                (1e6, 2, "ms")
            }
            Self::Memory | Self::ReadBytes => (1_048_576.0, 1, "MiB"),
            Self::Neighbour => (1e6, 1, "M/s"),
            Self::Seconds | Self::SwitchOver | Self::Recovery => (1.0, 3, "s"),
            Self::CpuPerGib => (1e9, 2, "s/GiB"),
            Self::SourceCores | Self::DestinationCores => (1.0, 3, "cores"),
            Self::Spread | Self::P95ByMean | Self::ReadByWrite | Self::DipByStandstill => {
                (1.0, 2, "times")
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::tests::cell;
    use crate::outcome::RequestTimes;

    #[test]
    fn reads_and_writes_are_measured_apart_where_there_were_any() {
        let of = |mean: f64| RequestTimes { mean, p50: mean * 0.5, p95: mean * 2.0 };
        let with = |round, reads, writes| Cell {
            times: Some(Times { all: of(3e6), reads, writes }),
            storage_cpu_per_io: Some(7e3),
            ..cell(round, "ours", "w", 100.0)
        };
        let cells = [with(0, Some(of(1e6)), Some(of(4e6))), with(1, None, Some(of(5e6)))];
        let values = |metric: Metric| metric.of(&cells, &[], "ours", "w");
        assert_eq!(values(Metric::ReadMean), [(0, 1e6)], "no read in the second round");
        assert_eq!(values(Metric::ReadP50), [(0, 0.5e6)]);
        assert_eq!(values(Metric::ReadP95), [(0, 2e6)]);
        assert_eq!(values(Metric::WriteMean), [(0, 4e6), (1, 5e6)]);
        assert_eq!(values(Metric::WriteP50), [(0, 2e6), (1, 2.5e6)]);
        assert_eq!(values(Metric::WriteP95), [(0, 8e6), (1, 10e6)]);
        assert_eq!(values(Metric::ReadByWrite), [(0, 0.25)]);
        assert_eq!(values(Metric::P95ByMean), [(0, 2.0), (1, 2.0)]);
        assert_eq!((values(Metric::Mean)[0], values(Metric::P95)[0]), ((0, 3e6), (0, 6e6)));
        assert_eq!(values(Metric::StorageCpuPerIo), [(0, 7e3), (1, 7e3)]);
        assert_eq!(Metric::WriteMean.of(&cells, &[], "theirs", "w"), []);
        assert_eq!(Metric::ReadMean.show(1.5e6), "1500.00 µs");
    }

    #[test]
    fn processor_time_of_a_gib_is_cores_at_a_rate() {
        // At 10 Gb/s a GiB takes 0.859 s.
        let cell = |source, destination| Cell {
            source_cpu_per_gib: source,
            destination_cpu_per_gib: destination,
            ..cell(0, "ours", "w", 100.0)
        };
        let cells = [cell(Some(858_993_459.2), Some(214_748_364.8))];
        let of = |metric: Metric| metric.of(&cells, &[], "ours", "w");
        assert_eq!(of(Metric::SourceCores), [(0, 1.0)]);
        assert_eq!(of(Metric::DestinationCores), [(0, 0.25)]);
        let cells = [cell(None, None)];
        assert!(Metric::SourceCores.of(&cells, &[], "ours", "w")[0].1.is_nan());
        assert_eq!(Metric::SourceCores.show(0.25), "0.250 cores");
    }

    #[test]
    fn a_dip_is_compared_with_the_standstill() {
        let served = Served { silence: 0.45, stood_still: 0.3, recovery: 2.5, ..Served::default() };
        let cells = [Cell { served: Some(served), ..cell(0, "ours", "w", 100.0) }];
        let of = |metric: Metric| metric.of(&cells, &[], "ours", "w")[0].1;
        assert!((of(Metric::DipByStandstill) - 1.5).abs() < 1e-9);
        assert_eq!(Metric::Recovery.show(of(Metric::Recovery)), "2.500 s");
        let cells = [cell(0, "ours", "w", 100.0)];
        assert!(Metric::Recovery.of(&cells, &[], "ours", "w")[0].1.is_nan(), "nobody has asked");
    }

    #[test]
    fn what_clients_notice_of_a_move_has_three_latencies_and_the_switch_over() {
        let served = Served {
            latency_before: 1e6,
            latency_during: 4e6,
            latency_after: 2e6,
            stood_still: 0.25,
            ..Served::default()
        };
        let asked = Cell { served: Some(served), ..cell(0, "ours", "w", 100.0) };
        // One that stood still as long without a client.
        let cells = [asked, cell(1, "ours", "w", 16.0)];
        let of = |metric: Metric| metric.of(&cells, &[], "ours", "w");
        for (metric, value, shown) in [
            (Metric::LatencyBefore, 1e6, "1.00 ms"),
            (Metric::LatencyDuring, 4e6, "4.00 ms"),
            (Metric::LatencyAfter, 2e6, "2.00 ms"),
            (Metric::SwitchOver, 0.25, "0.250 s"),
        ] {
            let found = of(metric);
            assert_eq!(found[0], (0, value), "{metric:?}");
            assert!(found[1].1.is_nan(), "{metric:?}: nobody has asked");
            assert_eq!(metric.show(value), shown);
        }
    }

    #[test]
    fn files_name_measures_so() {
        for (name, metric) in [
            ("latency_before", Metric::LatencyBefore),
            ("latency_during", Metric::LatencyDuring),
            ("latency_after", Metric::LatencyAfter),
            ("switch_over", Metric::SwitchOver),
            ("recovery", Metric::Recovery),
            ("dip_by_standstill", Metric::DipByStandstill),
            ("source_cores", Metric::SourceCores),
            ("destination_cores", Metric::DestinationCores),
            ("p95_by_mean", Metric::P95ByMean),
            ("read_mean", Metric::ReadMean),
            ("write_p95", Metric::WriteP95),
            ("read_by_write", Metric::ReadByWrite),
            ("storage_cpu_per_io", Metric::StorageCpuPerIo),
        ] {
            assert_eq!(serde_json::to_value(metric).unwrap(), name);
        }
    }
}
