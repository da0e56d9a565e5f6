//! Tasks.

use vmseal_api::host::version::{
    MIGRATE_RATE, PACE, PACE_OF_PROOFS, PACE_OF_REMOVALS, PACE_OF_WORK,
};
use vmseal_api::model::{Page, Plan, Task, TaskState};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::Problem;
use vmseal_api::request::SetTask;
use vmseal_api::size::Size;

use super::caller::{Caller, Privilege};
use super::{Outcome, PageRequest, Services, features, page_of};
use crate::operation::Operation;
use crate::store::vms::Vm;
use crate::store::{tasks, vms};
use crate::tasks::mirror_vm::former;
use crate::tasks::pacing::PaceChange;
use crate::tasks::steps;

/// What an agent of an earlier version cannot do.
pub(super) const CANNOT_PACE: &str = "limit the rate of a copy, or pause it";

/// Lists the tasks, oldest first.
pub async fn list(
    services: &Services,
    caller: &Caller,
    request: PageRequest,
    state: Option<TaskState>,
) -> Result<Page<Task>, Problem> {
    caller.require(Privilege::Read)?;
    let part = request.part();
    let found = tasks::list(&mut *services.store.read().await?, &part, state).await?;
    let items = found.iter().map(|task| services.engine.shown(task)).collect();
    Ok(page_of(items, part.limit, |it: &Task| it.id.to_string()))
}

/// Shows a task.
pub async fn show(services: &Services, caller: &Caller, id: &str) -> Result<Task, Problem> {
    caller.require(Privilege::Read)?;
    let found = tasks::get(&mut *services.store.read().await?, id).await?;
    let task = found.ok_or_else(|| Problem::not_found("task", id))?;
    Ok(services.engine.shown(&task))
}

/// Cancels a task: it stops and undoes what it has done. With `force` a migration that waits for its other host does not wait any more: an
/// operator says that the host is gone for good, or that what the guest did there until it restarted may be lost.
pub async fn cancel(
    services: &Services,
    caller: &Caller,
    id: &str,
    force: bool,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::ManageTasks)?;
    if force {
        return give_up(services, caller, id, dry_run).await;
    }
    if dry_run {
        let task = services.engine.check_cancel(id).await?;
        let step = format!(
            "stop {} at step '{}', and undo what it has done",
            task.operation.kind(),
            steps::title(&task)
        );
        return Ok(Outcome::planned("task.cancel", &task.target, step));
    }
    let task = services.engine.cancel(id, caller.name()).await?;
    Ok(Outcome::Done(services.engine.shown(&task)))
}

/// Has the guest of a migration go on where it was, though the other host does not say whether it runs there.
async fn give_up(
    services: &Services,
    caller: &Caller,
    id: &str,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    if dry_run {
        let (task, host) = services.engine.check_give_up(id).await?;
        let (name, vm) = (&host.name, &task.target);
        let (steps, warning) = match task.operation {
            Operation::ReceiveVm { .. } => (
                vec![format!("have VM '{vm}' go on at the control plane that it comes from")],
                format!(
                    "host '{name}', or its agent, has restarted since VM '{vm}' was sent to it: what the VM has done there until then is lost. The copies of its disks stay there as files, and their key is destroyed"
                ),
            ),
            _ => (
                vec![
                    format!("have VM '{vm}' go on where it was, whatever host '{name}' would say"),
                    format!("end it on host '{name}' if that ever answers again"),
                ],
                format!(
                    "host '{name}' must be off, and stay off, or must have restarted since VM '{vm}' was sent to it: where the VM runs there, it runs on two hosts. What it has done there is lost. A TPM whose disk is on a datastore that both hosts have may have gone on there, too"
                ),
            ),
        };
        let (kind, target) = ("task.cancel".to_owned(), task.target.clone());
        let warnings = vec![warning];
        return Ok(Outcome::Planned(Plan { kind, target, steps, warnings, ..Plan::default() }));
    }
    let task = services.engine.give_up(id, caller.name()).await?;
    Ok(Outcome::Done(services.engine.shown(&task)))
}

