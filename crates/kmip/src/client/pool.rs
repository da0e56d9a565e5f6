//! The connections to one server: their number is bounded, and a few are kept while idle.
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
    /// The cause.
    pub(super) error: Error,
    /// Part of the request may have arrived, so the server may execute it.
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
    /// A task will close those that were idle too long.
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

    /// The number of idle connections.
    pub(super) fn idle_count(&self) -> usize {
        self.idle().connections.len()
    }

    /// One exchange, on an idle connection or a new one. `read` parses the answer; if it fails, the
    /// connection is closed. If an idle connection turns out to be dead before the first byte of the
    /// answer, a `repeatable` request is sent once more, on a new one.
    pub(super) async fn exchange<T>(
        self: &Arc<Self>,
        request: &[u8],
        repeatable: bool,
        read: impl FnOnce(&SecretBytes) -> Result<T, Error>,
    ) -> Result<T, Unanswered> {
        let (server, timeout) = (&self.peer.endpoint, self.peer.timeouts.wait);
        let permit = within(server, Step::Wait, timeout, async {
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
            // In TLS 1.3 the refusal comes after the request, which was not read.
            Err(failure) if failure.error.is_not_let_in() => Err(failure.error.into()),
            Err(failure) => Err(Unanswered::sent(failure.error)),
        }
    }

    /// The connection that was used last and is still usable.
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

    /// Closes connections that were idle too long. Returns when the next one will be; `None` if none is left.
    fn close_old(&self) -> Option<Instant> {
        let mut idle = self.idle();
        let idle_for = self.limits.idle_for;
        idle.connections.retain(|(_, since)| since.elapsed() < idle_for);
        let next = idle.connections.first().map(|(_, since)| *since + idle_for);
        idle.swept = next.is_some();
        next
    }
}

/// Closes idle connections when they are due; ends when there are none, or no pool.
async fn sweep(pool: Weak<Pool>) {
    loop {
        let Some(next) = pool.upgrade().and_then(|pool| pool.close_old()) else { return };
        tokio::time::sleep_until(next.into()).await;
    }
}
