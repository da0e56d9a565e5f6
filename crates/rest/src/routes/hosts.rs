//! Hosts.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};
use vmseal_api::model::{Host, JoinToken, Page, Plan};
use vmseal_api::request::{ChangeHost, DrainHost, JoinHost, Joined, UndrainHost};
use vmseal_control::services::{self, Services};

use crate::answer::{Answer, HostOrPlan, created, no_content};
use crate::connections::Connection;
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, EmptyBody, OptionalJson, PathSegment, QueryOf};
use crate::request::dry_run::DryRunQuery;
use crate::request::page::PageQuery;

/// Lists the hosts.
#[utoipa::path(get, path = "/api/v1/hosts", tag = "hosts", params(PageQuery),
    responses((status = 200, body = Page<Host>), ProblemResponse))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<PageQuery>,
) -> Result<Json<Page<Host>>, ProblemResponse> {
    Ok(Json(services::hosts::list(&control, &caller, query.into()).await?))
}

/// Shows a host.
#[utoipa::path(get, path = "/api/v1/hosts/{host}", tag = "hosts",
    params(("host" = String, Path, description = "Its name or id")),
    responses((status = 200, body = Host), ProblemResponse))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
) -> Result<Json<Host>, ProblemResponse> {
    Ok(Json(services::hosts::show(&control, &caller, &name).await?))
}

/// Changes the address of a host's agent. The host keeps its certificate, so another machine is not accepted as it.
#[utoipa::path(patch, path = "/api/v1/hosts/{host}", tag = "hosts",
    params(("host" = String, Path, description = "Its name or id"), DryRunQuery), request_body = ChangeHost,
    responses((status = 200, body = HostOrPlan), ProblemResponse))]
pub(super) async fn change(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<ChangeHost>,
) -> Result<Answer<Json<Host>>, ProblemResponse> {
    Ok(Answer(
        services::hosts::change(&control, &caller, &name, request, query.dry_run).await?.map(Json),
    ))
}

/// Has no more VMs placed on a host, and those that run there moved or stopped, as each says. It goes on after the answer: the host
/// shows how far it is.
#[utoipa::path(post, path = "/api/v1/hosts/{host}/drain", tag = "hosts",
    params(("host" = String, Path, description = "Its name or id"), DryRunQuery), request_body = Option<DrainHost>,
    responses((status = 200, body = HostOrPlan), ProblemResponse))]
pub(super) async fn drain(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<DrainHost>,
) -> Result<Answer<Json<Host>>, ProblemResponse> {
    Ok(Answer(
        services::drain::drain(&control, &caller, &name, request, query.dry_run).await?.map(Json),
    ))
}

/// Has VMs placed on a host again. None is moved back.
#[utoipa::path(post, path = "/api/v1/hosts/{host}/undrain", tag = "hosts",
    params(("host" = String, Path, description = "Its name or id"), DryRunQuery), request_body = Option<UndrainHost>,
    responses((status = 200, body = HostOrPlan), ProblemResponse))]
pub(super) async fn undrain(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(request): OptionalJson<UndrainHost>,
) -> Result<Answer<Json<Host>>, ProblemResponse> {
    Ok(Answer(
        services::drain::undrain(&control, &caller, &name, request, query.dry_run).await?.map(Json),
    ))
}

/// Removes a host that has neither datastores nor VMs.
#[utoipa::path(delete, path = "/api/v1/hosts/{host}", tag = "hosts",
    params(("host" = String, Path, description = "Its name or id"), DryRunQuery),
    responses((status = 204, description = "It is removed"), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn remove(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
) -> Result<Answer<StatusCode>, ProblemResponse> {
    Ok(Answer(
        services::hosts::remove(&control, &caller, &name, query.dry_run).await?.map(no_content),
    ))
}

/// Makes a one-time token that lets a machine join as a host.
#[utoipa::path(post, path = "/api/v1/hosts/tokens", tag = "hosts", params(DryRunQuery),
    responses((status = 201, body = JoinToken), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn make_token(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Answer<(StatusCode, Json<JoinToken>)>, ProblemResponse> {
    Ok(Answer(services::hosts::make_token(&control, &caller, query.dry_run).await?.map(created)))
}

/// Joins as a host; the token in the request is what authorizes it.
#[utoipa::path(post, path = "/api/v1/hosts/join", tag = "hosts", security(()),
    request_body = JoinHost, responses((status = 201, body = Joined), ProblemResponse))]
pub(super) async fn join(
    State(control): State<Arc<Services>>,
    connection: Option<Extension<Connection>>,
    body::Json(request): body::Json<JoinHost>,
) -> Result<(StatusCode, Json<Joined>), ProblemResponse> {
    let source = connection.map(|Extension(connection)| connection.source());
    Ok(created(services::hosts::join(&control, request, source).await?))
}
