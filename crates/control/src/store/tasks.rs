//! Tasks.

use std::collections::BTreeMap;

use jiff::Timestamp;
use sqlx::{FromRow, SqliteConnection};
use vmseal_api::id::{TaskId, VmId};
use vmseal_api::model::{TaskState, Waiting};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id::RequestId;

use super::{Part, StoreError, from_json, from_name, parse, to_json, to_name};
use crate::operation::{Claim, Operation, PowerChange};

/// How many ended tasks are kept; the events record all of them.
const ENDED_MAX: i64 = 10_000;

/// A task as the inventory has it.
#[derive(Clone, Debug)]
pub struct Task {
    /// Its id.
    pub id: TaskId,
    /// Its operation.
    pub operation: Operation,
    /// The VM's name when it began.
    pub target: String,
    /// The user who requested it.
    pub actor: String,
    /// Its state.
    pub state: TaskState,
    /// The name of the current step, done or undone.
    pub step: String,
    /// The name of the step that failed, once the rollback has begun.
    pub failed_step: Option<String>,
    /// The outputs of its steps, by their names.
    pub outputs: BTreeMap<String, serde_json::Value>,
    /// What it waits for.
    pub waiting: Option<Waiting>,
    /// The task that it is a part of.
    pub parent: Option<TaskId>,
    /// Its earliest start.
    pub not_before: Option<Timestamp>,
    /// Whether it was cancelled.
    pub cancelled: bool,
    /// How fast it copies disks, where it does.
    pub pace: CopyPace,
    /// When it was requested.
    pub created: Timestamp,
    /// When it ended.
    pub ended: Option<Timestamp>,
    /// The id of its request.
    pub request_id: Option<RequestId>,
    /// Why it failed.
    pub problem: Option<Problem>,
}

impl Task {
    /// Why this version does not run it.
    #[must_use]
    pub fn why_unreadable(&self) -> String {
        match &self.operation {
            Operation::Unreadable { why, .. } => why.clone(),
            _ => format!("this version knows no step '{}' of it", self.step),
        }
    }
}

#[derive(FromRow)]
struct Row {
    id: String,
    kind: String,
    target: String,
    vm_id: String,
    actor: String,
    operation: String,
    state: String,
    step: String,
    failed_step: Option<String>,
    outputs: String,
    waiting: Option<String>,
    parent: Option<String>,
    not_before: Option<String>,
    cancelled: bool,
    rate: Option<i64>,
    paused: bool,
    created: String,
    ended: Option<String>,
    request_id: Option<String>,
    problem: Option<String>,
}

/// The columns of a [`Row`].
macro_rules! columns {
    () => {
        "id, kind, target, vm_id, actor, operation, state, step, failed_step, outputs, waiting, parent,
         not_before, cancelled, rate, paused, created, ended, request_id, problem"
    };
}

/// Reads a row. A task of another version that this one cannot read is kept but not run; it does not prevent other
/// tasks from being read.
impl From<Row> for Task {
    fn from(row: Row) -> Self {
        let mut unreadable = None;
        let ended = row.ended.as_ref().map(|text| parse(text, "a time"));
        let open = if ended.is_some() { TaskState::Unknown } else { TaskState::Running };
        let mut task = Self {
            id: read(&mut unreadable, parse(&row.id, "a task's id"), TaskId(uuid::Uuid::nil())),
            operation: Operation::Unreadable {
                kind: row.kind.clone(),
                vm: parse(&row.vm_id, "a VM's id").ok(),
                why: String::new(),
            },
            target: row.target,
            actor: row.actor,
            state: read(&mut unreadable, from_name(&row.state, "a task's state"), open),
            step: row.step,
            failed_step: row.failed_step,
            outputs: read(
                &mut unreadable,
                from_json(&row.outputs, "the outputs of steps"),
                BTreeMap::new(),
            ),
            waiting: row.waiting.and_then(|json| from_json(&json, "what is waited for").ok()),
            parent: row.parent.and_then(|id| parse(&id, "a task's id").ok()),
            not_before: row.not_before.and_then(|at| parse(&at, "a time").ok()),
            cancelled: row.cancelled,
            pace: CopyPace {
                bytes_per_second: row.rate.and_then(|rate| u64::try_from(rate).ok()),
                paused: row.paused,
            },
            created: read(&mut unreadable, parse(&row.created, "a time"), Timestamp::UNIX_EPOCH),
            ended: ended.map(|ended| read(&mut unreadable, ended, Timestamp::UNIX_EPOCH)),
            request_id: row.request_id.and_then(|id| parse(&id, "a request's id").ok()),
            // A newer version may have error codes that this one does not know.
            problem: row.problem.map(|json| {
                from_json(&json, "a problem").unwrap_or_else(|_| {
                    let detail = format!("another version of vmseal noted: {json}");
                    Problem::new(ErrorCode::Internal, detail)
                })
            }),
        };
        let operation = from_json(&row.operation, "an operation");
        let operation = read(&mut unreadable, operation.map(Some), None);
        match (unreadable, operation) {
            (None, Some(operation)) => task.operation = operation,
            (why, _) => {
                let (kind, vm) = (row.kind, task.operation.vm());
                let why = why.map_or_else(String::new, |error: StoreError| error.to_string());
                task.operation = Operation::Unreadable { kind, vm, why };
            }
        }
        task
    }
}

