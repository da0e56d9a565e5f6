//! The pace of work that copies a whole disk or layer while no guest waits for it: it may be changed,
//! paused and resumed meanwhile.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use vmseal_api::pace::CopyPace;

use crate::layers::replicate::pace::Bucket;
use crate::stack::stop::Stop;

/// How fast the work of a disk goes.
#[derive(Debug)]
pub struct WorkPace {
    pace: Mutex<CopyPace>,
    /// Readable when the pace has changed since the work looked.
    changed: EventFd,
}

impl WorkPace {
    /// Not held back.
    ///
    /// # Errors
    /// No eventfd is available.
    pub fn new() -> io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let changed = EventFd::from_value_and_flags(0, flags)?;
        Ok(Self { pace: Mutex::default(), changed })
    }

    /// Has the work go on at this pace from now on, also where it waits.
    pub fn set(&self, pace: CopyPace) {
        *self.pace.lock().unwrap_or_else(PoisonError::into_inner) = pace;
        // Fails only when the counter is full, and then it is readable anyway.
        let _ = self.changed.write(1);
    }

    fn get(&self) -> CopyPace {
        *self.pace.lock().unwrap_or_else(PoisonError::into_inner)
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

/// One piece of work, which goes at the pace of its disk.
pub struct Paced {
    pace: Option<Arc<WorkPace>>,
    bucket: Bucket,
}

impl Paced {
    /// Work at this pace; none is not held back.
    #[must_use]
    pub fn new(pace: Option<Arc<WorkPace>>) -> Self {
        Self { pace, bucket: Bucket::new(Instant::now()) }
    }

    /// Waits until so many bytes may be copied: true. False when it is to stop.
    pub fn wait(&mut self, bytes: u64, stop: &Stop) -> bool {
        while !stop.asked() {
            let Some(pace) = &self.pace else { return true };
            let now = pace.get();
            let wait = self.bucket.wait(now.bytes_per_second, Instant::now());
            match now.paused {
                true => pace.sleep(stop, None),
                false if wait.is_zero() => {
                    self.bucket.take(bytes);
                    return true;
                }
                false => pace.sleep(stop, Some(wait)),
            }
        }
        false
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
}
