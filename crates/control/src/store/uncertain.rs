//! The VMs of an inventory that was restored from a backup of which their descriptors may know more (docs/decisions/287). Events say which
//! these are not.

use sqlx::SqliteConnection;
use vmseal_api::id::{HostId, VmId};

use super::{StoreError, parse};

/// In SQL, the kinds of events after which the inventory knows a VM as well as its descriptors do, each said in
/// [`crate::hosts::restored`].
macro_rules! known_since {
    () => {
        "('vm.compared', 'vm.kept', 'vm.changed', 'vm.created', 'vm.adopted', 'vm.arrived',
          'vm.encrypted', 'backup.restored')"
    };
}
pub(super) use known_since;

/// VMs with a key, which no task makes or removes, without such an event since the inventory was restored ($1). An adoption that was undone
/// has taken back what an earlier event said. Events have an index by target, so that a VM costs a look at its events since the restore.
macro_rules! uncertain {
    ($rest:literal) => {
        concat!(
            "SELECT v.id FROM vms v JOIN placements o ON o.vm_id = v.id AND o.role = 'owner'
             WHERE v.key_id IS NOT NULL AND v.lifecycle = 'ready' AND NOT EXISTS (
                 SELECT 1 FROM events e
                 WHERE e.target = v.name AND e.sequence > $1 AND e.kind IN ",
            known_since!(),
            " AND NOT EXISTS (
                 SELECT 1 FROM events u
                 WHERE u.target = v.name AND u.sequence > e.sequence
                   AND u.kind = 'vm.adoption-undone')) ",
            $rest
        )
    };
}

/// Whether one of a restored inventory's VMs is.
pub async fn is_any(from: &mut SqliteConnection, restored: i64) -> Result<bool, StoreError> {
    let found: Option<String> =
        sqlx::query_scalar(uncertain!("LIMIT 1")).bind(restored).fetch_optional(from).await?;
    Ok(found.is_some())
}

/// Whether this VM is.
pub async fn is_one(
    from: &mut SqliteConnection,
    restored: i64,
    vm: VmId,
) -> Result<bool, StoreError> {
    let found: Option<String> = sqlx::query_scalar(uncertain!("AND v.id = $2"))
        .bind(restored)
        .bind(vm.to_string())
        .fetch_optional(from)
        .await?;
    Ok(found.is_some())
}

/// Those of a host, in the order of their ids.
pub async fn on_host(
    from: &mut SqliteConnection,
    restored: i64,
    host: HostId,
) -> Result<Vec<VmId>, StoreError> {
    let found: Vec<String> = sqlx::query_scalar(uncertain!("AND o.host_id = $2 ORDER BY v.id"))
        .bind(restored)
        .bind(host.to_string())
        .fetch_all(from)
        .await?;
    found.iter().map(|id| parse(id, "a VM's id")).collect()
}
