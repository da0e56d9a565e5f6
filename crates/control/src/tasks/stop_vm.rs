//! Stopping a VM. There is nothing to undo: a guest that was asked to shut down may do so later, and the
//! host's state says what is.

use std::time::Duration;

use tokio::time::Instant;
use vmseal_api::host::{HostState, Power, PowerOff};
use vmseal_api::problem::{ErrorCode, Problem};

use super::operation::Operation;
use super::run::{Run, StepError, absent_is_fine, state_of};
use super::start_vm::wait_off;

pub(super) async fn power_off(run: &Run<'_>) -> Result<(), StepError> {
    let Operation::StopVm { force, timeout_seconds, .. } = run.task.operation else {
        return Ok(());
    };
    let vm = run.vm().await?;
    let agent = run.agent(&vm)?;
    let mut state: HostState = run.news(&*agent, None).await?;
    if state_of(&state, vm.id).is_none_or(|seen| seen.power == Power::Off) {
        return Ok(());
    }
    if force {
        absent_is_fine(agent.power_off(vm.id, PowerOff::Force).await)?;
        return wait_off(run, &vm, &*agent).await;
    }
    absent_is_fine(agent.power_off(vm.id, PowerOff::Shutdown).await)?;
    let deadline = Instant::now() + Duration::from_secs(timeout_seconds.into());
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match tokio::time::timeout(left, run.news(&*agent, Some(&state))).await {
            Ok(next) => state = next?,
            Err(_) => {
                let detail = format!(
                    "the guest did not shut down within {timeout_seconds} s: give it longer (--timeout), or cut its power (--force)"
                );
                return Err(StepError::Final(Problem::new(ErrorCode::TimedOut, detail)));
            }
        }
        if state_of(&state, vm.id).is_none_or(|seen| seen.power == Power::Off) {
            run.hosts().until_shown(vm.host, &state).await;
            return Ok(());
        }
        run.check_cancelled()?;
    }
}

/// Nothing is undone; but without the host's word it is not known whether the VM runs.
pub(super) async fn see_what_is(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    run.agent(&vm)?.state(None, Duration::ZERO).await?;
    Ok(())
}
