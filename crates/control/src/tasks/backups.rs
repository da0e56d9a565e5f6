//! Backs up a VM, verifies a backup, restores one, and deletes one.
//!
//! ```text
//! create   reserve (rows are there) ─► prepare ─► take a snapshot ─► write ─► name ─► record (commit) ─► drop the snapshot
//!          ─► drop what earlier backups have left
//! verify   prepare ─► read all of it ─► record
//! restore  check that the VM is off ─► prepare ─► write new images ─► decide (commit) ─► use them ─► record
//!          of a deleted VM: reserve (rows are there) ─► prepare ─► write ─► use ─► record (commit)
//!          as a new VM: reserve (rows are there) ─► key ─► register ─► keys ─► its TPM ─► mark ─► write ─► use ─► record (commit)
//! delete   mark (commit) ─► remove the files ─► destroy keys that nothing needs ─► remove the row
//! ```
//! A backup is undone as a whole: its snapshot is dropped, and its directory is removed, whether it has its name or not. Host
//! and inventory agree on which backups there are, but for what is done by hand.

mod dropping;
mod marking;
mod new_tpm;
mod told;

use async_trait::async_trait;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use vmseal_api::host::backup::{BackupContents, BackupManifest, BackupPlace};
use vmseal_api::host::version::{TRACKED_BACKUP, WHOLE_BACKUP};
use vmseal_api::host::{
    BackupJob, BackupKey, DiskFacts, DiskRole, HostAgent, JobKind, JobSpec, Power,
    RestoreBackupJob, RestoredFrom, Tracked, VerifyBackupJob,
};
use vmseal_api::id::{BackupId, DiskId, SnapshotId};
use vmseal_api::model::{BackupState, FailedVerification, Lifecycle};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::size::Size;
use vmseal_secret::digest::sha256;

use self::dropping::{drop_snapshot, remove_written};
use super::create_vm::{self, CreateVmStep};
use super::job::{first_disk, follow, put};
use super::run::{Run, StepError, absent_is_fine, internal, register, state_of};
use super::start_vm::{locked, prepare};
use super::step::{Limit, Output, Step, WaitPolicy};
use super::temporary_snapshot::{self, drop_left};
use crate::hosts::keys::{self as delivery, Purpose};
use crate::operation::Operation;
use crate::store::backups::{self, Backup};
use crate::store::events::NewEvent;
use crate::store::snapshots::{self, Snapshot};
use crate::store::vms::Vm;
use crate::store::{disks, keys, vms};

/// The steps of the operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BackupStep {
    Reserve,
    Prepare,
    Take,
    Write,
    Name,
    Record,
    DropSnapshot,
    DropLeft,
    Verify,
    RecordVerified,
    CheckOff,
    WriteImages,
    Decide,
    UseImages,
    RecordRestored,
    ReserveVm,
    MakeTpm,
    UseFirstImages,
    RecordVm,
    Mark,
    RemoveFiles,
    DestroyKeys,
    RemoveRow,
}

pub(crate) const CREATE: &[&dyn Step] = &[
    &BackupStep::Reserve,
    &BackupStep::Prepare,
    &BackupStep::Take,
    &BackupStep::Write,
    &BackupStep::Name,
    &BackupStep::Record,
    &BackupStep::DropSnapshot,
    &BackupStep::DropLeft,
];

pub(crate) const VERIFY: &[&dyn Step] =
    &[&BackupStep::Prepare, &BackupStep::Verify, &BackupStep::RecordVerified];

pub(crate) const RESTORE: &[&dyn Step] = &[
    &BackupStep::CheckOff,
    &BackupStep::Prepare,
    &BackupStep::WriteImages,
    &BackupStep::Decide,
    &BackupStep::UseImages,
    &BackupStep::RecordRestored,
];

pub(crate) const RESTORE_DELETED: &[&dyn Step] = &[
    &BackupStep::ReserveVm,
    &BackupStep::Prepare,
    &BackupStep::WriteImages,
    &BackupStep::UseFirstImages,
    &BackupStep::RecordVm,
];

