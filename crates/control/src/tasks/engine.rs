//! Begins tasks, resumes those of an earlier run of the server, cancels and resolves them. [`super::runner`] runs
//! each one, [`super::pacing`] has them go slower.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tracing::Instrument;
use vmseal_api::id::{TaskId, VmId};
use vmseal_api::migration::Migration;
use vmseal_api::model::{self, TaskState};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id;
use vmseal_api::transfer::Progress;

use super::beside;
use super::environment::{Environment, Retry};
use super::held_steps::HeldSteps;
use super::migrate_vm::is_lost;
use super::migrate_vm::watched::migrated;
use super::mirror_vm::former;
use super::run::{Context, LiveProgress, Requests};
use super::runner::{Interrupted, Runner};
use super::steps;
use crate::hosts::{Hosts, restored};
use crate::operation::migration::SWITCH;
use crate::operation::{Operation, Placed};
use crate::providers::Providers;
use crate::remotes::Remotes;
use crate::store::events::NewEvent;
use crate::store::hosts::Host;
use crate::store::tasks::{self, Task};
use crate::store::{Store, StoreError, Write, hosts, placements};
use crate::task_alarms;

/// The handle of a running task.
struct Running {
    requests: watch::Sender<Requests>,
    paces: watch::Sender<CopyPace>,
    heard: watch::Sender<()>,
    live: Arc<LiveProgress>,
    work: AbortHandle,
}

/// The relation of a task to others.
#[derive(Clone, Copy, Debug, Default)]
pub struct TaskSchedule {
    /// Its parent: both are cancelled together.
    pub parent: Option<TaskId>,
    /// Its earliest start.
    pub not_before: Option<Timestamp>,
    /// The id that another control plane has given it.
    pub id: Option<TaskId>,
}

/// Runs tasks until [`Engine::stop`].
pub struct Engine {
    pub(super) environment: Environment,
    running: Mutex<HashMap<TaskId, Running>>,
    /// Held from the record of a pace until its task is told: of two that change it, both hear the last.
    pub(super) pacing: tokio::sync::Mutex<()>,
}

impl Engine {
    /// An engine without running tasks.
    #[must_use]
    pub fn new(
        store: Arc<Store>,
        providers: Arc<Providers>,
        hosts: Arc<Hosts>,
        remotes: Arc<Remotes>,
        retry: Retry,
    ) -> Self {
        Self {
            environment: Environment::new(Context { store, providers, hosts, remotes }, retry),
            running: Mutex::default(),
            pacing: tokio::sync::Mutex::default(),
        }
    }

    /// The same, which holds each step until its file in a directory is removed ([`super::held_steps`]).
    #[must_use]
    pub fn holding_steps(mut self, directory: Option<PathBuf>) -> Self {
        self.environment.held = directory.map(HeldSteps::in_directory);
        self
    }

