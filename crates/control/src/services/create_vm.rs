//! Creates VMs: checks a request, chooses the host, and records a task.

use std::collections::HashSet;

use sqlx::SqliteConnection;
use vmseal_api::cloud_init::CLOUD_INIT_DISK;
use vmseal_api::filter::{CRYPT_SECTOR, SERIAL_MAX, check_caches};
use vmseal_api::hardware::{Hardware, TPM_DISK, VARIABLES_DISK};
use vmseal_api::host::{DatastoreSpec, DiskRole, DiskSpec, ImageSource, NewDisk, NicSpec};
use vmseal_api::id::{DiskId, HostId, VmId, check_name};
use vmseal_api::model::{Lifecycle, Plan, Task};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::replica::ReplicaPlace;
use vmseal_api::request::{CreateDisk, CreateVm, DISK_SIZE_MAX, DISK_SIZE_MIN, DISKS_MAX};
use vmseal_api::size::Size;
use vmseal_api::transfer::ImageFormat;

use super::caller::{Caller, Privilege};
use super::providers::usable;
use super::vm_values::{check_count, check_description, check_labels, check_memory, check_vcpus};
use super::vms::{begin, plan};
use super::{Outcome, Services, cloud_init, hardware, image_layouts, redundancy, room, usage};
use crate::hosts::mounted;
use crate::hosts::osds;
use crate::operation::Operation;
use crate::stalls;
use crate::store::datastores::OnHost;
use crate::store::policies::Policy;
use crate::store::{Write, datastores, disks, hosts, nics, policies, providers, vms};
use crate::tasks::Engine;

/// Creates a VM.
pub async fn create(
    services: &Services,
    caller: &Caller,
    request: CreateVm,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    check(&request)?;
    let (id, name) = (VmId::new(), &request.name);
    let documents = request.cloud_init.as_ref().map(|asked| cloud_init::documents(asked, id, name));
    let documents = documents.transpose()?;
    let mut hardware = request.hardware.clone();
    hardware.cpu_model = cpu_model(services, &request).await?;
    let host = choose_host(services, &request).await?;
    let key_box = ask_host(services, &host, id, &request, &hardware)
        .await
        .map_err(|problem| of_policy(problem, &request, &hardware))?;
    let chosen = Chosen { id, host, hardware };
    let mut write = services.store.write().await?;
    let mut reserved = reserve(services, caller, &mut write, &request, &chosen).await?;
    if dry_run {
        return planned(services, caller, write, reserved).await;
    }
    if reserved.disks.iter().any(is_filled_from_file) {
        // No transaction is held during a call to a host. So what this one reserves is given up, and reserved again after the call.
        drop(write);
        let Reserved { vm, disks, cards, .. } = &reserved;
        examine_those(services, vm, disks, cards, is_filled_from_file)
            .await
            .map_err(nothing_was_begun)?;
        write = services.store.write().await?;
        reserved = reserve(services, caller, &mut write, &request, &chosen).await?;
    }
    let Reserved { vm, for_cloud_init, .. } = &reserved;
    let sealed = match (documents, *for_cloud_init, key_box) {
        (Some(documents), Some(disk), Some(key_box)) => {
            Some(cloud_init::seal(key_box, vm, disk, &documents)?)
        }
        _ => None,
    };
    let operation = Operation::CreateVm { vm: vm.id, cloud_init: sealed, copies: None };
    begin(services, write, operation, vm, caller, dry_run).await
}

/// The problem of a host that was only asked, before anything is on record. For clients `timed-out` leaves in doubt whether something was
/// begun, and here it is known.
pub(super) fn nothing_was_begun(problem: Problem) -> Problem {
    match problem.code {
        ErrorCode::TimedOut => {
            let detail = format!("{}. Nothing was begun", problem.detail);
            Problem::new(ErrorCode::Unreachable, detail)
        }
        _ => problem,
    }
}

/// What is chosen for a new VM before the transaction that reserves it.
struct Chosen {
    id: VmId,
    host: ChosenHost,
    hardware: Hardware,
}

