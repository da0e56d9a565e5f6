//! Pools that a host still has mounted in a way that a policy does not allow: their datastore was changed since (`datastore set`), and the
//! host mounts them anew when it is told to.

use sqlx::SqliteConnection;
use vmseal_api::datastore::{DatastoreCondition, Messenger};
use vmseal_api::host::HostAgent;
use vmseal_api::id::HostId;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::compliance::{is_open, may_be_former};
use crate::store::datastores::{self, Datastore, OnHost};
use crate::store::disks::Disk;
use crate::store::policies::{self, Policy};
use crate::store::vms::Vm;
use crate::store::{Store, StoreError};

/// Refuses disks, and replicas of disks, in pools of Ceph whose connections are not as the policy has it, or not yet where the host has
/// mounted them.
///
/// # Errors
/// `wrong-state`, with what may be done.
pub(crate) async fn require_messenger(
    from: &mut SqliteConnection,
    policy: &Policy,
    host: HostId,
    disks: &[Disk],
) -> Result<(), Problem> {
    policy.require_messenger(disks)?;
    let open = mounted_in_the_clear(from, policy, host, disks, is_open).await?;
    open.first().map_or(Ok(()), |datastore| Err(refusal(policy, host, datastore, true)))
}

/// The same as it is now: a host whose mount was noted as open, or may be by a former way, says whether it is.
///
/// # Errors
/// `wrong-state`, with what may be done; `unreachable` where the datastore does not answer; the host's.
pub(crate) async fn require_messenger_now(
    store: &Store,
    agent: &dyn HostAgent,
    policy: &Policy,
    host: HostId,
    disks: &[Disk],
) -> Result<(), Problem> {
    policy.require_messenger(disks)?;
    let may_be = |on: &OnHost| is_open(on) || may_be_former(on);
    let mut read = store.read().await?;
    let noted = mounted_in_the_clear(&mut read, policy, host, disks, may_be).await?;
    drop(read);
    for datastore in noted {
        let Some(spec) = datastore.spec_on(host) else { continue };
        match agent.measure_datastore(spec).await? {
            DatastoreCondition::Available { mount: Some(mount), .. }
                if mount.messenger == Messenger::Secure => {}
            DatastoreCondition::Available { mount, .. } => {
                return Err(refusal(policy, host, &datastore, mount.is_some()));
            }
            // Also where somebody else measures it just now: it is asked again.
            DatastoreCondition::Unavailable { detail } => {
                let detail = format!("datastore '{}': {detail}", datastore.name);
                return Err(Problem::new(ErrorCode::Unreachable, detail));
            }
            DatastoreCondition::WrongMark { detail } => {
                let detail = format!("datastore '{}': {detail}", datastore.name);
                return Err(Problem::new(ErrorCode::WrongState, detail));
            }
        }
    }
    Ok(())
}

/// The same of disks of a VM on a host that it is to go to, where the VM's policy asks for it.
///
/// # Errors
/// As for [`require_messenger_now`].
pub(crate) async fn require_messenger_at(
    store: &Store,
    agent: &dyn HostAgent,
    vm: &Vm,
    host: HostId,
    disks: &[Disk],
) -> Result<(), Problem> {
    let policy = policies::find(&mut *store.read().await?, &vm.policy.to_string()).await?;
    match policy {
        Some(policy) => require_messenger_now(store, agent, &policy, host, disks).await,
        None => Ok(()),
    }
}

/// The datastores of these disks and their replicas that the host has mounted with open connections, as `is_open` says, where the policy
/// wants others.
async fn mounted_in_the_clear(
    from: &mut SqliteConnection,
    policy: &Policy,
    host: HostId,
    disks: &[Disk],
    is_open: fn(&OnHost) -> bool,
) -> Result<Vec<Datastore>, StoreError> {
    let in_pool =
        |disk: &Disk| disk.places().any(|place| place.datastore.location.pool().is_some());
    if policy.messenger != Some(Messenger::Secure) || !disks.iter().any(in_pool) {
        return Ok(Vec::new());
    }
    let mut here = datastores::of_host(from, host).await?;
    here.retain(|datastore| {
        datastore.on(host).is_some_and(is_open)
            && disks.iter().any(|disk| disk.datastores().any(|(id, _)| id == datastore.id))
    });
    Ok(here)
}

/// `says`: whether the host says how it has the pool mounted.
fn refusal(policy: &Policy, host: HostId, datastore: &Datastore, says: bool) -> Problem {
    let (name, on) = (&datastore.name, datastore.on(host));
    let host = on.map_or("", |on| on.host_name.as_str());
    let how = match says {
        true => format!("still has datastore '{name}' mounted with messenger 'crc'"),
        false => format!(
            "does not say how it has datastore '{name}' mounted, as what serves it is of an earlier version"
        ),
    };
    let detail = format!(
        "policy '{}' has disks in pools of Ceph only where connections are encrypted, and host '{host}' {how}: mount it anew (vmseal datastore remount {name} --host {host})",
        policy.name
    );
    Problem::new(ErrorCode::WrongState, detail)
}
