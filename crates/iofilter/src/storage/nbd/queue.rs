//! The requests of one chain on one connection.
//!
//! ```text
//!  submit: a part of the request into the line     poll: send from the line, receive replies, until the socket has no more
//!  In line ──all of it sent──> Sent ──reply──> complete
//!     ^                                  └──a part of a long one──> In line
//!     └ any of them ──connection lost──> failed
//! ```
//! A request is sent straight from its memory and received straight into it; a call of the kernel never keeps that memory. So
//! a chain that goes leaves nothing behind but a connection that is closed. A long request goes in parts, one at a time: no
//! part is longer than the server takes. What is in flight is bounded by the chain's slots, each of which has one part.
//!
//! The socket is the chain's wait set: readable for replies, writable while the line is not empty. The only point in time is
//! the end of the server's [`TIMEOUT`]; a request that others overtake for so long is noticed a quarter of it later.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::poll::PollFlags;
use nix::sys::socket::{Shutdown, shutdown};

use crate::nbd::{REQUEST_LENGTH, Request as Asking, command, command_flag, transmission};
use crate::stack::chain::{Io, Storage};
use crate::stack::memory::{Cursor, SEGMENTS_MAX, Segment, Segments};
use crate::stack::request::{IoError, Operation, Request, RequestId};
use crate::stack::socket::{self, Moved};
use crate::storage::nbd::Shared;
use crate::storage::nbd::replies::{Asked, Broken, Event, HEADER_MAX, Replies};

/// How long a server may be silent while it is asked for something: as long as Linux gives a request.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Where replies arrive that are not data alone: many of them, and small reads whole.
const ARRIVALS: usize = 64 * 1024;

/// How often one call of `poll` sends and receives: a fast server must not keep the thread from its other work.
const ROUNDS: usize = 16;

/// How much is handed to the kernel in one call, in bytes: about what a socket takes.
const SENT_AT_ONCE: usize = 1 << 20;

/// What is sent where the server cannot write zeroes by itself.
static ZEROES: [u8; 64 * 1024] = [0; 64 * 1024];

/// The most zeroes of one request, in bytes.
const ZEROES_MAX: u64 = 1 << 20;

/// Why a connection is lost.
#[derive(Debug, thiserror::Error)]
enum Loss {
    #[error("the server has ended the connection")]
    Closed,
    #[error("the connection has failed: {0}")]
    Socket(#[from] std::io::Error),
    #[error("the server breaks the protocol: {0}")]
    Broken(#[from] Broken),
    #[error("the server has not answered for {} seconds", TIMEOUT.as_secs())]
    Silent,
}

/// A request in flight.
#[derive(Clone, Copy, Debug, Default)]
struct Flight {
    /// Which; none where there is none.
    id: Option<RequestId>,
    /// Bytes done by earlier parts.
    done: u64,
    /// Bytes of the present part.
    part: u32,
    /// Of a flush: the changes that it covers.
    covers: u64,
    /// About when the present part was asked for.
    since: Option<Instant>,
}

/// What follows the header of a request.
#[derive(Clone, Copy, Debug)]
enum Payload {
    Nothing,
    Data { from: usize, length: usize },
    Zeroes { length: usize },
}

impl Payload {
    fn length(self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Data { length, .. } | Self::Zeroes { length } => length,
        }
    }
}

/// A request in the line.
#[derive(Debug)]
struct Outgoing {
    id: RequestId,
    header: [u8; REQUEST_LENGTH],
    payload: Payload,
}

impl Outgoing {
    fn length(&self) -> usize {
        REQUEST_LENGTH + self.payload.length()
    }

