//! Requests and replies of one connection: one thread, one chain, many requests at a time, replies in
//! the order in which they are done.
//!
//! ```text
//!   pass: receive and take requests → chain → handle completions → send all that is ready
//!
//!   Serving ──DISC | client sends no more | stop──> Ending ──all answered──> ended
//!      └──hostile | broken connection──> Broken <──ENDING_MAX──┘
//!                                          └──nothing in the chain──> ended
//!
//!   input:  Request ──> Memory (awaited) ──read──> Request
//!                          └─write─> Data ──last piece there──> Request
//!                                      └──piece there──> Piece (in the chain) ──done──> Data
//! ```
//! A request that waits for memory stops further receiving, so a client cannot have more memory than its
//! connection's pool. Requests that have memory progress without further input.
//!
//! A read longer than a piece is answered as its pieces come. In a structured reply each piece has chunks
//! of its own, and other replies may come between them. Simple replies, and those that must be one
//! chunk, stream their pieces, and cannot report an error once data has begun, so then the connection
//! ends, as the protocol demands.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::poll::PollFlags;

use crate::front_ends::ServedDisk;
use crate::front_ends::nbd::arrivals::Arrivals;
use crate::front_ends::nbd::chunk::{BEGINNINGS, Reply};
use crate::front_ends::nbd::context::{self, STATUS_MAX};
use crate::front_ends::nbd::option::Agreed;
use crate::front_ends::nbd::request::{ClientCommand, Slot, Stage, Terms, understand};
use crate::nbd::{self, BLOCK_MAX, REQUEST_LENGTH, Request, command, command_flag, error};
use crate::stack::chain::{Chain, Done, ROOTS_MAX};
use crate::stack::memory::{Cursor, Segment, Segments};
use crate::stack::pool::{BLOCK, BLOCKS_MAX, Pool};
use crate::stack::request::{IoError, Operation, RequestId};
use crate::stack::socket::{self, Moved};
use crate::stack::stop::Stop;

/// The most requests of a connection in flight; more wait in the socket.
pub const REQUESTS_MAX: usize = 128;

const _: () = assert!(REQUESTS_MAX <= ROOTS_MAX, "each request has at most one of the chain's");

/// The longest piece of a read or a write, in bytes: longer pieces are not faster.
const PIECE_MAX: usize = 512 * 1024;

/// Memory for input that is received ahead: many requests, or the whole of a small write.
const ARRIVALS: usize = 2 * BLOCK;

/// Memory for the headers of replies.
const REPLIES: usize = REQUESTS_MAX * BEGINNINGS;

const _: () = assert!(REPLIES <= BLOCKS_MAX * BLOCK, "they are one buffer");

/// The most steps of receiving in one pass, so that replies are not held back for long.
const BATCH: usize = 64;

/// The most segments to send at once, before those of the last reply.
const SEND_BATCH: usize = 256;

/// How long a client may take to receive its last replies, once the disk is done.
pub const ENDING_MAX: Duration = Duration::from_secs(5);

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("what the client sent is not a request")]
    Magic,
    #[error("a write has {0} bytes, at most {BLOCK_MAX} are possible")]
    Length(u32),
    #[error("the connection broke: {0}")]
    Socket(#[from] io::Error),
    #[error("a long read failed after its reply had begun")]
    Cut,
    #[error("the client did not take its last replies within {} seconds", ENDING_MAX.as_secs())]
    Slow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Serving,
    Ending { until: Instant },
    Broken,
}

/// The next input; see the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Input {
    Request,
    Memory { slot: usize },
    Data { slot: usize, filled: usize },
    Piece { slot: usize },
    Ended,
}

/// See the module.
pub struct Transmission<'a> {
    stream: &'a UnixStream,
    served: &'a ServedDisk,
    agreed: Agreed,
    stop: &'a Stop,
    /// The number of its queue of the disk.
    queue: usize,
    // Before the pool, so that it is dropped first: the kernel may use the memory until then.
    chain: Chain,
    pool: Pool,
    phase: Phase,
    input: Input,
    /// Whether the socket may have input; `poll` sets it again.
    readable: bool,
    arrivals: Arrivals,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Requests with data to send; the first may be a long read that waits for its next piece.
    replies: VecDeque<usize>,
    /// The headers of replies, one for each slot.
    beginnings: Segment,
    /// How much of the first reply's piece has been sent.
    sent: usize,
    sending: Segments,
    receiving: Segments,
    /// The buffer in which the answer to a block status request is made.
    told: Vec<u8>,
    piece_max: usize,
}

