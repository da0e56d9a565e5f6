//! Opens the replica of a disk: its leg, and the map of what that lacks.

use vmseal_api::filter::{BackendSpec, ReplicateSpec};
use vmseal_api::id::DiskId;
use vmseal_api::pace::CopyPace;

use crate::handle::Handles;
use crate::layers::leg::Leg;
use crate::layers::replicate::open::{OpenedReplica, ReplicaError};
use crate::process::{StartError, open_stack};
use crate::storage::DiskStorage;
use crate::storage::file::OpenError;

/// What a replica's leg is called in messages.
const REPLICA: &str = "its replica";

/// Opens the replica of a disk of `size` bytes, which is stored in `image`.
///
/// # Errors
/// [`StartError`].
pub fn open(
    disk: DiskId,
    size: u64,
    spec: &ReplicateSpec,
    image: &DiskStorage,
    handles: &mut Handles,
) -> Result<OpenedReplica, StartError> {
    let refused = |error| StartError::Replica { disk, error };
    let leg = match open_stack::leg(disk, REPLICA, size, &spec.to, handles) {
        Err(StartError::Open { error: OpenError::Truncated { has, needs }, .. }) => {
            Err(refused(ReplicaError::Size { has, needs }))
        }
        other => other,
    }?;
    is_no_longer(&leg, size, &spec.to.backend).map_err(refused)?;
    let pace = CopyPace { bytes_per_second: Some(spec.bytes_per_second), paused: false };
    OpenedReplica::open(disk, size, &spec.map, pace, image, leg, handles).map_err(refused)
}

/// A raw file has exactly the length that is needed, or is another disk's; a device, or an export, may be longer.
fn is_no_longer(leg: &Leg, size: u64, backend: &BackendSpec) -> Result<(), ReplicaError> {
    let (BackendSpec::File { offset, .. }, Some(file)) = (backend, leg.files().first()) else {
        return Ok(());
    };
    let look = |error: nix::Error| ReplicaError::Look { what: REPLICA, error: error.into() };
    let stat = nix::sys::stat::fstat(file).map_err(look)?;
    let (has, needs) = (u64::try_from(stat.st_size).unwrap_or(0), offset.saturating_add(size));
    let is_regular = stat.st_mode & libc::S_IFMT == libc::S_IFREG;
    if is_regular && has != needs { Err(ReplicaError::Size { has, needs }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use vmseal_api::filter::{Direct, Handle, REPLICATE_RATE_MIN, StackSpec};

    use super::*;
    use crate::handle::HandleError;
    use crate::storage::mem::MemDisk;

    const SIZE: u64 = 1 << 20;

    fn open_at(
        replica: &std::path::Path,
        map: &std::path::Path,
    ) -> Result<OpenedReplica, StartError> {
        let (file, direct) = (Handle::Path(replica.into()), Direct::Auto);
        let (offset, keeps_room, channel) = (0, false, None);
        let backend = BackendSpec::File { file, offset, direct, keeps_room, channel };
        let spec = ReplicateSpec {
            to: StackSpec { chain: Vec::new(), backend },
            map: Handle::Path(map.into()),
            bytes_per_second: REPLICATE_RATE_MIN,
        };
        let image = DiskStorage::Mem(MemDisk::new(0));
        open(DiskId::new(), SIZE, &spec, &image, &mut Handles::default())
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
        let first = open_at(&path("replica"), &path("map")).unwrap();
        for (replica, map, locked) in [
            ("replica", "other map", "its replica:"),
            ("other replica", "map", "the map of its replica:"),
        ] {
            let refused = open_at(&path(replica), &path(map)).map(drop).unwrap_err();
            let (StartError::Handle { error, .. }
            | StartError::Replica { error: ReplicaError::Handle { error, .. }, .. }) = &refused
            else {
                panic!("{replica} and {map}: {refused:?}")
            };
            assert!(matches!(error, HandleError::Locked(_)), "{refused}");
            assert!(refused.to_string().contains(locked), "{refused}");
        }
        drop(first);
        open_at(&path("replica"), &path("map")).unwrap();
        let refused = |replica, map| match open_at(&path(replica), &path(map)).map(drop) {
            Err(StartError::Replica { error, .. }) => error,
            other => panic!("{replica} and {map}: {other:?}"),
        };
        assert!(matches!(refused("map", "map"), ReplicaError::Size { .. }));
        assert!(matches!(refused("replica", "replica"), ReplicaError::Same));
    }
}