pub(crate) const RESTORE_NEW: &[&dyn Step] = &[
    &CreateVmStep::Reserve,
    &CreateVmStep::MakeKey,
    &CreateVmStep::Register,
    &CreateVmStep::DeliverKey,
    &BackupStep::MakeTpm,
    &marking::MarkOrigin,
    &BackupStep::WriteImages,
    &BackupStep::UseFirstImages,
    &BackupStep::RecordVm,
];

pub(crate) const DELETE: &[&dyn Step] = &[
    &BackupStep::Mark,
    &BackupStep::RemoveFiles,
    &BackupStep::DestroyKeys,
    &BackupStep::RemoveRow,
];

#[async_trait]
impl Step for BackupStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::Prepare => "prepare",
            Self::Take => "take",
            Self::Write => "write",
            Self::Name => "name",
            Self::Record => "record",
            Self::DropSnapshot => "drop-snapshot",
            Self::DropLeft => "drop-left",
            Self::Verify => "verify",
            Self::RecordVerified => "record-verified",
            Self::CheckOff => "check-off",
            Self::WriteImages => "write-images",
            Self::Decide => "decide",
            Self::UseImages => "use-images",
            Self::RecordRestored => "record-restored",
            Self::ReserveVm => "reserve-vm",
            Self::MakeTpm => "make-tpm",
            Self::UseFirstImages => "use-first-images",
            Self::RecordVm => "record-vm",
            Self::Mark => "mark",
            Self::RemoveFiles => "remove-files",
            Self::DestroyKeys => "destroy-keys",
            Self::RemoveRow => "remove-row",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Reserve => "reserve its name",
            Self::Prepare => "register and deliver the key",
            Self::Take => "keep what the disks hold",
            Self::Write => "write the backup",
            Self::Name => "give the backup its name",
            Self::Record => "record the backup",
            Self::DropSnapshot => "merge what was kept for it",
            Self::DropLeft => "merge what an earlier backup has left",
            Self::Verify => "read all of the backup",
            Self::RecordVerified => "record that it was verified",
            Self::CheckOff => "check that the VM is off",
            Self::WriteImages => "write new images of the disks",
            Self::Decide => "go on to the end",
            Self::UseImages | Self::UseFirstImages => "use the new images",
            Self::RecordRestored => "record what the disks hold",
            Self::ReserveVm => "reserve the name of the VM",
            Self::MakeTpm => "make its TPM, if it has one",
            Self::RecordVm => "record the VM",
            Self::Mark => "mark the backup as being deleted",
            Self::RemoveFiles => "remove its files",
            Self::DestroyKeys => "destroy keys that nothing needs",
            Self::RemoveRow => "remove it from the inventory",
        }
    }

    fn needs_key(&self) -> bool {
        // What a TPM keeps is never in the clear.
        matches!(self, Self::DestroyKeys | Self::MakeTpm)
    }

    fn commits(&self) -> bool {
        matches!(self, Self::Record | Self::Decide | Self::RecordVm | Self::Mark)
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            // Hours of copying are not thrown away because the host is away for a while.
            Self::Write
            | Self::Name
            | Self::DropSnapshot
            | Self::DropLeft
            | Self::Verify
            | Self::MakeTpm
            | Self::WriteImages
            | Self::UseImages
            | Self::UseFirstImages
            | Self::RecordRestored
            | Self::RecordVm
            | Self::RemoveFiles
            | Self::DestroyKeys => WaitPolicy::BOTH,
            _ => WaitPolicy::NONE,
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::Prepare | Self::DestroyKeys => Some(Limit::Provider),
            Self::Write
            | Self::DropSnapshot
            | Self::DropLeft
            | Self::Verify
            | Self::WriteImages => Some(Limit::Copy),
            Self::MakeTpm => Some(Limit::Short),
            _ => None,
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Take => return take(run).await.map(|taken| Output::of(&taken)),
            Self::Write => return write(run).await.map(|written| Output::of(&written)),
            Self::WriteImages => return write_images(run).await.map(|facts| Output::of(&facts)),
            // The new images are used one after another: from here on all of them are.
            Self::Reserve | Self::ReserveVm | Self::Decide => Ok(()),
            Self::Prepare => prepare(run).await,
            Self::Name => name(run).await,
            Self::Record => record(run).await,
            Self::DropSnapshot => drop_snapshot(run).await,
            Self::DropLeft => drop_left(run).await,
            Self::Verify => verify(run).await,
            Self::RecordVerified => record_verified(run).await,
            Self::CheckOff => check_off(run).await,
            Self::MakeTpm => new_tpm::make(run).await,
            Self::UseImages | Self::UseFirstImages => use_images(run).await,
            Self::RecordRestored => record_restored(run).await,
            Self::RecordVm => record_vm(run).await,
            Self::Mark => mark(run).await,
            Self::RemoveFiles => remove_files(run).await,
            Self::DestroyKeys => destroy_keys(run).await,
            Self::RemoveRow => remove_row(run).await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
        match self {
            Self::Reserve => unreserve(run).await,
            Self::Take => drop_snapshot(run).await,
            Self::Write | Self::Name => remove_written(run).await,
            Self::Verify => {
                cancel(run, verification(run, None).await?).await?;
                record_failed(run, cause).await
            }
            // Of a backup that was deleted meanwhile nothing was read.
            Self::WriteImages if find(run).await?.is_none() => Ok(()),
            Self::WriteImages => cancel(run, restoration(run, None).await?).await,
            Self::RecordVerified => set_verified(run, None).await,
            // There are no other disks yet.
            Self::MakeTpm => create_vm::delete_disks(run).await,
            Self::UseFirstImages => remove_first_images(run).await,
            Self::RecordVm => create_vm::unfinish(run).await,
            Self::ReserveVm => unreserve_vm(run).await,
            Self::Mark => set_state(run, BackupState::Ready).await,
            // Nothing was done, or it is past the commit step.
            _ => Ok(()),
        }
    }
}

