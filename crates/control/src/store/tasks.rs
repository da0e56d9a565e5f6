//! Tasks.

use jiff::Timestamp;
use sqlx::{FromRow, SqliteConnection};
use vmseal_api::id::TaskId;
use vmseal_api::model::TaskState;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id::RequestId;

use super::{Part, StoreError, from_json, from_name, parse, to_json, to_name};
use crate::tasks::Operation;

/// How many ended tasks are kept; the events tell of all.
const ENDED_MAX: i64 = 10_000;

/// A task as the inventory has it.
#[derive(Clone, Debug)]
pub struct Task {
    /// Its id.
    pub id: TaskId,
    /// What it does.
    pub operation: Operation,
    /// The VM's name when it began.
    pub target: String,
    /// Who asked for it.
    pub actor: String,
    /// How it stands.
    pub state: TaskState,
    /// The place of the step that is being done or undone.
    pub position: usize,
    /// That step, for people.
    pub step: String,
    /// Whether somebody wants it to stop.
    pub cancelled: bool,
    /// When it was asked for.
    pub created: Timestamp,
    /// When it ended.
    pub ended: Option<Timestamp>,
    /// The id of the request that asked for it.
    pub request_id: Option<RequestId>,
    /// Why it failed.
    pub problem: Option<Problem>,
}

#[derive(FromRow)]
struct Row {
    id: String,
    target: String,
    actor: String,
    operation: String,
    state: String,
    position: i64,
    step: String,
    cancelled: bool,
    created: String,
    ended: Option<String>,
    request_id: Option<String>,
    problem: Option<String>,
}

impl TryFrom<Row> for Task {
    type Error = StoreError;
    fn try_from(row: Row) -> Result<Self, StoreError> {
        Ok(Self {
            id: parse(&row.id, "a task's id")?,
            operation: from_json(&row.operation, "an operation")?,
            target: row.target,
            actor: row.actor,
            state: from_name(&row.state, "a task's state")?,
            position: usize::try_from(row.position).unwrap_or(usize::MAX),
            step: row.step,
            cancelled: row.cancelled,
            created: parse(&row.created, "a time")?,
            ended: row.ended.map(|text| parse(&text, "a time")).transpose()?,
            request_id: row.request_id.map(|id| parse(&id, "a request's id")).transpose()?,
            problem: row.problem.map(|json| from_json(&json, "a problem")).transpose()?,
        })
    }
}

/// Adds a task, and forgets the oldest of those that ended.
///
/// # Errors
/// `wrong-state` while the VM has another one.
pub async fn insert(to: &mut SqliteConnection, task: &Task) -> Result<(), Problem> {
    let inserted = sqlx::query(
        "INSERT INTO tasks (id, kind, target, vm_id, actor, operation, state, position, step, created,
                            request_id)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    )
    .bind(task.id.to_string())
    .bind(task.operation.kind())
    .bind(&task.target)
    .bind(task.operation.vm().to_string())
    .bind(&task.actor)
    .bind(to_json(&task.operation))
    .bind(to_name(&task.state))
    .bind(i64::try_from(task.position).unwrap_or(i64::MAX))
    .bind(&task.step)
    .bind(task.created.to_string())
    .bind(task.request_id.as_ref().map(RequestId::as_str))
    .execute(&mut *to)
    .await;
    match inserted {
        Ok(_) => {}
        Err(error) if error.as_database_error().is_some_and(|e| e.is_unique_violation()) => {
            let detail = format!(
                "another task works on VM '{}': wait for it (vmseal task list) or cancel it",
                task.target
            );
            return Err(Problem::new(ErrorCode::WrongState, detail));
        }
        Err(error) => return Err(StoreError::from(error).into()),
    }
    prune(to).await.map_err(Problem::from)
}

async fn prune(to: &mut SqliteConnection) -> Result<(), StoreError> {
    sqlx::query(
        "DELETE FROM tasks WHERE ended IS NOT NULL AND id <= (
             SELECT id FROM tasks WHERE ended IS NOT NULL ORDER BY id DESC LIMIT 1 OFFSET ?)",
    )
    .bind(ENDED_MAX)
    .execute(to)
    .await?;
    Ok(())
}

/// Notes how a task stands.
pub async fn update(to: &mut SqliteConnection, task: &Task) -> Result<(), StoreError> {
    // Not `cancelled`: that is the users' to set.
    sqlx::query(
        "UPDATE tasks SET state = ?, position = ?, step = ?, ended = ?, problem = ? WHERE id = ?",
    )
    .bind(to_name(&task.state))
    .bind(i64::try_from(task.position).unwrap_or(i64::MAX))
    .bind(&task.step)
    .bind(task.ended.map(|at| at.to_string()))
    .bind(task.problem.as_ref().map(to_json))
    .bind(task.id.to_string())
    .execute(to)
    .await?;
    Ok(())
}

/// Notes that a task is to stop; false when it has ended or is being undone.
pub async fn cancel(to: &mut SqliteConnection, task: TaskId) -> Result<bool, StoreError> {
    let cancelled =
        sqlx::query("UPDATE tasks SET cancelled = 1 WHERE id = ? AND state = 'running'")
            .bind(task.to_string())
            .execute(to)
            .await?;
    Ok(cancelled.rows_affected() == 1)
}

/// A task by its id.
pub async fn get(from: &mut SqliteConnection, id: &str) -> Result<Option<Task>, StoreError> {
    let row: Option<Row> = sqlx::query_as(
        "SELECT id, target, actor, operation, state, position, step, cancelled, created, ended,
                request_id, problem
         FROM tasks WHERE id = ?",
    )
    .bind(id)
    .fetch_optional(from)
    .await?;
    row.map(Task::try_from).transpose()
}

/// Tasks in order of their ids, which is that of their beginning; those in one state, where one is given.
pub async fn list(
    from: &mut SqliteConnection,
    part: &Part,
    state: Option<TaskState>,
) -> Result<Vec<Task>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT id, target, actor, operation, state, position, step, cancelled, created, ended,
                request_id, problem
         FROM tasks WHERE id > ?1 AND (?2 IS NULL OR state = ?2) ORDER BY id LIMIT ?3",
    )
    .bind(&part.after)
    .bind(state.as_ref().map(to_name))
    .bind(part.limit)
    .fetch_all(from)
    .await?;
    rows.into_iter().map(Task::try_from).collect()
}

/// The tasks that have not ended.
pub async fn open(from: &mut SqliteConnection) -> Result<Vec<Task>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT id, target, actor, operation, state, position, step, cancelled, created, ended,
                request_id, problem
         FROM tasks WHERE state IN ('running', 'undoing') ORDER BY id",
    )
    .fetch_all(from)
    .await?;
    rows.into_iter().map(Task::try_from).collect()
}
