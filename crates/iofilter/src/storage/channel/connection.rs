//! The connection of a disk to the `vmseal-rbd` that serves its file, on which its queues are attached.
//!
//! ```text
//!  the connection   Attach: the file's ticket, the queue's ring, the server's end of a pair of sockets ──>
//!  the queue's pair Attached: the file's length <──   Share: the queue's buffers ──>   Shared <──   and from then on doorbells
//! ```
//! Somebody else connects: this process only gets the socket. A message on it is sent whole, so several queues can be attached at
//! one time, by any thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::time::TimeSpec;
use vmseal_channel::{
    RING_BYTES, Requester, SharedMemory, TICKET_BYTES, ToFilter, ToServer, receive, send,
};

use crate::stack::pool::Pool;
use crate::storage::channel::budget::{BUFFER_BYTES, Budget, Taken};
use crate::storage::served;

/// How long a server may take to attach a queue: it opens nothing and asks no cluster for that. A VM that starts, or goes on after
/// its filter has ended, waits for it.
const TIMEOUT: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    ticket: [u8; TICKET_BYTES],
    /// Whether the server has not answered in time: it is not waited for again, for each further queue.
    late: AtomicBool,
    budget: Arc<Budget>,
}

/// A queue that the server serves.
pub(super) struct Attached {
    pub(super) socket: OwnedFd,
    pub(super) requester: Requester,
    /// Buffers that the server has.
    pub(super) pool: Pool,
    pub(super) taken: Taken,
}

impl Connection {
    /// A connected socket of the server of this file, which is asked for a ticket.
    ///
    /// # Errors
    /// The file's server gives none, or nobody serves it.
    pub fn open(socket: OwnedFd, file: &OwnedFd) -> io::Result<Self> {
        let ticket = served::ticket(file)?;
        Ok(Self { budget: Budget::of_process(), ..Self::new(socket, ticket) })
    }

    /// A connected socket, and the ticket of a file. The memory of its queues counts by itself.
    #[must_use]
    pub fn new(socket: OwnedFd, ticket: [u8; TICKET_BYTES]) -> Self {
        Self { socket, ticket, late: AtomicBool::new(false), budget: Arc::default() }
    }

    /// Attaches a queue to the file, which ends at `end` or behind that.
    ///
    /// # Errors
    /// The server refuses, or is gone, or does not answer, or the queues share as much memory as they may. Where it has not answered for
    /// one, all later ones fail at once.
    pub(super) fn attach(&self, end: u64) -> io::Result<Attached> {
        if self.late.load(Ordering::Relaxed) {
            return Err(late("the server has not answered for an earlier queue"));
        }
        let attached = self.try_attach(end);
        if attached.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::TimedOut) {
            self.late.store(true, Ordering::Relaxed);
        }
        attached
    }

    fn try_attach(&self, end: u64) -> io::Result<Attached> {
        let (until, taken) = (Instant::now() + TIMEOUT, self.budget.take()?);
        let requester = Requester::new(SharedMemory::create(RING_BYTES)?);
        let pool = Pool::shared(BUFFER_BYTES)?;
        let (family, kind) = (AddressFamily::Unix, SockType::SeqPacket);
        let (socket, servers) = socketpair(family, kind, None, SockFlag::SOCK_CLOEXEC)?;
        let attach = ToServer::Attach { ticket: self.ticket };
        say(self.socket.as_fd(), &attach, &[servers.as_fd(), requester.fd()], until)?;
        // From now on the server alone has it: that it hangs up is seen.
        drop(servers);
        match hear(socket.as_fd(), until)? {
            ToFilter::Attached { errno: 0, size } if size >= end => {}
            ToFilter::Attached { errno: 0, size } => {
                return Err(io::Error::other(format!("the image has {size} bytes, and not {end}")));
            }
            ToFilter::Attached { errno, .. } => return Err(io::Error::from_raw_os_error(errno)),
            ToFilter::Shared { .. } | ToFilter::Doorbell => return Err(unasked()),
        }
        let memory = pool.arena().shared_memory().ok_or_else(|| io::Error::other("no memory"))?;
        let share = ToServer::Share { region: super::regions::OWN, bytes: memory.len() as u64 };
        say(socket.as_fd(), &share, &[memory.fd()], until)?;
        match hear(socket.as_fd(), until)? {
            ToFilter::Shared { errno: 0 } => Ok(Attached { socket, requester, pool, taken }),
            ToFilter::Shared { errno } => Err(io::Error::from_raw_os_error(errno)),
            ToFilter::Attached { .. } | ToFilter::Doorbell => Err(unasked()),
        }
    }
}

fn unasked() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the server answers what it was not asked")
}

fn late(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, what.into())
}

/// Sends a message, and waits for room for it.
fn say(
    socket: BorrowedFd<'_>,
    message: &ToServer,
    fds: &[BorrowedFd<'_>],
    until: Instant,
) -> io::Result<()> {
    loop {
        match send(socket, message, fds) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait(socket, PollFlags::POLLOUT, until)?;
            }
            sent => return sent,
        }
    }
}

/// Waits for a message.
fn hear(socket: BorrowedFd<'_>, until: Instant) -> io::Result<ToFilter> {
    loop {
        match receive::<ToFilter>(socket, false) {
            Ok(Some((message, _))) => return Ok(message),
            Ok(None) => {
                let what = "the server has closed the queue";
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, what));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait(socket, PollFlags::POLLIN, until)?;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Waits until a socket is ready for this.
fn wait(socket: BorrowedFd<'_>, events: PollFlags, until: Instant) -> io::Result<()> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(socket, events)];
        match ppoll(&mut fds, Some(TimeSpec::from(left)), None) {
            Ok(0) => {
                let seconds = TIMEOUT.as_secs();
                return Err(late(format!("the server has not answered for {seconds} seconds")));
            }
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
