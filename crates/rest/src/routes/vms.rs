//! Virtual machines.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::model::{self, Page, Plan, Vm};
use vmseal_api::request::{CreateVm, RecryptVm, StopVm};
use vmseal_control::services::{self, Services};

use crate::answer::{Accepted, Answer};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, EmptyBody, OptionalJson, PathSegment, QueryOf};
use crate::request::dry_run::DryRunQuery;
use crate::request::page::PageQuery;

/// Lists the VMs.
#[utoipa::path(get, path = "/api/v1/vms", tag = "vms", params(PageQuery),
    responses((status = 200, body = Page<Vm>), ProblemResponse))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<PageQuery>,
) -> Result<Json<Page<Vm>>, ProblemResponse> {
    Ok(Json(services::vms::list(&control, &caller, query.into()).await?))
}

/// Shows a VM.
#[utoipa::path(get, path = "/api/v1/vms/{vm}", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id")),
    responses((status = 200, body = Vm), ProblemResponse))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
) -> Result<Json<Vm>, ProblemResponse> {
    Ok(Json(services::vms::show(&control, &caller, &name).await?))
}

/// Creates a VM.
#[utoipa::path(post, path = "/api/v1/vms", tag = "vms", params(DryRunQuery), request_body = CreateVm,
    responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn create(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<CreateVm>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(
        services::create_vm::create(&control, &caller, request, query.dry_run).await?.map(Accepted),
    ))
}

/// Starts a VM that is off.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/start", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn start(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(services::vms::start(&control, &caller, &name, query.dry_run).await?.map(Accepted)))
}

/// Stops a VM; one that is off stays off. With `force`, a task that waits for the guest to shut down cuts its power
/// instead, and the answer is that task.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/stop", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = Option<StopVm>, responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn stop(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<StopVm>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(
        services::vms::stop(&control, &caller, &name, request, query.dry_run).await?.map(Accepted),
    ))
}

/// Deletes a VM that is off, with its disks and its key, or the remains of one.
#[utoipa::path(delete, path = "/api/v1/vms/{vm}", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn delete(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(services::vms::delete(&control, &caller, &name, query.dry_run).await?.map(Accepted)))
}

/// Gives a VM that is off another key-encryption key, of its provider or another one, and destroys the old one. The
/// data of its disks is not rewritten.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/recrypt", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = Option<RecryptVm>, responses((status = 202, body = model::Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn recrypt(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<RecryptVm>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(
        services::recrypt::recrypt(&control, &caller, &name, request, query.dry_run)
            .await?
            .map(Accepted),
    ))
}
