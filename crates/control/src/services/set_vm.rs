//! What users change of a VM: its name, size, labels, autostart and policy.
//!
//! The inventory changes at once. What a guest that runs cannot get takes effect when it is started next, and is shown
//! as such.

use std::collections::BTreeMap;

use vmseal_api::boot::{BootDevice, Cdrom};
use vmseal_api::compliance::Requirement;
use vmseal_api::hardware::{Hardware, MemoryBacking};
use vmseal_api::host::version::{ABOUT, PANIC, SET_RUNNING};
use vmseal_api::host::{Power, VmState};
use vmseal_api::id::{VmId, check_name};
use vmseal_api::model::{Plan, Vm};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::SetVm;
use vmseal_api::size::Size;

use super::caller::{Caller, Privilege};
use super::hardware::check_network_boot;
use super::set_policy::{Need, model_name, needs, needs_of_storage};
use super::vm_values::{check_count, check_description, check_labels, check_memory, check_vcpus};
use super::vms::{require_free, require_no_template, require_ready};
use super::{Outcome, Services, features, room, saved_memory};
use crate::compliance;
use crate::hosts::{self, is_silence, restored};
use crate::store::events::NewEvent;
use crate::store::{datastores, disks, nics, policies, snapshots, vms};

/// Changes a VM.
pub async fn set(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: SetVm,
    dry_run: bool,
) -> Result<Outcome<Vm>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    check(&request)?;
    let found = vms::find(&mut *services.store.read().await?, name).await?;
    let found = found.ok_or_else(|| Problem::not_found("VM", name))?;
    let id = found.id;
    if request.on_crash.is_some_and(|on_crash| !on_crash.is_usual())
        || request.crash_dump_format.is_some()
    {
        let cannot = "do anything else than stop a VM when its guest panics";
        features::require_unless_away(services, &found, PANIC, cannot)?;
    }
    // No transaction is held during a call to a host.
    examine(services, &found, &request).await?;
    examine_model(services, &found, &request).await?;
    examine_memory(services, &found, &request).await?;
    let unchanged = services.hosts.lock(id).await;
    let mut write = services.store.write().await?;
    let before = vms::get(&mut write, id).await?.ok_or_else(|| Problem::not_found("VM", name))?;
    require_ready(&before)?;
    require_free(&mut write, &before).await?;
    restored::require_certain(&mut write, &before).await?;
    let view = services.hosts.view(before.host);
    let runs = view.vm(id).is_some_and(|seen| seen.power != Power::Off);
    let mut after = changed(&before, &request)?;
    check_template(&before, &after, &request, runs)?;
    if after.memory > before.memory {
        room::check_memory(services, before.host, &before.host_name, after.memory)?;
    }
    check_boot(&mut write, &before, &after, runs).await?;
    let mut steps = told(&before, &after, runs);
    if let Some(wanted) = &request.policy {
        steps.extend(give_policy(services, &mut write, &before, wanted, &mut after).await?);
    }
    vms::set(&mut write, &after).await?;
    if dry_run {
        let (kind, target) = ("vm.set".to_owned(), before.name);
        return Ok(Outcome::Planned(Plan { kind, target, steps, ..Plan::default() }));
    }
    if !steps.is_empty() {
        let (detail, target) = (steps.join("; "), after.name.as_str());
        let actor = caller.name();
        write.event(NewEvent { kind: "vm.changed", actor, target, detail: &detail }).await?;
    }
    // Labels and the like change nothing of the guest, and are for its descriptors. For them a VM that runs is registered again only
    // where that plugs nothing in or out.
    let said = hosts::about(&before) != hosts::about(&after)
        && view.has(ABOUT)
        && has_the_devices(&mut write, id, view.vm(id)).await?;
    write.commit().await?;
    drop(unchanged);
    // The host learns of it now, if it is there and can; else when the VM is started next.
    let same =
        |vm: &vms::Vm| (vm.name.clone(), vm.vcpus, vm.memory, vm.policy, vm.hardware.clone());
    let at_once = request.cdrom.is_some() || request.on_crash.is_some();
    let told = same(&before) != same(&after) || at_once;
    let learns = !runs || (told || said) && view.has(SET_RUNNING);
    if learns
        && let Err(problem) = crate::hosts::register(&services.store, &services.hosts, id).await
    {
        if runs && request.cdrom.is_some() {
            return Err(not_in_drive(&after, problem));
        }
        if runs && request.on_crash.is_some() {
            return Err(not_told(&after, problem));
        }
        tracing::info!(vm = after.name, %problem, "its host learns of the change later");
    }
    let state = services.hosts.agent(after.host)?.state_now().await;
    if let Ok(state) = state {
        services.hosts.until_shown(after.host, &state).await;
    }
    super::vms::show(services, caller, &id.to_string()).await.map(Outcome::Done)
}

