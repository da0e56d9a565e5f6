//! Goals as data (`bench/goals.toml`), and the verdict on each.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::experiment::{Cell, Outcome, SATURATED};
pub use crate::metric::Metric;
use crate::statistics::Interval;
use crate::systems::FIO;

/// The longest goals file, in bytes: three hundred goals fit.
const FILE_MAX: u64 = 128 * 1024;

/// On which side of the goal's value the measured value must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Relation {
    /// The ratio is the value or more.
    AtLeast,
    /// The ratio is the value or less.
    AtMost,
}

/// What is compared with the goal's value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compare {
    /// Numerator over denominator.
    #[default]
    Ratio,
    /// Numerator minus denominator, in the metric's unit.
    Difference,
    /// The numerator alone, in the metric's unit.
    Alone,
}

impl Compare {
    /// Whether it is what files need not say.
    pub(crate) fn is_ratio(&self) -> bool {
        *self == Self::Ratio
    }
}

/// A goal: one metric of two systems, or of one, under one load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Goal {
    /// Its name; what it is about comes first (`disk.`).
    pub id: String,
    /// Its description.
    pub description: String,
    /// What is compared.
    pub metric: Metric,
    /// The system above the line.
    pub numerator: String,
    /// The system below the line; none where one is judged alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub denominator: Option<String>,
    /// Others that may be below the line in its place: of all of them the one that sends the most in a second is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub or_faster: Vec<String>,
    /// The load.
    pub workload: String,
    /// The load of the system below the line, where it is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<String>,
    /// What is compared with `value`.
    #[serde(default)]
    pub compare: Compare,
    /// Of one system alone: what so many of 100 rounds do not exceed is judged, in place of the median.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percentile: Option<u8>,
    /// On which side of `value` it must be.
    pub relation: Relation,
    /// The value.
    pub value: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Goals {
    goal: Vec<Goal>,
}

/// Why goals cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum GoalsError {
    /// There is no such file, or it is too long.
    #[error("the goals in {} cannot be read (at most {FILE_MAX} bytes)", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file is not valid.
    #[error("the goals in {} cannot be parsed", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: toml::de::Error,
    },
    /// A goal that is a duplicate or can never be judged.
    #[error("goal {id} {what}")]
    Goal {
        /// Which.
        id: String,
        /// What is wrong with it.
        what: &'static str,
    },
}

/// What the goals about disks begin with.
pub const DISK: &str = "disk.";

/// What the goals about operations begin with.
pub const OPERATIONS: &str = "ops.";

/// What the goals about migrations begin with.
pub const MIGRATION: &str = "migration.";

/// What the goals about clients of Ceph begin with.
pub const CEPH: &str = "ceph.";

/// What the goals about network cards begin with.
pub const NETWORK: &str = "network.";

/// Reads the goals whose id begins with `about`.
///
/// # Errors
/// [`GoalsError`].
pub fn read(path: &Path, about: &str) -> Result<Vec<Goal>, GoalsError> {
    let failed = |source| GoalsError::Read { path: path.into(), source };
    if std::fs::metadata(path).map_err(failed)?.len() > FILE_MAX {
        return Err(failed(std::io::ErrorKind::FileTooLarge.into()));
    }
    let text = std::fs::read_to_string(path).map_err(failed)?;
    let mut goals = parse(path, &text)?;
    goals.retain(|goal| goal.id.starts_with(about));
    Ok(goals)
}

