//! Drops what is kept for a backup, at its end and when it is undone.

use vmseal_api::problem::ErrorCode;

use super::{backup, cancel, order, place, snapshot, snapshot_id};
use crate::tasks::run::{Run, StepError};
use crate::tasks::temporary_snapshot;

/// Has the host drop the snapshot, if there is one, and merge its layers.
pub(super) async fn drop_snapshot(run: &Run<'_>) -> Result<(), StepError> {
    temporary_snapshot::drop_snapshot(run, snapshot_id(run)?).await
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
