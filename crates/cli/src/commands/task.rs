//! Tasks, and waiting for them.

use std::time::Duration;

use anyhow::Context;
use vmseal_api::client::ServerClient;
use vmseal_api::model::{Task, TaskState};
use vmseal_api::problem::Problem;
use vmseal_api::request::SetTask;

use super::follow::Changes;
use super::list;
use super::progress::Progress;
use super::reconnect::{self, across, is_temporary, until_answer, within};
use crate::arguments::{self, DryRun, Output, Wait};
use crate::exit::{self, Ended, Exit, FailedTask, FailedTasks};
use crate::print::{self, plan};
use crate::rows::word;

/// What the overwriting of a former image does not promise.
const OLDER_COPIES: &str = "On flash, journaled or copy-on-write storage, and in snapshots and backups of the datastore, older copies of the data may remain.";

pub async fn run(
    server: &ServerClient,
    output: Output,
    verb: arguments::Task,
) -> anyhow::Result<()> {
    match verb {
        arguments::Task::List { list: how, state } => {
            let path = match state {
                Some(state) => format!("tasks?state={}", state.replace('-', "_")),
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
                true => across(server, async || open(server).await).await?,
                false => named(server, &tasks).await?,
            };
            if tasks.is_empty() {
                print::say("no task is running");
            }
            follow(server, output, tasks, None, Progress::watching(output)).await
        }
        arguments::Task::Cancel { name, force, dry_run } => {
            ask(server, output, &name, ("cancel", force), &dry_run).await
        }
        arguments::Task::Resolve { name, dry_run } => {
            ask(server, output, &name, ("resolve", false), &dry_run).await
        }
        arguments::Task::Pause { name, dry_run } => {
            ask(server, output, &name, ("pause", false), &dry_run).await
        }
        arguments::Task::Resume { name, dry_run } => {
            ask(server, output, &name, ("resume", false), &dry_run).await
        }
        arguments::Task::Set { name, rate, dry_run } => {
            let (path, request) = (format!("tasks/{name}"), SetTask { rate });
            if dry_run.dry_run {
                return plan::show(output, &server.try_patch(&path, &request).await?);
            }
            let task: Task = server.patch(&path, &request).await?;
            print::one(output, &task, &print::task_details(&task))
        }
    }
}

/// Asks something of a task that has no parameters, but may be forced.
async fn ask(
    server: &ServerClient,
    output: Output,
    name: &str,
    (verb, force): (&str, bool),
    dry_run: &DryRun,
) -> anyhow::Result<()> {
    let forced = if force { "?force=true" } else { "" };
    let path = format!("tasks/{name}/{verb}{forced}");
    if dry_run.dry_run {
        let plan = server.try_post(&path, &serde_json::Value::Null).await?;
        return plan::show(output, &plan);
    }
    let task: Task = server.post(&path, &serde_json::Value::Null).await?;
    print::one(output, &task, &print::task_details(&task))
}

/// Follows tasks, given by their ids, to their ends. What they do was printed before.
pub async fn until_ended(
    server: &ServerClient,
    ids: &[String],
    timeout: Option<Duration>,
) -> anyhow::Result<()> {
    if ids.is_empty() {
        return Ok(());
    }
    let tasks = named(server, ids).await?;
    follow(server, Output::Table, tasks, timeout, Progress::quiet()).await
}

async fn named(server: &ServerClient, ids: &[String]) -> anyhow::Result<Vec<Task>> {
    let mut tasks = Vec::new();
    for id in ids {
        let ask = async || server.get(&format!("tasks/{id}")).await;
        let task = across(server, ask).await;
        tasks.push(task.map_err(|last| lost(&last, &ids.join(" ")))?);
    }
    Ok(tasks)
}

/// The tasks that have not ended. One whose state changes meanwhile is in two lists.
async fn open(server: &ServerClient) -> Result<Vec<Task>, Problem> {
    let mut tasks: Vec<Task> = Vec::new();
    for state in TaskState::OPEN {
        let state = word(&state).replace('-', "_");
        for seen in server.all::<Task>(&format!("tasks?state={state}")).await? {
            match tasks.iter_mut().find(|task| task.id == seen.id) {
                Some(known) => *known = seen,
                None => tasks.push(seen),
            }
        }
    }
    tasks.sort_by_key(|task| task.id);
    Ok(tasks)
}