pub(crate) fn parse(path: &Path, text: &str) -> Result<Vec<Goal>, GoalsError> {
    let goals: Goals =
        toml::from_str(text).map_err(|source| GoalsError::Parse { path: path.into(), source })?;
    let mut seen = std::collections::BTreeSet::new();
    for goal in &goals.goal {
        let wrong = |what| Err(GoalsError::Goal { id: goal.id.clone(), what });
        if !seen.insert(&goal.id) {
            return wrong("is there twice");
        }
        let nothing = goal.value == 0.0 && goal.compare == Compare::Alone;
        if !(goal.value.is_finite() && goal.value > 0.0 || nothing) {
            return wrong("has a value that is not a positive number");
        }
        let same_load = goal.beside.as_ref().is_none_or(|beside| *beside == goal.workload);
        if Some(&goal.numerator) == goal.denominator.as_ref() && same_load {
            return wrong("compares a system with itself");
        }
        if (goal.compare == Compare::Alone) != goal.denominator.is_none() {
            return wrong("names a denominator if, and only if, it compares");
        }
        if goal.percentile.is_some_and(|it| !(1..=99).contains(&it)) {
            return wrong("has a percentile that is not from 1 to 99");
        }
        if goal.percentile.is_some() && goal.compare != Compare::Alone {
            return wrong("has a percentile, and is not about one system alone");
        }
        if goal.denominator.is_none() && !goal.or_faster.is_empty() {
            return wrong("names others in place of a denominator, and has none");
        }
        let mut below: Vec<&String> = goal.denominator.iter().chain(&goal.or_faster).collect();
        below.sort();
        if below.windows(2).any(|pair| pair[0] == pair[1]) {
            return wrong("names a system below the line twice");
        }
        if goal.or_faster.contains(&goal.numerator) && same_load {
            return wrong("compares a system with itself");
        }
        if goal.compare == Compare::Alone && goal.beside.is_some() {
            return wrong("names a load beside its own, and compares with nothing");
        }
    }
    Ok(goals.goal)
}

/// The verdict on a goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The 95 % bound passes.
    Met,
    /// The other 95 % bound fails.
    NotMet,
    /// The noise is larger than the question, or there are too few rounds.
    NotResolved,
    /// One of the systems or the load was left out.
    NotMeasured,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Met => "met",
            Self::NotMet => "not met",
            Self::NotResolved => "not resolved",
            Self::NotMeasured => "not measured",
        })
    }
}

/// A goal with its verdict.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Assessment {
    /// The goal; of several that may be below the line, `denominator` is the one that was.
    #[serde(flatten)]
    pub goal: Goal,
    /// The verdict.
    pub verdict: Verdict,
    /// Numerator over denominator, within each round.
    pub ratio: Option<Interval>,
    /// Numerator minus denominator, within each round, in the metric's unit.
    pub difference: Option<Interval>,
    /// The numerator alone, where it is judged alone, in the metric's unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alone: Option<Interval>,
    /// The verdict by CPU time, where a rate is not resolved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by_cpu_time: Option<ByCpuTime>,
}

/// The verdict by CPU time on a rate that the noise of the machine or its storage leaves unresolved: the
/// ratio if the latency of the system below the line changed by the difference in CPU time alone. Where the
/// server's core is the bottleneck, that is the ratio of CPU times. Where it waits for storage, the waiting
/// may hide the difference; the ratio is then the worst case.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ByCpuTime {
    /// The verdict.
    pub verdict: Verdict,
    /// Numerator over denominator, within each round.
    pub ratio: Interval,
}

/// Judges a goal by the rounds in which both systems were measured.
#[must_use]
pub fn assess(goal: &Goal, outcome: &Outcome) -> Assessment {
    let goal = &Goal { denominator: fastest(goal, outcome), ..goal.clone() };
    let of = |system: &str, load: &str| goal.metric.of(&outcome.cells, &outcome.idle, system, load);
    let pairs = pairs(goal, of);
    let ratio = ratio_of(&pairs);
    let difference = Interval::of(pairs.iter().map(|(above, below)| above - below));
    let values = of(&goal.numerator, &goal.workload).into_iter().map(|(_, value)| value);
    let alone = match goal.percentile {
        None => Interval::of(values),
        Some(percentile) => Interval::of_percentile(percentile, values),
    };
    let judged = match goal.compare {
        Compare::Ratio => ratio,
        Compare::Difference => difference,
        Compare::Alone => alone,
    };
    let verdict = judged.as_ref().map_or(Verdict::NotMeasured, |judged| judge(goal, judged));
    // The CPU time of a cell is that of its server: it says nothing of other storage, and fio's has its load generator in it.
    let comparable = goal.beside.is_none() && goal.denominator.as_deref() != Some(FIO);
    let undecided = verdict == Verdict::NotResolved && goal.compare == Compare::Ratio && comparable;
    let by_cpu_time =
        if undecided && goal.metric.is_a_rate() { by_cpu_time(goal, outcome) } else { None };
    let alone = alone.filter(|_| goal.compare == Compare::Alone);
    Assessment { goal: goal.clone(), verdict, ratio, difference, alone, by_cpu_time }
}

