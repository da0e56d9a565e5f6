//! Making a VM: its key, its registration, its disks. Until the last step it is `creating`, and undoing
//! leaves nothing of it.

use vmseal_api::datastore::DatastoreCondition;
use vmseal_api::host::{DiskPhase, HostAgent, HostState};
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::transfer::Progress;

use async_trait::async_trait;

use super::run::{Run, StepError, absent_is_fine, register, state_of};
use super::step::{Limit, Output, Patience};
use crate::hosts::keys::Purpose;
use crate::store::disks::{self, Disk};
use crate::store::events::NewEvent;
use crate::store::vms::{self, Vm};
use crate::store::{datastores, key_requests, keys};

/// What is done, in order. The names and ids are taken with the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Reserve,
    MakeKey,
    Register,
    DeliverKey,
    CreateDisks,
    Finish,
}

pub(crate) const STEPS: &[&dyn super::step::Step] = &[
    &Step::Reserve,
    &Step::MakeKey,
    &Step::Register,
    &Step::DeliverKey,
    &Step::CreateDisks,
    &Step::Finish,
];

#[async_trait]
impl super::step::Step for Step {
    fn name(&self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::MakeKey => "make-key",
            Self::Register => "register",
            Self::DeliverKey => "deliver-key",
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
            Self::CreateDisks => "create the disks",
            Self::Finish => "finish",
        }
    }

    fn needs_key(&self) -> bool {
        matches!(self, Self::MakeKey | Self::DeliverKey)
    }

    fn patience(&self) -> Patience {
        match self {
            Self::MakeKey | Self::DeliverKey => Patience::PROVIDER,
            Self::CreateDisks => Patience::BOTH,
            _ => Patience::NONE,
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::MakeKey | Self::DeliverKey => Some(Limit::Provider),
            Self::CreateDisks => Some(Limit::HostWork),
            _ => None,
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Reserve => Ok(()),
            Self::MakeKey => make_key(run).await,
            Self::Register => register(run).await,
            Self::DeliverKey => deliver_key(run).await,
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
            Self::DeliverKey => Ok(()),
            Self::CreateDisks => delete_disks(run).await,
            Self::Finish => unfinish(run).await,
        }
    }
}

/// The same task asks for the same key, however often.
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

/// Undoes [`make_key`], whether or not it is known what it did.
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
        // The agent restarted since it was asked for its key box, or since it was told of the VM.
        Err(problem) if matches!(problem.code, ErrorCode::WrongState | ErrorCode::NotFound) => {
            register(run).await?;
            Ok(run.hosts().deliver(&vm, Purpose::Encrypt).await?)
        }
        other => Ok(other?),
    }
}

/// Makes the disks that are not pinned yet, and pins each when it is whole.
pub(super) async fn create_disks(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let agent = run.agent(&vm)?;
    let mut state: Option<HostState> = None;
    loop {
        let disks = run.disks().await?;
        let missing: Vec<_> = disks.iter().filter(|disk| disk.facts.is_none()).collect();
        if missing.is_empty() {
            run.show(Progress::default());
            return Ok(());
        }
        let Some(seen) = &state else {
            for disk in &missing {
                begin(run, &vm, &*agent, disk).await?;
            }
            state = Some(run.news(&*agent, None).await?);
            continue;
        };
        let known = state_of(seen, vm.id);
        let mut progress = Progress::default();
        for disk in &missing {
            let phase = known.and_then(|vm| vm.disks.iter().find(|state| state.disk == disk.id));
            match phase.map(|state| &state.phase) {
                Some(DiskPhase::Ready { facts }) => {
                    let mut write = run.store().write().await?;
                    disks::set_facts(&mut write, disk.id, facts).await?;
                    write.commit().await?;
                }
                Some(DiskPhase::Creating { done, total }) => {
                    progress.done += done;
                    progress.total += total;
                }
                Some(DiskPhase::Failed { problem }) => {
                    return Err(StepError::Final(problem.clone()));
                }
                // The agent restarted and knows nothing of it: begin again.
                None => {
                    let detail =
                        format!("host '{}' lost track of disk '{}'", vm.host_name, disk.name);
                    return Err(StepError::Again(Problem::new(ErrorCode::Unreachable, detail)));
                }
            }
        }
        run.show(progress);
        run.check_cancelled()?;
        if run.disks().await?.iter().any(|disk| disk.facts.is_none()) {
            state = Some(run.news(&*agent, Some(seen)).await?);
        }
    }
}

async fn begin(
    run: &Run<'_>,
    vm: &Vm,
    agent: &dyn HostAgent,
    disk: &Disk,
) -> Result<(), StepError> {
    let source = || disk.image.clone();
    match agent.create_disk(vm.id, disk.id, source()).await {
        // The agent restarted since it was told of the VM and its key.
        Err(problem) if matches!(problem.code, ErrorCode::NotFound | ErrorCode::Locked) => {
            run.hosts().prepare(vm.id, Purpose::Encrypt).await?;
            Ok(agent.create_disk(vm.id, disk.id, source()).await?)
        }
        other => Ok(other?),
    }
}

/// Undoes [`create_disks`]: removes every disk, made or half-made.
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
    register(run).await?;
    {
        let _unchanged = run.hosts().lock(run.vm_id).await;
        let vm = run.vm().await?;
        if vm.lifecycle != Lifecycle::Ready {
            let mut write = run.store().write().await?;
            vms::set_lifecycle(&mut write, vm.id, Lifecycle::Ready).await?;
            let (kind, actor) = ("vm.created", run.task.actor.as_str());
            let detail = format!("on host '{}', policy '{}'", vm.host_name, vm.policy_name);
            write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
            write.commit().await?;
        }
    }
    let vm = run.vm().await?;
    let state = run.news(&*run.agent(&vm)?, None).await?;
    run.hosts().until_shown(vm.host, &state).await;
    measure_datastores(run).await;
    Ok(())
}

/// Notes how much room is left. Nothing depends on it, and nothing is written to the datastore.
async fn measure_datastores(run: &Run<'_>) {
    let measured: Result<(), StepError> = async {
        let vm = run.vm().await?;
        let agent = run.agent(&vm)?;
        for disk in run.disks().await? {
            let condition = agent.measure_datastore(disk.datastore.clone()).await?;
            let DatastoreCondition::Available { usage } = condition else { continue };
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
