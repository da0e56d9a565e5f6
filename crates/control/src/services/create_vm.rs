//! Creates VMs: checks a request, chooses the host, and records a task.

use std::collections::HashSet;

use vmseal_api::cloud_init::CLOUD_INIT_DISK;
use vmseal_api::filter::{CRYPT_SECTOR, SERIAL_MAX, check_caches};
use vmseal_api::host::{DatastoreSpec, DiskRole, ImageSource, NewDisk, NicSpec};
use vmseal_api::id::{DiskId, HostId, VmId, check_name};
use vmseal_api::model::{Lifecycle, Task};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::replica::ReplicaPlace;
use vmseal_api::request::{
    CreateDisk, CreateVm, DISK_SIZE_MAX, DISK_SIZE_MIN, DISKS_MAX, MEMORY_MAX, MEMORY_MIN,
    VCPUS_MAX,
};

use super::caller::{Caller, Privilege};
use super::providers::usable;
use super::vms::{begin, plan};
use super::{Outcome, Services, cloud_init};
use crate::operation::Operation;
use crate::store::policies::Policy;
use crate::store::{Write, datastores, disks, nics, policies, providers, vms};
use crate::tasks::Engine;

/// The unit of a VM's memory, in bytes.
const MEMORY_UNIT: u64 = 1 << 20;

/// Creates a VM.
pub async fn create(
    services: &Services,
    caller: &Caller,
    request: CreateVm,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    check(&request)?;
    let mut write = services.store.write().await?;
    let policy = policies::find(&mut write, &request.policy).await?.ok_or_else(|| Problem {
        field: Some("policy".to_owned()),
        ..Problem::not_found("policy", &request.policy)
    })?;
    if policy.encryption {
        caller.require(Privilege::EncryptNew)?;
    }
    let provider = provider_of(services, &mut write, &policy).await?;
    let (host, mut made) = place(&mut write, &request.disks, &policy).await?;
    services.hosts.connected(host.id)?;
    if !request.nics.is_empty() {
        super::nics::known_to(services, host.id, &host.name)?;
    }
    let cards = super::nics::place(&mut write, &request.nics).await?;
    let (id, name) = (VmId::new(), request.name);
    let documents =
        request.cloud_init.as_ref().map(|asked| cloud_init::documents(asked, id, &name));
    let documents = documents.transpose()?;
    if documents.is_some() {
        made.extend(cloud_init::disk(&made));
    }
    let vm = vms::Vm {
        id,
        name,
        host: host.id,
        host_name: host.name,
        policy: policy.id,
        policy_name: policy.name,
        vcpus: request.vcpus,
        memory: request.memory,
        provider: provider.map(|provider| provider.id),
        key: None,
        lifecycle: Lifecycle::Creating,
        seen_power: None,
        seen_stopped: None,
    };
    vms::insert(&mut write, &vm).await?;
    for (position, disk) in made.iter().enumerate() {
        disks::insert(&mut write, vm.id, position, disk).await?;
    }
    for (position, nic) in cards.iter().enumerate() {
        nics::insert(&mut write, vm.id, position, nic).await?;
    }
    if dry_run {
        let operation = Operation::CreateVm { vm: vm.id, cloud_init: None };
        let task = Engine::record(&mut write, operation, &vm.name, caller.name()).await?;
        // No transaction is held during a call to a host.
        drop(write);
        examine(services, &vm, &made, &cards).await?;
        if documents.is_some() {
            cloud_init::key_box(services, &vm).await?;
        }
        return Ok(Outcome::Planned(plan(&task, &vm)));
    }
    let sealed = match (documents, made.last()) {
        (Some(documents), Some(disk)) => {
            Some(cloud_init::seal(services, &vm, disk.id, &documents).await?)
        }
        _ => None,
    };
    let operation = Operation::CreateVm { vm: vm.id, cloud_init: sealed };
    begin(services, write, operation, &vm, caller, dry_run).await
}

/// Asks the host whether the disks could be created.
async fn examine(
    services: &Services,
    vm: &vms::Vm,
    made: &[disks::Disk],
    cards: &[NicSpec],
) -> Result<(), Problem> {
    let agent = services.hosts.connected(vm.host)?;
    let spec = crate::hosts::spec_of(vm, made, cards);
    for (index, (disk, made)) in spec.disks().zip(made).enumerate() {
        let (disk, source) = (disk.clone(), made.image.clone());
        agent.examine_disk(NewDisk { disk, source }).await.map_err(|problem| Problem {
            field: problem.field.map(|field| format!("disks[{index}].{field}")),
            ..problem
        })?;
    }
    super::nics::examine(&*agent, vm.id, cards).await
}

