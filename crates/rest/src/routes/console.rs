//! A guest's serial console: a WebSocket to the user, joined to the host's.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::response::Response;
use serde::Deserialize;
use utoipa::IntoParams;
use vmseal_api::carry::{MESSAGE_MAX, carry};
use vmseal_api::console::ConsoleClaim;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_control::services::{self, Services};

use crate::connections::{self, Connection};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{PathSegment, QueryOf};

/// Whether a console in use is to be taken over.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ConsoleQuery {
    /// Take it over from whoever has it, whose WebSocket is closed with code 4000; else it is refused.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    force: bool,
}

/// Opens a guest's serial console as a WebSocket of binary messages; one user has it at a time.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/console", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), ConsoleQuery),
    responses((status = 101, description = "The WebSocket stands"), ProblemResponse))]
pub(super) async fn open(
    State(control): State<Arc<Services>>,
    PathSegment(name): PathSegment,
    Authenticated(caller): Authenticated,
    connection: Option<Extension<Connection>>,
    QueryOf(query): QueryOf<ConsoleQuery>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ProblemResponse> {
    let upgrade = upgrade.map_err(|error| {
        let detail = format!("the console is a WebSocket: {}", error.body_text());
        Problem::new(ErrorCode::InvalidRequest, detail)
    })?;
    let held = connections::hold(connection.as_ref())?;
    // Before the upgrade, so that a refusal is an answer that can be read.
    let claim = if query.force { ConsoleClaim::TakeOver } else { ConsoleClaim::IfFree };
    let console = services::vms::console(&control, &caller, &name, claim).await?;
    Ok(upgrade.max_message_size(MESSAGE_MAX).max_frame_size(MESSAGE_MAX).on_upgrade(
        async move |socket| {
            let _held = (held, connection);
            carry(socket, console).await;
        },
    ))
}
