//! Receives a VM that runs, is off or suspended, from another control plane ([`super::migrate_vm::away`] has the other side).
//!
//! ```text
//!   reserve ─► make-key ─► receive ──────────────────────► switch ─► done
//!                           waits until the source asks      its host lets the guest go;
//!                           to let the guest go              the inventory says so
//!                             │                              commit step
//!                             └── undone: nothing is left
//! ```
//! The source's control plane decides whether the guest goes on there or here, until it has asked for the switch. From then on
//! this task decides, and the other side asks until it is told. It is told that the guest does not run here only where the host
//! has said that it does not, and never will; or where an operator says so of a host that has rebooted since the guest ran there.

mod at_rest;

use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep_until};
use vmseal_api::host::{
    ArrivingCopies, ArrivingCopy, DiskState, HostAgent, HostState, JobSpec, JobState, Power,
    ReceiveJob,
};
use vmseal_api::id::HostId;
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::{ErrorCode, Problem};

use super::create_vm::{make_key, remove_rows, unmake_key};
use super::migrate_vm::{ended, is_given_up, is_lost, lost};
use super::mirror_vm::set_image;
use super::run::{Run, StepError, absent_is_fine, internal, state_of, wrong_state};
use super::step::{Limit, Output, Step, WaitPolicy};
use crate::hosts::is_silence;
use crate::operation::Operation;
use crate::store::disks::Disk;
use crate::store::events::NewEvent;
use crate::store::tasks::Task;
use crate::store::{memory_generations, vms};

/// How long nothing may be heard of the source before it has asked for the switch. It asks each second; this is time for its server
/// to be restarted.
const SOURCE_TIMEOUT: Duration = Duration::from_secs(600);

/// How long a newer state of the host is waited for before the host is asked.
const NEWER_STATE_WAIT: Duration = Duration::from_secs(1);

/// The steps, in order. The request has already reserved the names and ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceiveVmStep {
    Reserve,
    MakeKey,
    Receive,
    Switch,
}

pub(crate) const STEPS: &[&dyn Step] = &[
    &ReceiveVmStep::Reserve,
    &ReceiveVmStep::MakeKey,
    &ReceiveVmStep::Receive,
    &ReceiveVmStep::Switch,
];

/// The step in which the VM can be sent.
pub(crate) const RECEIVES: &str = "receive";

#[async_trait]
impl Step for ReceiveVmStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::MakeKey => "make-key",
            Self::Receive => RECEIVES,
            Self::Switch => "switch",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Reserve => "reserve the names",
            Self::MakeKey => "make a key",
            Self::Receive => "receive its disks, and the memory of a guest that runs",
            Self::Switch => "have the VM be here: let its guest go on, if it runs",
        }
    }

    fn needs_key(&self) -> bool {
        matches!(self, Self::MakeKey)
    }

    fn commits(&self) -> bool {
        matches!(self, Self::Switch)
    }

    fn insists(&self) -> bool {
        matches!(self, Self::Switch)
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            Self::MakeKey => WaitPolicy::PROVIDER,
            Self::Switch => WaitPolicy::BOTH,
            Self::Reserve | Self::Receive => WaitPolicy::NONE,
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::MakeKey => Some(Limit::Provider),
            _ => None,
        }
    }

    fn is_undone_by_monitor(&self) -> bool {
        // A host that has not been asked to let the guest go forgets it when the inventory does not have it.
        matches!(self, Self::Receive)
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Reserve => Ok(Output::default()),
            Self::MakeKey => make_key(run).await.map(Output::from),
            Self::Receive => until_asked(run).await.map(Output::from),
            Self::Switch => switch(run).await.map(|arrived| Output::of(&arrived)),
        }
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::Reserve => remove_rows(run).await,
            Self::MakeKey => unmake_key(run).await,
            Self::Receive => forget(run).await,
            Self::Switch => switch_back(run).await,
        }
    }
}

/// The host of a task, and the generation of the VM's placement there.
fn place(run: &Run<'_>) -> Result<(HostId, u64), StepError> {
    match run.task.operation {
        Operation::ReceiveVm { host, generation, .. } => Ok((host, generation)),
        _ => Err(internal("the task receives no VM")),
    }
}

/// The job of an arrival, without what begins it. `at_rest`: of a VM that is off, or `suspended`.
pub(crate) fn job(
    disks: &[Disk],
    generation: u64,
    (at_rest, suspended): (bool, bool),
) -> ReceiveJob {
    let copy = |disk: &Disk| ArrivingCopy { disk: disk.id, datastore: disk.datastore.clone() };
    let copies = disks.iter().map(copy).collect();
    let copies = ArrivingCopies { generation, disks: copies, at_rest, suspended };
    let disks = disks.iter().map(|disk| disk.id).collect();
    ReceiveJob { disks, copies: Some(copies), begin: None }
}

