//! A VM that is off, or suspended, and goes to another control plane: its disks are sent, and the memory of its guest where that is saved.

use vmseal_api::host::{HostState, JobSpec, JobState, Power};
use vmseal_api::id::HostId;
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::ErrorCode;

use super::{agent_of, checked};
use crate::hosts;
use crate::hosts::keys::Purpose;
use crate::store::disks::Disk;
use crate::tasks::run::{Run, StepError, state_of, wrong_state};
use crate::tasks::start_vm::locked;

/// The disks of a VM that must be off, or suspended, on this host still.
pub(super) async fn disks(
    run: &Run<'_>,
    from: HostId,
    suspended: bool,
) -> Result<Vec<Disk>, StepError> {
    let vm = run.vm().await?;
    if vm.lifecycle != Lifecycle::Ready || vm.host != from {
        return Err(wrong_state(format!(
            "VM '{}' has been changed meanwhile: begin again",
            vm.name
        )));
    }
    let state = run.host_state(from, None).await?;
    let (wanted, word) =
        if suspended { (Power::Suspended, "suspended") } else { (Power::Off, "off") };
    // An agent that has restarted says what it is when it is told of it.
    if state_of(&state, vm.id).is_some_and(|seen| seen.power != wanted) {
        return Err(wrong_state(format!("VM '{}' is not {word} any more", vm.name)));
    }
    Ok(run.disks().await?.into_iter().filter(|disk| !disk.detached).collect())
}

/// Has its host know it, and its key: an agent that has restarted knows no VM that is off.
pub(super) async fn prepare(run: &Run<'_>) -> Result<(), StepError> {
    Ok(run.hosts().prepare(run.vm_id, Purpose::Open).await.map_err(locked)?)
}

/// Has its host give up the memory that the other control plane has taken: with that it would be suspended here, and keep its disks.
pub(super) async fn give_up_memory(run: &Run<'_>, from: HostId) -> Result<(), StepError> {
    let agent = agent_of(run, from)?;
    let job = JobSpec::Send(checked(run)?.sent());
    match agent.commit_job(run.vm_id, run.task.id, job).await {
        // One that has restarted is told of it, and finds the memory.
        Err(problem) if problem.code == ErrorCode::NotFound => {
            let here = agent.describe().await?;
            let spec = hosts::definition_with(run.store(), run.vm_id, from, &[]).await?;
            agent.register_vm(hosts::for_agent(spec, Some(&here))).await?;
        }
        done => done?,
    }
    match agent.discard_memory(run.vm_id).await {
        // The agent has restarted since, and has to be told of the VM: without its memory removed its disks could not be.
        Err(problem) if problem.code == ErrorCode::NotFound => Err(StepError::Again(problem)),
        done => Ok(done?),
    }
}

/// Whether its disks are at the other host, as the agent says that has sent them.
pub(super) fn is_sent(run: &Run<'_>, source: &HostState) -> bool {
    run.job_in(source).is_some_and(|job| job.state == JobState::ReadyToCommit)
}
