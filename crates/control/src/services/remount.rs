//! A pool of Ceph that a host mounts anew, with the key of now: another process serves it, and guests stand still meanwhile.
//!
//! The server records nothing about a remount. If server or agent dies meanwhile, the host has the pool mounted with the old key or with the
//! new one, or has it not mounted; the agent mounts it when a disk there is needed, and an operator may repeat the request.

use std::collections::BTreeSet;
use std::time::Duration;

use sqlx::SqliteConnection;
use tokio::time::{sleep, timeout};
use vmseal_api::datastore::{DatastoreCondition, MountFacts, RbdPool};
use vmseal_api::host::version::REMOUNT_POOLS;
use vmseal_api::host::{DatastoreSpec, HostAgent, Power, Remount};
use vmseal_api::id::VmId;
use vmseal_api::model::{Datastore, Plan, TaskState};
use vmseal_api::problem::{ErrorCode, Problem};

use super::caller::{Caller, Privilege};
use super::datastores::{find, shown};
use super::unnoted::unnoted;
use super::{Outcome, Services};
use crate::hosts::pool_keys;
use crate::operation::{Claim, Placed};
use crate::store::datastores::{self, OnHost};
use crate::store::events::NewEvent;
use crate::store::tasks::Task;
use crate::store::{exposures, tasks, vms};

/// How long it is waited for what a host says of its new mount: the caller waits for the remount, too.
const ANSWERED: Duration = Duration::from_secs(5);

/// The pause before a host is asked for that again.
const AGAIN: Duration = Duration::from_millis(200);

/// Has a host mount a pool anew. A dry run sees whether the cluster takes the key, and says which guests stand still.
pub async fn remount(
    services: &Services,
    caller: &Caller,
    name: &str,
    host: &str,
    dry_run: bool,
) -> Result<Outcome<Datastore>, Problem> {
    caller.require(Privilege::ManageDatastores)?;
    let datastore = find(services, name).await?;
    let is_it = |on: &&OnHost| on.host_name == host || on.host.to_string() == host;
    let Some(on) = datastore.hosts.iter().find(is_it) else {
        let detail = format!("host '{host}' does not have datastore '{}'", datastore.name);
        let field = Some("host".to_owned());
        return Err(Problem { field, ..Problem::new(ErrorCode::NotFound, detail) });
    };
    require(services, &datastore, on)?;
    let agent = services.hosts.connected(on.host)?;
    let standing_still = standing_still(services, &datastore, on).await?;
    let here = |problem: Problem| Problem {
        detail: format!("on host '{}': {}", on.host_name, problem.detail),
        ..problem
    };
    let (spec, only_try) = (datastore.spec(on), dry_run);
    let remount = Remount { datastore: spec.clone(), only_try, key: None, cluster: None };
    if dry_run {
        agent.remount_datastore(remount).await.map_err(here)?;
        return Ok(Outcome::Planned(plan(&datastore, on, &standing_still)));
    }
    if pool_keys::is_held_for(on) {
        let key = pool_keys::held(&services.store, &services.data_dir, &datastore).await?;
        pool_keys::give(&services.store, &*agent, &datastore.name, on, &key).await.map_err(here)?;
    }
    let mounted_key = agent.remount_datastore(remount).await.map_err(here)?;
    // It is mounted anew whether this is answered or not, and is asked about again soon.
    let mount = timeout(ANSWERED, mounted(&*agent, &spec)).await;
    let mount = mount.as_ref().ok().map(Option::as_ref);
    let noted = note(services, caller, (&datastore, on), mounted_key.as_deref(), mount).await;
    let now = noted.map_err(|problem| {
        let done =
            format!("datastore '{}' was mounted anew on host '{}'", datastore.name, on.host_name);
        unnoted(&done, problem)
    })?;
    Ok(Outcome::Done(shown(now)))
}

/// Records that a host has mounted a pool anew, with this key, and how where it has said that; returns the datastore as it is now.
async fn note(
    services: &Services,
    caller: &Caller,
    (datastore, on): (&datastores::Datastore, &OnHost),
    key: Option<&str>,
    mount: Option<Option<&MountFacts>>,
) -> Result<datastores::Datastore, Problem> {
    let mut write = services.store.write().await?;
    datastores::set_mounted_key(&mut write, datastore.id, on.host, key).await?;
    if let Some(mount) = mount {
        datastores::set_mount(&mut write, datastore.id, on.host, mount).await?;
    }
    let (kind, target) = ("datastore.remounted", datastore.name.as_str());
    let with = key.map_or_else(String::new, |key| format!(", with key {key}"));
    let detail = format!("on host '{}'{with}", on.host_name);
    write.event(NewEvent { kind, actor: caller.name(), target, detail: &detail }).await?;
    let now = datastores::find(&mut write, &datastore.id.to_string()).await?;
    let now = now.ok_or_else(|| Problem::not_found("datastore", target))?;
    write.commit().await?;
    Ok(now)
}

/// How a host that has just mounted a pool has mounted it. Where the host is asked for the same by others it is asked again: they may have waited
/// for the mount, and an agent answers one of them.
async fn mounted(agent: &dyn HostAgent, spec: &DatastoreSpec) -> Option<MountFacts> {
    loop {
        if let Ok(DatastoreCondition::Available { mount, .. }) =
            agent.measure_datastore(spec.clone()).await
        {
            return mount;
        }
        sleep(AGAIN).await;
    }
}