impl<'a> Transmission<'a> {
    /// A connection after its negotiation, on queue `queue` of the disk; `pool_bytes` bounds its buffers.
    ///
    /// # Errors
    /// Returns the chain, and why there is no memory.
    pub fn new(
        stream: &'a UnixStream,
        agreed: Agreed,
        served: &'a ServedDisk,
        stop: &'a Stop,
        (queue, chain): (usize, Chain),
        pool_bytes: usize,
    ) -> Result<Self, (Box<Chain>, io::Error)> {
        let piece_max = (pool_bytes / 2 / BLOCK * BLOCK).clamp(BLOCK, PIECE_MAX);
        let pool = Pool::new(pool_bytes.max(2 * BLOCK) + ARRIVALS + REPLIES);
        let own = pool.and_then(|mut pool| {
            let mut own = |bytes| {
                let buffer = pool.take(bytes).filter(|buffer| buffer.len() >= bytes);
                // Never given back: it is freed with the pool.
                buffer.map(|buffer| pool.segment(&buffer)).ok_or(io::ErrorKind::OutOfMemory)
            };
            // The longer one first: it must be aligned to its length.
            let (beginnings, arrivals) = (own(REPLIES)?, own(ARRIVALS)?);
            Ok((arrivals, beginnings, pool))
        });
        let (arrivals, beginnings, pool) = match own {
            Ok(own) => own,
            Err(error) => return Err((Box::new(chain), error)),
        };
        Ok(Self {
            stream,
            served,
            agreed,
            stop,
            queue,
            chain,
            pool,
            phase: Phase::Serving,
            input: Input::Request,
            readable: true,
            arrivals: Arrivals::new(arrivals),
            slots: (0..REQUESTS_MAX).map(|_| Slot::default()).collect(),
            free: (0..REQUESTS_MAX).rev().collect(),
            replies: VecDeque::with_capacity(REQUESTS_MAX),
            beginnings,
            sent: 0,
            sending: Segments::default(),
            receiving: Segments::default(),
            told: Vec::with_capacity(STATUS_MAX),
            piece_max,
        })
    }

    /// Serves until the client or the filter ends; returns the chain, with nothing in it.
    #[must_use]
    pub fn run(mut self) -> Chain {
        loop {
            if self.stop.asked() {
                self.end();
            }
            let moved = match self.pass() {
                Ok(moved) => moved,
                Err(error) => {
                    tracing::warn!(%error, "the connection is ended");
                    self.phase = Phase::Broken;
                    self.chain.hasten(true);
                    true
                }
            };
            let ended = match self.phase {
                Phase::Serving => false,
                Phase::Ending { .. } => self.free.len() == REQUESTS_MAX,
                Phase::Broken => self.chain.is_idle(),
            };
            if ended {
                self.chain.hasten(false);
                return self.chain;
            }
            if !moved {
                self.sleep();
            }
        }
    }

    /// Stops receiving; requests in flight are still answered.
    fn end(&mut self) {
        if self.phase != Phase::Serving {
            return;
        }
        self.phase = Phase::Ending { until: Instant::now() + ENDING_MAX };
        self.chain.hasten(true);
        match std::mem::replace(&mut self.input, Input::Ended) {
            // A write without its data is not answered, and did not happen.
            Input::Memory { slot } | Input::Data { slot, .. } => self.release(slot),
            Input::Request | Input::Piece { .. } | Input::Ended => {}
        }
    }

    /// One round; true if there was progress.
    fn pass(&mut self) -> Result<bool, ConnectionError> {
        let mut moved = false;
        if self.phase == Phase::Serving {
            for _ in 0..BATCH {
                if !self.take()? {
                    break;
                }
                moved = true;
            }
        }
        let disk_works = self.chain.in_flight() > 0;
        self.chain.poll();
        while let Some(done) = self.chain.next_done() {
            moved = true;
            let slot = usize::try_from(done.tag).unwrap_or(usize::MAX);
            if let Err(error) = done.result {
                self.served.state.note(&done, error);
                self.fail(slot, nbd::number(error), Some(error));
            }
            self.done(slot, done.length)?;
        }
        if let (Phase::Ending { until }, true) = (&mut self.phase, disk_works) {
            *until = Instant::now() + ENDING_MAX;
        }
        if self.phase != Phase::Broken {
            moved |= self.send()?;
        }
        Ok(moved)
    }

