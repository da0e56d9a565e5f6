//! Replicas of disks that are copied: each copy gets another one, in the place of the former, when it is used.

use vmseal_api::host::version::MIRROR_REPLICAS;
use vmseal_api::host::{Allocation, Power};
use vmseal_api::problem::{ErrorCode, Problem};

use super::Wanted;
use crate::services::{Services, features};
use crate::store::disks::Disk;
use crate::tasks::mirror_vm;

/// Refuses disks with replicas where these could not be made anew.
///
/// # Errors
/// `wrong-state` in place, and for a move to where a replica is; `unsupported`; `unreachable` for a host that does not answer.
pub(super) fn require(services: &Services, wanted: &Wanted) -> Result<(), Problem> {
    let vm = &wanted.vm;
    let Some((first, _)) = replicated(wanted).next() else { return Ok(()) };
    let refused = |detail: String| Err(Problem::new(ErrorCode::WrongState, detail));
    if wanted.operation.is_in_place() {
        return refused(format!(
            "VM '{}' has a replica of its disk '{}', which would stay as it is: leave out --in-place, and the disk is copied and gets another replica, where there is room",
            vm.name, first.name
        ));
    }
    let to = mirror_vm::target(&wanted.operation).map(|to| to.datastore);
    let is_there = |disk: &Disk| {
        let replica = disk.replica.as_ref().map(|(place, _)| place.datastore.datastore);
        to.is_some() && replica == to
    };
    if let Some((disk, place)) = replicated(wanted).find(|(disk, _)| is_there(disk)) {
        return refused(format!(
            "the replica of disk '{}' of VM '{}' is on datastore '{place}', and a replica has to be on another datastore than its disk: move the disk to a third datastore, or leave it out (--disk)",
            disk.name, vm.name
        ));
    }
    features::require(services, vm, MIRROR_REPLICAS, "copy disks that have replicas")
}

/// The disks that are copied and have replicas, and the name of the datastore of each.
fn replicated(wanted: &Wanted) -> impl Iterator<Item = (&Disk, &str)> {
    wanted.disks().filter_map(|disk| Some((disk, disk.replica.as_ref()?.1.as_str())))
}

/// The replicas that the copies get, as disks: they take room where they are. Replicas are thin.
pub(super) fn replicated_copies(wanted: &Wanted) -> Vec<Disk> {
    let replica = |disk: &Disk| {
        let (place, name) = disk.replica.clone()?;
        let (datastore, datastore_name) = (place.datastore, name);
        let copy = wanted.copy(disk);
        Some(Disk { datastore, datastore_name, allocation: Allocation::Thin, ..copy })
    };
    wanted.disks().filter_map(replica).collect()
}

/// What is to be considered: until a new replica is complete its disk has no second copy.
pub(super) fn warning(services: &Services, wanted: &Wanted) -> Option<String> {
    let of: Vec<_> =
        replicated(wanted).map(|(disk, place)| format!("{} (on '{place}')", disk.name)).collect();
    if of.is_empty() {
        return None;
    }
    let (vm, of) = (&wanted.vm, of.join(", "));
    let view = services.hosts.view(vm.host);
    let is_at_rest = |power| matches!(power, Power::Off | Power::Suspended);
    let from = match view.vm(vm.id).is_none_or(|seen| is_at_rest(seen.power)) {
        true => ", which begins with the VM's next start",
        false => "",
    };
    Some(format!(
        "new replicas are made of disks {of}: the disks have no second copy from the use of the copies until these have caught up{from} (alarm 'replica-behind'; vmseal disk replica {} DISK)",
        vm.name
    ))
}
