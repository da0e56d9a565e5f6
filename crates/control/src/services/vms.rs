//! Virtual machines.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use sqlx::{Connection as _, SqliteConnection};
use vmseal_api::compliance::Requirement;
use vmseal_api::console::ConsoleClaim;
use vmseal_api::host::version::STALLS;
use vmseal_api::host::{ConsoleStream, DiskSettings, NicSpec, Power, VmChange, VmState};
use vmseal_api::id::{HostId, PolicyId, VmId, check_name};
use vmseal_api::model::{
    self, Disk, DiskAttachment, Lifecycle, LinkedTo, Page, Plan, Replication, Vm,
};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::{StartVm, StopVm};

use super::caller::{Caller, Privilege};
use super::vm_key::require_available;
use super::{
    Outcome, PageRequest, Services, examine_change, features, image_layouts, page_of, room,
};
use crate::compliance::{self, Deviation, deviations};
use crate::hosts::keys::Purpose;
use crate::hosts::osds;
use crate::hosts::{may_fence, mounted};
use crate::operation::Operation;
use crate::stalls;
use crate::store::events::NewEvent;
use crate::store::links::{self, Link};
use crate::store::snapshots::Snapshot;
use crate::store::tasks::Task;
use crate::store::{
    Part, StoreError, Write, datastores, disks, evacuations, free_name, hosts, nics, policies,
    providers, tasks, vms,
};
use crate::tasks::{Engine, steps};

/// How long a guest may take to shut down by default, in seconds.
pub(super) const SHUTDOWN_DEFAULT: u32 = 120;

/// The maximum time for a guest to shut down, in seconds.
const SHUTDOWN_MAX: u32 = vmseal_api::host::SHUTDOWN_SECONDS_MAX;

/// What a VM shares with others.
#[derive(Default)]
struct Links {
    /// What it stands on.
    to: Option<Link>,
    /// The clones that stand on it, by name.
    from: Vec<String>,
}

fn shown(
    vm: vms::Vm,
    (disks, deviations): (Vec<disks::Disk>, Vec<Deviation>),
    nics: Vec<NicSpec>,
    provider: Option<String>,
    links: Links,
    seen: Option<&VmState>,
) -> Vm {
    let at_next_start = at_next_start(&vm, &disks, seen);
    let disks_in_the_clear = in_the_clear(&deviations);
    let attachment = |disk: &disks::Disk| attachment(disk, seen);
    let linked = links.to.map(|link| LinkedTo {
        vm: link.vm_name,
        snapshot: link.snapshot_name,
        shares_data_key: disks.iter().any(|disk| disk.role.is_data() && disk.encrypted),
    });
    let disks = disks.into_iter().map(|disk| Disk {
        attachment: attachment(&disk),
        id: disk.id,
        name: disk.name,
        datastore: disk.datastore_name,
        size: disk.size,
        encrypted: disk.encrypted,
        role: disk.role,
        allocation: disk.allocation,
        limits: disk.limits,
        cache: disk.cache,
        replica: disk.replica.map(|(place, datastore)| Replication {
            datastore,
            bytes_per_second: place.bytes_per_second,
        }),
        facts: disk.facts,
        image_layout: None,
        wanted_image_layout: None,
        encrypted_at: None,
    });
    Vm {
        id: vm.id,
        name: vm.name,
        description: vm.description,
        labels: vm.labels,
        autostart: vm.autostart,
        migration_encryption: vm.migration_encryption,
        on_drain: vm.on_drain,
        template: vm.template,
        linked,
        clones: links.from,
        host: vm.host_name,
        policy: vm.policy_name,
        vcpus: vm.vcpus,
        memory: vm.memory,
        hardware: vm.hardware,
        key: vm.key,
        provider,
        disks: disks.collect(),
        disks_in_the_clear,
        compliance: Some(compliance::shown(deviations)),
        nics: super::nics::shown(nics, seen),
        lifecycle: vm.lifecycle,
        power: seen.map(|seen| seen.power),
        suspended_to_ram: seen.is_some_and(|seen| seen.suspended_to_ram),
        at_next_start,
        key_state: seen.map(|seen| seen.key),
        stopped: seen.and_then(|seen| seen.stopped.clone()).or(vm.seen_stopped),
    }
}

