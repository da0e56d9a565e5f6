//! Adopts the VMs of a datastore that the inventory does not have: after the loss of a server, or of the part of its
//! inventory that is newer than its backup.
//!
//! What is on the datastore is not trusted: each value is checked as a user's would be, the descriptor of an encrypted VM
//! is authenticated with its key, and a task has its host open every disk with that key before the VM is in the
//! inventory.

mod asked;
mod authentic;
mod differing;
mod memories;
mod newer;
mod rekeyed;
mod taken_since;

use std::collections::{HashMap, HashSet};
use std::slice;

use futures_util::StreamExt;
use futures_util::stream;
use vmseal_api::adopt::{AdoptStatus, AdoptVms, AdoptedVm, Adoption};
use vmseal_api::cloud_init::CLOUD_INIT_DISK;
use vmseal_api::datastore::{DatastoreContents, FoundImage, HeaderRole, ImageContent};
use vmseal_api::hardware::{Firmware, Hardware, TPM_DISK, VARIABLES_DISK};
use vmseal_api::host::descriptor::{self, DescribedDisk, DescribedSnapshot, VmDescriptor};
use vmseal_api::host::survey::{FoundDescriptor, FoundVm, HeaderDisk};
use vmseal_api::host::{
    DatastoreSpec, Device, DiskFacts, DiskRole, DiskSpec, DiskState, KeyReference, Power,
    SnapshotSpec, VmSpec,
};
use vmseal_api::id::{DatastoreId, DiskId, PolicyId, ProviderId, VmId, check_name};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::replica::ReplicaPlace;

use self::asked::is_one_of;
use self::authentic::check_key;
use self::newer::{Changed, changed, newer};
use self::rekeyed::rekeyed;
use super::Services;
use super::caller::{Caller, Privilege};
use super::datastores::{describes, find, reached};
use super::hardware;
use super::vm_values::{check_memory, check_vcpus};
use crate::hosts::restored;
use crate::operation::{Definition, Operation};
use crate::store::datastores::{self, Datastore, OnHost};
use crate::store::disks::Placed;
use crate::store::events::NewEvent;
use crate::store::policies::Policy;
use crate::store::vms::Vm;
use crate::store::{Part, disks, keys, nics, policies, providers, vms};
use crate::tasks::Engine;

/// How many keys are asked for at a time.
const KEYS_AT_ONCE: usize = 8;

/// What a VM of a datastore is compared with.
struct Known {
    datastore: Datastore,
    /// The host that has looked at it, and gets its VMs.
    on: OnHost,
    /// The VMs that other hosts of the datastore have, and the names of these.
    elsewhere: HashMap<VmId, String>,
    /// The datastores of that host, by id.
    places: HashMap<DatastoreId, DatastoreSpec>,
    /// VMs by id.
    vms: HashMap<VmId, Vm>,
    /// VMs that cannot be adopted now, as it is not known which memory their snapshots keep, and why not.
    unseen: HashMap<VmId, String>,
    /// VMs that have another key than their disks, with that one; or why it cannot be had.
    rekeyed: HashMap<VmId, Result<Definition, String>>,
    /// VMs whose descriptors have other disks, network cards or snapshots, with those; or why these are not taken.
    changed: HashMap<VmId, Result<Changed, String>>,
    /// VMs whose descriptors say something else of them than the inventory, and what.
    differing: HashMap<VmId, Vec<String>>,
    /// The disks of the inventory, by id.
    disks: HashMap<DiskId, Placed>,
    policies: Vec<Policy>,
    providers: HashSet<ProviderId>,
    images: HashMap<(VmId, DiskId), FoundImage>,
    /// Whether these are all images of the datastore.
    has_all_images: bool,
}

