//! Adopts a VM that is on a datastore and not in the inventory. Nothing is written to the datastore, and there is no row
//! of the VM before the commit step: what fails leaves it as it was found.
//!
//! ```text
//!   registered on its host, with its key ─► the host has opened every disk with it ─► in the inventory, ready
//! ```
//!
//! A VM that runs already is left alone by its host, which compares the key with that of the running VM.
//!
//! A VM that the inventory has with another key than its disks name, as it was recrypted after the backup from which the
//! inventory was restored, gets that key the same way. So does one, while it is off or suspended, that has got disks, network cards or
//! snapshots since: its host is told of them before the inventory has them.

mod devices;
mod snapshots;

use async_trait::async_trait;
use vmseal_api::host::{Power, VmState};
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::{ErrorCode, Problem};

use super::run::{Run, StepError, absent_is_fine, register, state_of, wrong_state};
use super::start_vm::locked;
use super::step::{Output, WaitPolicy};
use crate::hosts::keys::{self as delivery, Purpose};
use crate::hosts::{for_agent, restored};
use crate::operation::{Definition, Operation};
use crate::store::events::NewEvent;
use crate::store::vms::{self, Vm};
use crate::store::{Write, keys, nics, placements};

/// The steps, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdoptVmStep {
    OpenDisks,
    Adopt,
}

pub(crate) const STEPS: &[&dyn super::step::Step] = &[&AdoptVmStep::OpenDisks, &AdoptVmStep::Adopt];

#[async_trait]
impl super::step::Step for AdoptVmStep {
    fn name(&self) -> &'static str {
        match self {
            Self::OpenDisks => "open-disks",
            Self::Adopt => "adopt",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::OpenDisks => "open every disk with the key that its header names",
            Self::Adopt => "add it to the inventory",
        }
    }

    fn commits(&self) -> bool {
        matches!(self, Self::Adopt)
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            Self::OpenDisks => WaitPolicy::PROVIDER,
            Self::Adopt => WaitPolicy::NONE,
        }
    }

    fn is_undone_by_monitor(&self) -> bool {
        // A VM that the inventory does not have is forgotten.
        matches!(self, Self::OpenDisks)
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::OpenDisks => open_disks(run).await,
            Self::Adopt => adopt(run).await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::OpenDisks => forget(run).await,
            Self::Adopt => remove_rows(run).await,
        }
    }
}

fn definition<'a>(run: &'a Run<'_>) -> Result<&'a Definition, StepError> {
    match &run.task.operation {
        Operation::AdoptVm { definition, .. } => Ok(definition),
        _ => {
            let what = "it is not an adoption";
            Err(StepError::Final(Problem::new(ErrorCode::Internal, what)))
        }
    }
}

/// The VM as the inventory gets it.
pub(crate) fn row(definition: &Definition) -> Vm {
    let Definition { spec, host, host_name, policy, policy_name, .. } = definition;
    // What is made of a backup has none.
    let about = spec.about.clone().unwrap_or_default();
    Vm {
        id: spec.vm,
        name: spec.name.clone(),
        description: about.description,
        labels: about.labels,
        autostart: about.autostart,
        migration_encryption: about.migration_encryption,
        on_drain: about.on_drain,
        template: about.template,
        host: *host,
        host_name: host_name.clone(),
        policy: *policy,
        policy_name: policy_name.clone(),
        vcpus: spec.vcpus,
        memory: spec.memory,
        hardware: spec.hardware.clone(),
        provider: spec.key.as_ref().map(|key| key.provider),
        key: spec.key.clone(),
        lifecycle: Lifecycle::Ready,
        seen_power: None,
        seen_stopped: None,
    }
}

/// Whether the host is told of the VM: it has no guest that knows more. One that is suspended gets disks and network cards as well: it can
/// go on with these alone, and a host refuses other ones than it was suspended with.
fn is_told(definition: &Definition, seen: Option<&VmState>) -> bool {
    seen.is_none_or(|seen| match seen.power {
        Power::Off => true,
        Power::Suspended => definition.replaces_devices.is_some(),
        _ => false,
    })
}

