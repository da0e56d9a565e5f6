//! A chain that is copied to: the runs of a piece are in flight together, and those of the next piece with them.
//!
//! ```text
//!  begun: its runs are submitted and encrypted ──> in flight: the requests use its memory ──> complete: all of them have ended
//! ```
//! A piece stays here while it is in flight, whatever fails. Where buffers or requests of the chain run out, runs wait for others to end.

use std::collections::VecDeque;
use std::ops::DerefMut;

use crate::copy::engine::{Sink, next_run};
use crate::copy::filled::Filled;
use crate::stack::blocking;
use crate::stack::chain::{Chain, ROOTS_MAX};
use crate::stack::memory::Segment;
use crate::stack::request::{IoError, Operation};

/// What becomes of zeroes in a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeroes {
    /// They may become holes.
    Unmap,
    /// The chain reads as zeroes already.
    Skip,
    /// They are data: a hole would read otherwise.
    Write,
}

/// See the module. `C` is the chain, or refers to it.
pub struct ToChain<C: DerefMut<Target = Chain>> {
    chain: C,
    zeroes: Zeroes,
    pieces: Pieces,
}

/// The pieces in flight, in order.
struct Pieces {
    list: VecDeque<InFlight>,
    /// The number of the first one. The tag of a request is the number of its piece.
    first: u64,
}

struct InFlight {
    piece: Filled,
    /// How many of its runs have not ended.
    runs: usize,
    result: Result<(), IoError>,
}

impl Pieces {
    /// Fetches the runs that have ended.
    fn fetch(&mut self, chain: &mut Chain) {
        while let Some(done) = chain.next_done() {
            let place = done.tag.wrapping_sub(self.first) as usize;
            if let Some(of) = self.list.get_mut(place) {
                of.runs -= 1;
                of.result = of.result.and(done.result);
            }
        }
    }

    fn is_first_complete(&self) -> bool {
        self.list.front().is_none_or(|first| first.runs == 0)
    }

    fn are_complete(&self) -> bool {
        self.list.iter().all(|piece| piece.runs == 0)
    }
}

impl<C: DerefMut<Target = Chain>> ToChain<C> {
    /// Nothing is in flight in the chain.
    pub fn new(chain: C, zeroes: Zeroes) -> Self {
        let pieces = Pieces { list: VecDeque::new(), first: 0 };
        Self { chain, zeroes, pieces }
    }

    /// Submits the runs of the last piece. After an error, which is its result then, it gets no more.
    fn submit_last(&mut self) {
        let Some(last) = self.pieces.list.back_mut() else { return };
        let (at, bytes) = (last.piece.at(), last.piece.bytes_mut());
        // SAFETY: the piece stays here, and its memory where it is, until all its runs have ended; `drop` waits for that, too. Meanwhile
        // its runs are looked for in it, which is to read it, as the requests do: they are writes.
        let memory = unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) };
        let mut start = 0;
        while let Some((end, zero)) = self.run_of_last(start) {
            let skipped = zero && self.zeroes == Zeroes::Skip;
            let run = memory.part(start, end - start);
            if !skipped && !self.submit_run(run, zero, at + start as u64) {
                return;
            }
            start = end;
        }
    }

    /// Where the run of the last piece ends that begins at `start`, and whether it is zeroes; none at the end.
    fn run_of_last(&self, start: usize) -> Option<(usize, bool)> {
        let piece = &self.pieces.list.back()?.piece;
        let bytes = piece.bytes();
        match self.zeroes {
            Zeroes::Write => (start < bytes.len()).then_some((bytes.len(), false)),
            Zeroes::Unmap | Zeroes::Skip => next_run(bytes, start, piece.at()),
        }
    }

    /// Submits a run of the last piece; false after an error.
    fn submit_run(&mut self, run: Segment, zero: bool, at: u64) -> bool {
        self.wait_for_room();
        let tag = self.pieces.first + self.pieces.list.len() as u64 - 1;
        let Some(last) = self.pieces.list.back_mut() else { return false };
        let Some(id) = self.chain.begin() else {
            last.result = last.result.and(Err(IoError::Overload));
            return false;
        };
        last.runs += 1;
        if zero {
            let zeroes = Operation::WriteZeroes { unmap: true };
            self.chain.submit(id, zeroes, at, run.len() as u64, tag);
        } else {
            self.chain.data_mut(id).push(run);
            self.chain.submit(id, Operation::Write, at, 0, tag);
        }
        true
    }

    /// Waits until one more request may be in flight.
    fn wait_for_room(&mut self) {
        let Self { chain, pieces, .. } = self;
        if chain.in_flight() < ROOTS_MAX {
            return;
        }
        blocking::wait_until(chain, |chain| {
            pieces.fetch(chain);
            chain.in_flight() < ROOTS_MAX
        });
    }

    /// Waits until all pieces are complete. Each keeps its result.
    fn settle(&mut self) {
        let Self { chain, pieces, .. } = self;
        if pieces.list.is_empty() {
            return;
        }
        blocking::wait_until(chain, |chain| {
            pieces.fetch(chain);
            pieces.are_complete()
        });
    }
}

impl<C: DerefMut<Target = Chain>> Sink for ToChain<C> {
    type Error = IoError;

    fn write(&mut self, bytes: &mut [u8], at: u64) -> Result<(), IoError> {
        self.settle();
        blocking::move_bytes(&mut self.chain, Operation::Write, bytes, at)
    }

    fn zero(&mut self, at: u64, length: u64) -> Result<(), IoError> {
        self.settle();
        match self.zeroes {
            Zeroes::Skip => Ok(()),
            zeroes => {
                let unmap = zeroes == Zeroes::Unmap;
                blocking::write_zeroes(&mut self.chain, at, length, unmap)
            }
        }
    }

    fn begin(&mut self, piece: Filled) -> Result<Option<Filled>, IoError> {
        // It is here before its requests are: it stays until they have ended, whatever happens.
        self.pieces.list.push_back(InFlight { piece, runs: 0, result: Ok(()) });
        self.submit_last();
        // Encrypted and handed over now, not when the next piece comes.
        self.chain.poll();
        self.pieces.fetch(&mut self.chain);
        let is_complete = self.pieces.list.len() == 1 && self.pieces.is_first_complete();
        if is_complete { self.finish() } else { Ok(None) }
    }

    fn finish(&mut self) -> Result<Option<Filled>, IoError> {
        let Self { chain, pieces, .. } = self;
        blocking::wait_until(chain, |chain| {
            pieces.fetch(chain);
            pieces.is_first_complete()
        });
        let Some(InFlight { piece, result, .. }) = pieces.list.pop_front() else { return Ok(None) };
        pieces.first += 1;
        result.map(|()| Some(piece))
    }

    fn flush(&mut self) -> Result<(), IoError> {
        self.settle();
        blocking::flush(&mut self.chain)
    }
}

impl<C: DerefMut<Target = Chain>> Drop for ToChain<C> {
    fn drop(&mut self) {
        if !self.pieces.list.is_empty() {
            // Requests use the memory of pieces, which is freed after this. Who could be told of an error has ended.
            let _ = blocking::drain(&mut self.chain);
        }
    }
}

#[cfg(test)]
mod tests;
