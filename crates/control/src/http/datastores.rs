//! Datastores.

use std::sync::Arc;

use aws_lc_rs::digest::{SHA256, digest};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use vmseal_api::host::{DatastoreLocation, DatastoreSpec};
use vmseal_api::id::{DatastoreId, HostId, check_name};
use vmseal_api::model::{Datastore, Page, Plan};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::AddDatastore;

use super::auth::User;
use super::body::{self, Asked, Named};
use super::dry_run::{Intent, Outcome};
use super::problem::Refusal;
use super::{App, PageQuery, page};
use crate::store::events::NewEvent;
use crate::store::{datastores, hosts};

/// The longest path of a datastore, in bytes: PATH_MAX less what is below it.
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

pub(super) async fn find(app: &App, name: &str) -> Result<datastores::Datastore, Refusal> {
    let found = datastores::find(&mut *app.store.read().await?, name).await?;
    Ok(found.ok_or_else(|| Problem::not_found("datastore", name))?)
}

/// The id of the datastore at a place. It follows from the place, so that adding it again (after a
/// crash, or after it was removed) finds the mark that it left there to be its own.
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
#[utoipa::path(get, path = "/api/v1/datastores", tag = "datastores", params(PageQuery),
    responses((status = 200, body = Page<Datastore>), Refusal))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    Asked(query): Asked<PageQuery>,
) -> Result<Json<Page<Datastore>>, Refusal> {
    let part = query.part();
    let found = datastores::list(&mut *app.store.read().await?, &part).await?;
    let items = found.into_iter().map(shown).collect();
    Ok(Json(page(items, part.limit, |it: &Datastore| it.id.to_string())))
}

/// Adds a datastore of a host, which marks it and measures it.
#[utoipa::path(post, path = "/api/v1/datastores", tag = "datastores", params(Intent),
    request_body = AddDatastore,
    responses((status = 201, body = Datastore), (status = 200, body = Plan), Refusal))]
pub(super) async fn add(
    State(app): State<Arc<App>>,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<AddDatastore>,
) -> Result<Outcome<(StatusCode, Json<Datastore>)>, Refusal> {
    check_name(&request.name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    let DatastoreLocation::Dir { path } = &request.location;
    if !path.is_absolute() || path.as_os_str().len() > PATH_LEN_MAX {
        let detail = format!("must be an absolute path of at most {PATH_LEN_MAX} bytes");
        return Err(Problem::invalid("location.path", detail).into());
    }
    let host = hosts::find(&mut *app.store.read().await?, &request.host).await?;
    let host = host.ok_or_else(|| Problem {
        field: Some("host".to_owned()),
        ..Problem::not_found("host", &request.host)
    })?;
    let id = id_of(host.id, &request.location);
    let mut read = app.store.read().await?;
    for taken in [format!("{}:{}", host.name, request.name), id.to_string()] {
        if let Some(known) = datastores::find(&mut read, &taken).await? {
            let (known, host) = (known.name, known.host_name);
            let detail =
                format!("datastore '{known}' of host '{host}' has this name or is at this place");
            return Err(Problem::new(ErrorCode::AlreadyExists, detail).into());
        }
    }
    drop(read);
    let spec = DatastoreSpec { datastore: id, location: request.location.clone() };
    let agent = app.hosts.connected(host.id)?;
    if intent.dry_run {
        // The host's probe marks the directory: a dry run only has it looked at.
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
    let mut write = app.store.write().await?;
    datastores::insert(&mut write, &datastore).await?;
    let (kind, target) = ("datastore.added", datastore.name.as_str());
    let detail = format!("on host '{}', id {id}", datastore.host_name);
    write.event(NewEvent { kind, actor: &actor, target, detail: &detail }).await?;
    write.commit().await?;
    Ok(Outcome::Done((StatusCode::CREATED, Json(shown(datastore)))))
}

/// Shows a datastore.
#[utoipa::path(get, path = "/api/v1/datastores/{datastore}", tag = "datastores",
    params(("datastore" = String, Path, description = "Its name, HOST:NAME where hosts share one, or id")),
    responses((status = 200, body = Datastore), Refusal))]
pub(super) async fn show(
    State(app): State<Arc<App>>,
    Named(name): Named,
) -> Result<Json<Datastore>, Refusal> {
    Ok(Json(shown(find(&app, &name).await?)))
}

/// Forgets a datastore without disks; what else is on it stays.
#[utoipa::path(delete, path = "/api/v1/datastores/{datastore}", tag = "datastores",
    params(("datastore" = String, Path, description = "Its name, HOST:NAME where hosts share one, or id"), Intent),
    responses((status = 204, description = "It is forgotten"), (status = 200, body = Plan), Refusal))]
pub(super) async fn remove(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
) -> Result<Outcome<StatusCode>, Refusal> {
    let datastore = find(&app, &name).await?;
    let mut write = app.store.write().await?;
    let disks = datastores::uses(&mut write, datastore.id).await?;
    if disks > 0 {
        let detail = format!(
            "datastore '{}' is in use (disks: {disks}): delete their VMs first",
            datastore.name
        );
        return Err(Problem::new(ErrorCode::InUse, detail).into());
    }
    datastores::delete(&mut write, datastore.id).await?;
    let (kind, target) = ("datastore.removed", datastore.name.as_str());
    let detail = format!("of host '{}'; what is on it stays", datastore.host_name);
    write.event(NewEvent { kind, actor: &actor, target, detail: &detail }).await?;
    if intent.dry_run {
        let step = "forget it; what is on it stays".to_owned();
        return Ok(Outcome::planned("datastore.remove", target, step));
    }
    write.commit().await?;
    Ok(Outcome::Done(StatusCode::NO_CONTENT))
}
