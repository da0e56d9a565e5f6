//! The registration of a VM on its host.

use vmseal_api::host::{Device, DiskSpec, NicSpec, VmSpec};
use vmseal_api::id::VmId;
use vmseal_api::problem::Problem;

use super::Hosts;
use crate::store::disks::{self, Disk};
use crate::store::nics;
use crate::store::vms::{self, Vm};
use crate::store::{Store, StoreError};

/// The definition of a VM for its host.
#[must_use]
pub fn spec_of(vm: &Vm, disks: &[Disk], nics: &[NicSpec]) -> VmSpec {
    let disks = disks.iter().map(|disk| DiskSpec {
        disk: disk.id,
        name: disk.name.clone(),
        datastore: disk.datastore.clone(),
        size: disk.size,
        encrypted: disk.encrypted,
        allocation: disk.allocation,
        role: disk.role,
        limits: disk.limits,
        cache: disk.cache,
        replica: disk.replica.as_ref().map(|(place, _)| place.clone()),
        facts: disk.facts.clone(),
    });
    VmSpec {
        vm: vm.id,
        name: vm.name.clone(),
        vcpus: vm.vcpus,
        memory: vm.memory,
        key: vm.key.clone(),
        devices: disks.map(Device::Disk).chain(nics.iter().cloned().map(Device::Nic)).collect(),
    }
}

/// A VM and its definition for the host; `None` if the inventory does not have it.
pub(super) async fn read(store: &Store, vm: VmId) -> Result<Option<(Vm, VmSpec)>, StoreError> {
    let mut read = store.read().await?;
    let Some(vm) = vms::get(&mut read, vm).await? else { return Ok(None) };
    let disks = disks::of_vm(&mut read, vm.id).await?;
    let nics = nics::of_vm(&mut read, vm.id).await?;
    let spec = spec_of(&vm, &disks, &nics);
    Ok(Some((vm, spec)))
}

/// Registers a VM on its host, as the inventory has it now.
///
/// # Errors
/// `not-found`: the inventory does not have it; or the host's.
pub async fn register(store: &Store, hosts: &Hosts, vm: VmId) -> Result<Vm, Problem> {
    let _unchanged = hosts.lock(vm).await;
    let Some((vm, spec)) = read(store, vm).await? else {
        return Err(Problem::not_found("VM", vm));
    };
    hosts.agent(vm.host)?.register_vm(spec).await?;
    Ok(vm)
}
