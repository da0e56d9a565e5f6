//! Every pair of the exclusion table: the activity is started, the action is tried, and the answer must be
//! what the table says. A change of keys ends too soon to be caught here; the table's own unit test covers
//! that column.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use vmseal_api::expose::LET_GO;
use vmseal_api::guest::GuestCommand;
use vmseal_api::host::{
    Allocation, ConsoleClaim, ConsoleStream, Departure, DropSourcesJob, ExportJob, Exposing,
    GuestControl, HostAgent, JobSpec, JobState, KeyState, MigrationSession, Power, PowerOff,
    SealedKey, SendJob, VmChange,
};
use vmseal_api::id::{BackupId, DumpId, MigrationId, SnapshotId, TaskId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::transfer::ExportFormat;

use super::backups::{back_up, restore, verify};
use super::convert::conversion;
use super::dumps::{decryption, dump_of};
use super::jobs::{creation, image};
use super::mirror::copy;
use super::proofs::proof;
use super::snapshots::{drop_snapshot, revert, take};
use super::{Session, done};
use crate::rules::exclusion::{ACTIVITIES, Action, Activity, Rule, TABLE, rule};

/// How often a pair is tried when its activity ends before the action is answered.
const ATTEMPTS: u32 = 50;

/// Longer than a row takes, in seconds. The suite's guest ignores the power button.
const STOPPING_SECONDS: u32 = 600;

/// Keeps an activity in progress.
enum Ongoing {
    ByItself,
    Job(TaskId),
    /// A copy, which goes on until it is committed or cancelled.
    Copy(TaskId),
    Stream(ConsoleStream),
}

/// How a VM that is off would be sent by a session without connections, which every host refuses.
fn at_rest_to_nowhere() -> Departure {
    let key = SealedKey { key_box: String::new(), sealed: String::new() };
    let (migration, nonce, streams) = (MigrationId::new(), 0, 0);
    let (encrypted, apart) = (true, false);
    let session = MigrationSession { migration, nonce, key, streams, encrypted, apart };
    let to = SocketAddr::from(([127, 0, 0, 1], 1));
    let (downtime_milliseconds, bytes_per_second, compresses) = (0, None, false);
    let (at_rest, suspended) = (true, false);
    Departure {
        session,
        to,
        downtime_milliseconds,
        bytes_per_second,
        compresses,
        at_rest,
        suspended,
    }
}

/// Tries all pairs. The VM is off, its disks are made and its key is there, before and after.
pub async fn walk(agent: &dyn HostAgent, session: &Session) {
    for activity in ACTIVITIES {
        if activity == Activity::KeyChange {
            continue;
        }
        for (action, _) in TABLE {
            pair(agent, session, action, activity).await;
        }
        at_rest(agent, session).await;
    }
}

/// What the table says of a VM that is off while its disk is worked on.
fn expected(action: Action, activity: Activity) -> Rule {
    let of_disk = matches!(
        activity,
        Activity::Creating | Activity::Exporting | Activity::Exposed | Activity::Mirroring
    );
    match rule(action, Activity::Off) {
        Rule::Allowed | Rule::Ends => rule(action, activity),
        while_off if of_disk => while_off,
        _ => rule(action, activity),
    }
}

async fn pair(agent: &dyn HostAgent, session: &Session, action: Action, activity: Activity) {
    let expected = expected(action, activity);
    for _ in 0..ATTEMPTS {
        let ongoing = bring_about(agent, session, activity).await;
        let answer = attempt(agent, session, action).await;
        let goes_on = goes_on(agent, session, activity, &ongoing).await;
        let as_expected = match (expected, &answer) {
            (Rule::Refused(code), Err(problem)) => problem.code == code && goes_on,
            (Rule::Allowed | Rule::Already, Ok(())) => true,
            (Rule::Ends, Ok(())) => !goes_on,
            _ => false,
        };
        release(agent, session, ongoing).await;
        if as_expected {
            return;
        }
        assert!(!goes_on, "{action:?} during {activity:?}: {answer:?} and not {expected:?}");
    }
    panic!("{action:?} during {activity:?}: the activity always ended too soon");
}

async fn at_rest(agent: &dyn HostAgent, session: &Session) {
    let vm = session.vm();
    if session.seen(agent).await.is_some_and(|seen| seen.power != Power::Off) {
        // Refused where it is suspended.
        let _ = agent.power_off(vm, PowerOff::Force).await;
    }
    done(agent.register_vm(session.spec.clone()).await, "registering");
    // One that was unregistered while it was suspended is suspended when it is registered again.
    done(agent.discard_memory(vm).await, "discarding its memory");
    if session.now(agent).await.key == KeyState::Missing {
        done(session.offer(agent).await, "the key");
    }
    let working = |state: &JobState| matches!(state, JobState::Waiting | JobState::Running);
    session
        .wait(agent, "the end of the jobs", |seen| seen.jobs.iter().all(|job| !working(&job.state)))
        .await;
    let sources = [image(&session.fixture.image), None];
    for (index, source) in sources.into_iter().enumerate() {
        let disk = session.disk(index).disk;
        if session.now(agent).await.disks.iter().all(|known| known.disk != disk) {
            let task = done(session.create(agent, disk, source).await, "a disk");
            session.made(agent, task, disk).await;
        }
    }
}

async fn bring_about(agent: &dyn HostAgent, session: &Session, activity: Activity) -> Ongoing {
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    let power = match activity {
        Activity::Running => Some(Power::Running),
        Activity::Stopping => Some(Power::Stopping),
        Activity::Paused => Some(Power::Paused),
        Activity::Suspending => Some(Power::Suspending),
        Activity::Suspended => Some(Power::Suspended),
        _ => None,
    };
    if power.is_some() && session.seen(agent).await.map(|seen| seen.power) == power {
        return Ongoing::ByItself;
    }
    at_rest(agent, session).await;
    let task = TaskId::new();
    match activity {
        Activity::Off | Activity::KeyChange => {}
        Activity::Starting => done(agent.power_on(vm).await, "starting"),
        Activity::Running
        | Activity::Stopping
        | Activity::Paused
        | Activity::Suspending
        | Activity::Suspended => {
            done(agent.power_on(vm).await, "starting");
            session.power(agent, Power::Running).await;
            if activity == Activity::Stopping {
                let how = PowerOff::Shutdown { seconds: STOPPING_SECONDS };
                done(agent.power_off(vm, how).await, "pressing the power button");
            }
            if matches!(activity, Activity::Suspending | Activity::Suspended) {
                done(agent.suspend(vm).await, "suspending");
            }
            if activity == Activity::Suspended {
                session.power(agent, Power::Suspended).await;
            }
            if activity == Activity::Paused {
                done(agent.control_guest(vm, GuestControl::Pause).await, "pausing");
            }
        }
        Activity::Creating => {
            done(agent.delete_disk(vm, disk).await, "removing a disk");
            let job = creation(disk, image(&session.fixture.image));
            done(agent.put_job(vm, task, job).await, "making a disk");
            return Ongoing::Job(task);
        }
        Activity::Exporting => {
            done(agent.put_job(vm, task, export(session, task)).await, "exporting a disk");
            return Ongoing::Job(task);
        }
        Activity::Mirroring => {
            done(agent.put_job(vm, task, copy(disk, true)).await, "copying a disk");
            return Ongoing::Copy(task);
        }
        Activity::Exposed => {
            let hold = Exposing::Hold { writable: false };
            return Ongoing::Stream(done(agent.expose_disk(vm, disk, hold).await, "exposing"));
        }
    }
    Ongoing::ByItself
}

fn export(session: &Session, task: TaskId) -> JobSpec {
    let to = session.fixture.image.with_file_name(format!("walk-{task}"));
    let (disk, format) = (session.disk(0).disk, ExportFormat::Raw);
    JobSpec::Export(ExportJob { disk, to, format, passphrase: None, snapshot: None })
}

async fn attempt(agent: &dyn HostAgent, session: &Session, action: Action) -> Result<(), Problem> {
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    match action {
        Action::Register => {
            let mut changed = session.spec.clone();
            for disk in changed.disks_mut() {
                disk.allocation = Allocation::Preallocated;
            }
            agent.register_vm(changed).await?;
            agent.register_vm(session.spec.clone()).await
        }
        Action::Unregister => agent.unregister_vm(vm).await,
        Action::ChangeKeys => {
            let key = session.spec.key.clone().expect("the VM has a key");
            agent.check_key(vm, key).await
        }
        Action::CreateDisk => {
            session.create(agent, disk, image(&session.fixture.image)).await.map(drop)
        }
        Action::DeleteDisk => agent.delete_disk(vm, disk).await,
        Action::ExportDisk => {
            let task = TaskId::new();
            agent.put_job(vm, task, export(session, task)).await
        }
        Action::ExportKept => {
            let task = TaskId::new();
            let JobSpec::Export(job) = export(session, task) else { unreachable!("it exports") };
            let job = ExportJob { snapshot: Some(SnapshotId::new()), ..job };
            match agent.put_job(vm, task, JobSpec::Export(job)).await {
                // It was let as far as to look for the snapshot.
                Err(problem) if problem.code == ErrorCode::NotFound => Ok(()),
                put => put,
            }
        }
        Action::MirrorDisk => {
            let task = TaskId::new();
            match agent.put_job(vm, task, copy(disk, true)).await {
                // The suite's guest has no driver for its disks, and an old QEMU takes no other filter then.
                Err(problem) if problem.code == ErrorCode::TimedOut => Ok(()),
                put => {
                    put?;
                    agent.cancel_job(vm, task, copy(disk, true)).await
                }
            }
        }
        Action::ConvertDisk => {
            let task = TaskId::new();
            agent.put_job(vm, task, conversion(disk, true)).await?;
            agent.cancel_job(vm, task, conversion(disk, true)).await
        }
        Action::DropSource => {
            let job = JobSpec::DropSources(DropSourcesJob { disks: vec![disk] });
            let task = TaskId::new();
            agent.put_job(vm, task, job).await?;
            assert_eq!(session.worked(agent, task).await, JobState::Done);
            Ok(())
        }
        Action::TakeSnapshot => {
            let (task, snapshot) = (TaskId::new(), SnapshotId::new());
            match agent.put_job(vm, task, take(disk, snapshot)).await {
                // The suite's guest has no driver for its disks, and an old QEMU takes no other filter then.
                Err(problem) if problem.code == ErrorCode::TimedOut => Ok(()),
                put => {
                    put?;
                    assert_eq!(session.worked(agent, task).await, JobState::Done);
                    let task = TaskId::new();
                    agent.put_job(vm, task, drop_snapshot(disk, snapshot)).await?;
                    assert_eq!(session.worked(agent, task).await, JobState::Done);
                    Ok(())
                }
            }
        }
        Action::Revert => {
            match agent.put_job(vm, TaskId::new(), revert(disk, SnapshotId::new())).await {
                // It was let as far as to look for the snapshot.
                Err(problem) if problem.code == ErrorCode::NotFound => Ok(()),
                put => put,
            }
        }
        Action::DropSnapshot => {
            let task = TaskId::new();
            agent.put_job(vm, task, drop_snapshot(disk, SnapshotId::new())).await?;
            assert_eq!(session.worked(agent, task).await, JobState::Done);
            Ok(())
        }
        Action::Prove => {
            let task = TaskId::new();
            agent.put_job(vm, task, proof(&[disk])).await?;
            assert_eq!(session.worked(agent, task).await, JobState::Done);
            Ok(())
        }
        Action::Dump => {
            let (task, dump) = (TaskId::new(), DumpId::new());
            agent.put_job(vm, task, dump_of(dump, disk)).await?;
            assert_eq!(session.worked(agent, task).await, JobState::Done);
            agent.discard_dump(vm, dump).await
        }
        Action::DecryptDump => {
            let (task, to) = (TaskId::new(), session.fixture.image.with_file_name("core"));
            let job = decryption(DumpId::new(), disk, &to);
            agent.put_job(vm, task, job).await?;
            // It was let as far as to look for the dump.
            let failed = session.worked(agent, task).await;
            let absent = |problem: &Problem| problem.code == ErrorCode::NotFound;
            let as_expected = matches!(&failed, JobState::Failed { problem } if absent(problem));
            assert!(as_expected, "{failed:?}");
            Ok(())
        }
        Action::BackUp | Action::VerifyBackup | Action::Restore => {
            let job = match action {
                Action::BackUp => back_up(session, BackupId::new(), None, SnapshotId::new()),
                Action::VerifyBackup => verify(session, BackupId::new()),
                _ => restore(session, BackupId::new()),
            };
            match agent.put_job(vm, TaskId::new(), job).await {
                // It was let as far as to look for the snapshot, or for the backup.
                Err(problem) if problem.code == ErrorCode::NotFound => Ok(()),
                put => put,
            }
        }
        Action::Send => {
            let job = SendJob { disks: vec![disk], copies: Vec::new(), begin: None };
            match agent.put_job(vm, TaskId::new(), JobSpec::Send(job)).await {
                // It was let as far as to look where to.
                Err(problem) if problem.code == ErrorCode::InvalidRequest => Ok(()),
                put => put,
            }
        }
        Action::SendAtRest => {
            let begin = Some(Box::new(at_rest_to_nowhere()));
            let job = SendJob { disks: vec![disk], copies: vec![disk], begin };
            match agent.put_job(vm, TaskId::new(), JobSpec::Send(job)).await {
                // It was let as far as to look what is sent.
                Err(problem) if problem.code == ErrorCode::InvalidRequest => Ok(()),
                put => put,
            }
        }
        Action::ExposeToRead | Action::ExposeToWrite => {
            let hold = Exposing::Hold { writable: action == Action::ExposeToWrite };
            let stream = agent.expose_disk(vm, disk, hold).await?;
            release(agent, session, Ongoing::Stream(stream)).await;
            Ok(())
        }
        Action::ExposeKept => {
            let hold = Exposing::HoldKept { snapshot: SnapshotId::new(), sealed: false };
            match agent.expose_disk(vm, disk, hold).await {
                // It was let as far as to look for the snapshot.
                Err(problem) if problem.code == ErrorCode::NotFound => Ok(()),
                held => held.map(drop),
            }
        }
        Action::ExposeSealed => {
            let stream = agent.expose_disk(vm, disk, Exposing::HoldSealed).await?;
            release(agent, session, Ongoing::Stream(stream)).await;
            Ok(())
        }
        Action::PowerOn => {
            let start = VmChange::Start { first: None, discard_memory: false, generation: None };
            let examined = agent.examine_change(vm, start).await;
            foretold(examined, agent.power_on(vm).await)
        }
        Action::ShutDown => {
            agent.power_off(vm, PowerOff::Shutdown { seconds: STOPPING_SECONDS }).await
        }
        Action::Suspend => agent.suspend(vm).await,
        Action::GrowDisk => {
            // Where it is allowed, the disk has the size already.
            let size = session.disk(0).size;
            let examined = agent.examine_change(vm, VmChange::GrowDisk { disk, size }).await;
            foretold(examined, agent.grow_disk(vm, disk, size).await)
        }
        Action::Pause => agent.control_guest(vm, GuestControl::Pause).await,
        Action::Unpause => agent.control_guest(vm, GuestControl::Unpause).await,
        Action::Reset => agent.control_guest(vm, GuestControl::Reset).await,
        Action::Wakeup => match agent.control_guest(vm, GuestControl::Wakeup).await {
            // It was let as far as to ask whether the guest sleeps.
            Err(problem) if problem.detail.contains("is not suspended to RAM") => Ok(()),
            woken => woken,
        },
        Action::Console => agent.console(vm, ConsoleClaim::TakeOver).await.map(drop),
        Action::Screen => agent.screen(vm).await.map(drop),
        // The suite's guest has no agent.
        Action::Guest => match agent.guest(vm, GuestCommand::Ping).await {
            Err(problem) if problem.code == ErrorCode::Unreachable => Ok(()),
            answered => answered.map(drop),
        },
        Action::Bitmaps => agent.bitmaps(vm, disk).await.map(drop),
        Action::Replica => agent.replica(vm, session.disk(1).disk).await.map(drop),
    }
}

/// The answer to an action that was asked about just before: that may not be refused where the question was not.
fn foretold(examined: Result<(), Problem>, answer: Result<(), Problem>) -> Result<(), Problem> {
    // The activity may have ended in between.
    examined?;
    answer.map_err(|problem| {
        let what = format!("it was not refused when it was asked about: {problem}");
        Problem::new(ErrorCode::Internal, what)
    })
}

/// Whether the activity is still in progress.
async fn goes_on(
    agent: &dyn HostAgent,
    session: &Session,
    activity: Activity,
    ongoing: &Ongoing,
) -> bool {
    let Some(seen) = session.seen(agent).await else { return false };
    match (ongoing, activity) {
        (Ongoing::Job(task), _) => seen.jobs.iter().any(|job| {
            job.task == *task && matches!(job.state, JobState::Waiting | JobState::Running)
        }),
        (Ongoing::Copy(task), _) => seen.jobs.iter().any(|job| {
            let goes_on = [JobState::Waiting, JobState::Running, JobState::ReadyToCommit];
            job.task == *task && goes_on.contains(&job.state)
        }),
        (Ongoing::Stream(_), _) => true,
        (Ongoing::ByItself, Activity::Off) => seen.power == Power::Off,
        (Ongoing::ByItself, Activity::Starting) => seen.power == Power::Starting,
        (Ongoing::ByItself, Activity::Running) => seen.power == Power::Running,
        (Ongoing::ByItself, Activity::Stopping) => seen.power == Power::Stopping,
        (Ongoing::ByItself, Activity::Paused) => seen.power == Power::Paused,
        (Ongoing::ByItself, Activity::Suspending) => seen.power == Power::Suspending,
        (Ongoing::ByItself, Activity::Suspended) => seen.power == Power::Suspended,
        (Ongoing::ByItself, _) => false,
    }
}

/// Ends the activity; other jobs than copies end by themselves.
async fn release(agent: &dyn HostAgent, session: &Session, ongoing: Ongoing) {
    match ongoing {
        Ongoing::Stream(mut stream) => {
            // It may have ended with its VM.
            let _ = stream.write_all(&[LET_GO]).await;
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
        Ongoing::Copy(task) => {
            if session.seen(agent).await.is_none() {
                // It was unregistered: the copy is there still.
                done(agent.register_vm(session.spec.clone()).await, "registering");
            }
            let job = copy(session.disk(0).disk, true);
            done(agent.cancel_job(session.vm(), task, job).await, "cancelling a copy");
        }
        Ongoing::ByItself | Ongoing::Job(_) => {}
    }
}
