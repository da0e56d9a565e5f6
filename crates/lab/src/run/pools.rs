//! The pools of Ceph that an experiment has for itself: in each cluster that it is measured on one for each redundancy. All are
//! there, and mounted, at the same time, so that they are measured in turn within each round.
//!
//! ```text
//! for each cluster: choose a directory → make pools
//! mount all, once for each client → measure the points that have a pool → unmount all
//! for each cluster: remove its pools
//! ```

use std::path::{Path, PathBuf};

use vmseal_api::datastore::RbdPool;

use super::{MeasuredCluster, One, RunArguments};
use crate::ceph::mount::Mount;
use crate::ceph::own_pool::{self, OwnPool};
use crate::ceph::redundancy::Raid;
use crate::ceph::setup::{self, Setup};
use crate::definition::Definition;
use crate::experiment::{ExperimentError, Outcome, Progress, ServedDirectory};
use crate::operation;
use crate::report::Unavailable;
use crate::sections::{self, Section};

/// Why nothing was measured of an experiment whose points are all told by themselves.
const NO_CLUSTER: &str = "no cluster that is given fits any of its points";

/// The pools in a cluster, which is named where an experiment tells clusters apart.
pub(super) type InCluster = (Option<Setup>, OwnPool);

/// The pools of an experiment.
struct Pools {
    made: Vec<InCluster>,
    /// The points that have none, and why.
    unavailable: Vec<Unavailable>,
    /// Why there is none at all.
    refused: Option<String>,
}

/// A pool that is mounted, once for each client.
pub(super) struct Stored {
    cluster: Option<Setup>,
    redundancy: Option<Raid>,
    /// How a client gets to it.
    pub(super) access: RbdPool,
    /// The processes that store what is in it.
    daemons: Vec<u32>,
    /// It is unmounted with them.
    mounts: Vec<Mount>,
}

impl Stored {
    /// Whether it has the disks of a section.
    pub(super) fn has(&self, section: &Section) -> bool {
        (self.cluster, self.redundancy) == (section.cluster, section.redundancy)
    }

    /// Where the clients of a section have their disks.
    pub(super) fn served(&self, section: &Section) -> Vec<ServedDirectory> {
        let served = |mount: &Mount| ServedDirectory {
            directory: mount.directory().to_owned(),
            channel: mount.channel().to_owned(),
            process: mount.process(),
            daemons: self.daemons.clone(),
        };
        self.mounts.iter().take(section.clients as usize).map(served).collect()
    }
}

/// The points of a cluster that have no pool there: all, or those of a redundancy.
fn without(
    sections: &[Section],
    cluster: Option<Setup>,
    raid: Option<Raid>,
    why: &str,
) -> Vec<Unavailable> {
    let of_it = sections.iter().filter(|it| it.cluster == cluster);
    let of_it = of_it.filter(|it| raid.is_none() || it.redundancy == raid);
    of_it.map(|it| Unavailable { section: it.id, why: why.to_owned() }).collect()
}

