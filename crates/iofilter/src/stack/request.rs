//! A request on its way through a chain, and how it can fail.

use vmseal_api::filter::OperationKind;

use crate::stack::memory::{Cursor, Segments};

/// The smallest unit a request may have, in bytes (virtio-blk counts in it).
pub const LOGICAL_BLOCK: u64 = 512;

/// An operation of a disk. Offsets and lengths are in bytes, multiples of [`LOGICAL_BLOCK`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Fills the request's memory.
    Read,
    /// Writes the request's memory; it never changes it.
    Write,
    /// Makes all writes durable that had completed before it was submitted.
    Flush,
    /// The range's content is no longer needed; what it reads as afterwards is either as before or zeroes.
    Discard,
    /// The range reads as zeroes afterwards.
    WriteZeroes {
        /// Whether the space may be given back (a hole punched).
        unmap: bool,
    },
}

impl Operation {
    /// Whether it changes stored data.
    #[must_use]
    pub fn changes(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes { .. })
    }

    /// Whether it is of one of these kinds; an empty list means all.
    #[must_use]
    pub fn is_one_of(self, kinds: &[OperationKind]) -> bool {
        let kind = match self {
            Self::Read => OperationKind::Read,
            Self::Write => OperationKind::Write,
            Self::Flush => OperationKind::Flush,
            Self::Discard | Self::WriteZeroes { .. } => OperationKind::Discard,
        };
        kinds.is_empty() || kinds.contains(&kind)
    }
}

/// Why a request failed. It is reported to the guest, as an I/O error of this disk, and in the disk's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    /// Not on the disk, or not in whole logical blocks.
    #[error("the request is beyond the end of the disk or not in whole 512-byte blocks")]
    OutOfRange,
    /// More than [`crate::stack::memory::SEGMENTS_MAX`] segments.
    #[error("the request's memory is in too many pieces")]
    Scattered,
    /// The disk is served read-only.
    #[error("the disk is read-only")]
    ReadOnly,
    /// ENOSPC, EDQUOT.
    #[error("no space is left on the datastore; make room there, the guest may then retry")]
    NoSpace,
    /// The file ends before the end of the disk.
    #[error("the image ends before the end of the disk: it was truncated; restore it from a copy")]
    Truncated,
    /// An earlier flush has failed: the kernel may have dropped data that it should have written, and reports it once.
    #[error(
        "an earlier flush failed, so what was written before it may be lost; look at the datastore, then stop and start the VM"
    )]
    Lost,
    /// Nothing answers any more where the data is stored.
    #[error(
        "the connection to the NBD server is lost; give the disk another one, or stop and start the VM"
    )]
    Disconnected,
    /// Storage has not answered a request of the disk for longer than the disk's policy allows. What was asked may still be done, until
    /// storage has answered it.
    #[error(
        "storage has not answered for longer than the disk's policy lets its guest wait; requests fail until it has answered all that it was given. Look at the datastore"
    )]
    Stalled,
    /// Any other error of the kernel.
    #[error("the datastore answers: {}", std::io::Error::from_raw_os_error(*.0))]
    Device(i32),
    /// The cipher failed; the key or the library is broken.
    #[error("the cipher failed; the data was left as it was")]
    Cipher,
    /// The tables of a qcow2 image make no sense.
    #[error(
        "the image is damaged; the filter's log says how. Stop the VM and look at the image with qemu-img check, or restore it from a copy"
    )]
    Damaged,
    /// The reader of qcow2 images has panicked.
    #[error(
        "the reader of qcow2 images has a defect and was stopped; the filter's log says where. Stop and start the VM"
    )]
    Defect,
    /// A filter neither passed nor ended the request, nor said that it keeps it.
    #[error(
        "a filter of the disk has a defect and forgot the request; the filter process's log says which"
    )]
    Forgotten,
    /// More requests are in flight than the chain was built for.
    #[error("too many requests are in flight")]
    Overload,
}

impl IoError {
    /// The meaning of an error number of the kernel.
    #[must_use]
    pub fn from_errno(errno: i32) -> Self {
        match errno {
            libc::ENOSPC | libc::EDQUOT => Self::NoSpace,
            other => Self::Device(other),
        }
    }
}

/// Identifies a request in its chain; an index into tables that filters keep for their requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u32);

