//! How many bytes filters have in flight: librbd copies what is written before it waits for the cluster, so a slow cluster would cost as
//! much memory as filters have requests.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The most bytes in flight of all filters together: several busy disks with long requests. With those of FUSE and of the library
/// it stays far below the limit of the process's memory.
pub const BYTES_IN_FLIGHT: u64 = 256 << 20;

/// Bytes that are left to take.
pub struct Budget {
    left: Mutex<u64>,
    more: Condvar,
}

/// Bytes that are taken, until this is dropped.
pub struct Taken {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Self { left: Mutex::new(BYTES_IN_FLIGHT), more: Condvar::new() }
    }
}

impl Budget {
    fn left(&self) -> MutexGuard<'_, u64> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes bytes, at most [`BYTES_IN_FLIGHT`] at once; waits until there are as many.
    #[must_use]
    pub fn take(self: &Arc<Self>, bytes: u64) -> Taken {
        let bytes = bytes.min(BYTES_IN_FLIGHT);
        let left = self.more.wait_while(self.left(), |left| *left < bytes);
        *left.unwrap_or_else(PoisonError::into_inner) -= bytes;
        Taken { budget: Arc::clone(self), bytes }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        *self.budget.left() += self.bytes;
        self.budget.more.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::time::Duration;

    use super::*;

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
        let early = told.recv_timeout(Duration::from_millis(50));
        assert_eq!(early, Err(RecvTimeoutError::Timeout));
        drop(few);
        told.recv().unwrap();
        waiter.join().unwrap();
        assert_eq!(*budget.left(), BYTES_IN_FLIGHT);
    }
}