/// The job of a task's arrival.
async fn job_of(run: &Run<'_>) -> Result<JobSpec, StepError> {
    let (_, generation) = place(run)?;
    let operation = &run.task.operation;
    let rest = (operation.is_at_rest(), operation.is_of_suspended());
    Ok(JobSpec::Receive(job(&run.disks().await?, generation, rest)))
}

/// Waits until the source asks to let the guest go.
async fn until_asked(run: &Run<'_>) -> Result<(), StepError> {
    let (mut requests, mut heard) = (run.requests.clone(), run.heard.clone());
    let mut deadline = Instant::now() + SOURCE_TIMEOUT;
    loop {
        if requests.borrow_and_update().committed || run.task.operation.is_asked_to_commit() {
            return Ok(());
        }
        run.check_cancelled()?;
        tokio::select! {
            Ok(()) = requests.changed() => {}
            Ok(()) = heard.changed() => {
                heard.borrow_and_update();
                deadline = Instant::now() + SOURCE_TIMEOUT;
            }
            () = sleep_until(deadline) => {
                let detail = format!(
                    "nothing was heard of the control plane that VM '{}' comes from for {} s",
                    run.task.target,
                    SOURCE_TIMEOUT.as_secs()
                );
                return Err(StepError::Final(Problem::new(ErrorCode::TimedOut, detail)));
            }
        }
    }
}

/// Undoes the reception: the host has not been asked to let the guest go.
async fn forget(run: &Run<'_>) -> Result<(), StepError> {
    let (host, _) = place(run)?;
    // A session that is begun meanwhile is ended here, and none is begun later.
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let agent = run.hosts().agent(host)?;
    let job = job_of(run).await?;
    match agent.cancel_job(run.vm_id, run.task.id, job).await {
        // Copies that a guest has run on stay there as files: that of this task, which is given up, or that of an earlier one.
        Err(problem) if problem.code == ErrorCode::WrongState && may_stay(run).await? => {
            tracing::warn!(vm = %run.vm_id, %problem, "copies of disks stay as files");
        }
        cancelled => absent_is_fine(cancelled)?,
    }
    absent_is_fine(agent.unregister_vm(run.vm_id).await)
}

/// Whether the host may keep copies: an operator has said so, or they are none of this task, which has not asked it to let a guest go.
async fn may_stay(run: &Run<'_>) -> Result<bool, StepError> {
    Ok(!run.task.operation.is_asked_to_commit() || is_given_up(run).await?)
}

/// Whether the guest runs here, as its host has said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Runs,
    /// It does not, and this task will not have it run here.
    DoesNot,
}

/// How a guest has come: the output of its switch.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Arrived {
    /// What its host has placed of the memory, in bytes; none where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    placed: Option<u64>,
}

/// What the host of an arrival has placed of the guest's memory, once the guest runs there.
pub(crate) fn placed(task: &Task) -> Option<u64> {
    let arrived = task.outputs.get(ReceiveVmStep::Switch.name())?.clone();
    serde_json::from_value::<Arrived>(arrived).ok()?.placed
}

/// Has the guest go on, and records that it does.
async fn switch(run: &Run<'_>) -> Result<Arrived, StepError> {
    if run.vm().await?.lifecycle == Lifecycle::Ready {
        // Recorded by a server that has restarted since.
        return Ok(Arrived::default());
    }
    let (host, _) = place(run)?;
    let agent = run.hosts().agent(host)?;
    let (committed, arrived) = match until_loaded(run, host).await {
        Ok(arrived) => {
            if run.task.operation.is_at_rest() {
                at_rest::note_images(run, host).await?;
            }
            let job = job_of(run).await?;
            (agent.commit_job(run.vm_id, run.task.id, job).await, arrived)
        }
        Err(StepError::Final(problem)) => (Err(problem), Arrived::default()),
        Err(other) => return Err(other),
    };
    match committed {
        Ok(()) => record(run).await?,
        Err(problem) if is_silence(&problem) => return Err(problem.into()),
        Err(problem) => match give_up(run, &*agent).await? {
            Verdict::Runs => record(run).await?,
            Verdict::DoesNot => return Err(StepError::Final(problem)),
        },
    }
    Ok(arrived)
}

/// Waits until the guest's memory is loaded. Returns how it was.
async fn until_loaded(run: &Run<'_>, host: HostId) -> Result<Arrived, StepError> {
    let mut state = run.host_state(host, None).await?;
    loop {
        let job = run.job_in(&state);
        match job.map(|job| &job.state) {
            // An agent that has restarted says itself what became of the guest.
            None | Some(JobState::ReadyToCommit | JobState::Done) => {
                let received = job.and_then(|job| job.migration);
                return Ok(Arrived { placed: received.and_then(|received| received.placed) });
            }
            Some(JobState::Failed { problem }) => return Err(StepError::Final(problem.clone())),
            Some(JobState::Cancelled) => {
                let what = "the host has cancelled it";
                return Err(StepError::Final(Problem::new(ErrorCode::Cancelled, what)));
            }
            Some(_) => {}
        }
        state = newer(run, host, &state).await?;
    }
}

