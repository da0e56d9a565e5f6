//! Who may have how many connections to the server.
//!
//! ```text
//!  accepted ─► stranger ──── a request with a user's token ────► known ─► ends
//!                 │ STRANGER_TIMEOUT, or one too many of strangers
//!                 ▼
//!               closed
//! ```
//! A stranger has shown no token yet: it is in its TLS handshake, joins a host, or asks what needs no token. Strangers
//! have places of their own, and take none from users, whatever they do. Where they are too many, the oldest one of the
//! address with the most goes: who shows a token at once is hardly ever met by that. What users hold open (long
//! polls, consoles, exposed disks) has a limit of its own, so that requests that are answered at once find room.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use axum::Extension;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use vmseal_api::problem::{ErrorCode, Problem};

/// Connections of users. With [`STRANGERS_MAX`] well below the 1024 descriptors that a process has by default.
const KNOWN_MAX: usize = 512;

/// What users may hold open at a time: three quarters of their connections.
const HELD_MAX: usize = 384;

/// Connections of strangers.
const STRANGERS_MAX: usize = 256;

/// Connections of strangers from one address: several commands at a time, and not all places.
const STRANGERS_PER_SOURCE: usize = 128;

/// How long one may stay a stranger: a TLS handshake and a join fit well within.
pub(crate) const STRANGER_TIMEOUT: Duration = Duration::from_secs(30);

/// The places for connections.
pub(crate) struct Places {
    strangers: Mutex<Vec<Stranger>>,
    known: Arc<Semaphore>,
    held: Arc<Semaphore>,
}

/// Oldest first in their list.
struct Stranger {
    source: IpAddr,
    /// Told when it is to go.
    leave: Arc<Notify>,
}

impl Places {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            strangers: Mutex::default(),
            known: Arc::new(Semaphore::new(KNOWN_MAX)),
            held: Arc::new(Semaphore::new(HELD_MAX)),
        })
    }

    fn strangers(&self) -> MutexGuard<'_, Vec<Stranger>> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in a stranger; another one may have to leave for it.
    pub(crate) fn admit(self: &Arc<Self>, source: IpAddr) -> Connection {
        let source = source.to_canonical();
        let leave = Arc::new(Notify::new());
        let mut strangers = self.strangers();
        if let Some(index) = one_too_many(&strangers, source) {
            // It is told once, also when it does not wait for that yet.
            strangers.remove(index).leave.notify_one();
        }
        strangers.push(Stranger { source, leave: Arc::clone(&leave) });
        drop(strangers);
        let (places, known) = (Arc::clone(self), OnceLock::new());
        Connection(Arc::new(Inner { places, source, leave, known }))
    }
}

/// Which stranger has to go before one from `source` is taken in.
fn one_too_many(strangers: &[Stranger], source: IpAddr) -> Option<usize> {
    let of = |source| strangers.iter().filter(|it| it.source == source).count();
    let crowded = if of(source) >= STRANGERS_PER_SOURCE {
        source
    } else if strangers.len() >= STRANGERS_MAX {
        strangers.iter().map(|it| it.source).max_by_key(|source| of(*source))?
    } else {
        return None;
    };
    strangers.iter().position(|it| it.source == crowded)
}

/// A connection, in the extensions of its requests.
#[derive(Clone)]
pub(crate) struct Connection(Arc<Inner>);

struct Inner {
    places: Arc<Places>,
    source: IpAddr,
    leave: Arc<Notify>,
    known: OnceLock<OwnedSemaphorePermit>,
}

impl Connection {
    /// The address that it comes from.
    pub(crate) fn source(&self) -> IpAddr {
        self.0.source
    }

