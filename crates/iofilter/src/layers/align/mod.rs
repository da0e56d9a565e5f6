//! The filter that turns guest requests, 512-byte blocks in memory of any alignment, into requests that
//! the layers below accept: whole blocks (4096 bytes under `crypt`), in aligned memory.
//!
//! A request that already fits is passed unchanged. A write holds the shared lock meanwhile; a read does so only where
//! a block of the same stretch is being modified, or was modified during the read: then the read is repeated. Any other
//! request is done piece by piece, one after the other, each piece in one of these ways:
//! ```text
//!            buffer?   lock?       children
//!  Direct      no     shared      write / discard / write-zeroes of whole blocks, parent's memory
//!  Gather     yes     shared      write of whole blocks, copied (memory is not aligned)
//!  Scatter    yes     shared      read of whole blocks, copied to the parent
//!  Modify     yes    exclusive    read of one block, change it, write it
//!
//!   Waiting (for a buffer, then for its lock) --> Running --> next piece | complete
//! ```
//! The buffer comes first: a request that waits for a lock has everything else, so the holders of locks
//! can finish. Reads of part of a block take the shared lock, so that they never see a block half written
//! by a change to its other part (a hole that is being filled would decrypt to noise). Reads of whole blocks
//! check the count of claims afterwards instead, which costs a load or two (docs/decisions/051).
//!
//! A block is rewritten by one aligned write, so a crash leaves its neighbours alone.

pub mod locks;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use crate::layers::align::locks::SectorLocks;
use crate::stack::chain::{Filter, Io, Limits, ROOTS_MAX};
use crate::stack::layer::{Boundary, Layer, Place};
use crate::stack::memory::Cursor;
use crate::stack::pool::{BLOCK, BLOCKS_MAX, Buffer, Pool};
use crate::stack::request::{IoError, LOGICAL_BLOCK, Operation, RequestId};

/// Its name.
pub const KIND: &str = "align";

/// The layer: the locks that all chains of a disk share.
#[derive(Debug, Default)]
pub struct Alignment {
    locks: Arc<SectorLocks>,
}

impl Layer for Alignment {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn presents(&self, below: Boundary) -> Boundary {
        Boundary { block: LOGICAL_BLOCK as u32, memory: 1, ..below }
    }

    fn filter(&self, place: &Place) -> io::Result<Box<dyn Filter>> {
        let Boundary { block, memory, .. } = place.below;
        let locks = Arc::clone(&self.locks);
        Ok(Box::new(Align::new(block, memory as usize, locks, place.pool_bytes / 4)?))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// How a piece is done; see the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    /// The request itself is passed.
    Whole,
    Direct,
    Gather,
    Scatter,
    Modify,
}

impl Method {
    /// Whether it goes through a bounce buffer.
    fn has_buffer(self) -> bool {
        matches!(self, Self::Gather | Self::Scatter | Self::Modify)
    }
}

/// A stretch of whole blocks, and the part of it that belongs to the request.
#[derive(Clone, Copy, Debug)]
struct Piece {
    method: Method,
    start: u64,
    length: u64,
    /// Up to where the request is done when this piece is done.
    until: u64,
}

/// A request in progress.
#[derive(Debug)]
struct SplitRequest {
    operation: Operation,
    /// Up to where it is done, in bytes on the disk.
    position: u64,
    end: u64,
    cursor: Cursor,
    piece: Piece,
    buffer: Option<Buffer>,
    held: LockState,
}

/// The state of a job's lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LockState {
    Nothing,
    Shared,
    /// Claimed; exclusive once the sharers have left.
    Claimed,
}

/// The filter; see the module.
pub struct Align {
    block: u64,
    memory: usize,
    locks: Arc<SectorLocks>,
    pool: Pool,
    jobs: Vec<Option<SplitRequest>>,
    /// How often the stretches of a passed read had been claimed before it.
    claims: Vec<u64>,
    waiting: VecDeque<RequestId>,
}