/// Refuses directories, and a host whose agent cannot do it.
fn require(
    services: &Services,
    datastore: &datastores::Datastore,
    on: &OnHost,
) -> Result<(), Problem> {
    if on.location.pool().is_none() {
        let detail =
            format!("datastore '{}' is a directory: it is not mounted by vmseal", datastore.name);
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    if services.hosts.view(on.host).has(REMOUNT_POOLS) {
        return Ok(());
    }
    services.hosts.connected(on.host)?;
    let detail = format!(
        "the agent of host '{}' does not mount pools anew: upgrade vmseal there",
        on.host_name
    );
    Err(Problem::new(ErrorCode::Unsupported, detail))
}

/// The names of the VMs that run on a host with a disk on the datastore.
///
/// # Errors
/// `in-use`: a task works on such a disk, whether its VM runs or not, or somebody reads it over NBD. Neither goes on where the pool was
/// mounted before.
async fn standing_still(
    services: &Services,
    datastore: &datastores::Datastore,
    on: &OnHost,
) -> Result<Vec<String>, Problem> {
    let mut read = services.store.read().await?;
    let here = datastores::vms_of_host(&mut read, datastore.id, on.host).await?;
    let ids: BTreeSet<VmId> = here.iter().map(|(vm, _)| *vm).collect();
    let in_use = |detail| Err(Problem::new(ErrorCode::InUse, detail));
    for task in tasks::open(&mut read).await? {
        if is_at_work(&task) && is_about(&mut read, &task, (datastore, on), &ids).await? {
            return in_use(format!(
                "task {0} ({1}) of VM '{2}' works with disks on datastore '{3}' on host '{4}': wait for it (vmseal task wait {0}) or cancel it",
                task.id,
                task.operation.kind(),
                task.target,
                datastore.name,
                on.host_name
            ));
        }
    }
    for exposed in exposures::list(&mut read).await? {
        if here.iter().any(|(_, name)| *name == exposed.vm) {
            return in_use(format!(
                "disk '{}' of VM '{}' is exposed by '{}', whose connection would end: end it first",
                exposed.disk, exposed.vm, exposed.actor
            ));
        }
    }
    drop(read);
    let view = services.hosts.view(on.host);
    let runs = |vm: VmId| {
        let power = view.vm(vm).map(|seen| seen.power);
        power.is_some_and(|power| !matches!(power, Power::Off | Power::Suspended))
    };
    Ok(here.into_iter().filter(|(vm, _)| runs(*vm)).map(|(_, name)| name).collect())
}

/// Whether a task has begun: one that waits for its turn has nothing open.
fn is_at_work(task: &Task) -> bool {
    task.state != TaskState::Queued || !task.outputs.is_empty()
}

/// Whether a task works with disks of these VMs, which are on the datastore, or brings others there.
async fn is_about(
    from: &mut SqliteConnection,
    task: &Task,
    (datastore, on): (&datastores::Datastore, &OnHost),
    vms_there: &BTreeSet<VmId>,
) -> Result<bool, Problem> {
    let claims = task.operation.claims();
    let is_there = |claim: &Claim| matches!(claim, Claim::Vm(vm) if vms_there.contains(vm));
    // A VM that comes to this host has its disks opened there before it is said to be there.
    if claims.iter().any(is_there) || task.operation.places() == Some(Placed::On(on.host)) {
        return Ok(true);
    }
    if !task.operation.needs_datastore(datastore.id) {
        return Ok(false);
    }
    // A VM that is not in the inventory yet may be meant for this host.
    let vm = match task.operation.vm() {
        Some(vm) => vms::get(from, vm).await?,
        None => None,
    };
    Ok(vm.is_none_or(|vm| vm.host == on.host))
}

/// By which way the pool is mounted then, where that is another one than now.
fn other_way(on: &OnHost) -> String {
    let mounted = on.mount.as_ref().map(|it| &it.way);
    let other = on.location.pool().filter(|pool| mounted.is_some_and(|it| *it != pool.way()));
    other.map_or_else(String::new, |RbdPool { monitors, user, messenger, .. }| {
        format!(" as {user} by {monitors} with messenger '{}'", messenger.name())
    })
}

/// What is done, and which guests wait for it.
fn plan(datastore: &datastores::Datastore, on: &OnHost, standing_still: &[String]) -> Plan {
    let key = match (&datastore.key, pool_keys::is_held_for(on)) {
        (Some(key), true) => format!("key {key}"),
        (None, true) => "the key that the server holds".to_owned(),
        (_, false) => "the key in the keyring on the host".to_owned(),
    };
    let mut steps = vec![format!(
        "end the vmseal-rbd that serves it on host '{}', and start another one with {key}{}, which the cluster takes",
        on.host_name,
        other_way(on)
    )];
    let wait = |vm: &String| {
        format!(
            "VM '{vm}': its guest waits for a second or two, until the pool is mounted again; no request fails"
        )
    };
    steps.extend(standing_still.iter().map(wait));
    if standing_still.is_empty() {
        steps.push(format!("no VM with a disk there runs on host '{}'", on.host_name));
    }
    let (kind, target) = ("datastore.remount".to_owned(), datastore.name.clone());
    Plan { kind, target, steps, ..Plan::default() }
}

#[cfg(test)]
mod tests;
