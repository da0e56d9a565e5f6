//! Deletes a VM: disks, registration, key, rows, in this order, so that a partly deleted VM can always be deleted
//! again. Works without the VM's key.

use async_trait::async_trait;
use vmseal_api::host::HostAgent;
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::{ErrorCode, Problem};

use super::run::{Run, StepError, absent_is_fine, register};
use super::step::{Limit, Output};
use crate::operation::Operation;
use crate::store::events::NewEvent;
use crate::store::{backups, disks, dumps, keys, vms};

/// The steps, in order. The request has already marked the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeleteVmStep {
    Mark,
    DeleteDisks,
    Forget,
    DestroyKey,
    RemoveRows,
}

pub(crate) const STEPS: &[&dyn super::step::Step] = &[
    &DeleteVmStep::Mark,
    &DeleteVmStep::DeleteDisks,
    &DeleteVmStep::Forget,
    &DeleteVmStep::DestroyKey,
    &DeleteVmStep::RemoveRows,
];

#[async_trait]
impl super::step::Step for DeleteVmStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Mark => "mark",
            Self::DeleteDisks => "delete-disks",
            Self::Forget => "forget",
            Self::DestroyKey => "destroy-key",
            Self::RemoveRows => "remove-rows",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Mark => "mark as being deleted",
            Self::DeleteDisks => "delete the disks",
            Self::Forget => "unregister from the host",
            Self::DestroyKey => "destroy the key",
            Self::RemoveRows => "remove from the inventory",
        }
    }

    fn needs_key(&self) -> bool {
        matches!(self, Self::DestroyKey)
    }

    fn commits(&self) -> bool {
        matches!(self, Self::DeleteDisks)
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::DestroyKey => Some(Limit::Provider),
            _ => None,
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Mark => Ok(()),
            Self::DeleteDisks => delete_disks(run).await,
            Self::Forget => forget(run).await,
            Self::DestroyKey => destroy_keys(run).await,
            Self::RemoveRows => remove_rows(run).await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
        match self {
            Self::Mark => unmark(run).await,
            Self::DeleteDisks => are_disks_whole(run, cause).await,
            // Past the commit step.
            Self::Forget | Self::DestroyKey | Self::RemoveRows => Ok(()),
        }
    }
}

pub(super) async fn delete_disks(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let agent = run.agent(&vm)?;
    register(run).await?;
    if let Operation::DeleteVm { was: Lifecycle::Deleting, .. } = run.task.operation {
        // It went to another control plane: with its memory it would be suspended here, and keep its disks.
        absent_is_fine(agent.discard_memory(vm.id).await)?;
    }
    delete_dumps(run, &vm, &*agent).await?;
    for disk in run.disks().await? {
        if disk.detached {
            // A task that added or removed it has left it: the host knows it only if it is told.
            crate::hosts::register_with(run.store(), run.hosts(), run.vm_id, &disk).await?;
        }
        mark_disk(run, &disk, true).await?;
        let answer = absent_is_fine(agent.delete_disk(vm.id, disk.id).await);
        if let Err(StepError::Final(problem)) = &answer
            && refused_untouched(problem.code)
        {
            mark_disk(run, &disk, disk.deleting).await?;
        }
        answer?;
    }
    Ok(())
}

/// Removes its core dumps: no key opens them any more when it is deleted.
async fn delete_dumps(run: &Run<'_>, vm: &vms::Vm, agent: &dyn HostAgent) -> Result<(), StepError> {
    let known = dumps::of_vm(&mut *run.store().read().await?, vm.id).await?;
    for dump in known {
        absent_is_fine(agent.discard_dump(vm.id, dump.id).await)?;
    }
    // The inventory may not have those yet that the host has written by itself.
    let state = agent.state_now().await?;
    for dump in state.vms.iter().filter(|seen| seen.vm == vm.id).flat_map(|it| &it.panic_dumps) {
        absent_is_fine(agent.discard_dump(vm.id, dump.dump).await)?;
    }
    Ok(())
}

/// Whether the host returns this error before it touches the disk. After any other error the disk may be gone: its
/// name may be removed although the directory could not be flushed.
fn refused_untouched(code: ErrorCode) -> bool {
    matches!(
        code,
        ErrorCode::InUse | ErrorCode::WrongState | ErrorCode::Forbidden | ErrorCode::InvalidRequest
    )
}

async fn mark_disk(run: &Run<'_>, disk: &disks::Disk, deleting: bool) -> Result<(), StepError> {
    let mut write = run.store().write().await?;
    disks::set_deleting(&mut write, disk.id, deleting).await?;
    Ok(write.commit().await?)
}

/// Undoes [`delete_disks`], which is possible only while no disk has been touched.
pub(super) async fn are_disks_whole(run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
    if run.disks().await?.iter().any(|disk| disk.deleting) {
        return Err(StepError::Final(unfinished(&run.task.target, cause)));
    }
    Ok(())
}

/// The problem of a deletion that cannot go on: it cannot be undone.
pub(super) fn unfinished(target: &str, cause: &Problem) -> Problem {
    let detail = format!(
        "VM '{target}' is partly deleted ({cause}): delete it again once the cause is fixed"
    );
    Problem::new(cause.code, detail)
}

pub(super) async fn forget(run: &Run<'_>) -> Result<(), StepError> {
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let Some(vm) = run.find_vm().await? else { return Ok(()) };
    absent_is_fine(run.agent(&vm)?.unregister_vm(vm.id).await)
}

/// Destroys the VM's keys, including those that a recryption has left.
pub(super) async fn destroy_keys(run: &Run<'_>) -> Result<(), StepError> {
    let Some(vm) = run.find_vm().await? else { return Ok(()) };
    let known = keys::of_vm(&mut *run.store().read().await?, vm.id).await?;
    let unknown = vm.key.iter().filter(|key| !known.contains(key)).cloned();
    let all = known.iter().cloned().chain(unknown).collect();
    // Those that backups need go with the last of these.
    let all = backups::not_needed(&mut *run.store().read().await?, vm.id, all).await?;
    for key in &all {
        run.context.providers.get(key.provider)?.destroy_key(vm.id, &vm.name, key).await?;
    }
    Ok(())
}

pub(super) async fn remove_rows(run: &Run<'_>) -> Result<(), StepError> {
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let Some(vm) = run.find_vm().await? else { return Ok(()) };
    let mut write = run.store().write().await?;
    vms::delete(&mut write, vm.id).await?;
    let (kind, actor) = ("vm.deleted", run.task.actor.as_str());
    let detail = format!("id {}, from host '{}'", vm.id, vm.host_name);
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// Undoes the mark: the VM has its former lifecycle.
pub(super) async fn unmark(run: &Run<'_>) -> Result<(), StepError> {
    let Operation::DeleteVm { was, .. } = run.task.operation else { return Ok(()) };
    // A VM that was already partly deleted stays so.
    let lifecycle = if was == Lifecycle::Ready { was } else { Lifecycle::Deleting };
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    vms::set_lifecycle(&mut write, run.vm_id, lifecycle).await?;
    Ok(write.commit().await?)
}
