//! The context of a step.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use tokio::sync::watch;
use vmseal_api::host::{HostAgent, HostState, JobStatus, VmState};
use vmseal_api::id::{HostId, VmId};
use vmseal_api::migration::Migration;
use vmseal_api::model::ChangeKind;
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::transfer::Progress;

use crate::hosts::{Hosts, is_silence};
use crate::providers::Providers;
use crate::remotes::Remotes;
use crate::store::changes::Kinds;
use crate::store::disks::{self, Disk};
use crate::store::tasks::Task;
use crate::store::vms::{self, Vm};
use crate::store::{Store, StoreError};

/// How far a step is, and how fast it gets on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) progress: Progress,
    /// Where that is known.
    pub(super) bytes_per_second: Option<u64>,
    /// Of a migration.
    pub(super) migration: Option<Migration>,
}

impl Seen {
    /// How long the rest takes at this speed, in seconds.
    pub(super) fn seconds_left(&self) -> Option<u64> {
        let left = self.progress.total.saturating_sub(self.progress.done);
        self.bytes_per_second.filter(|speed| *speed > 0).map(|speed| left.div_ceil(speed))
    }

    /// Whether people would see a difference: in the percentage, or of a tenth in the speed.
    fn differs(&self, other: &Self) -> bool {
        let speeds = match (self.bytes_per_second, other.bytes_per_second) {
            (Some(one), Some(other)) => one.abs_diff(other) > one.max(other) / 10,
            (one, other) => one != other,
        };
        let parts = |seen: &Self| {
            let migration = seen.migration?;
            let measured = migration.progress.map(|it| (it.passes, it.throttle));
            Some((migration.phase, measured))
        };
        speeds || self.progress.percent() != other.progress.percent() || parts(self) != parts(other)
    }
}

/// The progress of a step, if known.
#[derive(Default)]
pub(super) struct LiveProgress(Mutex<Shown>);

#[derive(Default)]
struct Shown {
    seen: Option<Seen>,
    /// When people were last told of a difference.
    told: Option<Instant>,
}

/// How often people are told of the rates of a migration at least, while they change.
const TOLD_EVERY: Duration = Duration::from_secs(1);

impl LiveProgress {
    /// Sets it; returns whether people would see a difference to what was shown before.
    pub(super) fn show(&self, seen: Option<Seen>) -> bool {
        let mut shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut shown.seen, seen);
        let due = shown.told.is_none_or(|told| told.elapsed() >= TOLD_EVERY);
        let tells = match (before, seen) {
            (Some(before), Some(now)) => {
                now.differs(&before) || (due && now.migration != before.migration)
            }
            (before, now) => before != now,
        };
        if tells {
            shown.told = Some(Instant::now());
        }
        tells
    }

    pub(super) fn read(&self) -> Option<Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).seen
    }
}

/// What users requested of a task since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Requests {
    /// To stop, and to undo what it has done.
    pub(super) cancelled: bool,
    /// To cut the power, if it waits for a guest to shut down.
    pub(super) forced: bool,
    /// To let the guest go that it receives.
    pub(super) committed: bool,
}

/// How long a task waits for a newer state from a host's monitor before it asks the host itself.
const NEWER_STATE_WAIT: Duration = Duration::from_secs(2);

/// Why a step did not succeed.
#[derive(Debug)]
pub(crate) enum StepError {
    /// It may have happened or not, or a retry may succeed: try again.
    Again(Problem),
    /// It is certain: a retry would change nothing.
    Final(Problem),
    /// A user has paused the task: the step is done again when it goes on.
    Paused(Problem),
}

impl StepError {
    /// Adds to the problem of a missing answer.
    pub(super) fn about(self, more: impl FnOnce(String) -> String) -> Self {
        match self {
            Self::Again(problem) => {
                Self::Again(Problem { detail: more(problem.detail), code: problem.code, ..problem })
            }
            said => said,
        }
    }

    pub(super) fn problem(self) -> Problem {
        match self {
            Self::Again(problem) | Self::Final(problem) | Self::Paused(problem) => problem,
        }
    }

    pub(super) fn as_problem(&self) -> &Problem {
        match self {
            Self::Again(problem) | Self::Final(problem) | Self::Paused(problem) => problem,
        }
    }
}