/// Adopts the VMs of a datastore, or says what would become of them.
pub async fn adopt(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: AdoptVms,
    dry_run: bool,
) -> Result<Adoption, Problem> {
    caller.require(Privilege::VmConfigure)?;
    check(&request)?;
    let datastore = find(services, name).await?;
    let (on, agent) = reached(services, &datastore, name)?;
    let on = on.clone();
    let view = services.hosts.view(on.host);
    describes(view.description.as_deref(), &on.host_name)?;
    let survey = agent.survey_datastore(on.location.clone()).await?;
    // Refused if the mark is another one.
    let contents = agent.scan_datastore(datastore.spec(&on)).await?;
    let incomplete = survey.incomplete.or_else(|| contents.incomplete.clone());
    let mut known = known(services, datastore, on, contents).await?;
    let mut found = Vec::new();
    for vm in survey.vms {
        if request.vms.is_empty() || is_one_of(&known.vms, &vm, &request.vms) {
            found.push(completed(services, &known, &request, vm).await?);
        }
    }
    known.unseen = memories::complete(&*agent, &known, &mut found).await;
    known.rekeyed = rekeyed(services, &known, &found).await?;
    known.changed = changed(services, &known, &found).await?;
    known.differing = differing::differing(services, &known, &found).await?;
    if let Some(missing) = request
        .vms
        .iter()
        .find(|name| !found.iter().any(|it| is_one_of(&known.vms, it, slice::from_ref(*name))))
    {
        let what = format!("datastore '{}' has no VM '{missing}'", known.datastore.name);
        return Err(Problem {
            field: Some("vms".to_owned()),
            ..Problem::new(ErrorCode::NotFound, what)
        });
    }
    let mut taken: HashSet<String> = known.vms.values().map(|vm| vm.name.clone()).collect();
    let judged: Vec<_> =
        found.into_iter().map(|found| judge(&known, &request, found, &mut taken)).collect();
    let checked = stream::iter(judged).map(|(line, candidate)| async {
        match candidate {
            Some(candidate) => check_candidate(services, caller, &request, line, *candidate).await,
            None => (line, None),
        }
    });
    let checked: Vec<_> = checked.buffered(KEYS_AT_ONCE).collect().await;
    let mut lines = Vec::new();
    for (mut line, definition) in checked {
        line.power = view.vm(line.vm).map(|seen| seen.power);
        line.warnings.extend(definition.as_ref().and_then(|it| memories::lost(&view, it)));
        if let Some(definition) = definition.filter(|_| !dry_run) {
            begin(services, caller, definition, &mut line).await?;
        }
        if request.discard_newer
            && !dry_run
            && let Some(vm) = known.vms.get(&line.vm)
        {
            discard(services, caller, vm, &mut line).await?;
        }
        lines.push(line);
    }
    Ok(Adoption { datastore: known.datastore.name, vms: lines, incomplete })
}

fn check(request: &AdoptVms) -> Result<(), Problem> {
    for rename in &request.rename {
        check_name(&rename.name)
            .map_err(|error| Problem::invalid("rename", format!("'{}': {error}", rename.name)))?;
    }
    if request.discard_newer && request.vms.is_empty() {
        let what = "needs the VMs that are to be kept as the inventory has them (--vm)";
        return Err(Problem::invalid("discard_newer", what));
    }
    request.vcpus.map_or(Ok(()), check_vcpus)?;
    request.memory.map_or(Ok(()), check_memory)
}

async fn known(
    services: &Services,
    datastore: Datastore,
    on: OnHost,
    contents: DatastoreContents,
) -> Result<Known, Problem> {
    let all = Part::all();
    let mut read = services.store.read().await?;
    let places = datastores::of_host(&mut read, on.host).await?;
    let places = places.iter().filter_map(|it| Some((it.id, it.spec_on(on.host)?))).collect();
    let vms = vms::list(&mut read, &all).await?.into_iter();
    let policies = policies::list(&mut read, &all).await?.into_iter();
    let placed = disks::placed(&mut read).await?.into_iter();
    let has_all_images = contents.incomplete.is_none();
    let of_disks = contents.images.into_iter().filter_map(|image| {
        let named = image.named.filter(|named| !named.half_made && !named.replica)?;
        Some(((named.vm, named.disk), image))
    });
    let others = datastore.hosts.iter().filter(|it| it.host != on.host);
    let elsewhere = others.flat_map(|it| {
        let view = services.hosts.view(it.host);
        let vms = view.vms().iter().filter(|seen| seen.power != Power::Off);
        vms.map(|seen| (seen.vm, it.host_name.clone())).collect::<Vec<_>>()
    });
    Ok(Known {
        elsewhere: elsewhere.collect(),
        datastore,
        on,
        places,
        vms: vms.map(|vm| (vm.id, vm)).collect(),
        unseen: HashMap::new(),
        rekeyed: HashMap::new(),
        changed: HashMap::new(),
        differing: HashMap::new(),
        disks: placed.filter_map(|disk| Some((disk.id.parse().ok()?, disk))).collect(),
        policies: policies.collect(),
        providers: providers::names(&mut read).await?.into_keys().collect(),
        images: of_disks.collect(),
        has_all_images,
    })
}