impl Align {
    /// A filter over layers that take blocks of `block` bytes (at most [`BLOCK`], a power of two), in
    /// memory aligned to `memory` bytes; `locks` is the disk's, `pool_bytes` bounds the buffers.
    ///
    /// # Errors
    /// No memory for the buffers.
    pub fn new(
        block: u32,
        memory: usize,
        locks: Arc<SectorLocks>,
        pool_bytes: usize,
    ) -> io::Result<Self> {
        debug_assert!(block.is_power_of_two() && block as usize <= BLOCK);
        Ok(Self {
            block: u64::from(block),
            memory,
            locks,
            pool: Pool::new(pool_bytes)?,
            jobs: Vec::new(),
            claims: Vec::new(),
            waiting: VecDeque::new(),
        })
    }

    fn floor(&self, offset: u64) -> u64 {
        offset & !(self.block - 1)
    }

    /// Whether the request can be passed as it is.
    fn fits(&self, id: RequestId, io: &Io<'_>) -> bool {
        let request = io.request(id);
        (request.offset | request.length) & (self.block - 1) == 0
            && request.data.aligned_to(self.memory)
    }

    /// The whole blocks inside a range; none if there are none.
    fn inner(&self, start: u64, end: u64) -> Option<(u64, u64)> {
        let first = self.floor(start + self.block - 1);
        let last = self.floor(end);
        (first < last).then_some((first, last))
    }

    /// What to do next for a request that does not fit.
    fn next_piece(&self, job: &SplitRequest, memory_fits: bool) -> Option<Piece> {
        let (position, end) = (job.position, job.end);
        if position >= end {
            return None;
        }
        let most = (BLOCKS_MAX * BLOCK) as u64;
        let block_start = self.floor(position);
        let inner = self.inner(position, end);
        Some(match job.operation {
            Operation::Discard => {
                let (start, until) = inner?;
                Piece { method: Method::Direct, start, length: until - start, until: end }
            }
            Operation::Read => {
                let covered = (self.floor(end + self.block - 1) - block_start).min(most);
                let until = (block_start + covered).min(end);
                Piece { method: Method::Scatter, start: block_start, length: covered, until }
            }
            Operation::Flush | Operation::Write | Operation::WriteZeroes { .. } => match inner {
                Some((start, until)) if start == position => {
                    let copied = job.operation == Operation::Write && !memory_fits;
                    let method = if copied { Method::Gather } else { Method::Direct };
                    let length = (until - start).min(if copied { most } else { u64::MAX });
                    Piece { method, start, length, until: start + length }
                }
                _ => {
                    let until = (block_start + self.block).min(end);
                    Piece { method: Method::Modify, start: block_start, length: self.block, until }
                }
            },
        })
    }

    /// Whether the data of a passed read was modified meanwhile.
    fn may_be_torn(&self, id: RequestId, io: &Io<'_>) -> bool {
        let request = io.request(id);
        let claims = || self.locks.claims(request.offset, request.length);
        request.operation == Operation::Read && claims() != Some(self.claims[id.index()])
    }

    /// Serves a request under the locks.
    fn take_on(&mut self, id: RequestId, fits: bool, io: &mut Io<'_>) {
        let request = io.request(id);
        let (operation, offset, length) = (request.operation, request.offset, request.length);
        let piece = Piece { method: Method::Whole, start: offset, length, until: offset + length };
        self.jobs[id.index()] = Some(SplitRequest {
            operation,
            position: offset,
            end: offset + length,
            cursor: Cursor::default(),
            piece,
            buffer: None,
            held: LockState::Nothing,
        });
        if !fits {
            self.advance(id, io);
        } else if !self.start(id, io) {
            io.hold(id);
            self.waiting.push_back(id);
        }
    }

    /// Goes on with the next piece, or completes the request.
    fn advance(&mut self, id: RequestId, io: &mut Io<'_>) {
        let memory_fits = io.request(id).data.aligned_to(self.memory);
        let Some(job) = self.jobs[id.index()].as_ref() else { return };
        match self.next_piece(job, memory_fits) {
            None => self.finish(id, Ok(()), io),
            Some(piece) => {
                if let Some(job) = self.jobs[id.index()].as_mut() {
                    job.piece = piece;
                }
                if !self.start(id, io) {
                    io.hold(id);
                    self.waiting.push_back(id);
                }
            }
        }
    }

