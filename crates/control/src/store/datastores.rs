//! Datastores.

use sqlx::{FromRow, SqliteConnection};
use vmseal_api::datastore::MountFacts;
use vmseal_api::host::{DatastoreLocation, DatastoreSpec, DatastoreUsage};
use vmseal_api::id::{DatastoreId, HostId, VmId};
use vmseal_api::osd_encryption::{OsdEncryption, OsdFacts, OsdsUnknown, StatedOsds};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::redundancy::PoolFacts;

use super::{Part, StoreError, from_json, from_name, parse, taken, to_json, to_name, unsigned};

/// A datastore as the inventory has it.
#[derive(Clone, Debug)]
pub struct Datastore {
    /// Its id.
    pub id: DatastoreId,
    /// Its name.
    pub name: String,
    /// The hosts that have it, in the order of their names: one, or several that share it.
    pub hosts: Vec<OnHost>,
    /// Its capacity and free space when last measured.
    pub usage: Option<DatastoreUsage>,
    /// How its cluster keeps what is stored there, as it was last told; none of a directory.
    pub pools: Vec<PoolFacts>,
    /// The fingerprint of the key that the server holds, if it holds one.
    pub key: Option<String>,
    /// Whether the OSDs of its cluster are encrypted; nothing of a directory.
    pub osds: Osds,
}

/// Whether the OSDs of a cluster are encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Osds {
    /// What is known of it.
    pub facts: OsdFacts,
    /// The host that the monitors have told it last.
    pub told_by: Option<HostId>,
}

/// A datastore on a host.
#[derive(Clone, Debug)]
pub struct OnHost {
    /// The host.
    pub host: HostId,
    /// That host's name.
    pub host_name: String,
    /// Where it is on that host.
    pub location: DatastoreLocation,
    /// The fingerprint of the key that its mount uses, as it was last told.
    pub mounted_key: Option<String>,
    /// How its mount gets to the cluster, as it was last told.
    pub mount: Option<MountFacts>,
}

impl Datastore {
    /// What a host has of it, if it has it.
    #[must_use]
    pub fn on(&self, host: HostId) -> Option<&OnHost> {
        self.hosts.iter().find(|on| on.host == host)
    }

    /// What the agent of a host is to know of it; none where that host does not have it.
    #[must_use]
    pub fn spec_on(&self, host: HostId) -> Option<DatastoreSpec> {
        self.on(host).map(|on| self.spec(on))
    }

    /// What the agent of a host that has it is to know.
    #[must_use]
    pub fn spec(&self, on: &OnHost) -> DatastoreSpec {
        DatastoreSpec { datastore: self.id, location: on.location.clone() }
    }

    /// Whether a host that had it in `before` has it elsewhere by now, or gets to its pool in another way.
    #[must_use]
    pub fn is_elsewhere_than(&self, before: &Self) -> bool {
        let is_other =
            |on: &OnHost| before.on(on.host).is_some_and(|it| it.location != on.location);
        self.hosts.iter().any(is_other)
    }

    /// Whether what the monitors tell a host of the OSDs is to be recorded. A cluster that does not answer for a moment has the OSDs that it
    /// had; and a host that may not ask, or cannot, takes nothing back that another one was told.
    #[must_use]
    pub fn is_news_of_osds(&self, told: OsdEncryption, host: HostId) -> bool {
        let no_answer = OsdEncryption::Unknown { why: OsdsUnknown::NoAnswer };
        match self.osds.facts.told {
            None => true,
            Some(known) if known == told || told == no_answer => false,
            Some(known) => {
                let by = self.osds.told_by.filter(|by| self.on(*by).is_some());
                told.known().is_some() || known == no_answer || by.is_none_or(|by| by == host)
            }
        }
    }

