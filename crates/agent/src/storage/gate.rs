//! The pace that is wanted at the moment of what copies a disk and serves no guest: work of the agent itself waits here, and
//! filters are told ([`Told`]), also whether they are to rest beside a guest ([`Gate::beside`]).

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
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
    /// Whether a guest runs at present; none where the work does not rest beside one.
    guest_runs: Option<Arc<AtomicBool>>,
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
        let (changed, notify) = (Condvar::new(), Notify::new());
        Self { state: Mutex::new(state), changed, notify, guest_runs: None }
    }

    /// The same of work whose filter rests while a guest runs, which may start or stop meanwhile.
    #[must_use]
    pub fn beside(pace: CopyPace, guest_runs: Arc<AtomicBool>) -> Self {
        Self { guest_runs: Some(guest_runs), ..Self::new(pace) }
    }

    /// Whether a filter is to rest after each piece of its work.
    #[must_use]
    pub fn rests(&self) -> bool {
        // It alone counts: nothing else is read by it.
        self.guest_runs.as_ref().is_some_and(|runs| runs.load(Ordering::Relaxed))
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

/// What a filter was told of the pace of a gate, and of rests.
pub struct Told<'a> {
    gate: &'a Gate,
    /// None where an answer is lacking: the filter may go by what it was told last, or by what it was told before.
    told: Option<(CopyPace, bool)>,
}

impl<'a> Told<'a> {
    /// A filter that has just started, and is not held back and does not rest.
    #[must_use]
    pub fn nothing(gate: &'a Gate) -> Self {
        Self { gate, told: Some((CopyPace::default(), false)) }
    }

    /// Tells the filter of these disks what has changed. One that does not answer is looked at by the caller.
    pub async fn tell(&mut self, control: &Control, disks: &[DiskId]) {
        let wanted @ (pace, rests) = (self.gate.pace(), self.gate.rests());
        if self.told == Some(wanted) {
            return;
        }
        self.told = None;
        for disk in disks {
            if let Err(error) = control.set_work_pace(*disk, pace, rests).await {
                tracing::debug!(%disk, %error, "a filter is not told its pace");
                return;
            }
        }
        self.told = Some(wanted);
    }

    /// Waits until the pace has changed. A guest that starts or stops is seen at the caller's next look.
    pub async fn changed(&self) {
        self.gate.changed().await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::sync::mpsc::{RecvTimeoutError, channel};

    use serde_json::{Value, json};
    use tempfile::TempDir;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::UnixListener;
    use tokio::task::{spawn_blocking, yield_now};
    use tokio::time::timeout;

    use super::*;
    use crate::filter::NAME;
    use crate::process::run_dir::RunDir;

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

    /// The socket of a filter that is still to answer, and the agent's side of it.
    async fn filter_of(disk: DiskId) -> (TempDir, UnixListener, Control) {
        let root = tempfile::tempdir().unwrap();
        let directory = RunDir::open(root.path()).unwrap().import(disk);
        directory.renew().await.unwrap();
        let filter = UnixListener::bind(directory.socket(NAME)).unwrap();
        (root, filter, Control::of(&directory))
    }

    /// What a filter is told at the next look; none if nothing.
    async fn hears(
        told: &mut Told<'_>,
        filter: &UnixListener,
        (control, disk): (&Control, DiskId),
    ) -> Option<Value> {
        let answers = async {
            let (stream, _) = filter.accept().await.unwrap();
            let (reader, mut writer) = stream.into_split();
            let mut line = String::new();
            BufReader::new(reader).read_line(&mut line).await.unwrap();
            writer.write_all(b"{\"answer\":\"done\"}\n").await.unwrap();
            serde_json::from_str::<Value>(&line).unwrap()
        };
        let disks = [disk];
        let mut answers = pin!(answers);
        let mut tells = pin!(told.tell(control, &disks));
        tokio::select! {
            biased;
            () = &mut tells => None,
            heard = &mut answers => {
                tells.await;
                Some(heard)
            }
        }
    }

    #[tokio::test]
    async fn a_filter_is_told_to_rest_while_a_guest_runs_and_only_where_the_work_is_beside_one() {
        let disk = DiskId::new();
        let (_root, filter, control) = filter_of(disk).await;
        let at = (&control, disk);
        let guest_runs = Arc::new(AtomicBool::new(false));
        let gate = Gate::beside(CopyPace::default(), Arc::clone(&guest_runs));
        let mut told = Told::nothing(&gate);
        assert_eq!(hears(&mut told, &filter, at).await, None, "no guest runs");
        guest_runs.store(true, Ordering::Relaxed);
        let rests = json!({ "do": "pace", "disk": disk, "pace": {}, "rests": true });
        assert_eq!(hears(&mut told, &filter, at).await, Some(rests));
        assert_eq!(hears(&mut told, &filter, at).await, None, "it was told");
        gate.set(CopyPace { paused: false, bytes_per_second: Some(1 << 20) });
        let mut paced = json!({ "do": "pace", "disk": disk, "rests": true });
        paced["pace"] = json!({ "bytes_per_second": 1 << 20 });
        assert_eq!(hears(&mut told, &filter, at).await, Some(paced), "another rate ends no rests");
        gate.set(CopyPace::default());
        guest_runs.store(false, Ordering::Relaxed);
        let free = json!({ "do": "pace", "disk": disk, "pace": {} });
        assert_eq!(hears(&mut told, &filter, at).await, Some(free));

        guest_runs.store(true, Ordering::Relaxed);
        let of_others = Gate::new(CopyPace::default());
        let mut told = Told::nothing(&of_others);
        assert_eq!(hears(&mut told, &filter, at).await, None, "it is not beside a guest");
    }

    #[tokio::test]
    async fn a_filter_whose_answer_is_lost_is_told_again_also_that_all_is_as_before() {
        let disks = [DiskId::new()];
        let [disk] = disks;
        let (_root, filter, control) = filter_of(disk).await;
        let gate = Gate::new(CopyPace::default());
        let mut told = Told::nothing(&gate);
        gate.set(CopyPace { paused: true, bytes_per_second: None });
        let takes_it = async {
            let (stream, _) = filter.accept().await.unwrap();
            let mut line = String::new();
            BufReader::new(stream).read_line(&mut line).await.unwrap();
            line
        };
        let ((), line) = tokio::join!(told.tell(&control, &disks), takes_it);
        assert!(line.contains("\"paused\":true"), "{line}");
        gate.set(CopyPace::default());
        let free = json!({ "do": "pace", "disk": disk, "pace": {} });
        assert_eq!(hears(&mut told, &filter, (&control, disk)).await, Some(free));
    }
}