    fn running(&self) -> MutexGuard<'_, HashMap<TaskId, Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Resumes the tasks that have not ended.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn resume(self: &Arc<Self>) -> Result<(), StoreError> {
        let open = tasks::open(&mut *self.environment.context.store.read().await?).await?;
        for task in open {
            self.spawn(task, true);
        }
        Ok(())
    }

    /// Writes a new task in the transaction `write`; [`Engine::begin`] follows once that is committed.
    ///
    /// # Errors
    /// `wrong-state` while another task of the VM is in the way, or the host on which the task would have it is emptied, or while its
    /// descriptors may know more of it than an inventory that was restored.
    pub async fn record(
        write: &mut Write<'_>,
        operation: Operation,
        target: &str,
        actor: &str,
    ) -> Result<Task, Problem> {
        Self::record_scheduled(write, operation, target, actor, TaskSchedule::default()).await
    }

    /// The same for a task with a parent or a later start.
    ///
    /// # Errors
    /// Those of [`Engine::record`].
    pub async fn record_scheduled(
        write: &mut Write<'_>,
        operation: Operation,
        target: &str,
        actor: &str,
        plan: TaskSchedule,
    ) -> Result<Task, Problem> {
        require_active(write, &operation).await?;
        restored::require_for_task(write, &operation).await?;
        beside::require_no_tpm_copied(write, &operation).await?;
        let step = steps::of(&operation).first().map_or("", |step| step.name());
        let task = Task {
            id: plan.id.unwrap_or_default(),
            operation,
            target: target.to_owned(),
            actor: actor.to_owned(),
            state: TaskState::Running,
            step: step.to_owned(),
            failed_step: None,
            outputs: Default::default(),
            waiting: None,
            parent: plan.parent,
            not_before: plan.not_before,
            cancelled: false,
            pace: CopyPace::default(),
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
        self.spawn(task, false);
    }

    fn spawn(self: &Arc<Self>, task: Task, resumed: bool) {
        let Some(vm_id) = task.operation.vm().filter(|_| !steps::of(&task.operation).is_empty())
        else {
            let engine = Arc::clone(self);
            tokio::spawn(async move { engine.leave(&task, &task.why_unreadable()).await });
            return;
        };
        let requests = Requests { cancelled: task.cancelled, ..Requests::default() };
        let (requests, asked) = watch::channel(requests);
        let (paces, pace) = watch::channel(task.pace);
        let (heard, source) = watch::channel(());
        let live = Arc::new(LiveProgress::default());
        let id = task.id;
        let engine = Arc::clone(self);
        // Held over the insertion, so that an end cannot come before its beginning.
        let mut running = self.running();
        let work = {
            let live = Arc::clone(&live);
            let request = task.request_id.clone();
            let span = tracing::error_span!("task", %id);
            let work = async move {
                let (kind, target) = (task.operation.kind(), &task.target);
                tracing::info!(kind, target, step = task.step, "the task goes on");
                let kept = task.clone();
                let environment = &engine.environment;
                let (requests, paces, heard) = (asked, pace, source);
                let runner =
                    Runner { environment, task, vm_id, requests, paces, heard, live, resumed };
                match runner.carry_out().await {
                    Ok(()) => {}
                    #[cfg(test)]
                    Err(Interrupted::Crashed) => return,
                    Err(Interrupted::Unreadable(why)) => engine.leave(&kept, &why).await,
                }
                engine.running().remove(&id);
            };
            tokio::spawn(request_id::during(request, work.instrument(span)))
        };
        let work = work.abort_handle();
        running.insert(id, Running { requests, paces, heard, live, work });
    }

    /// Leaves a task unchanged that this version cannot run, and raises an alarm.
    async fn leave(&self, task: &Task, why: &str) {
        tracing::error!(task = %task.id, why, "the task is left as it is");
        let noted = async {
            let mut write = self.environment.context.store.write().await?;
            task_alarms::unreadable(&mut write, task, why).await?;
            write.commit().await
        };
        if let Err(error) = noted.await {
            tracing::error!(task = %task.id, %error, "its alarm cannot be raised");
        }
    }

    /// Cancels a task: it stops and undoes what it has done.
    ///
    /// # Errors
    /// `not-found`; `wrong-state` when it has ended, is being undone, or cannot be stopped half-way.
    pub async fn cancel(&self, id: &str, actor: &str) -> Result<Task, Problem> {
        let mut write = self.environment.context.store.write().await?;
        let task = Self::note_cancelled(&mut write, id).await?;
        let mut cancelled = vec![task];
        cancelled.extend(tasks::cancel_parts(&mut write, cancelled[0].id, may_be_cancelled).await?);
        for task in &cancelled {
            note_cancel(&mut write, task, actor).await?;
        }
        write.commit().await?;
        self.tell_cancelled(&cancelled);
        Ok(cancelled.swap_remove(0))
    }

    /// Cancels a migration whose other host does not answer, and is gone for good, as an operator says: the guest goes on where it was
    /// ([`super::migrate_vm`]). The same of one whose other host has rebooted after the guest ran there, here or at another control plane.
    ///
    /// # Errors
    /// `not-found`; `wrong-state` for a task that does not wait for such an answer, and where the other host knows the VM; those of a host
    /// that has just fallen silent.
    pub async fn give_up(&self, id: &str, actor: &str) -> Result<Task, Problem> {
        self.check_give_up(id).await?;
        let mut write = self.environment.context.store.write().await?;
        let (task, host) = Self::note_given_up(&mut write, id).await?;
        let detail = format!(
            "{} as task {}, by force: host '{}' is given up",
            task.operation.kind(),
            task.id,
            host.name
        );
        let (kind, target) = ("task.cancelled", task.target.as_str());
        write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
        write.commit().await?;
        self.tell_cancelled(std::slice::from_ref(&task));
        Ok(task)
    }

    /// Whether [`Engine::give_up`] would succeed; changes nothing. Returns the other host, too.
    ///
    /// # Errors
    /// Those of [`Engine::give_up`].
    pub async fn check_give_up(&self, id: &str) -> Result<(Task, Host), Problem> {
        // The transaction is not committed.
        let mut write = self.environment.context.store.write().await?;
        let (task, host) = Self::note_given_up(&mut write, id).await?;
        drop(write);
        self.require_undecided(&task, &host).await?;
        Ok((task, host))
    }

    /// Refuses to give up a host that answers and has the VM: it decides. One that has rebooted, and cannot look at the datastore of its
    /// copies, does not have the VM; nor does one whose agent knows only that the guest has ended.
    async fn require_undecided(&self, task: &Task, host: &Host) -> Result<(), Problem> {
        let Ok(agent) = self.environment.context.hosts.connected(host.id) else {
            return require_inventory_keeps(task, host);
        };
        let state = agent.state_now().await?;
        if is_lost(state.vms.iter().find(|seen| Some(seen.vm) == task.operation.vm())) {
            return Ok(());
        }
        let what = format!(
            "host '{}' answers, and knows whether the guest runs there: wait for the task, or cancel it without --force",
            host.name
        );
        Err(Problem::new(ErrorCode::WrongState, what))
    }

    async fn note_given_up(write: &mut Write<'_>, id: &str) -> Result<(Task, Host), Problem> {
        let found = tasks::get(write, id).await?;
        let mut task = found.ok_or_else(|| Problem::not_found("task", id))?;
        let refused = |why: String| Problem::new(ErrorCode::WrongState, why);
        let is_committed = steps::is_committed(&task);
        let (to, given_up) = match &mut task.operation {
            Operation::MigrateVm { to, given_up, .. } => (*to, given_up),
            Operation::ReceiveVm { host, at_rest: false, given_up, .. } => (*host, given_up),
            _ => {
                let what = "only a migration to another host is cancelled by force, of a guest that runs. Where it is on its way to another control plane, and its host there has restarted since, cancel the task there by force; where that control plane is gone for good, remove it by force (vmseal remote remove NAME --force)";
                return Err(refused(what.to_owned()));
            }
        };
        *given_up = true;
        if !task.state.is_open() {
            return Err(refused("the task has ended".to_owned()));
        }
        if is_committed {
            let what = "the guest runs on the other host, as that has said: wait for the task";
            return Err(refused(what.to_owned()));
        }
        if task.step != SWITCH {
            let what = "no answer of the other host decides where the guest runs: cancel the task without --force, or wait for it";
            return Err(refused(what.to_owned()));
        }
        let host = hosts::find(write, &to.to_string()).await?;
        let host = host.ok_or_else(|| Problem::not_found("host", to))?;
        // One that is being undone is cancelled already, or has failed.
        tasks::cancel(write, task.id).await?;
        tasks::set_operation(write, &task).await?;
        Ok((task, host))
    }

    /// Marks those of these tasks as cancelled, in the transaction `write`, that can be; [`Engine::tell_cancelled`] follows once
    /// that is committed.
    ///
    /// # Errors
    /// The inventory's.
    pub async fn note_all_cancelled(
        write: &mut Write<'_>,
        ids: impl IntoIterator<Item = TaskId>,
        actor: &str,
    ) -> Result<Vec<Task>, Problem> {
        let mut cancelled = Vec::new();
        for id in ids {
            let Some(task) = tasks::get(write, &id.to_string()).await? else { continue };
            if may_be_cancelled(&task) && tasks::cancel(write, id).await? {
                note_cancel(write, &task, actor).await?;
                cancelled.push(task);
            }
        }
        Ok(cancelled)
    }

    /// Tells tasks that run that they are cancelled.
    pub fn tell_cancelled(&self, cancelled: &[Task]) {
        for task in cancelled {
            self.ask(task.id, |requests| requests.cancelled = true);
        }
    }

    fn ask(&self, task: TaskId, what: impl FnOnce(&mut Requests)) {
        if let Some(running) = self.running().get(&task) {
            running.requests.send_modify(what);
        }
    }

    /// Tells a task that runs how fast it is to copy disks.
    pub(super) fn tell_pace(&self, task: &Task) {
        if let Some(running) = self.running().get(&task.id) {
            running.paces.send_replace(task.pace);
        }
    }

    /// Makes the task that waits for a VM's guest to shut down cut its power instead. `None` if there is no such task.
    ///
    /// # Errors
    /// The inventory's.
    pub async fn force_stop(&self, vm: VmId, actor: &str) -> Result<Option<Task>, Problem> {
        let mut write = self.environment.context.store.write().await?;
        let Some(task) = Self::note_forced(&mut write, vm).await? else { return Ok(None) };
        tasks::set_operation(&mut write, &task).await?;
        let detail = format!("{} as task {} cuts the power now", task.operation.kind(), task.id);
        let (kind, target) = ("task.forced", task.target.as_str());
        write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
        write.commit().await?;
        self.ask(task.id, |requests| requests.forced = true);
        Ok(Some(task))
    }

    /// Whether [`Engine::force_stop`] would succeed; changes nothing.
    ///
    /// # Errors
    /// Those of [`Engine::force_stop`].
    pub async fn check_force_stop(&self, vm: VmId) -> Result<Option<Task>, Problem> {
        // The transaction is not committed.
        Self::note_forced(&mut self.environment.context.store.write().await?, vm).await
    }

    /// Has an arrival let its guest go, as its source asks. Nothing where it has ended, is being undone or is cancelled.
    ///
    /// # Errors
    /// The inventory's.
    pub async fn commit_arrival(&self, id: TaskId) -> Result<(), Problem> {
        let mut write = self.environment.context.store.write().await?;
        let Some(mut task) = tasks::get(&mut write, &id.to_string()).await? else { return Ok(()) };
        let open = task.state.is_open() && task.state != TaskState::RollingBack && !task.cancelled;
        let Operation::ReceiveVm { committed, .. } = &mut task.operation else { return Ok(()) };
        if *committed || !open {
            return Ok(());
        }
        *committed = true;
        tasks::set_operation(&mut write, &task).await?;
        write.commit().await?;
        self.ask(id, |requests| requests.committed = true);
        Ok(())
    }

    /// Tells an arrival that its source is there.
    pub fn hear_source(&self, id: TaskId) {
        if let Some(running) = self.running().get(&id) {
            running.heard.send_replace(());
        }
    }

    async fn note_forced(write: &mut Write<'_>, vm: VmId) -> Result<Option<Task>, Problem> {
        let found = match tasks::beside(write, vm).await? {
            Some(task) => Some(task),
            None => tasks::holding(write, vm).await?,
        };
        let Some(mut task) = found else { return Ok(None) };
        match &mut task.operation {
            Operation::StopVm { force, .. } if task.state != TaskState::RollingBack => {
                *force = true
            }
            _ => return Ok(None),
        }
        Ok(Some(task))
    }

    /// Records that an operator has handled what a task left behind: its alarm is cleared. A task that this version
    /// cannot run ends as unknown, and releases its claim.
    ///
    /// # Errors
    /// `not-found`; `wrong-state` for a task that needs no operator.
    pub async fn resolve(&self, id: &str, actor: &str) -> Result<Task, Problem> {
        let mut write = self.environment.context.store.write().await?;
        let task = self.note_resolved(&mut write, id, actor).await?;
        write.commit().await?;
        if let Operation::MigrateVm { from, .. } | Operation::MigrateAway { from, .. } =
            task.operation
        {
            // A guest that stands still because its task ended without knowing where it runs goes on there.
            self.environment.context.hosts.look_again(from);
        }
        Ok(task)
    }

    /// Whether [`Engine::resolve`] would succeed; changes nothing.
    ///
    /// # Errors
    /// Those of [`Engine::resolve`].
    pub async fn check_resolve(&self, id: &str) -> Result<Task, Problem> {
        // The transaction is not committed.
        let mut write = self.environment.context.store.write().await?;
        self.note_resolved(&mut write, id, crate::SELF).await
    }

    async fn note_resolved(
        &self,
        write: &mut Write<'_>,
        id: &str,
        actor: &str,
    ) -> Result<Task, Problem> {
        let found = tasks::get(write, id).await?;
        let mut task = found.ok_or_else(|| Problem::not_found("task", id))?;
        if task.state.is_open() {
            if self.running().contains_key(&task.id) {
                let detail = "the task is still active: wait for it (vmseal task wait), or cancel it (vmseal task cancel)";
                return Err(Problem::new(ErrorCode::WrongState, detail));
            }
            task.state = TaskState::Unknown;
            task.ended = Some(Timestamp::now());
            let detail = format!("{}, and was resolved by {actor}", task.why_unreadable());
            task.problem = Some(Problem::new(ErrorCode::Internal, detail));
            tasks::update(write, &task).await?;
        } else if task.state != TaskState::Unknown {
            let detail = "the task has ended, and left nothing to deal with";
            return Err(Problem::new(ErrorCode::WrongState, detail));
        }
        task_alarms::clear(write, &task).await?;
        let detail = format!("{} as task {}", task.operation.kind(), task.id);
        let (kind, target) = ("task.resolved", task.target.as_str());
        write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
        Ok(task)
    }

    /// Whether [`Engine::cancel`] would succeed; changes nothing.
    ///
    /// # Errors
    /// Those of [`Engine::cancel`].
    pub async fn check_cancel(&self, id: &str) -> Result<Task, Problem> {
        // The transaction is not committed.
        Self::note_cancelled(&mut self.environment.context.store.write().await?, id).await
    }

    async fn note_cancelled(write: &mut Write<'_>, id: &str) -> Result<Task, Problem> {
        let task = tasks::get(write, id).await?.ok_or_else(|| Problem::not_found("task", id))?;
        let refused = |why| Err(Problem::new(ErrorCode::WrongState, why));
        if !task.operation.can_be_cancelled() {
            return refused(format!("{} cannot be stopped half-way", task.operation.kind()));
        }
        if task.operation.is_asked_to_commit() {
            let what = "the other control plane has asked to let the guest go: wait for it";
            return refused(what.to_owned());
        }
        if steps::is_committed(&task) {
            return refused(format!(
                "the task is past the step after which it cannot be undone ({}): wait for it",
                steps::title(&task)
            ));
        }
        if !tasks::cancel(write, task.id).await? {
            return refused("the task has ended, or is being undone".to_owned());
        }
        Ok(task)
    }

    /// A task in the form of the API.
    #[must_use]
    pub fn shown(&self, task: &Task) -> model::Task {
        let seen = self.running().get(&task.id).and_then(|it| it.live.read());
        let seen = seen.filter(|_| task.ended.is_none());
        let progress = seen.map(|seen| seen.progress).filter(|progress| progress.total > 0);
        let moving = seen.filter(|_| task.state == TaskState::Running && !task.pace.paused);
        let encrypted = task.operation.is_sent_encrypted();
        let migration = seen.and_then(|seen| seen.migration);
        model::Task {
            id: task.id,
            kind: task.operation.kind().to_owned(),
            target: task.target.clone(),
            state: task.state,
            step: steps::title(task).to_owned(),
            percent: progress.and_then(Progress::percent),
            progress,
            bytes_per_second: moving.and_then(|seen| seen.bytes_per_second),
            seconds_left: moving.and_then(|seen| seen.seconds_left()),
            migration: migration.map(|migration| Migration { encrypted, ..migration }),
            migrated: migrated(task),
            former_images: former::of_task(task),
            rate: task.pace.bytes_per_second,
            paused: task.pace.paused && task.state.is_open() && !task.cancelled,
            created: task.created,
            ended: task.ended,
            request_id: task.request_id.as_ref().map(ToString::to_string),
            waiting: task.waiting.clone().filter(|_| {
                let waits = [TaskState::Queued, TaskState::Waiting, TaskState::RollingBack];
                waits.contains(&task.state)
            }),
            parent: task.parent,
            not_before: task.not_before,
            problem: task.problem.clone(),
        }
    }

    /// Stops all work where it is; the next start resumes it.
    pub fn stop(&self) {
        for (_, running) in self.running().drain() {
            running.work.abort();
        }
    }
}

