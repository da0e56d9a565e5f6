//! The vhost-user-blk front end: QEMU's fast path, on shared guest memory.
//!
//! ```text
//!   Listening --connection, peer allowed--> Connected --disconnected | protocol error--> Listening
//!        └─────────────────────── stop ───────────────┴──> ended, rings drained
//! ```
//! A socket that is connected from the start, or by another process later, serves that one connection.
//!
//! One thread per disk handles the protocol ([`session`]); one per queue moves data ([`queue`]). The
//! crate `vhost-user-backend` is not used: it takes a lock per request and cannot track those in flight
//! ([`inflight`]).

pub mod config;
pub mod descriptor_message;
pub mod inflight;
pub mod memory_log;
mod message;
pub mod queue;
pub mod replay;
pub mod request;
pub mod session;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv};
use vhost::vhost_user::BackendReqHandler;
use vmseal_api::filter::DiskActivity;

use crate::front_ends::vhost_user::descriptor_message::Given;
use crate::front_ends::vhost_user::message::Arrival;
use crate::front_ends::vhost_user::session::Session;
use crate::front_ends::{self, ServedDisk};
use crate::handle::Socket;
use crate::stack::chain::Chain;
use crate::stack::orders::Orders;

/// Serves VMMs, one after the other, until told to stop; returns the chains. An error means that the
/// disk cannot be served any more.
///
/// # Errors
/// The reason.
pub fn serve(
    socket: &Socket,
    peer_uid: u32,
    served: &Arc<ServedDisk>,
    chains: Vec<Chain>,
    orders: &Orders,
) -> io::Result<Vec<Chain>> {
    match socket {
        Socket::Listening(listener) => serve_all(listener, peer_uid, served, chains, orders),
        // The process that connected it has chosen the peer.
        Socket::Connected(stream) => serve_one(stream, served, chains, orders),
        Socket::Connecting(stream, pipe) => {
            // A pipe is readable when its other end is closed.
            match orders.idle(Some(pipe.as_fd()), chains)? {
                (chains, true) => {
                    check_connected(stream)?;
                    serve_one(stream, served, chains, orders)
                }
                (chains, false) => Ok(chains),
            }
        }
    }
}

fn serve_one(
    stream: &UnixStream,
    served: &Arc<ServedDisk>,
    chains: Vec<Chain>,
    orders: &Orders,
) -> io::Result<Vec<Chain>> {
    let chains = session(stream.try_clone()?, served, chains, orders)?;
    Ok(orders.idle(None, chains)?.0)
}

/// Checks that a socket is connected, or was: before that, `recv` fails with EINVAL (unix(7)).
fn check_connected(stream: &UnixStream) -> io::Result<()> {
    let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    match recv(stream.as_raw_fd(), &mut [0], peek) {
        Err(Errno::EINVAL) => {
            Err(io::Error::other("the process that was to connect its socket to the VMM has ended"))
        }
        _ => Ok(()),
    }
}

fn serve_all(
    listener: &UnixListener,
    peer_uid: u32,
    served: &Arc<ServedDisk>,
    mut chains: Vec<Chain>,
    orders: &Orders,
) -> io::Result<Vec<Chain>> {
    listener.set_nonblocking(true)?;
    loop {
        let connected;
        (chains, connected) = orders.idle(Some(listener.as_fd()), chains)?;
        if !connected {
            return Ok(chains);
        }
        if let Some(stream) = front_ends::accept(listener, peer_uid)? {
            chains = session(stream, served, chains, orders)?;
        }
    }
}

/// The time with one VMM.
fn session(
    stream: UnixStream,
    served: &Arc<ServedDisk>,
    chains: Vec<Chain>,
    orders: &Orders,
) -> io::Result<Vec<Chain>> {
    let queues = chains.len();
    stream.set_nonblocking(false)?;
    let chains = converse(stream, served, chains, orders)?;
    if chains.len() < queues {
        return Err(io::Error::other("a queue's thread died; restart the filter"));
    }
    served.state.set(DiskActivity::Idle);
    tracing::info!("the VMM is gone; all its requests are finished");
    Ok(chains)
}

