//! Disks and network cards that are added to VMs and removed from them, and disks that grow. The VM may run: then its
//! guest gets them, or lets them go. [`super::vm_tpm`] is about TPMs.

use vmseal_api::cloud_init::CLOUD_INIT_DISK;
use vmseal_api::filter::{CRYPT_SECTOR, check_caches};
use vmseal_api::host::version::{GROW_DISK, GROW_REPLICA, SET_RUNNING};
use vmseal_api::host::{DiskRole, HostAgent, NewDisk, NicSpec, Power, VmChange};
use vmseal_api::id::VmId;
use vmseal_api::model::Task;
use vmseal_api::nic::{NICS_MAX, NicToCheck, check_nics};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::{AddDisk, CreateDisk, CreateNic, DISK_SIZE_MAX, DISKS_MAX, ResizeDisk};
use vmseal_api::size::Size;

use super::caller::{Caller, Privilege};
use super::create_vm::{ChosenHost, check_disk, nothing_was_begun, place};
use super::vms::{begin, find, power, require_no_template, require_ready};
use super::{Outcome, Services, examine_change, image_layouts, room};
use crate::operation::Operation;
use crate::stalls;
use crate::store::disks::{self, Disk};
use crate::store::policies::Policy;
use crate::store::vms::Vm;
use crate::store::{Write, nics, policies, snapshots, vms};
use crate::tasks::Engine;

/// Adds a disk to a VM.
pub async fn add_disk(
    services: &Services,
    caller: &Caller,
    vm: &str,
    request: AddDisk,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let (vm, known) = find(services, vm).await?;
    let (request, chosen) = on_datastore(request, &vm.name, &known)?;
    check_disk(&request).map_err(|(field, detail)| Problem::invalid(field, detail))?;
    may_have_more(caller, &vm, &known, &request)?;
    let agent = changeable(services, &vm).await?;
    let mut write = services.store.write().await?;
    let (mut vm, policy, mut disk) =
        reserve_disk(services, caller, &mut write, vm.id, &request).await?;
    if dry_run {
        let operation = Operation::AddDisk { vm: vm.id, disk: disk.id };
        let task = Engine::record(&mut write, operation, &vm.name, caller.name()).await?;
        // No transaction is held during a call to a host.
        drop(write);
        let spec = crate::hosts::spec_of_disk(&disk);
        agent.examine_disk(new_disk(&disk)).await?;
        let change = VmChange::AddDisk { disk: Box::new(spec) };
        let mut plan = super::vms::plan(&task, &vm);
        let in_the_clear = in_the_clear(&policy, &disk);
        plan.steps = chosen.into_iter().chain(in_the_clear).chain(plan.steps).collect();
        plan.warnings.extend(examine_change::ask(services, &vm, change).await?);
        plan.warnings.extend(room::examine_added(services, &vm, &disk).await?);
        plan.warnings.extend(image_layouts::in_directories(&policy, &[disk]));
        return Ok(Outcome::Planned(plan));
    }
    if disk.image.is_some() {
        // No transaction is held here, either: what this one reserves is given up, and reserved again after the call.
        drop(write);
        agent.examine_disk(new_disk(&disk)).await.map_err(nothing_was_begun)?;
        write = services.store.write().await?;
        (vm, _, disk) = reserve_disk(services, caller, &mut write, vm.id, &request).await?;
    }
    let operation = Operation::AddDisk { vm: vm.id, disk: disk.id };
    begin(services, write, operation, &vm, caller, dry_run).await
}

/// A disk that is to be added, as its host is asked about it.
fn new_disk(disk: &Disk) -> NewDisk {
    let (spec, source) = (crate::hosts::spec_of_disk(disk), disk.image.clone());
    NewDisk { disk: spec, source, firmware: None }
}

