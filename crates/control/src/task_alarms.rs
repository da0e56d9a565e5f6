//! Alarms about tasks that need an operator: those that could be neither finished nor undone, and those that this
//! version cannot read. An alarm is active until an operator resolves the task, or a later task does its work.

use sqlx::SqliteConnection;
use vmseal_api::id::VmId;

use crate::operation::Operation;
use crate::store::alarms::RaisedAlarm;
use crate::store::tasks::{self, Task};
use crate::store::{StoreError, Write, alarms};

/// The source of a task's alarm.
fn source(task: &Task) -> String {
    format!("task {}", task.id)
}

/// Whether an operator must handle what such a task has left behind. For a VM that could not be started or stopped, the
/// state of the host is enough.
fn leaves_work(operation: &Operation) -> bool {
    !matches!(
        operation,
        Operation::StartVm { .. }
            | Operation::AutostartVm { .. }
            | Operation::StopVm { .. }
            | Operation::SuspendVm { .. }
            | Operation::RebootVm { .. }
    )
}

/// The kind of the alarm of a task that has ended as unknown.
const UNFINISHED: &str = "task-unfinished";

/// Raises the alarm of a task that has ended as unknown.
pub(crate) async fn unfinished(write: &mut Write<'_>, task: &Task) -> Result<(), StoreError> {
    if !leaves_work(&task.operation) {
        return Ok(());
    }
    let why = task.problem.as_ref().map(ToString::to_string).unwrap_or_default();
    raise(write, task, UNFINISHED, why).await
}

/// Whether a task has ended as unknown, and no operator has dealt with that yet.
pub(crate) async fn is_active(
    read: &mut SqliteConnection,
    task: &Task,
) -> Result<bool, StoreError> {
    alarms::is_raised(read, &source(task), UNFINISHED).await
}

/// Raises the alarm of a task that this version does not run.
pub(crate) async fn unreadable(
    write: &mut Write<'_>,
    task: &Task,
    why: &str,
) -> Result<(), StoreError> {
    let what = format!(
        "it was begun by another version of vmseal and stays as it is ({why}); that version can resume it"
    );
    raise(write, task, "task-unreadable", what).await
}

async fn raise(
    write: &mut Write<'_>,
    task: &Task,
    code: &'static str,
    why: String,
) -> Result<(), StoreError> {
    let (kind, id) = (task.operation.kind(), task.id);
    let detail =
        format!("{kind} as task {id}: {why}. When it is dealt with: vmseal task resolve {id}");
    let alarm = RaisedAlarm { code, target: task.target.clone(), detail, reason: None };
    alarms::replace(write, &source(task), &[alarm]).await
}

/// Clears a task's alarm.
pub(crate) async fn clear(write: &mut Write<'_>, task: &Task) -> Result<(), StoreError> {
    alarms::replace(write, &source(task), &[]).await
}

/// Clears the alarms that a task's success makes obsolete: those of the same operation on its VM, or on the same disk
/// of it, and all of a deleted VM. Whatever copies the disks of a VM removes first what others that do so have left.
pub(crate) async fn answered(
    write: &mut Write<'_>,
    done: &Task,
    vm: VmId,
) -> Result<(), StoreError> {
    let gone = matches!(done.operation, Operation::DeleteVm { .. });
    for task in tasks::unknown_of_vm(write, vm).await? {
        let same = |of: &Operation| (of.kind().to_owned(), of.disk());
        let mirror = done.operation.mirrors_disks() && task.operation.mirrors_disks();
        if gone || mirror || same(&task.operation) == same(&done.operation) {
            clear(write, &task).await?;
        }
    }
    Ok(())
}
