//! Dirty bitmaps of disks in use: what has changed since when, for backups. The filter that serves a disk
//! keeps them; the inventory knows nothing of them.

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
use crate::problem::Refusal;
use crate::request::auth::Authenticated;
use crate::request::body::{self, NamedPair, NamedTriple, Nothing, OptionalJson, QueryOf};
use crate::request::dry_run::Intent;

/// Lists the dirty bitmaps of a disk whose VM runs. They live in the process that serves the disk: all are gone when
/// the VM stops, and when another process takes its place.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/disks/{disk}/bitmaps", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id")),
    responses((status = 200, body = Page<BitmapStatus>), Refusal))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    NamedPair(vm, disk): NamedPair,
) -> Result<Json<Page<BitmapStatus>>, Refusal> {
    Ok(Json(services::bitmaps::list(&control, &caller, &vm, &disk).await?))
}

/// Starts a dirty bitmap of a disk whose VM runs: what changes from now on is dirty. One that is there is refused.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/disks/{disk}/bitmaps", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id"), Intent),
    request_body = AddBitmap,
    responses((status = 201, body = BitmapStatus), (status = 200, body = Plan), Refusal))]
pub(super) async fn add(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    NamedPair(vm, disk): NamedPair,
    QueryOf(intent): QueryOf<Intent>,
    body::Json(request): body::Json<AddBitmap>,
) -> Result<Answer<(StatusCode, Json<BitmapStatus>)>, Refusal> {
    Ok(Answer(
        services::bitmaps::add(&control, &caller, &vm, &disk, request, intent.dry_run)
            .await?
            .map(created),
    ))
}

/// Clears a dirty bitmap: what has changed until now is forgotten, and what changes from now on is dirty. Not while
/// somebody reads it.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/disks/{disk}/bitmaps/{bitmap}/clear", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id"),
           ("bitmap" = String, Path, description = "The bitmap's name"), Intent),
    responses((status = 200, body = BitmapOrPlan), Refusal))]
pub(super) async fn clear(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    NamedTriple(vm, disk, bitmap): NamedTriple,
    QueryOf(intent): QueryOf<Intent>,
    OptionalJson(Nothing {}): OptionalJson<Nothing>,
) -> Result<Answer<Json<BitmapStatus>>, Refusal> {
    let of = Target { vm: &vm, disk: &disk, bitmap: &bitmap };
    Ok(Answer(services::bitmaps::clear(&control, &caller, of, intent.dry_run).await?.map(Json)))
}

/// Removes a dirty bitmap. Not while somebody reads it.
#[utoipa::path(delete, path = "/api/v1/vms/{vm}/disks/{disk}/bitmaps/{bitmap}", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id"),
           ("bitmap" = String, Path, description = "The bitmap's name"), Intent),
    responses((status = 204, description = "It is removed"), (status = 200, body = Plan), Refusal))]
pub(super) async fn remove(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    NamedTriple(vm, disk, bitmap): NamedTriple,
    QueryOf(intent): QueryOf<Intent>,
) -> Result<Answer<StatusCode>, Refusal> {
    let of = Target { vm: &vm, disk: &disk, bitmap: &bitmap };
    Ok(Answer(
        services::bitmaps::remove(&control, &caller, of, intent.dry_run).await?.map(no_content),
    ))
}
