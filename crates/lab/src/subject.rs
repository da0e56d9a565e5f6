//! What is measured, behind one trait, and the order of measuring that is the same for all.
//!
//! ```text
//! place:  prepare: make what is measured, anew
//! round:  begin → for each workload: before, each system in turn (run) → end
//! ```
//!
//! The order of the systems is rotated by one from round to round, so that what disturbs the machine affects all
//! alike; so is the order of storages at each load. Comparisons are made within a round.

use crate::outcome::{ExperimentError, Outcome, Progress, Sample};
use crate::stop;

/// One measurement to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// The round, from 0.
    pub round: u32,
    /// Which system.
    pub system: &'static str,
    /// Under which load, or at which operation.
    pub workload: &'static str,
}

/// What is measured.
pub trait Subject {
    /// Makes what is measured; `place` counts how often it was made before.
    ///
    /// # Errors
    /// [`ExperimentError`].
    fn prepare(
        &mut self,
        place: u32,
        observe: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), ExperimentError>;

    /// A round begins.
    ///
    /// # Errors
    /// [`ExperimentError`].
    fn begin(&mut self, _round: u32) -> Result<(), ExperimentError> {
        Ok(())
    }

    /// What all systems are compared with at a workload.
    ///
    /// # Errors
    /// [`ExperimentError`].
    fn before(&mut self, _: u32, _: &'static str) -> Result<Option<Sample>, ExperimentError> {
        Ok(None)
    }

    /// Measures once; none where the system does not do this.
    ///
    /// # Errors
    /// [`ExperimentError`].
    fn run(&mut self, point: &Point) -> Result<Option<Sample>, ExperimentError>;

    /// A round is over.
    ///
    /// # Errors
    /// [`ExperimentError`].
    fn end(&mut self) -> Result<(), ExperimentError> {
        Ok(())
    }
}

/// How often what is measured.
#[derive(Clone, Debug)]
pub struct Order {
    /// The systems.
    pub systems: Vec<&'static str>,
    /// The loads or operations; a load of several storages has a name for each.
    pub workloads: Vec<Vec<&'static str>>,
    /// How often everything is measured.
    pub rounds: u32,
    /// How often it is made; at most once a round.
    pub places: u32,
}

