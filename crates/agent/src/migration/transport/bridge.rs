//! A local stream socket carried over a stream: what QEMU writes on one host, QEMU reads on the other, both ways.
//!
//! An end that QEMU makes is carried as an authenticated end, and only such an end is shown to the other QEMU by closing that direction.
//! Anything else shuts the local socket down in both directions at once, in the middle of what QEMU reads or writes. QEMU cannot tell
//! an end from a failure where its own stream happens to be complete: who commits a migration waits for [`Bridge::done`] first.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use tokio::sync::oneshot;
use vmseal_seal::frame::{CONTENT_MAX, Kind};

use super::error::TransportError;
use super::records::{RecordReceiver, RecordSender, records};
use super::session::{Shared, Stream};

/// How many bytes a bridge has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// From the local socket to the other host.
    pub sent: u64,
    /// From the other host to the local socket.
    pub received: u64,
}

/// A bridge at work, in two threads. Dropping it lets it go on; the session ends it.
pub struct Bridge {
    shared: Arc<Shared>,
    stream: u16,
    sent: oneshot::Receiver<Result<u64, TransportError>>,
    received: oneshot::Receiver<Result<u64, TransportError>>,
}

impl Bridge {
    /// Carries what is written to a connected local socket.
    ///
    /// # Errors
    /// [`TransportError::Setup`], or why the session has failed.
    pub fn start(stream: Stream, local: UnixStream) -> Result<Self, TransportError> {
        let (shared, number) = (stream.shared.clone(), stream.number());
        let failed = |error| shared.fail(TransportError::setup(number)(error));
        local.set_nonblocking(false).map_err(failed)?;
        let (reading, writing, shut) =
            (|| Ok((local.try_clone()?, local.try_clone()?, local)))().map_err(failed)?;
        shared.carries(number, shut);
        let (sender, receiver) = records(stream)?;
        let sent =
            work(&shared, number, "out", move |shared| outward(shared, number, sender, reading))?;
        let received =
            work(&shared, number, "in", move |shared| inward(shared, number, receiver, writing))?;
        Ok(Self { shared, stream: number, sent, received })
    }

    /// Waits until both directions have had their authenticated end, and everything is in the local sockets.
    ///
    /// # Errors
    /// Why the session has failed.
    pub async fn done(self) -> Result<Moved, TransportError> {
        // A thread that says nothing has panicked, and has failed the session.
        let lost = |_| self.shared.fail(TransportError::Abandoned { stream: self.stream });
        let sent = self.sent.await.map_err(lost)??;
        let received = self.received.await.map_err(lost)??;
        Ok(Moved { sent, received })
    }
}

/// Fails the session unless the work has come to its end, also where it panics.
struct Unfinished<'a>(&'a Shared, u16);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.0.fail(TransportError::Abandoned { stream: self.1 });
    }
}

fn work(
    shared: &Arc<Shared>,
    stream: u16,
    direction: &str,
    run: impl FnOnce(&Shared) -> Result<u64, TransportError> + Send + 'static,
) -> Result<oneshot::Receiver<Result<u64, TransportError>>, TransportError> {
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
    mut sender: RecordSender,
    mut local: UnixStream,
) -> Result<u64, TransportError> {
    let mut sent = 0;
    loop {
        match local.read(&mut sender.content()[..CONTENT_MAX]) {
            Ok(0) => break,
            Ok(read) => {
                sender.send_filled(Kind::BYTES, read)?;
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
    sender.finish()?;
    Ok(sent)
}

/// Gives QEMU what comes, until its authenticated end. Returns how many bytes that were.
fn inward(
    shared: &Shared,
    stream: u16,
    mut receiver: RecordReceiver,
    mut local: UnixStream,
) -> Result<u64, TransportError> {
    let mut received = 0;
    while let Some((kind, bytes)) = receiver.receive()? {
        if kind != Kind::BYTES {
            return Err(shared.fail(TransportError::Kind { stream, kind: kind.number() }));
        }
        local.write_all(bytes).map_err(|error| local_failed(shared, stream, error))?;
        received += bytes.len() as u64;
    }
    match local.shutdown(Shutdown::Write) {
        // QEMU may be gone by now: it has had everything.
        Err(error) if error.kind() != ErrorKind::NotConnected => {
            Err(local_failed(shared, stream, error))
        }
        _ => Ok(received),
    }
}
