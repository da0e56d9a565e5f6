//! Backups of disks: each step repeated, every refusal provoked.

use std::path::PathBuf;

use jiff::Timestamp;
use vmseal_api::host::backup::{BackupManifest, BackupPlace, VERSION};
use vmseal_api::host::{
    BackupJob, DiskRole, HostAgent, JobSpec, JobState, RestoreBackupJob, VerifyBackupJob,
};
use vmseal_api::id::{BackupId, SnapshotId, TaskId};
use vmseal_api::limits::BACKUP_CHAIN_MAX;
use vmseal_api::problem::ErrorCode;
use vmseal_api::transfer::ImageFormat;

use super::snapshots::{drop_snapshot, take};
use super::tpm::added;
use super::{Session, done, refused};

fn directory(session: &Session) -> PathBuf {
    session.fixture.image.parent().expect("a file is in a directory").to_owned()
}

/// The job that backs up the first disk.
pub fn back_up(
    session: &Session,
    backup: BackupId,
    parent: Option<BackupId>,
    snapshot: SnapshotId,
) -> JobSpec {
    JobSpec::Backup(BackupJob {
        backup,
        name: "nightly".to_owned(),
        created: Timestamp::UNIX_EPOCH,
        directory: directory(session),
        parent,
        snapshot,
        quiesced: Some(false),
        disks: vec![session.disk(0).disk],
        beside: Vec::new(),
    })
}

/// The job that verifies a backup.
pub fn verify(session: &Session, backup: BackupId) -> JobSpec {
    let (directory, disk) = (directory(session), session.disk(0).disk);
    let opens_with = session.spec.key.clone();
    JobSpec::VerifyBackup(VerifyBackupJob { backup, directory, disk, opens_with, key: None })
}

/// The job that restores the first disk.
pub fn restore(session: &Session, backup: BackupId) -> JobSpec {
    let (directory, disks) = (directory(session), vec![session.disk(0).disk]);
    let opens_with = session.spec.key.clone();
    JobSpec::RestoreBackup(RestoreBackupJob { backup, directory, disks, opens_with, key: None })
}

impl Session {
    fn place(&self, backup: BackupId) -> BackupPlace {
        BackupPlace { directory: directory(self), vm: self.vm(), backup }
    }

    /// Makes a backup, once in vain.
    async fn backed_up(
        &self,
        agent: &dyn HostAgent,
        parent: Option<BackupId>,
        snapshot: SnapshotId,
    ) -> (BackupId, BackupManifest) {
        let (vm, backup) = (self.vm(), BackupId::new());
        let job = back_up(self, backup, parent, snapshot);
        let task = TaskId::new();
        done(agent.put_job(vm, task, job.clone()).await, "a backup");
        done(agent.put_job(vm, task, job.clone()).await, "the same again");
        assert_eq!(self.worked(agent, task).await, JobState::ReadyToCommit);
        let unnamed = agent.read_backup(self.place(backup)).await;
        refused(unnamed, ErrorCode::NotFound, "a backup without its name");
        done(agent.cancel_job(vm, task, job.clone()).await, "giving it up");
        refused(
            agent.commit_job(vm, task, job.clone()).await,
            ErrorCode::NotFound,
            "naming what was given up",
        );
        done(agent.put_job(vm, task, job.clone()).await, "the backup again");
        assert_eq!(self.worked(agent, task).await, JobState::ReadyToCommit);
        done(agent.commit_job(vm, task, job.clone()).await, "naming it");
        done(agent.commit_job(vm, task, job.clone()).await, "naming it again");
        let told = done(agent.job(vm, task).await, "the job").backup.map(|told| *told);
        let read = done(agent.read_backup(self.place(backup)).await, "the manifest");
        assert_eq!(told.as_ref(), Some(&read));
        (backup, read)
    }

    /// Backups that cannot be made.
    async fn refused_backups(&self, agent: &dyn HostAgent, snapshot: SnapshotId) {
        let (vm, disk, strange) = (self.vm(), self.disk(0).disk, BackupId::new());
        let good = of_backup(back_up(self, strange, None, snapshot));
        let (absent, invalid) = (ErrorCode::NotFound, ErrorCode::InvalidRequest);
        for (job, code, what) in [
            (BackupJob { snapshot: SnapshotId::new(), ..good.clone() }, absent, "no snapshot"),
            (BackupJob { parent: Some(strange), ..good.clone() }, absent, "no parent"),
            (BackupJob { directory: "here".into(), ..good.clone() }, invalid, "a relative path"),
            (BackupJob { name: "a/b".to_owned(), ..good.clone() }, invalid, "a wrong name"),
            (BackupJob { disks: vec![disk, disk], ..good.clone() }, invalid, "a disk twice"),
        ] {
            refused(agent.examine_job(vm, JobSpec::Backup(job.clone())).await, code, what);
            refused(agent.put_job(vm, TaskId::new(), JobSpec::Backup(job)).await, code, what);
        }
        let put = |job| agent.put_job(vm, TaskId::new(), job);
        refused(put(verify(self, strange)).await, absent, "verifying no backup");
        refused(put(restore(self, strange)).await, absent, "restoring from none");
    }
}

