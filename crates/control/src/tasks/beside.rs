//! Tasks beside which others change the power of their VM ([`Operation::leaves_power`], docs/decisions/312).
//!
//! | the task beside | what is done |
//! |---|---|
//! | is refused by the host as the VM is starting or stopping | it waits for that, and does its step again ([`outlast`]) |
//! | is at a step in which the host has the VM otherwise than the inventory | no start registers the VM meanwhile, or goes on ([`redefining`], [`keep_starts_away`]) |
//! | copies what the VM's TPM keeps | it is not started: swtpm would have that ([`require_no_tpm_copied`]) |
//!
//! [`Operation::leaves_power`]: crate::operation::Operation::leaves_power

use std::time::Duration;

use sqlx::SqliteConnection;
use tokio::sync::OwnedMutexGuard;
use vmseal_api::host::{DiskRole, HostState, Power};
use vmseal_api::id::{TaskId, VmId};
use vmseal_api::model::{Waiting, WaitingOn};
use vmseal_api::problem::{ErrorCode, Problem};

use super::run::{Run, StepError, state_of};
use super::step::{Redefines, Step};
use super::{mirror_vm, steps};
use crate::locks::Locks;
use crate::operation::{Operation, PowerChange};
use crate::store::tasks::{self, Task};
use crate::store::{Store, StoreError, disks};

/// How often a start looks again whether its turn has come: it is told of changes, and one may be missed.
pub(super) const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// Refuses to start a VM while a task copies, or may copy, what its TPM keeps. A task that has found the guest running leaves that
/// where it is.
///
/// # Errors
/// `wrong-state`.
pub(super) async fn require_no_tpm_copied(
    from: &mut SqliteConnection,
    operation: &Operation,
) -> Result<(), Problem> {
    let (Some(PowerChange::Start), Some(vm)) = (operation.power_change(), operation.vm()) else {
        return Ok(());
    };
    let Some(task) = tasks::holding(from, vm).await? else { return Ok(()) };
    if !task.operation.leaves(vm, PowerChange::Start) || !task.operation.mirrors_disks() {
        return Ok(());
    }
    let disks = disks::of_vm(from, vm).await?;
    let of_tpm = disks.iter().find(|disk| disk.role == DiskRole::Tpm);
    let concerned = of_tpm.filter(|disk| mirror_vm::concerns(&task.operation, disk));
    let Some(disk) = concerned.filter(|_| !steps::is_committed(&task)) else { return Ok(()) };
    // Before it has settled what it copies, that depends on whether the VM runs.
    if mirror_vm::of_task(&task).is_some_and(|copied| !copied.contains(&disk.id)) {
        return Ok(());
    }
    let mut problem = tasks::in_the_way(&task, &task.target);
    problem.detail.push_str(&format!(
        ". It copies disk '{}' with what the VM's TPM keeps, which a guest would use",
        disk.name
    ));
    Err(problem)
}

/// Whether a step of a task, done or undone, starts the VM. To undo a start is to cut the power.
pub(super) fn starts(operation: &Operation, undone: bool) -> bool {
    operation.power_change() == Some(PowerChange::Start) && !undone
}

/// The task that has the VM, if it is at a step in which the host has the VM otherwise than the inventory: a start (of this id) waits for that.
/// The step on record says so: the host may also have done it in an earlier run of the server.
pub(super) async fn redefining(
    store: &Store,
    vm: VmId,
    start: TaskId,
) -> Result<Option<Task>, StoreError> {
    let mut read = store.read().await?;
    let holding = tasks::holding(&mut read, vm).await?;
    let Some(task) = holding.filter(|task| task.id != start) else { return Ok(None) };
    let at = steps::of(&task.operation).iter().find(|step| step.name() == task.step);
    let Some(step) = at else { return Ok(None) };
    Ok(redefines(&mut read, vm, step.redefines()).await?.then_some(task))
}

