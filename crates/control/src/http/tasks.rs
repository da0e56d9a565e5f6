//! Tasks.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use utoipa::IntoParams;
use vmseal_api::model::{Page, Plan, Task, TaskState};
use vmseal_api::problem::Problem;

use super::auth::User;
use super::body::{Asked, Named, Nothing, OptionalJson};
use super::dry_run::{Intent, Outcome, TaskOrPlan};
use super::problem::Refusal;
use super::{App, PageQuery, page};
use crate::store::tasks;

/// The answer to a request for long work: 202, the task, and where it is.
pub(super) struct Accepted(pub Task);

impl IntoResponse for Accepted {
    fn into_response(self) -> Response {
        let place = format!("/api/v1/tasks/{}", self.0.id);
        let mut response = (StatusCode::ACCEPTED, Json(self.0)).into_response();
        // A UUID has nothing that a header cannot hold.
        if let Ok(place) = HeaderValue::try_from(place) {
            response.headers_mut().insert(header::LOCATION, place);
        }
        response
    }
}

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
    State(app): State<Arc<App>>,
    Asked(query): Asked<TaskQuery>,
) -> Result<Json<Page<Task>>, Refusal> {
    let part = PageQuery { after: query.after, limit: query.limit }.part();
    let found = tasks::list(&mut *app.store.read().await?, &part, query.state).await?;
    let items = found.iter().map(|task| app.engine.shown(task)).collect();
    Ok(Json(page(items, part.limit, |it: &Task| it.id.to_string())))
}

/// Shows a task.
#[utoipa::path(get, path = "/api/v1/tasks/{task}", tag = "tasks",
    params(("task" = String, Path, description = "Its id")),
    responses((status = 200, body = Task), Refusal))]
pub(super) async fn show(
    State(app): State<Arc<App>>,
    Named(id): Named,
) -> Result<Json<Task>, Refusal> {
    let found = tasks::get(&mut *app.store.read().await?, &id).await?;
    let task = found.ok_or_else(|| Problem::not_found("task", &id))?;
    Ok(Json(app.engine.shown(&task)))
}

/// Asks a task to stop and to undo what it has done.
#[utoipa::path(post, path = "/api/v1/tasks/{task}/cancel", tag = "tasks",
    params(("task" = String, Path, description = "Its id"), Intent),
    responses((status = 202, body = Task), (status = 200, body = Plan), Refusal))]
pub(super) async fn cancel(
    State(app): State<Arc<App>>,
    Named(id): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    OptionalJson(Nothing {}): OptionalJson<Nothing>,
) -> Result<Outcome<Accepted>, Refusal> {
    if intent.dry_run {
        let task = app.engine.check_cancel(&id).await?;
        let step = format!(
            "stop {} at step '{}', and undo what it has done",
            task.operation.kind(),
            task.step_title()
        );
        return Ok(Outcome::planned("task.cancel", &task.target, step));
    }
    let task = app.engine.cancel(&id, &actor).await?;
    Ok(Outcome::Done(Accepted(app.engine.shown(&task))))
}

/// Notes that an operator has seen to what a task left, and clears its alarm. A task that this version cannot carry
/// out ends as unknown, and its VM is free for others.
#[utoipa::path(post, path = "/api/v1/tasks/{task}/resolve", tag = "tasks",
    params(("task" = String, Path, description = "Its id"), Intent),
    responses((status = 200, body = TaskOrPlan), Refusal))]
pub(super) async fn resolve(
    State(app): State<Arc<App>>,
    Named(id): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    OptionalJson(Nothing {}): OptionalJson<Nothing>,
) -> Result<Outcome<Json<Task>>, Refusal> {
    if intent.dry_run {
        let task = app.engine.check_resolve(&id).await?;
        let step = format!("clear the alarm of {} as task {}", task.operation.kind(), task.id);
        return Ok(Outcome::planned("task.resolve", &task.target, step));
    }
    let task = app.engine.resolve(&id, &actor).await?;
    Ok(Outcome::Done(Json(app.engine.shown(&task))))
}
