//! Opening a replica and its map, before the process serves.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::sys::stat::{FileStat, fstat};
use vmseal_api::filter::{Direct, ReplicateSpec};
use vmseal_api::id::DiskId;
use vmseal_api::pace::CopyPace;

use crate::handle::{HandleError, Handles, lock_if_path};
use crate::layers::replicate::Replicate;
use crate::layers::replicate::blocking_disk::BlockingDisk;
use crate::layers::replicate::copier::Copier;
use crate::layers::replicate::format::Geometry;
use crate::layers::replicate::map::MapLoad;
use crate::stack::chain::Chain;
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

const REPLICA: &str = "its replica";
const MAP: &str = "the map of its replica";

/// An open replica whose copier does not exist yet.
pub struct OpenedReplica {
    /// The layer.
    pub replicate: Replicate,
    replica: BlockingDisk,
}

impl OpenedReplica {
    /// Opens the replica of a disk. `image` is the file that holds the disk, if there is one.
    ///
    /// # Errors
    /// [`ReplicaError`].
    pub fn open(
        disk: DiskId,
        size: u64,
        spec: &ReplicateSpec,
        image: Option<&FileDisk>,
        handles: &mut Handles,
    ) -> Result<Self, ReplicaError> {
        let geometry = Geometry::new(disk, size);
        let mut file = |what, handle| {
            handles.file(handle, true).map_err(|error| ReplicaError::Handle { what, error })
        };
        let (replica, map) = (file(REPLICA, &spec.replica)?, file(MAP, &spec.map)?);
        let opened = [
            (REPLICA, &spec.replica, shared(REPLICA, &replica)?),
            (MAP, &spec.map, shared(MAP, &map)?),
        ];
        check_size(&replica, spec.offset.saturating_add(size))?;
        let replica = FileDisk::open(replica, spec.offset, size, Direct::Auto, false)
            .map_err(|error| ReplicaError::Open { what: REPLICA, error })?;
        let map_bytes = geometry.map_bytes() as u64;
        let map =
            FileDisk::open(lengthened(map, map_bytes, MAP)?, 0, map_bytes, Direct::Off, false)
                .map_err(|error| ReplicaError::Open { what: MAP, error })?;
        let image_is = |other: &FileDisk| image.is_some_and(|image| image.is_same_file(other));
        if image_is(&replica) || image_is(&map) || replica.is_same_file(&map) {
            return Err(ReplicaError::Same);
        }
        for (what, handle, file) in opened {
            lock_if_path(&file, handle, true)
                .map_err(|error| ReplicaError::Handle { what, error })?;
        }
        let map = BlockingDisk::file(map, map_bytes)
            .map_err(|error| ReplicaError::Look { what: MAP, error })?;
        let (replicate, found) = Replicate::new(geometry, map);
        let chain = Chain::new(size, false, Vec::new(), replica.queue())
            .map_err(|error| ReplicaError::Look { what: REPLICA, error })?;
        let replica = BlockingDisk::over(chain, Some(replica), true);
        tell(disk, &replicate, found);
        let bytes_per_second = Some(spec.bytes_per_second);
        replicate.set_pace(CopyPace { bytes_per_second, paused: false });
        Ok(Self { replicate, replica })
    }

    /// Makes the copier, which reads what is below the filter.
    #[must_use]
    pub fn copier(self, source: Chain, holes: Option<FileDisk>) -> Copier {
        let Self { replicate, replica } = self;
        Copier::new(&replicate, BlockingDisk::new(source), holes, replica)
    }
}

/// Another descriptor of the same open file, which has its lock, too.
fn shared(what: &'static str, file: &OwnedFd) -> Result<OwnedFd, ReplicaError> {
    file.try_clone().map_err(|error| ReplicaError::Look { what, error })
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

fn stat(fd: &OwnedFd, what: &'static str) -> Result<FileStat, ReplicaError> {
    fstat(fd.as_fd()).map_err(|error| ReplicaError::Look { what, error: error.into() })
}

fn is_regular(stat: &FileStat) -> bool {
    stat.st_mode & libc::S_IFMT == libc::S_IFREG
}

/// A file must have exactly the required length; a device may be longer.
fn check_size(replica: &OwnedFd, needs: u64) -> Result<(), ReplicaError> {
    let stat = stat(replica, REPLICA)?;
    let has = u64::try_from(stat.st_size).unwrap_or(0);
    if is_regular(&stat) && has != needs {
        return Err(ReplicaError::Size { has, needs });
    }
    Ok(())
}

/// Opens the map and extends it to its length: a new one is empty.
pub(super) fn lengthened(
    map: OwnedFd,
    bytes: u64,
    what: &'static str,
) -> Result<OwnedFd, ReplicaError> {
    let stat = stat(&map, what)?;
    let map = File::from(map);
    if is_regular(&stat) && u64::try_from(stat.st_size).unwrap_or(0) < bytes {
        map.set_len(bytes).map_err(|error| ReplicaError::Look { what, error })?;
    }
    Ok(map.into())
}

#[cfg(test)]
mod tests {
    use vmseal_api::filter::{Handle, REPLICATE_RATE_MIN};

    use super::*;

    const SIZE: u64 = 1 << 20;

    fn open(
        replica: &std::path::Path,
        map: &std::path::Path,
    ) -> Result<OpenedReplica, ReplicaError> {
        let spec = ReplicateSpec {
            replica: Handle::Path(replica.into()),
            map: Handle::Path(map.into()),
            offset: 0,
            bytes_per_second: REPLICATE_RATE_MIN,
        };
        OpenedReplica::open(DiskId::new(), SIZE, &spec, None, &mut Handles::default())
    }

    #[test]
    fn a_replica_and_a_map_at_paths_are_one_filters_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name| directory.path().join(name);
        for name in ["replica", "other replica"] {
            File::create_new(path(name)).unwrap().set_len(SIZE).unwrap();
        }
        for name in ["map", "other map"] {
            File::create_new(path(name)).unwrap();
        }
        let first = open(&path("replica"), &path("map")).unwrap();
        for (replica, map, locked) in
            [("replica", "other map", REPLICA), ("other replica", "map", MAP)]
        {
            match open(&path(replica), &path(map)).map(drop) {
                Err(ReplicaError::Handle { what, error: HandleError::Locked(_) }) => {
                    assert_eq!(what, locked);
                }
                other => panic!("{replica} and {map}: {other:?}"),
            }
        }
        drop(first);
        open(&path("replica"), &path("map")).unwrap();
        assert!(matches!(open(&path("map"), &path("map")), Err(ReplicaError::Size { .. })));
        assert!(matches!(open(&path("replica"), &path("replica")), Err(ReplicaError::Same)));
    }
}
