//! The sections of the benchmark. Each has its systems, its loads and its kind of storage, and is an
//! experiment by itself: comparisons are made within a section.

use std::path::Path;

use nix::sys::statfs::{EXT4_SUPER_MAGIC, statfs};
use serde::Serialize;

use crate::experiment::Progress;
use crate::idle::IDLE;
use crate::load::{Direction, Order, Workload};
use crate::systems::Transport;

/// The systems under test, by name.
pub const SYSTEMS: [&str; 7] = [
    "vmseal-encrypted",
    "vmseal-plain",
    "storage-daemon-plain",
    "storage-daemon-luks",
    "vmseal-encrypted-8-disks",
    "nbdkit-plain",
    "nbdkit-luks",
];

/// The storage of disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Storage {
    /// In files whose pages are in memory.
    Memory,
    /// In files on ext4 that are accessed without the page cache.
    Ext4,
}

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
}

/// What `vmseal lab disk` runs.
pub const SECTIONS: [Section; 4] = [
    Section {
        id: "memory",
        title: "in memory, to a guest",
        storage: Storage::Memory,
        transport: Transport::VhostUser,
        systems: &[
            "vmseal-encrypted",
            "vmseal-plain",
            "storage-daemon-plain",
            "storage-daemon-luks",
        ],
        workloads: &[
            random("4k-random-read", Direction::Read),
            random("4k-random-write", Direction::Write),
            sequential("512k-sequential-read", Direction::Read),
            sequential("512k-sequential-write", Direction::Write),
            // One request at a time: the latency counts.
            Workload { depth: 1, ..random("4k-alone-read", Direction::Read) },
            Workload { depth: 1, ..random("4k-alone-write", Direction::Write) },
            // For the growth of the server's memory.
            Workload { depth: 128, ..sequential("512k-deep-write", Direction::Write) },
        ],
        idle: true,
        limit: true,
        cuts: 10,
        places: 1,
    },
    Section {
        id: "ext4",
        title: "on a device, past the page cache, to a guest",
        storage: Storage::Ext4,
        transport: Transport::VhostUser,
        systems: &["vmseal-encrypted", "vmseal-plain", "storage-daemon-plain"],
        workloads: &[
            random("ext4-4k-random-read", Direction::Read),
            random("ext4-4k-random-write", Direction::Write),
            sequential("ext4-512k-sequential-read", Direction::Read),
            sequential("ext4-512k-sequential-write", Direction::Write),
        ],
        idle: false,
        limit: false,
        cuts: 10,
        places: 5,
    },
    Section {
        id: "scaling",
        title: "in memory, one disk and eight of the same size together, each with its queue and its client",
        storage: Storage::Memory,
        transport: Transport::VhostUser,
        systems: &["vmseal-encrypted", "vmseal-encrypted-8-disks"],
        workloads: &[random("scaling-4k-random-read", Direction::Read)],
        idle: false,
        limit: false,
        cuts: 10,
        places: 1,
    },
    Section {
        id: "nbd",
        title: "in memory, to a tool with one connection",
        storage: Storage::Memory,
        transport: Transport::Nbd,
        systems: &["vmseal-encrypted", "vmseal-plain", "nbdkit-plain", "nbdkit-luks"],
        workloads: &[
            random("nbd-4k-random-read", Direction::Read),
            random("nbd-4k-random-write", Direction::Write),
        ],
        idle: false,
        limit: false,
        cuts: 5,
        places: 1,
    },
];

const fn random(id: &'static str, direction: Direction) -> Workload {
    Workload { id, order: Order::Random, direction, block: 4096, depth: 32 }
}

const fn sequential(id: &'static str, direction: Direction) -> Workload {
    Workload { id, order: Order::Sequential, direction, block: 512 * 1024, depth: 8 }
}

impl Section {
    /// Whether to print a progress line for this: with many short rounds, only some.
    #[must_use]
    pub fn tells(&self, progress: Progress<'_>) -> bool {
        match progress {
            Progress::Round(round, _) => (round - 1).is_multiple_of(self.cuts),
            Progress::Section(..) | Progress::Filling(_) => true,
        }
    }
}

/// The names of all loads, and of the measurement without work.
#[must_use]
pub fn workload_ids() -> Vec<&'static str> {
    let of = |section: &Section| section.workloads.iter().map(|workload| workload.id);
    SECTIONS.iter().flat_map(of).chain([IDLE]).collect()
}

impl Storage {
    /// Why this kind of storage is unavailable in a directory; none if it is available.
    #[must_use]
    pub fn obstacle(self, directory: &Path) -> Option<String> {
        if self == Self::Memory {
            return None;
        }
        let at = directory.display();
        match statfs(directory) {
            Err(errno) => Some(format!("{at} cannot be used: {}", errno.desc())),
            // ext2 and ext3 have the same number.
            Ok(found) if found.filesystem_type() == EXT4_SUPER_MAGIC => None,
            Ok(_) => {
                let kind = crate::machine::file_system(directory);
                Some(format!(
                    "{at} is on {kind}, not on ext4; choose another with --ext4-directory"
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

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
    fn of_many_short_rounds_only_some_are_announced() {
        let told = |cuts| {
            let section = Section { cuts, ..SECTIONS[0] };
            (1..=20).filter(|round| section.tells(Progress::Round(*round, 20))).collect::<Vec<_>>()
        };
        assert_eq!(told(10), [1, 11]);
        assert_eq!(told(1).len(), 20);
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
