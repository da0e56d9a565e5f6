//! Long work on the disks of a VM: a job of a task.
//!
//! ```text
//! put ─► Waiting ─► Running ─► ReadyToCommit ── commit ─► Done      (export, mirror, decrypting, backup, restore)
//!                      │  └──────────────────────────────► Done      (the others: nothing to commit)
//!                      │              │
//!                      ├── cancel ────┴─► Cancelled: nothing is left of it
//!                      └── an error ────► Failed:    nothing is left of it
//!
//! put ─► ReadyToCommit ── commit ─► Running ─► Done                  (a conversion in place)
//! put ─► Running ─► ReadyToCommit ── commit ─► Done                  (a migration, at either host: [`super::migration`])
//! ```
//! Putting the same job again continues it, or begins it again if it failed or was cancelled. A job that an
//! agent has lost with a restart is put again, too, and continues with what it had written. A task has one job at
//! a time; one of another kind may follow a job that has ended. A copy of disks is put again, too, to have it go on at
//! another pace.

use std::collections::BTreeMap;
use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::DatastoreSpec;
use super::disk::ImageSource;
use super::key::{KeyReference, SealedKey};
use super::migration::{MigrationProgress, ReceiveJob, SendJob};
use super::proof::SignedReport;
use crate::dump::DumpFormat;
use crate::filter::BACKING_MAX;
use crate::former_image::FormerImage;
use crate::host::backup::BackupManifest;
use crate::id::{BackupId, DiskId, DumpId, SnapshotId, TaskId, VmId};
use crate::pace::CopyPace;
use crate::problem::Problem;
use crate::transfer::ExportFormat;

/// The work. An agent refuses a kind that it does not know or that is not in its features.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum JobSpec {
    /// Make disks.
    Create(CreateJob),
    /// Write a disk to a file on the host.
    Export(ExportJob),
    /// Copy disks, and use the copies in their place.
    Mirror(MirrorJob),
    /// Encrypt, decrypt or re-encrypt disks in the files that they have.
    Convert(ConvertJob),
    /// Remove the images that disks had before they were mirrored.
    DropSources(DropSourcesJob),
    /// Keep what disks hold now.
    Snapshot(SnapshotJob),
    /// Have disks hold what a snapshot keeps.
    Revert(RevertJob),
    /// Keep what a snapshot keeps no longer.
    DropSnapshot(DropSnapshotJob),
    /// Read the VM's files, and report whether they are encrypted.
    Prove(ProveJob),
    /// Write what the guest's memory holds to a sealed file.
    Dump(DumpJob),
    /// Write what such a file holds to a file in the clear.
    DecryptDump(DecryptDumpJob),
    /// Copy what a snapshot keeps to a directory of the host, as it is.
    Backup(BackupJob),
    /// Read such a copy, and check that it is whole and opens with its key.
    VerifyBackup(VerifyBackupJob),
    /// Put what such a copy holds in the place of disks.
    RestoreBackup(RestoreBackupJob),
    /// Send the VM, which runs, to another host.
    Send(SendJob),
    /// Receive the VM from another host.
    Receive(ReceiveJob),
}

/// Makes disks of a registered VM that is off. A complete disk is not touched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateJob {
    /// The disks, each once.
    pub disks: Vec<DiskToCreate>,
}

/// A disk of the VM to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskToCreate {
    /// The disk.
    pub disk: DiskId,
    /// The image to fill it from; none leaves it empty. The agent has what the firmware's variables begin with; those of a raw
    /// image are taken in their place by agents with the feature [`TAKE_VARIABLES`](super::version::TAKE_VARIABLES). Of the disk of a
    /// TPM it is the file with what the TPM keeps, for agents with the feature [`TAKE_TPM_STATE`](super::version::TAKE_TPM_STATE).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<ImageSource>,
    /// The documents of a disk for cloud-init, packed ([`crate::cloud_init::Documents::packed`]) and sealed to the
    /// agent's key box ([`crate::cloud_init::cloud_init_info`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<SealedKey>,
    /// The disk of another VM to fill it from, of the same size. One for cloud-init gets the documents of that one, with meta-data
    /// that names its own VM ([`crate::cloud_init::Documents::for_clone`]); agents without the feature
    /// [`CLOUD_INIT_COPIES`](super::version::CLOUD_INIT_COPIES) refuse that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_of: Option<CopyOf>,
}

