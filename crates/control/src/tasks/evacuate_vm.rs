//! Gives a VM to another host, which has its pools of Ceph, from one that does not answer.
//!
//! ```text
//!   check ─► hand over ─────────────────► fence ─────────────────────► register ─► power on ─► done
//!             the inventory names the       the new host takes the        the new host has it, and its key
//!             other host; the former one    lease and the images: the
//!             is to forget the VM           cluster takes nothing of
//!                  │                        the former one any more
//!                  │   commit step
//!                  └── undone: nothing was done
//! ```
//! The former host may run the guest: nobody can ask it. What keeps the guest from its disks is the cluster, after the inventory has said where
//! the VM is. So the former host's agent is told to end it whenever it answers, whatever becomes of this task ([`crate::hosts`]).

use std::time::Duration;

use async_trait::async_trait;
use vmseal_api::id::HostId;
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::Problem;

use super::change_host::{arrive, require_datastores};
use super::fencing;
use super::run::{Run, StepError, internal, wrong_state};
use super::start_vm::{self, locked};
use super::step::{Limit, Output, Step, WaitPolicy};
use crate::hosts::keys::{self, Purpose};
use crate::hosts::may_fence;
use crate::operation::Operation;
use crate::store::events::NewEvent;
use crate::store::vms::Vm;
use crate::store::{evacuations, hosts as store_hosts, placements};

/// How often a start is tried: a former host that is alive may have opened an image once more before it was kept from it.
const STARTS_MAX: u32 = 3;

/// The pause between these.
const START_PAUSE: Duration = Duration::from_secs(5);

/// The steps, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EvacuateVmStep {
    Check,
    HandOver,
    Fence,
    Register,
    PowerOn,
}

pub(crate) const STEPS: &[&dyn Step] = &[
    &EvacuateVmStep::Check,
    &EvacuateVmStep::HandOver,
    &EvacuateVmStep::Fence,
    &EvacuateVmStep::Register,
    &EvacuateVmStep::PowerOn,
];

/// Those of a VM that is not started.
pub(crate) const AT_REST: &[&dyn Step] = &[
    &EvacuateVmStep::Check,
    &EvacuateVmStep::HandOver,
    &EvacuateVmStep::Fence,
    &EvacuateVmStep::Register,
];

#[async_trait]
impl Step for EvacuateVmStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::HandOver => "hand-over",
            Self::Fence => "fence",
            Self::Register => "register",
            Self::PowerOn => "power-on",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Check => "check the VM, its key and both hosts",
            Self::HandOver => "record the other host",
            Self::Fence => {
                "take the disks from the former host, which the cluster takes no writes of any more"
            }
            Self::Register => "register on the other host and deliver the key",
            Self::PowerOn => "power on",
        }
    }

    fn commits(&self) -> bool {
        matches!(self, Self::HandOver)
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::Check => Some(Limit::Provider),
            _ => None,
        }
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            Self::Check | Self::HandOver => WaitPolicy::NONE,
            Self::Fence | Self::Register | Self::PowerOn => WaitPolicy::BOTH,
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Check => check(run).await.map(|generation| Output::of(&generation)),
            Self::HandOver => hand_over(run).await.map(Output::from),
            Self::Fence => fence(run).await.map(Output::from),
            Self::Register => arrive(run).await.map(Output::from),
            Self::PowerOn => start(run).await.map(Output::from),
        }
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::HandOver => stay(run).await,
            // Nothing was done, or past the commit step.
            Self::Check | Self::Fence | Self::Register | Self::PowerOn => Ok(()),
        }
    }
}

fn ends(run: &Run<'_>) -> Result<(HostId, HostId), StepError> {
    match run.task.operation {
        Operation::EvacuateVm { from, to, .. } => Ok((from, to)),
        _ => Err(internal("the task does not say where the VM goes")),
    }
}

