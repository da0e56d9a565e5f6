//! The pace of work that copies a whole disk or layer while no guest waits for it: it may be changed,
//! paused and resumed meanwhile. Beside a guest that runs it rests after each piece ([`WorkPace::set_rests`]): this process does
//! not see what that guest asks for, as the filter that serves it does.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use vmseal_api::pace::CopyPace;

use crate::layers::replicate::pace::Bucket;
use crate::stack::stop::Stop;

/// How long work rests, as a multiple of what its pieces took: the guest has half of the storage's time, unless a piece takes
/// longer than [`REST_MAX`].
const REST: u32 = 1;

/// The longest rest: storage that takes longer for a piece would else hold the work up for minutes.
const REST_MAX: Duration = Duration::from_secs(1);

/// Shorter rests are saved up until they are as long together: a sleep is in whole milliseconds, and a disk has many parts for
/// which nothing is to be done.
const REST_MIN: Duration = Duration::from_millis(10);

/// What the work of a disk is told.
#[derive(Clone, Copy, Debug, Default)]
struct Wanted {
    pace: CopyPace,
    rests: bool,
}

/// How fast the work of a disk goes.
#[derive(Debug)]
pub struct WorkPace {
    wanted: Mutex<Wanted>,
    /// Readable when the pace has changed since the work looked.
    changed: EventFd,
}

impl WorkPace {
    /// Not held back, and without rests.
    ///
    /// # Errors
    /// No eventfd is available.
    pub fn new() -> io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let changed = EventFd::from_value_and_flags(0, flags)?;
        Ok(Self { wanted: Mutex::default(), changed })
    }

    /// Has the work go on at this pace from now on, also where it waits.
    pub fn set(&self, pace: CopyPace) {
        self.wanted().pace = pace;
        self.wake();
    }

    /// Whether the work rests after each piece from now on, for as long as that took: a guest runs that has the same storage. A
    /// rest that has begun ends when it need not rest any more.
    pub fn set_rests(&self, rests: bool) {
        self.wanted().rests = rests;
        self.wake();
    }

    fn wanted(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // Fails only when the counter is full, and then it is readable anyway.
        let _ = self.changed.write(1);
    }

    fn get(&self) -> Wanted {
        *self.wanted()
    }

    /// Sleeps until the pace changes, until asked to stop, or for so long.
    fn sleep(&self, stop: &Stop, longest: Option<Duration>) {
        let whole = longest.map(|longest| longest.as_millis().saturating_add(1));
        let timeout = whole.map_or(PollTimeout::NONE, |milliseconds| {
            PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::MAX)
        });
        let readable = PollFlags::POLLIN;
        let mut fds =
            [PollFd::new(self.changed.as_fd(), readable), PollFd::new(stop.event(), readable)];
        match poll(&mut fds, timeout) {
            // The caller looks again.
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => tracing::warn!(%error, "a copy that is held back goes on"),
        }
        let _ = self.changed.read();
    }
}

/// The rest that work owes to a guest.
#[derive(Debug, Default)]
struct Rest {
    /// When storage got the present piece.
    begun: Option<Instant>,
    /// What is saved up.
    owed: Duration,
    /// The end of the last rest.
    until: Option<Instant>,
}

impl Rest {
    fn piece_begins(&mut self, now: Instant) {
        self.begun = Some(now);
    }

    fn piece_ends(&mut self, now: Instant) {
        let Some(begun) = self.begun.take() else { return };
        let rest = now.saturating_duration_since(begun).saturating_mul(REST);
        self.owed = self.owed.saturating_add(rest).min(REST_MAX);
        if self.owed >= REST_MIN {
            self.until = Some(now + std::mem::take(&mut self.owed));
        }
    }

    /// How much is left of it. Where no guest runs there is none, and none is saved up for the next one.
    fn left(&mut self, rests: bool, now: Instant) -> Duration {
        if !rests {
            (self.owed, self.until) = (Duration::ZERO, None);
        }
        self.until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now))
    }
}

/// One piece of work, which goes at the pace of its disk.
pub struct Paced {
    pace: Option<Arc<WorkPace>>,
    bucket: Bucket,
    rest: Rest,
}

impl Paced {
    /// Work at this pace; none is not held back.
    #[must_use]
    pub fn new(pace: Option<Arc<WorkPace>>) -> Self {
        Self { pace, bucket: Bucket::new(Instant::now()), rest: Rest::default() }
    }

    /// Whether it rests after each piece: then nothing else of the work may use the storage meanwhile.
    #[must_use]
    pub fn rests(&self) -> bool {
        self.pace.as_ref().is_some_and(|pace| pace.get().rests)
    }

    /// Waits until so many bytes may be copied: true. False when it is to stop. All between two of these calls is a piece of work.
    pub fn wait(&mut self, bytes: u64, stop: &Stop) -> bool {
        self.rest.piece_ends(Instant::now());
        while !stop.asked() {
            match self.held_back(bytes) {
                Some((pace, longest)) => pace.sleep(stop, longest),
                None => return true,
            }
        }
        false
    }

    /// The same where that need not sleep: true. False when it must, and then [`Self::wait`] has to follow.
    pub fn goes_at_once(&mut self, bytes: u64) -> bool {
        self.rest.piece_ends(Instant::now());
        self.held_back(bytes).is_none()
    }