/// A disk of another VM of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyOf {
    /// The VM; its key is at hand where the disk is encrypted.
    pub vm: VmId,
    /// The disk.
    pub disk: DiskId,
    /// What the disk held then; none means what it holds now, and that its VM is off, unless it is a disk for cloud-init, to which
    /// no guest writes and of which snapshots keep nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotId>,
    /// Whether the new disk stands on what the snapshot keeps, and has its data key (DEK), instead of being filled from it. Until
    /// it is deleted, or copied, that is neither changed nor copied elsewhere. It is on the same datastore, of the same size and
    /// thin; what is encrypted is encrypted under both keys.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub linked: bool,
}

/// Writes a disk of a VM that is off, or what a snapshot keeps of one, to a file. The file is written and flushed under another name, and
/// renamed when the job is committed, so that the caller knows for certain whether it is complete. In place of the disk of a TPM, which
/// holds nothing, what the TPM keeps is written as swtpm's file, in the clear: as `raw` alone, and of no snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportJob {
    /// Which disk.
    pub disk: DiskId,
    /// The file's absolute path on the host; nothing is there yet.
    pub to: PathBuf,
    /// What is written.
    pub format: ExportFormat,
    /// The passphrase of a LUKS2 file, sealed to the agent's key box ([`export_info`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passphrase: Option<SealedKey>,
    /// What the disk held then; none means what it holds now, and that its VM is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotId>,
}

/// Copies disks of a VM, which may run, to new images on the same datastores, or others. While that goes on the disks are used as
/// before, and the copies follow. Committing the job makes the copies the disks' images, at one instant for each disk; the
/// former images stay beside them until they are dropped ([`DropSourcesJob`]). Until it is committed it can be
/// cancelled. It outlives the agent and the guest: the copy goes on where it was.
///
/// The same job with another pace is the same job: its copies go on at that pace when the call that puts it returns, and keep it
/// until another is put, also over the deaths of all processes. While they are paused it is not committed.
///
/// The disk that has the key of a TPM is copied with what the TPM keeps, of a VM that is off or suspended when the job is put and
/// committed. Agents without the feature [`MIRROR_TPM`](super::version::MIRROR_TPM) refuse it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MirrorJob {
    /// The disks, each once.
    pub disks: Vec<DiskToMirror>,
    /// How fast they are copied. It counts only where the job is put. Agents without the feature [`PACE`](super::version::PACE)
    /// do not know it.
    #[serde(default, skip_serializing_if = "CopyPace::is_free")]
    pub pace: CopyPace,
    /// Whether the VM has no key when the former images are gone: what is beside its first disk, as the memory that its snapshots keep, is in
    /// the clear then. Agents without the feature [`MIRROR_MEMORY`](super::version::MIRROR_MEMORY) do not know it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub forgets_key: bool,
}

/// A disk to copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskToMirror {
    /// The disk.
    pub disk: DiskId,
    /// Whether its copy is encrypted, with a key of its own under the VM's key.
    pub encrypted: bool,
    /// The datastore of the copy; none means that of the disk. Agents without the feature
    /// [`MOVE`](super::version::MOVE) do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<DatastoreSpec>,
}

/// Encrypts, decrypts or re-encrypts disks of a VM that is off, each in the file that it has: there is room for no copy. The
/// disks have no snapshots and no replicas. What it needs beside the data is made when it is put; then it is ready to be
/// committed, and nothing of the disks has been changed. Committing it begins the work: it runs, and is done when all disks
/// are as they are to be and have opened with the VM's key. From then on they cannot be used meanwhile, and the job can be
/// cancelled only as long as no data has moved. It outlives the agent: put again, it goes on where it was, also after it has
/// failed. What the disks are is in the state of the VM; [`DropSourcesJob`] ends it, when the disks are registered as they are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConvertJob {
    /// The disks, each once.
    pub disks: Vec<DiskToConvert>,
    /// The highest rate for each disk, in bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
}

