//! Tells a thread that sleeps on a descriptor to stop.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// A request to stop, made once and visible to every holder.
#[derive(Debug)]
pub struct Stop {
    asked: AtomicBool,
    event: EventFd,
}

impl Stop {
    /// Not asked yet.
    ///
    /// # Errors
    /// No eventfd is available.
    pub fn new() -> io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let event = EventFd::from_value_and_flags(0, flags)?;
        Ok(Self { asked: AtomicBool::new(false), event })
    }

    /// Asks everyone to stop.
    pub fn ask(&self) {
        self.asked.store(true, Ordering::Release);
        // Fails only when the counter is full, and then it is readable anyway.
        let _ = self.event.write(1);
    }

    /// Whether it was asked.
    #[must_use]
    pub fn asked(&self) -> bool {
        self.asked.load(Ordering::Acquire)
    }

    /// The descriptor that becomes readable when a stop is asked for, and stays so.
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Sleeps until asked to stop.
    ///
    /// # Errors
    /// The error of `poll`.
    pub fn wait(&self) -> io::Result<()> {
        self.wait_or_readable(self.event()).map(drop)
    }

    /// Sleeps until `fd` is readable or its peer is gone (true), or until asked to stop (false).
    ///
    /// # Errors
    /// The error of `poll`.
    pub fn wait_or_readable(&self, fd: BorrowedFd<'_>) -> io::Result<bool> {
        let readable = PollFlags::POLLIN;
        let mut fds = [PollFd::new(fd, readable), PollFd::new(self.event(), readable)];
        loop {
            if self.asked() {
                return Ok(false);
            }
            match poll(&mut fds, PollTimeout::NONE) {
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
                Ok(_) if fds[0].any().unwrap_or(true) => return Ok(true),
                Ok(_) => {}
            }
        }
    }
}
