//! The environment of every task: how often steps are retried, how many run at a time, and how a task's state is
//! recorded.

#[cfg(test)]
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use vmseal_api::id::VmId;
use vmseal_api::model::TaskState;
#[cfg(test)]
use vmseal_api::problem::Problem;

use super::held_steps::HeldSteps;
use super::limits::Limits;
use super::run::Context;
use crate::locks::Locks;
use crate::metrics;
use crate::operation::{Elsewhere, Operation};
use crate::store::events::NewEvent;
use crate::store::tasks::{self, Task};
use crate::task_alarms;

/// How often, and with what pauses, a step is tried while a host does not answer.
#[derive(Clone, Copy, Debug)]
pub struct Retry {
    /// The number of attempts.
    pub attempts: u32,
    /// The first pause; each further one is twice as long.
    pub first_pause: Duration,
    /// The longest pause.
    pub longest_pause: Duration,
    /// The pause before a failed access to the inventory is retried.
    pub store_pause: Duration,
}

impl Retry {
    /// About a minute in all: an agent that restarts is back by then, and users do not wait long for a host that is
    /// gone.
    pub const USUAL: Self = Self {
        attempts: 10,
        first_pause: Duration::from_millis(250),
        longest_pause: Duration::from_secs(10),
        store_pause: Duration::from_secs(2),
    };

    pub(super) fn pause(&self, attempt: u32) -> Duration {
        self.first_pause.saturating_mul(1 << attempt.min(16)).min(self.longest_pause)
    }
}

/// Where a test may inject a fault.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultPoint {
    Before,
    After,
}

/// The fault that a test injects.
#[cfg(test)]
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    None,
    /// As if the server's process ended here.
    Crash,
    /// The step fails: without being done (before), or although it was done (after).
    Fail(Problem),
    /// The step panics.
    Panic,
    /// The step is done once more.
    Twice,
}

#[cfg(test)]
pub(crate) type Faults = Arc<dyn Fn(&str, TaskState, FaultPoint) -> Fault + Send + Sync>;

/// The environment of every task.
pub(super) struct Environment {
    pub(super) context: Context,
    pub(super) retry: Retry,
    pub(super) limits: Limits,
    /// Of VMs that are started, or whose definition changes at their hosts before it does in the inventory.
    pub(super) definitions: Locks<VmId>,
    /// For tests of whole systems.
    pub(super) held: Option<HeldSteps>,
    #[cfg(test)]
    pub(super) faults: Option<Faults>,
}

impl Environment {
    pub(super) fn new(context: Context, retry: Retry) -> Self {
        Self {
            context,
            retry,
            limits: Limits::default(),
            definitions: Locks::default(),
            held: None,
            #[cfg(test)]
            faults: None,
        }
    }

    /// Ends a task, and releases its claim.
    pub(super) async fn end(&self, task: &mut Task, vm: VmId, state: TaskState) {
        task.state = state;
        task.waiting = None;
        task.ended = Some(Timestamp::now());
        let kind = match state {
            TaskState::Done => "task.done",
            TaskState::Unknown => "task.unknown",
            TaskState::Cancelled => "task.undone",
            _ => "task.failed",
        };
        self.save(task, Some((kind, vm))).await;
        if let Operation::MigrateVm { from, to, .. }
        | Operation::ChangeHost { from, to, .. }
        | Operation::EvacuateVm { from, to, .. } = task.operation
        {
            // What it may have left is theirs from here on.
            self.context.hosts.look_again(from);
            self.context.hosts.look_again(to);
        }
        if let Some(Elsewhere { from, to, .. }) = task.operation.elsewhere() {
            self.context.hosts.look_again(from);
            self.context.hosts.look_again(to);
        }
        if let Operation::MigrateAway { from: host, .. } | Operation::ReceiveVm { host, .. } =
            task.operation
        {
            self.context.hosts.look_again(host);
        }
        tracing::info!(kind = task.operation.kind(), outcome = kind, "the task has ended");
        let took = task.ended.map(|ended| ended.duration_since(task.created).unsigned_abs());
        let outcome = match state {
            TaskState::Cancelled => "cancelled",
            _ => kind.trim_start_matches("task."),
        };
        metrics::get().task(task.operation.kind(), outcome, took.unwrap_or_default());
    }

    /// Records the task's state. If the inventory cannot be written, retries until it can: a task must not go on without
    /// a record.
    pub(super) async fn save(&self, task: &Task, ended: Option<(&str, VmId)>) {
        loop {
            let saved = async {
                let mut write = self.context.store.write().await?;
                tasks::update(&mut write, task).await?;
                if let Some((kind, vm)) = ended {
                    match task.state {
                        TaskState::Unknown => task_alarms::unfinished(&mut write, task).await?,
                        TaskState::Done => task_alarms::answered(&mut write, task, vm).await?,
                        _ => {}
                    }
                    let mut detail = format!("{} as task {}", task.operation.kind(), task.id);
                    if let Some(problem) = &task.problem {
                        detail.push_str(&format!(": {problem}"));
                    }
                    let (actor, target) = (task.actor.as_str(), task.target.as_str());
                    write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
                }
                write.commit().await
            };
            match saved.await {
                Ok(()) => return,
                Err(error) => {
                    tracing::error!(task = %task.id, %error, "a task's state cannot be recorded");
                    tokio::time::sleep(self.retry.store_pause).await;
                }
            }
        }
    }
}
