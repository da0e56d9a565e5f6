//! Adds a network card to a VM, or removes one. The VM may run: then its guest gets the card, or lets it go.

use async_trait::async_trait;
use vmseal_api::host::NicSpec;
use vmseal_api::problem::{ErrorCode, Problem};

use super::run::{Run, StepError, register};
use super::step::{Output, Step};
use crate::operation::Operation;
use crate::store::events::NewEvent;
use crate::store::nics;

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
}

pub(crate) const ADD: &[&dyn Step] = &[&AddNicStep::Record, &AddNicStep::PlugIn];

pub(crate) const REMOVE: &[&dyn Step] = &[&RemoveNicStep::Record, &RemoveNicStep::PlugOut];

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
            Self::PlugIn => plugged(run, "added").await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::Record => {
                delete(run).await?;
                register(run).await
            }
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
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Record => "remove it from the inventory",
            Self::PlugOut => "take it from the VM",
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Record => delete(run).await,
            Self::PlugOut => plugged(run, "removed").await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::Record => {
                insert(run).await?;
                register(run).await
            }
            Self::PlugOut => Ok(()),
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

async fn delete(run: &Run<'_>) -> Result<(), StepError> {
    let (nic, _) = nic_of(run)?;
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    nics::delete(&mut write, nic.nic).await?;
    Ok(write.commit().await?)
}

/// Has the host do what the inventory says now, and tells of it.
async fn plugged(run: &Run<'_>, what: &str) -> Result<(), StepError> {
    let (nic, _) = nic_of(run)?;
    register(run).await?;
    let vm = run.vm().await?;
    let mut write = run.store().write().await?;
    let detail = format!("network card '{}' is {what}", nic.name);
    let (kind, actor) = ("vm.changed", run.task.actor.as_str());
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    write.commit().await?;
    let state = run.host_state(vm.host, None).await?;
    run.hosts().until_shown(vm.host, &state).await;
    Ok(())
}