    /// The names of its hosts, for people.
    #[must_use]
    pub fn host_names(&self) -> String {
        self.hosts.iter().map(|on| on.host_name.as_str()).collect::<Vec<_>>().join(", ")
    }
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
    pools: Option<String>,
    held_key: Option<String>,
    mounted_key: Option<String>,
    mount: Option<String>,
    osds_stated: Option<String>,
    osds_told: Option<String>,
    osds_told_by: Option<String>,
}

/// What is known of the OSDs of a datastore's cluster.
fn osd_facts(stated: Option<&str>, told: Option<&str>) -> Result<OsdFacts, StoreError> {
    let stated = stated.map(|it| from_name::<StatedOsds>(it, "what is stated of OSDs"));
    let told = told.map(|it| from_json(it, "what is told of OSDs"));
    Ok(OsdFacts {
        stated: stated.transpose()?.and_then(StatedOsds::stated),
        told: told.transpose()?,
    })
}

/// A row for each host of a datastore, those of one datastore after one another.
macro_rules! select {
    ($which:literal) => {
        concat!(
            "SELECT d.id, d.name, a.host_id, h.name AS host_name, a.location, d.capacity, d.free,
                    d.pools, k.fingerprint AS held_key, a.mounted_key, a.mount, d.osds_stated,
                    d.osds_told, d.osds_told_by
             FROM datastores d JOIN datastore_hosts a ON a.datastore_id = d.id
                  JOIN hosts h ON h.id = a.host_id
                  LEFT JOIN datastore_keys k ON k.datastore_id = d.id ",
            $which,
            " ORDER BY d.id, h.name"
        )
    };
}

/// The datastores of these rows.
fn gathered(rows: Vec<Row>) -> Result<Vec<Datastore>, StoreError> {
    let mut found: Vec<Datastore> = Vec::new();
    for row in rows {
        let id = parse(&row.id, "a datastore's id")?;
        let on = OnHost {
            host: parse(&row.host_id, "a host's id")?,
            host_name: row.host_name,
            location: from_json(&row.location, "a datastore's location")?,
            mounted_key: row.mounted_key,
            mount: row.mount.as_deref().map(|it| from_json(it, "a pool's mount")).transpose()?,
        };
        if let Some(last) = found.last_mut().filter(|last| last.id == id) {
            last.hosts.push(on);
            continue;
        }
        let usage = match (row.capacity, row.free) {
            (Some(capacity), Some(free)) => Some(DatastoreUsage {
                capacity: unsigned(capacity, "a capacity")?,
                free: unsigned(free, "free room")?,
            }),
            _ => None,
        };
        let pools =
            row.pools.as_deref().map(|it| from_json(it, "a datastore's pools")).transpose()?;
        let pools = pools.unwrap_or_default();
        let osds = Osds {
            facts: osd_facts(row.osds_stated.as_deref(), row.osds_told.as_deref())?,
            told_by: row.osds_told_by.map(|it| parse(&it, "a host's id")).transpose()?,
        };
        let (name, key) = (row.name, row.held_key);
        found.push(Datastore { id, name, hosts: vec![on], usage, pools, key, osds });
    }
    Ok(found)
}

/// A size as SQL can store it; more than 8 EiB counts as 8 EiB.
fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Adds a datastore, and its hosts.
pub async fn insert(to: &mut SqliteConnection, datastore: &Datastore) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO datastores (id, name, capacity, free, pools, osds_stated, osds_told, osds_told_by)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
    )
    .bind(datastore.id.to_string())
    .bind(&datastore.name)
    .bind(datastore.usage.map(|usage| signed(usage.capacity)))
    .bind(datastore.usage.map(|usage| signed(usage.free)))
    .bind(kept_pools(&datastore.pools))
    .bind(kept_stated(datastore.osds.facts.stated))
    .bind(datastore.osds.facts.told.as_ref().map(to_json))
    .bind(datastore.osds.told_by.map(|host| host.to_string()))
    .execute(&mut *to)
    .await
    .map_err(taken(|| exists(&datastore.name, &datastore.host_names())))?;
    for on in &datastore.hosts {
        insert_host(to, datastore, on).await?;
    }
    Ok(())
}

