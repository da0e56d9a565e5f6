//! The jobs of a VM, as its host keeps them: what was asked for, and how far it is. The real host and the
//! simulated one use the same code; whoever does the work reports the outcome here.
//!
//! [`vmseal_api::host::JobState`] has the diagram.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use vmseal_api::former_image::FormerImage;
use vmseal_api::host::backup::BackupManifest;
use vmseal_api::host::{
    Departure, JobKind, JobProgress, JobSpec, JobState, JobStatus, MigrationProgress, MirrorJob,
    VmSpec,
};
use vmseal_api::id::{DiskId, TaskId};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::proof::SignedReport;

use crate::rules::exclusion::Activity;

/// How far back the speed of a job looks: long against the flushes of storage, short against a change of its pace.
const SPEED_OVER: Duration = Duration::from_secs(30);

/// The least time between two measurements of how far a job is.
const MEASURED_EVERY: Duration = Duration::from_secs(1);

/// How fast a job has been of late.
#[derive(Default)]
struct Speed {
    /// How much was done at these times, oldest first.
    measured: VecDeque<(Instant, u64)>,
    bytes_per_second: Option<u64>,
}

impl Speed {
    /// So much is done now.
    fn measure(&mut self, done: u64, now: Instant) {
        let since = |then: Instant| now.saturating_duration_since(then);
        while self.measured.len() > 1 && since(self.measured[1].0) >= SPEED_OVER {
            self.measured.pop_front();
        }
        let Some((first, before)) = self.measured.front().copied() else {
            // An earlier agent may have begun the work.
            return self.measured.push_back((now, done));
        };
        let milliseconds = since(first).as_millis();
        let copied = u128::from(done.saturating_sub(before));
        if let Some(speed) = (copied * 1000).checked_div(milliseconds) {
            self.bytes_per_second = u64::try_from(speed).ok().filter(|speed| *speed > 0);
        }
        if self.measured.back().is_none_or(|(last, _)| since(*last) >= MEASURED_EVERY) {
            self.measured.push_back((now, done));
        }
    }
}

/// A disk of a job.
struct Part {
    disk: DiskId,
    finished: bool,
    done: u64,
    total: u64,
}

struct Job {
    spec: JobSpec,
    state: JobState,
    /// That of work without a guest; the spec of a mirror has its own.
    pace: CopyPace,
    parts: Vec<Part>,
    speed: Speed,
    quiesced: Option<bool>,
    proof: Option<Box<SignedReport>>,
    backup: Option<Box<BackupManifest>>,
    read_bytes: Option<u64>,
    migration: Option<MigrationProgress>,
    /// When all of the guest that is sent was, which stands still since then.
    all_sent: Option<Instant>,
    /// When the guest that was received went on.
    went_on: Option<Instant>,
    former: Vec<FormerImage>,
    /// Why the work on one of its disks failed, while that on the others goes on.
    failure: Option<Problem>,
}

impl Job {
    fn is_at_work(&self) -> bool {
        matches!(self.state, JobState::Waiting | JobState::Running)
    }

    /// Whether it keeps its disks from other work: the copy of a mirrored disk goes on until the job is committed.
    fn holds_disks(&self) -> bool {
        // So does a restored image, and the other host.
        let copies =
            matches!(self.spec, JobSpec::Mirror(_) | JobSpec::RestoreBackup(_) | JobSpec::Send(_));
        self.is_at_work() || (copies && self.state == JobState::ReadyToCommit)
    }

    fn pace(&self) -> CopyPace {
        match &self.spec {
            JobSpec::Mirror(mirror) => mirror.pace,
            _ => self.pace,
        }
    }

    fn has_ended(&self) -> bool {
        matches!(self.state, JobState::Done | JobState::Failed { .. } | JobState::Cancelled)
    }

    fn done(&self) -> u64 {
        self.parts.iter().map(|part| part.done).sum()
    }

    fn unfinished(&self) -> Vec<DiskId> {
        self.parts.iter().filter(|part| !part.finished).map(|part| part.disk).collect()
    }

