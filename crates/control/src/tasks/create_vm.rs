//! Creates a VM: its key, its registration, its disks. Until the last step it is `creating`, and undoing removes all
//! of it.

use vmseal_api::datastore::DatastoreCondition;
use vmseal_api::host::{CreateJob, DiskRole, DiskState, DiskToCreate, HostAgent, JobKind, JobSpec};
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::{ErrorCode, Problem};

use async_trait::async_trait;

use super::job::follow;
use super::run::{Run, StepError, absent_is_fine, register, state_of};
use super::step::{Limit, Output, WaitPolicy};
use crate::hosts::keys::Purpose;
use crate::operation::Operation;
use crate::store::disks::{self, Disk};
use crate::store::events::NewEvent;
use crate::store::vms::{self, Vm};
use crate::store::{datastores, key_requests, keys};

/// The steps, in order; [`super::clone_vm`] has those of clones. The request has already reserved the names and ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CreateVmStep {
    Reserve,
    MakeKey,
    Register,
    DeliverKey,
    PrepareOrigin,
    CreateDisks,
    Finish,
}

pub(crate) const STEPS: &[&dyn super::step::Step] = &[
    &CreateVmStep::Reserve,
    &CreateVmStep::MakeKey,
    &CreateVmStep::Register,
    &CreateVmStep::DeliverKey,
    &CreateVmStep::CreateDisks,
    &CreateVmStep::Finish,
];

#[async_trait]
impl super::step::Step for CreateVmStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::MakeKey => "make-key",
            Self::Register => "register",
            Self::DeliverKey => "deliver-key",
            Self::PrepareOrigin => "prepare-origin",
            Self::CreateDisks => "create-disks",
            Self::Finish => "finish",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Reserve => "reserve the names",
            Self::MakeKey => "make the key",
            Self::Register => "register on the host",
            Self::DeliverKey => "deliver the key",
            Self::PrepareOrigin => "deliver the key of the VM that is cloned",
            Self::CreateDisks => "create the disks",
            Self::Finish => "finish",
        }
    }

    fn needs_key(&self) -> bool {
        matches!(self, Self::MakeKey | Self::DeliverKey)
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            Self::MakeKey | Self::DeliverKey | Self::PrepareOrigin => WaitPolicy::PROVIDER,
            Self::CreateDisks => WaitPolicy::BOTH,
            _ => WaitPolicy::NONE,
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::MakeKey | Self::DeliverKey | Self::PrepareOrigin => Some(Limit::Provider),
            Self::CreateDisks => Some(Limit::NewDisks),
            _ => None,
        }
    }

    fn is_undone_by_monitor(&self) -> bool {
        // A VM without disks, which the inventory does not have then, is forgotten.
        matches!(self, Self::Register)
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Reserve => Ok(()),
            Self::MakeKey => make_key(run).await,
            Self::Register => register(run).await,
            Self::DeliverKey => deliver_key(run).await,
            Self::PrepareOrigin => prepare_origin(run).await,
            Self::CreateDisks => create_disks(run).await,
            Self::Finish => finish(run).await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::Reserve => remove_rows(run).await,
            Self::MakeKey => unmake_key(run).await,
            Self::Register => super::delete_vm::forget(run).await,
            Self::DeliverKey | Self::PrepareOrigin => Ok(()),
            Self::CreateDisks => delete_disks(run).await,
            Self::Finish => unfinish(run).await,
        }
    }
}

