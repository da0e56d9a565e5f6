//! A server that does what a test tells it, even what no server should do. It speaks TLS and reads
//! requests; the test decides what follows.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ALL_VERSIONS, RootCertStore, ServerConfig, SupportedProtocolVersion};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::certificates::{Authority, Issued};
use crate::client::Endpoint;
use crate::fields::Fields;
use crate::ttlv::{Encoder, HEADER_LEN, Tag, decode, message_len};
use crate::{OperationCode, ProtocolVersion, ResultReason};

/// A received request.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The number of its connection, from 0.
    pub connection: usize,
    /// Its number over all connections, from 0.
    pub request: usize,
    /// Its version.
    pub version: ProtocolVersion,
    /// The operation of its items.
    pub operation: OperationCode,
    /// The ids of its items.
    pub ids: Vec<Vec<u8>>,
    /// The ids of the objects that its items are about, where they are about one.
    pub objects: Vec<String>,
}

/// The server's reaction to it.
#[derive(Clone, Debug)]
pub enum Reaction {
    /// Sends bytes, and waits for the next request.
    Send(Vec<u8>),
    /// Sends bytes after a time, and waits for the next request.
    SendLate(Duration, Vec<u8>),
    /// Sends bytes and closes the connection.
    SendAndClose(Vec<u8>),
    /// Sends bytes, and nothing more, for as long as the client stays.
    SendAndHang(Vec<u8>),
}

impl Asked {
    fn read(connection: usize, request: usize, message: &[u8]) -> Self {
        let message = decode(message).expect("the client sends TTLV");
        let fields = Fields::of(&message).expect("a structure");
        let header = fields.structure(Tag::REQUEST_HEADER).expect("a header");
        let version = header.structure(Tag::PROTOCOL_VERSION).expect("a version");
        let items: Vec<_> =
            fields.structures(Tag::BATCH_ITEM).collect::<Result<_, _>>().expect("items");
        let id =
            |item: &Fields<'_, '_>| item.bytes(Tag::UNIQUE_BATCH_ITEM_ID).expect("an id").to_vec();
        let object = |item: &Fields<'_, '_>| {
            let payload = item.structure(Tag::REQUEST_PAYLOAD).expect("a payload");
            payload.optional_text(Tag::UNIQUE_IDENTIFIER).expect("text").map(str::to_owned)
        };
        let operation = items.first().expect("an item").enumeration(Tag::OPERATION);
        Self {
            connection,
            request,
            version: version.version().expect("a version"),
            operation: OperationCode::from_number(operation.expect("an operation")),
            ids: items.iter().map(id).collect(),
            objects: items.iter().filter_map(object).collect(),
        }
    }

    /// A response message of `items`.
    #[must_use]
    pub fn response(&self, count: usize, items: impl FnOnce(&mut Encoder)) -> Vec<u8> {
        let mut encoder = Encoder::new();
        encoder.structure(Tag::RESPONSE_MESSAGE, |message| {
            message.structure(Tag::RESPONSE_HEADER, |header| {
                self.version.encode(header);
                header.date_time(Tag::TIME_STAMP, 0);
                header.integer(Tag::BATCH_COUNT, count.try_into().expect("a small count"));
            });
            items(message);
        });
        encoder.finish().expect("a short message")
    }

    /// Writes one result: done, with a payload.
    pub fn result(&self, message: &mut Encoder, id: &[u8], payload: impl FnOnce(&mut Encoder)) {
        message.structure(Tag::BATCH_ITEM, |item| {
            item.enumeration(Tag::OPERATION, self.operation.number());
            item.bytes(Tag::UNIQUE_BATCH_ITEM_ID, id);
            item.enumeration(Tag::RESULT_STATUS, 0);
            item.structure(Tag::RESPONSE_PAYLOAD, payload);
        });
    }

    /// Writes one result: refused.
    pub fn refusal(&self, message: &mut Encoder, id: &[u8], reason: ResultReason) {
        message.structure(Tag::BATCH_ITEM, |item| {
            item.enumeration(Tag::OPERATION, self.operation.number());
            item.bytes(Tag::UNIQUE_BATCH_ITEM_ID, id);
            item.enumeration(Tag::RESULT_STATUS, 1);
            item.enumeration(Tag::RESULT_REASON, reason.number());
            item.text(Tag::RESULT_MESSAGE, "as the script says");
        });
    }

    /// All items done, each with the same payload.
    #[must_use]
    pub fn done(&self, payload: impl Fn(&mut Encoder)) -> Vec<u8> {
        self.response(self.ids.len(), |message| {
            self.ids.iter().for_each(|id| self.result(message, id, &payload));
        })
    }

    /// The answer to DiscoverVersions.
    #[must_use]
    pub fn versions(&self, versions: &[ProtocolVersion]) -> Reaction {
        Reaction::Send(self.done(|payload| {
            versions.iter().for_each(|version| version.encode(payload));
        }))
    }

    /// All refused as one.
    #[must_use]
    pub fn refused(&self, reason: ResultReason) -> Reaction {
        Reaction::Send(self.response(1, |message| {
            message.structure(Tag::BATCH_ITEM, |item| {
                item.enumeration(Tag::RESULT_STATUS, 1);
                item.enumeration(Tag::RESULT_REASON, reason.number());
                item.text(Tag::RESULT_MESSAGE, "as the script says");
            });
        }))
    }
}

#[derive(Default)]
struct Counters {
    accepted: AtomicUsize,
    open: AtomicUsize,
    requests: AtomicUsize,
}

