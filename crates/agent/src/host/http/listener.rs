//! The agent's listening socket with TLS: connections are served once their handshakes are done.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use vmseal_log::Seldom;

/// Connections that may be in their TLS handshake; strangers get no further.
const HANDSHAKES_MAX: usize = 32;

/// The longest that a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait after the kernel could not accept (too many open files).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Accepted connections that may wait to be served.
const ACCEPTED_MAX: usize = 16;

/// Connections whose TLS handshake is done.
pub struct TlsListener {
    accepted: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
    pub(super) address: SocketAddr,
}

impl TlsListener {
    /// Accepts from `listener`. Handshakes are made beside each other, so that a slow one holds up none.
    ///
    /// # Errors
    /// When the listener has no address.
    pub fn new(listener: TcpListener, tls: Arc<rustls::ServerConfig>) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let (sender, accepted) = mpsc::channel(ACCEPTED_MAX);
        tokio::spawn(accept(listener, TlsAcceptor::from(tls), sender));
        Ok(Self { accepted, address })
    }
}

/// What is logged of strangers.
#[derive(Default)]
struct Told {
    refused: Seldom,
    slow: Seldom,
}

async fn accept(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    accepted: mpsc::Sender<(TlsStream<TcpStream>, SocketAddr)>,
) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    let told = Arc::new(Told::default());
    loop {
        let connection = tokio::select! {
            connection = listener.accept() => connection,
            () = accepted.closed() => return,
        };
        let (stream, peer) = match connection {
            Ok(connection) => connection,
            Err(error) => {
                tracing::warn!(%error, "a connection cannot be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = handshakes.clone().acquire_owned().await else { return };
        let (acceptor, accepted, told) = (acceptor.clone(), accepted.clone(), told.clone());
        tokio::spawn(async move {
            let _permit = permit;
            // Key strokes wait for nobody; a socket that refuses this works all the same.
            let _ = stream.set_nodelay(true);
            match timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
                Ok(Ok(stream)) => {
                    // The server may be shutting down.
                    let _ = accepted.send((stream, peer)).await;
                }
                Ok(Err(error)) => {
                    if let Some(unlogged) = told.refused.due() {
                        tracing::info!(%peer, %error, unlogged, "a connection is refused");
                    }
                }
                Err(_) => {
                    if let Some(unlogged) = told.slow.due() {
                        tracing::info!(%peer, unlogged, "a connection's handshake takes too long");
                    }
                }
            }
        });
    }
}

impl axum::serve::Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.accepted.recv().await {
            Some(connection) => connection,
            // The accepting task lives as long as this receiver.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}
