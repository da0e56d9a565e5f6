//! The directories that simulated hosts keep datastores in: hosts beside each other see the same ones.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uuid::Uuid;
use vmseal_api::host::{DatastoreSpec, Fence, Sharing, SharingStep};
use vmseal_api::id::{DatastoreId, DiskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::running::RunningGuest;
use super::{Inside, SimulatedDisk, SimulatedHost};

/// What is in these directories beside VMs. Clones are the same storage.
#[derive(Clone, Default)]
pub struct Storage(Arc<Mutex<Directories>>);

#[derive(Default)]
struct Directories {
    marks: BTreeMap<PathBuf, DatastoreId>,
    /// Those that are marked as shared.
    shared: BTreeSet<DatastoreId>,
    /// What was last written for a check, and whether its lock is held.
    checks: BTreeMap<DatastoreId, (Uuid, bool)>,
    /// Whether each host has its locks for itself.
    local_locks: bool,
    /// What is there of VMs that a host has forgotten.
    left: BTreeMap<VmId, Left>,
}

/// What a VM that no host knows has on its datastores.
#[derive(Default)]
pub struct Left {
    pub disks: BTreeMap<DiskId, SimulatedDisk>,
    /// The guest whose memory is saved.
    pub suspended: Option<RunningGuest>,
}

impl Storage {
    fn inside(&self) -> MutexGuard<'_, Directories> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn mark(&self, path: &Path) -> Option<DatastoreId> {
        self.inside().marks.get(path).copied()
    }

    pub fn put_mark(&self, path: &Path, datastore: DatastoreId) {
        self.inside().marks.insert(path.to_owned(), datastore);
    }

    /// A host has forgotten a VM; one that is asked again knows no more than the first time.
    pub fn leave(&self, vm: VmId, left: Left) {
        let mut inside = self.inside();
        let known = inside.left.entry(vm).or_default();
        known.disks.extend(left.disks);
        known.suspended = left.suspended.or(known.suspended.take());
    }

    /// A host gets a VM.
    pub fn take(&self, vm: VmId) -> Left {
        self.inside().left.remove(&vm).unwrap_or_default()
    }

    /// An agent has ended, and with it the locks for checks, whichever agent held them.
    pub fn lose_locks(&self) {
        self.inside().checks.values_mut().for_each(|(_, held)| *held = false);
    }

    /// Checks the mark at a place.
    pub fn check_place(&self, spec: &DatastoreSpec) -> Result<(), Problem> {
        let path = spec.location.path();
        if self.mark(path) == Some(spec.datastore) {
            return Ok(());
        }
        let what = format!("{} is not marked as datastore {}", path.display(), spec.datastore);
        Err(Problem::new(ErrorCode::WrongState, what))
    }

    pub fn share(&self, Sharing { datastore: spec, check, step }: &Sharing) -> Result<(), Problem> {
        self.check_place(spec)?;
        let (datastore, mut inside) = (spec.datastore, self.inside());
        let known = inside.checks.get(&datastore).filter(|(known, _)| known == check);
        let (is_written, is_held) = (known.is_some(), known.is_some_and(|(_, held)| *held));
        match step {
            SharingStep::Hold => drop(inside.checks.insert(datastore, (*check, true))),
            SharingStep::Try if !is_written => {
                return Err(Problem::new(ErrorCode::WrongState, "it is a copy of the datastore"));
            }
            SharingStep::Try if inside.local_locks || !is_held => {
                let what = "locks do not reach the other host";
                return Err(Problem::new(ErrorCode::Unsupported, what));
            }
            SharingStep::Try => {}
            SharingStep::Release if !is_held => {
                return Err(Problem::new(ErrorCode::WrongState, "the lock is not held any more"));
            }
            SharingStep::Release => drop(inside.checks.remove(&datastore)),
            SharingStep::Mark => drop(inside.shared.insert(datastore)),
        }
        Ok(())
    }
}

impl Inside {
    /// Keeps others from the disks of a VM. Simulated guests write nothing.
    pub fn fence(&mut self, Fence { vm, generation }: &Fence) -> Result<(), Problem> {
        let taken = self.persisted.leases.get(&vm.vm).is_some_and(|taken| taken > generation);
        if taken {
            let what = format!("the disks of VM '{}' belong to a later placement of it", vm.name);
            return Err(Problem::new(ErrorCode::Conflict, what));
        }
        self.persisted.leases.insert(vm.vm, *generation);
        Ok(())
    }
}

impl SimulatedHost {
    /// A new host that sees the same directories as this one, and has no VM.
    ///
    /// # Panics
    /// When memory cannot be locked.
    #[must_use]
    pub fn beside(&self) -> Self {
        let new = Self::new();
        new.inside().persisted.storage = self.inside().persisted.storage.clone();
        new
    }

    /// Another host gets what a VM has on datastores though this one has not forgotten it: on a pool of a cluster it is there for all.
    pub fn show_others(&self, vm: VmId) {
        self.inside().leave(vm);
    }

    /// The generation of the placement that a VM's disks were taken with on this host.
    #[must_use]
    pub fn lease(&self, vm: VmId) -> Option<u64> {
        self.inside().persisted.leases.get(&vm).copied()
    }

    /// Sets whether each host has its locks for itself, as over NFS without a lock server.
    pub fn set_local_locks(&self, local: bool) {
        self.inside().persisted.storage.inside().local_locks = local;
    }

    /// Whether a datastore is marked as shared.
    #[must_use]
    pub fn is_marked_shared(&self, datastore: DatastoreId) -> bool {
        self.inside().persisted.storage.inside().shared.contains(&datastore)
    }

    /// The datastore that is at a path.
    #[must_use]
    pub fn mark(&self, path: &Path) -> Option<DatastoreId> {
        self.inside().persisted.storage.mark(path)
    }

    /// Mounts a datastore at a path, too.
    pub fn mount(&self, path: &Path, datastore: DatastoreId) {
        self.inside().persisted.storage.put_mark(path, datastore);
    }

    /// Puts another datastore at a path.
    pub fn change_mark(&self, path: &Path) {
        self.inside().persisted.storage.put_mark(path, DatastoreId::new());
    }
}