/// A disk to convert.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskToConvert {
    /// The disk.
    pub disk: DiskId,
    /// Whether it is encrypted afterwards, with a new key of its own under the VM's key.
    pub encrypted: bool,
}

/// Overwrites and removes the images that disks had before they were mirrored, as far as they are there. Disks that were
/// converted in their files, and are registered as they are since, get their names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DropSourcesJob {
    /// The disks, each once.
    pub disks: Vec<DiskId>,
}

/// Keeps what disks of a VM hold at one instant, the same for all of them, whether it runs, is off or suspended. From then on the guest
/// writes to new layers above their images; each disk has at most [`LAYERS_MAX`] above each other. It is done when the call
/// that puts the job returns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotJob {
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// Whether the guest's file systems are frozen meanwhile, if its agent answers; [`JobStatus::quiesced`] says whether they
    /// were.
    #[serde(default)]
    pub quiesce: bool,
    /// Whether the memory of the guest is kept, too. Of a guest that runs it is saved, and the job goes on after the call that puts it; of
    /// one that is suspended it is saved already.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub memory: bool,
    /// The generation of that memory; none where nobody counts. The memory of a suspended guest has one already, and keeps it. Agents without
    /// the feature [`MEMORY_GENERATION`](super::version::MEMORY_GENERATION) do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// The backup that the snapshot is for: what the guest changes from then on is noted, as far as that can be done, so that
    /// the next backup reads no more. For hosts with [`super::version::TRACKED_BACKUP`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracked: Option<Tracked>,
    /// The disks, each once.
    pub disks: Vec<DiskId>,
}

/// A backup whose changes are noted, in a dirty bitmap of each disk ([`super::backup::tracking_name`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tracked {
    /// The backup.
    pub backup: BackupId,
    /// The one that it is to be above: what has changed since that is known until this one is written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<BackupId>,
}

/// Has disks of a VM that is off or suspended hold what they held when a snapshot was taken. What they have held since then is lost, as
/// far as no other snapshot keeps it. It is done when the call that puts the job returns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RevertJob {
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// Whether the snapshot keeps memory: the VM is then suspended with it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub memory: bool,
    /// Whether the memory of a VM that is suspended is given up, before its disks change; else such a VM is refused. For hosts with
    /// [`super::version::SUSPENDED_SNAPSHOTS`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub discard_memory: bool,
    /// The disks, each once.
    pub disks: Vec<DiskId>,
}

/// Removes a snapshot of disks, and merges the layers that nothing needs apart any more. A disk without the snapshot is merged
/// only. The VM may run; the guest sees a pause for each disk where its last layer is merged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DropSnapshotJob {
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// The disks, each once.
    pub disks: Vec<DiskId>,
}

/// Reads the files of a VM on its datastores, whether it runs or is off, and reports whether they are encrypted
/// ([`JobStatus::proof`]). Nothing is written. An encrypted disk needs the VM's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProveJob {
    /// All disks of the VM that are made, each once.
    pub disks: Vec<DiskId>,
    /// Whether every byte is read; else a sample of each file.
    #[serde(default)]
    pub all: bool,
    /// What decides which parts of a file are in the sample.
    #[serde(default)]
    pub seed: u64,
}

/// Writes what the memory of a guest holds, a core dump, to a sealed file beside the VM's first disk. The guest stands still
/// meanwhile. It needs the VM's key, where it has one. It is done when the file has its name; its length is then the job's
/// total.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DumpJob {
    /// The dump.
    pub dump: DumpId,
    /// The first disk of the VM.
    pub disk: DiskId,
    /// What is written.
    pub format: DumpFormat,
}

/// Writes what a core dump holds to a file on the host, in the clear. Like an export it is written under another name, and
/// renamed when the job is committed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecryptDumpJob {
    /// The dump.
    pub dump: DumpId,
    /// The first disk of the VM.
    pub disk: DiskId,
    /// The file's absolute path on the host; nothing is there yet.
    pub to: PathBuf,
}

