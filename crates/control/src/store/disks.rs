//! Virtual disks.

use std::collections::HashMap;
use std::fmt;

use sqlx::{FromRow, SqliteConnection};
use vmseal_api::host::{
    Allocation, DatastoreLocation, DatastoreSpec, DiskFacts, DiskLimits, DiskRole, ImageSource,
};
use vmseal_api::id::{DatastoreId, DiskId, HostId, VmId};
use vmseal_api::image_layout::ImageLayout;
use vmseal_api::replica::ReplicaPlace;
use vmseal_api::transfer::ImageFormat;

use super::{
    FIRST_GENERATION, Part, StoreError, from_json, from_name, parse, to_json, to_name, unsigned,
};

/// The role of the volume that a disk's guest reads and writes.
const IMAGE: &str = "image";

/// The role of a disk's second copy.
const REPLICA: &str = "replica";

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
    /// What it is for.
    pub role: DiskRole,
    /// Its provisioning.
    pub allocation: Allocation,
    /// The limits of its guest.
    pub limits: DiskLimits,
    /// The size of its cache in its filter, in bytes.
    pub cache: Option<u64>,
    /// The datastore of its replica, and that datastore's name.
    pub replica: Option<(ReplicaPlace, String)>,
    /// The image that it is filled from.
    pub image: Option<ImageSource>,
    /// The recorded facts about it; `None` until it is created.
    pub facts: Option<DiskFacts>,
    /// Whether its host has been asked to delete it.
    pub deleting: bool,
    /// Whether a task adds or removes it: its VM does not have it.
    pub detached: bool,
}

impl Disk {
    /// The places that it is on: that of its image, and that of its replica.
    pub fn places(&self) -> impl Iterator<Item = Place<'_>> {
        let image = Place {
            disk: self,
            is_replica: false,
            datastore: &self.datastore,
            datastore_name: &self.datastore_name,
        };
        let replica = self.replica.as_ref().map(|(place, name)| Place {
            disk: self,
            is_replica: true,
            datastore: &place.datastore,
            datastore_name: name,
        });
        [Some(image), replica].into_iter().flatten()
    }

    /// The datastores that it is on, with their names: that of its image, and that of its replica.
    pub fn datastores(&self) -> impl Iterator<Item = (DatastoreId, &str)> {
        self.places().map(|place| (place.datastore.datastore, place.datastore_name))
    }
}

/// A place that a disk is on.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    disk: &'a Disk,
    is_replica: bool,
    /// The datastore.
    pub datastore: &'a DatastoreSpec,
    /// The datastore's name.
    pub datastore_name: &'a str,
}

impl Place<'_> {
    /// What of the disk is there.
    #[must_use]
    pub fn part(&self) -> DiskPart {
        let disk = self.disk.name.clone();
        if self.is_replica { DiskPart::Replica(disk) } else { DiskPart::Image(disk) }
    }
}

/// A part of a disk of this name that is at a place of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskPart {
    /// Its image.
    Image(String),
    /// Its replica.
    Replica(String),
}

impl DiskPart {
    /// The disk's name.
    #[must_use]
    pub fn disk(&self) -> &str {
        match self {
            Self::Image(disk) | Self::Replica(disk) => disk,
        }
    }

    /// The same as it is called beside its VM.
    #[must_use]
    pub fn of_vm(&self) -> String {
        match self {
            Self::Image(disk) => format!("its disk '{disk}'"),
            Self::Replica(disk) => format!("the replica of its disk '{disk}'"),
        }
    }

    /// What has it in another datastore, where a policy of this name does not allow the one that it is in.
    #[must_use]
    pub fn elsewhere(&self, policy: &str) -> String {
        match self {
            Self::Image(_) => "choose another datastore (vmseal vm move)".to_owned(),
            Self::Replica(_) => format!(
                "choose another datastore for replicas (vmseal policy set {policy} --replicate-to NAME: of disks that are made from now on)"
            ),
        }
    }
}

impl fmt::Display for DiskPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Image(disk) => write!(f, "disk '{disk}'"),
            Self::Replica(disk) => write!(f, "the replica of disk '{disk}'"),
        }
    }
}

