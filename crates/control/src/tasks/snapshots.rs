//! Takes a snapshot of a VM's disks, reverts to one, and deletes one.
//!
//! ```text
//! take    reserve (its row is there) ─► prepare ─► take ─► record (commit)     undone by having the host drop it
//! revert  [cut its power] ─► check that the VM is off, or suspended and its memory given up (commit) ─► revert ─► record [─► start]
//! delete  check ─► mark (commit: it cannot be reverted to any more) ─► merge ─► record
//! ```
//! A deletion that cannot be finished leaves the row as marked: it is deleted again when the cause is gone.
//!
//! The host gives the memory of a suspended VM up when it has found all that it needs for the revert, and before it changes a disk. The
//! inventory expects that memory no more as soon as it is gone.

use std::sync::Arc;

use async_trait::async_trait;
use vmseal_api::host::version::{MEMORY_GENERATION, SUSPENDED_SNAPSHOTS};
use vmseal_api::host::{
    DropSnapshotJob, HostAgent, HostState, JobKind, JobSpec, Power, RevertJob, SnapshotJob,
};
use vmseal_api::id::SnapshotId;
use vmseal_api::model::SnapshotState;
use vmseal_api::problem::{ErrorCode, Problem};

use super::job::{self, follow, put};
use super::run::{Run, StepError, register, state_of, wrong_state};
use super::start_vm::{power_on, prepare};
use super::step::{Limit, Output, Step, WaitPolicy};
use super::stop_vm;
use crate::operation::Operation;
use crate::store::events::NewEvent;
use crate::store::memory_generations;
use crate::store::snapshots::{self, Snapshot};
use crate::store::vms::Vm;

/// The steps of the three operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SnapshotStep {
    Reserve,
    Prepare,
    Take,
    RecordTaken,
    CutPower,
    CheckOff,
    Revert,
    RecordReverted,
    Start,
    CheckPower,
    Mark,
    Merge,
    RecordDeleted,
}

pub(crate) const TAKE: &[&dyn Step] = &[
    &SnapshotStep::Reserve,
    &SnapshotStep::Prepare,
    &SnapshotStep::Take,
    &SnapshotStep::RecordTaken,
];

pub(crate) const REVERT: &[&dyn Step] =
    &[&SnapshotStep::CheckOff, &SnapshotStep::Revert, &SnapshotStep::RecordReverted];

/// The same of a VM that runs afterwards, and may run before. A guest whose power was cut is not started again where the rest cannot
/// be done: what it held is as after a power cut.
pub(crate) const REVERT_RUNNING: &[&dyn Step] = &[
    &SnapshotStep::CutPower,
    &SnapshotStep::CheckOff,
    &SnapshotStep::Revert,
    &SnapshotStep::RecordReverted,
    &SnapshotStep::Start,
];

pub(crate) const DELETE: &[&dyn Step] = &[
    &SnapshotStep::CheckPower,
    &SnapshotStep::Mark,
    &SnapshotStep::Merge,
    &SnapshotStep::RecordDeleted,
];

