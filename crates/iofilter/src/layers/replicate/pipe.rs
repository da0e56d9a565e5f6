//! Copies pieces from one disk to another, several at a time, so that both sides always have work.
//!
//! ```text
//!  slot:  Free ── a piece ──> Reading ── read ──> Writing: its runs of data and of zeroes ── all written ──> Free
//!                                └── an error ──> noted with the piece's chunk ────────────────────────────^
//! ```
//! What was begun between two calls of [`Pipe::begin_flush`] is a batch. A batch is flushed, the disk before the copy, when
//! all of it is written; pieces of the next batch may be in flight meanwhile. One batch at a time waits for its flush:
//! ```text
//!  flush:  Idle ── begun ──> Writing ── all written ──> Disk ── flushed ──> Copy ── flushed ──> Ended ── taken ──> Idle
//!                                                        └────── an error ───┴───────────────────^
//! ```
//! Nothing is in flight after [`Pipe::drain`], whatever failed, so no request outlives the buffers.

use std::cell::UnsafeCell;

use crate::layers::leg::{LegChain, REMOTE_POOL_BYTES};
use crate::stack::chain::{Chain, Done, ROOTS_MAX};
use crate::stack::memory::Segment;
use crate::stack::request::{IoError, Operation};

/// The most that is copied as one piece, in bytes: large enough for any device's own best.
pub const PIECE: usize = 512 * 1024;

/// The most pieces in flight: one that is read, one that is written, and one that waits for each.
pub const DEPTH: usize = 4;

/// The same to a server elsewhere: as much as a line of 1 Gb/s has under way in 150 ms, and a quarter more.
pub const REMOTE_DEPTH: usize = 48;

/// The buffers of a pipe, in bytes.
pub const BYTES: usize = PIECE * REMOTE_DEPTH;

/// The unit in which zeroes become a hole of the copy, in bytes: about what file systems allocate together.
const RUN: usize = 64 * 1024;

/// The same to a server elsewhere, where more pieces are in flight and a chain has room for as many requests.
const REMOTE_RUN: usize = 256 * 1024;

// Runs, zeroes that belong to no piece, and a flush.
const _: () = assert!(DEPTH * (PIECE / RUN) + DEPTH < ROOTS_MAX);
const _: () = assert!(REMOTE_DEPTH * (PIECE / REMOTE_RUN) + DEPTH < ROOTS_MAX);
const _: () = assert!((REMOTE_DEPTH + REMOTE_DEPTH / 4) * PIECE <= REMOTE_POOL_BYTES);

/// The place of the slot in a request's tag; the rest is not used.
const NO_SLOT: u64 = u64::MAX;

/// A page of the buffers, aligned for direct I/O.
#[repr(align(4096))]
struct Page(#[expect(dead_code, reason = "its bytes are reached by a segment")] [u8; 4096]);

/// Which side failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PipeError {
    /// It cannot be read.
    Source(IoError),
    /// It cannot be written.
    Copy(IoError),
}

/// The state of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Free,
    Reading {
        batch: u64,
        chunk: usize,
        at: u64,
        length: usize,
    },
    /// This many runs are not written yet.
    Writing {
        batch: u64,
        chunk: usize,
        runs: usize,
    },
}

impl Slot {
    /// Whether it has a piece of a batch before this one.
    fn is_before(self, present: u64) -> bool {
        match self {
            Self::Free => false,
            Self::Reading { batch, .. } | Self::Writing { batch, .. } => batch < present,
        }
    }
}

/// Zeroes in flight that belong to no slot.
struct Zeroes {
    /// Of their request; tags count down from [`NO_SLOT`].
    tag: u64,
    batch: u64,
    chunk: usize,
}

/// The flush of the batch before the present one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flush {
    /// No batch waits for one.
    Idle,
    /// Some of the batch is in flight.
    Writing,
    /// All of it is written; the disk is being flushed.
    Disk,
    /// The disk is flushed; the copy is being flushed.
    Copy,
    /// Both are flushed, or one of them has failed.
    Ended(Result<(), PipeError>),
}

/// See the module.
pub struct Pipe {
    source: Chain,
    copy: LegChain,
    slots: Vec<Slot>,
    /// Those of all slots. Cells, as the kernel writes into some while others are handed out.
    buffers: Box<[UnsafeCell<Page>]>,
    zeroes: Vec<Zeroes>,
    next_tag: u64,
    /// The number of the present batch.
    batch: u64,
    flush: Flush,
    failed: Vec<(usize, PipeError)>,
    written: u64,
    run: usize,
}

impl Pipe {
    /// From a disk to a leg of the same size, with this many pieces in flight.
    #[must_use]
    pub fn new(source: Chain, copy: LegChain, pieces: usize) -> Self {
        let page = |_| UnsafeCell::new(Page([0; 4096]));
        Self {
            source,
            copy,
            slots: vec![Slot::Free; pieces],
            buffers: (0..pieces * PIECE / 4096).map(page).collect(),
            zeroes: Vec::new(),
            next_tag: NO_SLOT,
            batch: 0,
            flush: Flush::Idle,
            failed: Vec::new(),
            written: 0,
            run: if pieces > DEPTH { REMOTE_RUN } else { RUN },
        }
    }

