//! The layers of a disk: what its snapshots keep, and what was written since.
//!
//! ```text
//!   DISK.raw ◄── layer ◄── layer ◄── layer        the guest reads and writes the last one, the active layer;
//!       ▲                    ▲                    what it has not written there shows from below
//!    snapshot             snapshot                nobody writes below the active layer
//!                            └──── layer          other snapshots may be on other branches
//! ```
//! A layer is an image of QEMU's format over all of the disk's image, header included, and holds ciphertext where the disk is
//! encrypted. The header is only ever in the image itself, the lowest of all, and is written there: all layers have its key.
//!
//! Which layers there are and what they are above of is in a note beside the disk ([`note`]), which is replaced as a whole: so
//! there is a disk at any instant. A file that the note does not name is debris. A disk without a note has no layers.
//!
//! The lowest layer of a linked clone is above frozen files of another VM, its base, which have names in the clone's own home as
//! well ([`super::linking`]): its own image has only the header and the lock.
//!
//! The lock of the image itself is that of the whole disk. Nothing of vmseal follows the names that layers have in their headers.

mod arriving;
mod copies;
mod files;
mod note;

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use vmseal_api::host::{DiskSpec, LAYERS_MAX, VmSpec};
use vmseal_api::id::{DiskId, SnapshotId, VmId};
use vmseal_api::problem::Problem;

pub use self::arriving::{ArrivingLayers, Tree};
pub use self::copies::{CopiedLayers, NextCopy, drop_copies, drop_sources, set_aside, take_place};
pub use self::files::{
    Files, base_of, begin_layer, check_droppable, check_unshared, lock_merge, note_merged, open,
    open_above, open_from, open_kept, open_lower, open_served, open_upper, prepare_active,
    prepare_merged, put_active, put_linked, remove_merged, remove_unneeded, room, room_of_all,
    written,
};
pub use self::note::{PreparedNote, read};
use crate::rules;
use crate::storage::file_identity::FileIdentity;

/// Identifies a layer of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LayerId(pub Uuid);

impl LayerId {
    fn new() -> Self {
        Self(Uuid::now_v7())
    }
}

/// A layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// Which, and what its file is called by.
    pub layer: LayerId,
    /// The one below it; none for the disk's image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below: Option<LayerId>,
    /// Its file.
    pub file: FileIdentity,
}

/// What a snapshot keeps of the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kept {
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// The attempt that took it: what was kept of several disks by one attempt is of one instant.
    pub attempt: Uuid,
    /// The layer that was active; none for the disk's image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<LayerId>,
}

/// What the layers of a linked clone's disk are above of: files that nobody writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Base {
    /// The VM that they were made for; it may be gone.
    pub vm: VmId,
    /// Its disk.
    pub disk: DiskId,
    /// The files, each above the next. The last one is a raw image, the others are layers. Their places are their names
    /// ([`Home::base`]): a note names no path.
    ///
    /// [`Home::base`]: crate::storage::home::Home::base
    pub files: Vec<FileIdentity>,
}

/// The layers of a disk, and its snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layers {
    layers: Vec<Layer>,
    active: Option<LayerId>,
    snapshots: Vec<Kept>,
    base: Option<Base>,
}

/// A layer that can be merged into the one below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToMerge {
    /// The layer.
    pub upper: LayerId,
    /// Whether it is the active one.
    pub active: bool,
}

