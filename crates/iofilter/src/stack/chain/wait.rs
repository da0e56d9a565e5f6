//! How the thread of a chain sleeps: the wait set of the contract in [`super`].

use std::os::fd::BorrowedFd;
use std::time::Instant;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::signal::SigSet;
use nix::sys::time::TimeSpec;

use super::{Chain, Io, sooner};

/// The most descriptors that a front end adds to the wait set: a kick or a connection, and a stop.
const OTHERS_MAX: usize = 2;

/// The descriptors of the chain itself: its eventfd and the storage's.
const OWN: usize = 2;

impl Chain {
    /// Prepares to sleep: from now on a thread with news for the chain writes its eventfd, and earlier news is handled
    /// here. False if a request is finished and must be fetched: do not sleep. [`Chain::disarm`] must follow.
    pub fn arm(&mut self) -> bool {
        self.waker.arm();
        loop {
            self.poll();
            // Storage looks after all else: what it finds may have it asked for more.
            if !self.done.is_empty() || !self.storage_finds_work() {
                return self.done.is_empty();
            }
        }
    }

    /// Has storage look once more before the thread sleeps; whether there is work after that.
    fn storage_finds_work(&mut self) -> bool {
        let (requests, work, audit) = (&mut self.requests, &mut self.work, &mut self.audit);
        let level = self.filters.len();
        let (flight, waker) = (&*self.flight, &self.waker);
        let mut io = Io { requests, work, audit, flight, waker, level };
        self.storage.before_sleep(&mut io);
        self.deadline = sooner(self.deadline, self.storage.deadline());
        !self.work.is_empty()
    }

    /// The descriptors on which a thread sleeps after arming the chain, until [`Chain::deadline`]: the eventfd, which
    /// others write and which becomes readable, and the storage's with its events.
    #[must_use]
    pub fn wait_set(&self) -> (BorrowedFd<'_>, Option<(BorrowedFd<'_>, PollFlags)>) {
        let handle = self.storage.wait_handle();
        (self.waker.event(), handle.map(|handle| (handle, self.storage.wait_events())))
    }

    /// The thread is awake; `woken` is whether the eventfd was readable.
    pub fn disarm(&mut self, woken: bool) {
        self.waker.disarm(woken);
    }

    /// Sleeps until the chain has work, one of `others` is ready for its named events, or the time
    /// comes: the chain's own deadline or `until`. Returns the ready events of each of the others. A chain with nothing
    /// in flight has no work.
    ///
    /// # Errors
    /// The error of `ppoll`.
    pub fn wait<const N: usize>(
        &mut self,
        others: [(BorrowedFd<'_>, PollFlags); N],
        until: Option<Instant>,
    ) -> Result<[PollFlags; N], Errno> {
        self.wait_by(others, until, ppoll)
    }

    /// As [`Chain::wait`], with `sleep` as the system call.
    pub(in crate::stack) fn wait_by<const N: usize>(
        &mut self,
        others: [(BorrowedFd<'_>, PollFlags); N],
        until: Option<Instant>,
        sleep: impl FnOnce(&mut [PollFd<'_>], Option<TimeSpec>, Option<SigSet>) -> Result<i32, Errno>,
    ) -> Result<[PollFlags; N], Errno> {
        const { assert!(N <= OTHERS_MAX) };
        let busy = !self.is_idle();
        // Requests apart end without a request that is done; who drains waits for the last of them.
        if busy && (!self.arm() || self.is_idle()) {
            self.disarm(false);
            return Ok([PollFlags::empty(); N]);
        }
        let (event, handle) = self.wait_set();
        let mut fds = [(); OWN + OTHERS_MAX].map(|()| PollFd::new(event, PollFlags::empty()));
        if busy {
            fds[0] = PollFd::new(event, PollFlags::POLLIN);
            if let Some((handle, events)) = handle {
                fds[1] = PollFd::new(handle, events);
            }
        }
        for (place, (fd, wanted)) in fds[OWN..].iter_mut().zip(others) {
            *place = PollFd::new(fd, wanted);
        }
        let deadline = [self.deadline().filter(|_| busy), until].into_iter().flatten().min();
        let timeout = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let slept = sleep(&mut fds[..OWN + N], timeout.map(TimeSpec::from), None);
        let ready = |fd: &PollFd<'_>| fd.revents().unwrap_or(PollFlags::all());
        let woken = slept.is_ok() && !ready(&fds[0]).is_empty();
        let others = std::array::from_fn(|index| ready(&fds[OWN + index]));
        if busy {
            self.disarm(woken);
        }
        slept.map(|_| others)
    }
}
