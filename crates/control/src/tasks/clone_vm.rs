//! Clones a VM: creates one whose disks are copied from another one's. Of one that runs or is suspended a snapshot is copied, which lasts as
//! long.
//!
//! ```text
//! off, or a snapshot   reserve (rows are there) ─► key ─► register ─► keys ─► make the disks ─► finish
//! runs, or suspended   the same ─► take a snapshot ─► make the disks ─► record (commit) ─► drop the snapshot
//! ```
//! Until it is recorded it is undone as a whole, the snapshot of the other VM included. One for another host goes there when its disks are
//! made ([`elsewhere`]).

mod elsewhere;

use async_trait::async_trait;
use vmseal_api::id::SnapshotId;
use vmseal_api::problem::Problem;

use self::elsewhere::ElsewhereStep;
use super::create_vm::{self, CreateVmStep};
use super::run::{Run, StepError, internal};
use super::step::{Limit, Output, Step, WaitPolicy};
use super::temporary_snapshot::{self, drop_left, drop_snapshot};
use crate::operation::{Copies, Elsewhere, Operation, Temporary};
use crate::store::snapshots;

/// The steps of a clone of a VM that runs or is suspended, besides those of any new VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CloneVmStep {
    Reserve,
    TakeSnapshot,
    Record,
    DropSnapshot,
}

const CLONE: &[&dyn Step] = &[
    &CreateVmStep::Reserve,
    &CreateVmStep::MakeKey,
    &CreateVmStep::Register,
    &CreateVmStep::DeliverKey,
    &CreateVmStep::PrepareOrigin,
    &CreateVmStep::CreateDisks,
    &CreateVmStep::Finish,
];

const CLONE_RUNNING: &[&dyn Step] = &[
    &CloneVmStep::Reserve,
    &CreateVmStep::MakeKey,
    &CreateVmStep::Register,
    &CreateVmStep::DeliverKey,
    &CreateVmStep::PrepareOrigin,
    &CloneVmStep::TakeSnapshot,
    &CreateVmStep::CreateDisks,
    &CloneVmStep::Record,
    &CloneVmStep::DropSnapshot,
];

const CLONE_HANDED_OVER: &[&dyn Step] = &[
    &CreateVmStep::Reserve,
    &CreateVmStep::MakeKey,
    &CreateVmStep::Register,
    &CreateVmStep::DeliverKey,
    &CreateVmStep::PrepareOrigin,
    &CreateVmStep::CreateDisks,
    &ElsewhereStep::HandOver,
    &ElsewhereStep::Arrive,
    &CreateVmStep::Finish,
];

const CLONE_RUNNING_HANDED_OVER: &[&dyn Step] = &[
    &CloneVmStep::Reserve,
    &CreateVmStep::MakeKey,
    &CreateVmStep::Register,
    &CreateVmStep::DeliverKey,
    &CreateVmStep::PrepareOrigin,
    &CloneVmStep::TakeSnapshot,
    &CreateVmStep::CreateDisks,
    &ElsewhereStep::HandOver,
    &ElsewhereStep::Arrive,
    &CloneVmStep::Record,
    &CloneVmStep::DropSnapshot,
];

const CLONE_SENT: &[&dyn Step] = &[
    &CreateVmStep::Reserve,
    &CreateVmStep::MakeKey,
    &CreateVmStep::Register,
    &CreateVmStep::DeliverKey,
    &CreateVmStep::PrepareOrigin,
    &CreateVmStep::CreateDisks,
    &ElsewhereStep::Check,
    &ElsewhereStep::Send,
    &ElsewhereStep::Switch,
    &ElsewhereStep::RemoveSent,
];

const CLONE_RUNNING_SENT: &[&dyn Step] = &[
    &CloneVmStep::Reserve,
    &CreateVmStep::MakeKey,
    &CreateVmStep::Register,
    &CreateVmStep::DeliverKey,
    &CreateVmStep::PrepareOrigin,
    &CloneVmStep::TakeSnapshot,
    &CreateVmStep::CreateDisks,
    &ElsewhereStep::Check,
    &ElsewhereStep::Send,
    &ElsewhereStep::Switch,
    &ElsewhereStep::RemoveSent,
    &CloneVmStep::DropSnapshot,
];

/// The steps of a clone, in order.
pub(crate) fn steps(copies: &Copies) -> &'static [&'static dyn Step] {
    match (copies.elsewhere, copies.temporary) {
        (None, None) => CLONE,
        (None, Some(_)) => CLONE_RUNNING,
        (Some(Elsewhere { sent: None, .. }), None) => CLONE_HANDED_OVER,
        (Some(Elsewhere { sent: None, .. }), Some(_)) => CLONE_RUNNING_HANDED_OVER,
        (Some(Elsewhere { sent: Some(_), .. }), None) => CLONE_SENT,
        (Some(Elsewhere { sent: Some(_), .. }), Some(_)) => CLONE_RUNNING_SENT,
    }
}

