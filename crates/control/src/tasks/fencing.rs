//! The VM's host keeps all others from the VM's disks, which are on pools of Ceph ([`vmseal_api::host::Fence`]).

use vmseal_api::host::version::FENCE_VMS;
use vmseal_api::host::{Fence, VmSpec};
use vmseal_api::problem::ErrorCode;

use super::run::{Run, StepError, internal};
use crate::hosts::{definition, for_agent, may_fence};
use crate::operation::Operation;
use crate::store::vms::Vm;
use crate::store::{evacuations, placements};

/// Keeps hosts that a VM was evacuated from, and that have not said since that they have nothing of it, from its disks before it is started. An
/// evacuation may not have got as far as that, and an agent of an earlier version does not see the lease.
pub(super) async fn keep_former_away(run: &Run<'_>, vm: &Vm) -> Result<(), StepError> {
    // It does so itself.
    if matches!(run.task.operation, Operation::EvacuateVm { .. }) {
        return Ok(());
    }
    let generation = {
        let mut read = run.store().read().await?;
        if !evacuations::is_awaited(&mut read, vm.id).await? {
            return Ok(());
        }
        placements::generation(&mut read, vm.id).await?
    };
    let found = definition(run.store(), vm.id).await?;
    let (_, spec) = found.ok_or_else(|| internal("the VM is gone"))?;
    // Disks may have been moved to a directory since, and the VM to a host with an agent of an earlier version.
    if !is_on_pools(&spec) || !run.has_feature(vm, FENCE_VMS).await? {
        return Ok(());
    }
    // What is begun cannot be ended by a host that may not.
    may_fence::require(run.store(), &*run.agent(vm)?, vm.host, &run.disks().await?).await?;
    match take(run, generation).await {
        // The lease is later than what the inventory knows: another host may have the images. If it has, it keeps them, and the start fails.
        Err(StepError::Final(problem)) if problem.code == ErrorCode::Conflict => {
            tracing::warn!(vm = %vm.id, %problem, "a VM that was evacuated is started without taking its disks");
            Ok(())
        }
        other => other,
    }
}

/// Whether all disks of a VM, and their replicas, are on pools.
fn is_on_pools(spec: &VmSpec) -> bool {
    spec.disks().all(|disk| {
        let replica = disk.replica.as_ref().map(|replica| &replica.datastore);
        let mut places = std::iter::once(&disk.datastore).chain(replica);
        places.all(|place| place.location.pool().is_some())
    })
}

/// Has the VM's host take its disks, for a placement of this generation.
pub(super) async fn take(run: &Run<'_>, generation: u64) -> Result<(), StepError> {
    let found = definition(run.store(), run.vm_id).await?;
    let (vm, spec) = found.ok_or_else(|| internal("the VM is gone"))?;
    let agent = run.agent(&vm)?;
    let here = agent.describe().await?;
    let vm = for_agent(spec, Some(&here));
    match agent.fence_vm(Fence { vm, generation }).await {
        // The cluster is slow, or has not enough OSDs at the moment: there is no way back, so it is asked until it answers.
        Err(problem) if matches!(problem.code, ErrorCode::Internal | ErrorCode::NoSpace) => {
            Err(StepError::Again(problem))
        }
        other => Ok(other?),
    }
}
