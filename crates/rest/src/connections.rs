//! The limits of connections to the server.
//!
//! ```text
//!  accepted ─► unauthenticated ── a request with a user's token ──► authenticated ─► ends
//!                 │ AUTHENTICATION_TIMEOUT, or one too many of them
//!                 ▼
//!               closed
//! ```
//! An unauthenticated connection has sent no token yet: it is in its TLS handshake, joins a host, or sends requests
//! that need no token. Such connections have a separate limit, so they take no slots from users. If there are too
//! many, the oldest one of the address with the most is closed: a client that sends its token at once is hardly ever
//! affected. Connections that users hold open (long polls, consoles, exposed disks) have their own limit, which
//! leaves room for short requests.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use axum::Extension;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use vmseal_api::problem::{ErrorCode, Problem};

/// Connections of users. Together with [`UNAUTHENTICATED_MAX`] well below the default limit of 1024 descriptors.
const AUTHENTICATED_MAX: usize = 512;

/// How many connections users may hold open at a time: three quarters of theirs.
const HELD_MAX: usize = 384;

/// Unauthenticated connections.
const UNAUTHENTICATED_MAX: usize = 256;

/// Unauthenticated connections from one address: enough for several commands at a time, but not all slots.
const UNAUTHENTICATED_PER_SOURCE: usize = 128;

/// How long a connection may stay unauthenticated: more than enough for a TLS handshake and a join.
pub(crate) const AUTHENTICATION_TIMEOUT: Duration = Duration::from_secs(30);

/// The limits, and their current use.
pub(crate) struct ConnectionLimits {
    unauthenticated: Mutex<Vec<Unauthenticated>>,
    authenticated: Arc<Semaphore>,
    held: Arc<Semaphore>,
}

/// In a list, oldest first.
struct Unauthenticated {
    source: IpAddr,
    /// Notified when it must close.
    leave: Arc<Notify>,
}

impl ConnectionLimits {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            unauthenticated: Mutex::default(),
            authenticated: Arc::new(Semaphore::new(AUTHENTICATED_MAX)),
            held: Arc::new(Semaphore::new(HELD_MAX)),
        })
    }

    fn unauthenticated(&self) -> MutexGuard<'_, Vec<Unauthenticated>> {
        self.unauthenticated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a connection; may close another one to make room.
    pub(crate) fn admit(self: &Arc<Self>, source: IpAddr) -> Connection {
        let source = source.to_canonical();
        let leave = Arc::new(Notify::new());
        let mut unauthenticated = self.unauthenticated();
        if let Some(index) = one_too_many(&unauthenticated, source) {
            // The notification is kept if the connection does not wait for it yet.
            unauthenticated.remove(index).leave.notify_one();
        }
        unauthenticated.push(Unauthenticated { source, leave: Arc::clone(&leave) });
        drop(unauthenticated);
        let (limits, authenticated) = (Arc::clone(self), OnceLock::new());
        Connection(Arc::new(Inner { limits, source, leave, authenticated }))
    }
}

/// The connection to close before one from `source` is admitted.
fn one_too_many(unauthenticated: &[Unauthenticated], source: IpAddr) -> Option<usize> {
    let of = |source| unauthenticated.iter().filter(|it| it.source == source).count();
    let crowded = if of(source) >= UNAUTHENTICATED_PER_SOURCE {
        source
    } else if unauthenticated.len() >= UNAUTHENTICATED_MAX {
        unauthenticated.iter().map(|it| it.source).max_by_key(|source| of(*source))?
    } else {
        return None;
    };
    unauthenticated.iter().position(|it| it.source == crowded)
}

/// A connection, in the extensions of its requests.
#[derive(Clone)]
pub(crate) struct Connection(Arc<Inner>);

struct Inner {
    limits: Arc<ConnectionLimits>,
    source: IpAddr,
    leave: Arc<Notify>,
    authenticated: OnceLock<OwnedSemaphorePermit>,
}

impl Connection {
    /// The address that it comes from.
    pub(crate) fn source(&self) -> IpAddr {
        self.0.source
    }

