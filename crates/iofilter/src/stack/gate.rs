//! Has a disk that is drained wait, and lets others exchange its chains or what is below them meanwhile.
//!
//! ```text
//!  asker   hold ──> orders                          with: chains exchanged        open (or dropped)
//!                     v                               ^                             v
//!  disk    serves ── queues stopped ── flushed ──> [held] ── opened | time | stop ──> serves with the chains as they are
//!                                         └── failed ──> serves as before
//!          retired, and would go on with the chains of before: the process ends
//! ```
//! The disk keeps the time itself: the process that asked may die or hang.

use std::io;
use std::os::fd::AsFd;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::stack::blocking;
use crate::stack::chain::Chain;
use crate::stack::orders::Exchange;
use crate::stack::request::IoError;
use crate::stack::stop::Stop;

/// How a process exits that would serve a disk by a stack that is out of date.
const RETIRED_EXIT: i32 = 3;

/// See the module.
pub struct Gate {
    inside: Mutex<Inside>,
    opened: EventFd,
}

#[derive(Default)]
struct Inside {
    /// The chains, while the disk is held.
    chains: Option<Vec<Chain>>,
    /// The disk must not go on with these chains.
    retired: bool,
}

/// A disk that is held; it stays held for as long as this is there.
pub struct Held<'a>(MutexGuard<'a, Inside>);

impl Held<'_> {
    /// The chains: none if the disk is not held any more.
    pub fn chains(&mut self) -> Option<&mut Vec<Chain>> {
        self.0.chains.as_mut()
    }

    /// Has the process end rather than the disk go on with these chains, until [`Held::is_replaced`].
    pub fn retire(&mut self) {
        self.0.retired = true;
    }

    /// The chains are those that the disk is to have.
    pub fn is_replaced(&mut self) {
        self.0.retired = false;
    }
}

impl Gate {
    /// A gate for one disk and one time.
    ///
    /// # Errors
    /// No eventfd is available.
    pub fn new() -> io::Result<Arc<Self>> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let opened = EventFd::from_value_and_flags(0, flags)?;
        Ok(Arc::new(Self { inside: Mutex::default(), opened }))
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What holds the disk, for `limit` at most or until told to stop. `tell` gets the outcome of the flush.
    #[must_use]
    pub fn holding(
        self: &Arc<Self>,
        limit: Duration,
        stop: Arc<Stop>,
        tell: Sender<Result<(), IoError>>,
    ) -> Exchange {
        let gate = Arc::clone(self);
        Box::new(move |mut chains| {
            let flushed = chains.first_mut().map_or(Ok(()), blocking::flush);
            let holds = flushed.is_ok();
            let before = gate.lock().chains.replace(chains);
            debug_assert!(before.is_none(), "a gate holds once");
            if tell.send(flushed).is_ok() && holds {
                gate.wait(&stop, Instant::now() + limit);
            }
            let mut inside = gate.lock();
            if inside.retired {
                tracing::error!(
                    "the stack of a disk is out of date and not replaced; the filter ends"
                );
                // No request of the disk is in flight, and those of other disks are on record.
                std::process::exit(RETIRED_EXIT);
            }
            inside.chains.take().unwrap_or_default()
        })
    }

    /// The chains, while the disk is held.
    #[must_use]
    pub fn held(&self) -> Held<'_> {
        Held(self.lock())
    }

    /// Lets the disk go on; false if it went on before.
    pub fn open(&self) -> bool {
        let held = self.lock().chains.is_some();
        // Fails only when the counter is full, and then it is readable anyway.
        let _ = self.opened.write(1);
        held
    }

    fn wait(&self, stop: &Stop, until: Instant) {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return tracing::warn!("nobody has resumed the disk; it goes on");
            }
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
            let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
            let mut fds = [readable(self.opened.as_fd()), readable(stop.event())];
            match poll(&mut fds, timeout) {
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return,
                Err(error) => return tracing::error!(%error, "the disk cannot wait; it goes on"),
            }
        }
    }
}
