//! Snapshots that the descriptor of a VM has and the inventory does not, as they were taken after the backup from which it was restored. The VM
//! gets them as it gets disks ([`super::newer`]): what they keep is in the layers of its disks, which are there.

use vmseal_api::host::SnapshotSpec;
use vmseal_api::host::descriptor::{DescribedSnapshot, VmDescriptor};
use vmseal_api::host::survey::{FoundVm, KeptMemory};
use vmseal_api::limits::SNAPSHOTS_MAX;

use super::{Known, snapshot};
use crate::store::snapshots::Snapshot;

/// The snapshots that a VM gets.
pub(super) struct TakenSince {
    /// Those that it has, and after them those that it gets.
    pub(super) all: Vec<SnapshotSpec>,
    /// The memory that those keep which it gets.
    pub(super) memories: Vec<KeptMemory>,
    /// What is new, for people: a sentence each.
    pub(super) said: Vec<String>,
}

/// The snapshots that a VM gets, of which the inventory has rows, and has told its host of those that are whole; none where it has all, and
/// why not where it gets none.
pub(super) fn taken_since(
    known: &Known,
    tells_memories: bool,
    (rows, whole): (&[Snapshot], &[SnapshotSpec]),
    (found, descriptor): (&FoundVm, &VmDescriptor),
) -> Result<Option<TakenSince>, String> {
    let is_new = |of: &&DescribedSnapshot| rows.iter().all(|row| row.id != of.snapshot);
    let new: Vec<&DescribedSnapshot> = descriptor.snapshots.iter().filter(is_new).collect();
    if new.is_empty() {
        return Ok(None);
    }
    if !tells_memories {
        return Err(format!(
            "it has snapshots that the inventory does not have, and the agent of host '{}' does not tell which of them keep memory: upgrade vmseal there, and adopt it again",
            known.on.host_name
        ));
    }
    // Nobody could read a descriptor with more.
    let count = rows.len() + new.len();
    if count > SNAPSHOTS_MAX {
        return Err(format!(
            "with the snapshots that the inventory does not have it would have {count}, and a VM has {SNAPSHOTS_MAX} at most"
        ));
    }
    // Beside that disk is their memory.
    let first = descriptor.disks.first().and_then(|disk| disk.datastore);
    if first.is_some_and(|place| place != known.datastore.id) {
        return Err("it has snapshots that the inventory does not have, and its first disk, beside which their memory is, is on another datastore: adopt it from that one".to_owned());
    }
    for of in &new {
        let name = &of.name;
        if rows.iter().any(|row| row.name == *name) {
            return Err(format!(
                "its snapshot '{name}' was deleted, and another one of that name taken: the inventory cannot have both"
            ));
        }
        if let Some(file) = found.unusable_memories.iter().find(|it| it.snapshot == of.snapshot) {
            return Err(format!(
                "its host cannot use the memory of its snapshot '{name}', {}: adopt it when the host can, or move the file to another directory to have the snapshot without memory",
                file.detail
            ));
        }
    }
    let said = new
        .iter()
        .map(|of| format!("its snapshot '{}' of {} was taken: it gets it", of.name, of.created));
    let said = said.collect();
    let current = descriptor.snapshots.iter().find(|it| it.current).map(|it| it.snapshot);
    let more = new.iter().map(|of| snapshot(descriptor, of));
    let all = whole.iter().cloned().chain(more).map(|of| {
        let current = current == Some(of.snapshot);
        SnapshotSpec { current, ..of }
    });
    let is_of_new = |kept: &&KeptMemory| new.iter().any(|of| of.snapshot == kept.snapshot);
    let memories = found.memories.iter().filter(is_of_new).copied().collect();
    Ok(Some(TakenSince { all: all.collect(), memories, said }))
}