/// A new VM that is in the inventory, with its disks and network cards.
struct Reserved {
    vm: vms::Vm,
    disks: Vec<disks::Disk>,
    cards: Vec<NicSpec>,
    /// The disk with the documents, where there are some.
    for_cloud_init: Option<DiskId>,
    /// What a plan warns of.
    in_directories: Option<String>,
}

/// Checks what the inventory knows, and puts the VM into it.
async fn reserve(
    services: &Services,
    caller: &Caller,
    write: &mut Write<'_>,
    request: &CreateVm,
    Chosen { id, host, hardware }: &Chosen,
) -> Result<Reserved, Problem> {
    let policy = policies::find(write, &request.policy).await?.ok_or_else(|| Problem {
        field: Some("policy".to_owned()),
        ..Problem::not_found("policy", &request.policy)
    })?;
    if policy.encryption {
        caller.require(Privilege::EncryptNew)?;
    }
    hardware::check_tpm(&request.hardware, &policy)?;
    let provider = provider_of(services, write, &policy).await?;
    let mut made = place(write, &request.disks, &policy, host).await?;
    image_layouts::require(services, (host.id, &host.name), &policy, &made)?;
    stalls::require(&services.hosts, (host.id, &host.name), &policy)?;
    let in_directories = image_layouts::in_directories(&policy, &made);
    services.hosts.connected(host.id)?;
    room::check_memory(services, host.id, &host.name, request.memory)?;
    // It may have changed since.
    check_cpu_model(&policy, hardware.cpu_model.as_deref())?;
    let cards = super::nics::place(write, &request.nics).await?;
    let documents = request.cloud_init.as_ref();
    let documents = documents.and_then(|_| cloud_init::disk(&made, policy.encryption));
    let for_cloud_init = documents.as_ref().map(|disk| disk.id);
    made.extend(documents);
    let taken = request.uefi_variables.as_deref();
    made.extend(hardware::variables(hardware.firmware, &made, policy.encryption, taken));
    made.extend(hardware::tpm(hardware, &made, request.tpm_state.as_deref()));
    let vm = vms::Vm {
        id: *id,
        name: request.name.clone(),
        description: request.description.clone(),
        labels: request.labels.clone(),
        autostart: request.autostart,
        migration_encryption: request.migration_encryption,
        on_drain: Default::default(),
        template: false,
        host: host.id,
        host_name: host.name.clone(),
        policy: policy.id,
        policy_name: policy.name,
        vcpus: request.vcpus,
        memory: request.memory,
        hardware: hardware.clone(),
        provider: provider.map(|provider| provider.id),
        key: None,
        lifecycle: Lifecycle::Creating,
        seen_power: None,
        seen_stopped: None,
    };
    vms::insert(write, &vm).await?;
    for (position, disk) in made.iter().enumerate() {
        disks::insert(write, vm.id, position, disk).await?;
    }
    for (position, nic) in cards.iter().enumerate() {
        nics::insert(write, vm.id, position, nic).await?;
    }
    Ok(Reserved { vm, disks: made, cards, for_cloud_init, in_directories })
}

/// What would be done for a VM, which is not kept in the inventory.
async fn planned(
    services: &Services,
    caller: &Caller,
    mut write: Write<'_>,
    reserved: Reserved,
) -> Result<Outcome<Task>, Problem> {
    let Reserved { vm, disks, cards, in_directories, .. } = reserved;
    let operation = Operation::CreateVm { vm: vm.id, cloud_init: None, copies: None };
    let task = Engine::record(&mut write, operation, &vm.name, caller.name()).await?;
    // No transaction is held during a call to a host.
    drop(write);
    examine_disks(services, &vm, &disks, &cards).await?;
    let mut warnings = room::examine(services, &vm, &disks).await?;
    warnings.extend(in_directories);
    let mut planned = Plan { warnings, ..plan(&task, &vm) };
    planned.steps.insert(0, room::understood(&vm, &disks));
    Ok(Outcome::Planned(planned))
}

/// Whether a disk gets what is in a file of its host, which may be wrong: an image, variables of UEFI, or what a TPM keeps.
fn is_filled_from_file(disk: &disks::Disk) -> bool {
    disk.image.is_some()
}

