//! Gives a VM another KEK, perhaps of another provider (shallow recrypt): the keys of its disks stay,
//! and are wrapped again. The VM may run: its filter goes on with the keys of the disks. At every point the key in the inventory opens all disks of the VM:
//!
//! ```text
//!   all disks open with the old key ─► make the new key ─► all open with both ─► inventory: the new one
//!      ─► host: the new one ─► all open with the new one alone ─► the old one is destroyed
//! ```
//!
//! It can be undone until the inventory has the new key, which is the commit step; after that it goes only forward.
//! In the last step the host has tried the new key on every disk again before the old one is destroyed. Each request
//! names the key that the host is expected to be registered with: so the effect of a lost answer is never mistaken
//! for the state in which a key may be dropped.
//!
//! A task that can be neither finished nor undone leaves its keys in the inventory, as keys of the VM. The next
//! recryption removes them from the disks and destroys them; so does the VM's deletion.

use async_trait::async_trait;
use vmseal_api::host::{KeyReference, OtherKey, Power};
use vmseal_api::id::ProviderId;
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::{ErrorCode, Problem};

use super::run::{Run, StepError, internal, state_of};
use super::start_vm::locked;
use super::step::{Limit, Output, WaitPolicy};
use crate::hosts::keys::{self as delivery, Purpose};
use crate::operation::Operation;
use crate::store::events::NewEvent;
use crate::store::vms::{self, Vm};
use crate::store::{backups, key_requests, keys};

/// The steps, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::enum_variant_names, reason = "every step is about one of two keys")]
pub(crate) enum RecryptVmStep {
    CheckKey,
    MakeNewKey,
    AddNewKey,
    SwitchKey,
    DeliverNewKey,
    DropOldKey,
    DestroyOldKey,
}

pub(crate) const STEPS: &[&dyn super::step::Step] = &[
    &RecryptVmStep::CheckKey,
    &RecryptVmStep::MakeNewKey,
    &RecryptVmStep::AddNewKey,
    &RecryptVmStep::SwitchKey,
    &RecryptVmStep::DeliverNewKey,
    &RecryptVmStep::DropOldKey,
    &RecryptVmStep::DestroyOldKey,
];

#[async_trait]
impl super::step::Step for RecryptVmStep {
    fn name(&self) -> &'static str {
        match self {
            Self::CheckKey => "check-key",
            Self::MakeNewKey => "make-new-key",
            Self::AddNewKey => "add-new-key",
            Self::SwitchKey => "switch-key",
            Self::DeliverNewKey => "deliver-new-key",
            Self::DropOldKey => "drop-old-key",
            Self::DestroyOldKey => "destroy-old-key",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::CheckKey => "open every disk with the key that it has",
            Self::MakeNewKey => "make the new key",
            Self::AddNewKey => "add the new key to the disks",
            Self::SwitchKey => "give the VM the new key",
            Self::DeliverNewKey => "deliver the new key",
            Self::DropOldKey => "remove the old key from the disks",
            Self::DestroyOldKey => "destroy the old key",
        }
    }

    fn commits(&self) -> bool {
        matches!(self, Self::SwitchKey)
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            Self::MakeNewKey
            | Self::AddNewKey
            | Self::DeliverNewKey
            | Self::DropOldKey
            | Self::DestroyOldKey => WaitPolicy::PROVIDER,
            _ => WaitPolicy::NONE,
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::CheckKey
            | Self::MakeNewKey
            | Self::AddNewKey
            | Self::DeliverNewKey
            | Self::DestroyOldKey => Some(Limit::Provider),
            _ => None,
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::CheckKey => check(run).await,
            Self::AddNewKey => add_new(run).await,
            Self::SwitchKey => switch(run).await,
            Self::DeliverNewKey => prepare(run).await,
            Self::DropOldKey => drop_old(run).await,
            Self::DestroyOldKey => destroy_old(run).await,
            Self::MakeNewKey => return make_key(run).await.map(|key| Output::of(&key)),
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::CheckKey | Self::DeliverNewKey | Self::DropOldKey | Self::DestroyOldKey => Ok(()),
            Self::MakeNewKey => unmake_key(run).await,
            Self::AddNewKey => drop_new(run).await,
            Self::SwitchKey => switch_back(run).await,
        }
    }
}

/// The old key, and the provider of the new one.
fn order<'a>(run: &'a Run<'_>) -> Result<(&'a KeyReference, ProviderId), StepError> {
    match &run.task.operation {
        Operation::RecryptVm { old, provider, .. } => Ok((old, *provider)),
        _ => Err(internal("it is not a recryption")),
    }
}