#[async_trait]
impl Step for SnapshotStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::Prepare => "prepare",
            Self::Take => "take",
            Self::RecordTaken => "record-taken",
            Self::CutPower => "cut-power",
            Self::CheckOff => "check-off",
            Self::Revert => "revert",
            Self::RecordReverted => "record-reverted",
            Self::Start => "start",
            Self::CheckPower => "check-power",
            Self::Mark => "mark",
            Self::Merge => "merge",
            Self::RecordDeleted => "record-deleted",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Reserve => "reserve its name",
            Self::Prepare => "register and deliver the key",
            Self::Take => "keep what the disks hold",
            Self::RecordTaken => "record the snapshot",
            Self::CutPower => "cut its power",
            Self::CheckOff => "check that the VM is at rest",
            Self::Revert => "revert the disks",
            Self::RecordReverted => "record what the disks hold",
            Self::Start => "deliver the key and start it",
            Self::CheckPower => "check the VM",
            Self::Mark => "mark the snapshot as being deleted",
            Self::Merge => "merge what nothing needs apart",
            Self::RecordDeleted => "remove the snapshot from the inventory",
        }
    }

    fn needs_key(&self) -> bool {
        matches!(self, Self::Prepare)
    }

    fn notes_what_it_sends(&self) -> bool {
        matches!(self, Self::CutPower | Self::Start)
    }

    fn commits(&self) -> bool {
        matches!(self, Self::RecordTaken | Self::CheckOff | Self::Mark)
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            Self::Merge | Self::RecordDeleted => WaitPolicy::BOTH,
            _ => WaitPolicy::NONE,
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::Prepare | Self::Start => Some(Limit::Provider),
            Self::Merge => Some(Limit::Copy),
            _ => None,
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Reserve => number(run).await.map(Output::from),
            Self::Prepare => prepare(run).await.map(Output::from),
            Self::Take => take(run).await.map(|quiesced| Output::of(&quiesced)),
            Self::RecordTaken => record_taken(run).await.map(Output::from),
            Self::CutPower => cut_power(run).await.map(Output::from),
            Self::CheckOff => check_off(run).await.map(|suspended| Output::of(&suspended)),
            Self::Revert => revert(run).await.map(Output::from),
            Self::RecordReverted => record_reverted(run).await.map(Output::from),
            Self::Start => start(run).await.map(Output::from),
            Self::CheckPower => check_power(run).await.map(Output::from),
            Self::Mark => mark(run).await.map(Output::from),
            Self::Merge => merge(run).await.map(Output::from),
            Self::RecordDeleted => record_deleted(run).await.map(Output::from),
        }
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::Reserve => {
                if let Some(snapshot) = find(run).await? {
                    let mut write = run.store().write().await?;
                    snapshots::delete(&mut write, &snapshot).await?;
                    write.commit().await?;
                }
                Ok(())
            }
            Self::CutPower => stop_vm::see_what_is(run).await,
            Self::Take => merge(run).await,
            Self::Mark => {
                let mut write = run.store().write().await?;
                snapshots::set_state(&mut write, id(run)?, SnapshotState::Ready).await?;
                Ok(write.commit().await?)
            }
            // Nothing was done, or it is past the commit step.
            _ => Ok(()),
        }
    }
}

fn id(run: &Run<'_>) -> Result<SnapshotId, StepError> {
    match run.task.operation {
        Operation::TakeSnapshot { snapshot, .. }
        | Operation::RevertSnapshot { snapshot, .. }
        | Operation::DeleteSnapshot { snapshot, .. } => Ok(snapshot),
        _ => {
            let what = "the task is about no snapshot";
            Err(StepError::Final(Problem::new(ErrorCode::Internal, what)))
        }
    }
}

/// The snapshot of the task; none if it is removed.
async fn find(run: &Run<'_>) -> Result<Option<Snapshot>, StepError> {
    let id = id(run)?;
    let known = snapshots::of_vm(&mut *run.store().read().await?, run.vm_id).await?;
    Ok(known.into_iter().find(|known| known.id == id))
}

async fn snapshot(run: &Run<'_>) -> Result<Snapshot, StepError> {
    find(run).await?.ok_or_else(|| {
        let detail = format!("VM '{}' has lost the snapshot of this task", run.task.target);
        StepError::Final(Problem::new(ErrorCode::NotFound, detail))
    })
}

/// The state of the VM's host, which knows the VM: whether a VM is suspended shows only then.
async fn known_state(run: &Run<'_>, vm: &Vm) -> Result<Arc<HostState>, StepError> {
    let state = run.host_state(vm.host, None).await?;
    if state_of(&state, vm.id).is_some() {
        return Ok(state);
    }
    register(run).await?;
    Ok(run.host_state(vm.host, None).await?)
}

