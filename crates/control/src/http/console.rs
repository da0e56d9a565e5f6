//! A guest's serial console: a WebSocket to the user, joined to the host's.

use std::sync::Arc;

use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::response::Response;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use vmseal_api::host::ConsoleStream;
use vmseal_api::problem::{ErrorCode, Problem};

use super::App;
use super::auth::User;
use super::body::Named;
use super::problem::Refusal;
use super::vms::find;
use crate::store::events::NewEvent;

/// The longest message from a user, in bytes: what is pasted at once.
const MESSAGE_MAX: usize = 64 * 1024;

/// What is sent to a user at once, in bytes.
const CHUNK: usize = 16 * 1024;

/// Opens a guest's serial console as a WebSocket of binary messages.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/console", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id")),
    responses((status = 101, description = "The WebSocket stands"), Refusal))]
pub(super) async fn open(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Refusal> {
    let upgrade = upgrade.map_err(|error| {
        let detail = format!("the console is a WebSocket: {}", error.body_text());
        Problem::new(ErrorCode::InvalidRequest, detail)
    })?;
    let (vm, _) = find(&app, &name).await?;
    // Before the upgrade, so that a refusal is an answer that can be read.
    let console = app.hosts.connected(vm.host)?.console(vm.id).await?;
    let mut write = app.store.write().await?;
    let (kind, target) = ("vm.console-opened", vm.name.as_str());
    write.event(NewEvent { kind, actor: &actor, target, detail: "its serial line" }).await?;
    write.commit().await?;
    Ok(upgrade
        .max_message_size(MESSAGE_MAX)
        .max_frame_size(MESSAGE_MAX)
        .on_upgrade(|socket| join(socket, console)))
}

/// Carries bytes until either side ends.
async fn join(mut socket: WebSocket, console: ConsoleStream) {
    let (mut from_guest, mut to_guest) = tokio::io::split(console);
    let mut buffer = vec![0; CHUNK];
    loop {
        tokio::select! {
            read = from_guest.read(&mut buffer) => match read {
                Ok(count) if count > 0 => {
                    let message = Message::Binary(buffer[..count].to_vec().into());
                    if socket.send(message).await.is_err() {
                        break;
                    }
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
    let _ = socket.send(Message::Close(None)).await;
}