    /// Ends it when the work on its last disk has ended: as failed, if that on one of them was, else as `last`.
    fn end_with(&mut self, last: JobState) {
        if self.parts.iter().all(|part| part.finished) {
            self.state = match self.failure.take() {
                Some(problem) => JobState::Failed { problem },
                None => last,
            };
        }
    }

    fn status(&self, task: TaskId) -> JobStatus {
        let total = self.parts.iter().map(|part| part.total).sum();
        let bytes_per_second = self.speed.bytes_per_second.filter(|_| self.is_at_work());
        JobStatus {
            task,
            kind: self.spec.kind(),
            disks: self.spec.disks(),
            state: self.state.clone(),
            progress: JobProgress { done: self.done(), total, bytes_per_second },
            paused: self.holds_disks() && self.pace().paused,
            quiesced: self.quiesced,
            proof: None,
            backup: None,
            read_bytes: self.read_bytes,
            migration: self.migration,
            all_sent_milliseconds: None,
            went_on_milliseconds: None,
            former: self.former.clone(),
        }
    }
}

/// The jobs of a VM. A disk has either jobs in progress or its last job.
#[derive(Default)]
pub struct Jobs(BTreeMap<TaskId, Job>);

impl Jobs {
    /// The state of a task's job, which must be this one; none where it is unknown, or where the task's last job has
    /// ended and was of another kind.
    ///
    /// # Errors
    /// `conflict`: the task has another job.
    pub fn same(&self, task: TaskId, spec: &JobSpec) -> Result<Option<&JobState>, Problem> {
        match self.0.get(&task) {
            None => Ok(None),
            Some(job) if job.spec.is_same_work(spec) => Ok(Some(&job.state)),
            Some(job) if job.has_ended() && job.spec.kind() != spec.kind() => Ok(None),
            // A task may drop several snapshots, one after the other.
            Some(job) if job.has_ended() && spec.kind() == JobKind::DropSnapshot => Ok(None),
            Some(_) => {
                let what = format!("task {task} has another job on this VM");
                Err(Problem::new(ErrorCode::Conflict, what))
            }
        }
    }

    /// Records that a job begins. Ended jobs of its disks are forgotten.
    pub fn begin(&mut self, task: TaskId, spec: JobSpec) {
        let disks = spec.disks();
        self.0.retain(|_, job| {
            job.holds_disks() || !job.parts.iter().any(|part| disks.contains(&part.disk))
        });
        let part = |disk| Part { disk, finished: false, done: 0, total: 0 };
        let parts = disks.into_iter().map(part).collect();
        let (state, speed, quiesced) = (JobState::Waiting, Speed::default(), None);
        let (proof, backup, read_bytes, migration) = (None, None, None, None);
        let (all_sent, went_on) = (None, None);
        let (pace, former, failure) = (CopyPace::default(), Vec::new(), None);
        let job = Job {
            spec,
            state,
            pace,
            parts,
            speed,
            quiesced,
            proof,
            backup,
            read_bytes,
            migration,
            all_sent,
            went_on,
            former,
            failure,
        };
        self.0.insert(task, job);
    }

    /// The job that works on a disk.
    fn at_work(&mut self, disk: DiskId) -> Option<&mut Job> {
        self.0.values_mut().find(|job| {
            job.is_at_work() && job.parts.iter().any(|part| part.disk == disk && !part.finished)
        })
    }

    /// Records the progress of a disk, in bytes, at this time.
    pub fn progress(&mut self, disk: DiskId, done: u64, total: u64, now: Instant) {
        let Some(job) = self.at_work(disk) else { return };
        for part in job.parts.iter_mut().filter(|part| part.disk == disk) {
            (part.done, part.total) = (done, total);
        }
        job.state = JobState::Running;
        let all = job.done();
        job.speed.measure(all, now);
    }

    /// The pace of what works on a disk and serves no guest.
    pub fn pace_of(&self, disk: DiskId) -> CopyPace {
        let works = |job: &&Job| job.is_at_work() && job.parts.iter().any(|it| it.disk == disk);
        self.0.values().find(works).map(Job::pace).unwrap_or_default()
    }