/// Has the host open every disk with the VM's key. Nothing is written.
pub(super) async fn open_disks(run: &Run<'_>) -> Result<(), StepError> {
    let definition = definition(run)?;
    let vm = row(definition);
    // The monitor, which unregisters VMs that the inventory does not have, waits.
    let _unchanged = run.hosts().lock(vm.id).await;
    if let Some(known) = run.find_vm().await?
        && (definition.replaces.is_none() || known.key != definition.replaces)
    {
        let detail = format!("the inventory has this VM already, as '{}'", known.name);
        return Err(StepError::Final(Problem::new(ErrorCode::AlreadyExists, detail)));
    }
    let agent = run.agent(&vm)?;
    let state = run.host_state(vm.host, None).await?;
    let is_told = is_told(definition, state_of(&state, vm.id));
    if let Some(before) = &definition.replaces_devices {
        devices::check_unchanged(run, before, definition.replaces_snapshots.as_deref()).await?;
        if !is_told {
            let what =
                "is neither off nor suspended: stop it, and adopt it again before it is started";
            return Err(wrong_state(format!("VM '{}' {what}", vm.name)));
        }
    }
    if is_told {
        let description = run.hosts().view(vm.host).description;
        if definition.replaces.is_some() && definition.replaces_devices.is_none() {
            // It gets a key alone: what is newer there must not be written over.
            let known = (&vm, &definition.spec);
            restored::settle(run.store(), &*agent, description.as_deref(), known).await?;
        }
        agent.register_vm(for_agent(definition.spec.clone(), description.as_deref())).await?;
    }
    let Some(key) = &vm.key else { return Ok(()) };
    let kek = delivery::fetch(&run.context.providers, &vm, key, Purpose::Open).await;
    let kek = kek.map_err(locked)?;
    let key_box = agent.describe().await?.key_box;
    delivery::hand_over(run.store(), &*agent, &key_box, &vm, key, kek).await?;
    if is_told {
        agent.check_key(vm.id, key.clone()).await?;
    }
    Ok(())
}

/// Undoes [`open_disks`]: the host forgets the VM, unless it runs it. Its disks stay.
pub(super) async fn forget(run: &Run<'_>) -> Result<(), StepError> {
    let definition = definition(run)?;
    let vm = row(definition);
    let unchanged = run.hosts().lock(vm.id).await;
    if run.find_vm().await?.is_some() {
        drop(unchanged);
        if keeps_descriptor(definition) {
            return Ok(());
        }
        // With the key that the inventory has.
        return match register(run).await {
            // Its host is told of it when what is newer is adopted, or given up.
            Err(StepError::Final(problem)) if problem.code == ErrorCode::WrongState => {
                let is_uncertain =
                    restored::is_uncertain(&mut *run.store().read().await?, &vm).await?;
                if is_uncertain { Ok(()) } else { Err(StepError::Final(problem)) }
            }
            other => other,
        };
    }
    let state = run.host_state(vm.host, None).await?;
    match state_of(&state, vm.id) {
        Some(seen) if seen.power == Power::Off => {
            absent_is_fine(run.agent(&vm)?.unregister_vm(vm.id).await)
        }
        _ => Ok(()),
    }
}

/// Whether the host is left as it is when the adoption of a VM that the inventory has is undone. It writes descriptors of what a VM is
/// registered as: registered as the inventory has it, there would be nothing to adopt any more. It is not told of the VM so
/// before the VM is adopted, or kept (docs/decisions/287).
fn keeps_descriptor(definition: &Definition) -> bool {
    definition.replaces_devices.is_some()
}

/// Adds the VM to the inventory.
pub(super) async fn adopt(run: &Run<'_>) -> Result<(), StepError> {
    let definition = definition(run)?;
    let vm = row(definition);
    {
        let _unchanged = run.hosts().lock(vm.id).await;
        match run.find_vm().await? {
            None => write_rows(run, definition, &vm).await?,
            Some(known) => update_rows(run, definition, &known, &vm).await?,
        }
    }
    // What the monitor raised about a VM that was unknown is over.
    run.hosts().look_again(vm.host);
    let shown = async {
        let state = run.host_state(vm.host, None).await?;
        if is_told(definition, state_of(&state, vm.id)) {
            register(run).await?;
        }
        let state = run.host_state(vm.host, None).await?;
        run.hosts().until_shown(vm.host, &state).await;
        Ok::<_, StepError>(())
    };
    if let Err(error) = shown.await {
        tracing::info!(vm = vm.name, problem = %error.as_problem(), "left to the host's monitor");
    }
    Ok(())
}

