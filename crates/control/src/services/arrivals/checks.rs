//! Whether a VM may arrive from another control plane: each check, with its result.

use std::net::SocketAddr;

use vmseal_api::datastore::DatastoreCondition;
use vmseal_api::filter::check_caches;
use vmseal_api::host::version::{
    IMAGE_LAYOUTS, MIGRATE, MIGRATE_APART, MIGRATE_APART_SNAPSHOTS, MIGRATE_AT_REST,
    MIGRATE_COMPRESSED, MIGRATE_DISKS, MIGRATE_ENCRYPTED, MIGRATE_SNAPSHOTS, MIGRATE_STATE,
    MIGRATE_SUSPENDED, MIGRATE_TPM_AT_REST,
};
use vmseal_api::host::{Allocation, CopyRoom, DiskRole, HostAgent, HostDescription, KeptRoom};
use vmseal_api::migration::MigrationEncryption;
use vmseal_api::model::Connection;
use vmseal_api::problem::Problem;
use vmseal_api::remote::{ArrivalCheck, ArrivalChecks, ArrivingVm, BeginArrival, DiskOfArrival};
use vmseal_api::size::Size;

use crate::hosts::HostView;
use crate::hosts::osds;
use crate::remotes::keeps_state;
use crate::services::create_vm::{check_cpu_model, provider_of};
use crate::services::migrate::{Promised, free_memory, older, same_processor, sizes};
use crate::services::{Services, hardware, hosts, image_layouts};
use crate::store::datastores::{self, Datastore};
use crate::store::hosts::Host;
use crate::store::policies::{self, Policy};
use crate::store::{self, Part, vms};
use crate::tasks::migrate_vm::reachable;

/// What the VM gets.
pub(super) struct Chosen {
    pub host: Host,
    pub datastore: Datastore,
    pub policy: Policy,
}

/// Where on a host it would be.
struct Place {
    datastore: Datastore,
    /// Where the host waits for VMs.
    address: SocketAddr,
}

/// What was looked at.
#[derive(Default)]
struct Looked {
    checks: Vec<ArrivalCheck>,
    host: Option<String>,
}

impl Looked {
    /// Notes a result; gives what was found, where that is good.
    fn note<T>(&mut self, what: &str, found: Result<(T, String), String>) -> Option<T> {
        let (found, ok, detail) = match found {
            Ok((found, detail)) => (Some(found), true, detail),
            Err(why) => (None, false, why),
        };
        let (what, host) = (what.to_owned(), self.host.clone());
        self.checks.push(ArrivalCheck { what, host, ok, detail });
        found
    }

    fn is_ok(&self) -> bool {
        self.checks.iter().all(|check| check.ok)
    }
}

fn failed(problem: impl Into<Problem>) -> String {
    problem.into().detail
}

/// Looks at all; says what the VM would get, if it may arrive.
pub(super) async fn look(
    services: &Services,
    arrival: &BeginArrival,
) -> Result<(ArrivalChecks, Option<Chosen>), Problem> {
    let mut looked = Looked::default();
    looked.note("name", name_is_free(services, arrival).await);
    let policy = looked.note("policy", policy_for(services, arrival).await);
    if let Some(told) = suspended(arrival) {
        looked.note("saved memory", Ok(((), told)));
    }
    if let Some(told) = snapshots_of(arrival) {
        looked.note("snapshots", Ok(((), told)));
    }
    let may = looked.is_ok();
    let mut best: Option<((bool, u64), Host, Place)> = None;
    let candidates = match &arrival.host {
        Some(name) => match hosts::find(services, name).await {
            Ok(host) => vec![host],
            Err(problem) => {
                looked.note::<()>("host", Err(problem.detail));
                Vec::new()
            }
        },
        None => store::hosts::list(&mut *services.store.read().await?, &Part::all()).await?,
    };
    let (mut of_best, mut of_others) = (Vec::new(), Vec::new());
    for host in candidates {
        let mut here = Looked { host: Some(host.name.clone()), ..Looked::default() };
        let fit = fit(services, arrival, policy.as_ref(), &host, &mut here).await?;
        let fit = fit.filter(|_| here.is_ok());
        // As within one control plane: first those to which all is sent encrypted, then those with the most free memory.
        let rank = |free| (is_encrypted(arrival, &services.hosts.view(host.id)), free);
        let fit = fit.map(|(free, place)| (rank(free), place));
        match fit {
            Some((rank, place)) if best.as_ref().is_none_or(|(most, ..)| rank > *most) => {
                (of_best, best) = (here.checks, Some((rank, host, place)));
            }
            Some(_) => {}
            None => of_others.extend(here.checks),
        }
    }
    looked.checks.extend(if best.is_some() { of_best } else { of_others });
    let (chosen, encrypted, address) = match (policy, best) {
        (Some(policy), Some(((encrypted, _), host, place))) if may => {
            let Place { datastore, address } = place;
            (Some(Chosen { host, datastore, policy }), Some(encrypted), Some(address))
        }
        _ => (None, None, None),
    };
    if chosen.is_none() && looked.is_ok() {
        looked.note::<()>("host", Err("there is no host".to_owned()));
    }
    let host = chosen.as_ref().map(|chosen| chosen.host.name.clone());
    let datastore = chosen.as_ref().map(|chosen| chosen.datastore.name.clone());
    let checks = looked.checks;
    Ok((ArrivalChecks { checks, host, datastore, address, encrypted }, chosen))
}

