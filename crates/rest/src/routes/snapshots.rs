//! Snapshots of VMs.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::model::{Page, Plan, Snapshot, Task};
use vmseal_api::problem::Problem;
use vmseal_api::request::{RevertSnapshot, TakeSnapshot};
use vmseal_control::services::{self, Services};

use crate::answer::{Accepted, Answer};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{OptionalJson, PathSegment, QueryOf, TwoPathSegments};
use crate::request::dry_run::DryRunQuery;
use crate::request::page::PageQuery;

/// Lists the snapshots of a VM, oldest first.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/snapshots", tag = "snapshots",
    params(("vm" = String, Path, description = "The VM's name or id"), PageQuery),
    responses((status = 200, body = Page<Snapshot>), ProblemResponse))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(vm): PathSegment,
    QueryOf(query): QueryOf<PageQuery>,
) -> Result<Json<Page<Snapshot>>, ProblemResponse> {
    Ok(Json(services::snapshots::list(&control, &caller, &vm, query.into()).await?))
}

/// Shows a snapshot.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/snapshots/{snapshot}", tag = "snapshots",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("snapshot" = String, Path, description = "The snapshot's name, or its id")),
    responses((status = 200, body = Snapshot), ProblemResponse))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, snapshot): TwoPathSegments,
) -> Result<Json<Snapshot>, ProblemResponse> {
    Ok(Json(services::snapshots::show(&control, &caller, &vm, &snapshot).await?))
}

/// Takes a snapshot of the disks of a VM, off, running or suspended: of all of them at one instant. A guest that runs sees a
/// short pause of its disks.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/snapshots", tag = "snapshots",
    params(("vm" = String, Path, description = "The VM's name or id"), DryRunQuery),
    request_body = Option<TakeSnapshot>, responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn take(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(vm): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<TakeSnapshot>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let taken = services::snapshots::take(&control, &caller, &vm, request, query.dry_run).await;
    accepted(taken)
}

/// Has the disks of a VM hold what they held when a snapshot was taken. What they hold now is lost, as far as no other snapshot keeps
/// it. The VM is off and stays so, unless `running` is asked for. The memory of one that is suspended is given up with `discard_memory`; without
/// it the VM is refused, unless a snapshot keeps that memory.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/snapshots/{snapshot}/revert", tag = "snapshots",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("snapshot" = String, Path, description = "The snapshot's name, or its id"), DryRunQuery),
    request_body = Option<RevertSnapshot>,
    responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn revert(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, snapshot): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<RevertSnapshot>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let dry_run = query.dry_run;
    accepted(services::snapshots::revert(&control, &caller, &vm, &snapshot, request, dry_run).await)
}

/// Deletes a snapshot. What the VM's disks hold, and its other snapshots, stay as they are. The VM may run.
#[utoipa::path(delete, path = "/api/v1/vms/{vm}/snapshots/{snapshot}", tag = "snapshots",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("snapshot" = String, Path, description = "The snapshot's name, or its id"), DryRunQuery),
    responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn delete(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, snapshot): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    let dry_run = query.dry_run;
    accepted(services::snapshots::delete(&control, &caller, &vm, &snapshot, dry_run).await)
}

fn accepted(
    outcome: Result<services::Outcome<Task>, Problem>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(outcome?.map(Accepted)))
}
