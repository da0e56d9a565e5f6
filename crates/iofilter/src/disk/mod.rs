//! A complete disk: the parts its chains are made of, shared by its queues.

pub mod allocation;
pub mod current;
pub mod status;

use std::io;
use std::sync::Arc;

use vmseal_api::filter::{CRYPT_SECTOR, Holes};
use vmseal_secret::SecretBytes;

use crate::disk::allocation::Allocation;
use crate::layers::align::Align;
use crate::layers::align::locks::SectorLocks;
use crate::layers::crypt::{Chunk, Crypt, CryptError};
use crate::layers::stays_above_a_mirror;
use crate::stack::chain::{Chain, Filter, Storage};
use crate::stack::dirty::Bitmaps;
use crate::stack::figures::CipherTime;
use crate::stack::layer::Layer;
use crate::stack::request::{IoError, LOGICAL_BLOCK};
use crate::storage::file::FileDisk;
use crate::storage::mem::MemDisk;
use crate::storage::qcow2::Qcow2Disk;

/// The limit for all bounce buffers of a process together. With tables, stacks and the program's own
/// memory a process stays under 32 MiB.
pub const POOLS_BYTES: usize = 16 * 1024 * 1024;

/// The limit for one queue where storage is synchronous: more than its requests in flight use.
const QUEUE_POOL_BYTES: usize = 2 * 1024 * 1024;

/// The same where a device works on many requests at a time: 8 writes of 512 KiB, and a quarter for [`Align`].
const DEVICE_POOL_BYTES: usize = 6 * 1024 * 1024;

/// The limit for a chain that only reads, for reads that are not of whole sectors.
pub const READER_POOL_BYTES: usize = 256 * 1024;

/// The limit for a chain that copies: four pieces of 512 KiB, and a quarter for [`Align`].
pub const COPY_POOL_BYTES: usize = 3 * 1024 * 1024;

/// Where a disk's data is stored.
#[derive(Clone, Debug)]
pub enum DiskStorage {
    /// A file or block device.
    File(FileDisk),
    /// An image of QEMU's format.
    Qcow2(Qcow2Disk),
    /// Memory that completes requests late and in another order, for tests.
    Mem(MemDisk),
}

impl DiskStorage {
    /// The file, if it is a raw one or a device.
    #[must_use]
    pub fn file(&self) -> Option<&FileDisk> {
        match self {
            Self::File(file) => Some(file),
            Self::Qcow2(_) | Self::Mem(_) => None,
        }
    }
}

/// How a disk is encrypted.
#[derive(Debug)]
pub struct Encryption {
    /// The data key (DEK).
    pub key: SecretBytes,
    /// What a sector of zeroes on the datastore means.
    pub holes: Holes,
}

/// A disk from which chains are made, one per queue.
#[derive(Debug)]
pub struct Disk {
    size: u64,
    read_only: bool,
    encryption: Option<Arc<Encryption>>,
    storage: DiskStorage,
    locks: Arc<SectorLocks>,
    pool_bytes: usize,
    cipher_time: Arc<CipherTime>,
    above: Vec<Arc<dyn Layer>>,
    below: Vec<Arc<dyn Layer>>,
    bitmaps: Arc<Bitmaps>,
}

impl Disk {
    /// A disk of `size` bytes. `pools` counts the chains of the whole process, and the front ends with
    /// buffers of their own, which share [`POOLS_BYTES`].
    #[must_use]
    pub fn new(
        size: u64,
        read_only: bool,
        encryption: Option<Encryption>,
        storage: DiskStorage,
        pools: usize,
    ) -> Self {
        let most = match &storage {
            DiskStorage::File(file) if !file.works_at_once() => DEVICE_POOL_BYTES,
            DiskStorage::Qcow2(image) if image.has_rings() => DEVICE_POOL_BYTES,
            _ => QUEUE_POOL_BYTES,
        };
        let pool_bytes = (POOLS_BYTES / pools.max(1)).min(most);
        let (locks, cipher_time) = (Arc::default(), Arc::default());
        let (above, below) = (Vec::new(), Vec::new());
        let bitmaps = Arc::new(Bitmaps::new(size));
        Self {
            size,
            read_only,
            encryption: encryption.map(Arc::new),
            storage,
            locks,
            pool_bytes,
            cipher_time,
            above,
            below,
            bitmaps,
        }
    }

    /// The same disk with further layers: `above` encryption, which see the guest's requests, and `below`,
    /// which see whole sectors of ciphertext; each from the guest downwards. Without encryption both are
    /// above storage.
    #[must_use]
    pub fn with_layers(self, above: Vec<Arc<dyn Layer>>, below: Vec<Arc<dyn Layer>>) -> Self {
        Self { above, below, ..self }
    }

