//! What a step has to work with.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use vmseal_api::host::{HostAgent, HostState, VmState};
use vmseal_api::id::VmId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::transfer::Progress;

use crate::hosts::Hosts;
use crate::providers::Providers;
use crate::store::disks::{self, Disk};
use crate::store::tasks::Task;
use crate::store::vms::{self, Vm};
use crate::store::{Store, StoreError};

/// How far a step is, where that is known, and what it waits for.
#[derive(Default)]
pub(super) struct Gauge(Mutex<Reading>);

#[derive(Clone, Default)]
pub(super) struct Reading {
    pub(super) progress: Option<Progress>,
    /// The host that the step waits for.
    pub(super) waiting: Option<String>,
}

impl Gauge {
    /// Shows it; whether the percentage is another one now.
    pub(super) fn show(&self, progress: Option<Progress>) -> bool {
        let mut shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut shown.progress, progress);
        before.map(Progress::percent) != progress.map(Progress::percent)
    }

    /// Shows which host is waited for.
    pub(super) fn wait_for(&self, host: Option<&str>) {
        let mut shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shown.waiting = host.map(str::to_owned);
    }

    pub(super) fn read(&self) -> Reading {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// How long one wait for a host's news is: a cancelled task notices within it.
const NEWS_WAIT: Duration = Duration::from_secs(2);

/// Why a step did not succeed.
#[derive(Debug)]
pub(super) enum StepError {
    /// It may be so or not, or may go better soon: try again.
    Again(Problem),
    /// It is certain, and trying again would change nothing.
    Final(Problem),
}

impl StepError {
    /// Says more about an answer that did not come.
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
            Self::Again(problem) | Self::Final(problem) => problem,
        }
    }
}

impl From<Problem> for StepError {
    fn from(problem: Problem) -> Self {
        if is_silence(&problem) { Self::Again(problem) } else { Self::Final(problem) }
    }
}

/// Whether somebody who was asked has not answered.
fn is_silence(problem: &Problem) -> bool {
    matches!(problem.code, ErrorCode::Unreachable | ErrorCode::TimedOut)
}

impl From<StoreError> for StepError {
    fn from(error: StoreError) -> Self {
        Self::Final(error.into())
    }
}

/// What all tasks work with.
pub(super) struct Means {
    pub(super) store: Arc<Store>,
    pub(super) providers: Arc<Providers>,
    pub(super) hosts: Arc<Hosts>,
}

/// A task that is being carried out.
pub(super) struct Run<'a> {
    pub(super) means: &'a Means,
    pub(super) task: &'a Task,
    pub(super) cancelled: watch::Receiver<bool>,
    pub(super) gauge: &'a Gauge,
}

impl Run<'_> {
    pub(super) fn store(&self) -> &Store {
        &self.means.store
    }

    pub(super) fn hosts(&self) -> &Hosts {
        &self.means.hosts
    }

    pub(super) fn vm_id(&self) -> VmId {
        self.task.operation.vm()
    }

    /// The task's VM; none when it is removed already.
    pub(super) async fn find_vm(&self) -> Result<Option<Vm>, StoreError> {
        vms::get(&mut *self.store().read().await?, self.vm_id()).await
    }

    /// The task's VM.
    pub(super) async fn vm(&self) -> Result<Vm, StepError> {
        let found = self.find_vm().await?;
        found.ok_or_else(|| StepError::Final(Problem::not_found("VM", &self.task.target)))
    }

    pub(super) async fn disks(&self) -> Result<Vec<Disk>, StoreError> {
        disks::of_vm(&mut *self.store().read().await?, self.vm_id()).await
    }

    pub(super) fn agent(&self, vm: &Vm) -> Result<Arc<dyn HostAgent>, Problem> {
        self.hosts().agent(vm.host)
    }

    /// Shows how far the step is, in bytes; nothing of nothing.
    pub(super) fn show(&self, progress: Progress) {
        if self.gauge.show(Some(progress).filter(|progress| progress.total > 0)) {
            self.means.store.note_change();
        }
    }

    /// Waits, however long, until the VM's host answers, or somebody cancels the task. False where it answers
    /// at once: then its silence is not why a step failed.
    pub(super) async fn outwait_silence(&self, pause: impl Fn(u32) -> Duration) -> bool {
        let Ok(vm) = self.vm().await else { return false };
        let Ok(agent) = self.agent(&vm) else { return false };
        let mut cancelled = self.cancelled.clone();
        let mut asked = 0;
        loop {
            let silent = tokio::select! {
                answer = agent.describe() => answer.is_err_and(|problem| is_silence(&problem)),
                Ok(()) = cancelled.changed() => break,
            };
            if !silent {
                break;
            }
            if asked == 0 {
                tracing::info!(task = %self.task.id, host = vm.host_name, "waiting for the host");
                self.gauge.wait_for(Some(&vm.host_name));
                self.means.store.note_change();
            }
            tokio::select! {
                () = tokio::time::sleep(pause(asked)) => asked += 1,
                Ok(()) = cancelled.changed() => break,
            }
        }
        self.gauge.wait_for(None);
        self.means.store.note_change();
        asked > 0
    }

    /// Ends a step when somebody cancelled the task.
    pub(super) fn check_cancelled(&self) -> Result<(), StepError> {
        if *self.cancelled.borrow() {
            let detail =
                format!("{} of '{}' was cancelled", self.task.operation.kind(), self.task.target);
            return Err(StepError::Final(Problem::new(ErrorCode::Cancelled, detail)));
        }
        Ok(())
    }

    /// Reads the host's state, at once or as soon as it differs from the last one.
    pub(super) async fn news(
        &self,
        agent: &dyn HostAgent,
        last: Option<&HostState>,
    ) -> Result<HostState, Problem> {
        let after = last.map(|state| (state.incarnation, state.version));
        let wait = if last.is_some() { NEWS_WAIT } else { Duration::ZERO };
        let mut cancelled = self.cancelled.clone();
        tokio::select! {
            state = agent.state(after, wait) => state,
            // The caller checks; it goes on with what it has.
            Ok(()) = cancelled.changed() => match last {
                Some(state) => Ok(state.clone()),
                None => agent.state(None, Duration::ZERO).await,
            },
        }
    }
}

/// What a host says of a VM.
pub(super) fn state_of(state: &HostState, vm: VmId) -> Option<&VmState> {
    state.vms.iter().find(|seen| seen.vm == vm)
}

/// No such VM there is what was wanted.
pub(super) fn absent_is_fine(answer: Result<(), Problem>) -> Result<(), StepError> {
    match answer {
        Err(problem) if problem.code == ErrorCode::NotFound => Ok(()),
        other => Ok(other?),
    }
}