/// Begins a task and waits for it as `wait` says; with `--dry-run` only shows the plan.
pub async fn begin(
    server: &ServerClient,
    output: Output,
    path: &str,
    request: &(impl serde::Serialize + Sync),
    dry_run: &DryRun,
    wait: &Wait,
) -> anyhow::Result<()> {
    if dry_run.dry_run {
        return plan::show(output, &server.try_post(path, request).await?);
    }
    let begun = server.post(path, request).await?;
    settle(server, output, begun, wait).await
}

/// Begins a task, shows how far it is and waits for its end, for so long at most.
pub async fn begin_and_watch(
    server: &ServerClient,
    output: Output,
    path: &str,
    request: &(impl serde::Serialize + Sync),
    timeout: Option<Duration>,
) -> anyhow::Result<()> {
    let begun = server.post(path, request).await?;
    follow(server, output, vec![begun], timeout, Progress::watching(output)).await
}

/// Begins several tasks and waits for all of them as `wait` says; none is begun where the server would refuse one.
pub async fn begin_all(
    server: &ServerClient,
    output: Output,
    paths: &[String],
    request: &(impl serde::Serialize + Sync),
    dry_run: &DryRun,
    wait: &Wait,
) -> anyhow::Result<()> {
    for path in paths {
        let plan = server.try_post(path, request).await?;
        if dry_run.dry_run {
            plan::show(output, &plan)?;
        }
    }
    if dry_run.dry_run {
        return Ok(());
    }
    let mut begun: Vec<Task> = Vec::new();
    for path in paths {
        match server.post(path, request).await {
            Ok(task) => begun.push(task),
            Err(problem) if begun.is_empty() => return Err(problem.into()),
            Err(problem) => {
                let others = left("not all tasks were begun", &going(&begun));
                return Err(anyhow::Error::from(problem).context(others));
            }
        }
    }
    if wait.no_wait {
        return print::list(output, &arguments::Columns::usual(), begun);
    }
    follow(server, output, begun, wait.timeout, Progress::quiet()).await
}

/// Begins a task that removes something, or shows its plan.
pub async fn begin_deletion(
    server: &ServerClient,
    output: Output,
    path: &str,
    dry_run: &DryRun,
    wait: &Wait,
) -> anyhow::Result<()> {
    if dry_run.dry_run {
        return plan::show(output, &server.try_delete(path).await?);
    }
    let begun = server.delete_task(path).await?;
    settle(server, output, begun, wait).await
}

/// Waits for a task's end; with `--no-wait` only shows it.
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

/// Follows tasks to their ends. Ctrl-C and the timeout end the wait, not the tasks.
async fn follow(
    server: &ServerClient,
    output: Output,
    tasks: Vec<Task>,
    timeout: Option<Duration>,
    mut progress: Progress,
) -> anyhow::Result<()> {
    let several = tasks.len() > 1;
    let mut followed = Followed { tasks, away: None };
    let left = tokio::select! {
        ended = to_ends(server, &mut followed, &mut progress) => ended.map(|()| None)?,
        () = elapsed(timeout) => Some((Exit::GoesOn, "--timeout has passed")),
        Ok(()) = tokio::signal::ctrl_c() => Some((Exit::Interrupted, "interrupted")),
    };
    if let Some((exit, why)) = left {
        return Err(followed.leave(exit, why).into());
    }
    let ended = followed.tasks;
    match (output, ended.as_slice()) {
        _ if progress.prints_documents() => {}
        (Output::Table, _) => {}
        (_, [task]) if !several => print::one(output, task, &[])?,
        (_, tasks) => print::list(output, &arguments::Columns::usual(), tasks.to_vec())?,
    }
    former_images(&ended).iter().for_each(print::say);
    outcome(&ended)
}

/// What is said of the former images of disks that tasks have copied, also where a task has failed since.
fn former_images(tasks: &[Task]) -> Vec<String> {
    let all = || tasks.iter().flat_map(|task| task.former_images.iter().map(move |it| (task, it)));
    let mut said: Vec<_> = all().map(|(task, it)| format!("{}: {it}", task.target)).collect();
    if all().any(|(_, image)| image.is_overwritten()) {
        said.push(OLDER_COPIES.to_owned());
    }
    said
}

