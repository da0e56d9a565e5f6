//! Takes the disks of a VM from a host that does not answer, before this one opens them.
//!
//! ```text
//!  the lease taken ──> each home: images taken from others, who are on the cluster's blocklist (vmseal-rbd)
//!   └── from here on the other host's agent starts no other filter for the guest ([`crate::storage::lease`])
//! ```
//! In this order: a `vmseal-rbd` that ends because it is on the blocklist is started again by its agent, under an address that the cluster takes
//! requests of. Images that this host has open then are refused to it. Those of a VM that is off here are not: its agent sees the lease.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use rustix::fs::XattrFlags;
use rustix::io::Errno;
use vmseal_api::host::{DatastoreSpec, Fence, VmSpec};
use vmseal_api::id::DatastoreId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::rbd::FENCE_ATTRIBUTE;

use crate::storage::file_error::failed;
use crate::storage::home::Home;
use crate::storage::lease;

/// Takes them. Blocks.
///
/// # Errors
/// `wrong-state` where a disk is on a directory, whose file system keeps nobody from writing; `conflict` where a later placement has the lease;
/// `unsupported` where a `vmseal-rbd` of an earlier version serves a pool; those of the cluster.
pub fn fence(Fence { vm, generation }: &Fence) -> Result<(), Problem> {
    let places = places(vm)?;
    lease::take_as_it_is(vm, *generation)?;
    places.into_iter().try_for_each(|place| take_home(Home::of(place, vm.vm)?.path()))
}

/// Where the VM's disks and their replicas are, each place once.
fn places(vm: &VmSpec) -> Result<Vec<&DatastoreSpec>, Problem> {
    let mut places: BTreeMap<DatastoreId, &DatastoreSpec> = BTreeMap::new();
    for disk in vm.disks() {
        let replica = disk.replica.as_ref().map(|replica| &replica.datastore);
        for place in std::iter::once(&disk.datastore).chain(replica) {
            if place.location.pool().is_none() {
                let what = format!(
                    "disk '{}' of VM '{}' is on {}, a directory: no host can be kept from writing there",
                    disk.name,
                    vm.name,
                    place.location.path().display()
                );
                return Err(Problem::new(ErrorCode::WrongState, what));
            }
            places.insert(place.datastore, place);
        }
    }
    Ok(places.into_values().collect())
}

/// Has `vmseal-rbd` take all that is in a VM's home from other hosts; nothing where the VM has no home there.
fn take_home(home: &Path) -> Result<(), Problem> {
    match rustix::fs::setxattr(home, FENCE_ATTRIBUTE, b"1", XattrFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            let what = format!(
                "the vmseal-rbd that serves {} is of an earlier version, and cannot take images from other hosts: mount the pool anew (vmseal datastore remount --host)",
                home.display()
            );
            Err(Problem::new(ErrorCode::Unsupported, what))
        }
        Err(error) => Err(failed(home, "taken from other hosts", &io::Error::from(error))),
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{DatastoreLocation, Device};

    use super::*;
    use crate::storage::datastore::tests::unmarked;
    use crate::storage::{datastore, pool};

    fn vm_on(place: &DatastoreSpec) -> VmSpec {
        let mut vm = crate::process::run_dir::tests::spec();
        let mut disk = crate::rules::tests::disk("system");
        disk.datastore = place.clone();
        vm.devices = vec![Device::Disk(disk)];
        vm
    }

    #[test]
    fn what_is_in_a_directory_is_refused_and_its_lease_stays() {
        let (directory, place) = unmarked();
        datastore::probe(&place).unwrap();
        let vm = vm_on(&place);
        std::fs::create_dir(directory.path().join(vm.vm.to_string())).unwrap();
        let refused = fence(&Fence { vm: vm.clone(), generation: 2 }).unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        assert!(refused.detail.contains("a directory"), "{refused}");
        assert_eq!(lease::read(&vm).unwrap(), 0);
    }

    /// Nothing is taken where what serves the place does not know how: `/proc` does not.
    #[test]
    fn each_place_is_asked_once_and_one_that_cannot_is_an_error() {
        let location =
            DatastoreLocation::Rbd { path: "/proc".into(), pool: Box::new(pool::tests::pool()) };
        let place = DatastoreSpec { datastore: DatastoreId::new(), location };
        let mut vm = vm_on(&place);
        vm.devices.push(vm.devices[0].clone());
        assert_eq!(places(&vm).unwrap(), [&place]);
        take_home(Path::new("/proc")).unwrap_err();
        take_home(Path::new("/proc/there/is/none")).unwrap();
    }
}
