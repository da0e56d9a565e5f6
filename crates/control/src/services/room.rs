//! Checks whether a host has enough memory, processors and disk space for a new VM.
//!
//! The same for copies of the disks of a VM, and for disks that are added or grow.
//!
//! A VM that can never fit is refused. A dry run warns where the host lacks room beside its other VMs: VMs share memory
//! and processors, and thin disks grow as guests write to them.

use std::collections::HashMap;

use vmseal_api::datastore::DatastoreCondition;
use vmseal_api::host::{Allocation, DatastoreSpec, HEADER_AREA, HostAgent, IN_PLACE_ROOM};
use vmseal_api::id::{DatastoreId, HostId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::size::Size;

use super::{Services, usage};
use crate::store::disks::Disk;
use crate::store::vms;

/// Checks that a VM does not have more memory than its host has in all, as far as that is known.
pub(super) fn check_memory(
    services: &Services,
    host: HostId,
    host_name: &str,
    memory: u64,
) -> Result<(), Problem> {
    let Some(description) = services.hosts.view(host).description else { return Ok(()) };
    if memory <= description.memory {
        return Ok(());
    }
    let detail = format!(
        "is {}, and host '{host_name}' has {} in all",
        Size(memory),
        Size(description.memory)
    );
    Err(Problem::invalid("memory", detail))
}

/// What is to be made, with the sizes as they were understood.
pub(super) fn understood(vm: &vms::Vm, made: &[Disk]) -> String {
    let disks = made.iter().map(|disk| {
        let all_of_it = match disk.allocation {
            Allocation::Preallocated => ", preallocated",
            Allocation::Thin => "",
        };
        // Of a VM that gets no key none is encrypted, and that is its policy's word.
        let in_the_clear =
            if vm.provider.is_some() && !disk.encrypted { ", in the clear" } else { "" };
        let (name, size, datastore) = (&disk.name, Size(disk.size), &disk.datastore_name);
        format!("{name} ({size} on datastore '{datastore}'{all_of_it}{in_the_clear})")
    });
    format!(
        "choose host '{}': virtual processors {}; memory {}; disks {}",
        vm.host_name,
        vm.vcpus,
        Size(vm.memory),
        disks.collect::<Vec<_>>().join(", ")
    )
}

/// Says where the VMs that run on a VM's host leave less memory than it has.
pub(super) async fn memory_beside(
    services: &Services,
    vm: &vms::Vm,
) -> Result<Option<String>, Problem> {
    let view = services.hosts.view(vm.host);
    let Some(description) = &view.description else { return Ok(None) };
    let room = usage::room(&mut *services.store.read().await?, vm.host, &view).await?;
    Ok(room.memory_left.is_some_and(|left| left < vm.memory).then(|| {
        format!(
            "the VMs that run on host '{}' have {} of its {} of memory: there is not enough for {} beside them",
            vm.host_name,
            Size(room.memory_running),
            Size(description.memory),
            Size(vm.memory)
        )
    }))
}

/// Checks that the VM's disks have room together, and says what its host does not have beside its other VMs.
pub(super) async fn examine(
    services: &Services,
    vm: &vms::Vm,
    made: &[Disk],
) -> Result<Vec<String>, Problem> {
    let mut warnings = shared(services, vm).await?;
    warnings.extend(examine_made(services, vm, made).await?);
    Ok(warnings)
}

/// Says what memory and processors a VM's host does not have beside its other VMs.
pub(super) async fn shared(services: &Services, vm: &vms::Vm) -> Result<Vec<String>, Problem> {
    let mut warnings: Vec<String> = memory_beside(services, vm).await?.into_iter().collect();
    if let Some(description) = &services.hosts.view(vm.host).description
        && vm.vcpus > description.cpus
    {
        warnings.push(format!(
            "host '{}' has {} processors, which {} virtual ones would share",
            vm.host_name, description.cpus, vm.vcpus
        ));
    }
    Ok(warnings)
}

/// Checks that the VM's disks have room together, and says where they may not once they are full.
pub(super) async fn examine_made(
    services: &Services,
    vm: &vms::Vm,
    made: &[Disk],
) -> Result<Vec<String>, Problem> {
    let agent = services.hosts.connected(vm.host)?;
    let mut warnings = Vec::new();
    for store in stores(made.iter().map(|disk| (disk, disk.encrypted))) {
        warnings.extend(store.examine(&*agent, "disks").await?);
    }
    Ok(warnings)
}

/// Checks that copies of disks of a VM have room where they are to be, beside these or elsewhere, and says where they may not. A thin disk
/// takes what its guest has written, which nobody has counted.
pub(super) async fn examine_copies(
    services: &Services,
    vm: &vms::Vm,
    copies: &[Disk],
) -> Result<Vec<String>, Problem> {
    let agent = services.hosts.connected(vm.host)?;
    let mut warnings = Vec::new();
    for store in stores(copies.iter().map(|disk| (disk, disk.encrypted))) {
        let examined = store.examine(&*agent, "copies of the disks").await;
        let warning = examined.map_err(|problem| Problem { field: None, ..problem })?;
        warnings.extend(warning);
    }
    Ok(warnings)
}

/// Says where a disk that is added may not have room once it is full. One whose room is allocated at once is refused by its host.
pub(super) async fn examine_added(
    services: &Services,
    vm: &vms::Vm,
    disk: &Disk,
) -> Result<Option<String>, Problem> {
    let header = if disk.encrypted { HEADER_AREA } else { 0 };
    let size = disk.size.saturating_add(header);
    let free = free_below(services, vm, disk, size).await?;
    Ok(free.map(|free| {
        format!(
            "disk '{}' may grow to {} on datastore '{}', and {} are free",
            disk.name,
            Size(size),
            disk.datastore_name,
            Size(free)
        )
    }))
}

/// Says where what a disk gets may not have room. What it had before may not be written yet, either: nobody has counted that.
pub(super) async fn examine_growth(
    services: &Services,
    vm: &vms::Vm,
    disk: &Disk,
    size: u64,
) -> Result<Option<String>, Problem> {
    let more = size.saturating_sub(disk.size);
    let free = free_below(services, vm, disk, more).await?;
    Ok(free.map(|free| {
        format!(
            "disk '{}' may take up to {} more on datastore '{}', and {} are free",
            disk.name,
            Size(more),
            disk.datastore_name,
            Size(free)
        )
    }))
}

/// What is free on a disk's datastore, in bytes, where that is less than this; none also where it cannot be told.
async fn free_below(
    services: &Services,
    vm: &vms::Vm,
    disk: &Disk,
    wanted: u64,
) -> Result<Option<u64>, Problem> {
    let agent = services.hosts.connected(vm.host)?;
    let condition = agent.measure_datastore(disk.datastore.clone()).await?;
    // What else is wrong with a datastore is said when the disk is examined.
    let DatastoreCondition::Available { usage, .. } = condition else { return Ok(None) };
    Ok((usage.free < wanted).then_some(usage.free))
}

/// Checks that there is room for what disks of a VM need beside their data while they are converted in their files.
pub(super) async fn examine_in_place(
    services: &Services,
    vm: &vms::Vm,
    disks: &[&Disk],
) -> Result<(), Problem> {
    let agent = services.hosts.connected(vm.host)?;
    let mut needed = HashMap::<DatastoreId, (&Disk, u64)>::new();
    for disk in disks {
        let grows = disk.allocation == Allocation::Preallocated && !disk.encrypted;
        let header = if grows { HEADER_AREA } else { 0 };
        needed.entry(disk.datastore.datastore).or_insert((disk, 0)).1 += IN_PLACE_ROOM + header;
    }
    for (disk, needed) in needed.into_values() {
        let DatastoreCondition::Available { usage, .. } =
            agent.measure_datastore(disk.datastore.clone()).await?
        else {
            continue;
        };
        if usage.free < needed {
            let detail = format!(
                "{} are needed on datastore '{}' beside the disks to convert them in place, and {} are free: free some room",
                Size(needed),
                disk.datastore_name,
                Size(usage.free)
            );
            return Err(Problem::new(ErrorCode::NoSpace, detail));
        }
    }
    Ok(())
}

/// What images of disks, each with whether it is encrypted, take of their datastores.
fn stores<'a>(made: impl Iterator<Item = (&'a Disk, bool)>) -> Vec<Store<'a>> {
    let mut stores = HashMap::<DatastoreId, Store<'a>>::new();
    for (disk, encrypted) in made {
        let store = stores.entry(disk.datastore.datastore).or_insert_with(|| Store {
            name: &disk.datastore_name,
            place: &disk.datastore,
            taken: 0,
            wanted: 0,
        });
        let header = if encrypted { HEADER_AREA } else { 0 };
        let size = disk.size.saturating_add(header);
        store.wanted = store.wanted.saturating_add(size);
        if disk.allocation == Allocation::Preallocated {
            store.taken = store.taken.saturating_add(size);
        }
    }
    stores.into_values().collect()
}

/// What disks of a VM take of a datastore.
struct Store<'a> {
    name: &'a str,
    place: &'a DatastoreSpec,
    /// What they take when they are made, in bytes.
    taken: u64,
    /// What they take when they are full.
    wanted: u64,
}

impl Store<'_> {
    /// Compares what `what` take with what is free.
    async fn examine(&self, agent: &dyn HostAgent, what: &str) -> Result<Option<String>, Problem> {
        // What is wrong with a datastore has been said when each disk was examined.
        let DatastoreCondition::Available { usage, .. } =
            agent.measure_datastore(self.place.clone()).await?
        else {
            return Ok(None);
        };
        let (name, free) = (self.name, Size(usage.free));
        if self.taken > usage.free {
            let detail = format!(
                "the preallocated {what} take {} of datastore '{name}', their headers included, and {free} are free: free some room or use another datastore",
                Size(self.taken)
            );
            let field = Some("disks".to_owned());
            return Err(Problem { field, ..Problem::new(ErrorCode::NoSpace, detail) });
        }
        Ok((self.wanted > usage.free).then(|| {
            format!(
                "the {what} may grow to {} on datastore '{name}', and {free} are free",
                Size(self.wanted)
            )
        }))
    }
}