/// The VM is off; its first disk is made and has no snapshots.
pub async fn disks(agent: &dyn HostAgent, session: &Session) {
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    let (task, snapshot) = (TaskId::new(), SnapshotId::new());
    done(agent.put_job(vm, task, take(disk, snapshot)).await, "a snapshot");
    assert_eq!(session.worked(agent, task).await, JobState::Done);
    session.refused_backups(agent, snapshot).await;
    let (full, manifest) = session.backed_up(agent, None, snapshot).await;
    assert!(manifest.is_full() && manifest.disks.len() == 1, "{manifest:?}");
    assert_eq!((manifest.vm.vm, manifest.disks[0].format), (vm, ImageFormat::Raw));
    assert_eq!(manifest.mac.is_some(), session.spec.key.is_some());
    let (above, manifest) = session.backed_up(agent, Some(full), snapshot).await;
    assert_eq!((manifest.parent, manifest.disks[0].format), (Some(full), ImageFormat::Qcow2));
    for backup in [full, above] {
        let task = TaskId::new();
        done(agent.put_job(vm, task, verify(session, backup)).await, "verifying");
        assert_eq!(session.worked(agent, task).await, JobState::Done);
        done(agent.commit_job(vm, task, verify(session, backup)).await, "nothing to commit");
    }
    deepest(agent, session, above, snapshot).await;
    let kept = agent.put_job(vm, TaskId::new(), restore(session, full)).await;
    refused(kept, ErrorCode::WrongState, "a disk with a snapshot");
    let task = TaskId::new();
    done(agent.put_job(vm, task, drop_snapshot(disk, snapshot)).await, "dropping the snapshot");
    assert_eq!(session.worked(agent, task).await, JobState::Done);
    if session.spec.key.is_some() {
        abandoned(agent, session, above).await;
    }
    restored(agent, session, above).await;
    for backup in [above, full] {
        done(agent.discard_backup(session.place(backup)).await, "removing a backup");
        done(agent.discard_backup(session.place(backup)).await, "removing what is removed");
        let gone = agent.read_backup(session.place(backup)).await;
        refused(gone, ErrorCode::NotFound, "what is removed");
    }
}

/// What a TPM keeps is backed up with the disk that has its key, and comes back with it. In the end the VM is as it was.
pub async fn tpms(agent: &dyn HostAgent, session: &Session) {
    let (vm, data, backup) = (session.vm(), session.disk(0).disk, BackupId::new());
    let (spec, tpm) = added(session);
    done(agent.register_vm(spec).await, "registering a TPM");
    let task = done(session.create(agent, tpm, None).await, "making its disk");
    let facts = session.made(agent, task, tpm).await;
    let (task, snapshot) = (TaskId::new(), SnapshotId::new());
    done(agent.put_job(vm, task, take(data, snapshot)).await, "a snapshot");
    assert_eq!(session.worked(agent, task).await, JobState::Done);

    let job = of_backup(back_up(session, backup, None, snapshot));
    let put = |job| agent.put_job(vm, TaskId::new(), JobSpec::Backup(job));
    let kept = put(BackupJob { disks: vec![data, tpm], ..job.clone() }).await;
    refused(kept, ErrorCode::WrongState, "a TPM's disk as one that a snapshot keeps");
    let written = BackupJob { disks: vec![tpm], beside: vec![data], ..job.clone() };
    refused(
        put(written).await,
        ErrorCode::WrongState,
        "a disk that is written, without a snapshot",
    );
    let twice = BackupJob { beside: vec![tpm, tpm], ..job.clone() };
    refused(put(twice).await, ErrorCode::InvalidRequest, "a disk twice");
    let (task, job) = (TaskId::new(), JobSpec::Backup(BackupJob { beside: vec![tpm], ..job }));
    done(agent.put_job(vm, task, job.clone()).await, "a backup");
    assert_eq!(session.worked(agent, task).await, JobState::ReadyToCommit);
    done(agent.commit_job(vm, task, job).await, "naming it");
    let manifest = done(agent.read_backup(session.place(backup)).await, "the manifest");
    let of_tpm = manifest.disks.iter().find(|disk| disk.disk == tpm).expect("it is in it");
    assert!(of_tpm.tpm.is_some() && of_tpm.facts == facts, "{manifest:?}");
    assert_eq!(manifest.version, VERSION);
    // The other disk was not asked for.
    let lacks = manifest.contents().lacks;
    assert!(lacks.iter().all(|part| part.role == DiskRole::Data), "{lacks:?}");
    let task = TaskId::new();
    done(agent.put_job(vm, task, verify(session, backup)).await, "verifying");
    assert_eq!(session.worked(agent, task).await, JobState::Done);

    let task = TaskId::new();
    done(agent.put_job(vm, task, drop_snapshot(data, snapshot)).await, "dropping the snapshot");
    assert_eq!(session.worked(agent, task).await, JobState::Done);
    done(agent.delete_disk(vm, tpm).await, "removing its disk");
    let (task, job) = (TaskId::new(), of(&restore(session, backup)));
    let job = JobSpec::RestoreBackup(RestoreBackupJob { disks: vec![data, tpm], ..job });
    done(agent.put_job(vm, task, job.clone()).await, "restoring");
    assert_eq!(session.worked(agent, task).await, JobState::ReadyToCommit);
    done(agent.commit_job(vm, task, job).await, "using what is restored");
    // It is there: what makes it finds it made.
    let task = done(session.create(agent, tpm, None).await, "making its disk");
    assert_eq!(session.made(agent, task, tpm).await, facts);
    done(agent.discard_backup(session.place(backup)).await, "removing the backup");
    done(agent.delete_disk(vm, tpm).await, "removing its disk");
    done(agent.register_vm(session.spec.clone()).await, "registering without it");
}