fn id(run: &Run<'_>) -> Result<BackupId, StepError> {
    match run.task.operation {
        Operation::BackUpVm { backup, .. }
        | Operation::VerifyBackup { backup, .. }
        | Operation::RestoreBackup { backup, .. }
        | Operation::RestoreDeletedVm { backup, .. }
        | Operation::RestoreNewVm { backup, .. }
        | Operation::DeleteBackup { backup, .. } => Ok(backup),
        _ => Err(internal("the task is about no backup")),
    }
}

/// The backup of the task; none if it is removed.
async fn find(run: &Run<'_>) -> Result<Option<Backup>, StepError> {
    Ok(backups::get(&mut *run.store().read().await?, id(run)?).await?)
}

async fn backup(run: &Run<'_>) -> Result<Backup, StepError> {
    find(run).await?.ok_or_else(|| {
        let detail = format!("the backup of '{}' that this task is about is gone", run.task.target);
        StepError::Final(Problem::new(ErrorCode::NotFound, detail))
    })
}

/// Where a backup is.
pub(crate) fn place(of: &Backup) -> BackupPlace {
    BackupPlace { directory: of.directory.clone(), vm: of.vm, backup: of.id }
}

fn snapshot_id(run: &Run<'_>) -> Result<SnapshotId, StepError> {
    match run.task.operation {
        Operation::BackUpVm { snapshot, .. } => Ok(snapshot),
        _ => Err(internal("the task takes no snapshot")),
    }
}

/// The snapshot of the task; none if it is dropped.
async fn snapshot(run: &Run<'_>) -> Result<Option<Snapshot>, StepError> {
    temporary_snapshot::find(run, snapshot_id(run)?).await
}

/// When the snapshot was taken, and whether the guest's file systems were frozen.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Taken {
    at: Timestamp,
    quiesced: Option<bool>,
}

async fn take(run: &Run<'_>) -> Result<Taken, StepError> {
    let vm = run.vm().await?;
    let kept = snapshot(run).await?.ok_or_else(|| internal("the task has lost its snapshot"))?;
    let quiesce = matches!(run.task.operation, Operation::BackUpVm { quiesce: true, .. });
    let tracked = if host_has(run, &vm, TRACKED_BACKUP).await? {
        let Backup { id, parent, .. } = backup(run).await?;
        Some(Tracked { backup: id, parent })
    } else {
        None
    };
    let quiesced = temporary_snapshot::take(run, kept, quiesce, tracked).await?;
    Ok(Taken { at: Timestamp::now(), quiesced })
}

