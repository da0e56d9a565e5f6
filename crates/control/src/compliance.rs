//! Whether the storage of VMs is as their policies require: what their alarms, `vm show` and dry runs of policies say of it.

use std::collections::HashMap;

use sqlx::SqliteConnection;
use vmseal_api::compliance::{Compliance, Deviation as Shown, Requirement};
use vmseal_api::datastore::Messenger;
use vmseal_api::id::{DatastoreId, DiskId, HostId};

use crate::store::alarms::RaisedAlarm;
use crate::store::datastores::{self, Datastore, OnHost};
use crate::store::disks::{self, Disk, DiskPart, Layouts, Place};
use crate::store::policies::{self, Policy};
use crate::store::{Part, StoreError, vms};

/// Datastores, by their ids.
pub(crate) type Datastores = HashMap<DatastoreId, Datastore>;

/// Datastores of a list, by their ids.
pub(crate) fn by_id(datastores: Vec<Datastore>) -> Datastores {
    datastores.into_iter().map(|it| (it.id, it)).collect()
}

/// A disk, or its replica, that is not as a policy requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Deviation {
    /// What the policy requires.
    pub requirement: Requirement,
    /// The disk, or its replica.
    pub part: DiskPart,
    /// The datastore that it is in.
    pub datastore: String,
    /// What is the matter, for people.
    pub why: String,
}

impl Deviation {
    fn of(requirement: Requirement, place: Place<'_>, why: String) -> Self {
        let (part, datastore) = (place.part(), place.datastore_name.to_owned());
        Self { requirement, part, datastore, why }
    }

    /// The alarm of a VM of this name that has such a disk, whether it runs or not; none where nobody has to do anything soon.
    fn alarm(&self, policy: &str, vm: &str) -> Option<RaisedAlarm> {
        let Self { requirement, part, datastore, why } = self;
        let elsewhere = part.elsewhere(policy);
        let place = format!("{part} is in datastore '{datastore}'");
        let until = "A guest that runs goes on; the VM does not start again until then";
        let (code, detail) = match requirement {
            Requirement::Redundancy => (
                "less-redundant",
                format!(
                    "{place}: {why}: move the disk (vmseal vm move), or change the pool or the policy"
                ),
            ),
            Requirement::OsdEncryption => (
                "osd-not-encrypted",
                format!(
                    "{place}, and policy '{policy}' requires encrypted OSDs: {why}. Otherwise {elsewhere}, or change the policy (vmseal policy set {policy} --osd-encryption any). {until}"
                ),
            ),
            Requirement::Messenger => (
                "messenger-not-secure",
                format!(
                    "{place}, and policy '{policy}' requires encrypted connections: {why}. Otherwise {elsewhere}, or change the policy (vmseal policy set {policy} --messenger any). {until}"
                ),
            ),
            Requirement::Encryption | Requirement::ImageLayout | Requirement::Unknown => {
                return None;
            }
        };
        Some(RaisedAlarm { code, target: vm.to_owned(), detail, reason: None })
    }
}

impl From<Deviation> for Shown {
    fn from(it: Deviation) -> Self {
        let Deviation { requirement, part, datastore, why } = it;
        let detail = format!("{part} is in datastore '{datastore}': {why}");
        let replica = matches!(part, DiskPart::Replica(_));
        Self { requirement, disk: part.disk().to_owned(), replica, datastore, detail }
    }
}

/// Deviations as the API shows them with a VM.
pub(crate) fn shown(deviations: Vec<Deviation>) -> Compliance {
    let compliant = deviations.is_empty();
    Compliance { compliant, deviations: deviations.into_iter().map(Shown::from).collect() }
}

/// What of these disks on a host is not as a policy requires, in their order. Of images whose layout is not among `layouts` it is not known.
pub(crate) fn deviations(
    policy: &Policy,
    host: HostId,
    disks: &[Disk],
    datastores: &Datastores,
    layouts: &HashMap<DiskId, Layouts>,
) -> Vec<Deviation> {
    let mut found = Vec::new();
    for disk in disks {
        let datastore = datastores.get(&disk.datastore.datastore);
        found.extend(in_the_clear(policy, disk));
        found.extend(less_redundant(policy, disk, datastore));
        found.extend(cut_otherwise(policy, disk, layouts));
        for place in disk.places() {
            let Some(datastore) = datastores.get(&place.datastore.datastore) else { continue };
            found.extend(osds_in_the_clear(policy, place, datastore));
            found.extend(over_open_connections(policy, host, place, datastore));
        }
    }
    found
}

/// The first deviation of each requirement.
pub(crate) fn first_of_each(deviations: Vec<Deviation>) -> Vec<Deviation> {
    let mut first: Vec<Deviation> = Vec::new();
    for deviation in deviations {
        if first.iter().all(|it| it.requirement != deviation.requirement) {
            first.push(deviation);
        }
    }
    first
}

