//! Backups on a simulated host: manifests without files. They outlive the agent, as those of a real one do.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use vmseal_api::host::backup::{BackedUpDisk, BackedUpTpm, BackupManifest, BackupPlace};
use vmseal_api::host::{
    BackupJob, BackupKey, DiskFacts, DiskRole, JobSpec, KeyReference, Power, RestoreBackupJob,
};
use vmseal_api::id::{BackupId, DiskId, TaskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::transfer::ImageFormat;

use super::{Inside, SimulatedHost};
use crate::rules::{self, find_disk};
use crate::storage::backup::manifest_of;

/// The backups in the directories of the host, and the images that are restored from them.
#[derive(Default)]
pub struct Backups {
    unfinished: BTreeMap<BackupId, BackupManifest>,
    whole: BTreeMap<(PathBuf, BackupId), BackupManifest>,
    restoring: BTreeMap<DiskId, TaskId>,
    restored: BTreeMap<DiskId, BackupId>,
    /// Directories that are not there now.
    away: BTreeSet<PathBuf>,
}

impl SimulatedHost {
    /// The backups that are whole, and how many are not.
    #[must_use]
    pub fn backups(&self) -> (Vec<BackupId>, usize) {
        let inside = self.inside();
        let Backups { whole, unfinished, .. } = &inside.persisted.backups;
        (whole.keys().map(|(_, backup)| *backup).collect(), unfinished.len())
    }

    /// Has this host's directories what is in those of another one now, as when both have mounted the same.
    pub fn mount_backups_of(&self, other: &Self) {
        let whole = other.inside().persisted.backups.whole.clone();
        self.inside().persisted.backups.whole.extend(whole);
    }

    /// A directory is taken away, with what is in it, as when its file system is unmounted; or it is there again.
    pub fn set_directory(&self, directory: &Path, is_there: bool) {
        let away = &mut self.inside().persisted.backups.away;
        match is_there {
            true => drop(away.remove(directory)),
            false => drop(away.insert(directory.to_owned())),
        }
    }

    /// The backup that a disk was restored from last, and whether there is a restored image that is not used.
    #[must_use]
    pub fn restored(&self, disk: DiskId) -> (Option<BackupId>, bool) {
        let inside = self.inside();
        let Backups { restored, restoring, .. } = &inside.persisted.backups;
        (restored.get(&disk).copied(), restoring.contains_key(&disk))
    }
}

fn absent(backup: BackupId) -> Problem {
    Problem::new(ErrorCode::NotFound, format!("there is no backup {backup}"))
}

impl Inside {
    fn check_directory(&self, directory: &Path) -> Result<(), Problem> {
        if !directory.is_absolute() {
            return Err(Problem::invalid("directory", "must be an absolute path"));
        }
        if self.persisted.backups.away.contains(directory) {
            let what = format!("{} is no directory of this host", directory.display());
            return Err(Problem::invalid("directory", what));
        }
        Ok(())
    }

    fn whole_backup(&self, directory: &Path, backup: BackupId) -> Result<&BackupManifest, Problem> {
        self.check_directory(directory)?;
        let known = self.persisted.backups.whole.get(&(directory.to_owned(), backup));
        known.ok_or_else(|| absent(backup))
    }

    /// Checks what the files of a real host say.
    pub fn ready_for_backups(&mut self, vm: VmId, job: &JobSpec) -> Result<(), Problem> {
        match job {
            JobSpec::Backup(job) => {
                let name = self.known(vm)?.spec.name.clone();
                for id in &job.disks {
                    let disk = find_disk(&self.known(vm)?.spec, *id)?.clone();
                    if !self.keeps(*id, job.snapshot) {
                        return Err(rules::no_snapshot(&name, &disk, job.snapshot));
                    }
                }
                job.beside
                    .iter()
                    .try_for_each(|id| find_disk(&self.known(vm)?.spec, *id).map(drop))?;
                match job.parent {
                    Some(parent) => self.whole_backup(&job.directory, parent).map(drop),
                    None => self.check_directory(&job.directory),
                }
            }
            JobSpec::VerifyBackup(job) => {
                self.whole_backup(&job.directory, job.backup)?;
                self.opened_key(vm, job.key.as_ref())
            }
            JobSpec::RestoreBackup(job) => self.ready_to_restore(vm, job),
            _ => Ok(()),
        }
    }

    fn ready_to_restore(&mut self, vm: VmId, job: &RestoreBackupJob) -> Result<(), Problem> {
        let manifest = self.whole_backup(&job.directory, job.backup)?.clone();
        if manifest.vm.vm != job.backed_up(vm) {
            return Err(absent(job.backup));
        }
        self.opened_key(job.backed_up(vm), job.key.as_ref())?;
        self.check_key_of_backup(vm, &manifest, &job.opens_with, job.key.as_ref())?;
        for id in &job.disks {
            let spec = self.known(vm)?.spec.clone();
            let disk = find_disk(&spec, *id)?;
            if self.has_snapshots(*id) {
                return Err(rules::has_snapshots(&spec, disk));
            }
            let entry = manifest.disks.iter().find(|it| it.disk == job.disk_in_backup(*id));
            let encrypted = entry.ok_or_else(|| absent(job.backup))?.facts != DiskFacts::Raw;
            if encrypted != disk.encrypted {
                let what = format!("disk '{}' is not encrypted as it was", disk.name);
                return Err(Problem::new(ErrorCode::WrongState, what));
            }
        }
        Ok(())
    }

    fn opened_key(&mut self, vm: VmId, key: Option<&BackupKey>) -> Result<(), Problem> {
        let open = |given: &BackupKey| self.agent.key_box.open(vm, &given.key, &given.sealed);
        key.map(open).transpose().map(drop)
    }

    /// Whether the key that a backup names is at hand.
    fn check_key_of_backup(
        &mut self,
        vm: VmId,
        manifest: &BackupManifest,
        expected: &Option<KeyReference>,
        key: Option<&BackupKey>,
    ) -> Result<(), Problem> {
        if manifest.vm.key != *expected {
            let what = "the manifest names another key than the backup has";
            return Err(Problem::new(ErrorCode::Damaged, what));
        }
        let held = match key {
            Some(given) => Some(given.key.clone()),
            None => self.known(vm)?.spec.key.clone(),
        };
        if manifest.vm.key.is_none() || manifest.vm.key == held {
            return Ok(());
        }
        let what = format!("backup '{}' needs a key that is not on this host", manifest.name);
        Err(Problem::new(ErrorCode::Locked, what))
    }

    /// Ends the work of a job.
    pub fn backed_up(&mut self, vm: VmId, task: TaskId, job: &JobSpec) {
        let ended = match job {
            JobSpec::Backup(_) if self.full => {
                Err(Problem::new(ErrorCode::NoSpace, "the simulated host is full"))
            }
            JobSpec::Backup(job) => self.write_backup(vm, job),
            JobSpec::VerifyBackup(it) => {
                let found = self.whole_backup(&it.directory, it.backup).cloned();
                found.and_then(|found| {
                    self.check_key_of_backup(vm, &found, &it.opens_with, it.key.as_ref())
                        .map(|()| found)
                })
            }
            JobSpec::RestoreBackup(it) => {
                let found = self.whole_backup(&it.directory, it.backup).cloned();
                let begun = it.disks.iter().map(|disk| (*disk, task));
                self.persisted.backups.restoring.extend(begun);
                found
            }
            _ => return,
        };
        let Ok(known) = self.known(vm) else { return };
        let Some(first) = job.disks().first().copied() else { return };
        match ended {
            Ok(manifest) => known.jobs.backed_up(first, Box::new(manifest), None),
            Err(problem) => drop(known.jobs.failed(first, problem)),
        }
    }

    fn write_backup(&mut self, vm: VmId, job: &BackupJob) -> Result<BackupManifest, Problem> {
        self.check_directory(&job.directory)?;
        let place = (job.directory.clone(), job.backup);
        if let Some(there) = self.persisted.backups.whole.get(&place) {
            return Ok(there.clone());
        }
        let parent = job.parent.map(|id| self.whole_backup(&job.directory, id)).transpose()?;
        let parent = parent.cloned();
        let known = self.known(vm)?;
        let mut disks = Vec::new();
        for id in &job.all_disks().collect::<Vec<_>>() {
            let disk = find_disk(&known.spec, *id)?;
            let facts = disk.facts.clone().or_else(|| known.made.get(id).cloned());
            let facts = facts.unwrap_or(DiskFacts::Raw);
            let offset = crate::storage::opening::data_offset(&facts);
            let above = parent.as_ref().is_some_and(|parent| {
                let mut below = parent.disks.iter().filter(|it| it.disk == *id);
                below.any(|it| it.facts == facts && it.length == offset + disk.size)
            });
            let (format, extension) =
                if above { (ImageFormat::Qcow2, "qcow2") } else { (ImageFormat::Raw, "luks") };
            disks.push(BackedUpDisk {
                disk: *id,
                name: disk.name.clone(),
                file: format!("{}.{extension}", disk.name),
                format,
                length: offset + disk.size,
                bytes: if above { 1 << 16 } else { disk.size },
                facts,
                tpm: (disk.role == DiskRole::Tpm).then(|| BackedUpTpm {
                    file: format!("{}.tpm", disk.name),
                    bytes: 1,
                    sha256: "0".repeat(64),
                    later: false,
                }),
                sums: format!("{}.sums", disk.name),
                sums_sha256: "0".repeat(64),
            });
        }
        let (kek, suspended) = (known.kek.as_ref(), known.power == Power::Suspended);
        let manifest = manifest_of(&known.spec, job, disks, kek, suspended)?;
        // As a real host removes what is left in the VM's directory.
        self.persisted.backups.unfinished.retain(|_, left| left.vm.vm != vm);
        self.persisted.backups.unfinished.insert(job.backup, manifest.clone());
        Ok(manifest)
    }

    /// Names a backup, or uses restored images; none where the job is another.
    pub fn commit_backup(
        &mut self,
        vm: VmId,
        task: TaskId,
        job: &JobSpec,
        is_done: bool,
    ) -> Option<Result<(), Problem>> {
        let committed = match job {
            JobSpec::Backup(job) => {
                if let Err(away) = self.check_directory(&job.directory) {
                    return Some(Err(away));
                }
                let place = (job.directory.clone(), job.backup);
                let Backups { unfinished, whole, .. } = &mut self.persisted.backups;
                if let Some(manifest) = unfinished.remove(&job.backup) {
                    whole.insert(place, manifest);
                    Ok(())
                } else {
                    whole.get(&place).map(drop).ok_or_else(|| absent(job.backup))
                }
            }
            JobSpec::RestoreBackup(_) if is_done => Ok(()),
            JobSpec::RestoreBackup(job) => self.use_restored(vm, task, job),
            _ => return None,
        };
        Some(committed.and_then(|()| {
            self.known(vm)?.jobs.committed(task);
            self.agent.publish(vm);
            Ok(())
        }))
    }

    fn use_restored(
        &mut self,
        vm: VmId,
        task: TaskId,
        job: &RestoreBackupJob,
    ) -> Result<(), Problem> {
        let manifest = self.whole_backup(&job.directory, job.backup)?.clone();
        let key = self.known(vm)?.spec.key.clone();
        let mut found = false;
        for (number, id) in job.disks.iter().enumerate() {
            if self.halfway && number > 0 {
                return Err(super::gone());
            }
            let Backups { restoring, restored, .. } = &mut self.persisted.backups;
            if restoring.get(id) != Some(&task) {
                continue;
            }
            restoring.remove(id);
            restored.insert(*id, job.backup);
            found = true;
            self.make_disk(vm, *id)?;
            self.forget_bitmaps(vm, *id);
            let entry = manifest.disks.iter().find(|it| it.disk == job.disk_in_backup(*id));
            if let (Some(image), Some(entry)) = (self.persisted.disks.get_mut(id), entry) {
                let key = key.clone().filter(|_| entry.facts != DiskFacts::Raw);
                image.facts = entry.facts.clone();
                image.checks = key.iter().map(|key| key.check.clone()).collect();
                image.keys = key.into_iter().collect();
                image.shared = !image.keys.is_empty() && (job.shared || job.from.is_some());
            }
        }
        if found { Ok(()) } else { Err(rules::nothing_to_commit(task)) }
    }

    /// Removes what a cancelled job has written.
    pub fn cancel_backup(&mut self, task: TaskId, job: &JobSpec) -> Result<(), Problem> {
        if let JobSpec::Backup(job) = job {
            self.check_directory(&job.directory)?;
        }
        let Backups { unfinished, restoring, .. } = &mut self.persisted.backups;
        match job {
            JobSpec::Backup(job) => drop(unfinished.remove(&job.backup)),
            JobSpec::RestoreBackup(_) => restoring.retain(|_, of| *of != task),
            _ => {}
        }
        Ok(())
    }

    pub fn read_backup(&mut self, place: &BackupPlace) -> Result<BackupManifest, Problem> {
        self.whole_backup(&place.directory, place.backup).cloned()
    }

    pub fn discard_backup(&mut self, place: &BackupPlace) -> Result<(), Problem> {
        self.check_directory(&place.directory)?;
        let Backups { unfinished, whole, .. } = &mut self.persisted.backups;
        unfinished.remove(&place.backup);
        whole.remove(&(place.directory.clone(), place.backup));
        Ok(())
    }
}
