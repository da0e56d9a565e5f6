//! The results of experiments as JSON, with all that is needed to judge them later; as tables in
//! [`crate::tables`].

use std::io::Write as _;
use std::path::Path;
use std::{fs, io};

use serde::Serialize;
use vmseal_initiator::Wait;

use crate::experiment::{Cell, Cores, Outcome, Plan, SATURATED};
use crate::goals::{Assessment, Verdict};
use crate::idle::Idle;
use crate::load::Workload;
use crate::machine::Machine;
use crate::outcome::{RequestTimes, Times};
use crate::sections::Section;
use crate::statistics::Interval;
use crate::systems::Transport;

/// The version of the JSON.
pub const VERSION: u32 = 3;

/// Everything about one run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`VERSION`].
    pub version: u32,
    /// When it began, in UTC.
    pub started: jiff::Timestamp,
    /// The commit that was measured, with `-dirty` if there were changes.
    pub commit: String,
    /// The machine.
    pub machine: Machine,
    /// The goals with their verdicts.
    pub goals: Vec<Assessment>,
    /// The measured sections.
    pub sections: Vec<Measured>,
    /// The sections that could not be measured, and why.
    pub obstacles: Vec<Unavailable>,
}

/// A section that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// Its name.
    pub section: &'static str,
    /// Its title.
    pub title: &'static str,
    /// Its settings, of disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settings: Option<Settings>,
    /// Each system under each load, over all rounds.
    pub summaries: Vec<Summary>,
    /// Each operation of each system, over all rounds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub operations: Vec<OperationSummary>,
    /// Each system without work, over all rounds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub idle_summaries: Vec<IdleSummary>,
    /// The rounds.
    pub cells: Vec<Cell>,
    /// The rounds without work.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub idle: Vec<Idle>,
}

impl Measured {
    /// A section of operations.
    pub(crate) fn of_operations(
        section: &'static str,
        title: &'static str,
        outcome: &Outcome,
    ) -> Self {
        Self {
            section,
            title,
            settings: None,
            summaries: Vec::new(),
            operations: summarize_operations(outcome),
            idle_summaries: Vec::new(),
            cells: outcome.cells.clone(),
            idle: Vec::new(),
        }
    }
}

/// A section that could not be measured here.
#[derive(Clone, Debug, Serialize)]
pub struct Unavailable {
    /// Its name.
    pub section: &'static str,
    /// The reason.
    pub why: String,
}

impl Measured {
    /// The results of a section's plan.
    #[must_use]
    pub fn of(section: &Section, plan: &Plan, outcome: &Outcome) -> Self {
        Self {
            section: section.id,
            title: section.title,
            settings: Some(Settings::of(plan, section.transport)),
            summaries: summarize(outcome),
            operations: Vec::new(),
            idle_summaries: summarize_idle(outcome),
            cells: outcome.cells.clone(),
            idle: outcome.idle.clone(),
        }
    }
}

/// The settings of a measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Settings {
    /// How disks were served.
    pub transport: Transport,
    /// The loads.
    pub workloads: Vec<Workload>,
    /// The number of rounds.
    pub rounds: u32,
    /// How often the disks were made, the first time included.
    pub places: u32,
    /// How long a cell was measured, in seconds.
    pub seconds: f64,
    /// How long it ran before that, in seconds.
    pub warm_up_seconds: f64,
    /// The size of each system's disks together, in bytes.
    pub size: u64,
    /// The file system of the disks, by its type.
    pub file_system: String,
    /// How the client waited.
    pub wait: Wait,
    /// Whether content was compared while measuring.
    pub verify: bool,
    /// The cores of server and client.
    pub cores: Option<Cores>,
}

impl Settings {
    /// The settings of a plan.
    #[must_use]
    pub fn of(plan: &Plan, transport: Transport) -> Self {
        Self {
            transport,
            workloads: plan.workloads.clone(),
            rounds: plan.rounds,
            places: plan.places,
            seconds: plan.cell.as_secs_f64(),
            warm_up_seconds: plan.warm_up.as_secs_f64(),
            size: plan.size,
            file_system: crate::machine::file_system(plan.storage()),
            wait: plan.wait,
            verify: plan.verify,
            cores: plan.cores,
        }
    }
}

