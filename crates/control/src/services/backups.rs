//! Backups of VMs: ciphertext in a directory of the VM's host, full or of what has changed.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use vmseal_api::host::backup::{BackedUpDisk, BackupManifest, BackupPlace, WITHOUT_MEMORY};
use vmseal_api::host::version::{BACKUP, BACKUP_SUSPENDED, SNAPSHOTS};
use vmseal_api::host::{DatastoreSpec, Device, DiskSpec, Power, VmSpec};
use vmseal_api::id::{BackupId, DatastoreId, DiskId, SnapshotId, VmId, check_name};
use vmseal_api::limits::{BACKUP_CHAIN_MAX, BACKUPS_MAX};
use vmseal_api::model::{self, BackupState, Lifecycle, Page, Task};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::{CreateBackup, RestoreBackup};

pub(crate) mod as_new;
mod reader;
mod replicas;
mod shared_keys;

use self::reader::{Reader, read_by};
use super::caller::{Caller, Privilege};
use super::create_vm::check_cpu_model;
use super::snapshots::{OF_REPLICATED, keepable, require_power};
use super::vm_key::require_available;
use super::vms::{
    begin, begin_named, begin_paced, find, find_ready, new_name, power, require_no_template,
    require_ready, word,
};
use super::{
    Outcome, PageRequest, Services, features, image_layouts, redundancy, temporary_snapshot,
};
use crate::hosts::keys::Purpose as KeyPurpose;
use crate::hosts::mounted;
use crate::hosts::osds;
use crate::operation::{Definition, Operation};
use crate::stalls;
use crate::store::backups::{self, Backup};
use crate::store::disks::Disk;
use crate::store::policies::Policy;
use crate::store::vms::Vm;
use crate::store::{Write, datastores, disks, policies, vms};
use crate::tasks::adopt_vm;
use crate::tasks::backups::{digest_of, is_beside, place};
use crate::tasks::temporary_snapshot::Purpose;

/// The backups of a VM, which may be deleted.
struct OfVm {
    id: VmId,
    /// None when it is deleted.
    vm: Option<Vm>,
    disks: Vec<Disk>,
    all: Vec<Backup>,
}

impl OfVm {
    async fn find(services: &Services, name: &str) -> Result<Self, Problem> {
        match find(services, name).await {
            Ok((vm, disks)) => {
                let all = backups::of_vm(&mut *services.store.read().await?, vm.id).await?;
                Ok(Self { id: vm.id, vm: Some(vm), disks, all })
            }
            Err(problem) if problem.code == ErrorCode::NotFound => {
                let mut read = services.store.read().await?;
                let id = backups::deleted_vm(&mut read, name).await?.ok_or(problem)?;
                // It may have another name since.
                let vm = vms::get(&mut read, id).await?;
                let disks = crate::store::disks::of_vm(&mut read, id).await?;
                let all = backups::of_vm(&mut read, id).await?;
                Ok(Self { id, vm, disks, all })
            }
            Err(problem) => Err(problem),
        }
    }

    /// Its name, or the one that it had.
    fn name(&self) -> &str {
        let last = || self.all.last().map(|backup| backup.vm_name.as_str());
        self.vm.as_ref().map(|vm| vm.name.as_str()).or_else(last).unwrap_or_default()
    }

    fn one(&self, name: &str) -> Result<&Backup, Problem> {
        let found = self.all.iter().find(|it| it.name == name || it.id.to_string() == name);
        found.ok_or_else(|| {
            let detail = format!("VM '{}' has no backup '{name}'", self.name());
            Problem::new(ErrorCode::NotFound, detail)
        })
    }

    /// The VM, which is needed.
    fn vm(&self) -> Result<&Vm, Problem> {
        self.vm.as_ref().ok_or_else(|| {
            let detail = format!(
                "VM '{0}' is deleted: restore it first (vmseal backup restore {0} BACKUP)",
                self.name()
            );
            Problem::new(ErrorCode::WrongState, detail)
        })
    }

    fn shown(&self, backup: &Backup) -> model::VmBackup {
        let vm = self.vm.as_ref().map(|vm| vm.name.clone());
        shown(vm, &self.all, backup)
    }
}

