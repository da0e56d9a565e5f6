//! Disks are copied to other images, and the copies used in their place: each step repeated, every refusal provoked.

use tokio::time::timeout;
use vmseal_api::former_image::{FormerFate, FormerImage};
use vmseal_api::host::{
    DatastoreLocation, DatastoreSpec, DiskFacts, DiskSpec, DiskState, DiskToMirror, DropSourcesJob,
    HostAgent, JobKind, JobSpec, JobState, MirrorJob, Power, PowerOff,
};
use vmseal_api::id::{DiskId, TaskId};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::ErrorCode;

use super::{Session, console, done, examine, pace, refused, running};

/// The job that moves one disk, which stays as it is.
pub fn moved(disk: DiskId, encrypted: bool, to: &DatastoreSpec) -> JobSpec {
    let datastore = Some(to.clone());
    at_pace(vec![DiskToMirror { disk, encrypted, datastore }], CopyPace::default())
}

/// The job that copies one disk.
pub fn copy(disk: DiskId, encrypted: bool) -> JobSpec {
    copy_at(disk, encrypted, CopyPace::default())
}

/// The same, at this pace.
pub fn copy_at(disk: DiskId, encrypted: bool, pace: CopyPace) -> JobSpec {
    at_pace(vec![DiskToMirror { disk, encrypted, datastore: None }], pace)
}

fn at_pace(disks: Vec<DiskToMirror>, pace: CopyPace) -> JobSpec {
    JobSpec::Mirror(MirrorJob { disks, pace, forgets_key: false })
}

impl Session {
    /// Puts a job that copies a disk, and waits until it can be committed.
    pub async fn copied(&self, agent: &dyn HostAgent, task: TaskId, job: &JobSpec) {
        let put = || agent.put_job(self.vm(), task, job.clone());
        done(put().await, "a copy");
        done(put().await, "the same, while it is copied");
        assert_eq!(self.worked(agent, task).await, JobState::ReadyToCommit);
        done(put().await, "the same, when it is copied");
    }
}

/// The plain disk, which has a replica, is encrypted, and decrypted again.
pub async fn disks(agent: &dyn HostAgent, session: &mut Session) {
    let vm = session.vm();
    let [system, data] = [0, 1].map(|index| session.disk(index).disk);
    let put = |task, job| agent.put_job(vm, task, job);
    let code = ErrorCode::InvalidRequest;
    let replica = session.disk(1).replica.clone().expect("the suite's second disk has a replica");
    let both = put(TaskId::new(), moved(data, false, &replica.datastore)).await;
    refused(both, code, "a move to where the disk's replica is");
    refused(put(TaskId::new(), copy(data, false)).await, code, "decrypting a plain disk");
    let none = at_pace(vec![], CopyPace::default());
    refused(put(TaskId::new(), none).await, code, "a copy of no disk");
    let strange = put(TaskId::new(), copy(DiskId::new(), true)).await;
    refused(strange, ErrorCode::NotFound, "a disk that the VM does not have");
    let (task, job) = (TaskId::new(), copy(data, true));
    let cancel = || agent.cancel_job(vm, task, job.clone());
    let commit = || agent.commit_job(vm, task, job.clone());
    refused(commit().await, ErrorCode::NotFound, "committing an unknown copy");
    done(agent.examine_job(vm, job.clone()).await, "examining it");
    session.copied(agent, task, &job).await;
    let other = put(TaskId::new(), copy(data, true)).await;
    refused(other, ErrorCode::InUse, "a second copy of a disk");
    done(cancel().await, "cancelling it");
    assert_eq!(session.worked(agent, task).await, JobState::Cancelled);
    done(cancel().await, "cancelling it again");
    refused(commit().await, ErrorCode::NotFound, "committing a cancelled copy");

    pace::disk(agent, session, data).await;
    for encrypted in [true, false] {
        let facts = mirrored(agent, session, data, copy(data, encrypted)).await.facts;
        assert_eq!(matches!(facts, DiskFacts::Luks2 { .. }), encrypted, "{facts:?}");
        let disk = disk_mut(session, data);
        (disk.encrypted, disk.facts) = (encrypted, Some(facts));
        // As the server does when it has recorded that.
        done(agent.register_vm(session.spec.clone()).await, "registering the disk as it is");
    }
    move_disk(agent, session, data).await;
    let facts = mirrored(agent, session, system, copy(system, true)).await.facts;
    assert!(matches!(facts, DiskFacts::Luks2 { .. }), "{facts:?}");
}

