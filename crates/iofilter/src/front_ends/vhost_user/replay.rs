//! Repeats the requests that an earlier filter began and did not answer.
//!
//! Their descriptors are still in the guest's ring; the record of requests in flight says which they are
//! ([`super::inflight`]). They are listed in an available ring of our own, on a page beside the guest's
//! memory, so that the same code reads them as any other, with the same checks.

use std::sync::atomic::Ordering;

use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{
    Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap, MmapRegion,
};

/// The alignment of the list: that of the guest's pages.
const PAGE: u64 = 4096;

/// Flags, index, and the event index behind the list, in bytes.
const AROUND: usize = 6;

/// Why the requests cannot be repeated.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The guest's memory reaches to the end of the address space.
    #[error("there is no room beside the guest's memory")]
    Room,
    /// No memory.
    #[error("there is no memory for their list: {0}")]
    Mapping(#[from] vm_memory::mmap::MmapRegionError),
    /// The list cannot be mapped beside the guest's memory.
    #[error("their list cannot be put beside the guest's memory: {0}")]
    Region(#[from] vm_memory::GuestRegionCollectionError),
    /// The list cannot be written.
    #[error("their list cannot be written: {0}")]
    Memory(#[from] vm_memory::GuestMemoryError),
    /// The list is not a valid ring.
    #[error("the ring is invalid: {0}")]
    Ring(#[from] virtio_queue::Error),
}

/// See the module.
#[derive(Debug)]
pub struct Replay {
    queue: Queue,
    memory: GuestMemoryMmap,
    count: u16,
}

impl Replay {
    /// The requests with these heads of `queue`, in order.
    ///
    /// # Errors
    /// [`ReplayError`].
    pub fn new(
        queue: &Queue,
        memory: &GuestMemoryMmap,
        heads: &[u16],
    ) -> Result<Self, ReplayError> {
        let end = memory.last_addr().raw_value().checked_add(PAGE).ok_or(ReplayError::Room)?;
        let base = GuestAddress(end / PAGE * PAGE);
        let length = AROUND + 2 * usize::from(queue.size());
        let region = MmapRegion::new(length.next_multiple_of(PAGE as usize))?;
        let region = GuestRegionMmap::new(region, base).ok_or(ReplayError::Room)?;
        let memory = memory.insert_region(std::sync::Arc::new(region))?;
        for (at, head) in (2u64..).zip(heads) {
            memory.write_obj(head.to_le(), base.unchecked_add(2 * at))?;
        }
        let count = heads.len() as u16;
        memory.store(count.to_le(), base.unchecked_add(2), Ordering::Release)?;
        let mut queue = Queue::try_from(queue.state())?;
        queue.try_set_avail_ring_address(base)?;
        queue.set_next_avail(0);
        Ok(Self { queue, memory, count })
    }

    /// Whether all are taken.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.queue.next_avail() >= self.count
    }

    /// The next one; none when all are taken.
    ///
    /// # Errors
    /// The ring is invalid.
    pub fn take(
        &mut self,
    ) -> Result<Option<DescriptorChain<&GuestMemoryMmap>>, virtio_queue::Error> {
        Ok(self.queue.iter(&self.memory)?.next())
    }
}
