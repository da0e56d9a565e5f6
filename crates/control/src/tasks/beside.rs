//! Tasks beside which others change the power of their VM ([`Operation::leaves_power`], docs/decisions/312).
//!
//! | the task beside | what is done |
//! |---|---|
//! | is refused by the host as the VM is starting or stopping | it waits for that, and does its step again ([`outlast`]) |
//! | is at a step in which the host has the VM otherwise than the inventory | no start registers the VM meanwhile, or goes on ([`turn`]) |
//! | copies what the VM's TPM keeps | it is not started: swtpm would have that ([`require_no_tpm_copied`]) |
//!
//! [`Operation::leaves_power`]: crate::operation::Operation::leaves_power

use std::time::Duration;

use sqlx::SqliteConnection;
use tokio::sync::OwnedMutexGuard;
use vmseal_api::host::{DiskRole, HostState, Power};
use vmseal_api::id::VmId;
use vmseal_api::problem::{ErrorCode, Problem};

use super::run::{Run, StepError, state_of};
use super::step::Step;
use super::{mirror_vm, steps};
use crate::locks::Locks;
use crate::operation::{Operation, PowerChange};
use crate::store::{disks, tasks};

/// How often a start looks again whether its turn has come: it is told of changes, and one may be missed.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

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

/// Has a start, and a step of another task in which the host has the VM otherwise than the inventory, wait for each other: what is held
/// until the step is done, or has failed.
///
/// # Errors
/// The task is cancelled; or the inventory's.
pub(super) async fn turn(
    definitions: &Locks<VmId>,
    run: &Run<'_>,
    step: &dyn Step,
    undone: bool,
) -> Result<Option<OwnedMutexGuard<()>>, StepError> {
    // To undo a start is to cut the power.
    let starts = run.task.operation.power_change() == Some(PowerChange::Start) && !undone;
    if !starts && !step.redefines() {
        return Ok(None);
    }
    let mut changes = run.store().changes();
    loop {
        run.check_cancelled()?;
        changes.mark_unchanged();
        let turn = tokio::select! {
            turn = definitions.lock(run.vm_id) => turn,
            () = cancelled(run) => continue,
        };
        // Also of an earlier run of the server: the host may have done it.
        if !starts || !is_redefined(run).await? {
            return Ok(Some(turn));
        }
        drop(turn);
        tokio::select! {
            Ok(()) = changes.changed() => {}
            () = cancelled(run) => {}
            () = tokio::time::sleep(LOOK_AGAIN) => {}
        }
    }
}

/// Whether the task that has the VM is at a step in which the host has the VM otherwise than the inventory.
async fn is_redefined(run: &Run<'_>) -> Result<bool, StepError> {
    let holding = tasks::holding(&mut *run.store().read().await?, run.vm_id).await?;
    let Some(task) = holding.filter(|task| task.id != run.task.id) else { return Ok(false) };
    let mut at = steps::of(&task.operation).iter().filter(|step| step.name() == task.step);
    Ok(at.any(|step| step.redefines()))
}

async fn cancelled(run: &Run<'_>) {
    let mut requests = run.requests.clone();
    if requests.wait_for(|requests| requests.cancelled).await.is_err() {
        // Nobody can cancel it any more.
        std::future::pending::<()>().await;
    }
}

/// Waits until a VM whose power others may change is neither starting nor stopping, after a step has failed with this error. Returns whether
/// the step may succeed now. `tried` says whether it was done again because another task only has the VM's power.
pub(super) async fn outlast(run: &Run<'_>, error: &StepError, tried: &mut bool) -> bool {
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
    // It may have been so when the host refused.
    let is_beside = async {
        let mut read = run.store().read().await?;
        tasks::beside(&mut read, vm).await
    };
    matches!(is_beside.await, Ok(Some(_))) && !std::mem::replace(tried, true)
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
