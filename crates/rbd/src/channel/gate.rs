//! Counts what is at work on something, and waits for it once nothing more may begin.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Work goes in and out, until it is shut.
#[derive(Default)]
pub struct Gate {
    state: Mutex<State>,
    empty: Condvar,
}

#[derive(Default)]
struct State {
    shut: bool,
    inside: usize,
}

/// Work that is inside, until this is dropped.
pub struct Inside(Arc<Gate>);

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Goes in; none once it is shut.
    #[must_use]
    pub fn enter(self: &Arc<Self>) -> Option<Inside> {
        let mut state = self.state();
        if state.shut {
            return None;
        }
        state.inside += 1;
        Some(Inside(Arc::clone(self)))
    }

    /// Nothing goes in from now on; whether something is inside.
    pub fn shut(&self) -> bool {
        let mut state = self.state();
        state.shut = true;
        state.inside > 0
    }

    /// Whether it is shut.
    #[must_use]
    pub fn is_shut(&self) -> bool {
        self.state().shut
    }

    /// Waits until nothing is inside.
    pub fn wait(&self) {
        let left = self.empty.wait_while(self.state(), |state| state.inside > 0);
        drop(left.unwrap_or_else(PoisonError::into_inner));
    }

    /// The same, for at most this long; false: something is inside.
    #[must_use]
    pub fn wait_for(&self, most: Duration) -> bool {
        let left = self.empty.wait_timeout_while(self.state(), most, |state| state.inside > 0);
        let (state, _) = left.unwrap_or_else(PoisonError::into_inner);
        state.inside == 0
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.inside -= 1;
        if state.inside == 0 {
            self.0.empty.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};

    use super::*;

    #[test]
    fn a_shut_gate_takes_nothing_and_is_waited_at_until_all_have_left() {
        let gate = Arc::new(Gate::default());
        let (one, other) = (gate.enter().unwrap(), gate.enter().unwrap());
        drop(one);
        assert!(!gate.is_shut());
        assert!(gate.shut());
        assert!(gate.is_shut());
        assert!(gate.enter().is_none());
        let (tell, told) = channel();
        let waits = Arc::clone(&gate);
        let waiter = std::thread::spawn(move || {
            waits.wait();
            tell.send(()).unwrap();
        });
        // It cannot end before the other has left.
        let early = told.recv_timeout(Duration::from_millis(50));
        assert_eq!(early, Err(RecvTimeoutError::Timeout));
        assert!(!gate.wait_for(Duration::ZERO));
        drop(other);
        told.recv().unwrap();
        waiter.join().unwrap();
        assert!(!gate.shut());
        gate.wait();
        assert!(gate.wait_for(Duration::ZERO));
    }
}