/// The VM's key in the inventory.
fn key_of(vm: &Vm) -> Result<&KeyReference, StepError> {
    vm.key.as_ref().ok_or_else(|| internal("the VM has no key"))
}

/// The key that this task created.
async fn new_key(run: &Run<'_>) -> Result<KeyReference, StepError> {
    if let Some(key) = run.output(super::step::Step::name(&RecryptVmStep::MakeNewKey)) {
        return Ok(key);
    }
    // Begun by a version that stored no outputs.
    let found = keys::of_task(&mut *run.store().read().await?, run.task.id).await?;
    found.ok_or_else(|| internal("the new key is not in the inventory"))
}

/// Registers the VM on the host and delivers its key; repeats this if the agent has restarted in between.
async fn prepare(run: &Run<'_>) -> Result<(), StepError> {
    let prepared = match run.hosts().prepare(run.vm_id, Purpose::Open).await {
        Err(problem) if matches!(problem.code, ErrorCode::NotFound | ErrorCode::WrongState) => {
            run.hosts().prepare(run.vm_id, Purpose::Open).await
        }
        other => other,
    };
    Ok(prepared.map_err(locked)?)
}

/// Sends a request to the host; registers the VM and repeats it if the agent may have restarted since the
/// registration, or has the VM with another key.
async fn ask<F: Future<Output = Result<(), Problem>>>(
    run: &Run<'_>,
    question: impl Fn() -> F,
) -> Result<(), StepError> {
    match question().await {
        Err(problem)
            if matches!(
                problem.code,
                ErrorCode::NotFound | ErrorCode::Locked | ErrorCode::WrongState
            ) =>
        {
            prepare(run).await?;
            Ok(question().await?)
        }
        other => Ok(other?),
    }
}

/// Checks the preconditions: the VM is complete, neither starting nor ending, and its key opens all its disks.
pub(super) async fn check(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let (old, _) = order(run)?;
    let refused = |what: &str| {
        let detail = format!("VM '{}' {what}", vm.name);
        Err(StepError::Final(Problem::new(ErrorCode::WrongState, detail)))
    };
    if vm.lifecycle != Lifecycle::Ready || key_of(&vm)? != old {
        return refused("has been changed meanwhile: begin again");
    }
    let agent = run.agent(&vm)?;
    let state = run.host_state(vm.host, None).await?;
    let power = state_of(&state, vm.id).map_or(Power::Off, |seen| seen.power);
    if !matches!(power, Power::Off | Power::Suspended | Power::Running | Power::Paused) {
        return refused("is starting or stopping: wait until it is off, or runs, and try again");
    }
    prepare(run).await?;
    ask(run, || agent.check_key(vm.id, old.clone())).await
}

/// The request id is the task's, so a repetition gets the same key; it is in the inventory before anything uses it.
pub(super) async fn make_key(run: &Run<'_>) -> Result<KeyReference, StepError> {
    let vm = run.vm().await?;
    let (_, provider) = order(run)?;
    let task = run.task.id;
    let made = keys::of_task(&mut *run.store().read().await?, task).await?;
    if let Some(made) = made {
        return Ok(made);
    }
    let (key, kek) = run.context.providers.get(provider)?.create_key(vm.id, task.0).await?;
    drop(kek);
    let mut write = run.store().write().await?;
    keys::insert_for_task(&mut write, vm.id, &key, task).await?;
    key_requests::delete(&mut write, provider, task.0).await?;
    let detail = format!("key '{}' of provider {}", key.key_id, key.provider);
    let (kind, actor) = ("key.created", run.task.actor.as_str());
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    write.commit().await?;
    Ok(key)
}

/// Undoes [`make_key`], even if its outcome is unknown.
pub(super) async fn unmake_key(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let (_, provider) = order(run)?;
    let made = keys::of_task(&mut *run.store().read().await?, run.task.id).await?;
    if made.is_some() && made == vm.key {
        return Err(internal("the new key is the VM's: it is not destroyed"));
    }
    let provider = match run.context.providers.get(provider) {
        // The provider was removed before it could create a key.
        Err(problem) if problem.code == ErrorCode::NotFound && made.is_none() => return Ok(()),
        other => other?,
    };
    if let Some(key) = made {
        provider.destroy_key(vm.id, &vm.name, &key).await?;
    }
    Ok(provider.abandon(run.task.id.0).await?)
}

/// Adds the new key to the disks.
pub(super) async fn add_new(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let (old, _) = order(run)?;
    add(run, &vm, old, &new_key(run).await?).await
}