    /// One step of receiving; true if there was something to do.
    fn take(&mut self) -> Result<bool, ConnectionError> {
        match self.input {
            Input::Request => self.take_request(),
            Input::Memory { slot } => {
                if !self.slots[slot].take_memory(&mut self.pool, self.piece_max) {
                    return Ok(false);
                }
                if self.slots[slot].operation == Operation::Write {
                    self.input = Input::Data { slot, filled: 0 };
                    return Ok(true);
                }
                self.input = Input::Request;
                match self.slots[slot].status {
                    Some(one) => self.tell(slot, one),
                    None => self.submit(slot),
                }
                Ok(true)
            }
            Input::Data { slot, filled } => self.take_data(slot, filled),
            Input::Piece { .. } | Input::Ended => Ok(false),
        }
    }

    fn take_request(&mut self) -> Result<bool, ConnectionError> {
        if self.free.is_empty() {
            return Ok(false);
        }
        let Some(bytes) = self.arrivals.take::<REQUEST_LENGTH>() else {
            return self.receive(None).map(|received| received.is_some());
        };
        let request = Request::decode(&bytes).ok_or(ConnectionError::Magic)?;
        if request.command == command::WRITE && request.length > BLOCK_MAX {
            return Err(ConnectionError::Length(request.length));
        }
        let asked = understand(&request, &self.terms());
        if asked == ClientCommand::Disconnect {
            self.end();
            return Ok(false);
        }
        let Some(slot) = self.free.pop() else { return Ok(false) };
        self.slots[slot].begin(request, asked);
        if self.slots[slot].needs_memory() {
            self.input = Input::Memory { slot };
        } else if let ClientCommand::Refused(_) = asked {
            self.answer(slot);
        } else {
            self.submit(slot);
        }
        Ok(true)
    }

    fn terms(&self) -> Terms {
        Terms {
            size: self.served.size.get(),
            read_only: self.served.read_only,
            structured: self.agreed.structured,
            contexts: !self.agreed.contexts.is_empty(),
            zeroes_fast: self.served.allocation.get().zeroes_fast(),
        }
    }

    /// Answers a block status request.
    fn tell(&mut self, slot: usize, one: bool) {
        let state = &self.slots[slot];
        let Request { cookie, offset, length, .. } = state.request;
        let (part, room) = ((offset, offset + u64::from(length)), state.memory.bytes());
        let (contexts, allocation) = (&self.agreed.contexts, &self.served.allocation.get());
        let told = context::status(contexts, allocation, cookie, part, (room, one), &mut self.told);
        match told {
            Ok(()) => {
                Cursor::default().scatter(&state.memory, &self.told);
            }
            Err(cause) => {
                let known = cause.get_ref().and_then(|inner| inner.downcast_ref::<IoError>());
                let cause = match (known, cause.kind()) {
                    (Some(known), _) => *known,
                    (None, io::ErrorKind::UnexpectedEof) => IoError::Truncated,
                    _ => IoError::from_errno(cause.raw_os_error().unwrap_or(libc::EIO)),
                };
                let (length, result) = (u64::from(length), Err(cause));
                let asked = Done { tag: 0, operation: Operation::Read, offset, length, result };
                self.served.state.note(&asked, cause);
                self.fail(slot, error::EIO, Some(cause));
            }
        }
        self.answer(slot);
    }

    /// Receives the data of a write's piece.
    fn take_data(&mut self, slot: usize, filled: usize) -> Result<bool, ConnectionError> {
        let whole = self.slots[slot].memory.bytes();
        let mut cursor = Cursor::default();
        cursor.skip(&self.slots[slot].memory, filled);
        let mut filled = filled + self.arrivals.move_to(&self.slots[slot].memory, &mut cursor);
        if filled < whole {
            let Some(received) = self.receive(Some((slot, cursor)))? else {
                if self.input != Input::Ended {
                    self.input = Input::Data { slot, filled };
                }
                return Ok(false);
            };
            filled += received;
        }
        self.input = Input::Data { slot, filled };
        if filled == whole {
            self.piece_arrived(slot);
        }
        Ok(true)
    }

    fn piece_arrived(&mut self, slot: usize) {
        let state = &mut self.slots[slot];
        let piece = state.memory.bytes() as u64;
        let last = piece == state.left();
        if state.error == 0 {
            self.input = if last { Input::Request } else { Input::Piece { slot } };
            self.submit(slot);
            return;
        }
        // The write has failed already: the rest of its data is received and dropped.
        state.done += piece;
        if last {
            self.input = Input::Request;
            self.answer(slot);
        } else {
            state.lay_out(&self.pool, self.piece_max);
            self.input = Input::Data { slot, filled: 0 };
        }
    }

