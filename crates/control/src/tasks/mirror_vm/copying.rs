//! The step that has the host copy the disks, at the pace that users want: slower, or not for now.

use vmseal_api::host::JobKind;
use vmseal_api::problem::{ErrorCode, Problem};

use super::{copied, mirror_of, put};
use crate::tasks::job::{Followed, follow_at};
use crate::tasks::run::{Run, StepError};

/// Has the host copy the disks until the copies are as good as complete. While the task is paused the host copies nothing,
/// and this ends with [`StepError::Paused`]: it is done again when the task goes on.
pub(super) async fn copy(run: &Run<'_>) -> Result<(), StepError> {
    let disks = copied(run)?;
    if disks.is_empty() {
        return may_go_on(run);
    }
    let vm = run.vm().await?;
    loop {
        let pace = run.pace();
        let job = mirror_of(run, &run.task.operation, &disks, pace).await?;
        put(run, &vm, job).await?;
        if pace.paused {
            // How far it is, without how fast.
            run.show_job(&*run.host_state(vm.host, None).await?);
            may_go_on(run)?;
            continue;
        }
        match follow_at(run, &vm, JobKind::Mirror, pace).await? {
            Followed::Ready(_) => return Ok(()),
            Followed::AnotherPace => {}
        }
    }
}

/// Ends a step while its task is paused.
pub(super) fn may_go_on(run: &Run<'_>) -> Result<(), StepError> {
    if !run.pace().paused {
        return Ok(());
    }
    let detail = format!("{} of '{}' is paused", run.task.operation.kind(), run.task.target);
    Err(StepError::Paused(Problem::new(ErrorCode::WrongState, detail)))
}
