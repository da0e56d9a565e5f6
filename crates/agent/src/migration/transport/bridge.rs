//! A local stream socket carried over a stream: what QEMU writes on one host, QEMU reads on the other, both ways.
//!
//! An end that QEMU makes is carried as an authenticated end, and only such an end is shown to the other QEMU by closing that direction.
//! Anything else shuts the local socket down in both directions at once, in the middle of what QEMU reads or writes. QEMU cannot tell
//! an end from a failure where its own stream happens to be complete: who commits a migration waits for [`Bridge::done`] first.
//!
//! A stream may carry several local sockets, one after the other: the end of each but the last one is a frame of its own
//! ([`Carrier::part`]), and the stream goes on.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::oneshot;
use vmseal_seal::frame::{CONTENT_MAX, Kind};

use super::compression::{COMPRESSED, Compression, Decompression};
use super::error::TransportError;
use super::records::{RecordReceiver, RecordSender, records};
use super::session::{Shared, Stream};
use crate::migration::placement::{Placed, Placement};

/// How many bytes a bridge has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// From the local socket to the other host.
    pub sent: u64,
    /// From the other host to the local socket, or into memory.
    pub received: u64,
    /// How much of that was placed in memory; none where nothing was to be.
    pub placed: Option<Placed>,
}

/// How the end of one of several local sockets is told.
const PART_END: Kind = Kind::new(4);

/// A stream that carries local sockets, one after the other.
pub struct Carrier {
    shared: Arc<Shared>,
    stream: u16,
    sender: RecordSender,
    receiver: RecordReceiver,
    compression: Compressed,
    placement: Option<Placement>,
}

/// What of a stream may be compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compressed {
    /// Nothing.
    #[default]
    Never,
    /// What the other host sends.
    Received,
    /// What this host sends, where that is faster. The other one must know of that.
    Sent,
}

/// A local socket at work that is not the last one.
pub struct Part(Work<RecordSender, RecordReceiver>);

/// A bridge at work, in two threads. Dropping it lets it go on; the session ends it.
pub struct Bridge(Work<u64, Received>);

/// What a thread has received.
struct Received {
    bytes: u64,
    placed: Option<Placed>,
}

/// What of a stream is not for the local socket as it is.
#[derive(Default)]
struct Inlet {
    /// The kind of the frame that ends it; none for the stream's end.
    end: Option<Kind>,
    decompression: Option<Decompression>,
    placement: Option<Placement>,
}

/// What two threads do, and what each leaves.
struct Work<S, R> {
    shared: Arc<Shared>,
    stream: u16,
    sent: oneshot::Receiver<Result<S, TransportError>>,
    received: oneshot::Receiver<Result<R, TransportError>>,
}

impl Carrier {
    /// Of a stream that nobody uses yet.
    ///
    /// # Errors
    /// [`TransportError::Setup`], or why the session has failed.
    pub fn new(stream: Stream) -> Result<Self, TransportError> {
        let (shared, number) = (stream.shared.clone(), stream.number());
        let (sender, receiver) = records(stream)?;
        let compression = Compressed::Never;
        Ok(Self { shared, stream: number, sender, receiver, compression, placement: None })
    }

    /// The same, of whose last local socket this may be compressed.
    #[must_use]
    pub fn compressing(self, compression: Compressed) -> Self {
        Self { compression, ..self }
    }

    /// The same, of whose last local socket the pages that come are placed in memory.
    #[must_use]
    pub fn placing(self, placement: Option<Placement>) -> Self {
        Self { placement, ..self }
    }

    /// Carries what is written to a connected local socket. Others follow.
    ///
    /// # Errors
    /// As [`Carrier::new`].
    pub fn part(self, local: UnixStream) -> Result<Part, TransportError> {
        let out = |shared: &Shared, stream, mut sender: RecordSender, local| {
            outward(shared, stream, &mut sender, local, None)?;
            sender.send(PART_END, &[]).map(|()| sender)
        };
        let into = |shared: &Shared, stream, mut receiver: RecordReceiver, local| {
            let inlet = Inlet { end: Some(PART_END), ..Inlet::default() };
            inward(shared, stream, &mut receiver, local, inlet).map(|_| receiver)
        };
        self.work(local, out, into).map(Part)
    }

