//! Storage policies.

use sqlx::{FromRow, SqliteConnection};
use vmseal_api::datastore::{Messenger, RbdPool};
use vmseal_api::host::{Allocation, DiskLimits};
use vmseal_api::id::{PolicyId, ProviderId};
use vmseal_api::image_layout::ImageLayout;
use vmseal_api::model::Replication;
use vmseal_api::osd_encryption::AskedOsds;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::redundancy::Redundancy;

use super::disks::{Disk, Place};
use super::{Part, StoreError, from_json, from_name, parse, taken, to_json, to_name, unsigned};

/// A policy as the inventory has it.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Its id.
    pub id: PolicyId,
    /// Its name.
    pub name: String,
    /// Whether its disks are encrypted.
    pub encryption: bool,
    /// The provider of the keys, by id and name; none means the default one.
    pub provider: Option<(ProviderId, String)>,
    /// The provisioning of disks.
    pub allocation: Allocation,
    /// The limits of guests, for each disk.
    pub limits: DiskLimits,
    /// The size of each disk's cache in its filter, in bytes.
    pub cache: Option<u64>,
    /// The datastore of replicas.
    pub replica: Option<Replication>,
    /// The processor model of its VMs; none leaves it to each.
    pub cpu_model: Option<String>,
    /// The longest that a guest is to stand still while the rest of its memory is sent to another host, in milliseconds; none is the
    /// usual limit.
    pub downtime_milliseconds: Option<u32>,
    /// How data must go between hosts and Ceph clusters; none asks for nothing.
    pub messenger: Option<Messenger>,
    /// What the OSDs of Ceph clusters must be; none asks for nothing.
    pub osd_encryption: Option<AskedOsds>,
    /// What failures its disks must outlive.
    pub redundancy: Redundancy,
    /// How images of its disks in pools of Ceph are cut into objects.
    pub image_layout: ImageLayout,
}

impl Policy {
    /// Refuses disks in pools of Ceph whose connections are not as the policy has it.
    ///
    /// # Errors
    /// `wrong-state`, with what may be done.
    pub fn require_messenger(&self, disks: &[Disk]) -> Result<(), Problem> {
        match self.open_connection(disks) {
            None => Ok(()),
            Some((place, pool)) => {
                let (policy, part) = (&self.name, place.part());
                let detail = format!(
                    "policy '{policy}' has disks in pools of Ceph only where connections are encrypted, and {part} is in pool '{}' with messenger 'crc'. Have hosts encrypt them (vmseal datastore set {} --messenger secure), {}, or change the policy (vmseal policy set {policy} --messenger any)",
                    pool.pool,
                    place.datastore_name,
                    part.elsewhere(policy)
                );
                Err(Problem::new(ErrorCode::WrongState, detail))
            }
        }
    }

    /// Whether disks in pools of Ceph must be on encrypted OSDs.
    #[must_use]
    pub fn needs_encrypted_osds(&self) -> bool {
        self.osd_encryption == Some(AskedOsds::Required)
    }

    /// Where a disk, or its replica, goes over connections that are not as the policy has it, and the pool.
    fn open_connection<'a>(&self, disks: &'a [Disk]) -> Option<(Place<'a>, &'a RbdPool)> {
        if self.messenger != Some(Messenger::Secure) {
            return None;
        }
        let places = disks.iter().flat_map(Disk::places);
        let mut pools = places.filter_map(|place| Some((place, place.datastore.location.pool()?)));
        pools.find(|(_, pool)| pool.messenger != Messenger::Secure)
    }
}

#[derive(FromRow)]
struct Row {
    id: String,
    name: String,
    encryption: bool,
    provider_id: Option<String>,
    provider_name: Option<String>,
    allocation: String,
    limits: String,
    cache: Option<i64>,
    replica: Option<String>,
    cpu_model: Option<String>,
    downtime: Option<i64>,
    messenger: Option<String>,
    osd_encryption: Option<String>,
    redundancy: Option<String>,
    image_layout: Option<String>,
}

impl TryFrom<Row> for Policy {
    type Error = StoreError;
    fn try_from(row: Row) -> Result<Self, StoreError> {
        let provider = match (row.provider_id, row.provider_name) {
            (Some(id), Some(name)) => Some((parse(&id, "a provider's id")?, name)),
            _ => None,
        };
        Ok(Self {
            id: parse(&row.id, "a policy's id")?,
            name: row.name,
            encryption: row.encryption,
            provider,
            allocation: from_name(&row.allocation, "an allocation")?,
            limits: from_json(&row.limits, "a policy's limits")?,
            cache: row.cache.map(|bytes| unsigned(bytes, "a policy's cache")).transpose()?,
            replica: row.replica.map(|json| from_json(&json, "a policy's replica")).transpose()?,
            cpu_model: row.cpu_model,
            downtime_milliseconds: row.downtime.map(downtime).transpose()?,
            messenger: row
                .messenger
                .map(|name| from_name(&name, "a policy's messenger"))
                .transpose()?,
            osd_encryption: row
                .osd_encryption
                .map(|name| from_name(&name, "what a policy asks of OSDs"))
                .transpose()?,
            redundancy: row
                .redundancy
                .map(|json| from_json(&json, "a policy's redundancy"))
                .transpose()?
                .unwrap_or_default(),
            image_layout: row
                .image_layout
                .map(|json| from_json(&json, "how a policy has images cut"))
                .transpose()?
                .unwrap_or_default(),
        })
    }
}

