//! What the datastore has of VMs of the inventory that is newer than the backup from which this was restored: disks that
//! were added or grew, network cards, and snapshots. It is taken from a descriptor that is authentic; else it is only told.
//!
//! A MAC shows that a host with the VM's key wrote the descriptor, but not when. Somebody who can write to the datastore can put an old
//! descriptor back, and a descriptor stays old where its host could not write the next one. So the VM gets nothing unless the inventory
//! was restored from a backup and has not changed the VM since. It also gets nothing if the descriptor lacks a disk that both the
//! inventory and the datastore have.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Display;
use std::mem;

use vmseal_api::adopt::AdoptedVm;
use vmseal_api::host::descriptor::{DescribedDisk, VmDescriptor};
use vmseal_api::host::survey::{FoundDescriptor, FoundVm};
use vmseal_api::host::version::SURVEY_MEMORIES;
use vmseal_api::host::{Device, DiskRole, DiskSpec, DiskState, NicSpec, Power, VmSpec};
use vmseal_api::id::VmId;
use vmseal_api::nic::NicLink;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::size::Size;

use super::authentic::is_made_with;
use super::rekeyed::encrypted;
use super::taken_since::{TakenSince, taken_since};
use super::{Known, check_image, check_nics, place};
use crate::hosts::restored;
use crate::operation::Definition;
use crate::services::caller::{Caller, Privilege};
use crate::services::vms::require_free;
use crate::services::{Services, hardware};
use crate::store::StoreError;
use crate::store::events::NewEvent;
use crate::store::snapshots;
use crate::store::vms::Vm;

/// What a VM that the inventory has gets, if its descriptor is authentic.
#[derive(Clone)]
pub(super) struct Changed {
    /// The VM as it will be, without disks that were removed.
    pub(super) definition: Definition,
    /// What is new in that, and what is not taken, for people: a sentence each.
    pub(super) said: Vec<String>,
}

/// The disks, network cards and snapshots that a VM gets.
struct Wanted {
    devices: Vec<Device>,
    snapshots: Option<TakenSince>,
    said: Vec<String>,
}

/// What the datastore has of a VM of the inventory that is newer than what the inventory says of it, for people: disks that
/// were added or grew after the backup from which it was restored. Nothing of it is authenticated.
pub(super) fn newer(known: &Known, found: &FoundVm) -> Vec<String> {
    let described: &[DescribedDisk] = match &found.descriptor {
        FoundDescriptor::Read { descriptor, .. } => &descriptor.disks,
        FoundDescriptor::Missing { .. } | FoundDescriptor::Unusable { .. } => &[],
    };
    let images = known.images.iter().filter(|((vm, _), _)| *vm == found.vm);
    // In one order each time.
    let images: BTreeSet<_> = images.map(|((_, disk), image)| (*disk, image.size)).collect();
    let mut newer = Vec::new();
    for (disk, length) in images {
        let Some(placed) = known.disks.get(&disk) else {
            let named = described.iter().find(|it| it.disk == disk);
            let name = named.map(|it| format!(" '{}'", it.name)).unwrap_or_default();
            newer.push(format!(
                "its disk{name} {disk} is on the datastore and not in the inventory, which is older than it: leave its file where it is, and do not start the VM if it needs the disk"
            ));
            continue;
        };
        if let Some(known) = placed.image_length().filter(|known| *known < length) {
            newer.push(format!(
                "the image of its disk '{}' has {}, and the inventory knows of {}: it grew since. Make the disk as long here (vmseal disk resize) before the guest uses it",
                placed.name,
                Size(length),
                Size(known),
            ));
        }
    }
    newer
}

/// What is said where nothing is taken.
pub(super) fn not_taken(why: &dyn Display) -> String {
    format!(
        "its descriptor says other disks, network cards or snapshots, which the VM does not get: {why}"
    )
}

/// What becomes of a VM that gets what its descriptor says.
pub(super) fn detail(definition: &Definition) -> String {
    match &definition.replaces {
        Some(old) if definition.spec.key.as_ref() != Some(old) => format!(
            "the inventory has it with key '{}', as it was at the backup; it gets the key, the disks, the network cards and the snapshots that its descriptor says",
            old.key_id
        ),
        _ => "the inventory has it as it was at the backup; it gets the disks, the network cards and the snapshots that its descriptor says".to_owned(),
    }
}

