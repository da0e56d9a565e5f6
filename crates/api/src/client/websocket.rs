//! A guest's console, or a disk's NBD, over a WebSocket: binary frames both ways.

use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::duplex;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::http::header::AUTHORIZATION;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use zeroize::Zeroizing;

use super::exchange::{CONNECT_TIMEOUT, Peer};
use crate::carry::{CarryEnd, MESSAGE_MAX, carry};
use crate::console::{self, ConsoleStream};
use crate::host::ContractRange;
use crate::host::version::CONTRACT_HEADER;
use crate::problem::{ErrorCode, Problem};
use crate::request_id;

/// The buffer of each direction, in bytes: a screen or two.
const BUFFER: usize = 16 * 1024;

/// The address of a WebSocket.
pub(super) struct Address<'a> {
    /// The other end, as messages name it.
    pub peer: Peer<'a>,
    /// `host:port` to connect to.
    pub socket: String,
    /// The name in the other end's certificate.
    pub server_name: ServerName<'static>,
    /// The path.
    pub url: String,
    /// `Authorization`, where one is needed.
    pub authorization: Option<Zeroizing<String>>,
    /// The versions of the contract that are spoken, where an agent is called.
    pub contract: Option<ContractRange>,
}

/// Connects to a console; returns both directions.
pub(super) async fn open(
    address: Address<'_>,
    tls: Arc<ClientConfig>,
) -> Result<ConsoleStream, Problem> {
    let socket = connected(address, tls).await?;
    let (mut ours, ending, theirs) = console::pair(BUFFER);
    tokio::spawn(async move {
        if carry(socket, &mut ours).await == CarryEnd::TakenOver {
            ending.taken_over();
        }
    });
    Ok(theirs)
}

/// Connects to a disk; returns both directions, which do not wait for each other.
pub(super) async fn open_disk(
    address: Address<'_>,
    tls: Arc<ClientConfig>,
) -> Result<ConsoleStream, Problem> {
    let socket = connected(address, tls).await?;
    let (ours, theirs) = duplex(MESSAGE_MAX);
    tokio::spawn(carry(socket, ours));
    Ok(Box::new(theirs))
}

type Socket = WebSocketStream<TlsStream<TcpStream>>;

async fn connected(address: Address<'_>, tls: Arc<ClientConfig>) -> Result<Socket, Problem> {
    let peer = Peer(address.peer.0);
    match tokio::time::timeout(CONNECT_TIMEOUT, connect(address, tls)).await {
        Ok(connected) => connected,
        Err(_) => Err(peer.unreachable(&"it took too long")),
    }
}

async fn connect(address: Address<'_>, tls: Arc<ClientConfig>) -> Result<Socket, Problem> {
    let peer = &address.peer;
    let tcp =
        TcpStream::connect(&address.socket).await.map_err(|error| peer.unreachable(&error))?;
    // Key strokes are small and must not wait. If the socket refuses this it still works.
    let _ = tcp.set_nodelay(true);
    let stream = TlsConnector::from(tls)
        .connect(address.server_name.clone(), tcp)
        .await
        .map_err(|error| peer.unreachable(&error))?;
    let mut request =
        address.url.as_str().into_client_request().map_err(|error| peer.unreachable(&error))?;
    if let Some(authorization) = &address.authorization {
        let value = authorization.as_str().try_into().map_err(|_| {
            Problem::new(
                ErrorCode::Unauthenticated,
                "the token has characters that are not allowed in a token",
            )
        })?;
        request.headers_mut().insert(AUTHORIZATION, value);
    }
    if let Some(contract) = address.contract.and_then(|range| range.to_header().try_into().ok()) {
        request.headers_mut().insert(CONTRACT_HEADER, contract);
    }
    if let Some(value) = request_id::current().and_then(|id| id.as_str().try_into().ok()) {
        request.headers_mut().insert(request_id::HEADER, value);
    }
    let limits = WebSocketConfig::default()
        .max_message_size(Some(MESSAGE_MAX))
        .max_frame_size(Some(MESSAGE_MAX));
    let (socket, _) = tokio_tungstenite::client_async_with_config(request, stream, Some(limits))
        .await
        .map_err(|error| refusal(peer, error))?;
    Ok(socket)
}

/// A server that refuses the upgrade answers with a problem.
fn refusal(peer: &Peer<'_>, error: Error) -> Problem {
    if let Error::Http(answer) = &error
        && let Some(Ok(problem)) = answer.body().as_deref().map(serde_json::from_slice)
    {
        return problem;
    }
    match error {
        Error::Http(_) => peer.unreachable(&error),
        _ => peer.cut_off(&error),
    }
}
