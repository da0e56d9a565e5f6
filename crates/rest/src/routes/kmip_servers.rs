//! The servers of a KMIP provider: adds, removes, and moves them, and changes their addresses.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::kmip::{AddKmipServer, MoveKmipServer, SetKmipServer};
use vmseal_api::model::Provider;
use vmseal_control::services::{self, Services};

use crate::answer::{Answer, ProviderOrPlan};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, PathSegment, QueryOf, TwoPathSegments};
use crate::request::dry_run::DryRunQuery;

/// Adds a server to a KMIP provider, as the last in the order; its certificate must be trusted afterwards.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/servers", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = AddKmipServer, responses((status = 200, body = ProviderOrPlan), ProblemResponse))]
pub(super) async fn add(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<AddKmipServer>,
) -> Result<Answer<Json<Provider>>, ProblemResponse> {
    Ok(Answer(
        services::kmip::add_server(&control, &caller, &name, request, query.dry_run)
            .await?
            .map(Json),
    ))
}

/// Removes a server from a KMIP provider; its keys stay where they are.
#[utoipa::path(delete, path = "/api/v1/providers/{provider}/servers/{server}", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"),
           ("server" = String, Path, description = "The server's alias"), DryRunQuery),
    responses((status = 200, body = ProviderOrPlan), ProblemResponse))]
pub(super) async fn remove(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(name, alias): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
) -> Result<Answer<Json<Provider>>, ProblemResponse> {
    Ok(Answer(
        services::kmip::remove_server(&control, &caller, &name, &alias, query.dry_run)
            .await?
            .map(Json),
    ))
}

/// Changes the address of a server; its trusted certificates stay.
#[utoipa::path(put, path = "/api/v1/providers/{provider}/servers/{server}", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"),
           ("server" = String, Path, description = "The server's alias"), DryRunQuery),
    request_body = SetKmipServer, responses((status = 200, body = ProviderOrPlan), ProblemResponse))]
pub(super) async fn set(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(name, alias): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<SetKmipServer>,
) -> Result<Answer<Json<Provider>>, ProblemResponse> {
    Ok(Answer(
        services::kmip::set_server(&control, &caller, &name, &alias, request, query.dry_run)
            .await?
            .map(Json),
    ))
}

/// Moves a server in the order in which vmseal asks them.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/servers/{server}/move", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"),
           ("server" = String, Path, description = "The server's alias"), DryRunQuery),
    request_body = MoveKmipServer, responses((status = 200, body = ProviderOrPlan), ProblemResponse))]
pub(super) async fn move_to(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(name, alias): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<MoveKmipServer>,
) -> Result<Answer<Json<Provider>>, ProblemResponse> {
    Ok(Answer(
        services::kmip::move_server(&control, &caller, &name, &alias, request, query.dry_run)
            .await?
            .map(Json),
    ))
}
