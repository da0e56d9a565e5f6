//! Carries tasks out.
//!
//! ```text
//!              a step fails for good, or it is cancelled
//!   Running ─────────────────────────────────────────────► Undoing
//!    │   ▲ next step                         the step before │   ▲
//!    │   └───┘                                               │   └───┘
//!    │ after the last step                 after the first   │
//!    ▼                                                       ▼
//!   Done                                   Failed ◄──────────┴──────────► Unknown
//!                                                    a step cannot be undone
//! ```
//!
//! The state and the place are in the inventory before a step begins. A server that starts goes on with
//! every task where it was: the step that was under way is done (or undone) again from its beginning,
//! which every step can bear. A host's silence is no answer: the step is repeated with growing pauses,
//! and when that is no use it is undone, as it may have been done. A step that fills or writes disks waits
//! for its host as long as that takes, or until it is cancelled.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tracing::Instrument;
use vmseal_api::id::TaskId;
use vmseal_api::model::{self, TaskState};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id;
use vmseal_api::transfer::Progress;

use super::operation::{Operation, Step};
use super::run::{Gauge, Means, Run, StepError};
use crate::hosts::Hosts;
use crate::metrics;
use crate::providers::Providers;
use crate::store::events::NewEvent;
use crate::store::tasks::{self, Task};
use crate::store::{Store, StoreError, Write};

/// How often, and with what pauses, a step is tried that a host leaves unanswered.
#[derive(Clone, Copy, Debug)]
pub struct Retry {
    /// How often in all.
    pub attempts: u32,
    /// The first pause; each is twice the one before.
    pub first_pause: Duration,
    /// The longest pause.
    pub longest_pause: Duration,
}

impl Retry {
    /// About a minute in all: an agent that restarts is back by then, and a host that is gone does
    /// not keep its users waiting for long.
    pub const USUAL: Self = Self {
        attempts: 10,
        first_pause: Duration::from_millis(250),
        longest_pause: Duration::from_secs(10),
    };

    fn pause(&self, attempt: u32) -> Duration {
        self.first_pause.saturating_mul(1 << attempt.min(16)).min(self.longest_pause)
    }
}

/// How long the inventory is given before it is tried again when it cannot be written.
const STORE_PAUSE: Duration = Duration::from_secs(2);

/// A task that is being carried out, as others see it.
struct Running {
    cancel: watch::Sender<bool>,
    gauge: Arc<Gauge>,
    work: AbortHandle,
}

/// Where a test may interfere.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    Before,
    After,
}

/// What a test may do there.
#[cfg(test)]
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    None,
    /// As if the server's process ended here.
    Crash,
    /// The step fails without being done (before), or although it was done (after).
    Fail(Problem),
    /// It is done once more.
    Twice,
}

#[cfg(test)]
pub(crate) type Faults = Arc<dyn Fn(Step, TaskState, Moment) -> Fault + Send + Sync>;

/// Carries tasks out until [`Engine::stop`].
pub struct Engine {
    means: Means,
    retry: Retry,
    running: Mutex<HashMap<TaskId, Running>>,
    #[cfg(test)]
    pub(crate) faults: Option<Faults>,
}

/// Why [`Engine::carry_out`] stopped before the task's end.
struct Crashed;

impl Engine {
    /// An engine that has not begun anything yet.
    #[must_use]
    pub fn new(
        store: Arc<Store>,
        providers: Arc<Providers>,
        hosts: Arc<Hosts>,
        retry: Retry,
    ) -> Self {
        Self {
            means: Means { store, providers, hosts },
            retry,
            running: Mutex::default(),
            #[cfg(test)]
            faults: None,
        }
    }

