//! Storage policies.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use vmseal_api::model::{Page, Plan, Policy};
use vmseal_api::request::AddPolicy;
use vmseal_control::services::{self, Services};

use crate::answer::{Answer, created, no_content};
use crate::problem::Refusal;
use crate::request::auth::Authenticated;
use crate::request::body::{self, Named, QueryOf};
use crate::request::dry_run::Intent;
use crate::request::page::PageQuery;

/// Lists the storage policies.
#[utoipa::path(get, path = "/api/v1/policies", tag = "policies", params(PageQuery),
    responses((status = 200, body = Page<Policy>), Refusal))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<PageQuery>,
) -> Result<Json<Page<Policy>>, Refusal> {
    Ok(Json(services::policies::list(&control, &caller, query.into()).await?))
}

/// Adds a storage policy.
#[utoipa::path(post, path = "/api/v1/policies", tag = "policies", params(Intent),
    request_body = AddPolicy,
    responses((status = 201, body = Policy), (status = 200, body = Plan), Refusal))]
pub(super) async fn add(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(intent): QueryOf<Intent>,
    body::Json(request): body::Json<AddPolicy>,
) -> Result<Answer<(StatusCode, Json<Policy>)>, Refusal> {
    Ok(Answer(
        services::policies::add(&control, &caller, request, intent.dry_run).await?.map(created),
    ))
}

/// Shows a storage policy.
#[utoipa::path(get, path = "/api/v1/policies/{policy}", tag = "policies",
    params(("policy" = String, Path, description = "Its name or id")),
    responses((status = 200, body = Policy), Refusal))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
) -> Result<Json<Policy>, Refusal> {
    Ok(Json(services::policies::show(&control, &caller, &name).await?))
}

/// Removes a storage policy that no VM has.
#[utoipa::path(delete, path = "/api/v1/policies/{policy}", tag = "policies",
    params(("policy" = String, Path, description = "Its name or id"), Intent),
    responses((status = 204, description = "It is removed"), (status = 200, body = Plan), Refusal))]
pub(super) async fn remove(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    QueryOf(intent): QueryOf<Intent>,
) -> Result<Answer<StatusCode>, Refusal> {
    Ok(Answer(
        services::policies::remove(&control, &caller, &name, intent.dry_run).await?.map(no_content),
    ))
}
