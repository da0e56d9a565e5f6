//! The NBD front end: a disk for tools on the host, over a unix socket (NetworkBlockDevice/nbd,
//! `doc/proto.md`).
//!
//! ```text
//!   accepting:    connection, peer allowed ──a worker is idle within GRACE──> that worker
//!                                          └──none──> closed
//!   each worker:  Idle --connection--> Negotiating --GO--> Transmitting
//!                  ^  └──stop──> ended      |                   |
//!                  └── aborted | too slow ──┴──── ended ────────┘
//! ```
//! When the disk's chains are to be exchanged, all connections end as at a stop, and clients connect again: they wait in the
//! listener's queue until the workers have other chains.
//!
//! A disk has as many workers as chains; each serves one connection at a time. Connections beyond that are closed
//! at once: a client that makes several and waits for all of them would never be served. [`crate::nbd`], [`option`] and
//! [`request`] implement the protocol and do no I/O; [`negotiation`] and [`transmission`] move the bytes.
//!
//! Beside another front end, a disk has no workers: [`beside`] makes a chain, and a thread, for each
//! connection. [`chunk`] makes structured replies, [`context`] reports holes and changes.

pub mod arrivals;
pub mod beside;
pub mod chunk;
pub mod context;
pub mod negotiation;
pub mod option;
pub mod request;
pub mod transmission;

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use vmseal_api::filter::DiskActivity;

use crate::front_ends::nbd::negotiation::NegotiationError;
use crate::front_ends::nbd::option::Export;
use crate::front_ends::nbd::transmission::Transmission;
use crate::front_ends::{self, ServedDisk};
use crate::stack::chain::Chain;
use crate::stack::orders::{Orders, Woken};
use crate::stack::stop::Stop;

/// The stack size of a worker: its frames are small, and the process's memory is locked.
const STACK: usize = 256 * 1024;

/// How long to wait when the system has no descriptor for a connection.
const RETRY: Duration = Duration::from_millis(100);

/// How long a connection waits when every worker is busy: the worker of a client that has just disconnected may
/// still be finishing its requests.
const GRACE: Duration = Duration::from_secs(1);

/// The state that workers share.
struct Server<'a> {
    served: &'a ServedDisk,
    export: Export,
    pool_bytes: usize,
    stop: &'a Stop,
    connections: Mutex<usize>,
}

/// Serves as many connections at a time as there are chains, until told to stop; returns the chains.
/// `pool_bytes` bounds the buffers of each connection.
///
/// # Errors
/// An error of the listener.
pub fn serve(
    listener: &UnixListener,
    peer_uid: u32,
    served: &ServedDisk,
    mut chains: Vec<Chain>,
    pool_bytes: usize,
    orders: &Orders,
) -> io::Result<Vec<Chain>> {
    listener.set_nonblocking(true)?;
    loop {
        let exchanges;
        (chains, exchanges) = serve_round(listener, peer_uid, served, chains, pool_bytes, orders)?;
        if !exchanges {
            return Ok(chains);
        }
        chains = orders.carry_out(chains);
    }
}

/// Serves until told to stop, or until the chains are to be exchanged (true).
fn serve_round(
    listener: &UnixListener,
    peer_uid: u32,
    served: &ServedDisk,
    chains: Vec<Chain>,
    pool_bytes: usize,
    orders: &Orders,
) -> io::Result<(Vec<Chain>, bool)> {
    let round = Stop::new()?;
    let export = Export {
        name: served.state.disk().to_string(),
        size: served.size.get(),
        read_only: served.read_only,
        bitmaps: served.state.bitmaps(),
    };
    let connections = Mutex::new(0);
    let server = Server { served, export, pool_bytes, stop: &round, connections };
    let (server, span) = (&server, tracing::Span::current());
    let workers = Workers::default();
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for (queue, chain) in chains.into_iter().enumerate() {
            let span = span.clone();
            let workers = &workers;
            let worker = move || span.in_scope(|| server.work(queue, chain, workers));
            let builder = thread::Builder::new().name(format!("nbd{queue}")).stack_size(STACK);
            match builder.spawn_scoped(scope, worker) {
                Ok(thread) => threads.push(thread),
                Err(error) => tracing::warn!(%error, "one connection less is possible at a time"),
            }
        }
        if threads.is_empty() {
            return Err(io::Error::other("there is no thread to serve the disk with"));
        }
        let ended = accept_all(listener, peer_uid, &workers, orders);
        round.ask();
        workers.close();
        let exchanges = ended?;
        let died = |_| io::Error::other("a connection's thread died; restart the filter");
        let chains = threads.into_iter().map(|thread| thread.join().map_err(died)?);
        Ok((chains.collect::<io::Result<_>>()?, exchanges))
    })
}

