//! The sealed files of a VM that are beside its first disk: the memory of its guest, that of its snapshots, its core dumps. When the
//! disk is copied they are copied, too.
//!
//! ```text
//! vm.memory              DISK.copy-memory-vm    DISK.source-memory-vm
//! vm.memory.snapshot-S   DISK.copy-memory-S     DISK.source-memory-S
//! vm.core-NAME           DISK.copy-core-NAME    DISK.source-core-NAME
//! ```

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use vmseal_api::dump::DumpFormat;
use vmseal_api::id::{DiskId, DumpId, SnapshotId};
use vmseal_api::problem::Problem;

use super::{CORE, Home, MEMORY, PANIC_CORE, SNAPSHOT_MEMORY};
use crate::storage::file_error::failed;

/// What the names have, behind the disk, of those that are to take their places with its copy.
const COPY: &str = "copy-";

/// The same of what they were before.
const SOURCE: &str = "source-";

/// What the names of copies of memories have behind that, before the snapshot.
const OF_MEMORY: &str = "memory-";

/// The same of the VM's own.
const OF_VM: &str = "memory-vm";

/// The same of core dumps.
const OF_CORE: &str = "core-";

/// A file beside a VM's first disk. Those of snapshots are copied first, as they were always copied.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Beside {
    /// The memory that a snapshot keeps.
    SnapshotMemory(SnapshotId),
    /// The memory of the VM, which is suspended.
    Memory,
    /// A core dump, by what its name has behind `vm.core-`.
    Core(String),
}

impl Beside {
    /// Which file has this name; none for one that is not whole, and for any other.
    fn named(name: &str) -> Option<Self> {
        if name == MEMORY {
            return Some(Self::Memory);
        }
        match name.strip_prefix(SNAPSHOT_MEMORY) {
            Some(snapshot) => snapshot.parse().ok().map(Self::SnapshotMemory),
            None => Self::core(name.strip_prefix(CORE)?),
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Memory => MEMORY.to_owned(),
            Self::SnapshotMemory(snapshot) => format!("{SNAPSHOT_MEMORY}{snapshot}"),
            Self::Core(name) => format!("{CORE}{name}"),
        }
    }

    /// Which file this is a copy of, by what the name has behind that of the disk and of the copy.
    fn ended(ending: &str) -> Option<Self> {
        if ending == OF_VM {
            return Some(Self::Memory);
        }
        match ending.strip_prefix(OF_MEMORY) {
            Some(snapshot) => snapshot.parse().ok().map(Self::SnapshotMemory),
            None => Self::core(ending.strip_prefix(OF_CORE)?),
        }
    }

    fn ending(&self) -> String {
        match self {
            Self::Memory => OF_VM.to_owned(),
            Self::SnapshotMemory(snapshot) => format!("{OF_MEMORY}{snapshot}"),
            Self::Core(name) => format!("{OF_CORE}{name}"),
        }
    }

    fn core(name: &str) -> Option<Self> {
        let (dump, ending) = match name.split_once('.') {
            Some((dump, ending)) => (dump, Some(ending)),
            None => (name, None),
        };
        dump.parse::<DumpId>().ok()?;
        let formats = [DumpFormat::Elf, DumpFormat::Kdump].map(DumpFormat::name);
        let of_panic = |ending: &str| {
            ending.strip_prefix(PANIC_CORE).is_some_and(|format| formats.contains(&format))
        };
        ending.is_none_or(of_panic).then(|| Self::Core(name.to_owned()))
    }
}

impl Home {
    /// Where a file is that is beside the VM's first disk.
    #[must_use]
    pub fn beside(&self, what: &Beside) -> PathBuf {
        self.path.join(what.name())
    }

    /// What takes its place with the copy of that disk.
    #[must_use]
    pub fn copy_beside(&self, disk: DiskId, what: &Beside) -> PathBuf {
        self.path.join(format!("{disk}.{COPY}{}", what.ending()))
    }

    /// What it was before.
    #[must_use]
    pub fn source_beside(&self, disk: DiskId, what: &Beside) -> PathBuf {
        self.path.join(format!("{disk}.{SOURCE}{}", what.ending()))
    }