/// Checks that the VM's host does not answer, that the other one does, and that its key can be had. Returns the generation of the placement.
async fn check(run: &Run<'_>) -> Result<u64, StepError> {
    let (vm, (from, to)) = (run.vm().await?, ends(run)?);
    if vm.lifecycle != Lifecycle::Ready || vm.host != from {
        return Err(wrong_state(format!(
            "VM '{}' has been changed meanwhile: begin again",
            vm.name
        )));
    }
    if run.hosts().connected(from).is_ok() {
        return Err(answers_again(&vm));
    }
    // One that does not answer would leave it where nobody can start it.
    run.host_state(to, None).await?;
    // Nor one that cannot keep the former host away, or would not start it.
    let agent = run.hosts().agent(to)?;
    may_fence::require(run.store(), &*agent, to, &run.disks().await?).await?;
    if let Operation::EvacuateVm { starts: true, .. } = run.task.operation {
        start_vm::require_places(run, &vm, to).await?;
    }
    if let Some(key) = &vm.key {
        let kek = keys::fetch(&run.context.providers, &vm, key, Purpose::Encrypt).await;
        drop(kek.map_err(locked)?);
    }
    Ok(placements::next_generation(&mut *run.store().read().await?, vm.id).await?)
}

fn answers_again(vm: &Vm) -> StepError {
    wrong_state(format!(
        "host '{}' answers again: VM '{}' stays there. Move it as any other (vmseal vm migrate)",
        vm.host_name, vm.name
    ))
}

fn generation(run: &Run<'_>) -> Result<u64, StepError> {
    let known = run.output(EvacuateVmStep::Check.name());
    known.ok_or_else(|| internal("the task does not say what it has checked"))
}

/// Records the other host, and that the former one is to forget the VM.
async fn hand_over(run: &Run<'_>) -> Result<(), StepError> {
    let ((from, to), generation) = (ends(run)?, generation(run)?);
    // Monitors, which register the VMs of their hosts, wait.
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let vm = run.vm().await?;
    // A server that has restarted may have recorded it before.
    if vm.host == to {
        return Ok(());
    }
    // It may have come back while the provider was asked: its guest is not to be ended for nothing.
    if run.hosts().connected(from).is_ok() {
        return Err(answers_again(&vm));
    }
    record(run, &vm, (from, to), generation).await
}

async fn record(
    run: &Run<'_>,
    vm: &Vm,
    (from, to): (HostId, HostId),
    generation: u64,
) -> Result<(), StepError> {
    let mut write = run.store().write().await?;
    let host = store_hosts::find(&mut write, &to.to_string()).await?;
    let host = host.ok_or_else(|| wrong_state("the other host was removed".to_owned()))?;
    require_datastores(&mut write, vm, &host).await?;
    placements::set_owner(&mut write, vm.id, to, generation).await?;
    evacuations::insert(&mut write, vm.id, from, generation).await?;
    let detail = format!(
        "from host '{}', which does not answer, to host '{}'; what its guest had not flushed is lost",
        vm.host_name, host.name
    );
    let (actor, target) = (run.task.actor.as_str(), vm.name.as_str());
    write.event(NewEvent { kind: "vm.evacuated", actor, target, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// Has the new host keep all others from the VM's disks.
async fn fence(run: &Run<'_>) -> Result<(), StepError> {
    fencing::take(run, generation(run)?).await
}

/// Starts it.
async fn start(run: &Run<'_>) -> Result<(), StepError> {
    let mut tries = 1;
    loop {
        fence(run).await?;
        match start_vm::power_on(run).await {
            Err(StepError::Final(problem)) if tries < STARTS_MAX => {
                tracing::warn!(vm = %run.vm_id, %problem, tries, "a VM that was evacuated has not started");
                tokio::time::sleep(START_PAUSE).await;
                tries += 1;
            }
            other => return other,
        }
    }
}

/// Undoes [`hand_over`], unless the inventory names the other host already: then the VM stays there.
async fn stay(run: &Run<'_>) -> Result<(), StepError> {
    let (_, to) = ends(run)?;
    if run.vm().await?.host != to {
        return Ok(());
    }
    fence(run).await?;
    if let Err(error) = arrive(run).await {
        tracing::info!(problem = %error.as_problem(), "left to the host's monitor");
    }
    let detail = format!(
        "VM '{}' is on the other host: its evacuation could not be undone any more. It is not started there (vmseal vm start)",
        run.task.target
    );
    Err(wrong_state(detail))
}

/// The problem of a failure after the inventory has the other host.
pub(super) fn unfinished(target: &str, cause: &Problem) -> Problem {
    let detail = format!(
        "VM '{target}' is on the other host, and its evacuation did not come to its end: {cause}. Start it there when that is mended (vmseal vm start {target})"
    );
    Problem { reason: cause.reason, ..Problem::new(cause.code, detail) }
}