/// The server; stopped when dropped.
pub struct ScriptedServer {
    address: SocketAddr,
    counters: Arc<Counters>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for ScriptedServer {
    /// Frees its port.
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || !matches!(ended, Some(Err(_))), "the server failed");
    }
}

impl ScriptedServer {
    /// A server that answers DiscoverVersions with all that the client speaks, and everything else as
    /// `script` says. Asks clients for a certificate of `clients`, if given.
    #[must_use]
    pub fn start(
        certificate: &Issued,
        clients: Option<&Authority>,
        script: impl Fn(&Asked) -> Reaction + Send + Sync + 'static,
    ) -> Self {
        Self::start_on(0, certificate, clients, move |asked| match asked.operation {
            OperationCode::DiscoverVersions => asked.versions(&ProtocolVersion::SPOKEN),
            _ => script(asked),
        })
    }

    /// A server on a port of 127.0.0.1, 0 for any free one, that answers everything as `script` says. With
    /// a fixed port it can replace an earlier server.
    #[must_use]
    pub fn start_on(
        port: u16,
        certificate: &Issued,
        clients: Option<&Authority>,
        script: impl Fn(&Asked) -> Reaction + Send + Sync + 'static,
    ) -> Self {
        let acceptor =
            TlsAcceptor::from(Arc::new(server_config(certificate, clients, ALL_VERSIONS)));
        let (stop, stopped) = oneshot::channel();
        let (started, start) = std::sync::mpsc::channel();
        let counters = Arc::new(Counters::default());
        let shared = Arc::clone(&counters);
        let script: Arc<Script> = Arc::new(script);
        // Its own runtime, which runs on while the test's runtime is blocked.
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let listener = TcpListener::bind(("127.0.0.1", port)).await.expect("a free port");
                started.send(listener.local_addr().expect("an address")).expect("the test waits");
                tokio::select! {
                    () = accept(listener, acceptor, shared, script) => {}
                    _ = stopped => {}
                }
            });
        });
        let address = start.recv().expect("a server");
        Self { address, counters, stop: Some(stop), thread: Some(thread) }
    }

    /// Where it listens.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        Endpoint::new("127.0.0.1", self.address.port()).expect("an address")
    }

    /// How many connections there have been.
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.counters.accepted.load(Ordering::SeqCst)
    }

    /// How many connections are open.
    #[must_use]
    pub fn open(&self) -> usize {
        self.counters.open.load(Ordering::SeqCst)
    }

    /// How many requests there have been.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.counters.requests.load(Ordering::SeqCst)
    }
}

type Script = dyn Fn(&Asked) -> Reaction + Send + Sync;

/// TLS settings of a server with certain TLS versions.
pub(crate) fn server_config(
    certificate: &Issued,
    clients: Option<&Authority>,
    versions: &[&'static SupportedProtocolVersion],
) -> ServerConfig {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let der = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).expect("PEM");
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(versions)
        .expect("versions that AWS-LC has");
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(authority) => {
            let mut roots = RootCertStore::empty();
            roots.add(der(authority.certificate())).expect("an authority");
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            builder.with_client_cert_verifier(verifier.build().expect("a verifier"))
        }
    };
    let key = certificate.private_key();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.expose().to_vec()));
    builder.with_single_cert(vec![der(&certificate.certificate)], key).expect("a certificate")
}

async fn accept(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    counters: Arc<Counters>,
    script: Arc<Script>,
) {
    while let Ok((socket, _)) = listener.accept().await {
        let number = counters.accepted.fetch_add(1, Ordering::SeqCst);
        let (acceptor, counters) = (acceptor.clone(), Arc::clone(&counters));
        let script = Arc::clone(&script);
        tokio::spawn(async move {
            counters.open.fetch_add(1, Ordering::SeqCst);
            serve(socket, acceptor, number, &counters, &*script).await;
            counters.open.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

async fn serve(
    socket: TcpStream,
    acceptor: TlsAcceptor,
    connection: usize,
    counters: &Counters,
    script: &Script,
) {
    // The test checks whether a client refuses this server or is refused.
    let Ok(mut stream) = acceptor.accept(socket).await else { return };
    while let Some(message) = receive(&mut stream).await {
        let request = counters.requests.fetch_add(1, Ordering::SeqCst);
        let reaction = script(&Asked::read(connection, request, &message));
        let goes_on = match reaction {
            Reaction::Send(bytes) => send(&mut stream, &bytes).await,
            Reaction::SendLate(after, bytes) => {
                tokio::time::sleep(after).await;
                send(&mut stream, &bytes).await
            }
            Reaction::SendAndHang(bytes) => {
                // Waits until the client leaves.
                send(&mut stream, &bytes).await && receive(&mut stream).await.is_some()
            }
            Reaction::SendAndClose(bytes) => {
                send(&mut stream, &bytes).await;
                false
            }
        };
        if !goes_on {
            break;
        }
    }
    // It does not matter whether the client still listens.
    let _ = stream.shutdown().await;
}

async fn send(stream: &mut TlsStream<TcpStream>, bytes: &[u8]) -> bool {
    stream.write_all(bytes).await.is_ok() && stream.flush().await.is_ok()
}

/// A request; `None` when the client has left.
async fn receive(stream: &mut TlsStream<TcpStream>) -> Option<Vec<u8>> {
    let mut message = vec![0; HEADER_LEN];
    stream.read_exact(&mut message).await.ok()?;
    let header = *message.first_chunk().expect("a header");
    let len = message_len(header, Tag::REQUEST_MESSAGE).expect("a request");
    message.resize(len, 0);
    stream.read_exact(&mut message[HEADER_LEN..]).await.ok()?;
    Some(message)
}
