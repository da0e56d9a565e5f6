//! Other control planes.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use vmseal_api::model::{Page, Plan};
use vmseal_api::remote::{AddRemote, LookAtRemote, Remote, RemoteChecked, RemoteShown};
use vmseal_control::services::{self, Services};

use crate::answer::{Answer, created, no_content};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, PathSegment, QueryOf};
use crate::request::dry_run::DryRunQuery;
use crate::request::page::PageQuery;

/// How a remote is removed.
#[derive(Clone, Copy, Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct RemoveQuery {
    /// Check the request and answer what it would do, without doing anything.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    dry_run: bool,
    /// Remove it while VMs are on their way there: it is gone for good, with its hosts, and the VMs go on here.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    force: bool,
}

/// Lists the control planes that this one knows.
#[utoipa::path(get, path = "/api/v1/remotes", tag = "remotes", params(PageQuery),
    responses((status = 200, body = Page<Remote>), ProblemResponse))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<PageQuery>,
) -> Result<Json<Page<Remote>>, ProblemResponse> {
    Ok(Json(services::remotes::list(&control, &caller, query.into()).await?))
}

/// Shows the certificate of the authority that the server of another control plane shows now. It is not trusted by that.
#[utoipa::path(post, path = "/api/v1/remote-certificate", tag = "remotes", request_body = LookAtRemote,
    responses((status = 200, body = RemoteShown), ProblemResponse))]
pub(super) async fn look(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    body::Json(request): body::Json<LookAtRemote>,
) -> Result<Json<RemoteShown>, ProblemResponse> {
    Ok(Json(services::remotes::look(&control, &caller, request).await?))
}

/// Adds another control plane: its server must show the authority with this fingerprint.
#[utoipa::path(post, path = "/api/v1/remotes", tag = "remotes", params(DryRunQuery),
    request_body = AddRemote,
    responses((status = 201, body = Remote), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn add(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<AddRemote>,
) -> Result<Answer<(StatusCode, Json<Remote>)>, ProblemResponse> {
    let added = services::remotes::add(&control, &caller, request, query.dry_run).await?;
    Ok(Answer(added.map(created)))
}

/// Shows another control plane.
#[utoipa::path(get, path = "/api/v1/remotes/{remote}", tag = "remotes",
    params(("remote" = String, Path, description = "Its name or id")),
    responses((status = 200, body = Remote), ProblemResponse))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
) -> Result<Json<Remote>, ProblemResponse> {
    Ok(Json(services::remotes::show(&control, &caller, &name).await?))
}

/// Asks another control plane whether it answers, and takes VMs.
#[utoipa::path(get, path = "/api/v1/remotes/{remote}/check", tag = "remotes",
    params(("remote" = String, Path, description = "Its name or id")),
    responses((status = 200, body = RemoteChecked), ProblemResponse))]
pub(super) async fn check(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
) -> Result<Json<RemoteChecked>, ProblemResponse> {
    Ok(Json(services::remotes::check(&control, &caller, &name).await?))
}

/// Removes another control plane.
#[utoipa::path(delete, path = "/api/v1/remotes/{remote}", tag = "remotes",
    params(("remote" = String, Path, description = "Its name or id"), RemoveQuery),
    responses((status = 204, description = "It is removed"), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn remove(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<RemoveQuery>,
) -> Result<Answer<StatusCode>, ProblemResponse> {
    let RemoveQuery { dry_run, force } = query;
    let removed = services::remotes::remove(&control, &caller, &name, force, dry_run).await?;
    Ok(Answer(removed.map(no_content)))
}
