//! A connection of a filter, and its queues: one thread serves them all.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Weak;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vmseal_channel::{ToServer, receive};

use crate::channel::queue::Queue;
use crate::channel::service::Service;

/// How many queues of a connection may be refused, each with a line in the log: a filter whose queue is refused uses its file instead,
/// and tries again with the next one.
const REFUSALS_MAX: usize = 64;

struct Connection {
    /// None when the filter has closed it, or may attach no more: its queues are served on.
    socket: Option<OwnedFd>,
    queues: Vec<Queue>,
    /// How many were refused.
    refused: usize,
}

/// Serves a connection until the filter has closed it and all its queues, or the file system is gone.
pub fn serve(socket: OwnedFd, service: &Weak<Service>) {
    let mut connection = Connection { socket: Some(socket), queues: Vec::new(), refused: 0 };
    loop {
        let more = {
            // Not kept while it waits: the images are closed with the file system.
            let Some(service) = service.upgrade() else { return };
            connection.work(&service)
        };
        if connection.is_closed() {
            return;
        }
        let ready = match connection.wait(more) {
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

    /// Begins requests that wait, of each queue a turn; whether more may wait.
    fn work(&mut self, service: &Service) -> bool {
        let mut more = false;
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
        more
    }

    /// Waits until a socket has something, but not where there is more to do; which ones have, that of the connection first, if it is open.
    fn wait(&self, more: bool) -> io::Result<Vec<bool>> {
        let timeout = if more { PollTimeout::ZERO } else { PollTimeout::NONE };
        let own = self.socket.iter().map(AsFd::as_fd);
        let sockets = own.chain(self.queues.iter().map(Queue::socket));
        let mut fds: Vec<_> = sockets.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        loop {
            match poll(&mut fds, timeout) {
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
                    match Queue::attach(service, &ticket, fds, others) {
                        Some(queue) => self.queues.push(queue),
                        None => self.refused += 1,
                    }
                    if self.refused >= REFUSALS_MAX {
                        tracing::warn!(
                            most = REFUSALS_MAX,
                            "a filter attaches no more queues: too many were refused"
                        );
                        return false;
                    }
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
