//! Writes the held-back tables to the file, in such an order that the file is a sound image if the process or
//! the machine dies at any write.
//!
//! ```text
//!  imago ── writes tables ──> pending, blocks        data: straight to the file
//!                                   │ commit
//!  1  refcount blocks, only raised, and the length of the
//!     file with them; a new refcount table; new L2 tables  ── sync, if there were any
//!  2  what points to new refcount blocks                    ── sync, if there was any
//!  3  other L2 tables                                       ── sync, if 4 has a header
//!  4  L1 table, header
//!
//!  release: refcount blocks as they are (reserved clusters are no longer needed)
//! ```
//! So a cluster that something points to is always counted, whatever is lost: the worst case is clusters that
//! are counted and not used (leaks). Raising counts some clusters ahead, so that most commits are a write
//! of an L2 table and no sync.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use super::check::OFFSET_MASK;
use super::refcounts;
#[cfg(test)]
use super::storage::FileEvent;
use super::storage::{Block, ImageFile, Tables, within};
use crate::stack::request::IoError;

/// How much of the file is counted ahead, in bytes: the most that a killed filter leaves as leaks.
const RESERVE_BYTES: u64 = 16 << 20;

/// And at least this many clusters.
const RESERVE_MIN: usize = 16;

/// The unit in which changed tables are written, in bytes: that of direct I/O.
const WRITTEN_UNIT: usize = 4096;

/// The limit for tables that are kept as they are in the file, in bytes: at 64 KiB a cluster, those of 16 GiB.
const WRITTEN_MAX: usize = 2 << 20;

/// The limit for exact refcount blocks, in bytes, before they are released: at 64 KiB a cluster, those of
/// 64 GiB.
const BLOCKS_BYTES_MAX: usize = 2 << 20;

