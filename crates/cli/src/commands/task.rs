//! Tasks, and waiting for them.

use std::time::Duration;

use anyhow::Context;
use vmseal_api::client::ServerClient;
use vmseal_api::model::{self, Task, TaskState};
use vmseal_api::problem::Problem;

use super::follow::Changes;
use super::progress::Progress;
use super::reconnect::{self, may_pass, until_answer};
use super::{list, plan};
use crate::arguments::{self, Output, Wait};
use crate::exit::{self, Ended, Exit};
use crate::print;

pub async fn run(
    server: &ServerClient,
    output: Output,
    verb: arguments::Task,
) -> anyhow::Result<()> {
    match verb {
        arguments::Task::List { list: how, state } => {
            let path = match state {
                Some(state) => format!("tasks?state={state}"),
                None => "tasks".to_owned(),
            };
            list::run(server, output, &how, &path).await
        }
        arguments::Task::Show(of) => {
            list::one(server, output, &of, "tasks", print::task_details).await
        }
        arguments::Task::Wait { tasks, timeout } => {
            let tasks = named(server, &tasks).await?;
            follow(server, output, tasks, timeout, Progress::quiet()).await
        }
        arguments::Task::Watch { tasks } => {
            let tasks = match tasks.is_empty() {
                true => server.all("tasks?state=running").await?,
                false => named(server, &tasks).await?,
            };
            if tasks.is_empty() {
                print::say("no task is running");
            }
            follow(server, output, tasks, None, Progress::telling()).await
        }
        arguments::Task::Cancel { name, dry_run } => {
            let path = format!("tasks/{name}/cancel");
            if dry_run.dry_run {
                let plan = server.try_post(&path, &serde_json::Value::Null).await?;
                return plan::show(output, &plan);
            }
            let task: Task = server.post(&path, &serde_json::Value::Null).await?;
            print::one(output, &task, &print::task_details(&task))
        }
    }
}

async fn named(server: &ServerClient, ids: &[String]) -> anyhow::Result<Vec<Task>> {
    let mut tasks = Vec::new();
    for id in ids {
        tasks.push(server.get(&format!("tasks/{id}")).await?);
    }
    Ok(tasks)
}

/// Waits for a task's end, or only shows it where the user does not want to wait.
pub async fn settle(
    server: &ServerClient,
    output: Output,
    task: Task,
    wait: &Wait,
) -> anyhow::Result<()> {
    if wait.no_wait {
        return print::one(output, &task, &print::task_details(&task));
    }
    follow(server, output, vec![task], wait.timeout, Progress::quiet()).await
}

/// Follows tasks to their ends. Leaving them, by Ctrl-C or because time is over, does not stop them.
async fn follow(
    server: &ServerClient,
    output: Output,
    tasks: Vec<Task>,
    timeout: Option<Duration>,
    mut progress: Progress,
) -> anyhow::Result<()> {
    let several = tasks.len() > 1;
    let going = going(&tasks);
    let ended = tokio::select! {
        ended = to_ends(server, tasks, &mut progress) => ended?,
        () = over(timeout) => {
            return Err(Ended::new(Exit::GoesOn, left("--timeout has passed", &going)).into());
        }
        Ok(()) = tokio::signal::ctrl_c() => {
            return Err(Ended::new(Exit::Interrupted, left("interrupted", &going)).into());
        }
    };
    match (output, ended.as_slice()) {
        (Output::Table, _) => {}
        (_, [task]) if !several => print::one(output, task, &[])?,
        (_, tasks) => print::list(output, &arguments::Columns::usual(), tasks.to_vec())?,
    }
    outcome(&ended)
}

/// The ids of those that have not ended.
fn going(tasks: &[Task]) -> String {
    let ids = tasks.iter().filter(|task| is_open(task)).map(|task| task.id.to_string());
    ids.collect::<Vec<_>>().join(" ")
}

fn left(why: &str, ids: &str) -> String {
    format!(
        "{why}; it goes on. To follow it: vmseal task wait {ids}. To cancel it: vmseal task cancel {ids}"
    )
}

async fn over(timeout: Option<Duration>) {
    match timeout {
        Some(timeout) => tokio::time::sleep(timeout).await,
        None => std::future::pending().await,
    }
}

fn is_open(task: &Task) -> bool {
    matches!(task.state, TaskState::Running | TaskState::Undoing)
}

/// Follows tasks to their ends, across restarts of the server.
async fn to_ends(
    server: &ServerClient,
    mut tasks: Vec<Task>,
    progress: &mut Progress,
) -> anyhow::Result<Vec<Task>> {
    while let Err(problem) = while_answered(server, &mut tasks, progress).await {
        let ids = going(&tasks);
        if !may_pass(&problem) {
            return Err(problem).context(left("lost sight of the task", &ids));
        }
        progress.say(&format!("{problem}: asking again for {}", within()));
        let ask = async || server.get::<model::Changes>("changes").await.map(drop);
        until_answer(reconnect::USUAL, problem, ask).await.map_err(|last| lost(&last, &ids))?;
        progress.say("the server answers again");
    }
    Ok(tasks)
}