impl RequestId {
    /// The index, below [`crate::stack::chain::Chain::capacity`].
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A request.
#[derive(Debug)]
pub struct Request {
    /// The operation.
    pub operation: Operation,
    /// The offset, in bytes from the start of the guest's disk.
    pub offset: u64,
    /// The length, in bytes.
    pub length: u64,
    /// The memory that is read into or written from, of `length` bytes; empty for other operations.
    pub(crate) data: Segments,
    /// Of a read: whether storage may leave what is read in buffers of its own.
    pub(crate) takes_lent: bool,
    /// Where it has left it, on the way up; empty if it is in the request's memory.
    pub(crate) lent: Segments,
    /// Its result; valid on its way up.
    pub result: Result<(), IoError>,
    /// The front end's own number for it.
    pub(crate) tag: u64,
    /// Its parent.
    pub(crate) parent: Option<RequestId>,
    /// The layer that has it now.
    pub(crate) level: usize,
    /// The layer that made it; none for the front end's own. One that has a maker and no parent is apart ([`Io::apart`]).
    ///
    /// [`Io::apart`]: crate::stack::chain::Io::apart
    pub(crate) maker: Option<usize>,
    /// Who must act on it.
    pub(crate) turn: Turn,
    /// The number of its children.
    pub(crate) children: u32,
    /// Whether the layer that has it holds it.
    pub(crate) held: bool,
    /// Whether this process has asked for it, and no guest waits for it.
    pub(crate) internal: bool,
}

impl Request {
    /// The memory that is read into or written from, for storage that has a library move the data. It stays until the request is
    /// completed.
    #[must_use]
    pub fn data(&self) -> &Segments {
        &self.data
    }

    /// Copies the data to write, from `start` bytes on, into `to`; returns how many bytes there were. The guest may
    /// change it at any time: read it only once.
    pub fn copy_to(&self, start: usize, to: &mut [u8]) -> usize {
        let mut cursor = Cursor::default();
        cursor.skip(&self.data, start);
        cursor.gather(&self.data, to)
    }

    /// Copies read data into the request's memory, from `start` bytes on; returns how many bytes fit. None fit in a
    /// request that is not a read: its memory must not be changed.
    pub fn copy_from(&self, start: usize, from: &[u8]) -> usize {
        if self.operation != Operation::Read {
            return 0;
        }
        let mut cursor = Cursor::default();
        cursor.skip(&self.data, start);
        cursor.scatter(&self.data, from)
    }
}

/// Who must act on a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Nobody: the slot is free.
    Free,
    /// The layer that has it.
    Layer,
    /// The chain, which takes it to the next layer.
    Chain,
    /// Its children: the layer has completed it, and it goes up when the last of them is released.
    Parts,
}

/// All requests of one chain: a fixed number of slots, reused without allocating.
#[derive(Debug)]
pub(crate) struct Requests {
    slots: Vec<Request>,
    free: Vec<RequestId>,
}

impl Requests {
    pub(crate) fn new(capacity: u32) -> Self {
        let slot = |_| Request {
            operation: Operation::Flush,
            offset: 0,
            length: 0,
            data: Segments::default(),
            takes_lent: false,
            lent: Segments::default(),
            result: Ok(()),
            tag: 0,
            parent: None,
            level: 0,
            maker: None,
            turn: Turn::Free,
            children: 0,
            held: false,
            internal: false,
        };
        Self {
            slots: (0..capacity).map(slot).collect(),
            free: (0..capacity).rev().map(RequestId).collect(),
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn take(&mut self) -> Option<RequestId> {
        let id = self.free.pop()?;
        let slot = self.get_mut(id);
        slot.data.clear();
        slot.result = Ok(());
        (slot.tag, slot.parent, slot.level, slot.maker) = (0, None, 0, None);
        (slot.turn, slot.children, slot.held) = (Turn::Layer, 0, false);
        slot.internal = false;
        Some(id)
    }

    pub(crate) fn give(&mut self, id: RequestId) {
        let slot = self.get_mut(id);
        slot.turn = Turn::Free;
        // A caller that still has the id must not find another request's memory.
        slot.data.clear();
        if std::mem::take(&mut slot.takes_lent) {
            slot.lent.clear();
        }
        self.free.push(id);
    }

    pub(crate) fn get(&self, id: RequestId) -> &Request {
        &self.slots[id.index()]
    }

    pub(crate) fn get_mut(&mut self, id: RequestId) -> &mut Request {
        &mut self.slots[id.index()]
    }

    /// Two different requests at once.
    pub(crate) fn pair(
        &mut self,
        from: RequestId,
        to: RequestId,
    ) -> Option<(&Request, &mut Request)> {
        let [from, to] = self.slots.get_disjoint_mut([from.index(), to.index()]).ok()?;
        Some((from, to))
    }
}
