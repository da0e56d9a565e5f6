//! The VM that was backed up, when another one is made of its backup: both have the same data keys then. What its guest reads goes
//! through buffers of the filter from then on, as what the new VM reads does (docs/decisions/237).

use std::collections::BTreeSet;

use async_trait::async_trait;
use vmseal_api::host::ShareDataKeys;
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::{ErrorCode, Problem};

use super::{backup, restored_disks};
use crate::hosts::keys::Purpose;
use crate::operation::Operation;
use crate::store::disks::Disk;
use crate::store::{backups, tasks};
use crate::tasks::run::{Run, StepError};
use crate::tasks::step::{Limit, Output, Step, WaitPolicy};

/// Marks its disks, before another VM has their data keys. The mark stays where that is undone: it costs reads a copy, and
/// nothing else.
#[derive(Debug)]
pub(crate) struct MarkOrigin;

#[async_trait]
impl Step for MarkOrigin {
    fn name(&self) -> &'static str {
        "mark-origin"
    }

    fn title(&self) -> &'static str {
        "mark the disks of the VM that was backed up"
    }

    fn needs_key(&self) -> bool {
        // What is in the clear has no data key.
        true
    }

    fn wait_policy(&self) -> WaitPolicy {
        WaitPolicy::PROVIDER
    }

    fn limit(&self) -> Option<Limit> {
        Some(Limit::Provider)
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        mark(run).await.map(Output::from)
    }

    async fn back(&self, _: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        Ok(())
    }
}

async fn mark(run: &Run<'_>) -> Result<(), StepError> {
    let of = backup(run).await?;
    if of.key.is_none() {
        return Ok(());
    }
    let vm = of.vm;
    // Before the disks: what is restored into them from here on is marked, too.
    note(run, vm).await?;
    stays_as_it_is(run, vm).await?;
    let disks: BTreeSet<DiskId> = restored_disks(run)?.into_iter().map(|(_, from)| from).collect();
    let origin = run.for_vm(vm);
    let mut answer = ask(&origin, &disks).await;
    let unprepared =
        |problem: &Problem| matches!(problem.code, ErrorCode::NotFound | ErrorCode::Locked);
    if answer.as_ref().is_err_and(unprepared) {
        // The agent restarted since it got the VM and its key, or another host has the VM now.
        run.hosts().prepare(vm, Purpose::Open).await?;
        answer = ask(&origin, &disks).await;
    }
    match answer {
        // A backup, an export or a copy of its disks, a start or a stop, or a change of its key: some end in a moment.
        Err(problem) if matches!(problem.code, ErrorCode::InUse | ErrorCode::WrongState) => {
            return Err(StepError::Again(problem));
        }
        other => other?,
    }
    stays_as_it_is(run, vm).await?;
    // Those that were made meanwhile may have the header of before.
    note(run, vm).await
}

/// Notes that the data keys in the VM's backups are shared.
async fn note(run: &Run<'_>, vm: VmId) -> Result<(), StepError> {
    let mut write = run.store().write().await?;
    backups::share_data_keys(&mut write, vm).await?;
    Ok(write.commit().await?)
}

/// Has this wait for what gives the VM headers of before, or has another host read them beside the one that is asked: a task that began
/// earlier does not know of the mark.
async fn stays_as_it_is(run: &Run<'_>, vm: VmId) -> Result<(), StepError> {
    let holding = tasks::holding(&mut *run.store().read().await?, vm).await?;
    let Some(task) = holding else { return Ok(()) };
    let is = match task.operation {
        Operation::RestoreBackup { .. } | Operation::RestoreDeletedVm { .. } => "restored",
        Operation::AdoptVm { .. } => "adopted",
        Operation::MigrateVm { .. }
        | Operation::ChangeHost { .. }
        | Operation::EvacuateVm { .. } => "moved to another host",
        // It may stay after all.
        Operation::RemoveDisk { .. } => "deprived of a disk",
        _ => return Ok(()),
    };
    let detail = format!(
        "VM '{}' keeps the data keys that are in its backup, and its disks must be marked first; it is being {is} now: wait for that (vmseal task list), or cancel it",
        task.target
    );
    Err(StepError::Again(Problem::new(ErrorCode::InUse, detail)))
}

/// Has the host of the VM that was backed up mark those of its disks that are encrypted, if the VM is there.
async fn ask(origin: &Run<'_>, of: &BTreeSet<DiskId>) -> Result<(), Problem> {
    let found = origin.find_vm().await?.filter(|vm| vm.lifecycle == Lifecycle::Ready);
    let Some(vm) = found else { return Ok(()) };
    let Some(key) = vm.key.clone() else { return Ok(()) };
    let known = origin.disks().await?;
    // One that a task removes is not the VM's any more.
    let is_there = |disk: &&Disk| disk.encrypted && disk.facts.is_some() && !disk.detached;
    let encrypted = known.iter().filter(is_there);
    let disks: Vec<DiskId> = encrypted.map(|disk| disk.id).filter(|it| of.contains(it)).collect();
    if disks.is_empty() {
        return Ok(());
    }
    let marked = origin.agent(&vm)?.share_data_keys(vm.id, ShareDataKeys { key, disks }).await;
    marked.map_err(|problem| {
        let detail = format!(
            "VM '{}' keeps the data keys that are in its backup, and its disks must be marked on host '{}' first: {}",
            vm.name, vm.host_name, problem.detail
        );
        Problem { detail, ..problem }
    })
}