    /// Receives data of the slot from the cursor on, and then the input after it; returns how much data that was
    /// (0 if there was only later input, or none was asked for); none if there is nothing now.
    fn receive(&mut self, data: Option<(usize, Cursor)>) -> Result<Option<usize>, ConnectionError> {
        if !self.readable {
            return Ok(None);
        }
        self.receiving.clear();
        if let Some((slot, mut cursor)) = data {
            self.receiving.push_from(&self.slots[slot].memory, &mut cursor, usize::MAX);
        }
        let wanted = self.receiving.bytes();
        self.receiving.push(self.arrivals.room());
        match socket::receive(self.stream, self.receiving.as_slice())? {
            Moved::Bytes(bytes) => {
                self.readable = bytes == self.receiving.bytes();
                self.arrivals.arrived(bytes.saturating_sub(wanted));
                Ok(Some(bytes.min(wanted)))
            }
            Moved::Nothing => {
                self.readable = false;
                Ok(None)
            }
            Moved::Closed => {
                if self.input != Input::Request || !self.arrivals.is_empty() {
                    tracing::warn!("the client ended the connection within a request");
                }
                self.end();
                Ok(None)
            }
        }
    }

    fn root(&mut self) -> RequestId {
        let Some(id) = self.chain.begin() else {
            unreachable!("each slot has one request in the chain, and there are fewer slots")
        };
        id
    }

    /// Hands the slot's next piece to the chain.
    fn submit(&mut self, slot: usize) {
        let id = self.root();
        let state = &mut self.slots[slot];
        state.stage = Stage::Running;
        let (offset, length) = (state.request.offset + state.done, state.range());
        let bytes = state.memory.bytes();
        self.chain.data_mut(id).push_from(&state.memory, &mut Cursor::default(), bytes);
        self.chain.submit(id, state.operation, offset, length, slot as u64);
    }

    fn fail(&mut self, slot: usize, number: u32, cause: Option<IoError>) {
        let state = &mut self.slots[slot];
        if state.error == 0 {
            (state.error, state.cause) = (number, cause);
        }
    }

    /// The chain has finished a piece of the slot, or its flush.
    fn done(&mut self, slot: usize, length: u64) -> Result<(), ConnectionError> {
        let stopped = self.stop.asked();
        let state = &mut self.slots[slot];
        if self.phase == Phase::Broken {
            self.release(slot);
            return Ok(());
        }
        if state.stage == Stage::Flushing {
            self.answer(slot);
            return Ok(());
        }
        state.done += length;
        if stopped && state.left() > 0 {
            self.fail(slot, error::ESHUTDOWN, None);
        }
        let state = &mut self.slots[slot];
        let more = state.left() > 0;
        match state.operation {
            Operation::Read if state.begun => {
                if state.error != 0 {
                    return Err(ConnectionError::Cut);
                }
                self.ready(slot);
            }
            Operation::Write if more => {
                if self.input == (Input::Piece { slot }) {
                    state.stage = Stage::Receiving;
                    state.lay_out(&self.pool, self.piece_max);
                    self.input = Input::Data { slot, filled: 0 };
                } else {
                    // The connection is ending: its data will not arrive.
                    self.release(slot);
                }
            }
            Operation::Discard | Operation::WriteZeroes { .. } if more && state.error == 0 => {
                self.submit(slot);
            }
            _ if state.durable && state.error == 0 => {
                state.stage = Stage::Flushing;
                let id = self.root();
                self.chain.submit(id, Operation::Flush, 0, 0, slot as u64);
            }
            _ => self.answer(slot),
        }
        Ok(())
    }

    /// The reply can be sent, or the next chunks of it.
    fn answer(&mut self, slot: usize) {
        self.replies.push_back(slot);
        self.ready(slot);
    }

    /// Whether its pieces must follow each other with nothing between them.
    fn streams(&self, slot: usize) -> bool {
        !self.agreed.structured || self.slots[slot].request.flags & command_flag::DF != 0
    }