/// The processor model of a VM: the one that it asks for, else that of its policy.
async fn cpu_model(services: &Services, request: &CreateVm) -> Result<Option<String>, Problem> {
    let policy = policies::find(&mut *services.store.read().await?, &request.policy).await?;
    let of_policy = policy.and_then(|policy| policy.cpu_model);
    Ok(request.hardware.cpu_model.clone().or(of_policy))
}

/// Says of a processor model that the host refuses whose it is, where the request names none.
fn of_policy(problem: Problem, request: &CreateVm, hardware: &Hardware) -> Problem {
    let is_model = problem.field.as_deref() == Some("hardware.cpu_model");
    match &hardware.cpu_model {
        Some(model) if is_model && request.hardware.cpu_model.is_none() => Problem {
            field: Some("policy".to_owned()),
            detail: format!(
                "'{}' gives VMs the processor model '{model}': {}",
                request.policy, problem.detail
            ),
            ..problem
        },
        _ => problem,
    }
}

/// Whether a VM of a policy may have this processor model.
pub(super) fn check_cpu_model(policy: &Policy, model: Option<&str>) -> Result<(), Problem> {
    let Some(wanted) = policy.cpu_model.as_deref().filter(|wanted| model != Some(*wanted)) else {
        return Ok(());
    };
    let detail = format!(
        "VMs of policy '{}' have the processor model '{wanted}', not {}: leave it out, or choose another policy",
        policy.name,
        model.map_or("the default one".to_owned(), |model| format!("'{model}'"))
    );
    Err(Problem::invalid("hardware.cpu_model", detail))
}

/// Chooses the host of a new VM: the one that has the datastores of all disks. Where several share them, that which the request
/// names, or the one that answers and has the most memory left.
async fn choose_host(services: &Services, request: &CreateVm) -> Result<ChosenHost, Problem> {
    let mut read = services.store.read().await?;
    let mut common: Option<(Vec<OnHost>, String)> = None;
    for (index, disk) in request.disks.iter().enumerate() {
        let found = find_datastore(&mut read, disk, index).await?;
        let names = found.host_names();
        let mut hosts = found.hosts;
        if let Some(named) = datastores::host_in(&disk.datastore) {
            hosts.retain(|on| on.host_name == named);
        }
        let Some((before, first)) = &mut common else {
            common = Some((hosts, names));
            continue;
        };
        before.retain(|on| hosts.iter().any(|it| it.host == on.host));
        if before.is_empty() {
            let detail = format!(
                "datastore '{}' belongs to host '{names}', and that of the first disk to '{first}': choose datastores of one host",
                found.name
            );
            return Err(Problem::invalid(format!("disks[{index}].datastore"), detail));
        }
    }
    let mut hosts = common.map(|(hosts, _)| hosts).unwrap_or_default();
    if let Some(wanted) = &request.host {
        hosts.retain(|on| on.host_name == *wanted || on.host.to_string() == *wanted);
        if hosts.is_empty() {
            let detail = format!(
                "host '{wanted}' does not have the datastores of all disks: choose datastores of that host (vmseal datastore list), or another host"
            );
            return Err(Problem::invalid("host", detail));
        }
    }
    hosts = active(&mut read, hosts).await?;
    let mut best: Option<(Option<u64>, OnHost)> = None;
    let several = hosts.len() > 1;
    for on in hosts {
        let room = match services.hosts.connected(on.host) {
            Ok(_) if several => {
                let view = services.hosts.view(on.host);
                let room = usage::room(&mut read, on.host, &view).await?;
                Some(room.memory_left.unwrap_or(0))
            }
            _ => None,
        };
        if best.as_ref().is_none_or(|(most, _)| room > *most) {
            best = Some((room, on));
        }
    }
    let (_, on) = best.ok_or_else(|| Problem::invalid("disks", "a VM has at least one disk"))?;
    Ok(ChosenHost { id: on.host, name: on.host_name })
}

