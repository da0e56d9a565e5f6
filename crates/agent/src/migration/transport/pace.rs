//! How many bytes a session sends per second at most: all its streams together, changeable while they send.

use std::num::NonZeroU64;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How much time may be made up for: a thread that woke late sends that much at once.
const CATCH_UP: Duration = Duration::from_millis(10);

/// The session does not send any more.
#[derive(Debug, PartialEq, Eq)]
pub struct Stopped;

/// See the module.
#[derive(Default)]
pub struct Pace {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    bytes_per_second: Option<NonZeroU64>,
    /// When what was let go before is sent at this rate.
    free: Option<Instant>,
    stopped: bool,
}

impl State {
    /// Lets bytes go, or says how long they have to wait.
    fn admit(&mut self, now: Instant, bytes: usize) -> Option<Duration> {
        let rate = self.bytes_per_second?;
        let earliest = now.checked_sub(CATCH_UP).unwrap_or(now);
        let free = self.free.map_or(now, |free| free.max(earliest));
        if free > now {
            return Some(free - now);
        }
        self.free = Some(free + Duration::from_secs_f64(bytes as f64 / rate.get() as f64));
        None
    }

    fn set(&mut self, rate: Option<NonZeroU64>) {
        self.bytes_per_second = rate;
        // What was let go at the rate of before does not count at the new one.
        self.free = None;
    }
}

impl Pace {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until this many bytes may be sent.
    pub fn wait(&self, bytes: usize) -> Result<(), Stopped> {
        let mut state = self.state();
        loop {
            if state.stopped {
                return Err(Stopped);
            }
            let Some(pause) = state.admit(Instant::now(), bytes) else { return Ok(()) };
            let woken = self.changed.wait_timeout(state, pause);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Another rate, or none.
    pub fn set(&self, rate: Option<NonZeroU64>) {
        self.state().set(rate);
        self.changed.notify_all();
    }

    /// Lets nobody wait any more.
    pub fn stop(&self) {
        self.state().stopped = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: usize = 256 * 1024;

    /// How many bytes go in this time, where `senders` try whenever they may.
    fn sent(state: &mut State, now: &mut Instant, time: Duration, senders: usize) -> usize {
        let (end, mut sent) = (*now + time, 0);
        while *now < end {
            let mut pause = Duration::from_micros(10);
            for _ in 0..senders {
                match state.admit(*now, FRAME) {
                    None => sent += FRAME,
                    Some(wait) => pause = wait,
                }
            }
            *now += pause;
        }
        sent
    }

    #[test]
    fn all_senders_together_keep_the_rate_and_a_change_counts_at_once() {
        for senders in [1, 4] {
            let (mut state, mut now) = (State::default(), Instant::now());
            let ten = Duration::from_secs(10);
            for rate in [1_000_000, 125_000_000, 50_000_000] {
                state.set(NonZeroU64::new(rate));
                let sent = sent(&mut state, &mut now, ten, senders) as f64;
                let expected = rate as f64 * ten.as_secs_f64();
                let over = sent - expected;
                assert!(over.abs() <= 2.0 * FRAME as f64, "{senders} at {rate}: {over} over");
            }
            state.set(None);
            assert_eq!(state.admit(now, FRAME), None);
            assert_eq!(state.admit(now, FRAME), None, "no rate, no wait");
        }
    }

    #[test]
    fn time_that_passed_unused_is_not_made_up_for() {
        let (mut state, mut now) = (State::default(), Instant::now());
        state.set(NonZeroU64::new(100_000_000));
        assert_eq!(state.admit(now, FRAME), None);
        now += Duration::from_secs(60);
        let at_once = std::iter::from_fn(|| state.admit(now, FRAME).is_none().then_some(FRAME));
        let most = 100_000_000 / 100 + 2 * FRAME; // CATCH_UP's worth, and the frames around it
        assert!(at_once.take(1000).sum::<usize>() <= most);
    }

    #[test]
    fn who_waits_wakes_when_the_rate_is_lifted_or_the_session_stops() {
        type End = fn(&Pace);
        let ends: [(End, Result<(), Stopped>); 2] =
            [(|pace| pace.set(None), Ok(())), (Pace::stop, Err(Stopped))];
        for (end, expected) in ends {
            let pace = Pace::default();
            pace.set(NonZeroU64::new(1));
            assert_eq!(pace.wait(FRAME), Ok(()));
            std::thread::scope(|scope| {
                // At one byte per second the second frame waits for three days.
                let waiting = scope.spawn(|| pace.wait(FRAME));
                end(&pace);
                assert_eq!(waiting.join().unwrap(), expected);
            });
        }
    }
}