/// The value that was read, or a substitute and the reason.
fn read<T>(first: &mut Option<StoreError>, value: Result<T, StoreError>, otherwise: T) -> T {
    value.unwrap_or_else(|error| {
        first.get_or_insert(error);
        otherwise
    })
}

/// Adds a task and its claim, and deletes the oldest ended tasks.
///
/// # Errors
/// `wrong-state` while another task holds the resource.
pub async fn insert(to: &mut SqliteConnection, task: &Task) -> Result<(), Problem> {
    for wanted in task.operation.claims() {
        let claim = left_for(to, task, wanted).await?;
        let (kind, object) = claim.stored();
        let claimed =
            sqlx::query("INSERT INTO task_claims (kind, object, task_id) VALUES ($1, $2, $3)")
                .bind(kind)
                .bind(object)
                .bind(task.id.to_string())
                .execute(&mut *to)
                .await;
        if let Err(error) = claimed {
            if !error.as_database_error().is_some_and(|error| error.is_unique_violation()) {
                return Err(StoreError::from(error).into());
            }
            let does = match claim {
                Claim::Vm(_) | Claim::Power(_) => format!("works on VM '{}'", task.target),
                Claim::Backup(_) => "restores this backup as another VM, or deletes it".to_owned(),
            };
            let detail =
                format!("another task {does}: wait for it (vmseal task list) or cancel it");
            return Err(Problem::new(ErrorCode::WrongState, detail));
        }
    }
    let vm = task.operation.vm().map(|vm| vm.to_string());
    sqlx::query(
        "INSERT INTO tasks (id, kind, target, vm_id, actor, operation, state, step, created,
                            request_id, parent, not_before)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
    )
    .bind(task.id.to_string())
    .bind(task.operation.kind())
    .bind(&task.target)
    .bind(vm.unwrap_or_default())
    .bind(&task.actor)
    .bind(to_json(&task.operation))
    .bind(to_name(&task.state))
    .bind(&task.step)
    .bind(task.created.to_string())
    .bind(task.request_id.as_ref().map(RequestId::as_str))
    .bind(task.parent.map(|id| id.to_string()))
    .bind(task.not_before.map(|at| at.to_string()))
    .execute(&mut *to)
    .await
    .map_err(StoreError::from)?;
    prune(to).await.map_err(Problem::from)
}

/// What of a resource a task claims: of a VM that another task has, and whose power that leaves to others, a change of power
/// claims that alone.
///
/// # Errors
/// `wrong-state` where another task is in the way.
async fn left_for(
    from: &mut SqliteConnection,
    task: &Task,
    wanted: Claim,
) -> Result<Claim, Problem> {
    let Claim::Vm(vm) = wanted else { return Ok(wanted) };
    let change = task.operation.power_change();
    for claim in [Claim::Power(vm), wanted] {
        let Some(other) = with_claim(from, claim).await? else { continue };
        let left = change.filter(|change| other.operation.leaves(vm, *change));
        if claim == wanted && left.is_some() {
            return Ok(Claim::Power(vm));
        }
        // Of a clone that may be the VM that it is made of.
        let name: Option<String> = sqlx::query_scalar("SELECT name FROM vms WHERE id = $1")
            .bind(vm.to_string())
            .fetch_optional(&mut *from)
            .await
            .map_err(StoreError::from)?;
        let mut problem = in_the_way(&other, name.as_deref().unwrap_or(&task.target));
        if change.is_some() && other.operation.leaves(vm, PowerChange::Stop) {
            problem.detail.push_str(". The VM can be stopped meanwhile, but not started");
        }
        return Err(problem);
    }
    Ok(wanted)
}

