//! What an experiment says: as JSON with all that is needed to judge it later, and as tables.

use std::fmt::Write as _;
use std::path::Path;
use std::{fs, io};

use comfy_table::{Cell as TableCell, CellAlignment, ContentArrangement, Table, presets};
use serde::Serialize;

use crate::experiment::{Cell, Cores, Outcome, Plan};
use crate::goals::{Assessment, Compare, Metric, Relation, Verdict};
use crate::initiator::Wait;
use crate::load::Workload;
use crate::machine::Machine;
use crate::statistics::Interval;

/// The version of the JSON.
pub const VERSION: u32 = 2;

/// A share of time above which a CPU counts as the bottleneck.
const SATURATED: f64 = 0.9;
/// A share of a CPU above which other work on the machine is worth a word.
const DISTURBED: f64 = 0.1;

/// Everything about one experiment.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`VERSION`].
    pub version: u32,
    /// When it began, in UTC.
    pub started: jiff::Timestamp,
    /// The commit that was measured, with `-dirty` if there were changes.
    pub commit: String,
    /// Where.
    pub machine: Machine,
    /// How.
    pub settings: Settings,
    /// The goals and what is said of each.
    pub goals: Vec<Assessment>,
    /// Each system under each load, over all rounds.
    pub summaries: Vec<Summary>,
    /// The rounds.
    pub cells: Vec<Cell>,
}

/// How it was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Settings {
    /// The loads.
    pub workloads: Vec<Workload>,
    /// How often.
    pub rounds: u32,
    /// How long a cell was measured, in seconds.
    pub seconds: f64,
    /// How long it ran before that, in seconds.
    pub warm_up_seconds: f64,
    /// The size of a disk, in bytes.
    pub size: u64,
    /// The file system of the disks, by its type.
    pub file_system: String,
    /// How the client waited.
    pub wait: Wait,
    /// Whether content was compared while measuring.
    pub verify: bool,
    /// Which core did what.
    pub cores: Option<Cores>,
}

impl Settings {
    /// The settings of a plan.
    #[must_use]
    pub fn of(plan: &Plan) -> Self {
        Self {
            workloads: plan.workloads.clone(),
            rounds: plan.rounds,
            seconds: plan.cell.as_secs_f64(),
            warm_up_seconds: plan.warm_up.as_secs_f64(),
            size: plan.size,
            file_system: crate::machine::file_system(&plan.directory),
            wait: plan.wait,
            verify: plan.verify,
            cores: plan.cores,
        }
    }
}

/// What kept a system from being quicker.
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
    /// The server's CPU time for a request, in nanoseconds.
    pub cpu_per_io: Interval,
    /// Shares of the time, as in [`Cell`].
    pub server_busy: Interval,
    /// As in [`Cell`].
    pub client_busy: Interval,
    /// As in [`Cell`].
    pub others_busy: Interval,
    /// What kept it from being quicker.
    pub bottleneck: Bottleneck,
    /// Latencies.
    pub latency: Latency,
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
    })
}

