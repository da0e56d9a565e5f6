//! Disks of VMs.

use std::sync::Arc;
use std::time::Instant;

use uuid::Uuid;
use vmseal_api::filter::ReplicaStatus;
use vmseal_api::host::version::{EXPOSE_KEPT, SNAPSHOT_EXPORT};
use vmseal_api::host::{ConsoleStream, DiskRole, ExportJob, Exposing, JobSpec, Power};
use vmseal_api::id::SnapshotId;
use vmseal_api::model::Task;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::ExportDisk;
use vmseal_api::transfer::ExportFormat;

use super::caller::{Caller, Privilege};
use super::features;
use super::saved_memory;
use super::snapshots;
use super::vms::{plan, power, require_no_template, require_ready};
use super::{Outcome, Services};
use crate::hosts::keys::Purpose;
use crate::operation::Operation;
use crate::store::disks::Disk;
use crate::store::events::NewEvent;
use crate::store::exposures::{self, Exposed};
use crate::store::tasks::Task as StoredTask;
use crate::store::vms::Vm;
use crate::store::{Store, StoreError, Write, tasks};
use crate::tasks::Engine;

/// Writes a disk of a VM that is off, or what a snapshot keeps of one, to a file of its host. In place of the disk of a TPM, what the TPM
/// keeps is written.
pub async fn export(
    services: &Services,
    caller: &Caller,
    vm: &str,
    disk: &str,
    request: ExportDisk,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::DirectAccess)?;
    check(&request)?;
    let (vm, disk) = find(services, vm, disk).await?;
    if disk.encrypted && request.format != ExportFormat::Sealed {
        caller.require(Privilege::Decrypt)?;
    }
    if request.format == ExportFormat::Sealed && !disk.encrypted {
        let detail = format!("disk '{}' is not encrypted: export it as raw", disk.name);
        return Err(Problem::invalid("format", detail));
    }
    if disk.role == DiskRole::Tpm {
        check_of_tpm(&disk, &request)?;
    }
    if request.snapshot.is_none() {
        require_off(services, &vm).await?;
    } else {
        require_ready(&vm)?;
        features::require(services, &vm, SNAPSHOT_EXPORT, "export what a snapshot keeps")?;
    }
    let pace = super::tasks::work_pace(services, &vm, request.rate)?;
    let mut write = services.store.write().await?;
    let snapshot = kept(&mut write, &vm, &disk, request.snapshot.as_deref()).await?;
    let detail = told(&vm, &disk, &request);
    let event =
        NewEvent { kind: "disk.export", actor: caller.name(), target: &vm.name, detail: &detail };
    write.event(event).await?;
    let ExportDisk { to, format, passphrase, .. } = request;
    let job = dry_run.then(|| {
        let (disk, to, passphrase) = (disk.id, to.clone(), passphrase.clone());
        JobSpec::Export(ExportJob { disk, to, format, passphrase, snapshot })
    });
    let (of, disk) = (vm.id, disk.id);
    let operation = Operation::ExportDisk { vm: of, disk, to, format, passphrase, snapshot };
    let task = Engine::record(&mut write, operation, &vm.name, caller.name()).await?;
    if let Some(job) = job {
        // No transaction is held during a call to a host.
        drop(write);
        let agent = services.hosts.connected(vm.host)?;
        agent.examine_job(vm.id, job).await?;
        return Ok(Outcome::Planned(plan(&task, &vm)));
    }
    let task = StoredTask { pace, ..task };
    tasks::set_pace(&mut write, &task).await?;
    write.commit().await?;
    let shown = services.engine.shown(&task);
    services.engine.begin(task);
    Ok(Outcome::Done(shown))
}

/// The snapshot that a request names, which keeps something of the disk, if it names one.
async fn kept(
    write: &mut Write<'_>,
    vm: &Vm,
    disk: &Disk,
    name: Option<&str>,
) -> Result<Option<SnapshotId>, Problem> {
    let snapshot = snapshots::chosen(write, vm, name).await?;
    if snapshot.as_ref().is_some_and(|snapshot| !snapshot.disks.contains(&disk.id)) {
        let detail = format!("keeps nothing of disk '{}'", disk.name);
        return Err(Problem::invalid("snapshot", detail));
    }
    Ok(snapshot.map(|snapshot| snapshot.id))
}