/// Gives the memory that the snapshot is to keep a number, where its host's agent numbers memories. That of a VM that is suspended has
/// one already.
async fn number(run: &Run<'_>) -> Result<(), StepError> {
    let (vm, snapshot) = (run.vm().await?, snapshot(run).await?);
    if !snapshot.memory || !run.has_feature(&vm, MEMORY_GENERATION).await? {
        return Ok(());
    }
    let state = known_state(run, &vm).await?;
    let power = state_of(&state, vm.id).map(|seen| seen.power);
    if power == Some(Power::Suspending) {
        let detail = format!("VM '{}' is being suspended: wait a moment", vm.name);
        return Err(wrong_state(detail));
    }
    let mut write = run.store().write().await?;
    if power == Some(Power::Suspended) {
        memory_generations::keep_expected(&mut write, vm.id, snapshot.id).await?;
    } else {
        memory_generations::number_snapshot(&mut write, vm.id, snapshot.id).await?;
    }
    Ok(write.commit().await?)
}

async fn take(run: &Run<'_>) -> Result<Option<bool>, StepError> {
    let (vm, Snapshot { id, disks, memory, .. }) = (run.vm().await?, snapshot(run).await?);
    let quiesce = matches!(run.task.operation, Operation::TakeSnapshot { quiesce: true, .. });
    let generation = memory_generations::of_snapshot(&mut *run.store().read().await?, id).await?;
    let job = SnapshotJob { snapshot: id, quiesce, memory, generation, tracked: None, disks };
    put(run, &vm, JobSpec::Snapshot(job)).await?;
    follow(run, &vm, JobKind::Snapshot).await
}

async fn record_taken(run: &Run<'_>) -> Result<(), StepError> {
    let (vm, snapshot) = (run.vm().await?, snapshot(run).await?);
    let quiesced: Option<bool> = run.output(SnapshotStep::Take.name()).flatten();
    let mut write = run.store().write().await?;
    snapshots::set_taken(&mut write, snapshot.id, quiesced).await?;
    snapshots::set_current(&mut write, vm.id, Some(snapshot.id)).await?;
    let detail = format!("snapshot '{}' of {} disks", snapshot.name, snapshot.disks.len());
    let (kind, actor) = ("snapshot.taken", run.task.actor.as_str());
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    write.commit().await?;
    describe(run).await;
    Ok(())
}

/// Cuts the power of a VM that runs; one that is suspended has none.
async fn cut_power(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let state = run.host_state(vm.host, None).await?;
    match state_of(&state, vm.id).map(|seen| seen.power) {
        Some(Power::Suspended) => Ok(()),
        _ => stop_vm::power_off(run).await,
    }
}

/// Whether the saved memory of the VM is to be given up.
fn discards_memory(run: &Run<'_>) -> bool {
    matches!(run.task.operation, Operation::RevertSnapshot { discard_memory: true, .. })
}

/// Checks that no guest has the disks, and returns whether the VM is suspended.
async fn check_off(run: &Run<'_>) -> Result<bool, StepError> {
    let vm = run.vm().await?;
    let state = known_state(run, &vm).await?;
    let suspended = match state_of(&state, vm.id).map(|seen| seen.power) {
        None | Some(Power::Off) => false,
        Some(Power::Suspended) if discards_memory(run) => true,
        Some(Power::Suspended) => {
            let detail = format!(
                "VM '{0}' is suspended, and a revert loses its memory: resume it (vmseal vm resume {0}), or have the memory given up (--discard-memory)",
                vm.name
            );
            return Err(wrong_state(detail));
        }
        Some(_) => {
            let detail = format!(
                "VM '{0}' is not off: stop it first (vmseal vm stop {0}), as what it holds would change under its guest",
                vm.name
            );
            return Err(wrong_state(detail));
        }
    };
    register(run).await?;
    Ok(suspended)
}