impl RunArguments {
    /// Measures an experiment, which was named so, in pools of its own, which go again; and why points without a pool are not
    /// measured.
    pub(super) fn on_ceph(
        &self,
        definition: &Definition,
        named: &str,
        observe: &mut dyn FnMut(Progress<'_>),
    ) -> Result<One, ExperimentError> {
        let Pools { made, unavailable, refused } = self.pools(definition, named, observe)?;
        if refused.is_some() {
            let nothing = (Vec::new(), Vec::new(), Outcome::default(), refused);
            return Ok((nothing, unavailable, Vec::new()));
        }
        let cluster = |(setup, pool): &InCluster| MeasuredCluster {
            setup: *setup,
            release: pool.release().to_owned(),
        };
        let clusters = made.iter().map(cluster).collect();
        let found = self.measure(definition, &made, observe);
        // All are tried before the first failure is told.
        let removed: Vec<_> = made.into_iter().map(|(_, pool)| pool.remove()).collect();
        // Why measuring failed says more than why a pool stays.
        let found = found?;
        removed.into_iter().collect::<Result<(), _>>()?;
        Ok((found, unavailable, clusters))
    }

    /// Makes the pools of an experiment, of those points that have a cluster with enough OSDs.
    fn pools(
        &self,
        definition: &Definition,
        named: &str,
        observe: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Pools, ExperimentError> {
        let sections = sections::of_definition(definition);
        let (mut made, mut unavailable) = (Vec::new(), Vec::new());
        for cluster in definition.clusters_or_first() {
            let directory = match self.directory_of(cluster, named) {
                Ok(directory) => directory,
                Err(why) if cluster.is_none() => {
                    return Ok(Pools { made, unavailable, refused: Some(why) });
                }
                Err(why) => {
                    unavailable.extend(without(&sections, cluster, None, &why));
                    continue;
                }
            };
            let (raids, others) = own_pool::fitting(directory, definition.redundancy())?;
            for (raid, why) in &others {
                unavailable.extend(without(&sections, cluster, Some(*raid), why));
            }
            if raids.is_empty() && !others.is_empty() {
                continue;
            }
            let observe = &mut |it: &_| observe(Progress::Cluster(it));
            made.push((cluster, OwnPool::make(directory, &raids, observe)?));
        }
        let refused = made.is_empty().then(|| NO_CLUSTER.to_owned());
        Ok(Pools { made, unavailable, refused })
    }

    /// The directory of a cluster that is set up so and can be measured on, without a setup the first that is given; else why
    /// an experiment, which was named so, cannot be measured there.
    pub(super) fn directory_of(
        &self,
        cluster: Option<Setup>,
        named: &str,
    ) -> Result<&Path, String> {
        let usable = match cluster {
            Some(setup) => setup::usable(&self.ceph_directory, setup, named),
            None => own_pool::usable(self.ceph_directory.first().map(PathBuf::as_path), named),
        };
        let program = self.pool_program();
        usable.and_then(|it| operation::missing(&[&program]).map_or(Ok(it), Err))
    }

    /// Mounts all pools, each once for each of so many clients.
    pub(super) fn mount(
        &self,
        pools: &[InCluster],
        clients: u32,
    ) -> Result<Vec<Stored>, ExperimentError> {
        let program = self.pool_program();
        let mut stored = Vec::new();
        for (cluster, pool) in pools {
            let daemons = pool.osds();
            for (redundancy, access) in pool.accesses() {
                let mounts = (0..clients).map(|_| Mount::new(&program, access));
                let mounts = mounts.collect::<Result<Vec<_>, _>>()?;
                let (cluster, redundancy, access) = (*cluster, *redundancy, access.clone());
                let daemons = daemons.clone();
                stored.push(Stored { cluster, redundancy, access, daemons, mounts });
            }
        }
        Ok(stored)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::Parser;

    use super::*;
    use crate::claim::ClaimVerdict;
    use crate::definition::{AxisValue, CLUSTERS, REDUNDANCY};
    use crate::goals::tests::cell;
    use crate::run::place;
    use crate::{catalogue, claim, run};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: RunArguments,
    }

    fn small(id: &str) -> (Definition, Vec<Section>) {
        let small = catalogue::find(id).unwrap().within(false);
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
    fn of_a_cluster_with_few_osds_only_the_points_of_that_redundancy_are_left_out() {
        let (_, of_h) = small("h");
        let points = |sections: &[Section], cluster, raid| {
            let left_out = without(sections, cluster, raid, "why");
            assert!(left_out.iter().all(|it| it.why == "why"));
            left_out.iter().map(|it| it.section).collect::<Vec<_>>()
        };
        assert_eq!(points(&of_h, None, Some(Raid::Raid6)), ["h-raid6"]);
        let (_, of_c3) = small("c3");
        assert_eq!(points(&of_c3, Some(Setup::Osd), Some(Raid::Raid1)), ["c3-osd"]);
        assert_eq!(points(&of_c3, Some(Setup::Osd), Some(Raid::Raid6)), [] as [&str; 0]);
        assert_eq!(points(&of_c3, Some(Setup::Secure), None), ["c3-secure"]);
    }

    #[test]
    fn the_clusters_of_a_point_are_measured_together() {
        let (definition, sections) = small("c3");
        let points: Vec<_> = sections
            .chunk_by(Section::is_beside)
            .map(|point| point.iter().map(|it| it.id).collect::<Vec<_>>())
            .collect();
        assert_eq!(points, [["c3-crc", "c3-secure", "c3-osd"]]);
        // As few clients, and as few requests, as a small machine stands.
        assert_eq!((sections[0].clients, sections[0].disks), (2, 1));
        assert_eq!(sections[0].workloads[0].depth, 16);
        let secure = place(&definition, &sections[1]);
        assert_eq!(secure.axes.get(CLUSTERS), Some(&AxisValue::from("secure")));
        assert_eq!(secure.axes.get(REDUNDANCY), Some(&AxisValue::from("raid1")));
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