    /// Makes the reply, or its next piece.
    fn compose(&mut self, slot: usize) {
        let streams = self.streams(slot);
        let room = self.beginnings.part(slot * BEGINNINGS, BEGINNINGS);
        let state = &mut self.slots[slot];
        let (left, has_data, has_status) =
            (state.left(), state.brings_data(), state.status.is_some());
        let piece = state.memory.bytes();
        let at = (state.operation == Operation::Read && piece > 0).then(|| state.piece_offset());
        let Request { cookie, offset, length, .. } = state.request;
        let mut reply = Reply::new(room, &mut state.reply, cookie);
        if !self.agreed.structured {
            if !state.begun {
                reply.bytes(&nbd::reply(cookie, state.error));
            }
            if has_data {
                reply.memory(&state.memory, piece);
            }
        } else if state.error != 0 {
            reply.error(state.error, state.cause, at);
        } else if has_status {
            reply.memory(&state.memory, self.told.len());
        } else if let (Some(at), true) = (at, has_data) {
            if !streams {
                return reply.sparse(at, &state.memory, left == 0);
            }
            if !state.begun {
                reply.data(offset, length, true);
            }
            reply.memory(&state.memory, piece);
        } else {
            reply.done();
        }
    }

    /// The reply, or its next piece, is ready to send.
    fn ready(&mut self, slot: usize) {
        self.compose(slot);
        let state = &mut self.slots[slot];
        state.stage = Stage::Answering;
        let counters = self.served.state.counters(self.queue);
        if state.error != 0 {
            counters.failed();
        } else if state.left() == 0 && state.status.is_none() {
            counters.succeeded(state.operation, u64::from(state.request.length));
            counters.took(state.operation, state.began.elapsed());
        }
    }

    /// Sends everything ready, in one go; true if anything was sent.
    fn send(&mut self) -> Result<bool, ConnectionError> {
        if let Phase::Ending { until } = self.phase
            && self.has_reply()
            && Instant::now() > until
        {
            return Err(ConnectionError::Slow);
        }
        let mut moved = false;
        while self.has_reply() {
            self.gather();
            match socket::send(self.stream, self.sending.as_slice())? {
                Moved::Bytes(bytes) => self.went(bytes),
                Moved::Nothing | Moved::Closed => break,
            }
            moved = true;
        }
        Ok(moved)
    }

    fn has_reply(&self) -> bool {
        self.replies.front().is_some_and(|&slot| self.slots[slot].stage == Stage::Answering)
    }

    /// Lists the segments to send now. Nothing may come between the pieces of a streamed reply.
    fn gather(&mut self) {
        self.sending.clear();
        let mut skip = self.sent;
        for &slot in &self.replies {
            let state = &self.slots[slot];
            let full = self.sending.as_slice().len() > SEND_BATCH;
            if state.stage != Stage::Answering || full {
                return;
            }
            let mut cursor = Cursor::default();
            cursor.skip(&state.reply, skip);
            self.sending.push_from(&state.reply, &mut cursor, usize::MAX);
            if state.brings_data() && state.left() > 0 && self.streams(slot) {
                return;
            }
            skip = 0;
        }
    }

    /// This many bytes of the list were sent.
    fn went(&mut self, bytes: usize) {
        self.sent += bytes;
        while let Some(&slot) = self.replies.front() {
            let streams = self.streams(slot);
            let state = &mut self.slots[slot];
            let piece = state.reply.bytes();
            if self.sent < piece || state.stage != Stage::Answering {
                return;
            }
            self.sent -= piece;
            let more = state.brings_data() && state.left() > 0;
            if more {
                state.begun = streams;
                state.lay_out(&self.pool, self.piece_max);
                self.submit(slot);
            }
            if more && streams {
                return;
            }
            self.replies.pop_front();
            if !more {
                self.release(slot);
            }
        }
    }

    fn release(&mut self, slot: usize) {
        self.slots[slot].give_memory(&mut self.pool);
        self.free.push(slot);
    }

    /// Sleeps until there may be work.
    fn sleep(&mut self) {
        let receives = match self.input {
            Input::Request => !self.free.is_empty(),
            Input::Data { .. } => true,
            Input::Memory { .. } | Input::Piece { .. } | Input::Ended => false,
        } && self.phase == Phase::Serving;
        let sends = self.phase != Phase::Broken && self.has_reply();
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::POLLIN, receives);
        wanted.set(PollFlags::POLLOUT, sends);
        let (nothing, stop) = (PollFlags::empty(), self.stop.event());
        let stopping = if self.phase == Phase::Serving { PollFlags::POLLIN } else { nothing };
        // A socket without interest is left out: its hang-up would wake us.
        let stream = if wanted.is_empty() { stop } else { self.stream.as_fd() };
        let until = match self.phase {
            Phase::Ending { until } if sends => Some(until),
            _ => None,
        };
        if let Ok([ready, _]) = self.chain.wait([(stream, wanted), (stop, stopping)], until) {
            self.readable |= receives && !ready.is_empty();
        }
    }
}
