//! Reboots a VM: its guest shuts down, and another QEMU starts it, with what was changed of the VM since. A guest that
//! does not shut down runs on. There is nothing to undo: a VM that could not be started again is off, as after a stop.

use async_trait::async_trait;
use vmseal_api::problem::Problem;

use super::run::{Run, StepError};
use super::start_vm;
use super::step::{Limit, Output};
use super::stop_vm;

/// The steps, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RebootVmStep {
    ShutDown,
    Prepare,
    PowerOn,
}

pub(crate) const STEPS: &[&dyn super::step::Step] =
    &[&RebootVmStep::ShutDown, &RebootVmStep::Prepare, &RebootVmStep::PowerOn];

#[async_trait]
impl super::step::Step for RebootVmStep {
    fn name(&self) -> &'static str {
        match self {
            Self::ShutDown => "shut-down",
            Self::Prepare => "prepare",
            Self::PowerOn => "power-on",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::ShutDown => "shut the guest down",
            Self::Prepare => "register and deliver the key",
            Self::PowerOn => "power on",
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::Prepare => Some(Limit::Provider),
            _ => None,
        }
    }

    fn notes_what_it_sends(&self) -> bool {
        !matches!(self, Self::Prepare)
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::ShutDown => stop_vm::power_off(run).await,
            Self::Prepare => start_vm::prepare(run).await,
            Self::PowerOn => start_vm::power_on(run).await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::ShutDown => stop_vm::see_what_is(run).await,
            Self::Prepare => Ok(()),
            Self::PowerOn => start_vm::power_off(run).await,
        }
    }
}