/// Gives a VM another policy, where it can have that; and what is told of it.
async fn give_policy(
    services: &Services,
    write: &mut sqlx::SqliteConnection,
    before: &vms::Vm,
    wanted: &str,
    after: &mut vms::Vm,
) -> Result<Vec<String>, Problem> {
    let field = || Some("policy".to_owned());
    let policy = policies::find(write, wanted).await?;
    let policy =
        policy.ok_or_else(|| Problem { field: field(), ..Problem::not_found("policy", wanted) })?;
    let old = policies::find(write, &before.policy.to_string()).await?;
    let mut steps = Vec::new();
    if let Some(old) = old.filter(|old| old.id != policy.id) {
        let known = disks::of_vm(write, before.id).await?;
        let power = services.hosts.view(before.host).vm(before.id).map(|seen| seen.power);
        let runs = power.is_some_and(|power| power != Power::Off);
        let mut needs = needs(&old, &policy, before, &known, runs);
        let datastores = compliance::by_id(datastores::of_host(write, before.host).await?);
        let layouts = disks::image_layouts(write, before.id, before.id).await?;
        let of_storage = needs_of_storage(&policy, before, &known, &datastores, &layouts);
        // Images stay as they are.
        let (of_images, of_storage): (Vec<_>, Vec<_>) =
            of_storage.into_iter().partition(|need| need.is_for(Requirement::ImageLayout));
        needs.extend(of_storage);
        // A VM that is off gets the model of its new policy.
        needs.retain(|need| !matches!(need, Need::CpuModel { .. }));
        if let Some(need) = needs.iter().find(|need| !need.is_met_by_itself()) {
            let detail = format!("policy '{}' asks for something else: {need}", policy.name);
            return Err(Problem { field: field(), ..Problem::new(ErrorCode::WrongState, detail) });
        }
        steps.push(format!("set policy to {}", policy.name));
        if let Some(model) = other_model(&policy, before) {
            require_no_processor_in_use(write, before, power, &policy.name, model).await?;
            let now = model_name(before.hardware.cpu_model.as_deref());
            steps.push(format!("set cpu-model to {model}, in place of {now}"));
            after.hardware.cpu_model = Some(model.to_owned());
        }
        for disk in known.iter().filter(|disk| disk.role.is_data()) {
            disks::set_settings(write, disk.id, policy.limits, policy.cache).await?;
        }
        steps.extend(needs.iter().map(Need::to_string));
        steps.extend(of_images.iter().map(Need::to_string));
    }
    (after.policy, after.policy_name) = (policy.id, policy.name);
    Ok(steps)
}

/// The processor model that a VM gets with this policy, where it has another one.
fn other_model<'a>(policy: &'a policies::Policy, vm: &vms::Vm) -> Option<&'a str> {
    let wanted = policy.cpu_model.as_deref().filter(|_| policy.id != vm.policy)?;
    (vm.hardware.cpu_model.as_deref() != Some(wanted)).then_some(wanted)
}