    /// Records the pace of a task's job, which is no mirror; returns the disks that it works on.
    ///
    /// # Errors
    /// `not-found`: there is no such job at work; `unsupported`: the pace of a mirror is in its spec, and others have none.
    pub fn set_work_pace(&mut self, task: TaskId, pace: CopyPace) -> Result<Vec<DiskId>, Problem> {
        let job = self.0.get_mut(&task).filter(|job| job.is_at_work());
        let Some(job) = job else {
            let what = format!("task {task} has no job at work on this host");
            return Err(Problem::new(ErrorCode::NotFound, what));
        };
        if !job.spec.kind().has_work_pace() {
            let what = format!("the job of task {task} copies nothing at a pace of its own");
            return Err(Problem::new(ErrorCode::Unsupported, what));
        }
        if job.pace != pace {
            (job.pace, job.speed) = (pace, Speed::default());
        }
        Ok(job.spec.disks())
    }

    /// The pace of a task's job that copies disks, while it does.
    pub fn pace(&self, task: TaskId) -> Option<CopyPace> {
        let job = self.0.get(&task).filter(|job| job.holds_disks())?;
        matches!(job.spec, JobSpec::Mirror(_)).then(|| job.pace())
    }

    /// Records the pace of a task's job that copies disks. One that was ready to be committed is followed again when it goes on
    /// after a pause, in which its guest may have changed much: returns the disks that are.
    pub fn set_pace(&mut self, task: TaskId, pace: CopyPace) -> Vec<DiskId> {
        let Some(job) = self.0.get_mut(&task).filter(|job| job.holds_disks()) else {
            return Vec::new();
        };
        let JobSpec::Mirror(mirror) = &mut job.spec else { return Vec::new() };
        let before = std::mem::replace(&mut mirror.pace, pace);
        // What it was before tells nothing of what it will be.
        job.speed = Speed::default();
        if pace.paused || before.paused {
            for part in &mut job.parts {
                part.finished = false;
            }
            if job.parts.iter().any(|part| !part.finished) {
                job.state = JobState::Running;
            }
        }
        job.unfinished()
    }

    /// Records how a task's job sends its VM from now on.
    pub fn set_departure(&mut self, task: TaskId, departure: &Departure) {
        let job = self.0.get_mut(&task).filter(|job| job.holds_disks());
        if let Some(JobSpec::Send(send)) = job.map(|job| &mut job.spec) {
            send.begin = Some(Box::new(departure.clone()));
        }
    }

    /// Records that the work on a disk is done; `last` is the job's state once its last disk is done.
    fn finished(&mut self, disk: DiskId, last: JobState) {
        let Some(job) = self.at_work(disk) else { return };
        for part in job.parts.iter_mut().filter(|part| part.disk == disk) {
            part.finished = true;
            part.done = part.total;
        }
        job.end_with(last);
    }

    /// Records that a disk is made.
    pub fn made(&mut self, disk: DiskId) {
        self.finished(disk, JobState::Done);
    }

    /// Records that the former image of a disk is removed, if there was one, and what has become of it.
    pub fn removed(&mut self, disk: DiskId, former: Option<FormerImage>) {
        if let Some(job) = self.at_work(disk) {
            job.former.extend(former);
        }
        self.made(disk);
    }

    /// Records that a disk's export, or its copy, is complete.
    pub fn written(&mut self, disk: DiskId) {
        self.finished(disk, JobState::ReadyToCommit);
    }

    /// Records that the work on a disk failed; returns the other disks of the job, whose work must be
    /// stopped.
    pub fn failed(&mut self, disk: DiskId, problem: Problem) -> Vec<DiskId> {
        let Some(job) = self.at_work(disk) else { return Vec::new() };
        job.state = JobState::Failed { problem };
        job.unfinished().into_iter().filter(|other| *other != disk).collect()
    }

    /// Records that the former image of a disk could not be removed. Those of the other disks are removed nevertheless; then the job fails. A
    /// missing key goes before other problems: the server gives it, and begins again.
    pub fn not_removed(&mut self, disk: DiskId, problem: Problem) {
        let Some(job) = self.at_work(disk) else { return };
        if job.failure.is_none() || problem.code == ErrorCode::Locked {
            job.failure = Some(problem);
        }
        for part in job.parts.iter_mut().filter(|part| part.disk == disk) {
            part.finished = true;
        }
        job.end_with(JobState::Done);
    }

