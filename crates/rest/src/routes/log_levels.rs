//! The log levels of the server and its hosts.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::log_level::LogLevel;
use vmseal_api::request::SetLogLevel;
use vmseal_control::services::{self, Services};

use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, PathSegment};

/// Shows the log levels of the server.
#[utoipa::path(get, path = "/api/v1/log-level", tag = "server",
    responses((status = 200, body = LogLevel), ProblemResponse))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
) -> Result<Json<LogLevel>, ProblemResponse> {
    Ok(Json(services::log_levels::show(&control, &caller).await?))
}

/// Changes the log levels of the server, until its process ends.
#[utoipa::path(put, path = "/api/v1/log-level", tag = "server",
    request_body = SetLogLevel, responses((status = 200, body = LogLevel), ProblemResponse))]
pub(super) async fn set(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    body::Json(request): body::Json<SetLogLevel>,
) -> Result<Json<LogLevel>, ProblemResponse> {
    Ok(Json(services::log_levels::set(&control, &caller, request).await?))
}

/// Shows the log levels of a host's agent.
#[utoipa::path(get, path = "/api/v1/hosts/{host}/log-level", tag = "hosts",
    params(("host" = String, Path, description = "Its name or id")),
    responses((status = 200, body = LogLevel), ProblemResponse))]
pub(super) async fn show_host(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
) -> Result<Json<LogLevel>, ProblemResponse> {
    Ok(Json(services::log_levels::show_host(&control, &caller, &name).await?))
}

/// Changes the log levels of a host's agent and of the filters of its VMs, until the agent's process ends.
#[utoipa::path(put, path = "/api/v1/hosts/{host}/log-level", tag = "hosts",
    params(("host" = String, Path, description = "Its name or id")),
    request_body = SetLogLevel, responses((status = 200, body = LogLevel), ProblemResponse))]
pub(super) async fn set_host(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    body::Json(request): body::Json<SetLogLevel>,
) -> Result<Json<LogLevel>, ProblemResponse> {
    Ok(Json(services::log_levels::set_host(&control, &caller, &name, request).await?))
}