/// Several subjects that are measured as one: the same load of each follows the other, within each round.
#[derive(Debug)]
pub struct Joined<S>(pub Vec<(S, Vec<&'static str>)>);

impl<S> Joined<S> {
    /// The loads of all: the first of each, the second of each, ...
    #[must_use]
    pub fn workloads(&self) -> Vec<Vec<&'static str>> {
        let longest = self.0.iter().map(|(_, loads)| loads.len()).max().unwrap_or(0);
        let at =
            |at: usize| self.0.iter().filter_map(|(_, loads)| loads.get(at).copied()).collect();
        (0..longest).map(at).collect()
    }

    fn of(&mut self, workload: &str) -> Option<&mut S> {
        let mut parts = self.0.iter_mut();
        let found = parts.find(|(_, loads)| loads.contains(&workload));
        found.map(|(subject, _)| subject)
    }
}

impl<S: Subject> Subject for Joined<S> {
    fn prepare(
        &mut self,
        place: u32,
        observe: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), ExperimentError> {
        for (subject, _) in &mut self.0 {
            subject.prepare(place, observe)?;
        }
        Ok(())
    }

    fn begin(&mut self, round: u32) -> Result<(), ExperimentError> {
        self.0.iter_mut().try_for_each(|(subject, _)| subject.begin(round))
    }

    fn before(
        &mut self,
        round: u32,
        workload: &'static str,
    ) -> Result<Option<Sample>, ExperimentError> {
        self.of(workload).map_or(Ok(None), |subject| subject.before(round, workload))
    }

    fn run(&mut self, point: &Point) -> Result<Option<Sample>, ExperimentError> {
        self.of(point.workload).map_or(Ok(None), |subject| subject.run(point))
    }

    fn end(&mut self) -> Result<(), ExperimentError> {
        self.0.iter_mut().try_for_each(|(subject, _)| subject.end())
    }
}

/// All names, from one of them on.
fn in_turn(names: &[&'static str], begins: usize) -> impl Iterator<Item = &'static str> {
    let (later, first) = names.split_at(begins % names.len().max(1));
    first.iter().chain(later).copied()
}

/// Measures a subject, unless the end is asked for meanwhile.
///
/// # Errors
/// [`ExperimentError`]; the first one ends it.
pub fn measure(
    order: &Order,
    subject: &mut dyn Subject,
    observe: &mut dyn FnMut(Progress<'_>),
) -> Result<Outcome, ExperimentError> {
    let mut outcome = Outcome::default();
    let places = order.places.clamp(1, order.rounds.max(1));
    for place in 0..places {
        subject.prepare(place, observe)?;
        for round in place * order.rounds / places..(place + 1) * order.rounds / places {
            observe(Progress::Round(round + 1, order.rounds));
            subject.begin(round)?;
            let begins = round as usize + place as usize;
            for workload in order.workloads.iter().flat_map(|group| in_turn(group, begins)) {
                outcome.extend(subject.before(round, workload)?);
                for system in in_turn(&order.systems, begins) {
                    stop::check()?;
                    outcome.extend(subject.run(&Point { round, system, workload })?);
                }
            }
            subject.end()?;
        }
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes what it is asked for.
    #[derive(Default)]
    struct Noted(Vec<String>);

    impl Subject for Noted {
        fn prepare(
            &mut self,
            place: u32,
            _: &mut dyn FnMut(Progress<'_>),
        ) -> Result<(), ExperimentError> {
            self.0.push(format!("make {place}"));
            Ok(())
        }

        fn run(&mut self, point: &Point) -> Result<Option<Sample>, ExperimentError> {
            self.0.push(format!("{}{}{}", point.system, point.workload, point.round));
            Ok(None)
        }
    }

    #[test]
    fn systems_take_turns_within_a_round_and_begin_in_turn() {
        let order = Order {
            systems: vec!["a", "b"],
            workloads: vec![vec!["x"], vec!["y"]],
            rounds: 2,
            places: 1,
        };
        let mut noted = Noted::default();
        measure(&order, &mut noted, &mut |_| {}).unwrap();
        assert_eq!(noted.0, ["make 0", "ax0", "bx0", "ay0", "by0", "bx1", "ax1", "by1", "ay1"]);
        let mut noted = Noted::default();
        measure(&Order { places: 9, ..order }, &mut noted, &mut |_| {}).unwrap();
        assert_eq!(noted.0.iter().filter(|it| it.starts_with("make")).count(), 2);
    }

    #[test]
    fn subjects_that_are_joined_take_turns_within_a_round() {
        let of = |loads: &[&'static str]| (Noted::default(), loads.to_vec());
        let mut both = Joined(vec![of(&["x1", "y1"]), of(&["x2", "y2", "z2"])]);
        assert_eq!(both.workloads(), [vec!["x1", "x2"], vec!["y1", "y2"], vec!["z2"]]);
        let order = Order { systems: vec!["a"], workloads: both.workloads(), rounds: 2, places: 1 };
        measure(&order, &mut both, &mut |_| {}).unwrap();
        let [(first, _), (second, _)] = &both.0[..] else { panic!("there are two") };
        assert_eq!(first.0, ["make 0", "ax10", "ay10", "ax11", "ay11"]);
        assert_eq!(second.0, ["make 0", "ax20", "ay20", "az20", "ax21", "ay21", "az21"]);
    }

    #[test]
    fn storages_begin_in_turn_at_each_load() {
        let workloads = vec![vec!["x1", "x2", "x3"], vec!["y"]];
        let order = Order { systems: vec!["a"], workloads, rounds: 3, places: 1 };
        let mut noted = Noted::default();
        measure(&order, &mut noted, &mut |_| {}).unwrap();
        let expected = [
            ["ax10", "ax20", "ax30", "ay0"],
            ["ax21", "ax31", "ax11", "ay1"],
            ["ax32", "ax12", "ax22", "ay2"],
        ];
        assert_eq!(noted.0[1..], expected.concat());
    }
}
