//! Virtual machines.

use std::collections::BTreeMap;

use sqlx::{FromRow, SqliteConnection};
use vmseal_api::drain::OnDrain;
use vmseal_api::hardware::Hardware;
use vmseal_api::host::{KeyReference, Power, Stopped};
use vmseal_api::id::{HostId, PolicyId, ProviderId, VmId};
use vmseal_api::migration::MigrationEncryption;
use vmseal_api::model::Lifecycle;

use super::{
    FIRST_GENERATION, Part, StoreError, from_json, from_name, parse, taken, to_json, to_name,
    unsigned,
};

/// A VM as the inventory has it, without its disks.
#[derive(Clone, Debug)]
pub struct Vm {
    /// Its id.
    pub id: VmId,
    /// Its name.
    pub name: String,
    /// What it is for, in its users' words.
    pub description: String,
    /// Its labels, by key.
    pub labels: BTreeMap<String, String>,
    /// Whether it is started after its host has rebooted.
    pub autostart: bool,
    /// Whether what it is sent with to another host is encrypted.
    pub migration_encryption: MigrationEncryption,
    /// What happens to it while it runs when its host is emptied.
    pub on_drain: OnDrain,
    /// Whether it is a template: it is cloned, and neither started nor changed.
    pub template: bool,
    /// The host that it is on.
    pub host: HostId,
    /// That host's name.
    pub host_name: String,
    /// Its policy.
    pub policy: PolicyId,
    /// That policy's name.
    pub policy_name: String,
    /// Virtual processors.
    pub vcpus: u32,
    /// Memory in bytes.
    pub memory: u64,
    /// What its machine is.
    pub hardware: Hardware,
    /// The provider of its KEK; `None` if it is not encrypted.
    pub provider: Option<ProviderId>,
    /// Its KEK, once it is created.
    pub key: Option<KeyReference>,
    /// Its lifecycle.
    pub lifecycle: Lifecycle,
    /// Its power as last reported by its host.
    pub seen_power: Option<Power>,
    /// Why it stopped, as last reported by its host.
    pub seen_stopped: Option<Stopped>,
}

#[derive(FromRow)]
struct Row {
    id: String,
    name: String,
    description: String,
    labels: String,
    autostart: bool,
    migration_encryption: String,
    on_drain: String,
    template: bool,
    host_id: String,
    host_name: String,
    policy_id: String,
    policy_name: String,
    vcpus: u32,
    memory: i64,
    hardware: String,
    provider_id: Option<String>,
    key_id: Option<String>,
    key_check: Option<String>,
    lifecycle: String,
    seen_power: Option<String>,
    seen_stopped: Option<String>,
}

/// All columns, with the names of related resources.
macro_rules! select {
    ($rest:literal) => {
        concat!(
            "SELECT v.id, v.name, v.description, v.labels, v.autostart, v.migration_encryption, v.on_drain, v.template, o.host_id, h.name AS host_name, v.policy_id, p.name AS policy_name,
                    v.vcpus, v.memory, v.hardware, v.provider_id, v.key_id, v.key_check, v.lifecycle,
                    v.seen_power, v.seen_stopped
             FROM vms v JOIN placements o ON o.vm_id = v.id AND o.role = 'owner'
                  JOIN hosts h ON h.id = o.host_id JOIN policies p ON p.id = v.policy_id ",
            $rest
        )
    };
}

impl TryFrom<Row> for Vm {
    type Error = StoreError;
    fn try_from(row: Row) -> Result<Self, StoreError> {
        let provider: Option<ProviderId> =
            row.provider_id.map(|id| parse(&id, "a provider's id")).transpose()?;
        let key = match (provider, row.key_id, row.key_check) {
            (Some(provider), Some(key_id), Some(check)) => {
                Some(KeyReference { provider, key_id, check })
            }
            _ => None,
        };
        Ok(Self {
            id: parse(&row.id, "a VM's id")?,
            name: row.name,
            description: row.description,
            labels: from_json(&row.labels, "the labels of a VM")?,
            autostart: row.autostart,
            migration_encryption: from_name(&row.migration_encryption, "a mode of migrations")?,
            on_drain: from_name(&row.on_drain, "what happens to a VM when its host is emptied")?,
            template: row.template,
            host: parse(&row.host_id, "a host's id")?,
            host_name: row.host_name,
            policy: parse(&row.policy_id, "a policy's id")?,
            policy_name: row.policy_name,
            vcpus: row.vcpus,
            memory: unsigned(row.memory, "an amount of memory")?,
            hardware: from_json(&row.hardware, "what a VM's machine is")?,
            provider,
            key,
            lifecycle: from_name(&row.lifecycle, "a lifecycle")?,
            seen_power: row.seen_power.map(|name| from_name(&name, "a power state")).transpose()?,
            seen_stopped: row
                .seen_stopped
                .map(|json| from_json(&json, "why a VM stopped"))
                .transpose()?,
        })
    }
}

