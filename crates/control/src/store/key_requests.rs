//! Requests to create keys, recorded from before the request until the key is in the inventory. For providers that
//! create another key for every request.

use jiff::Timestamp;
use sqlx::{FromRow, SqliteConnection};
use uuid::Uuid;
use vmseal_api::id::{ProviderId, VmId};

use super::{StoreError, parse};

/// A request to a provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRequest {
    /// Its id.
    pub request: Uuid,
    /// The mark by which the key is found, if the server stores it.
    pub mark: Uuid,
    /// When it was sent.
    pub sent: Timestamp,
    /// The VM.
    pub vm: VmId,
    /// The server.
    pub server: String,
    /// Whether the server was asked to store the mark with the key.
    pub marked: bool,
    /// The key, once it is known.
    pub key_id: Option<String>,
    /// The key is no longer needed.
    pub abandoned: bool,
    /// The server's address has changed since: an id that it gave says nothing at the new one.
    pub moved: bool,
}

#[derive(FromRow)]
struct Row {
    request: String,
    mark: String,
    sent_at: String,
    vm_id: String,
    server: String,
    marked: bool,
    key_id: Option<String>,
    abandoned: bool,
    moved: bool,
}

impl TryFrom<Row> for KeyRequest {
    type Error = StoreError;
    fn try_from(row: Row) -> Result<Self, StoreError> {
        Ok(Self {
            request: parse(&row.request, "a request's id")?,
            mark: parse(&row.mark, "a request's mark")?,
            sent: parse(&row.sent_at, "a time")?,
            vm: parse(&row.vm_id, "a VM's id")?,
            server: row.server,
            marked: row.marked,
            key_id: row.key_id,
            abandoned: row.abandoned,
            moved: row.moved,
        })
    }
}

/// Records a request, or what is known of its answer. A recorded move of the server stays, as the address may have
/// changed while the server was asked.
pub async fn put(
    to: &mut SqliteConnection,
    provider: ProviderId,
    request: &KeyRequest,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO key_requests (provider_id, request, mark, sent_at, vm_id, server, marked, key_id, abandoned, moved)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
         ON CONFLICT (provider_id, request) DO UPDATE
         SET mark = excluded.mark, sent_at = excluded.sent_at, server = excluded.server,
             marked = excluded.marked, key_id = excluded.key_id, abandoned = excluded.abandoned,
             moved = excluded.moved OR (key_requests.moved AND key_requests.mark = excluded.mark)",
    )
    .bind(provider.to_string())
    .bind(request.request.to_string())
    .bind(request.mark.to_string())
    .bind(request.sent.to_string())
    .bind(request.vm.to_string())
    .bind(&request.server)
    .bind(request.marked)
    .bind(&request.key_id)
    .bind(request.abandoned)
    .bind(request.moved)
    .execute(to)
    .await?;
    Ok(())
}

/// A recorded request.
pub async fn get(
    from: &mut SqliteConnection,
    provider: ProviderId,
    request: Uuid,
) -> Result<Option<KeyRequest>, StoreError> {
    let row: Option<Row> = sqlx::query_as(
        "SELECT request, mark, sent_at, vm_id, server, marked, key_id, abandoned, moved FROM key_requests
         WHERE provider_id = $1 AND request = $2",
    )
    .bind(provider.to_string())
    .bind(request.to_string())
    .fetch_optional(from)
    .await?;
    row.map(KeyRequest::try_from).transpose()
}

/// The requests whose keys are no longer needed.
pub async fn abandoned(
    from: &mut SqliteConnection,
    provider: ProviderId,
) -> Result<Vec<KeyRequest>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT request, mark, sent_at, vm_id, server, marked, key_id, abandoned, moved FROM key_requests
         WHERE provider_id = $1 AND abandoned ORDER BY request",
    )
    .bind(provider.to_string())
    .fetch_all(from)
    .await?;
    rows.into_iter().map(KeyRequest::try_from).collect()
}

/// All requests to a provider.
pub async fn of_provider(
    from: &mut SqliteConnection,
    provider: ProviderId,
) -> Result<Vec<KeyRequest>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT request, mark, sent_at, vm_id, server, marked, key_id, abandoned, moved FROM key_requests
         WHERE provider_id = $1 ORDER BY request",
    )
    .bind(provider.to_string())
    .fetch_all(from)
    .await?;
    rows.into_iter().map(KeyRequest::try_from).collect()
}

/// Changes the server of the requests that went to one server.
pub async fn set_server(
    to: &mut SqliteConnection,
    provider: ProviderId,
    from: &str,
    server: &str,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE key_requests SET server = $1 WHERE provider_id = $2 AND server = $3")
        .bind(server)
        .bind(provider.to_string())
        .bind(from)
        .execute(to)
        .await?;
    Ok(())
}

/// Records that a server has another address than when it was asked.
pub async fn set_moved(
    to: &mut SqliteConnection,
    provider: ProviderId,
    server: &str,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE key_requests SET moved = TRUE WHERE provider_id = $1 AND server = $2")
        .bind(provider.to_string())
        .bind(server)
        .execute(to)
        .await?;
    Ok(())
}

/// Deletes a request: its key is in the inventory, or there is none.
pub async fn delete(
    to: &mut SqliteConnection,
    provider: ProviderId,
    request: Uuid,
) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM key_requests WHERE provider_id = $1 AND request = $2")
        .bind(provider.to_string())
        .bind(request.to_string())
        .execute(to)
        .await?;
    Ok(())
}