/// Records that an operator has handled what a task left behind, and clears its alarm. A task that this version
/// cannot run ends as unknown, and its VM is free for other tasks.
pub async fn resolve(
    services: &Services,
    caller: &Caller,
    id: &str,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::ManageTasks)?;
    if dry_run {
        let task = services.engine.check_resolve(id).await?;
        let step = format!("clear the alarm of {} as task {}", task.operation.kind(), task.id);
        return Ok(Outcome::planned("task.resolve", &task.target, step));
    }
    let task = services.engine.resolve(id, caller.name()).await?;
    Ok(Outcome::Done(services.engine.shown(&task)))
}

/// The pace of a copy with this rate; 0 and none are no limit.
pub(super) fn pace_of(rate: Option<u64>) -> Result<CopyPace, Problem> {
    let bytes_per_second = rate.filter(|rate| *rate > 0);
    let pace = CopyPace { bytes_per_second, paused: false };
    pace.check().map_err(|wrong| Problem::invalid("rate", wrong))?;
    Ok(pace)
}

/// The same of work without a guest, where the VM's host can keep to it.
pub(super) fn work_pace(
    services: &Services,
    vm: &Vm,
    rate: Option<u64>,
) -> Result<CopyPace, Problem> {
    let pace = pace_of(rate)?;
    if !pace.is_free() {
        features::require(services, vm, PACE_OF_WORK, CANNOT_PACE)?;
    }
    Ok(pace)
}

/// Has a task that copies disks copy nothing until it is resumed.
pub async fn pause(
    services: &Services,
    caller: &Caller,
    id: &str,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    change_pace(services, caller, id, PaceChange::Pause, dry_run).await
}

/// Has a paused task go on.
pub async fn resume(
    services: &Services,
    caller: &Caller,
    id: &str,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    change_pace(services, caller, id, PaceChange::Resume, dry_run).await
}

/// Changes the rate of a task that copies disks.
pub async fn set(
    services: &Services,
    caller: &Caller,
    id: &str,
    request: SetTask,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    let rate = pace_of(Some(request.rate))?.bytes_per_second;
    change_pace(services, caller, id, PaceChange::Rate(rate), dry_run).await
}

async fn change_pace(
    services: &Services,
    caller: &Caller,
    id: &str,
    change: PaceChange,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::ManageTasks)?;
    let task = services.engine.check_change_pace(id, change).await?;
    let vm = match task.operation.vm() {
        Some(vm) => vms::get(&mut *services.store.read().await?, vm).await?,
        None => None,
    };
    if let Some(vm) = vm {
        let (feature, cannot) = match task.operation.is_migration() {
            true => (MIGRATE_RATE, "change the rate of a migration that is under way"),
            false if matches!(task.operation, Operation::ProveVm { .. }) => {
                (PACE_OF_PROOFS, "slow the reading for a proof, or pause it")
            }
            false if former::removes(&task) => {
                (PACE_OF_REMOVALS, "slow the overwriting of former images, or pause it")
            }
            false if task.operation.has_work_pace() => (PACE_OF_WORK, CANNOT_PACE),
            false => (PACE, CANNOT_PACE),
        };
        features::require_unless_away(services, &vm, feature, cannot)?;
    }
    if dry_run {
        let (kind, what) = match change {
            PaceChange::Pause => ("task.pause", "copy nothing for now".to_owned()),
            PaceChange::Resume => ("task.resume", "go on copying".to_owned()),
            PaceChange::Rate(None) => ("task.set", "go on without a limit".to_owned()),
            PaceChange::Rate(Some(rate)) => {
                let what = if task.operation.is_migration() { "send" } else { "copy each disk" };
                ("task.set", format!("{what} at {} a second at most", Size(rate)))
            }
        };
        let step =
            format!("have {} {what}, at step '{}'", task.operation.kind(), steps::title(&task));
        return Ok(Outcome::planned(kind, &task.target, step));
    }
    let task = services.engine.change_pace(id, change, caller.name()).await?;
    Ok(Outcome::Done(services.engine.shown(&task)))
}
