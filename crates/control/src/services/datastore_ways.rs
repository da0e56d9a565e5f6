//! How hosts get to a pool of Ceph: monitors, user, messenger, and whether the key is in a file on each host or held by the server, changed
//! while VMs have disks there.
//!
//! ```text
//!  each host tries the new way ──> all may use it ──> inventory ──> hosts note it ──> each mounts the pool anew (datastore remount)
//!            │
//!            └──one may not──> nothing is changed
//! ```
//! What is in the inventory is the way. A server that dies before that has changed nothing; after that hosts are told with whatever they are
//! asked about the datastore next.

use futures_util::future::join_all;
use jiff::{SignedDuration, Timestamp};
use vmseal_api::datastore::{RbdPool, SetDatastore, SetDatastoreKey};
use vmseal_api::host::DatastoreLocation;
use vmseal_api::host::version::POOL_WAYS;
use vmseal_api::model::Plan;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use super::caller::{Caller, Privilege};
use super::{Outcome, Services, datastore_keys, stated_osds};
use crate::hosts::{is_silence, pool_keys};
use crate::store::datastores::{self, Datastore, OnHost};
use crate::store::events::NewEvent;
use crate::store::{Write, datastore_keys as store_keys};

/// How much later a change is than the one before, at least: the clock may have been set back.
const LATER: SignedDuration = SignedDuration::from_millis(1);

/// The keys that hosts need to try a way.
struct Keys {
    /// The one that was given: the server is to hold it.
    new: Option<SecretBytes>,
    /// The one that the server holds, where none was given and hosts go on to get it from the server.
    held: Option<SecretBytes>,
}

impl Keys {
    /// The key that a host is to try; none where it has a keyring.
    fn of(&self, on: &OnHost) -> Option<&SecretBytes> {
        self.new.as_ref().or(self.held.as_ref()).filter(|_| pool_keys::is_held_for(on))
    }
}

/// Changes how hosts get to a pool, or its key alone. A pool that is mounted stays as it is. Returns what the caller has to know, too.
pub(super) async fn set(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: SetDatastore,
    dry_run: bool,
) -> Result<Outcome<(Datastore, Vec<String>)>, Problem> {
    let other = SetDatastore { key: None, ..request.clone() };
    if let Some(key) = request.key.as_ref().filter(|_| other == SetDatastore::default()) {
        let request = SetDatastoreKey { key: key.clone(), force: false };
        return set_key(services, caller, name, request, dry_run).await;
    }
    change(services, caller, name, request, dry_run).await
}

