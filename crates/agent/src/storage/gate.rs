//! The pace that is wanted at the moment of what copies a disk and serves no guest: work of the agent itself waits here, and
//! filters are told ([`Told`]).

use std::pin::pin;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};
use vmseal_api::id::DiskId;
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::filter::Control;

/// See the module. One thread at a time copies.
#[derive(Debug)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    /// The same for who does not block.
    notify: Notify,
}

#[derive(Debug)]
struct State {
    pace: CopyPace,
    closed: bool,
    /// When the rate allows more.
    free_at: Instant,
}

impl Gate {
    /// At this pace.
    #[must_use]
    pub fn new(pace: CopyPace) -> Self {
        let state = State { pace, closed: false, free_at: Instant::now() };
        Self { state: Mutex::new(state), changed: Condvar::new(), notify: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pace of now.
    #[must_use]
    pub fn pace(&self) -> CopyPace {
        self.state().pace
    }

    /// Another pace from now on, also for what waits.
    pub fn set(&self, pace: CopyPace) {
        let mut state = self.state();
        (state.pace, state.free_at) = (pace, Instant::now());
        drop(state);
        self.wake();
    }

    /// Nothing passes any more.
    pub fn close(&self) {
        self.state().closed = true;
        self.wake();
    }

    /// Whether nothing passes any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.state().closed
    }

    fn wake(&self) {
        self.changed.notify_all();
        self.notify.notify_one();
    }

    /// Waits until so many bytes may be copied. Blocks.
    ///
    /// # Errors
    /// `cancelled` when it is closed.
    pub fn pass(&self, bytes: u64) -> Result<(), Problem> {
        let mut state = self.state();
        loop {
            if state.closed {
                return Err(stopped());
            }
            let now = Instant::now();
            let wait = match state.pace {
                CopyPace { paused: true, .. } => None,
                CopyPace { bytes_per_second: None, .. } => return Ok(()),
                CopyPace { bytes_per_second: Some(rate), .. } if state.free_at <= now => {
                    let takes = Duration::try_from_secs_f64(bytes as f64 / rate.max(1) as f64);
                    state.free_at = now + takes.unwrap_or(Duration::ZERO);
                    return Ok(());
                }
                CopyPace { .. } => Some(state.free_at - now),
            };
            state = match wait {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(wait) => {
                    let woken = self.changed.wait_timeout(state, wait);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Waits for `work`, which passes here, unless it is `asked` to stop: then this is closed, and the work has ended when this returns none.
    pub async fn close_when<T>(
        &self,
        asked: impl Future<Output = ()>,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        let mut work = pin!(work);
        tokio::select! {
            // A step that has just ended is no reason to begin the next one.
            biased;
            () = asked => {}
            done = &mut work => return Some(done),
        }
        // A thread may write, or wait here.
        self.close();
        work.await;
        None
    }

    /// Waits until the pace is set again.
    pub async fn changed(&self) {
        self.notify.notified().await;
    }

    /// Waits while it is paused.
    pub async fn resumed(&self) {
        while self.pace().paused {
            self.changed().await;
        }
    }
}

/// The problem of a copy that was asked to stop.
#[must_use]
pub fn stopped() -> Problem {
    Problem::new(ErrorCode::Cancelled, "the copy is stopped")
}

/// Waits until it is asked to stop. A sender that is gone has asked for nothing.
pub async fn asked(cancelled: oneshot::Receiver<()>) {
    if cancelled.await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// What a filter was told of the pace of a gate.
pub struct Told<'a> {
    gate: &'a Gate,
    told: CopyPace,
}

impl<'a> Told<'a> {
    /// A filter that has just started, and is not held back.
    #[must_use]
    pub fn nothing(gate: &'a Gate) -> Self {
        Self { gate, told: CopyPace::default() }
    }

    /// Tells the filter of these disks what has changed. One that does not answer is looked at by the caller.
    pub async fn tell(&mut self, control: &Control, disks: &[DiskId]) {
        let wanted = self.gate.pace();
        if wanted == self.told {
            return;
        }
        for disk in disks {
            if let Err(error) = control.set_pace(*disk, wanted).await {
                tracing::debug!(%disk, %error, "a filter is not told its pace");
                return;
            }
        }
        self.told = wanted;
    }

    /// Waits until it has changed.
    pub async fn changed(&self) {
        self.gate.changed().await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{RecvTimeoutError, channel};

    use tokio::task::{spawn_blocking, yield_now};
    use tokio::time::timeout;

    use super::*;

    /// How long a stop may take to be noticed.
    const STOPS_WITHIN: Duration = Duration::from_secs(30);

    /// How long nothing may happen that must not: too short, it only lets the test pass wrongly.
    const QUIET: Duration = Duration::from_millis(200);

    #[test]
    fn nothing_passes_while_it_is_paused_and_nothing_when_it_is_closed() {
        let paused = CopyPace { paused: true, bytes_per_second: None };
        let gate = Gate::new(paused);
        std::thread::scope(|scope| {
            let (tell, told) = channel();
            let gate = &gate;
            scope.spawn(move || while tell.send(gate.pass(1).is_ok()).is_ok() {});
            assert_eq!(told.recv_timeout(QUIET), Err(RecvTimeoutError::Timeout));
            gate.set(CopyPace::default());
            assert_eq!(told.recv(), Ok(true));
            gate.set(paused);
            while told.recv_timeout(QUIET).is_ok() {}
            gate.close();
            assert_eq!(told.recv(), Ok(false));
        });
    }

    #[test]
    fn a_rate_holds_the_next_piece_until_there_is_another_one() {
        let gate = Gate::new(CopyPace { paused: false, bytes_per_second: Some(1 << 20) });
        // A day.
        gate.pass(86_400 << 20).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| gate.pass(1));
            std::thread::sleep(QUIET);
            assert!(!waits.is_finished());
            gate.set(CopyPace::default());
            waits.join().unwrap().unwrap();
        });
    }

    #[tokio::test]
    async fn work_has_ended_when_it_is_asked_to_stop() {
        let gate = Arc::new(Gate::new(CopyPace { paused: true, bytes_per_second: None }));
        let ended = Arc::new(AtomicBool::new(false));
        let (passes, ends) = (Arc::clone(&gate), Arc::clone(&ended));
        let work = spawn_blocking(move || {
            let passed = passes.pass(1);
            ends.store(true, Ordering::Relaxed);
            passed
        });
        let done = timeout(STOPS_WITHIN, gate.close_when(yield_now(), work)).await;
        // A thread that is left would hold up the end of the test.
        gate.close();
        assert!(done.unwrap().is_none());
        assert!(ended.load(Ordering::Relaxed));
    }

    #[tokio::test]
    async fn what_is_done_closes_nothing_and_to_be_asked_comes_first() {
        let gate = Gate::new(CopyPace::default());
        assert_eq!(gate.close_when(pending(), ready(7)).await, Some(7));
        assert!(!gate.is_closed());
        // Neither does one that ends without a word.
        let (sender, cancelled) = oneshot::channel();
        drop(sender);
        let work = async {
            yield_now().await;
            7
        };
        assert_eq!(gate.close_when(asked(cancelled), work).await, Some(7));
        assert_eq!(gate.close_when(ready(()), ready(7)).await, None);
        assert!(gate.is_closed());
    }
}
