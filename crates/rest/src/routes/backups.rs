//! Backups of VMs.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::model::{Page, Plan, Task, VmBackup};
use vmseal_api::problem::Problem;
use vmseal_api::request::{CreateBackup, RestoreBackup};
use vmseal_control::services::{self, Services};

use crate::answer::{Accepted, Answer};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{EmptyBody, OptionalJson, PathSegment, QueryOf, TwoPathSegments};
use crate::request::dry_run::DryRunQuery;
use crate::request::page::PageQuery;

/// Lists the backups of all VMs, also of deleted ones, oldest first.
#[utoipa::path(get, path = "/api/v1/backups", tag = "backups", params(PageQuery),
    responses((status = 200, body = Page<VmBackup>), ProblemResponse))]
pub(super) async fn list_all(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<PageQuery>,
) -> Result<Json<Page<VmBackup>>, ProblemResponse> {
    Ok(Json(services::backups::list_all(&control, &caller, query.into()).await?))
}

/// Lists the backups of a VM, which may be deleted, oldest first.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/backups", tag = "backups",
    params(("vm" = String, Path, description = "The VM's name or id"), PageQuery),
    responses((status = 200, body = Page<VmBackup>), ProblemResponse))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(vm): PathSegment,
    QueryOf(query): QueryOf<PageQuery>,
) -> Result<Json<Page<VmBackup>>, ProblemResponse> {
    Ok(Json(services::backups::list(&control, &caller, &vm, query.into()).await?))
}

/// Shows a backup.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/backups/{backup}", tag = "backups",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("backup" = String, Path, description = "The backup's name, or its id")),
    responses((status = 200, body = VmBackup), ProblemResponse))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, backup): TwoPathSegments,
) -> Result<Json<VmBackup>, ProblemResponse> {
    Ok(Json(services::backups::show(&control, &caller, &vm, &backup).await?))
}

/// Backs up the disks of a VM, which may run or be suspended, at one instant, to a directory of its host, encrypted as they are.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/backups", tag = "backups",
    params(("vm" = String, Path, description = "The VM's name or id"), DryRunQuery),
    request_body = Option<CreateBackup>, responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn create(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(vm): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<CreateBackup>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    accepted(services::backups::create(&control, &caller, &vm, request, query.dry_run).await)
}

/// Reads all of a backup, and checks that it is as it was written and that its key opens it.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/backups/{backup}/verify", tag = "backups",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("backup" = String, Path, description = "The backup's name, or its id"), DryRunQuery),
    responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn verify(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, backup): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    accepted(services::backups::verify(&control, &caller, &vm, &backup, query.dry_run).await)
}

/// Restores a backup: the disks of a VM that is off hold what it has, a VM that was deleted is made again, or a new one is made.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/backups/{backup}/restore", tag = "backups",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("backup" = String, Path, description = "The backup's name, or its id"), DryRunQuery),
    request_body = Option<RestoreBackup>,
    responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn restore(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, backup): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<RestoreBackup>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let restored =
        services::backups::restore(&control, &caller, &vm, &backup, request, query.dry_run).await;
    accepted(restored)
}

/// Deletes a backup that no other one is above. A key that nothing else needs is destroyed.
#[utoipa::path(delete, path = "/api/v1/vms/{vm}/backups/{backup}", tag = "backups",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("backup" = String, Path, description = "The backup's name, or its id"), DryRunQuery),
    responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn delete(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, backup): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    accepted(services::backups::delete(&control, &caller, &vm, &backup, query.dry_run).await)
}

fn accepted(
    outcome: Result<services::Outcome<Task>, Problem>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(outcome?.map(Accepted)))
}