/// Exposes a disk over NBD, or opens a connection to one that is exposed already. A disk of a running VM is exposed
/// read-only, and so is what a snapshot keeps, and ciphertext.
pub async fn expose(
    services: &Services,
    caller: &Caller,
    vm: &str,
    disk: &str,
    what: Exposing<&str>,
) -> Result<(ConsoleStream, Option<Exposure>), Problem> {
    caller.require(Privilege::DirectAccess)?;
    let (vm, disk) = find(services, vm, disk).await?;
    require_ready(&vm)?;
    if matches!(what, Exposing::Hold { writable: true }) {
        require_no_template(&vm)?;
        require_not_sent(services, &vm).await?;
    }
    let of_host = as_of_host(services, &vm, &disk, what).await?;
    let stream = opened(services, &vm, &disk, of_host).await?;
    if what == Exposing::Connect {
        return Ok((stream, None));
    }
    let mut write = services.store.write().await?;
    let detail = told_exposed(&disk, what);
    let (kind, target) = ("disk.exposed", vm.name.as_str());
    write.event(NewEvent { kind, actor: caller.name(), target, detail: &detail }).await?;
    let actor = caller.name().to_owned();
    let exposed = Exposed { id: Uuid::now_v7(), vm: vm.name, disk: disk.name, actor };
    exposures::insert(&mut write, &exposed).await?;
    write.commit().await?;
    let store = Arc::clone(&services.store);
    Ok((stream, Some(Exposure { store, exposed, since: Instant::now() })))
}

/// What its host is asked for.
async fn as_of_host(
    services: &Services,
    vm: &Vm,
    disk: &Disk,
    what: Exposing<&str>,
) -> Result<Exposing, Problem> {
    let name = match what {
        Exposing::Hold { writable } => return Ok(Exposing::Hold { writable }),
        Exposing::Connect => return Ok(Exposing::Connect),
        Exposing::HoldKept { snapshot, .. } => Some(snapshot),
        Exposing::HoldSealed => None,
    };
    let sealed = what.is_sealed();
    if sealed && !disk.encrypted {
        let detail = format!("disk '{}' is not encrypted: expose it as it is", disk.name);
        return Err(Problem::invalid("sealed", detail));
    }
    // An earlier agent would not see the difference, and expose what the disk holds now in the clear.
    features::require(services, vm, EXPOSE_KEPT, "expose what a snapshot keeps, or ciphertext")?;
    let snapshot = kept(&mut services.store.write().await?, vm, disk, name).await?;
    Ok(match snapshot {
        Some(snapshot) => Exposing::HoldKept { snapshot, sealed },
        None => Exposing::HoldSealed,
    })
}

/// The detail of the event about a disk that is exposed.
fn told_exposed(disk: &Disk, what: Exposing<&str>) -> String {
    let kept = match what {
        Exposing::HoldKept { snapshot, .. } => format!(" at snapshot '{snapshot}'"),
        _ => String::new(),
    };
    let changed = matches!(what, Exposing::Hold { writable: true });
    let how = if changed { "to be read and changed" } else { "read-only" };
    let key = if what.is_sealed() { "still under the VM's key" } else { "IN THE CLEAR" };
    format!("disk '{}'{kept} over NBD, {how}, {key}", disk.name)
}

/// Refuses a VM that is off and on its way to another control plane. Its host refuses as well, unless its agent has restarted since the
/// disks were read.
async fn require_not_sent(services: &Services, vm: &Vm) -> Result<(), Problem> {
    let holding = tasks::holding(&mut *services.store.read().await?, vm.id).await?;
    match holding.filter(|task| task.operation.is_at_rest()) {
        None => Ok(()),
        Some(task) => {
            let detail = format!(
                "VM '{}' is on its way to another control plane (task {}): wait for it, or cancel it",
                vm.name, task.id
            );
            Err(Problem::new(ErrorCode::InUse, detail))
        }
    }
}

/// A disk that is exposed, for as long as this is kept: then its end is recorded.
pub struct Exposure {
    store: Arc<Store>,
    exposed: Exposed,
    since: Instant,
}

impl Drop for Exposure {
    fn drop(&mut self) {
        // Without a runtime the server ends; then its hosts end the exposure, and the next server records it.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (store, exposed) = (Arc::clone(&self.store), self.exposed.clone());
        let how = format!("after {} seconds", self.since.elapsed().as_secs());
        runtime.spawn(async move {
            if let Err(error) = end(&store, &exposed, &exposed.actor, &how).await {
                let vm = &exposed.vm;
                tracing::error!(vm, %error, "the end of an exposure is recorded only when the server starts again");
            }
        });
    }
}

/// Records the end of an exposure.
async fn end(store: &Store, exposed: &Exposed, actor: &str, how: &str) -> Result<(), StoreError> {
    let mut write = store.write().await?;
    exposures::delete(&mut write, exposed.id).await?;
    let (kind, target) = ("disk.unexposed", exposed.vm.as_str());
    let detail = format!("disk '{}', {how}", exposed.disk);
    write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
    write.commit().await
}

