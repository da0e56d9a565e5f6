//! Datastores.

use std::sync::Arc;

use aws_lc_rs::digest::{SHA256, digest};
use vmseal_api::compression::Compression;
use vmseal_api::datastore::{
    DatastoreCondition, DatastoreHost, DatastoreScan, LOCATION_PATH_MAX, MountFacts, MountedKey,
    MountedWay, RbdPool, SetDatastore, SetDatastoreKey,
};
use vmseal_api::host::version::{
    CREATE_POOLS, DATA_CHUNKS, DESCRIPTORS, FAILURE_DOMAINS, POOL_COMPRESSION, POOL_KEYS,
    POOL_WAYS, RBD_DATASTORES,
};
use vmseal_api::host::{DatastoreLocation, DatastoreSpec, HostAgent, HostDescription};
use vmseal_api::id::{DatastoreId, HostId, check_name};
use vmseal_api::model::{Datastore, Page, Plan, RekeyedDatastore};
use vmseal_api::new_pools::UNFINISHED_SUFFIX;
use vmseal_api::osd_encryption::{OsdFacts, StatedOsds};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::AddDatastore;
use vmseal_secret::SecretBytes;

use super::caller::{Caller, Privilege};
use super::scan::compare;
use super::{
    Outcome, PageRequest, Services, datastore_keys, datastore_ways, page_of, pools_for_policy,
    stated_osds,
};
use crate::hosts::pool_keys;
use crate::store::datastores::{OnHost, Osds};
use crate::store::events::NewEvent;
use crate::store::{datastore_keys as store_keys, datastores, disks, hosts, tasks};

pub(super) fn shown(datastore: datastores::Datastore) -> Datastore {
    let shown_on = |on: OnHost| {
        // What is in a keyring now the server does not know.
        let is_held = pool_keys::is_held_for(&on);
        let mounted = |fingerprint: String| {
            let current = is_held && datastore.key.as_ref() == Some(&fingerprint);
            MountedKey { fingerprint, current }
        };
        let mounted_key = on.mounted_key.map(mounted);
        let way = on.location.pool().map(RbdPool::way);
        let mounted =
            on.mount.map(|MountFacts { way: mounted, messenger, cluster, between_osds }| {
                let current = way.as_ref() == Some(&mounted);
                MountedWay { messenger, cluster, current, between_osds }
            });
        DatastoreHost { host: on.host_name, location: on.location, mounted_key, mounted }
    };
    let is_pool = datastore.hosts.iter().any(|on| on.location.pool().is_some());
    let hosts = datastore.hosts.into_iter().map(shown_on).collect();
    Datastore {
        id: datastore.id,
        name: datastore.name,
        hosts,
        usage: datastore.usage,
        key: datastore.key,
        pools: datastore.pools,
        osd_encryption: is_pool.then_some(datastore.osds.facts),
    }
}

pub(super) async fn find(
    services: &Services,
    name: &str,
) -> Result<datastores::Datastore, Problem> {
    let found = datastores::find(&mut *services.store.read().await?, name).await?;
    found.ok_or_else(|| Problem::not_found("datastore", name))
}

/// A host of a datastore that answers, and its agent: the one that `called`, the datastore's name in a request, says, or the
/// first one.
///
/// # Errors
/// `unreachable`.
pub(super) fn reached<'a>(
    services: &Services,
    datastore: &'a datastores::Datastore,
    called: &str,
) -> Result<(&'a OnHost, Arc<dyn HostAgent>), Problem> {
    let named = datastores::host_in(called);
    let mut silent = None;
    for on in datastore.hosts.iter().filter(|on| named.is_none_or(|name| on.host_name == name)) {
        match services.hosts.connected(on.host) {
            Ok(agent) => return Ok((on, agent)),
            Err(problem) => silent = Some(problem),
        }
    }
    Err(silent.unwrap_or_else(|| Problem::not_found("datastore", called)))
}

