//! The jobs of a VM's disks, as the VM's owner begins, finishes and stops them.

use std::time::Instant;

use tokio::task::spawn_blocking;
use vmseal_api::host::{
    CopyOf, CreateJob, DiskFacts, DiskRole, DiskSpec, DiskToCreate, ExportJob, JobSpec, JobState,
    SendJob,
};
use vmseal_api::id::{DiskId, SnapshotId, TaskId};
use vmseal_api::problem::Problem;

use super::Owner;
use crate::rules::exclusion::Action;
use crate::rules::{self, find_disk};
use crate::storage::cloning::Lent;
use crate::storage::disk::{NewDisk, Source};
use crate::storage::export::{self, Export, ExportRequest};
use crate::storage::home::Home;
use crate::storage::layers;
use crate::timed;
use crate::vm::internal;
use crate::vm::report::Report;

/// The work to begin.
enum Ready {
    Create(Vec<NewDisk>),
    Export(Box<ExportRequest>),
    /// It begins elsewhere.
    Nothing,
}

impl Owner {
    /// Checks whether a job could begin.
    pub(super) async fn examine_job(&self, spec: JobSpec) -> Result<(), Problem> {
        self.check_not_converted(&spec).await?;
        self.ready(TaskId::new(), &spec, Vec::new()).await.map(drop)
    }

    /// Lends a disk to be read: one that nobody writes, or what a snapshot keeps of it.
    pub(super) async fn lend(&mut self, of: CopyOf) -> Result<Lent, Problem> {
        let disk = find_disk(&self.spec, of.disk)?.clone();
        let facts = self.facts(&disk);
        rules::check_copied(&self.spec, &disk, self.key(), facts.is_some())?;
        let Some(facts) = facts else { return Err(internal("a disk without facts")) };
        match of.snapshot {
            None => drop(self.situation().may(rules::lending(&disk), Some(&disk))?),
            Some(snapshot) => self.keeps(&disk, snapshot).await?,
        }
        if of.linked {
            self.share(&disk).await?;
        }
        let (kek, linked) = (if disk.encrypted { self.clone_kek()? } else { None }, of.linked);
        Ok(Lent { spec: self.spec.clone(), disk, facts, kek, snapshot: of.snapshot, linked })
    }

    /// Checks that a snapshot keeps something of a disk.
    pub(super) async fn keeps(&self, disk: &DiskSpec, snapshot: SnapshotId) -> Result<(), Problem> {
        let (vm, name, of) = (self.spec.vm, self.spec.name.clone(), disk.clone());
        let look = move || {
            let home = Home::of(&of.datastore, vm)?;
            let kept = layers::read(&home, of.disk)?.layer_of(snapshot);
            kept.map(drop).ok_or_else(|| rules::no_snapshot(&name, &of, snapshot))
        };
        spawn_blocking(look).await.map_err(internal)?
    }

    pub(super) async fn put_job(
        &mut self,
        task: TaskId,
        spec: JobSpec,
        lent: Vec<Lent>,
    ) -> Result<(), Problem> {
        match self.jobs.same(task, &spec)? {
            None | Some(JobState::Failed { .. } | JobState::Cancelled) => {}
            Some(_) => {
                return match &spec {
                    JobSpec::Mirror(job) => self.set_pace(task, job.pace).await,
                    JobSpec::Send(SendJob { begin: Some(departure), .. }) => {
                        self.set_departure(task, departure);
                        Ok(())
                    }
                    _ => Ok(()),
                };
            }
        }
        self.check_not_converted(&spec).await?;
        match &spec {
            JobSpec::Mirror(job) => return self.put_mirror(task, &job.clone(), spec).await,
            JobSpec::Convert(job) => return self.put_convert(task, &job.clone(), spec).await,
            JobSpec::DropSources(job) => return self.put_drop_sources(task, &job.clone(), spec),
            JobSpec::Snapshot(job) => return self.put_snapshot(task, &job.clone(), spec).await,
            JobSpec::Revert(job) => return self.put_revert(task, &job.clone(), spec).await,
            JobSpec::DropSnapshot(job) => {
                return self.put_drop_snapshot(task, &job.clone(), spec).await;
            }
            JobSpec::Prove(job) => return self.put_proof(task, job.clone(), spec),
            JobSpec::Dump(job) => return self.put_dump(task, job.clone(), spec).await,
            JobSpec::DecryptDump(job) => return self.put_decryption(task, job.clone(), spec).await,
            JobSpec::Backup(job) => return self.put_backup(task, &job.clone(), spec).await,
            JobSpec::VerifyBackup(job) => {
                return self.put_verification(task, &job.clone(), spec).await;
            }
            JobSpec::RestoreBackup(job) => return self.put_restore(task, &job.clone(), spec).await,
            JobSpec::Send(job) if job.begins_at_rest() => {
                return self.put_send_at_rest(task, &job.clone(), spec).await;
            }
            JobSpec::Send(job) => return self.put_send(task, &job.clone(), spec).await,
            JobSpec::Receive(_) => self.ready(task, &spec, Vec::new()).await.map(drop)?,
            JobSpec::Create(_) | JobSpec::Export(_) => {}
        }
        let ready = self.ready(task, &spec, lent).await?;
        self.jobs.begin(task, spec);
        match ready {
            Ready::Create(new_disks) => {
                new_disks
                    .into_iter()
                    .for_each(|new_disk| self.workers.begin(&self.shared, new_disk));
            }
            Ready::Nothing => {}
            Ready::Export(request) => {
                self.jobs.progress(request.disk.disk, 0, request.disk.size, Instant::now());
                self.workers.begin_export(&self.shared, *request);
            }
        }
        Ok(())
    }