/// A VM whose descriptor is missing gets one of what its images say, and of what the request does. It is not
/// authenticated, and says neither processors nor memory nor policy.
async fn completed(
    services: &Services,
    known: &Known,
    request: &AdoptVms,
    found: FoundVm,
) -> Result<FoundVm, Problem> {
    let vm = found.vm;
    let FoundDescriptor::Missing { images, key } = found.descriptor else { return Ok(found) };
    let unusable = |detail: String| Ok(without_memories(vm, FoundDescriptor::Unusable { detail }));
    let Some(named) = request.rename.iter().find(|rename| rename.vm == vm.to_string()) else {
        return unusable(format!(
            "it has no descriptor: its images alone are there. Give it a name (--rename {vm}=NAME)"
        ));
    };
    let key = match key {
        None => None,
        Some((provider, key_id)) if known.providers.contains(&provider) => {
            let mut read = services.store.read().await?;
            let owner = keys::owner(&mut read, provider, &key_id).await?;
            drop(read);
            if let Some(other) = owner.filter(|owner| *owner != vm) {
                // Nobody gets another VM's key by writing its id to a datastore.
                return unusable(format!("its headers name the key of VM {other}"));
            }
            match services.providers.get(provider)?.reference_of(vm, &key_id).await {
                Ok(key) => Some(key),
                Err(problem) => return unusable(problem.to_string()),
            }
        }
        Some((provider, key_id)) => Some(KeyReference { provider, key_id, check: String::new() }),
    };
    let (hardware, uses) = match by_roles(&images) {
        Ok(by_roles) => by_roles,
        Err(why) => return unusable(why),
    };
    let disk = |(image, (name, role)): (&HeaderDisk, (String, DiskRole))| DescribedDisk {
        disk: image.disk,
        name,
        size: image.size,
        encrypted: matches!(image.facts, DiskFacts::Luks2 { .. }),
        file: Some(format!("{}.raw", image.disk)),
        datastore: None,
        role,
        allocation: Default::default(),
        limits: Default::default(),
        cache: None,
        replica: None,
        facts: Some(image.facts.clone()),
    };
    let descriptor = Box::new(VmDescriptor {
        version: descriptor::VERSION,
        vm,
        name: named.name.clone(),
        vcpus: None,
        memory: None,
        policy: None,
        key,
        hardware,
        disks: images.iter().zip(uses).map(disk).collect(),
        nics: Vec::new(),
        snapshots: Vec::new(),
        about: Default::default(),
        mac: None,
    });
    Ok(without_memories(vm, FoundDescriptor::Read { descriptor, made: Vec::new() }))
}

/// A VM whose own descriptor is not there: which snapshots it has is not known.
fn without_memories(vm: VmId, descriptor: FoundDescriptor) -> FoundVm {
    FoundVm { vm, descriptor, memories: Vec::new(), unusable_memories: Vec::new() }
}

/// What the headers of a VM's disks say of its machine, and the name and role of each disk. Without a header that says so, a disk is
/// data, there is no TPM, and the firmware is a BIOS.
fn by_roles(images: &[HeaderDisk]) -> Result<(Hardware, Vec<(String, DiskRole)>), String> {
    let mut hardware = Hardware::default();
    let mut uses: Vec<(String, DiskRole)> = Vec::new();
    let mut count = 0;
    for image in images {
        let (name, role) = match image.role {
            HeaderRole::Data => {
                count += 1;
                (format!("disk{}", count - 1), DiskRole::Data)
            }
            HeaderRole::CloudInit => (CLOUD_INIT_DISK.to_owned(), DiskRole::CloudInit),
            HeaderRole::UefiVariables => {
                hardware.firmware = Firmware::Uefi;
                (VARIABLES_DISK.to_owned(), DiskRole::UefiVariables)
            }
            HeaderRole::SecureBootVariables => {
                hardware.firmware = Firmware::UefiSecureBoot;
                (VARIABLES_DISK.to_owned(), DiskRole::UefiVariables)
            }
            HeaderRole::Tpm => {
                hardware.tpm = true;
                (TPM_DISK.to_owned(), DiskRole::Tpm)
            }
        };
        if uses.iter().any(|(known, _)| *known == name) {
            return Err(format!("the headers of two of its disks say '{name}', and a VM has one"));
        }
        uses.push((name, role));
    }
    Ok((hardware, uses))
}

