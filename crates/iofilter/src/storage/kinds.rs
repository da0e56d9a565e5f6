//! The kinds of storage that a stack can end in; from it each chain gets its own part.

use std::io;
use std::os::fd::OwnedFd;

use crate::stack::chain::Storage;
use crate::stack::layer::Boundary;
use crate::stack::request::{IoError, LOGICAL_BLOCK};
use crate::storage::file::FileDisk;
use crate::storage::mem::MemDisk;
use crate::storage::nbd::NbdDisk;
use crate::storage::qcow2::Qcow2Disk;

/// Where a disk's data is stored.
#[derive(Clone, Debug)]
pub enum DiskStorage {
    /// A file or block device.
    File(FileDisk),
    /// An image of QEMU's format.
    Qcow2(Qcow2Disk),
    /// An export of an NBD server.
    Nbd(NbdDisk),
    /// Memory that completes requests late and in another order, for tests.
    Mem(MemDisk),
}

impl DiskStorage {
    /// The file, if it is a raw one or a device.
    #[must_use]
    pub fn file(&self) -> Option<&FileDisk> {
        match self {
            Self::File(file) => Some(file),
            Self::Qcow2(_) | Self::Nbd(_) | Self::Mem(_) => None,
        }
    }

    /// Whether a device works on many requests at a time.
    #[must_use]
    pub fn is_a_device(&self) -> bool {
        match self {
            Self::File(file) => !file.works_at_once(),
            Self::Qcow2(image) => image.has_rings(),
            Self::Nbd(_) => true,
            Self::Mem(_) => false,
        }
    }

    /// Whether another process has the buffers of its queues, too ([`Storage::shares_memory`]); a queue may be without.
    #[must_use]
    pub fn shares_memory(&self) -> bool {
        self.file().is_some_and(FileDisk::has_channel)
    }

    /// What it presents, as a place of `size` bytes.
    #[must_use]
    pub fn boundary(&self, size: u64) -> Boundary {
        let (block, memory) = match self {
            Self::File(file) => (file.block(), file.memory_alignment()),
            Self::Nbd(export) => (export.block(), 1),
            Self::Qcow2(image) => (image.block(), image.memory_alignment()),
            Self::Mem(_) => (LOGICAL_BLOCK as u32, 1),
        };
        Boundary { size, block, memory }
    }

    /// Has the kernel keep this file open, with its lock, until it has finished every request of queues that are made from now
    /// on, also where the process is killed. Not of an NBD server, which finishes them.
    #[must_use]
    pub fn holding(self, lock: OwnedFd) -> Self {
        match self {
            Self::File(file) => Self::File(file.holding(lock)),
            Self::Qcow2(image) => Self::Qcow2(image.holding(lock)),
            Self::Nbd(_) | Self::Mem(_) => self,
        }
    }

    /// Storage for one queue.
    ///
    /// # Errors
    /// All connections to an NBD server are in use.
    pub fn queue(&self) -> io::Result<Box<dyn Storage>> {
        Ok(match self {
            Self::File(file) => file.queue(),
            Self::Qcow2(image) => image.queue(),
            Self::Nbd(export) => export.queue()?,
            Self::Mem(mem) => mem.queue(),
        })
    }

    /// The same without a ring.
    ///
    /// # Errors
    /// As [`DiskStorage::queue`].
    pub fn blocking_queue(&self) -> io::Result<Box<dyn Storage>> {
        Ok(match self {
            Self::File(file) => file.blocking_queue(),
            Self::Qcow2(image) => image.blocking_queue(),
            Self::Nbd(export) => export.queue()?,
            Self::Mem(mem) => mem.queue(),
        })
    }

    /// Whether zeroes that may be holes cost no more than a request.
    #[must_use]
    pub fn punches(&self) -> bool {
        match self {
            Self::File(file) => file.punches(),
            Self::Nbd(export) => export.writes_zeroes(),
            Self::Qcow2(_) | Self::Mem(_) => false,
        }
    }

    /// The caller is the only writer and will write again everything since the last good flush: a failed flush need not
    /// fail those that follow, where that can be had.
    pub fn forget_failed_flush(&self) {
        match self {
            Self::File(file) => file.forget_failed_flush(),
            Self::Nbd(export) => export.forget_failed_flush(),
            Self::Qcow2(_) | Self::Mem(_) => {}
        }
    }

    /// The caller is the only writer and will write all of a truncated file again if it gets its length back.
    pub fn forget_cut(&self) {
        match self {
            Self::File(file) => file.forget_cut(),
            Self::Qcow2(_) | Self::Nbd(_) | Self::Mem(_) => {}
        }
    }

    /// Makes most of what was written durable, beside the queues.
    ///
    /// # Errors
    /// The flush failed; those of the queues fail from then on, too, if data may be lost.
    pub fn flush_beside(&self) -> Result<(), IoError> {
        match self {
            Self::File(file) => file.flush_beside(),
            Self::Qcow2(image) => image.flush_beside(),
            // A server makes durable what it is asked to, by the queues.
            Self::Nbd(_) | Self::Mem(_) => Ok(()),
        }
    }

    /// Brings its files into the state in which others can open them. No queue has a request in flight.
    ///
    /// # Errors
    /// An error of the image, in an error of the kind `Other`; or of the system.
    pub fn settle(&self) -> io::Result<()> {
        match self {
            Self::Qcow2(image) => image.settle(),
            Self::File(_) | Self::Nbd(_) | Self::Mem(_) => Ok(()),
        }
    }
}