/// A VM that is suspended is copied as one that is off, and its memory with its first disk: it stays suspended, and its guest goes on
/// afterwards. The VM is off before and after.
pub async fn suspended(agent: &dyn HostAgent, session: &mut Session) {
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    done(agent.power_on(vm).await, "starting");
    session.power(agent, Power::Running).await;
    // A guest that boots does not hear what is typed.
    console(agent, session).await;
    done(agent.suspend_as(vm, GENERATION).await, "suspending");
    session.power(agent, Power::Suspended).await;
    let before = session.disk(0).facts.clone();
    let seen = mirrored(agent, session, disk, copy(disk, true)).await;
    assert_eq!(Some(seen.facts), before, "its facts");
    assert_eq!(session.now(agent).await.power, Power::Suspended);
    only_as_expected(agent, session).await;
    goes_on(agent, session).await;

    suspend(agent, session).await;
    // Alone it is decrypted, copied as it is, and encrypted again: the memory beside it is under the VM's key throughout.
    for encrypted in [false, false, true] {
        let facts = mirrored(agent, session, disk, copy(disk, encrypted)).await.facts;
        assert_eq!(matches!(facts, DiskFacts::Luks2 { .. }), encrypted, "{facts:?}");
        let known = disk_mut(session, disk);
        (known.encrypted, known.facts) = (encrypted, Some(facts));
        done(agent.register_vm(session.spec.clone()).await, "registering it as it is");
    }
    let second = second_datastore(agent, session).await;
    for to in [second, session.place.clone()] {
        let seen = mirrored(agent, session, disk, moved(disk, true, &to)).await;
        assert_eq!(seen.datastore, Some(to.datastore));
        assert_eq!(session.now(agent).await.power, Power::Suspended);
        disk_mut(session, disk).datastore = to;
        done(agent.register_vm(session.spec.clone()).await, "registering it where it is");
    }
    goes_on(agent, session).await;

    // Resumed in the middle, it runs; what was copied of its memory is of no use.
    suspend(agent, session).await;
    let (task, job) = (TaskId::new(), copy_at(disk, true, pace::PAUSED));
    done(agent.put_job(vm, task, job.clone()).await, "a copy that is paused");
    goes_on(agent, session).await;
    done(agent.cancel_job(vm, task, job).await, "cancelling it while the VM runs");
    assert_eq!(session.now(agent).await.power, Power::Running);
    done(agent.power_off(vm, PowerOff::Force).await, "forcing it off");
    assert_eq!(
        session.now(agent).await.power,
        Power::Off,
        "it is suspended with a memory of before"
    );
}

/// The generation of the memory that the suite has saved.
pub const GENERATION: u64 = 7;

/// A suspended VM is started with the memory that is expected alone, also when that has been copied.
async fn only_as_expected(agent: &dyn HostAgent, session: &Session) {
    let vm = session.vm();
    done(agent.suspend_as(vm, GENERATION + 1).await, "suspending what is suspended");
    for other in [GENERATION - 1, GENERATION + 1] {
        let answer = agent.power_on_with(vm, other).await;
        let text = answer.as_ref().expect_err("another memory").detail.clone();
        let numbers = [format!("generation {GENERATION},"), format!("generation {other} is")];
        assert!(numbers.iter().all(|number| text.contains(number)), "{text}");
        let both = (examine::start_with(agent, vm, Some(other)).await, answer);
        examine::alike(both, ErrorCode::Damaged, "a memory that is not the expected one");
        assert_eq!(session.now(agent).await.power, Power::Suspended);
    }
    done(examine::start_with(agent, vm, Some(GENERATION)).await, "asking about the expected one");
    done(agent.power_on_with(vm, GENERATION).await, "resuming");
}

/// The memory of the guest is saved.
pub async fn suspend(agent: &dyn HostAgent, session: &Session) {
    done(agent.suspend(session.vm()).await, "suspending");
    session.power(agent, Power::Suspended).await;
}

/// The guest of a suspended VM goes on: it echoes, and does not boot.
pub async fn goes_on(agent: &dyn HostAgent, session: &Session) {
    done(agent.power_on(session.vm()).await, "resuming");
    session.power(agent, Power::Running).await;
    let echo = running::echoed(agent, session);
    assert!(timeout(session.fixture.timeout, echo).await.is_ok(), "its guest does not go on");
}