/// What should not have happened.
pub(super) fn internal(what: &str) -> StepError {
    StepError::Final(Problem::new(ErrorCode::Internal, what))
}

/// The VM, or what it is to use, is not as the step needs it.
pub(super) fn wrong_state(detail: String) -> StepError {
    StepError::Final(Problem::new(ErrorCode::WrongState, detail))
}

impl From<Problem> for StepError {
    fn from(problem: Problem) -> Self {
        // Another control plane that is busy; this one's inventory is waited for as such.
        let is_busy = problem.code == ErrorCode::Busy && !problem.inventory;
        if is_silence(&problem) || is_busy { Self::Again(problem) } else { Self::Final(problem) }
    }
}

impl From<StoreError> for StepError {
    fn from(error: StoreError) -> Self {
        Self::Final(error.into())
    }
}

/// The parts of the server that all tasks use.
pub(super) struct Context {
    pub(super) store: Arc<Store>,
    pub(super) providers: Arc<Providers>,
    pub(super) hosts: Arc<Hosts>,
    pub(super) remotes: Arc<Remotes>,
}

/// A running step.
pub(crate) struct Run<'a> {
    pub(super) context: &'a Context,
    pub(super) task: &'a Task,
    pub(super) vm_id: VmId,
    pub(super) requests: watch::Receiver<Requests>,
    pub(super) paces: watch::Receiver<CopyPace>,
    /// Changes each time that the source of a guest was heard that arrives.
    pub(super) heard: watch::Receiver<()>,
    pub(super) live: &'a LiveProgress,
    /// Whether a host may have received a request of this step.
    pub(super) sent: AtomicBool,
}