    /// All such files here that are whole.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn all_beside(&self) -> Result<BTreeMap<Beside, PathBuf>, Problem> {
        self.those(Beside::named)
    }

    /// Those that are to take their places with the copy of a disk.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn copies_beside(&self, disk: DiskId) -> Result<BTreeMap<Beside, PathBuf>, Problem> {
        let prefix = format!("{disk}.{COPY}");
        self.those(|name| Beside::ended(name.strip_prefix(&prefix)?))
    }

    /// What they were before the copy of a disk took its place.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn sources_beside(&self, disk: DiskId) -> Result<BTreeMap<Beside, PathBuf>, Problem> {
        let prefix = format!("{disk}.{SOURCE}");
        self.those(|name| Beside::ended(name.strip_prefix(&prefix)?))
    }

    /// Removes files that were to be beside a disk's copy and are not whole.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn remove_unfinished_beside(&self, disk: DiskId) -> Result<(), Problem> {
        self.unfinished_beside(disk).iter().try_for_each(|path| self.remove_note(path))
    }

    pub(super) fn unfinished_beside(&self, disk: DiskId) -> Vec<PathBuf> {
        let prefixes = [OF_MEMORY, OF_CORE].map(|of| format!("{disk}.{COPY}{of}"));
        let entries = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
        let unfinished = entries.filter(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            name.ends_with(".new") && prefixes.iter().any(|prefix| name.starts_with(prefix))
        });
        unfinished.map(|entry| entry.path()).collect()
    }

    /// The files here whose names say which they are.
    fn those(
        &self,
        which: impl Fn(&str) -> Option<Beside>,
    ) -> Result<BTreeMap<Beside, PathBuf>, Problem> {
        let entries = match std::fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            Err(error) => return Err(failed(&self.path, "read", &error)),
        };
        let mut found = BTreeMap::new();
        for entry in entries {
            let entry = entry.map_err(|error| failed(&self.path, "read", &error))?;
            if let Some(what) = entry.file_name().to_str().and_then(&which) {
                found.insert(what, entry.path());
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_their_copies_are_known_by_their_names() {
        let directory = tempfile::tempdir().unwrap();
        let home = Home { path: directory.path().to_owned() };
        let (disk, other) = (DiskId::new(), DiskId::new());
        let (snapshot, dump) = (SnapshotId::new(), DumpId::new());
        let all = [
            Beside::SnapshotMemory(snapshot),
            Beside::Memory,
            Beside::Core(dump.to_string()),
            Beside::Core(format!("{dump}.panic-kdump")),
        ];
        for what in &all {
            for path in
                [home.beside(what), home.copy_beside(disk, what), home.source_beside(disk, what)]
            {
                std::fs::write(path, []).unwrap();
            }
        }
        // Others, or not whole.
        for name in [
            "vm.memory.creating".to_owned(),
            "vm.memory.used".to_owned(),
            "vm.memory.snapshot-x".to_owned(),
            format!("vm.memory.snapshot-{snapshot}.creating"),
            format!("vm.core-{dump}.creating"),
            format!("vm.core-{dump}.panic-kdump.creating"),
            format!("vm.core-{dump}.panic-x"),
            format!("{disk}.copy-memory-vm.new"),
            format!("{disk}.copy-core-{dump}.new"),
            format!("{disk}.copy-memory-{snapshot}.new"),
            format!("{disk}.copy-layers"),
            format!("{disk}.copy"),
            format!("{disk}.source-layers"),
            format!("{other}.copy-memory-vm"),
        ] {
            std::fs::write(home.path.join(name), []).unwrap();
        }
        let keys = |of: BTreeMap<Beside, PathBuf>| of.into_keys().collect::<Vec<_>>();
        let mut expected = all.to_vec();
        expected.sort();
        assert_eq!(keys(home.all_beside().unwrap()), expected);
        assert_eq!(keys(home.copies_beside(disk).unwrap()), expected);
        assert_eq!(keys(home.sources_beside(disk).unwrap()), expected);
        assert_eq!(keys(home.copies_beside(other).unwrap()), [Beside::Memory]);
        assert_eq!(home.unfinished_beside(disk).len(), 3);
        home.remove_unfinished_beside(disk).unwrap();
        assert_eq!(home.unfinished_beside(disk), Vec::<PathBuf>::new());
        assert_eq!(keys(home.copies_beside(disk).unwrap()), expected);
    }
}
