//! Adds a network card to a VM, or removes one. The VM may run: then its guest gets the card, or lets it go.
//!
//! ```text
//! add       row ──► the guest has it
//! remove    the row says that it leaves ──► the guest has let it go ──► no row
//! ```
//! What undoes an addition removes in the same order. So no other card gets the address of one that a guest may still have.

use async_trait::async_trait;
use vmseal_api::host::NicSpec;
use vmseal_api::problem::{ErrorCode, Problem};

use super::run::{Run, StepError, register};
use super::step::{Output, Step};
use crate::operation::Operation;
use crate::store::events::NewEvent;
use crate::store::vms::Vm;
use crate::store::{Write, nics};

/// The steps of adding one, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddNicStep {
    Record,
    PlugIn,
}

/// The steps of removing one, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RemoveNicStep {
    Record,
    PlugOut,
    RemoveRow,
}

pub(crate) const ADD: &[&dyn Step] = &[&AddNicStep::Record, &AddNicStep::PlugIn];

pub(crate) const REMOVE: &[&dyn Step] =
    &[&RemoveNicStep::Record, &RemoveNicStep::PlugOut, &RemoveNicStep::RemoveRow];

#[async_trait]
impl Step for AddNicStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Record => "record",
            Self::PlugIn => "plug-in",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Record => "add it to the inventory",
            Self::PlugIn => "give it to the VM",
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Record => insert(run).await,
            Self::PlugIn => plug_in(run).await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::Record => take_back(run).await,
            Self::PlugIn => Ok(()),
        }
    }
}

#[async_trait]
impl Step for RemoveNicStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Record => "record",
            Self::PlugOut => "plug-out",
            Self::RemoveRow => "remove-row",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Record => "mark it as being removed",
            Self::PlugOut => "take it from the VM",
            Self::RemoveRow => "remove it from the inventory",
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Record => set_leaving(run, true).await,
            Self::PlugOut => plug_out(run).await,
            Self::RemoveRow => remove_row(run).await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::Record => put_back(run).await,
            Self::PlugOut | Self::RemoveRow => Ok(()),
        }
    }
}

fn nic_of<'a>(run: &'a Run<'_>) -> Result<(&'a NicSpec, usize), StepError> {
    match &run.task.operation {
        Operation::AddNic { nic, position, .. } | Operation::RemoveNic { nic, position, .. } => {
            Ok((nic, *position))
        }
        _ => Err(StepError::Final(Problem::new(ErrorCode::Internal, "it is about no card"))),
    }
}

async fn insert(run: &Run<'_>) -> Result<(), StepError> {
    let (nic, position) = nic_of(run)?;
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    if nics::position(&mut write, nic.nic).await?.is_none() {
        nics::insert(&mut write, run.vm_id, position, nic).await?;
    }
    Ok(write.commit().await?)
}

/// Has the host give the card to the VM, and tells of it.
async fn plug_in(run: &Run<'_>) -> Result<(), StepError> {
    register(run).await?;
    let vm = run.vm().await?;
    let mut write = run.store().write().await?;
    tell(&mut write, run, &vm, "added").await?;
    write.commit().await?;
    show(run, &vm).await
}

/// Undoes [`insert`], and what was begun of [`plug_in`].
async fn take_back(run: &Run<'_>) -> Result<(), StepError> {
    set_leaving(run, true).await?;
    register(run).await?;
    let (nic, _) = nic_of(run)?;
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    nics::delete(&mut write, nic.nic).await?;
    Ok(write.commit().await?)
}

/// Records whether the card is being taken from the VM: then the host is told of the VM without it.
async fn set_leaving(run: &Run<'_>, leaving: bool) -> Result<(), StepError> {
    let (nic, _) = nic_of(run)?;
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    nics::set_leaving(&mut write, nic.nic, leaving).await?;
    Ok(write.commit().await?)
}

/// Has the host take the card from the VM.
async fn plug_out(run: &Run<'_>) -> Result<(), StepError> {
    register(run).await?;
    show(run, &run.vm().await?).await
}

/// Gives the card's name and address up, and tells of it.
async fn remove_row(run: &Run<'_>) -> Result<(), StepError> {
    let (nic, _) = nic_of(run)?;
    let vm = run.vm().await?;
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    nics::delete(&mut write, nic.nic).await?;
    tell(&mut write, run, &vm, "removed").await?;
    Ok(write.commit().await?)
}

/// Undoes a removal: a guest that runs gets the card again, if it has let it go. A task of an earlier version may have removed the row at its
/// first step.
async fn put_back(run: &Run<'_>) -> Result<(), StepError> {
    insert(run).await?;
    set_leaving(run, false).await?;
    register(run).await
}

async fn tell(write: &mut Write<'_>, run: &Run<'_>, vm: &Vm, what: &str) -> Result<(), StepError> {
    let (nic, _) = nic_of(run)?;
    let detail = format!("network card '{}' is {what}", nic.name);
    let (kind, actor) = ("vm.changed", run.task.actor.as_str());
    Ok(write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?)
}

/// Waits until what the host has done is shown.
async fn show(run: &Run<'_>, vm: &Vm) -> Result<(), StepError> {
    let state = run.host_state(vm.host, None).await?;
    run.hosts().until_shown(vm.host, &state).await;
    Ok(())
}