/// Keeps a VM as the inventory has it: nothing of what is newer on its datastores is taken any more, and its host writes descriptors of what
/// the inventory says when it is told of the VM the next time.
///
/// # Errors
/// `wrong-state` while a task works on the VM: it may be the one that takes what is newer.
pub(super) async fn discard(
    services: &Services,
    caller: &Caller,
    vm: &Vm,
    there: &AdoptedVm,
) -> Result<(), Problem> {
    let mut write = services.store.write().await?;
    require_free(&mut write, vm).await?;
    let (kind, actor, target) = (restored::KEPT, caller.name(), vm.name.as_str());
    let said = there.newer.iter().chain(&there.differs).cloned();
    let what = "as the inventory has it: what is newer on its datastores is discarded";
    let detail = [what.to_owned()].into_iter().chain(said).collect::<Vec<_>>().join(". ");
    write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
    write.commit().await?;
    let view = services.hosts.view(vm.host);
    let runs = view.vm(vm.id).is_some_and(|seen| seen.power != Power::Off);
    if !runs
        && let Err(problem) = crate::hosts::register(&services.store, &services.hosts, vm.id).await
    {
        tracing::info!(vm = vm.name, %problem, "its host learns of it later");
    }
    services.hosts.look_again(vm.host);
    Ok(())
}

/// The VMs that the inventory has with other disks, network cards or snapshots than their descriptors say; or why they do not get these.
pub(super) async fn changed(
    services: &Services,
    known: &Known,
    found: &[FoundVm],
) -> Result<HashMap<VmId, Result<Changed, String>>, Problem> {
    let mut changed = HashMap::new();
    let restored = restored::restored(&mut *services.store.read().await?).await?;
    let Some(restored) = restored else { return Ok(changed) };
    let tells_memories = services.hosts.view(known.on.host).has(SURVEY_MEMORIES);
    for found in found {
        let Some((vm, descriptor)) = encrypted(known, found) else { continue };
        let FoundDescriptor::Read { made, .. } = &found.descriptor else { continue };
        let is_its_key = match known.rekeyed.get(&vm.id) {
            None => descriptor.key == vm.key,
            // Where the headers name another key than the descriptor, that was overwritten.
            Some(definition) => definition.as_ref().is_ok_and(|it| it.spec.key == descriptor.key),
        };
        if !is_its_key {
            continue;
        }
        let Some((vm, spec)) = crate::hosts::definition(&services.store, vm.id).await? else {
            continue;
        };
        let mut read = services.store.read().await?;
        let rows = snapshots::of_vm(&mut read, vm.id).await?;
        let is_uncertain = restored::is_uncertain(&mut read, &vm).await?;
        drop(read);
        let of_inventory = (&*rows, &*spec.snapshots);
        // Since it was compared, one that the descriptor alone has may be one that was deleted here, whose layers are merged.
        let taken = match is_uncertain {
            true => taken_since(known, tells_memories, of_inventory, (found, descriptor)),
            false => Ok(None),
        };
        let compared = taken.and_then(|taken| compare(known, &spec, descriptor, made, taken));
        let wanted = match compared {
            Ok(None) => continue,
            Ok(Some(wanted)) => match stands_against(services, known, &vm, restored).await? {
                None => Ok(wanted),
                Some(why) => Err(why),
            },
            Err(why) => Err(why),
        };
        let id = vm.id;
        changed.insert(id, wanted.map(|wanted| define(vm, spec, descriptor, wanted)));
    }
    Ok(changed)
}

/// Why a VM gets nothing now, whatever its descriptor says.
async fn stands_against(
    services: &Services,
    known: &Known,
    vm: &Vm,
    restored_at: i64,
) -> Result<Option<String>, StoreError> {
    let mut read = services.store.read().await?;
    for (kind, why) in restored::KNOWN_SINCE {
        let since = restored::last_event(&mut read, kind, &vm.name).await?;
        if since.is_some_and(|since| since > restored_at) {
            return Ok(Some(why.to_owned()));
        }
    }
    if let Some(host) = known.elsewhere.get(&vm.id) {
        return Ok(Some(format!("the VM is not off on host '{host}'")));
    }
    let view = services.hosts.view(vm.host);
    // A guest whose memory is saved has the devices of its descriptor, and goes on with these alone.
    let has_none = |power: Power| matches!(power, Power::Off | Power::Suspended);
    let is_free = view.vm(vm.id).is_none_or(|seen| has_none(seen.power));
    let why =
        "the VM is neither off nor suspended. Stop it, and adopt it again before it is started";
    Ok((!is_free).then(|| why.to_owned()))
}

