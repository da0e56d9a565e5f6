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
    .map_err(taken(|| {
        let (name, host) = (&datastore.name, &datastore.host_name);
        format!("a datastore '{name}' of host '{host}', or one at this place,")
    }))?;
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

/// The datastores that go by this: an id, a name, or `HOST:NAME` where hosts share a name.
pub async fn called(from: &mut SqliteConnection, what: &str) -> Result<Vec<Datastore>, StoreError> {
    let (host, name) = match what.split_once(':') {
        Some((host, name)) => (Some(host), name),
        None => (None, what),
    };
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT d.id, d.name, d.host_id, h.name AS host_name, d.location, d.capacity, d.free
         FROM datastores d JOIN hosts h ON h.id = d.host_id
         WHERE d.id = ? OR (d.name = ? AND (? IS NULL OR h.name = ?)) ORDER BY h.name",
    )
    .bind(what)
    .bind(name)
    .bind(host)
    .bind(host)
    .fetch_all(from)
    .await?;
    rows.into_iter().map(Datastore::try_from).collect()
}

/// The datastore that goes by this, as [`called`]; none where there is none.
///
/// # Errors
/// `invalid-request` where several do: which is meant is never guessed.
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

/// How many disks are on a datastore, or have their replica there.
pub async fn uses(from: &mut SqliteConnection, datastore: DatastoreId) -> Result<i64, StoreError> {
    Ok(sqlx::query_scalar("SELECT COUNT(*) FROM disks WHERE ? IN (datastore_id, replica_id)")
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

#[cfg(test)]
mod tests {
    use std::str::FromStr;

    use sqlx::sqlite::SqliteConnectOptions;
    use sqlx::{ConnectOptions, Connection, raw_sql};

    /// What there was before datastores of several hosts could have one name.
    const BEFORE: [&str; 4] = [
        include_str!("../../migrations/0001_inventory.sql"),
        include_str!("../../migrations/0010_allocation.sql"),
        include_str!("../../migrations/0011_image_format.sql"),
        include_str!("../../migrations/0020_kmip.sql"),
    ];

    const KNOWN: &str = "
        INSERT INTO hosts VALUES ('h', 'here', 'a', NULL), ('i', 'there', 'b', NULL);
        INSERT INTO policies (id, name, encryption) VALUES ('p', 'plain', 0);
        INSERT INTO vms (id, name, host_id, policy_id, vcpus, memory, lifecycle)
            VALUES ('v', 'web', 'h', 'p', 1, 1, 'ready');
        INSERT INTO datastores VALUES ('d', 'local', 'h', '{}', 2, 1);
        INSERT INTO disks (id, vm_id, position, name, datastore_id, size, encrypted)
            VALUES ('k', 'v', 0, 'root', 'd', 1, 0);";

    const TWIN: &str = "INSERT INTO datastores VALUES ('e', 'local', 'i', '{}', 2, 1)";

    #[tokio::test]
    async fn an_inventory_of_before_keeps_its_datastores_and_their_disks() {
        let options = SqliteConnectOptions::from_str("sqlite::memory:").unwrap();
        let mut inventory = options.foreign_keys(true).connect().await.unwrap();
        for sql in BEFORE {
            raw_sql(sql).execute(&mut inventory).await.unwrap();
        }
        raw_sql(KNOWN).execute(&mut inventory).await.unwrap();
        raw_sql(TWIN).execute(&mut inventory).await.unwrap_err();
        let mut change = inventory.begin().await.unwrap();
        let sql = include_str!("../../migrations/0031_datastores_of_one_name.sql");
        raw_sql(sql).execute(&mut *change).await.unwrap();
        change.commit().await.unwrap();
        raw_sql(TWIN).execute(&mut inventory).await.unwrap();
        let (place, capacity): (String, i64) = sqlx::query_as(
            "SELECT s.name, s.capacity FROM disks d JOIN datastores s ON s.id = d.datastore_id",
        )
        .fetch_one(&mut inventory)
        .await
        .unwrap();
        assert_eq!((place.as_str(), capacity), ("local", 2));
        let gone = raw_sql("DELETE FROM datastores WHERE id = 'd'").execute(&mut inventory).await;
        assert!(gone.is_err(), "a datastore with disks can be forgotten");
    }
}