#[derive(FromRow)]
struct Row {
    vm_id: String,
    id: String,
    name: String,
    datastore_id: String,
    datastore_name: String,
    location: String,
    size: i64,
    encrypted: bool,
    role: String,
    allocation: String,
    limits: String,
    cache: Option<i64>,
    replica_id: Option<String>,
    replica_name: Option<String>,
    replica_location: Option<String>,
    replica_rate: Option<i64>,
    image: Option<String>,
    image_format: Option<String>,
    image_forced: bool,
    facts: Option<String>,
    deleting: bool,
    detached: bool,
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

/// The locations of a VM's disks are those on the host that owns it.
macro_rules! select {
    ($rest:literal) => {
        concat!(
            "SELECT d.vm_id, d.id, d.name, i.datastore_id, s.name AS datastore_name, s.location, d.size,
                    d.encrypted, d.role, d.allocation, d.limits, d.cache, d.image, d.image_format,
                    d.image_forced, i.facts,
                    d.deleting, d.detached, r.datastore_id AS replica_id, d.replica_rate,
                    t.name AS replica_name, t.location AS replica_location
             FROM disks d JOIN placements o ON o.vm_id = d.vm_id AND o.role = 'owner'
                  JOIN volumes i ON i.disk_id = d.id AND i.role = 'image'
                  JOIN datastore_hosts s
                       ON s.datastore_id = i.datastore_id AND s.host_id = o.host_id
                  LEFT JOIN volumes r ON r.disk_id = d.id AND r.role = 'replica'
                  LEFT JOIN datastore_hosts t
                       ON t.datastore_id = r.datastore_id AND t.host_id = o.host_id ",
            $rest
        )
    };
}

impl Row {
    fn read(self) -> Result<(VmId, Disk), StoreError> {
        let row = self;
        let vm = parse(&row.vm_id, "a VM's id")?;
        let datastore: DatastoreId = parse(&row.datastore_id, "a datastore's id")?;
        let location: DatastoreLocation = from_json(&row.location, "a datastore's location")?;
        let format = match &row.image_format {
            Some(name) => from_name(name, "an image's format")?,
            None => ImageFormat::Raw,
        };
        let replica = row.replica()?;
        let disk = Disk {
            id: parse(&row.id, "a disk's id")?,
            name: row.name,
            datastore: DatastoreSpec { datastore, location },
            datastore_name: row.datastore_name,
            size: unsigned(row.size, "a disk's size")?,
            encrypted: row.encrypted,
            role: from_name(&row.role, "a disk's role")?,
            allocation: from_name(&row.allocation, "an allocation")?,
            limits: from_json(&row.limits, "a disk's limits")?,
            cache: row.cache.map(|bytes| unsigned(bytes, "a disk's cache")).transpose()?,
            replica,
            image: row.image.map(|path| ImageSource {
                path: path.into(),
                format,
                force: row.image_forced,
            }),
            facts: row
                .facts
                .map(|json| from_json(&json, "what is pinned of a disk"))
                .transpose()?,
            deleting: row.deleting,
            detached: row.detached,
        };
        Ok((vm, disk))
    }
}

/// Adds a disk that does not exist yet.
pub async fn insert(
    to: &mut SqliteConnection,
    vm: VmId,
    position: usize,
    disk: &Disk,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO disks (id, vm_id, position, name, size, encrypted, image, image_format,
                            allocation, limits, cache, replica_rate, role, detached, image_forced)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)",
    )
    .bind(disk.id.to_string())
    .bind(vm.to_string())
    .bind(i64::try_from(position).unwrap_or(i64::MAX))
    .bind(&disk.name)
    .bind(i64::try_from(disk.size).unwrap_or(i64::MAX))
    .bind(disk.encrypted)
    .bind(disk.image.as_ref().map(|image| image.path.to_string_lossy()))
    .bind(disk.image.as_ref().map(|image| image.format.name()))
    .bind(to_name(&disk.allocation))
    .bind(to_json(&disk.limits))
    .bind(disk.cache.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX)))
    .bind(disk.replica.as_ref().map(|(place, _)| {
        // At most LIMIT_MAX.
        i64::try_from(place.bytes_per_second).unwrap_or(i64::MAX)
    }))
    .bind(to_name(&disk.role))
    .bind(disk.detached)
    .bind(disk.image.as_ref().is_some_and(|image| image.force))
    .execute(&mut *to)
    .await?;
    insert_volume(to, disk.id, IMAGE, disk.datastore.datastore).await?;
    if let Some((place, _)) = &disk.replica {
        insert_volume(to, disk.id, REPLICA, place.datastore.datastore).await?;
    }
    Ok(())
}