/// The VM as it will be.
fn define(vm: Vm, spec: VmSpec, descriptor: &VmDescriptor, wanted: Wanted) -> Changed {
    let Wanted { devices, snapshots, said } = wanted;
    let before = spec.devices;
    let mut spec = VmSpec { key: descriptor.key.clone(), devices, ..spec };
    let has_tpm = spec.disks().any(|disk| disk.role == DiskRole::Tpm);
    spec.hardware.tpm = has_tpm;
    let (replaces_snapshots, memories) = match snapshots {
        Some(taken) => (Some(mem::replace(&mut spec.snapshots, taken.all)), taken.memories),
        None => (None, Vec::new()),
    };
    let definition = Definition {
        spec,
        host: vm.host,
        host_name: vm.host_name,
        policy: vm.policy,
        policy_name: vm.policy_name,
        replaces: vm.key,
        replaces_devices: Some(before),
        replaces_snapshots,
        memories,
    };
    Changed { definition, said }
}

/// What a VM gets of what its descriptor says; none where that is what it has, and why not where the two cannot be brought
/// together.
fn compare(
    known: &Known,
    spec: &VmSpec,
    descriptor: &VmDescriptor,
    made: &[DiskState],
    snapshots: Option<TakenSince>,
) -> Result<Option<Wanted>, String> {
    let (mut said, mut told, mut devices) = (Vec::new(), Vec::new(), Vec::new());
    for disk in spec.disks() {
        let Some(described) = descriptor.disks.iter().find(|it| it.disk == disk.disk) else {
            told.push(removed(known, spec, disk)?);
            continue;
        };
        let size = size_of(known, descriptor, disk, described)?;
        if size > disk.size {
            let (name, before, now) = (&disk.name, Size(disk.size), Size(size));
            said.push(format!(
                "its disk '{name}' has grown from {before} to {now}: it gets that size"
            ));
        }
        devices.push(Device::Disk(DiskSpec { size, ..disk.clone() }));
    }
    for described in descriptor.disks.iter().filter(|it| spec.disk(it.disk).is_none()) {
        let disk = added(known, spec, descriptor, described, made)?;
        said.push(format!("its disk '{}' of {} was added: it gets it", disk.name, Size(disk.size)));
        devices.push(Device::Disk(disk));
    }
    said.extend(cards(spec, descriptor));
    said.extend(snapshots.iter().flat_map(|taken| taken.said.iter().cloned()));
    if said.is_empty() {
        return if told.is_empty() { Ok(None) } else { Err(told.join(". ")) };
    }
    devices.extend(descriptor.nics.iter().cloned().map(Device::Nic));
    said.extend(told);
    Ok(Some(Wanted { devices, snapshots, said }))
}

/// The size of a disk that the inventory and the descriptor have.
fn size_of(
    known: &Known,
    descriptor: &VmDescriptor,
    disk: &DiskSpec,
    described: &DescribedDisk,
) -> Result<u64, String> {
    let name = &disk.name;
    let is_elsewhere = described.datastore.is_some_and(|it| it != disk.datastore.datastore);
    let is_other = described.facts.is_some() && described.facts != disk.facts;
    let is_same = (described.encrypted, described.role) == (disk.encrypted, disk.role);
    if is_elsewhere || is_other || !is_same {
        return Err(format!("its disk '{name}' was moved or converted since the backup"));
    }
    if described.size < disk.size {
        return Err(format!("it is older than the inventory, in which disk '{name}' is longer"));
    }
    if described.size > disk.size && disk.datastore.datastore == known.datastore.id {
        let facts = disk.facts.as_ref();
        let facts = facts.ok_or_else(|| format!("its disk '{name}' was never finished"))?;
        let image = known.images.get(&(descriptor.vm, disk.disk));
        check_image(image, descriptor, described, facts)?;
    }
    Ok(described.size)
}

