//! Removes a disk of a VM, which may run: its guest lets the disk go first. Once the image may be gone there is only
//! forward; the VM can be started without it in any case. A TPM is removed in the same way, as the disk that has its key.

use async_trait::async_trait;
use vmseal_api::host::DiskRole;
use vmseal_api::problem::Problem;

use super::add_disk::{
    delete_image, detach, find_disk, register_with_key, remove_row, set_detached,
};
use super::run::{Run, StepError};
use super::step::Output;
use crate::operation::Operation;
use crate::store::disks;
use crate::store::events::NewEvent;

/// The steps, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RemoveDiskStep {
    Detach,
    DeleteImage,
    RemoveRow,
}

pub(crate) const STEPS: &[&dyn super::step::Step] =
    &[&RemoveDiskStep::Detach, &RemoveDiskStep::DeleteImage, &RemoveDiskStep::RemoveRow];

#[async_trait]
impl super::step::Step for RemoveDiskStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Detach => "detach",
            Self::DeleteImage => "delete-image",
            Self::RemoveRow => "remove-row",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Detach => "take it from the VM",
            Self::DeleteImage => "delete the disk",
            Self::RemoveRow => "remove it from the inventory",
        }
    }

    fn commits(&self) -> bool {
        matches!(self, Self::DeleteImage)
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Detach => detach(run).await,
            Self::DeleteImage => delete(run).await,
            Self::RemoveRow => remove(run).await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
        match self {
            Self::Detach => attach_again(run).await,
            Self::DeleteImage => is_image_whole(run, cause).await,
            Self::RemoveRow => Ok(()),
        }
    }
}

async fn delete(run: &Run<'_>) -> Result<(), StepError> {
    let Some(disk) = find_disk(run).await? else { return Ok(()) };
    let mut write = run.store().write().await?;
    disks::set_deleting(&mut write, disk.id, true).await?;
    write.commit().await?;
    delete_image(run).await
}

/// Undoes [`delete`], which is possible only while the host has not been asked.
async fn is_image_whole(run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
    match find_disk(run).await? {
        Some(disk) if !disk.deleting => Ok(()),
        _ => Err(StepError::Final(unfinished(&run.task.operation, &run.task.target, cause))),
    }
}

/// Undoes [`detach`]: a guest that runs gets the disk again, if it had it.
async fn attach_again(run: &Run<'_>) -> Result<(), StepError> {
    let Some(disk) = find_disk(run).await? else { return Ok(()) };
    if disk.deleting {
        return Ok(());
    }
    set_detached(run, &disk, false).await?;
    register_with_key(run).await
}

async fn remove(run: &Run<'_>) -> Result<(), StepError> {
    let disk = find_disk(run).await?;
    remove_row(run).await?;
    let Some(disk) = disk else { return Ok(()) };
    let vm = run.vm().await?;
    let mut write = run.store().write().await?;
    let detail = match disk.role {
        DiskRole::Tpm => "its TPM is removed, with what it kept".to_owned(),
        _ => format!("disk '{}' is removed", disk.name),
    };
    let (kind, actor) = ("vm.changed", run.task.actor.as_str());
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// The problem of a removal that cannot go on.
pub(super) fn unfinished(operation: &Operation, target: &str, cause: &Problem) -> Problem {
    let (what, left) = match operation {
        Operation::RemoveTpm { .. } => ("TPM", "what it keeps may be left"),
        _ => ("disk", "whose image may be left"),
    };
    let detail = format!(
        "VM '{target}' no longer has the {what}, {left} ({cause}): remove the {what} again once the cause is fixed"
    );
    Problem { reason: cause.reason, ..Problem::new(cause.code, detail) }
}