async fn insert_volume(
    to: &mut SqliteConnection,
    disk: DiskId,
    role: &str,
    datastore: DatastoreId,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO volumes (disk_id, role, datastore_id, generation) VALUES ($1, $2, $3, $4)",
    )
    .bind(disk.to_string())
    .bind(role)
    .bind(datastore.to_string())
    .bind(FIRST_GENERATION)
    .execute(to)
    .await?;
    Ok(())
}

/// The disks of the VMs of a page, by VM, in boot order: one query, however many VMs there are.
pub async fn of_part(
    from: &mut SqliteConnection,
    part: &Part,
) -> Result<HashMap<VmId, Vec<Disk>>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(select!(
        "WHERE d.vm_id IN (SELECT id FROM vms WHERE id > $1 ORDER BY id LIMIT $2) ORDER BY d.position"
    ))
    .bind(&part.after)
    .bind(part.limit)
    .fetch_all(from)
    .await?;
    by_vm(rows)
}

fn by_vm(rows: Vec<Row>) -> Result<HashMap<VmId, Vec<Disk>>, StoreError> {
    let mut disks: HashMap<VmId, Vec<Disk>> = HashMap::new();
    for row in rows {
        let (vm, disk) = row.read()?;
        disks.entry(vm).or_default().push(disk);
    }
    Ok(disks)
}

/// The disks of those VMs of a host whose policies require something that raises alarms, by VM, in boot order.
pub async fn watched_on(
    from: &mut SqliteConnection,
    host: HostId,
) -> Result<HashMap<VmId, Vec<Disk>>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(select!(
        "WHERE o.host_id = $1 AND EXISTS
             (SELECT 1 FROM vms v JOIN policies p ON p.id = v.policy_id
              WHERE v.id = d.vm_id
                    AND (p.messenger IS NOT NULL OR p.osd_encryption IS NOT NULL
                         OR p.redundancy IS NOT NULL))
         ORDER BY d.position"
    ))
    .bind(host.to_string())
    .fetch_all(from)
    .await?;
    by_vm(rows)
}

/// The disks of a VM, in boot order.
pub async fn of_vm(from: &mut SqliteConnection, vm: VmId) -> Result<Vec<Disk>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(select!("WHERE d.vm_id = $1 ORDER BY d.position"))
        .bind(vm.to_string())
        .fetch_all(from)
        .await?;
    rows.into_iter().map(|row| Ok(row.read()?.1)).collect()
}

/// Records the facts about a finished disk, whose image was made as its VM's policy has it.
pub async fn set_facts(
    to: &mut SqliteConnection,
    disk: DiskId,
    facts: &DiskFacts,
) -> Result<(), StoreError> {
    pin_facts(to, disk, facts).await?;
    note_layout(to, disk).await
}

/// Records that the image of a disk was made as its VM's policy has it.
pub async fn note_layout(to: &mut SqliteConnection, disk: DiskId) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE volumes SET image_layout =
             (SELECT COALESCE(p.image_layout, '{}') FROM disks d JOIN vms v ON v.id = d.vm_id
                     JOIN policies p ON p.id = v.policy_id WHERE d.id = volumes.disk_id)
         WHERE disk_id = $1 AND role = 'image'",
    )
    .bind(disk.to_string())
    .execute(to)
    .await?;
    Ok(())
}

