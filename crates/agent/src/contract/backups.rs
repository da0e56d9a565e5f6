//! Backups of disks: each step repeated, every refusal provoked.

use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;
use vmseal_api::host::backup::{BackupManifest, BackupPlace, VERSION, WITH_TPM};
use vmseal_api::host::{
    BackupJob, BackupKey, Device, DiskFacts, DiskRole, DiskSpec, HostAgent, JobSpec, JobState,
    Power, PowerOff, RestoreBackupJob, RestoredFrom, VerifyBackupJob, VmSpec,
};
use vmseal_api::id::{BackupId, DiskId, SnapshotId, TaskId, VmId};
use vmseal_api::limits::BACKUP_CHAIN_MAX;
use vmseal_api::problem::ErrorCode;
use vmseal_api::transfer::ImageFormat;
use vmseal_secret::{KEK_LEN, SecretBytes};

use super::mirror::{goes_on, suspend};
use super::snapshots::{drop_snapshot, take};
use super::tpm::added;
use super::{Session, console, done, refused};
use crate::keys::{reference_of, seal_for};

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
    let (key, from, shared) = (None, None, false);
    JobSpec::RestoreBackup(RestoreBackupJob {
        backup,
        directory,
        disks,
        opens_with,
        key,
        from,
        shared,
    })
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
    as_another(agent, session, above, &manifest.disks[0].facts).await;
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
    assert_eq!(manifest.version, WITH_TPM);
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

