//! Messages that others can cause as often as they like.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The least time between two lines of the same message. What happens all the time is seen in some seconds.
const EVERY: Duration = Duration::from_secs(5);

/// Says when a line is due of one message that others can cause as often as they like, a port scan for example. The first one is. Those
/// after it are counted, and the next line that is due says how many they were.
#[derive(Debug, Default)]
pub struct Seldom(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    last: Option<Instant>,
    unlogged: u64,
}

impl Seldom {
    /// It has happened once more. If a line is due, how many were left out since the last one.
    pub fn due(&self) -> Option<u64> {
        self.due_at(Instant::now())
    }

    fn due_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.last.is_some_and(|last| now.saturating_duration_since(last) < EVERY) {
            state.unlogged = state.unlogged.saturating_add(1);
            return None;
        }
        state.last = Some(now);
        Some(std::mem::take(&mut state.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_logged_now_and_then_with_how_many_were_not() {
        let (seldom, begin) = (Seldom::default(), Instant::now());
        assert_eq!(seldom.due_at(begin), Some(0), "the first");
        for _ in 0..1000 {
            assert_eq!(seldom.due_at(begin + EVERY / 2), None);
        }
        assert_eq!(seldom.due_at(begin + EVERY), Some(1000));
        assert_eq!(seldom.due_at(begin + EVERY), None);
        assert_eq!(seldom.due_at(begin + EVERY * 3), Some(1));
    }
}
