//! Runs one task.
//!
//! ```text
//!   Waiting (for its time)
//!      │            a permit is free           host, provider, passphrase
//!   Queued ◄───────────────────────► Running ◄───────────────────────────► Waiting
//!                                    │ ▲ │ next step
//!      a step fails for good, or     │ └─┘                 after the last step
//!      it is cancelled, before the   │  └────────────────────────────────────► Done
//!      commit step                   │
//!                                    ├── a step fails after the commit step ─► Unknown
//!                                    ▼
//!                               RollingBack ── all is undone ─► Failed, Cancelled
//!                                    │ ▲ │
//!                    the step before │ └─┘──── a step cannot be undone ──────► Unknown
//! ```
//!
//! State and step are in the inventory before the step begins, with the outputs of the steps before it. A starting
//! server resumes every task where it was: the interrupted step is done (or undone) again from its beginning, as
//! every step is repeatable. If a host does not answer, the step is repeated with growing pauses; if it never
//! answers, the step is undone, as it may have been done. A step that insists is done, or undone, until it is answered. While a user
//! has paused the task, the step that copies disks waits, and is done again afterwards. A step's [`super::step::WaitPolicy`] says what it waits for
//! without a limit; after the commit step a task waits for everything.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use jiff::Timestamp;
use tokio::sync::{OwnedMutexGuard, OwnedSemaphorePermit, Semaphore, watch};
use vmseal_api::model::{TaskState, Waiting, WaitingOn};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};

use super::environment::{Environment, Retry};
#[cfg(test)]
use super::environment::{Fault, FaultPoint};
use super::held_steps::Moment;
use super::limits::Share;
use super::run::{LiveProgress, Requests, Run, StepError};
use super::step::{Awaited, Limit, Output, Step, WaitPolicy};
use super::waits::{self, FailureKind};
use super::{beside, limits, migrate_vm, steps};
use crate::hosts::is_silence;
use crate::store::tasks::Task;
use crate::store::{disks, providers, vms};

/// Why running a task stopped before its end.
pub(super) enum Interrupted {
    /// As if the server's process had ended.
    #[cfg(test)]
    Crashed,
    /// This version does not know its step.
    Unreadable(String),
}

/// Why a step was not done.
struct StepFailure {
    problem: Problem,
    /// Whether no host received a request of it: then there is nothing to undo.
    unsent: bool,
}

pub(super) struct Runner<'a> {
    pub(super) environment: &'a Environment,
    pub(super) task: Task,
    pub(super) vm_id: vmseal_api::id::VmId,
    pub(super) requests: watch::Receiver<Requests>,
    pub(super) paces: watch::Receiver<CopyPace>,
    pub(super) heard: watch::Receiver<()>,
    pub(super) live: Arc<LiveProgress>,
    /// Whether the step may have been begun in an earlier run of the server.
    pub(super) resumed: bool,
}

