//! A report as tables.

use std::fmt::Write as _;

use comfy_table::{
    Cell as TableCell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle,
};
use vmseal_initiator::Wait;

use crate::claim::Assessed;
use crate::goals::{Assessment, Compare, Metric, Relation, Verdict};
use crate::machine::Machine;
use crate::report::{Bottleneck, Measured, Report, Settings, Summary};
use crate::run::RunReport;
use crate::statistics::Interval;

/// The share of a CPU above which other work on the machine is mentioned.
const DISTURBED: f64 = 0.1;

/// One rule below the titles.
const STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

impl Report {
    /// The tables.
    #[must_use]
    pub fn show(&self) -> String {
        let mut text = self.heading();
        for measured in &self.sections {
            text.push_str(&section(measured));
        }
        let _ = writeln!(text, "\n{}\n", lines(&verdicts(&self.goals)));
        text.push_str(
            "Medians; [95 % bounds, each by itself]. CPU is the server's, for one request. The\n\
             bottleneck is who used all of its core; `waiting` if neither server nor client did.\n",
        );
        if let Some(warning) = self.disturbance() {
            text.push_str(&warning);
        }
        for obstacle in &self.obstacles {
            let _ = writeln!(text, "not measured: {}: {}", obstacle.section, obstacle.why);
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

    fn heading(&self) -> String {
        heading(&self.machine, &self.commit)
    }

    /// The other work on the machine during the measurement.
    fn disturbance(&self) -> Option<String> {
        disturbance(&self.sections)
    }
}

impl RunReport {
    /// The tables.
    #[must_use]
    pub fn show(&self) -> String {
        let mut text = heading(&self.machine, &self.commit);
        for experiment in &self.experiments {
            let _ = writeln!(text, "\n{}: {}", experiment.id, experiment.title);
            if let Some(why) = &experiment.refused {
                let _ = writeln!(text, "not measured here: {why}");
            }
            for point in &experiment.unavailable {
                let _ = writeln!(text, "not measured here: {}: {}", point.section, point.why);
            }
            for cluster in &experiment.clusters {
                let _ = writeln!(text, "measured on {cluster}");
            }
            experiment.measured.iter().for_each(|measured| text.push_str(&section(measured)));
            if let Some(claim) = &experiment.claim {
                text.push_str(&claimed(claim));
            }
            if let Some(warning) = disturbance(&experiment.measured) {
                text.push_str(&warning);
            }
        }
        if !self.goals.is_empty() {
            let _ = writeln!(text, "\n{}", lines(&verdicts(&self.goals)));
        }
        text.push_str("\nMedians; [95 % bounds, each by itself].\n");
        text
    }
}

/// A claim beside what was found.
fn claimed(claim: &Assessed) -> String {
    let mut text = format!("\nclaim: {}\n  {}\n", claim.claim.text, claim.verdict);
    for found in &claim.found {
        let metric = found.goal.metric;
        let (is, value) = match found.goal.compare {
            Compare::Ratio => {
                let is = found.ratio.map(|it| it.show(|x| format!("{x:.3}")));
                (is, found.goal.value.to_string())
            }
            Compare::Difference | Compare::Alone => {
                let is = found.found().map(|it| metric.show_interval(&it));
                (is, metric.show(found.goal.value))
            }
        };
        let sign = match found.goal.relation {
            Relation::AtLeast => '≥',
            Relation::AtMost => '≤',
        };
        let (goal, verdict) = (&found.goal, found.verdict);
        let _ = writeln!(
            text,
            "  {}, {metric:?}: {}, claimed {sign} {value}: {verdict}",
            goal.workload,
            is.unwrap_or_default(),
        );
    }
    for why in &claim.left_out {
        let _ = writeln!(text, "  not comparable: {why}");
    }
    text
}

fn section(measured: &Measured) -> String {
    let mut text = format!("\n{}: {}\n", measured.section, measured.title);
    if let Some(settings) = &measured.settings {
        let _ = writeln!(text, "{}", described(settings));
    }
    if !measured.summaries.is_empty() {
        let _ = writeln!(text, "\n{}", lines(&systems(measured)));
    }
    if measured.summaries.iter().any(Summary::has_more) {
        let _ = writeln!(text, "\n{}", lines(&apart(measured)));
    }
    if !measured.operations.is_empty() {
        let _ = writeln!(text, "\n{}", lines(&operations(measured)));
    }
    if !measured.idle_summaries.is_empty() {
        let _ = writeln!(text, "\n{}", lines(&idle(measured)));
    }
    text
}

fn operations(measured: &Measured) -> Table {
    let all = &measured.operations;
    // Migrations have more to show.
    let sends = all.iter().any(|it| it.gap.is_some() || it.cpu_per_gib.is_some());
    let serves = all.iter().any(|it| it.served.is_some());
    let more: &[&str] = match (sends, serves) {
        (_, true) => &["gap ms", "CPU s/GiB", "requests/s before", "meanwhile", "afterwards"],
        (true, false) => &["gap ms", "CPU s/GiB"],
        (false, false) => &[],
    };
    let mut table = table(&[&["operation", "system", "s", "MB/s"], more].concat());
    for summary in all {
        let rate = summary.throughput.map(|rate| format!("{:.0}", rate.median / 1e6));
        let mut row = vec![
            summary.workload.clone(),
            summary.system.clone(),
            summary.seconds.show(|value| format!("{value:.3}")),
            rate.unwrap_or_default(),
        ];
        if sends {
            let gap = summary.gap.map(|gap| gap.show(|value| format!("{:.0}", value / 1e6)));
            let cpu = summary.cpu_per_gib.map(|cpu| cpu.show(|it| format!("{:.2}", it / 1e9)));
            row.extend([gap.unwrap_or_default(), cpu.unwrap_or_default()]);
        }
        if serves {
            let rates = |it: [Interval; 3]| it.map(|rate| rate.show(|value| format!("{value:.0}")));
            row.extend(summary.served.map(rates).unwrap_or_default());
        }
        table.add_row(row);
    }
    numbers_to_the_right(&mut table, 2..4 + more.len());
    table
}

pub(crate) fn heading(machine: &Machine, commit: &str) -> String {
    let program = |name: &str, version: &Option<String>| {
        version.as_ref().map_or_else(String::new, |version| format!(", {name} {version}"))
    };
    format!(
        "{}, {} cores, Linux {}{}{}; commit {}\n",
        machine.cpu,
        machine.cores,
        machine.kernel,
        program("QEMU", &machine.storage_daemon),
        program("nbdkit", &machine.nbdkit),
        commit,
    )
}

fn verdicts(goals: &[Assessment]) -> Table {
    let mut table = table(&["goal", "verdict", "found", "wanted", "difference"]);
    for judged in goals.iter().filter(|judged| judged.verdict != Verdict::NotMeasured) {
        let goal = &judged.goal;
        let value = match goal.compare {
            Compare::Ratio => format!("{:.3}", goal.value),
            Compare::Difference => signed(goal.metric, goal.value),
            Compare::Alone => goal.metric.show(goal.value),
        };
        let wanted = match goal.relation {
            Relation::AtLeast => format!("{}≥ {value}", goal.of_rounds()),
            Relation::AtMost => format!("{}≤ {value}", goal.of_rounds()),
        };
        let found = judged.ratio.map(|ratio| ratio.show(|x| format!("{x:.3}")));
        let alone = judged.alone.map(|value| goal.metric.show_interval(&value));
        table.add_row(vec![
            goal.name(),
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

/// The other work on the machine during the measurement.
pub(crate) fn disturbance(sections: &[Measured]) -> Option<String> {
    let cells = sections.iter().flat_map(|measured| &measured.cells);
    let others = Interval::of(cells.map(|cell| cell.others_busy))?.median;
    (others > DISTURBED).then(|| {
        let percent = others * 100.0;
        format!("Other work used {percent:.0} % of a core meanwhile: trust ratios, not figures.\n")
    })
}

pub(crate) fn described(settings: &Settings) -> String {
    let transport = match settings.transport {
        crate::systems::Transport::VhostUser => "vhost-user-blk",
        crate::systems::Transport::Nbd => "NBD",
    };
    let client = match settings.wait {
        Wait::Sleep => "sleeps until something comes",
        Wait::Poll => "polls",
    };
    let made = match settings.places {
        1 => String::new(),
        places => format!(", files made {places} times"),
    };
    format!(
        "{transport}, {} MiB on {}, {} rounds of {} s{made}, client {client}",
        settings.size >> 20,
        settings.file_system,
        settings.rounds,
        settings.seconds,
    )
}

fn systems(measured: &Measured) -> Table {
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
    let mut before = "";
    for summary in &measured.summaries {
        let micro = |nanoseconds: u64| format!("{:.0}", nanoseconds as f64 / 1e3);
        // A load is named in its first row only, so that the next one is visible.
        let again = before == summary.workload;
        before = &summary.workload;
        table.add_row(vec![
            if again { String::new() } else { summary.workload.clone() },
            summary.system.clone(),
            format!("{:.1}", summary.iops.median / 1e3),
            format!("{:.0}", summary.throughput.median / 1e6),
            format!("{:.2}", summary.cpu_per_io.median / 1e3),
            micro(summary.latency.p50),
            micro(summary.latency.p99),
            micro(summary.latency.p999),
            named(summary.bottleneck).to_owned(),
        ]);
    }
    numbers_to_the_right(&mut table, 2..8);
    table
}

/// Reads and writes apart, and the storage's CPU time.
fn apart(measured: &Measured) -> Table {
    let mut table = table(&[
        "workload",
        "system",
        "read µs: mean",
        "p50",
        "p95",
        "write µs: mean",
        "p50",
        "p95",
        "storage CPU µs",
    ]);
    let mut before = "";
    for summary in &measured.summaries {
        let again = before == summary.workload;
        before = &summary.workload;
        let mut row = vec![
            if again { String::new() } else { summary.workload.clone() },
            summary.system.clone(),
        ];
        row.extend(summary.apart());
        table.add_row(row);
    }
    numbers_to_the_right(&mut table, 2..9);
    table
}

pub(crate) fn named(bottleneck: Bottleneck) -> &'static str {
    match bottleneck {
        Bottleneck::Server => "server",
        Bottleneck::Client => "client",
        Bottleneck::Waiting => "waiting",
    }
}

fn idle(measured: &Measured) -> Table {
    let mut table = table(&["without work", "CPU", "wake-ups"]);
    for summary in &measured.idle_summaries {
        table.add_row(vec![
            summary.system.clone(),
            Metric::IdleCpu.show_interval(&summary.cpu),
            Metric::IdleWakeups.show_interval(&summary.wakeups),
        ]);
    }
    numbers_to_the_right(&mut table, 1..3);
    table
}

fn table(titles: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(titles.iter().map(TableCell::new));
    table
}

/// A table without trailing blanks.
fn lines(table: &Table) -> String {
    table.trim_fmt()
}

fn numbers_to_the_right(table: &mut Table, columns: std::ops::Range<usize>) {
    for column in columns {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

fn signed(metric: Metric, value: f64) -> String {
    let sign = if value < 0.0 { '−' } else { '+' };
    format!("{sign}{}", metric.show(value.abs()))
}

#[cfg(test)]
mod tests {
    use crate::goals::tests::rounds;
    use crate::outcome::{Cell, Outcome, RequestTimes, Times};
    use crate::report::summarize;
    use crate::report::tests::{outcome as report_outcome, report};

    #[test]
    fn the_tables_keep_their_shape() {
        insta::assert_snapshot!("tables", report().show());
    }

    #[test]
    fn reads_and_writes_of_a_mixed_load_are_shown_apart() {
        let mut report = report();
        let times = RequestTimes { mean: 2e6, p50: 1.5e6, p95: 4e6 };
        let outcome = |reads| {
            let cells = rounds(&[1.0; 5]).into_iter().map(|cell| Cell {
                times: Some(Times { all: times, reads, writes: Some(times) }),
                storage_cpu_per_io: Some(31_000.0),
                ..cell
            });
            let latencies = report_outcome().latencies;
            Outcome { cells: cells.collect(), latencies, ..Outcome::default() }
        };
        assert!(!report.show().contains("write µs"), "not where nothing is to be told apart");
        report.sections[0].summaries = summarize(&outcome(Some(times)));
        let shown = report.show();
        let line = shown.lines().filter(|line| line.contains("ours")).nth(1).unwrap();
        let words: Vec<_> = line.split_whitespace().collect();
        assert_eq!(words, ["w", "ours", "2000", "1500", "4000", "2000", "1500", "4000", "31.00"]);
        report.sections[0].summaries = summarize(&outcome(None));
        let shown = report.show();
        let line = shown.lines().filter(|line| line.contains("ours")).nth(1).unwrap();
        let words: Vec<_> = line.split_whitespace().collect();
        assert_eq!(words, ["w", "ours", "2000", "1500", "4000", "31.00"], "no reads");
    }

    #[test]
    fn a_disturbed_machine_is_named() {
        let mut report = report();
        assert_eq!(report.disturbance(), None);
        report.sections[0].cells.iter_mut().for_each(|cell| cell.others_busy = 0.4);
        assert!(report.disturbance().unwrap().contains("40 % of a core"));
    }
}
