//! Gives a VM that is off or suspended to another host, which has all of its datastores: nothing is sent or copied.
//!
//! ```text
//!   check ─► hand over ──────────────────────────► register ─► done
//!             the former host forgets the VM;        the new host knows it, and has its key
//!             the inventory says where it is now
//!                  │   commit step
//!                  └── undone: the former host knows it again
//! ```
//! The former host has forgotten the VM before the inventory names the new one, and is told of VMs only as the inventory has them:
//! at no time can both be asked to start it.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use vmseal_api::host::Power;
use vmseal_api::id::HostId;
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::Problem;

use super::run::{Run, StepError, absent_is_fine, internal, register, state_of, wrong_state};
use super::start_vm::locked;
use super::step::{Limit, Output, Step, WaitPolicy};
use crate::hosts::keys::{self, Purpose};
use crate::operation::Operation;
use crate::store::events::NewEvent;
use crate::store::vms::Vm;
use crate::store::{Write, datastores, disks, hosts as store_hosts, placements};

/// The steps, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChangeHostStep {
    Check,
    HandOver,
    Register,
}

pub(crate) const STEPS: &[&dyn Step] =
    &[&ChangeHostStep::Check, &ChangeHostStep::HandOver, &ChangeHostStep::Register];

/// What the steps after the first one need.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Checked {
    generation: u64,
    /// Whether the memory of its guest is saved.
    suspended: bool,
}

#[async_trait]
impl Step for ChangeHostStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::HandOver => "hand-over",
            Self::Register => "register",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Check => "check the VM, its key and the other host",
            Self::HandOver => "unregister from the former host, and record the other one",
            Self::Register => "register on the other host and deliver the key",
        }
    }

    fn commits(&self) -> bool {
        matches!(self, Self::HandOver)
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::Check => Some(Limit::Provider),
            Self::HandOver | Self::Register => None,
        }
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            Self::Check | Self::HandOver => WaitPolicy::NONE,
            Self::Register => WaitPolicy::BOTH,
        }
    }

    fn is_undone_by_monitor(&self) -> bool {
        // A host gets the VMs that the inventory has there.
        matches!(self, Self::HandOver)
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Check => check(run).await.map(|checked| Output::of(&checked)),
            Self::HandOver => hand_over(run).await.map(Output::from),
            Self::Register => arrive(run).await.map(Output::from),
        }
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::HandOver => take_back(run).await,
            // Nothing was done, or past the commit step.
            Self::Check | Self::Register => Ok(()),
        }
    }
}

fn ends(run: &Run<'_>) -> Result<(HostId, HostId), StepError> {
    match run.task.operation {
        Operation::ChangeHost { from, to, .. } => Ok((from, to)),
        _ => Err(internal("the task does not say where the VM goes")),
    }
}

/// Checks that nothing runs, that the other host answers, and that its key can be had.
async fn check(run: &Run<'_>) -> Result<Checked, StepError> {
    let (vm, (from, to)) = (run.vm().await?, ends(run)?);
    if vm.lifecycle != Lifecycle::Ready || vm.host != from {
        return Err(wrong_state(format!(
            "VM '{}' has been changed meanwhile: begin again",
            vm.name
        )));
    }
    let state = run.host_state(from, None).await?;
    let power = state_of(&state, vm.id).map_or(Power::Off, |seen| seen.power);
    if !matches!(power, Power::Off | Power::Suspended) {
        return Err(wrong_state(format!("VM '{}' is not off any more", vm.name)));
    }
    // One that does not answer would leave it where nobody can start it.
    run.host_state(to, None).await?;
    if let Some(key) = &vm.key {
        let kek = keys::fetch(&run.context.providers, &vm, key, Purpose::Encrypt).await;
        drop(kek.map_err(locked)?);
    }
    let generation = placements::next_generation(&mut *run.store().read().await?, vm.id).await?;
    Ok(Checked { generation, suspended: power == Power::Suspended })
}

