//! NBD beside a disk's own front end: read-only, for backups of a disk that its guest is using.
//!
//! ```text
//!   Listening --connection, peer allowed--> [thread: Negotiating --> Transmitting] --> ended
//!       ^                                └──all places taken, for GRACE──> closed
//!       └───────────────────────────────────────┘
//! ```
//! A connection's chain and buffers exist only as long as the connection, so that a guest's disk has
//! all its memory while nobody makes a backup.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, mpsc};
use std::thread;

use vmseal_api::filter::NBD_CONNECTIONS;

use crate::disk::current::CurrentDisk;
use crate::front_ends::nbd::negotiation::{self, NegotiationError};
use crate::front_ends::nbd::option::Export;
use crate::front_ends::nbd::transmission::Transmission;
use crate::front_ends::nbd::{GRACE, RETRY, STACK};
use crate::front_ends::{self, ServedDisk};
use crate::stack::stop::Stop;

/// The buffers of a connection, in bytes: two of the longest pieces.
pub const POOL_BYTES: usize = 1024 * 1024;

/// Serves up to [`NBD_CONNECTIONS`] connections at a time until told to stop. `served` is read-only, and
/// counts the reads here separately from the guest's requests.
///
/// # Errors
/// An error of the listener.
pub fn serve(
    listener: &UnixListener,
    peer_uid: u32,
    served: &ServedDisk,
    disk: &Arc<CurrentDisk>,
    stop: &Stop,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let (give, places) = mpsc::channel();
    for place in 0..usize::from(NBD_CONNECTIONS) {
        // The other end is in this function.
        let _ = give.send(place);
    }
    thread::scope(|scope| {
        // A stop ends the connections, too, which free their places.
        while let Some(stream) = next(listener, peer_uid, stop)? {
            let Ok(place) = places.recv_timeout(GRACE) else {
                tracing::warn!("as many clients are connected as can be; another one is closed");
                continue;
            };
            let (give_back, span) = (give.clone(), tracing::Span::current());
            let connection = move || {
                span.in_scope(|| connection(&stream, place, served, disk, stop));
                // The receiver is gone once the server stops.
                let _ = give_back.send(place);
            };
            let builder = thread::Builder::new().name(format!("beside{place}")).stack_size(STACK);
            if let Err(error) = builder.spawn_scoped(scope, connection) {
                tracing::warn!(%error, "there is no thread for a connection, which is ended");
                let _ = give.send(place);
            }
        }
        Ok(())
    })
}

/// The next connection; none when asked to stop.
fn next(listener: &UnixListener, peer_uid: u32, stop: &Stop) -> io::Result<Option<UnixStream>> {
    while stop.wait_or_readable(listener.as_fd())? {
        match front_ends::accept(listener, peer_uid) {
            Ok(Some(stream)) => return Ok(Some(stream)),
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, "a connection was not accepted");
                thread::sleep(RETRY);
            }
        }
    }
    Ok(None)
}

fn connection(
    stream: &UnixStream,
    place: usize,
    served: &ServedDisk,
    disk: &Arc<CurrentDisk>,
    stop: &Stop,
) {
    let export = Export {
        name: served.state.disk().to_string(),
        size: served.size.get(),
        read_only: true,
        bitmaps: served.state.bitmaps(),
    };
    let blocking = stream.set_nonblocking(false).map_err(NegotiationError::from);
    let agreed = match blocking.and_then(|()| negotiation::run(stream, &export, stop)) {
        Ok(Some(agreed)) => agreed,
        Ok(None) | Err(NegotiationError::Stopped) => return,
        Err(error) => return tracing::warn!(%error, "the connection is ended"),
    };
    let Some(reader) = disk.reader() else { return };
    let chain = match reader.disk.reader() {
        Ok(chain) => chain,
        Err(error) => return tracing::warn!(%error, "a connection is ended"),
    };
    match Transmission::new(stream, agreed, served, stop, (place, chain), POOL_BYTES) {
        Ok(transmission) => {
            tracing::info!(connection = place, "a client reads beside the guest");
            drop(transmission.run());
            tracing::info!(connection = place, "the client is gone");
        }
        Err((_, error)) => {
            tracing::warn!(%error, "no memory for the connection, which is ended");
        }
    }
}