impl Run<'_> {
    /// The same, about another VM that the task holds.
    pub(super) fn for_vm(&self, vm: VmId) -> Run<'_> {
        Run {
            context: self.context,
            task: self.task,
            vm_id: vm,
            requests: self.requests.clone(),
            paces: self.paces.clone(),
            heard: self.heard.clone(),
            live: self.live,
            sent: AtomicBool::new(false),
        }
    }

    pub(super) fn store(&self) -> &Store {
        &self.context.store
    }

    pub(super) fn hosts(&self) -> &Hosts {
        &self.context.hosts
    }

    /// The task's VM; `None` if it is already removed.
    pub(super) async fn find_vm(&self) -> Result<Option<Vm>, StoreError> {
        vms::get(&mut *self.store().read().await?, self.vm_id).await
    }

    /// The task's VM.
    pub(super) async fn vm(&self) -> Result<Vm, StepError> {
        let found = self.find_vm().await?;
        found.ok_or_else(|| StepError::Final(Problem::not_found("VM", &self.task.target)))
    }

    pub(super) async fn disks(&self) -> Result<Vec<Disk>, StoreError> {
        disks::of_vm(&mut *self.store().read().await?, self.vm_id).await
    }

    /// Whether the agent of the VM's host has a feature. It is asked itself where its monitor has no description of it yet.
    pub(super) async fn has_feature(&self, vm: &Vm, feature: &str) -> Result<bool, Problem> {
        self.host_has_feature(vm.host, feature).await
    }

    /// Whether the agent of a host knows of a feature.
    pub(super) async fn host_has_feature(
        &self,
        host: HostId,
        feature: &str,
    ) -> Result<bool, Problem> {
        let view = self.hosts().view(host);
        if view.description.is_some() {
            return Ok(view.has(feature));
        }
        let description = self.hosts().agent(host)?.describe().await?;
        Ok(description.features.iter().any(|known| known == feature))
    }

    pub(super) fn agent(&self, vm: &Vm) -> Result<Arc<dyn HostAgent>, Problem> {
        self.hosts().agent(vm.host)
    }

    /// Publishes the step's progress, in bytes; not if the total is 0.
    pub(super) fn show(&self, progress: Progress) {
        self.show_seen(Seen { progress, bytes_per_second: None, migration: None });
    }

    /// Publishes how far a migration is; also in bytes, if the total is not 0.
    pub(super) fn show_migration(&self, progress: Progress, migration: Migration) {
        self.show_seen(Seen { progress, bytes_per_second: None, migration: Some(migration) });
    }

    fn show_seen(&self, seen: Seen) {
        let known = |seen: &Seen| seen.progress.total > 0 || seen.migration.is_some();
        if self.live.show(Some(seen).filter(known)) {
            self.context.store.note_change(Kinds::NONE.with(ChangeKind::Task));
        }
    }

    /// The status of the task's job in a host's state.
    pub(super) fn job_in<'s>(&self, state: &'s HostState) -> Option<&'s JobStatus> {
        state_of(state, self.vm_id)?.jobs.iter().find(|job| job.task == self.task.id)
    }

    /// Publishes the progress of the task's job in a host's state.
    pub(super) fn show_job(&self, state: &HostState) {
        if let Some(job) = self.job_in(state) {
            let progress = Progress { done: job.progress.done, total: job.progress.total };
            let bytes_per_second = job.progress.bytes_per_second;
            self.show_seen(Seen { progress, bytes_per_second, migration: None });
        }
    }

    /// The output of an earlier step.
    pub(super) fn output<T: DeserializeOwned>(&self, step: &str) -> Option<T> {
        serde_json::from_value(self.task.outputs.get(step)?.clone()).ok()
    }

    /// Records whether a request for a change may have reached a host.
    pub(super) fn noted<T>(&self, answer: Result<T, Problem>) -> Result<T, Problem> {
        let unsent = |problem: &Problem| is_silence(problem) && !problem.in_doubt;
        if !answer.as_ref().is_err_and(unsent) {
            self.sent.store(true, Ordering::Relaxed);
        }
        answer
    }

    /// How fast the task is to copy disks now.
    pub(super) fn pace(&self) -> CopyPace {
        *self.paces.borrow()
    }

    /// Waits until the task is to copy disks at another pace than this.
    pub(super) async fn another_pace(&self, pace: CopyPace) {
        let mut paces = self.paces.clone();
        if paces.wait_for(|now| *now != pace).await.is_err() {
            // Nobody can set it any more.
            std::future::pending::<()>().await;
        }
    }

    /// Ends a step if the task was cancelled.
    pub(super) fn check_cancelled(&self) -> Result<(), StepError> {
        if self.requests.borrow().cancelled {
            let detail =
                format!("{} of '{}' was cancelled", self.task.operation.kind(), self.task.target);
            return Err(StepError::Final(Problem::new(ErrorCode::Cancelled, detail)));
        }
        Ok(())
    }

    /// The host's state. Without `last` it is read from the host, so that the effect of the request before is in it.
    /// Otherwise it comes from the host's monitor, as soon as it is newer than `last`: so a host is asked once, however
    /// many tasks wait for it.
    pub(super) async fn host_state(
        &self,
        host: HostId,
        last: Option<&HostState>,
    ) -> Result<Arc<HostState>, Problem> {
        let read = async || Ok(Arc::new(self.hosts().agent(host)?.state_now().await?));
        let Some(last) = last else { return read().await };
        let mut requests = self.requests.clone();
        tokio::select! {
            newer = self.hosts().newer_state(host, last) => match newer {
                // The monitor may not have noticed yet that the agent has restarted: this is the state from before.
                Ok(newer) if newer.incarnation != last.incarnation => read().await,
                newer => newer,
            },
            // The host does not answer, or its monitor is busy.
            () = tokio::time::sleep(NEWER_STATE_WAIT) => read().await,
            // The caller checks the requests; its state is unchanged.
            Ok(()) = requests.changed() => Ok(Arc::new(last.clone())),
        }
    }
}

/// The status of a VM in a host's state.
pub(super) fn state_of(state: &HostState, vm: VmId) -> Option<&VmState> {
    state.vms.iter().find(|seen| seen.vm == vm)
}

/// Treats `not-found` as success: the VM should be absent.
pub(super) fn absent_is_fine(answer: Result<(), Problem>) -> Result<(), StepError> {
    match answer {
        Err(problem) if problem.code == ErrorCode::NotFound => Ok(()),
        other => Ok(other?),
    }
}

/// Registers the VM on its host, as it is in the inventory.
pub(super) async fn register(run: &Run<'_>) -> Result<(), StepError> {
    crate::hosts::register(run.store(), run.hosts(), run.vm_id).await?;
    Ok(())
}
