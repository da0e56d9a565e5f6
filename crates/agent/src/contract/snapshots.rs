//! Snapshots of disks: each step repeated, every refusal provoked.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use vmseal_api::expose::LET_GO;
use vmseal_api::host::{
    CopyOf, CreateJob, Device, DiskSpec, DiskToCreate, DropSnapshotJob, ExportJob, Exposing,
    HostAgent, JobSpec, JobState, KeptRoom, LAYERS_MAX, PlacedDisk, RevertJob, SnapshotJob, VmSpec,
};
use vmseal_api::id::{DiskId, SnapshotId, TaskId, VmId};
use vmseal_api::problem::ErrorCode;
use vmseal_api::transfer::ExportFormat;
use vmseal_secret::{KEK_LEN, SecretBytes};

use super::mirror::{copy, disk_mut, mirrored, mirrored_beside_a_clone, moved, second_datastore};
use super::{Session, done, refused, speaks_nbd};
use crate::keys::{reference_of, seal_for};

/// The job that takes a snapshot of one disk.
pub fn take(disk: DiskId, snapshot: SnapshotId) -> JobSpec {
    JobSpec::Snapshot(SnapshotJob {
        snapshot,
        quiesce: true,
        memory: false,
        generation: None,
        tracked: None,
        disks: vec![disk],
    })
}

/// The job that reverts one disk, also of a VM that is suspended: its memory is given up.
pub fn revert(disk: DiskId, snapshot: SnapshotId) -> JobSpec {
    reverting(disk, snapshot, true)
}

/// The same; says whether the memory of one that is suspended is given up.
pub fn reverting(disk: DiskId, snapshot: SnapshotId, discard_memory: bool) -> JobSpec {
    JobSpec::Revert(RevertJob { snapshot, memory: false, discard_memory, disks: vec![disk] })
}

/// The job that removes a snapshot of one disk.
pub fn drop_snapshot(disk: DiskId, snapshot: SnapshotId) -> JobSpec {
    JobSpec::DropSnapshot(DropSnapshotJob { snapshot, disks: vec![disk] })
}

impl Session {
    /// Puts a job twice, and waits until it is done.
    pub async fn through(&self, agent: &dyn HostAgent, job: JobSpec) {
        let task = TaskId::new();
        done(agent.put_job(self.vm(), task, job.clone()).await, "a job on snapshots");
        done(agent.put_job(self.vm(), task, job.clone()).await, "the same again");
        assert_eq!(self.worked(agent, task).await, JobState::Done);
        done(agent.commit_job(self.vm(), task, job.clone()).await, "committing what is done");
        done(agent.cancel_job(self.vm(), task, job).await, "cancelling what is done");
    }
}

/// What a snapshot keeps is written to a file.
async fn kept_exports(
    agent: &dyn HostAgent,
    session: &Session,
    (kept, strange): (SnapshotId, SnapshotId),
) {
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    // How much room that takes is said of any VM and disk.
    let of = |disk: &DiskSpec| PlacedDisk { disk: disk.disk, datastore: disk.datastore.clone() };
    let places = vec![of(session.disk(0))];
    let room = done(agent.measure_kept(vm, places).await, "measuring what is kept");
    assert!(matches!(&room.disks[..], [it] if it.disk == disk && it.image > 0), "{room:?}");
    let none = done(agent.measure_kept(VmId::new(), Vec::new()).await, "measuring no disks");
    assert_eq!(none, KeptRoom::default());
    for format in [ExportFormat::Sealed, ExportFormat::Raw] {
        let (task, to) = (TaskId::new(), session.fixture.image.with_file_name("kept"));
        let of = |snapshot| {
            let (to, snapshot) = (to.clone(), Some(snapshot));
            JobSpec::Export(ExportJob { disk, to, format, passphrase: None, snapshot })
        };
        let absent = agent.put_job(vm, TaskId::new(), of(strange)).await;
        refused(absent, ErrorCode::NotFound, "a strange snapshot");
        done(agent.put_job(vm, task, of(kept)).await, "exporting what is kept");
        assert_eq!(session.worked(agent, task).await, JobState::ReadyToCommit);
        done(agent.cancel_job(vm, task, of(kept)).await, "giving it up");
    }
}