impl Report {
    /// Writes the JSON so that the file is the old one or the new one, whatever happens.
    ///
    /// # Errors
    /// The file system's.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = directory.unwrap_or(Path::new("."));
        fs::create_dir_all(directory)?;
        let file = tempfile::NamedTempFile::new_in(directory)?;
        serde_json::to_writer_pretty(&file, self)?;
        file.persist(path).map(drop).map_err(|error| error.error)
    }

    /// The tables.
    #[must_use]
    pub fn show(&self) -> String {
        let machine = &self.machine;
        let mut text = format!(
            "{}, {} cores, Linux {}, {}; {} rounds of {} s, client {}; commit {}\n",
            machine.cpu,
            machine.cores,
            machine.kernel,
            self.settings.file_system,
            self.settings.rounds,
            self.settings.seconds,
            match self.settings.wait {
                Wait::Sleep => "sleeps on interrupts",
                Wait::Poll => "polls",
            },
            self.commit,
        );
        let _ = writeln!(text, "\n{}\n\n{}", self.systems(), self.verdicts());
        text.push_str(
            "\nMedians; [95 % bounds, each by itself]. CPU is the server's, for one request. The\n\
             bottleneck is who used all of its core; `waiting` if neither server nor client did.\n",
        );
        if let Some(warning) = self.disturbance() {
            text.push_str(&warning);
        }
        let _ = writeln!(
            text,
            "{} met, {} not met, {} not resolved, {} not measured",
            self.count(Verdict::Met),
            self.count(Verdict::NotMet),
            self.count(Verdict::NotResolved),
            self.count(Verdict::NotMeasured),
        );
        text
    }

    fn systems(&self) -> Table {
        let mut table = table(&[
            "workload",
            "system",
            "kIOPS",
            "MB/s",
            "CPU µs",
            "p50 µs",
            "p99 µs",
            "p99.9 µs",
            "bottleneck",
        ]);
        for summary in &self.summaries {
            let micro = |nanoseconds: u64| format!("{:.0}", nanoseconds as f64 / 1e3);
            let bottleneck = match summary.bottleneck {
                Bottleneck::Server => "server",
                Bottleneck::Client => "client",
                Bottleneck::Waiting => "waiting",
            };
            table.add_row(vec![
                summary.workload.clone(),
                summary.system.clone(),
                format!("{:.1}", summary.iops.median / 1e3),
                format!("{:.0}", summary.throughput.median / 1e6),
                format!("{:.2}", summary.cpu_per_io.median / 1e3),
                micro(summary.latency.p50),
                micro(summary.latency.p99),
                micro(summary.latency.p999),
                bottleneck.to_owned(),
            ]);
        }
        numbers_to_the_right(&mut table, 2..8);
        table
    }

    fn verdicts(&self) -> Table {
        let mut table = table(&["goal", "verdict", "found", "wanted", "difference"]);
        for judged in &self.goals {
            let goal = &judged.goal;
            let value = match goal.compare {
                Compare::Ratio => format!("{:.3}", goal.value),
                Compare::Difference => signed(goal.metric, goal.value),
                Compare::Alone => goal.metric.show(goal.value),
            };
            let wanted = match goal.relation {
                Relation::AtLeast => format!("≥ {value}"),
                Relation::AtMost => format!("≤ {value}"),
            };
            let found = judged.ratio.map(|ratio| bounded(&ratio, |x| format!("{x:.3}")));
            let alone = judged.alone.map(|value| bounded(&value, |x| goal.metric.show(x)));
            table.add_row(vec![
                goal.id.clone(),
                judged.by_cpu_time.as_ref().map_or_else(
                    || judged.verdict.to_string(),
                    |decided| format!("{} (by CPU time: {})", judged.verdict, decided.verdict),
                ),
                found.or(alone).unwrap_or_default(),
                wanted,
                judged.difference.map_or_else(String::new, |d| signed(goal.metric, d.median)),
            ]);
        }
        numbers_to_the_right(&mut table, 2..5);
        table
    }

    /// What else the machine did while it measured.
    fn disturbance(&self) -> Option<String> {
        let others = Interval::of(self.cells.iter().map(|cell| cell.others_busy))?.median;
        (others > DISTURBED).then(|| {
            let percent = others * 100.0;
            format!(
                "Other work used {percent:.0} % of a core meanwhile: trust ratios, not figures.\n"
            )
        })
    }

    /// How many goals have a verdict.
    #[must_use]
    pub fn count(&self, verdict: Verdict) -> usize {
        self.goals.iter().filter(|judged| judged.verdict == verdict).count()
    }
}

fn table(titles: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(titles.iter().map(TableCell::new));
    table
}

fn numbers_to_the_right(table: &mut Table, columns: std::ops::Range<usize>) {
    for column in columns {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

fn bounded(interval: &Interval, show: impl Fn(f64) -> String) -> String {
    let median = show(interval.median);
    match (interval.lower, interval.upper) {
        (Some(lower), Some(upper)) => format!("{median} [{}, {}]", show(lower), show(upper)),
        _ => format!("{median} [too few rounds]"),
    }
}

fn signed(metric: Metric, value: f64) -> String {
    let sign = if value < 0.0 { '−' } else { '+' };
    format!("{sign}{}", metric.show(value.abs()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use hdrhistogram::Histogram;

    use super::*;
    use crate::goals::assess;
    use crate::goals::tests::{goal, rounds};
    use crate::load::WORKLOADS;

    fn outcome() -> Outcome {
        let cells = rounds(&[3.1, 3.2, 3.3, 3.4, 3.5]);
        let mut latencies = BTreeMap::new();
        for system in ["ours", "theirs"] {
            let mut histogram = Histogram::new_with_bounds(1, 1_000_000, 2).unwrap();
            (1..=1000).for_each(|value| histogram.record(value * 100).unwrap());
            latencies.insert((system.to_owned(), "w".to_owned()), histogram);
        }
        Outcome { cells, latencies }
    }

    fn report() -> Report {
        let outcome = outcome();
        let plan = Plan {
            workloads: WORKLOADS[..1].to_vec(),
            rounds: 5,
            cell: Duration::from_secs(1),
            warm_up: Duration::from_millis(500),
            wait: Wait::Sleep,
            verify: false,
            directory: "/proc".into(),
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
                load_average: 0.5,
            },
            settings: Settings::of(&plan),
            goals: goals.iter().map(|goal| assess(goal, &outcome.cells)).collect(),
            summaries: summarize(&outcome),
            cells: outcome.cells,
        }
    }

    #[test]
    fn the_json_keeps_its_shape() {
        insta::assert_json_snapshot!("report", report());
    }

    #[test]
    fn the_tables_keep_their_shape() {
        insta::assert_snapshot!("tables", report().show());
    }

    #[test]
    fn the_bottleneck_is_who_was_busy() {
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
    fn a_disturbed_machine_is_named() {
        let mut report = report();
        assert_eq!(report.disturbance(), None);
        report.cells.iter_mut().for_each(|cell| cell.others_busy = 0.4);
        assert!(report.disturbance().unwrap().contains("40 % of a core"));
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
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "debris");
    }
}
