//! Virtual machines.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::model::{self, Page, Plan, Vm};
use vmseal_api::request::{CreateVm, RecryptVm, StopVm};
use vmseal_control::services::{self, Services};

use crate::answer::{Accepted, Answer};
use crate::problem::Refusal;
use crate::request::auth::Authenticated;
use crate::request::body::{self, Named, Nothing, OptionalJson, QueryOf};
use crate::request::dry_run::Intent;
use crate::request::page::PageQuery;

/// Lists the VMs.
#[utoipa::path(get, path = "/api/v1/vms", tag = "vms", params(PageQuery),
    responses((status = 200, body = Page<Vm>), Refusal))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<PageQuery>,
) -> Result<Json<Page<Vm>>, Refusal> {
    Ok(Json(services::vms::list(&control, &caller, query.into()).await?))
}

/// Shows a VM.
#[utoipa::path(get, path = "/api/v1/vms/{vm}", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id")),
    responses((status = 200, body = Vm), Refusal))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
) -> Result<Json<Vm>, Refusal> {
    Ok(Json(services::vms::show(&control, &caller, &name).await?))
}

/// Makes a VM.
#[utoipa::path(post, path = "/api/v1/vms", tag = "vms", params(Intent), request_body = CreateVm,
    responses((status = 202, body = model::Task), (status = 200, body = Plan), Refusal))]
pub(super) async fn create(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(intent): QueryOf<Intent>,
    body::Json(request): body::Json<CreateVm>,
) -> Result<Answer<Accepted>, Refusal> {
    Ok(Answer(
        services::create_vm::create(&control, &caller, request, intent.dry_run)
            .await?
            .map(Accepted),
    ))
}

/// Starts a VM that is off.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/start", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), Intent),
    responses((status = 202, body = model::Task), (status = 200, body = Plan), Refusal))]
pub(super) async fn start(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    QueryOf(intent): QueryOf<Intent>,
    OptionalJson(Nothing {}): OptionalJson<Nothing>,
) -> Result<Answer<Accepted>, Refusal> {
    Ok(Answer(services::vms::start(&control, &caller, &name, intent.dry_run).await?.map(Accepted)))
}

/// Stops a VM; one that is off stays off. With `force`, a task that waits for the guest to shut down cuts its power
/// instead, and is the task that is answered.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/stop", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), Intent),
    request_body = Option<StopVm>, responses((status = 202, body = model::Task), (status = 200, body = Plan), Refusal))]
pub(super) async fn stop(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    QueryOf(intent): QueryOf<Intent>,
    OptionalJson(request): OptionalJson<StopVm>,
) -> Result<Answer<Accepted>, Refusal> {
    Ok(Answer(
        services::vms::stop(&control, &caller, &name, request, intent.dry_run).await?.map(Accepted),
    ))
}

/// Deletes a VM that is off, with its disks and its key; also what is left of one.
#[utoipa::path(delete, path = "/api/v1/vms/{vm}", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), Intent),
    responses((status = 202, body = model::Task), (status = 200, body = Plan), Refusal))]
pub(super) async fn delete(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    QueryOf(intent): QueryOf<Intent>,
) -> Result<Answer<Accepted>, Refusal> {
    Ok(Answer(services::vms::delete(&control, &caller, &name, intent.dry_run).await?.map(Accepted)))
}

/// Gives a VM that is off another key-encryption key, of its provider or another one, and destroys the one that it
/// had. The data of its disks is not rewritten.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/recrypt", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), Intent),
    request_body = Option<RecryptVm>, responses((status = 202, body = model::Task), (status = 200, body = Plan), Refusal))]
pub(super) async fn recrypt(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    QueryOf(intent): QueryOf<Intent>,
    OptionalJson(request): OptionalJson<RecryptVm>,
) -> Result<Answer<Accepted>, Refusal> {
    Ok(Answer(
        services::recrypt::recrypt(&control, &caller, &name, request, intent.dry_run)
            .await?
            .map(Accepted),
    ))
}