/// The disks that are in the clear though the policy of their VM encrypts, by name.
fn in_the_clear(deviations: &[Deviation]) -> Vec<String> {
    let of_encryption = deviations.iter().filter(|it| it.requirement == Requirement::Encryption);
    of_encryption.map(|it| it.part.disk().to_owned()).collect()
}

fn attachment(disk: &disks::Disk, seen: Option<&VmState>) -> DiskAttachment {
    if disk.detached {
        return DiskAttachment::Detached;
    }
    match seen.and_then(|seen| seen.started_with.as_ref()) {
        Some(with) if with.disks.iter().all(|it| it.disk != disk.id) => DiskAttachment::AtNextStart,
        _ => DiskAttachment::Attached,
    }
}

/// What a VM that runs gets at its next start, by the names of fields.
fn at_next_start(vm: &vms::Vm, disks: &[disks::Disk], seen: Option<&VmState>) -> Vec<String> {
    let Some(with) = seen.and_then(|seen| seen.started_with.as_ref()) else { return Vec::new() };
    let known = |disk: &disks::Disk| with.disks.iter().find(|it| it.disk == disk.id);
    let differs = |wanted: fn(&disks::Disk, &DiskSettings) -> bool| {
        disks.iter().any(|disk| known(disk).is_some_and(|has| wanted(disk, has)))
    };
    let waiting = [
        ("vcpus", vm.vcpus != with.vcpus),
        ("memory", vm.memory != with.memory),
        ("boot", vm.hardware.boot != with.boot),
        ("limits", differs(|disk, has| disk.limits != has.limits)),
        ("cache", differs(|disk, has| disk.cache != has.cache)),
    ];
    waiting.into_iter().filter(|(_, waits)| *waits).map(|(name, _)| name.to_owned()).collect()
}

async fn provider_name(
    from: &mut SqliteConnection,
    vm: &vms::Vm,
) -> Result<Option<String>, StoreError> {
    let Some(key) = &vm.key else { return Ok(None) };
    let found = providers::find(from, &key.provider.to_string()).await?;
    Ok(found.map(|provider| provider.name))
}

pub(super) async fn find(
    services: &Services,
    name: &str,
) -> Result<(vms::Vm, Vec<disks::Disk>), Problem> {
    let mut read = services.store.read().await?;
    let vm = vms::find(&mut read, name).await?.ok_or_else(|| Problem::not_found("VM", name))?;
    let disks = disks::of_vm(&mut read, vm.id).await?;
    Ok((vm, disks))
}

/// A label that listed VMs have: with this value, or with any.
struct Label<'a> {
    key: &'a str,
    value: Option<&'a str>,
}

impl<'a> Label<'a> {
    fn parse(text: &'a str) -> Result<Self, Problem> {
        let (key, value) = match text.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (text, None),
        };
        if key.is_empty() {
            let detail = format!("'{text}' is not of the form KEY=VALUE or KEY");
            return Err(Problem::invalid("label", detail));
        }
        Ok(Self { key, value })
    }

    fn is_of(&self, vm: &vms::Vm) -> bool {
        let has = vm.labels.get(self.key);
        has.is_some_and(|has| self.value.is_none_or(|value| value == has))
    }
}

