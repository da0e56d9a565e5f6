//! The sections of the benchmark. Each has its systems, its loads and its kind of storage, and is
//! measured by itself: comparisons are made within a section. They come from the files of experiments
//! ([`crate::definition`]).

use std::sync::LazyLock;

use crate::catalogue::CATALOGUE;
use crate::ceph::redundancy::Raid;
use crate::ceph::setup::Setup;
use crate::definition::{Definition, LoadSpec, Matter};
use crate::experiment::Progress;
use crate::idle::IDLE;
use crate::load::Workload;
pub use crate::storage::Storage;
use crate::systems::Transport;
pub use crate::systems::{MORE_SYSTEMS, SYSTEMS};

/// Systems that are measured together.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    /// Its name.
    pub id: &'static str,
    /// Its title.
    pub title: &'static str,
    /// The storage of its disks.
    pub storage: Storage,
    /// How they are served.
    pub transport: Transport,
    /// Its systems, of [`SYSTEMS`].
    pub systems: &'static [&'static str],
    /// Its loads.
    pub workloads: &'static [Workload],
    /// Whether its disks are also measured without work.
    pub idle: bool,
    /// Whether large loads are compared with the computed limit.
    pub limit: bool,
    /// How many shorter rounds replace each round: values that are compared are then closer in time, and more
    /// rounds give narrower bounds.
    pub cuts: u32,
    /// How often the disks are made: where a file is on a device matters more than the differences in
    /// question (docs/benchmarks.md).
    pub places: u32,
    /// How many disks a server has, each with a client of its own.
    pub disks: u32,
    /// How many clients of Ceph there are: each mounts the pool for itself, and has a server of its own.
    pub clients: u32,
    /// The latency that is added to the storage, in microseconds.
    pub delay_us: u64,
    /// How many CPU-bound threads share the server's core.
    pub neighbours: u32,
    /// How the pool keeps its disks, where redundancies are compared.
    pub redundancy: Option<Raid>,
    /// How the cluster is set up whose pool has the disks, where an experiment tells clusters apart.
    pub cluster: Option<Setup>,
}

/// The ids of what `vmseal lab disk` runs.
const OF_LAB_DISK: [&str; 4] = ["memory", "ext4", "scaling", "nbd"];

/// What `vmseal lab disk` runs; each is an experiment without axes, so it is one section.
pub static SECTIONS: LazyLock<Vec<Section>> = LazyLock::new(|| {
    let of = |id: &&str| CATALOGUE.iter().find(|it| it.id == *id).map(of_definition);
    OF_LAB_DISK.iter().filter_map(of).flatten().collect()
});