/// Whether the VM was suspended before it was reverted.
fn was_suspended(run: &Run<'_>) -> bool {
    run.output(SnapshotStep::CheckOff.name()).unwrap_or(false)
}

async fn revert(run: &Run<'_>) -> Result<(), StepError> {
    let (vm, snapshot) = (run.vm().await?, snapshot(run).await?);
    let memory = snapshot.memory.then_some(snapshot.id);
    match revert_on_host(run, &vm, snapshot).await {
        Ok(()) => expect_memory(run, &vm, memory).await,
        Err(error) => {
            outdate_given_up(run, &vm).await?;
            Err(error)
        }
    }
}

async fn revert_on_host(run: &Run<'_>, vm: &Vm, snapshot: Snapshot) -> Result<(), StepError> {
    let Snapshot { id: snapshot, disks, memory, .. } = snapshot;
    // Earlier agents do not know it, and refuse a VM that is suspended.
    let discard_memory = discards_memory(run) && run.has_feature(vm, SUSPENDED_SNAPSHOTS).await?;
    put(run, vm, JobSpec::Revert(RevertJob { snapshot, memory, discard_memory, disks })).await?;
    follow(run, vm, JobKind::Revert).await.map(drop)
}

/// The disks are reverted: of the memories of the VM only the one that this snapshot keeps fits them, if it keeps one.
async fn expect_memory(run: &Run<'_>, vm: &Vm, kept: Option<SnapshotId>) -> Result<(), StepError> {
    let mut write = run.store().write().await?;
    match kept {
        Some(snapshot) => {
            memory_generations::expect_snapshots(&mut write, vm.id, snapshot).await?;
        }
        None => memory_generations::renew(&mut write, vm.id).await?,
    }
    Ok(write.commit().await?)
}

/// A revert has failed: where the memory of the VM is given up by then, its disks may be others, and no copy of that memory is taken any more.
async fn outdate_given_up(run: &Run<'_>, vm: &Vm) -> Result<(), StepError> {
    if !discards_memory(run) {
        return Ok(());
    }
    let state = run.host_state(vm.host, None).await?;
    match state_of(&state, vm.id).map(|seen| seen.power) {
        Some(Power::Off) => expect_memory(run, vm, None).await,
        _ => Ok(()),
    }
}

/// Has the guest start, or go on where the snapshot keeps its memory.
async fn start(run: &Run<'_>) -> Result<(), StepError> {
    prepare(run).await?;
    power_on(run).await
}

async fn record_reverted(run: &Run<'_>) -> Result<(), StepError> {
    let (vm, snapshot) = (run.vm().await?, snapshot(run).await?);
    let mut write = run.store().write().await?;
    snapshots::set_current(&mut write, vm.id, Some(snapshot.id)).await?;
    let actor = run.task.actor.as_str();
    if snapshot.memory {
        // Again: a server of an earlier version may have done the step before.
        memory_generations::expect_snapshots(&mut write, vm.id, snapshot.id).await?;
    }
    if was_suspended(run) {
        let (kind, target) = ("vm.memory-discarded", vm.name.as_str());
        write.event(NewEvent { kind, actor, target, detail: "" }).await?;
    }
    let detail = format!("to snapshot '{}'", snapshot.name);
    let kind = "snapshot.reverted";
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    write.commit().await?;
    describe(run).await;
    Ok(())
}

/// Has the host describe the VM on its datastores as it is now; one that does not answer does so later.
async fn describe(run: &Run<'_>) {
    if let Err(error) = register(run).await {
        tracing::info!(vm = run.task.target, problem = %error.as_problem(), "its descriptor follows later");
    }
}

