//! Datastores.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use vmseal_api::adopt::{AdoptVms, Adoption};
use vmseal_api::datastore::{DatastoreScan, SetDatastore, SetDatastoreKey};
use vmseal_api::model::{Datastore, Page, Plan, RekeyedDatastore};
use vmseal_api::request::{AddDatastore, ShareDatastore};
use vmseal_control::services::{self, Services};

use crate::answer::{Answer, DatastoreOrPlan, RekeyedDatastoreOrPlan, created, no_content};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, PathSegment, QueryOf, TwoPathSegments};
use crate::request::dry_run::DryRunQuery;
use crate::request::page::PageQuery;

/// Lists the datastores.
#[utoipa::path(get, path = "/api/v1/datastores", tag = "datastores", params(PageQuery),
    responses((status = 200, body = Page<Datastore>), ProblemResponse))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<PageQuery>,
) -> Result<Json<Page<Datastore>>, ProblemResponse> {
    Ok(Json(services::datastores::list(&control, &caller, query.into()).await?))
}

/// Adds a datastore of a host, which marks it and measures it.
#[utoipa::path(post, path = "/api/v1/datastores", tag = "datastores", params(DryRunQuery),
    request_body = AddDatastore,
    responses((status = 201, body = Datastore), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn add(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<AddDatastore>,
) -> Result<Answer<(StatusCode, Json<Datastore>)>, ProblemResponse> {
    Ok(Answer(
        services::datastores::add(&control, &caller, request, query.dry_run).await?.map(created),
    ))
}

/// Shows a datastore.
#[utoipa::path(get, path = "/api/v1/datastores/{datastore}", tag = "datastores",
    params(("datastore" = String, Path, description = "Its name, HOST:NAME where hosts share one, or id")),
    responses((status = 200, body = Datastore), ProblemResponse))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
) -> Result<Json<Datastore>, ProblemResponse> {
    Ok(Json(services::datastores::show(&control, &caller, &name).await?))
}

/// Changes the key of the user of a pool of Ceph that the server holds, and gives it to the hosts that have the datastore. One of those that
/// are connected tries it first; a key that the cluster refuses, or that no host can try, is not kept, unless the request says `force`. A
/// dry run tries it, too. A pool that is mounted stays so with the former key. Where the key is in a file on each host, the server holds this
/// one from then on in its place: all of them try it first, as for another way to the pool, and `force` is refused.
#[utoipa::path(put, path = "/api/v1/datastores/{datastore}/key", tag = "datastores",
    params(("datastore" = String, Path, description = "Its name, HOST:NAME where hosts share one, or id"), DryRunQuery),
    request_body = SetDatastoreKey, responses((status = 200, body = RekeyedDatastoreOrPlan), ProblemResponse))]
pub(super) async fn set_key(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<SetDatastoreKey>,
) -> Result<Answer<Json<RekeyedDatastore>>, ProblemResponse> {
    Ok(Answer(
        services::datastores::set_key(&control, &caller, &name, request, query.dry_run)
            .await?
            .map(Json),
    ))
}

/// Changes what is stated of the OSDs of a pool's cluster, which counts before what its monitors say, and how hosts get to the pool:
/// monitors, user, messenger, keyring, and the key that the server holds, together or alone. Guests that run go on. Of how they get there each
/// host that has the datastore tries it first, as does a dry run: where one cannot use the pool so, or reaches another cluster, nothing is
/// changed. The datastore keeps its id and its disks. A pool that is mounted stays as it is until its host mounts it anew.
#[utoipa::path(patch, path = "/api/v1/datastores/{datastore}", tag = "datastores",
    params(("datastore" = String, Path, description = "Its name, HOST:NAME where hosts share one, or id"), DryRunQuery),
    request_body = SetDatastore, responses((status = 200, body = RekeyedDatastoreOrPlan), ProblemResponse))]
pub(super) async fn set(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<SetDatastore>,
) -> Result<Answer<Json<RekeyedDatastore>>, ProblemResponse> {
    Ok(Answer(
        services::datastores::set(&control, &caller, &name, request, query.dry_run)
            .await?
            .map(Json),
    ))
}