/// A VM against which nothing stands that is known without its key.
struct Candidate {
    descriptor: VmDescriptor,
    /// A VM that the inventory does not have; or one that gets another key. None of one that keeps its key.
    definition: Option<Definition>,
    /// What one that the inventory has gets if its descriptor is authentic.
    changed: Option<Changed>,
}

/// Compares a VM with the inventory.
fn judge(
    known: &Known,
    request: &AdoptVms,
    found: FoundVm,
    taken: &mut HashSet<String>,
) -> (AdoptedVm, Option<Box<Candidate>>) {
    let mut line = AdoptedVm {
        vm: found.vm,
        name: None,
        status: AdoptStatus::Refused,
        disks: None,
        key_id: None,
        policy: None,
        power: None,
        task: None,
        detail: String::new(),
        newer: Vec::new(),
        differs: known.differing.get(&found.vm).cloned().unwrap_or_default(),
        warnings: Vec::new(),
    };
    if let Some(vm) = known.vms.get(&found.vm) {
        if request.discard_newer {
            line.status = AdoptStatus::Known;
            line.name = Some(vm.name.clone());
            line.newer = newer(known, &found);
            line.detail = "it is kept as the inventory has it".to_owned();
            return (line, None);
        }
        return judge_known(known, vm, found, line);
    }
    if request.discard_newer {
        line.detail = "the inventory does not have it: there is nothing to keep".to_owned();
        return (line, None);
    }
    let (descriptor, made) = match found.descriptor {
        FoundDescriptor::Read { descriptor, made } => (*descriptor, made),
        FoundDescriptor::Unusable { detail } => {
            line.detail = detail;
            return (line, None);
        }
        FoundDescriptor::Missing { .. } => {
            line.detail = "it has no descriptor".to_owned();
            return (line, None);
        }
    };
    if let Some(host) = known.elsewhere.get(&found.vm) {
        let name = &known.datastore.name;
        line.detail = format!(
            "it is not off on host '{host}': adopt it there (vmseal datastore adopt {host}:{name})"
        );
        return (line, None);
    }
    let renamed = request
        .rename
        .iter()
        .find(|rename| rename.vm == descriptor.name || rename.vm == found.vm.to_string());
    let name = renamed.map_or(&descriptor.name, |rename| &rename.name).clone();
    line.name = Some(name.clone());
    line.disks = Some(descriptor.disks.len());
    line.key_id = descriptor.key.as_ref().map(|key| key.key_id.clone());
    if let Some(why) = known.unseen.get(&found.vm) {
        line.detail.clone_from(why);
        return (line, None);
    }
    match define(known, request, found.vm, name.clone(), &descriptor, &made) {
        Err(why) => line.detail = why,
        Ok(_) if taken.contains(&name) => {
            line.detail = format!(
                "another VM is called '{name}': give this one another name (--rename {}=NAME)",
                found.vm
            );
        }
        Ok(definition) => {
            taken.insert(name);
            line.policy = Some(definition.policy_name.clone());
            let definition = Some(Definition { memories: found.memories, ..definition });
            return (line, Some(Box::new(Candidate { descriptor, definition, changed: None })));
        }
    }
    (line, None)
}

/// Compares a VM of the inventory with what the datastore has of it.
fn judge_known(
    known: &Known,
    vm: &Vm,
    found: FoundVm,
    mut line: AdoptedVm,
) -> (AdoptedVm, Option<Box<Candidate>>) {
    line.status = AdoptStatus::Known;
    line.name = Some(vm.name.clone());
    line.detail = format!("the inventory has it, on host '{}'", vm.host_name);
    line.newer = newer(known, &found);
    let definition = match known.rekeyed.get(&vm.id) {
        Some(Err(why)) => {
            line.status = AdoptStatus::Refused;
            line.detail.clone_from(why);
            return (line, None);
        }
        Some(Ok(definition)) => Some(definition.clone()),
        None => None,
    };
    let changed = match known.changed.get(&vm.id) {
        Some(Err(why)) => {
            line.newer.push(newer::not_taken(why));
            None
        }
        Some(Ok(changed)) => Some(changed.clone()),
        None => None,
    };
    if let Some(definition) = &definition {
        line.status = AdoptStatus::Refused;
        line.key_id = definition.spec.key.as_ref().map(|key| key.key_id.clone());
    }
    match found.descriptor {
        FoundDescriptor::Read { descriptor, .. } if definition.is_some() || changed.is_some() => {
            (line, Some(Box::new(Candidate { descriptor: *descriptor, definition, changed })))
        }
        _ => (line, None),
    }
}