    /// Adds what comes after its first `sent` bytes, as far as the list has room.
    fn add_to(&self, list: &mut Segments, sent: usize, request: &Request) {
        if let Some(left) = REQUEST_LENGTH.checked_sub(sent).filter(|left| *left > 0) {
            let start = self.header[sent..].as_ptr().cast_mut();
            // SAFETY: the header stays in the line until the list has been sent; the kernel only reads it.
            list.push(unsafe { Segment::new(start, left) });
        }
        let sent = sent.saturating_sub(REQUEST_LENGTH);
        match self.payload {
            Payload::Nothing => {}
            Payload::Data { from, length } => {
                let mut cursor = Cursor::default();
                cursor.skip(&request.data, from + sent);
                list.push_from(&request.data, &mut cursor, length - sent);
            }
            Payload::Zeroes { length } => {
                let mut left = length - sent;
                while left > 0 {
                    let piece = left.min(ZEROES.len());
                    // SAFETY: it is static; the kernel only reads it.
                    list.push(unsafe { Segment::new(ZEROES.as_ptr().cast_mut(), piece) });
                    left -= piece;
                }
            }
        }
    }
}

/// See the module.
pub(super) struct Queue {
    shared: Arc<Shared>,
    /// None once it is lost.
    connection: Option<OwnedFd>,
    replies: Replies,
    flights: Vec<Flight>,
    in_flight: usize,
    line: VecDeque<Outgoing>,
    /// How much of the first in the line is sent, in bytes.
    sent: usize,
    /// For one call: what is sent or received into.
    list: Segments,
    arrivals: Box<[u8]>,
    /// The bytes of it that are not understood yet.
    begin: usize,
    end: usize,
    /// When the server was asked or heard of last.
    heard: Instant,
    /// When requests are looked at that others overtake.
    look: Instant,
}

impl Queue {
    pub(super) fn new(shared: Arc<Shared>, connection: OwnedFd) -> Self {
        Self {
            replies: Replies::new(shared.export.structured, 0),
            shared,
            connection: Some(connection),
            flights: Vec::new(),
            in_flight: 0,
            line: VecDeque::new(),
            sent: 0,
            list: Segments::default(),
            arrivals: vec![0; ARRIVALS].into(),
            begin: 0,
            end: 0,
            heard: Instant::now(),
            look: Instant::now(),
        }
    }

    /// What becomes of a request when there is no connection.
    fn refusal(&self, operation: Operation) -> Result<(), IoError> {
        match operation {
            Operation::Flush if self.shared.is_durable() => Ok(()),
            Operation::Flush => Err(IoError::Lost),
            _ => Err(IoError::Disconnected),
        }
    }

    /// Whether the server need not be asked.
    fn answered_here(&self, operation: Operation) -> Option<Result<(), IoError>> {
        let export = &self.shared.export;
        match operation {
            _ if self.connection.is_none() => Some(self.refusal(operation)),
            Operation::Flush if self.shared.failed.load(Ordering::Acquire) => {
                Some(Err(IoError::Lost))
            }
            // Of a disk that is only read.
            Operation::Flush if !export.has(transmission::SEND_FLUSH) => Some(Ok(())),
            Operation::Discard if !export.has(transmission::SEND_TRIM) => Some(Ok(())),
            _ => None,
        }
    }

    /// Puts the next part of a request into the line.
    fn ask(&mut self, id: RequestId, io: &Io<'_>) {
        let (request, flight) = (io.request(id), &mut self.flights[id.index()]);
        let export = &self.shared.export;
        let zeroes = export.has(transmission::SEND_WRITE_ZEROES);
        let (command, flags, most) = match request.operation {
            Operation::Read => (command::READ, 0, u64::MAX),
            Operation::Write => (command::WRITE, 0, u64::MAX),
            Operation::Flush => (command::FLUSH, 0, 0),
            Operation::Discard => (command::TRIM, 0, u64::MAX),
            Operation::WriteZeroes { .. } if !zeroes => (command::WRITE, 0, ZEROES_MAX),
            Operation::WriteZeroes { unmap: true } => (command::WRITE_ZEROES, 0, u64::MAX),
            Operation::WriteZeroes { unmap: false } => {
                (command::WRITE_ZEROES, command_flag::NO_HOLE, u64::MAX)
            }
        };
        let length = (request.length - flight.done).min(most).min(export.block_max.into()) as u32;
        let offset = match request.operation {
            Operation::Flush => 0,
            _ => self.shared.offset + request.offset + flight.done,
        };
        (flight.part, flight.since) = (length, Some(self.heard));
        let asked = Asked { read: command == command::READ, offset, length };
        let cookie = self.replies.begin(id.index(), asked);
        let header = Asking { flags, command, cookie, offset, length }.encode();
        let payload = match (request.operation, command) {
            (Operation::Write, _) => {
                Payload::Data { from: flight.done as usize, length: length as usize }
            }
            (_, command::WRITE) => Payload::Zeroes { length: length as usize },
            _ => Payload::Nothing,
        };
        self.line.push_back(Outgoing { id, header, payload });
    }

