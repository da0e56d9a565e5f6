//! A complete disk: the stack that its chains are made of, and what its queues share beside that.

pub mod allocation;
pub mod current;
pub mod pacing;
pub mod size;
pub mod status;

use std::fs::File;
use std::io;
use std::sync::Arc;

use crate::disk::allocation::Allocation;
use crate::layers::leg::COPY_POOL_BYTES;
use crate::layers::stack::Stack;
use crate::layers::{align, crypt, replicate, stall, stays_above_a_mirror};
use crate::stack::chain::{Chain, Storage};
use crate::stack::dirty::Bitmaps;
use crate::stack::figures::CipherTime;
use crate::stack::layer::Layer;
use crate::stack::request::IoError;
use crate::storage::file::FileDisk;

pub use crate::layers::crypt::Encryption;
pub use crate::storage::DiskStorage;

/// The limit for all bounce buffers of a process together. With tables, stacks and the program's own
/// memory a process stays under 32 MiB. What is shared with `vmseal-rbd` comes on top of that, the buffers of queues and those into
/// which is encrypted: [`SHARED_BYTES_MAX`](crate::storage::channel::SHARED_BYTES_MAX) at most.
pub const POOLS_BYTES: usize = 16 * 1024 * 1024;

/// The limit for one queue where storage is synchronous: more than its requests in flight use.
const QUEUE_POOL_BYTES: usize = 2 * 1024 * 1024;

/// The same where a device works on many requests at a time: 8 writes of 512 KiB, and a quarter for [`align`].
const DEVICE_POOL_BYTES: usize = 6 * 1024 * 1024;

/// The limit for a chain that only reads, for reads that are not of whole sectors.
pub const READER_POOL_BYTES: usize = 256 * 1024;

/// A disk from which chains are made, one per queue.
#[derive(Clone, Debug)]
pub struct Disk {
    stack: Stack,
    read_only: bool,
    pool_bytes: usize,
    cipher_time: Arc<CipherTime>,
    bitmaps: Arc<Bitmaps>,
}

impl Disk {
    /// A disk of this stack. `pools` counts the chains of the whole process, and the front ends with
    /// buffers of their own, which share [`POOLS_BYTES`].
    #[must_use]
    pub fn of(stack: Stack, read_only: bool, pools: usize) -> Self {
        let most = if stack.is_a_device() { DEVICE_POOL_BYTES } else { QUEUE_POOL_BYTES };
        let pool_bytes = (POOLS_BYTES / pools.max(1)).min(most);
        let bitmaps = Arc::new(Bitmaps::new(stack.boundary(0).size));
        Self { stack, read_only, pool_bytes, cipher_time: Arc::default(), bitmaps }
    }

    /// The same disk, with the dirty bitmaps that a file keeps.
    ///
    /// # Errors
    /// Those of the file.
    pub fn with_bitmaps_in(self, file: File) -> io::Result<Self> {
        let bitmaps = Arc::new(Bitmaps::kept_in(file, self.size())?);
        Ok(Self { bitmaps, ..self })
    }

    /// The same disk, whose chains mark these dirty bitmaps.
    #[must_use]
    pub fn with_bitmaps(self, bitmaps: Arc<Bitmaps>) -> Self {
        Self { bitmaps, ..self }
    }

    /// A disk of `size` bytes with no layer but encryption.
    #[must_use]
    pub fn new(
        size: u64,
        read_only: bool,
        encryption: Option<Encryption>,
        storage: DiskStorage,
        pools: usize,
    ) -> Self {
        let encryption = encryption.map(|encryption| Arc::new(encryption) as Arc<dyn Layer>);
        Self::of(Stack::new(encryption.into_iter().collect(), storage, size), read_only, pools)
    }

    /// The same disk with further layers: `above` all that it has, and `below` them; each from the guest downwards.
    #[must_use]
    pub fn with_layers(self, above: Vec<Arc<dyn Layer>>, below: Vec<Arc<dyn Layer>>) -> Self {
        let own = self.stack.layers().to_vec();
        let (storage, size) = (self.stack.storage().clone(), self.stack.storage_size());
        Self { stack: Stack::new([above, own, below].concat(), storage, size), ..self }
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
        let layers = self.stack.layers().iter();
        let stay = layers.take_while(|above| stays_above_a_mirror(&***above)).count();
        Self { stack: self.stack.with(stay, layer), ..self.clone() }
    }

    /// The same disk, which nothing copies to a mirror.
    #[must_use]
    pub fn unmirrored(&self) -> Self {
        Self { stack: self.stack.without(replicate::MIRROR), ..self.clone() }
    }

    /// Where its data is stored.
    #[must_use]
    pub fn storage(&self) -> &DiskStorage {
        self.stack.storage()
    }

    /// The same disk in the place of `stack`, where it may be longer: its layers, keys, counters and dirty bitmaps are those of this
    /// one.
    #[must_use]
    pub fn moved_to(&self, stack: &Stack) -> Self {
        let (storage, size) = (stack.storage().clone(), stack.storage_size());
        Self { stack: self.stack.over(storage, size), ..self.clone() }
    }

