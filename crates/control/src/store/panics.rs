//! The panics of guests of which there are events.

use jiff::Timestamp;
use sqlx::SqliteConnection;
use vmseal_api::id::VmId;

use super::{StoreError, parse};

/// Keeps the time of a VM's last panic of which there is an event.
pub async fn set_told(
    to: &mut SqliteConnection,
    vm: VmId,
    at: Timestamp,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO panics (vm_id, told) VALUES ($1, $2)
         ON CONFLICT (vm_id) DO UPDATE SET told = excluded.told",
    )
    .bind(vm.to_string())
    .bind(at.to_string())
    .execute(to)
    .await?;
    Ok(())
}

/// The time of a VM's last panic of which there is an event; none where there is none.
pub async fn told(from: &mut SqliteConnection, vm: VmId) -> Result<Option<Timestamp>, StoreError> {
    let told: Option<String> = sqlx::query_scalar("SELECT told FROM panics WHERE vm_id = $1")
        .bind(vm.to_string())
        .fetch_optional(from)
        .await?;
    told.map(|told| parse(&told, "a time")).transpose()
}
