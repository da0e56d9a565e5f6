//! Clones for another host. The host of the VM that is cloned makes them; then they go there, as VMs that are off.
//!
//! ```text
//! both have the datastores   … ─► make the disks ─► hand over ─► arrive ─► finish
//! they have not              … ─► make the disks ─► check ─► send ─► switch (commit) ─► remove what was sent
//! ```
//! Nobody uses a clone before its task has ended. So the host that made it deletes it when the task is undone, also where the other one
//! has had it already. That is not so from the switch on: only the other host can say whether it has the disks that were sent, and it is
//! asked until it does.

use async_trait::async_trait;
use vmseal_api::problem::Problem;

use crate::operation::migration::CHECK;
use crate::operation::{Copies, Elsewhere, Operation};
use crate::store::{hosts as store_hosts, placements};
use crate::tasks::change_host;
use crate::tasks::create_vm;
use crate::tasks::migrate_vm::new_vm;
use crate::tasks::run::{Run, StepError, absent_is_fine, internal, register, wrong_state};
use crate::tasks::step::{Limit, Output, Step, WaitPolicy};

/// The steps that other clones do not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ElsewhereStep {
    HandOver,
    Arrive,
    Check,
    Send,
    Switch,
    RemoveSent,
}

#[async_trait]
impl Step for ElsewhereStep {
    fn name(&self) -> &'static str {
        match self {
            Self::HandOver => "hand-over",
            Self::Arrive => "arrive",
            Self::Check => CHECK,
            Self::Send => new_vm::SENDS,
            Self::Switch => "switch",
            Self::RemoveSent => "remove-sent",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::HandOver => "unregister from the host that made it, and record the other one",
            Self::Arrive => "register on the other host and deliver the key",
            Self::Check => "check the other host",
            Self::Send => "send the disks to the other host",
            Self::Switch => "have the other host keep them, and record it",
            Self::RemoveSent => "remove what was sent from the host that made it",
        }
    }

    fn commits(&self) -> bool {
        matches!(self, Self::Switch)
    }

    fn insists(&self) -> bool {
        // The other host may have the disks already, and alone knows whether it does.
        matches!(self, Self::Switch)
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            Self::Arrive => WaitPolicy::PROVIDER,
            // Hours of copying are not thrown away because a host is away for a while.
            Self::Send | Self::RemoveSent => WaitPolicy::BOTH,
            Self::HandOver | Self::Check | Self::Switch => WaitPolicy::NONE,
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::Send => Some(Limit::Copy),
            Self::Arrive => Some(Limit::Provider),
            _ => None,
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::HandOver => hand_over(run).await.map(Output::from),
            Self::Arrive => arrive(run).await.map(Output::from),
            Self::Check => new_vm::check(run, of(run)?).await.map(|checked| Output::of(&checked)),
            Self::Send => new_vm::send(run, of(run)?).await.map(|made| Output::of(&made)),
            Self::Switch => switch(run).await.map(Output::from),
            Self::RemoveSent => new_vm::remove_sent(run, of(run)?).await.map(Output::from),
        }
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::HandOver => take_back(run).await,
            Self::Send => new_vm::take_back(run, of(run)?).await,
            Self::Switch => new_vm::switch_back(run, of(run)?, &how(run)?).await,
            // Nothing is there that the steps before do not undo; or it is past the commit step.
            Self::Arrive | Self::Check | Self::RemoveSent => Ok(()),
        }
    }
}

fn of(run: &Run<'_>) -> Result<Elsewhere, StepError> {
    let elsewhere = run.task.operation.elsewhere();
    elsewhere.ok_or_else(|| internal("the task makes no clone for another host"))
}

