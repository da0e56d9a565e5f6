//! Storage policies.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use vmseal_api::model::{Page, Plan, Policy};
use vmseal_api::request::{AddPolicy, SetPolicy};
use vmseal_control::services::{self, Services};

use crate::answer::{Answer, PolicyOrPlan, created, no_content};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, PathSegment, QueryOf};
use crate::request::dry_run::DryRunQuery;
use crate::request::page::PageQuery;

/// Lists the storage policies.
#[utoipa::path(get, path = "/api/v1/policies", tag = "policies", params(PageQuery),
    responses((status = 200, body = Page<Policy>), ProblemResponse))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<PageQuery>,
) -> Result<Json<Page<Policy>>, ProblemResponse> {
    Ok(Json(services::policies::list(&control, &caller, query.into()).await?))
}

/// Adds a storage policy.
#[utoipa::path(post, path = "/api/v1/policies", tag = "policies", params(DryRunQuery),
    request_body = AddPolicy,
    responses((status = 201, body = Policy), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn add(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<AddPolicy>,
) -> Result<Answer<(StatusCode, Json<Policy>)>, ProblemResponse> {
    Ok(Answer(
        services::policies::add(&control, &caller, request, query.dry_run).await?.map(created),
    ))
}

/// Shows a storage policy.
#[utoipa::path(get, path = "/api/v1/policies/{policy}", tag = "policies",
    params(("policy" = String, Path, description = "Its name or id")),
    responses((status = 200, body = Policy), ProblemResponse))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
) -> Result<Json<Policy>, ProblemResponse> {
    Ok(Json(services::policies::show(&control, &caller, &name).await?))
}

/// Changes a storage policy, with the limits and caches of VMs that have it, which take effect at their next start. A dry
/// run names these VMs, and what each would need.
#[utoipa::path(patch, path = "/api/v1/policies/{policy}", tag = "policies",
    params(("policy" = String, Path, description = "Its name or id"), DryRunQuery), request_body = SetPolicy,
    responses((status = 200, body = PolicyOrPlan), ProblemResponse))]
pub(super) async fn set(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<SetPolicy>,
) -> Result<Answer<Json<Policy>>, ProblemResponse> {
    Ok(Answer(
        services::set_policy::set(&control, &caller, &name, request, query.dry_run)
            .await?
            .map(Json),
    ))
}

/// Removes a storage policy that no VM has.
#[utoipa::path(delete, path = "/api/v1/policies/{policy}", tag = "policies",
    params(("policy" = String, Path, description = "Its name or id"), DryRunQuery),
    responses((status = 204, description = "It is removed"), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn remove(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
) -> Result<Answer<StatusCode>, ProblemResponse> {
    Ok(Answer(
        services::policies::remove(&control, &caller, &name, query.dry_run).await?.map(no_content),
    ))
}