/// The id of a datastore. It is derived from the location, so that adding it again (after a crash, or
/// after it was removed) recognizes the mark in the directory.
fn id_of(host: HostId, location: &DatastoreLocation) -> DatastoreId {
    let place = match location {
        DatastoreLocation::Dir { path } => {
            format!("vmseal datastore v1\0{host}\0dir\0{}", path.display())
        }
        // Wherever it is mounted.
        DatastoreLocation::Rbd { pool, .. } => {
            let RbdPool { monitors, pool, namespace, .. } = &**pool;
            let namespace = namespace.as_deref().unwrap_or_default();
            format!("vmseal datastore v1\0{host}\0rbd\0{monitors}\0{pool}\0{namespace}")
        }
    };
    let hash = digest(&SHA256, place.as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.as_ref()[..16]);
    // Version 8 of RFC 9562: bytes of our own making.
    DatastoreId(uuid::Builder::from_custom_bytes(bytes).into_uuid())
}

/// Refuses a host whose agent cannot mount or make this pool of Ceph, where the place is one.
pub(super) fn can_mount(
    services: &Services,
    (host, name): (HostId, &str),
    location: &DatastoreLocation,
) -> Result<(), Problem> {
    let Some(pool) = location.pool() else { return Ok(()) };
    let view = services.hosts.view(host);
    let create = pool.create.unwrap_or_default();
    let needs = [
        (true, RBD_DATASTORES, "cannot mount pools of Ceph"),
        (pool.create.is_some(), CREATE_POOLS, "makes no pools of Ceph"),
        (pool.keyring.is_none(), POOL_KEYS, "takes no keys of pools from the server"),
        (
            create.failure_domain.is_some(),
            FAILURE_DOMAINS,
            "makes no pools with a failure domain of one's choice",
        ),
        (
            create.data_chunks.is_some(),
            DATA_CHUNKS,
            "makes no pools with a number of data chunks (k) of one's choice",
        ),
        (
            create.compression.is_some(),
            POOL_COMPRESSION,
            "makes no pools with compression of one's choice",
        ),
        (
            pool.changed.is_some(),
            POOL_WAYS,
            "does not know pools whose monitors, user or messenger were changed",
        ),
    ];
    let lacking = needs.into_iter().find(|(needed, feature, _)| *needed && !view.has(feature));
    let Some((.., lacks)) = lacking else { return Ok(()) };
    services.hosts.connected(host)?;
    let detail = format!("the agent of host '{name}' {lacks}: upgrade vmseal there");
    Err(Problem::new(ErrorCode::Unsupported, detail))
}

/// Refuses a host whose agent describes no VMs.
pub(super) fn describes(description: Option<&HostDescription>, host: &str) -> Result<(), Problem> {
    if description.is_some_and(|it| it.features.iter().any(|feature| feature == DESCRIPTORS)) {
        return Ok(());
    }
    let what =
        format!("the agent of host '{host}' does not survey datastores: upgrade vmseal there");
    Err(Problem::new(ErrorCode::Unsupported, what))
}