/// Gives each connection to an idle worker, until told to stop or to exchange the chains (true).
fn accept_all(
    listener: &UnixListener,
    peer_uid: u32,
    workers: &Workers,
    orders: &Orders,
) -> io::Result<bool> {
    loop {
        match orders.wait(Some(listener.as_fd()))? {
            Woken::Readable => {}
            Woken::Stop => return Ok(false),
            Woken::Exchange => return Ok(true),
        }
        match front_ends::accept(listener, peer_uid) {
            Ok(Some(stream)) => {
                if !workers.give(stream) {
                    tracing::warn!(
                        "as many clients are connected as can be; another one is closed"
                    );
                }
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, "a connection was not accepted");
                thread::sleep(RETRY);
            }
        }
    }
}

/// The place where connections and workers wait for each other.
#[derive(Default)]
struct Workers {
    exchange: Mutex<Exchange>,
    changed: Condvar,
}

#[derive(Default)]
struct Exchange {
    /// The number of waiting workers.
    idle: usize,
    /// Never more than there are idle workers.
    connections: Vec<UnixStream>,
    closed: bool,
}

impl Workers {
    fn lock(&self) -> MutexGuard<'_, Exchange> {
        self.exchange.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next connection for a worker; none when there will be no more.
    fn next(&self) -> Option<UnixStream> {
        let mut exchange = self.lock();
        exchange.idle += 1;
        self.changed.notify_all();
        loop {
            if let Some(stream) = exchange.connections.pop() {
                exchange.idle -= 1;
                return Some(stream);
            }
            if exchange.closed {
                return None;
            }
            exchange = self.changed.wait(exchange).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives a connection to a worker; false, and it is closed, if none is idle within [`GRACE`].
    fn give(&self, stream: UnixStream) -> bool {
        let exchange = self.lock();
        let busy = |exchange: &mut Exchange| exchange.connections.len() >= exchange.idle;
        let waited = self.changed.wait_timeout_while(exchange, GRACE, busy);
        let (mut exchange, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if !timeout.timed_out() {
            exchange.connections.push(stream);
            self.changed.notify_all();
        }
        !timeout.timed_out()
    }

    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }
}

impl Server<'_> {
    fn work(&self, queue: usize, mut chain: Chain, workers: &Workers) -> io::Result<Chain> {
        while let Some(stream) = workers.next() {
            chain = self.connection(&stream, queue, chain)?;
        }
        Ok(chain)
    }

    fn connection(&self, stream: &UnixStream, queue: usize, chain: Chain) -> io::Result<Chain> {
        stream.set_nonblocking(false)?;
        let agreed = match negotiation::run(stream, &self.export, self.stop) {
            Ok(Some(agreed)) => agreed,
            Ok(None) | Err(NegotiationError::Stopped) => return Ok(chain),
            Err(error) => {
                tracing::warn!(%error, "the connection is ended");
                return Ok(chain);
            }
        };
        let (served, stop) = (self.served, self.stop);
        let transmission =
            Transmission::new(stream, agreed, served, stop, (queue, chain), self.pool_bytes);
        match transmission {
            Ok(transmission) => {
                self.count(|connections| connections + 1);
                tracing::info!(connection = queue, "a client is connected");
                let chain = transmission.run();
                self.count(|connections| connections - 1);
                tracing::info!(connection = queue, "the client is gone; all it asked is finished");
                Ok(chain)
            }
            Err((chain, error)) => {
                tracing::warn!(%error, "no memory for the connection, which is ended");
                Ok(*chain)
            }
        }
    }

    fn count(&self, change: impl FnOnce(usize) -> usize) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        *connections = change(*connections);
        let idle = *connections == 0;
        self.served.state.set(if idle { DiskActivity::Idle } else { DiskActivity::Connected });
    }
}