/// Lists the VMs; only those with a label (`KEY=VALUE`, or `KEY` with any value), if one is given. A page may then have
/// fewer than was asked for, and be followed by others.
pub async fn list(
    services: &Services,
    caller: &Caller,
    request: PageRequest,
    label: Option<&str>,
) -> Result<Page<Vm>, Problem> {
    caller.require(Privilege::Read)?;
    let label = label.map(Label::parse).transpose()?;
    let part = request.part();
    let mut read = services.store.read().await?;
    // One snapshot of the inventory, so that a VM that is created meanwhile is not listed without its disks.
    let mut read = read.begin().await.map_err(StoreError::from)?;
    let mut listed = vms::list(&mut read, &part).await?;
    let next = page_of(listed.iter().map(|vm| vm.id).collect(), part.limit, VmId::to_string).next;
    listed.retain(|vm| label.as_ref().is_none_or(|label| label.is_of(vm)));
    let mut disks = disks::of_part(&mut read, &part).await?;
    let mut nics = nics::of_part(&mut read, &part).await?;
    let providers = providers::names(&mut read).await?;
    let policies = policies::list(&mut read, &Part::all()).await?;
    let policies: HashMap<PolicyId, _> = policies.into_iter().map(|it| (it.id, it)).collect();
    let mut links = links::all(&mut read).await?;
    let mut clones: HashMap<VmId, Vec<String>> = HashMap::new();
    for link in links.values() {
        if let Entry::Vacant(clones) = clones.entry(link.vm) {
            clones.insert(links::clones_of(&mut read, link.vm, None).await?);
        }
    }
    let layouts = match (listed.first(), listed.last()) {
        (Some(first), Some(last)) => disks::image_layouts(&mut read, first.id, last.id).await?,
        _ => HashMap::new(),
    };
    let datastores = compliance::by_id(datastores::list(&mut read, &Part::all()).await?);
    drop(read);
    let hosts: HashSet<HostId> = listed.iter().map(|vm| vm.host).collect();
    let views: HashMap<_, _> = hosts.into_iter().map(|it| (it, services.hosts.view(it))).collect();
    let seen: HashMap<(HostId, VmId), &VmState> = views
        .iter()
        .flat_map(|(host, view)| view.vms().iter().map(|state| ((*host, state.vm), state)))
        .collect();
    let items = listed.into_iter().map(|vm| {
        let disks = disks.remove(&vm.id).unwrap_or_default();
        let nics = nics.remove(&vm.id).unwrap_or_default();
        let provider = vm.key.as_ref().and_then(|key| providers.get(&key.provider).cloned());
        let seen = seen.get(&(vm.host, vm.id)).copied();
        let from = clones.remove(&vm.id).unwrap_or_default();
        let links = Links { to: links.remove(&vm.id), from };
        let judged = |policy| deviations(policy, vm.host, &disks, &datastores, &layouts);
        let deviations = policies.get(&vm.policy).map(judged).unwrap_or_default();
        let (in_pools, pools) = (image_layouts::in_pools(&disks), osds::in_pools(&disks));
        let mut vm = shown(vm, (disks, deviations), nics, provider, links, seen);
        image_layouts::tell(&mut vm, &in_pools, &layouts);
        osds::tell(&mut vm, &pools, &datastores);
        vm
    });
    Ok(Page { items: items.collect(), next })
}

/// Shows a VM.
pub async fn show(services: &Services, caller: &Caller, name: &str) -> Result<Vm, Problem> {
    caller.require(Privilege::Read)?;
    let (vm, disks) = find(services, name).await?;
    let mut read = services.store.read().await?;
    let provider = provider_name(&mut read, &vm).await?;
    let nics = nics::all_of_vm(&mut read, vm.id).await?;
    let to = links::of_vm(&mut read, vm.id).await?;
    let links = Links { to, from: links::clones_of(&mut read, vm.id, None).await? };
    let policy = policies::find(&mut read, &vm.policy.to_string()).await?;
    let layouts = disks::image_layouts(&mut read, vm.id, vm.id).await?;
    let datastores = compliance::by_id(datastores::of_host(&mut read, vm.host).await?);
    drop(read);
    let judged =
        |policy: &policies::Policy| deviations(policy, vm.host, &disks, &datastores, &layouts);
    let deviations = policy.as_ref().map(judged).unwrap_or_default();
    let view = services.hosts.view(vm.host);
    let seen = view.vm(vm.id);
    let (in_pools, pools) = (image_layouts::in_pools(&disks), osds::in_pools(&disks));
    let mut vm = shown(vm, (disks, deviations), nics, provider, links, seen);
    image_layouts::tell(&mut vm, &in_pools, &layouts);
    osds::tell(&mut vm, &pools, &datastores);
    Ok(vm)
}

