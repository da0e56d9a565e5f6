//! The replicas of disks that are copied: a copy is made without its disk's replica taking part, and gets one of its own when it has
//! taken the disk's place ([`former`]).

use std::fs::File;

use tokio::task::spawn_blocking;
use vmseal_api::host::{DiskSpec, VmSpec};
use vmseal_api::id::VmId;
use vmseal_api::problem::Problem;

use super::of_disk;
use crate::filter::Replica;
use crate::storage::builder::internal;
use crate::storage::file_error::failed;
use crate::storage::home::Home;
use crate::storage::opening::data_offset;
use crate::storage::replica::{self, former};

/// Prepares the replica of a disk for a filter that writes to it, where the disk is now: in its image, or in the copy that has taken its
/// place.
///
/// # Errors
/// As [`replica::for_writer`]; `damaged` when it cannot be told where the disk's data is.
pub async fn replica_for_writer(
    spec: &VmSpec,
    disk: &DiskSpec,
    image: &File,
    offset: u64,
) -> Result<Option<Replica>, Problem> {
    if disk.replica.is_none() {
        return Ok(None);
    }
    let (vm, of) = (spec.vm, disk.clone());
    let mirror = spawn_blocking(move || of_disk(vm, &of)).await.map_err(internal)??;
    match mirror.filter(|mirror| mirror.pivoted) {
        Some(mirror) => {
            let disk = mirror.pivoted_disk(disk);
            replica::for_writer_of_copy(spec, &disk, image, offset).await
        }
        None => replica::for_writer(spec, disk, image, offset).await,
    }
}

/// Has all of a disk be copied to its replica by the next filter that writes to both: until then it is written without its replica. Nobody
/// has the replica and its map open. Does nothing for a disk without one. Blocks.
///
/// # Errors
/// As [`replica::copy_again`]; `damaged` when it cannot be told where the disk's data is. The disk must not be written then.
pub fn leave_replica(vm: VmId, disk: &DiskSpec) -> Result<(), Problem> {
    if disk.replica.is_none() {
        return Ok(());
    }
    replica::copy_again(&home_of_map(vm, disk)?, disk.disk)
}

/// Whether a disk is written without its replica until another filter begins ([`leave_replica`]). Blocks.
///
/// # Errors
/// Those of the image's datastore.
pub fn has_left_replica(vm: VmId, disk: &DiskSpec) -> Result<bool, Problem> {
    let map = home_of_map(vm, disk)?.map(disk.disk);
    let there = map.try_exists().map_err(|error| failed(&map, "looked at", &error))?;
    Ok(disk.replica.is_some() && !there)
}

/// Where the map of a disk's replica is: beside its image, or beside the copy that has taken its place.
fn home_of_map(vm: VmId, disk: &DiskSpec) -> Result<Home, Problem> {
    match of_disk(vm, disk)?.filter(|mirror| mirror.pivoted) {
        Some(mirror) => Home::of(&mirror.pivoted_disk(disk).datastore, vm),
        None => Home::of(&disk.datastore, vm),
    }
}

/// Makes the replica of a disk whose copy has taken its place and which nobody uses: it has nothing before a guest's filter fills it.
///
/// # Errors
/// As [`replica_for_writer`].
pub async fn make_replica(spec: &VmSpec, disk: &DiskSpec, image: &File) -> Result<(), Problem> {
    let Some(facts) = &disk.facts else { return Ok(()) };
    replica_for_writer(spec, disk, image, data_offset(facts)).await.map(drop)
}

/// Checks that disks could get other replicas, beside those that they have until then.
///
/// # Errors
/// As [`former::has_room_for_another`].
pub async fn examine_replica(spec: &VmSpec, disk: &DiskSpec) -> Result<(), Problem> {
    former::has_room_for_another(spec.vm, disk).await
}