/// Whether the agent of a VM's host has a feature. It is asked: a server that has just started does not know its hosts yet, and a
/// job that is put again must be the same.
async fn host_has(run: &Run<'_>, vm: &Vm, feature: &str) -> Result<bool, StepError> {
    let description = run.agent(vm)?.describe().await?;
    Ok(description.features.iter().any(|known| known == feature))
}

/// The disks that no guest writes to, which are backed up without a snapshot, by hosts that can.
async fn beside(run: &Run<'_>) -> Result<Vec<DiskId>, StepError> {
    let vm = run.vm().await?;
    if !host_has(run, &vm, WHOLE_BACKUP).await? {
        return Ok(Vec::new());
    }
    let disks = run.disks().await?;
    let found = disks.iter().filter(|disk| is_beside(disk.role) && disk.facts.is_some());
    Ok(found.map(|disk| disk.id).collect())
}

/// Whether disks of this role are written by no guest, so that no snapshot keeps them.
pub(crate) fn is_beside(role: DiskRole) -> bool {
    matches!(role, DiskRole::CloudInit | DiskRole::Tpm)
}

async fn order(run: &Run<'_>) -> Result<JobSpec, StepError> {
    let (backup, kept) = (backup(run).await?, snapshot(run).await?);
    let kept = kept.ok_or_else(|| internal("the task has lost its snapshot"))?;
    let taken: Option<Taken> = run.output(BackupStep::Take.name());
    Ok(JobSpec::Backup(BackupJob {
        backup: backup.id,
        name: backup.name,
        created: taken.map_or(backup.created, |taken| taken.at),
        directory: backup.directory,
        parent: backup.parent,
        snapshot: kept.id,
        quiesced: taken.and_then(|taken| taken.quiesced),
        disks: kept.disks,
        beside: beside(run).await?,
    }))
}

/// What the inventory keeps of a manifest.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Written {
    parent: Option<BackupId>,
    bytes: u64,
    disks: usize,
    #[serde(default)]
    read: Option<u64>,
    #[serde(default)]
    contents: Option<BackupContents>,
}

/// The manifest that the task's job has found or written.
async fn manifest(run: &Run<'_>, vm: &Vm) -> Result<BackupManifest, StepError> {
    written(run, vm).await.map(|(manifest, _)| manifest)
}

/// The same, and how much of the disks was read for it.
async fn written(run: &Run<'_>, vm: &Vm) -> Result<(BackupManifest, Option<u64>), StepError> {
    match run.agent(vm)?.job(vm.id, run.task.id).await {
        Ok(status) => {
            let manifest =
                status.backup.ok_or_else(|| internal("the host's job has no manifest"))?;
            Ok((*manifest, status.read_bytes))
        }
        // The agent has restarted since: it does the work again.
        Err(problem) if problem.code == ErrorCode::NotFound => Err(StepError::Again(problem)),
        Err(problem) => Err(problem.into()),
    }
}

async fn write(run: &Run<'_>) -> Result<Written, StepError> {
    let vm = run.vm().await?;
    put(run, &vm, order(run).await?).await?;
    follow(run, &vm, JobKind::Backup).await?;
    let (manifest, read) = written(run, &vm).await?;
    let (bytes, disks) = (manifest.bytes(), manifest.disks.len());
    let contents = Some(manifest.contents());
    Ok(Written { parent: manifest.parent, bytes, disks, read, contents })
}

/// Has the host name the backup; what an agent that has restarted has lost is written again, and the VM registered before that.
async fn name(run: &Run<'_>) -> Result<(), StepError> {
    let (vm, job) = (run.vm().await?, order(run).await?);
    let agent = run.agent(&vm)?;
    match agent.commit_job(vm.id, run.task.id, job.clone()).await {
        Err(problem) if problem.code == ErrorCode::NotFound => {}
        other => return Ok(other?),
    }
    put(run, &vm, job.clone()).await?;
    follow(run, &vm, JobKind::Backup).await?;
    Ok(agent.commit_job(vm.id, run.task.id, job).await?)
}

