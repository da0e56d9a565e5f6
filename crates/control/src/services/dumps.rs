//! Core dumps: what the memory of a guest holds, written encrypted beside its disks.

use jiff::Timestamp;
use vmseal_api::dump::DumpReason;
use vmseal_api::host::version::DUMP;
use vmseal_api::host::{DecryptDumpJob, DumpJob, JobSpec, Power};
use vmseal_api::id::{DiskId, DumpId};
use vmseal_api::limits::DUMPS_MAX;
use vmseal_api::model::{self, Page, Task};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::{DecryptDump, TakeDump};

use super::caller::{Caller, Privilege};
use super::vm_key::require_available;
use super::vms::{begin, find, find_ready, new_name, power, word};
use super::{Outcome, PageRequest, Services};
use crate::hosts::keys::Purpose;
use crate::operation::Operation;
use crate::store::disks::Disk;
use crate::store::dumps::{self, Dump};
use crate::store::events::NewEvent;
use crate::store::vms::Vm;

fn shown(vm: &Vm, dump: &Dump) -> model::Dump {
    model::Dump {
        id: dump.id,
        name: dump.name.clone(),
        vm: vm.name.clone(),
        format: dump.format,
        reason: dump.reason,
        created: dump.created,
        bytes: dump.bytes,
        encrypted: dump.encrypted,
    }
}

/// Lists the core dumps of a VM, oldest first.
pub async fn list(
    services: &Services,
    caller: &Caller,
    vm: &str,
    request: PageRequest,
) -> Result<Page<model::Dump>, Problem> {
    caller.require(Privilege::Read)?;
    let (vm, _) = find(services, vm).await?;
    let all = dumps::of_vm(&mut *services.store.read().await?, vm.id).await?;
    let part = request.part();
    let after = all.iter().filter(|known| known.id.to_string() > part.after);
    let items: Vec<_> = after.take(part.limit as usize).map(|dump| shown(&vm, dump)).collect();
    Ok(super::page_of(items, part.limit, |last| last.id.to_string()))
}

/// Shows a core dump.
pub async fn show(
    services: &Services,
    caller: &Caller,
    vm: &str,
    name: &str,
) -> Result<model::Dump, Problem> {
    caller.require(Privilege::Read)?;
    let (vm, _) = find(services, vm).await?;
    let all = dumps::of_vm(&mut *services.store.read().await?, vm.id).await?;
    Ok(shown(&vm, one(&vm, &all, name)?))
}

fn one<'a>(vm: &Vm, all: &'a [Dump], name: &str) -> Result<&'a Dump, Problem> {
    let found = all.iter().find(|known| known.name == name || known.id.to_string() == name);
    found.ok_or_else(|| {
        let detail = format!("VM '{}' has no core dump '{name}'", vm.name);
        Problem::new(ErrorCode::NotFound, detail)
    })
}

fn check_path(to: &std::path::Path) -> Result<(), Problem> {
    if to.is_absolute() && to.file_name().is_some() {
        return Ok(());
    }
    Err(Problem::invalid("to", "must be an absolute path that ends with a name"))
}

