//! Adds a disk to a VM, which may run: then its guest gets it, too. Until it is plugged in the VM does not have it, and
//! undoing removes all of it. A TPM is added in the same way, as the disk that has its key.

use async_trait::async_trait;
use vmseal_api::host::{CreateJob, DiskRole, DiskToCreate, JobKind, JobSpec};
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::size::Size;

use super::job::follow;
use super::run::{Run, StepError, absent_is_fine, register, state_of};
use super::step::{Limit, Output, WaitPolicy};
use crate::hosts::keys::Purpose;
use crate::hosts::register_with;
use crate::operation::Operation;
use crate::store::disks::{self, Disk};
use crate::store::events::NewEvent;
use crate::store::vms;

/// The steps, in order. The request has already written the disk's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddDiskStep {
    Reserve,
    CreateDisk,
    Attach,
}

pub(crate) const STEPS: &[&dyn super::step::Step] =
    &[&AddDiskStep::Reserve, &AddDiskStep::CreateDisk, &AddDiskStep::Attach];

#[async_trait]
impl super::step::Step for AddDiskStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::CreateDisk => "create-disk",
            Self::Attach => "attach",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Reserve => "reserve the name",
            Self::CreateDisk => "create the disk",
            Self::Attach => "give it to the VM",
        }
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            Self::CreateDisk => WaitPolicy::BOTH,
            _ => WaitPolicy::NONE,
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::CreateDisk => Some(Limit::NewDisks),
            _ => None,
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Reserve => Ok(()),
            Self::CreateDisk => create(run).await,
            Self::Attach => attach(run).await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::Reserve => remove_row(run).await,
            Self::CreateDisk => delete_image(run).await,
            Self::Attach => detach(run).await,
        }
    }
}

/// The disk of the task's operation.
fn disk_id(run: &Run<'_>) -> Result<DiskId, StepError> {
    match run.task.operation {
        Operation::AddDisk { disk, .. }
        | Operation::RemoveDisk { disk, .. }
        | Operation::AddTpm { disk, .. }
        | Operation::RemoveTpm { disk, .. }
        | Operation::GrowDisk { disk, .. } => Ok(disk),
        _ => Err(StepError::Final(Problem::new(ErrorCode::Internal, "it is about no disk"))),
    }
}

/// The disk of the task; `None` if it is removed.
pub(super) async fn find_disk(run: &Run<'_>) -> Result<Option<Disk>, StepError> {
    let id = disk_id(run)?;
    Ok(run.disks().await?.into_iter().find(|disk| disk.id == id))
}

async fn disk(run: &Run<'_>) -> Result<Disk, StepError> {
    find_disk(run).await?.ok_or_else(|| {
        let detail = format!("VM '{}' has lost the disk of this task", run.task.target);
        StepError::Final(Problem::new(ErrorCode::NotFound, detail))
    })
}

async fn create(run: &Run<'_>) -> Result<(), StepError> {
    let disk = disk(run).await?;
    if disk.facts.is_some() {
        return Ok(());
    }
    let wanted =
        DiskToCreate { disk: disk.id, source: disk.image.clone(), cloud_init: None, copy_of: None };
    let job = JobSpec::Create(CreateJob { disks: vec![wanted] });
    let vm = register_with(run.store(), run.hosts(), run.vm_id, &disk).await?;
    let agent = run.agent(&vm)?;
    match agent.put_job(vm.id, run.task.id, job.clone()).await {
        // The agent has restarted, and has no key.
        Err(problem) if problem.code == ErrorCode::Locked => {
            run.hosts().deliver(&vm, Purpose::Encrypt).await?;
            agent.put_job(vm.id, run.task.id, job).await?;
        }
        other => other?,
    }
    follow(run, &vm, JobKind::Create).await?;
    let state = run.host_state(vm.host, None).await?;
    let seen = state_of(&state, vm.id).map_or(&[][..], |seen| &seen.disks);
    let Some(made) = seen.iter().find(|made| made.disk == disk.id) else {
        let detail = format!("the host does not say how it made disk '{}'", disk.name);
        return Err(StepError::Again(Problem::new(ErrorCode::Unreachable, detail)));
    };
    let mut write = run.store().write().await?;
    disks::set_facts(&mut write, disk.id, &made.facts).await?;
    Ok(write.commit().await?)
}

/// Removes the image of the task's disk, complete or not.
pub(super) async fn delete_image(run: &Run<'_>) -> Result<(), StepError> {
    let Some(disk) = find_disk(run).await? else { return Ok(()) };
    let vm = register_with(run.store(), run.hosts(), run.vm_id, &disk).await?;
    let agent = run.agent(&vm)?;
    match agent.delete_disk(vm.id, disk.id).await {
        // Its filter serves the disk still, and the agent has restarted since it got the key for another one.
        Err(problem) if problem.code == ErrorCode::Locked => {
            run.hosts().deliver(&vm, Purpose::Open).await?;
            absent_is_fine(agent.delete_disk(vm.id, disk.id).await)
        }
        answer => absent_is_fine(answer),
    }
}

async fn attach(run: &Run<'_>) -> Result<(), StepError> {
    let disk = disk(run).await?;
    set_detached(run, &disk, false).await?;
    register_with_key(run).await?;
    let vm = run.vm().await?;
    let mut write = run.store().write().await?;
    let detail = match disk.role {
        DiskRole::Tpm => "a TPM is added".to_owned(),
        _ => {
            let how = if vm.key.is_some() && !disk.encrypted { ", in the clear" } else { "" };
            format!("disk '{}' is added, of {}{how}", disk.name, Size(disk.size))
        }
    };
    let (kind, actor) = ("vm.changed", run.task.actor.as_str());
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    write.commit().await?;
    let state = run.host_state(vm.host, None).await?;
    run.hosts().until_shown(vm.host, &state).await;
    Ok(())
}

/// Takes the disk from the VM: a guest that runs lets it go.
pub(super) async fn detach(run: &Run<'_>) -> Result<(), StepError> {
    let Some(disk) = find_disk(run).await? else { return Ok(()) };
    set_detached(run, &disk, true).await?;
    register_with_key(run).await
}

/// Registers the VM on its host. A filter that serves other disks than before opens all of them, and the agent of a VM
/// that runs may have restarted since it got the key.
pub(super) async fn register_with_key(run: &Run<'_>) -> Result<(), StepError> {
    match register(run).await {
        Err(StepError::Final(problem)) if problem.code == ErrorCode::Locked => {
            run.hosts().deliver(&run.vm().await?, Purpose::Open).await?;
            register(run).await
        }
        other => other,
    }
}

/// Records whether the VM has the disk, and with that of a TPM whether it has the TPM.
pub(super) async fn set_detached(
    run: &Run<'_>,
    disk: &Disk,
    detached: bool,
) -> Result<(), StepError> {
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    disks::set_detached(&mut write, disk.id, detached).await?;
    if disk.role == DiskRole::Tpm
        && let Some(mut vm) = vms::get(&mut write, run.vm_id).await?
    {
        vm.hardware.tpm = !detached;
        vms::set(&mut write, &vm).await?;
    }
    Ok(write.commit().await?)
}

/// Removes the disk from the inventory, and has the host forget it.
pub(super) async fn remove_row(run: &Run<'_>) -> Result<(), StepError> {
    if let Some(disk) = find_disk(run).await? {
        let _unchanged = run.hosts().lock(run.vm_id).await;
        let mut write = run.store().write().await?;
        disks::delete(&mut write, disk.id).await?;
        write.commit().await?;
    }
    register_with_key(run).await
}