    /// Records that a job is committed.
    pub fn committed(&mut self, task: TaskId) {
        if let Some(job) = self.0.get_mut(&task) {
            job.state = JobState::Done;
        }
    }

    /// Records that the work of a job begins, which was ready for that.
    pub fn begun(&mut self, task: TaskId) {
        if let Some(job) = self.0.get_mut(&task) {
            job.state = JobState::Running;
            job.parts.iter_mut().for_each(|part| part.finished = false);
        }
    }

    /// Records that a job is cancelled; returns the disks whose work must be stopped.
    pub fn cancel(&mut self, task: TaskId) -> Vec<DiskId> {
        let Some(job) = self.0.get_mut(&task) else { return Vec::new() };
        let at_work = job.is_at_work();
        job.state = JobState::Cancelled;
        if at_work { job.unfinished() } else { Vec::new() }
    }

    /// A disk is removed: its ended jobs are forgotten, its jobs in progress are cancelled. Returns the disks
    /// whose work must be stopped.
    pub fn remove_disk(&mut self, disk: DiskId) -> Vec<DiskId> {
        let of_disk = |job: &Job| job.parts.iter().any(|part| part.disk == disk);
        self.0.retain(|_, job| job.holds_disks() || !of_disk(job));
        let tasks: Vec<_> =
            self.0.iter().filter(|(_, job)| of_disk(job)).map(|(id, _)| *id).collect();
        tasks.into_iter().flat_map(|task| self.cancel(task)).collect()
    }

    /// Forgets ended jobs of disks that the VM no longer has.
    pub fn keep_disks_of(&mut self, spec: &VmSpec) {
        let known = |disk| spec.disk(disk).is_some();
        self.0.retain(|_, job| job.is_at_work() || job.parts.iter().all(|part| known(part.disk)));
    }

    /// The work in progress on disks.
    pub fn activities(&self) -> impl Iterator<Item = (DiskId, Activity)> {
        self.0.values().filter(|job| job.holds_disks()).flat_map(|job| {
            let activity = match job.spec {
                JobSpec::Create(_) | JobSpec::RestoreBackup(_) | JobSpec::Convert(_) => {
                    Activity::Creating
                }
                JobSpec::Export(_) | JobSpec::Backup(_) => Activity::Exporting,
                JobSpec::Mirror(_)
                | JobSpec::DropSources(_)
                | JobSpec::Snapshot(_)
                | JobSpec::Revert(_)
                | JobSpec::DropSnapshot(_)
                | JobSpec::Prove(_)
                | JobSpec::Dump(_)
                | JobSpec::DecryptDump(_)
                | JobSpec::VerifyBackup(_)
                | JobSpec::Send(_)
                | JobSpec::Receive(_) => Activity::Mirroring,
            };
            let disks = match job.spec {
                JobSpec::Mirror(_) | JobSpec::RestoreBackup(_) | JobSpec::Send(_) => {
                    job.spec.disks()
                }
                _ => job.unfinished(),
            };
            disks.into_iter().map(move |disk| (disk, activity))
        })
    }

    /// What a task's job is.
    pub fn spec(&self, task: TaskId) -> Option<&JobSpec> {
        self.0.get(&task).map(|job| &job.spec)
    }

    /// Records whether the guest's file systems were frozen during a task's job.
    pub fn quiesced(&mut self, task: TaskId, quiesced: Option<bool>) {
        if let Some(job) = self.0.get_mut(&task) {
            job.quiesced = quiesced;
        }
    }

    /// Records what the proof has found that this disk's worker made; the job is done for all of its disks.
    pub fn proved(&mut self, disk: DiskId, report: SignedReport) {
        let Some(job) = self.at_work(disk) else { return };
        job.proof = Some(Box::new(report));
        for disk in job.unfinished() {
            self.made(disk);
        }
    }

