//! What a migration that ended before its end has left on a host: the inventory says where the VM is.
//!
//! | the VM is | on this host | what is done |
//! |---|---|---|
//! | elsewhere | off, or suspended | it is unregistered |
//! | elsewhere, to where its disks were sent | off | the job that sent them ends, the disks are removed, and it is unregistered |
//! | elsewhere | handed over, or received and not run | its processes end, and it is unregistered |
//! | elsewhere, and a migration has left copies or former images here | the same | these are removed before ([`super::copies`]) |
//! | at another control plane: it is being deleted here | as elsewhere | as elsewhere |
//! | here | handed over | its guest goes on, unless it has run elsewhere since: the host knows |
//! | here, and a task could not learn whether it runs elsewhere | handed over | nothing, until an operator has resolved that task |
//! | the same | off | nothing; it is not started either until then |

use sqlx::SqliteConnection;
use vmseal_api::host::{HostAgent, JobKind, JobSpec, Power, SendJob, VmState};
use vmseal_api::id::{DiskId, HostId, TaskId, VmId};
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::Problem;

use super::{copies, is_silence, registration};
use crate::locks::Locks;
use crate::operation::Operation;
use crate::operation::migration::SWITCH;
use crate::store::tasks::Task;
use crate::store::{Store, StoreError, disks, tasks, vms};
use crate::task_alarms;

/// Whether a VM may be left so.
pub(super) fn may_be(seen: &VmState, is_here: bool) -> bool {
    match seen.power {
        Power::Migrating => true,
        Power::Off | Power::Suspended => !is_here,
        _ => false,
    }
}

/// Deals with a VM of which something may be left on a host. While a task has the VM, that is the task's.
///
/// # Errors
/// The host does not answer, or the inventory's.
pub(super) async fn deal_with(
    store: &Store,
    agent: &dyn HostAgent,
    locks: &Locks<VmId>,
    (host, seen): (HostId, &VmState),
) -> Result<(), Problem> {
    let _unchanged = locks.lock(seen.vm).await;
    let mut read = store.read().await?;
    if tasks::holding(&mut read, seen.vm).await?.is_some() {
        return Ok(());
    }
    if undecided_switch(&mut read, host, seen.vm).await?.is_some() {
        return Ok(());
    }
    let disks = disks::of_vm(&mut read, seen.vm).await?;
    let copied = copies::of_migrations(&mut read, &disks, (host, seen)).await?;
    drop(read);
    let disks: Vec<DiskId> =
        disks.into_iter().filter(|disk| !disk.detached).map(|disk| disk.id).collect();
    let known = registration::read(store, seen.vm).await?;
    // One that is handed over and being deleted runs at another control plane.
    let is_here = known.is_some_and(|(vm, _)| {
        vm.host == host && !(seen.power == Power::Migrating && vm.lifecycle == Lifecycle::Deleting)
    });
    let done = match (is_here, seen.power) {
        (true, Power::Migrating) => agent.cancel_job(seen.vm, TaskId::new(), sending(disks)).await,
        (true, _) => return Ok(()),
        (false, Power::Migrating) => {
            end_processes(agent, seen.vm, disks).await?;
            forget(agent, seen.vm, &copied).await
        }
        (false, _) => {
            // One that was sent while it was off has its disks held by the job until that ends.
            let ended = match seen.jobs.iter().find(|job| job.kind == JobKind::Send) {
                Some(sent) => agent.commit_job(seen.vm, sent.task, sending(disks)).await,
                None => Ok(()),
            };
            match ended {
                Err(problem) if is_silence(&problem) => Err(problem),
                _ => forget(agent, seen.vm, &copied).await,
            }
        }
    };
    match done {
        Err(problem) if is_silence(&problem) => Err(problem),
        Err(problem) => {
            tracing::warn!(vm = %seen.vm, %problem, "what a migration has left stays");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// The task that was to send a VM from this host, and has ended without knowing whether its guest runs elsewhere; none where there is none. An
/// operator who resolves the task says that it does not.
///
/// # Errors
/// The inventory's.
pub(crate) async fn undecided_switch(
    read: &mut SqliteConnection,
    host: HostId,
    vm: VmId,
) -> Result<Option<Task>, StoreError> {
    // One whose guest was found elsewhere has recorded that.
    let Some(known) = vms::get(&mut *read, vm).await? else { return Ok(None) };
    if known.host != host || known.lifecycle == Lifecycle::Deleting {
        return Ok(None);
    }
    for task in tasks::unknown_of_vm(&mut *read, vm).await? {
        let sent = matches!(
            task.operation,
            Operation::MigrateVm { from, .. } | Operation::MigrateAway { from, .. } if from == host
        );
        if sent && task.step == SWITCH && task_alarms::is_active(&mut *read, &task).await? {
            return Ok(Some(task));
        }
    }
    Ok(None)
}

fn sending(disks: Vec<DiskId>) -> JobSpec {
    JobSpec::Send(SendJob { disks, copies: Vec::new(), begin: None })
}

/// Has a host end the processes of a VM that is on its way to or from another one, and goes on elsewhere. One that is received has no such
/// job, and ends when it is unregistered.
///
/// # Errors
/// The host does not answer.
pub(super) async fn end_processes(
    agent: &dyn HostAgent,
    vm: VmId,
    disks: Vec<DiskId>,
) -> Result<(), Problem> {
    match agent.commit_job(vm, TaskId::new(), sending(disks)).await {
        Err(problem) if is_silence(&problem) => Err(problem),
        _ => Ok(()),
    }
}

/// Has a host forget a VM that is elsewhere, and remove the images that a migration has left there.
pub(super) async fn forget(
    agent: &dyn HostAgent,
    vm: VmId,
    copied: &[DiskId],
) -> Result<(), Problem> {
    for disk in copied {
        match agent.delete_disk(vm, *disk).await {
            Err(problem) if is_silence(&problem) => return Err(problem),
            Err(problem) => {
                tracing::warn!(%vm, %disk, %problem, "the former image of a disk is left");
            }
            Ok(()) => {}
        }
    }
    agent.unregister_vm(vm).await
}