/// What limited the speed of a system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bottleneck {
    /// The server used all of its core.
    Server,
    /// The client used all of its core: the server could do more.
    Client,
    /// Neither did: wake-ups, other processes, or the storage.
    Waiting,
}

/// Latencies in nanoseconds, of all rounds' requests together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Latency {
    /// The median.
    pub p50: u64,
    /// 99 of 100 are below.
    pub p99: u64,
    /// 999 of 1000 are below.
    pub p999: u64,
    /// The longest.
    pub max: u64,
}

/// One system under one load.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// The system's name.
    pub system: String,
    /// The load's name.
    pub workload: String,
    /// Requests per second.
    pub iops: Interval,
    /// Bytes per second.
    pub throughput: Interval,
    /// The server's CPU time per request, in nanoseconds.
    pub cpu_per_io: Interval,
    /// Shares of the time, as in [`Cell`].
    pub server_busy: Interval,
    /// As in [`Cell`].
    pub client_busy: Interval,
    /// As in [`Cell`].
    pub others_busy: Interval,
    /// What limited its speed.
    pub bottleneck: Bottleneck,
    /// Latencies.
    pub latency: Latency,
    /// How long reads took, where there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reads: Option<TimesSummary>,
    /// How long writes took, where there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub writes: Option<TimesSummary>,
    /// The CPU time of the storage for a request, in nanoseconds, where its processes are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_cpu_per_io: Option<Interval>,
}

/// How long requests took, in nanoseconds, over all rounds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TimesSummary {
    /// The mean.
    pub mean: Interval,
    /// The median.
    pub p50: Interval,
    /// The 95th percentile.
    pub p95: Interval,
}

impl TimesSummary {
    /// Of the rounds that had such requests.
    fn of<'a>(
        cells: impl Iterator<Item = &'a Cell> + Clone,
        which: fn(&Times) -> Option<RequestTimes>,
    ) -> Option<Self> {
        let times = cells.filter_map(|cell| which(cell.times.as_ref()?));
        let of = |value: fn(&RequestTimes) -> f64| Interval::of(times.clone().map(|it| value(&it)));
        Some(Self { mean: of(|it| it.mean)?, p50: of(|it| it.p50)?, p95: of(|it| it.p95)? })
    }
}

impl Summary {
    /// Whether there is more to tell of it than of a load of one direction whose storage is not known.
    pub(crate) fn has_more(&self) -> bool {
        self.reads.is_some() && self.writes.is_some() || self.storage_cpu_per_io.is_some()
    }

    /// Reads, writes (mean, p50 and p95 each, in microseconds) and the storage's CPU time; empty where there are none.
    pub(crate) fn apart(&self) -> [String; 7] {
        let show = |value: Option<Interval>, decimals: usize| {
            value.map_or_else(String::new, |it| format!("{:.decimals$}", it.median / 1e3))
        };
        let of = |times: Option<TimesSummary>| {
            [times.map(|it| it.mean), times.map(|it| it.p50), times.map(|it| it.p95)]
                .map(|value| show(value, 0))
        };
        let ([a, b, c], [d, e, f]) = (of(self.reads), of(self.writes));
        [a, b, c, d, e, f, show(self.storage_cpu_per_io, 2)]
    }
}

/// One operation of one system.
#[derive(Clone, Debug, Serialize)]
pub struct OperationSummary {
    /// The system's name.
    pub system: String,
    /// The operation's name.
    pub workload: String,
    /// How long it took, in seconds.
    pub seconds: Interval,
    /// The bytes of its disks in a second, where it goes over them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throughput: Option<Interval>,
    /// How long a guest stood still, in nanoseconds, where it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap: Option<Interval>,
    /// The CPU time for a GiB of memory, in nanoseconds, where memory is sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_per_gib: Option<Interval>,
    /// The requests that a guest answered in a second before it moved, meanwhile and afterwards, where it was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub served: Option<[Interval; 3]>,
}

