//! Disks that are encrypted, decrypted or re-encrypted in their own files, of a VM that is off.
//!
//! ```text
//!  put ─► prepared, noted ─► commit ─► the images lose their names, filters move the data ─► done: on record
//!               │                              │
//!               └─ cancel: all as before ◄─────┘ as long as no data has moved
//! ```
//! A job that is put and finds its disks begun goes on at once: an earlier agent, or an earlier task, has committed it.

use tokio::task::spawn_blocking;
use vmseal_api::host::{ConvertJob, DiskFacts, DiskToConvert, JobSpec, JobState, VmSpec};
use vmseal_api::id::{DiskId, TaskId};
use vmseal_api::problem::Problem;

use super::Owner;
use crate::rules::exclusion::Action;
use crate::rules::{self, find_disk};
use crate::storage::conversion;
use crate::storage::home::Home;
use crate::storage::in_place::{Position, Wanted};
use crate::vm::converting::Converting;
use crate::vm::internal;
use crate::vm::workers::Workers;

impl Owner {
    /// Refuses work on disks that are being converted in their files: these are no disks meanwhile.
    pub(super) async fn check_not_converted(&self, job: &JobSpec) -> Result<(), Problem> {
        if matches!(job, JobSpec::Convert(_) | JobSpec::DropSources(_)) {
            return Ok(());
        }
        let disks = job.disks().into_iter().filter_map(|disk| self.spec.disk(disk).cloned());
        let (disks, vm, name) = (disks.collect::<Vec<_>>(), self.spec.vm, self.spec.name.clone());
        let look = move || {
            disks.iter().find_map(|disk| {
                // A datastore that is away is somebody else's to report.
                let home = Home::of(&disk.datastore, vm).ok()?;
                conversion::refusal(&home, &name, disk).transpose()
            })
        };
        match spawn_blocking(look).await.map_err(internal)? {
            Some(refused) => Err(refused.unwrap_or_else(|problem| problem)),
            None => Ok(()),
        }
    }

    fn to_convert(&self, task: TaskId, wanted: &DiskToConvert) -> Result<Wanted, Problem> {
        let disk = find_disk(&self.spec, wanted.disk)?.clone();
        let facts = self.facts(&disk).ok_or_else(|| internal("a disk without facts"))?;
        let (spec, kek, wanted) = (self.spec.clone(), self.clone_kek()?, wanted.clone());
        Ok(Wanted { spec, disk, facts, kek, wanted, task })
    }

    async fn each<T: Send + 'static>(
        &self,
        task: TaskId,
        job: &ConvertJob,
        work: fn(&Wanted) -> Result<T, Problem>,
    ) -> Result<Vec<T>, Problem> {
        let disks = job.disks.iter().map(|disk| self.to_convert(task, disk));
        let disks = disks.collect::<Result<Vec<_>, _>>()?;
        let all = move || disks.iter().map(work).collect();
        spawn_blocking(all).await.map_err(internal)?
    }

    /// Checks whether disks could be converted now.
    pub(super) async fn ready_to_convert(
        &self,
        task: TaskId,
        job: &ConvertJob,
        spec: &JobSpec,
    ) -> Result<(), Problem> {
        self.may_work(Action::ConvertDisk, spec)?;
        self.each(task, job, Wanted::examine).await.map(drop)
    }

    pub(super) async fn put_convert(
        &mut self,
        task: TaskId,
        job: &ConvertJob,
        spec: JobSpec,
    ) -> Result<(), Problem> {
        self.may_work(Action::ConvertDisk, &spec)?;
        let prepared = match self.each(task, job, Wanted::prepare).await {
            Ok(prepared) => prepared,
            Err(problem) => {
                // Those before the one that cannot be; what has begun stays.
                let given_up = self.each(task, job, |disk| Ok(disk.give_up().is_ok())).await;
                tracing::debug!(?given_up, "a conversion was not prepared");
                return Err(problem);
            }
        };
        self.jobs.begin(task, spec);
        if prepared.iter().any(|position| *position != Position::Prepared) {
            return self.begin_conversions(task, job).await;
        }
        job.disks.iter().for_each(|disk| self.jobs.written(disk.disk));
        Ok(())
    }

    pub(super) async fn commit_convert(
        &mut self,
        task: TaskId,
        job: &ConvertJob,
        state: Option<&JobState>,
    ) -> Result<(), Problem> {
        match state {
            Some(JobState::Done | JobState::Running) => Ok(()),
            Some(JobState::ReadyToCommit) => {
                // What is only prepared keeps nobody from the disks.
                self.may_work(Action::ConvertDisk, &JobSpec::Convert(job.clone()))?;
                self.begin_conversions(task, job).await
            }
            // An agent that has restarted: the job is to be put again.
            _ => Err(rules::nothing_to_commit(task)),
        }
    }

    /// Takes their names from all images of a job, and has filters move the data.
    async fn begin_conversions(&mut self, task: TaskId, job: &ConvertJob) -> Result<(), Problem> {
        self.each(task, job, Wanted::commit).await?;
        self.jobs.begun(task);
        for disk in &job.disks {
            let wanted = self.to_convert(task, disk)?;
            let builder = Workers::builder(&self.shared, disk.disk);
            let rate = job.bytes_per_second;
            self.workers.begin_conversion(disk.disk, Converting { wanted, builder, rate });
        }
        Ok(())
    }

    pub(super) async fn cancel_convert(
        &mut self,
        task: TaskId,
        job: &ConvertJob,
    ) -> Result<(), Problem> {
        let state = self.jobs.status(task).ok().map(|status| status.state);
        if state == Some(JobState::Done) {
            return Err(rules::is_converted(&self.spec));
        }
        for disk in &job.disks {
            self.workers.cancel(disk.disk).await;
        }
        let given_up = self.each(task, job, |disk| Ok(disk.give_up())).await?;
        let kept = given_up.into_iter().find_map(Result::err);
        match kept {
            None => {
                self.jobs.cancel(task);
                Ok(())
            }
            // It stands still until it is put again.
            Some(problem) => {
                if let Some(disk) = job.disks.first() {
                    self.jobs.failed(disk.disk, problem.clone());
                }
                Err(problem)
            }
        }
    }

    /// A disk is as it is to be: puts that on record.
    pub(super) fn converted(&mut self, disk: DiskId, facts: DiskFacts) {
        let change = |spec: &mut VmSpec| {
            for known in spec.disks_mut().filter(|known| known.disk == disk) {
                known.encrypted = facts != DiskFacts::Raw;
                known.facts = Some(facts.clone());
            }
        };
        change(&mut self.spec);
        self.next.as_mut().map(change);
        self.made.insert(disk, facts);
        self.jobs.made(disk);
        self.describe();
    }
}
