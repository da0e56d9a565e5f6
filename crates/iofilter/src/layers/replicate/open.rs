//! Opening what a replica is kept with, before the process serves.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmseal_api::filter::{Direct, Handle};
use vmseal_api::id::DiskId;
use vmseal_api::pace::CopyPace;

use crate::handle::{HandleError, Handles, lock_if_path};
use crate::layers::leg::{Leg, LegChain};
use crate::layers::replicate::Replicate;
use crate::layers::replicate::copier::Copier;
use crate::layers::replicate::format::Geometry;
use crate::layers::replicate::map::MapLoad;
use crate::stack::chain::Chain;
use crate::storage::DiskStorage;
use crate::storage::file::{self, FileDisk};

/// Why a replica cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum ReplicaError {
    /// A handle in the configuration.
    #[error("{what}: {error}")]
    Handle {
        /// Which file.
        what: &'static str,
        /// Why.
        error: HandleError,
    },
    /// A system call failed.
    #[error("{what} cannot be used: {error}")]
    Look {
        /// Which file.
        what: &'static str,
        /// Why.
        error: io::Error,
    },
    /// Of the wrong length: another disk's, or truncated.
    #[error(
        "its replica has {has} bytes where the disk has {needs}: if it is this disk's, give it that length and remove its map, so that all of it is copied again"
    )]
    Size {
        /// Its length.
        has: u64,
        /// Offset and size of the disk.
        needs: u64,
    },
    /// A mirrored disk.
    #[error(
        "the map of its copy does not tell which of two places has the disk's data ({0}); restore the map, or remove it if the disk cannot have pivoted"
    )]
    NoPlace(MapLoad),
    /// A mirrored disk whose data is in its copy.
    #[error(
        "the disk has pivoted to its copy, and the map that says so cannot be written: make it writable, and do not remove it"
    )]
    PivotedMap,
    /// Given twice.
    #[error(
        "its image, the place that it is copied to and the map of the copy must be three files"
    )]
    Same,
    /// It cannot be opened as a disk.
    #[error("{what}: {error}")]
    Open {
        /// Which file.
        what: &'static str,
        /// Why.
        error: file::OpenError,
    },
}

const MAP: &str = "the map of its replica";

/// An open replica whose copier does not exist yet.
pub struct OpenedReplica {
    /// The layer.
    pub replicate: Replicate,
    /// Where the replica is.
    leg: Leg,
}

impl OpenedReplica {
    /// Opens the map of a disk's replica, which is in `leg`; the disk itself is stored in `image`.
    ///
    /// # Errors
    /// [`ReplicaError`].
    pub fn open(
        disk: DiskId,
        size: u64,
        map: &Handle,
        pace: CopyPace,
        image: &DiskStorage,
        leg: Leg,
        handles: &mut Handles,
    ) -> Result<Self, ReplicaError> {
        let geometry = Geometry::new(disk, size);
        let map = open_map(geometry, (MAP, map), image, &leg, handles)?;
        let (replicate, found) = Replicate::new(geometry, map);
        tell(disk, &replicate, found);
        replicate.set_pace(pace);
        Ok(Self { replicate, leg })
    }

    /// Makes the copier, which reads what is below the layer.
    ///
    /// # Errors
    /// As [`Leg::chain`].
    pub fn copier(self, source: Chain, holes: Option<FileDisk>) -> io::Result<Copier> {
        let Self { replicate, leg } = self;
        Ok(Copier::new(&replicate, source, holes, leg.chain(&Arc::default())?))
    }
}

/// Opens the map of a copy: the disk is stored in `image`, and copied to `leg`.
pub(super) fn open_map(
    geometry: Geometry,
    (what, map): (&'static str, &Handle),
    image: &DiskStorage,
    leg: &Leg,
    handles: &mut Handles,
) -> Result<LegChain, ReplicaError> {
    let (has, needs) = (leg.boundary().size, geometry.size());
    if has < needs {
        return Err(ReplicaError::Size { has, needs });
    }
    let of_handle = |error| ReplicaError::Handle { what, error };
    let file = handles.file(map, true).map_err(of_handle)?;
    let (image, copy) = (image.file(), leg.stack().storage().file());
    let is_copied_to_itself = image.zip(copy).is_some_and(|(image, copy)| image.is_in(copy));
    if is_copied_to_itself || image.into_iter().chain(copy).any(|place| place.is_in(&file)) {
        return Err(ReplicaError::Same);
    }
    lock_if_path(&file, map, true).map_err(of_handle)?;
    let bytes = geometry.map_bytes() as u64;
    let file = FileDisk::open(lengthened(file, bytes, what)?, 0, bytes, Direct::Off, false)
        .map_err(|error| ReplicaError::Open { what, error })?;
    LegChain::of_file(file, bytes).map_err(|error| ReplicaError::Look { what, error })
}

fn tell(disk: DiskId, replicate: &Replicate, found: MapLoad) {
    let dirty_bytes = replicate.status().dirty_bytes;
    match found {
        MapLoad::Map { damaged_blocks: 0 } => {
            tracing::info!(%disk, dirty_bytes, "the copy to the replica resumes");
        }
        MapLoad::Map { damaged_blocks } => {
            tracing::warn!(%disk, damaged_blocks, dirty_bytes, "the map of the replica is damaged; the parts it does not describe are copied again");
        }
        // A replica's map never says so.
        MapLoad::Pivoted => {}
        MapLoad::Nothing(why) => {
            tracing::info!(%disk, %why, "there is no map of the replica; all of the disk is copied");
        }
        MapLoad::Unreadable(error) => {
            tracing::warn!(%disk, %error, "the map of the replica cannot be read; all of the disk is copied");
        }
    }
}

/// Extends a map to its length: a new one is empty.
fn lengthened(map: OwnedFd, bytes: u64, what: &'static str) -> Result<OwnedFd, ReplicaError> {
    let look = |error| ReplicaError::Look { what, error };
    let map = File::from(map);
    let found = map.metadata().map_err(look)?;
    if found.is_file() && found.len() < bytes {
        map.set_len(bytes).map_err(look)?;
    }
    Ok(map.into())
}
