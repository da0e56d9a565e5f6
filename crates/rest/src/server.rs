//! The server process: the control plane and its API, served over TLS.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use vmseal_control::control_plane::{ControlPlane, StartError};
use vmseal_control::setup::identity::Identity;
use vmseal_control::setup::initialise::{InitialiseError, certificate_names, initialise};

use crate::connections::{AUTHENTICATION_TIMEOUT, Connection, ConnectionLimits};
use crate::routes::router;

/// How long a client may take for its TLS handshake, and for a request's header.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The maximum length of a request header, in bytes.
const HEADER_MAX: usize = 32 * 1024;

/// How long requests in flight may take when the server stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// The delay before the next attempt when a connection cannot be accepted (no descriptors left).
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(200);

/// How to run a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Its data directory.
    pub data_dir: PathBuf,
    /// The address to listen on; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Names and addresses for its certificate, beside those of `listen`.
    pub names: Vec<String>,
    /// The directory of credentials (systemd's `$CREDENTIALS_DIRECTORY`).
    pub credentials_dir: Option<PathBuf>,
    /// How many days events are kept.
    pub keep_events_days: u32,
    /// Where each step of a task is held until its file is removed, for tests.
    pub hold_steps: Option<PathBuf>,
}

/// Why the server cannot run.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The data directory.
    #[error(transparent)]
    Initialise(#[from] InitialiseError),
    /// The control plane.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The listening socket.
    #[error("cannot listen on {0}: {1}")]
    Listen(SocketAddr, std::io::Error),
    /// TLS cannot be set up.
    #[error("TLS cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
    /// Signals cannot be waited for.
    #[error("cannot wait for signals: {0}")]
    Signals(std::io::Error),
}

/// A running server.
pub struct Server {
    address: SocketAddr,
    control: ControlPlane,
    stop: watch::Sender<bool>,
    accepting: JoinHandle<()>,
}

impl Server {
    /// Starts a server. The process should have hardened itself ([`vmseal_secret::process::harden`]).
    ///
    /// # Errors
    /// [`ServerError`].
    pub async fn start(options: ServerOptions) -> Result<Self, ServerError> {
        let names = certificate_names(options.listen, &options.names);
        let initialised = initialise(&options.data_dir, names).await?;
        let listener = TcpListener::bind(options.listen)
            .await
            .map_err(|error| ServerError::Listen(options.listen, error))?;
        let address =
            listener.local_addr().map_err(|error| ServerError::Listen(options.listen, error))?;
        let control = ControlPlane::start(
            initialised,
            &options.data_dir,
            options.credentials_dir,
            options.keep_events_days,
            options.hold_steps,
        )
        .await?;
        let tls = TlsAcceptor::from(Arc::new(tls(control.identity())?));
        let router = router(Arc::clone(control.services()));
        let (stop, stopped) = watch::channel(false);
        let accepting = tokio::spawn(accept(listener, tls, router, stopped));
        tracing::info!(%address, "the server runs");
        Ok(Self { address, control, stop, accepting })
    }

    /// The address it listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops: requests in flight may finish; tasks stop after their current step and resume at the next start.
    pub async fn shutdown(self) {
        self.control.stop_work();
        self.stop.send_replace(true);
        // Its shutdown has its own timeout; a panic is in the log.
        let _ = self.accepting.await;
        self.control.close().await;
    }
}

/// Runs a server until it is told to end (SIGTERM, SIGINT).
///
/// # Errors
/// [`ServerError`].
pub async fn serve(options: ServerOptions) -> Result<(), ServerError> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).map_err(ServerError::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(ServerError::Signals)?;
    let server = Server::start(options).await?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    server.shutdown().await;
    Ok(())
}

fn tls(identity: &Arc<Identity>) -> Result<ServerConfig, rustls::Error> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_cert_resolver(Arc::clone(identity) as _);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

async fn accept(
    listener: TcpListener,
    tls: TlsAcceptor,
    router: axum::Router,
    mut stopped: watch::Receiver<bool>,
) {
    let limits = ConnectionLimits::new();
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = connections.join_next(), if !connections.is_empty() => continue,
            _ = stopped.changed() => break,
        };
        match accepted {
            Ok((stream, source)) => {
                let connection_limit = limits.admit(source.ip());
                let (tls, router) = (tls.clone(), router.clone());
                connections.spawn(serve_connection(
                    stream,
                    connection_limit,
                    tls,
                    router,
                    stopped.clone(),
                ));
            }
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
    drop(listener);
    let farewell = async { while connections.join_next().await.is_some() {} };
    // Remaining connections are aborted with the set.
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, farewell).await;
}

/// Ends when a connection has been unauthenticated for too long.
async fn authentication_timeout(connection_limit: &Connection) {
    tokio::time::sleep(AUTHENTICATION_TIMEOUT).await;
    if connection_limit.is_authenticated() {
        std::future::pending::<()>().await;
    }
}

async fn serve_connection(
    stream: TcpStream,
    connection_limit: Connection,
    tls: TlsAcceptor,
    router: axum::Router,
    mut stopped: watch::Receiver<bool>,
) {
    // Answers are small and the client waits for them; a socket that refuses this still works.
    let _ = stream.set_nodelay(true);
    let shaken = tokio::select! {
        shaken = tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)) => shaken,
        () = connection_limit.evicted() => return tracing::debug!("closed to make room"),
    };
    let stream = match shaken {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return tracing::debug!(%error, "no TLS"),
        Err(_) => return tracing::debug!("the TLS handshake timed out"),
    };
    let (service, of_request) = (TowerToHyperService::new(router), connection_limit.clone());
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(of_request.clone());
        service.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HANDSHAKE_TIMEOUT)
        .max_buf_size(HEADER_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        _ = stopped.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
        () = connection_limit.evicted() => return tracing::debug!("closed to make room"),
        () = authentication_timeout(&connection_limit) => return tracing::debug!("closed: no user's, and late"),
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}
