//! What the inventory has of a VM, as its host is told of it.

use vmseal_api::host::{AboutVm, Device, DiskSpec, NicSpec, SnapshotSpec, VmSpec};

use crate::store::disks::Disk;
use crate::store::snapshots::Snapshot;
use crate::store::vms::Vm;

/// The definition of a VM for its host, without the disks that a task adds or removes.
#[must_use]
pub fn spec_of(vm: &Vm, disks: &[Disk], nics: &[NicSpec]) -> VmSpec {
    let disks = disks.iter().filter(|disk| !disk.detached).map(spec_of_disk);
    VmSpec {
        vm: vm.id,
        name: vm.name.clone(),
        vcpus: vm.vcpus,
        memory: vm.memory,
        policy: Some(vm.policy_name.clone()),
        key: vm.key.clone(),
        hardware: vm.hardware.clone(),
        devices: disks.map(Device::Disk).chain(nics.iter().cloned().map(Device::Nic)).collect(),
        snapshots: Vec::new(),
        images: None,
        about: Some(about(vm)),
    }
}

/// What users say of a VM that its descriptors have.
#[must_use]
pub fn about(vm: &Vm) -> AboutVm {
    AboutVm {
        description: vm.description.clone(),
        labels: vm.labels.clone(),
        autostart: vm.autostart,
        migration_encryption: vm.migration_encryption,
        on_drain: vm.on_drain,
        template: vm.template,
    }
}

/// A disk, as its host is told of it.
#[must_use]
pub fn spec_of_disk(disk: &Disk) -> DiskSpec {
    DiskSpec {
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
    }
}

/// A snapshot, as its host is told of it.
pub(super) fn spec_of_snapshot(of: Snapshot) -> SnapshotSpec {
    SnapshotSpec {
        snapshot: of.id,
        name: of.name,
        parent: of.parent,
        created: of.created,
        quiesced: of.quiesced,
        current: of.current,
        disks: of.disks,
        description: of.description,
    }
}
