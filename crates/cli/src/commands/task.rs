//! Tasks, and waiting for one with a progress bar.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use vmseal_api::client::ServerClient;
use vmseal_api::model::{Task, TaskState};

use super::list;
use crate::arguments::{self, Output};
use crate::exit::{Ended, Exit};
use crate::print;

/// How often a task that is waited for is asked about.
const POLL: Duration = Duration::from_millis(250);

pub async fn run(
    server: &ServerClient,
    output: Output,
    verb: arguments::Task,
) -> anyhow::Result<()> {
    match verb {
        arguments::Task::List(how) => list::run(server, output, &how, "tasks").await,

        arguments::Task::Show(of) => {
            let task: Task = server.get(&format!("tasks/{}", of.name)).await?;
            show(output, &task)
        }
        arguments::Task::Wait(of) => {
            let task: Task = server.get(&format!("tasks/{}", of.name)).await?;
            finish(server, output, task).await
        }
        arguments::Task::Cancel(of) => {
            let path = format!("tasks/{}/cancel", of.name);
            let task: Task = server.post(&path, &serde_json::Value::Null).await?;
            show(output, &task)
        }
    }
}

fn show(output: Output, task: &Task) -> anyhow::Result<()> {
    print::one(output, task, &print::task_details(task))
}

/// Waits for a task's end, or only shows it where the user does not want to wait.
pub async fn settle(
    server: &ServerClient,
    output: Output,
    task: Task,
    wait: &arguments::Wait,
) -> anyhow::Result<()> {
    if wait.no_wait { show(output, &task) } else { finish(server, output, task).await }
}

/// Follows a task to its end. Leaving (Ctrl-C) does not stop it: `vmseal task cancel` does.
async fn finish(server: &ServerClient, output: Output, mut task: Task) -> anyhow::Result<()> {
    let bar = bar(&task);
    while matches!(task.state, TaskState::Running | TaskState::Undoing) {
        advance(&bar, &task);
        tokio::time::sleep(POLL).await;
        task = server.get(&format!("tasks/{}", task.id)).await?;
    }
    bar.finish_and_clear();
    if output != Output::Table {
        print::one(output, &task, &[])?;
    } else if task.state == TaskState::Done {
        eprintln!("{} {}: done", task.kind, task.target);
    }
    ended(&task)
}

/// How the program ends for a task that has: as it would have if the task's problem had been its own.
fn ended(task: &Task) -> anyhow::Result<()> {
    let Task { kind, target, step, problem, .. } = task;
    let because = problem.as_ref().map(ToString::to_string).unwrap_or_default();
    match task.state {
        TaskState::Done => Ok(()),
        TaskState::Unknown => {
            let message =
                format!("{kind} {target}: the outcome is not known at step '{step}': {because}");
            Err(Ended::new(Exit::OutcomeUnknown, message).into())
        }
        _ => {
            let exit = problem.as_ref().map_or(Exit::Failed, |problem| problem.code.into());
            let message = format!("{kind} {target} failed at step '{step}': {because}");
            Err(Ended::new(exit, message).into())
        }
    }
}

fn bar(task: &Task) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner();
    bar.set_prefix(format!("{} {}", task.kind, task.target));
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

fn advance(bar: &ProgressBar, task: &Task) {
    let template = match task.percent {
        Some(percent) => {
            bar.set_length(100);
            bar.set_position(u64::from(percent));
            "{prefix} {bar:30} {pos} % {msg} ({elapsed})"
        }
        None => "{prefix} {spinner} {msg} ({elapsed})",
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(match task.state {
        TaskState::Undoing => format!("undoing: {}", task.step),
        _ => task.step.clone(),
    });
}
