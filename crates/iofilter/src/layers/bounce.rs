//! The filter `bounce`: a read goes to buffers of its own, and is copied to the guest's memory when it is complete, decrypted.
//!
//! ```text
//!  read   split into chunks, each a child with a buffer; copied to the guest when it comes up
//!         Reading --a chunk passed--> Reading | Waiting (pool empty)      Waiting --a buffer came back--> Reading
//!  others passed
//! ```
//! For disks whose data key others have as well: a guest that saw ciphertext in its memory, and changed it before it is
//! decrypted, would have a sector of its choice decrypted.

use std::io;
use std::sync::Arc;

use crate::stack::buffer_queue::BufferQueue;
use crate::stack::chain::{Filter, Io, Limits};
use crate::stack::layer::{Counter, Layer, Place};
use crate::stack::memory::Cursor;
use crate::stack::pool::{Buffer, Pool};
use crate::stack::request::{IoError, Operation, RequestId};

/// The buffers of one queue, in bytes: some large reads at a time, or very many small ones.
pub const POOL_BYTES: usize = 512 << 10;

/// The most chunks of one read in flight, so that a large one leaves buffers to others.
const CHUNKS_MAX: u32 = 4;

/// The layer.
#[derive(Clone, Debug, Default)]
pub struct Bounce(Arc<Counter>);

impl Layer for Bounce {
    fn kind(&self) -> &'static str {
        "bounce"
    }

    fn filter(&self, _place: &Place) -> io::Result<Box<dyn Filter>> {
        Ok(Box::new(BounceFilter {
            pool: Pool::new(POOL_BYTES)?,
            copied: Arc::clone(&self.0),
            reading: Vec::new(),
            buffers: Vec::new(),
            waiting: BufferQueue::default(),
        }))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("bounced_bytes", self.0.get())]
    }
}

/// A read that is split.
#[derive(Debug, Default)]
struct Reading {
    /// Bytes passed down.
    passed: u64,
    /// Children in flight.
    chunks: u32,
    failed: Option<IoError>,
}

struct BounceFilter {
    pool: Pool,
    copied: Arc<Counter>,
    /// Reads in flight, by request.
    reading: Vec<Option<Reading>>,
    /// The buffer of each child.
    buffers: Vec<Option<Buffer>>,
    /// Reads that wait for a buffer.
    waiting: BufferQueue,
}

impl BounceFilter {
    /// Passes as much of a read as the buffers allow.
    fn pump(&mut self, id: RequestId, io: &mut Io<'_>) {
        let (offset, length) = (io.request(id).offset, io.request(id).length);
        loop {
            let Some(state) = self.reading[id.index()].as_mut() else { return };
            let left = length - state.passed;
            if state.failed.is_some() || left == 0 || state.chunks == CHUNKS_MAX {
                return self.finish_if_drained(id, io);
            }
            let Some(buffer) = self.pool.take(usize::try_from(left).unwrap_or(usize::MAX)) else {
                return self.waiting.wait(id, io);
            };
            let bytes = left.min(buffer.len() as u64);
            let Some(child) = io.child(id, Operation::Read, offset + state.passed, bytes) else {
                self.pool.give(buffer);
                state.failed = Some(IoError::Overload);
                continue;
            };
            state.passed += bytes;
            state.chunks += 1;
            io.lend(child, &self.pool, &buffer, bytes as usize);
            self.buffers[child.index()] = Some(buffer);
            io.pass(child);
        }
    }

    fn finish_if_drained(&mut self, id: RequestId, io: &mut Io<'_>) {
        let Some(state) = &self.reading[id.index()] else { return };
        if state.chunks > 0 {
            return;
        }
        let result = state.failed.map_or(Ok(()), Err);
        self.reading[id.index()] = None;
        io.complete(id, result);
    }

    /// A chunk is read, and decrypted: it goes to the guest, and its buffer serves the next one.
    fn chunk_up(&mut self, child: RequestId, parent: RequestId, io: &mut Io<'_>) {
        let (part, whole) = (io.request(child), io.request(parent));
        let (result, bytes) = (part.result, part.length as usize);
        if let Some(buffer) = self.buffers[child.index()].take() {
            if result.is_ok() {
                let mut from = self.pool.segment(&buffer).part(0, bytes);
                let mut to = Cursor::default();
                to.skip(&whole.data, (part.offset - whole.offset) as usize);
                while let Some(piece) = to.next(&whole.data, from.len()) {
                    piece.copy_from_segment(&from.part(0, piece.len()));
                    if piece.len() == from.len() {
                        break;
                    }
                    from = from.part(piece.len(), from.len());
                }
                self.copied.add(bytes as u64);
            }
            self.pool.give(buffer);
        }
        io.release(child);
        if let Some(state) = self.reading[parent.index()].as_mut() {
            state.chunks -= 1;
            state.failed = state.failed.or(result.err());
            let more = state.failed.is_none() && state.passed < io.request(parent).length;
            if !self.waiting.goes_behind(parent, more, io) {
                self.pump(parent, io);
            }
        }
        while let Some(next) = self.waiting.take_next() {
            self.pump(next, io);
            if self.waiting.stays_first(next) {
                return;
            }
        }
    }
}

impl Filter for BounceFilter {
    fn limits(&self) -> Limits {
        // A child has a buffer of at least one block.
        Limits { children: self.pool.blocks() }
    }

    fn prepare(&mut self, capacity: usize) {
        self.reading.resize_with(capacity, || None);
        self.buffers.resize_with(capacity, || None);
        self.waiting.prepare(capacity);
    }

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        if io.request(id).operation != Operation::Read {
            return io.pass(id);
        }
        self.reading[id.index()] = Some(Reading::default());
        self.pump(id, io);
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        match io.parent(id) {
            Some(parent) => self.chunk_up(id, parent, io),
            None => io.complete(id, io.request(id).result),
        }
    }
}

#[cfg(test)]
mod tests;