/// What comes with a VM of its guest's memory; none where it is not suspended.
fn suspended(arrival: &BeginArrival) -> Option<String> {
    arrival.suspended?;
    let size = match &arrival.vm.kept {
        Some(kept) => format!(": {} with that of snapshots", Size(kept.memories)),
        None => "; how much it takes is not known, and not counted".to_owned(),
    };
    Some(format!("it comes, and the VM is suspended here{size}"))
}

/// What comes with a VM of its snapshots; none where it has none.
fn snapshots_of(arrival: &BeginArrival) -> Option<String> {
    let vm = &arrival.vm;
    let count = match vm.snapshots.len() {
        0 => return None,
        1 => "one snapshot comes with it".to_owned(),
        many => format!("{many} snapshots come with it"),
    };
    let with_memory = vm.snapshots.iter().filter(|snapshot| snapshot.memory).count();
    let memory =
        if with_memory > 0 { format!(", {with_memory} with memory") } else { String::new() };
    Some(match &vm.kept {
        // That of the VM's own memory is not told apart.
        Some(kept) if arrival.suspended.is_some() => {
            format!("{count}{memory}: {}", Size(kept.of_disks()))
        }
        Some(kept) => format!("{count}{memory}: {}", sizes(kept)),
        None => format!("{count}{memory}; how much they keep is not known, and not counted"),
    })
}

async fn name_is_free(services: &Services, arrival: &BeginArrival) -> Result<((), String), String> {
    let (name, id) = (&arrival.vm.name, arrival.vm.id.to_string());
    let mut read = services.store.read().await.map_err(failed)?;
    if vms::find(&mut read, &id).await.map_err(failed)?.is_some() {
        return Err(format!("a VM with the id {id} is here already"));
    }
    match vms::find(&mut read, name).await.map_err(failed)? {
        Some(_) => Err(format!("another VM is called '{name}': rename one of them")),
        None => Ok(((), format!("'{name}' is free"))),
    }
}

/// The policy, which must encrypt if the VM has a key, and not otherwise: disks are not encrypted or decrypted on the way.
async fn policy_for(
    services: &Services,
    arrival: &BeginArrival,
) -> Result<(Policy, String), String> {
    let vm = &arrival.vm;
    let mut write = services.store.write().await.map_err(failed)?;
    let found = policies::find(&mut write, &arrival.policy).await.map_err(failed)?;
    let Some(policy) = found else {
        return Err(format!(
            "there is no policy '{}': create it, or name another one (--policy)",
            arrival.policy
        ));
    };
    let name = &policy.name;
    vm.disks.iter().try_for_each(|disk| require_as_vm(vm, disk))?;
    match (policy.encryption, vm.has_key) {
        (true, false) => {
            return Err(format!(
                "policy '{name}' encrypts, and the VM has no key: name one that does not (--policy)"
            ));
        }
        (false, true) => {
            return Err(format!(
                "policy '{name}' does not encrypt, and the VM is encrypted: name one that does (--policy)"
            ));
        }
        _ => {}
    }
    if policy.replica.is_some() {
        return Err(format!(
            "policy '{name}' has disks replicated, and those of a VM that arrives are not: name another one (--policy)"
        ));
    }
    check_cpu_model(&policy, vm.hardware.cpu_model.as_deref()).map_err(failed)?;
    hardware::check_tpm(&vm.hardware, &policy).map_err(failed)?;
    check_caches(vm.disks.iter().map(|_| policy.cache)).map_err(|(_, what)| what)?;
    // Nothing is written.
    let provider = provider_of(services, &mut write, &policy).await.map_err(failed)?;
    let keys =
        provider.map_or("no key".to_owned(), |it| format!("a new key of provider '{}'", it.name));
    let detail = format!("'{name}', {keys}{}", in_the_clear(vm));
    Ok((policy, detail))
}

