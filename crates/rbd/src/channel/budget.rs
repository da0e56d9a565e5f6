//! How many bytes filters have in flight: librbd copies what is written before it waits for the cluster, so a slow cluster would cost as
//! much memory as filters have requests.
//!
//! An image may have a third as much under way as it leaves to the others. So one whose objects do not answer (a placement group that is
//! not active) holds a quarter of all at most, a second one a quarter of what is left then, and so on: ten of them leave 14 MiB. Only the
//! thread of the filter of such an image waits.
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

/// The most bytes in flight of all filters together: several busy disks with long requests. With those of FUSE and of the library
/// it stays far below the limit of the process's memory.
pub const BYTES_IN_FLIGHT: u64 = 256 << 20;

/// The most that a request counts for: that of the longest one with data. One for zeroes may be in more objects.
const AT_ONCE: u64 = BYTES_IN_FLIGHT / 4;

/// An image leaves this many times as much to the others as it has under way.
const OTHERS: u64 = 3;

// What is read or written counts whole.
const _: () = assert!(REQUEST_BYTES_MAX <= AT_ONCE);

/// What a request counts for at least, in bytes, for each object that it is in: librbd makes a request to each of them, and the library
/// has a limit for their number, too.
pub const OF_OBJECT: u64 = 32 << 10;

/// The most requests to objects in flight of all filters together, but for those for zeroes that are in very many.
pub const REQUESTS_IN_FLIGHT: u64 = BYTES_IN_FLIGHT / OF_OBJECT;

/// Bytes that are left to take.
pub struct Budget {
    left: Mutex<u64>,
    changed: Condvar,
}

/// What one image has of it, as one filter has opened it.
pub struct Share {
    budget: Arc<Budget>,
    /// Changed by who has locked what is left.
    under_way: AtomicU64,
}

/// Bytes that are taken, until this is dropped.
pub struct Taken {
    share: Arc<Share>,
    bytes: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Self { left: Mutex::new(BYTES_IN_FLIGHT), changed: Condvar::new() }
    }
}

impl Budget {
    fn left(&self) -> MutexGuard<'_, u64> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a request may go for which these bytes count.
fn goes(bytes: u64, under_way: u64, left: u64) -> bool {
    let fits = |left: u64| under_way == 0 || under_way + bytes <= left / OTHERS;
    left.checked_sub(bytes).is_some_and(fits)
}

impl Share {
    /// That of one more image.
    #[must_use]
    pub fn of(budget: &Arc<Budget>) -> Arc<Self> {
        Arc::new(Self { budget: Arc::clone(budget), under_way: AtomicU64::new(0) })
    }

    /// Takes bytes, at most a quarter of all at once; waits until there are as many for this image.
    #[must_use]
    pub fn take(self: &Arc<Self>, bytes: u64) -> Taken {
        let bytes = bytes.min(AT_ONCE);
        let waits = |left: &mut u64| !goes(bytes, self.under_way.load(Ordering::Relaxed), *left);
        let waited = self.budget.changed.wait_while(self.budget.left(), waits);
        let mut left = waited.unwrap_or_else(PoisonError::into_inner);
        *left -= bytes;
        self.under_way.fetch_add(bytes, Ordering::Relaxed);
        drop(left);
        Taken { share: Arc::clone(self), bytes }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let Share { budget, under_way } = &*self.share;
        let mut left = budget.left();
        *left += self.bytes;
        under_way.fetch_sub(self.bytes, Ordering::Relaxed);
        drop(left);
        budget.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
    use std::thread::JoinHandle;
    use std::time::Duration;

    use super::*;

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
        while goes(bytes, share.under_way.load(Ordering::Relaxed), *share.budget.left()) {
            taken.push(share.take(bytes));
        }
        taken
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
        }
        drop(held);
        assert_eq!(*budget.left(), BYTES_IN_FLIGHT);
    }

    #[test]
    fn the_first_request_of_an_image_waits_for_room_alone() {
        let budget = Arc::new(Budget::default());
        let (one, other) = (Share::of(&budget), Share::of(&budget));
        let whole: Vec<_> = (0..3).map(|_| Share::of(&budget).take(u64::MAX)).collect();
        assert_eq!(*budget.left(), AT_ONCE, "one request took more than a quarter");
        // More than would be left; a second one would have to wait.
        let first = one.take(AT_ONCE - MIB);
        let (waiter, told) = taking(&other, 2 * MIB);
        assert_eq!(told.recv_timeout(SOON).err(), Some(RecvTimeoutError::Timeout));
        drop(first);
        drop(told.recv().unwrap());
        waiter.join().unwrap();
        drop(whole);
        assert_eq!(*budget.left(), BYTES_IN_FLIGHT);
        let idle = |share: &Share| share.under_way.load(Ordering::Relaxed) == 0;
        assert!(idle(&one) && idle(&other));
    }
}