    /// Begins a piece of so many bytes: none. Otherwise what holds it back, and for how long at the longest.
    fn held_back(&mut self, bytes: u64) -> Option<(&WorkPace, Option<Duration>)> {
        let pace = self.pace.as_deref()?;
        let Wanted { pace: wanted, rests } = pace.get();
        let now = Instant::now();
        // What a rate makes it wait is a rest as well.
        let wait = self.bucket.wait(wanted.bytes_per_second, now).max(self.rest.left(rests, now));
        if wanted.paused {
            return Some((pace, None));
        }
        if !wait.is_zero() {
            return Some((pace, Some(wait)));
        }
        self.bucket.take(bytes);
        self.rest.piece_begins(now);
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};

    use super::*;

    const MIB: u64 = 1 << 20;

    /// How long nothing may happen that must not: seen to be too short only by a test that passes wrongly.
    const QUIET: Duration = Duration::from_millis(200);

    #[test]
    fn work_that_is_paused_stands_still_until_it_is_resumed_or_stopped() {
        let (pace, stop) = (Arc::new(WorkPace::new().unwrap()), Stop::new().unwrap());
        let paused = CopyPace { paused: true, bytes_per_second: None };
        pace.set(paused);
        std::thread::scope(|scope| {
            let (tell, told) = channel();
            let (pace, stop) = (&pace, &stop);
            scope.spawn(move || {
                let mut paced = Paced::new(Some(Arc::clone(pace)));
                while tell.send(paced.wait(MIB, stop)).is_ok() && !stop.asked() {}
            });
            assert_eq!(told.recv_timeout(QUIET), Err(RecvTimeoutError::Timeout));
            pace.set(CopyPace::default());
            assert_eq!(told.recv(), Ok(true));
            pace.set(paused);
            // What it was at when it was paused.
            while told.recv_timeout(QUIET).is_ok() {}
            stop.ask();
            assert_eq!(told.recv(), Ok(false));
        });
    }

    #[test]
    fn work_goes_at_its_rate_and_at_another_one_at_once() {
        let (pace, stop) = (Arc::new(WorkPace::new().unwrap()), Stop::new().unwrap());
        // A day for the second piece.
        pace.set(CopyPace { paused: false, bytes_per_second: Some(MIB) });
        let mut paced = Paced::new(Some(Arc::clone(&pace)));
        assert!(paced.wait(MIB * 86_400, &stop));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| paced.wait(MIB, &stop));
            std::thread::sleep(QUIET);
            assert!(!waits.is_finished());
            pace.set(CopyPace::default());
            assert!(waits.join().unwrap());
        });
    }

    #[test]
    fn work_goes_at_once_only_where_it_need_not_sleep() {
        let (pace, stop) = (Arc::new(WorkPace::new().unwrap()), Stop::new().unwrap());
        assert!(Paced::new(None).goes_at_once(MIB));
        let mut paced = Paced::new(Some(Arc::clone(&pace)));
        assert!(paced.goes_at_once(MIB));
        pace.set(CopyPace { paused: true, bytes_per_second: None });
        assert!(!paced.goes_at_once(MIB), "it is paused");
        // A day for each piece.
        pace.set(CopyPace { paused: false, bytes_per_second: Some(MIB) });
        assert!(paced.goes_at_once(MIB * 86_400));
        assert!(!paced.goes_at_once(MIB), "the rate has to make up for the piece before");
        pace.set(CopyPace::default());
        assert!(paced.wait(MIB, &stop));
        pace.set_rests(true);
        assert!(!rests_long(&pace).goes_at_once(MIB), "it rests");
    }

    #[test]
    fn a_rest_is_as_long_as_the_pieces_took_and_not_without_a_guest() {
        let start = Instant::now();
        let after = |milliseconds| start + Duration::from_millis(milliseconds);
        let (none, mut rest) = (Duration::ZERO, Rest::default());
        // Before the first piece.
        rest.piece_ends(start);
        assert_eq!(rest.left(true, start), none);
        rest.piece_begins(start);
        rest.piece_ends(after(50));
        assert_eq!(rest.left(true, after(50)), Duration::from_millis(50));
        assert_eq!(rest.left(true, after(80)), Duration::from_millis(20));
        assert_eq!(rest.left(false, after(80)), none);
        assert_eq!(
            rest.left(true, after(80)),
            none,
            "what ended with a guest is not owed to the next"
        );
        // Short ones are saved up.
        let mut rests = Vec::new();
        for piece in [100, 200, 300, 400] {
            rest.piece_begins(after(piece));
            rest.piece_ends(after(piece + 4));
            rests.push(rest.left(true, after(piece + 4)).as_millis());
        }
        assert_eq!(rests, [0, 0, 12, 0]);
        // A long one has a limit.
        rest.piece_begins(after(1000));
        rest.piece_ends(after(9000));
        assert_eq!(rest.left(true, after(9000)), REST_MAX);
    }

    /// Work that rests for a day.
    fn rests_long(pace: &Arc<WorkPace>) -> Paced {
        let mut paced = Paced::new(Some(Arc::clone(pace)));
        paced.rest.until = Some(Instant::now() + Duration::from_secs(86_400));
        paced
    }

    #[test]
    fn a_rest_ends_when_the_guest_does_and_when_the_work_is_to_stop() {
        let (pace, stop) = (Arc::new(WorkPace::new().unwrap()), Stop::new().unwrap());
        assert!(rests_long(&pace).wait(MIB, &stop), "no guest runs");
        let ends: [(&dyn Fn(), bool); 2] =
            [(&|| pace.set_rests(false), true), (&|| stop.ask(), false)];
        for (end, goes_on) in ends {
            pace.set_rests(true);
            let mut paced = rests_long(&pace);
            assert!(paced.rests());
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| paced.wait(MIB, &stop));
                std::thread::sleep(QUIET);
                assert!(!waits.is_finished());
                end();
                assert_eq!(waits.join().unwrap(), goes_on);
            });
        }
    }
}
