//! Keys by reference: which were made, for whom, and which are destroyed.

use sqlx::SqliteConnection;
use vmseal_api::host::KeyReference;
use vmseal_api::id::{ProviderId, VmId};

use super::StoreError;

/// Notes that a key was made; a key that is known already stays as it is.
pub async fn insert(
    to: &mut SqliteConnection,
    vm: VmId,
    key: &KeyReference,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO keys (provider_id, key_id, vm_id, check_value) VALUES (?, ?, ?, ?)
         ON CONFLICT (provider_id, key_id) DO NOTHING",
    )
    .bind(key.provider.to_string())
    .bind(&key.key_id)
    .bind(vm.to_string())
    .bind(&key.check)
    .execute(to)
    .await?;
    Ok(())
}

/// Marks a key as destroyed, for ever; false when it was already. A key that was never noted gets its
/// tombstone all the same.
pub async fn destroy(
    to: &mut SqliteConnection,
    vm: VmId,
    key: &KeyReference,
) -> Result<bool, StoreError> {
    insert(to, vm, key).await?;
    let destroyed = sqlx::query(
        "UPDATE keys SET destroyed = 1 WHERE provider_id = ? AND key_id = ? AND destroyed = 0",
    )
    .bind(key.provider.to_string())
    .bind(&key.key_id)
    .execute(to)
    .await?;
    Ok(destroyed.rows_affected() == 1)
}

/// Whether a key has a tombstone.
pub async fn is_destroyed(
    from: &mut SqliteConnection,
    provider: ProviderId,
    key_id: &str,
) -> Result<bool, StoreError> {
    let found: Option<bool> =
        sqlx::query_scalar("SELECT destroyed FROM keys WHERE provider_id = ? AND key_id = ?")
            .bind(provider.to_string())
            .bind(key_id)
            .fetch_optional(from)
            .await?;
    Ok(found.unwrap_or(false))
}
