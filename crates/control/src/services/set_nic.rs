//! How a network card of a VM is changed that is made.

use sqlx::SqliteConnection;
use vmseal_api::host::{NicSpec, VmChange};
use vmseal_api::model::{Plan, Vm};
use vmseal_api::nic::NicLink;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::SetNic;

use super::caller::{Caller, Privilege};
use super::vms::{require_no_template, require_ready};
use super::{Outcome, Services, examine_change};
use crate::hosts::{is_silence, register_locked, restored};
use crate::store::events::NewEvent;
use crate::store::{nics, tasks, vms};

/// Plugs a network card in or out, while its VM runs, too, but not while a task changes the VM's devices. A host that is away does it when
/// it is back.
pub async fn set(
    services: &Services,
    caller: &Caller,
    vm: &str,
    nic: &str,
    request: SetNic,
    dry_run: bool,
) -> Result<Outcome<Vm>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let link = request.link;
    let mut read = services.store.read().await?;
    let vm = vms::find(&mut read, vm).await?.ok_or_else(|| Problem::not_found("VM", vm))?;
    let known = nics::all_of_vm(&mut read, vm.id).await?;
    let has = nics::of_vm(&mut read, vm.id).await?;
    restored::require_certain(&mut read, &vm).await?;
    drop(read);
    require_ready(&vm)?;
    require_no_template(&vm)?;
    let found = known.iter().find(|it| it.name == nic || it.nic.to_string() == nic);
    let nic = found.ok_or_else(|| {
        let what = format!("VM '{}' has no network card '{nic}'", vm.name);
        Problem::new(ErrorCode::NotFound, what)
    })?;
    if has.iter().all(|it| it.nic != nic.nic) {
        let what = format!(
            "network card '{0}' is being taken from VM '{1}': wait for the task that does it (vmseal task list), or remove the card again if there is none (vmseal nic remove {1} {0})",
            nic.name, vm.name
        );
        return Err(Problem::new(ErrorCode::WrongState, what));
    }
    require_devices_stay(&mut *services.store.read().await?, &vm).await?;
    if dry_run {
        let step = format!("set the link of network card '{}' {}", nic.name, link.name());
        let planned = Plan {
            kind: "nic.set".to_owned(),
            target: vm.name.clone(),
            steps: vec![step],
            warnings: not_now(services, &vm, nic, link).await?.into_iter().collect(),
            ..Plan::default()
        };
        return Ok(Outcome::Planned(planned));
    }
    let detail = format!("the link of network card '{}' is set {}", nic.name, link.name());
    let event =
        NewEvent { kind: "vm.changed", actor: caller.name(), target: &vm.name, detail: &detail };
    // The host is told again, as it may have failed to do it; but nothing changed.
    let event = (nic.link != link).then_some(event);
    match change(services, &vm, nic, link, event).await {
        // It may have come back meanwhile, and nothing else changes there.
        Err(problem) if is_silence(&problem) => services.hosts.look_again(vm.host),
        answer => answer?,
    }
    super::vms::show(services, caller, &vm.id.to_string()).await.map(Outcome::Done)
}

/// Asks the host whether it could do it now. Says why it would not do it at once.
async fn not_now(
    services: &Services,
    vm: &vms::Vm,
    nic: &NicSpec,
    link: NicLink,
) -> Result<Option<String>, Problem> {
    let change = VmChange::SetLink { nic: nic.nic, link };
    match examine_change::ask(services, vm, change).await {
        Err(problem) if is_silence(&problem) => {
            Ok(Some(format!("host '{}' does it when it is back", vm.host_name)))
        }
        answer => answer,
    }
}

/// Has the inventory, and then the host, have another link; the inventory alone where the host does not answer.
async fn change(
    services: &Services,
    vm: &vms::Vm,
    nic: &NicSpec,
    link: NicLink,
    event: Option<NewEvent<'_>>,
) -> Result<(), Problem> {
    let _unchanged = services.hosts.lock(vm.id).await;
    // A task may have begun since. One that begins from here on tells the host of its devices after this.
    require_devices_stay(&mut *services.store.read().await?, vm).await?;
    note(services, nic, link, event).await?;
    let told = register_locked(&services.store, &services.hosts, vm.id).await;
    if let Err(problem) = &told
        && !is_silence(problem)
    {
        note(services, nic, nic.link, None).await?;
    }
    told.map(drop)
}

/// Refuses while a task changes the VM's devices: the host would forget those that the task alone has told it of.
async fn require_devices_stay(from: &mut SqliteConnection, vm: &vms::Vm) -> Result<(), Problem> {
    match tasks::holding(from, vm.id).await? {
        Some(task) if task.operation.changes_devices() => Err(tasks::in_the_way(&task, &vm.name)),
        _ => Ok(()),
    }
}

/// Notes in the inventory what the host is to know next.
async fn note(
    services: &Services,
    nic: &NicSpec,
    link: NicLink,
    event: Option<NewEvent<'_>>,
) -> Result<(), Problem> {
    let mut write = services.store.write().await?;
    nics::set_link(&mut write, nic.nic, link).await?;
    if let Some(event) = event {
        write.event(event).await?;
    }
    Ok(write.commit().await?)
}