async fn redefines(
    from: &mut SqliteConnection,
    vm: VmId,
    step: Redefines,
) -> Result<bool, StoreError> {
    Ok(match step {
        Redefines::Never => false,
        Redefines::Always => true,
        // No further one can come while the step's task has the VM.
        Redefines::AfterUnknownCopy => {
            let unknown = tasks::unknown_of_vm(from, vm).await?;
            unknown.iter().any(|task| task.operation.mirrors_disks())
        }
    })
}

/// What a start waits for, as it shows it.
pub(super) fn shown(redefining: &Task) -> Waiting {
    let detail = format!(
        "task {} ({}) is at the step '{}', in which the VM's host may use other images, or another key, than are on record: the VM is started afterwards",
        redefining.id,
        redefining.operation.kind(),
        steps::title(redefining)
    );
    Waiting { on: WaitingOn::Task, name: redefining.id.to_string(), detail }
}

/// Has a step in which the host has the VM otherwise than the inventory wait for a step of a start that is being done: what is held until the
/// step is done, or has failed. It is on record already that the task is at this step, so no other step of a start begins.
///
/// # Errors
/// The task is cancelled; or the inventory's.
pub(super) async fn keep_starts_away(
    definitions: &Locks<VmId>,
    run: &Run<'_>,
    step: &dyn Step,
) -> Result<Option<OwnedMutexGuard<()>>, StepError> {
    let step = step.redefines();
    // Without the inventory for most steps.
    if step == Redefines::Never
        || !redefines(&mut *run.store().read().await?, run.vm_id, step).await?
    {
        return Ok(None);
    }
    loop {
        run.check_cancelled()?;
        tokio::select! {
            turn = definitions.lock(run.vm_id) => return Ok(Some(turn)),
            () = cancelled(run) => {}
        }
    }
}

async fn cancelled(run: &Run<'_>) {
    let mut requests = run.requests.clone();
    if requests.wait_for(|requests| requests.cancelled).await.is_err() {
        // Nobody can cancel it any more.
        std::future::pending::<()>().await;
    }
}

/// Whether another task has the power of the VM alone, which this one leaves to others.
pub(super) async fn is_beside(run: &Run<'_>) -> bool {
    let Some((vm, _)) = run.task.operation.leaves_power() else { return false };
    let found = async {
        let mut read = run.store().read().await?;
        tasks::beside(&mut read, vm).await
    };
    matches!(found.await, Ok(Some(_)))
}

/// Waits until a VM whose power others may change is neither starting nor stopping, after a step has failed with this error. Returns whether
/// the step may succeed now. `was_beside` says whether another task had the power when the step was begun; `tried`, whether it was done again
/// for that reason alone.
pub(super) async fn outlast(
    run: &Run<'_>,
    error: &StepError,
    was_beside: bool,
    tried: &mut bool,
) -> bool {
    let Some((vm, _)) = run.task.operation.leaves_power() else { return false };
    let (StepError::Again(problem) | StepError::Final(problem)) = error else { return false };
    // What hosts refuse such a VM with.
    if !matches!(problem.code, ErrorCode::WrongState | ErrorCode::TimedOut) {
        return false;
    }
    let of_vm = run.for_vm(vm);
    match settled(&of_vm).await {
        Ok(true) => return true,
        // The host does not answer, which is dealt with as ever.
        Err(_) => return run.check_cancelled().is_err(),
        Ok(false) => {}
    }
    // It may have been so when the host refused, also where the other task has ended since.
    (was_beside || is_beside(run).await) && !std::mem::replace(tried, true)
}

/// Waits until the VM is neither starting nor stopping, both of which end by themselves. Returns whether it was.
async fn settled(run: &Run<'_>) -> Result<bool, StepError> {
    let vm = run.vm().await?;
    let changes = |state: &HostState| {
        let seen = state_of(state, vm.id);
        seen.is_some_and(|seen| matches!(seen.power, Power::Starting | Power::Stopping))
    };
    let mut state = run.host_state(vm.host, None).await?;
    let changed = changes(&state);
    while changes(&state) {
        run.check_cancelled()?;
        state = run.host_state(vm.host, Some(&state)).await?;
    }
    Ok(changed)
}
