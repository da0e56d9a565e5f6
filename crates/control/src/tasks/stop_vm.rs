//! Stops a VM. There is nothing to undo: a guest that was asked to shut down may do so later, and the host's state
//! shows it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;
use vmseal_api::host::{HostState, Power, PowerOff};
use vmseal_api::problem::{ErrorCode, Problem};

use super::run::{Run, StepError, absent_is_fine, state_of};
use super::start_vm::wait_off;
use super::step::Output;
use crate::operation::Operation;
use crate::store::vms::Vm;

/// The steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopVmStep {
    PowerOff,
}

pub(crate) const STEPS: &[&dyn super::step::Step] = &[&StopVmStep::PowerOff];

#[async_trait]
impl super::step::Step for StopVmStep {
    fn name(&self) -> &'static str {
        match self {
            Self::PowerOff => "power-off",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::PowerOff => "power off",
        }
    }

    fn notes_what_it_sends(&self) -> bool {
        true
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::PowerOff => power_off(run).await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::PowerOff => see_what_is(run).await,
        }
    }
}

/// How much later than the task a host may notice that the guest's timeout has passed.
const HOST_LAG: Duration = Duration::from_secs(5);

pub(super) async fn power_off(run: &Run<'_>) -> Result<(), StepError> {
    let (force, timeout_seconds) = match run.task.operation {
        Operation::StopVm { force, timeout_seconds, .. } => (force, timeout_seconds),
        Operation::RebootVm { timeout_seconds, .. } => (false, timeout_seconds),
        Operation::RevertSnapshot { .. } => (true, 0),
        _ => return Ok(()),
    };
    let vm = run.vm().await?;
    let agent = run.agent(&vm)?;
    let state = run.host_state(vm.host, None).await?;
    if state_of(&state, vm.id).is_none_or(|seen| seen.power == Power::Off) {
        return Ok(());
    }
    if !(force || run.requests.borrow().forced) {
        let seconds = timeout_seconds;
        let how = PowerOff::Shutdown { seconds };
        absent_is_fine(run.noted(agent.power_off(vm.id, how).await))?;
        if shut_down(run, &vm, state, seconds).await? == ShutdownOutcome::Heeded {
            return Ok(());
        }
    }
    absent_is_fine(run.noted(agent.power_off(vm.id, PowerOff::Force).await))?;
    wait_off(run, &vm).await
}

/// How a guest that was asked to shut down ends.
#[derive(PartialEq, Eq)]
enum ShutdownOutcome {
    /// It has shut down.
    Heeded,
    /// A user has requested to cut its power.
    Forced,
}

/// Waits until a guest that was asked to shut down has done so, or a user requests to cut its power.
async fn shut_down(
    run: &Run<'_>,
    vm: &Vm,
    mut state: Arc<HostState>,
    seconds: u32,
) -> Result<ShutdownOutcome, StepError> {
    let deadline = Instant::now() + Duration::from_secs(seconds.into());
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match tokio::time::timeout(left, run.host_state(vm.host, Some(&state))).await {
            Ok(next) => state = next?,
            Err(_) => {
                not_heeded(run, vm, seconds).await?;
                return Ok(ShutdownOutcome::Heeded);
            }
        }
        if state_of(&state, vm.id).is_none_or(|seen| seen.power == Power::Off) {
            run.hosts().until_shown(vm.host, &state).await;
            return Ok(ShutdownOutcome::Heeded);
        }
        run.check_cancelled()?;
        if run.requests.borrow().forced {
            return Ok(ShutdownOutcome::Forced);
        }
    }
}

/// Fails once the host's state shows that the guest runs on: the host has the same timeout.
async fn not_heeded(run: &Run<'_>, vm: &Vm, seconds: u32) -> Result<(), StepError> {
    let give_up = Instant::now() + HOST_LAG;
    let mut state = run.host_state(vm.host, None).await?;
    let power = |state: &HostState| state_of(state, vm.id).map_or(Power::Off, |seen| seen.power);
    while power(&state) == Power::Stopping && Instant::now() < give_up {
        state = run.host_state(vm.host, Some(&state)).await?;
    }
    run.hosts().until_shown(vm.host, &state).await;
    if power(&state) == Power::Off {
        return Ok(());
    }
    let name = &vm.name;
    let detail = format!(
        "the guest of VM '{name}' did not shut down within {seconds} s and runs on: give it longer (vmseal vm stop {name} --grace-period DURATION), or cut its power (vmseal vm stop {name} --force)"
    );
    Err(StepError::Final(Problem::new(ErrorCode::TimedOut, detail)))
}

/// Undoes nothing; but without the host's state it is not known whether the VM runs.
pub(super) async fn see_what_is(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    run.agent(&vm)?.state_now().await?;
    Ok(())
}