/// Tasks that are followed.
struct Followed {
    /// Their last known states.
    tasks: Vec<Task>,
    /// Why the server does not answer, if it does not.
    away: Option<Problem>,
}

impl Followed {
    /// The program's end if it stops waiting for them.
    fn leave(&self, exit: Exit, why: &str) -> Ended {
        let ids = going(&self.tasks);
        match (&self.away, exit) {
            (Some(away), Exit::GoesOn) => Ended::new(
                Exit::OutcomeUnknown,
                format!(
                    "{why}, and the server does not answer ({away}): whether the task is done is not known. To look again: vmseal task wait {ids}"
                ),
            ),
            _ => Ended::new(exit, left(why, &ids)),
        }
    }
}

/// The ids of those that have not ended.
fn going(tasks: &[Task]) -> String {
    let ids = tasks.iter().filter(|task| is_open(task)).map(|task| task.id.to_string());
    ids.collect::<Vec<_>>().join(" ")
}

fn left(why: &str, ids: &str) -> String {
    // A command cancels one task.
    let cancel: Vec<_> = ids.split(' ').map(|id| format!("vmseal task cancel {id}")).collect();
    let cancel = cancel.join("; ");
    format!("{why}; it goes on. To follow it: vmseal task wait {ids}. To cancel it: {cancel}")
}

async fn elapsed(timeout: Option<Duration>) {
    match timeout {
        Some(timeout) => tokio::time::sleep(timeout).await,
        None => std::future::pending().await,
    }
}

fn is_open(task: &Task) -> bool {
    task.state.is_open()
}

/// Follows tasks to their ends, across restarts of the server, and while it is busy.
async fn to_ends(
    server: &ServerClient,
    followed: &mut Followed,
    progress: &mut Progress,
) -> anyhow::Result<()> {
    loop {
        let problem = match while_answered(server, &mut followed.tasks, progress).await {
            Ok(()) => return Ok(()),
            Err(Stopped::Output(error)) => return Err(error),
            Err(Stopped::Server(problem)) => problem,
        };
        let ids = going(&followed.tasks);
        if !is_temporary(&problem) {
            return Err(problem).context(left("lost sight of the task", &ids));
        }
        progress.say(&format!("{problem}: asking again for {}", within()));
        followed.away = Some(problem.clone());
        // The task itself is requested: a busy server may answer other requests while it still fails this one.
        let open = followed.tasks.iter().find(|task| is_open(task));
        let path = open.map_or_else(|| "changes".to_owned(), |task| format!("tasks/{}", task.id));
        let ask = async || server.get::<serde_json::Value>(&path).await.map(drop);
        until_answer(reconnect::DEFAULT, problem, ask).await.map_err(|last| lost(&last, &ids))?;
        followed.away = None;
        progress.say("the server answers again");
    }
}

/// Why tasks are not followed.
enum Stopped {
    Server(Problem),
    /// What they do cannot be printed.
    Output(anyhow::Error),
}

impl From<Problem> for Stopped {
    fn from(problem: Problem) -> Self {
        Self::Server(problem)
    }
}

