//! References of keys: which were created, for which VM, and which are destroyed.

use sqlx::SqliteConnection;
use vmseal_api::host::KeyReference;
use vmseal_api::id::{ProviderId, TaskId, VmId};

use super::{StoreError, parse};

/// Records a new key; one that is known already stays unchanged.
pub async fn insert(
    to: &mut SqliteConnection,
    vm: VmId,
    key: &KeyReference,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO keys (provider_id, key_id, vm_id, check_value) VALUES ($1, $2, $3, $4)
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

/// The VM that a key was created for; none where the inventory does not have it.
pub async fn owner(
    from: &mut SqliteConnection,
    provider: ProviderId,
    key_id: &str,
) -> Result<Option<VmId>, StoreError> {
    let vm: Option<String> =
        sqlx::query_scalar("SELECT vm_id FROM keys WHERE provider_id = $1 AND key_id = $2")
            .bind(provider.to_string())
            .bind(key_id)
            .fetch_optional(from)
            .await?;
    vm.map(|vm| parse(&vm, "a VM's id")).transpose()
}

/// Records a key that a task created for a VM which still has another one; it is found by the task.
pub async fn insert_for_task(
    to: &mut SqliteConnection,
    vm: VmId,
    key: &KeyReference,
    task: TaskId,
) -> Result<(), StoreError> {
    insert(to, vm, key).await?;
    sqlx::query("UPDATE keys SET task_id = $1 WHERE provider_id = $2 AND key_id = $3")
        .bind(task.to_string())
        .bind(key.provider.to_string())
        .bind(&key.key_id)
        .execute(to)
        .await?;
    Ok(())
}

/// The key that a task created, unless it is destroyed or unwanted.
pub async fn of_task(
    from: &mut SqliteConnection,
    task: TaskId,
) -> Result<Option<KeyReference>, StoreError> {
    let row: Option<(String, String, String)> = sqlx::query_as(
        "SELECT provider_id, key_id, check_value FROM keys
         WHERE task_id = $1 AND NOT destroyed AND NOT unwanted",
    )
    .bind(task.to_string())
    .fetch_optional(from)
    .await?;
    row.map(reference).transpose()
}

/// The keys of a VM, of all providers, except those that are destroyed or unwanted. More than one during a
/// recryption.
pub async fn of_vm(from: &mut SqliteConnection, vm: VmId) -> Result<Vec<KeyReference>, StoreError> {
    let rows: Vec<(String, String, String)> = sqlx::query_as(
        "SELECT provider_id, key_id, check_value FROM keys
         WHERE vm_id = $1 AND NOT destroyed AND NOT unwanted ORDER BY provider_id, key_id",
    )
    .bind(vm.to_string())
    .fetch_all(from)
    .await?;
    rows.into_iter().map(reference).collect()
}

fn reference(
    (provider, key_id, check): (String, String, String),
) -> Result<KeyReference, StoreError> {
    Ok(KeyReference { provider: parse(&provider, "a provider's id")?, key_id, check })
}

/// Removes the record of a VM's key that was adopted with it; the key stays at its provider.
pub async fn forget(
    to: &mut SqliteConnection,
    vm: VmId,
    key: &KeyReference,
) -> Result<(), StoreError> {
    sqlx::query(
        "DELETE FROM keys WHERE provider_id = $1 AND key_id = $2 AND vm_id = $3 AND NOT destroyed",
    )
    .bind(key.provider.to_string())
    .bind(&key.key_id)
    .bind(vm.to_string())
    .execute(to)
    .await?;
    Ok(())
}

/// A key of a provider that is not destroyed, with its VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LivingKey {
    /// Its id at the provider.
    pub key_id: String,
    /// The VM that it was created for.
    pub vm: VmId,
    /// That VM's name, while the VM exists.
    pub vm_name: Option<String>,
    /// Its check value; empty for a key that was gone before it could be read.
    pub check: String,
    /// It will be destroyed as soon as the provider answers.
    pub unwanted: bool,
}

/// The keys of a provider that are not destroyed.
pub async fn living(
    from: &mut SqliteConnection,
    provider: ProviderId,
) -> Result<Vec<LivingKey>, StoreError> {
    let rows: Vec<(String, String, Option<String>, String, bool)> = sqlx::query_as(
        "SELECT k.key_id, k.vm_id, v.name, k.check_value, k.unwanted FROM keys k LEFT JOIN vms v ON v.id = k.vm_id
         WHERE k.provider_id = $1 AND NOT k.destroyed ORDER BY k.key_id",
    )
    .bind(provider.to_string())
    .fetch_all(from)
    .await?;
    rows.into_iter()
        .map(|(key_id, vm, vm_name, check, unwanted)| {
            Ok(LivingKey { key_id, vm: parse(&vm, "a VM's id")?, vm_name, check, unwanted })
        })
        .collect()
}

/// Whether a key with this id was ever created.
pub async fn is_known(
    from: &mut SqliteConnection,
    provider: ProviderId,
    key_id: &str,
) -> Result<bool, StoreError> {
    let found: i64 =
        sqlx::query_scalar("SELECT COUNT(*) FROM keys WHERE provider_id = $1 AND key_id = $2")
            .bind(provider.to_string())
            .bind(key_id)
            .fetch_one(from)
            .await?;
    Ok(found > 0)
}

/// Marks a key as unwanted, so that it is destroyed; adds it if it was never recorded.
pub async fn set_unwanted(
    to: &mut SqliteConnection,
    vm: VmId,
    key: &KeyReference,
) -> Result<(), StoreError> {
    insert(to, vm, key).await?;
    sqlx::query("UPDATE keys SET unwanted = TRUE WHERE provider_id = $1 AND key_id = $2")
        .bind(key.provider.to_string())
        .bind(&key.key_id)
        .execute(to)
        .await?;
    Ok(())
}

/// Marks a key as destroyed permanently; false if it was already. A key that was never recorded gets its tombstone
/// too.
pub async fn destroy(
    to: &mut SqliteConnection,
    vm: VmId,
    key: &KeyReference,
) -> Result<bool, StoreError> {
    insert(to, vm, key).await?;
    let destroyed = sqlx::query(
        "UPDATE keys SET destroyed = TRUE WHERE provider_id = $1 AND key_id = $2 AND NOT destroyed",
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
        sqlx::query_scalar("SELECT destroyed FROM keys WHERE provider_id = $1 AND key_id = $2")
            .bind(provider.to_string())
            .bind(key_id)
            .fetch_optional(from)
            .await?;
    Ok(found.unwrap_or(false))
}