    async fn ready(&self, task: TaskId, spec: &JobSpec, lent: Vec<Lent>) -> Result<Ready, Problem> {
        match spec {
            JobSpec::Create(create) => self.ready_to_create(create, spec, lent).map(Ready::Create),
            JobSpec::Export(export) => {
                let request = self.ready_to_export(task, export, spec).await;
                request.map(|request| Ready::Export(Box::new(request)))
            }
            JobSpec::Mirror(job) => {
                self.ready_to_mirror(task, job, spec).await.map(|_| Ready::Nothing)
            }
            JobSpec::Convert(job) => {
                self.ready_to_convert(task, job, spec).await.map(|()| Ready::Nothing)
            }
            JobSpec::DropSources(_) => {
                self.may_work(Action::DropSource, spec).map(|()| Ready::Nothing)
            }
            JobSpec::Snapshot(_) => {
                self.may_work(Action::TakeSnapshot, spec).map(|()| Ready::Nothing)
            }
            JobSpec::Revert(job) => self.ready_to_revert(job, spec).map(|()| Ready::Nothing),
            JobSpec::DropSnapshot(job) => {
                self.may_work(Action::DropSnapshot, spec)?;
                self.can_drop(job).await.map(|()| Ready::Nothing)
            }
            JobSpec::Prove(_) => self.may_work(Action::Prove, spec).map(|()| Ready::Nothing),
            JobSpec::Dump(job) => self.ready_to_dump(job, spec).await.map(|_| Ready::Nothing),
            JobSpec::DecryptDump(job) => {
                self.ready_to_decrypt(task, job, spec).await.map(|_| Ready::Nothing)
            }
            JobSpec::Backup(job) => self.ready_to_back_up(job, spec).await.map(|_| Ready::Nothing),
            JobSpec::VerifyBackup(job) => {
                self.ready_to_verify(job, spec).await.map(|_| Ready::Nothing)
            }
            JobSpec::RestoreBackup(job) => {
                self.ready_to_restore(task, job, spec).await.map(|_| Ready::Nothing)
            }
            JobSpec::Send(_) => {
                self.ready_to_send(spec)?;
                self.require_unsaved().await.map(|()| Ready::Nothing)
            }
            // Its VM is here: it has come, or was never away.
            JobSpec::Receive(_) => Err(rules::wrong_state(&self.spec, "is on this host already")),
        }
    }

    /// Checks the action for each disk of a job.
    pub(super) fn may_work(&self, action: Action, spec: &JobSpec) -> Result<(), Problem> {
        let situation = self.situation();
        for disk in spec.disks() {
            situation.may(action, Some(find_disk(&self.spec, disk)?))?;
        }
        rules::check_job(&self.spec, spec, self.key(), |disk| self.facts(disk).is_some())
    }