fn check(request: &CreateVm) -> Result<(), Problem> {
    check_name(&request.name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    if !(1..=VCPUS_MAX).contains(&request.vcpus) {
        return Err(Problem::invalid("vcpus", format!("must be 1 to {VCPUS_MAX}")));
    }
    let memory = request.memory;
    if !(MEMORY_MIN..=MEMORY_MAX).contains(&memory) || !memory.is_multiple_of(MEMORY_UNIT) {
        let detail = format!("must be {MEMORY_MIN} to {MEMORY_MAX}, a multiple of {MEMORY_UNIT}");
        return Err(Problem::invalid("memory", detail));
    }
    if request.disks.is_empty() || request.disks.len() > DISKS_MAX {
        return Err(Problem::invalid("disks", format!("a VM has 1 to {DISKS_MAX} disks")));
    }
    super::nics::check(&request.nics)?;
    let mut names = HashSet::new();
    if request.cloud_init.is_some() && request.disks.len() == DISKS_MAX {
        let detail = format!("a VM has at most {DISKS_MAX} disks, that of cloud-init included");
        return Err(Problem::invalid("disks", detail));
    }
    for (index, disk) in request.disks.iter().enumerate() {
        if request.cloud_init.is_some() && disk.name == CLOUD_INIT_DISK {
            let detail =
                format!("'{CLOUD_INIT_DISK}' is the name of the disk with the cloud-init data");
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

fn check_disk(disk: &CreateDisk) -> Result<(), (&'static str, String)> {
    check_name(&disk.name).map_err(|error| ("name", error.to_string()))?;
    if disk.name.len() > SERIAL_MAX {
        // The guest sees it as the disk's serial number.
        return Err(("name", format!("a disk's name has at most {SERIAL_MAX} bytes")));
    }
    let sized = (DISK_SIZE_MIN..=DISK_SIZE_MAX).contains(&disk.size);
    if !sized || !disk.size.is_multiple_of(CRYPT_SECTOR.into()) {
        let detail =
            format!("must be {DISK_SIZE_MIN} to {DISK_SIZE_MAX}, a multiple of {CRYPT_SECTOR}");
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
    Some(ImageSource { path: disk.image.clone()?, format: disk.format? })
}

/// The provider of a policy's keys; it must be able to create one.
async fn provider_of(
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

struct ChosenHost {
    id: HostId,
    name: String,
}

/// The datastores of the disks; all must exist and be of one host.
async fn place(
    write: &mut Write<'_>,
    wanted: &[CreateDisk],
    policy: &Policy,
) -> Result<(ChosenHost, Vec<disks::Disk>), Problem> {
    let mut host: Option<ChosenHost> = None;
    let mut made = Vec::new();
    for (index, disk) in wanted.iter().enumerate() {
        let field = || Some(format!("disks[{index}].datastore"));
        let found = datastores::find(write, &disk.datastore).await;
        let found = found
            .and_then(|it| it.ok_or_else(|| Problem::not_found("datastore", &disk.datastore)))
            .map_err(|problem| Problem { field: field(), ..problem })?;
        let on = host.get_or_insert(ChosenHost { id: found.host, name: found.host_name.clone() });
        if on.id != found.host {
            let detail = format!(
                "datastore '{}' belongs to host '{}', the first disk's to '{}'",
                found.name, found.host_name, on.name
            );
            return Err(Problem { field: field(), ..Problem::invalid("", detail) });
        }
        let datastore = DatastoreSpec { datastore: found.id, location: found.location };
        let replica = replica(write, policy, on, &datastore)
            .await
            .map_err(|detail| Problem { field: Some(format!("disks[{index}]")), ..detail })?;
        made.push(disks::Disk {
            id: DiskId::new(),
            name: disk.name.clone(),
            datastore,
            datastore_name: found.name,
            size: disk.size,
            encrypted: policy.encryption,
            role: DiskRole::Data,
            allocation: policy.allocation,
            limits: policy.limits,
            cache: policy.cache,
            replica,
            image: source_of(disk),
            facts: None,
            deleting: false,
        });
    }
    let host = host.ok_or_else(|| Problem::invalid("disks", "a VM has at least one disk"))?;
    check_caches(made.iter().map(|disk| disk.cache)).map_err(|(index, what)| {
        let detail = format!("policy '{}' gives each disk a cache: {what}", policy.name);
        Problem::invalid(format!("disks[{index}]"), detail)
    })?;
    Ok((host, made))
}

/// The location of the replica of a disk on `image`: this host's datastore that the policy names.
async fn replica(
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
    let found = called
        .into_iter()
        .find(|it| it.host == host.id)
        .ok_or_else(|| refused(format!("host '{}' does not have", host.name)))?;
    let datastore = DatastoreSpec { datastore: found.id, location: found.location };
    let place = ReplicaPlace { datastore, bytes_per_second: wanted.bytes_per_second };
    place.check(image).map_err(|(_, what)| refused(what))?;
    Ok(Some((place, found.name)))
}