/// The refusal of what another task that works on a VM does not allow.
#[must_use]
pub fn in_the_way(other: &Task, vm: &str) -> Problem {
    let (id, kind) = (other.id, other.operation.kind());
    let detail = format!(
        "task {id} ({kind}) works on VM '{vm}': see how far it is (vmseal task show {id}), wait for it (vmseal task wait {id}), or cancel it (vmseal task cancel {id})"
    );
    Problem::new(ErrorCode::WrongState, detail)
}

async fn prune(to: &mut SqliteConnection) -> Result<(), StoreError> {
    let forgotten = sqlx::query(
        "DELETE FROM tasks WHERE ended IS NOT NULL AND id <= (
             SELECT id FROM tasks WHERE ended IS NOT NULL ORDER BY id DESC LIMIT 1 OFFSET $1)",
    )
    .bind(ENDED_MAX)
    .execute(&mut *to)
    .await?;
    if forgotten.rows_affected() > 0 {
        // Otherwise it could no longer be resolved.
        sqlx::query(
            "DELETE FROM alarms
             WHERE source LIKE 'task %' AND substr(source, 6) NOT IN (SELECT id FROM tasks)",
        )
        .execute(to)
        .await?;
    }
    Ok(())
}

/// Records a task's state; an ended task releases its claim.
pub async fn update(to: &mut SqliteConnection, task: &Task) -> Result<(), StoreError> {
    // Neither `cancelled` nor the pace nor the operation: users set those.
    sqlx::query(
        "UPDATE tasks SET state = $1, step = $2, failed_step = $3, outputs = $4, waiting = $5, ended = $6, problem = $7
         WHERE id = $8",
    )
    .bind(to_name(&task.state))
    .bind(&task.step)
    .bind(&task.failed_step)
    .bind(to_json(&task.outputs))
    .bind(task.waiting.as_ref().map(to_json))
    .bind(task.ended.map(|at| at.to_string()))
    .bind(task.problem.as_ref().map(to_json))
    .bind(task.id.to_string())
    .execute(&mut *to)
    .await?;
    if task.ended.is_some() {
        sqlx::query("DELETE FROM task_claims WHERE task_id = $1")
            .bind(task.id.to_string())
            .execute(to)
            .await?;
    }
    Ok(())
}

