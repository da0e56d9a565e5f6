//! How a network card of a VM is changed that is made.

use vmseal_api::host::{NicSpec, VmChange};
use vmseal_api::model::{Plan, Vm};
use vmseal_api::nic::NicLink;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::SetNic;

use super::caller::{Caller, Privilege};
use super::vms::{require_no_template, require_ready};
use super::{Outcome, Services, examine_change};
use crate::hosts::restored;
use crate::store::events::NewEvent;
use crate::store::{nics, vms};

/// Plugs a network card in or out, while its VM runs, too. A host that is away does it when it is back.
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
    note(services, &vm, nic, link, Some(event)).await?;
    if let Err(problem) = crate::hosts::register(&services.store, &services.hosts, vm.id).await {
        if !crate::hosts::is_silence(&problem) {
            note(services, &vm, nic, nic.link, None).await?;
            return Err(problem);
        }
        // It may have come back meanwhile, and nothing else changes there.
        services.hosts.look_again(vm.host);
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
        Err(problem) if crate::hosts::is_silence(&problem) => {
            Ok(Some(format!("host '{}' does it when it is back", vm.host_name)))
        }
        answer => answer,
    }
}

/// Notes in the inventory what the host is to know next.
async fn note(
    services: &Services,
    vm: &vms::Vm,
    nic: &NicSpec,
    link: NicLink,
    event: Option<NewEvent<'_>>,
) -> Result<(), Problem> {
    let _unchanged = services.hosts.lock(vm.id).await;
    let mut write = services.store.write().await?;
    nics::set_link(&mut write, nic.nic, link).await?;
    if let Some(event) = event {
        write.event(event).await?;
    }
    Ok(write.commit().await?)
}
