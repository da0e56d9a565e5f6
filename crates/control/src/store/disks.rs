//! Virtual disks.

use std::collections::HashMap;

use sqlx::{FromRow, SqliteConnection};
use vmseal_api::host::{
    Allocation, DatastoreLocation, DatastoreSpec, DiskFacts, DiskLimits, ImageSource,
};
use vmseal_api::id::{DatastoreId, DiskId, HostId, VmId};
use vmseal_api::replica::ReplicaPlace;
use vmseal_api::transfer::ImageFormat;

use super::{StoreError, from_json, from_name, parse, to_json, to_name, unsigned};

/// A disk as the inventory has it.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Its id.
    pub id: DiskId,
    /// Its name within the VM.
    pub name: String,
    /// The datastore.
    pub datastore: DatastoreSpec,
    /// The datastore's name.
    pub datastore_name: String,
    /// Size in bytes.
    pub size: u64,
    /// Whether it is encrypted.
    pub encrypted: bool,
    /// When it takes room.
    pub allocation: Allocation,
    /// What its guest may use of it.
    pub limits: DiskLimits,
    /// What its filter keeps of it in memory, in bytes.
    pub cache: Option<u64>,
    /// Where its second copy is, and what that datastore is called.
    pub replica: Option<(ReplicaPlace, String)>,
    /// What it is to be filled from.
    pub image: Option<ImageSource>,
    /// What is pinned of it; none until it is made.
    pub facts: Option<DiskFacts>,
    /// Whether its host has been asked to delete it.
    pub deleting: bool,
}

#[derive(FromRow)]
struct Row {
    id: String,
    name: String,
    datastore_id: String,
    datastore_name: String,
    location: String,
    size: i64,
    encrypted: bool,
    allocation: String,
    limits: String,
    cache: Option<i64>,
    replica_id: Option<String>,
    replica_name: Option<String>,
    replica_location: Option<String>,
    replica_rate: Option<i64>,
    image: Option<String>,
    image_format: Option<String>,
    facts: Option<String>,
    deleting: bool,
}

impl Row {
    fn replica(&self) -> Result<Option<(ReplicaPlace, String)>, StoreError> {
        let (Some(id), Some(name), Some(location), Some(rate)) =
            (&self.replica_id, &self.replica_name, &self.replica_location, self.replica_rate)
        else {
            return Ok(None);
        };
        let datastore = DatastoreSpec {
            datastore: parse(id, "the id of a replica's datastore")?,
            location: from_json(location, "the location of a replica's datastore")?,
        };
        let bytes_per_second = unsigned(rate, "the rate of a replica")?;
        Ok(Some((ReplicaPlace { datastore, bytes_per_second }, name.clone())))
    }
}

impl TryFrom<Row> for Disk {
    type Error = StoreError;
    fn try_from(row: Row) -> Result<Self, StoreError> {
        let datastore: DatastoreId = parse(&row.datastore_id, "a datastore's id")?;
        let location: DatastoreLocation = from_json(&row.location, "a datastore's location")?;
        let format = match &row.image_format {
            Some(name) => from_name(name, "an image's format")?,
            None => ImageFormat::Raw,
        };
        let replica = row.replica()?;
        Ok(Self {
            id: parse(&row.id, "a disk's id")?,
            name: row.name,
            datastore: DatastoreSpec { datastore, location },
            datastore_name: row.datastore_name,
            size: unsigned(row.size, "a disk's size")?,
            encrypted: row.encrypted,
            allocation: from_name(&row.allocation, "an allocation")?,
            limits: from_json(&row.limits, "a disk's limits")?,
            cache: row.cache.map(|bytes| unsigned(bytes, "a disk's cache")).transpose()?,
            replica,
            image: row.image.map(|path| ImageSource { path: path.into(), format }),
            facts: row
                .facts
                .map(|json| from_json(&json, "what is pinned of a disk"))
                .transpose()?,
            deleting: row.deleting,
        })
    }
}

