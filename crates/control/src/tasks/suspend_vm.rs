//! Suspends a VM. There is nothing to undo: a guest whose memory could not be saved goes on, and the host's state shows it.
//!
//! The number of its memory is in the inventory before the host is asked: a step that is repeated asks for the same one.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;
use vmseal_api::host::version::MEMORY_GENERATION;
use vmseal_api::host::{HostState, Power};
use vmseal_api::problem::{ErrorCode, Problem};

use super::run::{Run, StepError, state_of};
use super::step::Output;
use super::stop_vm::see_what_is;
use crate::store::memory_generations;

/// The steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SuspendVmStep {
    Number,
    Suspend,
}

pub(crate) const STEPS: &[&dyn super::step::Step] =
    &[&SuspendVmStep::Number, &SuspendVmStep::Suspend];

/// How long saving the memory may take: a terabyte at the speed of a slow disk. The host goes on with it after that.
const SUSPEND_TIMEOUT: Duration = Duration::from_secs(3 * 3600);

#[async_trait]
impl super::step::Step for SuspendVmStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Number => "number",
            Self::Suspend => "suspend",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Number => "number the memory",
            Self::Suspend => "save the memory and power off",
        }
    }

    fn notes_what_it_sends(&self) -> bool {
        true
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Number => number(run).await,
            Self::Suspend => suspend(run).await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            // A number that no memory gets is of no use, and no harm.
            Self::Number => Ok(()),
            Self::Suspend => see_what_is(run).await,
        }
    }
}

/// Gives the memory that is to be saved a number, which the VM's memory must have from then on. Agents of earlier versions number none.
async fn number(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let state = run.host_state(vm.host, None).await?;
    // What a host has begun to save has the number that it was asked for.
    if state_of(&state, vm.id)
        .is_some_and(|seen| matches!(seen.power, Power::Suspending | Power::Suspended))
    {
        return Ok(());
    }
    let numbers = run.has_feature(&vm, MEMORY_GENERATION).await?;
    let mut write = run.store().write().await?;
    if numbers {
        memory_generations::renew(&mut write, vm.id).await?;
    } else {
        memory_generations::accept_any(&mut write, vm.id).await?;
    }
    Ok(write.commit().await?)
}

async fn suspend(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let agent = run.agent(&vm)?;
    let generation = memory_generations::expected(&mut *run.store().read().await?, vm.id).await?;
    let asked = match generation {
        Some(generation) => agent.suspend_as(vm.id, generation).await,
        None => agent.suspend(vm.id).await,
    };
    run.noted(asked)?;
    let deadline = Instant::now() + SUSPEND_TIMEOUT;
    let mut state: Option<Arc<HostState>> = None;
    loop {
        let next = run.host_state(vm.host, state.as_deref()).await?;
        let seen = state_of(&next, vm.id);
        let failed = |detail: String| StepError::Final(Problem::new(ErrorCode::WrongState, detail));
        match seen.map(|seen| (seen.power, seen)) {
            Some((Power::Suspended, _)) => {
                run.hosts().until_shown(vm.host, &next).await;
                return Ok(());
            }
            Some((Power::Suspending | Power::Unknown, _)) => {}
            Some((Power::Off, seen)) => {
                // What was written of the memory has the former number.
                number(run).await?;
                let why = seen.stopped.as_ref().map_or("", |stopped| stopped.detail.as_str());
                return Err(failed(format!("it is off, and its memory was not saved: {why}")));
            }
            Some((_, seen)) => match &seen.not_suspended {
                Some(why) => {
                    number(run).await?;
                    return Err(failed(format!("it runs on: {why}")));
                }
                // The agent restarted meanwhile, and let the guest go on.
                None => {
                    // What that agent has written and not named has the former number.
                    number(run).await?;
                    let what = "the host's agent restarted while it saved the memory";
                    return Err(StepError::Again(Problem::new(ErrorCode::Unreachable, what)));
                }
            },
            None => {
                let what = "the host's agent does not know the VM yet";
                return Err(StepError::Again(Problem::new(ErrorCode::Unreachable, what)));
            }
        }
        if Instant::now() > deadline {
            let hours = SUSPEND_TIMEOUT.as_secs() / 3600;
            let what =
                format!("its memory was not saved within {hours} hours; the host goes on with it");
            return Err(StepError::Final(Problem::new(ErrorCode::TimedOut, what)));
        }
        state = Some(next);
    }
}
