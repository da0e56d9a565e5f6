//! A VM that is off and goes to another control plane: its disks are sent alone.

use vmseal_api::host::{HostState, JobState, Power};
use vmseal_api::id::HostId;
use vmseal_api::model::Lifecycle;

use crate::hosts::keys::Purpose;
use crate::store::disks::Disk;
use crate::tasks::run::{Run, StepError, state_of, wrong_state};
use crate::tasks::start_vm::locked;

/// The disks of a VM that must be off on this host still.
pub(super) async fn disks(run: &Run<'_>, from: HostId) -> Result<Vec<Disk>, StepError> {
    let vm = run.vm().await?;
    if vm.lifecycle != Lifecycle::Ready || vm.host != from {
        return Err(wrong_state(format!("VM '{}' has been changed meanwhile", vm.name)));
    }
    let state = run.host_state(from, None).await?;
    if state_of(&state, vm.id).map_or(Power::Off, |seen| seen.power) != Power::Off {
        return Err(wrong_state(format!("VM '{}' is not off any more", vm.name)));
    }
    Ok(run.disks().await?.into_iter().filter(|disk| !disk.detached).collect())
}

/// Has its host know it, and its key: an agent that has restarted knows no VM that is off.
pub(super) async fn prepare(run: &Run<'_>) -> Result<(), StepError> {
    Ok(run.hosts().prepare(run.vm_id, Purpose::Open).await.map_err(locked)?)
}

/// Whether its disks are at the other host, as the agent says that has sent them.
pub(super) fn is_sent(run: &Run<'_>, source: &HostState) -> bool {
    run.job_in(source).is_some_and(|job| job.state == JobState::ReadyToCommit)
}