    /// Marks it as authenticated: it sent a user's token.
    ///
    /// # Errors
    /// `limit-exceeded`: users have too many already.
    pub(crate) fn set_authenticated(&self) -> Result<(), Problem> {
        if self.is_authenticated() {
            return Ok(());
        }
        let permit = Arc::clone(&self.0.limits.authenticated).try_acquire_owned().map_err(|_| {
            let detail = format!(
                "{AUTHENTICATED_MAX} connections are open, which is the limit: close some, or try again"
            );
            Problem::new(ErrorCode::LimitExceeded, detail)
        })?;
        // Of two requests on it at once, one keeps its permit; the other's is returned.
        let _ = self.0.authenticated.set(permit);
        self.0.leave_unauthenticated();
        Ok(())
    }

    pub(crate) fn is_authenticated(&self) -> bool {
        self.0.authenticated.get().is_some()
    }

    /// Waits until it must close to make room. An authenticated one never must.
    pub(crate) async fn evicted(&self) {
        loop {
            self.0.leave.notified().await;
            if !self.is_authenticated() {
                return;
            }
        }
    }
}

impl Inner {
    fn leave_unauthenticated(&self) {
        self.limits.unauthenticated().retain(|it| !Arc::ptr_eq(&it.leave, &self.leave));
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.leave_unauthenticated();
    }
}

/// A permit for a connection that is held open; kept as long as the connection.
///
/// # Errors
/// `limit-exceeded`.
pub(crate) fn hold(
    connection: Option<&Extension<Connection>>,
) -> Result<Option<OwnedSemaphorePermit>, Problem> {
    let Some(Extension(connection)) = connection else { return Ok(None) };
    let held = Arc::clone(&connection.0.limits.held).try_acquire_owned().map_err(|_| {
        let detail = format!(
            "{HELD_MAX} consoles, exposed disks, and requests that wait for changes are open, which is the limit: end some, or try again"
        );
        Problem::new(ErrorCode::LimitExceeded, detail)
    })?;
    Ok(Some(held))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, number])
    }

    fn has_to_leave(connection: &Connection) -> bool {
        use futures_util::FutureExt;
        connection.evicted().now_or_never().is_some()
    }

    #[tokio::test]
    async fn unauthenticated_connections_leave_room_for_users_and_the_oldest_is_closed() {
        let limits = ConnectionLimits::new();
        let user = limits.admit(address(1));
        user.set_authenticated().unwrap();
        let mut flood: Vec<_> =
            (0..UNAUTHENTICATED_PER_SOURCE).map(|_| limits.admit(address(1))).collect();
        assert!(!flood.iter().any(has_to_leave));
        flood.push(limits.admit(address(1)));
        assert!(has_to_leave(&flood[0]) && !flood[1..].iter().any(has_to_leave));
        let more: Vec<_> = (0..UNAUTHENTICATED_MAX - UNAUTHENTICATED_PER_SOURCE)
            .map(|index| limits.admit(address(2 + u8::try_from(index % 100).unwrap())))
            .collect();
        let late = limits.admit(address(200));
        assert!(has_to_leave(&flood[1]) && !more.iter().any(has_to_leave) && !has_to_leave(&late));
        assert_eq!(limits.unauthenticated().len(), UNAUTHENTICATED_MAX);
        assert!(!has_to_leave(&user));
        late.set_authenticated().unwrap();
        assert!(late.is_authenticated());
        assert_eq!(limits.unauthenticated().len(), UNAUTHENTICATED_MAX - 1);
        drop((flood, more));
        assert!(limits.unauthenticated().is_empty());
    }

    #[test]
    fn users_have_a_limit_and_release_their_connections() {
        let limits = ConnectionLimits::new();
        let connection = || limits.admit(address(1));
        let mut users: Vec<_> = (0..AUTHENTICATED_MAX).map(|_| connection()).collect();
        users.iter().for_each(|user| user.set_authenticated().unwrap());
        users[0].set_authenticated().unwrap();
        let one_more = connection();
        assert_eq!(one_more.set_authenticated().unwrap_err().code, ErrorCode::LimitExceeded);
        users.pop();
        one_more.set_authenticated().unwrap();
    }

    #[test]
    fn held_connections_leave_room_for_requests() {
        let limits = ConnectionLimits::new();
        let connection = Extension(limits.admit(address(1)));
        let mut held: Vec<_> = (0..HELD_MAX).map(|_| hold(Some(&connection)).unwrap()).collect();
        let refused = hold(Some(&connection)).unwrap_err();
        assert_eq!(refused.code, ErrorCode::LimitExceeded);
        held.pop();
        assert!(hold(Some(&connection)).unwrap().is_some());
        const { assert!(HELD_MAX < AUTHENTICATED_MAX) };
    }
}
