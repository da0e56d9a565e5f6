//! Tasks.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use utoipa::IntoParams;
use vmseal_api::model::{Page, Plan, Task, TaskState};
use vmseal_api::request::SetTask;
use vmseal_control::services::{self, PageRequest, Services};

use crate::answer::{Accepted, Answer, TaskOrPlan};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, EmptyBody, OptionalJson, PathSegment, QueryOf};
use crate::request::dry_run::DryRunQuery;

/// The requested tasks.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct TaskQuery {
    /// The `next` of the last page.
    after: Option<String>,
    /// How many tasks at most.
    limit: Option<u32>,
    /// Only those in this state.
    state: Option<TaskState>,
}

/// How a task is cancelled.
#[derive(Clone, Copy, Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct CancelQuery {
    /// Check the request and answer what it would do, without doing anything.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    dry_run: bool,
    /// Only for a migration that waits at its switch for the other host: that host is gone for good, or has restarted since it ran the VM.
    /// The VM goes on as it was when it was sent; what it has done at that host is lost. Never use it while that host may run the VM.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    force: bool,
}

/// Lists the tasks, oldest first.
#[utoipa::path(get, path = "/api/v1/tasks", tag = "tasks", params(TaskQuery),
    responses((status = 200, body = Page<Task>), ProblemResponse))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<TaskQuery>,
) -> Result<Json<Page<Task>>, ProblemResponse> {
    let page = PageRequest { after: query.after, limit: query.limit };
    Ok(Json(services::tasks::list(&control, &caller, page, query.state).await?))
}

/// Shows a task.
#[utoipa::path(get, path = "/api/v1/tasks/{task}", tag = "tasks",
    params(("task" = String, Path, description = "Its id")),
    responses((status = 200, body = Task), ProblemResponse))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(id): PathSegment,
) -> Result<Json<Task>, ProblemResponse> {
    Ok(Json(services::tasks::show(&control, &caller, &id).await?))
}

/// Asks a task to stop and to undo what it has done.
#[utoipa::path(post, path = "/api/v1/tasks/{task}/cancel", tag = "tasks",
    params(("task" = String, Path, description = "Its id"), CancelQuery),
    responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn cancel(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(id): PathSegment,
    QueryOf(query): QueryOf<CancelQuery>,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let CancelQuery { dry_run, force } = query;
    let cancelled = services::tasks::cancel(&control, &caller, &id, force, dry_run).await?;
    Ok(Answer(cancelled.map(Accepted)))
}

/// Records that an operator has handled what a task left behind, and clears its alarm. A task that this version cannot
/// run ends as unknown, and its VM is free for other tasks.
#[utoipa::path(post, path = "/api/v1/tasks/{task}/resolve", tag = "tasks",
    params(("task" = String, Path, description = "Its id"), DryRunQuery),
    responses((status = 200, body = TaskOrPlan), ProblemResponse))]
pub(super) async fn resolve(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(id): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Answer<Json<Task>>, ProblemResponse> {
    Ok(Answer(services::tasks::resolve(&control, &caller, &id, query.dry_run).await?.map(Json)))
}

/// Changes the rate of a task that copies disks (`vm.encrypt`, `vm.decrypt`, `vm.recrypt-deep`, `vm.move`), until its guest is
/// given the copies.
#[utoipa::path(patch, path = "/api/v1/tasks/{task}", tag = "tasks",
    params(("task" = String, Path, description = "Its id"), DryRunQuery), request_body = SetTask,
    responses((status = 200, body = TaskOrPlan), ProblemResponse))]
pub(super) async fn set(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(id): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<SetTask>,
) -> Result<Answer<Json<Task>>, ProblemResponse> {
    let set = services::tasks::set(&control, &caller, &id, request, query.dry_run).await?;
    Ok(Answer(set.map(Json)))
}

/// Has a task that copies disks copy nothing until it is resumed. What the guest changes meanwhile is copied then. The same
/// again changes nothing.
#[utoipa::path(post, path = "/api/v1/tasks/{task}/pause", tag = "tasks",
    params(("task" = String, Path, description = "Its id"), DryRunQuery),
    responses((status = 200, body = TaskOrPlan), ProblemResponse))]
pub(super) async fn pause(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(id): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Answer<Json<Task>>, ProblemResponse> {
    Ok(Answer(services::tasks::pause(&control, &caller, &id, query.dry_run).await?.map(Json)))
}

/// Has a paused task go on. The same again changes nothing.
#[utoipa::path(post, path = "/api/v1/tasks/{task}/resume", tag = "tasks",
    params(("task" = String, Path, description = "Its id"), DryRunQuery),
    responses((status = 200, body = TaskOrPlan), ProblemResponse))]
pub(super) async fn resume(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(id): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Answer<Json<Task>>, ProblemResponse> {
    Ok(Answer(services::tasks::resume(&control, &caller, &id, query.dry_run).await?.map(Json)))
}