/// Does the VMM's requests until it disconnects, or until told to stop; returns the chains, without those of
/// threads that panicked.
fn converse(
    stream: UnixStream,
    served: &Arc<ServedDisk>,
    chains: Vec<Chain>,
    orders: &Orders,
) -> io::Result<Vec<Chain>> {
    let session = Session::new(Arc::clone(served), chains).map_err(io::Error::other)?;
    let session = Arc::new(Mutex::new(session));
    let connection = stream.try_clone()?;
    let mut handler = BackendReqHandler::from_stream(stream, Arc::clone(&session));
    let mut spoken = false;
    loop {
        match message::wait(&connection, orders)? {
            Arrival::Message => {}
            Arrival::Stop => break,
            Arrival::Exchange => {
                let mut session = session.lock().unwrap_or_else(PoisonError::into_inner);
                if let Err(error) = session.exchange(orders) {
                    tracing::warn!(%error, "a queue cannot go on with the new chains; the connection is ended");
                    break;
                }
                continue;
            }
            Arrival::Part => {
                tracing::warn!("the VMM has sent a part of a message; the connection is ended");
                break;
            }
        }
        if let Some(given) = descriptor_message::next(&connection) {
            if let Err(error) = take_descriptor(&connection, given, served, &session) {
                tracing::warn!(%error, "the connection is ended");
                break;
            }
            continue;
        }
        match handler.handle_request() {
            Ok(()) if spoken => {}
            Ok(()) => {
                spoken = true;
                served.state.set(DiskActivity::Connected);
                tracing::info!("a VMM is connected");
            }
            // The VMM got the error (or did not ask for it); what it tells the guest is the VMM's business.
            Err(
                error @ (vhost::vhost_user::Error::InvalidParam
                | vhost::vhost_user::Error::ReqHandlerError(_)
                | vhost::vhost_user::Error::InvalidOperation(_)),
            ) => tracing::warn!(%error, "a request of the VMM failed"),
            Err(vhost::vhost_user::Error::Disconnected) => break,
            Err(error) => {
                tracing::warn!(%error, "the connection is ended");
                break;
            }
        }
        if hung_up(connection.as_fd()) {
            break;
        }
    }
    served.state.set_announce(None);
    let mut session = session.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(session.end())
}

/// Takes a descriptor that is a message of its own.
fn take_descriptor(
    connection: &UnixStream,
    given: Given,
    served: &ServedDisk,
    session: &Mutex<Session>,
) -> io::Result<()> {
    let (descriptor, answer) = descriptor_message::take(connection)?;
    match given {
        Given::Channel => {
            let channel = UnixStream::from(descriptor);
            let announce = move || descriptor_message::announce(&channel);
            served.state.set_announce(Some(Box::new(announce)));
        }
        Given::LogEvent => {
            let mut session = session.lock().unwrap_or_else(PoisonError::into_inner);
            session.set_log_fd(descriptor).map_err(io::Error::other)?;
        }
    }
    answer.send(connection)
}

/// Whether the peer has closed the connection and left nothing to read.
fn hung_up(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
    let _ = poll(&mut fds, PollTimeout::ZERO);
    let events = fds[0].revents().unwrap_or(PollFlags::empty());
    events.contains(PollFlags::POLLHUP) && !events.contains(PollFlags::POLLIN)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

    use super::*;

    #[test]
    fn a_socket_that_nobody_has_connected_is_told_from_one_whose_vmm_has_gone() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("vmm");
        let listener = UnixListener::bind(&path).unwrap();
        let (family, kind) = (AddressFamily::Unix, SockType::Stream);
        let ours = socket(family, kind, SockFlag::SOCK_CLOEXEC, None).unwrap();
        let of_another_process: OwnedFd = ours.try_clone().unwrap();
        let ours = UnixStream::from(ours);
        assert!(check_connected(&ours).unwrap_err().to_string().contains("ended"));
        connect(of_another_process.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        check_connected(&ours).unwrap();
        drop(listener.accept().unwrap());
        check_connected(&ours).unwrap();
    }
}