/// Pools as the inventory keeps them.
fn kept_pools(pools: &[PoolFacts]) -> Option<String> {
    (!pools.is_empty()).then(|| to_json(&pools))
}

/// Records how its cluster keeps what is stored there.
pub async fn set_pools(
    to: &mut SqliteConnection,
    datastore: DatastoreId,
    pools: &[PoolFacts],
) -> Result<(), StoreError> {
    sqlx::query("UPDATE datastores SET pools = $1 WHERE id = $2")
        .bind(kept_pools(pools))
        .bind(datastore.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// What is stated of OSDs as the inventory keeps it.
fn kept_stated(encrypted: Option<bool>) -> Option<String> {
    encrypted.map(|encrypted| to_name(&if encrypted { StatedOsds::Yes } else { StatedOsds::No }))
}

/// Records what an administrator states of the OSDs of its cluster.
pub async fn set_osds_stated(
    to: &mut SqliteConnection,
    datastore: DatastoreId,
    encrypted: Option<bool>,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE datastores SET osds_stated = $1 WHERE id = $2")
        .bind(kept_stated(encrypted))
        .bind(datastore.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Records what the monitors have told a host of the OSDs of its cluster.
pub async fn set_osds_told(
    to: &mut SqliteConnection,
    datastore: DatastoreId,
    told: OsdEncryption,
    host: HostId,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE datastores SET osds_told = $1, osds_told_by = $2 WHERE id = $3")
        .bind(to_json(&told))
        .bind(host.to_string())
        .bind(datastore.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Adds a host to a datastore.
pub async fn insert_host(
    to: &mut SqliteConnection,
    datastore: &Datastore,
    on: &OnHost,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO datastore_hosts (datastore_id, host_id, name, location, mounted_key, mount)
         VALUES ($1, $2, $3, $4, $5, $6)",
    )
    .bind(datastore.id.to_string())
    .bind(on.host.to_string())
    .bind(&datastore.name)
    .bind(to_json(&on.location))
    .bind(&on.mounted_key)
    .bind(on.mount.as_ref().map(to_json))
    .execute(to)
    .await
    .map_err(taken(|| exists(&datastore.name, &on.host_name)))?;
    Ok(())
}

fn exists(name: &str, host: &str) -> String {
    format!("a datastore '{name}' of host '{host}', or one at this place,")
}

/// Records which key a host's mount uses.
pub async fn set_mounted_key(
    to: &mut SqliteConnection,
    datastore: DatastoreId,
    host: HostId,
    fingerprint: Option<&str>,
) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE datastore_hosts SET mounted_key = $1 WHERE datastore_id = $2 AND host_id = $3",
    )
    .bind(fingerprint)
    .bind(datastore.to_string())
    .bind(host.to_string())
    .execute(to)
    .await?;
    Ok(())
}

/// Records how a host's mount gets to the cluster.
pub async fn set_mount(
    to: &mut SqliteConnection,
    datastore: DatastoreId,
    host: HostId,
    mount: Option<&MountFacts>,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE datastore_hosts SET mount = $1 WHERE datastore_id = $2 AND host_id = $3")
        .bind(mount.map(to_json))
        .bind(datastore.to_string())
        .bind(host.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Changes where a datastore is on a host.
pub async fn set_location(
    to: &mut SqliteConnection,
    datastore: DatastoreId,
    host: HostId,
    location: &DatastoreLocation,
) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE datastore_hosts SET location = $1 WHERE datastore_id = $2 AND host_id = $3",
    )
    .bind(to_json(location))
    .bind(datastore.to_string())
    .bind(host.to_string())
    .execute(to)
    .await?;
    Ok(())
}

/// Takes a host from a datastore.
pub async fn delete_host(
    to: &mut SqliteConnection,
    datastore: DatastoreId,
    host: HostId,
) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM datastore_hosts WHERE datastore_id = $1 AND host_id = $2")
        .bind(datastore.to_string())
        .bind(host.to_string())
        .execute(to)
        .await?;
    Ok(())
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

/// A datastore as a request names it.
struct Called<'a> {
    host: Option<&'a str>,
    name: &'a str,
}

impl<'a> Called<'a> {
    fn of(what: &'a str) -> Self {
        match what.split_once(':') {
            Some((host, name)) => Self { host: Some(host), name },
            None => Self { host: None, name: what },
        }
    }
}

/// The host that `HOST:NAME` says.
#[must_use]
pub fn host_in(what: &str) -> Option<&str> {
    Called::of(what).host
}

/// The datastores with this id or name, or `HOST:NAME` if several hosts have the name.
pub async fn called(from: &mut SqliteConnection, what: &str) -> Result<Vec<Datastore>, StoreError> {
    let called = Called::of(what);
    let rows: Vec<Row> = sqlx::query_as(select!(
        "WHERE d.id = $1 OR (d.name = $2 AND (CAST($3 AS TEXT) IS NULL OR d.id IN (
             SELECT x.datastore_id FROM datastore_hosts x JOIN hosts y ON y.id = x.host_id
             WHERE x.name = $2 AND y.name = $3)))"
    ))
    .bind(what)
    .bind(called.name)
    .bind(called.host)
    .fetch_all(from)
    .await?;
    let mut found = gathered(rows)?;
    found.sort_by_key(Datastore::host_names);
    Ok(found)
}

