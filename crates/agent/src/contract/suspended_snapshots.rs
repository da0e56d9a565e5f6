//! Snapshots of a VM that is suspended: its memory stays that of its disks, or is gone. And such with memory of a guest that is paused.

use vmseal_api::host::{GuestControl, HostAgent, JobSpec, Power, PowerOff, RevertJob, SnapshotJob};
use vmseal_api::id::{DiskId, SnapshotId, TaskId};
use vmseal_api::problem::ErrorCode;

use super::mirror::{GENERATION, goes_on, suspend};
use super::snapshots::{drop_snapshot, revert, reverting, take};
use super::{Session, console, done, refused};

/// The job that takes a snapshot of one disk and of the guest's memory, which may be saved already.
fn take_with_memory(disk: DiskId, snapshot: SnapshotId) -> JobSpec {
    let (quiesce, memory, generation, tracked) = (true, true, None, None);
    let disks = vec![disk];
    JobSpec::Snapshot(SnapshotJob { snapshot, quiesce, memory, generation, tracked, disks })
}

/// The job that reverts one disk of a VM, which is suspended then.
fn revert_with_memory(disk: DiskId, snapshot: SnapshotId, discard_memory: bool) -> JobSpec {
    JobSpec::Revert(RevertJob { snapshot, memory: true, discard_memory, disks: vec![disk] })
}

async fn is_suspended(agent: &dyn HostAgent, session: &Session, what: &str) {
    assert_eq!(session.now(agent).await.power, Power::Suspended, "{what}");
}

/// The VM is off and its key is there, before and after.
pub async fn disk(agent: &dyn HostAgent, session: &Session) {
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    let [plain, asleep, later] = std::array::from_fn(|_| SnapshotId::new());
    let without = agent.put_job(vm, TaskId::new(), take_with_memory(disk, asleep)).await;
    refused(without, ErrorCode::WrongState, "the memory of a VM that is off");
    done(agent.power_on(vm).await, "starting");
    session.power(agent, Power::Running).await;
    // A guest that boots does not hear what is typed.
    console(agent, session).await;
    done(agent.suspend_as(vm, GENERATION).await, "suspending");
    session.power(agent, Power::Suspended).await;

    session.through(agent, take(disk, plain)).await;
    session.through(agent, take_with_memory(disk, asleep)).await;
    // Another task finds it taken.
    session.through(agent, take_with_memory(disk, asleep)).await;
    is_suspended(agent, session, "after snapshots").await;
    for job in [reverting(disk, plain, false), revert(disk, SnapshotId::new())] {
        let code = match &job {
            JobSpec::Revert(job) if job.discard_memory => ErrorCode::NotFound,
            _ => ErrorCode::WrongState,
        };
        refused(agent.put_job(vm, TaskId::new(), job).await, code, "a revert");
        is_suspended(agent, session, "after a revert that was refused").await;
    }
    let examined = agent.examine_job(vm, reverting(disk, plain, false)).await;
    refused(examined, ErrorCode::WrongState, "asking about a revert");
    // It goes on above new layers.
    goes_on(agent, session).await;

    done(agent.suspend_as(vm, GENERATION + 1).await, "suspending it again");
    session.power(agent, Power::Suspended).await;
    let silent = agent.put_job(vm, TaskId::new(), revert_with_memory(disk, asleep, false)).await;
    refused(silent, ErrorCode::WrongState, "a memory that is lost and was not given up");
    session.through(agent, revert_with_memory(disk, asleep, true)).await;
    is_suspended(agent, session, "after a revert to a snapshot with memory").await;
    // The job is done already. To ask for it again changes nothing.
    session.through(agent, revert_with_memory(disk, asleep, false)).await;
    let other = agent.power_on_with(vm, GENERATION + 1).await;
    refused(other, ErrorCode::Damaged, "the memory that was given up");
    session.through(agent, take_with_memory(disk, later)).await;
    session.through(agent, drop_snapshot(disk, asleep)).await;
    is_suspended(agent, session, "after a snapshot was dropped").await;
    done(agent.power_on_with(vm, GENERATION).await, "resuming with the snapshot's");
    session.power(agent, Power::Running).await;

    suspend(agent, session).await;
    session.through(agent, revert_with_memory(disk, later, true)).await;
    is_suspended(agent, session, "after a revert to what a suspended VM had").await;
    goes_on(agent, session).await;
    suspend(agent, session).await;
    session.through(agent, revert(disk, plain)).await;
    let power = session.now(agent).await.power;
    assert_eq!(power, Power::Off, "it has a memory of before");
    for snapshot in [plain, later] {
        session.through(agent, drop_snapshot(disk, snapshot)).await;
    }
}

/// A paused guest is kept with its memory and stays paused, and is paused again when it goes on from that. The VM is off and its key is
/// there, before and after.
pub async fn paused(agent: &dyn HostAgent, session: &Session) {
    let (vm, disk, kept) = (session.vm(), session.disk(0).disk, SnapshotId::new());
    done(agent.power_on(vm).await, "starting");
    session.power(agent, Power::Running).await;
    // A guest that boots does not hear what is typed.
    console(agent, session).await;
    done(agent.control_guest(vm, GuestControl::Pause).await, "pausing");
    session.through(agent, take_with_memory(disk, kept)).await;
    // Another task finds it taken.
    session.through(agent, take_with_memory(disk, kept)).await;
    assert_eq!(session.now(agent).await.power, Power::Paused, "after a snapshot");
    let again = agent.put_job(vm, TaskId::new(), take_with_memory(disk, SnapshotId::new())).await;
    refused(
        again,
        ErrorCode::WrongState,
        "the memory of a guest that was saved and has not run since",
    );
    refused(agent.suspend(vm).await, ErrorCode::WrongState, "suspending it");
    assert_eq!(session.now(agent).await.power, Power::Paused, "after what was refused");
    done(agent.control_guest(vm, GuestControl::Unpause).await, "unpausing");
    goes_on(agent, session).await;

    done(agent.power_off(vm, PowerOff::Force).await, "forcing it off");
    session.through(agent, revert_with_memory(disk, kept, false)).await;
    is_suspended(agent, session, "after a revert to a paused guest").await;
    done(agent.power_on(vm).await, "resuming");
    session.power(agent, Power::Paused).await;
    done(agent.control_guest(vm, GuestControl::Unpause).await, "unpausing it again");
    goes_on(agent, session).await;
    // It has run since, and is saved as any other.
    suspend(agent, session).await;
    session.through(agent, revert(disk, kept)).await;
    assert_eq!(session.now(agent).await.power, Power::Off, "it has a memory of before");
    session.through(agent, drop_snapshot(disk, kept)).await;
}
