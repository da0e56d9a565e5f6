//! The keys of datastores that the server holds, wrapped. They are apart from the datastores: who reads one of these does not get
//! its key with it.

use sqlx::SqliteConnection;
use vmseal_api::id::DatastoreId;

use super::StoreError;

/// Keeps the key of a datastore, in place of a former one.
pub async fn set(
    to: &mut SqliteConnection,
    datastore: DatastoreId,
    wrapped: &str,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO datastore_keys (datastore_id, wrapped) VALUES ($1, $2)
         ON CONFLICT (datastore_id) DO UPDATE SET wrapped = excluded.wrapped",
    )
    .bind(datastore.to_string())
    .bind(wrapped)
    .execute(to)
    .await?;
    Ok(())
}

/// The key of a datastore, if the server holds it.
pub async fn get(
    from: &mut SqliteConnection,
    datastore: DatastoreId,
) -> Result<Option<String>, StoreError> {
    Ok(sqlx::query_scalar("SELECT wrapped FROM datastore_keys WHERE datastore_id = $1")
        .bind(datastore.to_string())
        .fetch_optional(from)
        .await?)
}