/// Changes the key of a pool that the server holds, or has the server hold it from now on, in place of a file on each host.
pub(super) async fn set_key(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: SetDatastoreKey,
    dry_run: bool,
) -> Result<Outcome<(Datastore, Vec<String>)>, Problem> {
    caller.require(Privilege::ManageDatastores)?;
    let known = datastores::find(&mut *services.store.read().await?, name).await?;
    let known = known.ok_or_else(|| Problem::not_found("datastore", name))?;
    let keyring = known.hosts.iter().find_map(|on| on.location.pool()?.keyring.as_ref());
    let Some(keyring) = keyring else {
        return datastore_keys::set(services, caller, name, request, dry_run).await;
    };
    if request.force {
        let detail = format!(
            "the key of datastore '{}' is in a file on its hosts ({}), and the server holds one in place of that only after each of them has tried it: leave out --force",
            known.name,
            keyring.display()
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let request = SetDatastore { key: Some(request.key), ..SetDatastore::default() };
    change(services, caller, name, request, dry_run).await
}

/// Changes how hosts get to a pool, once each of them has tried it. A pool that is mounted stays as it is. Returns what the caller has to
/// know, too.
async fn change(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: SetDatastore,
    dry_run: bool,
) -> Result<Outcome<(Datastore, Vec<String>)>, Problem> {
    caller.require(Privilege::ManageDatastores)?;
    if request.keyring.is_some() && request.key.is_some() {
        let what = "is a file on each host, and a key is given for the server to hold: give one of the two";
        return Err(Problem::invalid("keyring", what));
    }
    let before = datastores::find(&mut *services.store.read().await?, name).await?;
    let before = before.ok_or_else(|| Problem::not_found("datastore", name))?;
    let changed = changed_hosts(&before, &request)?;
    let keys = keys(services, name, (&before, changed.as_slice()), &request).await?;
    let said = described(&before.hosts, &changed, keys.new.is_some());
    if said.is_empty() {
        let stated = request.osd_encryption;
        if stated.is_none() {
            return Ok(nothing_to_do(before, dry_run));
        }
        let set = stated_osds::state(services, caller, name, stated, dry_run).await?;
        return Ok(set.map(|datastore| (datastore, Vec::new())));
    }
    for on in &changed {
        require(services, on)?;
    }
    let cluster = cluster_of(&before)?;
    try_on_all(services, &before, &changed, &keys, &cluster).await?;

    let mut write = services.store.write().await?;
    require_same(&mut write, &before, keys.held.is_some()).await?;
    for on in &changed {
        datastores::set_location(&mut write, before.id, on.host, &on.location).await?;
    }
    if let Some(key) = &keys.new {
        let wrapped = pool_keys::wrapped(&services.data_dir, before.id, key)?;
        store_keys::set(&mut write, before.id, &wrapped).await?;
    } else if keys.held.is_none() {
        // Hosts have it in files.
        store_keys::remove(&mut write, before.id).await?;
    }
    let of_osds = request.osd_encryption.map(stated_osds::said);
    if let Some(stated) = request.osd_encryption {
        datastores::set_osds_stated(&mut write, before.id, stated.stated()).await?;
    }
    let names: Vec<_> = changed.iter().map(|on| format!("'{}'", on.host_name)).collect();
    let (said, names) = (said.join(", "), names.join(", "));
    let (kind, target) = ("datastore.set", before.name.as_str());
    let noted = of_osds.map_or_else(String::new, |noted| format!("; {noted}"));
    let detail = format!("{said}; tried on hosts {names}{noted}");
    write.event(NewEvent { kind, actor: caller.name(), target, detail: &detail }).await?;
    if dry_run {
        let mut steps = vec![
            format!("reach the pool by {said}, which works on hosts {names}"),
            format!(
                "leave it mounted as it is until hosts mount it anew (vmseal datastore remount {target})"
            ),
        ];
        steps.extend(of_osds.map(|noted| format!("note that {noted}")));
        return Ok(Outcome::Planned(plan(target, steps)));
    }
    let now = datastores::find(&mut write, &before.id.to_string()).await?;
    let now = now.ok_or_else(|| Problem::not_found("datastore", name))?;
    write.commit().await?;
    tell_all(services, &now, keys.new.as_ref()).await?;
    Ok(Outcome::Done((now, Vec::new())))
}

fn plan(target: &str, steps: Vec<String>) -> Plan {
    let (kind, target) = ("datastore.set".to_owned(), target.to_owned());
    Plan { kind, target, steps, ..Plan::default() }
}

fn nothing_to_do(datastore: Datastore, dry_run: bool) -> Outcome<(Datastore, Vec<String>)> {
    if !dry_run {
        return Outcome::Done((datastore, Vec::new()));
    }
    let step = "do nothing: hosts are told to reach the pool so already".to_owned();
    Outcome::Planned(plan(&datastore.name, vec![step]))
}

/// The hosts of a datastore, each with the way that is asked for.
fn changed_hosts(datastore: &Datastore, request: &SetDatastore) -> Result<Vec<OnHost>, Problem> {
    let pools = || datastore.hosts.iter().filter_map(|on| on.location.pool());
    if pools().next().is_none() {
        let detail = format!("datastore '{}' is a directory, and no pool of Ceph", datastore.name);
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let known = pools().filter_map(|pool| pool.changed).max();
    let after = known.and_then(|known| known.checked_add(LATER).ok());
    let now = Timestamp::now();
    let at = after.map_or(now, |after| after.max(now));
    datastore.hosts.iter().map(|on| changed_host(on, request, at)).collect()
}

fn changed_host(on: &OnHost, request: &SetDatastore, at: Timestamp) -> Result<OnHost, Problem> {
    let DatastoreLocation::Rbd { path, pool } = &on.location else { return Ok(on.clone()) };
    let mut pool = RbdPool { create: None, changed: Some(at), ..(**pool).clone() };
    if let Some(monitors) = &request.monitors {
        pool.monitors.clone_from(monitors);
    }
    if let Some(user) = &request.user {
        pool.user.clone_from(user);
    }
    if let Some(messenger) = request.messenger {
        pool.messenger = messenger;
    }
    if request.keyring.is_some() {
        pool.keyring.clone_from(&request.keyring);
    } else if request.key.is_some() {
        pool.keyring = None;
    }
    pool.check().map_err(|(field, what)| Problem::invalid(field, what))?;
    let location = DatastoreLocation::Rbd { path: path.clone(), pool: Box::new(pool) };
    Ok(OnHost { location, ..on.clone() })
}

/// The keys that hosts need once they are changed: one that is given, else the one that the server holds; none where they have keyrings.
async fn keys(
    services: &Services,
    called: &str,
    (datastore, changed): (&Datastore, &[OnHost]),
    request: &SetDatastore,
) -> Result<Keys, Problem> {
    if let Some(key) = &request.key {
        let new = datastore_keys::open(services, called, key)?;
        return Ok(Keys { new: Some(new), held: None });
    }
    if !changed.iter().any(pool_keys::is_held_for) {
        return Ok(Keys { new: None, held: None });
    }
    let held = pool_keys::held(&services.store, &services.data_dir, datastore).await?;
    Ok(Keys { new: None, held: Some(held) })
}

/// What is changed, for people; nothing where all is so already.
fn described(before: &[OnHost], after: &[OnHost], has_key: bool) -> Vec<String> {
    let mut said = Vec::new();
    for (before, after) in before.iter().zip(after) {
        let (Some(before), Some(after)) = (before.location.pool(), after.location.pool()) else {
            continue;
        };
        if before.monitors != after.monitors {
            said.push(format!("monitors {}", after.monitors));
        }
        if before.user != after.user {
            said.push(format!("user {}", after.user));
        }
        if before.messenger != after.messenger {
            said.push(format!("messenger '{}'", after.messenger.name()));
        }
        match (&before.keyring, &after.keyring) {
            (before, Some(after)) if before.as_ref() == Some(after) => {}
            (Some(_), Some(after)) => said.push(format!("keyring {}", after.display())),
            (None, Some(after)) => said.push(format!(
                "keyring {} on each host, in place of the key that the server holds and forgets",
                after.display()
            )),
            (Some(before), None) => said.push(format!(
                "a key that the server holds, in place of keyring {} on each host",
                before.display()
            )),
            (None, None) if has_key => said.push("another key".to_owned()),
            (None, None) => {}
        }
    }
    // Hosts that share a pool are told the same.
    let mut once: Vec<String> = Vec::new();
    for one in said {
        if !once.contains(&one) {
            once.push(one);
        }
    }
    once
}

/// Refuses a host that cannot try it, or would go on by the former way.
fn require(services: &Services, on: &OnHost) -> Result<(), Problem> {
    let connected = services.hosts.connected(on.host);
    let absent = |problem: Problem| {
        let detail = format!(
            "nothing is changed, as each host that has the pool has to try it: {}. If that host is gone for good, take it from the datastore first (vmseal datastore unshare)",
            problem.detail
        );
        Problem { detail, ..problem }
    };
    connected.map(drop).map_err(absent)?;
    if services.hosts.view(on.host).has(POOL_WAYS) {
        return Ok(());
    }
    let detail = format!(
        "the agent of host '{}' would go on to use the pool in the former way: upgrade vmseal there",
        on.host_name
    );
    Err(Problem::new(ErrorCode::Unsupported, detail))
}

/// The cluster that a datastore is in, by its fsid, as a host that has it mounted has said.
fn cluster_of(datastore: &Datastore) -> Result<String, Problem> {
    let known = datastore.hosts.iter().find_map(|on| on.mount.as_ref());
    known.map(|mount| mount.cluster.clone()).ok_or_else(|| {
        let detail = format!(
            "no host has said yet which cluster datastore '{0}' is in, so that another one would not be noticed: have a host that has it mount the pool anew (vmseal datastore remount {0} --host HOST), and try again",
            datastore.name
        );
        Problem::new(ErrorCode::WrongState, detail)
    })
}

/// Has all hosts try it, at the same time: one that waits in vain takes 13 seconds, and the caller waits for a minute.
async fn try_on_all(
    services: &Services,
    datastore: &Datastore,
    changed: &[OnHost],
    keys: &Keys,
    cluster: &str,
) -> Result<(), Problem> {
    let trials = changed.iter().map(async |on| {
        let agent = services.hosts.connected(on.host)?;
        let tried = (keys.of(on), Some(cluster));
        pool_keys::have_tried(&services.store, &*agent, datastore, on, tried).await
    });
    let trials = join_all(trials).await;
    for (on, tried) in changed.iter().zip(trials) {
        tried.map_err(|problem| {
            let detail = format!(
                "nothing is changed, as host '{}' cannot use the pool so: {}",
                on.host_name, problem.detail
            );
            Problem { detail, ..problem }
        })?;
    }
    Ok(())
}

/// Refuses what was not tried: hosts may have come and gone meanwhile, and others may have changed the datastore, or the key that it was tried
/// with.
async fn require_same(
    write: &mut Write<'_>,
    before: &Datastore,
    with_held: bool,
) -> Result<(), Problem> {
    let now = datastores::find(write, &before.id.to_string()).await?;
    let now = now.ok_or_else(|| Problem::not_found("datastore", &before.name))?;
    let places = |of: &Datastore| {
        of.hosts.iter().map(|on| (on.host, on.location.clone())).collect::<Vec<_>>()
    };
    // One of an earlier version gets its fingerprint when it is used.
    let other_key = with_held && before.key.is_some() && now.key != before.key;
    if places(&now) == places(before) && !other_key {
        return Ok(());
    }
    let detail = format!(
        "datastore '{}' was changed or shared while hosts tried it: nothing is changed. Try again",
        before.name
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// Gives hosts the new key, and has them note the way, so that they mount the pool by it if it has to be mounted now. One that does not
/// answer gets both when it answers again.
async fn tell_all(
    services: &Services,
    datastore: &Datastore,
    key: Option<&SecretBytes>,
) -> Result<(), Problem> {
    let told = datastore.hosts.iter().map(async |on| {
        let agent = services.hosts.agent(on.host)?;
        if let Some(key) = key.filter(|_| pool_keys::is_held_for(on)) {
            pool_keys::give(&services.store, &*agent, &datastore.name, on, key).await?;
        }
        // Whatever it finds there, and whether it answers now: it is asked again and again.
        drop(agent.measure_datastore(datastore.spec(on)).await);
        Ok::<(), Problem>(())
    });
    let told = join_all(told).await;
    for (on, told) in datastore.hosts.iter().zip(told) {
        let Err(problem) = told else { continue };
        // It gets the key when it answers again.
        if is_silence(&problem) && services.hosts.connected(on.host).is_err() {
            continue;
        }
        let detail = format!(
            "the datastore is changed, and the server holds the new key; host '{}' has not got it: {}. Give it again (vmseal datastore set {} --key-file FILE)",
            on.host_name, problem.detail, datastore.name
        );
        return Err(Problem { detail, ..problem });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
