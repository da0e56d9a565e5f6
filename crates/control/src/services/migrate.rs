//! Moving VMs to other hosts.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::future::join_all;
use sqlx::SqliteConnection;
use vmseal_api::datastore::DatastoreCondition;
use vmseal_api::hardware::{CPU_MODEL_HOST, Hardware};
use vmseal_api::host::version::{
    IMAGE_LAYOUTS, MIGRATE, MIGRATE_COMPRESSED, MIGRATE_ENCRYPTED, STALLS,
};
use vmseal_api::host::{Accelerator, DatastoreSpec, HostAgent, HostDescription, NicSpec, Power};
use vmseal_api::id::{HostId, VmId};
use vmseal_api::migration::{MigrationEncryption, check_downtime};
use vmseal_api::model::{Connection, Lifecycle, Task};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::MigrateVm;
use vmseal_api::size::Size;

mod at_rest;
mod connection;
mod copies;
pub mod evacuate;
mod kept;
mod key;
mod medium;
mod remote;
mod replicas;

pub(super) use self::connection::{Tried, require_reached};
use self::copies::Copies;
pub(super) use self::copies::sizes;
pub(super) use self::key::{fault_of_start, require_key_or_wait};
pub(super) use self::medium::require_medium_kept;
use super::caller::{Caller, Privilege};
use super::vm_key::require_held;
use super::vms::{begin_paced, find, power, require_ready, word};
use super::{Outcome, Services, features, hosts, image_layouts};
use crate::hosts::keys::Purpose;
use crate::hosts::{definition_with, is_silence, mounted};
use crate::operation::Operation;
use crate::stalls;
use crate::store::disks::Disk;
use crate::store::hosts::Host;
use crate::store::vms::Vm;
use crate::store::{self, Part, StoreError, Write, policies, tasks, vms};

/// The oldest QEMU that comes back to a filter which is replaced while the guest does not use its disks, as one that is paused does
/// not (docs/decisions/020). An older one would lose these disks.
const QEMU_COMES_BACK: &str = "9.0";

/// Why a VM cannot go to a host that is full.
const NO_ROOM: &str = "it has not enough free memory";

/// A host that a VM can go to.
pub(super) struct Fit {
    pub host: Host,
    /// How much memory it has for more VMs.
    free: u64,
    /// Whether what the VM is sent with is encrypted.
    encrypted: bool,
    /// How long the guest is to stand still, where the VM's policy says so, in milliseconds.
    downtime_milliseconds: Option<u32>,
    /// Where it gets copies of disks on datastores that it does not have; none where there are no such disks.
    copies: Option<Copies>,
    /// Whether memory is compressed.
    compresses: bool,
}

/// Checks what of a request is wrong whatever the VM does, also where its work leaves it out.
fn check(request: &MigrateVm) -> Result<(), Problem> {
    if request.policy.is_some() && request.remote.is_none() {
        let detail =
            "it is the policy at another control plane (--remote): here the VM keeps its own";
        return Err(Problem::invalid("policy", detail));
    }
    super::tasks::pace_of(request.rate)?;
    let downtime = request.downtime_milliseconds.map_or(Ok(()), check_downtime);
    downtime.map_err(|wrong| Problem::invalid("downtime_milliseconds", wrong))
}

