//! What the disks of clones are copied from, and where clones go.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use vmseal_api::host::{CopyOf, DiskRole};
use vmseal_api::id::{DatastoreId, DiskId, HostId, SnapshotId, VmId};

/// What the disks of a clone are copied from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copies {
    /// The VM that is cloned.
    pub vm: VmId,
    /// What its disks held then; none means what they hold now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotId>,
    /// That the task takes this snapshot, whose row is there, and drops it at its end; none where it was there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temporary: Option<Temporary>,
    /// Its disks, by those of the clone.
    pub disks: BTreeMap<DiskId, DiskId>,
    /// The disks of the clone that stand on what the snapshot keeps.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub linked: BTreeSet<DiskId>,
    /// The host that it is for; none where that is the one of the VM that is cloned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elsewhere: Option<Elsewhere>,
}

/// Another host that a clone is for. The host of the VM that is cloned makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Elsewhere {
    /// The host that makes it.
    pub from: HostId,
    /// The host that gets it.
    pub to: HostId,
    /// How its disks are sent; none where both hosts have their datastores, and nothing is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sent: Option<SentDisks>,
}

/// How the disks of a clone get to another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SentDisks {
    /// The datastore there that they are sent to.
    pub datastore: DatastoreId,
    /// Whether what is sent is encrypted.
    pub encrypted: bool,
}

/// A snapshot of a VM that runs or is suspended, for its clone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Temporary {
    /// Whether the guest's file systems are frozen for its instant.
    pub quiesce: bool,
    /// Whether the VM was suspended when the clone was asked for; it can have gone on before the snapshot is taken.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspended: bool,
}

impl Copies {
    /// What a disk of the clone is copied from. Snapshots keep nothing of what cloud-init reads, to which no guest writes.
    #[must_use]
    pub fn of(&self, disk: DiskId, role: DiskRole) -> Option<CopyOf> {
        let vm = self.vm;
        let snapshot = self.snapshot.filter(|_| role != DiskRole::CloudInit);
        let linked = self.linked.contains(&disk);
        self.disks.get(&disk).map(|from| CopyOf { vm, disk: *from, snapshot, linked })
    }
}
