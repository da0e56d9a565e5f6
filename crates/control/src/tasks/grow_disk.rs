//! Makes a disk longer, of a VM that is off as of one that runs. What a guest has seen cannot be taken back: once the host
//! has done it, the inventory follows. A host that did nothing leaves nothing to undo.

use async_trait::async_trait;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::size::Size;

use super::add_disk::find_disk;
use super::run::{Run, StepError, register};
use super::start_vm::prepare;
use super::step::Output;
use crate::hosts::keys::Purpose;
use crate::operation::Operation;
use crate::store::disks;
use crate::store::events::NewEvent;

/// The steps, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GrowDiskStep {
    Grow,
    Record,
}

pub(crate) const STEPS: &[&dyn super::step::Step] = &[&GrowDiskStep::Grow, &GrowDiskStep::Record];

#[async_trait]
impl super::step::Step for GrowDiskStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Grow => "grow",
            Self::Record => "record",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Grow => "make the disk longer",
            Self::Record => "record its size",
        }
    }

    fn commits(&self) -> bool {
        matches!(self, Self::Grow)
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Grow => grow(run).await,
            Self::Record => record(run).await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
        match self {
            // A host that has an image that is longer than its disk opens it as before; a guest that runs has seen it.
            Self::Grow => register(run).await.map_err(|error| match error {
                StepError::Final(_) => StepError::Final(unfinished(&run.task.target, cause)),
                again => again,
            }),
            Self::Record => Ok(()),
        }
    }
}

fn size_of(run: &Run<'_>) -> Result<u64, StepError> {
    match run.task.operation {
        Operation::GrowDisk { size, .. } => Ok(size),
        _ => Err(StepError::Final(Problem::new(ErrorCode::Internal, "it grows no disk"))),
    }
}

async fn grow(run: &Run<'_>) -> Result<(), StepError> {
    let size = size_of(run)?;
    let Some(disk) = find_disk(run).await?.filter(|disk| disk.size < size) else { return Ok(()) };
    let vm = run.vm().await?;
    let agent = run.agent(&vm)?;
    match agent.grow_disk(vm.id, disk.id, size).await {
        // The agent has restarted since it got the VM, or its key.
        Err(problem) if problem.code == ErrorCode::NotFound => {
            prepare(run).await?;
            agent.grow_disk(vm.id, disk.id, size).await?;
        }
        Err(problem) if problem.code == ErrorCode::Locked => {
            run.hosts().deliver(&vm, Purpose::Open).await?;
            agent.grow_disk(vm.id, disk.id, size).await?;
        }
        other => other?,
    }
    Ok(())
}

async fn record(run: &Run<'_>) -> Result<(), StepError> {
    let size = size_of(run)?;
    if let Some(disk) = find_disk(run).await?.filter(|disk| disk.size < size) {
        let vm = run.vm().await?;
        let _unchanged = run.hosts().lock(run.vm_id).await;
        let mut write = run.store().write().await?;
        disks::set_size(&mut write, disk.id, size).await?;
        let detail =
            format!("disk '{}' has {}, in place of {}", disk.name, Size(size), Size(disk.size));
        let (kind, actor) = ("vm.changed", run.task.actor.as_str());
        write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
        write.commit().await?;
    }
    register(run).await
}

/// The problem of a failure after the host has made the disk longer.
pub(super) fn unfinished(target: &str, cause: &Problem) -> Problem {
    let detail = format!(
        "a disk of VM '{target}' has grown on its host, and the inventory does not know it yet ({cause}): resize it again once the cause is fixed"
    );
    Problem { reason: cause.reason, ..Problem::new(cause.code, detail) }
}
