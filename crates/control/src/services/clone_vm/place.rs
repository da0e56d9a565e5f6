//! Clones on another datastore of the same host: which disks go there, and whether they may.

use vmseal_api::host::{DatastoreSpec, NicSpec};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::CloneVm;

use crate::hosts::mounted;
use crate::hosts::osds;
use crate::services::{Services, create_vm, image_layouts, redundancy};
use crate::store::datastores::{self, Datastore};
use crate::store::disks::Disk;
use crate::store::policies::Policy;
use crate::store::{Write, vms};

/// The datastore that the request names, if it names one.
pub(super) async fn named(
    write: &mut Write<'_>,
    request: &CloneVm,
) -> Result<Option<Datastore>, Problem> {
    let Some(named) = &request.datastore else { return Ok(None) };
    let found = datastores::find(write, named).await.map_err(of_datastore)?;
    found.map(Some).ok_or_else(|| of_datastore(Problem::not_found("datastore", named)))
}

/// Has all disks of a clone be on a datastore. They have to be what the policy asks of the disks of a VM that is created there.
pub(super) async fn put(
    write: &mut Write<'_>,
    origin: &vms::Vm,
    policy: &Policy,
    (found, linked): (&Datastore, bool),
    made: &mut [Disk],
) -> Result<(), Problem> {
    let Some(to) = found.spec_on(origin.host) else {
        let detail = format!(
            "datastore '{}' belongs to host '{}', and the clone is made on host '{}', where VM '{}' is: choose a datastore of that host, or say which host it is for (--host)",
            found.name,
            found.host_names(),
            origin.host_name,
            origin.name
        );
        return Err(of_datastore(Problem::new(ErrorCode::WrongState, detail)));
    };
    let refusal = match linked {
        true => shares_elsewhere(origin, made, &to),
        false => has_replica_there(origin, made, &to),
    };
    if let Some(detail) = refusal {
        return Err(of_datastore(Problem::new(ErrorCode::WrongState, detail)));
    }
    for disk in made.iter_mut() {
        disk.datastore = to.clone();
        disk.datastore_name.clone_from(&found.name);
    }
    let encrypted = mounted::require_messenger(write, policy, origin.host, made).await;
    encrypted.map_err(of_datastore)?;
    osds::require(write, policy, made).await.map_err(of_datastore)?;
    redundancy::require(write, policy, made).await.map_err(of_datastore)
}

/// Asks the host whether it could make the disks of a clone where the request names a datastore, and says what is to be considered
/// there. Elsewhere the other VM has such disks already.
pub(super) async fn examine(
    services: &Services,
    vm: &vms::Vm,
    policy: &Policy,
    request: &CloneVm,
    (made, cards): (&[Disk], &[NicSpec]),
) -> Result<Option<String>, Problem> {
    if request.datastore.is_none() {
        return Ok(None);
    }
    create_vm::examine_disks(services, vm, made, cards).await.map_err(of_datastore)?;
    Ok(image_layouts::in_directories(policy, made))
}

pub(super) fn of_datastore(problem: Problem) -> Problem {
    Problem { field: Some("datastore".to_owned()), ..problem }
}

/// Why a linked clone cannot be there: what it shares are further names of files, which one datastore has.
fn shares_elsewhere(origin: &vms::Vm, made: &[Disk], to: &DatastoreSpec) -> Option<String> {
    let elsewhere = |disk: &&Disk| disk.role.is_data() && disk.datastore.datastore != to.datastore;
    let disk = made.iter().find(elsewhere)?;
    Some(format!(
        "disk '{}' of VM '{}' is on datastore '{}', and a linked clone shares its files there: leave out --datastore, or make a full clone (without --linked)",
        disk.name, origin.name, disk.datastore_name
    ))
}

/// Why a disk with a replica cannot be there: the replica is kept against the loss of the disk's datastore.
fn has_replica_there(origin: &vms::Vm, made: &[Disk], to: &DatastoreSpec) -> Option<String> {
    let (disk, name) = made.iter().find_map(|disk| {
        let (place, name) = disk.replica.as_ref()?;
        (place.datastore.datastore == to.datastore).then_some((disk, name))
    })?;
    Some(format!(
        "the replica of disk '{}' of VM '{}' is on datastore '{name}', as that of the clone would be, and a replica has to be on another datastore than its disk: choose another datastore",
        disk.name, origin.name
    ))
}
