//! Hosts.

use sqlx::{FromRow, SqliteConnection};
use vmseal_api::drain::Maintenance;
use vmseal_api::host::HostDescription;
use vmseal_api::id::HostId;
use vmseal_api::problem::{ErrorCode, Problem};

use super::{Part, StoreError, from_json, from_name, parse, taken, to_json};

/// A host as the inventory has it.
#[derive(Clone, Debug)]
pub struct Host {
    /// Its id.
    pub id: HostId,
    /// Its name.
    pub name: String,
    /// The address of its agent.
    pub address: String,
    /// Its description when it last answered.
    pub description: Option<HostDescription>,
    /// Whether VMs are placed on it.
    pub maintenance: Maintenance,
}

impl Host {
    /// Refuses a host that is emptied, or empty for maintenance.
    ///
    /// # Errors
    /// `wrong-state`.
    pub fn require_active(&self) -> Result<(), Problem> {
        let name = &self.name;
        let is = match self.maintenance {
            Maintenance::No => return Ok(()),
            Maintenance::Draining => "is being emptied",
            Maintenance::Drained => "is empty for maintenance",
        };
        let detail = format!(
            "host '{name}' {is}: no VM is created, started or moved there until 'vmseal host undrain {name}'"
        );
        Err(Problem::new(ErrorCode::WrongState, detail))
    }
}

#[derive(FromRow)]
struct Row {
    id: String,
    name: String,
    address: String,
    description: Option<String>,
    drain: Option<String>,
}

impl TryFrom<Row> for Host {
    type Error = StoreError;
    fn try_from(row: Row) -> Result<Self, StoreError> {
        // A description is a cache: an unreadable one of an older vmseal is ignored.
        let description = row.description.and_then(|text| from_json(&text, "a host").ok());
        Ok(Self {
            id: parse(&row.id, "a host's id")?,
            name: row.name,
            address: row.address,
            description,
            maintenance: match row.drain {
                None => Maintenance::No,
                Some(state) => from_name(&state, "how far a host is emptied")?,
            },
        })
    }
}

/// Adds a host.
pub async fn insert(to: &mut SqliteConnection, host: &Host) -> Result<(), StoreError> {
    sqlx::query("INSERT INTO hosts (id, name, address) VALUES ($1, $2, $3)")
        .bind(host.id.to_string())
        .bind(&host.name)
        .bind(&host.address)
        .execute(to)
        .await
        .map_err(taken(|| format!("a host '{}'", host.name)))?;
    Ok(())
}

/// Records a host's description.
pub async fn set_description(
    to: &mut SqliteConnection,
    host: HostId,
    description: &HostDescription,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE hosts SET description = $1 WHERE id = $2")
        .bind(to_json(description))
        .bind(host.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Forgets the hosts' descriptions: none has rebooted since, as far as is known.
pub async fn forget_boots(to: &mut SqliteConnection) -> Result<(), StoreError> {
    sqlx::query("UPDATE hosts SET description = NULL").execute(&mut *to).await?;
    sqlx::query("UPDATE vms SET start_due = FALSE").execute(to).await?;
    Ok(())
}

/// Records the address of a host's agent.
pub async fn set_address(
    to: &mut SqliteConnection,
    host: HostId,
    address: &str,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE hosts SET address = $1 WHERE id = $2")
        .bind(address)
        .bind(host.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// A host by its name or id.
pub async fn find(
    from: &mut SqliteConnection,
    name_or_id: &str,
) -> Result<Option<Host>, StoreError> {
    let row: Option<Row> = sqlx::query_as(
        "SELECT h.id, h.name, h.address, h.description, d.state AS drain
         FROM hosts h LEFT JOIN drains d ON d.host_id = h.id WHERE h.name = $1 OR h.id = $2",
    )
    .bind(name_or_id)
    .bind(name_or_id)
    .fetch_optional(from)
    .await?;
    row.map(Host::try_from).transpose()
}

/// Hosts in order of their ids.
pub async fn list(from: &mut SqliteConnection, part: &Part) -> Result<Vec<Host>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT h.id, h.name, h.address, h.description, d.state AS drain
         FROM hosts h LEFT JOIN drains d ON d.host_id = h.id
         WHERE h.id > $1 ORDER BY h.id LIMIT $2",
    )
    .bind(&part.after)
    .bind(part.limit)
    .fetch_all(from)
    .await?;
    rows.into_iter().map(Host::try_from).collect()
}

/// How many datastores and VMs are on a host.
pub async fn uses(
    from: &mut SqliteConnection,
    host: HostId,
) -> Result<(i64, i64, i64), StoreError> {
    Ok(sqlx::query_as(
        "SELECT (SELECT COUNT(*) FROM datastore_hosts WHERE host_id = $1),
                (SELECT COUNT(*) FROM placements WHERE host_id = $2),
                (SELECT COUNT(*) FROM backups WHERE host_id = $3)",
    )
    .bind(host.to_string())
    .bind(host.to_string())
    .bind(host.to_string())
    .fetch_one(from)
    .await?)
}

/// Removes a host and the alarms of its monitors.
pub async fn delete(to: &mut SqliteConnection, host: HostId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM alarms WHERE source = $1 OR source = $2")
        .bind(host.to_string())
        .bind(super::alarms::source_of_datastores(host))
        .execute(&mut *to)
        .await?;
    sqlx::query("DELETE FROM hosts WHERE id = $1").bind(host.to_string()).execute(to).await?;
    Ok(())
}
