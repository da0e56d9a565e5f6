//! The room that is taken by what a VM has beside its disks as they are: what snapshots keep, and saved memory.

use serde::{Deserialize, Serialize};

use super::DatastoreSpec;
use crate::id::DiskId;

/// A disk, and where it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlacedDisk {
    /// The disk.
    pub disk: DiskId,
    /// Its datastore.
    pub datastore: DatastoreSpec,
}

/// The room that is taken by what a VM has beside its disks as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct KeptRoom {
    /// Of disks that snapshots keep something of, or that stand on the disks of other VMs; others are left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<KeptOfDisk>,
    /// By saved memory: what snapshots keep, and that of a VM which is suspended, in bytes.
    #[serde(default)]
    pub memories: u64,
}

/// What is taken by files of a disk that nobody writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct KeptOfDisk {
    /// The disk.
    pub disk: DiskId,
    /// By its image, or what it stands on of another VM, in bytes.
    pub image: u64,
    /// By layers above that, but for the one that is written, in bytes.
    pub layers: u64,
}

/// The room that a copy needs, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyRoom {
    /// At least.
    pub at_least: u64,
    /// When its guest has written all of it.
    pub at_most: u64,
}

impl std::ops::Add for CopyRoom {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            at_least: self.at_least.saturating_add(other.at_least),
            at_most: self.at_most.saturating_add(other.at_most),
        }
    }
}

impl KeptRoom {
    /// What the files of all disks take that nobody writes, in bytes.
    #[must_use]
    pub fn of_disks(&self) -> u64 {
        let each = self.disks.iter().map(|of| of.image.saturating_add(of.layers));
        each.fold(0, u64::saturating_add)
    }

    /// The room that a copy of a disk needs, with what snapshots keep of it.
    #[must_use]
    pub fn copy_of(&self, disk: DiskId, size: u64, preallocated: bool) -> CopyRoom {
        let Some(kept) = self.disks.iter().find(|of| of.disk == disk) else {
            return CopyRoom { at_least: if preallocated { size } else { 0 }, at_most: size };
        };
        // The image has all of its room; the layer above it that is written grows.
        let image = if preallocated { kept.image.max(size) } else { kept.image };
        let at_least = image.saturating_add(kept.layers);
        CopyRoom { at_least, at_most: at_least.saturating_add(size) }
    }

    /// The room that copies of these disks need, each with its size and whether it is preallocated, and with the memory.
    pub fn copies(&self, disks: impl Iterator<Item = (DiskId, u64, bool)>) -> CopyRoom {
        let memories = CopyRoom { at_least: self.memories, at_most: self.memories };
        let each = disks.map(|(disk, size, preallocated)| self.copy_of(disk, size, preallocated));
        each.fold(memories, std::ops::Add::add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_snapshots_keep_is_needed_beside_the_disks() {
        let (plain, kept) = (DiskId::new(), DiskId::new());
        let of = KeptOfDisk { disk: kept, image: 30, layers: 5 };
        let room = KeptRoom { disks: vec![of], memories: 7 };
        assert_eq!(room.of_disks(), 35);
        let needs = |disk, preallocated| {
            let CopyRoom { at_least, at_most } = room.copy_of(disk, 100, preallocated);
            (at_least, at_most)
        };
        assert_eq!(needs(plain, false), (0, 100));
        assert_eq!(needs(plain, true), (100, 100));
        assert_eq!(needs(kept, false), (35, 135));
        assert_eq!(needs(kept, true), (105, 205));
        let both = [(plain, 100, true), (kept, 100, false)];
        let all = room.copies(both.into_iter());
        assert_eq!((all.at_least, all.at_most), (142, 242));
        let huge = KeptRoom { memories: u64::MAX, ..room };
        assert_eq!(huge.copies(both.into_iter()).at_least, u64::MAX, "the other side may say so");
    }
}