/// The sections of an experiment with disks: one for each combination of its axes; those that differ in their pool alone
/// follow each other. An axis with several values is part of the names. Names are kept until the program ends, as those of
/// the sections that are built in.
#[must_use]
pub fn of_definition(definition: &Definition) -> Vec<Section> {
    let Matter::Disk(matrix, steps) = &definition.matter else { return Vec::new() };
    let known = SYSTEMS.into_iter().chain(MORE_SYSTEMS);
    let mut systems: Vec<&'static str> =
        known.filter(|id| matrix.systems.iter().any(|chosen| chosen == id)).collect();
    systems.sort_by_key(|id| matrix.systems.iter().position(|chosen| chosen == id));
    let systems: &'static [&'static str] = systems.leak();
    let (clusters, redundancies) = (or_none(&matrix.clusters), or_none(&matrix.redundancy));
    let pools: Vec<_> = pairs(&clusters, &redundancies).collect();
    let mut sections = Vec::new();
    for (clients, disks) in pairs(&matrix.clients, &matrix.disks) {
        for &delay_us in &matrix.delay_us {
            for (neighbours, (cluster, redundancy)) in pairs(&matrix.neighbours, &pools) {
                let mut suffix = String::new();
                for (name, value, values) in [
                    ("clients", u64::from(clients), matrix.clients.len()),
                    ("disks", u64::from(disks), matrix.disks.len()),
                    ("us", delay_us, matrix.delay_us.len()),
                    ("neighbours", u64::from(neighbours), matrix.neighbours.len()),
                ] {
                    if values > 1 {
                        suffix.push_str(&format!("-{value}-{name}"));
                    }
                }
                if let Some(cluster) = cluster.filter(|_| clusters.len() > 1) {
                    suffix.push_str(&format!("-{cluster}"));
                }
                if let Some(raid) = redundancy.filter(|_| redundancies.len() > 1) {
                    suffix.push_str(&format!("-{raid}"));
                }
                let workload = |load: &LoadSpec| Workload {
                    id: format!("{}{suffix}", load.id).leak(),
                    order: load.order,
                    direction: load.direction,
                    block: load.block,
                    depth: load.depth,
                };
                let workloads: Vec<_> = matrix.loads.iter().map(workload).collect();
                sections.push(Section {
                    id: format!("{}{suffix}", definition.id).leak(),
                    title: definition.title.clone().leak(),
                    storage: steps.storage,
                    transport: steps.transport,
                    systems,
                    workloads: workloads.leak(),
                    idle: steps.idle,
                    limit: steps.limit,
                    cuts: steps.cuts,
                    places: steps.places,
                    disks,
                    clients,
                    delay_us,
                    neighbours,
                    cluster,
                    redundancy,
                });
            }
        }
    }
    sections
}

/// The values of an axis; none is one of an axis that has none.
fn or_none<T: Copy>(values: &[T]) -> Vec<Option<T>> {
    match values.is_empty() {
        true => vec![None],
        false => values.iter().copied().map(Some).collect(),
    }
}

/// Each of the first with each of the second, which change first.
fn pairs<A: Copy, B: Copy>(first: &[A], second: &[B]) -> impl Iterator<Item = (A, B)> {
    first.iter().flat_map(|one| second.iter().map(|other| (*one, *other)))
}

impl Section {
    /// Whether it differs from another one of the same experiment in its pool alone: they are measured in turn.
    #[must_use]
    pub fn is_beside(&self, other: &Self) -> bool {
        let place = |it: &Self| (it.clients, it.disks, it.delay_us, it.neighbours);
        place(self) == place(other)
    }

    /// Whether to print a progress line for this: with many short rounds, only some.
    #[must_use]
    pub fn tells(&self, progress: Progress<'_>) -> bool {
        match progress {
            Progress::Round(round, _) => (round - 1).is_multiple_of(self.cuts),
            Progress::Section(..)
            | Progress::Filling(_)
            | Progress::Making(_)
            | Progress::Cluster(_) => true,
        }
    }
}

