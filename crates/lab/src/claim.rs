//! What the documents claim, beside what was found: met, not met, or not comparable here.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::definition::{AxisValue, Check, Claim, Comparable, Operation};
use crate::experiment::{Cell, Outcome};
use crate::goals::{self, Assessment, Compare, Goal, Verdict};
use crate::statistics::Interval;

/// The verdict on a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ClaimVerdict {
    /// At every point that could be compared.
    Met,
    /// At one point at least it is not.
    NotMet,
    /// The noise is larger than the question.
    NotResolved,
    /// This machine or its storage is not what the claim is about.
    NotComparable,
    /// Nothing of it was measured.
    NotMeasured,
}

impl fmt::Display for ClaimVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Met => "met",
            Self::NotMet => "not met",
            Self::NotResolved => "not resolved",
            Self::NotComparable => "not comparable here",
            Self::NotMeasured => "not measured",
        })
    }
}

/// A claim with its verdict.
#[derive(Clone, Debug, Serialize)]
pub struct Assessed {
    /// The claim.
    #[serde(flatten)]
    pub claim: Claim,
    /// The verdict.
    pub verdict: ClaimVerdict,
    /// Why points were left out.
    pub left_out: Vec<String>,
    /// Each check at each point.
    pub found: Vec<Assessment>,
}

/// A point of an experiment.
#[derive(Clone, Debug)]
pub struct Place {
    /// By the keys of the matrix.
    pub axes: BTreeMap<&'static str, AxisValue>,
    /// What was measured there, with the operation that it is; in the same order at all points.
    pub workloads: Vec<(&'static str, Option<Operation>)>,
    /// Of disks the ids that the file gives these loads, in their order.
    pub loads: Vec<&'static str>,
}

/// Judges a claim on a machine with so many `cores`.
#[must_use]
pub fn assess(claim: &Claim, places: &[Place], outcome: &Outcome, cores: usize) -> Assessed {
    let mut assessed = Assessed {
        claim: claim.clone(),
        verdict: ClaimVerdict::NotComparable,
        left_out: Vec::new(),
        found: Vec::new(),
    };
    if let Some(needed) = claim.cores.filter(|needed| *needed > cores) {
        assessed.left_out.push(format!("{cores} processors are here, and it takes {needed}"));
        return assessed;
    }
    for place in places {
        for (at, (workload, operation)) in place.workloads.iter().enumerate() {
            let range = claim.comparable.as_ref();
            if let Some(why) = range.and_then(|range| outside(range, outcome, workload)) {
                assessed.left_out.push(why);
                continue;
            }
            let about = |check: &&Check| {
                let named = |it: &Operation| *operation == Some(*it);
                let load = place.loads.get(at);
                (check.operations.is_empty() || check.operations.iter().any(named))
                    && (check.loads.is_empty()
                        || check.loads.iter().any(|it| load.is_some_and(|load| load == it)))
                    && check
                        .at
                        .iter()
                        .all(|(axis, value)| place.axes.get(axis.as_str()) == Some(value))
            };
            let has = |check: &&Check| !has_none(check, outcome, workload);
            for check in claim.checks.iter().filter(about).filter(has) {
                let Some(beside) = beside(check, place, places, at) else { continue };
                assessed.found.push(goals::assess(&goal(check, workload, beside), outcome));
            }
        }
    }
    let has = |verdict| assessed.found.iter().any(|found| found.verdict == verdict);
    assessed.verdict = match () {
        () if assessed.found.is_empty() => ClaimVerdict::NotComparable,
        () if has(Verdict::NotMet) => ClaimVerdict::NotMet,
        () if has(Verdict::NotResolved) => ClaimVerdict::NotResolved,
        () if has(Verdict::Met) => ClaimVerdict::Met,
        () => ClaimVerdict::NotMeasured,
    };
    assessed
}

/// Whether a load that was measured has nothing of what is compared: one that only writes has no reads.
fn has_none(check: &Check, outcome: &Outcome, workload: &str) -> bool {
    let was_measured = |cell: &Cell| cell.system == check.numerator && cell.workload == workload;
    let values = check.measure.of(&outcome.cells, &outcome.idle, &check.numerator, workload);
    values.is_empty() && outcome.cells.iter().any(was_measured)
}

/// The load of the system below the line, which is at the same place as the one above it: none is the same; the outer none
/// that there is no such point.
fn beside(
    check: &Check,
    place: &Place,
    places: &[Place],
    at: usize,
) -> Option<Option<&'static str>> {
    if check.beside.is_empty() {
        return Some(None);
    }
    let is_it = |other: &&Place| {
        let same = |(axis, own): (&&'static str, &AxisValue)| {
            other.axes.get(axis) == Some(check.beside.get(*axis).unwrap_or(own))
        };
        place.axes.iter().all(same)
    };
    places.iter().find(is_it)?.workloads.get(at).map(|(workload, _)| Some(*workload))
}