impl Goal {
    /// Its name, with the system below the line where that is one of several.
    pub(crate) fn name(&self) -> String {
        match &self.denominator {
            Some(denominator) if !self.or_faster.is_empty() => {
                format!("{} ({denominator})", self.id)
            }
            _ => self.id.clone(),
        }
    }

    /// What of the rounds is judged, before a value; nothing for the median.
    pub(crate) fn of_rounds(&self) -> String {
        self.percentile.map_or_else(String::new, |percentile| format!("p{percentile} "))
    }
}

impl Assessment {
    /// What is compared with the goal's value.
    #[must_use]
    pub fn found(&self) -> Option<Interval> {
        match self.goal.compare {
            Compare::Ratio => self.ratio,
            Compare::Difference => self.difference,
            Compare::Alone => self.alone,
        }
    }
}

/// What is below the line: of several the one with the highest median rate; the goal's own where none has a rate.
fn fastest(goal: &Goal, outcome: &Outcome) -> Option<String> {
    let own = goal.denominator.as_ref()?;
    let load = goal.beside.as_ref().unwrap_or(&goal.workload);
    let rate = |system: &String| {
        let rates = Metric::Throughput.of(&outcome.cells, &outcome.idle, system, load);
        Interval::of(rates.into_iter().map(|(_, rate)| rate)).map(|rates| rates.median)
    };
    let all = std::iter::once(own).chain(&goal.or_faster);
    let rates = all.filter_map(|system| Some((system, rate(system)?)));
    let fastest = rates.max_by(|(_, one), (_, other)| one.total_cmp(other));
    Some(fastest.map_or(own, |(system, _)| system).clone())
}

fn by_cpu_time(goal: &Goal, outcome: &Outcome) -> Option<ByCpuTime> {
    let cells = pairs(goal, |system, load| {
        let wanted = |cell: &&Cell| cell.system == system && cell.workload == load;
        outcome.cells.iter().filter(wanted).map(|cell| (cell.round, cell)).collect()
    });
    let ratio = |(above, below): &(&Cell, &Cell)| {
        let time = (1e9 / below.iops).max(below.cpu_per_io);
        time / (time + above.cpu_per_io - below.cpu_per_io)
    };
    let ratio = Interval::of(cells.iter().map(ratio))?;
    let waited = cells.iter().any(|(above, _)| above.server_busy < SATURATED);
    let verdict = match judge(goal, &ratio) {
        // The worst case.
        Verdict::NotMet if waited && goal.relation == Relation::AtLeast => Verdict::NotResolved,
        verdict => verdict,
    };
    Some(ByCpuTime { verdict, ratio })
}

/// The values of both systems, for each round that has both.
fn pairs<T>(goal: &Goal, of: impl Fn(&str, &str) -> Vec<(u32, T)>) -> Vec<(T, T)> {
    let Some(denominator) = &goal.denominator else { return Vec::new() };
    let load = goal.beside.as_ref().unwrap_or(&goal.workload);
    let mut below: BTreeMap<u32, T> = of(denominator, load).into_iter().collect();
    let pair = |(round, above)| Some((above, below.remove(&round)?));
    of(&goal.numerator, &goal.workload).into_iter().filter_map(pair).collect()
}

fn ratio_of(pairs: &[(f64, f64)]) -> Option<Interval> {
    Interval::of(pairs.iter().map(|(above, below)| above / below))
}