/// Moves a VM to another host, while it runs or while it is off or suspended. Without a host, one with the most free memory is chosen.
pub async fn migrate(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: MigrateVm,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    check(&request)?;
    let (vm, disks) = find(services, name).await?;
    require_ready(&vm)?;
    if vm.key.is_some() {
        caller.require(Privilege::Migrate)?;
    }
    let now = power(services, &vm).await.map_err(|problem| may_run(&vm, problem))?;
    match now.unwrap_or(Power::Off) {
        Power::Running | Power::Paused => {}
        rest @ (Power::Off | Power::Suspended) if request.remote.is_some() => {
            let of = (&vm, disks.as_slice(), Some(rest));
            return remote::migrate(services, caller, of, request, dry_run).await;
        }
        rest @ (Power::Off | Power::Suspended) => {
            return at_rest::migrate(services, caller, (&vm, &disks, rest), request, dry_run).await;
        }
        other => {
            let what = "wait until it runs, or is off or suspended";
            let detail = format!("VM '{}' is {}: {what}", vm.name, word(other));
            return Err(Problem::new(ErrorCode::WrongState, detail));
        }
    }
    if request.remote.is_some() {
        // What is said below of replicas is not enough to have it go there.
        remote::require_no_replica(&vm, &disks)?;
        medium::require_none(&vm)?;
    }
    require_sendable(services, &vm, &disks)?;
    if request.remote.is_some() {
        let of = (&vm, disks.as_slice(), None);
        return remote::migrate(services, caller, of, request, dry_run).await;
    }
    let pace = super::tasks::pace_of(request.rate)?;
    let promised = Promised::read(&mut *services.store.read().await?).await?;
    require_compression(services, &vm, request.compress)?;
    let (place, compresses) = (request.datastore.as_deref(), request.compress);
    let tried = Tried::default();
    let asked = Asked { promised: &promised, tried: &tried, place, compresses };
    let (fit, refused) = match &request.host {
        Some(host) => {
            let host = hosts::find(services, host).await?;
            let name = host.name.clone();
            let fit = async {
                let fit = fits(services, &vm, &disks, host, &asked).await?;
                tried.require_reached(services, &vm, &fit.host).await.map(|()| fit)
            };
            (fit.await.map_err(|why| cannot_go(&vm, &name, &why))?, Vec::new())
        }
        None => choose(services, &vm, &disks, &asked, None).await?,
    };
    key::require(services, &vm, Purpose::Open).await?;
    let mut write = services.store.write().await?;
    require_room(services, &mut write, &vm, &fit.host).await?;
    require_medium_kept(&mut write, &vm).await?;
    let mut operation = operation(&vm, &fit);
    if let Operation::MigrateVm { downtime_milliseconds, .. } = &mut operation {
        *downtime_milliseconds = request.downtime_milliseconds.or(*downtime_milliseconds);
    }
    let begun = begin_paced(services, write, operation, &vm, caller, (pace, dry_run)).await?;
    Ok(match begun {
        Outcome::Planned(mut plan) => {
            plan.steps.insert(0, understood(&fit));
            plan.warnings.extend(in_the_clear(&vm, fit.encrypted));
            plan.warnings.extend(fit.copies.as_ref().and_then(Copies::linked));
            plan.warnings.extend(fit.copies.as_ref().and_then(Copies::little_room));
            plan.warnings.extend(replicas::warning(&vm, &disks));
            plan.warnings.extend(refused);
            Outcome::Planned(plan)
        }
        done => done,
    })
}

fn cannot_go(vm: &Vm, host: &str, why: &str) -> Problem {
    let detail = format!("VM '{}' cannot go to host '{host}': {why}", vm.name);
    let problem = Problem::new(ErrorCode::WrongState, detail);
    Problem { field: Some("host".to_owned()), ..problem }
}

/// Says why a VM stays on a host that does not answer.
fn may_run(vm: &Vm, problem: Problem) -> Problem {
    if !is_silence(&problem) {
        return problem;
    }
    let detail = format!(
        "VM '{}' may run on its host '{}', which does not answer: it is not moved until that host answers. If the host is down, evacuate it, where its disks are on pools that another host has, too (vmseal vm evacuate {}). {}",
        vm.name, vm.host_name, vm.name, problem.detail
    );
    Problem { detail, ..problem }
}

/// The task that moves a running VM to a host.
pub(super) fn operation(vm: &Vm, fit: &Fit) -> Operation {
    let (from, to) = (vm.host, fit.host.id);
    let datastore = fit.copies.as_ref().map(|copies| copies.datastore.id);
    Operation::MigrateVm {
        vm: vm.id,
        from,
        to,
        encrypted: fit.encrypted,
        datastore,
        downtime_milliseconds: fit.downtime_milliseconds,
        compresses: fit.compresses,
        given_up: false,
    }
}

