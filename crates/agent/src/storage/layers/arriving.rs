//! The layers of a disk that comes from another host, which are made anew here: those that nobody writes one after the other,
//! each filled before the next one, and the active one last.
//!
//! ```text
//!  the image ─► a layer that nobody writes ─► … ─► the active layer: all are there ─► noted, when the disk gets its name
//! ```
//! Until they are noted they are debris, which goes with the half-made image ([`Home::discard`]).

use std::fs::File;

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use vmseal_api::host::LAYERS_MAX;
use vmseal_api::id::{DiskId, SnapshotId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::files::{make_layer, open_unlocked};
use super::{Kept, Layer, LayerId, Layers, note};
use crate::storage::home::Home;

/// The most layers of a disk that another host makes: what it says of them is a part of one message.
pub const SENT_LAYERS_MAX: usize = 64;

/// The layers of a disk as one host tells them to another: by their places, as each host has names of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tree {
    /// Those that nobody writes, each after the one below it: the place of that one, or none for the image.
    frozen: Vec<Option<usize>>,
    /// What the active layer is above of.
    active: Option<usize>,
    /// The snapshots.
    snapshots: Vec<KeptAt>,
}

/// What a snapshot keeps, by place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptAt {
    snapshot: SnapshotId,
    attempt: Uuid,
    layer: Option<usize>,
}

impl Tree {
    /// That of a disk's layers; none where it has none.
    ///
    /// # Errors
    /// `damaged`: its image is written although it has layers. `limit-exceeded`.
    pub fn of(layers: &Layers) -> Result<Option<Self>, Problem> {
        if layers.is_empty() {
            return Ok(None);
        }
        let frozen = layers.frozen();
        if frozen.len() >= SENT_LAYERS_MAX {
            let what = format!(
                "a disk has {} layers, and {SENT_LAYERS_MAX} at most go to another host: delete snapshots first",
                frozen.len() + 1
            );
            return Err(Problem::new(ErrorCode::LimitExceeded, what));
        }
        let place = |layer: Option<LayerId>| {
            layer.and_then(|layer| frozen.iter().position(|known| known.layer == layer))
        };
        let active = layers.active.and_then(|active| layers.layer(active)).ok_or_else(|| {
            let what = "a disk has layers, and its image is written all the same";
            Problem::new(ErrorCode::Damaged, what)
        })?;
        let kept = |kept: &Kept| KeptAt {
            snapshot: kept.snapshot,
            attempt: kept.attempt,
            layer: place(kept.layer),
        };
        Ok(Some(Self {
            frozen: frozen.iter().map(|layer| place(layer.below)).collect(),
            active: place(active.below),
            snapshots: layers.snapshots.iter().map(kept).collect(),
        }))
    }

    /// How many files nobody writes: the image, and layers.
    #[must_use]
    pub fn parts(&self) -> usize {
        1 + self.frozen.len()
    }

    /// Whether each layer is above an earlier one, and what is named is there.
    fn is_sound(&self) -> bool {
        let before = |count: usize| move |place: Option<usize>| place.is_none_or(|it| it < count);
        let all = before(self.frozen.len());
        self.frozen.len() < SENT_LAYERS_MAX
            && self.frozen.iter().enumerate().all(|(at, below)| before(at)(*below))
            && all(self.active)
            && self.snapshots.iter().all(|kept| all(kept.layer))
    }
}

impl Layers {
    /// The layers that nobody writes, in the order of [`Tree`].
    #[must_use]
    pub fn unwritten(&self) -> Vec<LayerId> {
        self.frozen().into_iter().map(|layer| layer.layer).collect()
    }
}

/// The layers of a disk that comes.
#[derive(Debug)]
pub struct ArrivingLayers {
    home: Home,
    disk: DiskId,
    tree: Tree,
    layers: Layers,
}

impl ArrivingLayers {
    /// Those of a disk whose image is begun, as the other host says that they are.
    ///
    /// # Errors
    /// `invalid-request`: they make no sense.
    pub fn new(home: Home, disk: DiskId, tree: Tree) -> Result<Self, Problem> {
        if !tree.is_sound() {
            let what =
                format!("what the other host says of the layers of disk {disk} makes no sense");
            return Err(Problem::new(ErrorCode::InvalidRequest, what));
        }
        Ok(Self { home, disk, tree, layers: Layers::default() })
    }

    /// How many files nobody writes: the image, and layers.
    #[must_use]
    pub fn parts(&self) -> usize {
        self.tree.parts()
    }

    /// Makes the next layer, which is empty; the active one is the last. Its file, whose lock is held, and those of the layers below
    /// it. `length` is that of the image. Blocks.
    ///
    /// # Errors
    /// `no-space`; `limit-exceeded`; those of the file system.
    pub fn make_next(&mut self, length: u64) -> Result<Vec<File>, Problem> {
        let made = self.layers.layers.len();
        let below = match self.tree.frozen.get(made) {
            Some(below) => *below,
            None => self.tree.active,
        };
        let below = below.and_then(|place| self.layers.layers.get(place)).map(|layer| layer.layer);
        let (layer, file) = make_layer(&self.home, self.disk, below, length)?;
        let mut files = vec![file];
        for below in self.layers.chain(below) {
            files.push(open_unlocked(&self.home, self.disk, below, false)?);
        }
        if files.len() > LAYERS_MAX {
            let what = format!("disk {} has more than {LAYERS_MAX} layers", self.disk);
            return Err(Problem::new(ErrorCode::LimitExceeded, what));
        }
        if made == self.tree.frozen.len() {
            self.layers.active = Some(layer.layer);
        }
        self.layers.layers.push(layer);
        Ok(files)
    }

    /// Notes them all: from then on they are the disk's. Again is no harm. Blocks.
    ///
    /// # Errors
    /// `internal`: some are not made; those of the note.
    pub fn note(&self) -> Result<(), Problem> {
        if self.layers.active.is_none() {
            let what = "a disk was to be named before its layers were there";
            return Err(Problem::new(ErrorCode::Internal, what));
        }
        let id = |place: &Option<usize>| {
            place.and_then(|place| self.layers.layers.get(place)).map(|layer: &Layer| layer.layer)
        };
        let kept = |kept: &KeptAt| Kept {
            snapshot: kept.snapshot,
            attempt: kept.attempt,
            layer: id(&kept.layer),
        };
        let snapshots = self.tree.snapshots.iter().map(kept).collect();
        note::write(&self.home, self.disk, &Layers { snapshots, ..self.layers.clone() })
    }
}