fn judge(goal: &Goal, judged: &Interval) -> Verdict {
    // A percentile may have one bound without the other.
    let (lower, upper) = (judged.lower, judged.upper);
    let (met, not_met) = match goal.relation {
        Relation::AtLeast => {
            (lower.is_some_and(|it| it >= goal.value), upper.is_some_and(|it| it < goal.value))
        }
        Relation::AtMost => {
            (upper.is_some_and(|it| it <= goal.value), lower.is_some_and(|it| it > goal.value))
        }
    };
    match (met, not_met) {
        (true, _) => Verdict::Met,
        (_, true) => Verdict::NotMet,
        _ => Verdict::NotResolved,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::computed_limit::ComputedLimit;
    use crate::idle::{IDLE, Idle};
    use crate::sections::SECTIONS;

    pub(crate) fn cell(round: u32, system: &str, workload: &str, iops: f64) -> Cell {
        Cell {
            requests: iops as u64,
            seconds: 1.0,
            iops,
            throughput: iops * 4096.0,
            cpu_per_io: 1e9 / iops,
            p50: 1e9 / iops,
            p99: 2e9 / iops,
            gap: 4e9 / iops,
            memory: 1e9 / iops,
            server_busy: 1.0,
            client_busy: 0.5,
            others_busy: 0.0,
            ..Cell::unmeasured(round, system, workload)
        }
    }

    pub(crate) fn goal(metric: Metric, relation: Relation, value: f64) -> Goal {
        Goal {
            id: "disk.test".to_owned(),
            description: "ours is quicker".to_owned(),
            metric,
            numerator: "ours".to_owned(),
            denominator: Some("theirs".to_owned()),
            or_faster: Vec::new(),
            workload: "w".to_owned(),
            beside: None,
            compare: Compare::Ratio,
            percentile: None,
            relation,
            value,
        }
    }

    pub(crate) fn outcome(cells: Vec<Cell>) -> Outcome {
        Outcome { cells, ..Outcome::default() }
    }

    /// Rounds in which theirs reaches 100 and ours 100 × the ratio.
    pub(crate) fn rounds(ratios: &[f64]) -> Vec<Cell> {
        let pair = |(round, ratio): (usize, &f64)| {
            let round = round as u32;
            [cell(round, "ours", "w", 100.0 * ratio), cell(round, "theirs", "w", 100.0)]
        };
        ratios.iter().enumerate().flat_map(pair).collect()
    }

    #[test]
    fn every_verdict_has_its_rounds() {
        use Metric::{CpuPerIo, Iops};
        use Relation::{AtLeast, AtMost};
        let cases: [(Metric, Relation, f64, &[f64], Verdict); 10] = [
            (Iops, AtLeast, 3.0, &[3.1, 3.2, 3.3, 3.4, 3.5], Verdict::Met),
            (Iops, AtLeast, 3.0, &[3.0, 3.2, 3.3, 3.4, 3.5], Verdict::Met),
            (Iops, AtLeast, 3.0, &[2.9, 3.2, 3.3, 3.4, 3.5], Verdict::NotResolved),
            (Iops, AtLeast, 3.0, &[2.9, 2.8, 2.9, 2.9, 2.99], Verdict::NotMet),
            (Iops, AtLeast, 3.0, &[2.9, 2.8, 2.9, 2.9, 3.0], Verdict::NotResolved),
            (Iops, AtLeast, 3.0, &[9.0, 9.0, 9.0, 9.0], Verdict::NotResolved),
            (Iops, AtLeast, 3.0, &[], Verdict::NotMeasured),
            (CpuPerIo, AtMost, 0.5, &[2.1, 2.2, 2.0, 4.0, 8.0], Verdict::Met),
            (CpuPerIo, AtMost, 0.5, &[1.9, 2.2, 2.0, 4.0, 8.0], Verdict::NotResolved),
            (CpuPerIo, AtMost, 0.5, &[1.9, 1.0, 1.1, 1.2, 1.3], Verdict::NotMet),
        ];
        for (metric, relation, value, ratios, verdict) in cases {
            let judged = assess(&goal(metric, relation, value), &outcome(rounds(ratios)));
            assert_eq!(judged.verdict, verdict, "{metric:?} {relation:?} {value} {ratios:?}");
        }
    }

    #[test]
    fn a_difference_and_a_value_alone_are_judged_by_themselves() {
        // Theirs takes 10 ms; ours 9.1 to 9.5 ms.
        let cells = outcome(rounds(&[1.05, 1.06, 1.07, 1.08, 1.1]));
        let cases = [
            (Compare::Difference, -400_000.0, Verdict::Met),
            (Compare::Difference, -600_000.0, Verdict::NotResolved),
            (Compare::Difference, -1_000_000.0, Verdict::NotMet),
            (Compare::Alone, 9_600_000.0, Verdict::Met),
            (Compare::Alone, 9_000_000.0, Verdict::NotMet),
        ];
        for (compare, value, verdict) in cases {
            let goal = Goal { compare, ..goal(Metric::P50, Relation::AtMost, value) };
            let judged = assess(&goal, &cells);
            assert_eq!(judged.verdict, verdict, "{compare:?} {value}: {judged:?}");
            assert_eq!(judged.alone.is_some(), compare == Compare::Alone);
        }
    }

    #[test]
    fn a_percentile_is_judged_in_place_of_the_median() {
        // So many rounds of 10 ms, of which the last ones took 40.
        let of = |rounds: u32, long: u32, percentile| {
            let cells = (0..rounds).map(|round| {
                let iops = if round < rounds - long { 100.0 } else { 25.0 };
                cell(round, "ours", "w", iops)
            });
            let (denominator, compare) = (None, Compare::Alone);
            let goal = goal(Metric::P50, Relation::AtMost, 20e6);
            let goal = Goal { denominator, compare, percentile, ..goal };
            assess(&goal, &outcome(cells.collect())).verdict
        };
        assert_eq!(of(300, 20, None), Verdict::Met);
        assert_eq!(of(300, 20, Some(99)), Verdict::NotMet);
        assert_eq!(of(300, 0, Some(99)), Verdict::Met);
        // A lower bound needs fewer rounds than an upper one.
        assert_eq!(of(100, 20, Some(99)), Verdict::NotMet);
        assert_eq!(of(100, 0, Some(99)), Verdict::NotResolved);
    }

    #[test]
    fn systems_are_compared_within_a_round() {
        // Both double from round to round: across rounds the ratio would be anything.
        let cells: Vec<Cell> = (0..5)
            .flat_map(|round| {
                let base = 100.0 * f64::from(1 << round);
                [cell(round, "theirs", "w", base), cell(round, "ours", "w", 2.0 * base)]
            })
            .collect();
        let judged = assess(&goal(Metric::Iops, Relation::AtLeast, 2.0), &outcome(cells));
        let two = Some(Interval { median: 2.0, lower: Some(2.0), upper: Some(2.0) });
        assert_eq!((judged.verdict, judged.ratio), (Verdict::Met, two));
        assert_eq!(judged.difference.unwrap().median, 400.0);
    }

    #[test]
    fn a_system_is_compared_with_itself_under_another_load() {
        let mut cells = rounds(&[2.1, 2.2, 2.3, 2.4, 2.5]);
        for cell in cells.iter_mut().filter(|cell| cell.system == "theirs") {
            cell.system = "ours".to_owned();
            cell.workload = "far".to_owned();
        }
        let goal = Goal {
            denominator: Some("ours".to_owned()),
            beside: Some("far".to_owned()),
            ..goal(Metric::Iops, Relation::AtLeast, 2.0)
        };
        let judged = assess(&goal, &outcome(cells));
        assert_eq!((judged.verdict, judged.ratio.unwrap().median), (Verdict::Met, 2.3));
    }

    #[test]
    fn of_several_systems_the_fastest_is_compared() {
        // Theirs reaches 100, and 150 with two streams, each of which takes twice the CPU time.
        let mut cells = rounds(&[2.1, 2.2, 2.3, 2.4, 2.5]);
        let with_two: Vec<Cell> = cells
            .iter()
            .filter(|cell| cell.system == "theirs")
            .map(|cell| Cell { cpu_per_io: 20e6, ..self::cell(cell.round, "two", "w", 150.0) })
            .collect();
        cells.extend(with_two);
        let or_faster = vec!["two".to_owned(), "left-out".to_owned()];
        let judged = |metric, relation, value| {
            let goal = Goal { or_faster: or_faster.clone(), ..goal(metric, relation, value) };
            assess(&goal, &outcome(cells.clone()))
        };
        let rate = judged(Metric::Throughput, Relation::AtLeast, 2.0);
        assert_eq!(rate.goal.denominator.as_deref(), Some("two"));
        assert_eq!(rate.goal.name(), "disk.test (two)");
        assert_eq!(rate.verdict, Verdict::NotMet);
        assert!((rate.ratio.unwrap().median - 2.3 / 1.5).abs() < 1e-9);
        // Its CPU time is compared, too, though the other one takes less.
        let cpu = judged(Metric::CpuPerIo, Relation::AtMost, 0.4);
        assert_eq!(cpu.goal.denominator.as_deref(), Some("two"));
        assert_eq!(cpu.verdict, Verdict::Met);
        // Without it the other one is.
        cells.retain(|cell| cell.system != "two");
        let goal = Goal { or_faster, ..goal(Metric::Throughput, Relation::AtLeast, 2.0) };
        let alone = assess(&goal, &outcome(cells));
        assert_eq!(alone.goal.denominator.as_deref(), Some("theirs"));
        assert_eq!(alone.verdict, Verdict::Met);
    }

    #[test]
    fn cpu_time_decides_what_the_clock_does_not() {
        let goal = goal(Metric::Iops, Relation::AtLeast, 3.0);
        let of = |cells: &[Cell]| assess(&goal, &outcome(cells.to_vec())).by_cpu_time;
        let mut cells = rounds(&[1.0, 3.5, 3.5, 3.5, 9.0]);
        for (cpu_ratio, verdict) in [(4.0, Verdict::Met), (2.0, Verdict::NotMet)] {
            // Theirs takes 10 ms, all of it on the CPU.
            for cell in cells.iter_mut().filter(|cell| cell.system == "ours") {
                cell.cpu_per_io = 10e6 / cpu_ratio;
            }
            let decided = of(&cells).unwrap();
            assert_eq!((decided.verdict, decided.ratio.median), (verdict, cpu_ratio));
        }
        // A verdict by the clock takes precedence, and CPU time needs rounds, too.
        assert_eq!(of(&rounds(&[4.0; 5])), None);
        assert_eq!(of(&rounds(&[4.0; 4])).unwrap().verdict, Verdict::NotResolved);
    }

    #[test]
    fn while_waiting_cpu_time_can_only_help() {
        // Both wait for noisy storage; ours needs 0.1 or 1 ms more CPU of about 10 ms.
        let mut cells = rounds(&[0.8, 0.9, 1.0, 1.1, 1.2]);
        for (more, verdict) in [(0.1e6, Verdict::Met), (1e6, Verdict::NotResolved)] {
            for cell in &mut cells {
                cell.server_busy = 0.2;
                cell.cpu_per_io = if cell.system == "ours" { 2e6 + more } else { 2e6 };
            }
            let goal = goal(Metric::Iops, Relation::AtLeast, 0.97);
            let decided = assess(&goal, &outcome(cells.clone())).by_cpu_time.unwrap();
            assert_eq!((decided.verdict, decided.ratio.median), (verdict, 10e6 / (10e6 + more)));
        }
    }

    #[test]
    fn a_disk_without_work_is_judged_by_what_it_used() {
        let goal = Goal {
            denominator: None,
            workload: IDLE.to_owned(),
            compare: Compare::Alone,
            ..goal(Metric::IdleCpu, Relation::AtMost, 0.0)
        };
        let of = |metric, used: f64| {
            let idle = |round| Idle {
                round,
                system: "ours".to_owned(),
                seconds: 2.0,
                cpu: used,
                waits: if used > 0.0 { 1.0 } else { 0.0 },
            };
            let outcome = Outcome { idle: (0..5).map(idle).collect(), ..Outcome::default() };
            let judged = assess(&Goal { metric, ..goal.clone() }, &outcome);
            (judged.verdict, judged.alone.map(|alone| alone.median))
        };
        assert_eq!(of(Metric::IdleCpu, 0.0), (Verdict::Met, Some(0.0)));
        assert_eq!(of(Metric::IdleCpu, 1.0), (Verdict::NotMet, Some(0.5)));
        assert_eq!(of(Metric::IdleWakeups, 0.0), (Verdict::Met, Some(0.0)));
        assert_eq!(of(Metric::IdleWakeups, 1.0), (Verdict::NotMet, Some(0.5)));
        assert_eq!(of(Metric::Iops, 0.0), (Verdict::NotMeasured, None));
    }

    #[test]
    fn a_system_that_was_left_out_is_not_judged() {
        let cells: Vec<Cell> = (0..5).map(|round| cell(round, "ours", "w", 1.0)).collect();
        let judged = assess(&goal(Metric::Iops, Relation::AtLeast, 2.0), &outcome(cells));
        assert_eq!(judged.verdict, Verdict::NotMeasured);
    }

    #[test]
    fn the_project_s_goals_name_systems_and_loads_that_exist() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/goals.toml");
        let goals = read(&path, DISK).unwrap();
        // Those about networks are checked by what judges them, and no others are left out by both.
        let networks = read(&path, NETWORK).unwrap();
        let operations = read(&path, OPERATIONS).unwrap();
        assert!(!goals.is_empty() && !networks.is_empty() && !operations.is_empty());
        let migrations = read(&path, MIGRATION).unwrap();
        let ceph = read(&path, CEPH).unwrap();
        assert!(!ceph.is_empty());
        let known = goals.len() + networks.len() + operations.len() + migrations.len() + ceph.len();
        assert_eq!(known, read(&path, "").unwrap().len());
        let (timed, of_disks): (Vec<_>, Vec<_>) =
            operations.into_iter().partition(|goal| goal.workload.starts_with("ops-"));
        let measured = ["operations", "encrypt", "backup"].map(crate::operation::names_of).concat();
        for goal in timed {
            assert!(measured.contains(&goal.workload), "{}: {measured:?}", goal.id);
            for system in std::iter::once(&goal.numerator).chain(&goal.denominator) {
                assert!(
                    crate::definition::OPERATION_SYSTEMS.contains(&system.as_str()),
                    "{}",
                    goal.id
                );
            }
        }
        assert!(!migrations.is_empty());
        for goal in migrations {
            let measured_at = crate::migration::measured_at;
            let (above, rounds) = measured_at(&goal.workload);
            let (below, _) = measured_at(goal.beside.as_ref().unwrap_or(&goal.workload));
            assert!(above.contains(&goal.numerator), "{}: one of {above:?}", goal.id);
            let mut systems = goal.denominator.iter().chain(&goal.or_faster);
            let known = systems.all(|system| below.contains(system));
            assert!(known, "{}: beside one of {below:?}", goal.id);
            // It can be met.
            let values = (0..rounds).map(f64::from);
            let bounded = Interval::of_percentile(goal.percentile.unwrap_or(50), values);
            let upper = bounded.and_then(|it| it.upper);
            assert!(upper.is_some(), "{}: {rounds} rounds are too few", goal.id);
        }
        for goal in goals.into_iter().chain(of_disks).chain(ceph) {
            let systems = std::iter::once(&goal.numerator).chain(&goal.denominator);
            if goal.workload == IDLE {
                let section = SECTIONS.iter().find(|section| section.idle).unwrap();
                assert!(
                    matches!(goal.metric, Metric::IdleCpu | Metric::IdleWakeups),
                    "{}",
                    goal.id
                );
                systems.for_each(|name| assert!(section.systems.contains(&name.as_str())));
                continue;
            }
            let more = [
                "snapshot-io",
                "snapshot-io-device",
                "encrypting-io",
                "snapshot-pause",
                "ceph-client",
                "ceph-clients",
                "ceph-process",
            ]
            .map(|id| crate::sections::of_definition(&crate::catalogue::find(id).unwrap()));
            let sections = [&SECTIONS[..], &more.concat()].concat();
            let loads = sections.iter().flat_map(|s| s.workloads.iter().map(move |w| (s, w)));
            let found = loads.into_iter().find(|(_, load)| load.id == goal.workload);
            let (section, load) = found.unwrap_or_else(|| panic!("{}: no such load", goal.id));
            for system in systems {
                let computed = system == crate::computed_limit::ID
                    && section.limit
                    && ComputedLimit::is_of(load);
                let known = section.systems.contains(&system.as_str());
                assert!(known || computed, "{}: {system}", goal.id);
            }
        }
    }

    #[test]
    fn goals_that_make_no_sense_are_refused() {
        let text = |id: &str, value: &str, denominator: &str, more: &str| {
            format!(
                "[[goal]]\nid = \"{id}\"\ndescription = \"\"\nmetric = \"iops\"\nnumerator = \"a\"\n\
                 denominator = \"{denominator}\"\nworkload = \"w\"\nrelation = \"at_least\"\nvalue = {value}\n{more}\n"
            )
        };
        let path = Path::new("goals.toml");
        let refused = |text: &str| parse(path, text).unwrap_err().to_string();
        assert_eq!(parse(path, &text("x", "2.0", "b", "")).unwrap().len(), 1);
        assert!(refused(&text("x", "0.0", "b", "")).contains("not a positive number"));
        assert!(refused(&text("x", "nan", "b", "")).contains("not a positive number"));
        assert!(refused(&text("x", "-1.0", "b", "")).contains("not a positive number"));
        assert!(refused(&text("x", "1.0", "a", "")).contains("with itself"));
        assert!(refused(&text("x", "1.0", "b", "note = 1")).contains("cannot be parsed"));
        let alone = refused(&text("x", "1.0", "b", "compare = \"alone\""));
        assert!(alone.contains("denominator"), "{alone}");
        let single = text("x", "1.0", "b", "").replace("denominator = \"b\"\n", "");
        assert!(refused(&single).contains("denominator"));
        assert_eq!(parse(path, &format!("{single}compare = \"alone\"")).unwrap().len(), 1);
        let nothing = single.replace("value = 1.0", "value = 0.0");
        assert_eq!(parse(path, &format!("{nothing}compare = \"alone\"")).unwrap().len(), 1);
        assert_eq!(parse(path, &text("x", "1.0", "a", "beside = \"v\"")).unwrap().len(), 1);
        assert!(refused(&text("x", "1.0", "a", "beside = \"w\"")).contains("with itself"));
        let percentile = |it: u8| format!("{single}compare = \"alone\"\npercentile = {it}");
        assert_eq!(parse(path, &percentile(99)).unwrap().len(), 1);
        assert!(refused(&percentile(100)).contains("from 1 to 99"));
        assert!(refused(&text("x", "1.0", "b", "percentile = 99")).contains("one system alone"));
        let several = |names: &str| text("x", "1.0", "b", &format!("or_faster = [{names}]"));
        assert_eq!(parse(path, &several("\"c\", \"d\"")).unwrap().len(), 1);
        assert!(refused(&several("\"b\"")).contains("below the line twice"));
        assert!(refused(&several("\"c\", \"c\"")).contains("below the line twice"));
        assert!(refused(&several("\"a\"")).contains("with itself"));
        let in_place_of_none = format!("{single}compare = \"alone\"\nor_faster = [\"c\"]");
        assert!(refused(&in_place_of_none).contains("and has none"));
        let beside_nothing = format!("{single}compare = \"alone\"\nbeside = \"v\"");
        assert!(refused(&beside_nothing).contains("compares with nothing"));
        let twice = text("x", "1.0", "b", "").repeat(2);
        assert!(refused(&twice).contains("is there twice"));
    }
}