fn goal(check: &Check, workload: &str, beside: Option<&str>) -> Goal {
    Goal {
        id: format!("claim.{workload}"),
        description: String::new(),
        metric: check.measure,
        numerator: check.numerator.clone(),
        denominator: check.denominator.clone(),
        or_faster: Vec::new(),
        workload: workload.to_owned(),
        beside: beside.map(str::to_owned),
        compare: match check.denominator {
            Some(_) => check.compare,
            None => Compare::Alone,
        },
        percentile: None,
        relation: check.relation,
        value: check.value,
    }
}

/// Why a load is not what the claim is about.
fn outside(range: &Comparable, outcome: &Outcome, workload: &str) -> Option<String> {
    let values = range.measure.of(&outcome.cells, &outcome.idle, &range.system, workload);
    let median = Interval::of(values.into_iter().map(|(_, value)| value))?.median;
    let (least, most) = (range.at_least.unwrap_or(f64::MIN), range.at_most.unwrap_or(f64::MAX));
    if (least..=most).contains(&median) {
        return None;
    }
    let found = range.measure.show(median);
    let wanted = match median < least {
        true => format!("at least {}", range.measure.show(least)),
        false => format!("at most {}", range.measure.show(most)),
    };
    let system = &range.system;
    Some(format!("{workload}: {system} has {found} here; the claim is about storage with {wanted}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::tests::{cell, rounds};
    use crate::goals::{Metric, Relation};
    use crate::outcome::{RequestTimes, Times};

    fn claim(value: f64) -> Claim {
        let check = Check {
            measure: Metric::Iops,
            numerator: "ours".to_owned(),
            denominator: Some("theirs".to_owned()),
            compare: Compare::Ratio,
            relation: Relation::AtLeast,
            value,
            operations: Vec::new(),
            loads: Vec::new(),
            at: BTreeMap::from([("disks".to_owned(), AxisValue::Number(2))]),
            beside: BTreeMap::new(),
        };
        Claim { text: "fast".to_owned(), checks: vec![check], comparable: None, cores: None }
    }

    fn place(axes: &[(&'static str, AxisValue)], loads: &[&'static str]) -> Place {
        let workloads = loads.iter().map(|load| (*load, None)).collect();
        Place { axes: axes.iter().cloned().collect(), workloads, loads: loads.to_vec() }
    }

    fn judged(claim: &Claim, disks: u64) -> Assessed {
        let places = [place(&[("disks", disks.into())], &["w"])];
        let cells = rounds(&[3.1, 3.2, 3.3, 3.4, 3.5]);
        assess(claim, &places, &Outcome { cells, ..Outcome::default() }, 2)
    }

    #[test]
    fn a_claim_is_judged_where_it_is_about_something_that_was_measured() {
        assert_eq!(judged(&claim(3.0), 2).verdict, ClaimVerdict::Met);
        assert_eq!(judged(&claim(4.0), 2).verdict, ClaimVerdict::NotMet);
        assert_eq!(judged(&claim(3.3), 2).verdict, ClaimVerdict::NotResolved);
        assert_eq!(judged(&claim(3.0), 4).verdict, ClaimVerdict::NotComparable);
    }

    #[test]
    fn a_point_is_compared_with_another_one() {
        let place = |disks: u64, workload| place(&[("disks", disks.into())], &[workload]);
        let mut far = rounds(&[1.0; 5]);
        far.retain(|cell| cell.system == "theirs");
        far.iter_mut().for_each(|cell| cell.workload = "far".to_owned());
        let cells = [rounds(&[3.1, 3.2, 3.3, 3.4, 3.5]), far].concat();
        let outcome = Outcome { cells, ..Outcome::default() };
        let mut claim = claim(3.0);
        claim.checks[0].numerator = "ours".to_owned();
        claim.checks[0].beside = BTreeMap::from([("disks".to_owned(), AxisValue::Number(9))]);
        let found = assess(&claim, &[place(2, "w"), place(9, "far")], &outcome, 2);
        assert_eq!(found.verdict, ClaimVerdict::Met);
        assert_eq!(found.found[0].goal.beside.as_deref(), Some("far"));
        // A point that was not measured.
        let alone = assess(&claim, &[place(2, "w")], &outcome, 2);
        assert_eq!(alone.verdict, ClaimVerdict::NotComparable);
    }

    #[test]
    fn each_load_of_one_cluster_is_compared_with_the_same_load_of_another() {
        let at = |cluster: &str, loads: [&'static str; 2]| Place {
            loads: vec!["read", "write"],
            ..place(&[("clusters", cluster.into())], &loads)
        };
        let places =
            [at("crc", ["read-crc", "write-crc"]), at("secure", ["read-secure", "write-secure"])];
        // Encrypted reads reach 0.9 of the clear ones, writes 0.5.
        let cells = (0..5).flat_map(|round| {
            [
                cell(round, "theirs", "read-crc", 100.0),
                cell(round, "theirs", "write-crc", 10.0),
                cell(round, "ours", "read-secure", 90.0),
                cell(round, "ours", "write-secure", 5.0),
            ]
        });
        let outcome = Outcome { cells: cells.collect(), ..Outcome::default() };
        let named = |cluster: &str| BTreeMap::from([("clusters".to_owned(), cluster.into())]);
        let check = |load: &str, value| Check {
            loads: vec![load.to_owned()],
            at: named("secure"),
            beside: named("crc"),
            value,
            ..claim(1.0).checks[0].clone()
        };
        let claim = |reads, writes| Claim {
            checks: vec![check("read", reads), check("write", writes)],
            ..claim(1.0)
        };
        let met = assess(&claim(0.9, 0.5), &places, &outcome, 2);
        assert_eq!(met.verdict, ClaimVerdict::Met);
        let compared: Vec<_> = met
            .found
            .iter()
            .map(|it| (it.goal.workload.as_str(), it.goal.beside.as_deref()))
            .collect();
        let expected = [("read-secure", Some("read-crc")), ("write-secure", Some("write-crc"))];
        assert_eq!(compared, expected);
        assert_eq!(assess(&claim(0.9, 0.6), &places, &outcome, 2).verdict, ClaimVerdict::NotMet);
        // Without the cluster in the clear there is nothing to compare with.
        let alone = assess(&claim(0.9, 0.5), &places[1..], &outcome, 2);
        assert_eq!(alone.verdict, ClaimVerdict::NotComparable);
    }

    #[test]
    fn each_load_is_compared_with_its_own_at_the_other_point() {
        let place =
            |disks: u64, loads: [&'static str; 2]| place(&[("disks", disks.into())], &loads);
        let mut claim = claim(3.0);
        claim.checks[0].beside = BTreeMap::from([("disks".to_owned(), AxisValue::Number(9))]);
        let places = [place(2, ["w", "x"]), place(9, ["far-w", "far-x"])];
        let found = assess(&claim, &places, &Outcome::default(), 2).found;
        let beside: Vec<_> = found.iter().filter_map(|it| it.goal.beside.as_deref()).collect();
        assert_eq!(beside, ["far-w", "far-x"]);
    }

    #[test]
    fn a_system_is_judged_alone_by_what_its_load_has() {
        let times = |reads| {
            let all = RequestTimes { mean: 1e6, p50: 1e6, p95: 2.5e6 };
            Some(Times { all, reads, writes: Some(RequestTimes { mean: 2e6, ..all }) })
        };
        let mut cells = rounds(&[1.0; 5]);
        for cell in &mut cells {
            cell.times = times(None);
        }
        let mut mixed = cells.clone();
        for cell in &mut mixed {
            cell.workload = "mixed".to_owned();
            cell.times = times(Some(RequestTimes { mean: 1e6, p50: 1e6, p95: 1e6 }));
        }
        let outcome = Outcome { cells: [cells, mixed].concat(), ..Outcome::default() };
        let judged = |measure, value| {
            let mut claim = claim(value);
            claim.checks[0].denominator = None;
            claim.checks[0].measure = measure;
            claim.checks[0].relation = Relation::AtMost;
            let places = [place(&[("disks", AxisValue::Number(2))], &["w", "mixed"])];
            let assessed = assess(&claim, &places, &outcome, 2);
            let about = assessed.found.iter().map(|it| it.goal.workload.clone());
            (assessed.verdict, about.collect::<Vec<_>>())
        };
        let both = vec!["w".to_owned(), "mixed".to_owned()];
        assert_eq!(judged(Metric::P95ByMean, 3.0), (ClaimVerdict::Met, both.clone()));
        assert_eq!(judged(Metric::P95ByMean, 2.0), (ClaimVerdict::NotMet, both));
        // What only writes has no reads to compare.
        let one = vec!["mixed".to_owned()];
        assert_eq!(judged(Metric::ReadByWrite, 1.0), (ClaimVerdict::Met, one.clone()));
        assert_eq!(judged(Metric::ReadByWrite, 0.4), (ClaimVerdict::NotMet, one));
    }

    #[test]
    fn a_difference_is_judged_in_the_unit_of_its_measure() {
        // Gaps of 40 ms, and ours of 36.4 to 38.1 ms.
        let cells = rounds(&[1.05, 1.06, 1.07, 1.08, 1.1]);
        let outcome = Outcome { cells, ..Outcome::default() };
        let judged = |value| {
            let mut claim = claim(value);
            claim.checks[0].measure = Metric::Gap;
            claim.checks[0].compare = Compare::Difference;
            claim.checks[0].relation = Relation::AtMost;
            let places = [place(&[("disks", AxisValue::Number(2))], &["w"])];
            let assessed = assess(&claim, &places, &outcome, 2);
            (assessed.verdict, assessed.found[0].goal.compare)
        };
        assert_eq!(judged(-1.6e6), (ClaimVerdict::Met, Compare::Difference));
        assert_eq!(judged(-3e6), (ClaimVerdict::NotResolved, Compare::Difference));
        assert_eq!(judged(-4e6), (ClaimVerdict::NotMet, Compare::Difference));
    }

    #[test]
    fn what_is_not_comparable_says_why() {
        let many = judged(&Claim { cores: Some(8), ..claim(3.0) }, 2);
        assert_eq!(many.verdict, ClaimVerdict::NotComparable);
        assert_eq!(many.left_out, ["2 processors are here, and it takes 8"]);
        let range = Comparable {
            measure: Metric::Iops,
            system: "theirs".to_owned(),
            at_least: Some(1e9),
            at_most: None,
        };
        let slow = judged(&Claim { comparable: Some(range), ..claim(3.0) }, 2);
        assert_eq!(slow.verdict, ClaimVerdict::NotComparable);
        assert!(slow.left_out[0].contains("w: theirs has"), "{:?}", slow.left_out);
    }
}
