//! How many bytes filters have in flight: librbd copies what is written before it waits for the cluster, so a slow cluster would cost as
//! much memory as filters have requests.
//!
//! An image may have a third as much under way as it leaves to the others. So one whose objects do not answer (a placement group that is
//! not active) holds a quarter of all at most, a second one a quarter of what is left then, and so on: ten of them leave 28 MiB. Only the
//! thread of the filter of such an image waits, and it is woken only when its request can go.
//!
//! ```text
//!  nothing of the image is under way:   goes when there is room for it
//!  something is:                        goes when after it no more is under way of the image than a third of what is left
//! ```
//! Nobody waits in line: the first one might be of an image that does not answer. A long request waits no longer than until the earlier
//! ones of its image have ended, unless there are so many busy images that what is left is shorter than it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use vmseal_channel::REQUEST_BYTES_MAX;

use crate::in_flight::BYTES_IN_FLIGHT;

/// The most that a request counts for: that of the longest one with data. One for zeroes, or for small objects, may be in more objects.
const AT_ONCE: u64 = REQUEST_BYTES_MAX;

/// An image leaves this many times as much to the others as it has under way.
const OTHERS: u64 = 3;

/// What filters may have in flight together.
pub struct Budget {
    state: Mutex<State>,
}

struct State {
    /// Bytes that are left to take.
    left: u64,
    /// Who waits for room, and for how many bytes.
    waiting: Vec<(Arc<Share>, u64)>,
}

/// What one image has of it, as one filter has opened it.
pub struct Share {
    budget: Arc<Budget>,
    /// Changed by who has locked the budget's state.
    under_way: AtomicU64,
    /// A request of this image that waits can go.
    room: Condvar,
}

/// Bytes that are taken, until this is dropped.
pub struct Taken {
    share: Arc<Share>,
    bytes: u64,
}

impl Default for Budget {
    fn default() -> Self {
        let state = State { left: BYTES_IN_FLIGHT, waiting: Vec::new() };
        Self { state: Mutex::new(state) }
    }
}

impl Budget {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// A request of this image waits no more for so many bytes.
    fn waits_no_more(&mut self, share: &Arc<Share>, bytes: u64) {
        let mut waiting = self.waiting.iter();
        let place = waiting.position(|(of, wanted)| Arc::ptr_eq(of, share) && *wanted == bytes);
        if let Some(place) = place {
            self.waiting.swap_remove(place);
        }
    }
}

impl Share {
    /// That of one more image.
    #[must_use]
    pub fn of(budget: &Arc<Budget>) -> Arc<Self> {
        let (under_way, room) = (AtomicU64::new(0), Condvar::new());
        Arc::new(Self { budget: Arc::clone(budget), under_way, room })
    }

    /// Whether a request of this image may go for which these bytes count.
    fn goes(&self, bytes: u64, left: u64) -> bool {
        let under_way = self.under_way.load(Ordering::Relaxed);
        let fits = |left: u64| under_way == 0 || under_way + bytes <= left / OTHERS;
        left.checked_sub(bytes).is_some_and(fits)
    }

    /// Takes bytes, at most those of the longest request at once; waits until there are as many for this image.
    #[must_use]
    pub fn take(self: &Arc<Self>, bytes: u64) -> Taken {
        let bytes = bytes.min(AT_ONCE);
        let mut state = self.budget.state();
        if !self.goes(bytes, state.left) {
            state.waiting.push((Arc::clone(self), bytes));
            let waits = |state: &mut State| !self.goes(bytes, state.left);
            let waited = self.room.wait_while(state, waits);
            state = waited.unwrap_or_else(PoisonError::into_inner);
            state.waits_no_more(self, bytes);
        }
        state.left -= bytes;
        self.under_way.fetch_add(bytes, Ordering::Relaxed);
        drop(state);
        Taken { share: Arc::clone(self), bytes }
    }
}