/// Refuses a disk that a VM does not have when it is whole: an encrypted one without the VM's key, and one of the machine's own in the
/// clear where the VM has a key. Only disks of the guest's may be in the clear then.
fn require_as_vm(vm: &ArrivingVm, disk: &DiskOfArrival) -> Result<(), String> {
    let (name, of) = (&vm.name, &disk.name);
    match (vm.has_key, disk.encrypted) {
        (false, true) => Err(format!(
            "disk '{of}' is encrypted, and the VM has no key: decrypt the VM first (vmseal vm decrypt {name})"
        )),
        (true, false) if !disk.role.is_data() => Err(format!(
            "disk '{of}' is in the clear, which is the machine's own, and the VM has a key: encrypt the VM first (vmseal vm encrypt {name})"
        )),
        _ => Ok(()),
    }
}

/// What comes in the clear of a VM that has a key, and stays so.
fn in_the_clear(vm: &ArrivingVm) -> String {
    let plain = vm.disks.iter().filter(|disk| vm.has_key && !disk.encrypted);
    let names: Vec<_> = plain.map(|disk| format!("'{}'", disk.name)).collect();
    match names.is_empty() {
        true => String::new(),
        false => format!("; in the clear, as they are: disks {}", names.join(", ")),
    }
}

/// Looks at one host; its free memory, and where the VM would be.
async fn fit(
    services: &Services,
    arrival: &BeginArrival,
    policy: Option<&Policy>,
    host: &Host,
    looked: &mut Looked,
) -> Result<Option<(u64, Place)>, Problem> {
    let view = services.hosts.view(host.id);
    let Some((agent, there)) = looked.note("connection", answers(services, host, &view)) else {
        return Ok(None);
    };
    looked.note("versions", versions(arrival, &view, &there));
    let address = match there.migration_address {
        Some(listens) => looked.note("address for VMs", reached_at(listens, host).await),
        // That is said of its version.
        None => None,
    };
    looked.note("encryption", Ok(((), encryption(arrival, &view))));
    looked.note("accelerator", accelerator(arrival, &there));
    let vm = &arrival.vm;
    let hardware = agent.examine_hardware(vm.hardware.clone(), Some(vm.memory)).await;
    let hardware =
        hardware.map(|()| ((), "it has the processor model and the firmware".to_owned()));
    looked.note("hardware", hardware.map_err(|problem| lacking(problem, vm)));
    looked.note("network", network(services, arrival, &*agent).await);
    let free = memory(services, arrival, host, &there).await;
    let free = looked.note("memory", free);
    let datastore = looked.note("datastore", room(services, arrival, policy, host, &*agent).await);
    let place = datastore.zip(address).map(|(datastore, address)| Place { datastore, address });
    Ok(free.zip(place))
}

/// What a host lacks of a VM's hardware. A medium in its drive is a file of the host that it comes from.
fn lacking(problem: Problem, vm: &ArrivingVm) -> String {
    match vm.hardware.medium() {
        None => problem.detail,
        Some(path) => format!(
            "{}. The VM has {} in its CD-ROM drive: have the same file there, or eject it first (vmseal vm cdrom eject {})",
            problem.detail,
            path.display(),
            vm.name
        ),
    }
}

type Answering = (std::sync::Arc<dyn HostAgent>, std::sync::Arc<HostDescription>);

fn answers(
    services: &Services,
    host: &Host,
    view: &HostView,
) -> Result<(Answering, String), String> {
    host.require_active().map_err(failed)?;
    let there = view.description.clone().filter(|_| view.connection == Connection::Connected);
    let agent = services.hosts.connected(host.id).map_err(failed)?;
    let there = there.ok_or_else(|| "it does not answer".to_owned())?;
    Ok(((agent, there), "it answers".to_owned()))
}