impl Runner<'_> {
    pub(super) async fn carry_out(mut self) -> Result<(), Interrupted> {
        self.await_time().await;
        loop {
            match self.task.state {
                TaskState::Queued | TaskState::Running | TaskState::Waiting => {
                    self.advance().await?
                }
                TaskState::RollingBack => self.retreat().await?,
                _ => return Ok(()),
            }
        }
    }

    fn steps(&self) -> &'static [&'static dyn Step] {
        steps::of(&self.task.operation)
    }

    /// The index of the current step.
    fn position(&self) -> Result<usize, Interrupted> {
        let name = &self.task.step;
        let found = self.steps().iter().position(|step| step.name() == name);
        found.ok_or_else(|| {
            Interrupted::Unreadable(format!("this version knows no step '{name}' of it"))
        })
    }

    /// Waits for the task's earliest start.
    async fn await_time(&mut self) {
        let Some(time) = self.task.not_before else { return };
        while let Ok(left) = Duration::try_from(time.duration_since(Timestamp::now()))
            && !left.is_zero()
            && !self.requests.borrow().cancelled
        {
            let waiting =
                Waiting { on: WaitingOn::Time, name: time.to_string(), detail: String::new() };
            self.note_waiting(waiting).await;
            let mut requests = self.requests.clone();
            tokio::select! {
                () = tokio::time::sleep(left.min(CLOCK_CHECK)) => {}
                Ok(()) = requests.changed() => {}
            }
        }
    }

    /// Does the next step.
    async fn advance(&mut self) -> Result<(), Interrupted> {
        let position = self.position()?;
        let step = self.steps()[position];
        let committed = self.steps()[..position].iter().any(|step| step.commits());
        match self.attempt(step, None, committed).await? {
            Ok(Output(output)) => {
                if let Some(output) = output {
                    self.task.outputs.insert(step.name().to_owned(), output);
                }
                match self.steps().get(position + 1) {
                    Some(next) => self.go_to(*next, TaskState::Running).await,
                    None => self.environment.end(&mut self.task, self.vm_id, TaskState::Done).await,
                }
            }
            Err(StepFailure { problem, .. }) if committed => {
                let (operation, target) = (&self.task.operation, &self.task.target);
                self.task.problem = Some(steps::unfinished(operation, step, target, &problem));
                self.environment.end(&mut self.task, self.vm_id, TaskState::Unknown).await;
            }
            Err(StepFailure { problem, unsent }) => {
                tracing::warn!(task = %self.task.id, step = step.name(), %problem, "rolling back");
                self.task.problem = Some(problem);
                self.task.failed_step = Some(step.name().to_owned());
                match position.checked_sub(usize::from(unsent)) {
                    Some(from) => self.go_back_to(self.steps()[from]).await,
                    None => self.end_undone().await,
                }
            }
        }
        Ok(())
    }

    /// Undoes the current step.
    async fn retreat(&mut self) -> Result<(), Interrupted> {
        let position = self.position()?;
        let step = self.steps()[position];
        let cause = self.task.problem.clone().unwrap_or_else(|| {
            Problem::new(ErrorCode::Internal, "the inventory does not say why it is undone")
        });
        let undone = match self.attempt(step, Some(&cause), false).await? {
            Err(StepFailure { problem, .. })
                if step.is_undone_by_monitor() && is_silence(&problem) =>
            {
                tracing::info!(task = %self.task.id, step = step.name(), %problem, "undone later, without the task");
                Ok(())
            }
            other => other.map(drop),
        };
        match undone {
            Ok(()) => match position.checked_sub(1) {
                Some(before) => self.go_back_to(self.steps()[before]).await,
                None => self.end_undone().await,
            },
            Err(StepFailure { problem, .. }) => {
                let left = steps::may_be_left(&self.task.operation);
                let left = left.map_or_else(String::new, |left| format!(". Besides, {left}"));
                let detail =
                    format!("{cause}; and undoing '{}' failed: {problem}{left}", step.title());
                self.task.problem = Some(Problem::new(problem.code, detail));
                self.environment.end(&mut self.task, self.vm_id, TaskState::Unknown).await;
            }
        }
        Ok(())
    }

    async fn go_to(&mut self, step: &dyn Step, state: TaskState) {
        self.resumed = false;
        self.task.step = step.name().to_owned();
        self.task.state = state;
        self.task.waiting = None;
        self.environment.save(&self.task, None).await;
    }

    async fn go_back_to(&mut self, step: &dyn Step) {
        self.live.show(None);
        self.go_to(step, TaskState::RollingBack).await;
    }

    /// Ends a task that is completely undone; the step shown is that at which it failed.
    async fn end_undone(&mut self) {
        let cancelled =
            self.task.problem.as_ref().is_some_and(|problem| problem.code == ErrorCode::Cancelled);
        let state = if cancelled { TaskState::Cancelled } else { TaskState::Failed };
        self.environment.end(&mut self.task, self.vm_id, state).await;
    }

    /// Does a step, or undoes it because of `cause`, with retries while a host or provider does not answer.
    async fn attempt(
        &mut self,
        step: &'static dyn Step,
        cause: Option<&Problem>,
        committed: bool,
    ) -> Result<Result<Output, StepFailure>, Interrupted> {
        let wait_policy = match cause {
            Some(_) => WaitPolicy::NONE,
            None if committed => WaitPolicy::BOTH,
            None => step.wait_policy(),
        };
        // What was asked before is known, and ends no pause.
        self.requests.borrow_and_update();
        // A task that is being undone, or is past its commit step, is not cancelled.
        let (_keep, never) = watch::channel(Requests::default());
        let requests = match cause {
            None if !committed => self.requests.clone(),
            _ => never,
        };
        let (environment, live, vm_id) = (self.environment, Arc::clone(&self.live), self.vm_id);
        let (retry, context) = (environment.retry, &environment.context);
        let (mut tries, mut furthest, mut sent) = (0, 0, self.resumed);
        let mut tried_beside = false;
        loop {
            // While a start waits for another task, it has no permit that others could use.
            let turn = match beside::starts(&self.task.operation, cause.is_some()) {
                true => self.take_turn(&requests).await,
                false => None,
            };
            let share = self.take_share(step, &requests).await;
            let task = self.task.clone();
            let (requests, sent_now) = (requests.clone(), AtomicBool::new(false));
            let (paces, heard, live, sent_to) =
                (self.paces.clone(), self.heard.clone(), &*live, sent_now);
            let run =
                Run { context, task: &task, vm_id, requests, paces, heard, live, sent: sent_to };
            let was_beside = beside::is_beside(&run).await;
            let outcome = self.try_once(&run, step, cause).await?;
            sent |= run.sent.load(Ordering::Relaxed);
            drop((turn, share));
            let error = match outcome {
                Ok(output) => return Ok(Ok(output)),
                Err(error) => error,
            };
            if beside::outlast(&run, &error, was_beside, &mut tried_beside).await {
                tracing::info!(task = %task.id, step = step.name(), problem = %error.as_problem(), "again, as the VM started or stopped");
                continue;
            }
            let done = self.live.read().map_or(0, |seen| seen.progress.done);
            if done > furthest {
                (tries, furthest) = (0, done);
            }
            match waits::classify(&error, wait_policy) {
                FailureKind::Paused => {
                    self.note_paused().await;
                    until_resumed(&run).await;
                    self.note_running().await;
                    tries = 0;
                }
                FailureKind::Inventory => {
                    tracing::error!(task = %task.id, error = %error.as_problem(), "the inventory fails: waiting");
                    pause(retry.store_pause, &run.requests).await;
                }
                FailureKind::Provider => {
                    let waiting = waits::for_provider(&run, error.as_problem()).await;
                    self.note_waiting(waiting).await;
                    let answers = self.await_provider(retry.pause(tries), &run.requests).await;
                    // A long step is shown as running; a short one that waits again does not flicker.
                    if answers || wait_policy.host {
                        self.note_running().await;
                    }
                    tries = tries.saturating_add(1);
                }
                FailureKind::Silence => {
                    let (problem, awaited) = (error.as_problem(), step.awaited(&run).await);
                    let mut waiter = HostWait { run: &run, retry, problem, awaited };
                    if wait_policy.host && waiter.is_silent().await {
                        let waiting = waiter.shown().await;
                        self.note_waiting(waiting).await;
                        waiter.outwait().await;
                        self.note_running().await;
                        tries = 0;
                        continue;
                    }
                    if tries + 1 >= retry.attempts && !committed && !step.insists() {
                        return Ok(Err(Self::failure(step, error, sent)));
                    }
                    let pause_for = retry.pause(tries);
                    tracing::info!(task = %task.id, step = step.name(), problem = %error.as_problem(), ?pause_for, "again");
                    // It goes on until it succeeds: people see why it does not.
                    let told = (committed || step.insists()) && tries > 0;
                    if told {
                        let mut waiting = waiter.shown().await;
                        if step.insists()
                            && let Some(remote) = migrate_vm::away::remote_of(&run).await
                        {
                            waiting.name = remote;
                        }
                        self.note_waiting(waiting).await;
                    }
                    match cause {
                        None => {
                            pause(pause_for, &run.requests).await;
                            if told {
                                self.note_running().await;
                            }
                        }
                        // An operator may say that nobody will answer. What it waits for is shown until the step is undone.
                        Some(_) => {
                            pause(pause_for, &self.requests).await;
                            self.requests.borrow_and_update();
                        }
                    }
                    tries = tries.saturating_add(1);
                }
                FailureKind::Final => return Ok(Err(Self::failure(step, error, sent))),
            }
        }
    }

    fn failure(step: &dyn Step, error: StepError, sent: bool) -> StepFailure {
        let problem = error.problem();
        let unsent =
            step.notes_what_it_sends() && !sent && is_silence(&problem) && !problem.in_doubt;
        StepFailure { problem, unsent }
    }

    /// Publishes what the task waits for. One that is being undone stays so: a server that has restarted goes on undoing it.
    async fn note_waiting(&mut self, waiting: Waiting) {
        let state = match self.task.state {
            TaskState::RollingBack => TaskState::RollingBack,
            _ => TaskState::Waiting,
        };
        if self.task.waiting.as_ref() != Some(&waiting) || self.task.state != state {
            tracing::info!(task = %self.task.id, on = ?waiting.on, name = waiting.name, "waiting");
            self.task.waiting = Some(waiting);
            self.task.state = state;
            self.environment.save(&self.task, None).await;
        }
    }

    /// Publishes that the task waits for its turn. One that is shown as waiting for something else stays so.
    async fn note_queued(&mut self, awaited: Waiting) {
        if matches!(self.task.state, TaskState::Running | TaskState::Queued) {
            tracing::info!(task = %self.task.id, detail = awaited.detail, "queued");
            self.task.waiting = Some(awaited);
            self.task.state = TaskState::Queued;
            self.environment.save(&self.task, None).await;
        }
    }

    /// Publishes that the task is paused.
    async fn note_paused(&mut self) {
        if self.task.waiting.is_some() || self.task.state != TaskState::Waiting {
            tracing::info!(task = %self.task.id, "paused");
            self.task.waiting = None;
            self.task.state = TaskState::Waiting;
            self.environment.save(&self.task, None).await;
        }
    }

    /// Publishes that the task no longer waits.
    async fn note_running(&mut self) {
        self.task.waiting = None;
        self.task.state = TaskState::Running;
        self.environment.save(&self.task, None).await;
    }

    /// Has a start wait while another task is at a step in which the host has the VM otherwise than the inventory; it is shown as waiting for
    /// that task. Returns what keeps such steps away until it is dropped; none if the task is cancelled, which the step checks.
    async fn take_turn(
        &mut self,
        requests: &watch::Receiver<Requests>,
    ) -> Option<OwnedMutexGuard<()>> {
        let (environment, vm) = (self.environment, self.vm_id);
        let mut requests = requests.clone();
        let mut changes = environment.context.store.changes();
        while !requests.borrow().cancelled {
            changes.mark_unchanged();
            // Locked before looking: a task that comes to such a step afterwards waits for this lock.
            let turn = environment.definitions.try_lock(vm);
            match beside::redefining(&environment.context.store, vm, self.task.id).await {
                Ok(None) if turn.is_some() => {
                    let waited = self.task.waiting.as_ref();
                    if waited.is_some_and(|waiting| waiting.on == WaitingOn::Task) {
                        self.note_running().await;
                    }
                    return turn;
                }
                // The step is just over, which its task has not recorded yet.
                Ok(None) => {}
                Ok(Some(other)) => {
                    drop(turn);
                    self.note_waiting(beside::shown(&other)).await;
                }
                Err(error) => {
                    drop(turn);
                    tracing::error!(task = %self.task.id, %error, "the inventory fails: waiting");
                }
            }
            tokio::select! {
                Ok(()) = changes.changed() => {}
                Ok(()) = requests.changed() => {}
                () = tokio::time::sleep(beside::LOOK_AGAIN) => {}
            }
        }
        None
    }

    /// Waits for a permit if the step's concurrency is limited; then the step runs.
    async fn take_share(
        &mut self,
        step: &dyn Step,
        requests: &watch::Receiver<Requests>,
    ) -> Option<OwnedSemaphorePermit> {
        let share = match self.permits(step).await {
            None => None,
            Some((permits, awaited)) => match limits::try_take(&permits) {
                Some(share) => Some(share),
                None => {
                    self.note_queued(awaited).await;
                    let mut requests = requests.clone();
                    // Also where that was asked for before: between two steps, or before the server restarted.
                    let cancelled =
                        async { requests.wait_for(|asked| asked.cancelled).await.is_ok() };
                    tokio::select! {
                        share = permits.acquire_owned() => share.ok(),
                        // The step checks whether it is cancelled.
                        true = cancelled => None,
                    }
                }
            },
        };
        if self.task.state == TaskState::Queued {
            self.note_running().await;
        }
        share
    }

    /// The permits of which the step needs one, and what the task shows that waits for one.
    async fn permits(&self, step: &dyn Step) -> Option<(Arc<Semaphore>, Waiting)> {
        if self.task.state == TaskState::RollingBack {
            return None;
        }
        let limit = step.limit()?;
        let mut read = self.environment.context.store.read().await.ok()?;
        let vm = vms::get(&mut read, self.vm_id).await.ok()??;
        let to_make = match limit {
            Limit::NewDisks => disks::of_vm(&mut read, self.vm_id).await.ok()?,
            Limit::Copy | Limit::Proof | Limit::Short | Limit::Provider => Vec::new(),
        };
        let share = Share::of(limit, &self.task.operation, &to_make);
        let (whose, name) = match limit {
            Limit::Provider => {
                let id = vm.provider?;
                let found = providers::find(&mut read, &id.to_string()).await.ok().flatten();
                (id.0, found.map(|found| found.name).unwrap_or_default())
            }
            Limit::Copy | Limit::NewDisks | Limit::Proof | Limit::Short => {
                (vm.host.0, vm.host_name)
            }
        };
        Some((self.environment.limits.of(share, whose), share.awaited(name)))
    }

    /// Waits until a provider can be used again (true), a user requests something of the task, or a pause is over.
    async fn await_provider(
        &self,
        at_most: Duration,
        requests: &watch::Receiver<Requests>,
    ) -> bool {
        let mut unlocks = self.environment.context.providers.unlocks();
        let mut requests = requests.clone();
        tokio::select! {
            Ok(()) = unlocks.changed() => true,
            () = tokio::time::sleep(at_most) => false,
            Ok(()) = requests.changed() => false,
        }
    }

    async fn try_once(
        &self,
        run: &Run<'_>,
        step: &'static dyn Step,
        cause: Option<&Problem>,
    ) -> Result<Result<Output, StepError>, Interrupted> {
        if let Err(cancelled) = run.check_cancelled() {
            return Ok(Err(cancelled));
        }
        let definitions = &self.environment.definitions;
        let _alone = match beside::keep_starts_away(definitions, run, step).await {
            Ok(alone) => alone,
            Err(error) => return Ok(Err(error)),
        };
        #[cfg(test)]
        if let Some(interfered) = self.interfere(run, step, cause, FaultPoint::Before).await? {
            return Ok(interfered);
        }
        if let Some(held) = &self.environment.held {
            held.hold(run, step, cause.is_some(), Moment::Before).await;
        }
        let outcome = perform(run, step, cause).await;
        if let Some(held) = &self.environment.held {
            held.hold(run, step, cause.is_some(), Moment::After).await;
        }
        #[cfg(test)]
        if outcome.is_ok()
            && let Some(interfered) = self.interfere(run, step, cause, FaultPoint::After).await?
        {
            return Ok(interfered);
        }
        Ok(outcome)
    }

    #[cfg(test)]
    async fn interfere(
        &self,
        run: &Run<'_>,
        step: &'static dyn Step,
        cause: Option<&Problem>,
        point: FaultPoint,
    ) -> Result<Option<Result<Output, StepError>>, Interrupted> {
        let Some(faults) = &self.environment.faults else { return Ok(None) };
        let state = if cause.is_some() { TaskState::RollingBack } else { TaskState::Running };
        match faults(step.name(), state, point) {
            Fault::None => Ok(None),
            Fault::Crash => Err(Interrupted::Crashed),
            Fault::Fail(problem) => {
                // The effect of a step that fails so is unknown.
                run.sent.store(true, Ordering::Relaxed);
                Ok(Some(Err(problem.into())))
            }
            Fault::Panic => {
                let panics = async || -> Result<Output, StepError> { panic!("on purpose") };
                Ok(Some(caught(step, panics()).await))
            }
            Fault::Twice => Ok(Some(perform(run, step, cause).await)),
        }
    }
}

