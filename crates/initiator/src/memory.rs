//! Memory that the server maps too: one region, a memfd, at guest address 0.

use std::fs::File;
use std::sync::atomic::Ordering;

use nix::sys::memfd::{MFdFlags, memfd_create};
use vhost::VhostUserMemoryRegionInfo;
use vm_memory::{
    AtomicAccess, Bytes, FileOffset, GuestAddress, GuestRegionMmap, MmapRegion, VolatileMemory,
};

use crate::InitiatorError;

/// One shared region. Offsets come from the initiator; one outside the region is a bug and panics.
pub(crate) struct SharedMemory {
    region: GuestRegionMmap,
}

impl SharedMemory {
    /// Maps `size` bytes and touches them all, so that no first touch is measured.
    pub(crate) fn new(size: usize) -> Result<Self, InitiatorError> {
        let failed = |source| InitiatorError::Memory { size, source };
        let fd = memfd_create("vmseal-lab", MFdFlags::MFD_CLOEXEC).map_err(|e| failed(e.into()))?;
        let file = File::from(fd);
        file.set_len(size as u64).map_err(failed)?;
        let mapping = MmapRegion::from_file(FileOffset::new(file, 0), size)
            .map_err(|e| failed(std::io::Error::other(e)))?;
        let region = GuestRegionMmap::new(mapping, GuestAddress(0))
            .ok_or_else(|| failed(std::io::Error::other("the region exceeds the address space")))?;
        let memory = Self { region };
        memory.write(0, &vec![0; size]);
        Ok(memory)
    }

    /// The region for SET_MEM_TABLE.
    pub(crate) fn info(&self) -> Result<VhostUserMemoryRegionInfo, vhost::Error> {
        VhostUserMemoryRegionInfo::from_guest_region(&self.region)
    }

    pub(crate) fn store<T: AtomicAccess>(&self, offset: usize, value: T, order: Ordering) {
        self.region.as_volatile_slice().store(value, offset, order).expect("an offset of ours");
    }

    pub(crate) fn load<T: AtomicAccess>(&self, offset: usize, order: Ordering) -> T {
        self.region.as_volatile_slice().load(offset, order).expect("an offset of ours")
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        self.region.as_volatile_slice().write_slice(bytes, offset).expect("an offset of ours");
    }

    pub(crate) fn read(&self, offset: usize, bytes: &mut [u8]) {
        self.region.as_volatile_slice().read_slice(bytes, offset).expect("an offset of ours");
    }
}
