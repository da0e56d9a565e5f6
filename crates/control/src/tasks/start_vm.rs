//! Starts a VM, which may be suspended. A start that fails is undone, but for a guest that has gone on from its saved memory: the
//! memory is used up then, and to cut the guest's power would lose it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;
use vmseal_api::host::version::{CANCEL_START, MEMORY_GENERATION, STALLS};
use vmseal_api::host::{HostState, Power, PowerOff, StopReason};
use vmseal_api::id::HostId;
use vmseal_api::problem::{ErrorCode, Problem};

use super::fencing;
use super::run::{Run, StepError, absent_is_fine, state_of, wrong_state};
use super::step::{Limit, Output, WaitPolicy};
use crate::hosts::keys::Purpose;
use crate::hosts::mounted;
use crate::hosts::osds;
use crate::hosts::undecided_switch;
use crate::operation::Operation;
use crate::stalls;
use crate::store::vms::Vm;
use crate::store::{hosts, memory_generations, policies};

/// The steps, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StartVmStep {
    Prepare,
    /// The same, however long the provider takes.
    AwaitKey,
    PowerOn,
}

pub(crate) const STEPS: &[&dyn super::step::Step] = &[&StartVmStep::Prepare, &StartVmStep::PowerOn];

/// The steps of a start that no user waits for: it waits for the provider of its key.
pub(crate) const AUTOSTART: &[&dyn super::step::Step] =
    &[&StartVmStep::AwaitKey, &StartVmStep::PowerOn];

#[async_trait]
impl super::step::Step for StartVmStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Prepare | Self::AwaitKey => "prepare",
            Self::PowerOn => "power-on",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Prepare | Self::AwaitKey => "register and deliver the key",
            Self::PowerOn => "power on",
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::Prepare | Self::AwaitKey => Some(Limit::Provider),
            _ => None,
        }
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            Self::AwaitKey => WaitPolicy::BOTH,
            _ => WaitPolicy::NONE,
        }
    }

    fn notes_what_it_sends(&self) -> bool {
        matches!(self, Self::PowerOn)
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Prepare | Self::AwaitKey => {
                require_decided(run).await?;
                // That a VM is suspended the host need not be asked again if it knew the VM.
                let suspended = match prepare_seen(run).await? {
                    Some(power) => power == Power::Suspended,
                    None => is_suspended(run).await?,
                };
                Ok(Output::of(&suspended))
            }
            Self::PowerOn => power_on(run).await.map(Output::from),
        }
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::Prepare | Self::AwaitKey => Ok(()),
            Self::PowerOn => undo(run).await,
        }
    }
}

/// How long QEMU and the filter may take from their start until the guest runs: some seconds, and more if a host
/// starts many VMs at once.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// How long processes may take to end when their VM's power is cut.
const OFF_TIMEOUT: Duration = Duration::from_secs(60);

/// Refuses a VM that is off here, and may run on the host that it was sent to: its QEMU has ended since all of it was sent.
async fn require_decided(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let undecided = undecided_switch(&mut *run.store().read().await?, vm.host, vm.id).await?;
    let Some(task) = undecided else { return Ok(()) };
    Err(wrong_state(format!(
        "VM '{}' may run on the host that it was sent to: task {} ({}) has ended without knowing. See to it that it does not run there, then say so (vmseal task resolve {1})",
        vm.name,
        task.id,
        task.operation.kind()
    )))
}

/// Ensures that the host has the VM's key; for what only reads its disks, any key that opens them.
pub(super) async fn prepare(run: &Run<'_>) -> Result<(), StepError> {
    prepare_seen(run).await.map(drop)
}

/// The same; returns what the VM did before on its host, if the host knew it.
async fn prepare_seen(run: &Run<'_>) -> Result<Option<Power>, StepError> {
    let vm = run.vm().await?;
    let state = run.host_state(vm.host, None).await?;
    let power = state_of(&state, vm.id).map(|seen| seen.power);
    // Processes of an earlier attempt may be running: they have what they need.
    if power.is_some_and(|power| !matches!(power, Power::Off | Power::Suspended)) {
        return Ok(power);
    }
    let purpose = match run.task.operation {
        Operation::ExportDisk { .. }
        | Operation::BackUpVm { .. }
        | Operation::VerifyBackup { .. }
        // Of the VM that is cloned.
        | Operation::CreateVm { .. } => Purpose::Open,
        _ => Purpose::Encrypt,
    };
    run.hosts().prepare_seen(vm.id, purpose, &state).await.map_err(locked)?;
    Ok(power)
}

