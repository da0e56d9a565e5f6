//! The connections to one server: a bounded number, a few of them kept while there is nothing to do.
//!
//! ```text
//!            permit, not quiet or none idle             exchange done, answer understood,
//!   request ------------------------------> opened ---+  not too old, room among the idle
//!      |                                              +----------------------------> idle
//!      | permit, an idle one is quiet                 |                               |
//!      +----------------------------------> taken ----+                               |
//!                                             |       |                               |
//!                            dead, repeatable |       | any error, cancelled          | idle_for over
//!                                             v       v                               v
//!                                          opened   closed <--------------------------+
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use tokio::sync::Semaphore;
use vmseal_secret::SecretBytes;

use super::connection::{Connection, Failure, Peer, within};
use super::error::{Error, Step};
use super::settings::PoolLimits;

/// The connections to one server.
pub(super) struct Pool {
    pub(super) peer: Peer,
    limits: PoolLimits,
    permits: Semaphore,
    idle: Mutex<Idle>,
}

/// A request without an answer.
pub(super) struct Unanswered {
    /// Why.
    pub(super) error: Error,
    /// Some of the request may have arrived: the server may do it.
    pub(super) sent: bool,
}

impl Unanswered {
    fn sent(error: Error) -> Self {
        Self { error, sent: true }
    }
}

impl From<Error> for Unanswered {
    fn from(error: Error) -> Self {
        Self { error, sent: false }
    }
}

#[derive(Default)]
struct Idle {
    /// The longest idle first.
    connections: Vec<(Connection, Instant)>,
    /// A task will close those whose time is over.
    swept: bool,
}

impl Pool {
    pub(super) fn new(peer: Peer, limits: PoolLimits) -> Arc<Self> {
        let permits = Semaphore::new(limits.connections.min(Semaphore::MAX_PERMITS));
        Arc::new(Self { peer, limits, permits, idle: Mutex::default() })
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many connections are open with nothing to do.
    pub(super) fn idle_count(&self) -> usize {
        self.idle().connections.len()
    }

    /// One exchange, on a connection that is open or a new one. `read` gets the answer; when it refuses
    /// it, the connection is closed. If an idle connection turns out dead before a byte of the answer, a
    /// `repeatable` request is sent once more, on a new one.
    pub(super) async fn exchange<T>(
        self: &Arc<Self>,
        request: &[u8],
        repeatable: bool,
        read: impl FnOnce(&SecretBytes) -> Result<T, Error>,
    ) -> Result<T, Unanswered> {
        let (server, patience) = (&self.peer.endpoint, self.peer.timeouts.wait);
        let permit = within(server, Step::Wait, patience, async {
            // The semaphore is never closed.
            Ok(self.permits.acquire().await.ok())
        });
        let _permit = permit.await?;
        let (connection, answer) = self.answer(request, repeatable).await?;
        let answer = read(&answer).map_err(Unanswered::sent)?;
        self.put_back(connection);
        Ok(answer)
    }

    async fn answer(
        &self,
        request: &[u8],
        repeatable: bool,
    ) -> Result<(Connection, SecretBytes), Unanswered> {
        if let Some(mut connection) = self.take_idle() {
            match connection.exchange(&self.peer, request).await {
                Ok(answer) => return Ok((connection, answer)),
                Err(Failure { was_dead: true, .. }) if repeatable => {}
                Err(failure) => return Err(Unanswered::sent(failure.error)),
            }
        }
        let mut connection = Connection::open(&self.peer).await?;
        match connection.exchange(&self.peer, request).await {
            Ok(answer) => Ok((connection, answer)),
            // In TLS 1.3 that comes after the request, which was not read.
            Err(failure) if failure.error.is_not_let_in() => Err(failure.error.into()),
            Err(failure) => Err(Unanswered::sent(failure.error)),
        }
    }

    /// The connection that was used last and is still good.
    fn take_idle(&self) -> Option<Connection> {
        let mut idle = self.idle();
        while let Some((connection, since)) = idle.connections.pop() {
            if since.elapsed() < self.limits.idle_for && connection.is_quiet() {
                return Some(connection);
            }
        }
        None
    }

    fn put_back(self: &Arc<Self>, connection: Connection) {
        let mut idle = self.idle();
        if idle.connections.len() >= self.limits.idle || connection.age() >= self.limits.lifetime {
            return;
        }
        idle.connections.push((connection, Instant::now()));
        if !idle.swept {
            idle.swept = true;
            tokio::spawn(sweep(Arc::downgrade(self)));
        }
    }

    /// Closes what has been idle too long. Gives when the next one will be, or nothing when none is left.
    fn close_old(&self) -> Option<Instant> {
        let mut idle = self.idle();
        let idle_for = self.limits.idle_for;
        idle.connections.retain(|(_, since)| since.elapsed() < idle_for);
        let next = idle.connections.first().map(|(_, since)| *since + idle_for);
        idle.swept = next.is_some();
        next
    }
}

/// Closes idle connections in their time; ends when there are none, or no pool.
async fn sweep(pool: Weak<Pool>) {
    loop {
        let Some(next) = pool.upgrade().and_then(|pool| pool.close_old()) else { return };
        tokio::time::sleep_until(next.into()).await;
    }
}