/// How long the guest of a VM is to stand still, where its policy says so, in milliseconds.
async fn downtime_of(services: &Services, vm: &Vm) -> Result<Option<u32>, StoreError> {
    let policy = policies::find(&mut *services.store.read().await?, &vm.policy.to_string()).await?;
    Ok(policy.and_then(|policy| policy.downtime_milliseconds))
}

/// The memory that VMs on their way to a host will have there.
#[derive(Debug, Default)]
pub(super) struct Promised(HashMap<HostId, u64>);

impl Promised {
    /// That of the migrations that go on. A VM that runs at its new host already is counted there.
    pub(super) async fn read(from: &mut SqliteConnection) -> Result<Self, StoreError> {
        let mut this = Self::default();
        for task in tasks::open(from).await? {
            match task.operation {
                Operation::MigrateVm { vm, to, .. } => {
                    if let Some(vm) = vms::get(from, vm).await?.filter(|vm| vm.host != to) {
                        this.add(to, vm.memory);
                    }
                }
                Operation::EvacuateVm { vm, to, starts: true, .. } => {
                    // It is there from early on, and not started yet.
                    if let Some(vm) = vms::get(from, vm).await? {
                        this.add(to, vm.memory);
                    }
                }
                // One that is off needs none until it is started.
                Operation::ReceiveVm { vm, host, at_rest: false, .. } => {
                    let arrives = |vm: &Vm| vm.lifecycle == Lifecycle::Creating;
                    if let Some(vm) = vms::get(from, vm).await?.filter(arrives) {
                        this.add(host, vm.memory);
                    }
                }
                _ => {}
            }
        }
        Ok(this)
    }

    pub(super) fn add(&mut self, host: HostId, memory: u64) {
        *self.0.entry(host).or_default() += memory;
    }

    fn of(&self, host: HostId) -> u64 {
        self.0.get(&host).copied().unwrap_or(0)
    }
}

/// Refuses a host that got too many other VMs since it was chosen.
pub(super) async fn require_room(
    services: &Services,
    write: &mut Write<'_>,
    vm: &Vm,
    to: &Host,
) -> Result<(), Problem> {
    let promised = Promised::read(write).await?;
    match free_memory(services, write, to.id, &promised).await? {
        Some(free) if free < vm.memory => {
            let (vm, host) = (&vm.name, &to.name);
            let detail = format!("VM '{vm}' cannot go to host '{host}': {NO_ROOM}");
            Err(Problem::new(ErrorCode::WrongState, detail))
        }
        _ => Ok(()),
    }
}

/// How much memory a host has for more VMs, as far as that is known.
pub(super) async fn free_memory(
    services: &Services,
    from: &mut SqliteConnection,
    host: HostId,
    promised: &Promised,
) -> Result<Option<u64>, StoreError> {
    let room = super::usage::room(from, host, &services.hosts.view(host)).await?;
    Ok(room.memory_left.map(|left| left.saturating_sub(promised.of(host))))
}

/// Refuses a VM whose host cannot send it now.
pub(super) fn require_sendable(
    services: &Services,
    vm: &Vm,
    disks: &[Disk],
) -> Result<(), Problem> {
    features::require(services, vm, MIGRATE, "send running VMs to other hosts")?;
    replicas::require(services, vm, disks)?;
    require_held(services, vm)?;
    if must_be_encrypted(vm) {
        features::require(services, vm, MIGRATE_ENCRYPTED, "encrypt what it sends")?;
    }
    require_use_of_disks(services, vm)
}

/// Refuses to compress memory where the VM's host does not know how.
pub(super) fn require_compression(
    services: &Services,
    vm: &Vm,
    compresses: bool,
) -> Result<(), Problem> {
    if !compresses {
        return Ok(());
    }
    features::require(services, vm, MIGRATE_COMPRESSED, "compress memory for another host")
}