impl Drop for Taken {
    /// Only here may somebody who waits come to go, and who waits is on the list before the state is unlocked: nobody is forgotten.
    fn drop(&mut self) {
        let mut state = self.share.budget.state();
        state.left += self.bytes;
        self.share.under_way.fetch_sub(self.bytes, Ordering::Relaxed);
        for (share, bytes) in &state.waiting {
            if share.goes(*bytes, state.left) {
                share.room.notify_all();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
    use std::thread::JoinHandle;
    use std::time::Duration;

    use super::*;
    use crate::in_flight::OF_OBJECT;

    /// Long enough for who need not wait.
    const SOON: Duration = Duration::from_millis(50);

    const MIB: u64 = 1 << 20;

    /// Takes bytes in a thread of its own, and says so.
    fn taking(share: &Arc<Share>, bytes: u64) -> (JoinHandle<()>, Receiver<Taken>) {
        let (tell, told) = channel();
        let share = Arc::clone(share);
        (std::thread::spawn(move || tell.send(share.take(bytes)).unwrap()), told)
    }

    /// As much as an image gets, in requests of this length, if none of them ends.
    fn stuck(share: &Arc<Share>, bytes: u64) -> Vec<Taken> {
        let mut taken = Vec::new();
        while share.goes(bytes, share.budget.state().left) {
            taken.push(share.take(bytes));
        }
        taken
    }

    /// How many requests wait.
    fn waiting(budget: &Budget) -> usize {
        budget.state().waiting.len()
    }

    #[test]
    fn an_image_that_is_busy_alone_has_128_mib_under_way() {
        let budget = Arc::new(Budget::default());
        let share = Share::of(&budget);
        let long = stuck(&share, 4 * MIB);
        assert_eq!(long.len(), 32);
        drop(long);
        let short = stuck(&share, OF_OBJECT);
        assert_eq!(short.len(), 4096);
        drop(short);
        assert_eq!(budget.state().left, BYTES_IN_FLIGHT);
    }

    #[test]
    fn images_that_do_not_answer_leave_room_to_others() {
        let budget = Arc::new(Budget::default());
        let mut held = Vec::new();
        for number in 1..=10 {
            let share = Share::of(&budget);
            held.extend(stuck(&share, MIB));
            if number == 1 {
                assert_eq!(share.under_way.load(Ordering::Relaxed), BYTES_IN_FLIGHT / 4);
            }
            // Its next one waits, and nobody else with it.
            let (waiter, told) = taking(&share, MIB);
            assert_eq!(told.recv_timeout(SOON).err(), Some(RecvTimeoutError::Timeout));
            let other = Share::of(&budget);
            drop(other.take(4 * MIB));
            drop(other.take(4096));
            assert!(told.try_recv().is_err(), "what others give back is not the image's");
            // One of its own ends.
            let last = held.pop().unwrap();
            assert!(Arc::ptr_eq(&last.share, &share));
            drop(last);
            held.push(told.recv().unwrap());
            waiter.join().unwrap();
            assert_eq!(waiting(&budget), 0);
        }
        drop(held);
        assert_eq!(budget.state().left, BYTES_IN_FLIGHT);
    }

    #[test]
    fn the_first_request_of_an_image_waits_for_room_alone() {
        let budget = Arc::new(Budget::default());
        let (one, other) = (Share::of(&budget), Share::of(&budget));
        let others = BYTES_IN_FLIGHT / AT_ONCE - 1;
        let whole: Vec<_> = (0..others).map(|_| Share::of(&budget).take(u64::MAX)).collect();
        assert_eq!(budget.state().left, AT_ONCE, "a request took more than the longest one");
        // More than would be left; a second one would have to wait.
        let first = one.take(AT_ONCE - MIB);
        let (waiter, told) = taking(&other, 2 * MIB);
        assert_eq!(told.recv_timeout(SOON).err(), Some(RecvTimeoutError::Timeout));
        drop(first);
        drop(told.recv().unwrap());
        waiter.join().unwrap();
        drop(whole);
        assert_eq!(budget.state().left, BYTES_IN_FLIGHT);
        assert_eq!(waiting(&budget), 0);
        let idle = |share: &Share| share.under_way.load(Ordering::Relaxed) == 0;
        assert!(idle(&one) && idle(&other));
    }
}