    /// Sends and receives until the socket has no more; returns whether anything has come or gone.
    fn exchange(&mut self, io: &mut Io<'_>) -> Result<bool, Loss> {
        let mut any = false;
        for _ in 0..ROUNDS {
            let moved = self.send(io)? | self.receive(io)?;
            any |= moved;
            if !moved || self.in_flight == 0 {
                break;
            }
        }
        Ok(any)
    }

    fn send(&mut self, io: &Io<'_>) -> Result<bool, Loss> {
        let Some(connection) = &self.connection else { return Ok(false) };
        let mut any = false;
        while !self.line.is_empty() {
            self.list.clear();
            let mut sent = self.sent;
            for outgoing in &self.line {
                outgoing.add_to(&mut self.list, sent, io.request(outgoing.id));
                sent = 0;
                let full = self.list.as_slice().len() >= SEGMENTS_MAX;
                if full || self.list.bytes() >= SENT_AT_ONCE {
                    break;
                }
            }
            match socket::send(connection, self.list.as_slice())? {
                Moved::Nothing => break,
                Moved::Closed => return Err(Loss::Closed),
                Moved::Bytes(count) => self.sent += count,
            }
            any = true;
            while let Some(first) = self.line.front().filter(|first| first.length() <= self.sent) {
                self.sent -= first.length();
                self.replies.sent(first.id.index());
                self.line.pop_front();
            }
        }
        self.list.clear();
        Ok(any)
    }

    fn receive(&mut self, io: &mut Io<'_>) -> Result<bool, Loss> {
        let mut any = false;
        while self.in_flight > 0 {
            self.understand(io)?;
            let Some(connection) = &self.connection else { break };
            // Data that has not arrived yet goes where it belongs, and only what follows it into the buffer.
            let mut data = 0;
            self.list.clear();
            if let Event::Data { slot, at, length } = self.replies.next(&mut &[][..])? {
                data = length as usize;
                if let Flight { id: Some(id), done, .. } = self.flights[slot] {
                    let mut cursor = Cursor::default();
                    cursor.skip(&io.request(id).data, done as usize + at as usize);
                    self.list.push_from(&io.request(id).data, &mut cursor, data);
                }
            }
            if self.list.bytes() != data {
                return Err(Broken::Data.into());
            }
            self.arrivals.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
            let (start, room) = (self.end, ARRIVALS - self.end);
            let free = self.arrivals[start..].as_mut_ptr();
            // SAFETY: nothing else uses the buffer until the call below has returned.
            self.list.push(unsafe { Segment::new(free, room) });
            let all = self.list.bytes();
            let moved = socket::receive(connection, self.list.as_slice());
            self.list.clear();
            let count = match moved? {
                Moved::Nothing => break,
                Moved::Closed => return Err(Loss::Closed),
                Moved::Bytes(count) => count,
            };
            any = true;
            let taken = count.min(data);
            self.replies.took(taken as u32);
            self.end += count - taken;
            if count < all {
                // The socket is empty, or nearly so.
                self.understand(io)?;
                break;
            }
        }
        Ok(any)
    }

    /// Does what the bytes that have arrived say.
    fn understand(&mut self, io: &mut Io<'_>) -> Result<(), Loss> {
        loop {
            let mut input = &self.arrivals[self.begin..self.end];
            let event = self.replies.next(&mut input)?;
            self.begin = self.end - input.len();
            match event {
                Event::More => return Ok(()),
                Event::Data { .. } if self.begin == self.end => return Ok(()),
                Event::Data { slot, at, length } => {
                    let count = (length as usize).min(self.end - self.begin);
                    let here = &self.arrivals[self.begin..self.begin + count];
                    let flight = self.flights[slot];
                    let place = flight.done as usize + at as usize;
                    let fits = flight.id.map(|id| io.request(id).copy_from(place, here));
                    if fits != Some(count) {
                        return Err(Broken::Data.into());
                    }
                    self.begin += count;
                    self.replies.took(count as u32);
                }
                Event::Zeroes { slot, at, length } => {
                    let flight = self.flights[slot];
                    if let Some(id) = flight.id {
                        clear(io.request(id), flight.done as usize + at as usize, length as usize);
                    }
                }
                Event::Done { slot, result } => self.answered(slot, result, io),
            }
        }
    }