/// Writes a core dump of a VM's guest.
pub async fn take(
    services: &Services,
    caller: &Caller,
    vm: &str,
    request: TakeDump,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::DirectAccess)?;
    let (vm, disks) = find_ready(services, vm, DUMP, "write core dumps").await?;
    if request.decrypt_to.is_some() {
        require_privileges(caller, &vm)?;
    }
    let now = power(services, &vm).await?.unwrap_or(Power::Off);
    if now == Power::Suspended {
        let detail = format!(
            "VM '{0}' is suspended: a core dump is written of a guest that runs or is paused, and not of saved memory. Resume the VM first (vmseal vm resume {0}), then dump it (vmseal vm dump {0})",
            vm.name
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    if !matches!(now, Power::Running | Power::Paused | Power::Stopping) {
        let detail = format!(
            "VM '{}' is {}: only the memory of a guest that runs or is paused can be dumped",
            vm.name,
            word(now)
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    require_available(services, &vm, Purpose::Open).await?;
    if let Some(to) = &request.decrypt_to {
        examine(services, &vm, &disks, to, None).await?;
    }
    if dry_run && let Some(disk) = first(&disks) {
        let (dump, format) = (DumpId::new(), request.format);
        ask(services, &vm, JobSpec::Dump(DumpJob { dump, disk, format })).await?;
    }
    let mut write = services.store.write().await?;
    let known = dumps::of_vm(&mut write, vm.id).await?;
    if known.len() >= DUMPS_MAX {
        let detail = format!(
            "VM '{0}' has {DUMPS_MAX} core dumps: delete one first (vmseal dump list {0})",
            vm.name
        );
        return Err(Problem::new(ErrorCode::LimitExceeded, detail));
    }
    let dump = Dump {
        id: DumpId::new(),
        vm: vm.id,
        name: new_name(request.name, "dump", known.iter().map(|it| it.name.as_str()))?,
        format: request.format,
        reason: DumpReason::Request,
        created: Timestamp::now(),
        bytes: None,
        encrypted: vm.key.is_some(),
    };
    dumps::insert(&mut write, &dump).await?;
    if let Some(to) = &request.decrypt_to {
        tell_decryption(&mut write, caller, &vm, &dump.name, to).await?;
    }
    let operation = Operation::DumpVm { vm: vm.id, dump: dump.id, to: request.decrypt_to };
    begin(services, write, operation, &vm, caller, dry_run).await
}

/// Decrypts a core dump to a file of the VM's host.
pub async fn decrypt(
    services: &Services,
    caller: &Caller,
    vm: &str,
    name: &str,
    request: DecryptDump,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::DirectAccess)?;
    let (vm, disks) = find_ready(services, vm, DUMP, "write core dumps").await?;
    require_privileges(caller, &vm)?;
    let all = dumps::of_vm(&mut *services.store.read().await?, vm.id).await?;
    let dump = one(&vm, &all, name)?;
    if dump.bytes.is_none() {
        let detail = format!("core dump '{}' of VM '{}' is not whole yet", dump.name, vm.name);
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let to = request.to;
    examine(services, &vm, &disks, &to, Some(dump.id)).await?;
    let mut write = services.store.write().await?;
    tell_decryption(&mut write, caller, &vm, &dump.name, &to).await?;
    let operation = Operation::DecryptDump { vm: vm.id, dump: dump.id, to };
    begin(services, write, operation, &vm, caller, dry_run).await
}

/// Decrypting needs two privileges where the VM is encrypted.
fn require_privileges(caller: &Caller, vm: &Vm) -> Result<(), Problem> {
    caller.require(Privilege::DirectAccess)?;
    match vm.key {
        Some(_) => caller.require(Privilege::Decrypt),
        None => Ok(()),
    }
}

/// Checks what the host would refuse.
async fn examine(
    services: &Services,
    vm: &Vm,
    disks: &[Disk],
    to: &std::path::Path,
    dump: Option<DumpId>,
) -> Result<(), Problem> {
    check_path(to)?;
    let Some(disk) = first(disks) else { return Ok(()) };
    let (dump, to) = (dump.unwrap_or_default(), to.to_owned());
    ask(services, vm, JobSpec::DecryptDump(DecryptDumpJob { dump, disk, to })).await
}

/// The disk beside which core dumps are written.
fn first(disks: &[Disk]) -> Option<DiskId> {
    let found = disks.iter().find(|disk| disk.facts.is_some() && !disk.detached);
    found.map(|disk| disk.id)
}

/// Asks the VM's host whether it would do a job.
async fn ask(services: &Services, vm: &Vm, job: JobSpec) -> Result<(), Problem> {
    match services.hosts.connected(vm.host)?.examine_job(vm.id, job).await {
        // The task registers the VM, and delivers its key.
        Err(problem) if matches!(problem.code, ErrorCode::NotFound | ErrorCode::Locked) => Ok(()),
        answer => answer,
    }
}

/// The use of the key is an event before it happens.
async fn tell_decryption(
    write: &mut crate::store::Write<'_>,
    caller: &Caller,
    vm: &Vm,
    dump: &str,
    to: &std::path::Path,
) -> Result<(), Problem> {
    let (host, to) = (&vm.host_name, to.display());
    let detail = format!("core dump '{dump}' to {to} on host '{host}', IN THE CLEAR");
    let (kind, actor, target) = ("dump.decrypt", caller.name(), vm.name.as_str());
    Ok(write.event(NewEvent { kind, actor, target, detail: &detail }).await?)
}

/// Removes a core dump; the VM may run.
pub async fn delete(
    services: &Services,
    caller: &Caller,
    vm: &str,
    name: &str,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let (vm, _) = find_ready(services, vm, DUMP, "write core dumps").await?;
    let mut write = services.store.write().await?;
    let all = dumps::of_vm(&mut write, vm.id).await?;
    let operation = Operation::DeleteDump { vm: vm.id, dump: one(&vm, &all, name)?.id };
    begin(services, write, operation, &vm, caller, dry_run).await
}

/// How many core dumps a VM has.
pub(super) async fn count(services: &Services, vm: &Vm) -> Result<usize, Problem> {
    Ok(dumps::of_vm(&mut *services.store.read().await?, vm.id).await?.len())
}

/// Refuses what would leave core dumps that no key opens: `what` says why, and what else can be done.
pub(super) async fn require_none(services: &Services, vm: &Vm, what: &str) -> Result<(), Problem> {
    let known = dumps::of_vm(&mut *services.store.read().await?, vm.id).await?;
    let Some(first) = known.first() else { return Ok(()) };
    let detail = format!(
        "VM '{}' has core dumps, '{}' for one, and {what}, or {}",
        vm.name,
        first.name,
        deletion(vm, first)
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// How a VM comes to have no core dumps, of which this is one: decrypting them does not remove them.
pub(super) fn deletion(vm: &Vm, dump: &Dump) -> String {
    let (vm, dump) = (&vm.name, &dump.name);
    format!(
        "delete all of them (vmseal dump delete {vm} {dump}), and before that decrypt what is still needed of each (vmseal dump decrypt {vm} {dump} --to FILE)"
    )
}