/// Adds a disk that is to be made.
pub async fn insert(
    to: &mut SqliteConnection,
    vm: VmId,
    position: usize,
    disk: &Disk,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO disks (id, vm_id, position, name, datastore_id, size, encrypted, image,
                            image_format, allocation, limits, cache, replica_id, replica_rate)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    )
    .bind(disk.id.to_string())
    .bind(vm.to_string())
    .bind(i64::try_from(position).unwrap_or(i64::MAX))
    .bind(&disk.name)
    .bind(disk.datastore.datastore.to_string())
    .bind(i64::try_from(disk.size).unwrap_or(i64::MAX))
    .bind(disk.encrypted)
    .bind(disk.image.as_ref().map(|image| image.path.to_string_lossy()))
    .bind(disk.image.as_ref().map(|image| image.format.name()))
    .bind(to_name(&disk.allocation))
    .bind(to_json(&disk.limits))
    .bind(disk.cache.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX)))
    .bind(disk.replica.as_ref().map(|(place, _)| place.datastore.datastore.to_string()))
    .bind(disk.replica.as_ref().map(|(place, _)| {
        // At most LIMIT_MAX.
        i64::try_from(place.bytes_per_second).unwrap_or(i64::MAX)
    }))
    .execute(to)
    .await?;
    Ok(())
}

/// The disks of a VM, in boot order.
pub async fn of_vm(from: &mut SqliteConnection, vm: VmId) -> Result<Vec<Disk>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT d.id, d.name, d.datastore_id, s.name AS datastore_name, s.location, d.size,
                d.encrypted, d.allocation, d.limits, d.cache, d.image, d.image_format, d.facts,
                d.deleting, d.replica_id, d.replica_rate, r.name AS replica_name,
                r.location AS replica_location
         FROM disks d JOIN datastores s ON s.id = d.datastore_id
              LEFT JOIN datastores r ON r.id = d.replica_id
         WHERE d.vm_id = ? ORDER BY d.position",
    )
    .bind(vm.to_string())
    .fetch_all(from)
    .await?;
    rows.into_iter().map(Disk::try_from).collect()
}

/// Pins what is known of a finished disk.
pub async fn set_facts(
    to: &mut SqliteConnection,
    disk: DiskId,
    facts: &DiskFacts,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE disks SET facts = ? WHERE id = ?")
        .bind(to_json(facts))
        .bind(disk.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Notes that a disk may be gone from now on, or that it certainly is not.
pub async fn set_deleting(
    to: &mut SqliteConnection,
    disk: DiskId,
    deleting: bool,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE disks SET deleting = ? WHERE id = ?")
        .bind(deleting)
        .bind(disk.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// What the disks of a host's VMs are called.
pub async fn names_on_host(
    from: &mut SqliteConnection,
    host: HostId,
) -> Result<HashMap<DiskId, String>, StoreError> {
    let rows: Vec<(String, String)> = sqlx::query_as(
        "SELECT d.id, d.name FROM disks d JOIN vms v ON v.id = d.vm_id WHERE v.host_id = ?",
    )
    .bind(host.to_string())
    .fetch_all(from)
    .await?;
    rows.into_iter().map(|(id, name)| Ok((parse(&id, "a disk's id")?, name))).collect()
}

/// A disk of the inventory, as a scan of a datastore needs it.
#[derive(Clone, Debug, FromRow)]
pub struct Placed {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its VM's id.
    pub vm_id: String,
    /// Its VM's name.
    pub vm_name: String,
    /// Its datastore's id.
    pub datastore_id: String,
    /// Its datastore's name.
    pub datastore_name: String,
    /// The id of its replica's datastore.
    pub replica_id: Option<String>,
    /// Whether it is encrypted.
    pub encrypted: bool,
    /// Its size, in bytes.
    pub size: i64,
    /// What is pinned of it, as JSON; none until it is made.
    pub facts: Option<String>,
    /// Whether it has been made, and its host has not been asked to delete it.
    pub whole: bool,
}

impl Placed {
    /// How long its image is at least, in bytes; none until it is made, or where what is pinned of it cannot be
    /// read: the start of its VM says so.
    #[must_use]
    pub fn image_length(&self) -> Option<u64> {
        let facts: DiskFacts = serde_json::from_str(self.facts.as_deref()?).ok()?;
        let offset = match facts {
            DiskFacts::Raw => 0,
            DiskFacts::Luks2 { data_offset, .. } => data_offset,
        };
        u64::try_from(self.size).ok()?.checked_add(offset)
    }
}

/// All disks.
pub async fn placed(from: &mut SqliteConnection) -> Result<Vec<Placed>, StoreError> {
    Ok(sqlx::query_as(
        "SELECT d.id, d.name, d.vm_id, v.name AS vm_name, d.datastore_id,
                s.name AS datastore_name, d.replica_id, d.encrypted, d.size, d.facts,
                d.facts IS NOT NULL AND d.deleting = 0 AS whole
         FROM disks d JOIN vms v ON v.id = d.vm_id JOIN datastores s ON s.id = d.datastore_id
         ORDER BY v.name, d.position",
    )
    .fetch_all(from)
    .await?)
}
