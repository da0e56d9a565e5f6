//! The keys of datastores that the server holds, wrapped. They are apart from the datastores: who reads one of these does not get
//! its key with it.

use sqlx::{FromRow, SqliteConnection};
use vmseal_api::id::DatastoreId;

use super::StoreError;

/// The key of a datastore.
#[derive(FromRow)]
pub struct Kept {
    /// The key, wrapped.
    pub wrapped: String,
    /// Which one it is; none of one that an earlier version kept.
    pub fingerprint: Option<String>,
}

/// Keeps the key of a datastore, in place of a former one.
pub async fn set(
    to: &mut SqliteConnection,
    datastore: DatastoreId,
    key: &Kept,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO datastore_keys (datastore_id, wrapped, fingerprint) VALUES ($1, $2, $3)
         ON CONFLICT (datastore_id) DO UPDATE SET wrapped = excluded.wrapped,
                                                  fingerprint = excluded.fingerprint",
    )
    .bind(datastore.to_string())
    .bind(&key.wrapped)
    .bind(&key.fingerprint)
    .execute(to)
    .await?;
    Ok(())
}

/// Notes which key a kept one is.
pub async fn set_fingerprint(
    to: &mut SqliteConnection,
    datastore: DatastoreId,
    wrapped: &str,
    fingerprint: &str,
) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE datastore_keys SET fingerprint = $1 WHERE datastore_id = $2 AND wrapped = $3",
    )
    .bind(fingerprint)
    .bind(datastore.to_string())
    .bind(wrapped)
    .execute(to)
    .await?;
    Ok(())
}

/// Forgets the key of a datastore.
pub async fn remove(to: &mut SqliteConnection, datastore: DatastoreId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM datastore_keys WHERE datastore_id = $1")
        .bind(datastore.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// The key of a datastore, if the server holds it.
pub async fn get(
    from: &mut SqliteConnection,
    datastore: DatastoreId,
) -> Result<Option<Kept>, StoreError> {
    Ok(sqlx::query_as("SELECT wrapped, fingerprint FROM datastore_keys WHERE datastore_id = $1")
        .bind(datastore.to_string())
        .fetch_optional(from)
        .await?)
}
