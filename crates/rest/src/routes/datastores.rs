//! Datastores.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use vmseal_api::datastore::DatastoreScan;
use vmseal_api::model::{Datastore, Page, Plan};
use vmseal_api::request::AddDatastore;
use vmseal_control::services::{self, Services};

use crate::answer::{Answer, created, no_content};
use crate::problem::Refusal;
use crate::request::auth::Authenticated;
use crate::request::body::{self, Named, QueryOf};
use crate::request::dry_run::Intent;
use crate::request::page::PageQuery;

/// Lists the datastores.
#[utoipa::path(get, path = "/api/v1/datastores", tag = "datastores", params(PageQuery),
    responses((status = 200, body = Page<Datastore>), Refusal))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<PageQuery>,
) -> Result<Json<Page<Datastore>>, Refusal> {
    Ok(Json(services::datastores::list(&control, &caller, query.into()).await?))
}

/// Adds a datastore of a host, which marks it and measures it.
#[utoipa::path(post, path = "/api/v1/datastores", tag = "datastores", params(Intent),
    request_body = AddDatastore,
    responses((status = 201, body = Datastore), (status = 200, body = Plan), Refusal))]
pub(super) async fn add(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(intent): QueryOf<Intent>,
    body::Json(request): body::Json<AddDatastore>,
) -> Result<Answer<(StatusCode, Json<Datastore>)>, Refusal> {
    Ok(Answer(
        services::datastores::add(&control, &caller, request, intent.dry_run).await?.map(created),
    ))
}

/// Shows a datastore.
#[utoipa::path(get, path = "/api/v1/datastores/{datastore}", tag = "datastores",
    params(("datastore" = String, Path, description = "Its name, HOST:NAME where hosts share one, or id")),
    responses((status = 200, body = Datastore), Refusal))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
) -> Result<Json<Datastore>, Refusal> {
    Ok(Json(services::datastores::show(&control, &caller, &name).await?))
}

/// Forgets a datastore without disks; what else is on it stays.
#[utoipa::path(delete, path = "/api/v1/datastores/{datastore}", tag = "datastores",
    params(("datastore" = String, Path, description = "Its name, HOST:NAME where hosts share one, or id"), Intent),
    responses((status = 204, description = "It is forgotten"), (status = 200, body = Plan), Refusal))]
pub(super) async fn remove(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    QueryOf(intent): QueryOf<Intent>,
) -> Result<Answer<StatusCode>, Refusal> {
    Ok(Answer(
        services::datastores::remove(&control, &caller, &name, intent.dry_run)
            .await?
            .map(no_content),
    ))
}

/// Looks at what is on a datastore, and says which images belong to no VM, and which are missing. Changes
/// nothing.
#[utoipa::path(get, path = "/api/v1/datastores/{datastore}/scan", tag = "datastores",
    params(("datastore" = String, Path, description = "Its name, HOST:NAME where hosts share one, or id")),
    responses((status = 200, body = DatastoreScan), Refusal))]
pub(super) async fn scan(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
) -> Result<Json<DatastoreScan>, Refusal> {
    Ok(Json(services::datastores::scan(&control, &caller, &name).await?))
}
