//! The replica of the image that a disk had before its copy took its place (docs/decisions/233).
//!
//! ```text
//!  DISK-ID.replica, of the former image ─► DISK-ID.former-replica ─► overwritten, removed: with the former image
//!                          DISK-ID.replica, of the copy ◄── made by the next who writes to the disk
//! ```
//! Which one a file is says the pair that is noted beside it: the new replica is handed to a filter only when it is noted as that of
//! the copy. So the former one gets its other name whenever somebody first looks after the exchange, also when its datastore was away
//! until then.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use vmseal_api::atomic_file;
use vmseal_api::host::DiskSpec;
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::Problem;

use super::{look, pair};
use crate::storage::file_error::failed;
use crate::storage::file_identity::FileIdentity;
use crate::storage::home::Home;
use crate::storage::locked::{Access, open_locked};

/// The replicas that are being set aside, by path: what a thread that was given up does later must not meet what another has made since.
static PLACES: Mutex<BTreeMap<PathBuf, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());

/// Gives the former replica of a disk its other name, where it still has that of the disk's replica. `home` is on the replica's
/// datastore, and `image` is what the disk has now. Blocks.
///
/// # Errors
/// Those of the file system.
pub fn set_aside(home: &Home, disk: DiskId, image: &FileIdentity) -> Result<(), Problem> {
    let (replica, former) = (home.replica(disk), home.former_replica(disk));
    let mut all = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    let place = Arc::clone(all.entry(replica.clone()).or_default());
    drop(all);
    let _alone = place.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(there) = identity(&replica)? else { return Ok(()) };
    let is_own = pair::read(home, disk).is_some_and(|pair| pair.is_of(image, &there));
    if is_own || identity(&former)?.is_some() {
        return Ok(());
    }
    std::fs::rename(&replica, &former)
        .and_then(|()| atomic_file::flush_directory_of(&former))
        .map_err(|error| failed(&replica, "renamed", &error))
}

/// Removes the former replica of a disk; `overwrite` gets it before. Where there is none, nothing is done. `image` is what the disk
/// has now. Blocks.
///
/// # Errors
/// `in-use` while a filter has it open; `wrong-state` when its datastore is not there; those of `overwrite` and of the file system.
pub fn remove(
    vm: VmId,
    disk: &DiskSpec,
    image: &FileIdentity,
    overwrite: impl FnOnce(&File) -> Result<(), Problem>,
) -> Result<(), Problem> {
    let Some(place) = &disk.replica else { return Ok(()) };
    let home = Home::of(&place.datastore, vm)?;
    set_aside(&home, disk.disk, image)?;
    let path = home.former_replica(disk.disk);
    if let Some(file) = open_locked(&path, Access::Write)? {
        overwrite(&file)?;
        home.remove_locked(&path)?;
    }
    // With the last file the directory goes.
    home.remove(&path)
}

/// Which file has a name; none when there is none.
fn identity(path: &Path) -> Result<Option<FileIdentity>, Problem> {
    match path.symlink_metadata() {
        Ok(metadata) => Ok(Some(FileIdentity::in_metadata(&metadata))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(path, "looked at", &error)),
    }
}

/// Checks that the datastore of a disk's replica is there, and has room for another replica beside the present one: as much as
/// that has, and a header.
///
/// # Errors
/// `wrong-state` when it carries no mark or another one; `no-space`; `timed-out`.
pub async fn has_room_for_another(vm: VmId, disk: &DiskSpec) -> Result<(), Problem> {
    let Some(place) = disk.replica.clone() else { return Ok(()) };
    let id = disk.disk;
    let measure = move |home: &Home| {
        let taken = home.replica(id).symlink_metadata().map_or(0, |it| it.blocks() * 512);
        home.check_room(vmseal_luks::DATA_OFFSET.saturating_add(taken))
    };
    look(&place.datastore, vm, measure).await
}