/// Operations in the order in which they first occur.
#[must_use]
pub fn summarize_operations(outcome: &Outcome) -> Vec<OperationSummary> {
    let mut order: Vec<(&str, &str)> = Vec::new();
    for cell in &outcome.cells {
        let key = (cell.workload.as_str(), cell.system.as_str());
        if !order.contains(&key) {
            order.push(key);
        }
    }
    order.sort_by_key(|(workload, _)| {
        outcome.cells.iter().position(|cell| cell.workload == *workload)
    });
    let summary = |(workload, system): (&str, &str)| {
        let of = |value: fn(&Cell) -> f64| {
            let wanted = |cell: &&Cell| cell.system == system && cell.workload == workload;
            Interval::of(outcome.cells.iter().filter(wanted).map(value))
        };
        let seconds = of(|cell| cell.seconds)?;
        let (throughput, gap) = (of(|cell| cell.throughput), of(|cell| cell.gap));
        let cpu_per_gib = of(|cell| cell.cpu_per_gib.unwrap_or(f64::NAN));
        let before = of(|cell| cell.served.as_ref().map_or(f64::NAN, |it| it.before));
        let during = of(|cell| cell.served.as_ref().map_or(f64::NAN, |it| it.during));
        let after = of(|cell| cell.served.as_ref().map_or(f64::NAN, |it| it.after));
        let served =
            before.zip(during).zip(after).map(|((before, during), after)| [before, during, after]);
        let (system, workload) = (system.to_owned(), workload.to_owned());
        Some(OperationSummary { system, workload, seconds, throughput, gap, cpu_per_gib, served })
    };
    order.into_iter().filter_map(summary).collect()
}

/// One system without work.
#[derive(Clone, Debug, Serialize)]
pub struct IdleSummary {
    /// The system's name.
    pub system: String,
    /// The server's CPU time in a second, in nanoseconds.
    pub cpu: Interval,
    /// How often it woke up in a second.
    pub wakeups: Interval,
}

fn summarize_idle(outcome: &Outcome) -> Vec<IdleSummary> {
    let mut systems: Vec<&str> = Vec::new();
    for idle in &outcome.idle {
        if !systems.contains(&idle.system.as_str()) {
            systems.push(&idle.system);
        }
    }
    let summary = |system: &str| {
        let of = |value: fn(&Idle) -> f64| {
            Interval::of(outcome.idle.iter().filter(|idle| idle.system == system).map(value))
        };
        Some(IdleSummary {
            system: system.to_owned(),
            cpu: of(|idle| idle.cpu / idle.seconds)?,
            wakeups: of(|idle| idle.waits / idle.seconds)?,
        })
    };
    systems.into_iter().filter_map(summary).collect()
}

/// Summaries in the order in which systems and loads first occur.
#[must_use]
pub fn summarize(outcome: &Outcome) -> Vec<Summary> {
    let mut order: Vec<(&str, &str)> = Vec::new();
    for cell in &outcome.cells {
        let key = (cell.workload.as_str(), cell.system.as_str());
        if !order.contains(&key) {
            order.push(key);
        }
    }
    order.into_iter().filter_map(|(workload, system)| summary(outcome, system, workload)).collect()
}

fn summary(outcome: &Outcome, system: &str, workload: &str) -> Option<Summary> {
    let cells =
        || outcome.cells.iter().filter(|cell| cell.system == system && cell.workload == workload);
    let of = |value: fn(&Cell) -> f64| Interval::of(cells().map(value));
    let latency = outcome.latencies.get(&(system.to_owned(), workload.to_owned()))?;
    let (server_busy, client_busy) = (of(|cell| cell.server_busy)?, of(|cell| cell.client_busy)?);
    let bottleneck = if server_busy.median >= SATURATED {
        Bottleneck::Server
    } else if client_busy.median >= SATURATED {
        Bottleneck::Client
    } else {
        Bottleneck::Waiting
    };
    Some(Summary {
        system: system.to_owned(),
        workload: workload.to_owned(),
        iops: of(|cell| cell.iops)?,
        throughput: of(|cell| cell.throughput)?,
        cpu_per_io: of(|cell| cell.cpu_per_io)?,
        server_busy,
        client_busy,
        others_busy: of(|cell| cell.others_busy)?,
        bottleneck,
        latency: Latency {
            p50: latency.value_at_quantile(0.5),
            p99: latency.value_at_quantile(0.99),
            p999: latency.value_at_quantile(0.999),
            max: latency.max(),
        },
        reads: TimesSummary::of(cells(), |times| times.reads),
        writes: TimesSummary::of(cells(), |times| times.writes),
        storage_cpu_per_io: of(|cell| cell.storage_cpu_per_io.unwrap_or(f64::NAN)),
    })
}