fn of_backup(job: JobSpec) -> BackupJob {
    let JobSpec::Backup(job) = job else { unreachable!("it backs up") };
    job
}

/// As many backups above each other as there can be, two of which are there, are read.
async fn deepest(agent: &dyn HostAgent, session: &Session, above: BackupId, snapshot: SnapshotId) {
    let (vm, mut chain) = (session.vm(), vec![above]);
    while chain.len() < BACKUP_CHAIN_MAX - 1 {
        let backup = BackupId::new();
        let job = back_up(session, backup, chain.last().copied(), snapshot);
        let task = TaskId::new();
        done(agent.put_job(vm, task, job.clone()).await, "one more");
        assert_eq!(session.worked(agent, task).await, JobState::ReadyToCommit);
        done(agent.commit_job(vm, task, job).await, "naming it");
        chain.push(backup);
    }
    let task = TaskId::new();
    let topmost = chain[chain.len() - 1];
    done(agent.put_job(vm, task, verify(session, topmost)).await, "verifying all of them");
    assert_eq!(session.worked(agent, task).await, JobState::Done);
    for backup in chain.into_iter().skip(1).rev() {
        done(agent.discard_backup(session.place(backup)).await, "removing one of them");
    }
}

async fn restored(agent: &dyn HostAgent, session: &Session, from: BackupId) {
    let (vm, task, job) = (session.vm(), TaskId::new(), restore(session, from));
    refused(agent.commit_job(vm, task, job.clone()).await, ErrorCode::NotFound, "using nothing");
    done(agent.put_job(vm, task, job.clone()).await, "restoring");
    assert_eq!(session.worked(agent, task).await, JobState::ReadyToCommit);
    refused(agent.power_on(vm).await, ErrorCode::WrongState, "starting during a restore");
    done(agent.cancel_job(vm, task, job.clone()).await, "giving it up");
    done(agent.put_job(vm, task, job.clone()).await, "restoring again");
    assert_eq!(session.worked(agent, task).await, JobState::ReadyToCommit);
    done(agent.commit_job(vm, task, job.clone()).await, "using what is restored");
    done(agent.commit_job(vm, task, job).await, "using it again");
}

/// The images of a task that has ended without a word to the host do not stand in the way of the next restore.
async fn abandoned(agent: &dyn HostAgent, session: &Session, from: BackupId) {
    let (vm, job) = (session.vm(), restore(session, from));
    for what in ["restoring", "restoring after that"] {
        let task = TaskId::new();
        done(agent.put_job(vm, task, job.clone()).await, what);
        assert_eq!(session.worked(agent, task).await, JobState::ReadyToCommit);
    }
    let strange = JobSpec::RestoreBackup(RestoreBackupJob { opens_with: None, ..of(&job) });
    let refusal = agent.put_job(vm, TaskId::new(), strange).await;
    refused(refusal, ErrorCode::Damaged, "a manifest that names a key, of a backup without one");
}

fn of(job: &JobSpec) -> RestoreBackupJob {
    let JobSpec::RestoreBackup(job) = job else { unreachable!("it restores") };
    job.clone()
}