fn shown(vm: Option<String>, all: &[Backup], backup: &Backup) -> model::VmBackup {
    let name = |id: BackupId| {
        let known = all.iter().find(|it| it.id == id).map(|it| it.name.clone());
        known.unwrap_or_else(|| id.to_string())
    };
    model::VmBackup {
        id: backup.id,
        name: backup.name.clone(),
        vm_deleted: vm.is_none(),
        vm: vm.unwrap_or_else(|| backup.vm_name.clone()),
        vm_id: backup.vm,
        created: backup.created,
        state: backup.state,
        host: backup.host_name.clone(),
        directory: backup.directory.clone(),
        parent: backup.parent.map(name),
        bytes: backup.bytes,
        read_bytes: backup.read_bytes,
        quiesced: backup.quiesced,
        verified: backup.verified,
        verification_failed: backup.failed.clone(),
        key: backup.key.clone(),
        contents: backup.contents.clone(),
    }
}

/// Lists the backups of all VMs, also of deleted ones, oldest first.
pub async fn list_all(
    services: &Services,
    caller: &Caller,
    request: PageRequest,
) -> Result<Page<model::VmBackup>, Problem> {
    caller.require(Privilege::Read)?;
    let part = request.part();
    let mut read = services.store.read().await?;
    let found = backups::page(&mut read, &part.after, part.limit).await?;
    let mut items = Vec::new();
    for backup in &found {
        let vm = vms::get(&mut read, backup.vm).await?.map(|vm| vm.name);
        let all = backups::of_vm(&mut read, backup.vm).await?;
        items.push(shown(vm, &all, backup));
    }
    Ok(super::page_of(items, part.limit, |last| last.id.to_string()))
}

/// Lists the backups of a VM, which may be deleted, oldest first.
pub async fn list(
    services: &Services,
    caller: &Caller,
    vm: &str,
    request: PageRequest,
) -> Result<Page<model::VmBackup>, Problem> {
    caller.require(Privilege::Read)?;
    let of = OfVm::find(services, vm).await?;
    let part = request.part();
    let after = of.all.iter().filter(|known| known.id.to_string() > part.after);
    let items: Vec<_> = after.take(part.limit as usize).map(|backup| of.shown(backup)).collect();
    Ok(super::page_of(items, part.limit, |last| last.id.to_string()))
}

/// Shows a backup. What is in one of an earlier version its host says, where that answers.
pub async fn show(
    services: &Services,
    caller: &Caller,
    vm: &str,
    name: &str,
) -> Result<model::VmBackup, Problem> {
    caller.require(Privilege::Read)?;
    let of = OfVm::find(services, vm).await?;
    let backup = of.one(name)?;
    let mut shown = of.shown(backup);
    if backup.contents.is_none()
        && backup.state == BackupState::Ready
        && let Ok(agent) = services.hosts.connected(backup.host)
    {
        let manifest = agent.read_backup(place(backup)).await;
        shown.contents = manifest.ok().map(|manifest| manifest.contents());
    }
    Ok(shown)
}

/// Backs up the disks of a VM, which may run or be suspended.
pub async fn create(
    services: &Services,
    caller: &Caller,
    vm: &str,
    request: CreateBackup,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::DirectAccess)?;
    let (vm, _) = find_ready(services, vm, SNAPSHOTS, "take snapshots").await?;
    features::require(services, &vm, BACKUP, "back VMs up")?;
    let suspended = is_suspended(services, &vm).await?;
    require_available(services, &vm, KeyPurpose::Open).await?;
    let pace = super::tasks::work_pace(services, &vm, request.rate)?;
    if let Some(directory) = &request.directory {
        check_directory(services, &vm, directory).await?;
    }
    if !request.full {
        reads_those_before(services, &vm, request.directory.as_deref(), caller, dry_run).await?;
    }
    let mut write = services.store.write().await?;
    let all = backups::of_vm(&mut write, vm.id).await?;
    if all.len() >= BACKUPS_MAX {
        let detail = format!("VM '{}' has {BACKUPS_MAX} backups: delete one first", vm.name);
        return Err(Problem::new(ErrorCode::LimitExceeded, detail));
    }
    let directory = directory(&vm, &all, request.directory)?;
    let parent = if request.full { None } else { parent(&vm, &all, &directory) };
    let name = new_name(request.name, "backup", all.iter().map(|it| it.name.as_str()))?;
    let snapshot = kept_for_it(services, &mut write, &vm).await?;
    let backup = Backup {
        id: BackupId::new(),
        vm: vm.id,
        vm_name: vm.name.clone(),
        host: vm.host,
        host_name: vm.host_name.clone(),
        name,
        directory,
        created: Timestamp::now(),
        state: BackupState::Creating,
        parent,
        quiesced: None,
        bytes: None,
        read_bytes: None,
        verified: None,
        failed: None,
        key: vm.key.clone(),
        contents: None,
    };
    backups::insert(&mut write, &backup).await?;
    let (backup, quiesce) = (backup.id, request.quiesce);
    let operation = Operation::BackUpVm { vm: vm.id, backup, snapshot, quiesce };
    let mut begun = begin_paced(services, write, operation, &vm, caller, (pace, dry_run)).await?;
    if let (Outcome::Planned(plan), true) = (&mut begun, suspended) {
        plan.warnings.push(format!("VM '{}' is suspended: {WITHOUT_MEMORY}", vm.name));
    }
    Ok(begun)
}