/// Those of some hosts on which VMs are placed; there is one, or it is said why there is none.
async fn active(from: &mut SqliteConnection, among: Vec<OnHost>) -> Result<Vec<OnHost>, Problem> {
    let (mut active, mut refusal) = (Vec::new(), None);
    for on in among {
        let known = hosts::find(from, &on.host.to_string()).await?;
        match known.map_or(Ok(()), |host| host.require_active()) {
            Ok(()) => active.push(on),
            Err(why) => refusal = Some(why),
        }
    }
    match refusal.filter(|_| active.is_empty()) {
        Some(why) => Err(Problem { field: Some("host".to_owned()), ..why }),
        None => Ok(active),
    }
}

/// The datastore of a disk of a request.
async fn find_datastore(
    from: &mut SqliteConnection,
    disk: &CreateDisk,
    index: usize,
) -> Result<datastores::Datastore, Problem> {
    let found = datastores::find(from, &disk.datastore).await;
    found
        .and_then(|it| it.ok_or_else(|| Problem::not_found("datastore", &disk.datastore)))
        .map_err(|problem| Problem { field: Some(format!("disks[{index}].datastore")), ..problem })
}

/// Asks the host whether it has what the machine and its network cards need, and for its key box if documents are to be sealed. That
/// comes before the transaction that reserves the VM: none is held during a call to a host.
async fn ask_host(
    services: &Services,
    host: &ChosenHost,
    vm: VmId,
    request: &CreateVm,
    hardware: &Hardware,
) -> Result<Option<String>, Problem> {
    hardware::examine(services, host.id, &host.name, hardware, Some(request.memory)).await?;
    hardware::require_taking(services, (host.id, &host.name), request).await?;
    // A request that is repeated is refused as such: its cards may be in use by the VM that it has made.
    let made = vms::find(&mut *services.store.read().await?, &request.name).await?;
    if made.is_none() {
        super::nics::examine_wanted(services, (host.id, &host.name), vm, &request.nics).await?;
    }
    match &request.cloud_init {
        Some(_) => Ok(Some(cloud_init::key_box(services, host.id, &host.name).await?)),
        None => Ok(None),
    }
}

/// Asks the host whether the disks of a VM could be created, one by one. A field of a problem is that of a disk of a list.
pub(super) async fn examine_disks(
    services: &Services,
    vm: &vms::Vm,
    made: &[disks::Disk],
    cards: &[NicSpec],
) -> Result<(), Problem> {
    examine_those(services, vm, made, cards, |_| true).await
}

/// The same of some of them.
async fn examine_those(
    services: &Services,
    vm: &vms::Vm,
    made: &[disks::Disk],
    cards: &[NicSpec],
    is_meant: fn(&disks::Disk) -> bool,
) -> Result<(), Problem> {
    let agent = services.hosts.connected(vm.host)?;
    let spec = crate::hosts::spec_of(vm, made, cards);
    for (index, (disk, made)) in spec.disks().zip(made).enumerate() {
        if !is_meant(made) {
            continue;
        }
        let new = new_disk(disk, made.image.clone(), &vm.hardware);
        let of_machine = new.taken_variables().is_some() || new.taken_tpm_state().is_some();
        agent.examine_disk(new).await.map_err(|problem| Problem {
            // No disk of the request has it.
            field: problem.field.map(|field| match of_machine {
                true => field,
                false => format!("disks[{index}].{field}"),
            }),
            ..problem
        })?;
    }
    Ok(())
}

/// A disk as its host is asked about it.
fn new_disk(disk: &DiskSpec, source: Option<ImageSource>, hardware: &Hardware) -> NewDisk {
    let takes = disk.role == DiskRole::UefiVariables && source.is_some();
    NewDisk { disk: disk.clone(), source, firmware: takes.then_some(hardware.firmware) }
}

