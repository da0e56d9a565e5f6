//! What the server and its hosts log.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::model::LogLevel;
use vmseal_api::problem::Problem;
use vmseal_api::request::SetLogLevel;
use vmseal_log::{Levels, LevelsError};

use super::auth::User;
use super::body::{self, Named};
use super::problem::Refusal;
use super::{App, hosts};
use crate::store::events::NewEvent;

fn shown() -> LogLevel {
    LogLevel { levels: vmseal_log::levels().to_string(), silent: Vec::new() }
}

fn parse(request: &SetLogLevel) -> Result<Levels, Problem> {
    let invalid = |error: LevelsError| Problem::invalid("levels", error.to_string());
    request.levels.parse().map_err(invalid)
}

/// Shows what the server logs.
#[utoipa::path(get, path = "/api/v1/log-level", tag = "server",
    responses((status = 200, body = LogLevel), Refusal))]
pub(super) async fn show() -> Json<LogLevel> {
    Json(shown())
}

/// Changes what the server logs, until its process ends.
#[utoipa::path(put, path = "/api/v1/log-level", tag = "server",
    request_body = SetLogLevel, responses((status = 200, body = LogLevel), Refusal))]
pub(super) async fn set(
    State(app): State<Arc<App>>,
    User(actor): User,
    body::Json(request): body::Json<SetLogLevel>,
) -> Result<Json<LogLevel>, Refusal> {
    let levels = parse(&request)?;
    tell(&app, "server.log-level-set", &actor, "server", &levels).await?;
    vmseal_log::set_levels(levels);
    Ok(Json(shown()))
}

/// Shows what a host's agent logs.
#[utoipa::path(get, path = "/api/v1/hosts/{host}/log-level", tag = "hosts",
    params(("host" = String, Path, description = "Its name or id")),
    responses((status = 200, body = LogLevel), Refusal))]
pub(super) async fn show_host(
    State(app): State<Arc<App>>,
    Named(name): Named,
) -> Result<Json<LogLevel>, Refusal> {
    let host = hosts::find(&app, &name).await?;
    Ok(Json(app.hosts.connected(host.id)?.log_level().await?))
}

/// Changes what a host's agent and the filters of its VMs log, until the agent's process ends.
#[utoipa::path(put, path = "/api/v1/hosts/{host}/log-level", tag = "hosts",
    params(("host" = String, Path, description = "Its name or id")),
    request_body = SetLogLevel, responses((status = 200, body = LogLevel), Refusal))]
pub(super) async fn set_host(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    body::Json(request): body::Json<SetLogLevel>,
) -> Result<Json<LogLevel>, Refusal> {
    let levels = parse(&request)?;
    let host = hosts::find(&app, &name).await?;
    let level = app.hosts.connected(host.id)?.set_log_level(levels.to_string()).await?;
    tell(&app, "host.log-level-set", &actor, &host.name, &levels).await?;
    Ok(Json(level))
}

async fn tell(
    app: &App,
    kind: &str,
    actor: &str,
    target: &str,
    levels: &Levels,
) -> Result<(), Refusal> {
    let mut write = app.store.write().await?;
    write.event(NewEvent { kind, actor, target, detail: &levels.to_string() }).await?;
    Ok(write.commit().await?)
}