/// Copies what a snapshot keeps of disks of a VM, which may run, to a directory of the host, encrypted or not as they are
/// (docs/formats/backup.md). Encrypted disks need the VM's key, which authenticates the manifest. The directory of the backup
/// is written and flushed under another name, and renamed when the job is committed. [`JobStatus::backup`] has the manifest then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupJob {
    /// The backup.
    pub backup: BackupId,
    /// Its name.
    pub name: String,
    /// The instant of the snapshot.
    pub created: Timestamp,
    /// The absolute path of the directory of backups, which is there.
    pub directory: PathBuf,
    /// The backup in the same directory that this one is above; none to copy all of each disk. A disk that is not in it, or
    /// was encrypted anew, is copied whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<BackupId>,
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// Whether the guest's file systems were frozen, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiesced: Option<bool>,
    /// The disks that the snapshot keeps, each once.
    pub disks: Vec<DiskId>,
    /// The disks that no guest writes to and no snapshot keeps: that for cloud-init, and that of the VM's TPM, with what the TPM
    /// keeps. That is of the instant of the snapshot, if the agent has taken it. For hosts with
    /// [`super::version::WHOLE_BACKUP`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<DiskId>,
}

impl BackupJob {
    /// All of its disks.
    pub fn all_disks(&self) -> impl Iterator<Item = DiskId> {
        self.disks.iter().chain(&self.beside).copied()
    }
}

/// The key of a backup that was made before the VM got another one. Two that are sealed differently are the same key.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupKey {
    /// Which key.
    pub key: KeyReference,
    /// The KEK, sealed with the [`key_info`](super::key::key_info) of `key`.
    pub sealed: SealedKey,
}

impl PartialEq for BackupKey {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl Eq for BackupKey {}

/// Reads all of a backup of a VM, whatever the VM does: that its blocks have the sums in its manifest, that the manifest is
/// authentic, that the key opens each disk, and that a TPM loads what it kept. Nothing is written. [`JobStatus::backup`] has the manifest then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VerifyBackupJob {
    /// The backup.
    pub backup: BackupId,
    /// The absolute path of the directory of backups.
    pub directory: PathBuf,
    /// The first disk of the VM, which the work counts as that of.
    pub disk: DiskId,
    /// The key that its manifest has to name; none where it is in the clear.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opens_with: Option<KeyReference>,
    /// That key, where it is not the VM's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<BackupKey>,
}

/// Writes what a backup holds to new images beside those of disks of a VM that is off, and opens them. Nothing is decrypted; a
/// header whose key is not the VM's is given the VM's, and one of another VM is replaced ([`RestoredFrom`]). Committing the job puts the images in the place of those of the disks,
/// one after the other, and what a TPM kept in the place of what it keeps. [`JobStatus::backup`] has the manifest then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestoreBackupJob {
    /// The backup.
    pub backup: BackupId,
    /// The absolute path of the directory of backups.
    pub directory: PathBuf,
    /// The disks, each once, all of them in the backup; they have no snapshots and no replicas.
    pub disks: Vec<DiskId>,
    /// The key that its manifest has to name; none where it is in the clear.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opens_with: Option<KeyReference>,
    /// That key, where it is not the VM's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<BackupKey>,
    /// The VM that was backed up, where that is another one. For hosts with [`super::version::RESTORE_AS`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<RestoredFrom>,
    /// Whether other VMs have data keys that are in it: the disks are marked then. For hosts with [`super::version::SHARE_DATA_KEYS`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared: bool,
}

/// Another VM, whose backup is restored as the disks of one that has none yet. Each image gets a header of its own: of its disk and
/// under its VM's key, with the data key (DEK) that is in the backup. What a TPM kept is not restored so: its key follows from its
/// disk's id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestoredFrom {
    /// The VM that was backed up.
    pub vm: VmId,
    /// Its disks, by those that are to hold what they held.
    pub disks: BTreeMap<DiskId, DiskId>,
}

impl RestoreBackupJob {
    /// The VM that was backed up, where `vm` is the one that is restored.
    #[must_use]
    pub fn backed_up(&self, vm: VmId) -> VmId {
        self.from.as_ref().map_or(vm, |from| from.vm)
    }