/// Has the former host forget the VM, and then records the other one.
async fn hand_over(run: &Run<'_>) -> Result<(), StepError> {
    let (from, to) = ends(run)?;
    let known: Option<Checked> = run.output(ChangeHostStep::Check.name());
    let checked = known.ok_or_else(|| internal("the task does not say what it has checked"))?;
    {
        // Monitors, which register the VMs of their hosts, wait.
        let _unchanged = run.hosts().lock(run.vm_id).await;
        let vm = run.vm().await?;
        // A server that has restarted may have recorded it before.
        if vm.host == to {
            return Ok(());
        }
        absent_is_fine(run.hosts().agent(from)?.unregister_vm(vm.id).await)?;
        record(run, &vm, to, checked).await?;
    }
    let state = run.host_state(from, None).await;
    if let Ok(state) = state {
        run.hosts().until_shown(from, &state).await;
    }
    Ok(())
}

async fn record(run: &Run<'_>, vm: &Vm, to: HostId, checked: Checked) -> Result<(), StepError> {
    let mut write = run.store().write().await?;
    let host = store_hosts::find(&mut write, &to.to_string()).await?;
    let host = host.ok_or_else(|| wrong_state("the other host was removed".to_owned()))?;
    require_datastores(&mut write, vm, &host).await?;
    placements::set_owner(&mut write, vm.id, to, checked.generation).await?;
    let power = if checked.suspended { "suspended" } else { "off" };
    let detail =
        format!("from host '{}' to host '{}', while it was {power}", vm.host_name, host.name);
    let (actor, target) = (run.task.actor.as_str(), vm.name.as_str());
    write.event(NewEvent { kind: "vm.migrated", actor, target, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// Refuses a host that no longer has all that the VM is on. The VM's disks are found only where its host has their datastores.
pub(super) async fn require_datastores(
    write: &mut Write<'_>,
    vm: &Vm,
    host: &store_hosts::Host,
) -> Result<(), StepError> {
    let there = datastores::of_host(write, host.id).await?;
    for disk in disks::of_vm(write, vm.id).await? {
        if let Some(name) = disk
            .datastores()
            .find_map(|(id, name)| (!there.iter().any(|it| it.id == id)).then_some(name))
        {
            return Err(wrong_state(format!(
                "disk '{}' is on datastore '{name}', which host '{}' does not have any more",
                disk.name, host.name
            )));
        }
    }
    Ok(())
}

/// Undoes [`hand_over`], unless the inventory names the other host already: then the VM stays there.
async fn take_back(run: &Run<'_>) -> Result<(), StepError> {
    let (_, to) = ends(run)?;
    if run.vm().await?.host == to {
        if let Err(error) = arrive(run).await {
            tracing::info!(problem = %error.as_problem(), "left to the host's monitor");
        }
        let detail = format!(
            "VM '{}' is on the other host: the change could not be undone any more",
            run.task.target
        );
        return Err(wrong_state(detail));
    }
    register(run).await
}

/// Has the other host know the VM. What its key still needs is the host's monitor's.
pub(super) async fn arrive(run: &Run<'_>) -> Result<(), StepError> {
    register(run).await?;
    let vm = run.vm().await?;
    {
        let _unchanged = run.hosts().lock(vm.id).await;
        if let Err(problem) = run.hosts().deliver(&vm, Purpose::Encrypt).await {
            tracing::info!(vm = vm.name, %problem, "its key is left to the host's monitor");
        }
    }
    let state = run.host_state(vm.host, None).await?;
    run.hosts().until_shown(vm.host, &state).await;
    Ok(())
}

/// The problem of a failure after the inventory has the other host.
pub(super) fn unfinished(target: &str, cause: &Problem) -> Problem {
    let detail = format!(
        "VM '{target}' is on the other host, which did not take it yet: {cause}. It is registered there when that host's agent can"
    );
    Problem { reason: cause.reason, ..Problem::new(cause.code, detail) }
}
