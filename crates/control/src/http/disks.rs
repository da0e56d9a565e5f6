//! Disks of VMs.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{Message, WebSocketUpgrade};
use axum::response::Response;
use serde::Deserialize;
use utoipa::IntoParams;
use vmseal_api::expose::{self, Carried, MESSAGE_MAX};
use vmseal_api::host::{ConsoleStream, ExportJob, Exposing, JobSpec, Power};
use vmseal_api::model::{Plan, Task};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::ExportDisk;
use vmseal_api::transfer::ExportFormat;

use super::App;
use super::auth::User;
use super::body::{self, Asked, NamedPair};
use super::dry_run::{Intent, Outcome};
use super::problem::Refusal;
use super::tasks::Accepted;
use super::vms::{plan, power, require_ready};
use crate::connections::{self, Connection};
use crate::keys::Purpose;
use crate::store::disks::Disk;
use crate::store::events::NewEvent;
use crate::store::vms::Vm;
use crate::tasks::{Engine, Operation};

/// Writes a disk of a VM that is off to a file of its host.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/disks/{disk}/export", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id"), Intent),
    request_body = ExportDisk,
    responses((status = 202, body = Task), (status = 200, body = Plan), Refusal))]
pub(super) async fn export(
    State(app): State<Arc<App>>,
    NamedPair(vm, disk): NamedPair,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<ExportDisk>,
) -> Result<Outcome<Accepted>, Refusal> {
    check(&request)?;
    let (vm, disk) = find(&app, &vm, &disk).await?;
    if request.format == ExportFormat::Sealed && !disk.encrypted {
        let detail = format!("disk '{}' is not encrypted: export it as raw", disk.name);
        return Err(Problem::invalid("format", detail).into());
    }
    require_off(&app, &vm).await?;
    let mut write = app.store.write().await?;
    let detail = told(&vm, &disk, &request);
    let event = NewEvent { kind: "disk.export", actor: &actor, target: &vm.name, detail: &detail };
    write.event(event).await?;
    let ExportDisk { to, format, passphrase, .. } = request;
    let job = intent.dry_run.then(|| {
        let (disk, to, passphrase) = (disk.id, to.clone(), passphrase.clone());
        JobSpec::Export(ExportJob { disk, to, format, passphrase })
    });
    let operation = Operation::ExportDisk { vm: vm.id, disk: disk.id, to, format, passphrase };
    let task = Engine::record(&mut write, operation, &vm.name, &actor).await?;
    if let Some(job) = job {
        // The inventory is not kept waiting for a host.
        drop(write);
        let agent = app.hosts.connected(vm.host)?;
        agent.examine_job(vm.id, job).await?;
        return Ok(Outcome::Planned(plan(&task, &vm)));
    }
    write.commit().await?;
    let shown = app.engine.shown(&task);
    app.engine.begin(task);
    Ok(Outcome::Done(Accepted(shown)))
}

/// What is opened of a disk's exposure.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ExposeQuery {
    /// Open a connection, which is NBD, to a disk that is being exposed; else expose it.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    connect: bool,
    /// Allow to change a disk that is to be exposed; its VM has to be off.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    writable: bool,
}

/// Exposes a disk over NBD, as WebSockets of binary messages. The first one holds it exposed: it sends `.` every
/// 10 seconds and `q` to let go, is told in words what went wrong, if anything did, and ends when the disk is free.
/// Each further one, with `connect`, is an NBD connection. The VM does not start while a disk of it is
/// exposed; a disk of a VM that runs is exposed for reading alone.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/disks/{disk}/expose", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id"), ExposeQuery),
    responses((status = 101, description = "The WebSocket stands"), Refusal))]
