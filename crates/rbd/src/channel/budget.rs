//! How many bytes filters have in flight: librbd copies what is written before it waits for the cluster, so a slow cluster would cost as
//! much memory as filters have requests.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The most bytes in flight of all filters together: several busy disks with long requests. With those of FUSE and of the library
/// it stays far below the limit of the process's memory.
pub const BYTES_IN_FLIGHT: u64 = 256 << 20;

/// Bytes that are left to take: who came first takes first, so that short requests do not keep a long one waiting for ever.
pub struct Budget {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    left: u64,
    /// How many have come, and how many of them have taken.
    came: u64,
    served: u64,
}

/// Bytes that are taken, until this is dropped.
pub struct Taken {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Default for Budget {
    fn default() -> Self {
        let state = State { left: BYTES_IN_FLIGHT, came: 0, served: 0 };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl Budget {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes bytes, at most [`BYTES_IN_FLIGHT`] at once; waits until all who came before have taken theirs, and there are as many.
    #[must_use]
    pub fn take(self: &Arc<Self>, bytes: u64) -> Taken {
        let bytes = bytes.min(BYTES_IN_FLIGHT);
        let mut state = self.state();
        let place = state.came;
        state.came += 1;
        let waits = |state: &mut State| state.served != place || state.left < bytes;
        let waited = self.changed.wait_while(state, waits);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.served += 1;
        state.left -= bytes;
        drop(state);
        // There may be enough for the next one as well.
        self.changed.notify_all();
        Taken { budget: Arc::clone(self), bytes }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.budget.state().left += self.bytes;
        self.budget.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::time::Duration;

    use super::*;

    /// Long enough for who need not wait.
    const SOON: Duration = Duration::from_millis(50);

    #[test]
    fn who_wants_more_than_is_left_waits() {
        let budget = Arc::new(Budget::default());
        let most = budget.take(BYTES_IN_FLIGHT - 10);
        let few = budget.take(10);
        let (tell, told) = channel();
        let waits = Arc::clone(&budget);
        let waiter = std::thread::spawn(move || {
            let all = waits.take(u64::MAX);
            tell.send(()).unwrap();
            drop(all);
        });
        drop(most);
        assert_eq!(told.recv_timeout(SOON), Err(RecvTimeoutError::Timeout));
        drop(few);
        told.recv().unwrap();
        waiter.join().unwrap();
        assert_eq!(budget.state().left, BYTES_IN_FLIGHT);
    }

    #[test]
    fn who_came_first_takes_first() {
        let budget = Arc::new(Budget::default());
        let most = budget.take(BYTES_IN_FLIGHT - 10);
        let (tell, told) = channel();
        let mut waiters = Vec::new();
        // There is enough for the second one from the start.
        for bytes in [BYTES_IN_FLIGHT, 5] {
            let came = budget.state().came;
            let (budget_of, tell) = (Arc::clone(&budget), tell.clone());
            waiters.push(std::thread::spawn(move || {
                let taken = budget_of.take(bytes);
                tell.send((bytes, taken)).unwrap();
            }));
            while budget.state().came == came {
                std::thread::yield_now();
            }
        }
        assert!(told.recv_timeout(SOON).is_err(), "the second one overtakes");
        drop(most);
        let (first, taken) = told.recv().unwrap();
        assert_eq!(first, BYTES_IN_FLIGHT);
        drop(taken);
        let (second, taken) = told.recv().unwrap();
        assert_eq!(second, 5);
        drop(taken);
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
        assert_eq!(budget.state().left, BYTES_IN_FLIGHT);
    }
}
