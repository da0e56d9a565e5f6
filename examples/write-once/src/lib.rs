//! A filter from outside vmseal: a block that was written can be read but never changed again, so that
//! malware in a guest cannot delete or encrypt existing backups.
//!
//! docs/write-a-filter.md explains this file.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vmseal_iofilter::stack::chain::{Filter, Io, Limits};
use vmseal_iofilter::stack::layer::{Counter, Layer, Place};
use vmseal_iofilter::stack::request::{IoError, Operation, Request, RequestId};

/// The unit that is protected: 4096 bytes.
const BLOCK: u64 = 4096;

/// The layer: what all queues of a disk share. One bit per block: written.
#[derive(Clone, Debug)]
pub struct WriteOnce(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    written: Vec<AtomicU64>,
    refused: Counter,
}

impl WriteOnce {
    /// For a disk of `size` bytes, of which nothing is written yet.
    #[must_use]
    pub fn new(size: u64) -> Self {
        let words = usize::try_from(size.div_ceil(BLOCK).div_ceil(64)).unwrap_or(usize::MAX);
        let written = (0..words).map(|_| AtomicU64::new(0)).collect();
        Self(Arc::new(Shared { written, refused: Counter::default() }))
    }
}

impl Layer for WriteOnce {
    fn kind(&self) -> &'static str {
        "write_once"
    }

    fn filter(&self, _place: &Place) -> std::io::Result<Box<dyn Filter>> {
        Ok(Box::new(Queue(Arc::clone(&self.0))))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("refused_requests", self.0.refused.get())]
    }
}

impl Shared {
    /// Marks the blocks of a request; false, without marking any, if one of them is marked already.
    fn claim(&self, request: &Request) -> bool {
        let first = request.offset / BLOCK;
        let end = (request.offset + request.length).div_ceil(BLOCK);
        for block in first..end {
            if self.mark(block) {
                (first..block).for_each(|marked| self.unmark(marked));
                return false;
            }
        }
        true
    }

    /// Marks a block; true if it was marked before.
    fn mark(&self, block: u64) -> bool {
        let bit = 1 << (block % 64);
        self.word(block).fetch_or(bit, Ordering::AcqRel) & bit != 0
    }

    fn unmark(&self, block: u64) {
        self.word(block).fetch_and(!(1 << (block % 64)), Ordering::AcqRel);
    }

    fn word(&self, block: u64) -> &AtomicU64 {
        // The chain lets no request through that is beyond the disk's end.
        &self.written[(block / 64) as usize]
    }
}

/// One queue's filter.
struct Queue(Arc<Shared>);

impl Filter for Queue {
    fn limits(&self) -> Limits {
        Limits { children: 0 }
    }

    fn prepare(&mut self, _capacity: usize) {}

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        let request = io.request(id);
        match request.operation {
            Operation::Read | Operation::Flush => io.pass(id),
            Operation::Write if self.0.claim(request) => io.pass(id),
            // A discard would remove protected data, so it is refused, too.
            Operation::Write | Operation::Discard | Operation::WriteZeroes { .. } => {
                self.0.refused.add(1);
                io.complete(id, Err(IoError::ReadOnly));
            }
        }
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        // A write that failed may be tried again: its blocks are free.
        let request = io.request(id);
        if request.operation == Operation::Write && request.result.is_err() {
            let blocks = request.offset / BLOCK..(request.offset + request.length).div_ceil(BLOCK);
            blocks.for_each(|block| self.0.unmark(block));
        }
        io.complete(id, io.request(id).result);
    }
}
