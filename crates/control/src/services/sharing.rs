//! Datastores that several hosts share: another host gets one after both have shown that each sees the other's locks.

use std::sync::Arc;

use uuid::Uuid;
use vmseal_api::host::version::SHARED_DATASTORES;
use vmseal_api::host::{DatastoreLocation, HostAgent, Sharing, SharingStep};
use vmseal_api::model::{Datastore, Plan};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::ShareDatastore;

use super::caller::{Caller, Privilege};
use super::datastores::{can_mount, check_location, find, reached, shown};
use super::{Outcome, Services, datastore_keys};
use crate::hosts::pool_keys;
use crate::operation::Placed;
use crate::store::datastores::{self, OnHost};
use crate::store::events::NewEvent;
use crate::store::{hosts, tasks};

/// How many VMs an error names.
const NAMED_MAX: usize = 5;

/// A host in the check, and its agent.
struct Party<'a> {
    on: &'a OnHost,
    agent: Arc<dyn HostAgent>,
}

/// Shares a datastore with another host: from then on VMs of either may have their disks there.
pub async fn share(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: ShareDatastore,
    dry_run: bool,
) -> Result<Outcome<Datastore>, Problem> {
    caller.require(Privilege::ManageDatastores)?;
    if let Some(location) = &request.location {
        check_location(location)?;
    }
    let location = request.location.map(DatastoreLocation::asked);
    let request = ShareDatastore { location, ..request };
    let datastore = find(services, name).await?;
    let on = new_host(services, &datastore, request).await?;
    for known in datastore.hosts.iter().chain([&on]) {
        require(services, known)?;
    }
    can_mount(services, (on.host, &on.host_name), &on.location)?;
    datastore_keys::forget_former(services, &on).await?;
    if !pool_keys::is_held_for(&on) {
        return share_with(services, caller, datastore, &on, dry_run).await;
    }
    let key = pool_keys::held(&services.store, &services.data_dir, &datastore).await?;
    datastore_keys::give(services, &datastore.name, &on, &key).await?;
    let shared = share_with(services, caller, datastore, &on, dry_run).await;
    if !matches!(shared, Ok(Outcome::Done(_))) {
        datastore_keys::forget(services, on.host, &on.location).await;
    }
    shared
}