fn check(request: &CreateVm) -> Result<(), Problem> {
    check_name(&request.name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    check_vcpus(request.vcpus)?;
    check_memory(request.memory)?;
    check_description(&request.description)?;
    check_labels(request.labels.iter().map(|(key, value)| (key.as_str(), value.as_str())))?;
    check_count(&request.labels)?;
    if request.disks.is_empty() || request.disks.len() > DISKS_MAX {
        return Err(Problem::invalid("disks", format!("a VM has 1 to {DISKS_MAX} disks")));
    }
    super::nics::check(&request.nics)?;
    let mut names = HashSet::new();
    hardware::check(&request.hardware, request.memory)?;
    hardware::check_variables(request.uefi_variables.as_deref(), request.hardware.firmware)?;
    hardware::check_tpm_state(request.tpm_state.as_deref(), &request.hardware)?;
    hardware::check_network_boot(&request.hardware.boot, request.nics.len())
        .map_err(|what| Problem::invalid("hardware.boot", what))?;
    let reserved = [
        (request.cloud_init.is_some(), CLOUD_INIT_DISK, "with the cloud-init data"),
        (
            request.hardware.firmware.has_variables(),
            VARIABLES_DISK,
            "with the firmware's variables",
        ),
        (request.hardware.tpm, TPM_DISK, "with the key of the TPM"),
    ];
    let reserved: Vec<_> = reserved.into_iter().filter(|(is_made, ..)| *is_made).collect();
    if request.disks.len() + reserved.len() > DISKS_MAX {
        let detail = format!(
            "a VM has at most {DISKS_MAX} disks, those of cloud-init, of the firmware and of the TPM included"
        );
        return Err(Problem::invalid("disks", detail));
    }
    for (index, disk) in request.disks.iter().enumerate() {
        if let Some((_, name, what)) = reserved.iter().find(|(_, name, _)| disk.name == *name) {
            let detail = format!("'{name}' is the name of the disk {what}");
            return Err(Problem::invalid(format!("disks[{index}].name"), detail));
        }
        check_disk(disk).map_err(|(field, detail)| {
            Problem::invalid(format!("disks[{index}].{field}"), detail)
        })?;
        if !names.insert(&disk.name) {
            let detail = format!("'{}' is the name of another disk of this VM", disk.name);
            return Err(Problem::invalid(format!("disks[{index}].name"), detail));
        }
    }
    Ok(())
}

/// Checks a disk on its own; the field that is wrong, and why.
pub(super) fn check_disk(disk: &CreateDisk) -> Result<(), (&'static str, String)> {
    check_name(&disk.name).map_err(|error| ("name", error.to_string()))?;
    if disk.name.len() > SERIAL_MAX {
        // The guest sees it as the disk's serial number.
        return Err(("name", format!("a disk's name has at most {SERIAL_MAX} bytes")));
    }
    let sized = (DISK_SIZE_MIN..=DISK_SIZE_MAX).contains(&disk.size);
    if !sized || !disk.size.is_multiple_of(CRYPT_SECTOR.into()) {
        let detail = format!(
            "is {}: it must be {} to {}, a multiple of {}",
            Size(disk.size),
            Size(DISK_SIZE_MIN),
            Size(DISK_SIZE_MAX),
            Size(CRYPT_SECTOR.into())
        );
        return Err(("size", detail));
    }
    match (&disk.image, disk.format) {
        (Some(path), _) if !path.is_absolute() => {
            Err(("image", "must be an absolute path".to_owned()))
        }
        (Some(_), None) => {
            Err(("format", "is needed with an image: raw or qcow2. It is never guessed".to_owned()))
        }
        (None, Some(_)) => Err(("format", "is an image's, and none is given".to_owned())),
        _ => Ok(()),
    }
}

fn source_of(disk: &CreateDisk) -> Option<ImageSource> {
    let format = disk.format?;
    // Only a raw image may look like another, and a host of an earlier version does not know the field.
    let force = disk.force && format == ImageFormat::Raw;
    Some(ImageSource { path: disk.image.clone()?, format, force })
}

/// The provider of a policy's keys; it must be able to create one.
pub(super) async fn provider_of(
    services: &Services,
    write: &mut Write<'_>,
    policy: &Policy,
) -> Result<Option<providers::Provider>, Problem> {
    if !policy.encryption {
        return Ok(None);
    }
    let provider = match &policy.provider {
        Some((id, _)) => providers::find(write, &id.to_string()).await?,
        None => providers::default(write).await?,
    };
    let wrong = |detail: String| Err(Problem::new(ErrorCode::WrongState, detail));
    let Some(provider) = provider else {
        return wrong(format!(
            "policy '{}' encrypts, and there is no default key provider (vmseal provider default NAME)",
            policy.name
        ));
    };
    usable(services, provider).map(Some)
}

/// The host of a VM.
pub(super) struct ChosenHost {
    pub(super) id: HostId,
    pub(super) name: String,
}

/// Whether a disk is encrypted: as it asks, else as the policy has it. What is encrypted needs the key that a VM has whose policy encrypts.
fn encrypts(policy: &Policy, disk: &CreateDisk) -> Result<bool, String> {
    match disk.encrypted {
        Some(true) if !policy.encryption => Err(format!(
            "cannot be: policy '{}' does not encrypt, and its VMs have no key. Choose a policy that encrypts, and give encrypted=no for each disk that is to be in the clear",
            policy.name
        )),
        asked => Ok(asked.unwrap_or(policy.encryption)),
    }
}

/// The disks on their datastores, which the host must have.
pub(super) async fn place(
    write: &mut Write<'_>,
    wanted: &[CreateDisk],
    policy: &Policy,
    host: &ChosenHost,
) -> Result<Vec<disks::Disk>, Problem> {
    let mut made = Vec::new();
    for (index, disk) in wanted.iter().enumerate() {
        let found = find_datastore(write, disk, index).await?;
        let Some(datastore) = found.spec_on(host.id) else {
            let detail = format!(
                "datastore '{}' belongs to host '{}', and the VM is on host '{}': choose a datastore of that host",
                found.name,
                found.host_names(),
                host.name
            );
            return Err(Problem::invalid(format!("disks[{index}].datastore"), detail));
        };
        let encrypted = encrypts(policy, disk)
            .map_err(|detail| Problem::invalid(format!("disks[{index}].encrypted"), detail))?;
        let replica = replica(write, policy, host, &datastore)
            .await
            .map_err(|detail| Problem { field: Some(format!("disks[{index}]")), ..detail })?;
        made.push(disks::Disk {
            id: DiskId::new(),
            name: disk.name.clone(),
            datastore,
            datastore_name: found.name,
            size: disk.size,
            encrypted,
            role: DiskRole::Data,
            allocation: policy.allocation,
            limits: policy.limits,
            cache: policy.cache,
            replica,
            image: source_of(disk),
            facts: None,
            deleting: false,
            detached: false,
        });
    }
    mounted::require_messenger(write, policy, host.id, &made)
        .await
        .map_err(|problem| Problem { field: Some("disks".to_owned()), ..problem })?;
    osds::require(write, policy, &made)
        .await
        .map_err(|problem| Problem { field: Some("disks".to_owned()), ..problem })?;
    redundancy::require(write, policy, &made)
        .await
        .map_err(|problem| Problem { field: Some("disks".to_owned()), ..problem })?;
    check_caches(made.iter().map(|disk| disk.cache)).map_err(|(index, what)| {
        let detail = format!("policy '{}' gives each disk a cache: {what}", policy.name);
        Problem::invalid(format!("disks[{index}]"), detail)
    })?;
    Ok(made)
}

/// The location of the replica of a disk on `image`: this host's datastore that the policy names.
pub(super) async fn replica(
    write: &mut Write<'_>,
    policy: &Policy,
    host: &ChosenHost,
    image: &DatastoreSpec,
) -> Result<Option<(ReplicaPlace, String)>, Problem> {
    let Some(wanted) = &policy.replica else { return Ok(None) };
    let refused = |why: String| {
        let (policy, datastore) = (&policy.name, &wanted.datastore);
        let detail =
            format!("policy '{policy}' has disks replicated to '{datastore}', which {why}");
        Problem::invalid("", detail)
    };
    let called = datastores::called(write, &wanted.datastore).await?;
    let here = called.into_iter().find_map(|it| Some((it.spec_on(host.id)?, it.name)));
    let (datastore, name) =
        here.ok_or_else(|| refused(format!("host '{}' does not have", host.name)))?;
    let place = ReplicaPlace { datastore, bytes_per_second: wanted.bytes_per_second };
    place.check(image).map_err(|(_, what)| refused(what))?;
    Ok(Some((place, name)))
}

#[cfg(test)]
mod tests;
