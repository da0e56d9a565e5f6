//! The accepting end: one port of the agent, and the migrations that it expects there.
//!
//! A stranger gets nothing but an answer to a hello that names a migration which is expected. Keys are derived, and a stream is taken, only
//! once the other end has proved that it has the spec. Everybody else is closed and counted, except one that closes the connection before
//! its first byte: another host tries so, before a migration, whether it can connect.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use uuid::Uuid;
use vmseal_log::Seldom;
use vmseal_seal::wire::{Accepting, HELLO_LEN, Hello, HelloError, PROOF_LEN, Spec};

use super::error::TransportError;
use super::session::{Opened, Session, plain_socket};
use super::{HANDSHAKE_TIMEOUT, UNPROVEN_MAX, UNPROVEN_PER_SOURCE, socket};

/// How long nothing is accepted after an error of accepting: there are no descriptors left, and some have to be given back first.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The port for migrations to this host. It is closed when this is dropped; sessions go on.
pub struct Listener {
    registry: Arc<Registry>,
    address: SocketAddr,
    accepting: JoinHandle<()>,
}

/// Connections that did not become a stream, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refused {
    /// There were too many that had not proved themselves, in all or from one address.
    pub crowded: u64,
    /// Something else than a hello of this version that agrees with the spec.
    pub hello: u64,
    /// A migration that this host does not expect, or does not expect any more.
    pub unknown_migration: u64,
    /// The proof that it has the spec's key is wrong.
    pub proof: u64,
    /// A stream that was taken before.
    pub taken: u64,
    /// The handshake took too long.
    pub timed_out: u64,
    /// The connection broke in the handshake.
    pub lost: u64,
}

#[derive(Default)]
struct Counters {
    crowded: Counter,
    hello: Counter,
    unknown_migration: Counter,
    proof: Counter,
    taken: Counter,
    timed_out: Counter,
    lost: Counter,
}

/// Connections that were refused for one reason. Each has lines of its own, so that a port scan does not hide who tries a wrong key.
#[derive(Default)]
struct Counter {
    refused: AtomicU64,
    told: Seldom,
}

/// Why a connection is closed.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("it was closed without a word")]
    Tried,
    #[error("too many connections have not proved themselves")]
    Crowded,
    #[error("{0}")]
    Hello(HelloError),
    #[error("migration {0} is not expected here")]
    UnknownMigration(Uuid),
    #[error("it did not prove that it has the key of migration {0}")]
    Proof(Uuid),
    #[error("stream {1} of migration {0} was taken before")]
    Taken(Uuid, u16),
    #[error("the handshake took too long")]
    TimedOut,
    #[error("it was lost: {0}")]
    Lost(#[from] std::io::Error),
}

#[derive(Default)]
struct Registry {
    expected: Mutex<HashMap<Uuid, Arc<Entry>>>,
    /// Connections that have not proved themselves, by address.
    unproven: Mutex<HashMap<IpAddr, usize>>,
    refused: Counters,
}

