//! Dirty bitmaps of disks in use: what has changed since when, for backups. The filter that serves a disk
//! keeps them; the inventory knows nothing of them.

use std::sync::Arc;

use axum::Json;
use axum::extract::{FromRequestParts, Path, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use vmseal_api::bitmap;
use vmseal_api::filter::{BitmapChange, BitmapStatus};
use vmseal_api::model::{Page, Plan};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::AddBitmap;

use super::App;
use super::auth::User;
use super::body::{self, Asked, NamedPair};
use super::disks::find;
use super::dry_run::{BitmapOrPlan, Intent, Outcome};
use super::problem::Refusal;
use super::vms::require_ready;
use crate::store::disks::Disk;
use crate::store::events::NewEvent;
use crate::store::vms::Vm;

/// The three names in a path.
pub(super) struct NamedBitmap {
    vm: String,
    disk: String,
    name: String,
}

impl<S: Send + Sync> FromRequestParts<S> for NamedBitmap {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path((vm, disk, name))) => Ok(Self { vm, disk, name }),
            Err(error) => Err(Problem::new(ErrorCode::InvalidRequest, error.body_text()).into()),
        }
    }
}

/// Lists the dirty bitmaps of a disk whose VM runs. They live in the process that serves the disk: all are gone when
/// the VM stops, and when another process takes its place.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/disks/{disk}/bitmaps", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id")),
    responses((status = 200, body = Page<BitmapStatus>), Refusal))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    NamedPair(vm, disk): NamedPair,
) -> Result<Json<Page<BitmapStatus>>, Refusal> {
    let (vm, disk) = find(&app, &vm, &disk).await?;
    let items = read(&app, &vm, &disk).await?;
    Ok(Json(Page { items, next: None }))
}

/// Starts a dirty bitmap of a disk whose VM runs: what changes from now on is dirty. One that is there is refused.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/disks/{disk}/bitmaps", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id"), Intent),
    request_body = AddBitmap,
    responses((status = 201, body = BitmapStatus), (status = 200, body = Plan), Refusal))]
pub(super) async fn add(
    State(app): State<Arc<App>>,
    NamedPair(vm, disk): NamedPair,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<AddBitmap>,
) -> Result<Outcome<(StatusCode, Json<BitmapStatus>)>, Refusal> {
    let of = Wanted { vm, disk, name: request.name, change: BitmapChange::Start };
    Ok(match change(&app, &actor, intent, of).await? {
        Outcome::Done(bitmap) => Outcome::Done((StatusCode::CREATED, Json(there(bitmap)?))),
        Outcome::Planned(plan) => Outcome::Planned(plan),
    })
}

/// Clears a dirty bitmap: what has changed until now is forgotten, and what changes from now on is dirty. Not while
/// somebody reads it.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/disks/{disk}/bitmaps/{bitmap}/clear", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id"),
           ("bitmap" = String, Path, description = "The bitmap's name"), Intent),
    responses((status = 200, body = BitmapOrPlan), Refusal))]
pub(super) async fn clear(
    State(app): State<Arc<App>>,
    NamedBitmap { vm, disk, name }: NamedBitmap,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::OptionalJson(body::Nothing {}): body::OptionalJson<body::Nothing>,
) -> Result<Outcome<Json<BitmapStatus>>, Refusal> {
    let of = Wanted { vm, disk, name, change: BitmapChange::Clear };
    Ok(match change(&app, &actor, intent, of).await? {
        Outcome::Done(bitmap) => Outcome::Done(Json(there(bitmap)?)),
        Outcome::Planned(plan) => Outcome::Planned(plan),
    })
}

/// Removes a dirty bitmap. Not while somebody reads it.
#[utoipa::path(delete, path = "/api/v1/vms/{vm}/disks/{disk}/bitmaps/{bitmap}", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id"),
           ("bitmap" = String, Path, description = "The bitmap's name"), Intent),
    responses((status = 204, description = "It is removed"), (status = 200, body = Plan), Refusal))]
pub(super) async fn remove(
    State(app): State<Arc<App>>,
    NamedBitmap { vm, disk, name }: NamedBitmap,
    User(actor): User,
    Asked(intent): Asked<Intent>,
) -> Result<Outcome<StatusCode>, Refusal> {
    let of = Wanted { vm, disk, name, change: BitmapChange::Remove };
    Ok(match change(&app, &actor, intent, of).await? {
        Outcome::Done(_) => Outcome::Done(StatusCode::NO_CONTENT),
        Outcome::Planned(plan) => Outcome::Planned(plan),
    })
}

/// What is to become of which bitmap.
struct Wanted {
    vm: String,
    disk: String,
    name: String,
    change: BitmapChange,
}

/// Changes a bitmap, or says what that would do; gives it, where it is there then.
async fn change(
    app: &App,
    actor: &str,
    intent: Intent,
    Wanted { vm, disk, name, change }: Wanted,
) -> Result<Outcome<Option<BitmapStatus>>, Refusal> {
    bitmap::check_name(&name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    let (vm, disk) = find(app, &vm, &disk).await?;
    let (done, kind, step) = match change {
        BitmapChange::Start => {
            ("disk.bitmap-added", "disk.bitmap.add", "begin to note what changes on")
        }
        BitmapChange::Clear => {
            ("disk.bitmap-cleared", "disk.bitmap.clear", "forget what has changed on")
        }
        BitmapChange::Remove => {
            ("disk.bitmap-removed", "disk.bitmap.remove", "end to note what changes on")
        }
    };
    if intent.dry_run {
        let bitmaps = read(app, &vm, &disk).await?;
        bitmap::check(bitmaps.iter().map(|bitmap| &*bitmap.name), &name, change).map_err(
            |error| {
                let what = format!("disk '{}' of VM '{}': {error}", disk.name, vm.name);
                Problem::new(error.code(), what)
            },
        )?;
        let step = format!("{step} disk '{}', as bitmap '{name}'", disk.name);
        return Ok(Outcome::planned(kind, &vm.name, step));
    }
    require_ready(&vm)?;
    let agent = app.hosts.connected(vm.host)?;
    let bitmaps = agent.change_bitmap(vm.id, disk.id, name.clone(), change).await?;
    let mut write = app.store.write().await?;
    let detail = format!("bitmap '{name}' of disk '{}'", disk.name);
    write.event(NewEvent { kind: done, actor, target: &vm.name, detail: &detail }).await?;
    write.commit().await?;
    Ok(Outcome::Done(bitmaps.into_iter().find(|bitmap| bitmap.name == name)))
}

async fn read(app: &App, vm: &Vm, disk: &Disk) -> Result<Vec<BitmapStatus>, Problem> {
    require_ready(vm)?;
    app.hosts.connected(vm.host)?.bitmaps(vm.id, disk.id).await
}

/// What has just been changed, and not removed.
fn there(bitmap: Option<BitmapStatus>) -> Result<BitmapStatus, Problem> {
    bitmap.ok_or_else(|| {
        Problem::new(ErrorCode::Internal, "the host does not name the bitmap that it has changed")
    })
}
