//! A session: the streams of one migration on one host, what they have moved, and their common end.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use uuid::Uuid;
use vmseal_seal::frame::FrameError;
use vmseal_seal::wire::Ends;

use super::error::TransportError;
use super::pace::Pace;
use super::socket;
use crate::migration::figures::{self, Figures};

/// A connection that is a stream of a migration.
pub(super) struct Opened {
    pub socket: TcpStream,
    pub ends: Ends,
}

/// What all streams of a session share.
pub(super) struct Shared {
    migration: Uuid,
    /// The first error. Nothing is sent or received after it.
    failure: watch::Sender<Option<TransportError>>,
    pub pace: Pace,
    connections: Vec<Connection>,
}

/// One stream's connection and counters.
pub(super) struct Connection {
    pub socket: TcpStream,
    /// What a bridge carries.
    local: Mutex<Option<UnixStream>>,
    pub sent: Counts,
    pub received: Counts,
}

/// What one direction of a stream has moved.
pub(super) struct Counts {
    bytes: AtomicU64,
    frames: AtomicU64,
    cpu_ns: AtomicU64,
    /// The same of all streams.
    all: &'static Figures,
}

impl Counts {
    fn new(all: &'static Figures) -> Self {
        let (bytes, frames, cpu_ns) = Default::default();
        Self { bytes, frames, cpu_ns, all }
    }

    /// One more frame, by the thread that calls.
    pub fn frame(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.frames.fetch_add(1, Ordering::Relaxed);
        self.all.moved(bytes as u64);
    }

    /// The CPU time of the thread that calls, which works for this direction alone.
    pub fn worked(&self) {
        let now = thread_cpu_ns();
        let before = self.cpu_ns.swap(now, Ordering::Relaxed);
        self.all.worked(now.saturating_sub(before));
    }
}

fn thread_cpu_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec, which lives until the call returns.
    if unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) } != 0 {
        return 0;
    }
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

impl Shared {
    pub fn connection(&self, stream: u16) -> &Connection {
        &self.connections[usize::from(stream)]
    }

    /// The session fails for this reason, unless it has failed already. Returns the reason why it has.
    pub fn fail(&self, error: TransportError) -> TransportError {
        let first = self.failure.send_if_modified(|failure| {
            let first = failure.is_none();
            if first {
                *failure = Some(error.clone());
            }
            first
        });
        if first {
            self.tell_changed(&error);
            self.pace.stop();
            for connection in &self.connections {
                // One that is shut down already needs no more.
                let _ = connection.socket.shutdown(Shutdown::Both);
                connection.shut_local();
            }
        }
        self.failure().unwrap_or(error)
    }

    /// Says that what came was not what the other host has sent: the server may have given the migration up before anybody else says
    /// so. A stream that was only cut off looks as if the other host had ended it.
    fn tell_changed(&self, error: &TransportError) {
        if let TransportError::Frame { error: frame, .. } = error
            && !matches!(frame, FrameError::Truncated(_))
        {
            tracing::warn!(migration = %self.migration, %error, "a stream of a migration was changed on its way");
        }
    }

    pub fn failure(&self) -> Option<TransportError> {
        self.failure.borrow().clone()
    }

    /// Takes the local socket of a stream, to shut it down when the session fails.
    pub fn carries(&self, stream: u16, local: UnixStream) {
        let connection = self.connection(stream);
        *connection.local.lock().unwrap_or_else(PoisonError::into_inner) = Some(local);
        // It may have failed before it had the socket.
        if self.failure().is_some() {
            connection.shut_local();
        }
    }
}

impl Connection {
    fn shut_local(&self) {
        if let Some(local) = &*self.local.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = local.shutdown(Shutdown::Both);
        }
    }
}

/// The streams of one migration. Dropping it cancels what still goes on.
pub struct Session {
    shared: Arc<Shared>,
    streams: Vec<Option<Stream>>,
}

/// One stream of a session, not in use yet.
pub struct Stream {
    pub(super) shared: Arc<Shared>,
    pub(super) number: u16,
    pub(super) ends: Ends,
}

impl Stream {
    /// Its number.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.number
    }
}

