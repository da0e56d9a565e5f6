//! Drops the snapshots of backups: at their end, when they are undone, and those that earlier ones have left.

use vmseal_api::host::DropSnapshotJob;
use vmseal_api::problem::ErrorCode;

use super::{backup, cancel, order, place, snapshot, snapshot_name};
use crate::store::snapshots::{self, Snapshot};
use crate::tasks::job;
use crate::tasks::run::{Run, StepError};

/// Has the host drop the snapshot, if there is one, and merge its layers.
pub(super) async fn drop_snapshot(run: &Run<'_>) -> Result<(), StepError> {
    match snapshot(run).await? {
        Some(kept) => drop_kept(run, kept).await,
        None => Ok(()),
    }
}

/// Drops what earlier backups have left that could be neither finished nor undone: no other task works on the VM now. The backup
/// is whole, whether that can be dropped or not.
pub(super) async fn drop_left(run: &Run<'_>) -> Result<(), StepError> {
    let known = snapshots::of_vm(&mut *run.store().read().await?, run.vm_id).await?;
    for left in known.into_iter().filter(|it| it.name == snapshot_name(it.id)) {
        match drop_kept(run, left).await {
            Err(StepError::Final(problem)) => {
                tracing::warn!(vm = %run.vm_id, %problem, "the snapshot of an earlier backup is left");
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

/// Undoes what was written of a backup. What was kept for the backup is dropped before its files are removed: files that a directory does
/// not give up must not leave a snapshot, which would keep the VM from being restored.
pub(super) async fn remove_written(run: &Run<'_>) -> Result<(), StepError> {
    let cancelled = match snapshot(run).await? {
        Some(_) => unless_away(cancel(run, order(run).await?).await),
        // The job was given up before this was dropped.
        None => Ok(()),
    };
    if let Err(StepError::Again(_)) = cancelled {
        return cancelled;
    }
    drop_snapshot(run).await?;
    cancelled?;
    let (vm, backup) = (run.vm().await?, backup(run).await?);
    unless_away(run.agent(&vm)?.discard_backup(place(&backup)).await.map_err(StepError::from))
}

/// Nothing can be removed from a directory that was moved or is not mounted. The next backup of the VM there removes what is left.
fn unless_away(removed: Result<(), StepError>) -> Result<(), StepError> {
    match removed {
        Err(StepError::Final(problem))
            if problem.code == ErrorCode::InvalidRequest
                && problem.field.as_deref() == Some("directory") =>
        {
            tracing::warn!(%problem, "an unfinished backup may be left");
            Ok(())
        }
        other => other,
    }
}