    /// The same disk, as the copy that `disk` pivots to: both mark the same dirty bitmaps, and count the cipher's time
    /// together.
    #[must_use]
    pub fn as_copy_of(self, disk: &Self) -> Self {
        let (bitmaps, cipher_time) = (disk.bitmaps(), Arc::clone(&disk.cipher_time));
        Self { bitmaps, cipher_time, ..self }
    }

    /// The same disk, with a layer that copies it below those that stay above a copy.
    #[must_use]
    pub fn mirrored_by(&self, layer: Arc<dyn Layer>) -> Self {
        let mut disk = self.moved_to(self.storage.clone());
        let stay = disk.above.iter().take_while(|above| stays_above_a_mirror(&***above)).count();
        disk.above.insert(stay, layer);
        disk
    }

    /// Where its data is stored.
    #[must_use]
    pub fn storage(&self) -> &DiskStorage {
        &self.storage
    }

    /// The same disk in another place: its layers, keys, counters and dirty bitmaps are those of this one.
    #[must_use]
    pub fn moved_to(&self, storage: DiskStorage) -> Self {
        Self {
            size: self.size,
            read_only: self.read_only,
            encryption: self.encryption.clone(),
            storage,
            // Nothing is locked where no request is in flight.
            locks: Arc::clone(&self.locks),
            pool_bytes: self.pool_bytes,
            cipher_time: Arc::clone(&self.cipher_time),
            above: self.above.clone(),
            below: self.below.clone(),
            bitmaps: self.bitmaps(),
        }
    }

    /// Whether the filters of this disk's chains give `other` what its storage takes. They are those of [`Disk::moved_to`].
    #[must_use]
    pub fn filters_suit(&self, other: &Self) -> bool {
        let (block, memory) = self.units();
        let (other_block, other_memory) = other.units();
        block >= other_block && memory >= other_memory
    }

    /// Makes most of what was written durable, beside the disk's queues. What they write meanwhile needs a flush.
    ///
    /// # Errors
    /// The flush failed; those of the queues fail from then on, too, if data may be lost.
    pub fn flush_beside(&self) -> Result<(), IoError> {
        match &self.storage {
            DiskStorage::File(file) => file.flush_beside(),
            DiskStorage::Qcow2(image) => image.flush_beside(),
            DiskStorage::Mem(_) => Ok(()),
        }
    }

    /// Brings the disk's files into the state in which others can open them. No queue has a request in flight.
    ///
    /// # Errors
    /// An error of the image, in an error of the kind `Other`; or of the system.
    pub fn settle(&self) -> io::Result<()> {
        match &self.storage {
            DiskStorage::Qcow2(image) => image.settle(),
            DiskStorage::File(_) | DiskStorage::Mem(_) => Ok(()),
        }
    }

    /// All layers but encryption, from the guest downwards.
    #[must_use]
    pub fn layers(&self) -> Vec<Arc<dyn Layer>> {
        [&self.above[..], &self.below].concat()
    }

    /// The disk's size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether all changes of the disk are refused.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// The CPU time of the cipher, if there is one.
    #[must_use]
    pub fn cipher_time(&self) -> Option<Arc<CipherTime>> {
        self.encryption.as_ref().map(|_| Arc::clone(&self.cipher_time))
    }

    /// The dirty bitmaps, which all chains mark.
    #[must_use]
    pub fn bitmaps(&self) -> Arc<Bitmaps> {
        Arc::clone(&self.bitmaps)
    }

    /// How to find the disk's holes.
    #[must_use]
    pub fn allocation(&self) -> Allocation {
        Allocation::of(&self.storage, self.encryption.as_deref())
    }

    /// The limit of a front end's buffers, for each of its chains.
    #[must_use]
    pub fn pool_bytes(&self) -> usize {
        self.pool_bytes
    }

    /// A chain for one queue.
    ///
    /// # Errors
    /// [`CryptError`]: the key is not usable, or there is no memory for buffers.
    pub fn chain(&self) -> Result<Chain, CryptError> {
        self.make_chain(self.read_only, self.pool_bytes, self.queue_storage())
    }

    /// The same over other storage with the same limits as this disk's own: for tests of the data
    /// below a chain.
    ///
    /// # Errors
    /// [`CryptError`]
    pub fn chain_over(&self, storage: Box<dyn Storage>) -> Result<Chain, CryptError> {
        self.make_chain(self.read_only, self.pool_bytes, storage)
    }