/// Whether both agents can do their part.
fn versions(
    arrival: &BeginArrival,
    view: &HostView,
    there: &HostDescription,
) -> Result<((), String), String> {
    let vm = &arrival.vm;
    let with_snapshots = !vm.snapshots.is_empty();
    let with_state = keeps_state(vm.disks.iter().map(|disk| disk.role));
    let with_tpm = vm.disks.iter().any(|disk| disk.role == DiskRole::Tpm);
    let needed = [
        (MIGRATE, true),
        (MIGRATE_DISKS, true),
        (MIGRATE_STATE, with_state),
        (MIGRATE_ENCRYPTED, must_be_encrypted(vm)),
        (MIGRATE_APART, vm.has_key),
        (MIGRATE_SNAPSHOTS, with_snapshots),
        (MIGRATE_APART_SNAPSHOTS, with_snapshots && vm.has_key),
        (MIGRATE_AT_REST, arrival.at_rest),
        (MIGRATE_SUSPENDED, arrival.suspended.is_some()),
        (MIGRATE_TPM_AT_REST, arrival.at_rest && with_tpm),
        (MIGRATE_COMPRESSED, arrival.compresses),
    ];
    for (feature, _) in needed.into_iter().filter(|(_, is_needed)| *is_needed) {
        if !view.has(feature) {
            return Err(format!(
                "its agent, vmseal {}, cannot receive it ({feature}): upgrade vmseal there",
                there.vmseal
            ));
        }
        if !arrival.source.features.iter().any(|it| it == feature) {
            return Err(format!(
                "the agent of the VM's host '{}', vmseal {}, cannot send it ({feature}): upgrade vmseal there",
                arrival.source.name, arrival.source.vmseal
            ));
        }
    }
    if there.migration_address.is_none() {
        return Err("its agent has no address for migrations".to_owned());
    }
    // A guest that boots there finds another machine, as with any start.
    if has_guest(arrival) && older(&there.qemu, &arrival.source.qemu) {
        return Err(format!(
            "its QEMU {} is older than QEMU {} of the VM's host",
            there.qemu, arrival.source.qemu
        ));
    }
    Ok(((), format!("vmseal {}, QEMU {}", there.vmseal, there.qemu)))
}

/// Where a host waits for VMs, as the VM's host is told. Only that one can try it.
async fn reached_at(listens: SocketAddr, host: &Host) -> Result<(SocketAddr, String), String> {
    let address = reachable(listens, &host.name, &host.address).await.map_err(failed)?;
    Ok((address, address.to_string()))
}

/// Whether what a VM is sent with must be encrypted.
fn must_be_encrypted(vm: &ArrivingVm) -> bool {
    vm.has_key || vm.migration_encryption == MigrationEncryption::Required
}

/// Whether what a VM is sent with to a host is encrypted.
fn is_encrypted(arrival: &BeginArrival, view: &HostView) -> bool {
    let sends = || arrival.source.features.iter().any(|it| it == MIGRATE_ENCRYPTED);
    let asked = arrival.vm.migration_encryption != MigrationEncryption::Disabled;
    must_be_encrypted(&arrival.vm) || asked && sends() && view.has(MIGRATE_ENCRYPTED)
}

/// The same for people.
fn encryption(arrival: &BeginArrival, view: &HostView) -> String {
    let told = match (is_encrypted(arrival, view), arrival.vm.migration_encryption) {
        (true, _) => "what is sent is encrypted",
        (false, MigrationEncryption::Disabled) => "what is sent is not encrypted, as the VM says",
        (false, _) if !view.has(MIGRATE_ENCRYPTED) => {
            "what is sent is not encrypted: its agent cannot"
        }
        (false, _) => "what is sent is not encrypted: the agent of the VM's host cannot",
    };
    told.to_owned()
}

fn accelerator(arrival: &BeginArrival, there: &HostDescription) -> Result<((), String), String> {
    let kind = there.accelerator.kind;
    let alike = runs_alike(arrival, there);
    if has_guest(arrival) {
        return alike.map(|()| ((), format!("{kind:?}")));
    }
    let off = format!("{kind:?}; the VM is off");
    let keeps_memory = arrival.vm.snapshots.iter().any(|snapshot| snapshot.memory);
    Ok((
        (),
        match alike {
            Err(why) if keeps_memory => {
                format!(
                    "{off}, and its guest may not go on there from the memory of a snapshot: {why}"
                )
            }
            _ => off,
        },
    ))
}

/// Whether its guest goes on there from the memory that it has.
fn has_guest(arrival: &BeginArrival) -> bool {
    !arrival.at_rest || arrival.suspended.is_some()
}

/// Whether guests run there as where the VM comes from.
fn runs_alike(arrival: &BeginArrival, there: &HostDescription) -> Result<(), String> {
    let (here, of_host) = (&arrival.source.accelerator, &there.accelerator);
    if here.kind != of_host.kind {
        let (here, there) = (here.kind, of_host.kind);
        return Err(format!("its guests run by {there:?}, and those of the VM's host by {here:?}"));
    }
    same_processor(&arrival.vm.hardware, here, of_host)
}

