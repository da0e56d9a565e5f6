//! The image's file, as imago uses it: imago's writes, which are the image's tables, are held back until
//! [`super::commit`]; data goes straight to the file.
//!
//! Where the file system allows it, all of the file is used past the page cache, tables too, so that the two never mix. What is
//! not aligned for that goes through a buffer.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display, Formatter};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use imago::Storage;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;
use vmseal_qcow2::Layout;

use crate::stack::memory::{Cursor, Segment, Segments};
use crate::stack::request::IoError;
use crate::storage::extent::{Extent, raw_extent};
use crate::storage::file::{past_page_cache, takes_rings};
use crate::storage::statx::length_here;
use crate::storage::sync;
use crate::storage::target::FileTarget;

/// The largest alignment that direct I/O needs ([`past_page_cache`]), in bytes.
pub(super) const DIRECT_BLOCK: u64 = 4096;

/// The file of a layer; clones share it.
#[derive(Clone, Debug)]
pub(super) struct ImageFile(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) target: Arc<FileTarget>,
    /// The length of the file, as far as we made it.
    pub(super) length: AtomicU64,
    /// The end of the part of it that was ever written to.
    pub(super) used: AtomicU64,
    /// The unit of allocation, in bytes; 1 of a raw file.
    pub(super) cluster: u64,
    pub(super) order: u32,
    /// What direct I/O needs memory and offsets to be multiples of, in bytes; 1 where the page cache is used.
    pub(super) memory: u32,
    pub(super) block: u32,
    /// Whether queues move its data by their rings.
    pub(super) rings: bool,
    pub(super) tables: Mutex<Tables>,
    pub(super) helper: CommonStorageHelper,
    /// The changes of the file, in order: for tests, which interrupt it anywhere.
    #[cfg(test)]
    pub(super) events: Mutex<Vec<FileEvent>>,
    /// The number of changes after which there is no more room: for tests.
    #[cfg(test)]
    pub(super) room: std::sync::atomic::AtomicI64,
}

/// A change of the file.
#[cfg(test)]
#[derive(Clone, Debug)]
pub(super) enum FileEvent {
    Write { at: u64, bytes: Vec<u8> },
    Zero { at: u64, length: u64 },
    Length(u64),
    Sync,
}

/// Imago's writes, by number of cluster.
#[derive(Debug, Default)]
pub(super) struct Tables {
    pub(super) pending: BTreeMap<u64, Vec<u8>>,
    /// Refcount blocks as they should be; those in the file may count more.
    pub(super) blocks: BTreeMap<u64, Block>,
    /// The refcount blocks that the refcount table in the file points to, and which of its entries does.
    pub(super) reachable: BTreeMap<u64, u64>,
    /// Where the refcount table is in the file: its first cluster, and how many.
    pub(super) refcount_table: (u64, u64),
    /// Where the L1 table is, likewise. It has the disk's full length and stays where it is.
    pub(super) l1: (u64, u64),
    /// Tables that lead to data as they are in the file: of the next change only what differs is written.
    pub(super) written: BTreeMap<u64, Vec<u8>>,
    /// The clusters that tables were read from or written to since imago's caches were last emptied.
    pub(super) touched: BTreeSet<u64>,
}

#[derive(Debug)]
pub(super) struct Block {
    pub(super) exact: Vec<u8>,
    /// What the file has, where that was read or written.
    pub(super) written: Option<Vec<u8>>,
    pub(super) dirty: bool,
}

pub(super) fn within(cluster: u64, (first, count): (u64, u64)) -> bool {
    cluster >= first && cluster - first < count
}

