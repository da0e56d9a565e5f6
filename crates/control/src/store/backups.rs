//! Backups of VMs. They outlive their VMs.

use std::path::PathBuf;

use jiff::Timestamp;
use sqlx::{FromRow, SqliteConnection};
use vmseal_api::host::KeyReference;
use vmseal_api::host::backup::BackupContents;
use vmseal_api::id::{BackupId, HostId, VmId};
use vmseal_api::model::{BackupState, FailedVerification};

use super::{StoreError, from_json, from_name, parse, taken, to_json, to_name};

/// A backup as the inventory has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backup {
    /// Its id.
    pub id: BackupId,
    /// Its VM, which may be deleted.
    pub vm: VmId,
    /// The name that the VM had.
    pub vm_name: String,
    /// The host that reads it: the one that wrote it, or another one that has its directory, too.
    pub host: HostId,
    /// That host's name.
    pub host_name: String,
    /// Its name, unique within the VM.
    pub name: String,
    /// The directory of backups on that host.
    pub directory: PathBuf,
    /// The instant that its disks are of.
    pub created: Timestamp,
    /// How it stands.
    pub state: BackupState,
    /// The backup that it is above.
    pub parent: Option<BackupId>,
    /// Whether the guest's file systems were frozen, where that is known.
    pub quiesced: Option<bool>,
    /// The room of its files, once it is whole.
    pub bytes: Option<u64>,
    /// How much of the disks was read for it, in bytes, where that is known.
    pub read_bytes: Option<u64>,
    /// When it was last verified.
    pub verified: Option<Timestamp>,
    /// Its last verification, where that failed and none has succeeded since.
    pub failed: Option<FailedVerification>,
    /// The key that opens it; none where the VM had none.
    pub key: Option<KeyReference>,
    /// What is in it, where that is known.
    pub contents: Option<BackupContents>,
}

#[derive(FromRow)]
struct Row {
    id: String,
    vm_id: String,
    vm_name: String,
    host_id: String,
    host_name: String,
    name: String,
    directory: String,
    created: String,
    state: String,
    parent_id: Option<String>,
    quiesced: Option<bool>,
    bytes: Option<i64>,
    read_bytes: Option<i64>,
    verified: Option<String>,
    failed: Option<String>,
    failure: Option<String>,
    provider_id: Option<String>,
    key_id: Option<String>,
    check_value: Option<String>,
    contents: Option<String>,
}

impl Row {
    fn read(self) -> Result<Backup, StoreError> {
        let key = match (self.provider_id, self.key_id, self.check_value) {
            (Some(provider), Some(key_id), Some(check)) => {
                Some(KeyReference { provider: parse(&provider, "a provider's id")?, key_id, check })
            }
            _ => None,
        };
        let failed = self.failed.map(|at| parse(&at, "a time")).transpose()?;
        let why = self.failure.unwrap_or_default();
        let contents = self.contents.map(|it| from_json(&it, "what is in a backup"));
        let parent = self.parent_id.as_deref().map(|id| parse(id, "a backup's id"));
        Ok(Backup {
            id: parse(&self.id, "a backup's id")?,
            vm: parse(&self.vm_id, "a VM's id")?,
            vm_name: self.vm_name,
            host: parse(&self.host_id, "a host's id")?,
            host_name: self.host_name,
            name: self.name,
            directory: self.directory.into(),
            created: parse(&self.created, "a time")?,
            state: from_name(&self.state, "a backup's state")?,
            parent: parent.transpose()?,
            quiesced: self.quiesced,
            bytes: self.bytes.map(i64::unsigned_abs),
            read_bytes: self.read_bytes.map(i64::unsigned_abs),
            verified: self.verified.map(|at| parse(&at, "a time")).transpose()?,
            failed: failed.map(|at| FailedVerification { at, why }),
            key,
            contents: contents.transpose()?,
        })
    }
}

/// Selects backups.
macro_rules! select {
    ($rest:literal) => {
        concat!(
            "SELECT id, vm_id, vm_name, host_id, host_name, name, directory, created, state, parent_id, quiesced,
             bytes, read_bytes, verified, failed, failure, provider_id, key_id, check_value, contents FROM backups ",
            $rest
        )
    };
}

/// Adds a backup.
///
/// # Errors
/// [`StoreError::Taken`]: the VM has another one of its name.
pub async fn insert(to: &mut SqliteConnection, backup: &Backup) -> Result<(), StoreError> {
    let key = backup.key.as_ref();
    sqlx::query(
        "INSERT INTO backups (id, vm_id, vm_name, host_id, host_name, name, directory, created, state, parent_id, quiesced, bytes, verified, provider_id, key_id, check_value)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)",
    )
    .bind(backup.id.to_string())
    .bind(backup.vm.to_string())
    .bind(&backup.vm_name)
    .bind(backup.host.to_string())
    .bind(&backup.host_name)
    .bind(&backup.name)
    .bind(backup.directory.to_string_lossy().into_owned())
    .bind(backup.created.to_string())
    .bind(to_name(&backup.state))
    .bind(backup.parent.map(|parent| parent.to_string()))
    .bind(backup.quiesced)
    .bind(backup.bytes.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX)))
    .bind(backup.verified.map(|at| at.to_string()))
    .bind(key.map(|key| key.provider.to_string()))
    .bind(key.map(|key| key.key_id.clone()))
    .bind(key.map(|key| key.check.clone()))
    .execute(to)
    .await
    .map_err(taken(|| format!("a backup of this VM named '{}'", backup.name)))?;
    Ok(())
}

/// The backups of a VM, in the order in which they were asked for.
pub async fn of_vm(from: &mut SqliteConnection, vm: VmId) -> Result<Vec<Backup>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(select!("WHERE vm_id = $1 ORDER BY id"))
        .bind(vm.to_string())
        .fetch_all(from)
        .await?;
    rows.into_iter().map(Row::read).collect()
}