    /// A chain that only reads, even on a writable disk, for a reader beside the front end. Its buffers
    /// are not part of the memory budget that was set at the start. It can be made at any time: it needs no ring.
    ///
    /// # Errors
    /// As [`Disk::chain`].
    pub fn reader(&self) -> Result<Chain, CryptError> {
        self.make_chain(true, READER_POOL_BYTES, self.blocking_storage())
    }

    /// A chain of everything below the first `count` layers above encryption, for a thread of its own. It marks no dirty
    /// bitmap.
    ///
    /// # Errors
    /// As [`Disk::chain`].
    pub fn beneath(&self, count: usize, read_only: bool) -> Result<Chain, CryptError> {
        let above = self.above.get(count..).unwrap_or_default();
        let storage = self.queue_storage();
        let filters = self.filters(above, COPY_POOL_BYTES, storage.works_at_once())?;
        Ok(Chain::new(self.size, read_only, filters, storage)?)
    }

    /// The file of the disk, where its holes are zeroes to the guest.
    #[must_use]
    pub fn holes(&self) -> Option<FileDisk> {
        let encryption = self.encryption.as_deref();
        let zeroes = encryption.is_none_or(|encryption| encryption.holes == Holes::Zero);
        self.file().filter(|_| zeroes).cloned()
    }

    /// A chain of everything below the layer of this kind, for a thread of its own that reads there.
    ///
    /// # Errors
    /// The system refuses what it needs.
    pub fn below(&self, kind: &str) -> io::Result<Chain> {
        let layers = self.layers();
        let above = layers.iter().take_while(|layer| layer.kind() != kind).count() + 1;
        let filters = layers.iter().skip(above).map(|layer| layer.filter());
        let filters = filters.collect::<io::Result<_>>()?;
        Chain::new(self.size, true, filters, self.queue_storage())
    }

    /// The file that the disk is stored in, if that is a raw file or a device.
    #[must_use]
    pub fn file(&self) -> Option<&FileDisk> {
        self.storage.file()
    }

    fn make_chain(
        &self,
        read_only: bool,
        pool_bytes: usize,
        storage: Box<dyn Storage>,
    ) -> Result<Chain, CryptError> {
        let filters = self.filters(&self.above, pool_bytes, storage.works_at_once())?;
        let chain = Chain::new(self.size, read_only, filters, storage)?;
        Ok(chain.marking(self.bitmaps()))
    }

    /// The filters of a chain with these layers above encryption.
    fn filters(
        &self,
        above: &[Arc<dyn Layer>],
        pool_bytes: usize,
        at_once: bool,
    ) -> Result<Vec<Box<dyn Filter>>, CryptError> {
        let mut filters: Vec<Box<dyn Filter>> = Vec::new();
        for layer in above {
            filters.push(layer.filter()?);
        }
        if let Some(align) = self.align(pool_bytes / 4)? {
            filters.push(Box::new(align));
        }
        if let Some(Encryption { key, holes }) = self.encryption.as_deref() {
            filters.push(Box::new(Crypt::new(
                key,
                *holes,
                if at_once { Chunk::Small } else { Chunk::Large },
                pool_bytes / 4 * 3,
                Arc::clone(&self.cipher_time),
            )?));
        }
        for layer in &self.below {
            filters.push(layer.filter()?);
        }
        Ok(filters)
    }

    /// Storage for one queue.
    #[must_use]
    pub fn queue_storage(&self) -> Box<dyn Storage> {
        match &self.storage {
            DiskStorage::File(file) => file.queue(),
            DiskStorage::Qcow2(image) => image.queue(),
            DiskStorage::Mem(mem) => mem.queue(),
        }
    }

    fn blocking_storage(&self) -> Box<dyn Storage> {
        match &self.storage {
            DiskStorage::File(file) => file.blocking_queue(),
            DiskStorage::Qcow2(image) => image.blocking_queue(),
            DiskStorage::Mem(mem) => mem.queue(),
        }
    }

    /// The smallest unit that the disk's storage or cipher takes, and the alignment of its memory.
    fn units(&self) -> (u32, u32) {
        let (block, memory) = match &self.storage {
            DiskStorage::File(file) => (file.block(), file.memory_alignment()),
            DiskStorage::Qcow2(image) => (image.block(), image.memory_alignment()),
            DiskStorage::Mem(_) => (LOGICAL_BLOCK as u32, 1),
        };
        (if self.encryption.is_some() { block.max(CRYPT_SECTOR) } else { block }, memory)
    }

    fn align(&self, pool_bytes: usize) -> io::Result<Option<Align>> {
        let (block, memory) = self.units();
        if u64::from(block) == LOGICAL_BLOCK && memory == 1 {
            return Ok(None);
        }
        let locks = Arc::clone(&self.locks);
        Align::new(block, memory as usize, locks, pool_bytes).map(Some)
    }
}
