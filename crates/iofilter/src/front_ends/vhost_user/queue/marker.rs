//! The one place where guest memory is marked as written: what a request was answered with, and its ring
//! ([`super::super::memory_log`] says when, and why not before).
//!
//! Data does not come here by the crate `vm-memory`, whose own bitmaps therefore stay empty: the kernel and the layers
//! write it by address. So a request is marked when it is answered, with all the memory that it was to fill, however
//! much of it was filled; then it is put into the used ring. A filter that is killed in between has it repeated and
//! marked by the next one. One that is killed between the used ring and its mark does not: so a ring that starts
//! to be logged is marked as a whole.

use std::os::fd::AsFd;

use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::signal;
use crate::front_ends::vhost_user::memory_log::{LogError, RingLog, used_length};
use crate::stack::memory::Segment;

/// A region of guest memory, as it is mapped here.
#[derive(Debug)]
struct Mapped {
    host: usize,
    length: usize,
    guest: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Marker {
    ring: RingLog,
    entries: u16,
    regions: Vec<Mapped>,
    /// Whether something was marked that the VMM was not told of.
    marked: bool,
}

impl Marker {
    /// Marks in this log what happens to a ring of `entries`, and the ring as it is now.
    pub(super) fn new(
        ring: RingLog,
        entries: u16,
        memory: &GuestMemoryMmap,
    ) -> Result<Self, LogError> {
        let regions = memory.iter().map(|region| Mapped {
            host: region.as_ptr() as usize,
            length: region.size(),
            guest: region.start_addr().raw_value(),
        });
        let regions = regions.collect();
        let mut marker = Self { ring, entries, regions, marked: false };
        marker.used(0, used_length(entries))?;
        Ok(marker)
    }

    /// Marks memory of a request.
    pub(super) fn segments(&mut self, written: &[Segment]) -> Result<(), LogError> {
        for segment in written {
            let start = segment.base() as usize;
            let holds =
                |region: &&Mapped| start >= region.host && start - region.host < region.length;
            let region = self.regions.iter().find(holds).ok_or(LogError::Elsewhere)?;
            let address = region.guest + (start - region.host) as u64;
            self.ring.log.mark(address, segment.len() as u64)?;
            self.marked = true;
        }
        Ok(())
    }

    /// Marks the entry of the used ring at `position`, and its index.
    pub(super) fn answer(&mut self, position: u16) -> Result<(), LogError> {
        self.used(4 + 8 * u64::from(position % self.entries.max(1)), 8)?;
        self.used(0, 4)
    }

    /// Marks where the ring says when the guest is to notify.
    pub(super) fn wish(&mut self) -> Result<(), LogError> {
        self.used(0, 4)?;
        self.used(used_length(self.entries) - 2, 2)
    }

    fn used(&mut self, start: u64, length: u64) -> Result<(), LogError> {
        let Some(used) = self.ring.used else { return Ok(()) };
        self.marked = true;
        let address = used.checked_add(start).ok_or(LogError::Beyond { address: u64::MAX })?;
        self.ring.log.mark(address, length)
    }

    /// Tells the VMM, if it wants to know, that something was marked.
    pub(super) fn announce(&mut self) {
        if let (Some(changed), true) = (&self.ring.changed, std::mem::take(&mut self.marked)) {
            signal(changed.as_fd());
        }
    }
}