/// Whether the VM is suspended.
async fn is_suspended(run: &Run<'_>) -> Result<bool, StepError> {
    let vm = run.vm().await?;
    let state = run.host_state(vm.host, None).await?;
    Ok(state_of(&state, vm.id).is_some_and(|seen| seen.power == Power::Suspended))
}

/// Without a key from the provider the VM is locked.
pub(super) fn locked(problem: Problem) -> Problem {
    match problem.code {
        ErrorCode::WrongState
        | ErrorCode::NotFound
        | ErrorCode::KeyMismatch
        | ErrorCode::Locked => {
            let detail = format!("VM key unavailable: {problem}");
            // The task waits for an inventory that could not be read.
            let (reason, inventory) = (problem.reason, problem.inventory);
            Problem { reason, inventory, ..Problem::new(ErrorCode::Locked, detail) }
        }
        _ => problem,
    }
}

pub(super) async fn power_on(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    // A guest that only reboots goes on as it is.
    if !matches!(run.task.operation, Operation::RebootVm { .. }) {
        require_places(run, &vm, vm.host).await?;
    }
    fencing::keep_former_away(run, &vm).await?;
    let agent = run.agent(&vm)?;
    let first = match run.task.operation {
        Operation::StartVm { boot_once, .. } => boot_once,
        _ => None,
    };
    let generation = expected_memory(run, &vm).await?;
    let power_on = || async {
        match (first, generation) {
            // Of a suspended VM that is refused.
            (Some(first), _) => agent.power_on_from(vm.id, first).await,
            (None, Some(generation)) => agent.power_on_with(vm.id, generation).await,
            (None, None) => agent.power_on(vm.id).await,
        }
    };
    match run.noted(power_on().await) {
        // The agent restarted since it got the VM and its key.
        Err(problem) if matches!(problem.code, ErrorCode::NotFound | ErrorCode::Locked) => {
            run.hosts().prepare(vm.id, Purpose::Encrypt).await.map_err(locked)?;
            run.noted(power_on().await)?;
        }
        other => other?,
    }
    let deadline = Instant::now() + START_TIMEOUT;
    let mut state: Option<Arc<HostState>> = None;
    loop {
        let next = run.host_state(vm.host, state.as_deref()).await?;
        let seen = state_of(&next, vm.id);
        match seen.map(|seen| (seen.power, &seen.stopped)) {
            Some((Power::Running | Power::Paused, _)) => {
                outdate_memory(run).await?;
                run.hosts().until_shown(vm.host, &next).await;
                return Ok(());
            }
            Some((power @ (Power::Off | Power::Suspended), Some(stopped))) => {
                // Of one that is off no memory is there any more: its guest may have gone on from it.
                if power == Power::Off {
                    outdate_memory(run).await?;
                }
                match stopped.reason {
                    // It ran, and has ended already.
                    StopReason::GuestShutdown | StopReason::PoweredOff => {
                        run.hosts().until_shown(vm.host, &next).await;
                        return Ok(());
                    }
                    StopReason::FoundDead => return Err(again(&stopped.detail)),
                    _ => {
                        let detail = format!("it did not start: {}", stopped.detail);
                        return Err(StepError::Final(Problem::new(ErrorCode::WrongState, detail)));
                    }
                }
            }
            Some((Power::Off | Power::Suspended, None)) | None => {
                return Err(again("the host's agent restarted while it started the VM"));
            }
            Some((
                Power::Starting
                | Power::Stopping
                | Power::Suspending
                | Power::Migrating
                | Power::Unknown,
                _,
            )) => {}
        }
        run.check_cancelled()?;
        if Instant::now() > deadline {
            let detail = format!("it did not run after {} s", START_TIMEOUT.as_secs());
            return Err(StepError::Final(Problem::new(ErrorCode::TimedOut, detail)));
        }
        state = Some(next);
    }
}

/// The generation that the memory of the VM must be of if it is suspended; none for agents of earlier versions, which take any.
async fn expected_memory(run: &Run<'_>, vm: &Vm) -> Result<Option<u64>, StepError> {
    if !run.has_feature(vm, MEMORY_GENERATION).await? {
        return Ok(None);
    }
    Ok(memory_generations::expected(&mut *run.store().read().await?, vm.id).await?)
}

