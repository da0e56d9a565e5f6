//! Datastores.

use sqlx::{FromRow, SqliteConnection};
use vmseal_api::host::{DatastoreLocation, DatastoreUsage};
use vmseal_api::id::{DatastoreId, HostId};

use super::{Part, StoreError, from_json, parse, taken, to_json, unsigned};

/// A datastore as the inventory has it.
#[derive(Clone, Debug)]
pub struct Datastore {
    /// Its id.
    pub id: DatastoreId,
    /// Its name.
    pub name: String,
    /// The host that it belongs to.
    pub host: HostId,
    /// That host's name.
    pub host_name: String,
    /// Where it is.
    pub location: DatastoreLocation,
    /// Its room when last measured.
    pub usage: Option<DatastoreUsage>,
}

#[derive(FromRow)]
struct Row {
    id: String,
    name: String,
    host_id: String,
    host_name: String,
    location: String,
    capacity: Option<i64>,
    free: Option<i64>,
}

impl TryFrom<Row> for Datastore {
    type Error = StoreError;
    fn try_from(row: Row) -> Result<Self, StoreError> {
        let usage = match (row.capacity, row.free) {
            (Some(capacity), Some(free)) => Some(DatastoreUsage {
                capacity: unsigned(capacity, "a capacity")?,
                free: unsigned(free, "free room")?,
            }),
            _ => None,
        };
        Ok(Self {
            id: parse(&row.id, "a datastore's id")?,
            name: row.name,
            host: parse(&row.host_id, "a host's id")?,
            host_name: row.host_name,
            location: from_json(&row.location, "a datastore's location")?,
            usage,
        })
    }
}

/// A size as SQL can hold it; more than 8 EiB is as good as 8 EiB here.
fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Adds a datastore.
pub async fn insert(to: &mut SqliteConnection, datastore: &Datastore) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO datastores (id, name, host_id, location, capacity, free)
         VALUES (?, ?, ?, ?, ?, ?)",
    )
    .bind(datastore.id.to_string())
    .bind(&datastore.name)
    .bind(datastore.host.to_string())
    .bind(to_json(&datastore.location))
    .bind(datastore.usage.map(|usage| signed(usage.capacity)))
    .bind(datastore.usage.map(|usage| signed(usage.free)))
    .execute(to)
    .await
    .map_err(taken(|| format!("a datastore '{}', or one at this place,", datastore.name)))?;
    Ok(())
}

/// Notes how much room there is.
pub async fn set_usage(
    to: &mut SqliteConnection,
    datastore: DatastoreId,
    usage: DatastoreUsage,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE datastores SET capacity = ?, free = ? WHERE id = ?")
        .bind(signed(usage.capacity))
        .bind(signed(usage.free))
        .bind(datastore.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// A datastore by its name or id.
pub async fn find(
    from: &mut SqliteConnection,
    name_or_id: &str,
) -> Result<Option<Datastore>, StoreError> {
    let row: Option<Row> = sqlx::query_as(
        "SELECT d.id, d.name, d.host_id, h.name AS host_name, d.location, d.capacity, d.free
         FROM datastores d JOIN hosts h ON h.id = d.host_id WHERE d.name = ? OR d.id = ?",
    )
    .bind(name_or_id)
    .bind(name_or_id)
    .fetch_optional(from)
    .await?;
    row.map(Datastore::try_from).transpose()
}

/// Datastores in order of their ids.
pub async fn list(from: &mut SqliteConnection, part: &Part) -> Result<Vec<Datastore>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT d.id, d.name, d.host_id, h.name AS host_name, d.location, d.capacity, d.free
         FROM datastores d JOIN hosts h ON h.id = d.host_id
         WHERE d.id > ? ORDER BY d.id LIMIT ?",
    )
    .bind(&part.after)
    .bind(part.limit)
    .fetch_all(from)
    .await?;
    rows.into_iter().map(Datastore::try_from).collect()
}

/// The datastores of a host.
pub async fn of_host(
    from: &mut SqliteConnection,
    host: HostId,
) -> Result<Vec<Datastore>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT d.id, d.name, d.host_id, h.name AS host_name, d.location, d.capacity, d.free
         FROM datastores d JOIN hosts h ON h.id = d.host_id WHERE d.host_id = ? ORDER BY d.id",
    )
    .bind(host.to_string())
    .fetch_all(from)
    .await?;
    rows.into_iter().map(Datastore::try_from).collect()
}

/// How many disks are on a datastore.
pub async fn uses(from: &mut SqliteConnection, datastore: DatastoreId) -> Result<i64, StoreError> {
    Ok(sqlx::query_scalar("SELECT COUNT(*) FROM disks WHERE datastore_id = ?")
        .bind(datastore.to_string())
        .fetch_one(from)
        .await?)
}

/// Forgets a datastore; what is on it stays.
pub async fn delete(to: &mut SqliteConnection, datastore: DatastoreId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM datastores WHERE id = ?")
        .bind(datastore.to_string())
        .execute(to)
        .await?;
    Ok(())
}