/// The request id is the task's, so a repetition gets the same key.
pub(super) async fn make_key(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let Some(provider) = vm.provider else { return Ok(()) };
    if vm.key.is_some() {
        return Ok(());
    }
    let (key, kek) = run.context.providers.get(provider)?.create_key(vm.id, run.task.id.0).await?;
    drop(kek);
    let mut write = run.store().write().await?;
    keys::insert(&mut write, vm.id, &key).await?;
    key_requests::delete(&mut write, provider, run.task.id.0).await?;
    vms::set_key(&mut write, vm.id, &key).await?;
    let detail = format!("key '{}' of provider {}", key.key_id, key.provider);
    let (kind, actor) = ("key.created", run.task.actor.as_str());
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// Undoes [`make_key`], even if its outcome is unknown.
pub(super) async fn unmake_key(run: &Run<'_>) -> Result<(), StepError> {
    let Some(vm) = run.find_vm().await? else { return Ok(()) };
    if vm.key.is_some() {
        return super::delete_vm::destroy_keys(run).await;
    }
    let Some(provider) = vm.provider else { return Ok(()) };
    Ok(run.context.providers.get(provider)?.abandon(run.task.id.0).await?)
}

pub(super) async fn deliver_key(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    match run.hosts().deliver(&vm, Purpose::Encrypt).await {
        // The agent restarted since it gave its key box, or since the registration.
        Err(problem) if matches!(problem.code, ErrorCode::WrongState | ErrorCode::NotFound) => {
            register(run).await?;
            Ok(run.hosts().deliver(&vm, Purpose::Encrypt).await?)
        }
        other => Ok(other?),
    }
}

/// Registers the VM that is cloned on its host, with its key.
async fn prepare_origin(run: &Run<'_>) -> Result<(), StepError> {
    let Operation::CreateVm { copies: Some(copies), .. } = &run.task.operation else {
        return Ok(());
    };
    crate::hosts::register(run.store(), run.hosts(), copies.vm).await?;
    Ok(run.hosts().prepare(copies.vm, Purpose::Open).await?)
}

/// Creates the disks, and records the facts about them when all are complete.
pub(super) async fn create_disks(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let agent = run.agent(&vm)?;
    let disks = run.disks().await?;
    if disks.iter().all(|disk| disk.facts.is_some()) {
        return Ok(());
    }
    let Operation::CreateVm { cloud_init, copies, .. } = &run.task.operation else {
        return Err(StepError::Final(Problem::new(ErrorCode::Internal, "it creates no VM")));
    };
    let wanted = |disk: &Disk| DiskToCreate {
        disk: disk.id,
        source: disk.image.clone(),
        cloud_init: cloud_init.clone().filter(|_| disk.role == DiskRole::CloudInit),
        copy_of: copies.as_ref().and_then(|copies| copies.of(disk.id, disk.role)),
    };
    let job = JobSpec::Create(CreateJob { disks: disks.iter().map(wanted).collect() });
    begin(run, &vm, &*agent, job).await?;
    follow(run, &vm, JobKind::Create).await?;
    let state = run.host_state(vm.host, None).await?;
    let seen = state_of(&state, vm.id).map(|seen| seen.disks.as_slice());
    pin(run, &disks, seen.unwrap_or_default()).await
}

/// Records the facts about the new disks.
async fn pin(run: &Run<'_>, disks: &[Disk], made: &[DiskState]) -> Result<(), StepError> {
    let mut write = run.store().write().await?;
    for disk in disks {
        let Some(made) = made.iter().find(|made| made.disk == disk.id) else {
            let detail = format!("the host does not say how it made disk '{}'", disk.name);
            return Err(StepError::Again(Problem::new(ErrorCode::Unreachable, detail)));
        };
        disks::set_facts(&mut write, disk.id, &made.facts).await?;
    }
    Ok(write.commit().await?)
}

async fn begin(
    run: &Run<'_>,
    vm: &Vm,
    agent: &dyn HostAgent,
    job: JobSpec,
) -> Result<(), StepError> {
    match agent.put_job(vm.id, run.task.id, job.clone()).await {
        // The agent restarted since it got the VM and its key.
        Err(problem) if matches!(problem.code, ErrorCode::NotFound | ErrorCode::Locked) => {
            run.hosts().prepare(vm.id, Purpose::Encrypt).await?;
            prepare_origin(run).await?;
            Ok(agent.put_job(vm.id, run.task.id, job).await?)
        }
        other => Ok(other?),
    }
}

/// Undoes [`create_disks`]: removes every disk, complete or not.
pub(super) async fn delete_disks(run: &Run<'_>) -> Result<(), StepError> {
    let Some(vm) = run.find_vm().await? else { return Ok(()) };
    let agent = run.agent(&vm)?;
    register(run).await?;
    for disk in run.disks().await? {
        match agent.delete_disk(vm.id, disk.id).await {
            // It is still being filled.
            Err(problem) if problem.code == ErrorCode::InUse => {
                return Err(StepError::Again(problem));
            }
            answer => absent_is_fine(answer)?,
        }
    }
    Ok(())
}

pub(super) async fn finish(run: &Run<'_>) -> Result<(), StepError> {
    finish_made(run, "").await
}

/// The same, with more for the event.
pub(super) async fn finish_made(run: &Run<'_>, how: &str) -> Result<(), StepError> {
    register(run).await?;
    {
        let _unchanged = run.hosts().lock(run.vm_id).await;
        let vm = run.vm().await?;
        if vm.lifecycle != Lifecycle::Ready {
            let in_the_clear = in_the_clear(&vm, &run.disks().await?);
            let mut write = run.store().write().await?;
            vms::set_lifecycle(&mut write, vm.id, Lifecycle::Ready).await?;
            let (kind, actor) = ("vm.created", run.task.actor.as_str());
            let (host, policy) = (&vm.host_name, &vm.policy_name);
            let detail = format!("on host '{host}', policy '{policy}'{how}{in_the_clear}");
            write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
            write.commit().await?;
        }
    }
    let vm = run.vm().await?;
    let state = run.host_state(vm.host, None).await?;
    run.hosts().until_shown(vm.host, &state).await;
    measure_datastores(run).await;
    Ok(())
}

/// Says for the event which disks of a VM with a key are in the clear.
pub(super) fn in_the_clear(vm: &Vm, disks: &[Disk]) -> String {
    let plain = disks.iter().filter(|disk| vm.key.is_some() && !disk.encrypted);
    let names: Vec<_> = plain.map(|disk| format!("'{}'", disk.name)).collect();
    match names.is_empty() {
        true => String::new(),
        false => format!(", in the clear: disks {}", names.join(", ")),
    }
}

/// Records the free space. Nothing depends on it, and nothing is written to the datastore.
pub(super) async fn measure_datastores(run: &Run<'_>) {
    let measured: Result<(), StepError> = async {
        let vm = run.vm().await?;
        let agent = run.agent(&vm)?;
        for disk in run.disks().await? {
            let condition = agent.measure_datastore(disk.datastore.clone()).await?;
            let DatastoreCondition::Available { usage, .. } = condition else { continue };
            let mut write = run.store().write().await?;
            datastores::set_usage(&mut write, disk.datastore.datastore, usage).await?;
            write.commit().await?;
        }
        Ok(())
    }
    .await;
    if let Err(error) = measured {
        tracing::debug!(?error, "a datastore could not be measured");
    }
}

/// Undoes [`finish`].
pub(super) async fn unfinish(run: &Run<'_>) -> Result<(), StepError> {
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    vms::set_lifecycle(&mut write, run.vm_id, Lifecycle::Creating).await?;
    Ok(write.commit().await?)
}

/// Undoes the reservation.
pub(super) async fn remove_rows(run: &Run<'_>) -> Result<(), StepError> {
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    vms::delete(&mut write, run.vm_id).await?;
    Ok(write.commit().await?)
}