/// Checks that a VM can be backed up as it is now; returns whether it is suspended.
async fn is_suspended(services: &Services, vm: &Vm) -> Result<bool, Problem> {
    match power(services, vm).await? {
        None | Some(Power::Off | Power::Running | Power::Paused) => Ok(false),
        Some(Power::Suspended) => {
            features::require(services, vm, BACKUP_SUSPENDED, "back up VMs that are suspended")?;
            Ok(true)
        }
        Some(now) => {
            let detail = format!(
                "VM '{}' is {}: backups are made while it runs, is paused, suspended or off",
                vm.name,
                word(now)
            );
            Err(Problem::new(ErrorCode::WrongState, detail))
        }
    }
}

/// Has a VM's host read the backups that it finds of those that another host has written, so that a new one can be above them.
async fn reads_those_before(
    services: &Services,
    vm: &Vm,
    directory: Option<&Path>,
    caller: &Caller,
    dry_run: bool,
) -> Result<(), Problem> {
    let all = backups::of_vm(&mut *services.store.read().await?, vm.id).await?;
    let in_directory = |it: &&Backup| directory.is_none_or(|asked| asked == it.directory);
    let newest = all.iter().rev().filter(in_directory).find(|it| it.state == BackupState::Ready);
    let Some(newest) = newest.filter(|it| it.host != vm.host) else { return Ok(()) };
    match read_by(services, newest, host_of(vm), caller.name(), dry_run).await {
        Err(problem) if problem.code == ErrorCode::WrongState => {
            tracing::info!(vm = %vm.id, why = problem.detail, "its next backup is a full one");
            Ok(())
        }
        other => other.map(drop),
    }
}

/// The directory of a new backup.
fn directory(vm: &Vm, all: &[Backup], asked: Option<PathBuf>) -> Result<PathBuf, Problem> {
    let last = || all.iter().rev().find(|it| it.host == vm.host).map(|it| it.directory.clone());
    let chosen = asked.or_else(last).ok_or_else(|| {
        let what = format!("is needed, as VM '{}' has no backup yet", vm.name);
        Problem::invalid("directory", what)
    })?;
    check_path(&chosen).map(|()| chosen)
}

fn check_path(directory: &Path) -> Result<(), Problem> {
    match directory.is_absolute() && directory.to_str().is_some() {
        true => Ok(()),
        false => Err(Problem::invalid("directory", "must be an absolute path in UTF-8")),
    }
}

/// Checks that a VM's host may write backups to a directory: it looks for one there.
async fn check_directory(services: &Services, vm: &Vm, directory: &Path) -> Result<(), Problem> {
    check_path(directory)?;
    let (directory, backup) = (directory.to_owned(), BackupId::new());
    let place = BackupPlace { directory, vm: vm.id, backup };
    match services.hosts.connected(vm.host)?.read_backup(place).await {
        Err(problem) if problem.code != ErrorCode::NotFound => Err(problem),
        _ => Ok(()),
    }
}

/// The backup that a new one can be above: the newest in its directory, unless too many are above each other, or one of them was
/// not found whole.
fn parent(vm: &Vm, all: &[Backup], directory: &Path) -> Option<BackupId> {
    let whole = all.iter().rev().filter(|it| it.state == BackupState::Ready);
    let newest = whole.into_iter().find(|it| it.host == vm.host && it.directory == directory)?;
    let (mut length, mut below) = (1, newest.parent);
    let mut failed = newest.failed.is_some();
    while let Some(id) = below
        && length < BACKUP_CHAIN_MAX
    {
        let under = all.iter().find(|it| it.id == id);
        failed |= under.is_some_and(|it| it.failed.is_some());
        below = under.and_then(|it| it.parent);
        length += 1;
    }
    if failed {
        return None;
    }
    (length < BACKUP_CHAIN_MAX).then_some(newest.id)
}

