//! The snapshots that a VM of the inventory gets, as its descriptor says them.

use vmseal_api::host::SnapshotSpec;
use vmseal_api::id::SnapshotId;
use vmseal_api::model::SnapshotState;

use crate::operation::Definition;
use crate::store::snapshots::{self, Snapshot};
use crate::store::{StoreError, Write, memory_generations};

/// Adds a snapshot of a VM, with the memory that its host has found of it.
pub(super) async fn insert(
    write: &mut Write<'_>,
    definition: &Definition,
    of: &SnapshotSpec,
) -> Result<(), StoreError> {
    let kept = definition.memories.iter().find(|kept| kept.snapshot == of.snapshot);
    let snapshot = Snapshot {
        id: of.snapshot,
        vm: definition.spec.vm,
        name: of.name.clone(),
        description: of.description.clone(),
        parent: of.parent,
        created: of.created,
        memory: kept.is_some(),
        state: SnapshotState::Ready,
        quiesced: of.quiesced,
        current: of.current,
        disks: of.disks.clone(),
    };
    snapshots::insert(write, &snapshot).await?;
    match kept {
        Some(kept) => memory_generations::take_found(write, &snapshot, kept.generation).await,
        None => Ok(()),
    }
}

fn current(of: &[SnapshotSpec]) -> Option<SnapshotId> {
    of.iter().find(|it| it.current).map(|it| it.snapshot)
}

/// Gives the VM its snapshots; returns what is new of them, for people. It may be done again: then nothing is new.
pub(super) async fn take(
    write: &mut Write<'_>,
    definition: &Definition,
) -> Result<Vec<String>, StoreError> {
    let spec = &definition.spec;
    let there = snapshots::of_vm(write, spec.vm).await?;
    let mut told = Vec::new();
    for of in &spec.snapshots {
        if there.iter().all(|known| known.id != of.snapshot) {
            insert(write, definition, of).await?;
            told.push(format!("snapshot '{}' of {} is added", of.name, of.created));
        }
    }
    snapshots::set_current(write, spec.vm, current(&spec.snapshots)).await?;
    Ok(told)
}

/// Undoes [`take`]: the VM has the snapshots that it had. Their layers stay.
pub(super) async fn put_back(
    write: &mut Write<'_>,
    definition: &Definition,
    before: &[SnapshotSpec],
) -> Result<(), StoreError> {
    let spec = &definition.spec;
    for known in snapshots::of_vm(write, spec.vm).await? {
        let is_of = |all: &[SnapshotSpec]| all.iter().any(|of| of.snapshot == known.id);
        if is_of(&spec.snapshots) && !is_of(before) {
            snapshots::delete(write, &known).await?;
        }
    }
    snapshots::set_current(write, spec.vm, current(before)).await
}