/// Refuses another processor model where a guest has the one that the VM has now: one that runs, and one whose memory was saved. What
/// is checked before a VM goes to another host is the model in the inventory, which has to be that of the guest.
async fn require_no_processor_in_use(
    write: &mut sqlx::SqliteConnection,
    vm: &vms::Vm,
    power: Option<Power>,
    policy: &str,
    model: &str,
) -> Result<(), Problem> {
    let name = &vm.name;
    let refused = |why: String| {
        let detail = format!("policy '{policy}' has the processor model {model}, and {why}");
        let field = Some("policy".to_owned());
        Err(Problem { field, ..Problem::new(ErrorCode::WrongState, detail) })
    };
    match power {
        Some(Power::Off) => {}
        Some(Power::Suspended) => return refused(saved_memory::refusal(vm).detail),
        _ => {
            return refused(format!(
                "VM '{name}' has {} until it is off: stop it first (vmseal vm stop {name})",
                model_name(vm.hardware.cpu_model.as_deref())
            ));
        }
    }
    let kept = snapshots::of_vm(write, vm.id).await?.into_iter().find(|it| it.memory);
    match kept {
        None => Ok(()),
        Some(snapshot) => refused(format!(
            "snapshot '{0}' of VM '{name}' keeps memory, which can be resumed only with {1}: delete it first (vmseal snapshot delete {name} {0})",
            snapshot.name,
            model_name(vm.hardware.cpu_model.as_deref())
        )),
    }
}

/// Whether the guest of a VM has exactly the disks and network cards that the inventory knows. An inventory that was restored may lack
/// some, or have some that were removed since.
async fn has_the_devices(
    write: &mut sqlx::SqliteConnection,
    vm: VmId,
    seen: Option<&VmState>,
) -> Result<bool, Problem> {
    let Some(seen) = seen else { return Ok(false) };
    let (disks, cards) = (disks::of_vm(write, vm).await?, nics::of_vm(write, vm).await?);
    let disks = disks.iter().filter(|disk| !disk.detached).map(|disk| disk.id);
    Ok(hosts::has_devices(seen, disks, cards.iter().map(|card| card.nic)))
}