    /// Whether the filters of this disk's chains give `other` what its storage takes. They are those of [`Disk::moved_to`].
    #[must_use]
    pub fn filters_suit(&self, other: &Self) -> bool {
        self.stack.filters_suit(&other.stack)
    }

    /// Makes most of what was written durable, beside the disk's queues. What they write meanwhile needs a flush.
    ///
    /// # Errors
    /// As [`DiskStorage::flush_beside`].
    pub fn flush_beside(&self) -> Result<(), IoError> {
        self.storage().flush_beside()
    }

    /// Brings the disk's files into the state in which others can open them. No queue has a request in flight.
    ///
    /// # Errors
    /// As [`DiskStorage::settle`].
    pub fn settle(&self) -> io::Result<()> {
        self.storage().settle()
    }

    /// The layers that were asked for, but for encryption, from the guest downwards.
    #[must_use]
    pub fn layers(&self) -> Vec<Arc<dyn Layer>> {
        let asked = |layer: &&Arc<dyn Layer>| ![align::KIND, crypt::KIND].contains(&layer.kind());
        self.stack.layers().iter().filter(asked).cloned().collect()
    }

    /// The disk's size in bytes, as the guest sees it.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.stack.boundary(0).size
    }

    /// Whether all changes of the disk are refused.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// The CPU time of the cipher, if there is one.
    #[must_use]
    pub fn cipher_time(&self) -> Option<Arc<CipherTime>> {
        self.stack.encrypts().then(|| Arc::clone(&self.cipher_time))
    }

    /// The dirty bitmaps, which all chains mark.
    #[must_use]
    pub fn bitmaps(&self) -> Arc<Bitmaps> {
        Arc::clone(&self.bitmaps)
    }

    /// How to find the disk's holes.
    #[must_use]
    pub fn allocation(&self) -> Allocation {
        Allocation::of(self.storage(), self.stack.keeps_zeroes())
    }

    /// The limit of a front end's buffers, for each of its chains.
    #[must_use]
    pub fn pool_bytes(&self) -> usize {
        self.pool_bytes
    }

    /// A chain for one queue.
    ///
    /// # Errors
    /// The system refuses what it needs, or the key is not usable.
    pub fn chain(&self) -> io::Result<Chain> {
        self.chain_over(self.storage().queue()?)
    }

    /// The same over other storage with the same limits as this disk's own: for tests of the data
    /// below a chain.
    ///
    /// # Errors
    /// As [`Disk::chain`].
    pub fn chain_over(&self, storage: Box<dyn Storage>) -> io::Result<Chain> {
        let chain = self.chain_from(0, self.read_only, self.pool_bytes, storage)?;
        Ok(chain.marking(self.bitmaps()))
    }

    /// A chain that only reads, even on a writable disk, for a reader beside the front end. It waits for storage without end, as no
    /// guest does. Its buffers are not part of the memory budget that was set at the start. It can be made at any time: it needs no ring.
    ///
    /// # Errors
    /// As [`Disk::chain`].
    pub fn reader(&self) -> io::Result<Chain> {
        let storage = self.storage().blocking_queue()?;
        let stack = self.stack.without(stall::KIND);
        let chain = stack.chain(0, true, READER_POOL_BYTES, &self.cipher_time, storage)?;
        Ok(chain.marking(self.bitmaps()))
    }

    /// A chain of everything below the first `count` layers, for a thread of its own. It marks no dirty bitmap.
    ///
    /// # Errors
    /// As [`Disk::chain`].
    pub fn beneath(&self, count: usize, read_only: bool) -> io::Result<Chain> {
        self.chain_from(count, read_only, COPY_POOL_BYTES, self.storage().queue()?)
    }

    /// A chain of everything below the layer of this kind, for a thread of its own that reads there.
    ///
    /// # Errors
    /// As [`Disk::chain`].
    pub fn below(&self, kind: &str) -> io::Result<Chain> {
        let layers = self.stack.layers().iter();
        let above = layers.take_while(|layer| layer.kind() != kind).count() + 1;
        self.beneath(above, true)
    }

    fn chain_from(
        &self,
        from: usize,
        read_only: bool,
        pool_bytes: usize,
        storage: Box<dyn Storage>,
    ) -> io::Result<Chain> {
        self.stack.chain(from, read_only, pool_bytes, &self.cipher_time, storage)
    }

    /// Whether zeroes in storage are zeroes to the guest.
    #[must_use]
    pub fn keeps_zeroes(&self) -> bool {
        self.stack.keeps_zeroes()
    }

    /// The file of the disk, where its holes are zeroes to the guest.
    #[must_use]
    pub fn holes(&self) -> Option<FileDisk> {
        self.file().filter(|_| self.stack.keeps_zeroes()).cloned()
    }

    /// The file that the disk is stored in, if that is a raw file or a device.
    #[must_use]
    pub fn file(&self) -> Option<&FileDisk> {
        self.storage().file()
    }

    /// Storage for one queue.
    ///
    /// # Errors
    /// As [`DiskStorage::queue`].
    pub fn queue_storage(&self) -> io::Result<Box<dyn Storage>> {
        self.storage().queue()
    }
}