/// Records the ends of the exposures that a server before this one has left: hosts end them when it is gone.
pub(crate) async fn end_exposures(store: &Store) -> Result<(), StoreError> {
    let left = exposures::list(&mut *store.read().await?).await?;
    for exposed in &left {
        let how = format!("exposed by '{}': the server ended", exposed.actor);
        end(store, exposed, crate::SELF, &how).await?;
    }
    Ok(())
}

/// Opens the exposure on the host; if its agent has restarted, registers the VM first, and delivers its key where that is needed.
async fn opened(
    services: &Services,
    vm: &Vm,
    disk: &Disk,
    what: Exposing,
) -> Result<ConsoleStream, Problem> {
    let agent = services.hosts.connected(vm.host)?;
    match agent.expose_disk(vm.id, disk.id, what).await {
        // Ciphertext is exposed without the key.
        Err(problem) if what.is_sealed() && problem.code == ErrorCode::NotFound => {
            crate::hosts::register(&services.store, &services.hosts, vm.id).await?;
            agent.expose_disk(vm.id, disk.id, what).await
        }
        Err(problem)
            if !what.is_sealed()
                && what != Exposing::Connect
                && matches!(problem.code, ErrorCode::NotFound | ErrorCode::Locked) =>
        {
            services.hosts.prepare(vm.id, Purpose::Open).await?;
            agent.expose_disk(vm.id, disk.id, what).await
        }
        other => other,
    }
}

pub(super) async fn find(services: &Services, vm: &str, disk: &str) -> Result<(Vm, Disk), Problem> {
    let (vm, disks) = super::vms::find(services, vm).await?;
    let found = disks.into_iter().find(|it| it.name == disk || it.id.to_string() == disk);
    match found {
        Some(disk) => Ok((vm, disk)),
        None => {
            let detail = format!("VM '{}' has no disk '{disk}'", vm.name);
            Err(Problem::new(ErrorCode::NotFound, detail))
        }
    }
}

/// The detail of the event about the use of the disk's key.
fn told(vm: &Vm, disk: &Disk, request: &ExportDisk) -> String {
    let how = match request.format {
        ExportFormat::Raw | ExportFormat::Qcow2 => "IN THE CLEAR",
        ExportFormat::Luks2 => "under a passphrase",
        ExportFormat::Sealed => "still under the VM's key",
    };
    let (host, format) = (&vm.host_name, request.format.name());
    let kept = request.snapshot.as_ref().map(|name| format!(" at snapshot '{name}'"));
    let (name, kept, to) = (&disk.name, kept.unwrap_or_default(), request.to.display());
    let what = if disk.role == DiskRole::Tpm { "what the TPM keeps, of " } else { "" };
    format!("{what}disk '{name}'{kept} to {to} on host '{host}' as {format}, {how}")
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
        (false, Some(_)) => Err(Problem::invalid("passphrase", "is only for luks2")),
        (true, None) => Err(Problem::invalid("passphrase", "is needed for luks2")),
        _ => Ok(()),
    }
}

/// What a TPM keeps now is written as swtpm's file, which is raw and in the clear; no snapshot has such a file.
fn check_of_tpm(disk: &Disk, request: &ExportDisk) -> Result<(), Problem> {
    let (field, what) = match (&request.snapshot, request.format) {
        (Some(_), _) => (
            "snapshot",
            "no snapshot has what the VM's TPM kept as a file: export what it keeps now",
        ),
        (None, ExportFormat::Raw) => return Ok(()),
        (None, _) => {
            ("format", "in its place, what the VM's TPM keeps is exported, and that as raw alone")
        }
    };
    Err(Problem::invalid(field, format!("disk '{}' holds nothing: {what}", disk.name)))
}

async fn require_off(services: &Services, vm: &Vm) -> Result<(), Problem> {
    require_ready(vm)?;
    match power(services, vm).await? {
        None | Some(Power::Off) => return Ok(()),
        Some(Power::Suspended) => return Err(saved_memory::refusal_of_export(vm)),
        Some(_) => {}
    }
    let name = &vm.name;
    let detail = format!(
        "VM '{name}' is not off, and a disk that is written to cannot be exported: export a snapshot (vmseal snapshot create {name} NAME, then --snapshot NAME), or stop it first"
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// Shows how far the replica of a disk is behind now. Refused if the disk's policy has no replica, if its VM is
/// off, and if the disk is served without its replica.
pub async fn replica(
    services: &Services,
    caller: &Caller,
    vm: &str,
    disk: &str,
) -> Result<ReplicaStatus, Problem> {
    caller.require(Privilege::Read)?;
    let (vm, disk) = find(services, vm, disk).await?;
    require_ready(&vm)?;
    let agent = services.hosts.connected(vm.host)?;
    agent.replica(vm.id, disk.id).await
}
