//! Several plans in turn: what they differ by is compared within each round, as systems are.
//!
//! ```text
//! place:  for each plan: make its disks
//! round:  for each load: each system of each plan in turn, one cell
//! ```

use super::{Disks, ExperimentError, Outcome, Pinned, Plan, Progress, Sample, System, root};
use crate::subject::{self, Point, Subject};

/// A plan with its systems.
#[derive(Clone, Copy)]
pub struct Planned<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// Its systems.
    pub systems: &'a [Box<dyn System>],
}

/// Runs plans together, and gives the outcome of each. The first one says how often, and on which core the client runs;
/// the loads of the others are those of the first in the same order, under other names.
///
/// # Errors
/// [`ExperimentError`]; no files are left in any case.
pub fn run_in_turn(
    plans: &[Planned<'_>],
    observe: &mut dyn FnMut(Progress<'_>),
) -> Result<Vec<Outcome>, ExperimentError> {
    let Some(Planned { plan: first, .. }) = plans.first() else { return Ok(Vec::new()) };
    let roots: Vec<_> =
        plans.iter().map(|it| root(it.plan, it.systems)).collect::<Result<_, _>>()?;
    let _pinned = Pinned::to(first.cores.map(|cores| cores.client))?;
    let systems: Vec<Vec<_>> =
        plans.iter().map(|it| it.systems.iter().map(|system| system.id()).collect()).collect();
    let turns = turns(&systems);
    let order = subject::Order {
        systems: turns.iter().map(|turn| turn.name).collect(),
        workloads: first.measures(),
        rounds: first.rounds,
        places: first.places,
    };
    let members = plans.iter().zip(&roots).map(|(it, root)| Member {
        disks: Disks::new(it.plan, it.systems, root.path()),
        measures: it.plan.measures(),
        outcome: Outcome::default(),
    });
    let members = members.collect();
    let mut together = InTurn { members, turns, measures: first.measures() };
    // Each sample is with the member that it is of.
    subject::measure(&order, &mut together, observe)?;
    Ok(together.members.into_iter().map(|member| member.outcome).collect())
}

/// A system of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Turn {
    /// Its name in the order.
    name: &'static str,
    member: usize,
    system: &'static str,
}

/// All systems of all plans. Names in an order are kept until the program ends.
fn turns(systems: &[Vec<&'static str>]) -> Vec<Turn> {
    let of = |(member, systems): (usize, &Vec<&'static str>)| {
        let turn = |system: &&'static str| Turn {
            name: format!("{member}-{system}").leak(),
            member,
            system: *system,
        };
        systems.iter().map(turn).collect::<Vec<_>>()
    };
    systems.iter().enumerate().flat_map(of).collect()
}

struct Member<'a> {
    disks: Disks<'a>,
    /// Its names of the loads.
    measures: Vec<&'static str>,
    outcome: Outcome,
}

struct InTurn<'a> {
    members: Vec<Member<'a>>,
    turns: Vec<Turn>,
    /// The names of the loads in the order.
    measures: Vec<&'static str>,
}

impl InTurn<'_> {
    /// The place of a load among all.
    fn place(&self, workload: &str) -> Option<usize> {
        self.measures.iter().position(|it| *it == workload)
    }
}

impl Subject for InTurn<'_> {
    fn prepare(
        &mut self,
        place: u32,
        observe: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), ExperimentError> {
        for member in &mut self.members {
            member.disks.prepare(place, observe)?;
        }
        Ok(())
    }

    fn begin(&mut self, round: u32) -> Result<(), ExperimentError> {
        self.members.iter_mut().try_for_each(|member| member.disks.begin(round))
    }

    fn before(
        &mut self,
        round: u32,
        workload: &'static str,
    ) -> Result<Option<Sample>, ExperimentError> {
        let Some(at) = self.place(workload) else { return Ok(None) };
        for member in &mut self.members {
            let Some(workload) = member.measures.get(at).copied() else { continue };
            let sample = member.disks.before(round, workload)?;
            member.outcome.extend(sample);
        }
        Ok(None)
    }

    fn run(&mut self, point: &Point) -> Result<Option<Sample>, ExperimentError> {
        let turn = self.turns.iter().find(|turn| turn.name == point.system).copied();
        let (Some(turn), Some(at)) = (turn, self.place(point.workload)) else { return Ok(None) };
        let member = &mut self.members[turn.member];
        let Some(workload) = member.measures.get(at).copied() else { return Ok(None) };
        let own = Point { round: point.round, system: turn.system, workload };
        let sample = member.disks.run(&own)?;
        member.outcome.extend(sample);
        Ok(None)
    }

    fn end(&mut self) -> Result<(), ExperimentError> {
        self.members.iter_mut().try_for_each(|member| member.disks.end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_system_of_every_plan_has_a_turn_of_its_own_name() {
        let turns = turns(&[vec!["a", "b"], vec!["a"]]);
        let turn = |name, member, system| Turn { name, member, system };
        assert_eq!(turns, [turn("0-a", 0, "a"), turn("0-b", 0, "b"), turn("1-a", 1, "a")]);
    }
}
