//! Other control planes.

use sqlx::{FromRow, SqliteConnection};
use vmseal_api::id::RemoteId;

use super::{Part, StoreError, parse, taken};

/// Another control plane as the inventory has it.
#[derive(Clone, Debug)]
pub struct Remote {
    /// Its id.
    pub id: RemoteId,
    /// Its name.
    pub name: String,
    /// Where its server is.
    pub url: String,
    /// The certificate of its authority, PEM.
    pub authority: String,
}

#[derive(FromRow)]
struct Row {
    id: String,
    name: String,
    url: String,
    authority: String,
}

impl TryFrom<Row> for Remote {
    type Error = StoreError;
    fn try_from(row: Row) -> Result<Self, StoreError> {
        let Row { id, name, url, authority } = row;
        Ok(Self { id: parse(&id, "the id of another control plane")?, name, url, authority })
    }
}

/// Adds one.
///
/// # Errors
/// [`StoreError::Taken`]: another one has its name.
pub async fn insert(to: &mut SqliteConnection, remote: &Remote) -> Result<(), StoreError> {
    sqlx::query("INSERT INTO remotes (id, name, url, authority) VALUES ($1, $2, $3, $4)")
        .bind(remote.id.to_string())
        .bind(&remote.name)
        .bind(&remote.url)
        .bind(&remote.authority)
        .execute(to)
        .await
        .map_err(taken(|| format!("a remote '{}'", remote.name)))?;
    Ok(())
}

/// One by its name or id.
pub async fn find(
    from: &mut SqliteConnection,
    name_or_id: &str,
) -> Result<Option<Remote>, StoreError> {
    let row: Option<Row> =
        sqlx::query_as("SELECT id, name, url, authority FROM remotes WHERE name = $1 OR id = $2")
            .bind(name_or_id)
            .bind(name_or_id)
            .fetch_optional(from)
            .await?;
    row.map(Remote::try_from).transpose()
}

/// Those of a part, in order of their ids.
pub async fn list(from: &mut SqliteConnection, part: &Part) -> Result<Vec<Remote>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT id, name, url, authority FROM remotes WHERE id > $1 ORDER BY id LIMIT $2",
    )
    .bind(&part.after)
    .bind(part.limit)
    .fetch_all(from)
    .await?;
    rows.into_iter().map(Remote::try_from).collect()
}

/// Removes one.
pub async fn delete(to: &mut SqliteConnection, remote: RemoteId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM remotes WHERE id = $1").bind(remote.to_string()).execute(to).await?;
    Ok(())
}
