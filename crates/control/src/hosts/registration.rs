//! The registration of a VM on its host.

use std::collections::BTreeSet;

use sqlx::SqliteConnection;
use vmseal_api::host::descriptor::bound_descriptions;
use vmseal_api::host::{
    ArrivingCopy, DatastoreSpec, Device, DiskRole, DiskSpec, SnapshotSpec, VmSpec, VmState,
};
use vmseal_api::id::{DatastoreId, DiskId, HostId, NicId, VmId};
use vmseal_api::model::SnapshotState;
use vmseal_api::problem::{ErrorCode, Problem};

use super::definition::{spec_of, spec_of_disk, spec_of_snapshot};
use super::earlier_agents::for_agent;
use super::{Hosts, restored};
use crate::store::datastores;
use crate::store::disks::{self, Disk};
use crate::store::nics;
use crate::store::policies;
use crate::store::snapshots;
use crate::store::vms::{self, Vm};
use crate::store::{Store, StoreError};

/// A VM and its definition for the host; `None` if the inventory does not have it.
///
/// # Errors
/// [`StoreError`].
pub async fn read(store: &Store, vm: VmId) -> Result<Option<(Vm, VmSpec)>, StoreError> {
    let mut read = store.read().await?;
    let Some(vm) = vms::get(&mut read, vm).await? else { return Ok(None) };
    let disks = disks::of_vm(&mut read, vm.id).await?;
    let nics = nics::of_vm(&mut read, vm.id).await?;
    let snapshots = snapshots::of_vm(&mut read, vm.id).await?;
    // One that is being taken or deleted is not for another inventory.
    let whole = snapshots.into_iter().filter(|it| it.state == SnapshotState::Ready);
    let mut snapshots: Vec<SnapshotSpec> = whole.map(spec_of_snapshot).collect();
    // A host would refuse a definition that is too long, and the VM could not be started.
    bound_descriptions(snapshots.iter_mut().map(|it| &mut it.description));
    let policy = policies::find(&mut read, &vm.policy.to_string()).await?;
    let images = policy.map(|policy| policy.image_layout);
    let spec = VmSpec { snapshots, images, ..spec_of(&vm, &disks, &nics) };
    Ok(Some((vm, spec)))
}

/// Whether the guest of a VM has exactly these disks and network cards: to register the VM again with them plugs nothing in or out. What
/// the host does not tell counts as different.
#[must_use]
pub fn has_devices(
    seen: &VmState,
    disks: impl Iterator<Item = DiskId>,
    nics: impl Iterator<Item = NicId>,
) -> bool {
    let Some(with) = &seen.started_with else { return false };
    let guests: BTreeSet<DiskId> = with.disks.iter().map(|disk| disk.disk).collect();
    let cards: BTreeSet<NicId> = seen.nics.iter().map(|nic| nic.nic).collect();
    guests == disks.collect::<BTreeSet<_>>() && cards == nics.collect::<BTreeSet<_>>()
}

/// The definition of a VM for a host that may get it: its datastores are where that host has them.
///
/// # Errors
/// `not-found`: the inventory does not have it. `wrong-state`: the host has not all of its datastores.
pub async fn definition_at(store: &Store, vm: VmId, host: HostId) -> Result<VmSpec, Problem> {
    definition_with(store, vm, host, &[]).await
}

/// The same with copies of some of its disks, which are yet to be made there.
///
/// # Errors
/// As [`definition_at`].
pub async fn definition_with(
    store: &Store,
    vm: VmId,
    host: HostId,
    copies: &[ArrivingCopy],
) -> Result<VmSpec, Problem> {
    let Some((vm, mut spec)) = read(store, vm).await? else {
        return Err(Problem::not_found("VM", vm));
    };
    let mut from = store.read().await?;
    for disk in spec.disks_mut() {
        if let Some(copy) = copies.iter().find(|copy| copy.disk == disk.disk) {
            (disk.datastore, disk.facts) = (copy.datastore.clone(), None);
            continue;
        }
        let absent = |what: &str| {
            let detail = format!(
                "{what} '{}' of VM '{}' is on a datastore that the host does not have (vmseal datastore share)",
                disk.name, vm.name
            );
            Problem::new(ErrorCode::WrongState, detail)
        };
        let place = place_on(&mut from, disk.datastore.datastore, host).await?;
        let place = place.ok_or_else(|| absent("disk"))?;
        let replica = match &disk.replica {
            Some(replica) => {
                let place = place_on(&mut from, replica.datastore.datastore, host).await?;
                Some(place.ok_or_else(|| absent("the replica of disk"))?)
            }
            None => None,
        };
        disk.datastore = place;
        if let (Some(replica), Some(place)) = (&mut disk.replica, replica) {
            replica.datastore = place;
        }
    }
    Ok(spec)
}

