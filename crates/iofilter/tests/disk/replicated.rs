//! A layer `replicate` whose map and replica are in memory, and whose queues do the marker's work themselves: for
//! chains that are run by one thread.

use std::time::Instant;

use vmseal_api::id::DiskId;
use vmseal_iofilter::disk::Disk;
use vmseal_iofilter::layers::leg::LegChain;
use vmseal_iofilter::layers::replicate::copier::{Copier, CopyError};
use vmseal_iofilter::layers::replicate::format::Geometry;
use vmseal_iofilter::layers::replicate::{KIND, Replicate};
use vmseal_iofilter::stack::chain::{Chain, Filter, Io, Limits};
use vmseal_iofilter::stack::layer::{Layer, Place};
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::RequestId;
use vmseal_iofilter::storage::mem::MemDisk;

/// Chunks of 64 KiB: requests touch several.
const SHIFT: u32 = 16;

#[derive(Clone, Debug)]
pub struct Replicated {
    replicate: Replicate,
    replica: MemDisk,
    size: u64,
}

fn place(disk: &MemDisk, size: u64) -> Chain {
    Chain::new(size, false, Vec::new(), disk.queue()).unwrap()
}

impl Replicated {
    /// Of a disk of this many bytes; everything is clean, and a replica of zeroes.
    pub fn new(size: u64) -> Self {
        let geometry = Geometry::new(DiskId::new(), size).with_shift(SHIFT);
        let map_bytes = geometry.map_bytes();
        let map = LegChain::new(place(&MemDisk::new(map_bytes), map_bytes as u64));
        let (replicate, _) = Replicate::new(geometry, map);
        // The copy of a disk of zeroes.
        let replica = MemDisk::new(size as usize);
        let leg = LegChain::new(place(&replica, size));
        let mut copier = Copier::new(&replicate, place(&replica, size), None, leg);
        while replicate.status().dirty_bytes > 0 {
            copier.batch().unwrap();
        }
        Self { replicate, replica, size }
    }

    /// Copies the marked chunks of the disk. The replica is equal then where the disk was zeroes before its first
    /// request, or was marked.
    pub fn copy(&self, disk: &Disk) {
        let mut copier = self.copier(disk);
        while self.replicate.status().dirty_bytes > 0 {
            copier.batch().unwrap();
        }
    }

    /// Copies of a disk that fails; returns what can be copied at the first attempt.
    pub fn copy_some(&self, disk: &Disk) {
        let outcome = self.copier(disk).batch();
        assert!(matches!(outcome, Ok(_) | Err(CopyError::Source(_))), "{outcome:?}");
    }

    fn copier(&self, disk: &Disk) -> Copier {
        let leg = LegChain::new(place(&self.replica, self.size));
        Copier::new(&self.replicate, disk.below(KIND).unwrap(), disk.file().cloned(), leg)
    }

    /// The content of the replica.
    pub fn bytes(&self) -> Vec<u8> {
        self.replica.bytes()
    }
}

/// The chain below the replica's layer.
pub fn below(disk: &Disk) -> Vec<u8> {
    let mut source = LegChain::new(disk.below(KIND).unwrap());
    let mut pages = vec![Page([0xee; 4096]); disk.size() as usize / 4096];
    // SAFETY: the pages outlive the read, which is over when the call returns.
    let all = unsafe { Segment::new(pages.as_mut_ptr().cast(), disk.size() as usize) };
    source.read(0, all).unwrap();
    pages.iter().flat_map(|page| page.0).collect()
}

/// Aligned for direct I/O.
#[derive(Clone)]
#[repr(align(4096))]
struct Page([u8; 4096]);

impl Layer for Replicated {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn filter(&self, place: &Place) -> std::io::Result<Box<dyn Filter>> {
        let queue = self.replicate.filter(place)?;
        Ok(Box::new(Marking { replicate: self.replicate.clone(), queue }))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.replicate.counters()
    }
}

struct Marking {
    replicate: Replicate,
    queue: Box<dyn Filter>,
}

impl Filter for Marking {
    fn limits(&self) -> Limits {
        self.queue.limits()
    }

    fn prepare(&mut self, capacity: usize) {
        self.queue.prepare(capacity);
    }

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        self.queue.down(id, io);
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        self.queue.up(id, io);
    }

    fn tick(&mut self, io: &mut Io<'_>) -> Option<Instant> {
        assert!(self.replicate.mark_waiting());
        self.queue.tick(io)
    }
}