/// How often a task that waits for a time checks whether the clock was set.
const CLOCK_CHECK: Duration = Duration::from_secs(60);

/// A pause that ends early if a user requests something of the task.
async fn pause(pause: Duration, requests: &watch::Receiver<Requests>) {
    let mut requests = requests.clone();
    tokio::select! {
        () = tokio::time::sleep(pause) => {}
        Ok(()) = requests.changed() => {}
    }
}

/// Waits until a user has a paused task go on, or cancels it.
async fn until_resumed(run: &Run<'_>) {
    let (mut requests, mut paces) = (run.requests.clone(), run.paces.clone());
    let resumed = async { paces.wait_for(|pace| !pace.paused).await.is_ok() };
    let cancelled = async { requests.wait_for(|requests| requests.cancelled).await.is_ok() };
    tokio::select! {
        true = resumed => {}
        true = cancelled => {}
        else => {}
    }
}

/// Waits for the host of a VM, or for the one whose answer its step waits for.
struct HostWait<'a> {
    run: &'a Run<'a>,
    retry: Retry,
    problem: &'a Problem,
    awaited: Option<Awaited>,
}

impl HostWait<'_> {
    /// Whether the step failed because the host does not answer: it does not answer now either.
    async fn is_silent(&mut self) -> bool {
        let host = match &self.awaited {
            Some(awaited) => awaited.host,
            None => match self.run.vm().await {
                Ok(vm) => vm.host,
                Err(_) => return false,
            },
        };
        let Ok(agent) = self.run.hosts().agent(host) else { return false };
        let mut requests = self.run.requests.clone();
        tokio::select! {
            answer = agent.describe() => answer.is_err_and(|problem| is_silence(&problem)),
            Ok(()) = requests.changed() => false,
        }
    }

    async fn shown(&self) -> Waiting {
        let (name, detail) = match &self.awaited {
            Some(awaited) => {
                (awaited.name.clone(), format!("{}. {}", self.problem, awaited.advice))
            }
            None => {
                let name = self.run.vm().await.map(|vm| vm.host_name).unwrap_or_default();
                (name, self.problem.to_string())
            }
        };
        Waiting { on: WaitingOn::Host, name, detail }
    }

    /// Waits until it answers, or a user requests something of the task.
    async fn outwait(&mut self) {
        let mut asked = 0;
        loop {
            pause(self.retry.pause(asked), &self.run.requests).await;
            asked = asked.saturating_add(1);
            if self.run.check_cancelled().is_err() || !self.is_silent().await {
                return;
            }
        }
    }
}

async fn perform(
    run: &Run<'_>,
    step: &'static dyn Step,
    cause: Option<&Problem>,
) -> Result<Output, StepError> {
    caught(step, async {
        match cause {
            None => step.forward(run).await,
            Some(cause) => step.back(run, cause).await.map(Output::from),
        }
    })
    .await
}

/// A step that panics has failed, and its task is undone as after any failure.
async fn caught(
    step: &'static dyn Step,
    work: impl Future<Output = Result<Output, StepError>>,
) -> Result<Output, StepError> {
    AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(|_| {
        let detail = format!(
            "a defect of vmseal ended step '{}': the server's log says where",
            step.title()
        );
        Err(StepError::Final(Problem::new(ErrorCode::Internal, detail)))
    })
}