/// The row of the snapshot that keeps what is backed up.
async fn kept_for_it(
    services: &Services,
    write: &mut Write<'_>,
    vm: &Vm,
) -> Result<SnapshotId, Problem> {
    let disks = crate::store::disks::of_vm(write, vm.id).await?;
    let kept = keepable(services, vm, &disks, OF_REPLICATED)?;
    if kept.is_empty() {
        let detail = format!("VM '{}' has no disk that can be backed up", vm.name);
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let snapshot = temporary_snapshot::reserve(write, vm, Purpose::Backup, kept).await?;
    Ok(snapshot.id)
}

fn require_whole(of: &OfVm, backup: &Backup) -> Result<(), Problem> {
    let is = match backup.state {
        BackupState::Ready => return Ok(()),
        BackupState::Creating => "not whole yet",
        BackupState::Deleting => "being deleted",
    };
    let detail = format!("backup '{}' of VM '{}' is {is}", backup.name, of.name());
    Err(Problem::new(ErrorCode::WrongState, detail))
}

fn host_of(vm: &Vm) -> Reader<'_> {
    Reader { id: vm.host, name: &vm.host_name }
}

/// Reads all of a backup, and checks that it is whole and opens with its key.
pub async fn verify(
    services: &Services,
    caller: &Caller,
    vm: &str,
    name: &str,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let of = OfVm::find(services, vm).await?;
    let (backup, vm) = (of.one(name)?, of.vm()?);
    require_whole(&of, backup)?;
    require_ready(vm)?;
    features::require(services, vm, BACKUP, "back VMs up")?;
    let backup = read_by(services, backup, host_of(vm), caller.name(), dry_run).await?;
    let write = services.store.write().await?;
    let operation = Operation::VerifyBackup { vm: vm.id, backup: backup.id };
    begin(services, write, operation, vm, caller, dry_run).await
}

