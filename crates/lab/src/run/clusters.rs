//! An experiment on clusters that are set up differently and run at the same time, so that they are measured in turn within
//! each round.
//!
//! ```text
//! for each cluster: choose a directory → make a pool → mount it
//! for each point:   measure those that are there in turn
//! for each cluster: unmount → remove the pool
//! ```

use super::{RunArguments, place};
use crate::ceph::CephError;
use crate::ceph::mount::Mount;
use crate::ceph::own_pool::OwnPool;
use crate::ceph::setup::{self, Setup};
use crate::definition::{Definition, DiskMatrix, DiskSteps};
use crate::experiment::{self, ExperimentError, Outcome, Plan, Planned, Progress, ServedDirectory};
use crate::operation::{self, Found};
use crate::report::{Measured, Unavailable};
use crate::sections::{self, Section};
use crate::systems::System;

/// Why nothing was measured of an experiment whose points are all told by themselves.
const NO_CLUSTER: &str = "none of its clusters can be used";

impl RunArguments {
    /// Measures an experiment, which was named so, on its clusters, each with a pool of its own, which goes again; and why
    /// points are not measured whose cluster cannot be used.
    pub(super) fn on_clusters(
        &self,
        definition: &Definition,
        (matrix, steps): (&DiskMatrix, &DiskSteps),
        named: &str,
        observe: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(Found, Vec<Unavailable>), ExperimentError> {
        let extent = if self.full { steps.full } else { steps.small };
        let definition = definition.within(extent);
        let sections = sections::of_definition(&definition);
        let (mut pools, mut unavailable) = (Vec::new(), Vec::new());
        for &setup in &matrix.clusters {
            let program = self.pool_program();
            let usable = setup::usable(&self.ceph_directory, setup, named);
            let usable = usable.and_then(|it| operation::missing(&[&program]).map_or(Ok(it), Err));
            match usable {
                Ok(directory) => {
                    let pool = OwnPool::make(directory, &mut |it| observe(Progress::Cluster(it)))?;
                    pools.push((setup, pool));
                }
                Err(why) => {
                    let of_it = sections.iter().filter(|it| it.cluster == Some(setup));
                    unavailable
                        .extend(of_it.map(|it| Unavailable { section: it.id, why: why.clone() }));
                }
            }
        }
        if pools.is_empty() {
            let found = (Vec::new(), Vec::new(), Outcome::default(), Some(NO_CLUSTER.to_owned()));
            return Ok((found, unavailable));
        }
        let found = self.in_pools(&definition, &sections, steps, &pools, observe);
        // All are tried before the first failure is told.
        let removed: Vec<_> = pools.into_iter().map(|(_, pool)| pool.remove()).collect();
        // Why measuring failed says more than why a pool stays.
        let found = found?;
        removed.into_iter().collect::<Result<(), _>>()?;
        Ok((found, unavailable))
    }

    /// Measures those sections whose cluster has a pool. The sections of a point follow each other.
    fn in_pools(
        &self,
        definition: &Definition,
        sections: &[Section],
        steps: &DiskSteps,
        pools: &[(Setup, OwnPool)],
        observe: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Found, ExperimentError> {
        let bench = self.bench(if self.full { steps.full } else { steps.small });
        let mounts = self.mounts(pools)?;
        let (mut measured, mut places, mut all) = (Vec::new(), Vec::new(), Outcome::default());
        for point in sections.chunk_by(|one, next| point_of(one) == point_of(next)) {
            let mut members = Vec::new();
            for section in point {
                if let Some(why) = bench.obstacle(section) {
                    return Ok((measured, places, all, Some(why)));
                }
                let mount = mounts.iter().find(|(setup, _)| section.cluster == Some(*setup));
                let Some((_, mount)) = mount else { continue };
                let served = Some(served(mount));
                let plan = Plan { served, ..bench.plan(section) };
                members.push(Member { section, plan, systems: bench.systems(section) });
            }
            let outcomes = measure(&members, observe)?;
            for (outcome, member) in outcomes.into_iter().zip(&members) {
                measured.push(Measured::of(member.section, &member.plan, &outcome));
                places.push(place(definition, member.section));
                all.cells.extend(outcome.cells);
                all.idle.extend(outcome.idle);
            }
        }
        Ok((measured, places, all, None))
    }

    fn mounts(&self, pools: &[(Setup, OwnPool)]) -> Result<Vec<(Setup, Mount)>, CephError> {
        let program = self.pool_program();
        let mount = |(setup, pool): &(Setup, OwnPool)| {
            Mount::new(&program, pool.access()).map(|mount| (*setup, mount))
        };
        pools.iter().map(mount).collect()
    }
}

/// What a mount serves.
pub(super) fn served(mount: &Mount) -> ServedDirectory {
    ServedDirectory { directory: mount.directory().to_owned(), process: mount.process() }
}

/// The name of a section's point, without its cluster.
fn point_of(section: &Section) -> &'static str {
    let cluster = section.cluster.map_or("", Setup::id);
    section.id.strip_suffix(cluster).unwrap_or(section.id)
}

/// A section, and how it is measured.
struct Member<'a> {
    section: &'a Section,
    plan: Plan,
    systems: Vec<Box<dyn System>>,
}