/// Refuses to give up a host that does not answer, where the VM would be in the inventory no more: nothing would end its guest there.
fn require_inventory_keeps(task: &Task, host: &Host) -> Result<(), Problem> {
    let Operation::ReceiveVm { .. } = task.operation else { return Ok(()) };
    let what = format!(
        "host '{}' does not answer, and VM '{}' may run there: wait for it. If it is off for good, the control plane that the VM comes from gives this one up (vmseal remote remove NAME --force)",
        host.name, task.target
    );
    Err(Problem::new(ErrorCode::WrongState, what))
}

/// Refuses a task that would have a VM on a host that is emptied. This is asked in the transaction that records the task: none
/// can begin beside the drain of its host.
async fn require_active(write: &mut Write<'_>, operation: &Operation) -> Result<(), Problem> {
    let host = match operation.places() {
        None => None,
        Some(Placed::On(host)) => Some(host),
        Some(Placed::WhereItIs(vm)) => placements::owner(write, vm).await?,
    };
    let Some(host) = host else { return Ok(()) };
    match hosts::find(write, &host.to_string()).await? {
        Some(host) => host.require_active(),
        None => Ok(()),
    }
}

async fn note_cancel(write: &mut Write<'_>, task: &Task, actor: &str) -> Result<(), StoreError> {
    let (kind, target) = ("task.cancelled", task.target.as_str());
    let detail = format!("{} as task {}", task.operation.kind(), task.id);
    write.event(NewEvent { kind, actor, target, detail: &detail }).await
}

/// Whether a task can be cancelled where nobody asks for this one alone.
fn may_be_cancelled(part: &Task) -> bool {
    part.operation.can_be_cancelled()
        && !part.operation.is_asked_to_commit()
        && !steps::is_committed(part)
}
