//! The job of a task on the host of its VM.

use std::sync::Arc;

use vmseal_api::host::{DropSnapshotJob, HostState, JobKind, JobSpec, JobState};
use vmseal_api::id::DiskId;
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::transfer::Progress;

use super::run::{Run, StepError};
use super::start_vm::{locked, prepare};
use crate::hosts::keys::Purpose;
use crate::store::vms::Vm;

/// Has the host begin a job; an agent that has restarted gets the VM and its key first.
pub(super) async fn put(run: &Run<'_>, vm: &Vm, job: JobSpec) -> Result<(), StepError> {
    let agent = run.agent(vm)?;
    match agent.put_job(vm.id, run.task.id, job.clone()).await {
        Err(problem) if matches!(problem.code, ErrorCode::NotFound | ErrorCode::Locked) => {
            known(run, vm).await?;
            Ok(agent.put_job(vm.id, run.task.id, job).await?)
        }
        other => Ok(other?),
    }
}

/// Gives the host of an agent that has restarted the VM and its key, also while the VM runs.
async fn known(run: &Run<'_>, vm: &Vm) -> Result<(), StepError> {
    prepare(run).await?;
    Ok(run.hosts().deliver(vm, Purpose::Open).await.map_err(locked)?)
}

/// The disk beside which core dumps are written.
pub(super) async fn first_disk(run: &Run<'_>) -> Result<DiskId, StepError> {
    let disks = run.disks().await?;
    let first = disks.iter().find(|disk| disk.facts.is_some() && !disk.detached);
    first.map(|disk| disk.id).ok_or_else(|| {
        let detail = format!("VM '{}' has no disk, and core dumps are beside one", run.task.target);
        StepError::Final(Problem::new(ErrorCode::WrongState, detail))
    })
}

/// Has the host drop a snapshot and merge its layers. An agent that has restarted since the job was put has no key for that.
pub(super) async fn drop_snapshot(
    run: &Run<'_>,
    vm: &Vm,
    job: DropSnapshotJob,
) -> Result<(), StepError> {
    let job = JobSpec::DropSnapshot(job);
    put(run, vm, job.clone()).await?;
    match follow(run, vm, JobKind::DropSnapshot).await {
        Err(StepError::Final(problem)) if problem.code == ErrorCode::Locked => {
            known(run, vm).await?;
            put(run, vm, job).await?;
            follow(run, vm, JobKind::DropSnapshot).await.map(drop)
        }
        followed => followed.map(drop),
    }
}

/// What has become of a job that was followed.
pub(super) enum Followed {
    /// Nothing is left but to commit it, or nothing at all; with whether the guest's file systems were frozen, where that is
    /// known.
    Ready(Option<bool>),
    /// The task is to go on at another pace.
    AnotherPace,
}

/// Follows the task's job of this kind until nothing is left but to commit it, or nothing at all. Returns whether the
/// guest's file systems were frozen, where that is known.
pub(super) async fn follow(
    run: &Run<'_>,
    vm: &Vm,
    kind: JobKind,
) -> Result<Option<bool>, StepError> {
    follow_as(run, vm, kind, std::convert::identity).await
}

/// The same of a job that is to have what `held` makes of the task's pace.
pub(super) async fn follow_as(
    run: &Run<'_>,
    vm: &Vm,
    kind: JobKind,
    held: fn(CopyPace) -> CopyPace,
) -> Result<Option<bool>, StepError> {
    // A job begins as fast as it can.
    let mut told = CopyPace::default();
    loop {
        let pace = run.pace();
        if held(pace) != told && kind.has_work_pace() {
            tell(run, vm, held(pace)).await?;
        }
        told = held(pace);
        match follow_at(run, vm, kind, pace).await? {
            Followed::Ready(quiesced) => return Ok(quiesced),
            Followed::AnotherPace => {}
        }
    }
}

/// Tells the host at what pace the task's job is to go on.
async fn tell(run: &Run<'_>, vm: &Vm, pace: CopyPace) -> Result<(), StepError> {
    match run.agent(vm)?.set_pace(vm.id, run.task.id, pace).await {
        // It has ended, or the agent has restarted and knows no job: who follows it sees that.
        Err(problem) if problem.code == ErrorCode::NotFound => Ok(()),
        // An earlier agent, after a change of hosts.
        Err(problem) if problem.code == ErrorCode::Unsupported => Ok(()),
        other => Ok(other?),
    }
}

/// The same of a job that was put at this pace, while the task is to have it.
pub(super) async fn follow_at(
    run: &Run<'_>,
    vm: &Vm,
    kind: JobKind,
    pace: CopyPace,
) -> Result<Followed, StepError> {
    let mut state: Option<Arc<HostState>> = None;
    loop {
        let next = tokio::select! {
            next = run.host_state(vm.host, state.as_deref()) => next?,
            () = run.another_pace(pace) => return Ok(Followed::AnotherPace),
        };
        let job = run.job_in(&next).filter(|job| job.kind == kind);
        match job.map(|job| &job.state) {
            Some(JobState::ReadyToCommit | JobState::Done) => {
                run.show(Progress::default());
                return Ok(Followed::Ready(job.and_then(|job| job.quiesced)));
            }
            Some(JobState::Failed { problem }) => return Err(StepError::Final(problem.clone())),
            Some(JobState::Cancelled) => {
                let detail = format!("host '{}' has cancelled this step", vm.host_name);
                return Err(StepError::Final(Problem::new(ErrorCode::Cancelled, detail)));
            }
            Some(_) => run.show_job(&next),
            // The agent has restarted and does not know the job: it is put again, and goes on where it was.
            None => {
                let detail = format!("host '{}' lost track of the disks", vm.host_name);
                return Err(StepError::Again(Problem::new(ErrorCode::Unreachable, detail)));
            }
        }
        run.check_cancelled()?;
        state = Some(next);
    }
}
