//! Replicas of disks: where they must not be, and how far they are behind.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use vmseal_api::filter::REPLICATE_RATE_MIN;
use vmseal_api::host::{DatastoreLocation, DatastoreSpec, HostAgent, NewDisk, VmSpec};
use vmseal_api::id::{DatastoreId, DiskId};
use vmseal_api::problem::ErrorCode;
use vmseal_api::replica::{REPLICA_RATE, ReplicaPlace};

use super::{Session, done, refused};

/// A replica is refused beside its disk, below the minimum rate, and where there is no datastore.
pub async fn misplaced(agent: &dyn HostAgent, session: &Session) {
    let elsewhere = |name: &str| DatastoreSpec {
        datastore: DatastoreId::new(),
        location: DatastoreLocation::Dir { path: session.fixture.datastore.join(name) },
    };
    let with = |datastore: DatastoreSpec, bytes_per_second| {
        let mut spec = session.spec.clone();
        spec.disk_at_mut(1).expect("two disks").replica =
            Some(ReplicaPlace { datastore, bytes_per_second });
        spec
    };
    let same_place = DatastoreSpec { datastore: DatastoreId::new(), ..session.place.clone() };
    let same_id = DatastoreSpec { datastore: session.place.datastore, ..elsewhere("x") };
    let broken: [VmSpec; 3] = [
        with(same_place, REPLICATE_RATE_MIN),
        with(same_id, REPLICATE_RATE_MIN),
        with(elsewhere("x"), REPLICATE_RATE_MIN - 1),
    ];
    for spec in broken {
        refused(agent.register_vm(spec).await, ErrorCode::InvalidRequest, "a misplaced replica");
    }
    let disk =
        with(elsewhere("missing"), REPLICATE_RATE_MIN).disk_at(1).expect("two disks").clone();
    let looked = agent.examine_disk(NewDisk { disk, source: None, firmware: None }).await;
    assert!(
        looked.as_ref().is_err_and(|problem| matches!(
            problem.code,
            ErrorCode::InvalidRequest | ErrorCode::WrongState
        )),
        "a replica without its datastore: {looked:?}"
    );
}

/// Gives the suite's second disk a replica on another datastore.
pub async fn given(agent: &dyn HostAgent, session: &mut Session) {
    let path = session.fixture.image.with_file_name("second");
    std::fs::create_dir(&path).expect("a second datastore");
    let location = DatastoreLocation::Dir { path };
    let datastore = DatastoreSpec { datastore: DatastoreId::new(), location };
    done(agent.probe_datastore(datastore.clone()).await, "a second datastore");
    let unknown = agent.replica(session.vm(), session.disk(1).disk).await;
    refused(unknown, ErrorCode::NotFound, "a replica of an unknown VM");
    let replica = ReplicaPlace { datastore, bytes_per_second: REPLICA_RATE };
    session.spec.disk_at_mut(1).expect("two disks").replica = Some(replica);
}

/// While the guest runs, the replica catches up with its disk.
pub async fn followed(agent: &dyn HostAgent, session: &Session) {
    let (vm, [without, with]) = (session.vm(), [0, 1].map(|index| session.disk(index).disk));
    let unknown = agent.replica(vm, DiskId::new()).await;
    refused(unknown, ErrorCode::NotFound, "the replica of an unknown disk");
    refuses(agent, session, without, "has no replica: its policy").await;
    let give_up = Instant::now() + session.fixture.timeout;
    loop {
        let replica = done(agent.replica(vm, with).await, "asking for a replica's status");
        assert_eq!(replica.last_error, None);
        if replica.dirty_bytes == 0 && replica.lag_milliseconds.is_some() {
            return;
        }
        assert!(Instant::now() < give_up, "the replica does not catch up: {replica:?}");
        sleep(Duration::from_millis(50)).await;
    }
}

/// The status of a replica is unavailable while the VM is off. A disk without a replica gets the same answer
/// as while the VM runs.
pub async fn at_rest(agent: &dyn HostAgent, session: &Session) {
    let [without, with] = [0, 1].map(|index| session.disk(index).disk);
    refuses(agent, session, with, "nothing is copied to a replica while its VM is off").await;
    refuses(agent, session, without, "has no replica: its policy").await;
}

async fn refuses(agent: &dyn HostAgent, session: &Session, disk: DiskId, word: &str) {
    let problem = agent.replica(session.vm(), disk).await.expect_err(word);
    assert_eq!(problem.code, ErrorCode::WrongState, "{problem}");
    assert!(problem.detail.contains(word), "{problem}");
}