/// What is told of a clone whose disks were sent, beside its host and its policy.
fn how(run: &Run<'_>) -> Result<String, StepError> {
    let sent = of(run)?.sent.ok_or_else(|| internal("the task sends no disks"))?;
    let encrypted = if sent.encrypted { "encrypted" } else { "not encrypted" };
    let taken = match &run.task.operation {
        Operation::CreateVm { copies: Some(copies), .. } if copies.temporary.is_some() => {
            super::of_taken(run)
        }
        _ => "",
    };
    Ok(format!("{taken}, sent from the host that made it, {encrypted}"))
}

/// Has the host that made the clone forget it, and then records the other one.
async fn hand_over(run: &Run<'_>) -> Result<(), StepError> {
    let Elsewhere { from, to, .. } = of(run)?;
    // At one that does not answer it could not be finished.
    run.host_state(to, None).await?;
    {
        // Monitors, which register the VMs of their hosts, wait.
        let _unchanged = run.hosts().lock(run.vm_id).await;
        let vm = run.vm().await?;
        // A server that has restarted may have recorded it before.
        if vm.host == to {
            return Ok(());
        }
        absent_is_fine(run.hosts().agent(from)?.unregister_vm(vm.id).await)?;
        let mut write = run.store().write().await?;
        let host = store_hosts::find(&mut write, &to.to_string()).await?;
        let host = host.ok_or_else(|| wrong_state("the other host was removed".to_owned()))?;
        change_host::require_datastores(&mut write, &vm, &host).await?;
        let generation = placements::next_generation(&mut write, vm.id).await?;
        placements::set_owner(&mut write, vm.id, to, generation).await?;
        write.commit().await?;
    }
    if let Ok(state) = run.host_state(from, None).await {
        run.hosts().until_shown(from, &state).await;
    }
    Ok(())
}

/// Has the other host know the clone, and its key.
async fn arrive(run: &Run<'_>) -> Result<(), StepError> {
    register(run).await?;
    create_vm::deliver_key(run).await
}

/// Undoes [`hand_over`]: the host that made the clone has it again, and can delete its disks.
async fn take_back(run: &Run<'_>) -> Result<(), StepError> {
    let Elsewhere { from, to, .. } = of(run)?;
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let Some(vm) = run.find_vm().await?.filter(|vm| vm.host == to) else { return Ok(()) };
    match absent_is_fine(run.hosts().agent(to)?.unregister_vm(vm.id).await) {
        Err(StepError::Again(problem)) => {
            // It starts nothing by itself, and nobody asks it to.
            tracing::info!(vm = vm.name, %problem, "left to the monitor of the other host");
        }
        forgotten => forgotten?,
    }
    let mut write = run.store().write().await?;
    let generation = placements::next_generation(&mut write, vm.id).await?;
    placements::set_owner(&mut write, vm.id, from, generation).await?;
    Ok(write.commit().await?)
}

/// Has the other host keep the disks, and records that.
async fn switch(run: &Run<'_>) -> Result<(), StepError> {
    new_vm::switch(run, of(run)?, &how(run)?).await?;
    create_vm::measure_datastores(run).await;
    Ok(())
}

/// What people are told where the host that made the clone did not remove what it had sent: what stands, and what is left to do.
pub(super) fn unfinished(copies: &Copies, target: &str, cause: &Problem) -> String {
    let of = copies.vm;
    // The step that would have merged it comes after this one.
    let snapshot = copies.temporary.map_or_else(String::new, |_| {
        format!(
            ". The temporary snapshot of VM {of}, which it was copied from, is left: delete it (vmseal snapshot list {of}; vmseal snapshot delete)"
        )
    });
    format!(
        "VM '{target}' is complete on the host that it is for, and can be used (vmseal vm delete {target} undoes the clone). Removing what was sent from the host that made it failed: {cause}. That host is asked again whenever its agent reports what it has, until that agent restarts: from then on it does not know the clone. Files that are left after that are not removed by vmseal: vmseal datastore scan lists them as orphan, on the datastores of the disks of VM {of}; remove them by hand{snapshot}"
    )
}