    /// The disk that was backed up, of one that is restored.
    #[must_use]
    pub fn disk_in_backup(&self, disk: DiskId) -> DiskId {
        self.from.as_ref().and_then(|from| from.disks.get(&disk)).copied().unwrap_or(disk)
    }
}

/// How many layers of a disk may be above each other: a read may have to look into the tables of each.
pub const LAYERS_MAX: usize = BACKING_MAX;

/// The context that the passphrase of an export is sealed with.
#[must_use]
pub fn export_info(vm: VmId, disk: DiskId) -> Vec<u8> {
    format!("vmseal export passphrase v1\0{vm}\0{disk}").into_bytes()
}

impl JobSpec {
    /// What kind it is.
    #[must_use]
    pub fn kind(&self) -> JobKind {
        match self {
            Self::Create(_) => JobKind::Create,
            Self::Export(_) => JobKind::Export,
            Self::Mirror(_) => JobKind::Mirror,
            Self::Convert(_) => JobKind::Convert,
            Self::DropSources(_) => JobKind::DropSources,
            Self::Snapshot(_) => JobKind::Snapshot,
            Self::Revert(_) => JobKind::Revert,
            Self::DropSnapshot(_) => JobKind::DropSnapshot,
            Self::Prove(_) => JobKind::Prove,
            Self::Dump(_) => JobKind::Dump,
            Self::DecryptDump(_) => JobKind::DecryptDump,
            Self::Backup(_) => JobKind::Backup,
            Self::VerifyBackup(_) => JobKind::VerifyBackup,
            Self::RestoreBackup(_) => JobKind::RestoreBackup,
            Self::Send(_) => JobKind::Send,
            Self::Receive(_) => JobKind::Receive,
        }
    }

    /// Whether both are the same work, at whatever pace.
    #[must_use]
    pub fn is_same_work(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Mirror(one), Self::Mirror(other)) => one.disks == other.disks,
            (Self::Convert(one), Self::Convert(other)) => one.disks == other.disks,
            // Who only cancels it has not asked for the key.
            (Self::VerifyBackup(one), Self::VerifyBackup(other)) => {
                let keyless = |job: &VerifyBackupJob| VerifyBackupJob { key: None, ..job.clone() };
                keyless(one) == keyless(other)
            }
            // That others have got its data keys may be known since it began.
            (Self::RestoreBackup(one), Self::RestoreBackup(other)) => {
                let keyless = |job: &RestoreBackupJob| RestoreBackupJob {
                    key: None,
                    shared: false,
                    ..job.clone()
                };
                keyless(one) == keyless(other)
            }
            // A task has one at a time at each host, however it was begun.
            (Self::Send(_), Self::Send(_)) | (Self::Receive(_), Self::Receive(_)) => true,
            (one, other) => one == other,
        }
    }

    /// Its disks.
    #[must_use]
    pub fn disks(&self) -> Vec<DiskId> {
        match self {
            Self::Create(create) => create.disks.iter().map(|disk| disk.disk).collect(),
            Self::Export(export) => vec![export.disk],
            Self::Mirror(mirror) => mirror.disks.iter().map(|disk| disk.disk).collect(),
            Self::Convert(job) => job.disks.iter().map(|disk| disk.disk).collect(),
            Self::DropSources(job) => job.disks.clone(),
            Self::Snapshot(job) => job.disks.clone(),
            Self::Revert(job) => job.disks.clone(),
            Self::DropSnapshot(job) => job.disks.clone(),
            Self::Prove(job) => job.disks.clone(),
            Self::Dump(job) => vec![job.disk],
            Self::DecryptDump(job) => vec![job.disk],
            Self::Backup(job) => job.all_disks().collect(),
            Self::VerifyBackup(job) => vec![job.disk],
            Self::RestoreBackup(job) => job.disks.clone(),
            Self::Send(job) => job.disks.clone(),
            Self::Receive(job) => job.disks.clone(),
        }
    }

    /// The file that it writes for its user, as that of an export.
    #[must_use]
    pub fn exported(&self) -> Option<ExportJob> {
        match self {
            Self::Export(export) => Some(export.clone()),
            Self::DecryptDump(DecryptDumpJob { disk, to, .. }) => {
                let (format, to) = (ExportFormat::Raw, to.clone());
                Some(ExportJob { disk: *disk, to, format, passphrase: None, snapshot: None })
            }
            _ => None,
        }
    }
}