async fn record(run: &Run<'_>) -> Result<(), StepError> {
    let (vm, known) = (run.vm().await?, backup(run).await?);
    let written: Written = run
        .output(BackupStep::Write.name())
        .ok_or_else(|| internal("the task does not say what it has written"))?;
    let taken: Option<Taken> = run.output(BackupStep::Take.name());
    let whole = Backup {
        created: taken.map_or(known.created, |taken| taken.at),
        quiesced: taken.and_then(|taken| taken.quiesced),
        parent: written.parent,
        bytes: Some(written.bytes),
        read_bytes: written.read,
        key: vm.key.clone(),
        contents: written.contents,
        ..known
    };
    let how = told::how(&whole, &run.disks().await?);
    let mut write = run.store().write().await?;
    backups::set_whole(&mut write, &whole).await?;
    let (kind, actor) = ("backup.created", run.task.actor.as_str());
    let what = if whole.parent.is_some() { "incremental" } else { "full" };
    let (name, host, directory) = (&whole.name, &whole.host_name, whole.directory.display());
    let (number, bytes) = (written.disks, Size(written.bytes));
    let read = written.read.map(|read| format!(", {} read", Size(read))).unwrap_or_default();
    let detail = format!(
        "{what} backup '{name}' of {number} disks, {bytes} in {directory} on host '{host}'{read}, {how}"
    );
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// Has the host give up the task's job, and remove what it has written.
async fn cancel(run: &Run<'_>, job: JobSpec) -> Result<(), StepError> {
    let vm = run.vm().await?;
    register(run).await?;
    absent_is_fine(run.agent(&vm)?.cancel_job(vm.id, run.task.id, job).await)
}

async fn unreserve(run: &Run<'_>) -> Result<(), StepError> {
    let kept = snapshot(run).await?;
    let mut write = run.store().write().await?;
    if let Some(kept) = kept {
        snapshots::delete(&mut write, &kept).await?;
    }
    backups::delete(&mut write, id(run)?).await?;
    Ok(write.commit().await?)
}

/// The key of the backup, sealed to the VM's host, where the VM has another one.
async fn other_key(run: &Run<'_>, vm: &Vm, of: &Backup) -> Result<Option<BackupKey>, StepError> {
    let Some(key) = of.key.clone().filter(|key| vm.key.as_ref() != Some(key)) else {
        return Ok(None);
    };
    let agent = run.agent(vm)?;
    // It is the key of the VM that was backed up, which may be another one.
    let owner = match of.vm == vm.id {
        true => vm.clone(),
        false => Vm { id: of.vm, name: of.vm_name.clone(), ..vm.clone() },
    };
    let kek = delivery::fetch(&run.context.providers, &owner, &key, Purpose::Open).await;
    let kek = kek.map_err(locked)?;
    let key_box = agent.describe().await?.key_box;
    let sealed = delivery::seal(run.store(), &key_box, &owner, &key, kek).await?;
    Ok(Some(BackupKey { key, sealed }))
}

async fn verification(run: &Run<'_>, key: Option<BackupKey>) -> Result<JobSpec, StepError> {
    let (backup, disk) = (backup(run).await?, first_disk(run).await?);
    let Backup { id, directory, key: opens_with, .. } = backup;
    Ok(JobSpec::VerifyBackup(VerifyBackupJob { backup: id, directory, disk, opens_with, key }))
}

async fn verify(run: &Run<'_>) -> Result<(), StepError> {
    let (vm, backup) = (run.vm().await?, backup(run).await?);
    let key = other_key(run, &vm, &backup).await?;
    put(run, &vm, verification(run, key).await?).await?;
    follow(run, &vm, JobKind::VerifyBackup).await?;
    match manifest(run, &vm).await {
        Ok(manifest) => note_contents(run, &backup, &manifest).await,
        // All of it was read: what is in it is not worth doing that again.
        Err(_) => Ok(()),
    }
}

/// Notes what is in a backup of an earlier version.
async fn note_contents(
    run: &Run<'_>,
    backup: &Backup,
    manifest: &BackupManifest,
) -> Result<(), StepError> {
    if backup.contents.is_some() {
        return Ok(());
    }
    let mut write = run.store().write().await?;
    backups::set_contents(&mut write, backup.id, &manifest.contents()).await?;
    Ok(write.commit().await?)
}

async fn record_verified(run: &Run<'_>) -> Result<(), StepError> {
    let (vm, backup) = (run.vm().await?, backup(run).await?);
    let mut write = run.store().write().await?;
    backups::set_verified(&mut write, backup.id, Some(Timestamp::now())).await?;
    let (kind, actor) = ("backup.verified", run.task.actor.as_str());
    let opens = match &backup.key {
        Some(key) => format!(", and key '{}' opens it", key.key_id),
        None => String::new(),
    };
    let detail = format!("backup '{}' is whole{opens}", backup.name);
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// Whether a verification that ended so has found something wrong with the backup.
fn is_finding(cause: &Problem) -> bool {
    matches!(
        cause.code,
        ErrorCode::Damaged | ErrorCode::NotFound | ErrorCode::Locked | ErrorCode::KeyMismatch
    )
}

/// The backup's row says from now on that its verification failed, until one succeeds.
async fn record_failed(run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
    let Some(backup) = find(run).await?.filter(|_| is_finding(cause)) else { return Ok(()) };
    // This may be done again.
    if backup.failed.as_ref().is_some_and(|known| known.at >= run.task.created) {
        return Ok(());
    }
    let vm = run.vm().await?;
    let failed = FailedVerification { at: Timestamp::now(), why: cause.to_string() };
    let mut write = run.store().write().await?;
    backups::set_failed(&mut write, backup.id, &failed).await?;
    let (kind, actor) = ("backup.verification-failed", run.task.actor.as_str());
    let detail = format!("backup '{}': {cause}", backup.name);
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    Ok(write.commit().await?)
}

async fn check_off(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let state = run.host_state(vm.host, None).await?;
    match state_of(&state, vm.id).map(|seen| seen.power) {
        None | Some(Power::Off) => Ok(()),
        Some(_) => {
            let detail = format!(
                "VM '{0}' is not off: stop it first (vmseal vm stop {0}), as what it holds would change under its guest",
                vm.name
            );
            Err(StepError::Final(Problem::new(ErrorCode::WrongState, detail)))
        }
    }
}

/// The disks that are restored, each with the one that was backed up.
fn restored_disks(run: &Run<'_>) -> Result<Vec<(DiskId, DiskId)>, StepError> {
    match &run.task.operation {
        Operation::RestoreBackup { disks, .. } | Operation::RestoreDeletedVm { disks, .. } => {
            Ok(disks.iter().map(|disk| (*disk, *disk)).collect())
        }
        Operation::RestoreNewVm { disks, .. } => {
            Ok(disks.iter().map(|(disk, from)| (*disk, *from)).collect())
        }
        _ => Err(internal("the task restores nothing")),
    }
}

async fn restoration(run: &Run<'_>, key: Option<BackupKey>) -> Result<JobSpec, StepError> {
    let (backup, restored) = (backup(run).await?, restored_disks(run)?);
    let disks = restored.iter().map(|(disk, _)| *disk).collect();
    let Backup { id, vm, directory, key: opens_with, .. } = backup;
    let from =
        (vm != run.vm_id).then(|| RestoredFrom { vm, disks: restored.iter().copied().collect() });
    let shared = backups::shares_data_keys(&mut *run.store().read().await?, id).await?;
    let shared = shared && from.is_none();
    let job = RestoreBackupJob { backup: id, directory, disks, opens_with, key, from, shared };
    Ok(JobSpec::RestoreBackup(job))
}

/// Has the host write new images; returns what is to be pinned of them.
async fn write_images(run: &Run<'_>) -> Result<Vec<(DiskId, DiskFacts)>, StepError> {
    let (vm, backup) = (run.vm().await?, backup(run).await?);
    let key = other_key(run, &vm, &backup).await?;
    put(run, &vm, restoration(run, key).await?).await?;
    follow(run, &vm, JobKind::RestoreBackup).await?;
    let manifest = manifest(run, &vm).await?;
    if let Operation::RestoreDeletedVm { manifest: known, .. }
    | Operation::RestoreNewVm { manifest: known, .. } = &run.task.operation
        && *known != digest_of(&manifest)
    {
        let detail = "the backup's manifest has changed since the restore began: begin it again";
        return Err(StepError::Final(Problem::new(ErrorCode::Conflict, detail)));
    }
    note_contents(run, &backup, &manifest).await?;
    let facts = |(disk, from): (DiskId, DiskId)| {
        let entry = manifest.disks.iter().find(|entry| entry.disk == from)?;
        Some((disk, entry.facts.clone()))
    };
    Ok(restored_disks(run)?.into_iter().filter_map(facts).collect())
}

/// Has the host use the new images. A host that has no job of this task gets it again and writes the images again.
async fn use_images(run: &Run<'_>) -> Result<(), StepError> {
    let (vm, backup) = (run.vm().await?, backup(run).await?);
    register(run).await?;
    let key = other_key(run, &vm, &backup).await?;
    let job = restoration(run, key).await?;
    let agent = run.agent(&vm)?;
    match agent.commit_job(vm.id, run.task.id, job.clone()).await {
        Err(problem) if problem.code == ErrorCode::NotFound => {}
        other => return Ok(other?),
    }
    put(run, &vm, job.clone()).await?;
    follow(run, &vm, JobKind::RestoreBackup).await?;
    Ok(agent.commit_job(vm.id, run.task.id, job).await?)
}

async fn set_verified(run: &Run<'_>, at: Option<Timestamp>) -> Result<(), StepError> {
    let mut write = run.store().write().await?;
    backups::set_verified(&mut write, id(run)?, at).await?;
    Ok(write.commit().await?)
}

async fn set_facts(run: &Run<'_>, write: &mut crate::store::Write<'_>) -> Result<(), StepError> {
    let facts: Vec<(DiskId, DiskFacts)> = run
        .output(BackupStep::WriteImages.name())
        .ok_or_else(|| internal("the task does not say what it has restored"))?;
    for (disk, facts) in facts {
        disks::set_facts(write, disk, &facts).await?;
    }
    Ok(())
}

async fn record_restored(run: &Run<'_>) -> Result<(), StepError> {
    let (vm, backup) = (run.vm().await?, backup(run).await?);
    let mut write = run.store().write().await?;
    set_facts(run, &mut write).await?;
    tell_restored(run, &mut write, &vm, &backup).await?;
    write.commit().await?;
    register(run).await
}

async fn tell_restored(
    run: &Run<'_>,
    write: &mut crate::store::Write<'_>,
    vm: &Vm,
    backup: &Backup,
) -> Result<(), StepError> {
    let (kind, actor) = ("backup.restored", run.task.actor.as_str());
    let is_new = backup.vm != vm.id;
    let lacks = backup.contents.as_ref().map_or(&[][..], |it| &it.lacks);
    // A new VM has a TPM of its own in any case.
    let lacks = lacks.iter().filter(|it| !(is_new && it.role == DiskRole::Tpm));
    let lacks = lacks.map(|it| format!(", without '{}', which is not in it", it.name));
    let lacks: String = lacks.collect();
    let whose = if is_new { format!(" of VM '{}'", backup.vm_name) } else { String::new() };
    let shares = if is_new && vm.key.is_some() { ", with the data keys in it" } else { "" };
    let detail = format!("backup '{}'{whose} of {}{shares}{lacks}", backup.name, backup.created);
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    Ok(())
}

/// The VM is as it was, and no VM that is being made any more.
async fn record_vm(run: &Run<'_>) -> Result<(), StepError> {
    let backup = backup(run).await?;
    {
        let _unchanged = run.hosts().lock(run.vm_id).await;
        let vm = run.vm().await?;
        // Not again where only the host has not answered: the event tells of one restore.
        if vm.lifecycle != Lifecycle::Ready {
            let mut write = run.store().write().await?;
            set_facts(run, &mut write).await?;
            vms::set_lifecycle(&mut write, vm.id, Lifecycle::Ready).await?;
            tell_restored(run, &mut write, &vm, &backup).await?;
            write.commit().await?;
        }
    }
    register(run).await
}

/// Undoes the use of the images of a VM that had none.
async fn remove_first_images(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    register(run).await?;
    let agent = run.agent(&vm)?;
    for (disk, _) in restored_disks(run)? {
        absent_is_fine(agent.delete_disk(vm.id, disk).await)?;
    }
    Ok(())
}

async fn unreserve_vm(run: &Run<'_>) -> Result<(), StepError> {
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let Some(vm) = run.find_vm().await? else { return Ok(()) };
    absent_is_fine(run.agent(&vm)?.unregister_vm(vm.id).await)?;
    let mut write = run.store().write().await?;
    vms::delete(&mut write, vm.id).await?;
    Ok(write.commit().await?)
}

async fn set_state(run: &Run<'_>, state: BackupState) -> Result<(), StepError> {
    let mut write = run.store().write().await?;
    backups::set_state(&mut write, id(run)?, state).await?;
    Ok(write.commit().await?)
}

async fn mark(run: &Run<'_>) -> Result<(), StepError> {
    set_state(run, BackupState::Deleting).await
}

async fn remove_files(run: &Run<'_>) -> Result<(), StepError> {
    let Some(backup) = find(run).await? else { return Ok(()) };
    let agent: std::sync::Arc<dyn HostAgent> = run.hosts().agent(backup.host)?;
    Ok(agent.discard_backup(place(&backup)).await?)
}

/// Destroys the keys of the VM that were kept for this backup alone: a VM that is there needs its own.
async fn destroy_keys(run: &Run<'_>) -> Result<(), StepError> {
    let Some(backup) = find(run).await? else { return Ok(()) };
    let vm = run.find_vm().await?;
    let mut read = run.store().read().await?;
    let known = keys::of_vm(&mut read, backup.vm).await?;
    let others = backups::of_vm(&mut read, backup.vm).await?;
    drop(read);
    let current = vm.as_ref().and_then(|vm| vm.key.as_ref());
    let others = || others.iter().filter(|other| other.id != backup.id);
    for key in known.iter().filter(|key| backup.key.as_ref() == Some(key)) {
        let needed = current == Some(key) || others().any(|other| other.key.as_ref() == Some(key));
        if !needed {
            let provider = run.context.providers.get(key.provider)?;
            provider.destroy_key(backup.vm, &backup.vm_name, key).await?;
        }
    }
    Ok(())
}

async fn remove_row(run: &Run<'_>) -> Result<(), StepError> {
    let Some(backup) = find(run).await? else { return Ok(()) };
    let mut write = run.store().write().await?;
    backups::delete(&mut write, backup.id).await?;
    let detail = format!("backup '{}'", backup.name);
    let (kind, actor) = ("backup.deleted", run.task.actor.as_str());
    write.event(NewEvent { kind, actor, target: &backup.vm_name, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// The problem of a failure after the commit step.
pub(super) fn unfinished(operation: &Operation, target: &str, cause: &Problem) -> Problem {
    let detail = match operation {
        Operation::BackUpVm { .. } => format!(
            "the backup of VM '{target}' is whole, but the snapshot that was taken for it is not merged yet ({cause}): delete it once the cause is fixed (vmseal snapshot list {target})"
        ),
        Operation::DeleteBackup { .. } => format!(
            "a backup of '{target}' is deleted in part ({cause}): delete it again once the cause is fixed"
        ),
        _ => format!(
            "some disks of VM '{target}' hold what the backup has, and others may not ({cause}): restore it again once the cause is fixed"
        ),
    };
    Problem { reason: cause.reason, ..Problem::new(cause.code, detail) }
}

/// The SHA-256 of what a manifest says.
pub(crate) fn digest_of(manifest: &BackupManifest) -> String {
    // A manifest of ours is always written.
    let digest = sha256(&manifest.authenticated().unwrap_or_default());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