/// Has a host mount a pool of Ceph anew, as the datastore has monitors, user and messenger now, and with the key that the server holds now, or
/// the keyring as it is now, after the cluster has taken that. Guests with disks there stand still for a second or two; a dry run names them. It may be repeated.
#[utoipa::path(post, path = "/api/v1/datastores/{datastore}/hosts/{host}/remount", tag = "datastores",
    params(("datastore" = String, Path, description = "Its name, HOST:NAME where hosts share one, or id"),
        ("host" = String, Path, description = "The host's name or id"), DryRunQuery),
    responses((status = 200, body = DatastoreOrPlan), ProblemResponse))]
pub(super) async fn remount(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(name, host): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
) -> Result<Answer<Json<Datastore>>, ProblemResponse> {
    Ok(Answer(
        services::remount::remount(&control, &caller, &name, &host, query.dry_run).await?.map(Json),
    ))
}

/// Removes a datastore without disks from the inventory; other files on it stay.
#[utoipa::path(delete, path = "/api/v1/datastores/{datastore}", tag = "datastores",
    params(("datastore" = String, Path, description = "Its name, HOST:NAME where hosts share one, or id"), DryRunQuery),
    responses((status = 204, description = "It is forgotten"), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn remove(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
) -> Result<Answer<StatusCode>, ProblemResponse> {
    Ok(Answer(
        services::datastores::remove(&control, &caller, &name, query.dry_run)
            .await?
            .map(no_content),
    ))
}

/// Shares a datastore with another host, after both have shown that they see the same files and each other's locks.
#[utoipa::path(post, path = "/api/v1/datastores/{datastore}/hosts", tag = "datastores",
    params(("datastore" = String, Path, description = "Its name, HOST:NAME where hosts share one, or id"), DryRunQuery),
    request_body = ShareDatastore,
    responses((status = 201, body = Datastore), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn share(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<ShareDatastore>,
) -> Result<Answer<(StatusCode, Json<Datastore>)>, ProblemResponse> {
    Ok(Answer(
        services::sharing::share(&control, &caller, &name, request, query.dry_run)
            .await?
            .map(created),
    ))
}

/// Takes a host, which has no VM with disks there, from a datastore that others have, too.
#[utoipa::path(delete, path = "/api/v1/datastores/{datastore}/hosts/{host}", tag = "datastores",
    params(("datastore" = String, Path, description = "Its name, HOST:NAME where hosts share one, or id"),
        ("host" = String, Path, description = "The host's name or id"), DryRunQuery),
    responses((status = 204, description = "The host does not have it any more"), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn unshare(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(name, host): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
) -> Result<Answer<StatusCode>, ProblemResponse> {
    Ok(Answer(
        services::sharing::unshare(&control, &caller, &name, &host, query.dry_run)
            .await?
            .map(no_content),
    ))
}

/// Adopts the VMs of a datastore that the inventory does not have, each with a task, or says why not. A dry run gives the
/// same answer without tasks.
#[utoipa::path(post, path = "/api/v1/datastores/{datastore}/adopt", tag = "datastores",
    params(("datastore" = String, Path, description = "Its name, HOST:NAME where hosts share one, or id"), DryRunQuery),
    request_body = AdoptVms, responses((status = 200, body = Adoption), ProblemResponse))]
pub(super) async fn adopt(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<AdoptVms>,
) -> Result<Json<Adoption>, ProblemResponse> {
    Ok(Json(services::adopt::adopt(&control, &caller, &name, request, query.dry_run).await?))
}

/// Scans a datastore, and lists images that belong to no VM, and missing images. Changes nothing.
#[utoipa::path(get, path = "/api/v1/datastores/{datastore}/scan", tag = "datastores",
    params(("datastore" = String, Path, description = "Its name, HOST:NAME where hosts share one, or id")),
    responses((status = 200, body = DatastoreScan), ProblemResponse))]
pub(super) async fn scan(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
) -> Result<Json<DatastoreScan>, ProblemResponse> {
    Ok(Json(services::datastores::scan(&control, &caller, &name).await?))
}
