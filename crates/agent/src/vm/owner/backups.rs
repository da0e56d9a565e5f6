//! Backups of a VM, as its owner begins, finishes and stops them.

use std::sync::Arc;

use tokio::task::spawn_blocking;
use vmseal_api::host::backup::BackupPlace;
use vmseal_api::host::{
    BackupJob, BackupKey, DiskFacts, DiskSpec, JobSpec, KeyReference, Power, RestoreBackupJob,
    SnapshotJob, VerifyBackupJob,
};
use vmseal_api::id::{BackupId, DiskId, SnapshotId, TaskId, VmId};
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use super::Owner;
use crate::rules::exclusion::Action;
use crate::rules::{self, find_disk};
use crate::storage::backup::{self, Creating, Restoring, TpmToKeep, Verifying};
use crate::timed;
use crate::vm::workers::Workers;
use crate::vm::{internal, tpm};

/// What a TPM kept at the instant of a snapshot.
pub(super) type KeptTpm = Option<(SnapshotId, Arc<TpmToKeep>)>;

impl Owner {
    fn place(&self, directory: &std::path::Path, backup: BackupId) -> BackupPlace {
        BackupPlace { directory: directory.to_owned(), vm: self.spec.vm, backup }
    }

    fn disks_of_backup(&self, disks: &[DiskId]) -> Result<Vec<(DiskSpec, DiskFacts)>, Problem> {
        let with_facts = |disk: &DiskId| {
            let disk = find_disk(&self.spec, *disk)?.clone();
            let facts = self.facts(&disk).ok_or_else(|| internal("a disk without facts"))?;
            Ok((disk, facts))
        };
        disks.iter().map(with_facts).collect()
    }

    /// The key of a backup of a VM, where that is not the key that this VM has.
    fn backup_key(
        &self,
        of: VmId,
        key: Option<&BackupKey>,
    ) -> Result<Option<(KeyReference, SecretBytes)>, Problem> {
        let open = |given: &BackupKey| {
            let kek = self.shared.key_box.open(of, &given.key, &given.sealed)?;
            Ok((given.key.clone(), kek))
        };
        key.map(open).transpose()
    }

    /// What a snapshot for a backup is to take along: what the VM's TPM keeps at the same instant.
    pub(super) async fn tpm_to_keep(
        &mut self,
        job: &SnapshotJob,
    ) -> Result<Option<Arc<TpmToKeep>>, Problem> {
        let Some(disk) = tpm::disk_of(&self.spec).filter(|_| job.tracked.is_some()).cloned() else {
            return Ok(None);
        };
        let vm = self.spec.clone();
        let of = spawn_blocking(move || TpmToKeep::of(&vm, &disk)).await.map_err(internal)??;
        let of = Arc::new(of);
        self.kept_tpm = Some((job.snapshot, Arc::clone(&of)));
        Ok(Some(of))
    }

    /// Whether a backup could be made so.
    pub(super) async fn ready_to_back_up(
        &self,
        job: &BackupJob,
        spec: &JobSpec,
    ) -> Result<Creating, Problem> {
        self.may_work(Action::BackUp, spec)?;
        let disks = self.disks_of_backup(&job.all_disks().collect::<Vec<_>>())?;
        for (disk, _) in disks.iter().filter(|(disk, _)| job.disks.contains(&disk.disk)) {
            self.keeps(disk, job.snapshot).await?;
        }
        let first = disks.first().map_or_else(DiskId::default, |(disk, _)| disk.disk);
        let creating = Creating {
            spec: self.spec.clone(),
            disks,
            kek: self.clone_kek()?,
            job: job.clone(),
            builder: Workers::builder_of_export(&self.shared, first),
            changed: self.changed_since(job).await,
            suspended: self.power() == Power::Suspended,
            tpm: self.kept_tpm.clone().filter(|(of, _)| *of == job.snapshot).map(|(_, it)| it),
        };
        timed::call(&job.directory, move || creating.check().map(|()| creating)).await
    }

    /// Whether a backup could be verified so.
    pub(super) async fn ready_to_verify(
        &self,
        job: &VerifyBackupJob,
        spec: &JobSpec,
    ) -> Result<Verifying, Problem> {
        self.may_work(Action::VerifyBackup, spec)?;
        let (place, allowed) =
            (self.place(&job.directory, job.backup), self.shared.transfer.clone());
        let known = place.clone();
        timed::call(&job.directory, move || backup::read(&known, &allowed)).await?;
        let key = match self.backup_key(self.spec.vm, job.key.as_ref())? {
            None => self.spec.key.clone().zip(self.clone_kek()?),
            other => other,
        };
        let builder = Workers::builder_of_export(&self.shared, job.disk);
        let opens_with = job.opens_with.clone();
        let (spec, swtpm) = (self.spec.clone(), self.shared.swtpm.clone());
        Ok(Verifying { spec, place, opens_with, key, builder, swtpm })
    }