fn within() -> String {
    format!("{}m", reconnect::USUAL.total.as_secs() / 60)
}

/// What is said when nobody knows any more what has become of tasks.
fn lost(last: &Problem, ids: &str) -> anyhow::Error {
    if !may_pass(last) {
        return anyhow::Error::from(last.clone()).context(left("lost sight of the task", ids));
    }
    let within = within();
    let message = format!(
        "the server has not answered for {within} ({last}): whether the task is done is not known. To look again: vmseal task wait {ids}"
    );
    Ended::new(Exit::OutcomeUnknown, message).into()
}

/// The same, as long as the server answers.
async fn while_answered(
    server: &ServerClient,
    tasks: &mut [Task],
    progress: &mut Progress,
) -> Result<(), Problem> {
    let mut changes = Changes::begin(server).await?;
    loop {
        for task in tasks.iter_mut().filter(|task| is_open(task)) {
            *task = server.get(&format!("tasks/{}", task.id)).await?;
        }
        progress.show(tasks);
        if !tasks.iter().any(is_open) {
            return Ok(());
        }
        changes.next().await?;
    }
}

/// How the program ends for tasks that have: as it would have if the first problem had been its own.
fn outcome(tasks: &[Task]) -> anyhow::Result<()> {
    let failures: Vec<_> = tasks.iter().filter_map(failure).collect();
    let Some((exit, _)) = failures.first() else { return Ok(()) };
    let messages: Vec<_> = failures.iter().map(|(_, message)| message.as_str()).collect();
    Err(Ended::new(*exit, messages.join("\n")).into())
}

fn failure(task: &Task) -> Option<(Exit, String)> {
    let Task { kind, target, step, problem, request_id, .. } = task;
    let told = |problem: &Problem| {
        let inside = exit::failed_inside(problem, request_id.as_deref()).unwrap_or_default();
        format!("{problem}{inside}")
    };
    let because = problem.as_ref().map(told).unwrap_or_default();
    match task.state {
        TaskState::Failed => {
            let exit = problem.as_ref().map_or(Exit::Failed, |problem| problem.code.into());
            Some((exit, format!("{kind} {target} failed at step '{step}': {because}")))
        }
        TaskState::Unknown => Some((
            Exit::OutcomeUnknown,
            format!("{kind} {target}: the outcome is not known at step '{step}': {because}"),
        )),
        TaskState::Done | TaskState::Running | TaskState::Undoing => None,
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::problem::ErrorCode;

    use super::*;

    fn task(state: TaskState, code: Option<ErrorCode>) -> Task {
        Task {
            id: vmseal_api::id::TaskId::new(),
            kind: "vm.start".into(),
            target: "web".into(),
            state,
            step: "power on".into(),
            percent: None,
            progress: None,
            created: jiff::Timestamp::UNIX_EPOCH,
            ended: None,
            request_id: Some("r-1".into()),
            problem: code.map(|code| Problem::new(code, "why")),
        }
    }

    #[test]
    fn a_lost_server_is_told_as_an_unknown_end_with_what_to_do() {
        let away = Problem::new(ErrorCode::Unreachable, "nobody is there");
        let error = lost(&away, "1 2");
        assert_eq!(Exit::of(&error), Exit::OutcomeUnknown);
        let said = error.to_string();
        assert!(said.contains("2m") && said.contains("vmseal task wait 1 2"), "{said}");
        let other = Problem::new(ErrorCode::Unauthenticated, "another server");
        assert_eq!(Exit::of(&lost(&other, "1")), Exit::NotPermitted);
    }

    #[test]
    fn a_tasks_end_is_the_programs() {
        let exit = |tasks: &[Task]| outcome(tasks).err().map(|error| Exit::of(&error));
        let done = task(TaskState::Done, None);
        let locked = task(TaskState::Failed, Some(ErrorCode::Locked));
        let unknown = task(TaskState::Unknown, Some(ErrorCode::Unreachable));
        assert_eq!(exit(&[]), None);
        assert_eq!(exit(std::slice::from_ref(&done)), None);
        assert_eq!(exit(&[done, locked.clone()]), Some(Exit::NoKey));
        assert_eq!(exit(std::slice::from_ref(&unknown)), Some(Exit::OutcomeUnknown));
        let both = outcome(&[unknown, locked]).unwrap_err();
        assert_eq!(Exit::of(&both), Exit::OutcomeUnknown);
        assert_eq!(both.to_string().lines().count(), 2);
        assert!(!both.to_string().contains("r-1"), "{both}");
        let inside = outcome(&[task(TaskState::Failed, Some(ErrorCode::Internal))]).unwrap_err();
        assert!(inside.to_string().ends_with("why (request id r-1)"), "{inside}");
    }
}