/// Gives a VM that the inventory has the key that its disks have, and the devices of its definition where it gets these.
async fn update_rows(
    run: &Run<'_>,
    definition: &Definition,
    from: &Vm,
    to: &Vm,
) -> Result<(), Problem> {
    let actor = run.task.actor.as_str();
    let mut write = run.store().write().await?;
    if let Some(key) = to.key.as_ref().filter(|key| from.key.as_ref() != Some(*key)) {
        vms::set_key(&mut write, to.id, key).await?;
        keys::insert(&mut write, to.id, key).await?;
        let old = from.key.as_ref().map_or("none", |key| key.key_id.as_str());
        let detail = format!("key '{}', which its disks name, in place of '{old}'", key.key_id);
        let kind = "vm.key-adopted";
        write.event(NewEvent { kind, actor, target: &to.name, detail: &detail }).await?;
    }
    if definition.replaces_devices.is_some() {
        let mut told = devices::take(&mut write, definition).await?;
        if definition.replaces_snapshots.is_some() {
            told.extend(snapshots::take(&mut write, definition).await?);
        }
        if !told.is_empty() {
            let (kind, detail) = ("vm.devices-adopted", told.join("; "));
            write.event(NewEvent { kind, actor, target: &to.name, detail: &detail }).await?;
        }
    }
    Ok(write.commit().await?)
}

async fn write_rows(run: &Run<'_>, definition: &Definition, vm: &Vm) -> Result<(), Problem> {
    let mut write = run.store().write().await?;
    insert_rows(&mut write, definition, vm).await?;
    // The lease of its disks has that of a placement which this inventory never had.
    placements::skip_generations(&mut write, Some(vm.id)).await?;
    let (kind, actor) = ("vm.adopted", run.task.actor.as_str());
    let key = vm.key.as_ref().map(|key| format!(", key '{}'", key.key_id)).unwrap_or_default();
    let detail = format!("on host '{}', policy '{}'{key}", vm.host_name, vm.policy_name);
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// Adds a VM with its disks, cards and snapshots to the inventory.
pub(crate) async fn insert_rows(
    write: &mut Write<'_>,
    definition: &Definition,
    vm: &Vm,
) -> Result<(), Problem> {
    vms::insert(write, vm).await?;
    if let Some(key) = &vm.key {
        vms::set_key(write, vm.id, key).await?;
        keys::insert(write, vm.id, key).await?;
    }
    for (position, disk) in definition.spec.disks().enumerate() {
        devices::insert(write, vm.id, position, disk).await?;
    }
    for (position, nic) in definition.spec.nics().enumerate() {
        nics::insert(write, vm.id, position, nic).await?;
    }
    for of in &definition.spec.snapshots {
        snapshots::insert(write, definition, of).await?;
    }
    Ok(())
}

/// Undoes [`adopt`]: the inventory forgets the VM, or has it as before. Its disks and its key stay.
pub(super) async fn remove_rows(run: &Run<'_>) -> Result<(), StepError> {
    let definition = definition(run)?;
    let vm = row(definition);
    let _unchanged = run.hosts().lock(vm.id).await;
    let mut write = run.store().write().await?;
    match &definition.replaces {
        None => vms::delete(&mut write, vm.id).await?,
        Some(key) => vms::set_key(&mut write, vm.id, key).await?,
    }
    if let Some(before) = &definition.replaces_devices {
        devices::put_back(&mut write, definition, before).await?;
        if let Some(before) = &definition.replaces_snapshots {
            snapshots::put_back(&mut write, definition, before).await?;
        }
        // With what it had for a moment, it may have been compared and found equal.
        let (kind, actor) = (restored::UNDONE, run.task.actor.as_str());
        let detail =
            "the VM is as the inventory had it: what is newer on its datastores was not taken";
        write.event(NewEvent { kind, actor, target: &vm.name, detail }).await?;
    }
    // A key that it keeps is not one that was adopted.
    if let Some(key) = vm.key.as_ref().filter(|key| definition.replaces.as_ref() != Some(*key)) {
        keys::forget(&mut write, vm.id, key).await?;
    }
    write.commit().await?;
    if definition.replaces_devices.is_some() {
        // What is newer is an alarm again.
        run.hosts().look_again(vm.host);
    }
    Ok(())
}