fn downtime(value: i64) -> Result<u32, StoreError> {
    let expected = "a policy's downtime";
    value.try_into().map_err(|_| StoreError::Unreadable { value: value.to_string(), expected })
}

/// Adds a policy.
pub async fn insert(to: &mut SqliteConnection, policy: &Policy) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO policies (id, name, encryption, provider_id, allocation, limits, cache,
                               replica, cpu_model, downtime, messenger, redundancy, image_layout,
                               osd_encryption)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)",
    )
    .bind(policy.id.to_string())
    .bind(&policy.name)
    .bind(policy.encryption)
    .bind(policy.provider.as_ref().map(|(id, _)| id.to_string()))
    .bind(to_name(&policy.allocation))
    .bind(to_json(&policy.limits))
    .bind(policy.cache.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX)))
    .bind(policy.replica.as_ref().map(to_json))
    .bind(&policy.cpu_model)
    .bind(policy.downtime_milliseconds)
    .bind(policy.messenger.as_ref().map(to_name))
    .bind((!policy.redundancy.is_nothing()).then(|| to_json(&policy.redundancy)))
    .bind((!policy.image_layout.is_usual()).then(|| to_json(&policy.image_layout)))
    .bind(policy.osd_encryption.as_ref().map(to_name))
    .execute(to)
    .await
    .map_err(taken(|| format!("a policy '{}'", policy.name)))?;
    Ok(())
}

/// A policy by its name or id.
pub async fn find(
    from: &mut SqliteConnection,
    name_or_id: &str,
) -> Result<Option<Policy>, StoreError> {
    let row: Option<Row> = sqlx::query_as(
        "SELECT p.id, p.name, p.encryption, p.provider_id, k.name AS provider_name, p.allocation,
                p.limits, p.cache, p.replica, p.cpu_model, p.downtime, p.messenger, p.redundancy,
                p.image_layout, p.osd_encryption
         FROM policies p LEFT JOIN providers k ON k.id = p.provider_id
         WHERE p.name = $1 OR p.id = $2",
    )
    .bind(name_or_id)
    .bind(name_or_id)
    .fetch_optional(from)
    .await?;
    row.map(Policy::try_from).transpose()
}

/// Policies in order of their ids.
pub async fn list(from: &mut SqliteConnection, part: &Part) -> Result<Vec<Policy>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT p.id, p.name, p.encryption, p.provider_id, k.name AS provider_name, p.allocation,
                p.limits, p.cache, p.replica, p.cpu_model, p.downtime, p.messenger, p.redundancy,
                p.image_layout, p.osd_encryption
         FROM policies p LEFT JOIN providers k ON k.id = p.provider_id
         WHERE p.id > $1 ORDER BY p.id LIMIT $2",
    )
    .bind(&part.after)
    .bind(part.limit)
    .fetch_all(from)
    .await?;
    rows.into_iter().map(Policy::try_from).collect()
}

/// Records what users change of a policy.
///
/// # Errors
/// [`StoreError::Taken`]: another policy has its name.
pub async fn set(to: &mut SqliteConnection, policy: &Policy) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE policies SET name = $1, encryption = $2, provider_id = $3, allocation = $4,
                             limits = $5, cache = $6, replica = $7, cpu_model = $8, downtime = $9,
                             messenger = $10, redundancy = $11, image_layout = $12,
                             osd_encryption = $13
         WHERE id = $14",
    )
    .bind(&policy.name)
    .bind(policy.encryption)
    .bind(policy.provider.as_ref().map(|(id, _)| id.to_string()))
    .bind(to_name(&policy.allocation))
    .bind(to_json(&policy.limits))
    .bind(policy.cache.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX)))
    .bind(policy.replica.as_ref().map(to_json))
    .bind(&policy.cpu_model)
    .bind(policy.downtime_milliseconds)
    .bind(policy.messenger.as_ref().map(to_name))
    .bind((!policy.redundancy.is_nothing()).then(|| to_json(&policy.redundancy)))
    .bind((!policy.image_layout.is_usual()).then(|| to_json(&policy.image_layout)))
    .bind(policy.osd_encryption.as_ref().map(to_name))
    .bind(policy.id.to_string())
    .execute(to)
    .await
    .map_err(taken(|| format!("a policy '{}'", policy.name)))?;
    Ok(())
}

/// How many VMs have a policy.
pub async fn uses(from: &mut SqliteConnection, policy: PolicyId) -> Result<i64, StoreError> {
    Ok(sqlx::query_scalar("SELECT COUNT(*) FROM vms WHERE policy_id = $1")
        .bind(policy.to_string())
        .fetch_one(from)
        .await?)
}

/// Removes a policy.
pub async fn delete(to: &mut SqliteConnection, policy: PolicyId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM policies WHERE id = $1").bind(policy.to_string()).execute(to).await?;
    Ok(())
}