/// A host drops snapshots of a VM that is off, suspended or runs, and none that linked clones stand on, of which it may know more than the
/// inventory.
async fn check_power(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    if let Some(snapshot) = find(run).await? {
        let droppable = check_droppable(&*run.agent(&vm)?, &vm, &snapshot).await;
        droppable.map_err(StepError::Final)?;
    }
    let state = run.host_state(vm.host, None).await?;
    match state_of(&state, vm.id).map(|seen| seen.power) {
        Some(Power::Starting) => {
            let detail = format!("VM '{}' is starting: wait until it runs", vm.name);
            Err(StepError::Final(Problem::new(ErrorCode::WrongState, detail)))
        }
        _ => Ok(()),
    }
}

/// Asks the host whether it would drop a snapshot.
///
/// # Errors
/// `wrong-state`, as linked clones stand on it, or for what the VM does; `in-use`, as a disk is exposed, for one. What else is wrong shows
/// when it is dropped.
pub(crate) async fn check_droppable(
    agent: &dyn HostAgent,
    vm: &Vm,
    snapshot: &Snapshot,
) -> Result<(), Problem> {
    let job = DropSnapshotJob { snapshot: snapshot.id, disks: snapshot.disks.clone() };
    match agent.examine_job(vm.id, JobSpec::DropSnapshot(job)).await {
        // A disk may be exposed for long: the snapshot is not marked as being deleted meanwhile.
        Err(problem) if matches!(problem.code, ErrorCode::WrongState | ErrorCode::InUse) => {
            let (name, of, why) = (&snapshot.name, &vm.name, &problem.detail);
            let detail = format!("snapshot '{name}' of VM '{of}' cannot be deleted: {why}");
            Err(Problem { detail, ..problem })
        }
        _ => Ok(()),
    }
}

async fn mark(run: &Run<'_>) -> Result<(), StepError> {
    let mut write = run.store().write().await?;
    snapshots::set_state(&mut write, id(run)?, SnapshotState::Deleting).await?;
    Ok(write.commit().await?)
}

/// Has the host drop the snapshot, if there is one, and merge its layers.
async fn merge(run: &Run<'_>) -> Result<(), StepError> {
    if find(run).await?.is_none() {
        return Ok(());
    }
    let (vm, Snapshot { id, disks, .. }) = (run.vm().await?, snapshot(run).await?);
    job::drop_snapshot(run, &vm, DropSnapshotJob { snapshot: id, disks }).await
}

async fn record_deleted(run: &Run<'_>) -> Result<(), StepError> {
    let Some(snapshot) = find(run).await? else { return Ok(()) };
    let vm = run.vm().await?;
    let mut write = run.store().write().await?;
    snapshots::delete(&mut write, &snapshot).await?;
    let detail = format!("snapshot '{}'", snapshot.name);
    let (kind, actor) = ("snapshot.deleted", run.task.actor.as_str());
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    write.commit().await?;
    describe(run).await;
    Ok(())
}

/// The problem of a failure after the commit step.
pub(super) fn unfinished(operation: &Operation, target: &str, cause: &Problem) -> Problem {
    let detail = match operation {
        Operation::DeleteSnapshot { .. } => format!(
            "a snapshot of VM '{target}' is given up, but not all of it is merged yet ({cause}): delete it again once the cause is fixed"
        ),
        Operation::RevertSnapshot { discard_memory: true, .. } => format!(
            "VM '{target}' was to be reverted, and it is not known how far that is ({cause}): do it again once the cause is fixed. If the VM is off, the memory that it had is given up, and its disks may be only partly reverted. If it is suspended, it has either its former memory and disks or those of the snapshot"
        ),
        Operation::RevertSnapshot { running: true, .. } => format!(
            "VM '{target}' was to be reverted and to run, and it is not known how far that is ({cause}): do it again once the cause is fixed. Where the VM is suspended, its disks are reverted, and its memory is that of the snapshot: resume it (vmseal vm resume {target})"
        ),
        _ => format!(
            "what was done with a snapshot of VM '{target}' is not on record ({cause}): do it again once the cause is fixed"
        ),
    };
    Problem { reason: cause.reason, ..Problem::new(cause.code, detail) }
}