/// The id that a new datastore gets: that of the mark in its directory, where there is one. So a host that has joined
/// again, or has joined another server, keeps its datastores.
async fn id_for(
    services: &Services,
    host: &hosts::Host,
    request: &AddDatastore,
) -> Result<DatastoreId, Problem> {
    let usual = id_of(host.id, &request.location);
    let description = services.hosts.view(host.id).description;
    if describes(description.as_deref(), &host.name).is_err() {
        // An agent of an earlier version refuses another mark.
        return Ok(usual);
    }
    let agent = services.hosts.connected(host.id)?;
    let survey = agent.survey_datastore(request.location.clone()).await?;
    let Some(mark) = survey.mark.filter(|mark| *mark != usual) else { return Ok(usual) };
    let path = request.location.path();
    let path = path.display();
    let mut read = services.store.read().await?;
    if let Some(known) = datastores::find(&mut read, &mark.to_string()).await? {
        let (hosts, known) = (known.host_names(), known.name);
        let detail = format!(
            "{path} has the mark of datastore '{known}' of {hosts}: is it a copy of that directory, or the same one? Hosts share one after vmseal datastore share {known} --host {}",
            host.name
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    if request.existing || (survey.vms.is_empty() && survey.incomplete.is_none()) {
        return Ok(mark);
    }
    let vms = survey.vms.len();
    let detail = format!(
        "{path} is a datastore of another inventory, with VMs on it: {vms}. If the server of that inventory is lost, or has given the host up, add it as it is (vmseal datastore add --existing) and adopt its VMs (vmseal datastore adopt). While another server works with it, two would write the same disks"
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// Lists the datastores.
pub async fn list(
    services: &Services,
    caller: &Caller,
    request: PageRequest,
) -> Result<Page<Datastore>, Problem> {
    caller.require(Privilege::Read)?;
    let part = request.part();
    let found = datastores::list(&mut *services.store.read().await?, &part).await?;
    let items = found.into_iter().map(shown).collect();
    Ok(page_of(items, part.limit, |it: &Datastore| it.id.to_string()))
}

pub(super) fn check_location(location: &DatastoreLocation) -> Result<(), Problem> {
    let path = location.path();
    if !path.is_absolute() || path.as_os_str().len() > LOCATION_PATH_MAX {
        let detail = format!("must be an absolute path of at most {LOCATION_PATH_MAX} bytes");
        return Err(Problem::invalid("location.path", detail));
    }
    let Some(pool) = location.pool() else { return Ok(()) };
    pool.check().map_err(|(field, what)| Problem::invalid(format!("location.pool.{field}"), what))
}

/// Refuses names that only unfinished pools have, where pools are to be made. `vmseal-rbd` refuses them as well, and a dry run does not ask
/// that.
fn check_new_pools(location: &DatastoreLocation) -> Result<(), Problem> {
    let Some(pool) = location.pool().filter(|pool| pool.create.is_some()) else { return Ok(()) };
    let names = [("pool", Some(&pool.pool)), ("data_pool", pool.data_pool.as_ref())];
    let reserved = names.into_iter().find(|(_, name)| {
        let name = name.map(String::as_str).unwrap_or_default();
        name.ends_with(UNFINISHED_SUFFIX)
    });
    let Some((field, _)) = reserved else { return Ok(()) };
    let what = format!(
        "must not end with '{UNFINISHED_SUFFIX}', as names of pools do that are not finished: choose another one"
    );
    Err(Problem::invalid(format!("location.pool.{field}"), what))
}

/// What is to be done for a datastore whose pools may not be there: they cannot be looked at without being made.
fn with_new_pools(request: &AddDatastore, pool: &RbdPool) -> Plan {
    let create = pool.create.unwrap_or_default();
    let asked = match &request.create_for_policy {
        Some(policy) => format!("policy '{policy}' ({create})"),
        None => create.to_string(),
    };
    let data = pool.data_pool.as_ref().map_or_else(String::new, |data| format!(" and '{data}'"));
    let steps = vec![
        format!("make the pool '{}'{data} for {asked}, unless it is there", pool.pool),
        format!("have host '{}' mark it as this datastore", request.host),
        "add it to the inventory".to_owned(),
    ];
    let cautions = [create.redundancy().risk(), create.compression.and_then(Compression::caution)];
    let warnings = cautions.into_iter().flatten().collect();
    let (kind, target) = ("datastore.add".to_owned(), request.name.clone());
    Plan { kind, target, steps, warnings, ..Plan::default() }
}

/// Adds a datastore of a host, which marks it and measures it.
pub async fn add(
    services: &Services,
    caller: &Caller,
    request: AddDatastore,
    dry_run: bool,
) -> Result<Outcome<Datastore>, Problem> {
    caller.require(Privilege::ManageDatastores)?;
    check_name(&request.name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    check_location(&request.location)?;
    let request = AddDatastore { location: request.location.asked(), ..request };
    if request.osd_encryption.is_some() && request.location.pool().is_none() {
        return Err(Problem::invalid("osd_encryption", stated_osds::NO_OSDS));
    }
    datastore_keys::check(&request)?;
    let request = pools_for_policy::resolve(services, request).await?;
    check_new_pools(&request.location)?;
    let host = hosts::find(&mut *services.store.read().await?, &request.host).await?;
    let host = host.ok_or_else(|| Problem {
        field: Some("host".to_owned()),
        ..Problem::not_found("host", &request.host)
    })?;
    can_mount(services, (host.id, &host.name), &request.location)?;
    services.hosts.connected(host.id)?;
    let key = datastore_keys::of_request(services, &request)?;
    let on = OnHost {
        host: host.id,
        host_name: host.name.clone(),
        location: request.location.clone(),
        mounted_key: None,
        mount: None,
    };
    datastore_keys::forget_former(services, &on).await?;
    if let Some(pool) = request.location.pool().filter(|pool| dry_run && pool.create.is_some()) {
        return Ok(Outcome::Planned(with_new_pools(&request, pool)));
    }
    let Some(key) = key else {
        return add_to(services, caller, host, request, None, dry_run).await;
    };
    datastore_keys::give(services, &request.name, &on, &key).await?;
    let added = add_to(services, caller, host, request, Some(&key), dry_run).await;
    if !matches!(added, Ok(Outcome::Done(_))) {
        datastore_keys::forget(services, on.host, &on.location).await;
    }
    added
}

/// Adds a datastore whose host can get at it.
async fn add_to(
    services: &Services,
    caller: &Caller,
    host: hosts::Host,
    request: AddDatastore,
    key: Option<&SecretBytes>,
    dry_run: bool,
) -> Result<Outcome<Datastore>, Problem> {
    let agent = services.hosts.connected(host.id)?;
    let id = id_for(services, &host, &request).await?;
    let mut read = services.store.read().await?;
    for taken in [format!("{}:{}", host.name, request.name), id.to_string()] {
        if let Some(known) = datastores::find(&mut read, &taken).await? {
            let (hosts, known) = (known.host_names(), known.name);
            let detail =
                format!("datastore '{known}' of {hosts} has this name or is at this place");
            return Err(Problem::new(ErrorCode::AlreadyExists, detail));
        }
    }
    drop(read);
    let spec = DatastoreSpec { datastore: id, location: request.location.clone() };
    if dry_run {
        // The host's probe marks the directory: a dry run only checks it.
        agent.examine_datastore(spec).await?;
        let path = request.location.path();
        let steps = vec![
            format!("have host '{}' mark {} as this datastore", host.name, path.display()),
            "add it to the inventory".to_owned(),
        ];
        let kind = "datastore.add".to_owned();
        return Ok(Outcome::Planned(Plan { kind, target: request.name, steps, ..Plan::default() }));
    }
    let usage = agent.probe_datastore(spec.clone()).await?;
    let (pools, mounted_key, mount, told) = match agent.measure_datastore(spec).await? {
        DatastoreCondition::Available { pools, mounted_key, mount, osds, .. } => {
            (pools, mounted_key, mount, osds)
        }
        _ => (Vec::new(), None, None, None),
    };
    let stated = request.osd_encryption.and_then(StatedOsds::stated);
    let told_by = told.map(|_| host.id);
    let wrapped = key.map(|key| pool_keys::wrapped(&services.data_dir, id, key)).transpose()?;
    let datastore = datastores::Datastore {
        id,
        name: request.name,
        hosts: vec![OnHost {
            host: host.id,
            host_name: host.name,
            location: request.location.kept(),
            mounted_key,
            mount,
        }],
        usage: Some(usage),
        pools,
        key: wrapped.as_ref().and_then(|key| key.fingerprint.clone()),
        osds: Osds { facts: OsdFacts { stated, told }, told_by },
    };
    let mut write = services.store.write().await?;
    datastores::insert(&mut write, &datastore).await?;
    if let Some(wrapped) = &wrapped {
        store_keys::set(&mut write, id, wrapped).await?;
    }
    let (kind, target) = ("datastore.added", datastore.name.as_str());
    let held = if wrapped.is_some() { ", with a key that the server holds" } else { "" };
    let detail = format!("on host '{}', id {id}{held}", datastore.host_names());
    write.event(NewEvent { kind, actor: caller.name(), target, detail: &detail }).await?;
    write.commit().await?;
    Ok(Outcome::Done(shown(datastore)))
}

/// Shows a datastore.
pub async fn show(services: &Services, caller: &Caller, name: &str) -> Result<Datastore, Problem> {
    caller.require(Privilege::Read)?;
    Ok(shown(find(services, name).await?))
}

/// Changes the key of a datastore that the server holds, once one of its hosts has tried it; or has the server hold it, in place of a file on
/// each host, once all of them have.
pub async fn set_key(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: SetDatastoreKey,
    dry_run: bool,
) -> Result<Outcome<RekeyedDatastore>, Problem> {
    let set = datastore_ways::set_key(services, caller, name, request, dry_run).await?;
    Ok(set.map(|(datastore, warnings)| RekeyedDatastore { datastore: shown(datastore), warnings }))
}

/// Changes what is stated of the OSDs of a pool's cluster, and how hosts get to the pool, once each of them has tried it. Guests that run go
/// on.
pub async fn set(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: SetDatastore,
    dry_run: bool,
) -> Result<Outcome<RekeyedDatastore>, Problem> {
    let other = SetDatastore { osd_encryption: None, ..request.clone() };
    let set = if other == SetDatastore::default() {
        let stated = request.osd_encryption;
        let set = stated_osds::state(services, caller, name, stated, dry_run).await?;
        set.map(|datastore| (datastore, Vec::new()))
    } else {
        datastore_ways::set(services, caller, name, request, dry_run).await?
    };
    Ok(set.map(|(datastore, warnings)| RekeyedDatastore { datastore: shown(datastore), warnings }))
}

/// Removes a datastore without disks from the inventory; other files on it stay.
pub async fn remove(
    services: &Services,
    caller: &Caller,
    name: &str,
    dry_run: bool,
) -> Result<Outcome<()>, Problem> {
    caller.require(Privilege::ManageDatastores)?;
    let datastore = find(services, name).await?;
    let mut write = services.store.write().await?;
    let disks = datastores::uses(&mut write, datastore.id).await?;
    if disks > 0 {
        let detail = format!(
            "datastore '{}' is in use (disks: {disks}): move them to another datastore (vmseal vm move), or delete their VMs first",
            datastore.name
        );
        return Err(Problem::new(ErrorCode::InUse, detail));
    }
    let open = tasks::open(&mut write).await?;
    if let Some(task) = open.iter().find(|it| it.operation.moves_disks_of(datastore.id)) {
        let detail = format!(
            "task {0} moves disks of VM '{1}' to datastore '{2}', or away from it: wait for it (vmseal task wait {0}) or cancel it",
            task.id, task.target, datastore.name
        );
        return Err(Problem::new(ErrorCode::InUse, detail));
    }
    datastores::delete(&mut write, datastore.id).await?;
    let (kind, target) = ("datastore.removed", datastore.name.as_str());
    let detail = format!("of host '{}'; what is on it stays", datastore.host_names());
    write.event(NewEvent { kind, actor: caller.name(), target, detail: &detail }).await?;
    if dry_run {
        let step = "forget it; what is on it stays".to_owned();
        return Ok(Outcome::planned("datastore.remove", target, step));
    }
    write.commit().await?;
    for on in &datastore.hosts {
        datastore_keys::forget(services, on.host, &on.location).await;
    }
    Ok(Outcome::Done(()))
}

/// Scans a datastore, and lists images that belong to no VM, and missing images. Changes
/// nothing.
pub async fn scan(
    services: &Services,
    caller: &Caller,
    name: &str,
) -> Result<DatastoreScan, Problem> {
    caller.require(Privilege::Read)?;
    let datastore = find(services, name).await?;
    let (on, agent) = reached(services, &datastore, name)?;
    // A disk that is created or deleted during the scan is complete, or present, in one of the two.
    let before = disks::placed(&mut *services.store.read().await?).await?;
    let contents = agent.scan_datastore(datastore.spec(on)).await?;
    let after = disks::placed(&mut *services.store.read().await?).await?;
    Ok(compare(&datastore, contents, &before, &after))
}

#[cfg(test)]
mod tests;