/// A VM that is suspended is backed up as one that is off, without the memory of its guest: it stays suspended, and its guest goes on
/// afterwards. The VM is off before and after.
pub async fn suspended(agent: &dyn HostAgent, session: &Session) {
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    done(agent.power_on(vm).await, "starting");
    session.power(agent, Power::Running).await;
    // A guest that boots does not hear what is typed.
    console(agent, session).await;
    suspend(agent, session).await;
    let (task, snapshot) = (TaskId::new(), SnapshotId::new());
    done(agent.put_job(vm, task, take(disk, snapshot)).await, "a snapshot");
    assert_eq!(session.worked(agent, task).await, JobState::Done);
    let (full, whole) = session.backed_up(agent, None, snapshot).await;
    let (above, changed) = session.backed_up(agent, Some(full), snapshot).await;
    assert_eq!((whole.parent, changed.parent), (None, Some(full)));
    for manifest in [&whole, &changed] {
        assert!(manifest.suspended && manifest.version == VERSION, "{manifest:?}");
        assert!(manifest.contents().suspended, "{manifest:?}");
    }
    for backup in [full, above] {
        let task = TaskId::new();
        done(agent.put_job(vm, task, verify(session, backup)).await, "verifying");
        assert_eq!(session.worked(agent, task).await, JobState::Done);
    }
    let task = TaskId::new();
    done(agent.put_job(vm, task, drop_snapshot(disk, snapshot)).await, "dropping the snapshot");
    assert_eq!(session.worked(agent, task).await, JobState::Done);
    // What it would go on with is not replaced under its guest.
    let restored = agent.put_job(vm, TaskId::new(), restore(session, full)).await;
    refused(restored, ErrorCode::WrongState, "restoring the disks of a guest that is to go on");
    assert_eq!(session.now(agent).await.power, Power::Suspended);
    goes_on(agent, session).await;
    done(agent.power_off(vm, PowerOff::Force).await, "forcing it off");
    assert_eq!(session.now(agent).await.power, Power::Off);
    for backup in [above, full] {
        done(agent.discard_backup(session.place(backup)).await, "removing a backup");
    }
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

/// A VM with a disk like the first one, and with a key of its own if that one's VM has one; registered with it.
async fn another(agent: &dyn HostAgent, session: &Session, facts: &DiskFacts) -> VmSpec {
    let (vm, kek) = (VmId::new(), SecretBytes::random(KEK_LEN).expect("locked memory"));
    let (disk, facts) = (DiskId::new(), Some(facts.clone()));
    let spec = VmSpec {
        vm,
        name: "contract-restored".to_owned(),
        key: session.spec.key.as_ref().map(|_| reference_of(&kek, vm, "new-key")),
        devices: vec![Device::Disk(DiskSpec { disk, facts, ..session.disk(0).clone() })],
        snapshots: Vec::new(),
        ..session.spec.clone()
    };
    done(agent.register_vm(spec.clone()).await, "registering another VM");
    if let Some(reference) = &spec.key {
        let sealed = seal_for(&session.key_box, vm, reference, &kek);
        done(agent.offer_key(vm, sealed).await, "its key");
    }
    spec
}

/// The first disk is restored as that of another VM, under a key of its own.
async fn as_another(agent: &dyn HostAgent, session: &Session, from: BackupId, facts: &DiskFacts) {
    let spec = another(agent, session, facts).await;
    let (vm, disk) = (spec.vm, spec.disk_at(0).expect("it has a disk").disk);
    let sealed = |of| {
        let key = session.spec.key.clone()?;
        let sealed = seal_for(&session.key_box, of, &key, &session.kek);
        Some(BackupKey { key, sealed })
    };
    let origin = RestoredFrom {
        vm: session.vm(),
        disks: [(disk, session.disk(0).disk)].into_iter().collect(),
    };
    let good = RestoreBackupJob {
        disks: vec![disk],
        key: sealed(session.vm()),
        from: Some(origin.clone()),
        ..of(&restore(session, from))
    };
    let with = |from| RestoreBackupJob { from: Some(from), ..good.clone() };
    let strange = [(disk, DiskId::new())].into_iter().collect();
    let unsaid = RestoredFrom { disks: Default::default(), ..origin.clone() };
    let (absent, invalid) = (ErrorCode::NotFound, ErrorCode::InvalidRequest);
    for (job, code, what) in [
        (with(unsaid), invalid, "a disk of which nothing is said"),
        (with(RestoredFrom { disks: strange, ..origin.clone() }), absent, "a disk not in it"),
        (with(RestoredFrom { vm, ..origin }), invalid, "the VM itself as another"),
        (RestoreBackupJob { key: None, from: None, ..good.clone() }, absent, "another's backup"),
    ] {
        let put = agent.put_job(vm, TaskId::new(), JobSpec::RestoreBackup(job)).await;
        refused(put, code, what);
    }
    if session.spec.key.is_some() {
        for (key, code) in [(None, ErrorCode::Locked), (sealed(vm), ErrorCode::KeyMismatch)] {
            let job = JobSpec::RestoreBackup(RestoreBackupJob { key, ..good.clone() });
            refused(agent.put_job(vm, TaskId::new(), job).await, code, "without the other's key");
        }
    }
    let (task, job) = (TaskId::new(), JobSpec::RestoreBackup(good.clone()));
    let keyless = JobSpec::RestoreBackup(RestoreBackupJob { key: None, ..good });
    for given_up in [true, false] {
        done(agent.put_job(vm, task, job.clone()).await, "restoring as another");
        ready_to_commit(agent, vm, task).await;
        if given_up {
            done(
                agent.cancel_job(vm, task, keyless.clone()).await,
                "giving it up, without the key",
            );
        }
    }
    for what in ["using what is restored", "using it again"] {
        done(agent.commit_job(vm, task, job.clone()).await, what);
    }
    if let Some(key) = spec.key {
        done(agent.check_key(vm, key).await, "opening it with the key of its own");
    }
    done(agent.delete_disk(vm, disk).await, "removing it");
    done(agent.unregister_vm(vm).await, "forgetting the other VM");
}

/// Waits until nothing is left of a VM's job but to commit it.
async fn ready_to_commit(agent: &dyn HostAgent, vm: VmId, task: TaskId) {
    loop {
        match done(agent.job(vm, task).await, "asking for a job").state {
            JobState::ReadyToCommit => return,
            JobState::Waiting | JobState::Running => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            ended => panic!("it is not restored: {ended:?}"),
        }
    }
}

fn of(job: &JobSpec) -> RestoreBackupJob {
    let JobSpec::RestoreBackup(job) = job else { unreachable!("it restores") };
    job.clone()
}
