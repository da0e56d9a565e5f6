//! A connection of a filter, and its queues: one thread serves them all.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Weak;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vmseal_channel::{ToServer, receive};

use crate::channel::queue::Queue;
use crate::channel::service::Service;

struct Connection {
    /// None when the filter has closed it: its queues are served on.
    socket: Option<OwnedFd>,
    queues: Vec<Queue>,
}

/// Serves a connection until the filter has closed it and all its queues, or the file system is gone.
pub fn serve(socket: OwnedFd, service: &Weak<Service>) {
    let mut connection = Connection { socket: Some(socket), queues: Vec::new() };
    loop {
        {
            // Not kept while it waits: the images are closed with the file system.
            let Some(service) = service.upgrade() else { return };
            connection.work(&service);
        }
        if connection.is_closed() {
            return;
        }
        let ready = match connection.wait() {
            Ok(ready) => ready,
            Err(error) => {
                tracing::error!(%error, "a filter's connection is not served any more");
                return;
            }
        };
        let Some(service) = service.upgrade() else { return };
        connection.hear(&ready, &service);
    }
}

impl Connection {
    fn is_closed(&self) -> bool {
        self.socket.is_none() && self.queues.is_empty()
    }

    /// Begins all requests that wait, of each queue in turn.
    fn work(&mut self, service: &Service) {
        let mut more = true;
        while more {
            more = false;
            self.queues.retain(|queue| match queue.take(service) {
                Ok(waits) => {
                    more |= waits;
                    true
                }
                Err(ending) => {
                    ending.log();
                    false
                }
            });
        }
    }

    /// Waits until a socket has something; which ones, that of the connection first, if it is open.
    fn wait(&self) -> io::Result<Vec<bool>> {
        let own = self.socket.iter().map(AsFd::as_fd);
        let sockets = own.chain(self.queues.iter().map(Queue::socket));
        let mut fds: Vec<_> = sockets.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        loop {
            match poll(&mut fds, PollTimeout::NONE) {
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
                Ok(_) => return Ok(fds.iter().map(|fd| fd.any().unwrap_or(true)).collect()),
            }
        }
    }

    /// Takes what the sockets have.
    fn hear(&mut self, ready: &[bool], service: &Service) {
        let mut ready = ready.iter().copied();
        let own = self.socket.is_some() && ready.next().unwrap_or(false);
        self.queues.retain_mut(|queue| {
            let heard = if ready.next().unwrap_or(false) { queue.hear() } else { Ok(()) };
            heard.inspect_err(|ending| ending.log()).is_ok()
        });
        if own && !self.attach(service) {
            self.socket = None;
        }
    }

    /// Attaches new queues; false: the connection is closed, or no good.
    fn attach(&mut self, service: &Service) -> bool {
        let Some(socket) = &self.socket else { return false };
        loop {
            match receive::<ToServer>(socket.as_fd(), false) {
                Ok(None) => return false,
                Ok(Some((ToServer::Attach { ticket }, fds))) => {
                    let others = self.queues.len();
                    self.queues.extend(Queue::attach(service, &ticket, fds, others));
                }
                Ok(Some(_)) => {
                    tracing::warn!("a filter says on its connection what belongs to a queue");
                    return false;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(error) => {
                    tracing::warn!(%error, "a filter attaches no more queues");
                    return false;
                }
            }
        }
    }
}
