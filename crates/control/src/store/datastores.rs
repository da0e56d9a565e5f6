//! Datastores.

use sqlx::{FromRow, SqliteConnection};
use vmseal_api::host::{DatastoreLocation, DatastoreUsage};
use vmseal_api::id::{DatastoreId, HostId};
use vmseal_api::problem::{ErrorCode, Problem};

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
    /// Its capacity and free space when last measured.
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

macro_rules! select {
    ($rest:literal) => {
        concat!(
            "SELECT d.id, d.name, a.host_id, h.name AS host_name, a.location, d.capacity, d.free
             FROM datastores d JOIN datastore_hosts a ON a.datastore_id = d.id
                  JOIN hosts h ON h.id = a.host_id ",
            $rest
        )
    };
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

/// A size as SQL can store it; more than 8 EiB counts as 8 EiB.
fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Adds a datastore, and its host.
pub async fn insert(to: &mut SqliteConnection, datastore: &Datastore) -> Result<(), StoreError> {
    let exists = || {
        let (name, host) = (&datastore.name, &datastore.host_name);
        format!("a datastore '{name}' of host '{host}', or one at this place,")
    };
    sqlx::query("INSERT INTO datastores (id, name, capacity, free) VALUES ($1, $2, $3, $4)")
        .bind(datastore.id.to_string())
        .bind(&datastore.name)
        .bind(datastore.usage.map(|usage| signed(usage.capacity)))
        .bind(datastore.usage.map(|usage| signed(usage.free)))
        .execute(&mut *to)
        .await
        .map_err(taken(exists))?;
    sqlx::query(
        "INSERT INTO datastore_hosts (datastore_id, host_id, name, location) VALUES ($1, $2, $3, $4)",
    )
    .bind(datastore.id.to_string())
    .bind(datastore.host.to_string())
    .bind(&datastore.name)
    .bind(to_json(&datastore.location))
    .execute(to)
    .await
    .map_err(taken(exists))?;
    Ok(())
}

/// Where a host has a datastore; none where it does not have it.
pub async fn location_at(
    from: &mut SqliteConnection,
    datastore: DatastoreId,
    host: HostId,
) -> Result<Option<DatastoreLocation>, StoreError> {
    let found: Option<String> = sqlx::query_scalar(
        "SELECT location FROM datastore_hosts WHERE datastore_id = $1 AND host_id = $2",
    )
    .bind(datastore.to_string())
    .bind(host.to_string())
    .fetch_optional(from)
    .await?;
    found.map(|location| from_json(&location, "a datastore's location")).transpose()
}

/// Records its capacity and free space.
pub async fn set_usage(
    to: &mut SqliteConnection,
    datastore: DatastoreId,
    usage: DatastoreUsage,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE datastores SET capacity = $1, free = $2 WHERE id = $3")
        .bind(signed(usage.capacity))
        .bind(signed(usage.free))
        .bind(datastore.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// The datastores with this id or name, or `HOST:NAME` if several hosts have the name.
pub async fn called(from: &mut SqliteConnection, what: &str) -> Result<Vec<Datastore>, StoreError> {
    let (host, name) = match what.split_once(':') {
        Some((host, name)) => (Some(host), name),
        None => (None, what),
    };
    let rows: Vec<Row> = sqlx::query_as(select!(
        "WHERE d.id = $1 OR (d.name = $2 AND (CAST($3 AS TEXT) IS NULL OR h.name = $3)) ORDER BY h.name"
    ))
    .bind(what)
    .bind(name)
    .bind(host)
    .fetch_all(from)
    .await?;
    rows.into_iter().map(Datastore::try_from).collect()
}

/// The datastore that [`called`] finds, if any.
///
/// # Errors
/// `invalid-request` if there are several: vmseal does not guess.
pub async fn find(from: &mut SqliteConnection, what: &str) -> Result<Option<Datastore>, Problem> {
    let mut found = called(from, what).await?;
    if found.len() > 1 {
        let all: Vec<_> = found.iter().map(|it| format!("{}:{}", it.host_name, it.name)).collect();
        let detail = format!("several datastores have the name '{what}': say {}", all.join(" or "));
        return Err(Problem::new(ErrorCode::InvalidRequest, detail));
    }
    Ok(found.pop())
}

/// Datastores in order of their ids.
pub async fn list(from: &mut SqliteConnection, part: &Part) -> Result<Vec<Datastore>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(select!("WHERE d.id > $1 ORDER BY d.id LIMIT $2"))
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
    let rows: Vec<Row> = sqlx::query_as(select!("WHERE a.host_id = $1 ORDER BY d.id"))
        .bind(host.to_string())
        .fetch_all(from)
        .await?;
    rows.into_iter().map(Datastore::try_from).collect()
}

/// How many disks are on a datastore, or have their replica there.
pub async fn uses(from: &mut SqliteConnection, datastore: DatastoreId) -> Result<i64, StoreError> {
    Ok(sqlx::query_scalar("SELECT COUNT(DISTINCT disk_id) FROM volumes WHERE datastore_id = $1")
        .bind(datastore.to_string())
        .fetch_one(from)
        .await?)
}

/// Removes a datastore; the files on it stay.
pub async fn delete(to: &mut SqliteConnection, datastore: DatastoreId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM datastores WHERE id = $1")
        .bind(datastore.to_string())
        .execute(to)
        .await?;
    Ok(())
}