    /// Carries what is written to a connected local socket, the last one.
    ///
    /// # Errors
    /// As [`Carrier::new`].
    pub fn last(mut self, local: UnixStream) -> Result<Bridge, TransportError> {
        let compression = (self.compression == Compressed::Sent).then(Compression::new);
        let reads = self.compression == Compressed::Received;
        let decompression = reads.then(Decompression::default);
        let inlet = Inlet { end: None, decompression, placement: self.placement.take() };
        let out = |shared: &Shared, stream, mut sender: RecordSender, local| {
            let sent = outward(shared, stream, &mut sender, local, compression)?;
            sender.finish().map(|()| sent)
        };
        let into = |shared: &Shared, stream, mut receiver: RecordReceiver, local| {
            inward(shared, stream, &mut receiver, local, inlet)
        };
        self.work(local, out, into).map(Bridge)
    }

    fn work<S: Send + 'static, R: Send + 'static>(
        self,
        local: UnixStream,
        out: impl FnOnce(&Shared, u16, RecordSender, UnixStream) -> Result<S, TransportError>
        + Send
        + 'static,
        into: impl FnOnce(&Shared, u16, RecordReceiver, UnixStream) -> Result<R, TransportError>
        + Send
        + 'static,
    ) -> Result<Work<S, R>, TransportError> {
        let Self { shared, stream, sender, receiver, .. } = self;
        let failed = |error| shared.fail(TransportError::setup(stream)(error));
        local.set_nonblocking(false).map_err(failed)?;
        let (reading, writing, shut) =
            (|| Ok((local.try_clone()?, local.try_clone()?, local)))().map_err(failed)?;
        shared.carries(stream, shut);
        let sent =
            work(&shared, stream, "out", move |shared| out(shared, stream, sender, reading))?;
        let received =
            work(&shared, stream, "in", move |shared| into(shared, stream, receiver, writing))?;
        Ok(Work { shared, stream, sent, received })
    }
}

impl<S, R> Work<S, R> {
    async fn done(self) -> Result<(S, R), TransportError> {
        // A thread that says nothing has panicked, and has failed the session.
        let lost = |_| self.shared.fail(TransportError::Abandoned { stream: self.stream });
        let sent = self.sent.await.map_err(lost)??;
        let received = self.received.await.map_err(lost)??;
        Ok((sent, received))
    }
}

impl Part {
    /// Waits until both directions have had their authenticated end, and everything is in the local sockets; then the stream
    /// carries another one.
    ///
    /// # Errors
    /// Why the session has failed.
    pub async fn done(self) -> Result<Carrier, TransportError> {
        let (shared, stream) = (self.0.shared.clone(), self.0.stream);
        let (sender, receiver) = self.0.done().await?;
        let compression = Compressed::Never;
        Ok(Carrier { shared, stream, sender, receiver, compression, placement: None })
    }
}

impl Bridge {
    /// Carries what is written to a connected local socket.
    ///
    /// # Errors
    /// [`TransportError::Setup`], or why the session has failed.
    pub fn start(stream: Stream, local: UnixStream) -> Result<Self, TransportError> {
        Carrier::new(stream)?.last(local)
    }

    /// Waits until both directions have had their authenticated end, and everything is in the local sockets.
    ///
    /// # Errors
    /// Why the session has failed.
    pub async fn done(self) -> Result<Moved, TransportError> {
        let (sent, Received { bytes, placed }) = self.0.done().await?;
        Ok(Moved { sent, received: bytes, placed })
    }
}