    /// Whether disks could be restored so.
    pub(super) async fn ready_to_restore(
        &self,
        task: TaskId,
        job: &RestoreBackupJob,
        spec: &JobSpec,
    ) -> Result<Restoring, Problem> {
        self.may_work(Action::Restore, spec)?;
        let disks = job.disks.iter().map(|disk| find_disk(&self.spec, *disk).cloned());
        let disks = disks.collect::<Result<Vec<_>, _>>()?;
        let first = disks.first().map_or_else(DiskId::default, |disk| disk.disk);
        let backed_up = job.backed_up(self.spec.vm);
        let restoring = Restoring {
            spec: self.spec.clone(),
            disks,
            task,
            place: BackupPlace { vm: backed_up, ..self.place(&job.directory, job.backup) },
            from: job.from.clone(),
            shared: job.shared,
            opens_with: job.opens_with.clone(),
            kek: self.clone_kek()?,
            other: self.backup_key(backed_up, job.key.as_ref())?,
            builder: Workers::builder_of_export(&self.shared, first),
        };
        timed::call(&job.directory, move || restoring.check().map(|()| restoring)).await
    }

    pub(super) async fn put_backup(
        &mut self,
        task: TaskId,
        job: &BackupJob,
        spec: JobSpec,
    ) -> Result<(), Problem> {
        let creating = self.ready_to_back_up(job, &spec).await?;
        let first = first_of(&job.disks)?;
        self.jobs.begin(task, spec);
        self.workers.begin_backup(first, creating);
        Ok(())
    }

    pub(super) async fn put_verification(
        &mut self,
        task: TaskId,
        job: &VerifyBackupJob,
        spec: JobSpec,
    ) -> Result<(), Problem> {
        let verifying = self.ready_to_verify(job, &spec).await?;
        self.jobs.begin(task, spec);
        self.workers.begin_verification(job.disk, verifying);
        Ok(())
    }

    pub(super) async fn put_restore(
        &mut self,
        task: TaskId,
        job: &RestoreBackupJob,
        spec: JobSpec,
    ) -> Result<(), Problem> {
        // A task that has ended without a word to this host holds the disks for nobody.
        self.jobs.give_up_restores(task, &job.disks);
        let restoring = self.ready_to_restore(task, job, &spec).await?;
        let first = first_of(&job.disks)?;
        self.jobs.begin(task, spec);
        self.workers.begin_restore(first, restoring);
        Ok(())
    }

    pub(super) async fn commit_backup(
        &mut self,
        task: TaskId,
        job: &BackupJob,
    ) -> Result<(), Problem> {
        let (place, allowed) =
            (self.place(&job.directory, job.backup), self.shared.transfer.clone());
        let named = spawn_blocking(move || backup::commit(&place, &allowed));
        named.await.map_err(internal)??;
        if let Some(parent) = job.parent {
            // The next one is above this one.
            self.end_tracking(parent, &job.disks).await;
        }
        self.jobs.committed(task);
        Ok(())
    }

    pub(super) async fn commit_restore(
        &mut self,
        task: TaskId,
        job: RestoreBackupJob,
        spec: &JobSpec,
    ) -> Result<(), Problem> {
        // The guest must not run; the job itself may be that of an earlier agent.
        if self.jobs.spec(task).is_none() {
            self.may_work(Action::Restore, spec)?;
        } else if self.power() != Power::Off {
            return Err(rules::wrong_state(&self.spec, "is not off: its disks cannot be restored"));
        }
        let (vm, known) = (self.spec.clone(), self.spec.clone());
        let disks = spec.disks().into_iter().map(|disk| find_disk(&known, disk).cloned());
        let disks = disks.collect::<Result<Vec<_>, _>>()?;
        let used = spawn_blocking(move || backup::use_restored(&vm, &disks, task));
        used.await.map_err(internal)??;
        tracing::info!(vm = %self.spec.vm, backup = %job.backup, "disks are restored");
        self.jobs.committed(task);
        Ok(())
    }

    /// Removes what a job that is cancelled has written.
    pub(super) async fn cancel_backup(&self, spec: &JobSpec) -> Result<(), Problem> {
        match spec {
            JobSpec::Backup(job) => {
                let place = self.place(&job.directory, job.backup);
                let allowed = self.shared.transfer.clone();
                let removed = move || {
                    let found = backup::Backups::find(&place, &allowed)?;
                    found.map_or(Ok(()), |backups| backups.remove_unfinished(place.backup))
                };
                spawn_blocking(removed).await.map_err(internal)?
            }
            JobSpec::RestoreBackup(job) => {
                let disks = job.disks.iter().map(|disk| find_disk(&self.spec, *disk).cloned());
                let disks = disks.collect::<Result<Vec<_>, _>>()?;
                let vm = self.spec.clone();
                spawn_blocking(move || backup::discard_restored(&vm, &disks))
                    .await
                    .map_err(internal)?
            }
            _ => Ok(()),
        }
    }
}

/// The disk whose worker does the work of all.
fn first_of(disks: &[DiskId]) -> Result<DiskId, Problem> {
    disks.first().copied().ok_or_else(|| Problem::invalid("disks", "at least one is needed"))
}