/// All backups, after this id, in the order in which they were asked for.
pub async fn page(
    from: &mut SqliteConnection,
    after: &str,
    limit: u32,
) -> Result<Vec<Backup>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(select!("WHERE id > $1 ORDER BY id LIMIT $2"))
        .bind(after)
        .bind(i64::from(limit))
        .fetch_all(from)
        .await?;
    rows.into_iter().map(Row::read).collect()
}

/// A backup.
pub async fn get(
    from: &mut SqliteConnection,
    backup: BackupId,
) -> Result<Option<Backup>, StoreError> {
    let row: Option<Row> = sqlx::query_as(select!("WHERE id = $1"))
        .bind(backup.to_string())
        .fetch_optional(from)
        .await?;
    row.map(Row::read).transpose()
}

/// The VM of this id, or the last of this name, that has backups although it is deleted.
pub async fn deleted_vm(from: &mut SqliteConnection, vm: &str) -> Result<Option<VmId>, StoreError> {
    let found: Option<String> = sqlx::query_scalar(
        "SELECT vm_id FROM backups WHERE vm_id = $1 OR vm_name = $2 ORDER BY id DESC LIMIT 1",
    )
    .bind(vm)
    .bind(vm)
    .fetch_optional(from)
    .await?;
    found.map(|id| parse(&id, "a VM's id")).transpose()
}

/// Records that a backup is whole.
pub async fn set_whole(to: &mut SqliteConnection, backup: &Backup) -> Result<(), StoreError> {
    let key = backup.key.as_ref();
    sqlx::query(
        "UPDATE backups SET state = $1, created = $2, parent_id = $3, quiesced = $4, bytes = $5,
         provider_id = $6, key_id = $7, check_value = $8, read_bytes = $9, contents = $10 WHERE id = $11",
    )
    .bind(to_name(&BackupState::Ready))
    .bind(backup.created.to_string())
    .bind(backup.parent.map(|parent| parent.to_string()))
    .bind(backup.quiesced)
    .bind(backup.bytes.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX)))
    .bind(key.map(|key| key.provider.to_string()))
    .bind(key.map(|key| key.key_id.clone()))
    .bind(key.map(|key| key.check.clone()))
    .bind(backup.read_bytes.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX)))
    .bind(backup.contents.as_ref().map(to_json))
    .bind(backup.id.to_string())
    .execute(to)
    .await?;
    Ok(())
}

/// Records that another VM gets the data keys that are in backups of this one: in any of those that there are, as it is not known
/// which of them have the same.
///
/// # Errors
/// [`StoreError::Database`].
pub async fn share_data_keys(to: &mut SqliteConnection, vm: VmId) -> Result<(), StoreError> {
    sqlx::query("UPDATE backups SET shared = TRUE WHERE vm_id = $1")
        .bind(vm.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Whether other VMs may have data keys that are in a backup.
///
/// # Errors
/// [`StoreError::Database`].
pub async fn shares_data_keys(
    from: &mut SqliteConnection,
    backup: BackupId,
) -> Result<bool, StoreError> {
    let shared: Option<bool> = sqlx::query_scalar("SELECT shared FROM backups WHERE id = $1")
        .bind(backup.to_string())
        .fetch_optional(from)
        .await?;
    Ok(shared.unwrap_or(false))
}

/// Records what is in a backup.
pub async fn set_contents(
    to: &mut SqliteConnection,
    backup: BackupId,
    contents: &BackupContents,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE backups SET contents = $1 WHERE id = $2")
        .bind(to_json(contents))
        .bind(backup.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Records which host reads a backup, and all others of its VM that the same host had in the same directory.
pub async fn set_reader(
    to: &mut SqliteConnection,
    backup: &Backup,
    (host, name): (HostId, &str),
) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE backups SET host_id = $1, host_name = $2 WHERE vm_id = $3 AND host_id = $4 AND directory = $5",
    )
    .bind(host.to_string())
    .bind(name)
    .bind(backup.vm.to_string())
    .bind(backup.host.to_string())
    .bind(backup.directory.to_string_lossy().into_owned())
    .execute(to)
    .await?;
    Ok(())
}

/// Records how a backup stands.
pub async fn set_state(
    to: &mut SqliteConnection,
    backup: BackupId,
    state: BackupState,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE backups SET state = $1 WHERE id = $2")
        .bind(to_name(&state))
        .bind(backup.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Records when a backup was last verified, if it was.
pub async fn set_verified(
    to: &mut SqliteConnection,
    backup: BackupId,
    at: Option<Timestamp>,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE backups SET verified = $1, failed = NULL, failure = NULL WHERE id = $2")
        .bind(at.map(|at| at.to_string()))
        .bind(backup.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Records that the last verification of a backup failed.
pub async fn set_failed(
    to: &mut SqliteConnection,
    backup: BackupId,
    failed: &FailedVerification,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE backups SET failed = $1, failure = $2 WHERE id = $3")
        .bind(failed.at.to_string())
        .bind(&failed.why)
        .bind(backup.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Removes a backup.
pub async fn delete(to: &mut SqliteConnection, backup: BackupId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM backups WHERE id = $1").bind(backup.to_string()).execute(to).await?;
    Ok(())
}

/// Those of a VM's keys that none of its backups needs.
pub async fn not_needed(
    from: &mut SqliteConnection,
    vm: VmId,
    mut keys: Vec<KeyReference>,
) -> Result<Vec<KeyReference>, StoreError> {
    let backups = of_vm(from, vm).await?;
    keys.retain(|key| backups.iter().all(|backup| backup.key.as_ref() != Some(key)));
    Ok(keys)
}