/// What a template is cannot change, but what is said of it; a VM becomes one while it is off.
fn check_template(
    before: &vms::Vm,
    after: &vms::Vm,
    request: &SetVm,
    runs: bool,
) -> Result<(), Problem> {
    let of_machine = (before.vcpus, before.memory, &before.hardware)
        != (after.vcpus, after.memory, &after.hardware)
        || request.policy.is_some();
    if after.template && of_machine {
        require_no_template(after)?;
    }
    if after.template && !before.template && runs {
        let detail = format!(
            "VM '{0}' is not off, and a template has to be: stop it first (vmseal vm stop {0})",
            before.name
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    Ok(())
}

/// Whether the VM can get the drive that it is to have, and has what it is to start from.
async fn check_boot(
    write: &mut sqlx::SqliteConnection,
    before: &vms::Vm,
    after: &vms::Vm,
    runs: bool,
) -> Result<(), Problem> {
    if runs && before.hardware.cdrom.is_none() && after.hardware.cdrom.is_some() {
        let detail = format!(
            "VM '{0}' has no CD-ROM drive, and gets one only while it is off: stop it first (vmseal vm stop {0})",
            before.name
        );
        let field = Some("cdrom".to_owned());
        return Err(Problem { field, ..Problem::new(ErrorCode::WrongState, detail) });
    }
    if before.hardware.boot == after.hardware.boot {
        return Ok(());
    }
    let cards = nics::of_vm(write, after.id).await?.len();
    check_network_boot(&after.hardware.boot, cards).map_err(|what| Problem::invalid("boot", what))
}

fn not_in_drive(vm: &vms::Vm, why: Problem) -> Problem {
    let detail = format!(
        "what is to be in the drive of VM '{}' is on record, and the guest that runs does not have it: {why}. Do it again",
        vm.name
    );
    Problem { detail, ..why }
}

fn not_told(vm: &vms::Vm, why: Problem) -> Problem {
    let detail = format!(
        "what is to be done when the guest of VM '{}' panics is on record, and its host does not know it: {why}. Do it again",
        vm.name
    );
    Problem { detail, ..why }
}

fn check(request: &SetVm) -> Result<(), Problem> {
    if let Some(name) = &request.name {
        check_name(name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    }
    request.vcpus.map_or(Ok(()), check_vcpus)?;
    request.memory.map_or(Ok(()), check_memory)?;
    request.description.as_deref().map_or(Ok(()), check_description)?;
    let labels = request.labels.iter();
    check_labels(labels.map(|(key, value)| (key.as_str(), value.as_deref().unwrap_or_default())))
}

fn changed(before: &vms::Vm, request: &SetVm) -> Result<vms::Vm, Problem> {
    let SetVm { name, vcpus, memory, description, labels: _, autostart, template, .. } = request;
    let labels = labelled(&before.labels, &request.labels);
    check_count(&labels)?;
    let hardware = machine(before, request);
    hardware.check(memory.unwrap_or(before.memory)).map_err(|(field, what)| match field {
        "cdrom.medium" | "boot" => Problem::invalid(field, what),
        _ => Problem::invalid("memory", format!("of this VM {what}")),
    })?;
    Ok(vms::Vm {
        name: name.clone().unwrap_or_else(|| before.name.clone()),
        vcpus: vcpus.unwrap_or(before.vcpus),
        memory: memory.unwrap_or(before.memory),
        description: description.clone().unwrap_or_else(|| before.description.clone()),
        labels,
        autostart: autostart.unwrap_or(before.autostart),
        migration_encryption: request.migration_encryption.unwrap_or(before.migration_encryption),
        on_drain: request.on_drain.unwrap_or(before.on_drain),
        template: template.unwrap_or(before.template),
        hardware,
        ..before.clone()
    })
}

/// What the machine of a VM is to be.
fn machine(before: &vms::Vm, request: &SetVm) -> Hardware {
    let mut hardware = before.hardware.clone();
    hardware.cdrom = request.cdrom.clone().or(hardware.cdrom);
    hardware.boot = request.boot.clone().unwrap_or(hardware.boot);
    hardware.on_crash = request.on_crash.unwrap_or(hardware.on_crash);
    hardware.crash_dump_format = request.crash_dump_format.or(hardware.crash_dump_format);
    hardware
}

/// Asks the VM's host whether it knows the processor model of another policy.
async fn examine_model(services: &Services, vm: &vms::Vm, request: &SetVm) -> Result<(), Problem> {
    let Some(wanted) = &request.policy else { return Ok(()) };
    let policy = policies::find(&mut *services.store.read().await?, wanted).await?;
    let model = policy.as_ref().and_then(|policy| other_model(policy, vm));
    let Some(model) = model else { return Ok(()) };
    let asked = Hardware { cpu_model: Some(model.to_owned()), ..Hardware::default() };
    let examined = super::hardware::examine(services, vm.host, &vm.host_name, &asked, None).await;
    examined.map_err(|problem| Problem {
        field: Some("policy".to_owned()),
        detail: format!("'{wanted}' gives VMs the processor model '{model}': {}", problem.detail),
        ..problem
    })
}

/// Asks the VM's host whether it has huge pages for more memory. One that is away is not waited for: a start asks again.
async fn examine_memory(services: &Services, vm: &vms::Vm, request: &SetVm) -> Result<(), Problem> {
    let Some(memory) = request.memory.filter(|memory| *memory > vm.memory) else { return Ok(()) };
    if vm.hardware.memory_backing == MemoryBacking::Pages {
        return Ok(());
    }
    changed(vm, request)?;
    let asked = Hardware { memory_backing: MemoryBacking::Hugepages, ..Hardware::default() };
    let examined =
        super::hardware::examine(services, vm.host, &vm.host_name, &asked, Some(memory)).await;
    match examined {
        Err(problem) if is_silence(&problem) => Ok(()),
        Err(problem) => Err(Problem { field: Some("memory".to_owned()), ..problem }),
        Ok(()) => Ok(()),
    }
}

/// Asks the VM's host whether it has what is to be in the drive, and can start the VM in such an order.
async fn examine(services: &Services, vm: &vms::Vm, request: &SetVm) -> Result<(), Problem> {
    if request.cdrom.is_none() && request.boot.is_none() {
        return Ok(());
    }
    changed(vm, request)?;
    let Hardware { cdrom, boot, .. } = machine(vm, request);
    // What does not change, and a medium that stays, is no reason to refuse.
    let cdrom = if request.cdrom.is_some() { cdrom } else { cdrom.map(|_| Cdrom::default()) };
    let asked = Hardware { cdrom, boot, ..Hardware::default() };
    let examined = super::hardware::examine(services, vm.host, &vm.host_name, &asked, None).await;
    examined.map_err(|problem| Problem {
        field: problem.field.map(|field| field.trim_start_matches("hardware.").to_owned()),
        ..problem
    })
}

fn labelled(
    before: &BTreeMap<String, String>,
    wanted: &BTreeMap<String, Option<String>>,
) -> BTreeMap<String, String> {
    let mut labels = before.clone();
    for (key, value) in wanted {
        match value {
            Some(value) => labels.insert(key.clone(), value.clone()),
            None => labels.remove(key),
        };
    }
    labels
}

/// What changes, for people.
fn told(before: &vms::Vm, after: &vms::Vm, runs: bool) -> Vec<String> {
    let later = if runs { ", at the next start" } else { "" };
    let mut told = Vec::new();
    if before.name != after.name {
        told.push(format!("set name to {}, in place of {}", after.name, before.name));
    }
    if before.vcpus != after.vcpus {
        told.push(format!("set vcpus to {}{later}", after.vcpus));
    }
    if before.memory != after.memory {
        told.push(format!("set memory to {}{later}", Size(after.memory)));
    }
    if before.hardware.cdrom != after.hardware.cdrom {
        told.push(match after.hardware.medium() {
            Some(medium) => format!("put {} into the CD-ROM drive", medium.display()),
            None => "empty the CD-ROM drive".to_owned(),
        });
    }
    if before.hardware.boot != after.hardware.boot {
        let order = after.hardware.boot_order();
        let order: Vec<_> = order.into_iter().map(BootDevice::name).collect();
        told.push(format!("set boot to {}{later}", order.join(",")));
    }
    if before.hardware.on_crash != after.hardware.on_crash {
        told.push(format!("set on-crash to {}", after.hardware.on_crash.name()));
    }
    if let Some(format) = after.hardware.crash_dump_format
        && before.hardware.crash_dump_format != Some(format)
    {
        told.push(format!("set crash-dump-format to {}", format.name()));
    }
    if before.description != after.description {
        told.push("set description".to_owned());
    }
    for (key, value) in &after.labels {
        if before.labels.get(key) != Some(value) {
            told.push(format!("set label {key} to '{value}'"));
        }
    }
    let gone = before.labels.keys().filter(|key| !after.labels.contains_key(*key));
    told.extend(gone.map(|key| format!("remove label {key}")));
    if before.autostart != after.autostart {
        told.push(format!("set autostart {}", if after.autostart { "on" } else { "off" }));
    }
    if before.migration_encryption != after.migration_encryption {
        told.push(format!("set migration-encryption to {}", after.migration_encryption.name()));
    }
    if before.on_drain != after.on_drain {
        told.push(format!("set on-drain to {}", after.on_drain.name()));
    }
    if before.template != after.template {
        let to = if after.template { "make it a template" } else { "make it an ordinary VM" };
        told.push(to.to_owned());
    }
    told
}
