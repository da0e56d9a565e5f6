//! The filter `cache`: data that was read is kept in memory, and read from there the next time.
//!
//! ```text
//!  read    all of it here ──> copied, completed
//!          not, or in part ──> child into a buffer of the cache's own ── up ──> copied to the request, kept
//!          longer than 64 KiB, or no buffer free ──> passed, not kept
//!  write, discard, write-zeroes ──> forgotten, passed ── up, however it ended ──> may be kept again
//!  flush   passed
//! ```
//! Only reads are answered without storage, and only with data that storage returned before, so a
//! crash loses no more than it would without the cache. How stale blocks are kept out: [`blocks`].
//!
//! Cached data never comes from the memory of the request. That memory is the guest's: a program in the
//! guest that changed its buffer just before it is copied would change what all others read.
//!
//! Below encryption all of this is ciphertext; above it the filter is refused ([`crate::process::config`]).

pub mod blocks;

use std::fmt;
use std::sync::Arc;

use vmseal_api::filter::CacheSpec;

use crate::layers::cache::blocks::{Blocks, STRETCH};
use crate::stack::chain::{Filter, Io, Limits};
use crate::stack::layer::{Counter, Layer, Place};
use crate::stack::memory::{Cursor, Segment, Segments};
use crate::stack::pool::{BLOCK, BLOCKS_MAX, Buffer, Pool};
use crate::stack::request::{Operation, RequestId};

/// The longest read that is looked up and cached, in bytes: the size of one buffer. Longer reads are mostly
/// of data that is read once.
const READ_MAX: u64 = STRETCH;
const _: () = assert!(READ_MAX == (BLOCKS_MAX * BLOCK) as u64);

/// The buffers of a queue, in bytes: for 128 reads of 4 KiB at a time.
pub const QUEUE_BYTES: usize = 512 * 1024;

/// The memory that a cache takes, in bytes: data, tables (less than a hundredth) and buffers.
#[must_use]
pub fn memory(spec: &CacheSpec, queues: usize) -> u64 {
    spec.bytes + spec.bytes / 64 + (queues * QUEUE_BYTES) as u64
}

/// The layer: what a disk's queues share.
#[derive(Clone)]
pub struct Cache(Arc<CacheState>);

struct CacheState {
    blocks: Blocks,
    passed: Counter,
}

impl Cache {
    /// An empty cache.
    #[must_use]
    pub fn new(spec: &CacheSpec) -> Self {
        let (blocks, passed) = (Blocks::new(spec.bytes), Counter::default());
        Self(Arc::new(CacheState { blocks, passed }))
    }
}

impl fmt::Debug for Cache {
    /// The memory of a filter, without the cached blocks.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Cache").field(&self.0.blocks.counts()).finish()
    }
}

impl Layer for Cache {
    fn kind(&self) -> &'static str {
        "cache"
    }

    fn filter(&self, _place: &Place) -> std::io::Result<Box<dyn Filter>> {
        let (shared, pool) = (Arc::clone(&self.0), Pool::new(QUEUE_BYTES)?);
        Ok(Box::new(CacheFilter { shared, pool, fetches: Vec::new() }))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let counts = self.0.blocks.counts();
        vec![
            ("hit_requests", counts.hits),
            ("missed_requests", counts.misses),
            ("passed_requests", self.0.passed.get()),
            ("installed_blocks", counts.installed),
            ("invalidated_blocks", counts.invalidated),
            ("evicted_blocks", counts.evicted),
        ]
    }
}

/// A read that storage is asked for, into a buffer.
struct Fetch {
    buffer: Buffer,
    ticket: blocks::Ticket,
}

struct CacheFilter {
    shared: Arc<CacheState>,
    pool: Pool,
    /// Indexed by child.
    fetches: Vec<Option<Fetch>>,
}

impl CacheFilter {
    fn read(&mut self, id: RequestId, io: &mut Io<'_>) {
        let request = io.request(id);
        let (offset, length) = (request.offset, request.length);
        if length <= READ_MAX {
            let mut cursor = Cursor::default();
            let give = |bytes: &[u8]| {
                cursor.scatter(&request.data, bytes);
            };
            if self.shared.blocks.read(offset, length, give) {
                return io.complete(id, Ok(()));
            }
            if self.fetch(id, offset, length, io).is_some() {
                return;
            }
        }
        self.shared.passed.add(1);
        io.pass(id);
    }

    /// Asks for a read into a buffer; none if none is free.
    fn fetch(&mut self, id: RequestId, offset: u64, length: u64, io: &mut Io<'_>) -> Option<()> {
        let buffer = self.pool.take(length as usize)?;
        let fits = buffer.len() as u64 >= length;
        let Some(child) = fits.then(|| io.child(id, Operation::Read, offset, length)).flatten()
        else {
            self.pool.give(buffer);
            return None;
        };
        io.lend(child, &self.pool, &buffer, length as usize);
        let ticket = self.shared.blocks.ticket(offset, length);
        self.fetches[child.index()] = Some(Fetch { buffer, ticket });
        io.pass(child);
        Some(())
    }

    /// Storage has answered.
    fn fetched(&mut self, child: RequestId, parent: RequestId, io: &mut Io<'_>) {
        let (result, length) = (io.request(child).result, io.request(child).length as usize);
        io.release(child);
        if let Some(Fetch { buffer, ticket }) = self.fetches[child.index()].take() {
            let bytes = self.pool.segment(&buffer).part(0, length);
            if result.is_ok() {
                self.shared.blocks.install(&ticket, |at, place| {
                    bytes.part(at, place.len()).copy_to(place);
                });
                copy(&bytes, &io.request(parent).data);
            }
            self.pool.give(buffer);
        }
        io.complete(parent, result);
    }
}

impl Filter for CacheFilter {
    fn limits(&self) -> Limits {
        // A child has a buffer of at least one block.
        Limits { children: self.pool.blocks() }
    }

    fn prepare(&mut self, capacity: usize) {
        self.fetches.resize_with(capacity, || None);
    }

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        let request = io.request(id);
        match request.operation {
            Operation::Read => self.read(id, io),
            Operation::Flush => io.pass(id),
            Operation::Write | Operation::Discard | Operation::WriteZeroes { .. } => {
                self.shared.blocks.begin_change(request.offset, request.length);
                io.pass(id);
            }
        }
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        if let Some(parent) = io.parent(id) {
            return self.fetched(id, parent, io);
        }
        let request = io.request(id);
        if request.operation.changes() {
            self.shared.blocks.end_change(request.offset, request.length);
        }
        io.complete(id, request.result);
    }
}

/// Copies a buffer to the memory of a request of the same length.
fn copy(from: &Segment, to: &Segments) {
    let (mut cursor, mut done) = (Cursor::default(), 0);
    while done < from.len() {
        let Some(piece) = cursor.next(to, from.len() - done) else { return };
        piece.copy_from_segment(&from.part(done, piece.len()));
        done += piece.len();
    }
}