/// What a snapshot keeps is exposed, in the clear and as ciphertext; the snapshot stays meanwhile.
async fn kept_exposures(
    agent: &dyn HostAgent,
    session: &Session,
    (kept, strange): (SnapshotId, SnapshotId),
) {
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    for sealed in [true, false] {
        let hold = |snapshot| agent.expose_disk(vm, disk, Exposing::HoldKept { snapshot, sealed });
        let absent = hold(strange).await;
        refused(absent.map(drop), ErrorCode::NotFound, "exposing a strange snapshot");
        let mut held = done(hold(kept).await, "exposing what is kept");
        speaks_nbd(agent, session, disk).await;
        refused(hold(kept).await.map(drop), ErrorCode::InUse, "exposing it twice");
        for job in [drop_snapshot(disk, kept), revert(disk, kept), copy(disk, true)] {
            let during = agent.put_job(vm, TaskId::new(), job).await;
            refused(during.clone(), ErrorCode::InUse, "what would change what is exposed");
            let problem = during.expect_err("it was refused");
            assert!(problem.detail.contains("disk expose"), "{problem}");
        }
        held.write_all(&[LET_GO]).await.expect("releasing the disk");
        let mut wrong = String::new();
        let end = timeout(session.fixture.timeout, held.read_to_string(&mut wrong)).await;
        assert!(end.is_ok() && wrong.is_empty(), "releasing the disk: {wrong:?}");
    }
}

/// Another VM's disk stands on what a snapshot keeps, which stays until the snapshot's disk has a copy in its place. The other one keeps what it had.
async fn linked_clones(
    agent: &dyn HostAgent,
    session: &Session,
    of: DiskId,
    [kept, other, strange]: [SnapshotId; 3],
) {
    let (vm, kek) = (VmId::new(), SecretBytes::random(KEK_LEN).expect("locked memory"));
    let disk = DiskSpec { disk: DiskId::new(), facts: None, ..session.disk(0).clone() };
    let clone = VmSpec {
        vm,
        name: "contract-clone".to_owned(),
        key: Some(reference_of(&kek, vm, "clone-key")),
        devices: vec![Device::Disk(disk.clone())],
        snapshots: Vec::new(),
        ..session.spec.clone()
    };
    done(agent.register_vm(clone.clone()).await, "registering a clone");
    let reference = clone.key.as_ref().expect("it has a key");
    let sealed = seal_for(&session.key_box, vm, reference, &kek);
    done(agent.offer_key(vm, sealed).await, "the clone's key");
    let link = |snapshot| {
        let copy_of = CopyOf { vm: session.vm(), disk: of, snapshot, linked: true };
        let wanted = DiskToCreate {
            disk: disk.disk,
            source: None,
            cloud_init: None,
            copy_of: Some(copy_of),
        };
        JobSpec::Create(CreateJob { disks: vec![wanted] })
    };
    let put = |job| agent.put_job(vm, TaskId::new(), job);
    refused(put(link(Some(strange))).await, ErrorCode::NotFound, "a strange snapshot");
    refused(put(link(None)).await, ErrorCode::InvalidRequest, "a link to what is written");
    for what in ["linking", "linking what is linked"] {
        let task = TaskId::new();
        for _ in 0..2 {
            done(agent.put_job(vm, task, link(Some(kept))).await, what);
        }
        loop {
            match done(agent.job(vm, task).await, what).state {
                JobState::Done => break,
                JobState::Waiting | JobState::Running => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                ended => panic!("{what}: {ended:?}"),
            }
        }
    }
    let on_source = |job| agent.put_job(session.vm(), TaskId::new(), job);
    let dropped = on_source(drop_snapshot(of, kept)).await;
    refused(dropped, ErrorCode::WrongState, "what a clone stands on");
    let dropped = agent.examine_job(session.vm(), drop_snapshot(of, other)).await;
    done(dropped, "a snapshot that no clone stands on");
    let copied = agent.examine_job(session.vm(), copy(of, true)).await;
    done(copied, "a copy of what a clone stands on");
    mirrored_beside_a_clone(agent, session, of, copy(of, true)).await;
    let dropped = agent.examine_job(session.vm(), drop_snapshot(of, kept)).await;
    done(dropped, "a snapshot whose former files a clone stands on");
    for _ in 0..2 {
        done(agent.delete_disk(vm, disk.disk).await, "deleting the clone's disk");
    }
    done(agent.unregister_vm(vm).await, "forgetting the clone");
}