/// Has the disks of a VM that is off hold what a backup has, makes a VM again that was deleted, or makes a new one.
pub async fn restore(
    services: &Services,
    caller: &Caller,
    vm: &str,
    name: &str,
    request: RestoreBackup,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    if let Some(name) = &request.name {
        check_name(name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    }
    if let Some(new) = &request.new_vm {
        as_new::check(&request, new)?;
    }
    let of = OfVm::find(services, vm).await?;
    let backup = of.one(name)?;
    require_whole(&of, backup)?;
    let asked = match &request.host {
        Some(name) => Some(super::hosts::find(services, name).await?),
        None => None,
    };
    let asked = asked.as_ref().map(|host| Reader { id: host.id, name: &host.name });
    let of_backup = Reader { id: backup.host, name: &backup.host_name };
    if request.new_vm.is_some() {
        let by = asked.unwrap_or(of_backup);
        return as_new::restore(services, caller, (&of, backup, by), &request, dry_run).await;
    }
    let reader = of.vm.as_ref().map(host_of).or(asked).unwrap_or(of_backup);
    let backup = &read_by(services, backup, reader, caller.name(), dry_run).await?;
    shared_keys::require_of_reader(services, backup).await?;
    let manifest = manifest_of(services, backup).await?;
    let Some(vm) = &of.vm else {
        return restore_deleted(services, caller, backup, manifest, &request, dry_run).await;
    };
    if request != RestoreBackup::default() {
        let detail = format!(
            "VM '{}' exists, and its disks are restored in their places: another name, host, datastore or policy can be given for a VM that was deleted, or for a new VM (--as NAME)",
            vm.name
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    require_ready(vm)?;
    require_no_template(vm)?;
    features::require(services, vm, BACKUP, "back VMs up")?;
    let beside = beside(vm, backup);
    let remedy = format!("stop it first (vmseal vm stop {}), or {beside}", vm.name);
    require_power(services, vm, &[Power::Off], &remedy).await?;
    super::snapshots::require_none(services, vm, "its disks would not follow").await.map_err(
        |problem| Problem { detail: format!("{}, or {beside}", problem.detail), ..problem },
    )?;
    let disks = restored(services, (&of, vm), &manifest, &beside)?;
    let write = services.store.write().await?;
    let operation = Operation::RestoreBackup { vm: vm.id, backup: backup.id, disks };
    let begun = begin(services, write, operation, vm, caller, dry_run).await;
    begun.map(|begun| warned(begun, &manifest, "stays as it is"))
}

/// The manifest of a backup as its host reads it now: of the VM and the key that the inventory has of it.
async fn manifest_of(services: &Services, backup: &Backup) -> Result<BackupManifest, Problem> {
    let manifest = services.hosts.connected(backup.host)?.read_backup(place(backup)).await?;
    if manifest.vm.key == backup.key && manifest.vm.vm == backup.vm {
        return Ok(manifest);
    }
    let detail = format!(
        "the manifest of backup '{}' names another VM or key than the inventory: it was changed",
        backup.name
    );
    Err(Problem::new(ErrorCode::Damaged, detail))
}

/// What is possible whatever the VM is now.
fn beside(vm: &Vm, backup: &Backup) -> String {
    format!(
        "restore it as another VM beside this one (vmseal backup restore {} {} --as NAME)",
        vm.name, backup.name
    )
}

/// What is said of the memory of a VM that was suspended when it was backed up.
fn without_memory(manifest: &BackupManifest) -> Option<String> {
    let said = || format!("the VM was suspended when it was backed up: {WITHOUT_MEMORY}");
    manifest.suspended.then(said)
}

/// Has a plan say what is not restored; `then` says what becomes of that.
fn warned(mut begun: Outcome<Task>, manifest: &BackupManifest, then: &str) -> Outcome<Task> {
    if let Outcome::Planned(plan) = &mut begun {
        let lacks = manifest.contents().lacks;
        let warnings = lacks.iter().map(|it| format!("'{}' is not in it, and {then}", it.name));
        plan.warnings.extend(warnings);
        plan.warnings.extend(without_memory(manifest));
    }
    begun
}

/// The disks that are restored: those of the VM that are in the backup. One that its guest writes to and that is not would be of
/// another time; what no guest writes to stays as it is.
fn restored(
    services: &Services,
    (of, vm): (&OfVm, &Vm),
    manifest: &BackupManifest,
    otherwise: &str,
) -> Result<Vec<DiskId>, Problem> {
    let backed_up: HashSet<DiskId> = manifest.disks.iter().map(|disk| disk.disk).collect();
    let refused = |what: String| Problem::new(ErrorCode::WrongState, what);
    let kept = keepable(services, vm, &of.disks, replicas::RESTORE)?;
    let named = |id: &DiskId| of.disks.iter().find(|disk| disk.id == *id).map(|it| &it.name);
    if let Some(newer) = kept.iter().find(|disk| !backed_up.contains(disk)) {
        let name = named(newer).cloned().unwrap_or_default();
        return Err(refused(format!(
            "disk '{name}' of VM '{}' is not in backup '{}': remove it first (vmseal disk remove), or {otherwise}",
            vm.name, manifest.name
        )));
    }
    for entry in &manifest.disks {
        let now = of.disks.iter().find(|disk| disk.id == entry.disk);
        let Some(now) = now else {
            return Err(refused(format!(
                "disk '{}', which is in backup '{}', was removed from VM '{}'. Delete the VM, and restore it as a whole, or {otherwise}",
                entry.name, manifest.name, vm.name
            )));
        };
        let then = entry.facts != vmseal_api::host::DiskFacts::Raw;
        if then != now.encrypted {
            let (was, is) =
                if then { ("encrypted", "is not") } else { ("in the clear", "is encrypted") };
            return Err(refused(format!(
                "disk '{}' was {was} when it was backed up, and {is} now, so this backup cannot be restored into this VM: {otherwise}",
                entry.name
            )));
        }
    }
    let beside = of.disks.iter().filter(|disk| is_beside(disk.role));
    let beside = beside.map(|disk| disk.id).filter(|disk| backed_up.contains(disk));
    Ok(kept.into_iter().chain(beside).collect())
}

/// Makes a VM again that was deleted, as it was when it was backed up.
async fn restore_deleted(
    services: &Services,
    caller: &Caller,
    backup: &Backup,
    manifest: BackupManifest,
    request: &RestoreBackup,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    let encrypted = manifest.vm.key.is_some();
    caller.require(if encrypted { Privilege::EncryptNew } else { Privilege::VmConfigure })?;
    if !services.hosts.view(backup.host).has(BACKUP) {
        let detail = format!(
            "the agent of host '{}' cannot back VMs up: upgrade vmseal there",
            backup.host_name
        );
        return Err(Problem::new(ErrorCode::Unsupported, detail));
    }
    let mut write = services.store.write().await?;
    let definition = define(&mut write, backup, &manifest, request).await?;
    let vm = Vm { lifecycle: Lifecycle::Creating, ..adopt_vm::row(&definition) };
    adopt_vm::insert_rows(&mut write, &definition, &vm).await?;
    let made = disks::of_vm(&mut write, vm.id).await?;
    require_places(services, &mut write, &vm, &made).await?;
    replicas::require(services, backup, &made)?;
    let disks = made.iter().map(|disk| disk.id).collect();
    let (backup, digest) = (backup.id, digest_of(&manifest));
    let operation = Operation::RestoreDeletedVm { vm: vm.id, backup, disks, manifest: digest };
    let begun = begin(services, write, operation, &vm, caller, dry_run).await;
    begun.map(|begun| warned(begun, &manifest, "the VM will not have it"))
}

/// Refuses disks in places that are not as the VM's policy has them: pools of Ceph with open connections, without encrypted OSDs,
/// or with less redundancy.
async fn require_places(
    services: &Services,
    write: &mut Write<'_>,
    vm: &Vm,
    made: &[Disk],
) -> Result<(), Problem> {
    let policy = policies::find(write, &vm.policy.to_string()).await?;
    let policy = policy.ok_or_else(|| Problem::not_found("policy", vm.policy.to_string()))?;
    mounted::require_messenger(write, &policy, vm.host, made).await?;
    osds::require(write, &policy, made).await?;
    image_layouts::require(services, (vm.host, &vm.host_name), &policy, made)?;
    stalls::require(&services.hosts, (vm.host, &vm.host_name), &policy)?;
    redundancy::require(write, &policy, made).await
}

/// The VM that a manifest describes, on the datastores that its host has still, or on the one that is asked for.
pub(crate) async fn define(
    write: &mut Write<'_>,
    backup: &Backup,
    manifest: &BackupManifest,
    request: &RestoreBackup,
) -> Result<Definition, Problem> {
    let of = &manifest.vm;
    let refused = |what: String| Problem::new(ErrorCode::WrongState, what);
    if of.vm != backup.vm || of.key != backup.key {
        return Err(refused(format!(
            "the manifest of backup '{}' is of another VM or key",
            backup.name
        )));
    }
    let (Some(vcpus), Some(memory)) = (of.vcpus, of.memory) else {
        return Err(refused(format!(
            "the manifest of backup '{}' describes no machine",
            backup.name
        )));
    };
    let policy = policy(write, backup, manifest, request).await?;
    let known = datastores::of_host(write, backup.host).await?;
    let wanted = request.datastore.as_ref().map(|wanted| {
        let is_it =
            |it: &&datastores::Datastore| it.name == *wanted || it.id.to_string() == *wanted;
        known.iter().find(is_it).map(|it| it.id).ok_or_else(|| {
            let what = format!("host '{}' has no datastore '{wanted}'", backup.host_name);
            Problem {
                field: Some("datastore".to_owned()),
                ..Problem::new(ErrorCode::NotFound, what)
            }
        })
    });
    let wanted = wanted.transpose()?;
    let places: Vec<DatastoreSpec> =
        known.iter().filter_map(|it| it.spec_on(backup.host)).collect();
    let disks = manifest.disks.iter().map(|entry| disk(manifest, entry, &places, wanted, backup));
    let mut disks = disks.collect::<Result<Vec<_>, _>>()?;
    replicas::place(write, &policy, backup, &mut disks).await?;
    let nics = of.nics.iter().cloned().map(Device::Nic);
    let name = request.new_vm.as_ref().or(request.name.as_ref());
    let mut hardware = of.hardware.clone();
    // A TPM without what it kept would lock its guest out of what that has sealed.
    hardware.tpm &= manifest.disks.iter().any(|disk| disk.tpm.is_some());
    Ok(Definition {
        spec: VmSpec {
            vm: of.vm,
            name: name.cloned().unwrap_or_else(|| of.name.clone()),
            vcpus,
            memory,
            policy: Some(policy.name.clone()),
            key: of.key.clone(),
            hardware,
            devices: disks.into_iter().map(Device::Disk).chain(nics).collect(),
            snapshots: Vec::new(),
            images: Some(policy.image_layout),
            about: None,
        },
        host: backup.host,
        host_name: backup.host_name.clone(),
        policy: policy.id,
        policy_name: policy.name,
        replaces: None,
        replaces_devices: None,
        replaces_snapshots: None,
        memories: Vec::new(),
    })
}

/// The policy of a VM that is made of a backup: the one that is asked for, else the one that it had.
async fn policy(
    write: &mut Write<'_>,
    backup: &Backup,
    manifest: &BackupManifest,
    request: &RestoreBackup,
) -> Result<Policy, Problem> {
    let (name, had) = match &request.policy {
        Some(asked) => (asked.clone(), ""),
        None => (manifest.vm.policy.clone().unwrap_or_default(), ", which the VM had,"),
    };
    let field = request.policy.as_ref().map(|_| "policy".to_owned());
    let refused = |what: &str| {
        let what = format!("policy '{name}'{had} {what}: name another one (--policy)");
        Problem { field: field.clone(), ..Problem::new(ErrorCode::WrongState, what) }
    };
    let found = policies::find(write, &name).await?;
    let found = found.ok_or_else(|| refused("is not there"))?;
    // A new VM has a key if its disks need one: that of a decrypted VM may have been kept for its TPM alone.
    let encrypted = match request.new_vm {
        Some(_) => as_new::is_encrypted(manifest),
        None => backup.key.is_some(),
    };
    match (found.encryption, encrypted) {
        (true, false) => return Err(refused("encrypts, and the backup is in the clear")),
        (false, true) => return Err(refused("does not encrypt, and the backup is encrypted")),
        _ => {}
    }
    if request.policy.is_some() {
        let checked = check_cpu_model(&found, manifest.vm.hardware.cpu_model.as_deref());
        checked.map_err(|problem| Problem { field: field.clone(), ..problem })?;
    }
    Ok(found)
}

fn disk(
    manifest: &BackupManifest,
    entry: &BackedUpDisk,
    places: &[DatastoreSpec],
    wanted: Option<DatastoreId>,
    backup: &Backup,
) -> Result<DiskSpec, Problem> {
    let refused = |what: String| Problem::new(ErrorCode::WrongState, what);
    let of = manifest.vm.disks.iter().find(|disk| disk.disk == entry.disk);
    let of = of.ok_or_else(|| refused(format!("the manifest lacks disk '{}'", entry.name)))?;
    let place = wanted.or(of.datastore);
    let there = places.iter().find(|known| Some(known.datastore) == place);
    let datastore = there.cloned().ok_or_else(|| {
        let id = of.datastore.map(|id| id.to_string()).unwrap_or_default();
        refused(format!(
            "disk '{}' was on datastore {id}, which host '{}' does not have: add it first (vmseal datastore add), or name another one (--datastore)",
            of.name, backup.host_name
        ))
    })?;
    Ok(DiskSpec {
        disk: of.disk,
        name: of.name.clone(),
        datastore,
        size: of.size,
        encrypted: of.encrypted,
        role: of.role,
        allocation: of.allocation,
        limits: of.limits,
        cache: of.cache,
        replica: None,
        facts: Some(entry.facts.clone()),
    })
}

/// Deletes a backup, also of a deleted VM.
pub async fn delete(
    services: &Services,
    caller: &Caller,
    vm: &str,
    name: &str,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let of = OfVm::find(services, vm).await?;
    let backup = of.one(name)?;
    let above: Vec<_> =
        of.all.iter().filter(|it| it.parent == Some(backup.id)).map(|it| &*it.name).collect();
    if !above.is_empty() {
        let detail = format!(
            "backup '{}' of VM '{}' is needed by {}: delete those first",
            backup.name,
            of.name(),
            above.join(", ")
        );
        return Err(Problem::new(ErrorCode::InUse, detail));
    }
    let write = services.store.write().await?;
    let operation = Operation::DeleteBackup { vm: of.id, backup: backup.id };
    let keyless = of.vm.as_ref().map_or(backup.key.is_none(), |vm| vm.provider.is_none());
    begin_named(
        services,
        write,
        operation,
        (of.name(), keyless),
        caller,
        (CopyPace::default(), dry_run),
    )
    .await
}