/// The guest has run: no memory that was saved before is of what its disks hold.
async fn outdate_memory(run: &Run<'_>) -> Result<(), StepError> {
    let mut write = run.store().write().await?;
    memory_generations::renew(&mut write, run.vm_id).await?;
    Ok(write.commit().await?)
}

/// Refuses connections of a host to storage that the VM's policy does not allow, OSDs that are not encrypted as it asks, and an agent that
/// does not have requests fail as it asks.
pub(super) async fn require_places(run: &Run<'_>, vm: &Vm, host: HostId) -> Result<(), StepError> {
    let disks = run.disks().await?;
    if stalls::asked(&disks) && !run.host_has_feature(host, STALLS).await? {
        let named = hosts::find(&mut *run.store().read().await?, &host.to_string()).await?;
        let named = named.map_or_else(|| host.to_string(), |host| host.name);
        return Err(stalls::refused(&named).into());
    }
    let policy = policies::find(&mut *run.store().read().await?, &vm.policy.to_string()).await?;
    let Some(policy) = policy else { return Ok(()) };
    let agent = run.hosts().agent(host)?;
    mounted::require_messenger_now(run.store(), &*agent, &policy, host, &disks).await?;
    Ok(osds::require(&mut *run.store().read().await?, &policy, &disks).await?)
}

fn again(why: &str) -> StepError {
    StepError::Again(Problem::new(ErrorCode::Unreachable, why))
}

/// Undoes a start. A guest that has gone on from its saved memory runs on.
async fn undo(run: &Run<'_>) -> Result<(), StepError> {
    // Both kinds of preparation have one name.
    let was_suspended = run.output(super::step::Step::name(&StartVmStep::Prepare)).unwrap_or(false);
    if was_suspended {
        let vm = run.vm().await?;
        let state = run.host_state(vm.host, None).await?;
        let power = state_of(&state, vm.id).map(|seen| seen.power);
        if matches!(power, Some(Power::Running | Power::Paused)) {
            outdate_memory(run).await?;
            run.hosts().until_shown(vm.host, &state).await;
            return Ok(());
        }
        // It may go on at this moment; then the host refuses, and the next look shows that it runs.
        let how = match run.has_feature(&vm, CANCEL_START).await? {
            true => PowerOff::CancelStart,
            false => PowerOff::Force,
        };
        return cut_power(run, how).await.map_err(|error| match error {
            StepError::Final(problem) if problem.code == ErrorCode::WrongState => {
                StepError::Again(problem)
            }
            other => other,
        });
    }
    power_off(run).await
}

/// Undoes [`power_on`]: the VM is off.
pub(super) async fn power_off(run: &Run<'_>) -> Result<(), StepError> {
    cut_power(run, PowerOff::Force).await
}

async fn cut_power(run: &Run<'_>, how: PowerOff) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let agent = run.agent(&vm)?;
    let state = run.host_state(vm.host, None).await?;
    // A start that failed leaves a suspended VM so.
    if state_of(&state, vm.id).is_some_and(|seen| seen.power == Power::Suspended) {
        return Ok(());
    }
    absent_is_fine(agent.power_off(vm.id, how).await)?;
    wait_off(run, &vm).await
}

/// Waits until the VM is off; its power has been cut.
pub(super) async fn wait_off(run: &Run<'_>, vm: &Vm) -> Result<(), StepError> {
    let deadline = Instant::now() + OFF_TIMEOUT;
    let mut state: Option<Arc<HostState>> = None;
    loop {
        let next = run.host_state(vm.host, state.as_deref()).await?;
        if state_of(&next, vm.id)
            .is_none_or(|seen| matches!(seen.power, Power::Off | Power::Suspended))
        {
            run.hosts().until_shown(vm.host, &next).await;
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(again("its power was cut, and its processes are still there"));
        }
        state = Some(next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_whose_key_is_not_known_for_the_inventory_waits_for_that() {
        let full = Problem { inventory: true, ..Problem::new(ErrorCode::Locked, "full") };
        let told = locked(full);
        assert!(told.inventory && told.detail.starts_with("VM key unavailable"), "{told}");
        assert!(!locked(Problem::new(ErrorCode::Locked, "sealed")).inventory);
    }
}