/// A migration that is expected.
struct Entry {
    spec: Spec,
    /// Which streams were taken.
    taken: Mutex<Vec<bool>>,
    came: mpsc::UnboundedSender<(u16, Result<Opened, TransportError>)>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Listener {
    /// Listens at an address.
    ///
    /// # Errors
    /// [`TransportError::Bind`].
    pub async fn bind(address: SocketAddr) -> Result<Self, TransportError> {
        let failed = |error| TransportError::Bind { address, error: Arc::new(error) };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let registry = Arc::new(Registry::default());
        let accepting = tokio::spawn(accept(listener, registry.clone()));
        Ok(Self { registry, address, accepting })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Expects a migration, until the result is dropped or its session is complete.
    ///
    /// # Errors
    /// [`TransportError::AlreadyExpected`].
    pub fn expect(&self, spec: Spec) -> Result<Expected, TransportError> {
        let (migration, streams) = (spec.migration(), spec.streams());
        let mut expected = lock(&self.registry.expected);
        if expected.contains_key(&migration) {
            return Err(TransportError::AlreadyExpected(migration));
        }
        let (came, arrivals) = mpsc::unbounded_channel();
        let taken = Mutex::new(vec![false; usize::from(streams)]);
        expected.insert(migration, Arc::new(Entry { spec, taken, came }));
        Ok(Expected { registry: self.registry.clone(), migration, streams, arrivals })
    }

    /// What was refused since it listens.
    #[must_use]
    pub fn refused(&self) -> Refused {
        let load = |counter: &Counter| counter.refused.load(Ordering::Relaxed);
        let refused = &self.registry.refused;
        Refused {
            crowded: load(&refused.crowded),
            hello: load(&refused.hello),
            unknown_migration: load(&refused.unknown_migration),
            proof: load(&refused.proof),
            taken: load(&refused.taken),
            timed_out: load(&refused.timed_out),
            lost: load(&refused.lost),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// A migration that is expected. When it is dropped, it is not expected any more.
pub struct Expected {
    registry: Arc<Registry>,
    migration: Uuid,
    streams: u16,
    arrivals: mpsc::UnboundedReceiver<(u16, Result<Opened, TransportError>)>,
}

impl Expected {
    /// Waits until all streams have come. The spec is used up in any case.
    ///
    /// # Errors
    /// [`TransportError::NotConnected`] after `within`; [`TransportError::Lost`] or [`TransportError::Setup`] for a stream that came
    /// and went.
    pub async fn session(mut self, within: Duration) -> Result<Session, TransportError> {
        let mut opened: Vec<Option<Opened>> = (0..self.streams).map(|_| None).collect();
        let mut came = 0;
        let all = async {
            while came < self.streams {
                // The registry holds a sender until this is dropped.
                let Some((stream, arrived)) = self.arrivals.recv().await else { break };
                opened[usize::from(stream)] = Some(arrived?);
                came += 1;
            }
            Ok(())
        };
        let all = timeout(within, all).await;
        let opened: Vec<Opened> = opened.into_iter().flatten().collect();
        match all {
            Ok(Err(error)) => Err(error),
            Ok(Ok(())) if opened.len() == usize::from(self.streams) => {
                Ok(Session::new(self.migration, opened))
            }
            _ => Err(TransportError::NotConnected {
                migration: self.migration,
                streams: self.streams,
                came,
                seconds: within.as_secs(),
            }),
        }
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        lock(&self.registry.expected).remove(&self.migration);
    }
}

async fn accept(listener: TcpListener, registry: Arc<Registry>) {
    loop {
        match listener.accept().await {
            Ok((socket, from)) => match registry.admit(from.ip()) {
                Ok(place) => drop(tokio::spawn(greet(socket, from, place))),
                Err(refusal) => {
                    registry.count(from, &refusal);
                }
            },
            Err(error) => {
                tracing::warn!(%error, "a connection to the migration port was not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The place of a connection that has not proved itself; given back when it is dropped.
struct Place {
    registry: Arc<Registry>,
    source: IpAddr,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut unproven = lock(&self.registry.unproven);
        if let Some(count) = unproven.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                unproven.remove(&self.source);
            }
        }
    }
}

impl Registry {
    fn admit(self: &Arc<Self>, source: IpAddr) -> Result<Place, Refusal> {
        let mut unproven = lock(&self.unproven);
        let of_source = unproven.get(&source).copied().unwrap_or(0);
        if of_source >= UNPROVEN_PER_SOURCE || unproven.values().sum::<usize>() >= UNPROVEN_MAX {
            return Err(Refusal::Crowded);
        }
        unproven.insert(source, of_source + 1);
        Ok(Place { registry: self.clone(), source })
    }

    /// Counts a refusal, and logs it unless others were just before; true if it was logged. A port that was only tried is neither.
    fn count(&self, from: SocketAddr, refusal: &Refusal) -> bool {
        let counter = match refusal {
            Refusal::Tried => return false,
            Refusal::Crowded => &self.refused.crowded,
            Refusal::Hello(_) => &self.refused.hello,
            Refusal::UnknownMigration(_) => &self.refused.unknown_migration,
            Refusal::Proof(_) => &self.refused.proof,
            Refusal::Taken(..) => &self.refused.taken,
            Refusal::TimedOut => &self.refused.timed_out,
            Refusal::Lost(_) => &self.refused.lost,
        };
        counter.refused.fetch_add(1, Ordering::Relaxed);
        let Some(unlogged) = counter.told.due() else { return false };
        tracing::info!(%from, %refusal, unlogged, "a connection to the migration port was refused");
        true
    }
}

/// Does the accepting end's part of a handshake.
async fn greet(mut socket: TcpStream, from: SocketAddr, place: Place) {
    let registry = place.registry.clone();
    let done = timeout(HANDSHAKE_TIMEOUT, handshake(&mut socket, &place)).await;
    drop(place);
    let (entry, stream, ends) = match done.unwrap_or(Err(Refusal::TimedOut)) {
        Ok(proven) => proven,
        Err(refusal) => {
            registry.count(from, &refusal);
            return;
        }
    };
    let opened = match ends {
        Ok(ends) => plain_socket(socket)
            .map(|socket| Opened { socket, ends })
            .map_err(TransportError::setup(stream)),
        Err(error) => Err(error),
    };
    // Nobody waits where the migration was given up meanwhile; the connection closes then.
    let _ = entry.came.send((stream, opened));
}

type Proven = (Arc<Entry>, u16, Result<vmseal_seal::wire::Ends, TransportError>);

/// Up to the stream that the other end has proved to have a right to. From there on an error is the session's.
async fn handshake(socket: &mut TcpStream, place: &Place) -> Result<Proven, Refusal> {
    socket::prepare(socket)?;
    let mut hello = [0; HELLO_LEN];
    let come = socket.read(&mut hello).await?;
    if come == 0 {
        return Err(Refusal::Tried);
    }
    socket.read_exact(&mut hello[come..]).await?;
    let hello = Hello::decode(&hello).map_err(Refusal::Hello)?;
    let migration = hello.migration();
    let entry = lock(&place.registry.expected).get(&migration).cloned();
    let entry = entry.ok_or(Refusal::UnknownMigration(migration))?;
    let (accepting, answer) = Accepting::new(&entry.spec, hello).map_err(Refusal::Hello)?;
    socket.write_all(&answer).await?;
    let mut proof = [0; PROOF_LEN];
    socket.read_exact(&mut proof).await?;
    let accepted = accepting.proven(&proof).map_err(|error| match error {
        HelloError::WrongProof => Refusal::Proof(migration),
        other => Refusal::Hello(other),
    })?;
    let stream = accepted.stream();
    let before =
        lock(&entry.taken).get_mut(usize::from(stream)).map(|taken| std::mem::replace(taken, true));
    if before != Some(false) {
        return Err(Refusal::Taken(migration, stream));
    }
    let ends = match accepted.take() {
        Ok((ends, first)) => socket
            .write_all(&first)
            .await
            .map(|()| ends)
            .map_err(|error| TransportError::of_connection(stream, error)),
        Err(error) => Err(TransportError::Frame { stream, error }),
    };
    Ok((entry, stream, ends))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_do_not_fill_the_log_nor_hide_one_who_tries_a_wrong_key() {
        let registry = Registry::default();
        let from = SocketAddr::from(([192, 0, 2, 1], 1));
        assert!(!registry.count(from, &Refusal::Tried), "it was only tried");
        let lines = (0..1000).filter(|_| registry.count(from, &Refusal::Crowded)).count();
        // More than one on a machine that stood still meanwhile.
        assert!((1..10).contains(&lines), "{lines} lines");
        assert!(registry.count(from, &Refusal::Proof(Uuid::nil())), "another reason");
        assert_eq!(registry.refused.crowded.refused.load(Ordering::Relaxed), 1000);
    }
}