/// Refuses a VM that is paused where its host's QEMU cannot send it so. What its guest does otherwise only the host knows.
fn require_use_of_disks(services: &Services, vm: &Vm) -> Result<(), Problem> {
    let view = services.hosts.view(vm.host);
    let is_paused = view.vm(vm.id).is_some_and(|seen| seen.power == Power::Paused);
    let qemu = view.description.as_ref().map_or("", |here| here.qemu.as_str());
    let is_known = qemu.starts_with(|first: char| first.is_ascii_digit());
    if !is_paused || !is_known || !older(qemu, QEMU_COMES_BACK) {
        return Ok(());
    }
    let detail = format!(
        "VM '{0}' is paused, and its host '{1}' has QEMU {qemu}: QEMU before {QEMU_COMES_BACK} cannot send a guest that does not use its disks. Unpause it first (vmseal vm unpause {0})",
        vm.name, vm.host_name
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// Whether what the VM is sent with is encrypted.
pub(super) fn is_encrypted(services: &Services, vm: &Vm, to: &Host) -> bool {
    let can = |host| services.hosts.view(host).has(MIGRATE_ENCRYPTED);
    must_be_encrypted(vm)
        || vm.migration_encryption != MigrationEncryption::Disabled && can(vm.host) && can(to.id)
}

pub(super) fn must_be_encrypted(vm: &Vm) -> bool {
    vm.key.is_some() || vm.migration_encryption == MigrationEncryption::Required
}

fn understood(fit: &Fit) -> String {
    let how = if fit.encrypted { "encrypted" } else { "not encrypted" };
    let copies = fit.copies.as_ref().map_or_else(String::new, |copies| {
        let disk = |disk: &Disk| format!("{} ({})", disk.name, Size(disk.size));
        let disks: Vec<_> = copies.disks.iter().map(disk).collect();
        let place = &copies.datastore.name;
        let with = copies.with();
        format!(", with copies of disks {}{with} on datastore '{place}'", disks.join(", "))
    });
    format!("choose host '{}'{copies}; memory and all else that is sent is {how}", fit.host.name)
}

/// What people should know who did not ask for that.
pub(super) fn in_the_clear(vm: &Vm, encrypted: bool) -> Option<String> {
    let asked = vm.migration_encryption == MigrationEncryption::Disabled;
    (!encrypted && !asked).then(|| {
        "one of the hosts cannot encrypt what is sent: all of the guest's memory goes over the network in the clear".to_owned()
    })
}

/// What else a host must have for a VM.
pub(super) struct Asked<'a> {
    /// What VMs on their way will need.
    pub promised: &'a Promised,
    /// The hosts whose ports were tried before.
    pub tried: &'a Tried,
    /// The datastore that was named for copies.
    pub place: Option<&'a str>,
    /// Whether memory is compressed.
    pub compresses: bool,
}

/// The host with the most memory that no VM has, of those that the VM can go to: one that has its disks, if there is one, and one
/// that is to be avoided only where there is no other. And why others are not offered.
pub(super) async fn choose(
    services: &Services,
    vm: &Vm,
    disks: &[Disk],
    asked: &Asked<'_>,
    avoided: Option<HostId>,
) -> Result<(Fit, Vec<String>), Problem> {
    let mut found = Vec::new();
    for host in others(services, vm).await? {
        let name = host.name.clone();
        found.push((name, fits(services, vm, disks, host, asked).await));
    }
    // At the same time: each that is cut off takes five seconds, and the caller waits for a minute.
    let reached = found.iter().map(async |(_, fit)| match fit {
        Ok(fit) => asked.tried.require_reached(services, vm, &fit.host).await,
        Err(_) => Ok(()),
    });
    let reached = join_all(reached).await;
    let mut candidates = Candidates::default();
    for ((name, fit), reached) in found.into_iter().zip(reached) {
        candidates.add(&name, fit.and_then(|fit| reached.map(|()| fit)), avoided);
    }
    candidates.best(vm)
}

/// The hosts that do not have a VM.
async fn others(services: &Services, vm: &Vm) -> Result<Vec<Host>, Problem> {
    let mut known = store::hosts::list(&mut *services.store.read().await?, &Part::all()).await?;
    known.retain(|host| host.id != vm.host);
    Ok(known)
}

/// The hosts that were asked whether a VM can go to them.
#[derive(Default)]
struct Candidates {
    best: Option<Fit>,
    /// Why the others cannot have it.
    refused: Vec<String>,
}

impl Candidates {
    fn add(&mut self, name: &str, fit: Result<Fit, String>, avoided: Option<HostId>) {
        match fit {
            Ok(fit) => {
                let is_better = |best: &Fit| fit.rank(avoided) > best.rank(avoided);
                if self.best.as_ref().is_none_or(is_better) {
                    self.best = Some(fit);
                }
            }
            Err(why) => self.refused.push(format!("host '{name}': {why}")),
        }
    }

    /// The best one, and why others are not offered.
    fn best(self, vm: &Vm) -> Result<(Fit, Vec<String>), Problem> {
        let Some(best) = self.best else {
            let none = "there is no other host".to_owned();
            let why = if self.refused.is_empty() { none } else { self.refused.join("; ") };
            let detail = format!("no other host can take VM '{}'; {why}", vm.name);
            return Err(Problem::new(ErrorCode::WrongState, detail));
        };
        let not_offered = |why| format!("not offered: {why}");
        Ok((best, self.refused.into_iter().map(not_offered).collect()))
    }
}

impl Fit {
    /// Those that are not avoided first, then those to which all is sent encrypted, then those without copies, then those with the
    /// most free memory.
    fn rank(&self, avoided: Option<HostId>) -> (bool, bool, bool, u64) {
        (avoided != Some(self.host.id), self.encrypted, self.copies.is_none(), self.free)
    }
}

/// What is known of another host, if VMs are placed there and it answers; or why it takes none.
pub(super) fn takes_vms(
    services: &Services,
    vm: &Vm,
    host: &Host,
) -> Result<Arc<HostDescription>, String> {
    if host.id == vm.host {
        return Err("it is there already".to_owned());
    }
    host.require_active().map_err(|problem| problem.detail)?;
    let view = services.hosts.view(host.id);
    let there = view.description.clone().filter(|_| view.connection == Connection::Connected);
    there.ok_or_else(|| "it does not answer".to_owned())
}

/// How a VM can go to a host; or why not. Whether its port is reached is not looked at.
async fn fits(
    services: &Services,
    vm: &Vm,
    disks: &[Disk],
    host: Host,
    asked: &Asked<'_>,
) -> Result<Fit, String> {
    let failed = |problem: Problem| problem.detail;
    let there = takes_vms(services, vm, &host)?;
    let view = services.hosts.view(host.id);
    if !view.has(MIGRATE) || there.migration_address.is_none() {
        return Err("its agent receives no running VMs: upgrade vmseal there".to_owned());
    }
    if must_be_encrypted(vm) && !view.has(MIGRATE_ENCRYPTED) {
        return Err("its agent cannot encrypt what is sent: upgrade vmseal there".to_owned());
    }
    if asked.compresses && !view.has(MIGRATE_COMPRESSED) {
        return Err("its agent reads nothing that is compressed: upgrade vmseal there, or leave out --compress".to_owned());
    }
    if stalls::asked(disks) && !view.has(STALLS) {
        return Err(format!("its agent cannot {}: upgrade vmseal there", stalls::CANNOT));
    }
    let Some(here) = services.hosts.view(vm.host).description.clone() else {
        return Err("the host of the VM is not known well enough".to_owned());
    };
    same_machine(&vm.hardware, &here, &there)?;
    // Before calls to the host: those are in vain for one that has no room.
    let free = {
        let mut read = services.store.read().await.map_err(|error| failed(error.into()))?;
        let free = free_memory(services, &mut read, host.id, asked.promised).await;
        free.map_err(|error| failed(error.into()))?.unwrap_or(there.memory)
    };
    if free < vm.memory {
        return Err(NO_ROOM.to_owned());
    }
    let agent = services.hosts.connected(host.id).map_err(failed)?;
    let copies = copies::of(services, vm, disks, &host, asked.place).await?;
    let to = copies.as_ref().map_or_else(Vec::new, |it| it.on(&host));
    let replicas = replicas::places(services, disks, &host, &to).await?;
    let spec = definition_with(&services.store, vm.id, host.id, &to).await.map_err(failed)?;
    image_layouts::fits(view.has(IMAGE_LAYOUTS), &spec, &to)?;
    let is_copied = |disk: &Disk| to.iter().any(|copy| copy.disk == disk.id);
    let stay: Vec<Disk> = disks.iter().filter(|disk| !is_copied(disk)).cloned().collect();
    for disk in &stay {
        let place = spec.disk(disk.id).map_or(&disk.datastore, |disk| &disk.datastore);
        require_there(&*agent, place, &disk.datastore_name).await?;
    }
    for (place, name) in &replicas {
        require_there(&*agent, place, name).await?;
    }
    // The pools are mounted there by now, if they were not.
    mounted::require_messenger_at(&services.store, &*agent, vm, host.id, &stay)
        .await
        .map_err(failed)?;
    medium::require_same(services, vm, &host, &*agent).await?;
    examine(&*agent, vm.id, spec.nics(), (&spec.hardware, spec.memory)).await?;
    let encrypted = is_encrypted(services, vm, &host);
    let downtime_milliseconds =
        downtime_of(services, vm).await.map_err(|error| failed(error.into()))?;
    let compresses = asked.compresses;
    Ok(Fit { host, free, encrypted, downtime_milliseconds, copies, compresses })
}

/// Refuses a datastore that a host cannot use now.
async fn require_there(
    agent: &dyn HostAgent,
    place: &DatastoreSpec,
    name: &str,
) -> Result<(), String> {
    let measured = agent.measure_datastore(place.clone()).await;
    match measured.map_err(|problem| problem.detail)? {
        DatastoreCondition::Available { .. } => Ok(()),
        DatastoreCondition::WrongMark { detail } | DatastoreCondition::Unavailable { detail } => {
            Err(format!("datastore '{name}' is not there: {detail}"))
        }
    }
}

/// Checks that a host has what a VM's network cards are connected to, and its hardware, with so much memory.
pub(super) async fn examine(
    agent: &dyn HostAgent,
    vm: VmId,
    nics: impl Iterator<Item = &NicSpec>,
    (hardware, memory): (&Hardware, u64),
) -> Result<(), String> {
    for nic in nics {
        // The host names the card.
        agent.examine_nic(vm, nic.clone()).await.map_err(|problem| problem.detail)?;
    }
    agent.examine_hardware(hardware.clone(), Some(memory)).await.map_err(|problem| problem.detail)
}

/// Whether a guest that runs on one host goes on on the other.
fn same_machine(
    hardware: &Hardware,
    here: &HostDescription,
    there: &HostDescription,
) -> Result<(), String> {
    if here.accelerator.kind != there.accelerator.kind {
        return Err(format!(
            "its guests run by {:?}, and those of the VM's host by {:?}",
            there.accelerator.kind, here.accelerator.kind
        ));
    }
    if older(&there.qemu, &here.qemu) {
        return Err(format!(
            "its QEMU {} is older than QEMU {} of the VM's host",
            there.qemu, here.qemu
        ));
    }
    same_processor(hardware, &here.accelerator, &there.accelerator)
}

/// Whether a guest that has the processor of one host finds all of it on the other. One with a model by name has the same anywhere.
pub(super) fn same_processor(
    hardware: &Hardware,
    here: &Accelerator,
    there: &Accelerator,
) -> Result<(), String> {
    let of_host = hardware.cpu_model.as_deref().is_none_or(|model| model == CPU_MODEL_HOST);
    let both = here.processor.as_ref().zip(there.processor.as_ref()).filter(|_| of_host);
    match both.and_then(|(here, there)| here.missing_on(there)) {
        Some(why) => Err(format!(
            "{why}. Give the VM a processor model by name that both hosts have: by a policy with that model (vmseal policy create --cpu-model), while the VM is off (vmseal vm stop, vmseal vm set --policy, vmseal vm start)"
        )),
        None => Ok(()),
    }
}

/// Whether one version of QEMU is older than another.
pub(super) fn older(one: &str, other: &str) -> bool {
    let numbers = |text: &str| -> Vec<u64> {
        let number = |part: &str| part.chars().take_while(char::is_ascii_digit).collect::<String>();
        text.split('.').take(2).map(|part| number(part).parse().unwrap_or(0)).collect()
    };
    numbers(one) < numbers(other)
}

#[cfg(test)]
mod tests;