    fn running(&self) -> MutexGuard<'_, HashMap<TaskId, Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Goes on with the tasks that have not ended.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn resume(self: &Arc<Self>) -> Result<(), StoreError> {
        for task in tasks::open(&mut *self.means.store.read().await?).await? {
            self.spawn(task);
        }
        Ok(())
    }

    /// Writes a new task together with what `write` holds; [`Engine::begin`] follows once that is
    /// committed.
    ///
    /// # Errors
    /// `wrong-state` while the VM has another task.
    pub async fn record(
        write: &mut Write<'_>,
        operation: Operation,
        target: &str,
        actor: &str,
    ) -> Result<Task, Problem> {
        let step = operation.steps().first().map_or("", |step| step.name());
        let task = Task {
            id: TaskId::new(),
            operation,
            target: target.to_owned(),
            actor: actor.to_owned(),
            state: TaskState::Running,
            position: 0,
            step: step.to_owned(),
            cancelled: false,
            created: Timestamp::now(),
            ended: None,
            request_id: request_id::current(),
            problem: None,
        };
        tasks::insert(write, &task).await?;
        let detail = format!("{} as task {}", task.operation.kind(), task.id);
        let kind = "task.begun";
        write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
        Ok(task)
    }

    /// Begins a task that is recorded.
    pub fn begin(self: &Arc<Self>, task: Task) {
        self.spawn(task);
    }

    fn spawn(self: &Arc<Self>, task: Task) {
        let (cancel, cancelled) = watch::channel(task.cancelled);
        let gauge = Arc::new(Gauge::default());
        let id = task.id;
        let engine = Arc::clone(self);
        // Held over the insertion, so that an end cannot come before its beginning.
        let mut running = self.running();
        let work = {
            let gauge = Arc::clone(&gauge);
            let request = task.request_id.clone();
            let span = tracing::error_span!("task", %id);
            let work = async move {
                let (kind, target) = (task.operation.kind(), &task.target);
                tracing::info!(kind, target, step = task.step, "the task goes on");
                if engine.carry_out(task, cancelled, &gauge).await.is_ok() {
                    engine.running().remove(&id);
                }
            };
            tokio::spawn(request_id::during(request, work.instrument(span)))
        };
        running.insert(id, Running { cancel, gauge, work: work.abort_handle() });
    }

    /// Asks a task to stop and to undo what it has done.
    ///
    /// # Errors
    /// `not-found`; `wrong-state` when it has ended, is being undone, or cannot be stopped half-way.
    pub async fn cancel(&self, id: &str, actor: &str) -> Result<Task, Problem> {
        let mut write = self.means.store.write().await?;
        let task = Self::note_cancelled(&mut write, id).await?;
        let (kind, target) = ("task.cancelled", task.target.as_str());
        let detail = format!("{} as task {}", task.operation.kind(), task.id);
        write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
        write.commit().await?;
        if let Some(running) = self.running().get(&task.id) {
            running.cancel.send_replace(true);
        }
        Ok(task)
    }

    /// Whether [`Engine::cancel`] would stop it; nothing is stopped.
    ///
    /// # Errors
    /// Those of [`Engine::cancel`].
    pub async fn check_cancel(&self, id: &str) -> Result<Task, Problem> {
        // What is written is not committed.
        Self::note_cancelled(&mut self.means.store.write().await?, id).await
    }

    async fn note_cancelled(write: &mut Write<'_>, id: &str) -> Result<Task, Problem> {
        let task = tasks::get(write, id).await?.ok_or_else(|| Problem::not_found("task", id))?;
        let refused = |why| Err(Problem::new(ErrorCode::WrongState, why));
        if !task.operation.can_be_cancelled() {
            return refused(format!("{} cannot be stopped half-way", task.operation.kind()));
        }
        if !tasks::cancel(write, task.id).await? {
            return refused("the task has ended, or is being undone".to_owned());
        }
        Ok(task)
    }

    /// A task as the API shows it.
    #[must_use]
    pub fn shown(&self, task: &Task) -> model::Task {
        let reading = self.running().get(&task.id).map(|it| it.gauge.read()).unwrap_or_default();
        let progress = reading.progress.filter(|_| task.ended.is_none());
        let step = match reading.waiting {
            Some(host) => format!("{}: waiting for host '{host}'", task.step),
            None => task.step.clone(),
        };
        model::Task {
            id: task.id,
            kind: task.operation.kind().to_owned(),
            target: task.target.clone(),
            state: task.state,
            step,
            percent: progress.and_then(Progress::percent),
            progress,
            created: task.created,
            ended: task.ended,
            request_id: task.request_id.as_ref().map(ToString::to_string),
            problem: task.problem.clone(),
        }
    }

    /// Stops all work where it is; the next start goes on with it.
    pub fn stop(&self) {
        for (_, running) in self.running().drain() {
            running.work.abort();
        }
    }

    async fn carry_out(
        &self,
        mut task: Task,
        cancelled: watch::Receiver<bool>,
        gauge: &Gauge,
    ) -> Result<(), Crashed> {
        let steps = task.operation.steps();
        while task.state == TaskState::Running {
            let Some(step) = steps.get(task.position).copied() else {
                self.end(&mut task, TaskState::Done).await;
                break;
            };
            let run = Run { means: &self.means, task: &task, cancelled: cancelled.clone(), gauge };
            match self.attempt(&run, step, None).await? {
                Ok(()) => task.position += 1,
                Err(problem) => {
                    tracing::warn!(task = %task.id, step = step.name(), %problem, "undoing");
                    task.state = TaskState::Undoing;
                    task.problem = Some(problem);
                }
            }
            if let Some(next) = steps.get(task.position) {
                task.step = next.name().to_owned();
                self.save(&task, None).await;
            }
        }
        // Undoing is not to be cancelled, and its waits are not to be cut short.
        let (_keep, never) = watch::channel(false);
        let cause = task.problem.clone();
        while task.state == TaskState::Undoing {
            let (Some(step), Some(cause)) = (steps.get(task.position).copied(), &cause) else {
                self.end(&mut task, TaskState::Failed).await;
                break;
            };
            let run = Run { means: &self.means, task: &task, cancelled: never.clone(), gauge };
            match self.attempt(&run, step, Some(cause)).await? {
                Ok(()) if task.position == 0 => self.end(&mut task, TaskState::Failed).await,
                Ok(()) => {
                    task.position -= 1;
                    self.save(&task, None).await;
                }
                Err(problem) => {
                    let detail =
                        format!("{cause}; and undoing '{}' failed: {problem}", step.name());
                    task.problem = Some(Problem::new(problem.code, detail));
                    self.end(&mut task, TaskState::Unknown).await;
                }
            }
        }
        Ok(())
    }

    /// Does a step, or undoes it because of `cause`, with patience for hosts that do not answer.
    async fn attempt(
        &self,
        run: &Run<'_>,
        step: Step,
        cause: Option<&Problem>,
    ) -> Result<Result<(), Problem>, Crashed> {
        let (mut attempt, mut furthest) = (0, 0);
        loop {
            let tried = match self.try_once(run, step, cause).await? {
                Err(StepError::Again(problem)) => problem,
                outcome => return Ok(outcome.map_err(StepError::problem)),
            };
            let done = run.gauge.read().progress.map_or(0, |progress| progress.done);
            if done > furthest {
                (attempt, furthest) = (0, done);
            }
            let patient = cause.is_none() && step.waits_for_its_host();
            if patient && run.outwait_silence(|asked| self.retry.pause(asked)).await {
                attempt = 0;
                continue;
            }
            if attempt + 1 >= self.retry.attempts {
                return Ok(Err(tried));
            }
            let pause = self.retry.pause(attempt);
            tracing::info!(task = %run.task.id, step = step.name(), problem = %tried, ?pause, "again");
            let mut cancelled = run.cancelled.clone();
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                Ok(()) = cancelled.changed() => {}
            }
            attempt += 1;
        }
    }

    async fn try_once(
        &self,
        run: &Run<'_>,
        step: Step,
        cause: Option<&Problem>,
    ) -> Result<Result<(), StepError>, Crashed> {
        if let Err(cancelled) = run.check_cancelled() {
            return Ok(Err(cancelled));
        }
        #[cfg(test)]
        if let Some(interfered) = self.interfere(run, step, cause, Moment::Before).await? {
            return Ok(interfered);
        }
        let outcome = perform(run, step, cause).await;
        #[cfg(test)]
        if outcome.is_ok()
            && let Some(interfered) = self.interfere(run, step, cause, Moment::After).await?
        {
            return Ok(interfered);
        }
        Ok(outcome)
    }

    #[cfg(test)]
    async fn interfere(
        &self,
        run: &Run<'_>,
        step: Step,
        cause: Option<&Problem>,
        moment: Moment,
    ) -> Result<Option<Result<(), StepError>>, Crashed> {
        let Some(faults) = &self.faults else { return Ok(None) };
        match faults(step, run.task.state, moment) {
            Fault::None => Ok(None),
            Fault::Crash => Err(Crashed),
            Fault::Fail(problem) => Ok(Some(Err(problem.into()))),
            Fault::Twice => Ok(Some(perform(run, step, cause).await)),
        }
    }

    async fn end(&self, task: &mut Task, state: TaskState) {
        task.state = state;
        task.ended = Some(Timestamp::now());
        let kind = match state {
            TaskState::Done => "task.done",
            TaskState::Unknown => "task.unknown",
            _ => "task.failed",
        };
        self.save(task, Some(kind)).await;
        tracing::info!(kind = task.operation.kind(), outcome = kind, "the task has ended");
        let took = task.ended.map(|ended| ended.duration_since(task.created).unsigned_abs());
        let outcome = kind.trim_start_matches("task.");
        metrics::get().task(task.operation.kind(), outcome, took.unwrap_or_default());
    }

    /// Records how the task stands; an inventory that cannot be written is tried until it can, as going
    /// on without a record would be going on in the dark.
    async fn save(&self, task: &Task, event: Option<&str>) {
        loop {
            let saved = async {
                let mut write = self.means.store.write().await?;
                tasks::update(&mut write, task).await?;
                if let Some(kind) = event {
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
                    tokio::time::sleep(STORE_PAUSE).await;
                }
            }
        }
    }
}

async fn perform(run: &Run<'_>, step: Step, cause: Option<&Problem>) -> Result<(), StepError> {
    match cause {
        None => step.forward(run).await,
        Some(cause) => step.back(run, cause).await,
    }
}
