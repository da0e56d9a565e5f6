//! Which host has a VM. Each time that it gets another one, the generation of the placement grows.

use jiff::Timestamp;
use sqlx::SqliteConnection;
use vmseal_api::id::{HostId, VmId};

use super::{StoreError, evacuations, parse, unsigned};

/// The generation of a VM's placement.
pub async fn generation(from: &mut SqliteConnection, vm: VmId) -> Result<u64, StoreError> {
    let now: i64 =
        sqlx::query_scalar("SELECT generation FROM placements WHERE vm_id = $1 AND role = 'owner'")
            .bind(vm.to_string())
            .fetch_one(from)
            .await?;
    unsigned(now, "the generation of a placement")
}

/// The generation that the next placement of a VM gets.
pub async fn next_generation(from: &mut SqliteConnection, vm: VmId) -> Result<u64, StoreError> {
    Ok(generation(from, vm).await?.saturating_add(1))
}

/// Has the next placements, of one VM or of all, be later than any that an inventory has noted which is lost: the leases of disks have those
/// generations. They count placements, and from here on seconds: nobody moves a VM more often.
pub async fn skip_generations(
    to: &mut SqliteConnection,
    vm: Option<VmId>,
) -> Result<(), StoreError> {
    let now = Timestamp::now().as_second();
    let skipped = match vm {
        Some(vm) => sqlx::query(
            "UPDATE placements SET generation = CASE WHEN generation < $1 THEN $1 ELSE generation + 1 END
             WHERE vm_id = $2",
        )
        .bind(now)
        .bind(vm.to_string()),
        None => sqlx::query(
            "UPDATE placements SET generation = CASE WHEN generation < $1 THEN $1 ELSE generation + 1 END",
        )
        .bind(now),
    };
    skipped.execute(to).await?;
    Ok(())
}

/// The host that has a VM; none where there is no such VM.
pub async fn owner(from: &mut SqliteConnection, vm: VmId) -> Result<Option<HostId>, StoreError> {
    let host: Option<String> =
        sqlx::query_scalar("SELECT host_id FROM placements WHERE vm_id = $1 AND role = 'owner'")
            .bind(vm.to_string())
            .fetch_optional(from)
            .await?;
    host.map(|host| parse(&host, "a host's id")).transpose()
}

/// Records that a host has a VM. It is not to end and forget it then, if it has not done so after an evacuation.
pub async fn set_owner(
    to: &mut SqliteConnection,
    vm: VmId,
    host: HostId,
    generation: u64,
) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE placements SET host_id = $1, generation = $2 WHERE vm_id = $3 AND role = 'owner'",
    )
    .bind(host.to_string())
    .bind(i64::try_from(generation).unwrap_or(i64::MAX))
    .bind(vm.to_string())
    .execute(&mut *to)
    .await?;
    evacuations::remove(to, vm, host).await
}
