//! Datastores.

use aws_lc_rs::digest::{SHA256, digest};
use vmseal_api::datastore::DatastoreScan;
use vmseal_api::host::{DatastoreLocation, DatastoreSpec};
use vmseal_api::id::{DatastoreId, HostId, check_name};
use vmseal_api::model::{Datastore, Page, Plan};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::AddDatastore;

use super::caller::{Caller, Privilege};
use super::scan::compare;
use super::{Outcome, PageRequest, Services, page_of};
use crate::store::events::NewEvent;
use crate::store::{datastores, disks, hosts};

/// The maximum length of a datastore's path, in bytes: PATH_MAX minus the paths below it.
const PATH_LEN_MAX: usize = 3072;

fn shown(datastore: datastores::Datastore) -> Datastore {
    Datastore {
        id: datastore.id,
        name: datastore.name,
        host: datastore.host_name,
        location: datastore.location,
        usage: datastore.usage,
    }
}

pub(super) async fn find(
    services: &Services,
    name: &str,
) -> Result<datastores::Datastore, Problem> {
    let found = datastores::find(&mut *services.store.read().await?, name).await?;
    found.ok_or_else(|| Problem::not_found("datastore", name))
}

/// The id of a datastore. It is derived from the location, so that adding it again (after a crash, or
/// after it was removed) recognizes the mark in the directory.
fn id_of(host: HostId, location: &DatastoreLocation) -> DatastoreId {
    let DatastoreLocation::Dir { path } = location;
    let place = format!("vmseal datastore v1\0{host}\0dir\0{}", path.display());
    let hash = digest(&SHA256, place.as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.as_ref()[..16]);
    // Version 8 of RFC 9562: bytes of our own making.
    DatastoreId(uuid::Builder::from_custom_bytes(bytes).into_uuid())
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

/// Adds a datastore of a host, which marks it and measures it.
pub async fn add(
    services: &Services,
    caller: &Caller,
    request: AddDatastore,
    dry_run: bool,
) -> Result<Outcome<Datastore>, Problem> {
    caller.require(Privilege::ManageDatastores)?;
    check_name(&request.name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    let DatastoreLocation::Dir { path } = &request.location;
    if !path.is_absolute() || path.as_os_str().len() > PATH_LEN_MAX {
        let detail = format!("must be an absolute path of at most {PATH_LEN_MAX} bytes");
        return Err(Problem::invalid("location.path", detail));
    }
    let host = hosts::find(&mut *services.store.read().await?, &request.host).await?;
    let host = host.ok_or_else(|| Problem {
        field: Some("host".to_owned()),
        ..Problem::not_found("host", &request.host)
    })?;
    let id = id_of(host.id, &request.location);
    let mut read = services.store.read().await?;
    for taken in [format!("{}:{}", host.name, request.name), id.to_string()] {
        if let Some(known) = datastores::find(&mut read, &taken).await? {
            let (known, host) = (known.name, known.host_name);
            let detail =
                format!("datastore '{known}' of host '{host}' has this name or is at this place");
            return Err(Problem::new(ErrorCode::AlreadyExists, detail));
        }
    }
    drop(read);
    let spec = DatastoreSpec { datastore: id, location: request.location.clone() };
    let agent = services.hosts.connected(host.id)?;
    if dry_run {
        // The host's probe marks the directory: a dry run only checks it.
        agent.examine_datastore(spec).await?;
        let DatastoreLocation::Dir { path } = &request.location;
        let steps = vec![
            format!("have host '{}' mark {} as this datastore", host.name, path.display()),
            "add it to the inventory".to_owned(),
        ];
        let kind = "datastore.add".to_owned();
        return Ok(Outcome::Planned(Plan { kind, target: request.name, steps }));
    }
    let usage = agent.probe_datastore(spec).await?;
    let datastore = datastores::Datastore {
        id,
        name: request.name,
        host: host.id,
        host_name: host.name,
        location: request.location,
        usage: Some(usage),
    };
    let mut write = services.store.write().await?;
    datastores::insert(&mut write, &datastore).await?;
    let (kind, target) = ("datastore.added", datastore.name.as_str());
    let detail = format!("on host '{}', id {id}", datastore.host_name);
    write.event(NewEvent { kind, actor: caller.name(), target, detail: &detail }).await?;
    write.commit().await?;
    Ok(Outcome::Done(shown(datastore)))
}

/// Shows a datastore.
pub async fn show(services: &Services, caller: &Caller, name: &str) -> Result<Datastore, Problem> {
    caller.require(Privilege::Read)?;
    Ok(shown(find(services, name).await?))
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
            "datastore '{}' is in use (disks: {disks}): delete their VMs first",
            datastore.name
        );
        return Err(Problem::new(ErrorCode::InUse, detail));
    }
    datastores::delete(&mut write, datastore.id).await?;
    let (kind, target) = ("datastore.removed", datastore.name.as_str());
    let detail = format!("of host '{}'; what is on it stays", datastore.host_name);
    write.event(NewEvent { kind, actor: caller.name(), target, detail: &detail }).await?;
    if dry_run {
        let step = "forget it; what is on it stays".to_owned();
        return Ok(Outcome::planned("datastore.remove", target, step));
    }
    write.commit().await?;
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
    let agent = services.hosts.connected(datastore.host)?;
    let location = datastore.location.clone();
    // A disk that is created or deleted during the scan is complete, or present, in one of the two.
    let before = disks::placed(&mut *services.store.read().await?).await?;
    let contents =
        agent.scan_datastore(DatastoreSpec { datastore: datastore.id, location }).await?;
    let after = disks::placed(&mut *services.store.read().await?).await?;
    Ok(compare(&datastore, contents, &before, &after))
}
