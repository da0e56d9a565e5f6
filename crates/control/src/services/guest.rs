//! What reaches into a running guest: its screen, and its agent.

use vmseal_api::guest::{GuestAnswer, GuestCommand};
use vmseal_api::host::version::SCREEN_AND_GUEST;
use vmseal_api::host::{ConsoleStream, HostAgent};
use vmseal_api::problem::{ErrorCode, Problem};

use std::sync::Arc;

use super::caller::{Caller, Privilege};
use super::{Services, vms};
use crate::store::events::NewEvent;
use crate::store::vms::Vm;

/// The VM, and its host's agent, which knows screens and guests. An encrypted one needs direct access.
async fn reach(
    services: &Services,
    caller: &Caller,
    name: &str,
) -> Result<(Vm, Arc<dyn HostAgent>), Problem> {
    let (vm, disks) = vms::find(services, name).await?;
    if disks.iter().any(|disk| disk.encrypted) {
        caller.require(Privilege::DirectAccess)?;
    }
    let agent = services.hosts.connected(vm.host)?;
    let description = services.hosts.view(vm.host).description;
    if description.is_some_and(|it| it.features.iter().any(|known| known == SCREEN_AND_GUEST)) {
        return Ok((vm, agent));
    }
    let host = &vm.host_name;
    let what = format!(
        "the agent of host '{host}' knows no screens and guest agents: upgrade vmseal there"
    );
    Err(Problem::new(ErrorCode::Unsupported, what))
}

async fn note(
    services: &Services,
    caller: &Caller,
    vm: &Vm,
    kind: &'static str,
    detail: &str,
) -> Result<(), Problem> {
    let mut write = services.store.write().await?;
    write.event(NewEvent { kind, actor: caller.name(), target: &vm.name, detail }).await?;
    Ok(write.commit().await?)
}

/// Connects to a guest's screen.
pub async fn screen(
    services: &Services,
    caller: &Caller,
    name: &str,
) -> Result<ConsoleStream, Problem> {
    caller.require(Privilege::VmConsole)?;
    let (vm, agent) = reach(services, caller, name).await?;
    let screen = agent.screen(vm.id).await?;
    note(services, caller, &vm, "vm.screen-opened", "its screen, by VNC").await?;
    Ok(screen)
}

/// Sends a request to the guest agent. An event records it first, without its arguments, which may be secret.
pub async fn ask(
    services: &Services,
    caller: &Caller,
    name: &str,
    command: GuestCommand,
) -> Result<GuestAnswer, Problem> {
    caller.require(Privilege::VmGuest)?;
    command.check().map_err(|(field, what)| Problem::invalid(field, what))?;
    let (vm, agent) = reach(services, caller, name).await?;
    let detail = match &command {
        GuestCommand::Ping => None,
        GuestCommand::Exec { path, .. } => Some(format!("to run {path}")),
        GuestCommand::Freeze => Some("to freeze its file systems".to_owned()),
        GuestCommand::Thaw => Some("to thaw its file systems".to_owned()),
    };
    if let Some(detail) = detail {
        note(services, caller, &vm, "vm.guest-asked", &detail).await?;
    }
    agent.guest(vm.id, command).await
}