/// Where a host has a datastore; none if it does not have it.
async fn place_on(
    from: &mut SqliteConnection,
    datastore: DatastoreId,
    host: HostId,
) -> Result<Option<DatastoreSpec>, Problem> {
    let known = datastores::find(from, &datastore.to_string()).await?;
    Ok(known.and_then(|known| known.spec_on(host)))
}

/// Registers a VM on its host with a disk that it does not have, for the host to make or delete.
///
/// # Errors
/// Those of [`register`].
pub async fn register_with(
    store: &Store,
    hosts: &Hosts,
    vm: VmId,
    disk: &Disk,
) -> Result<Vm, Problem> {
    let _unchanged = hosts.lock(vm).await;
    let Some((vm, mut spec)) = read(store, vm).await? else {
        return Err(Problem::not_found("VM", vm));
    };
    settle(store, hosts, &vm, &spec).await?;
    spec.devices.retain(|it| !matches!(it, Device::Disk(known) if known.disk == disk.id));
    spec.devices.push(Device::Disk(DiskSpec { facts: None, ..spec_of_disk(disk) }));
    // Hosts take the disk with a TPM's key for a VM with a TPM alone.
    spec.hardware.tpm |= disk.role == DiskRole::Tpm;
    let spec = for_agent(spec, hosts.view(vm.host).description.as_deref());
    hosts.agent(vm.host)?.register_vm(spec).await?;
    Ok(vm)
}

/// Registers a VM on its host, as the inventory has it now.
///
/// # Errors
/// `not-found`: the inventory does not have it; `wrong-state`: it is newer on its datastore, and the server was restored; or the host's.
pub async fn register(store: &Store, hosts: &Hosts, vm: VmId) -> Result<Vm, Problem> {
    let _unchanged = hosts.lock(vm).await;
    register_locked(store, hosts, vm).await
}

/// The same by a caller that has the VM's lock.
///
/// # Errors
/// Those of [`register`].
pub async fn register_locked(store: &Store, hosts: &Hosts, vm: VmId) -> Result<Vm, Problem> {
    let Some((vm, spec)) = read(store, vm).await? else {
        return Err(Problem::not_found("VM", vm));
    };
    settle(store, hosts, &vm, &spec).await?;
    let spec = for_agent(spec, hosts.view(vm.host).description.as_deref());
    hosts.agent(vm.host)?.register_vm(spec).await?;
    Ok(vm)
}

/// Compares a VM of an inventory that was restored, before it is registered.
async fn settle(store: &Store, hosts: &Hosts, vm: &Vm, spec: &VmSpec) -> Result<(), Problem> {
    let (agent, description) = (hosts.agent(vm.host)?, hosts.view(vm.host).description);
    if restored::settle(store, &*agent, description.as_deref(), (vm, spec)).await? {
        // Its alarm, if there is one, is over.
        hosts.look_again(vm.host);
    }
    Ok(())
}

/// Registers a VM on its host without the key that the inventory has of it. A host where a file is under the key refuses.
///
/// # Errors
/// Those of [`register`]; `wrong-state`.
pub async fn register_without_key(store: &Store, hosts: &Hosts, vm: VmId) -> Result<(), Problem> {
    let _unchanged = hosts.lock(vm).await;
    let Some((vm, spec)) = read(store, vm).await? else {
        return Err(Problem::not_found("VM", vm));
    };
    settle(store, hosts, &vm, &spec).await?;
    let spec = VmSpec { key: None, ..spec };
    let spec = for_agent(spec, hosts.view(vm.host).description.as_deref());
    hosts.agent(vm.host)?.register_vm(spec).await
}
