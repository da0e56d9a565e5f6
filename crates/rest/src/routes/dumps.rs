//! Core dumps of VMs.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::model::{Dump, Page, Plan, Task};
use vmseal_api::problem::Problem;
use vmseal_api::request::{DecryptDump, TakeDump};
use vmseal_control::services::{self, Services};

use crate::answer::{Accepted, Answer};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, OptionalJson, PathSegment, QueryOf, TwoPathSegments};
use crate::request::dry_run::DryRunQuery;
use crate::request::page::PageQuery;

/// Lists the core dumps of a VM, oldest first.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/dumps", tag = "dumps",
    params(("vm" = String, Path, description = "The VM's name or id"), PageQuery),
    responses((status = 200, body = Page<Dump>), ProblemResponse))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(vm): PathSegment,
    QueryOf(query): QueryOf<PageQuery>,
) -> Result<Json<Page<Dump>>, ProblemResponse> {
    Ok(Json(services::dumps::list(&control, &caller, &vm, query.into()).await?))
}

/// Shows a core dump.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/dumps/{dump}", tag = "dumps",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("dump" = String, Path, description = "The core dump's name, or its id")),
    responses((status = 200, body = Dump), ProblemResponse))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, dump): TwoPathSegments,
) -> Result<Json<Dump>, ProblemResponse> {
    Ok(Json(services::dumps::show(&control, &caller, &vm, &dump).await?))
}

/// Writes a core dump of a VM's guest, which stands still meanwhile, beside its first disk, encrypted under the VM's key.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/dumps", tag = "dumps",
    params(("vm" = String, Path, description = "The VM's name or id"), DryRunQuery),
    request_body = Option<TakeDump>, responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn take(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(vm): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<TakeDump>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    accepted(services::dumps::take(&control, &caller, &vm, request, query.dry_run).await)
}

/// Decrypts a core dump to a file of the VM's host. The file holds the guest's memory in the clear.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/dumps/{dump}/decrypt", tag = "dumps",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("dump" = String, Path, description = "The core dump's name, or its id"), DryRunQuery),
    request_body = DecryptDump, responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn decrypt(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, dump): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<DecryptDump>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let dry_run = query.dry_run;
    accepted(services::dumps::decrypt(&control, &caller, &vm, &dump, request, dry_run).await)
}

/// Deletes a core dump. The VM may run.
#[utoipa::path(delete, path = "/api/v1/vms/{vm}/dumps/{dump}", tag = "dumps",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("dump" = String, Path, description = "The core dump's name, or its id"), DryRunQuery),
    responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn delete(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, dump): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    accepted(services::dumps::delete(&control, &caller, &vm, &dump, query.dry_run).await)
}

fn accepted(
    outcome: Result<services::Outcome<Task>, Problem>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(outcome?.map(Accepted)))
}
