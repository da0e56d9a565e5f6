//! Core dumps of VMs.

use jiff::Timestamp;
use sqlx::{FromRow, SqliteConnection};
use vmseal_api::dump::{DumpFormat, DumpReason};
use vmseal_api::id::{DumpId, VmId};

use super::{StoreError, from_name, parse, taken, to_name};

/// A core dump as the inventory has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dump {
    /// Its id.
    pub id: DumpId,
    /// Its VM.
    pub vm: VmId,
    /// Its name, unique within the VM.
    pub name: String,
    /// Its format.
    pub format: DumpFormat,
    /// Why it was written.
    pub reason: DumpReason,
    /// When it was asked for, or was whole where its host wrote it by itself.
    pub created: Timestamp,
    /// The length of its file; none before it is whole.
    pub bytes: Option<u64>,
    /// Whether it is encrypted.
    pub encrypted: bool,
}

#[derive(FromRow)]
struct Row {
    id: String,
    vm_id: String,
    name: String,
    format: String,
    reason: String,
    created: String,
    bytes: Option<i64>,
    encrypted: bool,
}

impl Row {
    fn read(self) -> Result<Dump, StoreError> {
        Ok(Dump {
            id: parse(&self.id, "a core dump's id")?,
            vm: parse(&self.vm_id, "a VM's id")?,
            name: self.name,
            format: from_name(&self.format, "a core dump's format")?,
            reason: from_name(&self.reason, "a reason of a core dump")?,
            created: parse(&self.created, "a time")?,
            bytes: self.bytes.map(i64::unsigned_abs),
            encrypted: self.encrypted,
        })
    }
}

/// Adds a core dump.
///
/// # Errors
/// [`StoreError::Taken`]: the VM has another one of its name.
pub async fn insert(to: &mut SqliteConnection, dump: &Dump) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO dumps (id, vm_id, name, format, reason, created, bytes, encrypted)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
    )
    .bind(dump.id.to_string())
    .bind(dump.vm.to_string())
    .bind(&dump.name)
    .bind(to_name(&dump.format))
    .bind(to_name(&dump.reason))
    .bind(dump.created.to_string())
    .bind(dump.bytes.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX)))
    .bind(dump.encrypted)
    .execute(to)
    .await
    .map_err(taken(|| format!("a core dump of this VM named '{}'", dump.name)))?;
    Ok(())
}

/// The core dumps of a VM, in the order in which they were asked for.
pub async fn of_vm(from: &mut SqliteConnection, vm: VmId) -> Result<Vec<Dump>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT id, vm_id, name, format, reason, created, bytes, encrypted
         FROM dumps WHERE vm_id = $1 ORDER BY id",
    )
    .bind(vm.to_string())
    .fetch_all(from)
    .await?;
    rows.into_iter().map(Row::read).collect()
}

/// Records that a core dump is whole.
pub async fn set_written(
    to: &mut SqliteConnection,
    dump: DumpId,
    bytes: u64,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE dumps SET bytes = $1 WHERE id = $2")
        .bind(i64::try_from(bytes).unwrap_or(i64::MAX))
        .bind(dump.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Records that all core dumps of a VM are encrypted, or are not.
pub async fn set_encrypted(
    to: &mut SqliteConnection,
    vm: VmId,
    encrypted: bool,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE dumps SET encrypted = $1 WHERE vm_id = $2")
        .bind(encrypted)
        .bind(vm.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Removes a core dump.
pub async fn delete(to: &mut SqliteConnection, dump: DumpId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM dumps WHERE id = $1").bind(dump.to_string()).execute(to).await?;
    Ok(())
}