/// An encrypted disk in layers is copied with them, to where it is, to another datastore, and back.
async fn copies(agent: &dyn HostAgent, session: &mut Session, disk: DiskId) {
    let (first, second) = (session.place.clone(), second_datastore(agent, session).await);
    let (vm, task) = (session.vm(), TaskId::new());
    session.copied(agent, task, &copy(disk, true)).await;
    let during = agent.put_job(vm, TaskId::new(), take(disk, SnapshotId::new())).await;
    refused(during, ErrorCode::InUse, "a snapshot of a disk that is copied");
    done(agent.cancel_job(vm, task, copy(disk, true)).await, "giving the copy up");
    mirrored(agent, session, disk, copy(disk, true)).await;
    for to in [second, first] {
        let seen = mirrored(agent, session, disk, moved(disk, true, &to)).await;
        assert_eq!(seen.datastore, Some(to.datastore));
        disk_mut(session, disk).datastore = to;
        done(agent.register_vm(session.spec.clone()).await, "registering it where it is");
    }
}

/// The VM is off, its disks are made and its key is there, before and after.
pub async fn disks(agent: &dyn HostAgent, session: &mut Session) {
    let vm = session.vm();
    let [system, data] = [0, 1].map(|index| session.disk(index).disk);
    let put = |job| agent.put_job(vm, TaskId::new(), job);
    let [one, two, strange] = std::array::from_fn(|_| SnapshotId::new());
    // The second disk has a replica.
    for job in [take(data, one), revert(data, one), drop_snapshot(data, one)] {
        session.through(agent, job).await;
    }
    let none = JobSpec::Snapshot(SnapshotJob {
        snapshot: one,
        quiesce: false,
        memory: false,
        generation: None,
        tracked: None,
        disks: vec![],
    });
    refused(put(none).await, ErrorCode::InvalidRequest, "a snapshot of no disk");
    refused(put(take(DiskId::new(), one)).await, ErrorCode::NotFound, "a strange disk");
    refused(put(revert(system, one)).await, ErrorCode::NotFound, "no such snapshot");

    session.through(agent, take(system, one)).await;
    // Another task finds it taken.
    session.through(agent, take(system, one)).await;
    session.through(agent, take(system, two)).await;
    kept_exports(agent, session, (one, strange)).await;
    kept_exposures(agent, session, (one, strange)).await;
    linked_clones(agent, session, system, [one, two, strange]).await;
    copies(agent, session, system).await;
    let longer = session.disk(0).size * 2;
    let grown = agent.grow_disk(vm, system, longer).await;
    refused(grown, ErrorCode::WrongState, "a disk in layers grows");
    refused(put(revert(system, strange)).await, ErrorCode::NotFound, "a strange snapshot");
    session.through(agent, revert(system, one)).await;
    session.through(agent, revert(system, two)).await;
    session.through(agent, drop_snapshot(system, strange)).await;
    session.through(agent, drop_snapshot(system, one)).await;
    refused(put(revert(system, one)).await, ErrorCode::NotFound, "it was removed");
    session.through(agent, drop_snapshot(system, two)).await;

    let many: Vec<_> = (0..LAYERS_MAX).map(|_| SnapshotId::new()).collect();
    for snapshot in &many {
        session.through(agent, take(system, *snapshot)).await;
    }
    refused(put(take(system, one)).await, ErrorCode::LimitExceeded, "one layer too many");
    for snapshot in many {
        session.through(agent, drop_snapshot(system, snapshot)).await;
    }
    let copy_of = |vm, disk, snapshot| {
        let copy_of = Some(CopyOf { vm, disk, snapshot, linked: false });
        let wanted = DiskToCreate { disk: data, source: None, cloud_init: None, copy_of };
        JobSpec::Create(CreateJob { disks: vec![wanted] })
    };
    for (of, why) in [
        (copy_of(VmId::new(), system, None), "a disk of a strange VM"),
        (copy_of(vm, DiskId::new(), None), "a strange disk of a VM"),
        (copy_of(vm, system, Some(strange)), "a strange snapshot of a disk"),
    ] {
        refused(put(of).await, ErrorCode::NotFound, why);
    }
    // As before: it can be copied.
    done(agent.examine_job(vm, copy(system, true)).await, "examining a copy");
}
