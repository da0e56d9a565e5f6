//! A guest's serial console: a WebSocket to the user, joined to the host's.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade};
use axum::response::Response;
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use utoipa::IntoParams;
use vmseal_api::console::{
    ConsoleClaim, ConsoleStream, TAKEN_OVER, TAKEN_OVER_CODE, is_taken_over,
};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_control::services::{self, Services};

use crate::connections::{self, Connection};
use crate::problem::Refusal;
use crate::request::auth::Authenticated;
use crate::request::body::{Named, QueryOf};

/// The longest message from a user, in bytes: what is pasted at once.
const MESSAGE_MAX: usize = 64 * 1024;

/// What is sent to a user at once, in bytes.
const CHUNK: usize = 16 * 1024;

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
    responses((status = 101, description = "The WebSocket stands"), Refusal))]
pub(super) async fn open(
    State(control): State<Arc<Services>>,
    Named(name): Named,
    Authenticated(caller): Authenticated,
    connection: Option<Extension<Connection>>,
    QueryOf(query): QueryOf<ConsoleQuery>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Refusal> {
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
            join(socket, console).await;
        },
    ))
}

/// Carries bytes until either side ends.
async fn join(mut socket: WebSocket, console: ConsoleStream) {
    let (mut from_guest, mut to_guest) = tokio::io::split(console);
    let mut buffer = vec![0; CHUNK];
    let mut why = None;
    loop {
        tokio::select! {
            read = from_guest.read(&mut buffer) => match read {
                Ok(count) if count > 0 => {
                    let message = Message::Binary(buffer[..count].to_vec().into());
                    if socket.send(message).await.is_err() {
                        break;
                    }
                }
                Err(error) if is_taken_over(&error) => {
                    why = Some(CloseFrame { code: TAKEN_OVER_CODE, reason: TAKEN_OVER.into() });
                    break;
                }
                _ => break,
            },
            message = socket.recv() => match message {
                Some(Ok(Message::Binary(bytes))) => {
                    if to_guest.write_all(&bytes).await.is_err() || to_guest.flush().await.is_err() {
                        break;
                    }
                }
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                _ => break,
            },
        }
    }
    let _ = socket.send(Message::Close(why)).await;
}
