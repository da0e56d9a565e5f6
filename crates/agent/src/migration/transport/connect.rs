//! The connecting end of a session.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use vmseal_seal::wire::{ACCEPTED_LEN, ANSWER_LEN, Connecting, Ends, Spec};

use super::error::TransportError;
use super::session::{Opened, Session, plain_socket};
use super::{CONNECT_TIMEOUT, EXAMINE_TIMEOUT, HANDSHAKE_TIMEOUT, socket};

/// Connects all streams of this migration to the host that listens at an address, and returns when that one has taken them all.
///
/// # Errors
/// [`TransportError`]; the spec is used up in any case.
pub async fn connect(spec: Spec, to: SocketAddr) -> Result<Session, TransportError> {
    let streams = (0..spec.streams()).map(|stream| open(&spec, stream, to));
    let opened = try_join_all(streams).await?;
    Ok(Session::new(spec.migration(), opened))
}

/// Sees whether the port of another host can be connected to, before a migration begins. The connection is closed without a word: its
/// listener knows by that what it was for.
///
/// # Errors
/// Why it cannot.
pub async fn examine(to: SocketAddr) -> io::Result<()> {
    connected(to, EXAMINE_TIMEOUT).await.map(drop)
}

async fn connected(to: SocketAddr, within: Duration) -> io::Result<TcpStream> {
    timeout(within, TcpStream::connect(to)).await.unwrap_or_else(|_| {
        let silent = format!("nothing has answered within {} s", within.as_secs());
        Err(io::Error::new(ErrorKind::TimedOut, silent))
    })
}

async fn open(spec: &Spec, stream: u16, to: SocketAddr) -> Result<Opened, TransportError> {
    let mut socket = connected(to, CONNECT_TIMEOUT)
        .await
        .map_err(|error| TransportError::Connect { address: to, error: Arc::new(error) })?;
    socket::prepare(&socket).map_err(TransportError::setup(stream))?;
    let shaken = timeout(HANDSHAKE_TIMEOUT, handshake(spec, stream, &mut socket)).await;
    let ends = shaken.map_err(|_| TransportError::HandshakeTimeout { stream })??;
    let socket = plain_socket(socket).map_err(TransportError::setup(stream))?;
    Ok(Opened { socket, ends })
}

async fn handshake(
    spec: &Spec,
    stream: u16,
    socket: &mut TcpStream,
) -> Result<Ends, TransportError> {
    let lost = |error: std::io::Error| match error.kind() {
        // It says nothing to who it does not know.
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            TransportError::Refused { stream }
        }
        _ => TransportError::of_connection(stream, error),
    };
    let wrong = TransportError::hello;
    let (connecting, hello) = Connecting::new(spec, stream).map_err(wrong(stream))?;
    socket.write_all(&hello).await.map_err(lost)?;
    let mut answer = [0; ANSWER_LEN];
    socket.read_exact(&mut answer).await.map_err(lost)?;
    let (proving, proof) = connecting.answered(&answer).map_err(wrong(stream))?;
    socket.write_all(&proof).await.map_err(lost)?;
    let mut first = [0; ACCEPTED_LEN];
    socket.read_exact(&mut first).await.map_err(lost)?;
    proving.accepted(first).map_err(wrong(stream))
}