impl Session {
    /// A session of these connections, by their numbers.
    pub(super) fn new(migration: Uuid, opened: Vec<Opened>) -> Self {
        let (connections, ends): (Vec<Connection>, Vec<Ends>) = opened
            .into_iter()
            .map(|Opened { socket, ends }| {
                let (sent, received) = (Counts::new(&figures::OUT), Counts::new(&figures::IN));
                (Connection { socket, local: Mutex::default(), sent, received }, ends)
            })
            .unzip();
        let (failure, pace) = (watch::Sender::new(None), Pace::default());
        let shared = Arc::new(Shared { migration, failure, pace, connections });
        let stream = |(number, ends)| Some(Stream { shared: shared.clone(), number, ends });
        let streams = (0..).zip(ends).map(stream).collect();
        Self { shared, streams }
    }

    /// The stream with this number; none when it was taken, or where there is none.
    pub fn take(&mut self, number: u16) -> Option<Stream> {
        self.streams.get_mut(usize::from(number))?.take()
    }

    /// What watches and steers the session from elsewhere.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle(self.shared.clone())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shared.fail(TransportError::Cancelled);
    }
}

/// Watches and steers a session.
#[derive(Clone)]
pub struct Handle(Arc<Shared>);

impl Handle {
    /// The migration's id.
    #[must_use]
    pub fn migration(&self) -> Uuid {
        self.0.migration
    }

    /// Ends the session on both hosts, at once. Who waits for a stream gets [`TransportError::Cancelled`].
    pub fn cancel(&self) {
        self.0.fail(TransportError::Cancelled);
    }

    /// How many bytes per second all streams together send at most, from now on; none for as many as there can be. Messages of a
    /// [`super::Control`] do not wait.
    pub fn set_rate(&self, bytes_per_second: Option<NonZeroU64>) {
        self.0.pace.set(bytes_per_second);
    }

    /// Why the session has failed; none when it has not.
    #[must_use]
    pub fn failure(&self) -> Option<TransportError> {
        self.0.failure()
    }

    /// Waits until the session has failed, also by being cancelled or dropped.
    pub async fn failed(&self) -> TransportError {
        let mut failure = self.0.failure.subscribe();
        let failed = failure.wait_for(Option::is_some).await;
        // The sender lives as long as this handle.
        failed.ok().and_then(|failure| failure.clone()).unwrap_or(TransportError::Cancelled)
    }

    /// What each stream has moved, by number.
    #[must_use]
    pub fn counters(&self) -> Vec<StreamCounters> {
        self.0.connections.iter().map(StreamCounters::of).collect()
    }
}

/// What a stream has moved. Bytes are those of the content, without heads and tags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamCounters {
    /// Bytes that were sealed and given to the kernel.
    pub sent_bytes: u64,
    /// Frames of them.
    pub sent_frames: u64,
    /// Bytes that came and were opened.
    pub received_bytes: u64,
    /// Frames of them.
    pub received_frames: u64,
    /// CPU time of the thread that sends: reading, sealing, writing. None for messages.
    pub sending_cpu: Duration,
    /// CPU time of the thread that receives.
    pub receiving_cpu: Duration,
    /// Bytes that the kernel holds and has not sent yet, frames' heads and tags included.
    pub unsent_bytes: u64,
}

impl StreamCounters {
    fn of(connection: &Connection) -> Self {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Connection { socket, sent, received, .. } = connection;
        Self {
            sent_bytes: load(&sent.bytes),
            sent_frames: load(&sent.frames),
            received_bytes: load(&received.bytes),
            received_frames: load(&received.frames),
            sending_cpu: Duration::from_nanos(load(&sent.cpu_ns)),
            receiving_cpu: Duration::from_nanos(load(&received.cpu_ns)),
            unsent_bytes: socket::unsent(socket),
        }
    }
}

/// A connection of tokio, once its handshake is done.
pub(super) fn plain_socket(socket: tokio::net::TcpStream) -> io::Result<TcpStream> {
    let socket = socket.into_std()?;
    socket.set_nonblocking(false)?;
    Ok(socket)
}
