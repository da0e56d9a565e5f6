//! Disks that are converted in their files on a simulated host: how far they are outlives the agent.

use std::collections::BTreeMap;

use vmseal_api::host::{ConvertJob, DiskToConvert, DiskToMirror, JobSpec, JobState};
use vmseal_api::id::{DiskId, TaskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::calls::Later;
use super::{Inside, SimulatedHost, Work};
use crate::rules::exclusion::Action;
use crate::rules::{self, find_disk};

/// How far a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Conversion {
    task: TaskId,
    encrypted: bool,
    begun: bool,
    finished: bool,
}

/// The disks that are converted.
#[derive(Default)]
pub struct Conversions(BTreeMap<DiskId, Conversion>);

impl SimulatedHost {
    /// The disks that are prepared to be converted or have begun, and those that are as they are to be and have no name yet.
    #[must_use]
    pub fn converted(&self) -> (Vec<DiskId>, Vec<DiskId>) {
        let inside = self.inside();
        let all = &inside.persisted.conversions.0;
        let with = |finished| {
            let those = all.iter().filter(|(_, it)| it.finished == finished);
            those.map(|(disk, _)| *disk).collect()
        };
        (with(false), with(true))
    }
}

impl Inside {
    /// Refuses work on a disk that is being converted.
    pub fn check_not_converted(&mut self, vm: VmId, job: &JobSpec) -> Result<(), Problem> {
        if matches!(job, JobSpec::Convert(_) | JobSpec::DropSources(_)) {
            return Ok(());
        }
        self.check_no_conversion(vm, &job.disks())
    }

    /// The same of these disks.
    pub fn check_no_conversion(&mut self, vm: VmId, disks: &[DiskId]) -> Result<(), Problem> {
        let begun = |disk: &&DiskId| {
            self.persisted.conversions.0.get(disk).is_some_and(|conversion| conversion.begun)
        };
        let Some(disk) = disks.iter().find(begun).copied() else { return Ok(()) };
        let spec = &self.known(vm)?.spec;
        let name = &find_disk(spec, disk)?.name;
        let what = format!("disk '{name}' of VM '{}' is being converted in place", spec.name);
        Err(Problem::new(ErrorCode::WrongState, what))
    }

    /// Checks that these disks can be converted.
    pub fn ready_to_convert(&mut self, vm: VmId, job: &ConvertJob) -> Result<(), Problem> {
        let mut known = job.disks.iter().filter_map(|wanted| {
            let there = self.persisted.conversions.0.get(&wanted.disk)?;
            Some((wanted, *there))
        });
        let other =
            known.find(|(wanted, there)| there.begun && there.encrypted != wanted.encrypted);
        if let Some((wanted, _)) = other {
            return self.check_no_conversion(vm, &[wanted.disk]);
        }
        let begun = |inside: &Self, wanted: &DiskToConvert| {
            inside.persisted.conversions.0.get(&wanted.disk).is_some_and(|there| there.begun)
        };
        let spec = self.known(vm)?.spec.clone();
        for wanted in &job.disks {
            let disk = find_disk(&spec, wanted.disk)?;
            if !disk.encrypted && !wanted.encrypted && !begun(self, wanted) {
                let what = format!("disk '{}' is not encrypted already", disk.name);
                return Err(Problem::invalid("encrypted", what));
            }
        }
        if self.full && !job.disks.iter().any(|wanted| begun(self, wanted)) {
            return Err(Problem::new(ErrorCode::NoSpace, "the simulated datastore is full"));
        }
        Ok(())
    }

    pub fn put_convert(
        &mut self,
        vm: VmId,
        task: TaskId,
        job: &ConvertJob,
    ) -> Result<Later, Problem> {
        let mut goes_on = false;
        for wanted in &job.disks {
            let all = &mut self.persisted.conversions.0;
            let before = all.get(&wanted.disk).filter(|before| before.begun).copied();
            let new =
                Conversion { task, encrypted: wanted.encrypted, begun: false, finished: false };
            let now = before.map_or(new, |before| Conversion { task, ..before });
            goes_on |= now.begun;
            all.insert(wanted.disk, now);
        }
        self.known(vm)?.jobs.begin(task, JobSpec::Convert(job.clone()));
        if goes_on {
            return self.begin_conversions(vm, task, job);
        }
        let known = self.known(vm)?;
        job.disks.iter().for_each(|wanted| known.jobs.written(wanted.disk));
        self.agent.publish(vm);
        Ok(None)
    }

    fn begin_conversions(
        &mut self,
        vm: VmId,
        task: TaskId,
        job: &ConvertJob,
    ) -> Result<Later, Problem> {
        for wanted in &job.disks {
            if let Some(conversion) = self.persisted.conversions.0.get_mut(&wanted.disk) {
                conversion.begun = true;
            }
        }
        self.known(vm)?.jobs.begun(task);
        self.numbered(vm, Work::Job(task), self.work)
    }

    pub fn commit_convert(
        &mut self,
        vm: VmId,
        task: TaskId,
        job: &ConvertJob,
    ) -> Result<Later, Problem> {
        let spec = JobSpec::Convert(job.clone());
        match self.known(vm)?.jobs.same(task, &spec)? {
            Some(JobState::Done | JobState::Running) => Ok(None),
            Some(JobState::ReadyToCommit) => {
                let situation = self.situation(vm)?;
                for wanted in &job.disks {
                    let disk = find_disk(situation.spec, wanted.disk)?;
                    situation.may(Action::ConvertDisk, Some(disk))?;
                }
                self.begin_conversions(vm, task, job)
            }
            _ => Err(rules::nothing_to_commit(task)),
        }
    }

    /// Ends the work of a conversion.
    pub fn convert(&mut self, vm: VmId, job: &ConvertJob) {
        for wanted in &job.disks {
            let (disk, encrypted) = (wanted.disk, wanted.encrypted);
            let fails = self.full || self.fail_disks.contains(&disk);
            let Ok(known) = self.known(vm) else { return };
            if fails {
                let problem = Problem::new(ErrorCode::NoSpace, "the simulated datastore is full");
                known.jobs.failed(disk, problem);
                return;
            }
            let spec = known.spec.clone();
            let Ok(of) = find_disk(&spec, disk) else { return };
            let copy = DiskToMirror { disk, encrypted, datastore: None };
            if self.use_copy(vm, &spec, of, &copy).is_err() {
                return;
            }
            if let Some(conversion) = self.persisted.conversions.0.get_mut(&disk) {
                conversion.finished = true;
            }
            let Ok(known) = self.known(vm) else { return };
            known.jobs.made(disk);
        }
    }

    /// Undoes what is only prepared.
    pub fn cancel_convert(
        &mut self,
        vm: VmId,
        task: TaskId,
        job: &ConvertJob,
    ) -> Result<(), Problem> {
        let of_task = |disk: &DiskId| {
            self.persisted.conversions.0.get(disk).filter(|there| there.task == task).copied()
        };
        let disks: Vec<DiskId> = job.disks.iter().map(|wanted| wanted.disk).collect();
        if disks.iter().filter_map(of_task).any(|there| there.begun) {
            return Err(rules::is_converted(&self.known(vm)?.spec));
        }
        self.persisted
            .conversions
            .0
            .retain(|disk, there| !disks.contains(disk) || there.task != task);
        Ok(())
    }

    /// Gives a disk its name, if it is as it is to be, or forgets it as it is removed.
    pub fn settle_conversion(&mut self, disk: DiskId) {
        self.persisted.conversions.0.remove(&disk);
    }
}