/// Records a task's changed operation.
pub async fn set_operation(to: &mut SqliteConnection, task: &Task) -> Result<(), StoreError> {
    sqlx::query("UPDATE tasks SET operation = $1 WHERE id = $2")
        .bind(to_json(&task.operation))
        .bind(task.id.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Records how fast a task copies disks.
pub async fn set_pace(to: &mut SqliteConnection, task: &Task) -> Result<(), StoreError> {
    let rate = task.pace.bytes_per_second.map(|rate| i64::try_from(rate).unwrap_or(i64::MAX));
    sqlx::query("UPDATE tasks SET rate = $1, paused = $2 WHERE id = $3")
        .bind(rate)
        .bind(task.pace.paused)
        .bind(task.id.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Marks a task as cancelled; false if it has ended or is being undone.
pub async fn cancel(to: &mut SqliteConnection, task: TaskId) -> Result<bool, StoreError> {
    let cancelled = sqlx::query(
        "UPDATE tasks SET cancelled = TRUE
         WHERE id = $1 AND state IN ('queued', 'running', 'waiting')",
    )
    .bind(task.to_string())
    .execute(to)
    .await?;
    Ok(cancelled.rows_affected() == 1)
}

/// Marks the subtasks of a task as cancelled, if they can be.
pub async fn cancel_parts(
    to: &mut SqliteConnection,
    parent: TaskId,
    may_be_cancelled: impl Fn(&Task) -> bool,
) -> Result<Vec<Task>, StoreError> {
    let rows: Vec<Row> =
        sqlx::query_as(concat!("SELECT ", columns!(), " FROM tasks WHERE parent = $1 ORDER BY id"))
            .bind(parent.to_string())
            .fetch_all(&mut *to)
            .await?;
    let mut cancelled = Vec::new();
    for part in rows.into_iter().map(Task::from) {
        if may_be_cancelled(&part) && cancel(to, part.id).await? {
            cancelled.push(part);
        }
    }
    Ok(cancelled)
}

/// A task by its id.
pub async fn get(from: &mut SqliteConnection, id: &str) -> Result<Option<Task>, StoreError> {
    let row: Option<Row> =
        sqlx::query_as(concat!("SELECT ", columns!(), " FROM tasks WHERE id = $1"))
            .bind(id)
            .fetch_optional(from)
            .await?;
    Ok(row.map(Task::from))
}

/// The task that has a VM; else the one that changes its power and began beside a task that has ended.
pub async fn holding(from: &mut SqliteConnection, vm: VmId) -> Result<Option<Task>, StoreError> {
    match with_claim(from, Claim::Vm(vm)).await? {
        Some(task) => Ok(Some(task)),
        None => beside(from, vm).await,
    }
}

/// The task that changes a VM's power beside the one that works on the VM, or did when it was begun.
pub async fn beside(from: &mut SqliteConnection, vm: VmId) -> Result<Option<Task>, StoreError> {
    with_claim(from, Claim::Power(vm)).await
}

async fn with_claim(from: &mut SqliteConnection, claim: Claim) -> Result<Option<Task>, StoreError> {
    let (kind, object) = claim.stored();
    let row: Option<Row> = sqlx::query_as(concat!(
        "SELECT ",
        columns!(),
        " FROM tasks WHERE id = (SELECT task_id FROM task_claims WHERE kind = $1 AND object = $2)"
    ))
    .bind(kind)
    .bind(object)
    .fetch_optional(from)
    .await?;
    Ok(row.map(Task::from))
}

/// The tasks of a VM that have ended as unknown.
pub async fn unknown_of_vm(from: &mut SqliteConnection, vm: VmId) -> Result<Vec<Task>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(concat!(
        "SELECT ",
        columns!(),
        " FROM tasks WHERE vm_id = $1 AND state = 'unknown'"
    ))
    .bind(vm.to_string())
    .fetch_all(from)
    .await?;
    Ok(rows.into_iter().map(Task::from).collect())
}

/// The tasks that have given a VM another host, also a clone that was made for it, or moved disks of it to another datastore, or were to; in order
/// of their requests.
pub async fn moves_of_vm(from: &mut SqliteConnection, vm: VmId) -> Result<Vec<Task>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(concat!(
        "SELECT ",
        columns!(),
        " FROM tasks WHERE vm_id = $1 AND kind IN ('vm.migrate', 'vm.clone', 'vm.move') ORDER BY id"
    ))
    .bind(vm.to_string())
    .fetch_all(from)
    .await?;
    Ok(rows.into_iter().map(Task::from).collect())
}

/// Tasks in order of their ids, which is the order of their requests; only those in `state`, if given.
pub async fn list(
    from: &mut SqliteConnection,
    part: &Part,
    state: Option<TaskState>,
) -> Result<Vec<Task>, StoreError> {
    // Each statement uses its own index; an optional condition would prevent that.
    let query = match state {
        None => sqlx::query_as(concat!(
            "SELECT ",
            columns!(),
            " FROM tasks WHERE id > $1 ORDER BY id LIMIT $2"
        )),
        Some(_) => sqlx::query_as(concat!(
            "SELECT ",
            columns!(),
            " FROM tasks WHERE id > $1 AND state = $3 ORDER BY id LIMIT $2"
        )),
    };
    let query = query.bind(&part.after).bind(part.limit);
    let query = match state {
        None => query,
        Some(state) => query.bind(to_name(&state)),
    };
    let rows: Vec<Row> = query.fetch_all(from).await?;
    Ok(rows.into_iter().map(Task::from).collect())
}

/// The tasks that have not ended.
pub async fn open(from: &mut SqliteConnection) -> Result<Vec<Task>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(concat!(
        "SELECT ",
        columns!(),
        " FROM tasks WHERE ended IS NULL ORDER BY id"
    ))
    .fetch_all(from)
    .await?;
    Ok(rows.into_iter().map(Task::from).collect())
}
