//! Tickets: secrets by which a queue is attached to the file of an open handle, as that was opened.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use nix::sys::socket::{Shutdown, shutdown};
use vmseal_channel::TICKET_BYTES;

use crate::channel::budget::{Budget, Share};
use crate::channel::gate::Gate;
use crate::open_files::Rights;

// Both contracts say how long a ticket is.
const _: () = assert!(TICKET_BYTES == vmseal_api::rbd::TICKET_BYTES);

/// A ticket.
pub type Ticket = [u8; TICKET_BYTES];

/// A handle that has a ticket.
pub struct Holder {
    /// The handle.
    pub handle: u64,
    /// What it may do.
    pub rights: Rights,
    /// Where requests go in; it is shut when the handle is released.
    pub gate: Arc<Gate>,
    /// What its requests may have in flight.
    pub share: Arc<Share>,
    /// The sockets of its queues.
    sockets: Mutex<Vec<Weak<OwnedFd>>>,
}

/// The tickets of all handles, and what they share.
#[derive(Default)]
pub struct Tickets {
    all: Mutex<HashMap<u64, (Ticket, Arc<Holder>)>>,
    budget: Arc<Budget>,
}

fn random() -> io::Result<Ticket> {
    let mut ticket: Ticket = [0; TICKET_BYTES];
    // SAFETY: the buffer is as long as is said.
    let got = unsafe { libc::getrandom(ticket.as_mut_ptr().cast(), TICKET_BYTES, 0) };
    // So few bytes come whole.
    if got == TICKET_BYTES as isize { Ok(ticket) } else { Err(io::Error::last_os_error()) }
}

impl Tickets {
    fn all(&self) -> MutexGuard<'_, HashMap<u64, (Ticket, Arc<Holder>)>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ticket of an open handle; it is made when it is first asked for.
    ///
    /// # Errors
    /// The system gives no random bytes.
    pub fn of(&self, handle: u64, rights: Rights) -> io::Result<Ticket> {
        let mut all = self.all();
        if let Some((ticket, _)) = all.get(&handle) {
            return Ok(*ticket);
        }
        let ticket = random()?;
        let (gate, share) = (Arc::default(), Share::of(&self.budget));
        let holder = Holder { handle, rights, gate, share, sockets: Mutex::default() };
        all.insert(handle, (ticket, Arc::new(holder)));
        Ok(ticket)
    }

    /// The handle that has a ticket, unless it is released.
    #[must_use]
    pub fn find(&self, ticket: &Ticket) -> Option<Arc<Holder>> {
        let all = self.all();
        all.values().find(|(of, _)| of == ticket).map(|(_, holder)| Arc::clone(holder))
    }

    /// A handle is released: its queues take no more requests. Returns the gate where some are in flight.
    #[must_use]
    pub fn release(&self, handle: u64) -> Option<Arc<Gate>> {
        let (_, holder) = self.all().remove(&handle)?;
        let in_flight = holder.gate.shut();
        for socket in holder.sockets().drain(..).filter_map(|socket| socket.upgrade()) {
            // The thread that serves the queue wakes, and the filter, if there is still one, sees that nobody does any more.
            let _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
        }
        in_flight.then(|| Arc::clone(&holder.gate))
    }
}

impl Holder {
    fn sockets(&self) -> MutexGuard<'_, Vec<Weak<OwnedFd>>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This socket is shut down when the handle is released. Who adds one when that has happened finds the gate shut.
    pub fn add(&self, socket: &Arc<OwnedFd>) {
        let mut sockets = self.sockets();
        sockets.retain(|socket| socket.strong_count() > 0);
        sockets.push(Arc::downgrade(socket));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_ticket_is_of_one_handle_and_ends_with_it() {
        let tickets = Tickets::default();
        let both = Rights { reads: true, writes: true };
        let reads = Rights { reads: true, writes: false };
        let (one, other) = (tickets.of(1, both).unwrap(), tickets.of(2, reads).unwrap());
        assert_ne!(one, other);
        assert_eq!(tickets.of(1, both).unwrap(), one);
        let holder = tickets.find(&one).unwrap();
        assert_eq!((holder.handle, holder.rights), (1, both));
        assert_eq!(tickets.find(&other).unwrap().rights, reads);
        assert!(tickets.find(&[0; TICKET_BYTES]).is_none());
        let (here, there) = UnixStream::pair().unwrap();
        let socket = Arc::new(OwnedFd::from(here));
        holder.add(&socket);
        let inside = holder.gate.enter().unwrap();
        let gate = tickets.release(1).unwrap();
        assert!(tickets.find(&one).is_none());
        assert!(holder.gate.enter().is_none());
        assert_eq!(std::io::Read::read(&mut &there, &mut [0; 1]).unwrap(), 0, "it was shut down");
        drop(inside);
        gate.wait();
        assert!(tickets.release(2).is_none(), "nothing is in flight");
        assert!(tickets.release(3).is_none(), "it had no ticket");
    }
}