    /// Starts the job's piece if its buffer and lock are available.
    fn start(&mut self, id: RequestId, io: &mut Io<'_>) -> bool {
        let Some(job) = self.jobs[id.index()].as_mut() else { return true };
        let piece = job.piece;
        if piece.method.has_buffer() && job.buffer.is_none() {
            let Some(buffer) = self.pool.take(piece.length as usize) else { return false };
            job.shorten(buffer.len() as u64, self.block);
            job.buffer = Some(buffer);
        }
        if !job.lock(&self.locks) {
            return false;
        }
        if piece.method == Method::Whole {
            io.pass(id);
        } else {
            self.run(id, io);
        }
        true
    }

    /// Makes and passes the child of a piece whose buffer and lock are there.
    fn run(&mut self, id: RequestId, io: &mut Io<'_>) {
        let Some(job) = self.jobs[id.index()].as_mut() else { return };
        let piece = job.piece;
        let operation = match piece.method {
            Method::Scatter | Method::Modify => Operation::Read,
            Method::Whole | Method::Direct | Method::Gather => job.operation,
        };
        let Some(child) = io.child(id, operation, piece.start, piece.length) else {
            return self.finish(id, Err(IoError::Overload), io);
        };
        match &job.buffer {
            None if operation == Operation::Write => {
                io.add_from_parent(id, child, &mut job.cursor, piece.length as usize);
            }
            None => {}
            Some(buffer) => {
                let length = piece.length as usize;
                if piece.method == Method::Gather {
                    let segment = self.pool.segment(buffer).part(0, length);
                    copy(&mut job.cursor, id, segment, CopyDirection::FromGuest, io);
                }
                io.lend(child, &self.pool, buffer, length);
            }
        }
        io.pass(child);
    }

    /// A child of a piece has come back without error; true if the piece is done.
    fn piece_done(&mut self, id: RequestId, was: Operation, io: &mut Io<'_>) -> bool {
        let Some(job) = self.jobs[id.index()].as_mut() else { return true };
        let (piece, Some(buffer)) = (job.piece, &job.buffer) else { return true };
        let start = (job.position - piece.start) as usize;
        let part = self.pool.segment(buffer).part(start, (piece.until - job.position) as usize);
        match piece.method {
            Method::Scatter => copy(&mut job.cursor, id, part, CopyDirection::ToGuest, io),
            Method::Modify if was == Operation::Read => {
                if job.operation == Operation::Write {
                    copy(&mut job.cursor, id, part, CopyDirection::FromGuest, io);
                } else {
                    part.clear();
                }
                let Some(child) = io.child(id, Operation::Write, piece.start, piece.length) else {
                    self.finish(id, Err(IoError::Overload), io);
                    return false;
                };
                io.lend(child, &self.pool, buffer, piece.length as usize);
                io.pass(child);
                return false;
            }
            Method::Whole | Method::Direct | Method::Gather | Method::Modify => {}
        }
        true
    }

    /// Releases the piece's buffer and lock, and lets others try.
    fn release(&mut self, id: RequestId) {
        if let Some(job) = self.jobs[id.index()].as_mut() {
            job.unlock(&self.locks);
            if let Some(buffer) = job.buffer.take() {
                self.pool.give(buffer);
            }
        }
    }

    fn finish(&mut self, id: RequestId, result: Result<(), IoError>, io: &mut Io<'_>) {
        self.release(id);
        self.jobs[id.index()] = None;
        io.complete(id, result);
    }

    /// Whether some job has its buffer and waits for a lock.
    fn waits_for_a_lock(&self) -> bool {
        let jobs = self.waiting.iter().filter_map(|id| self.jobs[id.index()].as_ref());
        jobs.into_iter().any(|job| job.buffer.is_some() || !job.piece.method.has_buffer())
    }

