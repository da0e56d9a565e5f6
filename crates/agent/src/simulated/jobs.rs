//! The jobs of a simulated host: disks are records; of exported files only the names are kept.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Instant;

use vmseal_api::cloud_init::Documents;
use vmseal_api::host::{DiskRole, ExportJob, JobKind, JobSpec, JobState, Power, SendJob};
use vmseal_api::id::{DiskId, TaskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::calls::Later;
use super::{Inside, Work};
use crate::rules::exclusion::Action;
use crate::rules::{self, find_disk};
use crate::storage::image::Image;
use crate::storage::tpm_import;
use crate::storage::transfer::TransferDirectories;
use crate::storage::variables;

/// The exported files on the host.
#[derive(Default)]
pub struct Exports {
    unnamed: BTreeSet<TaskId>,
    named: BTreeMap<PathBuf, TaskId>,
}

impl Exports {
    pub fn files(&self) -> (Vec<PathBuf>, usize) {
        (self.named.keys().cloned().collect(), self.unnamed.len())
    }
}

impl Inside {
    /// Checks that a job can begin.
    pub fn ready(&mut self, vm: VmId, task: TaskId, job: &JobSpec) -> Result<(), Problem> {
        self.check_not_converted(vm, job)?;
        let situation = self.situation(vm)?;
        let action = match job {
            JobSpec::Create(_) => Action::CreateDisk,
            JobSpec::Export(job) if job.snapshot.is_some() => Action::ExportKept,
            JobSpec::Export(_) => Action::ExportDisk,
            JobSpec::Mirror(_) => Action::MirrorDisk,
            JobSpec::Convert(_) => Action::ConvertDisk,
            JobSpec::DropSources(_) => Action::DropSource,
            JobSpec::Snapshot(_) => Action::TakeSnapshot,
            JobSpec::Revert(_) => Action::Revert,
            JobSpec::DropSnapshot(_) => Action::DropSnapshot,
            JobSpec::Prove(_) => Action::Prove,
            JobSpec::Dump(_) => Action::Dump,
            JobSpec::DecryptDump(_) => Action::DecryptDump,
            JobSpec::Backup(_) => Action::BackUp,
            JobSpec::VerifyBackup(_) => Action::VerifyBackup,
            JobSpec::RestoreBackup(_) => Action::Restore,
            JobSpec::Send(job) if job.begins_at_rest() => Action::SendAtRest,
            JobSpec::Send(_) => Action::Send,
            JobSpec::Receive(_) => {
                return Err(rules::wrong_state(situation.spec, "is on this host already"));
            }
        };
        for disk in job.disks() {
            situation.may(action, Some(find_disk(situation.spec, disk)?))?;
        }
        let known = self.known(vm)?;
        let key = rules::key_state(&known.spec, known.key_held);
        rules::check_job(&known.spec, job, key, |disk| known.has_made(disk))?;
        if let JobSpec::Send(SendJob { begin: Some(departure), .. }) = job
            && departure.at_rest
        {
            let suspended = known.power == Power::Suspended;
            rules::check_sent_memory(&known.spec, suspended, departure.suspended)?;
        }
        if matches!(job, JobSpec::Send(_)) {
            self.require_unsaved(vm)?;
        }
        self.ready_for_snapshots(vm, job)?;
        self.ready_for_memory(vm, job)?;
        self.ready_for_backups(vm, job)?;
        self.ready_to_copy(vm, job)?;
        if let JobSpec::Dump(job) = job
            && self.full
            && !self.persisted.dumps.contains_key(&job.dump)
        {
            return Err(Problem::new(ErrorCode::NoSpace, "the simulated host is full"));
        }
        let export = match job {
            JobSpec::Mirror(mirror) => return self.ready_to_mirror(vm, task, mirror),
            JobSpec::Convert(job) => return self.ready_to_convert(vm, job),
            _ => match job.exported() {
                Some(export) => export,
                None => return Ok(()),
            },
        };
        if self.persisted.exports.named.contains_key(&export.to) {
            let what = format!("{} is there already", export.to.display());
            return Err(Problem::new(ErrorCode::AlreadyExists, what));
        }
        if let Some(sealed) = &export.passphrase {
            self.agent.key_box.open_passphrase(vm, export.disk, sealed)?;
        }
        Ok(())
    }

    pub fn put_job(&mut self, vm: VmId, task: TaskId, job: JobSpec) -> Result<Later, Problem> {
        if let JobSpec::Receive(receive) = &job
            && !self.agent.vms.contains_key(&vm)
        {
            return self.receive(vm, task, receive);
        }
        match self.known(vm)?.jobs.same(task, &job)? {
            None | Some(JobState::Failed { .. } | JobState::Cancelled) => {}
            Some(_) => {
                return match &job {
                    JobSpec::Mirror(mirror) => self.set_pace(vm, task, mirror.pace),
                    JobSpec::Send(SendJob { begin: Some(departure), .. }) => {
                        self.known(vm)?.jobs.set_departure(task, departure);
                        Ok(None)
                    }
                    _ => Ok(None),
                };
            }
        }
        if let JobSpec::RestoreBackup(job) = &job {
            self.known(vm)?.jobs.give_up_restores(task, &job.disks);
        }
        self.ready(vm, task, &job)?;
        if let JobSpec::Convert(job) = &job {
            return self.put_convert(vm, task, job);
        }
        if let JobSpec::Mirror(mirror) = &job {
            self.begin_mirror(task, mirror);
        }
        let lost = self.lost_documents(vm, &job);
        let known = self.known(vm)?;
        known.jobs.begin(task, job.clone());
        if let Some((disk, problem)) = wrong_source(&known.spec, &job).or(lost) {
            known.made.remove(&disk);
            known.jobs.failed(disk, problem);
            self.agent.publish(vm);
            return Ok(None);
        }
        for disk in job.disks() {
            let total = match &job {
                JobSpec::Create(_) => 0,
                _ => find_disk(&known.spec, disk)?.size,
            };
            known.jobs.progress(disk, 0, total, Instant::now());
        }
        if let JobSpec::Send(_) = job {
            self.begin_send(vm, task)?;
        }
        let known = self.known(vm)?;
        if known.jobs.pace(task).is_some_and(|pace| pace.paused) {
            self.agent.publish(vm);
            return Ok(None);
        }
        let of_kind = self.work_of.filter(|(kind, _)| *kind == job.kind());
        self.numbered(vm, Work::Job(task), of_kind.map_or(self.work, |(_, work)| work))
    }

    /// A disk for cloud-init that is not made, and whose documents cannot be opened; and why.
    fn lost_documents(&self, vm: VmId, job: &JobSpec) -> Option<(DiskId, Problem)> {
        let JobSpec::Create(create) = job else { return None };
        create.disks.iter().find_map(|wanted| {
            let sealed = wanted.cloud_init.as_ref()?;
            if self.persisted.disks.contains_key(&wanted.disk) {
                return None;
            }
            let opened = self.agent.key_box.open_cloud_init(vm, wanted.disk, sealed);
            let read = opened.and_then(|packed| {
                Documents::unpacked(packed.expose())
                    .map_err(|error| Problem::invalid("cloud_init", error.to_string()))
            });
            Some((wanted.disk, read.err()?))
        })
    }

    /// Ends the work of a job.
    pub fn worked(&mut self, vm: VmId, work: Work) {
        let Work::Job(task) = work else { return };
        let full = self.full;
        let own = self.persisted.panic_dumps.iter().map(|(_, known)| known.dump);
        let dumps: BTreeSet<_> = self.persisted.dumps.keys().copied().chain(own).collect();
        let Ok(known) = self.known(vm) else { return };
        let Ok(status) = known.jobs.status(task) else { return };
        if !matches!(status.state, JobState::Waiting | JobState::Running) {
            return;
        }
        let job = known.jobs.spec(task).cloned();
        match (&job, status.kind) {
            (Some(JobSpec::Send(_)), _) => self.migrated(vm, task, true),
            (Some(JobSpec::Receive(_)), _) => self.migrated(vm, task, false),
            (Some(JobSpec::Snapshot(job)), _) => {
                self.take_snapshot(&job.disks, job.snapshot);
                self.keep_memory(vm, job);
                self.all_made(vm, &job.disks);
            }
            (Some(JobSpec::Revert(job)), _) => {
                job.disks.iter().for_each(|disk| self.forget_bitmaps(vm, *disk));
                self.revert_memory(vm, job);
                self.all_made(vm, &job.disks);
            }
            (Some(JobSpec::DropSnapshot(job)), _) => {
                self.drop_snapshot(&job.disks, job.snapshot);
                self.persisted.kept_memories.remove(&job.snapshot);
                self.all_made(vm, &job.disks);
            }
            (Some(JobSpec::Prove(job)), _) => self.prove(vm, task, job),
            (
                Some(
                    job @ (JobSpec::Backup(_)
                    | JobSpec::VerifyBackup(_)
                    | JobSpec::RestoreBackup(_)),
                ),
                _,
            ) => self.backed_up(vm, task, job),
            (Some(JobSpec::Dump(job)), _) if full => {
                let problem = Problem::new(ErrorCode::NoSpace, "the simulated host is full");
                known.jobs.failed(job.disk, problem);
            }
            (Some(JobSpec::Dump(job)), _) => {
                let sealed = known.spec.key.is_some();
                self.persisted.dumps.insert(job.dump, (vm, sealed));
                self.all_made(vm, &[job.disk]);
            }
            (Some(JobSpec::DecryptDump(job)), _) if !dumps.contains(&job.dump) => {
                let what = "the core dump was removed";
                known.jobs.failed(job.disk, Problem::new(ErrorCode::NotFound, what));
            }
            (Some(JobSpec::DecryptDump(job)), _) => {
                known.jobs.written(job.disk);
                self.persisted.exports.unnamed.insert(task);
            }
            (Some(JobSpec::Convert(job)), _) => self.convert(vm, job),
            (_, JobKind::Mirror) => {
                status.disks.into_iter().for_each(|disk| known.jobs.written(disk))
            }
            (_, JobKind::DropSources) => {
                for disk in status.disks {
                    let former = self.drop_source(vm, disk);
                    let Ok(known) = self.known(vm) else { return };
                    known.jobs.removed(disk, former);
                }
            }
            (_, JobKind::Export) if full => {
                let problem = Problem::new(ErrorCode::NoSpace, "the simulated host is full");
                status.disks.into_iter().for_each(|disk| {
                    known.jobs.failed(disk, problem.clone());
                });
            }
            (_, JobKind::Export) => {
                status.disks.into_iter().for_each(|disk| known.jobs.written(disk));
                self.persisted.exports.unnamed.insert(task);
            }
            _ => {
                for disk in status.disks {
                    let made = self.make_disk(vm, disk);
                    if let (Ok(_), Some(job)) = (&made, &job) {
                        self.link(job, disk);
                    }
                    let Ok(known) = self.known(vm) else { return };
                    match made {
                        Ok(facts) => {
                            known.made.insert(disk, facts);
                            known.jobs.made(disk);
                        }
                        Err(problem) => {
                            known.made.remove(&disk);
                            known.jobs.failed(disk, problem);
                            return;
                        }
                    }
                }
            }
        }
    }

    pub fn commit_job(&mut self, vm: VmId, task: TaskId, job: JobSpec) -> Result<Later, Problem> {
        match job {
            JobSpec::Convert(job) => self.commit_convert(vm, task, &job),
            JobSpec::Send(_) => self.commit_send(vm, task).map(|()| None),
            JobSpec::Receive(_) => self.commit_receive(vm, task).map(|()| None),
            job => self.commit_result(vm, task, job).map(|()| None),
        }
    }

    fn commit_result(&mut self, vm: VmId, task: TaskId, job: JobSpec) -> Result<(), Problem> {
        let known = self.known(vm)?;
        let state = known.jobs.same(task, &job)?.cloned();
        if matches!(state, Some(JobState::Waiting | JobState::Running)) {
            return Err(rules::wrong_state(&known.spec, rules::NOT_READY_TO_COMMIT));
        }
        let is_done = state == Some(JobState::Done);
        if let Some(committed) = self.commit_backup(vm, task, &job, is_done) {
            return committed;
        }
        match job {
            JobSpec::Mirror(mirror) => self.commit_mirror(vm, task, &mirror),
            job => match job.exported() {
                Some(export) => {
                    self.check_export(vm, &export)?;
                    self.name(task, &export)?;
                    self.known(vm)?.jobs.committed(task);
                    self.agent.publish(vm);
                    Ok(())
                }
                None if state == Some(JobState::Done) => Ok(()),
                None => Err(rules::nothing_to_commit(task)),
            },
        }
    }

    fn all_made(&mut self, vm: VmId, disks: &[DiskId]) {
        if let Ok(known) = self.known(vm) {
            disks.iter().for_each(|disk| known.jobs.made(*disk));
        }
    }

    pub fn cancel_job(&mut self, vm: VmId, task: TaskId, job: JobSpec) -> Result<(), Problem> {
        if let JobSpec::Convert(job) = &job {
            self.cancel_convert(vm, task, job)?;
        }
        match &job {
            JobSpec::Send(_) => return self.cancel_send(vm, task),
            JobSpec::Receive(job) => return self.cancel_receive(vm, task, job),
            _ => {}
        }
        let known = self.known(vm)?;
        let state = known.jobs.same(task, &job)?.cloned();
        let at_work = matches!(state, Some(JobState::Waiting | JobState::Running));
        if at_work || state == Some(JobState::ReadyToCommit) {
            known.jobs.cancel(task);
            known.work.remove(&Work::Job(task));
            self.agent.publish(vm);
        }
        if let JobSpec::Mirror(mirror) = &job {
            return self.cancel_mirror(vm, task, mirror);
        }
        self.cancel_backup(task, &job)?;
        let Some(export) = job.exported() else { return Ok(()) };
        if state == Some(JobState::Cancelled) {
            return Ok(());
        }
        self.check_export(vm, &export)?;
        if self.persisted.exports.unnamed.remove(&task) || at_work {
            return Ok(());
        }
        if self.persisted.exports.named.get(&export.to) == Some(&task) {
            return Err(rules::has_its_name(&export.to));
        }
        Err(Problem::new(ErrorCode::NotFound, "there is no such unfinished export"))
    }

    fn check_export(&mut self, vm: VmId, export: &ExportJob) -> Result<(), Problem> {
        find_disk(&self.known(vm)?.spec, export.disk)?;
        rules::check_export(export)
    }

    fn name(&mut self, task: TaskId, export: &ExportJob) -> Result<(), Problem> {
        let Exports { unnamed, named } = &mut self.persisted.exports;
        match (unnamed.contains(&task), named.get(&export.to)) {
            (true, Some(_)) => {
                let what = format!("{} is there already", export.to.display());
                Err(Problem::new(ErrorCode::AlreadyExists, what))
            }
            (true, None) => {
                unnamed.remove(&task);
                named.insert(export.to.clone(), task);
                Ok(())
            }
            (false, Some(there)) if *there == task => Ok(()),
            (false, _) => Err(Problem::new(ErrorCode::NotFound, "the export is gone")),
        }
    }
}

/// The disk that cannot be filled from its source, and why.
fn wrong_source(spec: &vmseal_api::host::VmSpec, job: &JobSpec) -> Option<(DiskId, Problem)> {
    let JobSpec::Create(create) = job else { return None };
    create.disks.iter().find_map(|wanted| {
        let (source, disk) = (wanted.source.as_ref()?, spec.disk(wanted.disk)?);
        let anywhere = TransferDirectories::anywhere();
        let problem = match disk.role {
            DiskRole::UefiVariables => {
                variables::read(&source.path, spec.hardware.firmware, &anywhere).err()?
            }
            DiskRole::Tpm => tpm_import::read(&source.path, &anywhere).err()?,
            _ => Image::open(source, disk, &anywhere).err()?,
        };
        Some((disk.disk, problem))
    })
}
