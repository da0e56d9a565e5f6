//! How much room images take in the pool, for `stat(2)`.
//!
//! ```text
//!  stat ──> ask ──known for less than KNOWN──> what is known
//!            └────else──> a thread counts, by a handle of its own ──> told within WAIT, else what was known before
//! ```
//! A thread of its own, as a cluster that does not answer would keep the threads for names. A handle of its own, that only reads:
//! the file's has writes under way, which would be waited for, and it must be closed, with its lock, when the file is.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::cluster::Pool;
use crate::image::Image;
use crate::inode::Inode;

/// How long a count is good: it takes some ten requests to the cluster, and those who list a datastore ask for each file twice.
const KNOWN: Duration = Duration::from_secs(5);

/// How long a request waits for a count: many times what one takes in a cluster that is well.
const WAIT: Duration = Duration::from_secs(1);

/// The most counts at a time, over all images: a cluster that does not answer keeps no more threads.
const COUNTS_MAX: usize = 4;

/// What is told where the room is not known: all of it, however long the file is.
const ALL: u64 = u64::MAX;

/// What an image takes at least, in bytes. It has a header; and some programs take a file without blocks for one without data, while
/// data may have been written since the count.
const LEAST: u64 = 4096;

/// What is known of the room of images.
pub struct Rooms(Arc<Shared>);

struct Shared {
    count: Box<dyn Fn(Inode) -> u64 + Send + Sync>,
    state: Mutex<State>,
    counted: Condvar,
}

#[derive(Default)]
struct State {
    images: HashMap<Inode, Known>,
    /// How many counts there are now.
    counts: usize,
}

#[derive(Default)]
struct Known {
    /// What was counted last, and when.
    told: Option<(Instant, u64)>,
    /// Since when it is being counted.
    counting: Option<Instant>,
}

impl Rooms {
    /// Of the images in a pool.
    #[must_use]
    pub fn of(pool: Arc<Pool>) -> Self {
        Self::counted_by(move |inode| count(&pool, inode))
    }

    fn counted_by(count: impl Fn(Inode) -> u64 + Send + Sync + 'static) -> Self {
        let (count, state, counted) = (Box::new(count), Mutex::default(), Condvar::new());
        Self(Arc::new(Shared { count, state, counted }))
    }

    /// How much room an image takes, in bytes, if that was counted of late. It may be more than the file is long.
    #[must_use]
    pub fn known(&self, inode: Inode) -> Option<u64> {
        self.0.state().fresh(inode)
    }

    /// The same; it is counted if it was not. None, or what was counted before, where the cluster does not say it soon.
    #[must_use]
    pub fn ask(&self, inode: Inode) -> Option<u64> {
        let mut state = self.0.state();
        if let Some(room) = state.fresh(inode) {
            return Some(room);
        }
        let begun = match state.counting(inode) {
            Some(begun) => begun,
            None if state.counts >= COUNTS_MAX => return state.last(inode),
            None => match self.start(&mut state, inode) {
                Some(begun) => begun,
                None => return state.last(inode),
            },
        };
        // From its beginning: a count that hangs is not waited for again and again.
        let left = WAIT.saturating_sub(begun.elapsed());
        let goes_on = |state: &mut State| state.counting(inode).is_some();
        let waited = self.0.counted.wait_timeout_while(state, left, goes_on);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.last(inode)
    }

    /// The kernel does not know the file any more.
    pub fn forget(&self, inode: Inode) {
        self.0.state().images.remove(&inode);
    }

    /// Starts a count; returns when.
    fn start(&self, state: &mut State, inode: Inode) -> Option<Instant> {
        let shared = Arc::clone(&self.0);
        let count = move || {
            let room = (shared.count)(inode);
            let mut state = shared.state();
            state.counts -= 1;
            // Forgotten meanwhile, it is counted again when it is asked for.
            if let Some(known) = state.images.get_mut(&inode) {
                *known = Known { told: Some((Instant::now(), room)), counting: None };
            }
            shared.counted.notify_all();
        };
        if let Err(error) = std::thread::Builder::new().name("room".into()).spawn(count) {
            tracing::warn!(%inode, %error, "the room of an image is not counted: there is no thread");
            return None;
        }
        let begun = Instant::now();
        state.counts += 1;
        state.images.entry(inode).or_default().counting = Some(begun);
        Some(begun)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn fresh(&self, inode: Inode) -> Option<u64> {
        let (at, room) = self.images.get(&inode)?.told?;
        (at.elapsed() < KNOWN).then_some(room)
    }

    fn last(&self, inode: Inode) -> Option<u64> {
        self.images.get(&inode)?.told.map(|(_, room)| room)
    }

    fn counting(&self, inode: Inode) -> Option<Instant> {
        self.images.get(&inode)?.counting
    }
}

/// Counts the room of an image.
fn count(pool: &Arc<Pool>, inode: Inode) -> u64 {
    match Image::open(pool, &inode.image()).and_then(|image| image.room()) {
        Ok(Some(room)) => room.max(LEAST),
        Ok(None) => ALL,
        Err(error) => {
            // It may have been removed.
            tracing::debug!(%inode, %error, "the room of an image is not known");
            ALL
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_room_is_counted_once_for_a_while() {
        let counts = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&counts);
        let rooms = Rooms::counted_by(move |_| count.fetch_add(1, Ordering::Relaxed) + 7);
        let inode = Inode(2);
        assert_eq!(rooms.known(inode), None);
        assert_eq!((rooms.ask(inode), rooms.ask(inode)), (Some(7), Some(7)));
        assert_eq!(rooms.known(inode), Some(7));
        rooms.forget(inode);
        assert_eq!(rooms.ask(inode), Some(8));
    }

    #[test]
    fn a_cluster_that_does_not_answer_is_waited_for_once_and_by_few() {
        let (answer, answers) = mpsc::channel();
        let answers = Mutex::new(answers);
        let wait = move |_| answers.lock().unwrap().recv().unwrap();
        let rooms = Rooms::counted_by(wait);
        let begun = Instant::now();
        assert_eq!(rooms.ask(Inode(2)), None);
        assert!(begun.elapsed() >= WAIT);
        let begun = Instant::now();
        assert_eq!(rooms.ask(Inode(2)), None);
        assert!(begun.elapsed() < WAIT, "it was waited for again");
        rooms.0.state().counts = COUNTS_MAX;
        assert_eq!(rooms.ask(Inode(3)), None);
        assert_eq!(rooms.0.state().counting(Inode(3)), None, "one too many");
        answer.send(7).unwrap();
        while rooms.known(Inode(2)).is_none() {
            std::thread::yield_now();
        }
        assert_eq!(rooms.known(Inode(2)), Some(7));
    }
}
