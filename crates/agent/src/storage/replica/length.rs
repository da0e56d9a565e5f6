//! How long a replica is: as its disk, which may grow (docs/decisions/247).
//!
//! ```text
//!  the replica is made longer ─► the image is ─► the size is on record ─► a filter with the longer disk, and the map of before
//!        └── not possible, or an agent dies: a replica that is too short is copied again, one that is too long is cut
//! ```
//! A replica that is shorter than its disk may have lost data, and its map is not believed any more. So what grows with its disk
//! gets its new length before anybody looks for it, and only where it had all of the former disk.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use vmseal_api::host::DiskSpec;
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::Problem;

use super::{look, pair};
use crate::storage::file_error::failed;
use crate::storage::home::Home;
use crate::storage::locked::Access;

/// The replicas whose lengths are changed, by path: what a thread that was given up does later must not cut what another one has made
/// longer since.
static LENGTHS: Mutex<BTreeMap<PathBuf, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());

/// What one holds who changes the length of the replica at `path`.
fn alone(path: &Path) -> Arc<Mutex<()>> {
    let mut all = LENGTHS.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(all.entry(path.to_owned()).or_default())
}

/// Gives a replica that is open and locked the length of its disk. One that was shorter is no longer noted as what the map is about.
///
/// # Errors
/// Those of the file system.
pub(super) fn fit(home: &Home, disk: DiskId, file: &File, length: u64) -> Result<(), Problem> {
    let path = home.replica(disk);
    let one = alone(&path);
    let _alone = one.lock().unwrap_or_else(PoisonError::into_inner);
    let found = file.metadata().map_err(|error| failed(&path, "read", &error))?.len();
    if found < length {
        // New, truncated, or unfinished. In this order, so that no map of missing data is believed.
        pair::remove(home, disk)?;
    }
    if found != length {
        // One that is longer was to grow with its disk, which has not: what the map is about stays.
        file.set_len(length).map_err(|error| failed(&path, "made", &error))?;
    }
    Ok(())
}

/// Makes the replica of a disk that is to have `size` bytes as long, durably. One that is not there, or is shorter than the disk is now, is
/// left to who opens it next. `access` is [`Access::BesideGuest`] while a filter has it: that works on what was there before.
///
/// # Errors
/// `in-use`, `wrong-state` when its datastore is not there, `timed-out`; those of the file system. All of it is copied again then.
pub async fn lengthen(
    vm: VmId,
    disk: &DiskSpec,
    offset: u64,
    size: u64,
    access: Access,
) -> Result<(), Problem> {
    let Some(place) = disk.replica.clone().filter(|_| disk.size < size) else { return Ok(()) };
    let (id, former) = (disk.disk, offset.saturating_add(disk.size));
    let length = offset.saturating_add(size);
    let lengthen = move |home: &Home| {
        let path = home.replica(id);
        let Some(file) = home.open_replica(id, access)? else { return Ok(()) };
        let one = alone(&path);
        let _alone = one.lock().unwrap_or_else(PoisonError::into_inner);
        let found = file.metadata().map_err(|error| failed(&path, "read", &error))?.len();
        if !(former..length).contains(&found) {
            return Ok(());
        }
        file.set_len(length)
            .and_then(|()| file.sync_all())
            .map_err(|error| failed(&path, "made longer", &error))
    };
    look(&place.datastore, vm, lengthen).await
}
