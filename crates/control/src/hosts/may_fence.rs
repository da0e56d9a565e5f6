//! Whether a host may keep others from disks in pools of Ceph: the cluster's monitors must let the pool's user do that. It is asked before a VM is
//! given to a host, and before one is started that was taken from another host: after that there is no way back.

use vmseal_api::datastore::DatastoreCondition;
use vmseal_api::host::HostAgent;
use vmseal_api::id::HostId;
use vmseal_api::osd_encryption::OsdEncryption;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::store::Store;
use crate::store::datastores::{self, Datastore, OnHost};
use crate::store::disks::Disk;

/// Refuses a host that may not keep others from these disks and their replicas. Where one of them is on a directory nobody is kept away.
///
/// # Errors
/// `wrong-state`, with what may be done; the host's.
pub(crate) async fn require(
    store: &Store,
    agent: &dyn HostAgent,
    host: HostId,
    disks: &[Disk],
) -> Result<(), Problem> {
    let mut places = disks.iter().flat_map(Disk::places);
    if places.any(|place| place.datastore.location.pool().is_none()) {
        return Ok(());
    }
    let mut here = datastores::of_host(&mut *store.read().await?, host).await?;
    here.retain(|known| disks.iter().any(|disk| disk.datastores().any(|(id, _)| id == known.id)));
    for datastore in here {
        let Some(on) = datastore.on(host) else { continue };
        let condition = agent.measure_datastore(datastore.spec(on)).await?;
        if let Some(why) = lacking(&datastore, on, &condition) {
            let detail = format!("host '{}': {why}", on.host_name);
            return Err(Problem::new(ErrorCode::WrongState, detail));
        }
    }
    Ok(())
}

/// Why a host may not keep others from disks in a datastore, as it was measured there, and what may be done. None where it may, where that is not
/// known, and where the datastore does not answer: the cluster is asked again when it is to be done.
pub(crate) fn lacking(
    datastore: &Datastore,
    on: &OnHost,
    condition: &DatastoreCondition,
) -> Option<String> {
    let DatastoreCondition::Available { fencing: Some(fencing), .. } = condition else {
        return None;
    };
    let asks_osds = datastore.osds.facts.told.and_then(OsdEncryption::known).is_some();
    fencing.lacking(&datastore.name, &on.host_name, on.location.pool()?, asks_osds)
}