/// Shares a datastore with a host that can get at it.
async fn share_with(
    services: &Services,
    caller: &Caller,
    datastore: datastores::Datastore,
    on: &OnHost,
    dry_run: bool,
) -> Result<Outcome<Datastore>, Problem> {
    let (first, agent) = reached(services, &datastore, &datastore.id.to_string())?;
    let here = Party { on: first, agent };
    let there = Party { on, agent: services.hosts.connected(on.host)? };
    if dry_run {
        check_mark(&datastore, &there).await?;
        let steps = vec![
            format!(
                "check that hosts '{}' and '{}' see each other's locks on it",
                here.on.host_name, on.host_name
            ),
            "mark it as shared".to_owned(),
            format!("add host '{}' to it", on.host_name),
        ];
        let kind = "datastore.share".to_owned();
        let (target, warnings) = (datastore.name, Vec::new());
        return Ok(Outcome::Planned(Plan { kind, target, steps, warnings, ..Plan::default() }));
    }
    check_locks(&datastore, &here, &there).await?;
    let mut write = services.store.write().await?;
    let known = datastores::find(&mut write, &datastore.id.to_string()).await?;
    let known = known.ok_or_else(|| Problem::not_found("datastore", &datastore.name))?;
    // The new host would keep to the former way, and perhaps to a key that nobody holds any more.
    if known.is_elsewhere_than(&datastore) {
        let detail = format!(
            "how hosts get to datastore '{}' was changed while the hosts checked it: it is not shared. Try again",
            datastore.name
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    datastores::insert_host(&mut write, &datastore, on).await?;
    let path = on.location.path();
    let detail = format!("with host '{}', at {}", on.host_name, path.display());
    let (kind, target) = ("datastore.shared", datastore.name.as_str());
    write.event(NewEvent { kind, actor: caller.name(), target, detail: &detail }).await?;
    let now = datastores::find(&mut write, &datastore.id.to_string()).await?;
    let now = now.ok_or_else(|| Problem::not_found("datastore", target))?;
    write.commit().await?;
    Ok(Outcome::Done(shown(now)))
}

/// The host that is to have the datastore, which must not have it, nor another one of its name.
async fn new_host(
    services: &Services,
    datastore: &datastores::Datastore,
    request: ShareDatastore,
) -> Result<OnHost, Problem> {
    let of_host = |problem| Problem { field: Some("host".to_owned()), ..problem };
    let mut read = services.store.read().await?;
    let host = hosts::find(&mut read, &request.host).await?;
    let host = host.ok_or_else(|| of_host(Problem::not_found("host", &request.host)))?;
    let taken = |what: &str| {
        let detail = format!("host '{}' has {what} '{}' already", host.name, datastore.name);
        of_host(Problem::new(ErrorCode::AlreadyExists, detail))
    };
    if datastore.on(host.id).is_some() {
        return Err(taken("datastore"));
    }
    let called = format!("{}:{}", host.name, datastore.name);
    if datastores::find(&mut read, &called).await?.is_some() {
        return Err(taken("another datastore of the name"));
    }
    let same = || datastore.hosts.first().map(|on| on.location.clone());
    let location = match (request.location, same()) {
        // The same pool, mounted elsewhere.
        (Some(DatastoreLocation::Dir { path }), Some(DatastoreLocation::Rbd { pool, .. })) => {
            Some(DatastoreLocation::Rbd { path, pool })
        }
        (asked, same) => asked.or(same),
    };
    let location = location.ok_or_else(|| Problem::not_found("datastore", &datastore.name))?;
    let (mounted_key, mount) = (None, None);
    Ok(OnHost { host: host.id, host_name: host.name, location, mounted_key, mount })
}

/// Refuses a host whose agent would take what others make for debris.
fn require(services: &Services, on: &OnHost) -> Result<(), Problem> {
    if services.hosts.view(on.host).has(SHARED_DATASTORES) {
        return Ok(());
    }
    services.hosts.connected(on.host)?;
    let detail = format!(
        "the agent of host '{}' cannot share datastores: upgrade vmseal there",
        on.host_name
    );
    Err(Problem::new(ErrorCode::Unsupported, detail))
}

/// Checks the mark on the host that is to have the datastore. Nothing is written.
async fn check_mark(datastore: &datastores::Datastore, there: &Party<'_>) -> Result<(), Problem> {
    let survey = there.agent.survey_datastore(there.on.location.clone()).await;
    let survey = survey.map_err(|problem| of(there.on, problem))?;
    if survey.mark == Some(datastore.id) {
        return Ok(());
    }
    let path = there.on.location.path();
    let detail = format!(
        "{} does not carry the mark of datastore '{}': is its file system mounted there?",
        path.display(),
        datastore.name
    );
    Err(of(there.on, Problem::new(ErrorCode::WrongState, detail)))
}

/// Has both hosts check that they see the same files and each other's locks, and marks the datastore as shared.
async fn check_locks(
    datastore: &datastores::Datastore,
    here: &Party<'_>,
    there: &Party<'_>,
) -> Result<(), Problem> {
    let check = Uuid::new_v4();
    let ask = |party: &Party<'_>, step| {
        let sharing = Sharing { datastore: datastore.spec(party.on), check, step };
        let (agent, on) = (Arc::clone(&party.agent), party.on.clone());
        async move { agent.share_datastore(sharing).await.map_err(|problem| of(&on, problem)) }
    };
    ask(here, SharingStep::Hold).await?;
    let tried = ask(there, SharingStep::Try).await;
    let released = ask(here, SharingStep::Release).await;
    match (tried, released) {
        // It did not hold the lock any more: the other host saw none to see.
        (Err(_), Err(released)) if released.code == ErrorCode::WrongState => return Err(released),
        (tried, _) => tried?,
    }
    // Before the other host works with it.
    ask(here, SharingStep::Mark).await
}

/// Says which host a problem is of.
fn of(on: &OnHost, problem: Problem) -> Problem {
    Problem { detail: format!("on host '{}': {}", on.host_name, problem.detail), ..problem }
}

/// Takes a host from a datastore that others have, too. The datastore stays marked as shared.
pub async fn unshare(
    services: &Services,
    caller: &Caller,
    name: &str,
    host: &str,
    dry_run: bool,
) -> Result<Outcome<()>, Problem> {
    caller.require(Privilege::ManageDatastores)?;
    let mut write = services.store.write().await?;
    let datastore = datastores::find(&mut write, name).await?;
    let datastore = datastore.ok_or_else(|| Problem::not_found("datastore", name))?;
    let is_it = |on: &&OnHost| on.host_name == host || on.host.to_string() == host;
    let Some(on) = datastore.hosts.iter().find(is_it) else {
        let detail = format!("host '{host}' does not have datastore '{}'", datastore.name);
        let field = Some("host".to_owned());
        return Err(Problem { field, ..Problem::new(ErrorCode::NotFound, detail) });
    };
    let in_use = |detail| Err(Problem::new(ErrorCode::InUse, detail));
    if datastore.hosts.len() == 1 {
        return in_use(format!(
            "host '{}' is the only one that has datastore '{1}': remove it (vmseal datastore remove {1})",
            on.host_name, datastore.name
        ));
    }
    let vms = datastores::vms_of_host(&mut write, datastore.id, on.host).await?;
    if !vms.is_empty() {
        let named: Vec<_> =
            vms.iter().take(NAMED_MAX).map(|(_, name)| format!("'{name}'")).collect();
        let more = vms.len() - named.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        return in_use(format!(
            "VMs of host '{}' use datastore '{}': {}{more}. Move their disks to another datastore first (vmseal vm move), or delete them",
            on.host_name,
            datastore.name,
            named.join(", ")
        ));
    }
    let open = tasks::open(&mut write).await?;
    for task in open.iter().filter(|it| it.operation.needs_datastore(datastore.id)) {
        let vm = match task.operation.vm() {
            Some(vm) => crate::store::vms::get(&mut write, vm).await?,
            None => None,
        };
        let comes = task.operation.places() == Some(Placed::On(on.host));
        // A VM that is not in the inventory yet may be meant for this host.
        if comes || vm.is_none_or(|vm| vm.host == on.host) {
            return in_use(format!(
                "task {0} of VM '{1}' needs datastore '{2}': wait for it (vmseal task wait {0}) or cancel it",
                task.id, task.target, datastore.name
            ));
        }
    }
    datastores::delete_host(&mut write, datastore.id, on.host).await?;
    let (kind, target) = ("datastore.unshared", datastore.name.as_str());
    let detail = format!("from host '{}'; what is on it stays", on.host_name);
    write.event(NewEvent { kind, actor: caller.name(), target, detail: &detail }).await?;
    if dry_run {
        let step = format!("take host '{}' from it; what is on it stays", on.host_name);
        return Ok(Outcome::planned("datastore.unshare", target, step));
    }
    write.commit().await?;
    datastore_keys::forget(services, on.host, &on.location).await;
    Ok(Outcome::Done(()))
}

#[cfg(test)]
mod tests;
