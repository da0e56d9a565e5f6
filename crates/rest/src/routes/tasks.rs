//! Tasks.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use utoipa::IntoParams;
use vmseal_api::model::{Page, Plan, Task, TaskState};
use vmseal_control::services::{self, PageRequest, Services};

use crate::answer::{Accepted, Answer, TaskOrPlan};
use crate::problem::Refusal;
use crate::request::auth::Authenticated;
use crate::request::body::{Named, Nothing, OptionalJson, QueryOf};
use crate::request::dry_run::Intent;

/// Which tasks.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct TaskQuery {
    /// The `next` of the last page.
    after: Option<String>,
    /// How many tasks at most.
    limit: Option<u32>,
    /// Those in this state.
    state: Option<TaskState>,
}

/// Lists the tasks, oldest first.
#[utoipa::path(get, path = "/api/v1/tasks", tag = "tasks", params(TaskQuery),
    responses((status = 200, body = Page<Task>), Refusal))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<TaskQuery>,
) -> Result<Json<Page<Task>>, Refusal> {
    let page = PageRequest { after: query.after, limit: query.limit };
    Ok(Json(services::tasks::list(&control, &caller, page, query.state).await?))
}

/// Shows a task.
#[utoipa::path(get, path = "/api/v1/tasks/{task}", tag = "tasks",
    params(("task" = String, Path, description = "Its id")),
    responses((status = 200, body = Task), Refusal))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(id): Named,
) -> Result<Json<Task>, Refusal> {
    Ok(Json(services::tasks::show(&control, &caller, &id).await?))
}

/// Asks a task to stop and to undo what it has done.
#[utoipa::path(post, path = "/api/v1/tasks/{task}/cancel", tag = "tasks",
    params(("task" = String, Path, description = "Its id"), Intent),
    responses((status = 202, body = Task), (status = 200, body = Plan), Refusal))]
pub(super) async fn cancel(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(id): Named,
    QueryOf(intent): QueryOf<Intent>,
    OptionalJson(Nothing {}): OptionalJson<Nothing>,
) -> Result<Answer<Accepted>, Refusal> {
    Ok(Answer(services::tasks::cancel(&control, &caller, &id, intent.dry_run).await?.map(Accepted)))
}

/// Notes that an operator has seen to what a task left, and clears its alarm. A task that this version cannot carry
/// out ends as unknown, and its VM is free for others.
#[utoipa::path(post, path = "/api/v1/tasks/{task}/resolve", tag = "tasks",
    params(("task" = String, Path, description = "Its id"), Intent),
    responses((status = 200, body = TaskOrPlan), Refusal))]
pub(super) async fn resolve(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(id): Named,
    QueryOf(intent): QueryOf<Intent>,
    OptionalJson(Nothing {}): OptionalJson<Nothing>,
) -> Result<Answer<Json<Task>>, Refusal> {
    Ok(Answer(services::tasks::resolve(&control, &caller, &id, intent.dry_run).await?.map(Json)))
}
