//! The file of an image, as imago sees it: what imago writes, the tables of the image, is held back, and
//! goes to the file in an order in which the file can be cut off at any write, by the death of the process
//! or of the machine, and is a sound image.
//!
//! ```text
//!  imago ── writes tables ──> pending, blocks        data: straight to the file
//!                                   │ commit
//!  1  refcount blocks, only raised, and the length of the
//!     file with them; a new refcount table                 ── sync, if there were any
//!  2  what leads to new refcount blocks                     ── sync, if there was any
//!  3  L2 tables                                             ── sync, if 4 has any
//!  4  L1 table, header
//!
//!  release: refcount blocks as they are (nothing needs the ones that were only reserved any more)
//! ```
//! So a cluster that something leads to is always counted, whatever is lost: the worst are clusters that
//! are counted and not used (leaks). Raising counts some clusters ahead, so that most commits are a write
//! of an L2 table and no sync.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display, Formatter};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use imago::Storage;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;
use nix::sys::stat::fstat;
use vmseal_qcow2::Layout;

use super::refcounts;
use crate::backend::file::Target;
use crate::backend::sync;
use crate::memory::{Cursor, Segment, Segments};
use crate::request::IoError;

/// How much of the file is counted ahead, in bytes: what a filter that is killed leaves as leaks at most.
const RESERVE_BYTES: u64 = 16 << 20;

/// And at least so many clusters.
const RESERVE_MIN: usize = 16;

/// What exact refcount blocks may take, in bytes, before they are released: at 64 KiB a cluster, those of
/// 64 GiB.
const BLOCKS_BYTES_MAX: usize = 2 << 20;

/// Where the L1 and refcount tables point, without flags.
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

/// The file of a layer; clones are the same file.
#[derive(Clone, Debug)]
pub(super) struct ImageFile(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    target: Target,
    /// How long the file is, as far as we made it so.
    length: AtomicU64,
    /// How much of it anything was ever written to.
    used: AtomicU64,
    /// The unit of allocation, in bytes; 1 of a raw file.
    cluster: u64,
    order: u32,
    tables: Mutex<Tables>,
    helper: CommonStorageHelper,
    /// What became of the file, in its order: for tests, which cut it off anywhere.
    #[cfg(test)]
    events: Mutex<Vec<Event>>,
}

/// Something that was done to the file.
#[cfg(test)]
#[derive(Clone, Debug)]
pub(super) enum Event {
    Write { at: u64, bytes: Vec<u8> },
    Zero { at: u64, length: u64 },
    Length(u64),
    Sync,
}

/// What imago wrote, by number of cluster.
#[derive(Debug, Default)]
struct Tables {
    pending: BTreeMap<u64, Vec<u8>>,
    /// Refcount blocks as they should be; in the file they may count more.
    blocks: BTreeMap<u64, Block>,
    /// The refcount blocks that the refcount table in the file leads to, and which of its entries does.
    reachable: BTreeMap<u64, u64>,
    /// Where the refcount table is in the file: its first cluster, and how many.
    refcount_table: (u64, u64),
    /// Where the L1 table is, likewise. It has the disk's full length and stays where it is.
    l1: (u64, u64),
    /// The clusters that tables were read from or written to since imago's caches were empty.
    touched: BTreeSet<u64>,
}

#[derive(Debug)]
struct Block {
    exact: Vec<u8>,
    dirty: bool,
}

fn within(cluster: u64, (first, count): (u64, u64)) -> bool {
    cluster >= first && cluster - first < count
}

