//! Disks of VMs.

use std::sync::Arc;

use axum::extract::State;
use vmseal_api::host::{ExportSpec, ExportStep, Power};
use vmseal_api::id::TaskId;
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
    let (vm, disks) = super::vms::find(&app, &vm).await?;
    let found = disks.into_iter().find(|it| it.name == disk || it.id.to_string() == disk);
    let Some(disk) = found else {
        let detail = format!("VM '{}' has no disk '{disk}'", vm.name);
        return Err(Problem::new(ErrorCode::NotFound, detail).into());
    };
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
    let spec = intent.dry_run.then(|| ExportSpec {
        export: TaskId::new(),
        to: to.clone(),
        format,
        passphrase: passphrase.clone(),
    });
    let operation = Operation::ExportDisk { vm: vm.id, disk: disk.id, to, format, passphrase };
    let task = Engine::record(&mut write, operation, &vm.name, &actor).await?;
    if let Some(spec) = spec {
        // The inventory is not kept waiting for a host.
        drop(write);
        let agent = app.hosts.connected(vm.host)?;
        agent.export_disk(vm.id, disk.id, ExportStep::Check, spec).await?;
        return Ok(Outcome::Planned(plan(&task, &vm)));
    }
    write.commit().await?;
    let shown = app.engine.shown(&task);
    app.engine.begin(task);
    Ok(Outcome::Done(Accepted(shown)))
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