/// The definition of a VM, or why there is none.
fn define(
    known: &Known,
    request: &AdoptVms,
    vm: VmId,
    name: String,
    descriptor: &VmDescriptor,
    made: &[DiskState],
) -> Result<Definition, String> {
    if descriptor.vm != vm {
        return Err(format!("its descriptor is that of another VM, {}", descriptor.vm));
    }
    if descriptor.disks.is_empty() {
        return Err("its descriptor names no disk".to_owned());
    }
    let (Some(vcpus), Some(memory)) =
        (descriptor.vcpus.or(request.vcpus), descriptor.memory.or(request.memory))
    else {
        return Err(
            "its descriptor does not say how many processors and how much memory it has: give --vcpus and --memory"
                .to_owned(),
        );
    };
    if let Some(key) = &descriptor.key
        && !known.providers.contains(&key.provider)
    {
        return Err(format!(
            "its key is of provider {}, which is not here: restore that from its backup (vmseal provider add NAME --restore FILE)",
            key.provider
        ));
    }
    let encrypts =
        descriptor.disks.iter().any(|disk| disk.encrypted) || keeps_key(known, request, descriptor);
    let (policy, policy_name) = policy_of(known, request, descriptor, encrypts)?;
    let disks = descriptor.disks.iter().map(|disk| place(known, descriptor, disk, made));
    let disks = disks.collect::<Result<Vec<_>, String>>()?;
    let nics = descriptor.nics.iter().cloned().map(Device::Nic);
    Ok(Definition {
        spec: VmSpec {
            vm,
            name,
            vcpus,
            memory,
            policy: Some(policy_name.clone()),
            key: descriptor.key.clone().filter(|_| encrypts),
            hardware: descriptor.hardware.clone(),
            devices: disks.into_iter().map(Device::Disk).chain(nics).collect(),
            snapshots: descriptor.snapshots.iter().map(|it| snapshot(descriptor, it)).collect(),
            images: None,
            about: Some(descriptor.about.clone()),
        },
        host: known.on.host,
        host_name: known.on.host_name.clone(),
        policy,
        policy_name,
        replaces: None,
        replaces_devices: None,
        replaces_snapshots: None,
        memories: Vec::new(),
    })
}

/// Whether a VM of which no disk is encrypted has a key that it keeps: its policy encrypts. A VM that is being encrypted, or has just been
/// decrypted, has a key as well.
fn keeps_key(known: &Known, request: &AdoptVms, descriptor: &VmDescriptor) -> bool {
    let Some(asked) = request.policy.as_ref().or(descriptor.policy.as_ref()) else { return false };
    let called = |policy: &&Policy| policy.name == *asked || policy.id.to_string() == *asked;
    let policy = known.policies.iter().find(called);
    descriptor.key.is_some() && policy.is_some_and(|policy| policy.encryption)
}

/// A snapshot that a descriptor names.
fn snapshot(descriptor: &VmDescriptor, of: &DescribedSnapshot) -> SnapshotSpec {
    let disk = |at: &u8| descriptor.disks.get(usize::from(*at)).map(|disk| disk.disk);
    SnapshotSpec {
        snapshot: of.snapshot,
        name: of.name.clone(),
        parent: of.parent,
        created: of.created,
        quiesced: of.quiesced,
        current: of.current,
        disks: of.disks.iter().filter_map(disk).collect(),
        description: of.description.clone(),
    }
}

