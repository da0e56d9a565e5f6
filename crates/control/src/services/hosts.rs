//! Hosts.

use std::net::IpAddr;
use std::sync::Arc;

use sqlx::SqliteConnection;
use vmseal_api::drain::{Drain, DrainedVm};
use vmseal_api::id::HostId;
use vmseal_api::model::{Host, JoinToken, Page};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::{ChangeHost, JoinHost, Joined};
use vmseal_api::usage::HostRoom;

use super::caller::{Caller, Privilege};
use super::{Outcome, PageRequest, Services, page_of};
use crate::hosts::join as joining;
use crate::operation::Operation;
use crate::store::events::NewEvent;
use crate::store::{StoreError, drains, hosts, tasks};

fn shown(services: &Services, host: hosts::Host, room: Option<HostRoom>) -> Host {
    let view = services.hosts.view(host.id);
    Host {
        id: host.id,
        name: host.name,
        address: host.address,
        connection: view.connection,
        description: view.description.map(Arc::unwrap_or_clone).or(host.description),
        maintenance: host.maintenance,
        drain: None,
        room,
    }
}

/// The same with all that is known of it.
pub(super) async fn shown_whole(services: &Services, host: hosts::Host) -> Result<Host, Problem> {
    let (id, view) = (host.id, services.hosts.view(host.id));
    let mut read = services.store.read().await?;
    let room = super::usage::room(&mut read, id, &view).await?;
    let drain = drain_of(&mut read, id).await?;
    Ok(Host { drain, ..shown(services, host, Some(room)) })
}

/// How far a host is emptied.
async fn drain_of(from: &mut SqliteConnection, host: HostId) -> Result<Option<Drain>, StoreError> {
    let Some(drain) = drains::of_host(from, host).await? else { return Ok(None) };
    let vms = drains::vms_of(from, host).await?.into_iter().map(|it| DrainedVm {
        vm: it.name,
        state: it.state,
        task: it.task,
        detail: it.detail,
    });
    Ok(Some(Drain {
        actor: drain.actor,
        begun: drain.begun,
        request_id: drain.request_id.map(|id| id.to_string()),
        parallel: drain.parallel,
        stop_others: drain.stop_others,
        rate: drain.rate,
        compress: drain.compress,
        vms: vms.collect(),
    }))
}

pub(super) async fn find(services: &Services, name: &str) -> Result<hosts::Host, Problem> {
    let found = hosts::find(&mut *services.store.read().await?, name).await?;
    found.ok_or_else(|| Problem::not_found("host", name))
}

/// Lists the hosts.
pub async fn list(
    services: &Services,
    caller: &Caller,
    request: PageRequest,
) -> Result<Page<Host>, Problem> {
    caller.require(Privilege::Read)?;
    let part = request.part();
    let found = hosts::list(&mut *services.store.read().await?, &part).await?;
    let items = found.into_iter().map(|host| shown(services, host, None)).collect();
    Ok(page_of(items, part.limit, |host: &Host| host.id.to_string()))
}

/// Shows a host.
pub async fn show(services: &Services, caller: &Caller, name: &str) -> Result<Host, Problem> {
    caller.require(Privilege::Read)?;
    let host = find(services, name).await?;
    shown_whole(services, host).await
}

/// Changes the address of a host's agent. The host keeps its certificate, so another machine is not accepted as it.
pub async fn change(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: ChangeHost,
    dry_run: bool,
) -> Result<Outcome<Host>, Problem> {
    caller.require(Privilege::RegisterHost)?;
    let host = find(services, name).await?;
    let mut write = services.store.write().await?;
    let host = joining::change_address(&mut write, caller.name(), host, &request.address).await?;
    if dry_run {
        let step = format!("call its agent at {} from now on", host.address);
        return Ok(Outcome::planned("host.set", &host.name, step));
    }
    write.commit().await?;
    // The monitor of the old address ends.
    services.hosts.add(&host)?;
    Ok(Outcome::Done(shown(services, host, None)))
}

/// Removes a host that has neither datastores nor VMs.
pub async fn remove(
    services: &Services,
    caller: &Caller,
    name: &str,
    dry_run: bool,
) -> Result<Outcome<()>, Problem> {
    caller.require(Privilege::RegisterHost)?;
    let host = find(services, name).await?;
    let mut write = services.store.write().await?;
    require_none_on_its_way(&mut write, &host).await?;
    let (datastores, vms, backups) = hosts::uses(&mut write, host.id).await?;
    if datastores + vms + backups > 0 {
        let detail = format!(
            "host '{}' is in use (datastores: {datastores}, VMs: {vms}, backups: {backups}): remove them first, and datastores that other hosts have too from this one (vmseal datastore unshare); backups are read by another host that has their directory, once it verifies or restores one (vmseal backup restore --host)",
            host.name
        );
        return Err(Problem::new(ErrorCode::InUse, detail));
    }
    hosts::delete(&mut write, host.id).await?;
    let (kind, target, detail) = ("host.removed", host.name.as_str(), host.address.as_str());
    write.event(NewEvent { kind, actor: caller.name(), target, detail }).await?;
    if dry_run {
        let step = "remove it; it has neither datastores nor VMs".to_owned();
        return Ok(Outcome::planned("host.remove", target, step));
    }
    write.commit().await?;
    services.hosts.remove(host.id);
    Ok(Outcome::Done(()))
}

/// Makes a one-time token that lets a machine join as a host.
pub async fn make_token(
    services: &Services,
    caller: &Caller,
    dry_run: bool,
) -> Result<Outcome<JoinToken>, Problem> {
    caller.require(Privilege::RegisterHost)?;
    if dry_run {
        let minutes = joining::TOKEN_VALID.as_secs() / 60;
        let step = format!("make a token with which one machine may join within {minutes} minutes");
        return Ok(Outcome::planned("host.token", "", step));
    }
    let token = joining::make_token(&services.store, &services.authority, caller.name()).await?;
    Ok(Outcome::Done(token))
}

/// Joins as a host from `source`; needs no credentials except the token in the request.
pub async fn join(
    services: &Services,
    request: JoinHost,
    source: Option<IpAddr>,
) -> Result<Joined, Problem> {
    let (host, joined) =
        joining::join(&services.store, &services.authority, request, source).await?;
    services.hosts.add(&host)?;
    Ok(joined)
}

/// Refuses a host that a VM is on its way to: it alone may know whether the VM's guest runs there.
async fn require_none_on_its_way(
    from: &mut SqliteConnection,
    host: &hosts::Host,
) -> Result<(), Problem> {
    for task in tasks::open(from).await? {
        if matches!(task.operation, Operation::MigrateVm { to, .. } if to == host.id) {
            let detail = format!(
                "VM '{}' is on its way to host '{}' (task {}): wait for it, or cancel it (vmseal task cancel {}); if the host is gone for good, with --force",
                task.target, host.name, task.id, task.id
            );
            return Err(Problem::new(ErrorCode::InUse, detail));
        }
    }
    Ok(())
}
