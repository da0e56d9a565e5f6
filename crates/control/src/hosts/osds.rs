//! Whether the OSDs that disks are on are encrypted: what policies ask for, and what is shown with disks.

use std::collections::HashMap;

use sqlx::SqliteConnection;
use vmseal_api::datastore::Messenger;
use vmseal_api::id::{DatastoreId, DiskId, HostId};
use vmseal_api::model::Vm;
use vmseal_api::osd_encryption::{EncryptionPlace, OsdFacts};
use vmseal_api::problem::{ErrorCode, Problem};

use crate::compliance::{Datastores, is_open};
use crate::store::datastores::{self, Datastore};
use crate::store::disks::Disk;
use crate::store::policies::Policy;

/// Refuses disks, and replicas of disks, in pools of Ceph whose OSDs are not encrypted as their policy asks, or of which that is not
/// known. A directory has no OSDs.
///
/// # Errors
/// `wrong-state`, with what may be done.
pub(crate) async fn require(
    from: &mut SqliteConnection,
    policy: &Policy,
    disks: &[Disk],
) -> Result<(), Problem> {
    if !policy.needs_encrypted_osds() {
        return Ok(());
    }
    for disk in disks {
        for place in disk.places() {
            let Some(pool) = place.datastore.location.pool() else { continue };
            let id = place.datastore.datastore.to_string();
            let known = datastores::find(from, &id).await?;
            let facts = known.map_or_else(OsdFacts::default, |it| it.osds.facts);
            let Some(why) = facts.lacking(place.datastore_name, pool) else { continue };
            let (policy, part, datastore) = (&policy.name, place.part(), place.datastore_name);
            let elsewhere = part.elsewhere(policy);
            let detail = format!(
                "policy '{policy}' has disks in pools of Ceph only on encrypted OSDs, and {part} is in datastore '{datastore}': {why}. Otherwise {elsewhere}, or change the policy (vmseal policy set {policy} --osd-encryption any)"
            );
            return Err(Problem::new(ErrorCode::WrongState, detail));
        }
    }
    Ok(())
}

/// Why disks of VMs that have a policy may not get to a datastore of a host to which they move, for people: for its connections, or its
/// OSDs. None where they may.
pub(crate) fn refusal(policy: &Policy, datastore: &Datastore, host: HostId) -> Option<String> {
    let on = datastore.on(host)?;
    let pool = on.location.pool()?;
    if policy.messenger == Some(Messenger::Secure) && pool.messenger != Messenger::Secure {
        return Some(format!(
            "policy '{}' has disks in pools of Ceph only where connections are encrypted, and it has messenger 'crc'",
            policy.name
        ));
    }
    if policy.messenger == Some(Messenger::Secure) && is_open(on) {
        return Some(format!(
            "policy '{}' has disks in pools of Ceph only where connections are encrypted, and host '{2}' still has it mounted with messenger 'crc': mount it anew (vmseal datastore remount {1} --host {2})",
            policy.name, datastore.name, on.host_name
        ));
    }
    let facts = &datastore.osds.facts;
    let why = facts.lacking(&datastore.name, pool).filter(|_| policy.needs_encrypted_osds())?;
    Some(format!(
        "policy '{}' has disks in pools of Ceph only on encrypted OSDs, and {why}",
        policy.name
    ))
}

/// The datastores of those of these disks that are in pools.
pub(crate) fn in_pools(disks: &[Disk]) -> HashMap<DiskId, DatastoreId> {
    let in_pools = disks.iter().filter(|disk| disk.datastore.location.pool().is_some());
    in_pools.map(|disk| (disk.id, disk.datastore.datastore)).collect()
}

/// Says of each disk of a VM where it is encrypted.
pub(crate) fn tell(vm: &mut Vm, in_pools: &HashMap<DiskId, DatastoreId>, known: &Datastores) {
    for disk in &mut vm.disks {
        let osds = match in_pools.get(&disk.id) {
            Some(datastore) => known.get(datastore).and_then(|it| it.osds.facts.known()),
            None => Some(false),
        };
        disk.encrypted_at = Some(EncryptionPlace::of(disk.encrypted, osds));
    }
}

#[cfg(test)]
mod tests;
