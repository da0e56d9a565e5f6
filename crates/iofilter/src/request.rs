//! A request on its way through a chain, and how it can fail.

use vmseal_api::filter::OperationKind;

use crate::memory::Segments;

/// The smallest unit a request may have, in bytes (virtio-blk counts in it).
pub const LOGICAL_BLOCK: u64 = 512;

/// What is asked of a disk. Offsets and lengths are in bytes, multiples of [`LOGICAL_BLOCK`].
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
    /// Whether it changes what is stored.
    #[must_use]
    pub fn changes(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes { .. })
    }

    /// Whether it is of these kinds; none are all.
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

/// Why a request failed. It ends at the guest, as an I/O error of this disk, and in the disk's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    /// Not on the disk, or not in whole logical blocks.
    #[error("the request is beyond the end of the disk or not in whole 512-byte blocks")]
    OutOfRange,
    /// More than [`crate::memory::SEGMENTS_MAX`] segments.
    #[error("the request's memory is in too many pieces")]
    Scattered,
    /// The disk is served read-only.
    #[error("the disk is read-only")]
    ReadOnly,
    /// ENOSPC, EDQUOT.
    #[error("no space is left on the datastore; make room there, the guest may then retry")]
    NoSpace,
    /// The file ends where data should be.
    #[error("the image ends before the end of the disk: it was truncated; restore it from a copy")]
    Truncated,
    /// A flush has failed before: the kernel may have dropped what it was to write, and tells only once.
    #[error(
        "an earlier flush failed, so what was written before it may be lost; look at the datastore, then stop and start the VM"
    )]
    Lost,
    /// Anything else that the kernel answers.
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
    /// More is under way than the chain was built for.
    #[error("too many requests are under way")]
    Overload,
}

impl IoError {
    /// What an error number of the kernel means here.
    #[must_use]
    pub fn from_errno(errno: i32) -> Self {
        match errno {
            libc::ENOSPC | libc::EDQUOT => Self::NoSpace,
            other => Self::Device(other),
        }
    }
}

/// Names a request in its chain; an index into tables that filters keep beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u32);

impl RequestId {
    /// The index, below [`crate::chain::Chain::capacity`].
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A request.
#[derive(Debug)]
pub struct Request {
    /// What is asked.
    pub operation: Operation,
    /// Where, in bytes from the start of the guest's disk.
    pub offset: u64,
    /// How much, in bytes.
    pub length: u64,
    /// The memory that is read into or written from, of `length` bytes; empty for other operations.
    pub data: Segments,
    /// How it ended; meaningful on its way up.
    pub result: Result<(), IoError>,
    /// What the front end knows it by.
    pub(crate) tag: u64,
    /// The request it is a part of.
    pub(crate) parent: Option<RequestId>,
    /// The layer that has it now.
    pub(crate) level: usize,
    /// The layer that made it; none for the front end's own.
    pub(crate) maker: Option<usize>,
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
            result: Ok(()),
            tag: 0,
            parent: None,
            level: 0,
            maker: None,
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
        Some(id)
    }

    pub(crate) fn give(&mut self, id: RequestId) {
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
