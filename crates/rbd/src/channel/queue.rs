//! A queue: requests of a filter for one image, and their answers.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nix::sys::socket::{Shutdown, SockType, getsockopt, shutdown, sockopt};
use vmseal_channel::{
    Answerer, Broken, Operation, QUEUES_MAX, REGION_BYTES_MAX, REGIONS_MAX, REQUEST_BYTES_MAX,
    RING_BYTES, SharedMemory, Submission, ToFilter, ToServer, ZEROES_BYTES_MAX, receive,
    ring_doorbell, send,
};

use crate::channel::budget::Taken;
use crate::channel::gate::Inside;
use crate::channel::service::Service;
use crate::channel::tickets::{Holder, Ticket};
use crate::in_flight::OF_OBJECT;
use crate::open_file::{FileImage, OpenFile};
use crate::parts::{Parts, Regions};

/// How many requests of a queue are begun before the next queue has its turn.
const TURN: usize = 32;

/// Why a queue ends.
#[derive(Debug, thiserror::Error)]
pub enum Ending {
    /// The filter has closed it, or is gone.
    #[error("the filter has left")]
    Left,
    /// The file is closed.
    #[error("the file is closed")]
    Closed,
    /// The ring is broken.
    #[error("the filter breaks the protocol: {0}")]
    Broken(#[from] Broken),
    /// A piece is outside of its region.
    #[error(
        "the filter breaks the protocol: the request in slot {0} names memory that it does not share"
    )]
    Outside(u32),
    /// A message that belongs elsewhere.
    #[error("the filter breaks the protocol: it attaches a queue on a queue's socket")]
    Message,
    /// The socket.
    #[error("the queue's socket: {0}")]
    Socket(io::Error),
}

impl Ending {
    /// Logs what is not usual.
    pub fn log(&self) {
        match self {
            Self::Left | Self::Closed => {}
            _ => tracing::warn!(error = %self, "the queue of a filter is dropped"),
        }
    }
}