/// Adds `other` to all disks, beside the key in the inventory, which is `beside`.
async fn add(
    run: &Run<'_>,
    vm: &Vm,
    beside: &KeyReference,
    other: &KeyReference,
) -> Result<(), StepError> {
    if key_of(vm)? != beside {
        return Err(internal("the VM has another key than the one that is to stay"));
    }
    let agent = run.agent(vm)?;
    let provider = run.context.providers.get(other.provider)?;
    let (old, _) = order(run)?;
    ask(run, || async {
        let given = provider.get_key(vm.id, other).await?;
        if let Some(fault) = given.fault.filter(|_| other != old) {
            let problem = Problem::new(ErrorCode::KeyMismatch, fault.detail);
            return Err(Problem { reason: fault.reason, ..problem });
        }
        let key_box = agent.describe().await?.key_box;
        let sealed = delivery::seal(run.store(), &key_box, vm, other, given.kek).await?;
        let other = OtherKey { beside: beside.clone(), key: other.clone(), sealed };
        agent.add_key(vm.id, other).await
    })
    .await
}

/// Gives the VM the new key.
pub(super) async fn switch(run: &Run<'_>) -> Result<(), StepError> {
    let (old, _) = order(run)?;
    set_key(run, old, &new_key(run).await?, "vm.recrypted").await
}

/// Undoes [`switch`]: the disks open with both keys.
pub(super) async fn switch_back(run: &Run<'_>) -> Result<(), StepError> {
    let (old, _) = order(run)?;
    set_key(run, &new_key(run).await?, old, "vm.recryption-undone").await
}

async fn set_key(
    run: &Run<'_>,
    from: &KeyReference,
    to: &KeyReference,
    kind: &str,
) -> Result<(), StepError> {
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let vm = run.vm().await?;
    if vm.key.as_ref() == Some(to) {
        return Ok(());
    }
    if vm.key.as_ref() != Some(from) {
        return Err(internal("the VM has a third key"));
    }
    let mut write = run.store().write().await?;
    vms::set_key(&mut write, vm.id, to).await?;
    let detail = format!(
        "key '{}' of provider {} in place of key '{}' of provider {}",
        to.key_id, to.provider, from.key_id, from.provider
    );
    let actor = run.task.actor.as_str();
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// Makes the new key the only one that opens the disks.
pub(super) async fn drop_old(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    keep_only(run, &vm, &new_key(run).await?).await
}

/// Undoes [`add_new`]: makes the old key the only one that opens the disks.
pub(super) async fn drop_new(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let (old, _) = order(run)?;
    keep_only(run, &vm, old).await.map_err(|error| half_done(&vm, error))
}

async fn keep_only(run: &Run<'_>, vm: &Vm, key: &KeyReference) -> Result<(), StepError> {
    if key_of(vm)? != key {
        return Err(internal("the VM has another key than the one that is to stay"));
    }
    let agent = run.agent(vm)?;
    ask(run, || agent.drop_other_keys(vm.id, key.clone())).await
}

/// Destroys the old key, and those that earlier attempts have left, once the new one has opened every disk.
pub(super) async fn destroy_old(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let new = new_key(run).await?;
    if vm.key.as_ref() != Some(&new) {
        return Err(internal("the VM does not have its new key"));
    }
    let agent = run.agent(&vm)?;
    ask(run, || agent.check_key(vm.id, new.clone())).await?;
    let known = keys::of_vm(&mut *run.store().read().await?, vm.id).await?;
    // Those that backups need go with the last of these.
    let known = backups::not_needed(&mut *run.store().read().await?, vm.id, known).await?;
    for key in known.iter().filter(|key| **key != new) {
        run.context.providers.get(key.provider)?.destroy_key(vm.id, &vm.name, key).await?;
    }
    Ok(())
}

/// The problem of a failure after the VM has its new key.
pub(super) fn unfinished(target: &str, cause: &Problem) -> Problem {
    let detail = format!(
        "VM '{target}' is whole and has its new key, and its old one may open its disks as well ({cause}): recrypt it again once the cause is fixed"
    );
    Problem { reason: cause.reason, ..Problem::new(cause.code, detail) }
}

/// Adds the VM's state to the problem of a failed undo.
fn half_done(vm: &Vm, error: StepError) -> StepError {
    let say = |problem: Problem| {
        let key_id = vm.key.as_ref().map_or("", |key| key.key_id.as_str());
        let detail = format!(
            "{problem}. VM '{}' is whole and opens with key '{key_id}', and its disks may open with another key as well: recrypt it again once the cause is fixed",
            vm.name
        );
        Problem { detail, ..problem }
    };
    match error {
        StepError::Again(problem) => StepError::Again(say(problem)),
        StepError::Final(problem) => StepError::Final(say(problem)),
        StepError::Paused(problem) => StepError::Paused(problem),
    }
}