    /// Records the manifest of the backup that this disk's worker has written, read or restored, and how much was read of disks
    /// for it: nothing is left but to
    /// commit that, or nothing at all.
    pub fn backed_up(
        &mut self,
        disk: DiskId,
        manifest: Box<BackupManifest>,
        read_bytes: Option<u64>,
    ) {
        let Some(job) = self.at_work(disk) else { return };
        job.backup = Some(manifest);
        job.read_bytes = read_bytes;
        let last = match job.spec {
            JobSpec::VerifyBackup(_) => JobState::Done,
            _ => JobState::ReadyToCommit,
        };
        for disk in job.unfinished() {
            self.finished(disk, last.clone());
        }
    }

    /// Gives up restored images of these disks that another task has had written and not used.
    pub fn give_up_restores(&mut self, task: TaskId, disks: &[DiskId]) {
        for (other, job) in &mut self.0 {
            let restores = matches!(job.spec, JobSpec::RestoreBackup(_));
            let of_these = job.spec.disks().iter().any(|disk| disks.contains(disk));
            if *other != task && restores && of_these && job.state == JobState::ReadyToCommit {
                job.state = JobState::Cancelled;
            }
        }
    }

    /// Whether nothing is left of a task's job but to commit it.
    pub fn is_ready_to_commit(&self, task: TaskId) -> bool {
        self.0.get(&task).is_some_and(|job| job.state == JobState::ReadyToCommit)
    }

    /// The task that sends the VM to another host, or has sent it there.
    pub fn sender(&self) -> Option<TaskId> {
        let sends = |job: &Job| matches!(job.spec, JobSpec::Send(_)) && job.holds_disks();
        self.0.iter().find(|(_, job)| sends(job)).map(|(task, _)| *task)
    }

    /// Whether a task's job sends or receives a VM that is off.
    pub fn is_at_rest(&self, task: TaskId) -> bool {
        match self.spec(task) {
            Some(JobSpec::Send(job)) => job.begins_at_rest(),
            Some(JobSpec::Receive(job)) => job.is_at_rest(),
            _ => false,
        }
    }

    /// Whether a VM that is off is being sent to another host, or has been sent there.
    pub fn sends_at_rest(&self) -> bool {
        let at_rest = |job: &Job| matches!(&job.spec, JobSpec::Send(send) if send.begins_at_rest());
        self.0.values().any(|job| at_rest(job) && job.holds_disks())
    }

    /// Records how far a task's migration is.
    pub fn migrates(&mut self, task: TaskId, progress: MigrationProgress) {
        let Some(job) = self.0.get_mut(&task).filter(|job| job.is_at_work()) else { return };
        job.state = JobState::Running;
        job.migration = Some(progress);
    }

    /// Records when QEMU had sent all of a task's guest; none where that is not known.
    pub fn all_sent(&mut self, task: TaskId, at: Option<Instant>) {
        if let Some(job) = self.0.get_mut(&task) {
            job.all_sent = at;
        }
    }

    /// Records when the guest that a task's job has received went on; none where it does not run.
    pub fn went_on(&mut self, task: TaskId, at: Option<Instant>) {
        if let Some(job) = self.0.get_mut(&task) {
            job.went_on = at;
        }
    }

    /// Records that all of a VM is sent or received, or why it is not.
    pub fn migrated(&mut self, task: TaskId, result: Result<(), Problem>) {
        let Some(job) = self.0.get_mut(&task).filter(|job| job.is_at_work()) else { return };
        job.state = match result {
            Ok(()) => JobState::ReadyToCommit,
            Err(problem) => JobState::Failed { problem },
        };
    }

    /// The disks whose layers are to be merged.
    pub fn unfinished_merges(&self) -> Vec<DiskId> {
        let merges = |job: &&Job| matches!(job.spec, JobSpec::DropSnapshot(_)) && job.is_at_work();
        self.0.values().filter(merges).flat_map(Job::unfinished).collect()
    }

    /// The disks whose copies are not as good as complete.
    pub fn unfinished_copies(&self) -> Vec<DiskId> {
        let copies = |job: &&Job| matches!(job.spec, JobSpec::Mirror(_)) && job.is_at_work();
        self.0.values().filter(copies).flat_map(Job::unfinished).collect()
    }