    /// Lets the waiting jobs try, oldest first.
    fn retry(&mut self, io: &mut Io<'_>) {
        for _ in 0..self.waiting.len() {
            let Some(id) = self.waiting.pop_front() else { return };
            if !self.start(id, io) {
                self.waiting.push_back(id);
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CopyDirection {
    FromGuest,
    ToGuest,
}

/// Copies between a bounce buffer and the guest's memory at the cursor.
fn copy(
    cursor: &mut Cursor,
    id: RequestId,
    bounce: crate::stack::memory::Segment,
    direction: CopyDirection,
    io: &Io<'_>,
) {
    let data = &io.request(id).data;
    let mut at = 0;
    while at < bounce.len() {
        let Some(guest) = cursor.next(data, bounce.len() - at) else { return };
        let part = bounce.part(at, guest.len());
        let (from, to) = match direction {
            CopyDirection::FromGuest => (guest, part),
            CopyDirection::ToGuest => (part, guest),
        };
        to.copy_from_segment(&from);
        at += guest.len();
    }
}

impl SplitRequest {
    /// Makes the piece small enough for a buffer of `length` bytes.
    fn shorten(&mut self, length: u64, block: u64) {
        if self.piece.length > length {
            self.piece.length = length & !(block - 1);
            self.piece.until = self.piece.until.min(self.piece.start + self.piece.length);
        }
    }

    fn lock(&mut self, locks: &SectorLocks) -> bool {
        let piece = self.piece;
        if piece.method == Method::Modify {
            if self.held == LockState::Nothing && locks.claim(piece.start) {
                self.held = LockState::Claimed;
            }
            self.held == LockState::Claimed && locks.is_exclusive(piece.start)
        } else {
            let shared = locks.try_shared(piece.start, piece.length);
            if shared {
                self.held = LockState::Shared;
            }
            shared
        }
    }

    fn unlock(&mut self, locks: &SectorLocks) {
        match self.held {
            LockState::Nothing => {}
            LockState::Shared => locks.release_shared(self.piece.start, self.piece.length),
            LockState::Claimed => locks.release_exclusive(self.piece.start),
        }
        self.held = LockState::Nothing;
    }
}

impl Filter for Align {
    fn limits(&self) -> Limits {
        Limits { children: ROOTS_MAX }
    }

    fn prepare(&mut self, capacity: usize) {
        self.jobs.resize_with(capacity, || None);
        self.claims.resize(capacity, 0);
        self.waiting.reserve(capacity);
    }

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        let request = io.request(id);
        let (operation, offset, length) = (request.operation, request.offset, request.length);
        let fits = self.fits(id, io);
        if operation == Operation::Flush {
            return io.pass(id);
        }
        if fits
            && operation == Operation::Read
            && let Some(claims) = self.locks.claims(offset, length)
        {
            self.claims[id.index()] = claims;
            return io.pass(id);
        }
        self.take_on(id, fits, io);
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        let result = io.request(id).result;
        let Some(parent) = io.parent(id) else {
            match &self.jobs[id.index()] {
                Some(_) => self.finish(id, result, io),
                None if result.is_ok() && self.may_be_torn(id, io) => self.take_on(id, true, io),
                None => io.complete(id, result),
            }
            return self.retry(io);
        };
        let was = io.request(id).operation;
        io.release(id);
        match result {
            Err(_) => self.finish(parent, result, io),
            Ok(()) => {
                if !self.piece_done(parent, was, io) {
                    return;
                }
                self.release(parent);
                if let Some(job) = self.jobs[parent.index()].as_mut() {
                    job.position = job.piece.until;
                }
                self.advance(parent, io);
            }
        }
        self.retry(io);
    }

    fn tick(&mut self, io: &mut Io<'_>) -> Option<Instant> {
        self.retry(io);
        if self.waits_for_a_lock() {
            self.locks.wait(io.waker());
            // For what was released before that.
            self.retry(io);
        }
        None
    }
}