pub(super) async fn expose(
    State(app): State<Arc<App>>,
    NamedPair(vm, disk): NamedPair,
    User(actor): User,
    connection: Option<Extension<Connection>>,
    Asked(query): Asked<ExposeQuery>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Refusal> {
    let upgrade = upgrade.map_err(|error| {
        let detail = format!("an exposed disk is a WebSocket: {}", error.body_text());
        Problem::new(ErrorCode::InvalidRequest, detail)
    })?;
    let held = connections::hold(connection.as_ref())?;
    let (vm, disk) = find(&app, &vm, &disk).await?;
    require_ready(&vm)?;
    let ExposeQuery { connect, writable } = query;
    let what = if connect { Exposing::Connect } else { Exposing::Hold { writable } };
    // Before the upgrade, so that a refusal is an answer that can be read.
    let stream = opened(&app, &vm, &disk, what).await?;
    if !connect {
        let mut write = app.store.write().await?;
        let how = if writable { "to be read and changed" } else { "read-only" };
        let detail = format!("disk '{}' over NBD, {how}, IN THE CLEAR", disk.name);
        let (kind, target) = ("disk.exposed", vm.name.as_str());
        write.event(NewEvent { kind, actor: &actor, target, detail: &detail }).await?;
        write.commit().await?;
    }
    let message = |bytes: Vec<u8>| Message::Binary(bytes.into());
    let carried = |message| match message {
        Message::Binary(bytes) => Carried::Bytes(bytes.into()),
        Message::Ping(_) | Message::Pong(_) => Carried::Nothing,
        Message::Text(_) | Message::Close(_) => Carried::End,
    };
    Ok(upgrade.max_message_size(MESSAGE_MAX).max_frame_size(MESSAGE_MAX).on_upgrade(
        async move |socket| {
            let _held = (held, connection);
            expose::carry(socket, stream, message, carried).await;
        },
    ))
}

/// What the host opens; one that has restarted is told of the VM, and of its key.
async fn opened(app: &App, vm: &Vm, disk: &Disk, what: Exposing) -> Result<ConsoleStream, Problem> {
    let agent = app.hosts.connected(vm.host)?;
    match agent.expose_disk(vm.id, disk.id, what).await {
        Err(problem)
            if what != Exposing::Connect
                && matches!(problem.code, ErrorCode::NotFound | ErrorCode::Locked) =>
        {
            app.hosts.prepare(vm.id, Purpose::Open).await?;
            agent.expose_disk(vm.id, disk.id, what).await
        }
        other => other,
    }
}

pub(super) async fn find(app: &App, vm: &str, disk: &str) -> Result<(Vm, Disk), Refusal> {
    let (vm, disks) = super::vms::find(app, vm).await?;
    let found = disks.into_iter().find(|it| it.name == disk || it.id.to_string() == disk);
    match found {
        Some(disk) => Ok((vm, disk)),
        None => {
            let detail = format!("VM '{}' has no disk '{disk}'", vm.name);
            Err(Problem::new(ErrorCode::NotFound, detail).into())
        }
    }
}

/// What the record of the use of the disk's key says.
fn told(vm: &Vm, disk: &Disk, request: &ExportDisk) -> String {
    let how = match request.format {
        ExportFormat::Raw | ExportFormat::Qcow2 => "IN THE CLEAR",
        ExportFormat::Luks2 => "under a passphrase",
        ExportFormat::Sealed => "still under the VM's key",
    };
    let (host, format) = (&vm.host_name, request.format.name());
    format!("disk '{}' to {} on host '{host}' as {format}, {how}", disk.name, request.to.display())
}

fn check(request: &ExportDisk) -> Result<(), Problem> {
    if !request.to.is_absolute() || request.to.file_name().is_none() {
        return Err(Problem::invalid("to", "must be an absolute path that ends with a name"));
    }
    let (plain, protected) = (request.format.is_plain(), request.format.has_passphrase());
    if plain && !request.plaintext {
        let detail = format!(
            "a {} file is in the clear: say that it may be (--plaintext), or export luks2",
            request.format.name()
        );
        return Err(Problem::invalid("plaintext", detail));
    }
    if request.plaintext && !plain {
        let detail = format!("a {} file is not in the clear", request.format.name());
        return Err(Problem::invalid("plaintext", detail));
    }
    match (protected, &request.passphrase) {
        (false, Some(_)) => Err(Problem::invalid("passphrase", "is for luks2 alone")),
        (true, None) => Err(Problem::invalid("passphrase", "is needed for luks2")),
        _ => Ok(()),
    }
}

async fn require_off(app: &App, vm: &Vm) -> Result<(), Problem> {
    require_ready(vm)?;
    if power(app, vm).await?.is_none_or(|power| power == Power::Off) {
        return Ok(());
    }
    let name = &vm.name;
    let detail = format!(
        "VM '{name}' is not off, and a disk that is written to cannot be exported: stop it first (vmseal vm stop {name})"
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}