/// The datastore that [`called`] finds, if any.
///
/// # Errors
/// `invalid-request` if there are several: vmseal does not guess.
pub async fn find(from: &mut SqliteConnection, what: &str) -> Result<Option<Datastore>, Problem> {
    let mut found = called(from, what).await?;
    if found.len() > 1 {
        let first = |it: &Datastore| {
            let host = it.hosts.first().map_or("", |on| on.host_name.as_str());
            format!("{host}:{}", it.name)
        };
        let all: Vec<_> = found.iter().map(first).collect();
        let detail = format!("several datastores have the name '{what}': say {}", all.join(" or "));
        return Err(Problem::new(ErrorCode::InvalidRequest, detail));
    }
    Ok(found.pop())
}

/// Datastores in order of their ids.
pub async fn list(from: &mut SqliteConnection, part: &Part) -> Result<Vec<Datastore>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(select!(
        "WHERE d.id IN (SELECT id FROM datastores WHERE id > $1 ORDER BY id LIMIT $2)"
    ))
    .bind(&part.after)
    .bind(part.limit)
    .fetch_all(from)
    .await?;
    gathered(rows)
}

/// The datastores of a host, with all their hosts.
pub async fn of_host(
    from: &mut SqliteConnection,
    host: HostId,
) -> Result<Vec<Datastore>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(select!(
        "WHERE d.id IN (SELECT datastore_id FROM datastore_hosts WHERE host_id = $1)"
    ))
    .bind(host.to_string())
    .fetch_all(from)
    .await?;
    gathered(rows)
}

/// The VMs of a host that have a disk or a replica on a datastore, in the order of their names, which are with them.
pub async fn vms_of_host(
    from: &mut SqliteConnection,
    datastore: DatastoreId,
    host: HostId,
) -> Result<Vec<(VmId, String)>, StoreError> {
    let rows: Vec<(String, String)> = sqlx::query_as(
        "SELECT DISTINCT v.id, v.name
         FROM volumes i JOIN disks d ON d.id = i.disk_id JOIN vms v ON v.id = d.vm_id
              JOIN placements o ON o.vm_id = v.id
         WHERE i.datastore_id = $1 AND o.host_id = $2 ORDER BY v.name",
    )
    .bind(datastore.to_string())
    .bind(host.to_string())
    .fetch_all(from)
    .await?;
    rows.into_iter().map(|(id, name)| Ok((parse(&id, "a VM's id")?, name))).collect()
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