/// A newer state of the host.
async fn newer(
    run: &Run<'_>,
    host: HostId,
    last: &HostState,
) -> Result<std::sync::Arc<HostState>, StepError> {
    let newer = run.hosts().newer_state(host, last);
    match tokio::time::timeout(NEWER_STATE_WAIT, newer).await {
        Ok(newer) => Ok(newer?),
        Err(_) => Ok(run.host_state(host, None).await?),
    }
}

/// Has the host give the guest up, unless it runs there.
async fn give_up(run: &Run<'_>, agent: &dyn HostAgent) -> Result<Verdict, StepError> {
    let ((host, _), job) = (place(run)?, job_of(run).await?);
    let refusal = match agent.cancel_job(run.vm_id, run.task.id, job).await {
        Ok(()) => return Ok(Verdict::DoesNot),
        Err(problem) => problem,
    };
    match refusal.code {
        ErrorCode::NotFound => Ok(Verdict::DoesNot),
        // No guest is lost of one that is off: its disks are here, whether or not its host knows it.
        ErrorCode::WrongState if run.task.operation.is_at_rest() => Ok(Verdict::Runs),
        ErrorCode::WrongState => {
            match lost(run, host, &refusal, true).await.map_err(StepError::Again)? {
                None => Ok(Verdict::Runs),
                Some(_) if is_given_up(run).await? => Ok(Verdict::DoesNot),
                Some(problem) => Err(undecided(run, problem)),
            }
        }
        // It is not decided: the host is asked again.
        _ => Err(StepError::Again(refusal)),
    }
}

/// Only an operator can decide.
fn undecided(run: &Run<'_>, known: Problem) -> StepError {
    let advice = format!(
        "If what it has done there may be lost, have the VM go on where it comes from, as it was when it was sent: vmseal task cancel {} --force",
        run.task.id
    );
    StepError::Again(known).about(|known| format!("{known}. {advice}"))
}

/// Undoes [`switch`], if the host says that the guest does not run there.
async fn switch_back(run: &Run<'_>) -> Result<(), StepError> {
    let (host, _) = place(run)?;
    let agent = run.hosts().agent(host)?;
    match give_up(run, &*agent).await? {
        Verdict::DoesNot => Ok(()),
        Verdict::Runs => {
            record(run).await?;
            let detail = format!("VM '{}' is here: it has arrived", run.task.target);
            Err(wrong_state(detail))
        }
    }
}

/// Records that the guest runs here.
async fn record(run: &Run<'_>) -> Result<(), StepError> {
    let (host, _) = place(run)?;
    let operation = &run.task.operation;
    let (at_rest, suspended) = (operation.is_at_rest(), operation.is_of_suspended());
    // Those of one that is off were noted before, and its host may not know it any more.
    let made = if at_rest { Vec::new() } else { made(run, host).await? };
    {
        let _unchanged = run.hosts().lock(run.vm_id).await;
        let vm = run.vm().await?;
        let mut write = run.store().write().await?;
        for disk in &made {
            set_image(&mut write, disk, true).await?;
        }
        vms::set_lifecycle(&mut write, vm.id, Lifecycle::Ready).await?;
        if !suspended {
            // What its snapshots keep is beside its disks: none of that is its memory when it is off, unless it is reverted to.
            memory_generations::renew(&mut write, vm.id).await?;
        }
        // A guest that runs has run without a break.
        let (power, how) = match (at_rest, suspended) {
            (_, true) => (Power::Suspended, ", while it was suspended"),
            (true, false) => (Power::Off, ", while it was off"),
            (false, false) => (Power::Running, ""),
        };
        vms::set_seen(&mut write, vm.id, power, None).await?;
        let detail = format!(
            "from another control plane to host '{}', policy '{}', with copies of its disks{how}",
            vm.host_name, vm.policy_name
        );
        let (kind, actor) = ("vm.arrived", run.task.actor.as_str());
        write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
        write.commit().await?;
    }
    if at_rest {
        at_rest::register(run).await;
    }
    let state = run.host_state(host, None).await?;
    run.hosts().until_shown(host, &state).await;
    Ok(())
}

/// What the host says of the disks that it has made.
async fn made(run: &Run<'_>, host: HostId) -> Result<Vec<DiskState>, StepError> {
    let disks = run.disks().await?;
    let mut state = run.host_state(host, None).await?;
    loop {
        let Some(seen) = state_of(&state, run.vm_id) else {
            let detail = format!("the host does not know VM '{}' yet", run.task.target);
            return Err(StepError::Again(Problem::new(ErrorCode::Unreachable, detail)));
        };
        let of = |disk: &Disk| {
            let there = disk.datastore.datastore;
            let is_it = |it: &&DiskState| it.disk == disk.id && it.datastore == Some(there);
            seen.disks.iter().find(is_it).cloned()
        };
        if let Some(made) = disks.iter().map(of).collect::<Option<Vec<_>>>() {
            return Ok(made);
        }
        if is_lost(Some(seen)) {
            return Err(undecided(run, ended(run)));
        }
        state = newer(run, host, &state).await?;
    }
}
