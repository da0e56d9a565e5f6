//! Copies pieces from one disk to another, several at a time, so that both sides always have work.
//!
//! ```text
//!  slot:  Free ── a piece ──> Reading ── read ──> Writing: its runs of data and of zeroes ── all written ──> Free
//!                                └── an error ──> noted with the piece's chunk ────────────────────────────^
//! ```
//! Nothing is in flight after [`Pipe::drain`], whatever failed, so no request outlives the buffers.

use std::cell::UnsafeCell;

use crate::layers::leg::{LegChain, REMOTE_POOL_BYTES};
use crate::stack::blocking;
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

const _: () = assert!(DEPTH * (PIECE / RUN) + DEPTH <= ROOTS_MAX);
const _: () = assert!(REMOTE_DEPTH * (PIECE / REMOTE_RUN) + DEPTH <= ROOTS_MAX);
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
        chunk: usize,
        at: u64,
        length: usize,
    },
    /// This many runs are not written yet.
    Writing {
        chunk: usize,
        runs: usize,
    },
}

/// See the module.
pub struct Pipe {
    source: Chain,
    copy: LegChain,
    slots: Vec<Slot>,
    /// Those of all slots. Cells, as the kernel writes into some while others are handed out.
    buffers: Box<[UnsafeCell<Page>]>,
    /// Zeroes in flight that belong to no slot, by their tag, which counts down from [`NO_SLOT`].
    zeroes: Vec<(u64, usize)>,
    next_tag: u64,
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

    /// Whether a piece has failed.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        !self.failed.is_empty()
    }

    /// How many bytes were written since this was last asked, zeroes included.
    #[must_use]
    pub fn take_written(&mut self) -> u64 {
        std::mem::take(&mut self.written)
    }

    /// Begins to copy a piece of a chunk, of at most [`PIECE`] bytes; waits until there is room for it.
    pub fn piece(&mut self, chunk: usize, at: u64, length: usize) {
        let free = self.wait_for(|pipe| pipe.slots.iter().position(|slot| *slot == Slot::Free));
        self.slots[free] = Slot::Reading { chunk, at, length };
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
            self.zeroes.push((self.next_tag, chunk));
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

    /// Waits until nothing is in flight.
    pub fn drain(&mut self) {
        self.wait_for(|pipe| {
            let idle = pipe.slots.iter().all(|slot| *slot == Slot::Free) && pipe.zeroes.is_empty();
            idle.then_some(())
        });
        self.next_tag = NO_SLOT;
    }

    /// The chunks of pieces that failed, each with its error.
    #[must_use]
    pub fn take_failed(&mut self) -> Vec<(usize, PipeError)> {
        std::mem::take(&mut self.failed)
    }

    /// Makes both sides durable.
    ///
    /// # Errors
    /// The side that failed.
    pub fn flush(&mut self) -> Result<(), PipeError> {
        blocking::flush(&mut self.source).map_err(PipeError::Source)?;
        self.copy.flush().map_err(PipeError::Copy)
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
            self.read(&done);
        }
        self.copy.chain.poll();
        while let Some(done) = self.copy.chain.next_done() {
            self.wrote(&done);
        }
    }

    /// A piece is read: its runs of data and of zeroes are written.
    fn read(&mut self, done: &Done) {
        let slot = done.tag as usize;
        let Some(Slot::Reading { chunk, at, length }) = self.slots.get(slot).copied() else {
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
        self.slots[slot] = if runs == 0 { Slot::Free } else { Slot::Writing { chunk, runs } };
        // Encrypted and handed over now, not when the next piece is read.
        self.copy.chain.poll();
    }

    fn wrote(&mut self, done: &Done) {
        if done.result.is_ok() {
            self.written += done.length;
        }
        let error = done.result.err().map(PipeError::Copy);
        if let Some(place) = self.zeroes.iter().position(|(tag, _)| *tag == done.tag) {
            let (_, chunk) = self.zeroes.swap_remove(place);
            self.failed.extend(error.map(|error| (chunk, error)));
            return;
        }
        let slot = done.tag as usize;
        let Some(Slot::Writing { chunk, runs }) = self.slots.get(slot).copied() else { return };
        self.failed.extend(error.map(|error| (chunk, error)));
        self.slots[slot] =
            if runs == 1 { Slot::Free } else { Slot::Writing { chunk, runs: runs - 1 } };
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

/// A chain has room for more requests than a pipe ever has in flight.
fn overload() -> PipeError {
    PipeError::Copy(IoError::Overload)
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.drain();
    }
}