/// The kinds of job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobKind {
    /// [`CreateJob`]
    Create,
    /// [`ExportJob`]
    Export,
    /// [`MirrorJob`]
    Mirror,
    /// [`ConvertJob`]
    Convert,
    /// [`DropSourcesJob`]
    DropSources,
    /// [`SnapshotJob`]
    Snapshot,
    /// [`RevertJob`]
    Revert,
    /// [`DropSnapshotJob`]
    DropSnapshot,
    /// [`ProveJob`]
    Prove,
    /// [`DumpJob`]
    Dump,
    /// [`DecryptDumpJob`]
    DecryptDump,
    /// [`BackupJob`]
    Backup,
    /// [`VerifyBackupJob`]
    VerifyBackup,
    /// [`RestoreBackupJob`]
    RestoreBackup,
    /// [`SendJob`]
    Send,
    /// [`ReceiveJob`]
    Receive,
    /// A kind of a newer agent that this side does not know.
    #[serde(other)]
    Unknown,
}

impl JobKind {
    /// Whether such a job makes, reads, merges or overwrites disks without a guest, and can be slowed and paused
    /// ([`super::HostAgent::set_pace`]). The pace of a mirror, and of what is sent, is in its spec.
    #[must_use]
    pub fn has_work_pace(self) -> bool {
        matches!(
            self,
            Self::Create
                | Self::Export
                | Self::DropSources
                | Self::DropSnapshot
                | Self::Prove
                | Self::Backup
                | Self::VerifyBackup
                | Self::RestoreBackup
        )
    }
}

/// The status of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobStatus {
    /// The task of the job.
    pub task: TaskId,
    /// What it does.
    pub kind: JobKind,
    /// Its disks.
    pub disks: Vec<DiskId>,
    /// Its state.
    pub state: JobState,
    /// Its progress.
    pub progress: JobProgress,
    /// Whether its copies are paused.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// Whether the guest's file systems were frozen while its disks were kept; none for other jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiesced: Option<bool>,
    /// What a proof has found, once it is done. It is large, so it is not in the state of a host, but in the answer to who asks
    /// for the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof: Option<Box<SignedReport>>,
    /// The manifest of a backup that was made, verified or restored; like a proof, in the answer to who asks for the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<Box<BackupManifest>>,
    /// How much of the disks was read for a backup, in bytes; none for other jobs, and where it was written before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes: Option<u64>,
    /// How far a VM is that is sent, or how one was received; none for other jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<MigrationProgress>,
    /// How long ago QEMU had sent all of a guest, which stands still since then, in milliseconds; none before that, where QEMU does not say
    /// it, and from earlier agents. It grows all the time: like a proof, it is in the answer to who asks for the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub all_sent_milliseconds: Option<u64>,
    /// The same of a guest that was received: how long ago it went on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub went_on_milliseconds: Option<u64>,
    /// What has become of former images that were removed; empty for other jobs, and from agents that do not say it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former: Vec<FormerImage>,
}

/// The state of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum JobState {
    /// It has not begun.
    Waiting,
    /// It is in progress.
    Running,
    /// Its result is complete and flushed, or a copy as good as complete, but not visible yet.
    ReadyToCommit,
    /// It is finished.
    Done,
    /// It could not be done; what it had made is removed.
    Failed {
        /// Why.
        problem: Problem,
    },
    /// It was cancelled; what it had made is removed.
    Cancelled,
    /// A state of a newer agent that this side does not know; the job is followed until the state changes.
    #[serde(other)]
    Unknown,
}

/// The progress of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobProgress {
    /// Bytes dealt with.
    pub done: u64,
    /// All bytes; 0 where there is nothing to copy, or that is not known yet.
    pub total: u64,
    /// Bytes a second in the last half minute, in which this agent has worked on it; none while it does not get ahead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
}