impl Report {
    /// Writes the JSON, and beside it the page for a browser; each is the old one or the new one.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = directory.unwrap_or(Path::new("."));
        fs::create_dir_all(directory)?;
        let file = tempfile::NamedTempFile::new_in(directory)?;
        serde_json::to_writer_pretty(&file, self)?;
        file.persist(path).map_err(|error| error.error)?;
        let mut page = tempfile::NamedTempFile::new_in(directory)?;
        page.write_all(self.page().as_bytes())?;
        page.persist(path.with_extension("html")).map(drop).map_err(|error| error.error)
    }

    /// The number of goals with a verdict.
    #[must_use]
    pub fn count(&self, verdict: Verdict) -> usize {
        self.goals.iter().filter(|judged| judged.verdict == verdict).count()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use hdrhistogram::Histogram;

    use super::*;
    use crate::goals::tests::{goal, rounds};
    use crate::goals::{Metric, Relation, assess};
    use crate::sections::SECTIONS;

    pub(crate) fn outcome() -> Outcome {
        let cells = rounds(&[3.1, 3.2, 3.3, 3.4, 3.5]);
        let mut latencies = BTreeMap::new();
        for system in ["ours", "theirs"] {
            let mut histogram = Histogram::new_with_bounds(1, 1_000_000, 2).unwrap();
            (1..=1000).for_each(|value| histogram.record(value * 100).unwrap());
            latencies.insert((system.to_owned(), "w".to_owned()), histogram);
        }
        let idle = (0..5).flat_map(|round| {
            let idle = |system: &str, cpu, waits| Idle {
                round,
                system: system.to_owned(),
                seconds: 1.0,
                cpu,
                waits,
            };
            [idle("ours", 0.0, 0.0), idle("theirs", 123_456.0, 10.0)]
        });
        Outcome { cells, idle: idle.collect(), latencies }
    }

    pub(crate) fn report() -> Report {
        let outcome = outcome();
        let plan = Plan {
            workloads: SECTIONS[0].workloads[..1].to_vec(),
            idle: true,
            limit: true,
            rounds: 5,
            places: 1,
            cell: Duration::from_secs(1),
            warm_up: Duration::from_millis(500),
            wait: Wait::Sleep,
            verify: false,
            neighbours: 0,
            directory: "/proc".into(),
            served: Vec::new(),
            size: 1 << 30,
            cores: Some(Cores { server: 0, client: 1 }),
        };
        let goals = [
            goal(Metric::Iops, Relation::AtLeast, 3.0),
            goal(Metric::CpuPerIo, Relation::AtMost, 0.25),
            goal(Metric::Throughput, Relation::AtLeast, 3.3),
        ];
        Report {
            version: VERSION,
            started: "2001-02-03T04:05:06Z".parse().unwrap(),
            commit: "0123456".to_owned(),
            machine: Machine {
                cpu: "Some CPU".to_owned(),
                cores: 2,
                memory: 1 << 34,
                kernel: "6.1".to_owned(),
                storage_daemon: Some("7.2".to_owned()),
                nbdkit: None,
                load_average: 0.5,
            },
            goals: goals.iter().map(|goal| assess(goal, &outcome)).collect(),
            sections: vec![Measured::of(&SECTIONS[0], &plan, &outcome)],
            obstacles: vec![Unavailable { section: "nbd", why: "there is no nbdkit".to_owned() }],
        }
    }

    #[test]
    fn the_json_keeps_its_shape() {
        insta::assert_json_snapshot!("report", report());
    }

    #[test]
    fn the_bottleneck_is_the_busy_side() {
        let with = |server: f64, client: f64| {
            let mut outcome = outcome();
            for cell in &mut outcome.cells {
                (cell.server_busy, cell.client_busy) = (server, client);
            }
            summarize(&outcome)[0].bottleneck
        };
        assert_eq!(with(0.95, 0.95), Bottleneck::Server);
        assert_eq!(with(0.5, 0.95), Bottleneck::Client);
        assert_eq!(with(0.5, 0.5), Bottleneck::Waiting);
    }

    #[test]
    fn a_report_is_written_whole_and_over_an_old_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new/latest.json");
        for _ in 0..2 {
            report().write(&path).unwrap();
        }
        let value: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(value["goals"][0]["verdict"], "met");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 2, "debris");
    }
}