/// Where the image of a disk is.
fn image(disk: &Disk) -> Option<Place<'_>> {
    disk.places().next()
}

fn in_the_clear(policy: &Policy, disk: &Disk) -> Option<Deviation> {
    if !policy.encryption || disk.encrypted {
        return None;
    }
    let why = format!(
        "it is in the clear, and policy '{}' encrypts: encrypt it (vmseal vm encrypt)",
        policy.name
    );
    Some(Deviation::of(Requirement::Encryption, image(disk)?, why))
}

fn less_redundant(
    policy: &Policy,
    disk: &Disk,
    datastore: Option<&Datastore>,
) -> Option<Deviation> {
    let pools = datastore.map(|it| it.pools.as_slice()).unwrap_or_default();
    let lacking = policy.redundancy.lacking(pools)?;
    let why = format!("{lacking}. Policy '{}' asks for {}", policy.name, policy.redundancy);
    Some(Deviation::of(Requirement::Redundancy, image(disk)?, why))
}

fn cut_otherwise(
    policy: &Policy,
    disk: &Disk,
    layouts: &HashMap<DiskId, Layouts>,
) -> Option<Deviation> {
    disk.datastore.location.pool().filter(|_| disk.role.is_data())?;
    let now = layouts.get(&disk.id)?.image?;
    let wanted = policy.image_layout;
    let why = format!("its image is in {now}, and policy '{}' has {wanted}", policy.name);
    let place = image(disk).filter(|_| now != wanted)?;
    Some(Deviation::of(Requirement::ImageLayout, place, why))
}

fn osds_in_the_clear(
    policy: &Policy,
    place: Place<'_>,
    datastore: &Datastore,
) -> Option<Deviation> {
    let pool = place.datastore.location.pool().filter(|_| policy.needs_encrypted_osds())?;
    let why = datastore.osds.facts.lacking(&datastore.name, pool)?;
    Some(Deviation::of(Requirement::OsdEncryption, place, why))
}

fn over_open_connections(
    policy: &Policy,
    host: HostId,
    place: Place<'_>,
    datastore: &Datastore,
) -> Option<Deviation> {
    if policy.messenger != Some(Messenger::Secure) {
        return None;
    }
    let why = open_connections(datastore, host)?;
    Some(Deviation::of(Requirement::Messenger, place, why))
}

/// The alarms of a host's VMs whose storage is not as their policies require: one of each kind for each VM.
pub(crate) async fn alarms(
    from: &mut SqliteConnection,
    host: HostId,
) -> Result<Vec<RaisedAlarm>, StoreError> {
    let mut watched = disks::watched_on(from, host).await?;
    // Most hosts have no such VM.
    if watched.is_empty() {
        return Ok(Vec::new());
    }
    let policies = policies::list(from, &Part::all()).await?;
    let datastores = by_id(datastores::of_host(from, host).await?);
    let layouts = HashMap::new();
    let mut raised = Vec::new();
    for (vm, name, policy) in vms::policies_on(from, host).await? {
        let policy = policies.iter().find(|it| it.id == policy);
        let (Some(policy), Some(disks)) = (policy, watched.remove(&vm)) else { continue };
        let found = deviations(policy, host, &disks, &datastores, &layouts);
        let alarm = |it: Deviation| it.alarm(&policy.name, &name);
        raised.extend(first_of_each(found).into_iter().filter_map(alarm));
    }
    Ok(raised)
}

/// Why the connections of a host to a pool are open, or not known to be encrypted, and what may be done; none where they are encrypted.
fn open_connections(datastore: &Datastore, host: HostId) -> Option<String> {
    let on = datastore.on(host)?;
    let pool = on.location.pool()?;
    let (name, host) = (&datastore.name, &on.host_name);
    if pool.messenger != Messenger::Secure {
        return Some(format!(
            "hosts get to pool '{}' with messenger 'crc'. Have them encrypt their connections (vmseal datastore set {name} --messenger secure, vmseal datastore remount {name})",
            pool.pool
        ));
    }
    let how = if is_open(on) {
        "still has it mounted with messenger 'crc'"
    } else if may_be_former(on) {
        "has not said how it has it mounted"
    } else {
        return None;
    };
    Some(format!(
        "host '{host}' {how}. Mount it anew (vmseal datastore remount {name} --host {host})"
    ))
}

/// Whether a host has a pool mounted with open connections, as it was last told.
pub(crate) fn is_open(on: &OnHost) -> bool {
    on.mount.as_ref().is_some_and(|it| it.messenger != Messenger::Secure)
}

/// Whether a mount of which nothing is known may be by a former way: what serves it may be of an earlier version, which does not say it.
pub(crate) fn may_be_former(on: &OnHost) -> bool {
    on.mount.is_none() && on.location.pool().is_some_and(|pool| pool.changed.is_some())
}

#[cfg(test)]
mod tests;
