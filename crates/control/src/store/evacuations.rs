//! VMs that were given to other hosts while their host did not answer, and VMs on their way to a host that was given up: when it does answer,
//! it is to end and forget them. Nobody ends a guest for any other difference between a host and the inventory, which may be an older copy.

use sqlx::SqliteConnection;
use vmseal_api::id::{HostId, VmId};

use super::{StoreError, parse, unsigned};

/// Records that a host is to end and forget a VM. `generation` is that of the placement that took the VM away, or that
/// the VM was to get at this host.
pub async fn insert(
    to: &mut SqliteConnection,
    vm: VmId,
    host: HostId,
    generation: u64,
) -> Result<(), StoreError> {
    remove(to, vm, host).await?;
    sqlx::query("INSERT INTO evacuations (host_id, vm_id, generation) VALUES ($1, $2, $3)")
        .bind(host.to_string())
        .bind(vm.to_string())
        .bind(i64::try_from(generation).unwrap_or(i64::MAX))
        .execute(to)
        .await?;
    Ok(())
}

/// The VMs that a host is to end and forget.
pub async fn of_host(from: &mut SqliteConnection, host: HostId) -> Result<Vec<VmId>, StoreError> {
    let vms: Vec<String> =
        sqlx::query_scalar("SELECT vm_id FROM evacuations WHERE host_id = $1 ORDER BY vm_id")
            .bind(host.to_string())
            .fetch_all(from)
            .await?;
    vms.iter().map(|vm| parse(vm, "a VM's id")).collect()
}

/// The generation of the placement for which a host is to end and forget a VM; none where it is not to.
pub async fn generation(
    from: &mut SqliteConnection,
    vm: VmId,
    host: HostId,
) -> Result<Option<u64>, StoreError> {
    let of: Option<i64> =
        sqlx::query_scalar("SELECT generation FROM evacuations WHERE host_id = $1 AND vm_id = $2")
            .bind(host.to_string())
            .bind(vm.to_string())
            .fetch_optional(from)
            .await?;
    of.map(|of| unsigned(of, "the generation of a placement")).transpose()
}

/// Whether there is a host that is to end and forget a VM, and has not said since that it has nothing of it.
pub async fn is_awaited(from: &mut SqliteConnection, vm: VmId) -> Result<bool, StoreError> {
    let count: i64 = sqlx::query_scalar("SELECT count(*) FROM evacuations WHERE vm_id = $1")
        .bind(vm.to_string())
        .fetch_one(from)
        .await?;
    Ok(count > 0)
}

/// Forgets what hosts are to end and forget: since a backup of the inventory, VMs may have gone back to their former hosts and run there.
pub async fn remove_all(to: &mut SqliteConnection) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM evacuations").execute(to).await?;
    Ok(())
}

/// Records that a host has nothing of a VM any more, or is to have it.
pub async fn remove(to: &mut SqliteConnection, vm: VmId, host: HostId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM evacuations WHERE host_id = $1 AND vm_id = $2")
        .bind(host.to_string())
        .bind(vm.to_string())
        .execute(to)
        .await?;
    Ok(())
}