    fn ready_to_create(
        &self,
        create: &CreateJob,
        job: &JobSpec,
        mut lent: Vec<Lent>,
    ) -> Result<Vec<NewDisk>, Problem> {
        self.may_work(Action::CreateDisk, job)?;
        let new_disk = |wanted: &DiskToCreate| {
            let disk = find_disk(&self.spec, wanted.disk)?.clone();
            if let Some(of) = wanted.copy_of {
                let found = lent.iter().position(|lent| lent.disk.disk == of.disk);
                let found = found.ok_or_else(|| internal("a disk to be read was not lent"))?;
                let lent = lent.swap_remove(found);
                rules::check_copy(&disk, &lent.disk)?;
                let source = Some(Source::Copy(Box::new(lent)));
                let kek = if disk.encrypted { self.clone_kek()? } else { None };
                return Ok(NewDisk { spec: self.spec.clone(), disk, kek, source });
            }
            let key_box = &self.shared.key_box;
            let open = |sealed| key_box.open_cloud_init(self.spec.vm, disk.disk, sealed);
            let source = match disk.role {
                DiskRole::Data => wanted.source.clone().map(Source::Image),
                DiskRole::CloudInit => {
                    wanted.cloud_init.as_ref().map(|sealed| Source::CloudInit(open(sealed)))
                }
                DiskRole::Tpm => {
                    Some(Source::Tpm(self.shared.swtpm.clone(), wanted.source.clone()))
                }
                DiskRole::UefiVariables => {
                    let firmware = self.spec.hardware.firmware;
                    Some(match wanted.source.clone() {
                        Some(source) => Source::TakenVariables(source, firmware),
                        None => Source::Variables(self.shared.firmware.clone(), firmware),
                    })
                }
            };
            let kek = if disk.encrypted { self.clone_kek()? } else { None };
            Ok(NewDisk { spec: self.spec.clone(), disk, kek, source })
        };
        create.disks.iter().map(new_disk).collect()
    }

    async fn ready_to_export(
        &self,
        task: TaskId,
        job: &ExportJob,
        spec: &JobSpec,
    ) -> Result<ExportRequest, Problem> {
        let disk = find_disk(&self.spec, job.disk)?.clone();
        match job.snapshot {
            None => self.may_work(Action::ExportDisk, spec)?,
            Some(snapshot) => {
                self.may_work(Action::ExportKept, spec)?;
                self.keeps(&disk, snapshot).await?;
            }
        }
        let swtpm = self.shared.swtpm.clone();
        if disk.role == DiskRole::Tpm {
            swtpm.examine()?;
        }
        let export = Export { task, job: job.clone() };
        let (wanted, transfer) = (export.clone(), self.shared.transfer.clone());
        timed::call(&job.to, move || export::check(&wanted, &transfer)).await?;
        let open = |sealed| self.shared.key_box.open_passphrase(self.spec.vm, disk.disk, sealed);
        let passphrase = job.passphrase.as_ref().map(open).transpose()?;
        let Some(facts) = self.facts(&disk) else { return Err(internal("a disk without facts")) };
        let kek = if disk.encrypted { self.clone_kek()? } else { None };
        let record = self.shared.run_dir.exported(disk.disk);
        let spec = self.spec.clone();
        Ok(ExportRequest { spec, disk, facts, kek, export, passphrase, record, swtpm })
    }

    pub(super) async fn commit_job(&mut self, task: TaskId, spec: JobSpec) -> Result<(), Problem> {
        let state = self.jobs.same(task, &spec)?.cloned();
        if let JobSpec::Convert(job) = &spec {
            return self.commit_convert(task, job, state.as_ref()).await;
        }
        if matches!(state, Some(JobState::Waiting | JobState::Running)) {
            return Err(rules::wrong_state(&self.spec, rules::NOT_READY_TO_COMMIT));
        }
        match spec {
            JobSpec::Send(_) => self.commit_send().await,
            // Its guest runs here, or has since this agent started.
            JobSpec::Receive(_) => Ok(()),
            JobSpec::Create(_)
            | JobSpec::Convert(_)
            | JobSpec::DropSources(_)
            | JobSpec::Snapshot(_)
            | JobSpec::Revert(_)
            | JobSpec::DropSnapshot(_)
            | JobSpec::Prove(_)
            | JobSpec::Dump(_)
            | JobSpec::VerifyBackup(_) => match state {
                Some(JobState::Done) => Ok(()),
                _ => Err(rules::nothing_to_commit(task)),
            },
            JobSpec::Mirror(job) => match state {
                Some(JobState::Done) => Ok(()),
                Some(JobState::Cancelled | JobState::Failed { .. }) => {
                    Err(rules::nothing_to_commit(task))
                }
                // Of an earlier agent, too: its notes say what is there.
                _ => self.commit_mirror(task, &job).await,
            },
            JobSpec::Backup(job) => self.commit_backup(task, &job).await,
            JobSpec::RestoreBackup(_) if state == Some(JobState::Done) => Ok(()),
            JobSpec::RestoreBackup(ref job) => self.commit_restore(task, job.clone(), &spec).await,
            JobSpec::Export(_) | JobSpec::DecryptDump(_) => {
                let Some(job) = spec.exported() else { return Err(internal("no file is written")) };
                let record = self.record_of(&job)?;
                let (export, transfer) = (Export { task, job }, self.shared.transfer.clone());
                let named = spawn_blocking(move || export::name(&export, &record, &transfer));
                named.await.map_err(internal)??;
                self.jobs.committed(task);
                Ok(())
            }
        }
    }

