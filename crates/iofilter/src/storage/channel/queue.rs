//! The requests of one chain in one ring.
//!
//! ```text
//!  submit ──a slot and buffers are free──> In the ring ──answered, data copied──> complete
//!     │                                      ^       ├──a part of a long one──> first in the line
//!     └──> In the line, oldest first ────────┘       └──read, left in its buffers──> complete, Lent ──returned──> buffers are free
//!  any of them ──the server breaks the protocol──> failed
//! ```
//! A request that waits in the line has no buffer, and lent ones come back without help of this queue: so the line always goes on.
//! One that needs no buffers goes past it.
//!
//! `poll` shows the server all that was submitted since the last one, by one doorbell at most, and looks for answers. It asks for no
//! doorbell, and reads none, but where the server has to answer for a region: a thread that polls for a while sees the answers by
//! itself. The wait set is the queue's socket.
//!
//! Before the thread sleeps (`before_sleep`) the queue **asks** for a doorbell for the next answer ([`Requester::next`]), **looks**, **reads**
//! the doorbells that have come, asks and **looks again**. No wake-up is lost, whenever an answer comes:
//! - before the first look: that finds it. Between asking and the look is a fence, and the server has one between its answer and its look
//!   at whether it was asked: so an answer that the look does not find was given by a server that sees that it was asked, and rings.
//! - after that, and its doorbell was read: then it had been given before, and the last look finds it.
//! - after that, and its doorbell was not read: the socket is ready, and the thread does not sleep.
//!
//! Whatever a look finds is handled, and may have more be put into the ring; then the queue asks and looks again until it finds nothing. It
//! reads once, before the last look: what rings after that keeps the socket ready. A doorbell that was asked for before the thread worked
//! on is superfluous, and read before its next sleep.
//!
//! The server writes into the queue's buffers only while it has a request with them: they are given to the next one when it has
//! answered. When the queue goes it waits for all answers first, so that no earlier write lands after what comes next.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use vmseal_channel::{
    Broken, Operation as Asked, PIECES_MAX, Piece, Requester, SLOTS, ToFilter, ToServer, receive,
    ring_doorbell,
};

use crate::stack::chain::{Io, Storage};
use crate::stack::memory::{Cursor, Segment, Segments};
use crate::stack::pool::{BLOCK, BLOCKS_MAX, Buffer, Pool};
use crate::stack::request::{IoError, Operation, Request, RequestId};
use crate::storage::channel::budget::{BUFFER_BYTES, Taken};
use crate::storage::channel::connection::{Attached, Connection};
use crate::storage::channel::regions::{OWN, Regions};
use crate::storage::served;
use crate::storage::sync;
use crate::storage::target::{BROKEN, FileTarget};

/// The longest read that is left in the buffers, in bytes: what one request to the server has at most. Other reads go in parts.
const LENT_MAX: u64 = (PIECES_MAX * BLOCKS_MAX * BLOCK) as u64;

// A read that waits until all of it has buffers gets them when others have given theirs back.
const _: () = assert!(LENT_MAX as usize <= BUFFER_BYTES);

/// How many messages one call of `poll` reads: a server that rings without end must not keep the thread from its other work.
const MESSAGES_MAX: usize = 64;

/// The pause before a doorbell is tried again that the system had no memory for.
const RETRY: Duration = Duration::from_millis(1);

