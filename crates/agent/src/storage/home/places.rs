//! Where the files of a VM are in its directory.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use uuid::Uuid;
use vmseal_api::id::{DiskId, DumpId, MigrationId, SnapshotId, TaskId, VmId};
use vmseal_api::problem::Problem;

use super::{ARRIVING, Beside, CORE, Home, LEASE, MEMORY, is_base, of_arriving_tpm};
use crate::storage::file_error::failed;

impl Home {
    /// A disk's file.
    #[must_use]
    pub fn image(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.raw"))
    }

    /// The map of a disk's replica, beside the disk.
    #[must_use]
    pub fn map(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.map"))
    }

    /// The replica of a disk that is on another datastore.
    #[must_use]
    pub fn replica(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.replica"))
    }

    /// The replica of the image that the disk had before, in the place of [`Home::replica`].
    #[must_use]
    pub fn former_replica(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.former-replica"))
    }

    /// The note of which image and replica the map is of, beside either.
    #[must_use]
    pub fn pair(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.pair"))
    }

    /// The directory with the state of the VM's TPM, beside the disk that has its key.
    #[must_use]
    pub fn tpm_state(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.tpm"))
    }

    /// What the TPM keeps of a guest that comes from a host with the same datastore, until it takes that place
    /// ([`crate::storage::tpm_place`]).
    #[must_use]
    pub fn arriving_tpm(&self, disk: DiskId, migration: MigrationId) -> PathBuf {
        self.path.join(format!("{disk}.tpm-{migration}"))
    }