    pub(super) async fn cancel_job(&mut self, task: TaskId, spec: JobSpec) -> Result<(), Problem> {
        let state = self.jobs.same(task, &spec)?.cloned();
        match &spec {
            JobSpec::Mirror(job) => return self.cancel_mirror(task, job).await,
            JobSpec::Convert(job) => return self.cancel_convert(task, job).await,
            JobSpec::Send(_) => return self.cancel_send(task).await,
            JobSpec::Receive(_) => {
                let what = "runs on this host: its migration cannot be cancelled any more";
                return Err(rules::wrong_state(&self.spec, what));
            }
            _ => {}
        }
        self.stop_keeping(task).await;
        let at_work = matches!(state, Some(JobState::Waiting | JobState::Running));
        if at_work || state == Some(JobState::ReadyToCommit) {
            // Reports that its workers still send are about files that are removed here.
            for disk in self.jobs.cancel(task) {
                self.workers.cancel(disk).await;
            }
        }
        match spec.exported() {
            Some(_) if state == Some(JobState::Cancelled) => Ok(()),
            Some(job) => {
                let record = self.record_of(&job)?;
                let (export, transfer) = (Export { task, job }, self.shared.transfer.clone());
                let removed = spawn_blocking(move || export::remove(&export, &record, &transfer));
                let removed = removed.await.map_err(internal)?;
                if at_work { Ok(()) } else { removed }
            }
            // The worker removes what it was making; layers that are not merged stay as they are.
            _ => self.cancel_backup(&spec).await,
        }
    }

    /// The path of the record of an export of this VM's disk.
    fn record_of(&self, job: &ExportJob) -> Result<std::path::PathBuf, Problem> {
        let disk = find_disk(&self.spec, job.disk)?;
        rules::check_export(job)?;
        Ok(self.shared.run_dir.exported(disk.disk))
    }

    /// Handles a worker's report on a disk.
    pub(super) async fn reported(&mut self, disk: DiskId, report: Report) {
        match report {
            Report::Progress(done, total) => {
                self.jobs.progress(disk, done, total, Instant::now());
            }
            Report::Made(Ok(facts)) => {
                self.made.insert(disk, facts);
                self.jobs.made(disk);
            }
            Report::Made(Err(problem)) => {
                self.made.remove(&disk);
                self.give_up(disk, problem).await;
            }
            Report::Written(Ok(())) => self.jobs.written(disk),
            Report::Written(Err(problem)) => self.give_up(disk, problem).await,
            Report::Lacking(dirty) => {
                let size = self.spec.disk(disk).map_or(0, |disk| disk.size);
                self.jobs.progress(disk, size.saturating_sub(dirty), size, Instant::now());
            }
            Report::TreeCopied(copied) => self.tree_copied(disk, copied).await,
            Report::Sending(progress) => self.sending_at_rest(progress),
            Report::SentAtRest(sent) => self.sent_at_rest(sent),
            Report::Copied(Ok(())) => self.jobs.written(disk),
            Report::Converted(Ok(facts)) => self.converted(disk, facts),
            Report::Converted(Err(problem)) => self.give_up(disk, problem).await,
            Report::SourceRemoved(Ok(former)) => self.jobs.removed(disk, former),
            Report::Copied(Err(problem)) => self.copy_failed(disk, problem).await,
            Report::SourceRemoved(Err(problem)) => self.jobs.not_removed(disk, problem),
            Report::Proved(Ok(report)) => self.jobs.proved(disk, report),
            Report::Proved(Err(problem)) => self.give_up(disk, problem).await,
            Report::Dumped(Ok(bytes)) => {
                self.jobs.progress(disk, bytes, bytes, Instant::now());
                self.jobs.made(disk);
            }
            Report::Dumped(Err(problem)) => self.give_up(disk, problem).await,
            Report::BackedUp(Ok((manifest, read))) => self.jobs.backed_up(disk, manifest, read),
            Report::BackedUp(Err(problem)) => self.give_up(disk, problem).await,
            Report::Merged(upper, merged) => self.layer_merged(disk, upper, merged).await,
            Report::ExposedErrors(errors) => {
                self.exposed_errors.insert(disk, errors);
            }
            Report::Exposed(holder) => {
                self.exposed.remove(&disk);
                drop(holder);
            }
        }
    }

    pub(super) async fn give_up(&mut self, disk: DiskId, problem: Problem) {
        for other in self.jobs.failed(disk, problem) {
            self.workers.cancel(other).await;
        }
    }

    /// The facts of a disk that are pinned in the inventory or that the last job returned.
    pub(super) fn facts(&self, disk: &DiskSpec) -> Option<DiskFacts> {
        disk.facts.clone().or_else(|| self.made.get(&disk.disk).cloned())
    }
}