/// Measures sections of one point in turn.
fn measure(
    members: &[Member<'_>],
    observe: &mut dyn FnMut(Progress<'_>),
) -> Result<Vec<Outcome>, ExperimentError> {
    let plans: Vec<_> =
        members.iter().map(|it| Planned { plan: &it.plan, systems: &it.systems }).collect();
    for Member { section, .. } in members {
        observe(Progress::Section(section.id, section.title));
    }
    experiment::run_in_turn(&plans, &mut |progress| {
        if members.iter().all(|it| it.section.tells(progress)) {
            observe(progress);
        }
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::Parser;

    use super::*;
    use crate::claim::ClaimVerdict;
    use crate::definition::{AxisValue, CLUSTERS, Matter};
    use crate::goals::tests::cell;
    use crate::{catalogue, claim, run};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: RunArguments,
    }

    fn small(id: &str) -> (Definition, Vec<Section>) {
        let definition = catalogue::find(id).unwrap();
        let Matter::Disk(_, steps) = &definition.matter else { panic!("{id}") };
        let small = definition.within(steps.small);
        let sections = sections::of_definition(&small);
        (small, sections)
    }

    #[test]
    fn points_without_a_cluster_are_not_measured_and_say_how_to_make_one() {
        let arguments = Line::try_parse_from(["run", "c3"]).unwrap_or_else(|it| panic!("{it}"));
        let report = run::run(&arguments.arguments, &mut |_| {}).unwrap();
        let experiment = &report.experiments[0];
        assert_eq!((experiment.measured.len(), experiment.claim.is_none()), (0, true));
        let points: Vec<_> = experiment.unavailable.iter().map(|it| it.section).collect();
        assert_eq!(points, ["c3-crc", "c3-secure", "c3-osd"]);
        for text in [report.show(), report.page()] {
            for part in
                [NO_CLUSTER, "c3-secure: it needs", "--messenger secure", "--osd-encryption"]
            {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
    }

    #[test]
    fn the_clusters_of_a_point_are_measured_together() {
        let (definition, sections) = small("c3");
        let points: Vec<_> = sections
            .chunk_by(|one, next| point_of(one) == point_of(next))
            .map(|point| point.iter().map(|it| it.id).collect::<Vec<_>>())
            .collect();
        assert_eq!(points, [["c3-crc", "c3-secure", "c3-osd"]]);
        // As few clients, and as few requests, as a small machine stands.
        assert_eq!((sections[0].disks, sections[0].workloads[0].depth), (2, 16));
        let secure = place(&definition, &sections[1]);
        assert_eq!(secure.axes.get(CLUSTERS), Some(&AxisValue::from("secure")));
        assert_eq!(secure.loads, ["c3-4m-random-read", "c3-4m-random-write"]);
    }

    /// Each check of a claim finds what it compares, and is about one row and one load of the document.
    #[test]
    fn every_percentage_of_the_document_has_a_pair_of_points() {
        for number in 1..=7 {
            let (definition, sections) = small(&format!("c{number}"));
            let claim = definition.claim.clone().unwrap();
            let places: Vec<_> = sections.iter().map(|it| place(&definition, it)).collect();
            let of_section = |section: &Section| {
                let loads = section.workloads.iter().map(|load| load.id);
                let pairs =
                    loads.flat_map(|load| section.systems.iter().map(move |it| (*it, load)));
                pairs.collect::<Vec<_>>()
            };
            // Everywhere as fast as in the clear.
            let cells = sections.iter().flat_map(of_section).flat_map(|(system, load)| {
                (0..5).map(move |round| cell(round, system, load, 100.0))
            });
            let outcome = Outcome { cells: cells.collect(), ..Outcome::default() };
            let assessed = claim::assess(&claim, &places, &outcome, 2);
            assert_eq!(assessed.verdict, ClaimVerdict::Met, "c{number}: {:?}", assessed.found);
            let pairs = assessed.found.iter().map(|it| {
                let goal = &it.goal;
                (goal.workload.clone(), goal.numerator.clone(), goal.beside.clone())
            });
            assert_eq!(pairs.collect::<BTreeSet<_>>().len(), claim.checks.len(), "c{number}");
            assert_eq!(assessed.found.len(), claim.checks.len(), "c{number}");
        }
    }
}