#[async_trait]
impl Step for CloneVmStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::TakeSnapshot => "take-snapshot",
            Self::Record => "record",
            Self::DropSnapshot => "drop-snapshot",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Reserve => "reserve the names",
            Self::TakeSnapshot => "keep what the disks of the VM that is cloned hold",
            Self::Record => "record the clone",
            Self::DropSnapshot => "merge what was kept for it",
        }
    }

    fn commits(&self) -> bool {
        // Hours of copying are not thrown away because a merge fails.
        matches!(self, Self::Record)
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            // Hours of copying are not thrown away because the host is away for a while.
            Self::Record | Self::DropSnapshot => WaitPolicy::BOTH,
            _ => WaitPolicy::NONE,
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::DropSnapshot => Some(Limit::Copy),
            _ => None,
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Reserve => Ok(Output::default()),
            Self::TakeSnapshot => take_snapshot(run).await.map(|quiesced| Output::of(&quiesced)),
            Self::Record => record(run).await.map(Output::from),
            Self::DropSnapshot => drop_all(run).await.map(Output::from),
        }
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::Reserve => unreserve(run).await,
            Self::TakeSnapshot => {
                let (copies, snapshot, _) = of(run)?;
                drop_snapshot(&run.for_vm(copies.vm), snapshot).await
            }
            Self::Record => create_vm::unfinish(run).await,
            // It is past the commit step.
            Self::DropSnapshot => Ok(()),
        }
    }
}

/// What the task copies, and the snapshot that it takes for that.
fn of<'a>(run: &Run<'a>) -> Result<(&'a Copies, SnapshotId, Temporary), StepError> {
    let task = run.task;
    let Operation::CreateVm { copies: Some(copies), .. } = &task.operation else {
        return Err(internal("the task clones no VM"));
    };
    match (copies.snapshot, copies.temporary) {
        (Some(snapshot), Some(temporary)) => Ok((copies, snapshot, temporary)),
        _ => Err(internal("the task takes no snapshot")),
    }
}

/// Has the host keep what the disks of the VM that is cloned hold. Returns whether its file systems were frozen, where that is known.
async fn take_snapshot(run: &Run<'_>) -> Result<Option<bool>, StepError> {
    let (copies, snapshot, Temporary { quiesce, .. }) = of(run)?;
    let origin = run.for_vm(copies.vm);
    let kept = temporary_snapshot::find(&origin, snapshot).await?;
    let kept = kept.ok_or_else(|| internal("the task has lost its snapshot"))?;
    temporary_snapshot::take(&origin, kept, quiesce, None).await
}

async fn record(run: &Run<'_>) -> Result<(), StepError> {
    create_vm::finish_made(run, of_taken(run)).await
}

/// What is told of the snapshot that the task has taken.
fn of_taken(run: &Run<'_>) -> &'static str {
    let quiesced: Option<bool> = run.output(CloneVmStep::TakeSnapshot.name()).flatten();
    let was_suspended = of(run).is_ok_and(|(.., taken)| taken.suspended);
    match quiesced {
        // Frozen, it had gone on before the snapshot was taken.
        Some(true) => ", of a VM that ran, whose file systems were frozen",
        _ if was_suspended => {
            ", of a VM that was suspended, as after a power cut: its saved memory is not in the clone"
        }
        Some(false) => ", of a VM that ran, as after a power cut: its file systems were not frozen",
        None => ", of a VM that ran",
    }
}

/// Drops the snapshot, and those that earlier tasks have left.
async fn drop_all(run: &Run<'_>) -> Result<(), StepError> {
    let (copies, snapshot, _) = of(run)?;
    let origin = run.for_vm(copies.vm);
    drop_snapshot(&origin, snapshot).await?;
    drop_left(&origin).await
}

async fn unreserve(run: &Run<'_>) -> Result<(), StepError> {
    let (copies, snapshot, _) = of(run)?;
    if let Some(kept) = temporary_snapshot::find(&run.for_vm(copies.vm), snapshot).await? {
        let mut write = run.store().write().await?;
        snapshots::delete(&mut write, &kept).await?;
        write.commit().await?;
    }
    create_vm::remove_rows(run).await
}

/// What a task may have left that could not be undone, for people.
pub(super) fn may_be_left(copies: &Copies) -> Option<String> {
    let (of, snapshot) = (copies.vm, copies.snapshot.filter(|_| copies.temporary.is_some())?);
    Some(format!(
        "snapshot {snapshot} of VM {of}, which was taken for the clone, may be left (vmseal snapshot list {of}). The next backup of that VM drops it, and so does the next clone of it while it runs or is suspended"
    ))
}

/// The problem of a failure of a step after the commit step.
pub(super) fn unfinished(
    copies: &Copies,
    step: &dyn Step,
    target: &str,
    cause: &Problem,
) -> Problem {
    let of = copies.vm;
    let detail = if step.name() == ElsewhereStep::RemoveSent.name() {
        elsewhere::unfinished(copies, target, cause)
    } else {
        format!(
            "VM '{target}' is complete, but the temporary snapshot of VM {of}, which it was copied from, could not be merged: {cause}. Mend that, then delete the snapshot (vmseal snapshot list {of}; vmseal snapshot delete)"
        )
    };
    Problem { reason: cause.reason, ..Problem::new(cause.code, detail) }
}