/// Refuses another disk for a VM that has these, as far as the inventory tells.
fn may_have_more(
    caller: &Caller,
    vm: &Vm,
    known: &[Disk],
    request: &CreateDisk,
) -> Result<(), Problem> {
    require_ready(vm)?;
    require_no_template(vm)?;
    if known.iter().any(|disk| disk.encrypted) {
        caller.require(Privilege::EncryptNew)?;
    }
    check_name(request, known)
}

/// Puts a disk that is to be added into the inventory; it is given to the VM when it is made. Returns the VM and its policy as well.
async fn reserve_disk(
    services: &Services,
    caller: &Caller,
    write: &mut Write<'_>,
    vm: VmId,
    request: &CreateDisk,
) -> Result<(Vm, Policy, Disk), Problem> {
    // Read in the transaction: the VM may have been changed while its host was asked.
    let vm = vms::get(write, vm).await?.ok_or_else(|| Problem::not_found("VM", vm))?;
    let known = disks::of_vm(write, vm.id).await?;
    may_have_more(caller, &vm, &known, request)?;
    let policy = policies::find(write, &vm.policy.to_string()).await?;
    let policy = policy.ok_or_else(|| Problem::not_found("policy", &vm.policy_name))?;
    require_key(&vm, &policy, request)?;
    let host = ChosenHost { id: vm.host, name: vm.host_name.clone() };
    let mut made = place(write, std::slice::from_ref(request), &policy, &host)
        .await
        .map_err(|problem| Problem { field: problem.field.map(of_disk), ..problem })?;
    image_layouts::require(services, (host.id, &host.name), &policy, &made)?;
    stalls::require(&services.hosts, (host.id, &host.name), &policy)?;
    let Some(disk) = made.pop() else {
        return Err(Problem::new(ErrorCode::Internal, "no disk was placed"));
    };
    // Also where all other disks of the VM are in the clear.
    if disk.encrypted {
        caller.require(Privilege::EncryptNew)?;
    }
    if disk.encrypted && vm.key.is_none() {
        let detail = format!("VM '{}' has no key, and its policy encrypts", vm.name);
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let caches = known.iter().map(|disk| disk.cache).chain([disk.cache]);
    check_caches(caches).map_err(|(_, what)| {
        let detail = format!("policy '{}' gives each disk a cache: {what}", vm.policy_name);
        Problem::invalid("cache", detail)
    })?;
    let position = disks::next_position(write, vm.id).await?;
    let disk = Disk { detached: true, ..disk };
    disks::insert(write, vm.id, position, &disk).await?;
    Ok((vm, policy, disk))
}

/// The disk on the datastore that it names, or else on that of the VM's first disk; then it is said which that is. The guest's
/// disks come before the machine's own, and one that is detached does not count: a task makes or removes it.
fn on_datastore(
    request: AddDisk,
    vm: &str,
    known: &[Disk],
) -> Result<(CreateDisk, Option<String>), Problem> {
    if let Some(named) = request.datastore.clone() {
        return Ok((request.on(named), None));
    }
    let of_vm = || known.iter().filter(|disk| !disk.detached);
    let of_guest = of_vm().find(|disk| disk.role.is_data());
    let first = of_guest.or_else(|| of_vm().next()).ok_or_else(|| {
        let detail = format!("VM '{vm}' has no disk beside which it could be: name one");
        Problem::invalid("datastore", detail)
    })?;
    let chosen = format!(
        "choose datastore '{}', on which the VM's first disk '{}' is",
        first.datastore_name, first.name
    );
    // By its id: datastores of several hosts may have one name.
    Ok((request.on(first.datastore.datastore.to_string()), Some(chosen)))
}

/// Refuses an encrypted disk for a VM whose policy does not encrypt: it has no key, or one for its TPM alone.
fn require_key(vm: &Vm, policy: &Policy, request: &CreateDisk) -> Result<(), Problem> {
    if request.encrypted != Some(true) || policy.encryption {
        return Ok(());
    }
    let detail = format!(
        "cannot be: policy '{0}' of VM '{1}' does not encrypt. Add the disk without this, and encrypt it then: that gives the VM a policy that encrypts, with a key, and leaves the other disks of its guest as they are (vmseal vm encrypt {1} --disk {2})",
        policy.name, vm.name, request.name
    );
    Err(Problem::invalid("encrypted", detail))
}

/// Says that a disk is to be in the clear though the policy of its VM encrypts.
fn in_the_clear(policy: &Policy, disk: &Disk) -> Option<String> {
    (policy.encryption && !disk.encrypted).then(|| {
        format!("leave disk '{}' in the clear, though policy '{}' encrypts", disk.name, policy.name)
    })
}

/// The name of a field of `disks[0]`, for a request that has one disk.
fn of_disk(field: String) -> String {
    field.strip_prefix("disks[0].").map_or(field.clone(), str::to_owned)
}

fn check_name(request: &CreateDisk, known: &[Disk]) -> Result<(), Problem> {
    if request.name == CLOUD_INIT_DISK {
        let detail = format!("'{CLOUD_INIT_DISK}' is the name of the disk with cloud-init data");
        return Err(Problem::invalid("name", detail));
    }
    if known.iter().any(|disk| disk.name == request.name) {
        let detail = format!("'{}' is the name of another disk of this VM", request.name);
        return Err(Problem {
            field: Some("name".to_owned()),
            ..Problem::new(ErrorCode::AlreadyExists, detail)
        });
    }
    if known.len() >= DISKS_MAX {
        let detail = format!("a VM has at most {DISKS_MAX} disks");
        return Err(Problem::new(ErrorCode::LimitExceeded, detail));
    }
    Ok(())
}

/// The agent of a VM's host, if it can do what is asked while the VM is as it is.
async fn changeable(
    services: &Services,
    vm: &Vm,
) -> Result<std::sync::Arc<dyn HostAgent>, Problem> {
    let agent = services.hosts.connected(vm.host)?;
    let power = power(services, vm).await?;
    if power == Some(Power::Suspended) {
        return Err(super::saved_memory::refusal(vm));
    }
    let runs = power.is_some_and(|power| power != Power::Off);
    if runs && !services.hosts.view(vm.host).has(SET_RUNNING) {
        let (host, name) = (&vm.host_name, &vm.name);
        let detail = format!(
            "the agent of host '{host}' cannot change VMs that run: upgrade vmseal there, or stop the VM first (vmseal vm stop {name})"
        );
        return Err(Problem::new(ErrorCode::Unsupported, detail));
    }
    Ok(agent)
}

fn find_disk<'a>(vm: &Vm, known: &'a [Disk], name: &str) -> Result<&'a Disk, Problem> {
    let found = known.iter().find(|it| it.name == name || it.id.to_string() == name);
    found.ok_or_else(|| has_no(vm, "disk", name))
}