    /// A part of a request is answered.
    fn answered(&mut self, slot: usize, result: Result<(), IoError>, io: &mut Io<'_>) {
        let flight = &mut self.flights[slot];
        let Some(id) = flight.id else { return };
        let request = io.request(id);
        flight.done += u64::from(flight.part);
        if result.is_ok() && flight.done < request.length {
            return self.ask(id, io);
        }
        let shared = &self.shared;
        match (request.operation, result) {
            (Operation::Flush, Ok(())) => {
                shared.durable.fetch_max(flight.covers, Ordering::AcqRel);
            }
            (Operation::Flush, Err(_)) => shared.failed.store(true, Ordering::Release),
            (Operation::Read, _) | (_, Err(_)) => {}
            (_, Ok(())) => {
                shared.changed.fetch_add(1, Ordering::AcqRel);
            }
        }
        flight.id = None;
        self.in_flight -= 1;
        io.complete(id, result);
    }

    /// Whether a request waits too long while others are answered. Looked at now and then.
    fn forgets_one(&mut self) -> bool {
        if self.heard < self.look {
            return false;
        }
        self.look = self.heard + TIMEOUT / 4;
        let late = |since: Instant| self.heard.saturating_duration_since(since) > TIMEOUT;
        self.flights.iter().any(|flight| flight.id.is_some() && flight.since.is_some_and(late))
    }

    /// Gives the connection up, with all that is in flight.
    fn lose(&mut self, why: &Loss, io: &mut Io<'_>) {
        tracing::error!(%why, requests = self.in_flight, "the connection to the NBD server is lost; requests fail");
        if let Some(connection) = self.connection.take() {
            let _ = shutdown(connection.as_raw_fd(), Shutdown::Both);
        }
        self.line.clear();
        (self.sent, self.in_flight) = (0, 0);
        for slot in 0..self.flights.len() {
            if let Some(id) = self.flights[slot].id.take() {
                let refusal = self.refusal(io.request(id).operation);
                io.complete(id, refusal);
            }
        }
    }
}

/// Fills a part of what is read with zeroes.
fn clear(request: &Request, at: usize, length: usize) {
    let (mut cursor, mut left) = (Cursor::default(), length);
    cursor.skip(&request.data, at);
    while left > 0 {
        let Some(piece) = cursor.next(&request.data, left) else { return };
        piece.clear();
        left -= piece.len();
    }
}

impl Storage for Queue {
    fn prepare(&mut self, capacity: usize) {
        self.replies = Replies::new(self.shared.export.structured, capacity);
        self.flights.resize_with(capacity, Flight::default);
        self.line.reserve(capacity);
    }

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        if let Some(answer) = self.answered_here(io.request(id).operation) {
            return io.complete(id, answer);
        }
        if self.in_flight == 0 {
            self.heard = Instant::now();
        }
        self.in_flight += 1;
        let covers = self.shared.changed.load(Ordering::Acquire);
        self.flights[id.index()] = Flight { id: Some(id), covers, ..Flight::default() };
        self.ask(id, io);
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        if self.in_flight == 0 {
            return;
        }
        match self.exchange(io) {
            Ok(true) => {
                self.heard = Instant::now();
                if self.forgets_one() {
                    self.lose(&Loss::Silent, io);
                }
            }
            Ok(false) if self.heard.elapsed() < TIMEOUT => {}
            Ok(false) => self.lose(&Loss::Silent, io),
            Err(why) => self.lose(&why, io),
        }
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        self.connection.as_ref().map(AsFd::as_fd)
    }

    fn wait_events(&self) -> PollFlags {
        if self.line.is_empty() {
            PollFlags::POLLIN
        } else {
            PollFlags::POLLIN | PollFlags::POLLOUT
        }
    }

    /// A server never does, also not one that is gone.
    fn works_at_once(&self) -> bool {
        false
    }

    fn deadline(&self) -> Option<Instant> {
        (self.in_flight > 0).then(|| self.heard + TIMEOUT)
    }
}

impl Drop for Queue {
    /// A connection on which nothing is under way is the next chain's.
    fn drop(&mut self) {
        let quiet =
            self.in_flight == 0 && self.begin == self.end && !self.replies.is_within_a_reply();
        if let Some(connection) = self.connection.take().filter(|_| quiet) {
            self.shared.idle().push(connection);
        }
    }
}

const _: () = assert!(HEADER_MAX < ARRIVALS);