fn damaged(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl ImageFile {
    /// A raw file below an image.
    pub(super) fn raw(fd: OwnedFd) -> io::Result<Self> {
        Self::new(fd, 1, 0, Tables::default())
    }

    /// A qcow2 image.
    pub(super) fn qcow2(fd: OwnedFd, layout: &Layout) -> io::Result<Self> {
        let cluster = layout.header.cluster_size;
        let tables = Tables {
            refcount_table: (layout.refcount_offset / cluster, layout.refcount_clusters.into()),
            l1: (layout.l1_offset / cluster, (u64::from(layout.l1_entries) * 8).div_ceil(cluster)),
            ..Tables::default()
        };
        Self::new(fd, cluster, layout.refcount_order, tables)
    }

    fn new(fd: OwnedFd, cluster: u64, order: u32, tables: Tables) -> io::Result<Self> {
        let length = u64::try_from(nix::unistd::lseek(&fd, 0, nix::unistd::Whence::SeekEnd)?);
        let (length, tables) = (length.unwrap_or(0), tables.into());
        let (length, used) = (AtomicU64::new(length), AtomicU64::new(length));
        let (target, helper) = (Target::whole(fd), CommonStorageHelper::default());
        Ok(Self(Arc::new(Inner {
            target,
            length,
            used,
            cluster,
            order,
            tables,
            helper,
            #[cfg(test)]
            events: Mutex::default(),
        })))
    }

    /// Whether both are the same file.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// How long the file is, in bytes.
    pub(super) fn length(&self) -> u64 {
        self.0.length.load(Ordering::Relaxed)
    }

    /// Whether the file is still as long as we made it: what is cut off is not to be made anew.
    pub(super) fn intact(&self) -> Result<(), IoError> {
        let stat = fstat(&self.0.target.fd).map_err(|error| IoError::from_errno(error as i32))?;
        let short = u64::try_from(stat.st_size).unwrap_or(0) < self.length();
        if short { Err(IoError::Truncated) } else { Ok(()) }
    }

    /// Reads data. What lies in clusters beyond the end of the file is missing, and not zeroes; only the
    /// tail of the last one may be left out by whoever wrote it.
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
        self.settle(at, data.bytes() as u64)?;
        self.transfer(true, data, at)?;
        self.grown(at + data.bytes() as u64);
        Ok(())
    }

    /// Makes data zeroes.
    pub(super) fn zero_data(&self, at: u64, length: u64, unmap: bool) -> Result<(), IoError> {
        self.settle(at, length)?;
        // Neither way makes the file longer, and what is behind its end is zero.
        let there = self.length().saturating_sub(at).min(length);
        if there == 0 {
            return Ok(());
        }
        #[cfg(test)]
        self.note(Event::Zero { at, length: there });
        sync::zero(&self.0.target, at, there, unmap)
    }

    /// Gives the room of data back, if the file system can.
    pub(super) fn discard_data(&self, at: u64, length: u64) -> Result<(), IoError> {
        self.settle(at, length)?;
        #[cfg(test)]
        self.note(Event::Zero { at, length: length.min(self.length().saturating_sub(at)) });
        sync::discard(&self.0.target, at, length)
    }

    /// Makes durable what is in the file.
    pub(super) fn sync_file(&self) -> Result<(), IoError> {
        #[cfg(test)]
        self.note(Event::Sync);
        sync::flush(&self.0.target)
    }

    #[cfg(test)]
    fn note(&self, event: Event) {
        self.0.events.lock().unwrap().push(event);
    }

    /// What became of the file since this was asked last.
    #[cfg(test)]
    pub(super) fn events(&self) -> Vec<Event> {
        std::mem::take(&mut self.0.events.lock().unwrap())
    }

    /// Whether something written may be lost for good.
    pub(super) fn is_lost(&self) -> bool {
        self.0.target.is_lost()
    }

    /// How much is held back, in bytes.
    pub(super) fn held_back(&self) -> usize {
        self.tables().pending.len() * self.0.cluster as usize
    }

    /// How much imago may have of tables in its caches, in bytes.
    pub(super) fn touched(&self) -> u64 {
        self.tables().touched.len() as u64 * self.0.cluster
    }

    /// Its caches are empty.
    pub(super) fn forget_touched(&self) {
        self.tables().touched.clear();
    }

    /// Whether the header is to be written: the refcount table has moved.
    pub(super) fn moved(&self) -> bool {
        self.tables().pending.contains_key(&0)
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.0.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn transfer(&self, write: bool, data: &Segments, at: u64) -> Result<(), IoError> {
        if data.bytes() == 0 {
            return Ok(());
        }
        #[cfg(test)]
        if write {
            let mut bytes = vec![0; data.bytes()];
            Cursor::default().gather(data, &mut bytes);
            self.note(Event::Write { at, bytes });
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

    fn grown(&self, end: u64) {
        self.0.used.fetch_max(end, Ordering::Relaxed);
        self.0.length.fetch_max(end, Ordering::Relaxed);
    }

    /// imago copies into a new cluster what a write does not cover. Nothing leads to that cluster yet, so
    /// what is held back of it goes to the file before the data does.
    fn settle(&self, at: u64, length: u64) -> Result<(), IoError> {
        let mut tables = self.tables();
        if tables.pending.is_empty() {
            return Ok(());
        }
        let (first, end) = (at / self.0.cluster, (at + length).div_ceil(self.0.cluster));
        let copied: Vec<u64> =
            tables.pending.range(first..end).map(|(&number, _)| number).collect();
        for number in copied {
            if let Some(content) = tables.pending.remove(&number) {
                self.put(number, &content)?;
            }
        }
        Ok(())
    }

    fn put(&self, number: u64, content: &[u8]) -> Result<(), IoError> {
        let mut data = Segments::default();
        // SAFETY: `content` outlives the call, and writing it to a file only reads it.
        data.push(unsafe { Segment::new(content.as_ptr().cast_mut(), content.len()) });
        let at = number * self.0.cluster;
        self.transfer(true, &data, at)?;
        self.grown(at + content.len() as u64);
        Ok(())
    }

    /// What the file has; zeroes behind its end.
    fn fetch(&self, bytes: &mut [u8], at: u64) -> Result<(), IoError> {
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

    fn cluster(&self, number: u64) -> Result<Vec<u8>, IoError> {
        let mut content = vec![0; self.0.cluster as usize];
        self.fetch(&mut content, number * self.0.cluster)?;
        Ok(content)
    }

    /// Brings what imago wrote to the file; see the module. With `durable`, the data that was written
    /// before is durable before anything leads to it.
    pub(super) fn commit(&self, durable: bool) -> Result<(), IoError> {
        let tables = &mut *self.tables();
        let old = tables.refcount_table;
        let table = match tables.pending.get(&0) {
            Some(header) => refcount_table_of(header, self.0.cluster),
            None => old,
        };
        let numbers = tables.pending.keys().copied();
        let counting: Vec<u64> =
            numbers.filter(|&number| within(number, old) || within(number, table)).collect();
        let unchanged = counting.is_empty() && table == old;
        let reachable = if unchanged { None } else { Some(self.blocks_of(tables, table)?) };
        let known = reachable.as_ref().unwrap_or(&tables.reachable);
        let blocks: Vec<u64> =
            tables.pending.keys().copied().filter(|number| known.contains_key(number)).collect();
        for number in blocks {
            if let Some(exact) = tables.pending.remove(&number) {
                tables.blocks.insert(number, Block { exact, dirty: true });
            }
        }
        let mut wrote = self.raise(tables, known)? || durable;
        for &number in counting.iter().filter(|&&number| table != old && within(number, table)) {
            self.put(number, &tables.pending[&number])?;
            wrote = true;
        }
        if wrote {
            self.sync_file()?;
        }
        if let Some(reachable) = reachable {
            let leads = if table == old { &counting[..] } else { &[0] };
            for number in leads {
                self.put(*number, &tables.pending[number])?;
            }
            self.sync_file()?;
            leads.iter().chain(&counting).for_each(|number| drop(tables.pending.remove(number)));
            (tables.reachable, tables.refcount_table) = (reachable, table);
        }
        tables.blocks.values_mut().for_each(|block| block.dirty = false);
        self.commit_maps(tables)?;
        if tables.blocks.len() * self.0.cluster as usize > BLOCKS_BYTES_MAX {
            self.release_blocks(tables)?;
        }
        Ok(())
    }

    /// The L2 tables, and then what leads to them.
    fn commit_maps(&self, tables: &mut Tables) -> Result<(), IoError> {
        let l1 = tables.l1;
        let (last, maps): (Vec<u64>, Vec<u64>) =
            tables.pending.keys().partition(|&&number| number == 0 || within(number, l1));
        for number in &maps {
            self.put(*number, &tables.pending[number])?;
        }
        if !last.is_empty() {
            self.sync_file()?;
        }
        for number in &last {
            self.put(*number, &tables.pending[number])?;
        }
        tables.pending.clear();
        Ok(())
    }

    /// Raises refcounts in the file to what they should be; whether any were too low.
    fn raise(&self, tables: &Tables, known: &BTreeMap<u64, u64>) -> Result<bool, IoError> {
        let per_block = refcounts::count(self.0.cluster as usize, self.0.order) as u64;
        let reserve = ((RESERVE_BYTES / self.0.cluster) as usize).max(RESERVE_MIN);
        let mut wrote = false;
        for (&number, block) in tables.blocks.iter().filter(|(_, block)| block.dirty) {
            // Nothing leads to a new one: whatever is there counts nothing.
            let new = !tables.reachable.contains_key(&number);
            let disk = if new { vec![0; block.exact.len()] } else { self.cluster(number)? };
            let raised = refcounts::raised(&disk, &block.exact, self.0.order, reserve);
            if let Some((content, end)) = raised.or_else(|| new.then_some((disk, 0))) {
                self.put(number, &content)?;
                // Nothing may lead behind the end of the file, whatever becomes of the data there.
                let before = known.get(&number).map_or(0, |index| index * per_block);
                self.lengthen((before + end as u64) * self.0.cluster)?;
                wrote = true;
            }
        }
        Ok(wrote)
    }

    fn lengthen(&self, to: u64) -> Result<(), IoError> {
        if to <= self.length() {
            return Ok(());
        }
        #[cfg(test)]
        self.note(Event::Length(to));
        self.set_length(to)
    }

    fn set_length(&self, to: u64) -> Result<(), IoError> {
        let set = i64::try_from(to).map(|to| nix::unistd::ftruncate(&self.0.target.fd, to));
        set.map_err(|_| IoError::NoSpace)?.map_err(|error| IoError::from_errno(error as i32))?;
        self.0.length.store(to, Ordering::Relaxed);
        Ok(())
    }

    /// Cuts off what was never written to, when nothing is reserved any more.
    pub(super) fn shorten(&self) -> Result<(), IoError> {
        let used = self.0.used.load(Ordering::Relaxed);
        #[cfg(test)]
        self.note(Event::Length(used));
        self.set_length(used)
    }

    /// Writes refcounts as they are. What nothing leads to any more is durably so.
    pub(super) fn release(&self) -> Result<(), IoError> {
        let mut tables = self.tables();
        self.release_blocks(&mut tables)
    }

    fn release_blocks(&self, tables: &mut Tables) -> Result<(), IoError> {
        for (&number, block) in &tables.blocks {
            if self.cluster(number)? != block.exact {
                self.put(number, &block.exact)?;
            }
        }
        tables.blocks.clear();
        Ok(())
    }

    /// The clusters of refcount blocks that a refcount table leads to, as imago sees it.
    fn blocks_of(&self, tables: &Tables, table: (u64, u64)) -> Result<BTreeMap<u64, u64>, IoError> {
        let (mut blocks, mut index) = (BTreeMap::new(), 0);
        for number in table.0..table.0.saturating_add(table.1) {
            let content = match tables.pending.get(&number) {
                Some(content) => content,
                None => &self.cluster(number)?,
            };
            for &entry in content.as_chunks().0 {
                let at = u64::from_be_bytes(entry);
                if at != 0 {
                    blocks.insert(at / self.0.cluster, index);
                }
                index += 1;
            }
        }
        Ok(blocks)
    }

    /// Looks at the tables of an image that is to be written: each is in the file, in a place of its own,
    /// and is counted, so that nothing is ever put over it.
    pub(super) fn check(&self, layout: &Layout) -> io::Result<()> {
        let mut tables = self.tables();
        let table = tables.refcount_table;
        let counting = self.entries(layout.refcount_offset, table.1 * self.0.cluster / 8)?;
        let maps = self.entries(layout.l1_offset, layout.l1_entries.into())?;
        let offsets = counting.iter().chain(&maps).copied();
        let mut all = Vec::from([0]);
        for at in offsets.filter(|&at| at != 0) {
            if !at.is_multiple_of(self.0.cluster) {
                return Err(damaged("a table does not begin at a cluster"));
            }
            all.push(at / self.0.cluster);
        }
        all.extend((tables.l1.0..tables.l1.0 + tables.l1.1).chain(table.0..table.0 + table.1));
        all.sort_unstable();
        let last = all.last().copied().unwrap_or_default();
        if last.saturating_mul(self.0.cluster) >= self.length() {
            return Err(damaged("a table lies beyond the end of the file"));
        }
        let per_block = refcounts::count(self.0.cluster as usize, self.0.order) as u64;
        let mut block: Option<(u64, Vec<u8>)> = None;
        for (place, &number) in all.iter().enumerate() {
            if place > 0 && all[place - 1] == number {
                return Err(damaged("two of its tables lie over each other"));
            }
            let index = number / per_block;
            if block.as_ref().is_none_or(|(loaded, _)| *loaded != index) {
                let at = counting.get(index as usize).copied().filter(|&at| at != 0);
                let at = at.ok_or_else(|| damaged("a table is not counted"))?;
                let content = self.cluster(at / self.0.cluster).map_err(io_error)?;
                block = Some((index, content));
            }
            let (_, content) = block.as_ref().ok_or_else(|| damaged("a table is not counted"))?;
            if refcounts::get(content, self.0.order, (number % per_block) as usize) == 0 {
                return Err(damaged("a table is not counted"));
            }
        }
        let blocks = counting.iter().zip(0..).filter(|&(&at, _)| at != 0);
        tables.reachable = blocks.map(|(at, index)| (at / self.0.cluster, index)).collect();
        Ok(())
    }

    /// Offsets in a table of 8-byte entries.
    fn entries(&self, at: u64, count: u64) -> io::Result<Vec<u64>> {
        let mut bytes = vec![0; count as usize * 8];
        self.fetch(&mut bytes, at).map_err(io_error)?;
        let entries = bytes.as_chunks().0.iter();
        Ok(entries.map(|&entry| u64::from_be_bytes(entry) & OFFSET_MASK).collect())
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
            let block = tables.reachable.contains_key(&number);
            if !block && !tables.pending.contains_key(&number) {
                tables.pending.insert(number, self.cluster(number).map_err(io_error)?);
            }
            if block && !tables.blocks.contains_key(&number) {
                let exact = self.cluster(number).map_err(io_error)?;
                tables.blocks.insert(number, Block { exact, dirty: true });
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

/// Where a header says that the refcount table is: its first cluster, and how many.
fn refcount_table_of(header: &[u8], cluster: u64) -> (u64, u64) {
    let offset = header[48..].first_chunk().map_or(0, |&field| u64::from_be_bytes(field));
    let clusters = header[56..].first_chunk().map_or(0, |&field| u32::from_be_bytes(field));
    (offset / cluster, clusters.into())
}

/// What imago is told of an error.
fn io_error(error: IoError) -> io::Error {
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

    /// Only for the part of a new cluster that a write does not cover.
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