fn has_no(vm: &Vm, what: &str, name: &str) -> Problem {
    Problem::new(ErrorCode::NotFound, format!("VM '{}' has no {what} '{name}'", vm.name))
}

/// A VM whose devices the caller may change now.
async fn vm_to_change(services: &Services, caller: &Caller, name: &str) -> Result<Vm, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let (vm, _) = find(services, name).await?;
    require_ready(&vm)?;
    require_no_template(&vm)?;
    changeable(services, &vm).await?;
    Ok(vm)
}

/// Removes a disk of a VM, with its data.
pub async fn remove_disk(
    services: &Services,
    caller: &Caller,
    vm: &str,
    disk: &str,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    let vm = vm_to_change(services, caller, vm).await?;
    let mut write = services.store.write().await?;
    // Read in the transaction: two requests would remove one of two disks each.
    let known = disks::of_vm(&mut write, vm.id).await?;
    let disk = find_disk(&vm, &known, disk)?;
    let others = |it: &&Disk| it.id != disk.id && it.role.is_data() && !it.detached;
    if disk.role.is_data() && !disk.detached && known.iter().find(others).is_none() {
        let detail = format!(
            "disk '{}' is the only one that VM '{}' can start from: delete the VM, or add another disk first",
            disk.name, vm.name
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let keeps = |snapshot: &snapshots::Snapshot| snapshot.disks.contains(&disk.id);
    if let Some(snapshot) = snapshots::of_vm(&mut write, vm.id).await?.iter().find(|it| keeps(it)) {
        let detail = format!(
            "snapshot '{0}' of VM '{1}' keeps disk '{2}': delete the snapshot first (vmseal snapshot delete {1} {0})",
            snapshot.name, vm.name, disk.name
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    if disk.role == DiskRole::CloudInit && !disk.detached {
        // No snapshot keeps that disk, as what is on it does not change.
        let what = format!("its disk '{}'", disk.name);
        super::snapshots::require_no_memory(&mut write, &vm, &what).await?;
    }
    if disk.role == DiskRole::UefiVariables {
        let detail = format!("disk '{}' is a part of VM '{}''s firmware", disk.name, vm.name);
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    if disk.role == DiskRole::Tpm {
        let detail = format!(
            "disk '{}' has the key of VM '{1}''s TPM, and goes with it: vmseal vm set {1} --tpm off",
            disk.name, vm.name
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let operation = Operation::RemoveDisk { vm: vm.id, disk: disk.id };
    let change = VmChange::RemoveDisk { disk: disk.id };
    let known_to_host = !disk.detached;
    let begun = begin(services, write, operation, &vm, caller, dry_run).await?;
    // What an earlier attempt has taken from the VM is deleted without a word to its guest.
    match known_to_host {
        true => examine_change::of_plan(services, &vm, change, begun).await,
        false => Ok(begun),
    }
}

/// Makes a disk longer.
pub async fn resize_disk(
    services: &Services,
    caller: &Caller,
    vm: &str,
    disk: &str,
    request: ResizeDisk,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let (vm, known) = find(services, vm).await?;
    require_ready(&vm)?;
    require_no_template(&vm)?;
    let disk = find_disk(&vm, &known, disk)?;
    let size = request.size;
    if size > DISK_SIZE_MAX || !size.is_multiple_of(CRYPT_SECTOR.into()) {
        let detail = format!(
            "is {}: it must be a multiple of {} up to {}",
            Size(size),
            Size(CRYPT_SECTOR.into()),
            Size(DISK_SIZE_MAX)
        );
        return Err(Problem::invalid("size", detail));
    }
    if size <= disk.size {
        let detail = format!(
            "is {}, and disk '{}' has {}: it can only grow, as a smaller one would lose data",
            Size(size),
            disk.name,
            Size(disk.size)
        );
        return Err(Problem::invalid("size", detail));
    }
    if !disk.role.is_data() || disk.detached {
        let detail = format!("disk '{}' cannot grow: it is not the guest's", disk.name);
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    super::snapshots::require_none(services, &vm, "its disks cannot grow").await?;
    changeable(services, &vm).await?;
    super::features::require(services, &vm, GROW_DISK, "resize disks")?;
    if disk.replica.is_some() {
        super::features::require(services, &vm, GROW_REPLICA, "resize disks with replicas")?;
    }
    let write = services.store.write().await?;
    let operation = Operation::GrowDisk { vm: vm.id, disk: disk.id, size };
    let change = VmChange::GrowDisk { disk: disk.id, size };
    let begun = begin(services, write, operation, &vm, caller, dry_run).await?;
    let mut begun = examine_change::of_plan(services, &vm, change, begun).await?;
    if let Outcome::Planned(plan) = &mut begun {
        plan.warnings.extend(room::examine_growth(services, &vm, disk, size).await?);
    }
    Ok(begun)
}

/// Adds a network card to a VM.
pub async fn add_nic(
    services: &Services,
    caller: &Caller,
    vm: &str,
    request: CreateNic,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let (vm, _) = find(services, vm).await?;
    require_ready(&vm)?;
    require_no_template(&vm)?;
    super::nics::known_to(services, vm.host, &vm.host_name)?;
    let agent = changeable(services, &vm).await?;
    let mut write = services.store.write().await?;
    let known = nics::all_of_vm(&mut write, vm.id).await?;
    let request = CreateNic { name: Some(name_of(&request, &known)), ..request };
    let mut placed = super::nics::place(&mut write, std::slice::from_ref(&request))
        .await
        .map_err(|problem| Problem { field: problem.field.map(of_nic), ..problem })?;
    let Some(nic) = placed.pop() else {
        return Err(Problem::new(ErrorCode::Internal, "no network card was placed"));
    };
    let all: Vec<_> = known.iter().chain([&nic]).collect();
    let all: Vec<_> = all
        .iter()
        .map(|it| NicToCheck { name: &it.name, mac: Some(it.mac), backend: &it.backend })
        .collect();
    check_nics(&all).map_err(|(field, what)| {
        let mine = format!("nics[{}].", known.len());
        Problem::invalid(field.strip_prefix(&mine).map_or(field.clone(), str::to_owned), what)
    })?;
    let position = nics::next_position(&mut write, vm.id).await?;
    let operation = Operation::AddNic { vm: vm.id, nic: nic.clone(), position };
    if dry_run {
        let task = Engine::record(&mut write, operation, &vm.name, caller.name()).await?;
        // No transaction is held during a call to a host.
        drop(write);
        let mut plan = super::vms::plan(&task, &vm);
        let change = VmChange::AddNic { nic: nic.clone() };
        plan.warnings.extend(examine_change::ask(services, &vm, change).await?);
        plan.warnings.extend(not_connected(services, &*agent, &vm, nic).await?);
        return Ok(Outcome::Planned(plan));
    }
    begin(services, write, operation, &vm, caller, dry_run).await
}

/// Asks the host whether it could connect a card. What it lacks refuses a card of a VM that runs, and else waits for the start,
/// which is refused then.
async fn not_connected(
    services: &Services,
    agent: &dyn HostAgent,
    vm: &Vm,
    nic: NicSpec,
) -> Result<Option<String>, Problem> {
    let Err(problem) = agent.examine_nic(vm.id, nic).await else { return Ok(None) };
    let runs = power(services, vm).await?.is_some_and(|power| power != Power::Off);
    if runs || crate::hosts::is_silence(&problem) {
        return Err(problem);
    }
    Ok(Some(format!("VM '{}' could not start with it now: {}", vm.name, problem.detail)))
}

fn of_nic(field: String) -> String {
    field.strip_prefix("nics[0].").map_or(field.clone(), str::to_owned)
}

/// The card's name: as given, or the first of `nic0`, `nic1`, ... that is free.
fn name_of(request: &CreateNic, known: &[NicSpec]) -> String {
    let free = |name: &String| known.iter().all(|nic| nic.name != *name);
    let named = (0..=NICS_MAX).map(|number| format!("nic{number}")).find(free);
    request.name.clone().or(named).unwrap_or_default()
}

/// Removes a network card of a VM.
pub async fn remove_nic(
    services: &Services,
    caller: &Caller,
    vm: &str,
    nic: &str,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    let vm = vm_to_change(services, caller, vm).await?;
    let mut write = services.store.write().await?;
    // Also one that a task could not take from the VM.
    let known = nics::all_of_vm(&mut write, vm.id).await?;
    let found = known.into_iter().find(|it| it.name == nic || it.nic.to_string() == nic);
    let nic = found.ok_or_else(|| has_no(&vm, "network card", nic))?;
    let position = nics::position(&mut write, nic.nic).await?.unwrap_or(0);
    let has = nics::of_vm(&mut write, vm.id).await?;
    let is_leaving = has.iter().all(|it| it.nic != nic.nic);
    let change = VmChange::RemoveNic { nic: nic.nic };
    let operation = Operation::RemoveNic { vm: vm.id, nic, position };
    let begun = begin(services, write, operation, &vm, caller, dry_run).await?;
    if is_leaving {
        // The host need not know it any more.
        return Ok(begun);
    }
    examine_change::of_plan(services, &vm, change, begun).await
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{DatastoreLocation, DatastoreSpec};
    use vmseal_api::id::{DatastoreId, DiskId};
    use vmseal_api::model::Lifecycle;
    use vmseal_secret::sealed_box::Recipient;

    use super::*;
    use crate::testing::Fixture;

    /// A disk on a datastore of its own, `NAMEs`.
    fn disk(name: &str, role: DiskRole, detached: bool) -> Disk {
        let location = DatastoreLocation::Dir { path: format!("/{name}").into() };
        Disk {
            id: DiskId::new(),
            name: name.to_owned(),
            datastore: DatastoreSpec { datastore: DatastoreId::new(), location },
            datastore_name: format!("{name}s"),
            size: 1 << 20,
            encrypted: true,
            role,
            allocation: Default::default(),
            limits: Default::default(),
            cache: None,
            replica: None,
            image: None,
            facts: None,
            deleting: false,
            detached,
        }
    }

    #[test]
    fn a_disk_that_names_no_datastore_is_beside_the_first_one() {
        let request = |datastore: Option<&str>| AddDisk {
            name: "more".to_owned(),
            datastore: datastore.map(str::to_owned),
            size: 1 << 20,
            image: None,
            format: None,
            force: false,
            encrypted: None,
        };
        let tpm = disk("tpm", DiskRole::Tpm, false);
        let coming = disk("coming", DiskRole::Data, true);
        let (root, log) = (disk("root", DiskRole::Data, false), disk("log", DiskRole::Data, false));
        let all = [tpm.clone(), coming.clone(), root.clone(), log];
        let (placed, chosen) = on_datastore(request(None), "web", &all).unwrap();
        assert_eq!(placed.datastore, root.datastore.datastore.to_string());
        let chosen = chosen.unwrap();
        assert!(chosen.contains("'roots'") && chosen.contains("disk 'root'"), "{chosen}");
        let named = on_datastore(request(Some("fast")), "web", &all).unwrap();
        assert_eq!((named.0.datastore.as_str(), named.1), ("fast", None));
        // What is left where there is no other.
        let (placed, _) =
            on_datastore(request(None), "web", &[coming.clone(), tpm.clone()]).unwrap();
        assert_eq!(placed.datastore, tpm.datastore.datastore.to_string());
        let refused = on_datastore(request(None), "web", &[coming]).unwrap_err();
        assert_eq!(refused.field.as_deref(), Some("datastore"), "{refused}");
    }

    /// It may have been changed while its host was asked.
    #[tokio::test]
    async fn a_vm_is_read_again_when_a_disk_is_reserved_for_it() {
        let fixture = Fixture::new().await;
        let vm = fixture.made("web", "encrypted").await;
        let services = fixture.services(Recipient::generate().unwrap());
        let me = Caller::administrator("me");
        let named = |number: usize| CreateDisk {
            name: format!("more{number}"),
            datastore: "local".to_owned(),
            size: 1 << 20,
            image: None,
            format: None,
            force: false,
            encrypted: None,
        };
        let mut write = fixture.store.write().await.unwrap();
        for number in fixture.disks(vm).await.len()..DISKS_MAX {
            reserve_disk(&services, &me, &mut write, vm, &named(number)).await.unwrap();
        }
        let last = named(DISKS_MAX);
        let refused = reserve_disk(&services, &me, &mut write, vm, &last).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::LimitExceeded, "{refused}");
        vms::set_lifecycle(&mut write, vm, Lifecycle::Deleting).await.unwrap();
        let refused = reserve_disk(&services, &me, &mut write, vm, &last).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
    }
}