/// The names of all loads, and of the measurement without work.
#[must_use]
pub fn workload_ids() -> Vec<&'static str> {
    let of = |section: &Section| section.workloads.iter().map(|workload| workload.id);
    SECTIONS.iter().flat_map(of).chain([IDLE]).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[test]
    fn a_name_means_one_thing() {
        let ids = workload_ids();
        assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "{ids:?}");
        let named: BTreeSet<_> = SECTIONS.iter().flat_map(|section| section.systems).collect();
        assert_eq!(named, SYSTEMS.iter().collect());
        assert_eq!(SECTIONS.iter().filter(|section| section.idle).count(), 1);
    }

    #[test]
    fn redundancies_are_beside_each_other_and_part_of_the_names() {
        let mut definition = crate::catalogue::find("h").unwrap();
        let Matter::Disk(matrix, _) = &mut definition.matter else { panic!("h is about disks") };
        matrix.disks = vec![1, 2];
        let sections = of_definition(&definition);
        let ids: Vec<_> = sections.iter().map(|section| section.id).collect();
        assert_eq!(
            ids,
            ["h-1-disks-raid1", "h-1-disks-raid6", "h-2-disks-raid1", "h-2-disks-raid6"]
        );
        let together: Vec<_> = sections.chunk_by(Section::is_beside).map(<[_]>::len).collect();
        assert_eq!(together, [2, 2]);
        assert_eq!(sections[1].redundancy, Some(Raid::Raid6));
        assert!(sections[1].workloads[0].id.ends_with("-1-disks-raid6"), "{:?}", sections[1]);
        let one = of_definition(&crate::catalogue::find("v6").unwrap());
        assert!(one.iter().all(|section| section.redundancy.is_none()));
        assert_eq!(one.chunk_by(Section::is_beside).count(), one.len());
    }

    #[test]
    fn of_many_short_rounds_only_some_are_announced() {
        let told = |cuts| {
            let section = Section { cuts, ..SECTIONS[0] };
            (1..=20).filter(|round| section.tells(Progress::Round(*round, 20))).collect::<Vec<_>>()
        };
        assert_eq!(told(10), [1, 11]);
        assert_eq!(told(1).len(), 20);
    }

    #[test]
    fn clusters_are_part_of_the_names_and_follow_each_other() {
        let sections = |clusters: &str| {
            let file = include_str!("../../../bench/experiments/c3.toml");
            let axes = "clusters = [\"crc\", \"secure\", \"osd\"]\nredundancy = [\"raid1\"]";
            let text = file.replacen(axes, clusters, 1);
            assert_ne!(text, file);
            let (clients, some) = ("clients = [8]", "clients = [1, 2]");
            assert!(text.contains(clients));
            // Only the names are looked at: claims about clusters that are not there would be refused.
            let (text, _) = text.split_once("[claim]").unwrap();
            let text = text.replacen(clients, some, 1);
            let path = Path::new("mine.toml");
            of_definition(&crate::definition::parse(path, &text).unwrap())
        };
        let named = sections("clusters = [\"crc\", \"osd\"]");
        let ids: Vec<_> = named.iter().map(|section| section.id).collect();
        assert_eq!(
            ids,
            ["c3-1-clients-crc", "c3-1-clients-osd", "c3-2-clients-crc", "c3-2-clients-osd"]
        );
        assert_eq!((named[2].clients, named[2].disks), (2, 1));
        assert_eq!(named[1].cluster, Some(Setup::Osd));
        assert!(named[1].workloads.iter().all(|load| load.id.ends_with("-1-clients-osd")));
        let one = sections("clusters = [\"secure\"]");
        assert_eq!((one[0].id, one[0].cluster), ("c3-1-clients", Some(Setup::Secure)));
        let both = sections("clusters = [\"crc\", \"osd\"]\nredundancy = [\"raid1\", \"raid6\"]");
        let ids: Vec<_> = both.iter().take(4).map(|section| section.id).collect();
        assert_eq!(
            ids,
            [
                "c3-1-clients-crc-raid1",
                "c3-1-clients-crc-raid6",
                "c3-1-clients-osd-raid1",
                "c3-1-clients-osd-raid6"
            ]
        );
        let together: Vec<_> = both.chunk_by(Section::is_beside).map(<[_]>::len).collect();
        assert_eq!(together, [4, 4]);
        let first = sections("");
        assert_eq!((first[0].id, first[0].cluster, first.len()), ("c3-1-clients", None, 2));
    }

    #[test]
    fn ext4_is_recognised() {
        assert_eq!(Storage::Memory.obstacle(Path::new("/nonexistent")), None);
        let missing = Storage::Ext4.obstacle(Path::new("/nonexistent")).unwrap();
        assert!(missing.contains("/nonexistent cannot be used: No such file"), "{missing}");
        let wrong = Storage::Ext4.obstacle(Path::new("/proc")).unwrap();
        assert!(wrong.contains("/proc is on proc, not on ext4"), "{wrong}");
    }
}
