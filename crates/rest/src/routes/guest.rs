//! What reaches into a running guest: its screen, and its agent.

use std::sync::Arc;

use axum::extract::State;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::response::Response;
use axum::{Extension, Json};
use vmseal_api::carry::{MESSAGE_MAX, carry};
use vmseal_api::guest::{GuestAnswer, GuestCommand};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_control::services::{self, Services};

use crate::connections::{self, Connection};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, PathSegment};

/// Connects to a guest's screen, which speaks VNC, as a WebSocket of binary messages.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/screen", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id")),
    responses((status = 101, description = "The WebSocket stands"), ProblemResponse))]
pub(super) async fn screen(
    State(control): State<Arc<Services>>,
    PathSegment(name): PathSegment,
    Authenticated(caller): Authenticated,
    connection: Option<Extension<Connection>>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ProblemResponse> {
    let upgrade = upgrade.map_err(|error| {
        let detail = format!("the screen is a WebSocket: {}", error.body_text());
        Problem::new(ErrorCode::InvalidRequest, detail)
    })?;
    let held = connections::hold(connection.as_ref())?;
    // Before the upgrade, so that a refusal is an answer that can be read.
    let screen = services::guest::screen(&control, &caller, &name).await?;
    Ok(upgrade.max_message_size(MESSAGE_MAX).max_frame_size(MESSAGE_MAX).on_upgrade(
        async move |socket| {
            let _held = (held, connection);
            carry(socket, screen).await;
        },
    ))
}

/// Asks the agent in a guest: whether it answers, to run a program, to freeze or thaw its file systems.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/guest", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id")),
    request_body = GuestCommand, responses((status = 200, body = GuestAnswer), ProblemResponse))]
pub(super) async fn ask(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    body::Json(command): body::Json<GuestCommand>,
) -> Result<Json<GuestAnswer>, ProblemResponse> {
    Ok(Json(services::guest::ask(&control, &caller, &name, command).await?))
}
