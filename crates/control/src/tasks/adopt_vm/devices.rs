//! The disks and network cards that a VM of the inventory gets, as its descriptor says them.

use vmseal_api::host::{Device, DiskRole, DiskSpec, NicSpec, SnapshotSpec};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::size::Size;

use crate::operation::Definition;
use crate::store::disks::{self, Disk};
use crate::store::{StoreError, Write, nics, vms};
use crate::tasks::run::{Run, StepError, wrong_state};

/// A disk that is made, as the inventory has it.
fn row(disk: &DiskSpec) -> Disk {
    Disk {
        id: disk.disk,
        name: disk.name.clone(),
        datastore: disk.datastore.clone(),
        // The inventory has the names of datastores elsewhere.
        datastore_name: String::new(),
        size: disk.size,
        encrypted: disk.encrypted,
        role: disk.role,
        allocation: disk.allocation,
        limits: disk.limits,
        cache: disk.cache,
        replica: disk.replica.clone().map(|place| (place, String::new())),
        image: None,
        facts: None,
        deleting: false,
        detached: false,
    }
}

/// Adds a disk that is made.
pub(super) async fn insert(
    write: &mut Write<'_>,
    vm: VmId,
    position: usize,
    disk: &DiskSpec,
) -> Result<(), StoreError> {
    disks::insert(write, vm, position, &row(disk)).await?;
    if let Some(facts) = &disk.facts {
        disks::pin_facts(write, disk.disk, facts).await?;
    }
    Ok(())
}

/// The disk of this id among devices.
fn disk_of(devices: &[Device], id: DiskId) -> Option<&DiskSpec> {
    devices.iter().find_map(|device| match device {
        Device::Disk(disk) if disk.disk == id => Some(disk),
        Device::Disk(_) | Device::Nic(_) => None,
    })
}

fn nics_of(devices: &[Device]) -> Vec<&NicSpec> {
    let nics = devices.iter().filter_map(|device| match device {
        Device::Nic(nic) => Some(nic),
        Device::Disk(_) => None,
    });
    nics.collect()
}

/// Refuses if the inventory has changed the devices of the VM since it was compared with its descriptor; or its snapshots, where it gets
/// more of them.
pub(super) async fn check_unchanged(
    run: &Run<'_>,
    before: &[Device],
    snapshots: Option<&[SnapshotSpec]>,
) -> Result<(), StepError> {
    let known = crate::hosts::definition(run.store(), run.vm_id).await?;
    let is_same = |of: &[SnapshotSpec]| snapshots.is_none_or(|before| of == before);
    if known.is_some_and(|(_, spec)| spec.devices == before && is_same(&spec.snapshots)) {
        return Ok(());
    }
    let name = &run.task.target;
    Err(wrong_state(format!(
        "the disks, network cards or snapshots of VM '{name}' were changed meanwhile: look at it, and adopt it again"
    )))
}

/// Gives the VM its devices; returns what is new of them, for people. It may be done again: then nothing is new.
pub(super) async fn take(
    write: &mut Write<'_>,
    definition: &Definition,
) -> Result<Vec<String>, StoreError> {
    let spec = &definition.spec;
    let there = disks::of_vm(write, spec.vm).await?;
    let mut told = Vec::new();
    for disk in spec.disks() {
        let (name, size) = (&disk.name, Size(disk.size));
        match there.iter().find(|known| known.id == disk.disk) {
            None => {
                let position = disks::next_position(write, spec.vm).await?;
                insert(write, spec.vm, position, disk).await?;
                if disk.role == DiskRole::Tpm {
                    set_tpm(write, spec.vm, true).await?;
                }
                told.push(format!("disk '{name}' of {size} is added"));
            }
            Some(known) if known.size < disk.size => {
                disks::set_size(write, disk.disk, disk.size).await?;
                told.push(format!("disk '{name}' has {size}, in place of {}", Size(known.size)));
            }
            Some(_) => {}
        }
    }
    let wanted = nics_of(&spec.devices);
    let there = nics::of_vm(write, spec.vm).await?;
    if !there.iter().eq(wanted.iter().copied()) {
        set_nics(write, spec.vm, &wanted).await?;
        let names: Vec<_> = wanted.iter().map(|nic| format!("'{}'", nic.name)).collect();
        let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        told.push(format!("its network cards are those of its descriptor: {names}"));
    }
    Ok(told)
}

/// Undoes [`take`]: the VM has the devices that it had. Images stay.
pub(super) async fn put_back(
    write: &mut Write<'_>,
    definition: &Definition,
    before: &[Device],
) -> Result<(), StoreError> {
    let spec = &definition.spec;
    for disk in spec.disks() {
        match disk_of(before, disk.disk) {
            None => {
                disks::delete(write, disk.disk).await?;
                if disk.role == DiskRole::Tpm {
                    set_tpm(write, spec.vm, false).await?;
                }
            }
            Some(known) => disks::set_size(write, disk.disk, known.size).await?,
        }
    }
    set_nics(write, spec.vm, &nics_of(before)).await
}

/// Gives the VM these network cards in place of all that it has: names and addresses may have gone from one card to another.
async fn set_nics(write: &mut Write<'_>, vm: VmId, wanted: &[&NicSpec]) -> Result<(), StoreError> {
    for nic in nics::all_of_vm(write, vm).await? {
        nics::delete(write, nic.nic).await?;
    }
    for (position, nic) in wanted.iter().enumerate() {
        nics::insert(write, vm, position, nic).await?;
    }
    Ok(())
}

/// Records whether the VM has a TPM, whose key is that of a disk.
async fn set_tpm(write: &mut Write<'_>, vm: VmId, tpm: bool) -> Result<(), StoreError> {
    if let Some(mut vm) = vms::get(write, vm).await? {
        vm.hardware.tpm = tpm;
        vms::set(write, &vm).await?;
    }
    Ok(())
}