    /// All of these that are there.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn arriving_tpms(&self, disk: DiskId) -> Result<Vec<(MigrationId, PathBuf)>, Problem> {
        let entries = match std::fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(&self.path, "read", &error)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|error| failed(&self.path, "read", &error))?;
            match of_arriving_tpm(&entry.file_name().to_string_lossy()) {
                Some((of, migration)) if of == disk => found.push((migration, entry.path())),
                _ => {}
            }
        }
        Ok(found)
    }

    /// What takes its place with the copy of that disk.
    #[must_use]
    pub fn copy_tpm(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.copy-tpm"))
    }

    /// The same while it is made, or debris.
    #[must_use]
    pub fn unfinished_tpm(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.copy-tpm.new"))
    }

    /// What it was before.
    #[must_use]
    pub fn source_tpm(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.source-tpm"))
    }

    /// The note of the copy that is to take a disk's place.
    #[must_use]
    pub fn mirror_note(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.mirror"))
    }

    /// The copy that is to take a disk's place.
    #[must_use]
    pub fn copy(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.copy"))
    }

    /// The map of what that copy may lack.
    #[must_use]
    pub fn mirror_map(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.mirror-map"))
    }

    /// How fast that copy is made, where something holds it back.
    #[must_use]
    pub fn mirror_pace(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.mirror-pace"))
    }

    /// The note of a disk that is converted in its own file.
    #[must_use]
    pub fn in_place_note(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.in-place"))
    }

    /// The header that such a disk gets, or had.
    #[must_use]
    pub fn in_place_header(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.in-place-header"))
    }

    /// How far its conversion is.
    #[must_use]
    pub fn in_place_journal(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.in-place-journal"))
    }

    /// Its image meanwhile: no version opens it as a disk.
    #[must_use]
    pub fn converting(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.converting"))
    }

    /// The image that a disk had before its copy took its place.
    #[must_use]
    pub fn source(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.source"))
    }

    /// What is to be a disk, from a backup, while it is written.
    #[must_use]
    pub fn restoring(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.restoring"))
    }

    /// The same when it is whole, as a task has had it written.
    #[must_use]
    pub fn restored(&self, disk: DiskId, task: TaskId) -> PathBuf {
        self.path.join(format!("{disk}.restored-{task}"))
    }

    /// What a TPM kept, from a backup, as a task has had it written beside the disk that has its key.
    #[must_use]
    pub fn restored_tpm(&self, disk: DiskId, task: TaskId) -> PathBuf {
        self.path.join(format!("{disk}.tpm-restored-{task}"))
    }

    /// All that was restored of a disk and is not used.
    #[must_use]
    pub fn all_restored(&self, disk: DiskId) -> Vec<PathBuf> {
        let prefixes = [format!("{disk}.restored-"), format!("{disk}.tpm-restored-")];
        let entries = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
        let whole = entries.filter(|entry| {
            let name = entry.file_name();
            prefixes.iter().any(|prefix| name.to_string_lossy().starts_with(prefix))
        });
        whole.map(|entry| entry.path()).chain([self.restoring(disk)]).collect()
    }

    /// The note of a disk's layers.
    #[must_use]
    pub fn layers_note(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.layers"))
    }

    /// The note of the layers of the copy that is to take a disk's place.
    #[must_use]
    pub fn copy_layers_note(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.copy-layers"))
    }

    /// The note of the layers that a disk had before its copy took its place.
    #[must_use]
    pub fn source_layers_note(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.source-layers"))
    }

    /// A layer of a disk, of its copy, or of what the disk was before.
    #[must_use]
    pub fn layer(&self, disk: DiskId, layer: Uuid) -> PathBuf {
        self.path.join(format!("{disk}.layer-{layer}"))
    }

    /// What is locked while a layer of a disk is merged into the one below it.
    #[must_use]
    pub fn merge_lock(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.merge"))
    }

    /// The files that are named as layers of a disk.
    #[must_use]
    pub fn layer_files(&self, disk: DiskId) -> Vec<(Uuid, PathBuf)> {
        let prefix = format!("{disk}.layer-");
        let entries = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
        let layers = entries.filter_map(|entry| {
            let name = entry.file_name();
            let layer = name.to_str()?.strip_prefix(&prefix)?.parse().ok()?;
            Some((layer, entry.path()))
        });
        layers.collect()
    }

    /// A file of the `count` that a linked clone's disk stands on: the first is above the second, and so on. The last one is an
    /// image, the others are layers.
    #[must_use]
    pub fn base(&self, disk: DiskId, place: usize, count: usize) -> PathBuf {
        if place + 1 == count {
            return self.path.join(format!("{disk}.base"));
        }
        self.path.join(format!("{disk}.base-{place}"))
    }

    /// The files that are named as those that a disk stands on, or any disk.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn base_files(&self, disk: Option<DiskId>) -> Result<Vec<PathBuf>, Problem> {
        let entries = match std::fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(&self.path, "read", &error)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|error| failed(&self.path, "read", &error))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let named = name.split_once('.').filter(|(_, rest)| is_base(rest));
            let named = named.and_then(|(of, _)| of.parse::<DiskId>().ok());
            if named.is_some_and(|of| disk.is_none_or(|disk| disk == of)) {
                found.push(entry.path());
            }
        }
        Ok(found)
    }

    /// Removes the names of what a disk stands on. The files stay, for who else has them: they need no lock.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn remove_base(&self, disk: DiskId) -> Result<(), Problem> {
        self.base_files(Some(disk))?.iter().try_for_each(|path| self.remove_locked(path))
    }

    /// The homes of other VMs on the same datastore.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn others(&self) -> Result<Vec<Self>, Problem> {
        let datastore = self.datastore();
        let failed = |error: io::Error| failed(datastore, "read", &error);
        let mut homes = Vec::new();
        for entry in std::fs::read_dir(datastore).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let is_home = entry.file_name().to_string_lossy().parse::<VmId>().is_ok();
            if is_home && entry.path() != self.path {
                homes.push(Self { path: entry.path() });
            }
        }
        Ok(homes)
    }

    /// Which placement of the VM last used its disks.
    #[must_use]
    pub fn lease(&self) -> PathBuf {
        self.path.join(LEASE)
    }

    /// Which disks have come from another host.
    #[must_use]
    pub fn arriving(&self) -> PathBuf {
        self.path.join(ARRIVING)
    }

    /// The memory of a suspended VM.
    #[must_use]
    pub fn memory(&self) -> PathBuf {
        self.path.join(MEMORY)
    }

    /// The memory that a snapshot keeps.
    #[cfg(test)]
    #[must_use]
    pub fn snapshot_memory(&self, snapshot: SnapshotId) -> PathBuf {
        self.beside(&Beside::SnapshotMemory(snapshot))
    }

    /// What takes its place with the copy of the disk that it is beside, or comes with that.
    #[cfg(test)]
    #[must_use]
    pub fn copy_memory(&self, disk: DiskId, snapshot: SnapshotId) -> PathBuf {
        self.copy_beside(disk, &Beside::SnapshotMemory(snapshot))
    }

    /// All memories that snapshots keep here.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn snapshot_memories(&self) -> Result<BTreeMap<SnapshotId, PathBuf>, Problem> {
        self.all_beside().map(of_snapshots)
    }

    /// The memories that have come with a disk from another host, and have not taken their places.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn arrived_memories(&self, disk: DiskId) -> Result<BTreeMap<Beside, PathBuf>, Problem> {
        let mut all = self.copies_beside(disk)?;
        all.retain(|which, _| !matches!(which, Beside::Core(_)));
        Ok(all)
    }

    /// All that came, whole or not, to take the places of memories with a disk.
    pub(super) fn half_received(&self, disk: DiskId) -> Result<Vec<PathBuf>, Problem> {
        let whole = self.arrived_memories(disk)?.into_values();
        Ok(whole.chain(self.unfinished_beside(disk)).collect())
    }

    /// A core dump.
    #[must_use]
    pub fn core(&self, dump: DumpId) -> PathBuf {
        self.path.join(format!("{CORE}{dump}"))
    }

    pub(super) fn creating(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.raw.creating"))
    }

    pub(super) fn importing(&self, disk: DiskId) -> PathBuf {
        self.path.join(format!("{disk}.raw.importing"))
    }
}

/// Those that are the memories of snapshots.
fn of_snapshots(all: BTreeMap<Beside, PathBuf>) -> BTreeMap<SnapshotId, PathBuf> {
    let of_snapshot = |(what, path): (Beside, PathBuf)| match what {
        Beside::SnapshotMemory(snapshot) => Some((snapshot, path)),
        Beside::Memory | Beside::Core(_) => None,
    };
    all.into_iter().filter_map(of_snapshot).collect()
}