fn error(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

/// The number of an error, for the filter.
fn number(error: &io::Error) -> i32 {
    use io::ErrorKind::{InvalidData, InvalidInput};
    let of_kind = match error.kind() {
        InvalidData | InvalidInput => libc::EINVAL,
        _ => libc::EIO,
    };
    error.raw_os_error().unwrap_or(of_kind)
}

/// What answers need. It has no file: librbd's threads drop it, and must not close an image.
struct Line {
    answerer: Answerer,
    socket: Arc<OwnedFd>,
}

impl Line {
    /// Wakes the filter. One that cannot be woken would wait for its answers for ever: its socket ends, and the filter with that, and
    /// its successor makes the requests again.
    fn ring(&self) {
        use io::ErrorKind::{BrokenPipe, ConnectionReset};
        let Err(error) = ring_doorbell(self.socket.as_fd(), &ToFilter::Doorbell) else { return };
        // Else the filter is gone, which the thread that serves the queue sees.
        if !matches!(error.kind(), BrokenPipe | ConnectionReset) {
            tracing::warn!(%error, "a filter is not told that it has answers: its queue ends");
        }
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
    }
}

/// The answer to a request, which is to be given.
struct Answer {
    line: Arc<Line>,
    slot: u32,
    /// Given back after the answer.
    _bytes: Option<Taken>,
    /// Left last.
    _inside: Inside,
}

impl Answer {
    fn give(self, done: io::Result<()>) {
        let errno = done.err().map_or(0, |error| number(&error));
        if self.line.answerer.answer(self.slot, errno) {
            self.line.ring();
        }
    }
}

/// A queue that is attached.
pub struct Queue {
    line: Arc<Line>,
    holder: Arc<Holder>,
    regions: Regions,
}

impl Queue {
    /// Attaches a queue for who has this ticket, beside as many others of the connection, and says so on the queue's socket. None where it is
    /// refused.
    #[must_use]
    pub fn attach(
        service: &Service,
        ticket: &Ticket,
        fds: Vec<OwnedFd>,
        others: usize,
    ) -> Option<Self> {
        let Ok([socket, ring]) = <[OwnedFd; 2]>::try_from(fds) else {
            tracing::warn!("a filter attaches a queue without its socket and its ring");
            return None;
        };
        if !matches!(getsockopt(&socket, sockopt::SockType), Ok(SockType::SeqPacket)) {
            tracing::warn!("a filter attaches a queue whose socket is none for messages");
            return None;
        }
        let socket = Arc::new(socket);
        let made = Self::make(service, ticket, (&socket, ring), others);
        let answer = match &made {
            Ok((_, size)) => ToFilter::Attached { errno: 0, size: *size },
            Err(error) => {
                tracing::warn!(%error, "a filter's queue is not attached");
                ToFilter::Attached { errno: number(error), size: 0 }
            }
        };
        // Where the filter is gone already, that is seen when the queue is served.
        let _ = send(socket.as_fd(), &answer, &[]);
        made.ok().map(|(queue, _)| queue)
    }

    fn make(
        service: &Service,
        ticket: &Ticket,
        (socket, ring): (&Arc<OwnedFd>, OwnedFd),
        others: usize,
    ) -> io::Result<(Self, u64)> {
        if others >= QUEUES_MAX {
            return Err(error(libc::EMFILE));
        }
        let holder = service.tickets.find(ticket).ok_or_else(|| error(libc::EACCES))?;
        // Left after the file is dropped, as whoever releases the handle closes the image.
        let _inside = holder.gate.enter().ok_or_else(|| error(libc::EBADF))?;
        let file = service.files.of_handle(holder.handle)?;
        let image = file.image().ok_or_else(|| error(libc::EOPNOTSUPP))?;
        let ring = SharedMemory::map(ring, RING_BYTES)?;
        let answerer = Answerer::new(ring)
            .map_err(|broken| io::Error::new(io::ErrorKind::InvalidInput, broken))?;
        holder.add(socket);
        let line = Arc::new(Line { answerer, socket: Arc::clone(socket) });
        Ok((Self { line, holder, regions: Regions::default() }, image.size()))
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.line.socket.as_fd()
    }

    /// Takes what the filter says on the socket.
    ///
    /// # Errors
    /// The queue ends.
    pub fn hear(&mut self) -> Result<(), Ending> {
        loop {
            match receive::<ToServer>(self.socket(), false) {
                Ok(None) => return Err(Ending::Left),
                Ok(Some((ToServer::Doorbell, _))) => {}
                Ok(Some((ToServer::Share { region, bytes }, fds))) => {
                    let shared = self.share(region, bytes, fds);
                    let errno = shared.err().map_or(0, |error| number(&error));
                    send(self.socket(), &ToFilter::Shared { errno }, &[])
                        .map_err(Ending::Socket)?;
                }
                Ok(Some((ToServer::Attach { .. }, _))) => return Err(Ending::Message),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(Ending::Socket(error)),
            }
        }
    }

    fn share(&mut self, region: u32, bytes: u64, fds: Vec<OwnedFd>) -> io::Result<()> {
        let number = self.regions.len();
        if number >= REGIONS_MAX {
            return Err(error(libc::EMFILE));
        }
        let Ok([memory]) = <[OwnedFd; 1]>::try_from(fds) else { return Err(error(libc::EINVAL)) };
        let memory = SharedMemory::map(memory, REGION_BYTES_MAX)?;
        if region as usize != number || bytes != memory.len() as u64 {
            return Err(error(libc::EINVAL));
        }
        // Requests in flight keep the list that they were begun with.
        self.regions = self.regions.iter().cloned().chain([Arc::new(memory)]).collect();
        Ok(())
    }

    /// Begins requests that wait in the ring; whether more may wait, as its turn has ended.
    ///
    /// # Errors
    /// The queue ends.
    pub fn take(&self, service: &Service) -> Result<bool, Ending> {
        // Left after the file is dropped.
        let _inside = self.holder.gate.enter().ok_or(Ending::Closed)?;
        let file = service.files.of_handle(self.holder.handle).map_err(|_| Ending::Closed)?;
        for _ in 0..TURN {
            let Some(request) = self.line.answerer.next()? else { return Ok(false) };
            let inside = self.holder.gate.enter().ok_or(Ending::Closed)?;
            self.begin(service, &file, &request, inside)?;
        }
        Ok(true)
    }

    /// Begins a request. The image may be used here: `take` is inside of the gate.
    fn begin(
        &self,
        service: &Service,
        file: &OpenFile,
        request: &Submission,
        inside: Inside,
    ) -> Result<(), Ending> {
        let (line, slot) = (Arc::clone(&self.line), request.slot);
        let mut answer = Answer { line, slot, _bytes: None, _inside: inside };
        let image = match self.image(file, request) {
            Ok(image) => image,
            Err(error) => {
                answer.give(Err(error));
                return Ok(());
            }
        };
        let (offset, length) = (request.offset, request.length);
        let part = offset..offset + length;
        let objects = || image.image().objects(&part).saturating_mul(OF_OBJECT);
        match request.operation {
            // Its length is noted as well.
            Operation::Flush if image.has_grown() => answer.give(file.flush(&service.store)),
            Operation::Flush => image.image().flush(move |done| answer.give(done)),
            _ if length == 0 => answer.give(Ok(())),
            Operation::Zero | Operation::ZeroKeepingRoom => {
                // They have no data.
                answer._bytes = Some(self.room(objects())?);
                let takes_room = request.operation == Operation::ZeroKeepingRoom;
                image.image().write_zeroes(part, takes_room, move |done| answer.give(done));
            }
            Operation::Read => {
                let parts = self.parts(request)?;
                answer._bytes = Some(self.room(length.max(objects()))?);
                image.image().read_into(offset, parts, move |read| {
                    answer.give(read.and_then(|read| whole(read, length)));
                });
            }
            Operation::Write => {
                let parts = self.parts(request)?;
                answer._bytes = Some(self.room(length.max(objects()))?);
                image.image().write_from(offset, parts, move |done| answer.give(done));
            }
        }
        Ok(())
    }

    /// Takes room for a request, and waits for it. When the file is closed meanwhile, the filter is gone: the request is not begun.
    fn room(&self, bytes: u64) -> Result<Taken, Ending> {
        let taken = self.holder.share.take(bytes);
        if self.holder.gate.is_shut() { Err(Ending::Closed) } else { Ok(taken) }
    }

    fn parts(&self, request: &Submission) -> Result<Parts, Ending> {
        Parts::of(&request.pieces, &self.regions).ok_or(Ending::Outside(request.slot))
    }

    /// The image, if the request may be done with it.
    fn image(&self, file: &OpenFile, request: &Submission) -> io::Result<Arc<FileImage>> {
        let image = file.image().ok_or_else(|| error(libc::EBADF))?;
        let rights = self.holder.rights;
        let writes = rights.writes && image.is_writable();
        let (may, length_max) = match request.operation {
            Operation::Read => (rights.reads, REQUEST_BYTES_MAX),
            Operation::Write => (writes, REQUEST_BYTES_MAX),
            Operation::Flush => return Ok(image),
            Operation::Zero | Operation::ZeroKeepingRoom => (writes, ZEROES_BYTES_MAX),
        };
        if !may {
            return Err(error(libc::EBADF));
        }
        if request.length > length_max {
            return Err(error(libc::EINVAL));
        }
        let part = request.offset..request.offset.saturating_add(request.length);
        if image.within(part.clone()) != part {
            return Err(error(libc::EFBIG));
        }
        Ok(image)
    }
}

/// What is within an image is read whole; less is an error of the cluster, and no data.
fn whole(read: u64, length: u64) -> io::Result<()> {
    if read == length {
        return Ok(());
    }
    tracing::error!(read, length, "an image gives less than it was asked for");
    Err(error(libc::EIO))
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::{AddressFamily, SockFlag, socketpair};

    use super::*;

    /// A line, and the filter's end of it.
    fn line() -> (Line, OwnedFd) {
        let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
        let (own, filters) = socketpair(AddressFamily::Unix, kind, None, flags).unwrap();
        let answerer = Answerer::new(SharedMemory::create(RING_BYTES).unwrap()).unwrap();
        (Line { answerer, socket: Arc::new(own) }, filters)
    }

    #[test]
    fn a_filter_that_cannot_be_woken_loses_its_queue() {
        let (line, filters) = line();
        let says = || send(filters.as_fd(), &ToServer::Doorbell, &[]);
        line.ring();
        let (heard, _) = receive::<ToFilter>(filters.as_fd(), false).unwrap().unwrap();
        assert_eq!(heard, ToFilter::Doorbell);
        // Doorbells fail from now on, and nothing else does.
        shutdown(line.socket.as_raw_fd(), Shutdown::Write).unwrap();
        says().unwrap();
        line.ring();
        assert_eq!(says().unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_filter_whose_socket_is_full_keeps_its_queue() {
        let (line, filters) = line();
        while send(line.socket.as_fd(), &ToFilter::Doorbell, &[]).is_ok() {}
        line.ring();
        send(filters.as_fd(), &ToServer::Doorbell, &[]).unwrap();
    }
}