    /// The job that copies a disk.
    pub fn mirror_of(&self, disk: DiskId) -> Option<(TaskId, MirrorJob)> {
        self.0.iter().filter(|(_, job)| job.holds_disks()).find_map(|(task, job)| {
            let JobSpec::Mirror(mirror) = &job.spec else { return None };
            mirror.disks.iter().any(|it| it.disk == disk).then(|| (*task, mirror.clone()))
        })
    }

    /// The status of a task's job.
    ///
    /// # Errors
    /// `not-found`.
    pub fn status(&self, task: TaskId) -> Result<JobStatus, Problem> {
        let job = self.0.get(&task).ok_or_else(|| Problem::not_found("job on this host", task))?;
        let (proof, backup) = (job.proof.clone(), job.backup.clone());
        let all_sent_milliseconds = job.all_sent.filter(|_| job.holds_disks()).map(ago);
        let went_on_milliseconds = job.went_on.map(ago);
        let status = job.status(task);
        Ok(JobStatus { proof, backup, all_sent_milliseconds, went_on_milliseconds, ..status })
    }

    /// The status of all jobs, without what only the answer to who asks for one has: what is large, and what changes all the time.
    pub fn statuses(&self) -> Vec<JobStatus> {
        self.0.iter().map(|(task, job)| job.status(*task)).collect()
    }
}