impl Layers {
    /// Whether the disk is its image alone.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty() && self.snapshots.is_empty() && self.base.is_none()
    }

    /// Those of a linked clone that is as its base is: this layer is written.
    pub(super) fn linked(base: Base, first: Layer) -> Self {
        let (layers, active) = (vec![first.clone()], Some(first.layer));
        Self { layers, active, snapshots: Vec::new(), base: Some(base) }
    }

    /// What the lowest layers are above of, if that is not the disk's image.
    #[must_use]
    pub fn base(&self) -> Option<&Base> {
        self.base.as_ref()
    }

    /// The active layer; none for the image itself.
    #[must_use]
    pub fn active(&self) -> Option<LayerId> {
        self.active
    }

    /// The attempt that took a snapshot of the disk, if it is there.
    #[must_use]
    pub fn attempt(&self, snapshot: SnapshotId) -> Option<Uuid> {
        self.kept(snapshot).map(|kept| kept.attempt)
    }

    fn kept(&self, snapshot: SnapshotId) -> Option<&Kept> {
        self.snapshots.iter().find(|kept| kept.snapshot == snapshot)
    }

    fn layer(&self, layer: LayerId) -> Option<&Layer> {
        self.layers.iter().find(|known| known.layer == layer)
    }

    /// The layers from this one down to the image, which is not among them.
    #[must_use]
    pub fn chain(&self, from: Option<LayerId>) -> Vec<&Layer> {
        let first = from.and_then(|layer| self.layer(layer));
        let below = |layer: &&Layer| layer.below.and_then(|below| self.layer(below));
        // A note is checked when it is read: there is no circle.
        std::iter::successors(first, below).collect()
    }

    /// The layers that nobody writes, each after the one that it is above of.
    fn frozen(&self) -> Vec<&Layer> {
        let mut left: Vec<&Layer> =
            self.layers.iter().filter(|layer| self.active != Some(layer.layer)).collect();
        let mut sorted = Vec::new();
        while !left.is_empty() {
            let waits = |layer: &&Layer| left.iter().any(|it| layer.below == Some(it.layer));
            let (later, now): (Vec<_>, Vec<_>) = left.iter().copied().partition(waits);
            if now.is_empty() {
                // A note is checked when it is read: there is no circle.
                break;
            }
            sorted.extend(now);
            left = later;
        }
        sorted
    }

    /// The layers that no other layer stands on; with those below them these are all layers.
    #[must_use]
    pub fn uppermost(&self) -> Vec<LayerId> {
        let is_below = |layer: LayerId| self.layers.iter().any(|it| it.below == Some(layer));
        self.layers.iter().map(|it| it.layer).filter(|layer| !is_below(*layer)).collect()
    }

    /// How many layers there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.layers.len()
    }

    /// Whether another layer fits above the active one.
    #[must_use]
    pub fn has_room(&self) -> bool {
        // Readers of all of a clone put its header between its layers and the base.
        let below = self.base.as_ref().map_or(0, |base| base.files.len());
        self.chain(self.active).len() + below < LAYERS_MAX
    }

    /// Keeps what the disk holds, and has `next` written from now on. An earlier attempt at the same snapshot is forgotten.
    fn keep(&mut self, snapshot: SnapshotId, attempt: Uuid, next: Layer) {
        self.snapshots.retain(|kept| kept.snapshot != snapshot);
        self.snapshots.push(Kept { snapshot, attempt, layer: self.active });
        self.active = Some(next.layer);
        self.layers.push(next);
    }

    /// Has `next` written from now on, above what a layer below the active one, or the image, holds.
    fn stack(&mut self, next: Layer) {
        self.active = Some(next.layer);
        self.layers.push(next);
    }

    /// What a snapshot keeps: none where there is no such snapshot.
    #[must_use]
    pub fn layer_of(&self, snapshot: SnapshotId) -> Option<Option<LayerId>> {
        self.kept(snapshot).map(|kept| kept.layer)
    }

    /// Forgets a snapshot; returns whether it was there.
    pub fn forget(&mut self, snapshot: SnapshotId) -> bool {
        let before = self.snapshots.len();
        self.snapshots.retain(|kept| kept.snapshot != snapshot);
        self.snapshots.len() < before
    }

    fn is_kept(&self, layer: Option<LayerId>) -> bool {
        self.snapshots.iter().any(|kept| kept.layer == layer)
    }

    fn above(&self, layer: Option<LayerId>) -> impl Iterator<Item = &Layer> {
        self.layers.iter().filter(move |known| known.below == layer)
    }

    /// A layer that nothing needs: it is not active, no snapshot keeps it, and nothing is above it.
    fn unneeded(&self) -> Option<LayerId> {
        let unneeded = |layer: &&Layer| {
            let id = Some(layer.layer);
            self.active != id && !self.is_kept(id) && self.above(id).next().is_none()
        };
        self.layers.iter().find(unneeded).map(|layer| layer.layer)
    }

    /// A layer that can be merged into what is below it: nothing else needs what is below. Those that are not active come
    /// first.
    #[must_use]
    pub fn next_merge(&self) -> Option<ToMerge> {
        let alone = |layer: &Layer| {
            let below = layer.below;
            let frozen = below.is_none() && self.base.is_some();
            !frozen
                && !self.is_kept(below)
                && self.active != below
                && self.above(below).count() == 1
        };
        let mut found = self.layers.iter().filter(|layer| alone(layer));
        let merge = |layer: &Layer| ToMerge {
            upper: layer.layer,
            active: self.active == Some(layer.layer),
        };
        let all: Vec<ToMerge> = found.by_ref().map(merge).collect();
        all.iter().find(|merge| !merge.active).or(all.first()).copied()
    }

    /// A layer has been merged into the one below it, which takes its place.
    fn merged(&mut self, upper: LayerId) {
        let Some(below) = self.layer(upper).map(|layer| layer.below) else { return };
        let moved = |id: &mut Option<LayerId>| {
            if *id == Some(upper) {
                *id = below;
            }
        };
        self.layers.retain(|layer| layer.layer != upper);
        self.layers.iter_mut().for_each(|layer| moved(&mut layer.below));
        self.snapshots.iter_mut().for_each(|kept| moved(&mut kept.layer));
        moved(&mut self.active);
    }

    /// Checks that the disk is its image alone.
    ///
    /// # Errors
    /// `wrong-state`: it has snapshots, or is a linked clone's.
    pub fn are_none(&self, spec: &VmSpec, disk: &DiskSpec) -> Result<(), Problem> {
        match &self.base {
            Some(_) => Err(rules::is_linked(spec, disk)),
            None if self.is_empty() => Ok(()),
            None => Err(rules::has_snapshots(spec, disk)),
        }
    }

    /// Whether each layer is above one that is there, without circles, and what is named is there.
    fn is_sound(&self) -> bool {
        let there = |id: Option<LayerId>| id.is_none_or(|id| self.layer(id).is_some());
        let unique = |(index, layer): (usize, &Layer)| {
            self.layers[..index].iter().all(|other| other.layer != layer.layer)
        };
        // One above another is the later one, so a walk downwards ends.
        let rooted = |layer: &Layer| {
            let mut at = layer.below;
            for _ in 0..=self.layers.len() {
                match at.and_then(|id| self.layer(id)) {
                    None => return at.is_none(),
                    Some(next) => at = next.below,
                }
            }
            false
        };
        self.layers.iter().enumerate().all(unique)
            && self.layers.iter().all(rooted)
            && self.snapshots.iter().all(|kept| there(kept.layer))
            && there(self.active)
    }
}

#[cfg(test)]
mod tests;