/// Another datastore of the host.
pub async fn second_datastore(agent: &dyn HostAgent, session: &Session) -> DatastoreSpec {
    let path = session.fixture.datastore.with_file_name("second-datastore");
    // A simulated host has it nowhere.
    let _ = std::fs::create_dir(&path);
    let location = DatastoreLocation::Dir { path };
    let second = DatastoreSpec { datastore: session.second, location };
    done(agent.probe_datastore(second.clone()).await, "a second datastore");
    second
}

pub fn disk_mut(session: &mut Session, disk: DiskId) -> &mut DiskSpec {
    session.spec.disks_mut().find(|known| known.disk == disk).expect("the disk")
}

/// The plain disk is moved to another datastore, and back.
async fn move_disk(agent: &dyn HostAgent, session: &mut Session, disk: DiskId) {
    let vm = session.vm();
    let second = second_datastore(agent, session).await;
    let (first, put) = (session.place.clone(), |job| agent.put_job(vm, TaskId::new(), job));
    let code = ErrorCode::InvalidRequest;
    refused(put(moved(disk, false, &first)).await, code, "a move to where the disk is");
    let (task, job) = (TaskId::new(), moved(disk, false, &second));
    session.copied(agent, task, &job).await;
    let other = put(moved(disk, true, &second)).await;
    refused(other, ErrorCode::InUse, "a second copy of a disk that moves");
    done(agent.cancel_job(vm, task, job.clone()).await, "cancelling a move");
    refused(agent.commit_job(vm, task, job).await, ErrorCode::NotFound, "committing it");
    for to in [second, first] {
        let seen = mirrored(agent, session, disk, moved(disk, false, &to)).await;
        assert_eq!((seen.datastore, seen.facts), (Some(to.datastore), DiskFacts::Raw));
        disk_mut(session, disk).datastore = to;
        done(agent.register_vm(session.spec.clone()).await, "registering it where it is");
    }
}

/// Does a job that copies a disk, and commits it; the disk then. Nobody else has its former image.
pub async fn mirrored(
    agent: &dyn HostAgent,
    session: &Session,
    disk: DiskId,
    job: JobSpec,
) -> DiskState {
    let (known, former) = copied_away(agent, session, disk, job).await;
    assert!(former.is_overwritten(), "{former:?}");
    known
}

/// Does the same with a disk whose former image a linked clone stands on.
pub async fn mirrored_beside_a_clone(
    agent: &dyn HostAgent,
    session: &Session,
    disk: DiskId,
    job: JobSpec,
) {
    let (_, former) = copied_away(agent, session, disk, job).await;
    let is_shared = matches!(former.fate, FormerFate::Shared { in_the_clear: false, .. });
    assert!(is_shared, "{former:?}");
}

/// Does a job that copies a disk, and commits it; the disk then, and what has become of its former image.
async fn copied_away(
    agent: &dyn HostAgent,
    session: &Session,
    disk: DiskId,
    job: JobSpec,
) -> (DiskState, FormerImage) {
    let vm = session.vm();
    let task = TaskId::new();
    session.copied(agent, task, &job).await;
    let commit = || agent.commit_job(vm, task, job.clone());
    done(commit().await, "committing it");
    assert_eq!(session.worked(agent, task).await, JobState::Done);
    done(commit().await, "committing it again");
    let cancelled = agent.cancel_job(vm, task, job.clone()).await;
    refused(cancelled, ErrorCode::AlreadyExists, "cancelling what is committed");
    let next = agent.put_job(vm, TaskId::new(), copy(disk, true)).await;
    refused(next, ErrorCode::WrongState, "another copy while the former image is there");
    let known = session.now(agent).await.disks.into_iter().find(|known| known.disk == disk);
    let drop = JobSpec::DropSources(DropSourcesJob { disks: vec![disk] });
    done(agent.put_job(vm, task, drop.clone()).await, "removing the former image");
    done(agent.put_job(vm, task, drop.clone()).await, "the same again");
    assert_eq!(session.worked(agent, task).await, JobState::Done);
    let job = done(agent.job(vm, task).await, "the job");
    assert_eq!((job.kind, job.former.len()), (JobKind::DropSources, 1), "{job:?}");
    let former = job.former[0].clone();
    assert_eq!(former.disk, disk);
    let again = TaskId::new();
    done(agent.put_job(vm, again, drop).await, "removing what is gone");
    assert_eq!(session.worked(agent, again).await, JobState::Done);
    let job = done(agent.job(vm, again).await, "that job");
    assert!(job.former.is_empty(), "nothing was there: {job:?}");
    (known.expect("the disk's facts"), former)
}
