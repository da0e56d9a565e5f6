//! What is done to guests that run: reboot, reset, pause, unpause, wakeup.

use vmseal_api::host::version::{GUEST_CONTROL, WAKEUP};
use vmseal_api::host::{GuestControl, Power};
use vmseal_api::model::{Task, Vm};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::RebootVm;

use super::caller::{Caller, Privilege};
use super::unnoted::unnoted;
use super::vm_key::require_available;
use super::vms::{begin, find, power, require_ready, shutdown_time, word};
use super::{Outcome, Services};
use crate::hosts::keys::Purpose;
use crate::operation::Operation;
use crate::store::events::NewEvent;
use crate::store::vms;

/// Reboots a VM: its guest shuts down, and is started again with what was changed of it since.
pub async fn reboot(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: RebootVm,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmPower)?;
    let timeout_seconds = shutdown_time(request.timeout_seconds)?;
    let (vm, _) = find(services, name).await?;
    require_ready(&vm)?;
    require_running(services, &vm, false).await?;
    // A guest that shuts down and cannot be started again helps nobody.
    require_available(services, &vm, Purpose::Encrypt).await?;
    let write = services.store.write().await?;
    let operation = Operation::RebootVm { vm: vm.id, timeout_seconds };
    begin(services, write, operation, &vm, caller, dry_run).await
}

/// Pauses, unpauses, resets or wakes a guest.
pub async fn control(
    services: &Services,
    caller: &Caller,
    name: &str,
    what: GuestControl,
    dry_run: bool,
) -> Result<Outcome<Vm>, Problem> {
    caller.require(Privilege::VmPower)?;
    let (vm, _) = find(services, name).await?;
    require_ready(&vm)?;
    let agent = services.hosts.connected(vm.host)?;
    let (kind, event, step, done) = match what {
        GuestControl::Pause => ("vm.pause", "vm.paused", "pause the guest", "paused"),
        GuestControl::Unpause => ("vm.unpause", "vm.unpaused", "let the guest go on", "unpaused"),
        GuestControl::Reset => ("vm.reset", "vm.reset", "reset the guest", "reset"),
        GuestControl::Wakeup => {
            ("vm.wakeup", "vm.woken", "wake the guest from ACPI S3", "woken from ACPI S3")
        }
    };
    let wakes = what == GuestControl::Wakeup;
    let (feature, cannot) = match wakes {
        true => (WAKEUP, "wake guests"),
        false => (GUEST_CONTROL, "pause or reset guests"),
    };
    super::features::require(services, &vm, feature, cannot)?;
    require_running(services, &vm, !wakes).await?;
    super::vms::require_free(&mut *services.store.read().await?, &vm).await?;
    if dry_run {
        if wakes {
            require_asleep(services, &vm)?;
        }
        return Ok(Outcome::planned(kind, &vm.name, step.to_owned()));
    }
    agent.control_guest(vm.id, what).await?;
    let noted = async {
        let mut write = services.store.write().await?;
        let (actor, target) = (caller.name(), vm.name.as_str());
        write.event(NewEvent { kind: event, actor, target, detail: "" }).await?;
        write.commit().await?;
        let state = agent.state_now().await?;
        services.hosts.until_shown(vm.host, &state).await;
        super::vms::show(services, caller, &vm.id.to_string()).await
    };
    let shown = noted.await;
    let of_guest = |problem| unnoted(&format!("the guest of VM '{}' was {done}", vm.name), problem);
    shown.map(Outcome::Done).map_err(of_guest)
}

/// Refuses to wake a guest that is awake, as far as its host has said. Only for a plan: the host asks QEMU.
fn require_asleep(services: &Services, vm: &vms::Vm) -> Result<(), Problem> {
    if services.hosts.view(vm.host).vm(vm.id).is_some_and(|seen| seen.suspended_to_ram) {
        return Ok(());
    }
    let name = &vm.name;
    let detail = format!(
        "VM '{name}' is not suspended to RAM (ACPI S3): its guest is awake, and there is nothing to wake"
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// Refuses unless the VM runs, or is paused where that is fine.
async fn require_running(
    services: &Services,
    vm: &vms::Vm,
    paused_is_fine: bool,
) -> Result<(), Problem> {
    let now = power(services, vm).await?.unwrap_or(Power::Off);
    let (name, word) = (&vm.name, word(now));
    let remedy = match now {
        Power::Running | Power::Unknown => return Ok(()),
        Power::Paused if paused_is_fine => return Ok(()),
        Power::Paused => format!("unpause it first (vmseal vm unpause {name})"),
        Power::Off => format!("start it (vmseal vm start {name})"),
        Power::Suspended => format!("resume it (vmseal vm resume {name})"),
        Power::Starting | Power::Stopping | Power::Suspending | Power::Migrating => {
            "wait until it runs".to_owned()
        }
    };
    let detail = format!("VM '{name}' is {word}: {remedy}");
    Err(Problem::new(ErrorCode::WrongState, detail))
}
