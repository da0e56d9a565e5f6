//! Pools that a host still has mounted in a way that a policy does not allow: their datastore was changed since (`datastore set`), and the
//! host mounts them anew when it is told to.

use sqlx::SqliteConnection;
use vmseal_api::datastore::{DatastoreCondition, Messenger};
use vmseal_api::host::HostAgent;
use vmseal_api::id::HostId;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::store::datastores::{self, Datastore};
use crate::store::disks::Disk;
use crate::store::policies::Policy;
use crate::store::{Store, StoreError};

/// Refuses disks in pools of Ceph whose connections are not as the policy has it, or not yet where the host has mounted them.
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
    let open = mounted_in_the_clear(from, policy, host, disks).await?;
    open.first().map_or(Ok(()), |datastore| Err(refusal(policy, host, datastore)))
}

/// The same as it is now: a host whose mount was noted as open says whether it still is.
///
/// # Errors
/// `wrong-state`, with what may be done; the host's.
pub(crate) async fn require_messenger_now(
    store: &Store,
    agent: &dyn HostAgent,
    policy: &Policy,
    host: HostId,
    disks: &[Disk],
) -> Result<(), Problem> {
    policy.require_messenger(disks)?;
    let noted = mounted_in_the_clear(&mut *store.read().await?, policy, host, disks).await?;
    for datastore in noted {
        let Some(spec) = datastore.spec_on(host) else { continue };
        let condition = agent.measure_datastore(spec).await?;
        let is_secure = matches!(
            &condition,
            DatastoreCondition::Available { mount: Some(mount), .. }
                if mount.messenger == Messenger::Secure
        );
        if !is_secure {
            return Err(refusal(policy, host, &datastore));
        }
    }
    Ok(())
}

/// The datastores of these disks that the host has mounted with open connections, as it was last told, where the policy wants others.
async fn mounted_in_the_clear(
    from: &mut SqliteConnection,
    policy: &Policy,
    host: HostId,
    disks: &[Disk],
) -> Result<Vec<Datastore>, StoreError> {
    let in_pool = |disk: &Disk| disk.datastore.location.pool().is_some();
    if policy.messenger != Some(Messenger::Secure) || !disks.iter().any(in_pool) {
        return Ok(Vec::new());
    }
    let mut here = datastores::of_host(from, host).await?;
    here.retain(|datastore| {
        let mount = datastore.on(host).and_then(|on| on.mount.as_ref());
        mount.is_some_and(|it| it.messenger != Messenger::Secure)
            && disks.iter().any(|disk| disk.datastore.datastore == datastore.id)
    });
    Ok(here)
}

fn refusal(policy: &Policy, host: HostId, datastore: &Datastore) -> Problem {
    let host = datastore.on(host).map_or("", |on| on.host_name.as_str());
    let detail = format!(
        "policy '{}' has disks in pools of Ceph only where connections are encrypted, and host '{host}' still has datastore '{1}' mounted with messenger 'crc': mount it anew (vmseal datastore remount {1})",
        policy.name, datastore.name
    );
    Problem::new(ErrorCode::WrongState, detail)
}