/// Records the facts about a disk that was found.
pub async fn pin_facts(
    to: &mut SqliteConnection,
    disk: DiskId,
    facts: &DiskFacts,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE volumes SET facts = $1 WHERE disk_id = $2 AND role = 'image'")
        .bind(to_json(facts))
        .bind(disk.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// How the image of a disk is cut into objects, and how its VM's policy has it.
#[derive(Clone, Copy, Debug)]
pub struct Layouts {
    /// As the image was made; none where that is not known.
    pub image: Option<ImageLayout>,
    /// As the policy has it now.
    pub policy: ImageLayout,
}

/// The layouts of the disks of VMs from one to another, in order of their ids.
pub async fn image_layouts(
    from: &mut SqliteConnection,
    first: VmId,
    last: VmId,
) -> Result<HashMap<DiskId, Layouts>, StoreError> {
    let rows: Vec<(String, Option<String>, Option<String>)> = sqlx::query_as(
        "SELECT d.id, i.image_layout, p.image_layout
         FROM disks d JOIN volumes i ON i.disk_id = d.id AND i.role = 'image'
              JOIN vms v ON v.id = d.vm_id JOIN policies p ON p.id = v.policy_id
         WHERE d.vm_id >= $1 AND d.vm_id <= $2",
    )
    .bind(first.to_string())
    .bind(last.to_string())
    .fetch_all(from)
    .await?;
    let read = |(id, image, policy): (String, Option<String>, Option<String>)| {
        let layout = |json: Option<String>| {
            json.map(|json| from_json::<ImageLayout>(&json, "how an image is cut")).transpose()
        };
        let policy = layout(policy)?.unwrap_or_default();
        Ok::<_, StoreError>((parse(&id, "a disk's id")?, Layouts { image: layout(image)?, policy }))
    };
    rows.into_iter().map(read).collect()
}

/// Records that a disk has another image, which is encrypted or not, and the facts about it.
pub async fn set_image(
    to: &mut SqliteConnection,
    disk: DiskId,
    encrypted: bool,
    facts: &DiskFacts,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE disks SET encrypted = $1 WHERE id = $2")
        .bind(encrypted)
        .bind(disk.to_string())
        .execute(&mut *to)
        .await?;
    pin_facts(to, disk, facts).await
}

/// Records that the image of a disk is on another datastore.
pub async fn set_datastore(
    to: &mut SqliteConnection,
    disk: DiskId,
    datastore: DatastoreId,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE volumes SET datastore_id = $1 WHERE disk_id = $2 AND role = 'image'")
        .bind(datastore.to_string())
        .bind(disk.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Records whether a VM has a disk.
pub async fn set_detached(
    to: &mut SqliteConnection,
    disk: DiskId,
    detached: bool,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE disks SET detached = $1 WHERE id = $2")
        .bind(detached)
        .bind(disk.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Records the size of a disk, in bytes.
pub async fn set_size(
    to: &mut SqliteConnection,
    disk: DiskId,
    size: u64,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE disks SET size = $1 WHERE id = $2")
        .bind(i64::try_from(size).unwrap_or(i64::MAX))
        .bind(disk.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Records the limits and the cache of a disk.
pub async fn set_settings(
    to: &mut SqliteConnection,
    disk: DiskId,
    limits: DiskLimits,
    cache: Option<u64>,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE disks SET limits = $1, cache = $2 WHERE id = $3")
        .bind(to_json(&limits))
        .bind(cache.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX)))
        .bind(disk.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// The place behind the last disk of a VM.
pub async fn next_position(from: &mut SqliteConnection, vm: VmId) -> Result<usize, StoreError> {
    let next: i64 =
        sqlx::query_scalar("SELECT COALESCE(MAX(position) + 1, 0) FROM disks WHERE vm_id = $1")
            .bind(vm.to_string())
            .fetch_one(from)
            .await?;
    Ok(usize::try_from(next).unwrap_or(0))
}

/// Removes a disk whose image is gone.
pub async fn delete(to: &mut SqliteConnection, disk: DiskId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM disks WHERE id = $1").bind(disk.to_string()).execute(to).await?;
    Ok(())
}

/// Records that a disk may be gone from now on, or that it certainly is not.
pub async fn set_deleting(
    to: &mut SqliteConnection,
    disk: DiskId,
    deleting: bool,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE disks SET deleting = $1 WHERE id = $2")
        .bind(deleting)
        .bind(disk.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// The names of the disks of a host's VMs.
pub async fn names_on_host(
    from: &mut SqliteConnection,
    host: HostId,
) -> Result<HashMap<DiskId, String>, StoreError> {
    let rows: Vec<(String, String)> = sqlx::query_as(
        "SELECT d.id, d.name FROM placements o JOIN disks d ON d.vm_id = o.vm_id
         WHERE o.host_id = $1 AND o.role = 'owner'",
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
    /// The recorded facts about it, as JSON; `None` until it is created.
    pub facts: Option<String>,
    /// Whether it was created, and its host has not been asked to delete it.
    pub whole: bool,
}

impl Placed {
    /// The minimum length of its image, in bytes; `None` until it is created, or if the recorded facts cannot be
    /// read: the start of its VM reports that.
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
        "SELECT d.id, d.name, d.vm_id, v.name AS vm_name, i.datastore_id,
                s.name AS datastore_name, r.datastore_id AS replica_id, d.encrypted, d.size, i.facts,
                i.facts IS NOT NULL AND NOT d.deleting AS whole
         FROM disks d JOIN vms v ON v.id = d.vm_id
              JOIN volumes i ON i.disk_id = d.id AND i.role = 'image'
              JOIN datastores s ON s.id = i.datastore_id
              LEFT JOIN volumes r ON r.disk_id = d.id AND r.role = 'replica'
         ORDER BY v.name, d.position",
    )
    .fetch_all(from)
    .await?)
}