/// How the server has broken the protocol.
#[derive(Debug, thiserror::Error)]
enum Violation {
    #[error("{0}")]
    Ring(#[from] Broken),
    #[error("it answers a request that is not there")]
    Unasked,
    #[error("the ring does not take a request although it has room")]
    Full,
    #[error("it says what it was not asked")]
    Message,
    #[error("its message cannot be read: {0}")]
    Socket(#[source] io::Error),
}

/// A request that was submitted.
#[derive(Debug, Default)]
struct Flight {
    /// Bytes done by earlier parts.
    done: u64,
    /// Bytes of the present part.
    part: u64,
    /// The present part's; none of one that is by reference.
    buffers: Vec<Buffer>,
}

/// What leads to the server.
struct Link {
    socket: OwnedFd,
    requester: Requester,
}

/// See the module.
pub(in crate::storage) struct Queue {
    /// None once the server has broken the protocol.
    link: Option<Link>,
    target: Arc<FileTarget>,
    pool: Pool,
    regions: Regions,
    /// By request.
    flights: Vec<Flight>,
    /// Whose request each slot of the ring has.
    slots: Vec<Option<RequestId>>,
    free: Vec<u32>,
    line: VecDeque<RequestId>,
    /// Reads whose buffers were lent.
    lent: Vec<RequestId>,
    /// For one call: the memory of a request.
    pieces: Vec<Piece>,
    /// Whether requests were put into the ring that the server is not shown yet.
    pushed: bool,
    /// Whether a doorbell is due that could not be sent.
    due: bool,
    deadline: Option<Instant>,
    /// Given back when the memory is, too.
    _taken: Taken,
}

impl Queue {
    /// A queue to this file.
    ///
    /// # Errors
    /// The server refuses, or is gone, or does not answer.
    pub(in crate::storage) fn attach(
        connection: &Connection,
        target: Arc<FileTarget>,
    ) -> io::Result<Self> {
        let end = target.end.unwrap_or(target.offset);
        let Attached { socket, requester, pool, taken } = connection.attach(end)?;
        Ok(Self {
            link: Some(Link { socket, requester }),
            target,
            regions: Regions::new(pool.arena()),
            pool,
            flights: Vec::new(),
            slots: vec![None; SLOTS],
            free: (0..SLOTS as u32).rev().collect(),
            line: VecDeque::new(),
            lent: Vec::new(),
            pieces: Vec::with_capacity(PIECES_MAX),
            pushed: false,
            due: false,
            deadline: None,
            _taken: taken,
        })
    }

    fn in_ring(&self) -> usize {
        SLOTS - self.free.len()
    }

    /// Whether the server need not be asked.
    fn answered_here(&self, request: &Request) -> Option<Result<(), IoError>> {
        if self.link.is_none() {
            return Some(Err(BROKEN));
        }
        if let Err(refusal) = self.target.allows(request) {
            return Some(Err(refusal));
        }
        match request.operation {
            Operation::Read | Operation::Write | Operation::Flush => None,
            Operation::Discard | Operation::WriteZeroes { .. } => {
                let asked = zeroing(&self.target, request.operation);
                asked.is_none().then(|| self.without(request))
            }
        }
    }

    /// Whether a request need not wait behind those that wait for buffers. A flush covers what was answered before it.
    fn needs_no_buffers(&self, request: &Request) -> bool {
        match request.operation {
            Operation::Read => false,
            Operation::Write => {
                request.data.shared_arena().is_some_and(|arena| self.regions.have(arena))
            }
            Operation::Flush | Operation::Discard | Operation::WriteZeroes { .. } => true,
        }
    }

    /// Does through the file what the server cannot do otherwise.
    fn without(&self, request: &Request) -> Result<(), IoError> {
        match request.operation {
            Operation::WriteZeroes { unmap } => {
                sync::zero(&self.target, request.offset, request.length, unmap)
            }
            _ => sync::discard(&self.target, request.offset, request.length),
        }
    }

    /// Puts the next part of a request into the ring; false if it has to wait, for a slot or for buffers.
    fn start(&mut self, id: RequestId, io: &Io<'_>) -> Result<bool, Violation> {
        let Some(&slot) = self.free.last() else { return Ok(false) };
        let request = io.request(id);
        self.pieces.clear();
        let (asked, length) = match request.operation {
            Operation::Read => (Asked::Read, self.list_buffers(id, request)),
            Operation::Write => {
                let in_place = self.list_in_place(id, request);
                let length = in_place.unwrap_or_else(|| self.list_buffers(id, request));
                (Asked::Write, length)
            }
            Operation::Flush => (Asked::Flush, 0),
            Operation::Discard | Operation::WriteZeroes { .. } => {
                (zeroing_or_refusal(&self.target, request.operation), request.length)
            }
        };
        let flight = &mut self.flights[id.index()];
        let has_data = matches!(asked, Asked::Read | Asked::Write);
        if has_data && length == 0 && flight.done < request.length {
            return Ok(false);
        }
        flight.part = length;
        let at = match asked {
            Asked::Flush => 0,
            _ => self.target.offset + request.offset + flight.done,
        };
        let Some(link) = &mut self.link else { return Ok(false) };
        if !link.requester.push(slot, asked, at, length, &self.pieces) {
            return Err(Violation::Full);
        }
        self.free.pop();
        self.slots[slot as usize] = Some(id);
        self.pushed = true;
        Ok(true)
    }

    /// Lists the next part of a write by reference, if all of its data is in shared memory that the server has. Returns
    /// the part's length.
    fn list_in_place(&mut self, id: RequestId, request: &Request) -> Option<u64> {
        let (link, arena) = (self.link.as_ref()?, request.data.shared_arena()?);
        let region = self.regions.of(arena, link.socket.as_fd())?;
        let (mut cursor, mut length) = (Cursor::default(), 0);
        cursor.skip(&request.data, self.flights[id.index()].done as usize);
        while self.pieces.len() < PIECES_MAX {
            let Some(segment) = cursor.next(&request.data, usize::MAX) else { break };
            let Some(place) = arena.place_of(&segment) else { break };
            let piece = Piece { region, length: segment.len() as u32, offset: place as u64 };
            self.pieces.push(piece);
            length += segment.len() as u64;
        }
        Some(length)
    }

    /// Takes buffers for the next part of a request, lists them, and fills them if it is a write. Returns the part's
    /// length, 0 if it has to wait for buffers.
    fn list_buffers(&mut self, id: RequestId, request: &Request) -> u64 {
        let flight = &mut self.flights[id.index()];
        let left = request.length - flight.done;
        let mut held = 0;
        while held < left && flight.buffers.len() < PIECES_MAX {
            let missing = usize::try_from(left - held).unwrap_or(usize::MAX);
            let Some(buffer) = self.pool.take(missing) else { break };
            held += buffer.len() as u64;
            flight.buffers.push(buffer);
        }
        // One that may be lent waits for all of its buffers, rather than being copied in parts; but not for longer ones where it has as
        // many as a request can have.
        let ran_out = held < left && flight.buffers.len() < PIECES_MAX;
        if ran_out && request.takes_lent && flight.done == 0 && left <= LENT_MAX {
            flight.buffers.drain(..).for_each(|buffer| self.pool.give(buffer));
            return 0;
        }
        let length = held.min(left);
        let (mut cursor, mut rest) = (Cursor::default(), length as usize);
        cursor.skip(&request.data, flight.done as usize);
        for buffer in &flight.buffers {
            let segment = self.pool.segment(buffer).part(0, rest);
            rest -= segment.len();
            if request.operation == Operation::Write {
                fill(&segment, &request.data, &mut cursor);
            }
            let (length, offset) = (segment.len() as u32, buffer.place() as u64);
            self.pieces.push(Piece { region: OWN, length, offset });
        }
        length
    }

    /// Puts what waits into the ring, as far as there are slots and buffers.
    fn advance(&mut self, io: &Io<'_>) -> Result<(), Violation> {
        while let Some(&id) = self.line.front() {
            if !self.start(id, io)? {
                break;
            }
            self.line.pop_front();
        }
        Ok(())
    }

    /// Shows the server what was put into the ring.
    fn publish(&mut self) {
        let Some(link) = &mut self.link else { return };
        if std::mem::take(&mut self.pushed) {
            self.due |= link.requester.publish();
        }
        if !self.due {
            return;
        }
        match ring_doorbell(link.socket.as_fd(), &ToServer::Doorbell) {
            Ok(()) => self.due = false,
            Err(error) if says_gone(&error) => served::end(),
            // The system has no memory for it.
            Err(_) => self.deadline = Some(Instant::now() + RETRY),
        }
    }

    /// Handles the answers that have come; whether there were any. `asks`: for a doorbell for the next one.
    fn reap(&mut self, asks: bool, io: &mut Io<'_>) -> Result<bool, Violation> {
        let mut any = false;
        while let Some(Link { requester, .. }) = &mut self.link {
            let next = if asks { requester.next() } else { requester.try_next() };
            let Some((slot, errno)) = next? else { break };
            self.answered(slot, errno, io)?;
            any = true;
        }
        Ok(any)
    }

    /// The request of a slot, which is free from now on.
    fn release(&mut self, slot: u32) -> Result<RequestId, Violation> {
        let id = self.slots.get_mut(slot as usize).and_then(Option::take);
        let id = id.ok_or(Violation::Unasked)?;
        self.free.push(slot);
        Ok(id)
    }

    fn answered(&mut self, slot: u32, errno: i32, io: &mut Io<'_>) -> Result<(), Violation> {
        let id = self.release(slot)?;
        if errno != 0 {
            self.give_back(id);
            let result = self.failed(io.request(id), errno);
            io.complete(id, result);
            return Ok(());
        }
        match io.request(id).operation {
            Operation::Read => self.arrived(id, io),
            Operation::Write => self.give_back(id),
            Operation::Flush => {
                let result = self.target.flushed(Ok(()));
                io.complete(id, result);
                return Ok(());
            }
            Operation::Discard | Operation::WriteZeroes { .. } => {
                io.complete(id, Ok(()));
                return Ok(());
            }
        }
        let flight = &mut self.flights[id.index()];
        flight.done += flight.part;
        if flight.done < io.request(id).length {
            self.line.push_front(id);
        } else {
            io.complete(id, Ok(()));
        }
        Ok(())
    }

    /// What becomes of a request that the server has failed with this error number. The server is there: none says that it is
    /// gone.
    fn failed(&self, request: &Request, errno: i32) -> Result<(), IoError> {
        let error = IoError::from_errno(errno);
        match request.operation {
            Operation::Flush => self.target.flushed(Err(error)),
            _ if errno == libc::EFBIG => Err(self.target.is_short()),
            Operation::Read | Operation::Write => Err(error),
            Operation::Discard | Operation::WriteZeroes { .. } => {
                let keeps = request.operation == Operation::WriteZeroes { unmap: false };
                let flag = if keeps { &self.target.zeroes } else { &self.target.punches };
                if self.target.cannot(errno, flag) { self.without(request) } else { Err(error) }
            }
        }
    }

    /// What was read is in the buffers: it stays there if all of it is, and the filter above takes it from there.
    fn arrived(&mut self, id: RequestId, io: &mut Io<'_>) {
        let flight = &self.flights[id.index()];
        let (lends, mut left) = {
            let request = io.request(id);
            (request.takes_lent && flight.part == request.length, flight.part as usize)
        };
        let mut cursor = Cursor::default();
        cursor.skip(&io.request(id).data, flight.done as usize);
        for buffer in &flight.buffers {
            let segment = self.pool.segment(buffer).part(0, left);
            left -= segment.len();
            if lends {
                io.show_lent(id, segment);
            } else {
                empty(&segment, &io.request(id).data, &mut cursor);
            }
        }
        if lends {
            self.lent.push(id);
        } else {
            self.give_back(id);
        }
    }

    fn give_back(&mut self, id: RequestId) {
        let buffers = &mut self.flights[id.index()].buffers;
        buffers.drain(..).for_each(|buffer| self.pool.give(buffer));
    }

    /// Takes back the buffers of reads that the filter above has taken from them.
    fn take_back(&mut self, io: &Io<'_>) {
        let mut index = 0;
        while let Some(&id) = self.lent.get(index) {
            if io.request(id).lent.bytes() > 0 {
                index += 1;
            } else {
                self.lent.swap_remove(index);
                self.give_back(id);
            }
        }
    }

    /// Reads the doorbells that have come, and other messages.
    fn hear(&mut self) -> Result<(), Violation> {
        let Some(link) = &self.link else { return Ok(()) };
        for _ in 0..MESSAGES_MAX {
            match receive::<ToFilter>(link.socket.as_fd(), false) {
                Ok(Some((ToFilter::Doorbell, _))) => {}
                Ok(Some((ToFilter::Shared { errno }, _))) => {
                    if !self.regions.answered(errno) {
                        return Err(Violation::Message);
                    }
                }
                Ok(Some((ToFilter::Attached { .. }, _))) => return Err(Violation::Message),
                Ok(None) => served::end(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(Violation::Socket(error)),
            }
        }
        Ok(())
    }

    /// Exchanges requests and answers until there is none that has come; `sleeps`: the thread sleeps then. See the module for the order.
    fn exchange(&mut self, sleeps: bool, io: &mut Io<'_>) -> Result<(), Violation> {
        let mut heard = !sleeps && !self.regions.are_asked();
        loop {
            let reaped = self.reap(sleeps, io)?;
            self.advance(io)?;
            self.publish();
            if reaped {
                continue;
            }
            if heard {
                return Ok(());
            }
            self.hear()?;
            heard = true;
        }
    }

    /// One pass.
    fn pass(&mut self, sleeps: bool, io: &mut Io<'_>) {
        self.take_back(io);
        self.deadline = None;
        if self.link.is_none() || self.in_ring() + self.line.len() == 0 {
            return;
        }
        if let Err(why) = self.exchange(sleeps, io) {
            self.lose(&why, io);
        }
    }

    /// Gives the server up: what is under way fails, and all that comes, by the disk's other queues, too.
    fn lose(&mut self, why: &Violation, io: &mut Io<'_>) {
        let requests = self.in_ring() + self.line.len();
        tracing::error!(%why, requests, "vmseal-rbd breaks the protocol of its channel; the disk's requests fail. Look at its log, then stop and start the VM");
        self.link = None;
        // Before the requests fail: the guest may write again then.
        self.target.give_up();
        let in_ring = self.slots.iter_mut().filter_map(Option::take);
        for id in in_ring.chain(self.line.drain(..)) {
            io.complete(id, Err(BROKEN));
        }
    }

    /// Waits for the answers of all requests in the ring.
    fn wait_for_all(&mut self) -> Result<(), Violation> {
        let mut heard = false;
        while self.in_ring() > 0 {
            self.publish();
            let Some(link) = &mut self.link else { return Ok(()) };
            match link.requester.next()? {
                Some((slot, _)) => {
                    self.release(slot)?;
                }
                None if heard => {
                    let timeout = self.due.then(|| TimeSpec::from(RETRY));
                    let mut fds = [PollFd::new(link.socket.as_fd(), PollFlags::POLLIN)];
                    // A signal: it looks again.
                    let _ = ppoll(&mut fds, timeout, None);
                    heard = false;
                }
                None => {
                    self.hear()?;
                    heard = true;
                }
            }
        }
        Ok(())
    }
}

/// How the server is asked for zeroes; none if it need not be, or cannot do that.
fn zeroing(target: &FileTarget, operation: Operation) -> Option<Asked> {
    let may_be_holes = operation != Operation::WriteZeroes { unmap: false };
    if may_be_holes && target.punches.load(Ordering::Relaxed) {
        return Some(Asked::Zero);
    }
    let keeps = operation != Operation::Discard && target.zeroes.load(Ordering::Relaxed);
    keeps.then_some(Asked::ZeroKeepingRoom)
}

/// The same of a request that has waited: what the server cannot do may have been found out meanwhile. It refuses that
/// once more then, and the request is done without it. It is not asked for holes where room is to be kept.
fn zeroing_or_refusal(target: &FileTarget, operation: Operation) -> Asked {
    let is_discard = operation == Operation::Discard;
    let refused = if is_discard { Asked::Zero } else { Asked::ZeroKeepingRoom };
    zeroing(target, operation).unwrap_or(refused)
}

/// Whether an error of the queue's socket says that the server is gone.
fn says_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
    matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected)
}

/// Fills a buffer with data from the cursor on.
fn fill(buffer: &Segment, data: &Segments, cursor: &mut Cursor) {
    let mut done = 0;
    while done < buffer.len() {
        let Some(piece) = cursor.next(data, buffer.len() - done) else { return };
        buffer.part(done, piece.len()).copy_from_segment(&piece);
        done += piece.len();
    }
}

/// Copies a buffer to where the data is to be, from the cursor on.
fn empty(buffer: &Segment, data: &Segments, cursor: &mut Cursor) {
    let mut done = 0;
    while done < buffer.len() {
        let Some(piece) = cursor.next(data, buffer.len() - done) else { return };
        piece.copy_from_segment(&buffer.part(done, piece.len()));
        done += piece.len();
    }
}

impl Storage for Queue {
    fn prepare(&mut self, capacity: usize) {
        self.flights.resize_with(capacity, Flight::default);
        self.line.reserve(capacity);
        self.lent.reserve(capacity);
    }

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        self.take_back(io);
        if let Some(answer) = self.answered_here(io.request(id)) {
            return io.complete(id, answer);
        }
        self.flights[id.index()].done = 0;
        let goes = self.line.is_empty() || self.needs_no_buffers(io.request(id));
        let started = if goes { self.start(id, io) } else { Ok(false) };
        if !matches!(started, Ok(true)) {
            self.line.push_back(id);
        }
        if let Err(why) = started {
            self.lose(&why, io);
        }
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        self.pass(false, io);
    }

    fn before_sleep(&mut self, io: &mut Io<'_>) {
        self.pass(true, io);
    }

    /// None while the server has nothing to do: a doorbell that came too late would not let the thread sleep.
    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        let link = self.link.as_ref().filter(|_| self.in_ring() + self.line.len() > 0);
        link.map(|link| link.socket.as_fd())
    }

    /// A server never does, also not one that has broken the protocol.
    fn works_at_once(&self) -> bool {
        false
    }

    fn shares_memory(&self) -> bool {
        true
    }

    fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// The server never has a request's own memory, but earlier writes must not land later than this.
    fn finish(&mut self) -> bool {
        self.line.clear();
        if let Err(why) = self.wait_for_all() {
            tracing::error!(%why, requests = self.in_ring(), "vmseal-rbd breaks the protocol of its channel; its answers are not waited for");
            self.link = None;
            self.target.give_up();
        }
        true
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.finish();
    }
}

#[cfg(test)]
mod tests;
