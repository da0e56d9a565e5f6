//! Removing a VM: disks, registration, key, rows, in this order, so that what is left of one that is
//! partly deleted can always be deleted by deleting it again. Works without the VM's key.

use vmseal_api::model::Lifecycle;
use vmseal_api::problem::Problem;

use super::create_vm::register;
use super::operation::Operation;
use super::run::{Run, StepError, absent_is_fine};
use crate::store::events::NewEvent;
use crate::store::{disks, keys, vms};

pub(super) async fn delete_disks(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let agent = run.agent(&vm)?;
    register(run).await?;
    for disk in run.disks().await? {
        mark_disk(run, &disk, true).await?;
        let answer = absent_is_fine(agent.delete_disk(vm.id, disk.id).await);
        if let Err(StepError::Final(problem)) = answer {
            // The host is certain that it has not deleted it.
            mark_disk(run, &disk, disk.deleting).await?;
            return Err(StepError::Final(problem));
        }
        answer?;
    }
    Ok(())
}

async fn mark_disk(run: &Run<'_>, disk: &disks::Disk, deleting: bool) -> Result<(), StepError> {
    let mut write = run.store().write().await?;
    disks::set_deleting(&mut write, disk.id, deleting).await?;
    Ok(write.commit().await?)
}

/// Undoes [`delete_disks`], which can be done only while no disk has been touched.
pub(super) async fn are_disks_whole(run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
    if run.disks().await?.iter().any(|disk| disk.deleting) {
        return Err(partly_deleted(run, cause));
    }
    Ok(())
}

/// What has been deleted is not coming back.
pub(super) fn partly_deleted(run: &Run<'_>, cause: &Problem) -> StepError {
    let detail = format!(
        "VM '{}' is partly deleted ({cause}): delete it again when the cause is mended",
        run.task.target
    );
    StepError::Final(Problem::new(cause.code, detail))
}

pub(super) async fn forget(run: &Run<'_>) -> Result<(), StepError> {
    let _unchanged = run.hosts().lock(run.vm_id()).await;
    let Some(vm) = run.find_vm().await? else { return Ok(()) };
    absent_is_fine(run.agent(&vm)?.unregister_vm(vm.id).await)
}

/// Also those that a recryption has left.
pub(super) async fn destroy_keys(run: &Run<'_>) -> Result<(), StepError> {
    let Some(vm) = run.find_vm().await? else { return Ok(()) };
    let known = keys::of_vm(&mut *run.store().read().await?, vm.id).await?;
    let unknown = vm.key.iter().filter(|key| !known.contains(key));
    for key in known.iter().chain(unknown) {
        run.means.providers.get(key.provider)?.destroy_key(vm.id, &vm.name, key).await?;
    }
    Ok(())
}

pub(super) async fn remove_rows(run: &Run<'_>) -> Result<(), StepError> {
    let _unchanged = run.hosts().lock(run.vm_id()).await;
    let Some(vm) = run.find_vm().await? else { return Ok(()) };
    let mut write = run.store().write().await?;
    vms::delete(&mut write, vm.id).await?;
    let (kind, actor) = ("vm.deleted", run.task.actor.as_str());
    let detail = format!("id {}, from host '{}'", vm.id, vm.host_name);
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// Undoes the mark: the VM is what it was.
pub(super) async fn unmark(run: &Run<'_>) -> Result<(), StepError> {
    let Operation::DeleteVm { was, .. } = run.task.operation else { return Ok(()) };
    // One that was partly deleted before stays so.
    let lifecycle = if was == Lifecycle::Ready { was } else { Lifecycle::Deleting };
    let _unchanged = run.hosts().lock(run.vm_id()).await;
    let mut write = run.store().write().await?;
    vms::set_lifecycle(&mut write, run.vm_id(), lifecycle).await?;
    Ok(write.commit().await?)
}