/// Adds a VM that does not exist yet.
pub async fn insert(to: &mut SqliteConnection, vm: &Vm) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO vms (id, name, policy_id, vcpus, memory, provider_id, lifecycle, hardware,
                          description, labels, autostart, template, migration_encryption,
                          on_drain)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)",
    )
    .bind(vm.id.to_string())
    .bind(&vm.name)
    .bind(vm.policy.to_string())
    .bind(vm.vcpus)
    .bind(i64::try_from(vm.memory).unwrap_or(i64::MAX))
    .bind(vm.provider.map(|id| id.to_string()))
    .bind(to_name(&vm.lifecycle))
    .bind(to_json(&vm.hardware))
    .bind(&vm.description)
    .bind(to_json(&vm.labels))
    .bind(vm.autostart)
    .bind(vm.template)
    .bind(to_name(&vm.migration_encryption))
    .bind(to_name(&vm.on_drain))
    .execute(&mut *to)
    .await
    .map_err(taken(|| format!("a VM '{}'", vm.name)))?;
    sqlx::query(
        "INSERT INTO placements (vm_id, role, host_id, generation) VALUES ($1, 'owner', $2, $3)",
    )
    .bind(vm.id.to_string())
    .bind(vm.host.to_string())
    .bind(FIRST_GENERATION)
    .execute(to)
    .await?;
    Ok(())
}

/// A VM by its name or id.
pub async fn find(from: &mut SqliteConnection, name_or_id: &str) -> Result<Option<Vm>, StoreError> {
    let row: Option<Row> = sqlx::query_as(select!("WHERE v.name = $1 OR v.id = $2"))
        .bind(name_or_id)
        .bind(name_or_id)
        .fetch_optional(from)
        .await?;
    row.map(Vm::try_from).transpose()
}

/// A VM by its id.
pub async fn get(from: &mut SqliteConnection, vm: VmId) -> Result<Option<Vm>, StoreError> {
    find(from, &vm.to_string()).await
}

/// VMs in order of their ids.
pub async fn list(from: &mut SqliteConnection, part: &Part) -> Result<Vec<Vm>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(select!("WHERE v.id > $1 ORDER BY v.id LIMIT $2"))
        .bind(&part.after)
        .bind(part.limit)
        .fetch_all(from)
        .await?;
    rows.into_iter().map(Vm::try_from).collect()
}

/// The VMs of a host.
pub async fn on_host(from: &mut SqliteConnection, host: HostId) -> Result<Vec<Vm>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(select!("WHERE o.host_id = $1 ORDER BY v.id"))
        .bind(host.to_string())
        .fetch_all(from)
        .await?;
    rows.into_iter().map(Vm::try_from).collect()
}

/// The VMs of a host in the order of their names, with their policies.
pub async fn policies_on(
    from: &mut SqliteConnection,
    host: HostId,
) -> Result<Vec<(VmId, String, PolicyId)>, StoreError> {
    let rows: Vec<(String, String, String)> = sqlx::query_as(
        "SELECT v.id, v.name, v.policy_id FROM placements o JOIN vms v ON v.id = o.vm_id
         WHERE o.host_id = $1 AND o.role = 'owner' ORDER BY v.name",
    )
    .bind(host.to_string())
    .fetch_all(from)
    .await?;
    let read = |(vm, name, policy): (String, String, String)| {
        let (vm, policy) = (parse(&vm, "a VM's id")?, parse(&policy, "a policy's id")?);
        Ok::<_, StoreError>((vm, name, policy))
    };
    rows.into_iter().map(read).collect()
}