    /// A user's token came over it: it is no stranger's from here on.
    ///
    /// # Errors
    /// `limit-exceeded`: users have too many already.
    pub(crate) fn is_users(&self) -> Result<(), Problem> {
        if self.is_known() {
            return Ok(());
        }
        let permit = Arc::clone(&self.0.places.known).try_acquire_owned().map_err(|_| {
            let detail = format!(
                "{KNOWN_MAX} connections are open, which is the most: close some, or try again"
            );
            Problem::new(ErrorCode::LimitExceeded, detail)
        })?;
        // Of two requests at once on it, one keeps its place; the other's is given back.
        let _ = self.0.known.set(permit);
        self.0.leave_strangers();
        Ok(())
    }

    pub(crate) fn is_known(&self) -> bool {
        self.0.known.get().is_some()
    }

    /// Waits until it has to leave to make room. A user's never has to.
    pub(crate) async fn leave(&self) {
        loop {
            self.0.leave.notified().await;
            if !self.is_known() {
                return;
            }
        }
    }
}

impl Inner {
    fn leave_strangers(&self) {
        self.places.strangers().retain(|it| !Arc::ptr_eq(&it.leave, &self.leave));
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.leave_strangers();
    }
}

/// A place for something that is held open; kept for as long as that is.
///
/// # Errors
/// `limit-exceeded`.
pub(crate) fn hold(
    connection: Option<&Extension<Connection>>,
) -> Result<Option<OwnedSemaphorePermit>, Problem> {
    let Some(Extension(connection)) = connection else { return Ok(None) };
    let held = Arc::clone(&connection.0.places.held).try_acquire_owned().map_err(|_| {
        let detail = format!(
            "{HELD_MAX} consoles, exposed disks, and requests that wait for news are open, which is the most: end some, or try again"
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
        connection.leave().now_or_never().is_some()
    }

    #[tokio::test]
    async fn strangers_take_no_places_from_users_and_the_oldest_of_the_most_goes() {
        let places = Places::new();
        let user = places.admit(address(1));
        user.is_users().unwrap();
        let mut flood: Vec<_> =
            (0..STRANGERS_PER_SOURCE).map(|_| places.admit(address(1))).collect();
        assert!(!flood.iter().any(has_to_leave));
        flood.push(places.admit(address(1)));
        assert!(has_to_leave(&flood[0]) && !flood[1..].iter().any(has_to_leave));
        let more: Vec<_> = (0..STRANGERS_MAX - STRANGERS_PER_SOURCE)
            .map(|index| places.admit(address(2 + u8::try_from(index % 100).unwrap())))
            .collect();
        let late = places.admit(address(200));
        assert!(has_to_leave(&flood[1]) && !more.iter().any(has_to_leave) && !has_to_leave(&late));
        assert_eq!(places.strangers().len(), STRANGERS_MAX);
        assert!(!has_to_leave(&user));
        late.is_users().unwrap();
        assert!(late.is_known());
        assert_eq!(places.strangers().len(), STRANGERS_MAX - 1);
        drop((flood, more));
        assert!(places.strangers().is_empty());
    }

    #[test]
    fn users_have_a_limit_and_give_back_what_they_had() {
        let places = Places::new();
        let connection = || places.admit(address(1));
        let mut users: Vec<_> = (0..KNOWN_MAX).map(|_| connection()).collect();
        users.iter().for_each(|user| user.is_users().unwrap());
        users[0].is_users().unwrap();
        let one_more = connection();
        assert_eq!(one_more.is_users().unwrap_err().code, ErrorCode::LimitExceeded);
        users.pop();
        one_more.is_users().unwrap();
    }

    #[test]
    fn what_is_held_open_leaves_room_for_requests() {
        let places = Places::new();
        let connection = Extension(places.admit(address(1)));
        let mut held: Vec<_> = (0..HELD_MAX).map(|_| hold(Some(&connection)).unwrap()).collect();
        let refused = hold(Some(&connection)).unwrap_err();
        assert_eq!(refused.code, ErrorCode::LimitExceeded);
        held.pop();
        assert!(hold(Some(&connection)).unwrap().is_some());
        const { assert!(HELD_MAX < KNOWN_MAX) };
    }
}