/// What is said of a disk that the inventory has and the descriptor does not. Its row stays: what people remove, they remove by
/// name.
fn removed(known: &Known, spec: &VmSpec, disk: &DiskSpec) -> Result<String, String> {
    let name = &disk.name;
    if disk.datastore.datastore != known.datastore.id {
        return Err(format!(
            "it does not have disk '{name}', which is on another datastore: whether that was removed is not seen from here"
        ));
    }
    if !known.has_all_images {
        return Err(format!(
            "it does not have disk '{name}', and the datastore could not be read whole: whether that was removed is not known"
        ));
    }
    if known.images.contains_key(&(spec.vm, disk.disk)) {
        return Err(format!(
            "it does not have disk '{name}', which the inventory has and whose image is there: it is older than the inventory, or the disk was being removed"
        ));
    }
    Ok(format!(
        "its disk '{name}' was removed, and its image is gone: remove it here as well (vmseal disk remove {} {name}) before the VM is started",
        spec.name
    ))
}

/// A disk that the descriptor has and the inventory does not.
fn added(
    known: &Known,
    spec: &VmSpec,
    descriptor: &VmDescriptor,
    described: &DescribedDisk,
    made: &[DiskState],
) -> Result<DiskSpec, String> {
    let name = &described.name;
    if let Some(placed) = known.disks.get(&described.disk)
        && placed.vm_id == spec.vm.to_string()
    {
        return Err(format!("a task has left its disk '{name}' half added or half removed"));
    }
    if !matches!(described.role, DiskRole::Data | DiskRole::Tpm) {
        return Err(format!(
            "its disk '{name}' was added, which is its firmware's or cloud-init's"
        ));
    }
    if spec.disks().any(|disk| disk.name == *name) {
        return Err(format!(
            "its disk '{name}' was removed, and another one of that name added, whose file {}.raw stays where it is",
            described.disk
        ));
    }
    place(known, descriptor, described, made)
}

/// What is new of the network cards.
fn cards(spec: &VmSpec, descriptor: &VmDescriptor) -> Vec<String> {
    let before: Vec<&NicSpec> = spec.nics().collect();
    let mut said = Vec::new();
    for nic in &descriptor.nics {
        let (name, is) = (&nic.name, card(nic));
        match before.iter().find(|it| it.nic == nic.nic) {
            None => said.push(format!("its network card '{name}' ({is}) was added: it gets it")),
            Some(old) if **old != *nic => {
                let was = card(old);
                said.push(format!(
                    "its network card '{name}' was changed: it is {is} now, and was {was}"
                ));
            }
            Some(_) => {}
        }
    }
    for old in &before {
        if !descriptor.nics.iter().any(|nic| nic.nic == old.nic) {
            said.push(format!(
                "its network card '{}' ({}) was removed: it loses it",
                old.name,
                card(old)
            ));
        }
    }
    let mut pairs = before.iter().zip(&descriptor.nics);
    if said.is_empty() && !pairs.all(|(old, nic)| old.nic == nic.nic) {
        said.push("its network cards have another order: it gets that".to_owned());
    }
    said
}

/// A network card, for people.
fn card(nic: &NicSpec) -> String {
    let plugged = if nic.link == NicLink::Down { ", unplugged" } else { "" };
    format!("{}, {}, {}{plugged}", nic.model.name(), nic.mac, nic.backend)
}

/// Checks whether a VM that the inventory has may get what its descriptor says. `--unauthenticated` is for VMs that it does not
/// have.
pub(super) async fn check(
    services: &Services,
    caller: &Caller,
    descriptor: &VmDescriptor,
    definition: &Definition,
) -> Result<(), Problem> {
    caller.require(Privilege::EncryptNew)?;
    let Some(key) = &descriptor.key else {
        return Err(Problem::new(ErrorCode::Damaged, "it names no key"));
    };
    if !is_made_with(services, caller, descriptor, key).await? {
        let what = "it is not authenticated with the key that it names";
        return Err(Problem::new(ErrorCode::Damaged, what));
    }
    check_nics(services, definition).await?;
    let (spec, host) = (&definition.spec, &definition.host_name);
    hardware::examine(services, definition.host, host, &spec.hardware, None).await
}