/// The VMs that have a policy.
pub async fn of_policy(
    from: &mut SqliteConnection,
    policy: PolicyId,
) -> Result<Vec<Vm>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(select!("WHERE v.policy_id = $1 ORDER BY v.name"))
        .bind(policy.to_string())
        .fetch_all(from)
        .await?;
    rows.into_iter().map(Vm::try_from).collect()
}

/// Records what users change of a VM.
///
/// # Errors
/// [`StoreError::Taken`]: another VM has its name.
pub async fn set(to: &mut SqliteConnection, vm: &Vm) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE vms SET name = $1, vcpus = $2, memory = $3, description = $4, labels = $5,
                        autostart = $6, policy_id = $7, hardware = $8, template = $9,
                        migration_encryption = $10, on_drain = $11
         WHERE id = $12",
    )
    .bind(&vm.name)
    .bind(vm.vcpus)
    .bind(i64::try_from(vm.memory).unwrap_or(i64::MAX))
    .bind(&vm.description)
    .bind(to_json(&vm.labels))
    .bind(vm.autostart)
    .bind(vm.policy.to_string())
    .bind(to_json(&vm.hardware))
    .bind(vm.template)
    .bind(to_name(&vm.migration_encryption))
    .bind(to_name(&vm.on_drain))
    .bind(vm.id.to_string())
    .execute(to)
    .await
    .map_err(taken(|| format!("a VM '{}'", vm.name)))?;
    Ok(())
}

/// Records that the VMs of a host that has rebooted are to be started, if their users want that.
pub async fn set_starts_due(to: &mut SqliteConnection, host: HostId) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE vms SET start_due = TRUE
         WHERE autostart AND NOT template AND lifecycle = 'ready'
               AND id IN (SELECT vm_id FROM placements WHERE host_id = $1 AND role = 'owner')",
    )
    .bind(host.to_string())
    .execute(to)
    .await?;
    Ok(())
}

/// Records that the start of a VM is a task now, or is no longer wanted.
pub async fn set_start_done(to: &mut SqliteConnection, vm: VmId) -> Result<(), StoreError> {
    sqlx::query("UPDATE vms SET start_due = FALSE WHERE id = $1")
        .bind(vm.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// The VMs that are to be started because their hosts have rebooted.
pub async fn starts_due(from: &mut SqliteConnection) -> Result<Vec<Vm>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(select!(
        "WHERE v.start_due = TRUE AND v.autostart AND NOT v.template ORDER BY v.id"
    ))
    .fetch_all(from)
    .await?;
    rows.into_iter().map(Vm::try_from).collect()
}

/// Records a VM's key.
pub async fn set_key(
    to: &mut SqliteConnection,
    vm: VmId,
    key: &KeyReference,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE vms SET provider_id = $1, key_id = $2, key_check = $3 WHERE id = $4")
        .bind(key.provider.to_string())
        .bind(&key.key_id)
        .bind(&key.check)
        .bind(vm.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Records that a VM has no key.
pub async fn forget_key(to: &mut SqliteConnection, vm: VmId) -> Result<(), StoreError> {
    sqlx::query("UPDATE vms SET provider_id = NULL, key_id = NULL, key_check = NULL WHERE id = $1")
        .bind(vm.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Records a VM's lifecycle.
pub async fn set_lifecycle(
    to: &mut SqliteConnection,
    vm: VmId,
    lifecycle: Lifecycle,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE vms SET lifecycle = $1 WHERE id = $2")
        .bind(to_name(&lifecycle))
        .bind(vm.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Records a VM's power as its host reported it.
pub async fn set_seen(
    to: &mut SqliteConnection,
    vm: VmId,
    power: Power,
    stopped: Option<&Stopped>,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE vms SET seen_power = $1, seen_stopped = $2 WHERE id = $3")
        .bind(to_name(&power))
        .bind(stopped.map(to_json))
        .bind(vm.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Removes a VM, its placements, and the rest of its disks.
pub async fn delete(to: &mut SqliteConnection, vm: VmId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM disks WHERE vm_id = $1")
        .bind(vm.to_string())
        .execute(&mut *to)
        .await?;
    sqlx::query("DELETE FROM vms WHERE id = $1").bind(vm.to_string()).execute(to).await?;
    Ok(())
}
