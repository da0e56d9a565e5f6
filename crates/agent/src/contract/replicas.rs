//! Replicas of disks: where they may not be.

use vmseal_api::filter::REPLICATE_RATE_MIN;
use vmseal_api::host::{DatastoreLocation, DatastoreSpec, HostAgent, NewDisk, VmSpec};
use vmseal_api::id::DatastoreId;
use vmseal_api::problem::ErrorCode;
use vmseal_api::replica::ReplicaPlace;

use super::{Session, refused};

/// A replica is neither beside its disk, nor too slow, nor where no datastore is.
pub async fn misplaced(agent: &dyn HostAgent, session: &Session) {
    let elsewhere = |name: &str| DatastoreSpec {
        datastore: DatastoreId::new(),
        location: DatastoreLocation::Dir { path: session.fixture.datastore.join(name) },
    };
    let with = |datastore: DatastoreSpec, bytes_per_second| {
        let mut spec = session.spec.clone();
        spec.disks[1].replica = Some(ReplicaPlace { datastore, bytes_per_second });
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
    let disk = with(elsewhere("missing"), REPLICATE_RATE_MIN).disks.remove(1);
    let looked = agent.examine_disk(NewDisk { disk, source: None }).await;
    assert!(
        looked.as_ref().is_err_and(|problem| matches!(
            problem.code,
            ErrorCode::InvalidRequest | ErrorCode::WrongState
        )),
        "a replica without its datastore: {looked:?}"
    );
}