    /// Whether zeroes cost no more than a hole.
    #[must_use]
    pub fn punches(&self) -> bool {
        self.copy.punches()
    }

    /// Whether a piece has failed, or the flush of a batch.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        !self.failed.is_empty() || matches!(self.flush, Flush::Ended(Err(_)))
    }

    /// How many bytes were written since this was last asked, zeroes included.
    #[must_use]
    pub fn take_written(&mut self) -> u64 {
        std::mem::take(&mut self.written)
    }

    /// Begins to copy a piece of a chunk, of at most [`PIECE`] bytes; waits until there is room for it.
    pub fn piece(&mut self, chunk: usize, at: u64, length: usize) {
        let free = self.wait_for(|pipe| pipe.slots.iter().position(|slot| *slot == Slot::Free));
        self.slots[free] = Slot::Reading { batch: self.batch, chunk, at, length };
        let Some(id) = self.source.begin() else { return self.fail(free, chunk, overload()) };
        let segment = self.segment(free, length);
        self.source.data_mut(id).push(segment);
        self.source.submit(id, Operation::Read, at, length as u64, free as u64);
        // Handed over now, not when the next piece comes.
        self.source.poll();
    }

    /// Begins to make a part of a chunk zeroes; waits until there is room for it.
    pub fn zero(&mut self, chunk: usize, at: u64, length: u64) {
        self.wait_for(|pipe| (pipe.zeroes.len() < DEPTH).then_some(()));
        self.next_tag -= 1;
        if self.submit_zeroes(at, length, self.next_tag) {
            self.zeroes.push(Zeroes { tag: self.next_tag, batch: self.batch, chunk });
        } else {
            self.failed.push((chunk, overload()));
        }
    }

    /// Waits until nothing is being read.
    pub fn finish_reads(&mut self) {
        self.wait_for(|pipe| {
            let reads = pipe.slots.iter().any(|slot| matches!(slot, Slot::Reading { .. }));
            (!reads).then_some(())
        });
    }

    /// Waits until nothing is in flight, and no batch waits for its flush.
    pub fn drain(&mut self) {
        self.wait_for(|pipe| {
            let idle = pipe.slots.iter().all(|slot| *slot == Slot::Free) && pipe.zeroes.is_empty();
            (idle && !pipe.is_flushing()).then_some(())
        });
        self.next_tag = NO_SLOT;
    }

    /// The chunks of pieces that failed, each with its error.
    #[must_use]
    pub fn take_failed(&mut self) -> Vec<(usize, PipeError)> {
        std::mem::take(&mut self.failed)
    }

    /// Makes both sides durable when all that has begun is written; what begins from now on is another batch. The outcome of
    /// the flush before must have been taken ([`Self::take_flushed`]).
    pub fn begin_flush(&mut self) {
        debug_assert_eq!(self.flush, Flush::Idle, "two batches wait for their flush");
        self.batch += 1;
        self.flush = Flush::Writing;
    }

    /// Whether a batch waits for its flush.
    #[must_use]
    pub fn is_flushing(&self) -> bool {
        matches!(self.flush, Flush::Writing | Flush::Disk | Flush::Copy)
    }

    /// Waits until no batch waits for its flush.
    pub fn finish_flush(&mut self) {
        if self.is_flushing() {
            self.wait_for(|pipe| (!pipe.is_flushing()).then_some(()));
        }
    }

    /// How the flush of a batch has ended, once; an error is that of the side that failed. After an error of the copy all
    /// that was written since the last good flush must be written again, that of the present batch, too
    /// ([`Self::forget_failed_flush`]).
    #[must_use]
    pub fn take_flushed(&mut self) -> Option<Result<(), PipeError>> {
        let Flush::Ended(flushed) = self.flush else { return None };
        self.flush = Flush::Idle;
        Some(flushed)
    }

    /// Makes both sides durable, and waits for it. No other flush is under way.
    ///
    /// # Errors
    /// The side that failed.
    pub fn flush(&mut self) -> Result<(), PipeError> {
        self.begin_flush();
        self.wait_for(Self::take_flushed)
    }

    /// Says that all that was written to the copy since its last good flush will be written again. Nothing is in flight.
    pub fn forget_failed_flush(&self) {
        self.copy.forget_failed_flush();
    }

    /// Says of a copy that was truncated that all of it will be written again if it gets its length back.
    pub fn forget_cut(&self) {
        self.copy.forget_cut();
    }

    fn segment(&self, slot: usize, length: usize) -> Segment {
        debug_assert!(length <= PIECE);
        let base = self.buffers[slot * (PIECE / 4096)..].as_ptr().cast_mut().cast::<u8>();
        // SAFETY: the slot's own part of the buffers, which are as long as all slots together and live as long as the
        // chains: no slot is used for two pieces, and `drop` drains.
        unsafe { Segment::new(base, length) }
    }

    /// Sleeps until there is something.
    fn wait_for<T>(&mut self, mut what: impl FnMut(&mut Self) -> Option<T>) -> T {
        loop {
            self.progress();
            if let Some(found) = what(self) {
                return found;
            }
            self.copy.wait_beside(&mut self.source);
        }
    }

    fn progress(&mut self) {
        self.source.poll();
        while let Some(done) = self.source.next_done() {
            match done.operation {
                Operation::Flush => self.flushed_disk(done.result),
                _ => self.read(&done),
            }
        }
        self.copy.chain.poll();
        while let Some(done) = self.copy.chain.next_done() {
            match done.operation {
                Operation::Flush => self.flush = Flush::Ended(done.result.map_err(PipeError::Copy)),
                _ => self.wrote(&done),
            }
        }
        self.flush_when_written();
    }

    /// Has the disk flushed, if a batch waits for that and all of it is written.
    fn flush_when_written(&mut self) {
        let pieces = || self.slots.iter().any(|slot| slot.is_before(self.batch));
        let zeroes = || self.zeroes.iter().any(|zeroes| zeroes.batch < self.batch);
        if self.flush != Flush::Writing || pieces() || zeroes() {
            return;
        }
        let submitted = submit_flush(&mut self.source);
        self.flush = if submitted { Flush::Disk } else { Flush::Ended(Err(overload())) };
    }

    /// The disk is flushed: now the copy is.
    fn flushed_disk(&mut self, result: Result<(), IoError>) {
        self.flush = match result {
            Err(error) => Flush::Ended(Err(PipeError::Source(error))),
            Ok(()) if submit_flush(&mut self.copy.chain) => Flush::Copy,
            Ok(()) => Flush::Ended(Err(overload())),
        };
    }

    /// A piece is read: its runs of data and of zeroes are written.
    fn read(&mut self, done: &Done) {
        let slot = done.tag as usize;
        let Some(Slot::Reading { batch, chunk, at, length }) = self.slots.get(slot).copied() else {
            return;
        };
        if let Err(error) = done.result {
            return self.fail(slot, chunk, PipeError::Source(error));
        }
        let all = self.segment(slot, length);
        let (mut from, mut runs, mut complete) = (0, 0, true);
        while from < length && complete {
            let zero = all.part(from, self.run.min(length - from)).is_zero();
            let mut to = from;
            while to < length && all.part(to, self.run.min(length - to)).is_zero() == zero {
                to = (to + self.run).min(length);
            }
            let place = at + from as u64;
            complete = if zero {
                self.submit_zeroes(place, (to - from) as u64, slot as u64)
            } else {
                self.submit_data(place, all.part(from, to - from), slot as u64)
            };
            runs += usize::from(complete);
            from = to;
        }
        if !complete {
            self.failed.push((chunk, overload()));
        }
        self.slots[slot] =
            if runs == 0 { Slot::Free } else { Slot::Writing { batch, chunk, runs } };
        // Encrypted and handed over now, not when the next piece is read.
        self.copy.chain.poll();
    }

    fn wrote(&mut self, done: &Done) {
        if done.result.is_ok() {
            self.written += done.length;
        }
        let error = done.result.err().map(PipeError::Copy);
        if let Some(place) = self.zeroes.iter().position(|zeroes| zeroes.tag == done.tag) {
            let Zeroes { chunk, .. } = self.zeroes.swap_remove(place);
            self.failed.extend(error.map(|error| (chunk, error)));
            return;
        }
        let slot = done.tag as usize;
        let Some(Slot::Writing { batch, chunk, runs }) = self.slots.get(slot).copied() else {
            return;
        };
        self.failed.extend(error.map(|error| (chunk, error)));
        self.slots[slot] =
            if runs == 1 { Slot::Free } else { Slot::Writing { batch, chunk, runs: runs - 1 } };
    }

    fn fail(&mut self, slot: usize, chunk: usize, error: PipeError) {
        self.failed.push((chunk, error));
        self.slots[slot] = Slot::Free;
    }

    fn submit_data(&mut self, at: u64, data: Segment, tag: u64) -> bool {
        let Some(id) = self.copy.chain.begin() else { return false };
        self.copy.chain.data_mut(id).push(data);
        self.copy.chain.submit(id, Operation::Write, at, 0, tag);
        true
    }

    fn submit_zeroes(&mut self, at: u64, length: u64, tag: u64) -> bool {
        let Some(id) = self.copy.chain.begin() else { return false };
        self.copy.chain.submit(id, Operation::WriteZeroes { unmap: true }, at, length, tag);
        true
    }
}

/// Submits a flush; false if the chain has no room.
fn submit_flush(chain: &mut Chain) -> bool {
    let Some(id) = chain.begin() else { return false };
    chain.submit(id, Operation::Flush, 0, 0, NO_SLOT);
    // Handed over now, not when the next piece comes.
    chain.poll();
    true
}

/// A chain has room for more requests than a pipe ever has in flight.
fn overload() -> PipeError {
    PipeError::Copy(IoError::Overload)
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.drain();
    }
}