impl ImageFile {
    /// Writes imago's tables to the file; see the module. With `durable`, the data that was written
    /// before is durable before anything points to it.
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
                tables.blocks.insert(number, Block { exact, written: None, dirty: true });
            }
        }
        let mut wrote = self.raise(tables, reachable.as_ref())? || durable;
        for &number in counting.iter().filter(|&&number| table != old && within(number, table)) {
            self.put(number, &tables.pending[&number])?;
            wrote = true;
        }
        let new = self.new_maps(tables)?;
        for &number in &new {
            self.put_changed(number, tables)?;
            wrote = true;
        }
        if wrote {
            self.sync_file()?;
        }
        new.iter().for_each(|number| drop(tables.pending.remove(number)));
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

    /// The L2 tables, and then the tables that point to them.
    fn commit_maps(&self, tables: &mut Tables) -> Result<(), IoError> {
        let l1 = tables.l1;
        let (last, maps): (Vec<u64>, Vec<u64>) =
            tables.pending.keys().partition(|&&number| number == 0 || within(number, l1));
        for number in &maps {
            self.put_changed(*number, tables)?;
        }
        if tables.pending.contains_key(&0) {
            self.sync_file()?;
        }
        for number in &last {
            self.put(*number, &tables.pending[number])?;
        }
        tables.pending.clear();
        Ok(())
    }

    /// The L2 tables that nothing in the file points to yet, but the L1 table will.
    fn new_maps(&self, tables: &Tables) -> Result<Vec<u64>, IoError> {
        let mut new = Vec::new();
        for (&number, now) in
            tables.pending.iter().filter(|&(&number, _)| within(number, tables.l1))
        {
            let before = self.cluster(number)?;
            let offset = |entry: &[u8; 8]| u64::from_be_bytes(*entry) & OFFSET_MASK;
            let entries = now.as_chunks().0.iter().zip(before.as_chunks().0);
            let moved = entries.map(|(now, before)| (offset(now), offset(before)));
            let moved = moved.filter(|&(now, before)| now != 0 && now != before);
            new.extend(moved.map(|(now, _)| now / self.0.cluster));
        }
        Ok(new)
    }

    /// Writes the part of a table that differs from what the file has.
    fn put_changed(&self, number: u64, tables: &mut Tables) -> Result<(), IoError> {
        let Some(content) = tables.pending.get(&number) else { return Ok(()) };
        let differs = |(now, before): (&[u8], &[u8])| now != before;
        let parts = tables.written.get(&number).map(|before| {
            content.chunks(WRITTEN_UNIT).zip(before.chunks(WRITTEN_UNIT)).map(differs)
        });
        let changed = parts.map(|parts| {
            let parts: Vec<bool> = parts.collect();
            let first = parts.iter().position(|&part| part).unwrap_or(0);
            let last = parts.iter().rposition(|&part| part).map_or(0, |last| last + 1);
            (first * WRITTEN_UNIT, (last * WRITTEN_UNIT).min(content.len()))
        });
        // Until it is written it is not known what the file has.
        let before = tables.written.remove(&number);
        let (first, end) = changed.unwrap_or((0, content.len()));
        if first < end {
            self.put_part(number, first, &content[first..end])?;
        }
        let mut now = before.unwrap_or_default();
        now.clear();
        now.extend_from_slice(content);
        while (tables.written.len() + 1) * now.len() > WRITTEN_MAX {
            if tables.written.pop_first().is_none() {
                return Ok(());
            }
        }
        tables.written.insert(number, now);
        Ok(())
    }

    /// Raises refcounts in the file to their exact values; true if any were too low. `next` are the blocks that there
    /// will be, if that changes.
    fn raise(
        &self,
        tables: &mut Tables,
        next: Option<&BTreeMap<u64, u64>>,
    ) -> Result<bool, IoError> {
        let per_block = refcounts::count(self.0.cluster as usize, self.0.order) as u64;
        let reserve = ((RESERVE_BYTES / self.0.cluster) as usize).max(RESERVE_MIN);
        let mut wrote = false;
        let known = next.unwrap_or(&tables.reachable);
        for (&number, block) in tables.blocks.iter_mut().filter(|(_, block)| block.dirty) {
            // Nothing points to a new one: its present content counts nothing.
            let new = !tables.reachable.contains_key(&number);
            let disk = match block.written.take() {
                _ if new => vec![0; block.exact.len()],
                Some(written) => written,
                None => self.cluster(number)?,
            };
            let raised = refcounts::raised(&disk, &block.exact, self.0.order, reserve);
            if raised.is_none() && !new {
                block.written = Some(disk);
            } else {
                let (content, end) = raised.unwrap_or((disk, 0));
                self.put(number, &content)?;
                // Nothing may point past the end of the file, whatever happens to the data there.
                let before = known.get(&number).map_or(0, |index| index * per_block);
                self.lengthen((before + end as u64) * self.0.cluster)?;
                block.written = Some(content);
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
        self.note(FileEvent::Length(to));
        self.set_length(to)
    }

    fn set_length(&self, to: u64) -> Result<(), IoError> {
        let set = i64::try_from(to).map(|to| nix::unistd::ftruncate(&self.0.target.fd, to));
        set.map_err(|_| IoError::NoSpace)?.map_err(|error| IoError::from_errno(error as i32))?;
        self.0.length.store(to, Ordering::Relaxed);
        Ok(())
    }

    /// Truncates the part that was never written to, when nothing is reserved any more.
    pub(super) fn shorten(&self) -> Result<(), IoError> {
        let used = self.0.used.load(Ordering::Relaxed);
        #[cfg(test)]
        self.note(FileEvent::Length(used));
        self.set_length(used)
    }

    /// Writes refcounts as they are. It is already durable that nothing points to clusters that are no longer counted.
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

    /// The clusters of refcount blocks that a refcount table points to, as imago sees it.
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
}

/// The refcount table's place according to a header: its first cluster, and how many.
fn refcount_table_of(header: &[u8], cluster: u64) -> (u64, u64) {
    let offset = header[48..].first_chunk().map_or(0, |&field| u64::from_be_bytes(field));
    let clusters = header[56..].first_chunk().map_or(0, |&field| u32::from_be_bytes(field));
    (offset / cluster, clusters.into())
}