/// The error when the outcome of tasks is not known.
fn lost(last: &Problem, ids: &str) -> anyhow::Error {
    if !is_temporary(last) {
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
) -> Result<(), Stopped> {
    let mut changes = Changes::begin(server, "task").await?;
    loop {
        for task in tasks.iter_mut().filter(|task| is_open(task)) {
            *task = server.get(&format!("tasks/{}", task.id)).await?;
        }
        progress.show(tasks).map_err(Stopped::Output)?;
        if !tasks.iter().any(is_open) {
            return Ok(());
        }
        changes.next().await?;
    }
}

/// The program's end for tasks that have ended: that of the first problem.
fn outcome(tasks: &[Task]) -> anyhow::Result<()> {
    match FailedTasks::new(tasks.iter().filter_map(failure).collect()) {
        Some(failed) => Err(failed.into()),
        None => Ok(()),
    }
}

fn failure(task: &Task) -> Option<FailedTask> {
    let Task { kind, target, step, problem, request_id, .. } = task;
    let (exit, what) = match task.state {
        TaskState::Failed | TaskState::Cancelled => {
            let exit = problem.as_ref().map_or(Exit::Failed, |problem| problem.code.into());
            (exit, format!("{kind} {target} failed at step '{step}'"))
        }
        TaskState::Unknown => (
            Exit::OutcomeUnknown,
            format!("{kind} {target}: the outcome is not known at step '{step}'"),
        ),
        TaskState::Done
        | TaskState::Queued
        | TaskState::Running
        | TaskState::Waiting
        | TaskState::RollingBack => return None,
    };
    let trace = problem.as_ref().and_then(|it| exit::failed_inside(it, request_id.as_deref()));
    Some(FailedTask { exit, what, problem: problem.clone(), trace: trace.unwrap_or_default() })
}

#[cfg(test)]
mod tests {
    use vmseal_api::former_image::{Discard, FormerFate, FormerImage};
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
            bytes_per_second: None,
            seconds_left: None,
            migration: None,
            migrated: None,
            former_images: Vec::new(),
            rate: None,
            paused: false,
            created: jiff::Timestamp::UNIX_EPOCH,
            ended: None,
            waiting: None,
            parent: None,
            not_before: None,
            request_id: Some("r-1".into()),
            problem: code.map(|code| Problem::new(code, "why")),
        }
    }

    #[test]
    fn a_lost_server_is_an_unknown_outcome_with_advice() {
        for code in [ErrorCode::Unreachable, ErrorCode::Busy] {
            let error = lost(&Problem::new(code, "nobody is there"), "1 2");
            assert_eq!(Exit::of(&error), Exit::OutcomeUnknown);
            let said = error.to_string();
            assert!(said.contains("2m") && said.contains("vmseal task wait 1 2"), "{said}");
        }
        let other = Problem::new(ErrorCode::Unauthenticated, "another server");
        assert_eq!(Exit::of(&lost(&other, "1")), Exit::NotPermitted);
    }

    #[test]
    fn tasks_that_are_left_are_named_with_advice() {
        let (going, done) = (task(TaskState::RollingBack, None), task(TaskState::Done, None));
        let (id, other) = (going.id, done.id.to_string());
        let mut followed = Followed { tasks: vec![done, going], away: None };
        let exit = |ended: Ended| {
            let said = ended.to_string();
            assert!(said.contains(&format!("vmseal task wait {id}")), "{said}");
            assert!(!said.contains(&other), "it advises to wait for one that is done: {said}");
            (Exit::of(&ended.into()), said)
        };
        let (code, said) = exit(followed.leave(Exit::GoesOn, "--timeout has passed"));
        assert_eq!(code, Exit::GoesOn);
        assert!(said.contains(&format!("vmseal task cancel {id}")), "{said}");
        followed.away = Some(Problem::new(ErrorCode::Unreachable, "nobody is there"));
        assert_eq!(exit(followed.leave(Exit::Interrupted, "interrupted")).0, Exit::Interrupted);
        let (code, said) = exit(followed.leave(Exit::GoesOn, "--timeout has passed"));
        assert_eq!(code, Exit::OutcomeUnknown);
        assert!(said.contains("not known") && !said.contains("it goes on"), "{said}");
    }

    #[test]
    fn what_was_not_overwritten_is_not_said_to_be() {
        let image = |name: &str, fate| {
            let (disk, name) = (vmseal_api::id::DiskId::new(), name.to_owned());
            FormerImage { disk, name, fate, discard: Discard::ByFstrim }
        };
        let (clones, inodes) = (vec!["one".to_owned()], vec![7]);
        let shared = FormerFate::Shared { in_the_clear: true, clones, inodes };
        let mut done = task(TaskState::Done, None);
        assert!(former_images(std::slice::from_ref(&done)).is_empty());
        done.former_images = vec![image("data", shared)];
        let said = former_images(std::slice::from_ref(&done));
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].starts_with("web: disk 'data': its former image was not overwritten"));
        done.former_images.push(image("logs", FormerFate::Overwritten));
        let said = former_images(&[task(TaskState::Done, None), done]);
        assert!(said[1].contains("'logs'") && said[1].contains("overwritten with zeroes once"));
        assert_eq!(said[2..], [OLDER_COPIES]);
    }

    #[test]
    fn the_exit_code_is_that_of_the_first_failed_task() {
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
