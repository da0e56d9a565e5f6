//! One connection: opens it, then does one exchange after the other.

use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use rustls::ClientConfig;
use tokio::io::{AsyncRead, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use vmseal_secret::SecretBytes;

use super::error::{Error, OwnCertificate, Step, TlsProblem};
use super::plaintext::{Plaintext, READ_MAX};
use super::settings::{Endpoint, Timeouts};
use super::tls::{Identity, validity};
use crate::fields::Violation;
use crate::ttlv::{HEADER_LEN, Tag, message_len};

/// How many addresses of a name are tried at most.
const ADDRESSES_MAX: usize = 8;

/// A server, and how to connect to it.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) endpoint: Endpoint,
    pub(super) tls: Arc<ClientConfig>,
    pub(super) identity: Identity,
    pub(super) timeouts: Timeouts,
    /// When the certificate that the server sent last expires, in seconds since 1970; 0 before the first one.
    pub(super) certificate_ends: AtomicI64,
}

impl Peer {
    fn broken(&self, error: io::Error) -> Error {
        Error::broken(&self.endpoint, OwnCertificate::now(&self.identity), error)
    }
}

/// Runs a step with its timeout.
pub(super) async fn within<T>(
    server: &Endpoint,
    step: Step,
    after: Duration,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    match timeout(after, work).await {
        Ok(result) => result,
        Err(_) => Err(Error::TimedOut { server: server.clone(), step, after }),
    }
}

/// Resolves a name and connects to the first of its addresses that answers.
pub(super) async fn connect(server: &Endpoint, limit: Duration) -> Result<TcpStream, Error> {
    let not_resolved = |source| Error::NotResolved { server: server.clone(), source };
    let addresses = within(server, Step::Resolve, limit, async {
        let found = lookup_host((server.host(), server.port())).await.map_err(not_resolved)?;
        Ok(found.take(ADDRESSES_MAX).collect::<Vec<_>>())
    });
    let addresses = addresses.await?;
    within(server, Step::Connect, limit, async {
        let mut last = not_resolved(io::Error::other("it has no address"));
        for address in addresses {
            match TcpStream::connect(address).await {
                Ok(stream) => {
                    // Each request is one small write, and its answer is awaited.
                    stream.set_nodelay(true).map_err(|source| unreachable(server, source))?;
                    return Ok(stream);
                }
                Err(source) => last = unreachable(server, source),
            }
        }
        Err(last)
    })
    .await
}

fn unreachable(server: &Endpoint, source: io::Error) -> Error {
    let server = server.clone();
    if source.kind() == io::ErrorKind::ConnectionRefused {
        Error::ConnectionRefused { server }
    } else {
        Error::Unreachable { server, source }
    }
}

/// An exchange that failed.
pub(super) struct Failure {
    /// The cause.
    pub(super) error: Error,
    /// The connection ended before the first byte of the answer.
    pub(super) was_dead: bool,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, was_dead: false }
    }
}

/// An open connection with no request in flight. Dropping it during an exchange closes it, so that no
/// answer is ever taken for that of a later request.
pub(super) struct Connection {
    stream: TlsStream<TcpStream>,
    /// `None` only while the stream is polled.
    plaintext: Option<Plaintext>,
    opened: Instant,
}

impl Connection {
    /// Connects, and does the handshake.
    pub(super) async fn open(peer: &Peer) -> Result<Self, Error> {
        let server = &peer.endpoint;
        let socket = connect(server, peer.timeouts.connect).await?;
        let connector = TlsConnector::from(Arc::clone(&peer.tls));
        let stream = within(server, Step::Handshake, peer.timeouts.handshake, async {
            connector.connect(server.name(), socket).await.map_err(|error| Error::Tls {
                server: server.clone(),
                problem: TlsProblem::of_handshake(&error, OwnCertificate::now(&peer.identity)),
            })
        });
        let stream = stream.await?;
        let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        if let Some((_, ends)) = shown.and_then(|der| validity(der)) {
            peer.certificate_ends.store(ends, Ordering::Relaxed);
        }
        Ok(Self { stream, plaintext: Some(Plaintext::new()?), opened: Instant::now() })
    }

    /// When it was opened.
    pub(super) fn age(&self) -> Duration {
        self.opened.elapsed()
    }

    /// Whether the server has neither closed it nor sent anything unasked. It may still be dead: only the
    /// next exchange shows that.
    pub(super) fn is_quiet(&self) -> bool {
        let (socket, session) = self.stream.get_ref();
        let peeked =
            recv(socket.as_raw_fd(), &mut [0; 1], MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT);
        // rustls wants to read as long as it holds no unread data.
        session.wants_read() && peeked == Err(Errno::EAGAIN)
    }

    /// Sends a request and receives its answer, into secret memory.
    pub(super) async fn exchange(
        &mut self,
        peer: &Peer,
        request: &[u8],
    ) -> Result<SecretBytes, Failure> {
        let (server, timeouts) = (&peer.endpoint, &peer.timeouts);
        let write = async {
            self.stream.write_all(request).await?;
            self.stream.flush().await
        };
        let written = within(server, Step::Write, timeouts.write, async {
            write.await.map_err(|error| peer.broken(error))
        });
        written.await.map_err(|error| Failure { was_dead: was_lost(&error), error })?;

        let mut received = 0;
        let answer = self.receive(peer, &mut received);
        let answer = within(server, Step::Read, timeouts.read, answer).await;
        answer.map_err(|error| Failure { was_dead: received == 0 && was_lost(&error), error })
    }

    /// Receives a message. `received` counts its bytes, even on an error.
    async fn receive(&mut self, peer: &Peer, received: &mut usize) -> Result<SecretBytes, Error> {
        let mut header = [0; HEADER_LEN];
        self.fill(peer, &mut header, received).await?;
        let len = message_len(header, Tag::RESPONSE_MESSAGE).map_err(|garbage| {
            Error::Violation { server: peer.endpoint.clone(), source: Violation::from(garbage) }
        })?;
        let mut message = SecretBytes::zeroed(len)?;
        let (start, rest) = message.expose_mut().split_at_mut(HEADER_LEN);
        start.copy_from_slice(&header);
        self.fill(peer, rest, received).await?;
        Ok(message)
    }

    /// Reads some bytes; zero at the end. rustls delivers zeroes: the real bytes are in `plaintext`.
    async fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Self { stream, plaintext, .. } = self;
        let mut zeroes = [0; READ_MAX];
        let most = buffer.len().min(READ_MAX);
        let read = poll_fn(|context| {
            let mut window = ReadBuf::new(&mut zeroes[..most]);
            let polled = Plaintext::lend(plaintext, || {
                Pin::new(&mut *stream).poll_read(context, &mut window)
            });
            polled.map_ok(|()| window.filled().len())
        });
        let read = read.await?;
        match plaintext {
            Some(plaintext) => plaintext.take(&mut buffer[..read])?,
            None => return Err(io::Error::other("the connection is not usable any more")),
        }
        Ok(read)
    }

    async fn fill(
        &mut self,
        peer: &Peer,
        buffer: &mut [u8],
        received: &mut usize,
    ) -> Result<(), Error> {
        let mut filled = 0;
        while filled < buffer.len() {
            let read = self.read(&mut buffer[filled..]).await;
            match read.map_err(|error| peer.broken(error))? {
                0 => {
                    let server = peer.endpoint.clone();
                    return Err(Error::ConnectionLost { server, source: None });
                }
                read => {
                    filled += read;
                    *received += read;
                }
            }
        }
        Ok(())
    }
}

fn was_lost(error: &Error) -> bool {
    matches!(error, Error::ConnectionLost { .. })
}
