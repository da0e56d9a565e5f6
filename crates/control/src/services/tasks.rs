//! Tasks.

use vmseal_api::model::{Page, Task, TaskState};
use vmseal_api::problem::Problem;

use super::caller::{Caller, Privilege};
use super::{Outcome, PageRequest, Services, page_of};
use crate::store::tasks;
use crate::tasks::steps;

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

/// Cancels a task: it stops and undoes what it has done.
pub async fn cancel(
    services: &Services,
    caller: &Caller,
    id: &str,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::ManageTasks)?;
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