/// Fails the session unless the work has come to its end, also where it panics.
struct Unfinished<'a>(&'a Shared, u16);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.0.fail(TransportError::Abandoned { stream: self.1 });
    }
}

fn work<T: Send + 'static>(
    shared: &Arc<Shared>,
    stream: u16,
    direction: &str,
    run: impl FnOnce(&Shared) -> Result<T, TransportError> + Send + 'static,
) -> Result<oneshot::Receiver<Result<T, TransportError>>, TransportError> {
    let (done, result) = oneshot::channel();
    let of_thread = shared.clone();
    let spawned =
        std::thread::Builder::new().name(format!("stream-{stream}-{direction}")).spawn(move || {
            let unfinished = Unfinished(&of_thread, stream);
            let result = run(&of_thread);
            if result.is_ok() {
                std::mem::forget(unfinished);
            }
            // Nobody may want to know.
            let _ = done.send(result);
        });
    spawned.map_err(|error| shared.fail(TransportError::setup(stream)(error)))?;
    Ok(result)
}

fn local_failed(shared: &Shared, stream: u16, error: std::io::Error) -> TransportError {
    shared.fail(TransportError::Local { stream, error: Arc::new(error) })
}

/// Seals what QEMU writes, until it ends. Returns how many bytes that were.
fn outward(
    shared: &Shared,
    stream: u16,
    sender: &mut RecordSender,
    mut local: UnixStream,
    mut compression: Option<Compression>,
) -> Result<u64, TransportError> {
    let mut sent = 0;
    loop {
        match local.read(&mut sender.content()[..CONTENT_MAX]) {
            Ok(0) => break,
            Ok(read) => {
                match &mut compression {
                    None => sender.send_filled(Kind::BYTES, read)?,
                    Some(compression) => {
                        let full = Instant::now();
                        let (kind, length) = compression.fill(sender.content(), read);
                        sender.send_filled(kind, length)?;
                        compression.took(read, full.elapsed());
                    }
                }
                sent += read as u64;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(local_failed(shared, stream, error)),
        }
    }
    // The failure of a session looks like QEMU's end: the local socket is shut down.
    if let Some(failure) = shared.failure() {
        return Err(failure);
    }
    Ok(sent)
}

/// Gives QEMU what comes, until the authenticated end of the stream, or a frame of the kind that ends it.
fn inward(
    shared: &Shared,
    stream: u16,
    receiver: &mut RecordReceiver,
    mut local: UnixStream,
    Inlet { end, mut decompression, mut placement }: Inlet,
) -> Result<Received, TransportError> {
    let mut received = 0;
    let not_placed = |error| shared.fail(TransportError::Placement { stream, error });
    loop {
        let Some((kind, bytes)) = receiver.receive()? else {
            match end {
                None => break,
                Some(_) => return Err(shared.fail(TransportError::Ended { stream })),
            }
        };
        if Some(kind) == end && bytes.is_empty() {
            break;
        }
        let bytes = match (kind, &mut decompression) {
            (Kind::BYTES, _) => &*bytes,
            (COMPRESSED, Some(decompression)) => decompression
                .bytes(bytes)
                .ok_or_else(|| shared.fail(TransportError::Compressed { stream }))?,
            (other, _) => {
                return Err(shared.fail(TransportError::Kind { stream, kind: other.number() }));
            }
        };
        received += bytes.len() as u64;
        let for_local = match &mut placement {
            Some(placement) => placement.take(bytes).map_err(not_placed)?,
            None => bytes,
        };
        local.write_all(for_local).map_err(|error| local_failed(shared, stream, error))?;
    }
    let placed = placement.map(|placement| placement.end().map_err(not_placed)).transpose()?;
    let received = Received { bytes: received, placed: placed.flatten() };
    match local.shutdown(Shutdown::Write) {
        // QEMU may be gone by now: it has had everything.
        Err(error) if error.kind() != ErrorKind::NotConnected => {
            Err(local_failed(shared, stream, error))
        }
        _ => Ok(received),
    }
}