async fn network(
    services: &Services,
    arrival: &BeginArrival,
    agent: &dyn HostAgent,
) -> Result<((), String), String> {
    let vm = &arrival.vm;
    for nic in &vm.nics {
        let mut read = services.store.read().await.map_err(failed)?;
        if let Some(owner) = store::nics::owner(&mut read, nic.mac).await.map_err(failed)? {
            return Err(format!("VM '{owner}' has a network card with the address {}", nic.mac));
        }
        drop(read);
        // The host names the card.
        agent.examine_nic(vm.id, nic.clone()).await.map_err(failed)?;
    }
    Ok(((), format!("what {} network cards are connected to is there", vm.nics.len())))
}

async fn memory(
    services: &Services,
    arrival: &BeginArrival,
    host: &Host,
    there: &HostDescription,
) -> Result<(u64, String), String> {
    let mut read = services.store.read().await.map_err(failed)?;
    let promised = Promised::read(&mut read).await.map_err(failed)?;
    let free = free_memory(services, &mut read, host.id, &promised).await.map_err(failed)?;
    let (free, needed) = (free.unwrap_or(there.memory), arrival.vm.memory);
    let detail = format!("{} free, {} needed", Size(free), Size(needed));
    if arrival.at_rest {
        let when = if arrival.suspended.is_some() { "resumed" } else { "started" };
        return Ok((free, format!("{detail} when it is {when}")));
    }
    if free < needed { Err(detail) } else { Ok((free, detail)) }
}

/// The datastore of the host that was named, or the one with the most free room.
async fn room(
    services: &Services,
    arrival: &BeginArrival,
    policy: Option<&Policy>,
    host: &Host,
    agent: &dyn HostAgent,
) -> Result<(Datastore, String), String> {
    let mut read = services.store.read().await.map_err(failed)?;
    let there = datastores::of_host(&mut read, host.id).await.map_err(failed)?;
    drop(read);
    let place = arrival.datastore.as_deref();
    let named =
        |it: &&Datastore| place.is_none_or(|place| it.name == place || it.id.to_string() == place);
    let mut why = match place {
        Some(place) => format!("it has no datastore '{place}'"),
        None => "it has no datastore".to_owned(),
    };
    let sizes = || arrival.vm.disks.iter().map(|disk| disk.size);
    let mut best: Option<(u64, Datastore)> = None;
    for datastore in there.iter().filter(named) {
        let Some(spec) = datastore.spec_on(host.id) else { continue };
        let (knows, sizes) = (services.hosts.view(host.id).has(IMAGE_LAYOUTS), sizes());
        if let Some(policy) = policy
            && let Err(cannot) = image_layouts::takes(knows, policy, &spec, sizes)
        {
            why = format!("datastore '{}': {cannot}", datastore.name);
            continue;
        }
        if let Some(refused) = policy.and_then(|policy| osds::refusal(policy, datastore, host.id)) {
            why = format!("datastore '{}': {refused}", datastore.name);
            continue;
        }
        match agent.measure_datastore(spec).await.map_err(failed)? {
            DatastoreCondition::Available { usage, .. } => {
                if best.as_ref().is_none_or(|(most, _)| usage.free > *most) {
                    best = Some((usage.free, datastore.clone()));
                }
            }
            DatastoreCondition::WrongMark { detail }
            | DatastoreCondition::Unavailable { detail } => {
                why = format!("datastore '{}' is not there: {detail}", datastore.name);
            }
        }
    }
    let (free, datastore) = best.ok_or(why)?;
    let (needed, with) = needed(&arrival.vm, policy);
    let (place, room, all) = (&datastore.name, Size(free), Size(needed.at_most));
    let detail = format!("'{place}' has {room} free, the disks have {all} in all{with}");
    if needed.at_least > free {
        let at_least = Size(needed.at_least);
        return Err(format!("{detail}, and {at_least} are needed at least"));
    }
    Ok((datastore, detail))
}

/// The room that the disks of a VM need with what snapshots keep; and what people are told of that.
fn needed(vm: &ArrivingVm, policy: Option<&Policy>) -> (CopyRoom, &'static str) {
    let preallocated = policy.is_some_and(|it| it.allocation == Allocation::Preallocated);
    let none = KeptRoom::default();
    let kept = vm.kept.as_ref().unwrap_or(&none);
    let needed = kept.copies(vm.disks.iter().map(|disk| (disk.id, disk.size, preallocated)));
    let with = match (*kept == none, vm.snapshots.is_empty()) {
        (true, _) => "",
        (false, true) => " with saved memory",
        (false, false) => " with what snapshots keep",
    };
    (needed, with)
}