pub(super) fn damaged(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl ImageFile {
    /// A raw file below an image. With `direct`, past the page cache if that is possible.
    pub(super) fn raw(fd: OwnedFd, direct: bool) -> io::Result<Self> {
        Self::new(fd, (1, 0), Tables::default(), direct)
    }

    /// A qcow2 image.
    pub(super) fn qcow2(fd: OwnedFd, layout: &Layout, direct: bool) -> io::Result<Self> {
        let cluster = layout.header.cluster_size;
        let tables = Tables {
            refcount_table: (layout.refcount_offset / cluster, layout.refcount_clusters.into()),
            l1: (layout.l1_offset / cluster, (u64::from(layout.l1_entries) * 8).div_ceil(cluster)),
            ..Tables::default()
        };
        // The end of the disk is the end of a request.
        let direct = direct && layout.header.size.is_multiple_of(DIRECT_BLOCK);
        Self::new(fd, (cluster, layout.refcount_order), tables, direct)
    }

    fn new(
        fd: OwnedFd,
        (cluster, order): (u64, u32),
        tables: Tables,
        direct: bool,
    ) -> io::Result<Self> {
        let length = u64::try_from(nix::unistd::lseek(&fd, 0, nix::unistd::Whence::SeekEnd)?);
        let (length, tables) = (length.unwrap_or(0), tables.into());
        let (length, used) = (AtomicU64::new(length), AtomicU64::new(length));
        let (rings, clusters) = (takes_rings(&fd)?, cluster == 1 || cluster >= DIRECT_BLOCK);
        // Where rings are no use the page cache is: the pages are in memory, or a process has them.
        let alignment = if direct && clusters && rings { past_page_cache(&fd) } else { None };
        let (memory, block) = alignment.unwrap_or((1, 1));
        let direct = alignment.is_some();
        let target = Arc::new(FileTarget { direct, ..FileTarget::whole(fd) });
        let helper = CommonStorageHelper::default();
        Ok(Self(Arc::new(Inner {
            target,
            length,
            used,
            cluster,
            order,
            memory,
            block,
            rings,
            tables,
            helper,
            #[cfg(test)]
            events: Mutex::default(),
            #[cfg(test)]
            room: i64::MAX.into(),
        })))
    }

    /// The file, for those who move data themselves.
    pub(super) fn target(&self) -> &Arc<FileTarget> {
        &self.0.target
    }

    /// The alignment that requests to it need, of memory and of offsets.
    pub(super) fn alignment(&self) -> (u32, u32) {
        (self.0.memory, self.0.block)
    }

    /// The number of its descriptor.
    pub(super) fn number(&self) -> RawFd {
        self.0.target.fd.as_raw_fd()
    }

    /// Whether queues move its data by their rings.
    pub(super) fn takes_rings(&self) -> bool {
        self.0.rings
    }

    /// Whether both are the same file.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether it is a raw file: its holes are zeroes.
    pub(super) fn is_raw(&self) -> bool {
        self.0.cluster == 1
    }

    /// The hole or the data at `at` of a raw file, which is below `end`, up to `end` at most.
    ///
    /// # Errors
    /// As [`raw_extent`].
    pub(super) fn extent(&self, at: u64, end: u64) -> io::Result<Extent> {
        raw_extent(&self.0.target.fd, at, end)
    }

    /// How long the file is, in bytes.
    pub(super) fn length(&self) -> u64 {
        self.0.length.load(Ordering::Relaxed)
    }

    /// Whether the file is still as long as we made it: do not recreate a truncated part.
    pub(super) fn intact(&self) -> Result<(), IoError> {
        let target = &self.0.target;
        let has = length_here(&target.fd).map_err(|error| target.error(error as i32))?;
        if has < self.length() { Err(IoError::Truncated) } else { Ok(()) }
    }

    /// Reads data. Clusters beyond the end of the file are missing, and not zeroes; only the
    /// tail of the last one may have been left out by the writer.
    pub(super) fn read_data(&self, data: &Segments, at: u64) -> Result<(), IoError> {
        let (length, bytes) = (self.length(), data.bytes() as u64);
        let end = at.checked_add(bytes).ok_or(IoError::Truncated)?;
        if end > length.next_multiple_of(self.0.cluster) {
            return Err(IoError::Truncated);
        }
        let there = length.saturating_sub(at).min(bytes) as usize;
        let mut cursor = Cursor::default();
        if there == data.bytes() {
            return self.transfer(false, data, at);
        }
        let mut part = Segments::default();
        part.push_from(data, &mut cursor, there);
        self.transfer(false, &part, at)?;
        while let Some(rest) = cursor.next(data, usize::MAX) {
            rest.clear();
        }
        Ok(())
    }

    /// Writes data.
    pub(super) fn write_data(&self, data: &Segments, at: u64) -> Result<(), IoError> {
        self.before_data(at, data.bytes() as u64)?;
        self.transfer(true, data, at)?;
        self.grown(at + data.bytes() as u64);
        Ok(())
    }

    /// Takes room in the file for data that comes later; false if there is none, or the file system does not do that.
    pub(super) fn take_room_ahead(&self, at: u64, length: u64) -> bool {
        sync::allocate(&self.0.target, at, length)
    }

    /// Makes data zeroes.
    pub(super) fn zero_data(&self, at: u64, length: u64, unmap: bool) -> Result<(), IoError> {
        self.before_data(at, length)?;
        // Neither way extends the file, and everything beyond its end is zero.
        let there = self.length().saturating_sub(at).min(length);
        if there == 0 {
            return Ok(());
        }
        #[cfg(test)]
        self.note(FileEvent::Zero { at, length: there });
        sync::zero(&self.0.target, at, there, unmap)
    }

    /// Gives back the space of data, if the file system can.
    pub(super) fn discard_data(&self, at: u64, length: u64) -> Result<(), IoError> {
        self.before_data(at, length)?;
        #[cfg(test)]
        self.note(FileEvent::Zero { at, length: length.min(self.length().saturating_sub(at)) });
        sync::discard(&self.0.target, at, length)
    }

    /// Makes the file durable.
    pub(super) fn sync_file(&self) -> Result<(), IoError> {
        #[cfg(test)]
        self.note(FileEvent::Sync);
        sync::flush(&self.0.target)
    }

    #[cfg(test)]
    pub(super) fn note(&self, event: FileEvent) {
        self.0.events.lock().unwrap().push(event);
    }

    /// Whether a test has limited its room.
    #[cfg(test)]
    pub(super) fn has_little_room(&self) -> bool {
        self.0.room.load(Ordering::Relaxed) != i64::MAX
    }

    /// Counts a change of the file against its room.
    #[cfg(test)]
    fn take_room(&self) -> Result<(), IoError> {
        let left = self.0.room.fetch_sub(1, Ordering::Relaxed);
        if left > 0 { Ok(()) } else { Err(IoError::NoSpace) }
    }

    /// The changes of the file since the last call.
    #[cfg(test)]
    pub(super) fn events(&self) -> Vec<FileEvent> {
        std::mem::take(&mut self.0.events.lock().unwrap())
    }

    /// Whether these bytes are in the part of the file that was written to: the rest may be cut off at the end.
    pub(super) fn holds(&self, at: u64, length: u64) -> bool {
        at + length <= self.0.used.load(Ordering::Relaxed)
    }

    /// Whether written data may be lost for good.
    pub(super) fn is_lost(&self) -> bool {
        self.0.target.is_lost()
    }

    /// How much is held back, in bytes.
    pub(super) fn held_back(&self) -> usize {
        self.tables().pending.len() * self.0.cluster as usize
    }

    /// An upper bound of the tables in imago's caches, in bytes.
    pub(super) fn touched(&self) -> u64 {
        self.tables().touched.len() as u64 * self.0.cluster
    }

    /// Imago's caches are empty now.
    pub(super) fn forget_touched(&self) {
        let mut tables = self.tables();
        tables.touched.clear();
        tables.written.clear();
    }

    /// Whether the header must be written: the refcount table has moved.
    pub(super) fn moved(&self) -> bool {
        self.tables().pending.contains_key(&0)
    }

    pub(super) fn tables(&self) -> MutexGuard<'_, Tables> {
        self.0.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn transfer(&self, write: bool, data: &Segments, at: u64) -> Result<(), IoError> {
        if data.bytes() == 0 {
            return Ok(());
        }
        #[cfg(test)]
        if write {
            self.take_room()?;
            let mut bytes = vec![0; data.bytes()];
            Cursor::default().gather(data, &mut bytes);
            self.note(FileEvent::Write { at, bytes });
        }
        if !self.suits(data, at) {
            return self.through_buffer(write, data, at);
        }
        let mut rest = Segments::default();
        let mut done = sync::once(&self.0.target, write, at, data.as_slice())?;
        while done < data.bytes() {
            let mut cursor = Cursor::default();
            cursor.skip(data, done);
            rest.clear();
            rest.push_from(data, &mut cursor, data.bytes() - done);
            done += sync::once(&self.0.target, write, at + done as u64, rest.as_slice())?;
        }
        Ok(())
    }

    /// Whether the file takes this memory at this place.
    pub(super) fn suits(&self, data: &Segments, at: u64) -> bool {
        let Inner { memory, block, .. } = *self.0;
        block == 1
            || (at | data.bytes() as u64).is_multiple_of(block.into())
                && data.aligned_to(memory as usize)
    }

    /// Moves data that is not aligned for direct I/O.
    fn through_buffer(&self, write: bool, data: &Segments, at: u64) -> Result<(), IoError> {
        let block = u64::from(self.0.block);
        let (first, end) = (at / block * block, (at + data.bytes() as u64).next_multiple_of(block));
        let inside = (at - first) as usize;
        if write && end - first != data.bytes() as u64 {
            // Tables are written in whole clusters, and data in whole blocks.
            return Err(IoError::Device(libc::EINVAL));
        }
        let mut buffer = AlignedBuffer::new((end - first) as usize);
        if write {
            Cursor::default().gather(data, buffer.bytes());
        }
        let aligned = buffer.segments();
        let mut done = 0;
        // The file may end within the last block.
        while done < inside + data.bytes() {
            let rest = aligned.as_slice()[0].part(done, usize::MAX);
            done += sync::once(&self.0.target, write, first + done as u64, &[rest])?;
        }
        if !write {
            let bytes = &buffer.bytes()[inside..inside + data.bytes()];
            Cursor::default().scatter(data, bytes);
        }
        Ok(())
    }

    pub(super) fn grown(&self, end: u64) {
        self.0.used.fetch_max(end, Ordering::Relaxed);
        self.0.length.fetch_max(end, Ordering::Relaxed);
    }

    /// imago fills the part of a new cluster that a write does not cover. Nothing points to that cluster yet, so
    /// its held-back part goes to the file before the data does.
    pub(super) fn before_data(&self, at: u64, length: u64) -> Result<(), IoError> {
        let mut tables = self.tables();
        let (first, end) = (at / self.0.cluster, (at + length).div_ceil(self.0.cluster));
        // Whatever was a table there is none any more.
        while let Some((&number, _)) = tables.written.range(first..end).next() {
            tables.written.remove(&number);
        }
        if tables.pending.is_empty() {
            return Ok(());
        }
        let copied: Vec<u64> =
            tables.pending.range(first..end).map(|(&number, _)| number).collect();
        for number in copied {
            self.put(number, &tables.pending[&number])?;
            tables.pending.remove(&number);
        }
        Ok(())
    }

    pub(super) fn put(&self, number: u64, content: &[u8]) -> Result<(), IoError> {
        self.put_part(number, 0, content)
    }

    /// Writes a part of a cluster, from `start` on.
    pub(super) fn put_part(
        &self,
        number: u64,
        start: usize,
        content: &[u8],
    ) -> Result<(), IoError> {
        let mut data = Segments::default();
        // SAFETY: `content` outlives the call, and writing it to a file only reads it.
        data.push(unsafe { Segment::new(content.as_ptr().cast_mut(), content.len()) });
        let at = number * self.0.cluster + start as u64;
        self.transfer(true, &data, at)?;
        self.grown(at + content.len() as u64);
        Ok(())
    }

    /// The content of the file; zeroes after its end.
    pub(super) fn fetch(&self, bytes: &mut [u8], at: u64) -> Result<(), IoError> {
        let there = self.length().saturating_sub(at).min(bytes.len() as u64) as usize;
        let (present, beyond) = bytes.split_at_mut(there);
        beyond.fill(0);
        if there == 0 {
            return Ok(());
        }
        let mut data = Segments::default();
        // SAFETY: `present` outlives the call and is not used otherwise during it.
        data.push(unsafe { Segment::new(present.as_mut_ptr(), present.len()) });
        self.transfer(false, &data, at)
    }

    pub(super) fn cluster(&self, number: u64) -> Result<Vec<u8>, IoError> {
        let mut content = vec![0; self.0.cluster as usize];
        self.fetch(&mut content, number * self.0.cluster)?;
        Ok(content)
    }

    fn read_tables(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        let mut tables = self.tables();
        let (cluster, end) = (self.0.cluster, at.saturating_add(bytes.len() as u64));
        let (first, last) = (at / cluster, end.div_ceil(cluster));
        let held = |tables: &Tables, number| {
            tables.pending.contains_key(&number) || tables.blocks.contains_key(&number)
        };
        if !bytes.is_empty() && at >= self.length() && !held(&tables, first) {
            return Err(damaged("a table or a compressed cluster lies beyond the end of the file"));
        }
        if bytes.len() as u64 == cluster && at.is_multiple_of(cluster) {
            tables.touched.insert(first);
        }
        self.fetch(bytes, at).map_err(io_error)?;
        for number in first..last {
            let block = tables.blocks.get(&number).map(|block| &block.exact);
            if let Some(content) = block.or_else(|| tables.pending.get(&number)) {
                let start = number * cluster;
                let (from, to) = (start.max(at), (start + cluster).min(end));
                let part = &content[(from - start) as usize..(to - start) as usize];
                bytes[(from - at) as usize..(to - at) as usize].copy_from_slice(part);
            }
        }
        Ok(())
    }

    fn write_tables(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let mut guard = self.tables();
        let tables = &mut *guard;
        let (cluster, end) = (self.0.cluster, at.saturating_add(bytes.len() as u64));
        for number in at / cluster..end.div_ceil(cluster) {
            let start = number * cluster;
            let (from, to) = (start.max(at), (start + cluster).min(end));
            let part = &bytes[(from - at) as usize..(to - at) as usize];
            // After a failed commit there may be blocks that nothing points to yet.
            let block =
                tables.reachable.contains_key(&number) || tables.blocks.contains_key(&number);
            let now = |whole: bool| match whole {
                true => Ok(vec![0; cluster as usize]),
                false => self.cluster(number).map_err(io_error),
            };
            let whole = part.len() as u64 == cluster;
            if !block && !tables.pending.contains_key(&number) {
                tables.pending.insert(number, now(whole)?);
            }
            if block && !tables.blocks.contains_key(&number) {
                let exact = now(whole)?;
                tables.blocks.insert(number, Block { exact, written: None, dirty: true });
            }
            let content = match tables.blocks.get_mut(&number) {
                Some(block) => {
                    block.dirty = true;
                    Some(&mut block.exact)
                }
                None => tables.pending.get_mut(&number),
            };
            if let Some(content) = content {
                content[(from - start) as usize..(to - start) as usize].copy_from_slice(part);
            }
            tables.touched.insert(number);
        }
        Ok(())
    }
}

/// Memory that direct I/O takes.
#[derive(Debug, Default)]
pub(super) struct AlignedBuffer {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl AlignedBuffer {
    /// So many zeroes.
    pub(super) fn new(length: usize) -> Self {
        let memory = vec![0; length + DIRECT_BLOCK as usize];
        let start = memory.as_ptr().align_offset(DIRECT_BLOCK as usize);
        Self { memory, start, length }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.length]
    }

    /// All of it, as one segment. It is not used otherwise while that is in use.
    pub(super) fn segments(&mut self) -> Segments {
        let mut all = Segments::default();
        let bytes = self.bytes();
        // SAFETY: the memory stays where it is until the buffer is dropped, which callers do after the transfer.
        all.push(unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) });
        all
    }
}

/// The error that imago gets.
pub(super) fn io_error(error: IoError) -> io::Error {
    match error {
        IoError::Device(errno) => io::Error::from_raw_os_error(errno),
        IoError::NoSpace => io::Error::from_raw_os_error(libc::ENOSPC),
        other => io::Error::other(other),
    }
}

impl Storage for ImageFile {
    fn size(&self) -> io::Result<u64> {
        Ok(self.length())
    }

    unsafe fn pure_readv(&self, mut bufv: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        let mut bytes = vec![0; bufv.len() as usize];
        self.read_tables(&mut bytes, offset)?;
        bufv.copy_from_slice(&bytes);
        Ok(())
    }

    unsafe fn pure_writev(&self, bufv: IoVector<'_>, offset: u64) -> io::Result<()> {
        let mut bytes = vec![0; bufv.len() as usize];
        bufv.copy_into_slice(&mut bytes);
        self.write_tables(&bytes, offset)
    }

    /// Used only for the part of a new cluster that a write does not cover.
    unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.zero_data(offset, length, true).map_err(io_error)
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.0.helper
    }
}

impl Display for ImageFile {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "descriptor of {} bytes", self.length())
    }
}
