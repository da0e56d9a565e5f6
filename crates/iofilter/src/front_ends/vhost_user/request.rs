//! Virtio-blk requests out of descriptor chains (virtio 1.2, §2.7.4 and §5.2.6).
//!
//! ```text
//!   device-readable:  header (type, ioprio, sector) | data out
//!   device-writable:  data in | status (the last byte)
//! ```
//! The parts may be split into descriptors in any way. The guest chooses everything here: a chain
//! that has no place for a status, or points outside memory, is [`Malformed`]; any other invalid request is answered
//! with a status.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use virtio_queue::DescriptorChain;
use virtio_queue::desc::split::Descriptor;
use vm_memory::bitmap::BitmapSlice;
use vm_memory::{GuestMemory, GuestMemoryBackend, GuestMemoryMmap, Permissions, VolatileSlice};

use crate::front_ends::vhost_user::config::{DISCARD_SECTORS_MAX, WRITE_ZEROES_SECTORS_MAX};
use crate::stack::memory::{Cursor, SEGMENTS_MAX, Segment, Segments};
use crate::stack::request::{LOGICAL_BLOCK, Operation};

/// The length of the header, in bytes.
const HEADER: usize = 16;

/// The length of `struct virtio_blk_discard_write_zeroes`, of which a request has one.
const RANGE: usize = 16;

/// Why a chain cannot even be answered; the queue stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The chain loops, leaves its table, or has an invalid indirect table.
    #[error("a descriptor chain does not end")]
    Endless,
    /// An address is not guest memory.
    #[error("a descriptor points outside the guest's memory")]
    Address,
    /// Readable after writable.
    #[error("a descriptor for the device to read comes after one for it to write")]
    Order,
    /// More than [`SEGMENTS_MAX`].
    #[error("a descriptor chain has too many parts")]
    TooLong,
    /// No writable byte.
    #[error("a request has no place for its status")]
    NoStatus,
}

/// A guest's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestCommand {
    /// An operation for the chain, which has the data segments. The length is for operations without data.
    Io {
        /// The operation.
        operation: Operation,
        /// The offset, in bytes.
        offset: u64,
        /// The length, in bytes.
        length: u64,
    },
    /// Write the device id into the data segments.
    Id,
    /// Answer at once with this status.
    Refused(u8),
}

/// A parsed request.
#[derive(Clone, Copy, Debug)]
pub struct Parsed {
    /// The request.
    pub asked: GuestCommand,
    /// The byte for the status.
    pub status: Segment,
    /// How many bytes the device may write as data.
    pub writable: u32,
}

/// Lists reused from request to request.
#[derive(Debug, Default)]
pub struct Parser {
    readable: Segments,
    writable: Segments,
}

