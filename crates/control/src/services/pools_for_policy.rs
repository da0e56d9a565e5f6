//! Pools of Ceph that are made for a policy, with a new datastore: as its disks need them.

use vmseal_api::datastore::{DatastoreLocation, Messenger, RbdPool};
use vmseal_api::new_pools::NewPools;
use vmseal_api::osd_encryption::StatedOsds;
use vmseal_api::problem::Problem;
use vmseal_api::redundancy::Layout;
use vmseal_api::request::AddDatastore;

use super::Services;
use crate::store::policies::{self, Policy};

/// Has a request that names a policy say how the pools are made, as one with numbers does. Others stay as they are.
///
/// # Errors
/// What the request says besides, or the policy, does not go together with pools that are made.
pub(super) async fn resolve(
    services: &Services,
    mut request: AddDatastore,
) -> Result<AddDatastore, Problem> {
    let Some(name) = request.create_for_policy.clone() else { return Ok(request) };
    let refused = |what: &str| Problem::invalid("create_for_policy", what);
    let DatastoreLocation::Rbd { pool, .. } = &mut request.location else {
        return Err(refused("is only for pools of Ceph: a directory has no pools"));
    };
    if pool.create.is_some_and(|create| !create.redundancy().is_nothing()) {
        let what = "cannot be given together with the numbers of location.pool.create: the policy has them. Give one of the two";
        return Err(refused(what));
    }
    let policy = policies::find(&mut *services.store.read().await?, &name).await?;
    let policy = policy.ok_or_else(|| Problem {
        field: Some("create_for_policy".to_owned()),
        ..Problem::not_found("policy", &name)
    })?;
    require_failures(&policy)?;
    require_fitting(&policy, pool, request.osd_encryption)?;
    let compression = pool.create.and_then(|create| create.compression);
    pool.create = Some(NewPools { compression, ..NewPools::from(policy.redundancy) });
    Ok(request)
}

/// Refuses a policy that does not say how pools are made, or by what none can be made.
fn require_failures(policy: &Policy) -> Result<(), Problem> {
    let Policy { name, redundancy, .. } = policy;
    let refused = |what: String| Problem::invalid("create_for_policy", what);
    if redundancy.failures == 0 {
        return Err(refused(format!(
            "policy '{name}' does not name the failures that disks survive, which decide how many copies or chunks a pool has. Set them (vmseal policy set {name} --failures-to-tolerate NUMBER), or give the number for these pools alone (--create NUMBER)"
        )));
    }
    NewPools::from(*redundancy).check().map_err(|(_, what)| {
        refused(format!(
            "policy '{name}' asks for {redundancy}, and {what}: make the pools with ceph osd pool create, and add the datastore without this"
        ))
    })
}

/// Refuses a pool that the policy would have no disks in.
fn require_fitting(
    policy: &Policy,
    pool: &RbdPool,
    osds: Option<StatedOsds>,
) -> Result<(), Problem> {
    let name = &policy.name;
    let is_coded = policy.redundancy.layout == Some(Layout::ErasureCoding);
    let data_pool = |what: String| Err(Problem::invalid("location.pool.data_pool", what));
    match (is_coded, &pool.data_pool) {
        (true, None) => {
            return data_pool(format!(
                "must be named: policy '{name}' asks for erasure coding, and such data has a pool of its own"
            ));
        }
        (false, Some(_)) => {
            return data_pool(format!(
                "must not be given: policy '{name}' does not ask for erasure coding, and a mirrored pool has its data itself"
            ));
        }
        (true, Some(_)) | (false, None) => {}
    }
    if policy.messenger == Some(Messenger::Secure) && pool.messenger != Messenger::Secure {
        let what = format!(
            "must be 'secure': policy '{name}' has disks in pools of Ceph only where connections are encrypted"
        );
        return Err(Problem::invalid("location.pool.messenger", what));
    }
    if policy.needs_encrypted_osds() && osds == Some(StatedOsds::No) {
        let what = format!(
            "states that OSDs are not encrypted, and policy '{name}' has disks only where they are"
        );
        return Err(Problem::invalid("osd_encryption", what));
    }
    Ok(())
}
