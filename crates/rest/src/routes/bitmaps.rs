//! Dirty bitmaps of disks in use: the changes since a point in time, for backups. The filter that serves a disk
//! keeps them; they are not in the inventory.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use vmseal_api::filter::BitmapStatus;
use vmseal_api::model::{Page, Plan};
use vmseal_api::request::AddBitmap;
use vmseal_control::services::bitmaps::Target;
use vmseal_control::services::{self, Services};

use crate::answer::{Answer, BitmapOrPlan, created, no_content};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{
    self, EmptyBody, OptionalJson, QueryOf, ThreePathSegments, TwoPathSegments,
};
use crate::request::dry_run::DryRunQuery;

/// Lists the dirty bitmaps of a disk whose VM runs. They are in a file on the VM's host, and survive a restart of filter,
/// agent or guest, and a stop of the VM unless something else writes to the disk.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/disks/{disk}/bitmaps", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id")),
    responses((status = 200, body = Page<BitmapStatus>), ProblemResponse))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, disk): TwoPathSegments,
) -> Result<Json<Page<BitmapStatus>>, ProblemResponse> {
    Ok(Json(services::bitmaps::list(&control, &caller, &vm, &disk).await?))
}

/// Starts a dirty bitmap of a disk whose VM runs: changes from now on are dirty. Refused if the bitmap exists.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/disks/{disk}/bitmaps", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id"), DryRunQuery),
    request_body = AddBitmap,
    responses((status = 201, body = BitmapStatus), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn add(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, disk): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<AddBitmap>,
) -> Result<Answer<(StatusCode, Json<BitmapStatus>)>, ProblemResponse> {
    Ok(Answer(
        services::bitmaps::add(&control, &caller, &vm, &disk, request, query.dry_run)
            .await?
            .map(created),
    ))
}

/// Clears a dirty bitmap: only changes from now on are dirty. Refused while it is being read.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/disks/{disk}/bitmaps/{bitmap}/clear", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id"),
           ("bitmap" = String, Path, description = "The bitmap's name"), DryRunQuery),
    responses((status = 200, body = BitmapOrPlan), ProblemResponse))]
pub(super) async fn clear(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    ThreePathSegments(vm, disk, bitmap): ThreePathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Answer<Json<BitmapStatus>>, ProblemResponse> {
    let of = Target { vm: &vm, disk: &disk, bitmap: &bitmap };
    Ok(Answer(services::bitmaps::clear(&control, &caller, of, query.dry_run).await?.map(Json)))
}

/// Removes a dirty bitmap. Refused while it is being read.
#[utoipa::path(delete, path = "/api/v1/vms/{vm}/disks/{disk}/bitmaps/{bitmap}", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id"),
           ("bitmap" = String, Path, description = "The bitmap's name"), DryRunQuery),
    responses((status = 204, description = "It is removed"), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn remove(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    ThreePathSegments(vm, disk, bitmap): ThreePathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
) -> Result<Answer<StatusCode>, ProblemResponse> {
    let of = Target { vm: &vm, disk: &disk, bitmap: &bitmap };
    Ok(Answer(
        services::bitmaps::remove(&control, &caller, of, query.dry_run).await?.map(no_content),
    ))
}