/// How long ago that was, in milliseconds.
fn ago(then: Instant) -> u64 {
    u64::try_from(then.elapsed().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use vmseal_api::host::{
        CreateJob, DiskToCreate, DiskToMirror, DropSnapshotJob, DropSourcesJob, SendJob,
    };
    use vmseal_api::id::SnapshotId;

    use super::*;

    fn create(disks: &[DiskId]) -> JobSpec {
        let disks = disks.iter().map(|disk| DiskToCreate {
            disk: *disk,
            source: None,
            cloud_init: None,
            copy_of: None,
        });
        JobSpec::Create(CreateJob { disks: disks.collect() })
    }

    #[test]
    fn work_without_a_guest_has_a_pace_until_it_ends() {
        let (task, disk) = (TaskId::new(), DiskId::new());
        let paused = CopyPace { paused: true, ..CopyPace::default() };
        let mut jobs = Jobs::default();
        let refused = |jobs: &mut Jobs| jobs.set_work_pace(task, paused).unwrap_err().code;
        assert_eq!(refused(&mut jobs), ErrorCode::NotFound);
        jobs.begin(task, create(&[disk]));
        assert!(jobs.pace_of(disk).is_free() && !jobs.status(task).unwrap().paused);
        assert_eq!(jobs.set_work_pace(task, paused).unwrap(), [disk]);
        assert!(jobs.pace_of(disk) == paused && jobs.status(task).unwrap().paused);
        jobs.made(disk);
        assert_eq!(refused(&mut jobs), ErrorCode::NotFound);
        assert!(jobs.pace_of(disk).is_free() && !jobs.status(task).unwrap().paused);
        jobs.begin(task, JobSpec::DropSources(DropSourcesJob { disks: vec![disk] }));
        assert_eq!(jobs.set_work_pace(task, paused).unwrap(), [disk]);
        let task = TaskId::new();
        let send = SendJob { disks: vec![disk], copies: Vec::new(), begin: None };
        jobs.begin(task, JobSpec::Send(send));
        assert_eq!(jobs.set_work_pace(task, paused).unwrap_err().code, ErrorCode::Unsupported);
    }

    #[test]
    fn a_job_is_done_with_its_last_disk_and_tells_how_fast_it_is() {
        let (task, [one, two]) = (TaskId::new(), [DiskId::new(), DiskId::new()]);
        let mut jobs = Jobs::default();
        jobs.begin(task, create(&[one, two]));
        let status = |jobs: &Jobs| jobs.status(task).unwrap();
        assert_eq!(status(&jobs).state, JobState::Waiting);
        let begin = Instant::now();
        // Progress of an earlier agent.
        jobs.progress(one, 1000, 4000, begin);
        jobs.progress(two, 0, 2000, begin);
        assert_eq!(status(&jobs).progress.bytes_per_second, None);
        jobs.progress(one, 3000, 4000, begin + Duration::from_secs(2));
        let progress = JobProgress { done: 3000, total: 6000, bytes_per_second: Some(1000) };
        assert_eq!((status(&jobs).state, status(&jobs).progress), (JobState::Running, progress));
        jobs.made(one);
        assert_eq!(status(&jobs).state, JobState::Running);
        assert_eq!(jobs.activities().collect::<Vec<_>>(), [(two, Activity::Creating)]);
        jobs.made(two);
        assert_eq!(status(&jobs).state, JobState::Done);
        assert_eq!(jobs.activities().count(), 0);
    }

    #[test]
    fn how_long_a_guest_stands_still_is_told_to_who_asks_and_is_no_other_state() {
        let (task, disk) = (TaskId::new(), DiskId::new());
        let send = JobSpec::Send(SendJob { disks: vec![disk], copies: Vec::new(), begin: None });
        let mut jobs = Jobs::default();
        jobs.begin(task, send);
        let told = |jobs: &Jobs| {
            let status = jobs.status(task).unwrap();
            (status.all_sent_milliseconds, status.went_on_milliseconds)
        };
        assert_eq!(told(&jobs), (None, None));
        let a_second_ago = Instant::now().checked_sub(Duration::from_secs(1));
        jobs.all_sent(task, a_second_ago);
        jobs.migrated(task, Ok(()));
        let (all_sent, went_on) = told(&jobs);
        assert!(all_sent.is_some_and(|ago| ago >= 1000) && went_on.is_none(), "{all_sent:?}");
        let states = jobs.statuses();
        assert_eq!((states[0].all_sent_milliseconds, states[0].went_on_milliseconds), (None, None));
        jobs.cancel(task);
        assert_eq!(told(&jobs), (None, None), "it goes on here");
        jobs.went_on(task, a_second_ago);
        let (all_sent, went_on) = told(&jobs);
        assert!(went_on.is_some_and(|ago| ago >= 1000) && all_sent.is_none(), "{went_on:?}");
        assert_eq!(jobs.statuses()[0].went_on_milliseconds, None);
    }

    #[test]
    fn the_speed_is_that_of_late_and_there_is_none_while_nothing_gets_on() {
        let (task, disk, begin) = (TaskId::new(), DiskId::new(), Instant::now());
        let mut jobs = Jobs::default();
        jobs.begin(task, create(&[disk]));
        let mut at = |second: u64, done| {
            jobs.progress(disk, done, 1 << 30, begin + Duration::from_secs(second));
            jobs.status(task).unwrap().progress.bytes_per_second
        };
        for second in 0..60 {
            at(second, second * 1000);
        }
        assert_eq!(at(60, 60_000), Some(1000));
        for second in 61..200 {
            at(second, 60_000 + (second - 60) * 10);
        }
        assert_eq!(at(200, 61_400), Some(10), "the average since the beginning would be 307");
        for second in 201..240 {
            // As much as is copied the guest changes again.
            at(second, 61_400);
        }
        assert_eq!(at(240, 61_300), None);
    }

    #[test]
    fn a_copy_that_goes_on_after_a_pause_is_followed_again() {
        let (task, [data, other]) = (TaskId::new(), [DiskId::new(), DiskId::new()]);
        let to_mirror = |disk| DiskToMirror { disk, encrypted: true, datastore: None };
        let at = |pace| {
            let disks = vec![to_mirror(data), to_mirror(other)];
            JobSpec::Mirror(MirrorJob { disks, pace, forgets_key: false })
        };
        let (free, paused) =
            (CopyPace::default(), CopyPace { paused: true, ..CopyPace::default() });
        let mut jobs = Jobs::default();
        jobs.begin(task, at(free));
        jobs.written(other);
        jobs.written(data);
        assert_eq!(jobs.same(task, &at(paused)).unwrap(), Some(&JobState::ReadyToCommit));
        let rate = CopyPace { bytes_per_second: Some(1 << 20), paused: false };
        assert!(jobs.set_pace(task, rate).is_empty(), "it is complete");
        assert_eq!(jobs.set_pace(task, paused), [data, other]);
        let status = jobs.status(task).unwrap();
        assert_eq!((status.state, status.paused), (JobState::Running, true));
        assert_eq!(jobs.set_pace(task, free), [data, other]);
        jobs.written(other);
        jobs.written(data);
        let status = jobs.status(task).unwrap();
        assert_eq!((status.state, status.paused), (JobState::ReadyToCommit, false));
        jobs.committed(task);
        assert!(jobs.pace(task).is_none() && jobs.set_pace(task, paused).is_empty());
    }

    #[test]
    fn a_task_drops_one_snapshot_after_the_other() {
        let (task, mut jobs) = (TaskId::new(), Jobs::default());
        let [one, two] = [SnapshotId::new(), SnapshotId::new()];
        let drop = |snapshot| {
            JobSpec::DropSnapshot(DropSnapshotJob { snapshot, disks: vec![DiskId::new()] })
        };
        let (first, second) = (drop(one), drop(two));
        jobs.begin(task, first.clone());
        assert_eq!(jobs.same(task, &second).unwrap_err().code, ErrorCode::Conflict);
        for disk in first.disks() {
            jobs.made(disk);
        }
        assert_eq!(jobs.same(task, &first).unwrap(), Some(&JobState::Done));
        assert_eq!(jobs.same(task, &second).unwrap(), None);
    }

    #[test]
    fn a_former_image_that_stays_keeps_no_other_one() {
        let (task, mut jobs) = (TaskId::new(), Jobs::default());
        let disks = [DiskId::new(), DiskId::new(), DiskId::new()];
        let damaged = Problem::new(ErrorCode::Damaged, "does not open");
        let locked = Problem::new(ErrorCode::Locked, "no key");
        for (last, told) in [(None, &damaged), (Some(&locked), &locked)] {
            jobs.begin(task, JobSpec::DropSources(DropSourcesJob { disks: disks.to_vec() }));
            jobs.not_removed(disks[0], damaged.clone());
            assert_eq!(jobs.status(task).unwrap().state, JobState::Waiting, "others are stopped");
            jobs.removed(disks[1], None);
            match last {
                None => jobs.removed(disks[2], None),
                Some(problem) => jobs.not_removed(disks[2], problem.clone()),
            }
            let failed = JobState::Failed { problem: told.clone() };
            assert_eq!(jobs.status(task).unwrap().state, failed);
        }
        jobs.begin(task, JobSpec::DropSources(DropSourcesJob { disks: disks.to_vec() }));
        disks.iter().for_each(|disk| jobs.removed(*disk, None));
        assert_eq!(jobs.status(task).unwrap().state, JobState::Done, "what failed before is told");
    }

    #[test]
    fn a_task_has_one_job_and_a_disk_its_last_one() {
        let (task, [one, two]) = (TaskId::new(), [DiskId::new(), DiskId::new()]);
        let mut jobs = Jobs::default();
        assert_eq!(jobs.same(task, &create(&[one])).unwrap(), None);
        jobs.begin(task, create(&[one]));
        assert_eq!(jobs.same(task, &create(&[one])).unwrap(), Some(&JobState::Waiting));
        let other = jobs.same(task, &create(&[two])).unwrap_err();
        assert_eq!(other.code, ErrorCode::Conflict);
        jobs.made(one);
        let next = TaskId::new();
        jobs.begin(next, create(&[one, two]));
        assert_eq!(jobs.status(task).unwrap_err().code, ErrorCode::NotFound);
        let problem = Problem::new(ErrorCode::NoSpace, "full");
        assert_eq!(jobs.failed(one, problem.clone()), [two], "the others are not stopped");
        assert_eq!(jobs.status(next).unwrap().state, JobState::Failed { problem });
        jobs.begin(next, create(&[one, two]));
        assert_eq!(jobs.remove_disk(two), [one, two]);
        assert_eq!(jobs.status(next).unwrap().state, JobState::Cancelled);
    }
}