impl Parser {
    /// Parses a chain; the segments of its data go to `data`.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn parse(
        &mut self,
        chain: DescriptorChain<&GuestMemoryMmap>,
        memory: &GuestMemoryMmap,
        data: &mut Segments,
    ) -> Result<Parsed, Malformed> {
        self.collect(chain, memory)?;
        let writable = self.writable.bytes().checked_sub(1).ok_or(Malformed::NoStatus)?;
        let mut behind = Cursor::default();
        behind.skip(&self.writable, writable);
        let status = behind.peek(&self.writable, 1).ok_or(Malformed::NoStatus)?;
        let asked = self.understand(writable, data);
        Ok(Parsed { asked, status, writable: u32::try_from(writable).unwrap_or(u32::MAX) })
    }

    fn collect(
        &mut self,
        chain: DescriptorChain<&GuestMemoryMmap>,
        memory: &GuestMemoryMmap,
    ) -> Result<(), Malformed> {
        self.readable.clear();
        self.writable.clear();
        let mut open = true;
        for descriptor in chain {
            open = descriptor.has_next();
            let list = if descriptor.is_write_only() {
                &mut self.writable
            } else if self.writable.bytes() > 0 {
                return Err(Malformed::Order);
            } else {
                &mut self.readable
            };
            translate(&descriptor, memory, list)?;
            if list.as_slice().len() > SEGMENTS_MAX {
                return Err(Malformed::TooLong);
            }
        }
        if open { Err(Malformed::Endless) } else { Ok(()) }
    }

    fn understand(&self, writable: usize, data: &mut Segments) -> GuestCommand {
        let mut header = [0; HEADER];
        let mut cursor = Cursor::default();
        if cursor.gather(&self.readable, &mut header) < HEADER {
            return GuestCommand::Refused(VIRTIO_BLK_S_IOERR as u8);
        }
        let [kind, _priority] = [0, 4].map(|at| u32::from_le_bytes(field(&header, at)));
        let sector = u64::from_le_bytes(field(&header, 8));
        let Some(offset) = sector.checked_mul(LOGICAL_BLOCK) else {
            return GuestCommand::Refused(VIRTIO_BLK_S_IOERR as u8);
        };
        match kind {
            VIRTIO_BLK_T_IN => {
                data.push_from(&self.writable, &mut Cursor::default(), writable);
                GuestCommand::Io { operation: Operation::Read, offset, length: 0 }
            }
            VIRTIO_BLK_T_OUT => {
                data.push_from(&self.readable, &mut cursor, self.readable.bytes() - HEADER);
                GuestCommand::Io { operation: Operation::Write, offset, length: 0 }
            }
            VIRTIO_BLK_T_FLUSH => {
                GuestCommand::Io { operation: Operation::Flush, offset: 0, length: 0 }
            }
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => self.range(kind, cursor),
            VIRTIO_BLK_T_GET_ID => {
                data.push_from(&self.writable, &mut Cursor::default(), writable);
                GuestCommand::Id
            }
            _ => GuestCommand::Refused(VIRTIO_BLK_S_UNSUPP as u8),
        }
    }

    /// The one range of a discard or write-zeroes.
    fn range(&self, kind: u32, mut cursor: Cursor) -> GuestCommand {
        let mut range = [0; RANGE];
        let whole = self.readable.bytes() == HEADER + RANGE;
        if !whole || cursor.gather(&self.readable, &mut range) < RANGE {
            return GuestCommand::Refused(VIRTIO_BLK_S_IOERR as u8);
        }
        let sector = u64::from_le_bytes(field(&range, 0));
        let [sectors, flags] = [8, 12].map(|at| u32::from_le_bytes(field(&range, at)));
        let (operation, most) = match (kind, flags) {
            (VIRTIO_BLK_T_DISCARD, 0) => (Operation::Discard, DISCARD_SECTORS_MAX),
            (VIRTIO_BLK_T_WRITE_ZEROES, 0 | VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP) => {
                (Operation::WriteZeroes { unmap: flags != 0 }, WRITE_ZEROES_SECTORS_MAX)
            }
            _ => return GuestCommand::Refused(VIRTIO_BLK_S_UNSUPP as u8),
        };
        match sector.checked_mul(LOGICAL_BLOCK) {
            Some(offset) if sectors <= most => {
                GuestCommand::Io { operation, offset, length: u64::from(sectors) * LOGICAL_BLOCK }
            }
            _ => GuestCommand::Refused(VIRTIO_BLK_S_IOERR as u8),
        }
    }
}

/// `N` bytes of a structure whose length covers them.
fn field<const N: usize>(bytes: &[u8; 16], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}

/// Adds the memory of a descriptor, which may be in several regions of the guest's memory.
fn translate(
    descriptor: &Descriptor,
    memory: &GuestMemoryMmap,
    list: &mut Segments,
) -> Result<(), Malformed> {
    let (at, length) = (descriptor.addr(), descriptor.len() as usize);
    // Nearly always in one region. To look there first costs less than the crate's iterator over several.
    if let Ok(slice) = memory.get_slice(at, length) {
        list.push(segment(&slice));
        return Ok(());
    }
    let slices = GuestMemory::get_slices(memory, at, length, Permissions::ReadWrite);
    for slice in slices.map_err(|_| Malformed::Address)? {
        list.push(segment(&slice.map_err(|_| Malformed::Address)?));
    }
    Ok(())
}

fn segment<B: BitmapSlice>(slice: &VolatileSlice<'_, B>) -> Segment {
    // SAFETY: a `VolatileSlice` of the guest's memory lies within a mapped region: `get_slice` or `get_slices` has
    // checked that. The queue's worker keeps the mapping until every request has completed, and nothing makes a
    // reference to this memory.
    unsafe { Segment::new(slice.ptr_guard_mut().as_ptr(), slice.len()) }
}