/// A VM that is made, on a host whose agent has a feature; `cannot` completes "the agent of host 'x' cannot …".
pub(super) async fn find_ready(
    services: &Services,
    name: &str,
    feature: &str,
    cannot: &str,
) -> Result<(vms::Vm, Vec<disks::Disk>), Problem> {
    let (vm, disks) = find(services, name).await?;
    require_ready(&vm)?;
    super::features::require(services, &vm, feature, cannot)?;
    Ok((vm, disks))
}

/// The name of something new: the one that is asked for, else one that begins so and is not taken.
pub(super) fn new_name<'a>(
    asked: Option<String>,
    begin: &str,
    taken: impl Iterator<Item = &'a str>,
) -> Result<String, Problem> {
    let name = asked.unwrap_or_else(|| free_name(begin, taken));
    check_name(&name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    Ok(name)
}

/// Commits a transaction with a new task, and begins the task; or only plans it.
pub(super) async fn begin(
    services: &Services,
    write: Write<'_>,
    operation: Operation,
    vm: &vms::Vm,
    caller: &Caller,
    dry_run: bool,
) -> Result<Outcome<model::Task>, Problem> {
    begin_paced(services, write, operation, vm, caller, (CopyPace::default(), dry_run)).await
}

/// The same at a pace.
pub(super) async fn begin_paced(
    services: &Services,
    write: Write<'_>,
    operation: Operation,
    vm: &vms::Vm,
    caller: &Caller,
    (pace, dry_run): (CopyPace, bool),
) -> Result<Outcome<model::Task>, Problem> {
    let named = (&*vm.name, vm.provider.is_none());
    begin_named(services, write, operation, named, caller, (pace, dry_run)).await
}

/// The same of a VM that may be deleted, by its name; `keyless` is one that had no key.
pub(super) async fn begin_named(
    services: &Services,
    mut write: Write<'_>,
    operation: Operation,
    (name, keyless): (&str, bool),
    caller: &Caller,
    (pace, dry_run): (CopyPace, bool),
) -> Result<Outcome<model::Task>, Problem> {
    let task = Engine::record(&mut write, operation, name, caller.name()).await?;
    let task = Task { pace, ..task };
    if !pace.is_free() {
        tasks::set_pace(&mut write, &task).await?;
    }
    if dry_run {
        return Ok(Outcome::Planned(plan_of(&task, name, keyless)));
    }
    write.commit().await?;
    let shown = services.engine.shown(&task);
    services.engine.begin(task);
    Ok(Outcome::Done(shown))
}

/// The plan of a task.
pub(super) fn plan(task: &Task, vm: &vms::Vm) -> Plan {
    plan_of(task, &vm.name, vm.provider.is_none())
}

/// The same of a VM that may be deleted, and may have had no key.
fn plan_of(task: &Task, vm: &str, keyless: bool) -> Plan {
    let steps = steps::of(&task.operation).iter().filter(|step| !(keyless && step.needs_key()));
    Plan {
        kind: task.operation.kind().to_owned(),
        target: vm.to_owned(),
        steps: steps.map(|step| step.title().to_owned()).collect(),
        ..Plan::default()
    }
}

/// The power of a VM, read from its host: the monitor's view may be a moment old.
pub(super) async fn power(services: &Services, vm: &vms::Vm) -> Result<Option<Power>, Problem> {
    let state = services.hosts.connected(vm.host)?.state_now().await?;
    Ok(state.vms.iter().find(|seen| seen.vm == vm.id).map(|seen| seen.power))
}

pub(super) fn require_ready(vm: &vms::Vm) -> Result<(), Problem> {
    let why = match vm.lifecycle {
        Lifecycle::Ready => return Ok(()),
        Lifecycle::Creating => "is not made yet",
        Lifecycle::Deleting => "is being deleted",
    };
    Err(Problem::new(ErrorCode::WrongState, format!("VM '{}' {why}", vm.name)))
}

/// Refuses while a task works on the VM: it may depend on what would change.
pub(super) async fn require_free(
    write: &mut SqliteConnection,
    vm: &vms::Vm,
) -> Result<(), Problem> {
    match tasks::holding(write, vm.id).await? {
        Some(task) => Err(tasks::in_the_way(&task, &vm.name)),
        None => Ok(()),
    }
}

/// Refuses what would start or change a template: its clones are to hold what it holds now.
pub(super) fn require_no_template(vm: &vms::Vm) -> Result<(), Problem> {
    if !vm.template {
        return Ok(());
    }
    let detail = format!(
        "VM '{0}' is a template, which is neither started nor changed: clone it (vmseal vm clone {0} NAME), or make it an ordinary VM first (vmseal vm set {0} --template off)",
        vm.name
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// Starts a VM that is off. A suspended one goes on where it was, or boots when its memory is given up.
pub async fn start(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: StartVm,
    dry_run: bool,
) -> Result<Outcome<model::Task>, Problem> {
    caller.require(Privilege::VmPower)?;
    let (vm, disks) = find(services, name).await?;
    require_ready(&vm)?;
    require_no_template(&vm)?;
    require_active_host(services, &vm).await?;
    let StartVm { boot_once, discard_memory } = request;
    let nics = nics::of_vm(&mut *services.store.read().await?, vm.id).await?;
    if let Some(first) = boot_once {
        super::hardware::check_boot_once(services, &vm, &nics, first).await?;
    }
    let power = power(services, &vm).await?;
    let is_suspended = power == Some(Power::Suspended);
    if is_suspended && boot_once.is_some() && !discard_memory {
        return Err(super::saved_memory::refusal(&vm));
    }
    if let Some(power) = power
        && power != Power::Off
        && !is_suspended
    {
        let detail = format!("VM '{}' is not off: it is {}", vm.name, word(power));
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    if dry_run {
        require_available(services, &vm, Purpose::Encrypt).await?;
        super::hardware::examine(services, vm.host, &vm.host_name, &vm.hardware, None).await?;
        super::nics::examine(&*services.hosts.connected(vm.host)?, vm.id, &nics).await?;
        require_places(services, &vm, &disks).await?;
        require_former_kept_away(services, &vm, &disks).await?;
    }
    let operation = Operation::StartVm { vm: vm.id, boot_once };
    if is_suspended && discard_memory {
        // A task that works on the VM may copy its memory, or keep it.
        require_free(&mut *services.store.read().await?, &vm).await?;
    }
    if is_suspended && discard_memory && !dry_run {
        // Its memory is given up only where it can start.
        let mut write = services.store.write().await?;
        Engine::record(&mut write, operation.clone(), &vm.name, caller.name()).await?;
        drop(write);
        super::saved_memory::discard(services, caller, &vm).await?;
    }
    let write = services.store.write().await?;
    let begun = begin(services, write, operation, &vm, caller, dry_run).await?;
    let generation = super::saved_memory::expected(services, &vm).await?;
    let change = VmChange::Start { first: boot_once, discard_memory, generation };
    let mut begun = examine_change::of_plan(services, &vm, change, begun).await?;
    if let Outcome::Planned(plan) = &mut begun {
        plan.warnings.extend(room::memory_beside(services, &vm).await?);
    }
    Ok(begun)
}

/// Refuses a VM of which a disk goes over connections that its policy does not allow, or is not on encrypted OSDs as that asks, or whose
/// requests are to fail by an agent that does not know of that, as its start would.
async fn require_places(
    services: &Services,
    vm: &vms::Vm,
    disks: &[disks::Disk],
) -> Result<(), Problem> {
    let mut read = services.store.read().await?;
    let policy = policies::find(&mut read, &vm.policy.to_string()).await?;
    drop(read);
    let Some(policy) = policy else { return Ok(()) };
    if stalls::asked(disks) {
        features::require(services, vm, STALLS, stalls::CANNOT)?;
    }
    let agent = services.hosts.connected(vm.host)?;
    mounted::require_messenger_now(&services.store, &*agent, &policy, vm.host, disks).await?;
    osds::require(&mut *services.store.read().await?, &policy, disks).await
}

/// Refuses a VM that was taken from a host which may still run it, where its host may not keep that one from the disks, as its start would.
async fn require_former_kept_away(
    services: &Services,
    vm: &vms::Vm,
    disks: &[disks::Disk],
) -> Result<(), Problem> {
    if !evacuations::is_awaited(&mut *services.store.read().await?, vm.id).await? {
        return Ok(());
    }
    let agent = services.hosts.connected(vm.host)?;
    may_fence::require(&services.store, &*agent, vm.host, disks).await
}

/// Refuses a VM whose host is emptied, before anything is done for its start.
pub(super) async fn require_active_host(services: &Services, vm: &vms::Vm) -> Result<(), Problem> {
    let found = hosts::find(&mut *services.store.read().await?, &vm.host.to_string()).await?;
    found.map_or(Ok(()), |host| host.require_active())
}

pub(super) fn word(power: Power) -> &'static str {
    match power {
        Power::Off => "off",
        Power::Starting => "starting",
        Power::Running => "running",
        Power::Stopping => "stopping",
        Power::Paused => "paused",
        Power::Suspending => "being suspended",
        Power::Suspended => "suspended",
        Power::Migrating => "between two hosts",
        Power::Unknown => "in a state that this server does not know",
    }
}

/// How long a guest may take to shut down, in seconds.
pub(super) fn shutdown_time(asked: Option<u32>) -> Result<u32, Problem> {
    let seconds = asked.unwrap_or(SHUTDOWN_DEFAULT);
    if (1..=SHUTDOWN_MAX).contains(&seconds) {
        return Ok(seconds);
    }
    Err(Problem::invalid("timeout_seconds", format!("must be 1 to {SHUTDOWN_MAX}")))
}

/// Stops a VM; one that is off stays off. With `force`, a task that waits for the guest to shut down cuts its power
/// instead, and the answer is that task.
pub async fn stop(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: StopVm,
    dry_run: bool,
) -> Result<Outcome<model::Task>, Problem> {
    caller.require(Privilege::VmPower)?;
    let timeout_seconds = shutdown_time(request.timeout_seconds)?;
    let (vm, _) = find(services, name).await?;
    require_ready(&vm)?;
    let power = power(services, &vm).await?;
    if power == Some(Power::Suspended) {
        return Err(super::saved_memory::refusal(&vm));
    }
    if power == Some(Power::Paused) && !request.force {
        let name = &vm.name;
        let detail = format!(
            "VM '{name}' is paused, so its guest cannot shut down: unpause it first (vmseal vm unpause {name}), or cut its power (--force)"
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    if request.force && dry_run {
        if let Some(task) = services.engine.check_force_stop(vm.id).await? {
            let step = format!("cut the power now, as task {}", task.id);
            return Ok(Outcome::planned("vm.stop", &vm.name, step));
        }
    } else if request.force
        && let Some(task) = services.engine.force_stop(vm.id, caller.name()).await?
    {
        return Ok(Outcome::Done(services.engine.shown(&task)));
    }
    let mut write = services.store.write().await?;
    // A start that is due because its host has rebooted would undo it.
    vms::set_start_done(&mut write, vm.id).await?;
    let operation = Operation::StopVm { vm: vm.id, force: request.force, timeout_seconds };
    begin(services, write, operation, &vm, caller, dry_run).await
}

/// Deletes a VM that is off, with its disks and its key, or the remains of one.
pub async fn delete(
    services: &Services,
    caller: &Caller,
    name: &str,
    dry_run: bool,
) -> Result<Outcome<model::Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let (vm, _) = find(services, name).await?;
    // What is left of a VM that went away may have its memory still: that goes with it.
    let is_left = |power| power == Power::Suspended && vm.lifecycle == Lifecycle::Deleting;
    if let Some(power) = power(services, &vm).await?
        && power != Power::Off
        && !is_left(power)
    {
        if power == Power::Suspended {
            return Err(super::saved_memory::refusal(&vm));
        }
        let detail = format!(
            "VM '{}' is {}: stop it first (vmseal vm stop {})",
            vm.name,
            word(power),
            vm.name
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let _unchanged = services.hosts.lock(vm.id).await;
    let mut write = services.store.write().await?;
    // Read again: a task may have ended since.
    let now = vms::get(&mut write, vm.id).await?.ok_or_else(|| Problem::not_found("VM", name))?;
    vms::set_lifecycle(&mut write, vm.id, Lifecycle::Deleting).await?;
    let clones = links::clones_of(&mut write, vm.id, None).await?;
    let operation = Operation::DeleteVm { vm: vm.id, was: now.lifecycle };
    let mut begun = begin(services, write, operation, &vm, caller, dry_run).await?;
    if let (Outcome::Planned(plan), false) = (&mut begun, clones.is_empty()) {
        plan.warnings.push(format!(
            "linked clones keep what they share with it, data and data keys: {}",
            named(&clones)
        ));
    }
    Ok(begun)
}

/// Names of VMs, as an error has them.
pub(super) fn named(names: &[String]) -> String {
    names.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ")
}

/// Refuses what would change, or be rid of, what linked clones of a VM, or of one snapshot of it, stand on.
pub(super) async fn require_no_clones(
    from: &mut SqliteConnection,
    vm: &vms::Vm,
    snapshot: Option<&Snapshot>,
) -> Result<(), Problem> {
    let clones = links::clones_of(from, vm.id, snapshot.map(|snapshot| snapshot.id)).await?;
    if clones.is_empty() {
        return Ok(());
    }
    let of = match snapshot {
        Some(snapshot) => format!("snapshot '{}' of VM '{}'", snapshot.name, vm.name),
        None => format!("VM '{}'", vm.name),
    };
    let detail = format!(
        "linked clones stand on {of}: {}. Delete them, or make them VMs of their own first (vmseal vm recrypt NAME --deep, or vmseal vm move)",
        named(&clones)
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// Opens a guest's serial console; one user has it at a time.
pub async fn console(
    services: &Services,
    caller: &Caller,
    name: &str,
    claim: ConsoleClaim,
) -> Result<ConsoleStream, Problem> {
    caller.require(Privilege::VmConsole)?;
    let (vm, disks) = find(services, name).await?;
    if disks.iter().any(|disk| disk.encrypted) {
        caller.require(Privilege::DirectAccess)?;
    }
    let console = services.hosts.connected(vm.host)?.console(vm.id, claim).await?;
    let mut write = services.store.write().await?;
    let (kind, target) = ("vm.console-opened", vm.name.as_str());
    let detail = match claim {
        ConsoleClaim::IfFree => "its serial line",
        ConsoleClaim::TakeOver => "its serial line, taken over from the former user",
    };
    write.event(NewEvent { kind, actor: caller.name(), target, detail }).await?;
    write.commit().await?;
    Ok(console)
}
