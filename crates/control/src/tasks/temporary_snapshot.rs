//! Snapshots that a task takes for itself of a VM, and drops at its end or when it is undone: for a backup, or for the clone of a VM
//! that runs or is suspended. Their rows are there before the task begins.

use vmseal_api::host::{DropSnapshotJob, JobKind, JobSpec, SnapshotJob, Tracked};
use vmseal_api::id::SnapshotId;

use super::job::{self, follow, put};
use super::run::{Run, StepError};
use crate::store::snapshots::{self, Snapshot};

/// What such a snapshot is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Backup,
    Clone,
}

impl Purpose {
    const ALL: [Self; 2] = [Self::Backup, Self::Clone];

    /// The name of a snapshot.
    pub(crate) fn name(self, snapshot: SnapshotId) -> String {
        let begin = match self {
            Self::Backup => "backup",
            Self::Clone => "clone",
        };
        let digits = snapshot.0.simple().to_string();
        format!("{begin}-{}", &digits[digits.len() - 12..])
    }

    /// What it is, for people.
    pub(crate) fn description(self) -> &'static str {
        match self {
            Self::Backup => "kept while a backup is written",
            Self::Clone => "kept while the VM is cloned",
        }
    }
}

/// A snapshot of the VM that `run` is about; none if it is dropped.
pub(super) async fn find(run: &Run<'_>, id: SnapshotId) -> Result<Option<Snapshot>, StepError> {
    let known = snapshots::of_vm(&mut *run.store().read().await?, run.vm_id).await?;
    Ok(known.into_iter().find(|known| known.id == id))
}

/// Has the host take it. Returns whether the guest's file systems were frozen, where that is known.
pub(super) async fn take(
    run: &Run<'_>,
    kept: Snapshot,
    quiesce: bool,
    tracked: Option<Tracked>,
) -> Result<Option<bool>, StepError> {
    let vm = run.vm().await?;
    let Snapshot { id: snapshot, disks, .. } = kept;
    let job = SnapshotJob { snapshot, quiesce, memory: false, generation: None, tracked, disks };
    put(run, &vm, JobSpec::Snapshot(job)).await?;
    follow(run, &vm, JobKind::Snapshot).await
}

/// Has the host drop it and merge its layers, if it is not dropped yet.
pub(super) async fn drop_snapshot(run: &Run<'_>, id: SnapshotId) -> Result<(), StepError> {
    match find(run, id).await? {
        Some(kept) => drop_kept(run, kept).await,
        None => Ok(()),
    }
}

/// Drops what earlier tasks have left that could be neither finished nor undone: no other task works on the VM now. What this task is
/// for is done, whether that can be dropped or not.
pub(super) async fn drop_left(run: &Run<'_>) -> Result<(), StepError> {
    let known = snapshots::of_vm(&mut *run.store().read().await?, run.vm_id).await?;
    let is_left = |it: &Snapshot| Purpose::ALL.iter().any(|of| it.name == of.name(it.id));
    for left in known.into_iter().filter(is_left) {
        match drop_kept(run, left).await {
            Err(StepError::Final(problem)) => {
                tracing::warn!(vm = %run.vm_id, %problem, "the snapshot of an earlier task is left");
            }
            other => other?,
        }
    }
    Ok(())
}

async fn drop_kept(run: &Run<'_>, kept: Snapshot) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let job = DropSnapshotJob { snapshot: kept.id, disks: kept.disks.clone() };
    job::drop_snapshot(run, &vm, job).await?;
    let mut write = run.store().write().await?;
    snapshots::delete(&mut write, &kept).await?;
    Ok(write.commit().await?)
}