fn policy_of(
    known: &Known,
    request: &AdoptVms,
    descriptor: &VmDescriptor,
    encrypts: bool,
) -> Result<(PolicyId, String), String> {
    let Some(asked) = request.policy.as_ref().or(descriptor.policy.as_ref()) else {
        return Err("its descriptor does not name its policy: give --policy".to_owned());
    };
    let called = |policy: &&Policy| policy.name == *asked || policy.id.to_string() == *asked;
    let Some(policy) = known.policies.iter().find(called) else {
        return Err(format!("there is no policy '{asked}': make it, or give --policy"));
    };
    let name = &policy.name;
    if policy.encryption != encrypts {
        let is = if encrypts { "encrypted" } else { "not encrypted" };
        let does = if policy.encryption { "encrypts" } else { "does not encrypt" };
        return Err(format!("it is {is}, and policy '{name}' {does}: give --policy"));
    }
    let own = &descriptor.hardware.cpu_model;
    if let Some(model) = policy.cpu_model.as_ref().filter(|model| own.as_ref() != Some(*model)) {
        let own = own.as_deref().unwrap_or("the usual one");
        return Err(format!(
            "its processor model is {own}, and policy '{name}' has {model}: give --policy"
        ));
    }
    Ok((policy.id, name.clone()))
}

/// A disk, at its place on the host.
fn place(
    known: &Known,
    descriptor: &VmDescriptor,
    disk: &DescribedDisk,
    made: &[DiskState],
) -> Result<DiskSpec, String> {
    let name = &disk.name;
    if known.disks.contains_key(&disk.disk) {
        return Err(format!("another VM of the inventory has its disk '{name}'"));
    }
    let here = known.datastore.id;
    let of_host = |id: DatastoreId, what: &str| {
        known.places.get(&id).cloned().ok_or_else(|| {
            format!(
                "{what} '{name}' is on datastore {id}, which host '{}' does not have here: add it first (vmseal datastore add)",
                known.on.host_name
            )
        })
    };
    let datastore = of_host(disk.datastore.unwrap_or(here), "its disk")?;
    let replica = match &disk.replica {
        None => None,
        Some(replica) => Some(ReplicaPlace {
            datastore: of_host(replica.datastore, "the replica of its disk")?,
            bytes_per_second: replica.bytes_per_second,
        }),
    };
    let pinned = made.iter().find(|made| made.disk == disk.disk).map(|made| made.facts.clone());
    let facts = disk.facts.clone().or(pinned);
    let facts = facts.ok_or_else(|| format!("its disk '{name}' was never finished"))?;
    if disk.encrypted != matches!(facts, DiskFacts::Luks2 { .. }) {
        return Err(format!("what its descriptor says of its disk '{name}' is contradictory"));
    }
    if datastore.datastore == here {
        check_image(known.images.get(&(descriptor.vm, disk.disk)), descriptor, disk, &facts)?;
    }
    Ok(DiskSpec {
        disk: disk.disk,
        name: name.clone(),
        datastore,
        size: disk.size,
        encrypted: disk.encrypted,
        role: disk.role,
        allocation: disk.allocation,
        limits: disk.limits,
        cache: disk.cache,
        replica,
        facts: Some(facts),
    })
}

/// Whether the image of a disk is there, long enough, and names the disk and its key.
fn check_image(
    image: Option<&FoundImage>,
    descriptor: &VmDescriptor,
    disk: &DescribedDisk,
    facts: &DiskFacts,
) -> Result<(), String> {
    let name = &disk.name;
    let image = image.ok_or_else(|| {
        format!("the image of its disk '{name}' is not there, or was never finished")
    })?;
    let offset = match facts {
        DiskFacts::Raw => 0,
        DiskFacts::Luks2 { data_offset, .. } => *data_offset,
    };
    if image.size < disk.size.saturating_add(offset) {
        return Err(format!("the image of its disk '{name}' was truncated"));
    }
    match &image.content {
        ImageContent::Unreadable { detail } => Err(format!("its disk '{name}': {detail}")),
        // Without a MAC anybody could have said so: a guest would overwrite the only header.
        ImageContent::Vmseal { claims }
            if !disk.encrypted
                && claims
                    .iter()
                    .any(|claim| (claim.vm, claim.disk) == (descriptor.vm, disk.disk)) =>
        {
            Err(format!("its disk '{name}' is encrypted, and its descriptor says that it is not"))
        }
        _ if !disk.encrypted => Ok(()),
        ImageContent::Vmseal { claims } => {
            let its_own = claims.iter().any(|claim| {
                (claim.vm, claim.disk) == (descriptor.vm, disk.disk)
                    && descriptor.key.as_ref().is_some_and(|key| {
                        key.provider == claim.provider && key.key_id == claim.key_id
                    })
            });
            match its_own {
                true => Ok(()),
                false => Err(format!(
                    "the header of its disk '{name}' names another disk or key than its descriptor"
                )),
            }
        }
        ImageContent::ForeignLuks { detail } => Err(format!("its disk '{name}': {detail}")),
        ImageContent::Raw => {
            Err(format!("its disk '{name}' should be encrypted, and has no header"))
        }
    }
}

