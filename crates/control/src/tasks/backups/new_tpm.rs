//! The TPM of a VM that is made of another one's backup. It is a new one: what a TPM kept opens with its own disk alone, and two VMs
//! would have the same keys otherwise.

use vmseal_api::host::{CreateJob, DiskRole, DiskToCreate, JobKind, JobSpec};
use vmseal_api::problem::{ErrorCode, Problem};

use crate::store::disks;
use crate::tasks::job::{follow, put};
use crate::tasks::run::{Run, StepError, state_of};

/// Has the host make the disk of the VM's TPM, with a TPM that is empty, if the VM has one.
pub(super) async fn make(run: &Run<'_>) -> Result<(), StepError> {
    let (vm, known) = (run.vm().await?, run.disks().await?);
    let of_tpm = known.iter().find(|disk| disk.role == DiskRole::Tpm && disk.facts.is_none());
    let Some(disk) = of_tpm.map(|disk| disk.id) else { return Ok(()) };
    let wanted = DiskToCreate { disk, source: None, cloud_init: None, copy_of: None };
    put(run, &vm, JobSpec::Create(CreateJob { disks: vec![wanted] })).await?;
    follow(run, &vm, JobKind::Create).await?;
    let state = run.host_state(vm.host, None).await?;
    let made = state_of(&state, vm.id).map_or(&[][..], |seen| &seen.disks);
    let Some(made) = made.iter().find(|made| made.disk == disk) else {
        let detail = "the host does not say how it made the disk of the TPM";
        return Err(StepError::Again(Problem::new(ErrorCode::Unreachable, detail)));
    };
    let mut write = run.store().write().await?;
    disks::set_facts(&mut write, disk, &made.facts).await?;
    Ok(write.commit().await?)
}
