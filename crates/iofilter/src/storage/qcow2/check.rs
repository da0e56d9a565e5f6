//! Checks the tables of an image that will be written.

use std::collections::BTreeMap;
use std::io;

use vmseal_qcow2::Layout;

use super::refcounts;
use super::storage::{ImageFile, damaged, io_error};

/// Where entries of the L1 and refcount tables point, without flags.
pub(super) const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

impl ImageFile {
    /// Checks the tables of an image that will be written: each is in the file, in a place of its own,
    /// and is counted, so that nothing is ever written over it. Returns the refcount blocks, and which entry of the
    /// refcount table points to each.
    pub(super) fn check(&self, layout: &Layout) -> io::Result<BTreeMap<u64, u64>> {
        let tables = self.tables();
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
        Ok(blocks.map(|(at, index)| (at / self.0.cluster, index)).collect())
    }

    /// Offsets in a table of 8-byte entries.
    fn entries(&self, at: u64, count: u64) -> io::Result<Vec<u64>> {
        let mut bytes = vec![0; count as usize * 8];
        self.fetch(&mut bytes, at).map_err(io_error)?;
        let entries = bytes.as_chunks().0.iter();
        Ok(entries.map(|&entry| u64::from_be_bytes(entry) & OFFSET_MASK).collect())
    }
}