/// Checks what needs the VM's key, or another look at the inventory.
async fn check_candidate(
    services: &Services,
    caller: &Caller,
    request: &AdoptVms,
    mut line: AdoptedVm,
    candidate: Candidate,
) -> (AdoptedVm, Option<Definition>) {
    let Candidate { descriptor, definition, changed } = candidate;
    if let Some(Changed { definition, said }) = changed {
        match newer::check(services, caller, &descriptor, &definition).await {
            Ok(()) => {
                line.status = AdoptStatus::Possible;
                line.detail = newer::detail(&definition);
                line.newer = said;
                return (line, Some(definition));
            }
            Err(problem) => line.newer.push(newer::not_taken(&problem)),
        }
    }
    let Some(definition) = definition else { return (line, None) };
    let checked = async {
        if definition.spec.key.is_some() {
            caller.require(Privilege::EncryptNew)?;
        }
        if definition.replaces.is_none() {
            check_nics(services, &definition).await?;
            let (spec, host) = (&definition.spec, &definition.host_name);
            hardware::examine(services, definition.host, host, &spec.hardware, None).await?;
        }
        if definition.replaces.is_some() && definition.spec.key != descriptor.key {
            // Of the headers nothing but the key is taken, and it opens every disk before it is.
            return Ok("");
        }
        check_key(services, caller, request, &descriptor).await
    };
    match checked.await {
        Ok(remark) => {
            line.status = AdoptStatus::Possible;
            line.detail = match &definition.replaces {
                None => remark.to_owned(),
                Some(old) => format!(
                    "the inventory has it with key '{}'; it gets the one that its disks name",
                    old.key_id
                ),
            };
            (line, Some(definition))
        }
        Err(problem) => {
            line.detail = problem.to_string();
            (line, None)
        }
    }
}

/// Refuses network cards whose addresses other VMs have.
async fn check_nics(services: &Services, definition: &Definition) -> Result<(), Problem> {
    let is_own = |vm: &String| definition.replaces.is_some() && *vm == definition.spec.name;
    let mut read = services.store.read().await?;
    for nic in definition.spec.nics() {
        let owner = nics::owner(&mut read, nic.mac).await?;
        if let Some(vm) = owner.filter(|vm| !is_own(vm)) {
            let what = format!(
                "its network card '{}' has the address {}, which VM '{vm}' has here",
                nic.name, nic.mac
            );
            return Err(Problem::new(ErrorCode::AlreadyExists, what));
        }
    }
    Ok(())
}

/// Keeps a VM as the inventory has it.
async fn discard(
    services: &Services,
    caller: &Caller,
    vm: &Vm,
    line: &mut AdoptedVm,
) -> Result<(), Problem> {
    match newer::discard(services, caller, vm, line).await {
        Err(problem) if problem.code == ErrorCode::WrongState => {
            line.status = AdoptStatus::Refused;
            line.detail = problem.detail;
            Ok(())
        }
        other => other,
    }
}

async fn begin(
    services: &Services,
    caller: &Caller,
    definition: Definition,
    line: &mut AdoptedVm,
) -> Result<(), Problem> {
    let name = definition.spec.name.clone();
    // The host writes the descriptor anew with what the inventory says otherwise.
    let differed = definition.replaces.is_some() && !line.differs.is_empty();
    let operation = Operation::AdoptVm { vm: definition.spec.vm, definition: Box::new(definition) };
    let mut write = services.store.write().await?;
    match Engine::record(&mut write, operation, &name, caller.name()).await {
        Ok(task) => {
            if differed {
                let (kind, actor, target) = (restored::DIFFERED, caller.name(), name.as_str());
                let said = line.differs.join(". ");
                let detail = format!(
                    "before it was adopted, its descriptor said otherwise than the inventory. {said}"
                );
                write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
            }
            write.commit().await?;
            line.status = AdoptStatus::Begun;
            line.task = Some(task.id);
            services.engine.begin(task);
        }
        // Another request adopts it.
        Err(problem) if problem.code == ErrorCode::WrongState => {
            line.status = AdoptStatus::Refused;
            line.detail = problem.detail;
        }
        Err(problem) => return Err(problem),
    }
    Ok(())
}
