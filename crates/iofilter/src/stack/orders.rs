//! What a disk's thread is told from outside while it serves: to stop, or to exchange its chains.
//!
//! ```text
//!  asker   ask(exchange) ──┐                               ┌──> the exchange tells the asker its outcome
//!                          v                               |
//!  disk    serves ── wait: Exchange ──> queues stopped ──> exchange(chains) ──> serves with what it returns
//! ```
//! An exchange that is dropped was not carried out.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::stack::chain::Chain;
use crate::stack::stop::Stop;

/// Gets the chains of a disk that has no request in flight, and returns those that serve it from then on: as many.
pub type Exchange = Box<dyn FnOnce(Vec<Chain>) -> Vec<Chain> + Send>;

/// Why a disk's thread has woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woken {
    /// The descriptor is readable, or its peer is gone.
    Readable,
    /// There is an exchange ([`Orders::take`]).
    Exchange,
    /// It must stop.
    Stop,
}

/// Why an exchange is not asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotAsked {
    /// Another one is.
    Another,
    /// The disk's thread has ended.
    Ended,
}

/// An exchange that was asked for, to take that one back and no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked(u64);

#[derive(Default)]
struct Asking {
    exchange: Option<Exchange>,
    /// The number of the last one.
    last: u64,
    ended: bool,
}

/// See the module.
pub struct Orders {
    stop: Arc<Stop>,
    event: EventFd,
    asking: Mutex<Asking>,
}

impl Orders {
    /// No exchange yet; `stop` may be shared with other disks.
    ///
    /// # Errors
    /// No eventfd is available.
    pub fn new(stop: Arc<Stop>) -> io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let event = EventFd::from_value_and_flags(0, flags)?;
        Ok(Self { stop, event, asking: Mutex::default() })
    }

    /// The request to stop.
    #[must_use]
    pub fn stop(&self) -> &Arc<Stop> {
        &self.stop
    }

    fn asking(&self) -> MutexGuard<'_, Asking> {
        self.asking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for an exchange.
    ///
    /// # Errors
    /// [`NotAsked`]; the exchange is dropped.
    pub fn ask(&self, exchange: Exchange) -> Result<Asked, NotAsked> {
        let mut asking = self.asking();
        if asking.ended {
            return Err(NotAsked::Ended);
        }
        if asking.exchange.is_some() {
            return Err(NotAsked::Another);
        }
        asking.exchange = Some(exchange);
        asking.last += 1;
        let asked = Asked(asking.last);
        drop(asking);
        // Fails only when the counter is full, and then it is readable anyway.
        let _ = self.event.write(1);
        Ok(asked)
    }

    /// Takes back an exchange; false if the disk's thread has it already.
    pub fn take_back(&self, asked: Asked) -> bool {
        let mut asking = self.asking();
        asking.last == asked.0 && asking.exchange.take().is_some()
    }

    /// The disk's thread ends: no exchange is done any more.
    pub fn close(&self) {
        let mut asking = self.asking();
        asking.ended = true;
        asking.exchange = None;
    }

    /// Does the exchange that was asked for, if there still is one.
    #[must_use]
    pub fn carry_out(&self, chains: Vec<Chain>) -> Vec<Chain> {
        match self.take() {
            Some(exchange) => exchange(chains),
            None => chains,
        }
    }

    /// Does exchanges until `fd`, if there is one, is readable (true), or until told to stop; returns the chains.
    ///
    /// # Errors
    /// The error of `poll`.
    pub fn idle(
        &self,
        fd: Option<BorrowedFd<'_>>,
        mut chains: Vec<Chain>,
    ) -> io::Result<(Vec<Chain>, bool)> {
        loop {
            match self.wait(fd)? {
                Woken::Readable => return Ok((chains, true)),
                Woken::Stop => return Ok((chains, false)),
                Woken::Exchange => chains = self.carry_out(chains),
            }
        }
    }

    /// The exchange that was asked for.
    #[must_use]
    pub fn take(&self) -> Option<Exchange> {
        // Before it is taken: one that comes after that is announced again.
        let _ = self.event.read();
        self.asking().exchange.take()
    }

    /// Sleeps until `fd`, if there is one, is readable or its peer is gone, or until there is something else to do.
    ///
    /// # Errors
    /// The error of `poll`.
    pub fn wait(&self, fd: Option<BorrowedFd<'_>>) -> io::Result<Woken> {
        let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = vec![readable(self.event.as_fd()), readable(self.stop.event())];
        fds.extend(fd.map(readable));
        loop {
            if self.stop.asked() {
                return Ok(Woken::Stop);
            }
            match poll(&mut fds, PollTimeout::NONE) {
                Err(Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
                Ok(_) => {}
            }
            let ready = |index: usize| {
                fds.get(index).is_some_and(|fd: &PollFd<'_>| fd.any().unwrap_or(true))
            };
            if ready(0) {
                return Ok(Woken::Exchange);
            }
            if ready(2) {
                return Ok(Woken::Readable);
            }
        }
    }
}
