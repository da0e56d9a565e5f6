//! What each cluster of an image's file holds: tables, or which part of the disk.

use std::fs::File;

use crate::reach::{COMPRESSED, OFFSET_MASK, ZERO, table};
use crate::{Layout, Refusal};

/// The most clusters of a file that can be told apart: four bytes of memory each. With clusters of 64 KiB it is 4 TiB.
pub const MAPPED_MAX: u64 = 1 << 26;

/// The marks of clusters; a part of the disk is its number after these.
const UNUSED: u32 = 0;
const TABLE: u32 = 1;
const DATA: u32 = 2;

/// What a cluster of the file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The header or a table.
    Table,
    /// The disk's bytes from this offset on.
    Data(u64),
    /// Nothing that the tables lead to.
    Unused,
}

/// The clusters of a file.
pub struct Clusters {
    size: u64,
    marks: Vec<u32>,
}

impl Clusters {
    /// Reads the tables of an image whose file is `length` bytes long. What they refer to beyond that is left out.
    ///
    /// # Errors
    /// [`Refusal`]: it has compressed clusters, more than [`MAPPED_MAX`] clusters, or cannot be read.
    pub fn of(file: &File, layout: &Layout, length: u64) -> Result<Self, Refusal> {
        let size = layout.header.cluster_size;
        let count = length.div_ceil(size);
        let parts = layout.header.size.div_ceil(size);
        if count > MAPPED_MAX || parts >= u64::from(u32::MAX - DATA) {
            return Err(Refusal::Damaged("it has more clusters than can be told apart"));
        }
        let mut all = Self { size, marks: vec![UNUSED; usize::try_from(count).unwrap_or(0)] };
        all.mark(0, TABLE);
        all.mark_all(layout.l1_offset, u64::from(layout.l1_entries) * 8);
        let refcounts = u64::from(layout.refcount_clusters) * size;
        all.mark_all(layout.refcount_offset, refcounts);
        for block in table(file, layout.refcount_offset, refcounts / 8)? {
            all.mark(block & OFFSET_MASK, TABLE);
        }
        let maps = table(file, layout.l1_offset, u64::from(layout.l1_entries))?;
        for (map, first) in maps.zip((0u64..).step_by((size / 8) as usize)) {
            let map = map & OFFSET_MASK;
            if map == 0 || map.saturating_add(size) > length {
                continue;
            }
            all.mark(map, TABLE);
            for (entry, part) in table(file, map, size / 8)?.zip(first..) {
                if entry & COMPRESSED != 0 {
                    return Err(Refusal::Compression("QEMU"));
                }
                // One that reads as zeroes holds nothing of the disk's, wherever it points.
                let zero = layout.header.version >= 3 && entry & ZERO != 0;
                if !zero && entry & OFFSET_MASK != 0 && part < parts {
                    all.mark(entry & OFFSET_MASK, DATA + u32::try_from(part).unwrap_or(0));
                }
            }
        }
        Ok(all)
    }

    fn mark(&mut self, offset: u64, mark: u32) {
        let index = usize::try_from(offset / self.size).unwrap_or(usize::MAX);
        if let Some(place) = self.marks.get_mut(index) {
            *place = mark;
        }
    }

    fn mark_all(&mut self, offset: u64, length: u64) {
        for at in 0..length.div_ceil(self.size) {
            self.mark(offset + at * self.size, TABLE);
        }
    }

    /// What is at this offset of the file; what lies beyond the length that it was made with is unused.
    #[must_use]
    pub fn at(&self, offset: u64) -> Content {
        let index = usize::try_from(offset / self.size).unwrap_or(usize::MAX);
        match self.marks.get(index).copied().unwrap_or(UNUSED) {
            UNUSED => Content::Unused,
            TABLE => Content::Table,
            part => Content::Data(u64::from(part - DATA) * self.size + offset % self.size),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::{Below, create_overlay, examine_disk};

    const CLUSTER: u64 = 64 * 1024;

    #[test]
    fn tables_data_and_what_is_unused_are_told_apart() {
        let mut file = tempfile::tempfile().unwrap();
        let below = Below { name: "disk.raw", format: "raw" };
        create_overlay(&mut file, 1 << 30, below).unwrap();
        let layout = examine_disk(&file, true, false).unwrap();
        let before = file.metadata().unwrap().len().next_multiple_of(CLUSTER);
        // An L2 table, the data of the second cluster of the disk, a cluster that nothing leads to.
        let [map, data, unused] = [0, 1, 2].map(|index| before + index * CLUSTER);
        let entry = |offset: u64| (offset | 1 << 63).to_be_bytes();
        file.write_all_at(&entry(map), layout.l1_offset).unwrap();
        file.write_all_at(&vec![0; CLUSTER as usize], map).unwrap();
        file.write_all_at(&entry(data), map + 8).unwrap();
        let length = unused + CLUSTER;
        file.set_len(length).unwrap();
        let clusters = Clusters::of(&file, &layout, length).unwrap();
        for table in [0, layout.l1_offset, layout.refcount_offset, map, map + CLUSTER - 1] {
            assert_eq!(clusters.at(table), Content::Table, "{table}");
        }
        assert_eq!(clusters.at(data + 4096), Content::Data(CLUSTER + 4096));
        assert_eq!(clusters.at(unused), Content::Unused);
        assert_eq!(clusters.at(length), Content::Unused);
        // One that reads as zeroes, and one that is compressed.
        file.write_all_at(&(data | 1).to_be_bytes(), map + 8).unwrap();
        let clusters = Clusters::of(&file, &layout, length).unwrap();
        assert_eq!(clusters.at(data), Content::Unused);
        file.write_all_at(&(data | COMPRESSED).to_be_bytes(), map + 8).unwrap();
        assert!(Clusters::of(&file, &layout, length).is_err());
    }
}
