//! Snapshots of VMs, as trees.

use jiff::Timestamp;
use sqlx::{FromRow, SqliteConnection};
use vmseal_api::id::{DiskId, SnapshotId, VmId};
use vmseal_api::model::SnapshotState;

use super::{StoreError, from_json, from_name, parse, taken, to_json, to_name};

/// A snapshot as the inventory has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its id.
    pub id: SnapshotId,
    /// Its VM.
    pub vm: VmId,
    /// Its name, unique within the VM.
    pub name: String,
    /// The description that its user gave.
    pub description: String,
    /// The snapshot that the VM's disks began with when this one was taken.
    pub parent: Option<SnapshotId>,
    /// When it was asked for.
    pub created: Timestamp,
    /// How it stands.
    pub state: SnapshotState,
    /// Whether the guest's file systems were frozen, where that is known.
    pub quiesced: Option<bool>,
    /// Whether what the VM's disks hold now began with this one.
    pub current: bool,
    /// Whether it keeps the guest's memory.
    pub memory: bool,
    /// The disks that it keeps.
    pub disks: Vec<DiskId>,
}

#[derive(FromRow)]
struct Row {
    id: String,
    vm_id: String,
    name: String,
    description: String,
    parent_id: Option<String>,
    created: String,
    state: String,
    quiesced: Option<bool>,
    is_current: bool,
    memory: bool,
    disks: String,
}

impl Row {
    fn read(self) -> Result<Snapshot, StoreError> {
        let parent = self.parent_id.as_deref().map(|id| parse(id, "a snapshot's id"));
        Ok(Snapshot {
            id: parse(&self.id, "a snapshot's id")?,
            vm: parse(&self.vm_id, "a VM's id")?,
            name: self.name,
            description: self.description,
            parent: parent.transpose()?,
            created: parse(&self.created, "a time")?,
            state: from_name(&self.state, "a snapshot's state")?,
            quiesced: self.quiesced,
            current: self.is_current,
            memory: self.memory,
            disks: from_json(&self.disks, "the disks of a snapshot")?,
        })
    }
}

/// Adds a snapshot.
///
/// # Errors
/// [`StoreError::Taken`]: the VM has another one of its name.
pub async fn insert(to: &mut SqliteConnection, snapshot: &Snapshot) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO snapshots
         (id, vm_id, name, description, parent_id, created, state, quiesced, is_current, memory, disks)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
    )
    .bind(snapshot.id.to_string())
    .bind(snapshot.vm.to_string())
    .bind(&snapshot.name)
    .bind(&snapshot.description)
    .bind(snapshot.parent.map(|parent| parent.to_string()))
    .bind(snapshot.created.to_string())
    .bind(to_name(&snapshot.state))
    .bind(snapshot.quiesced)
    .bind(snapshot.current)
    .bind(snapshot.memory)
    .bind(to_json(&snapshot.disks))
    .execute(to)
    .await
    .map_err(taken(|| format!("a snapshot of this VM named '{}'", snapshot.name)))?;
    Ok(())
}

/// The snapshots of a VM, in the order in which they were asked for.
pub async fn of_vm(from: &mut SqliteConnection, vm: VmId) -> Result<Vec<Snapshot>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT id, vm_id, name, description, parent_id, created, state, quiesced, is_current, memory, disks
         FROM snapshots WHERE vm_id = $1 ORDER BY id",
    )
    .bind(vm.to_string())
    .fetch_all(from)
    .await?;
    rows.into_iter().map(Row::read).collect()
}

/// A snapshot of a VM, by name or id.
pub async fn find(
    from: &mut SqliteConnection,
    vm: VmId,
    name: &str,
) -> Result<Option<Snapshot>, StoreError> {
    let all = of_vm(from, vm).await?;
    Ok(all.into_iter().find(|known| known.name == name || known.id.to_string() == name))
}

/// Sets how a snapshot stands.
pub async fn set_state(
    to: &mut SqliteConnection,
    snapshot: SnapshotId,
    state: SnapshotState,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE snapshots SET state = $1 WHERE id = $2")
        .bind(to_name(&state))
        .bind(snapshot.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Records that a snapshot was taken, and how.
pub async fn set_taken(
    to: &mut SqliteConnection,
    snapshot: SnapshotId,
    quiesced: Option<bool>,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE snapshots SET state = $1, quiesced = $2 WHERE id = $3")
        .bind(to_name(&SnapshotState::Ready))
        .bind(quiesced)
        .bind(snapshot.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Records which snapshot the VM's disks begin with now; none where they begin with none.
pub async fn set_current(
    to: &mut SqliteConnection,
    vm: VmId,
    snapshot: Option<SnapshotId>,
) -> Result<(), StoreError> {
    let id = snapshot.map(|snapshot| snapshot.to_string()).unwrap_or_default();
    sqlx::query("UPDATE snapshots SET is_current = (id = $1) WHERE vm_id = $2")
        .bind(id)
        .bind(vm.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Removes a snapshot; those that were taken after it follow its parent.
pub async fn delete(to: &mut SqliteConnection, snapshot: &Snapshot) -> Result<(), StoreError> {
    sqlx::query("UPDATE snapshots SET parent_id = $1 WHERE vm_id = $2 AND parent_id = $3")
        .bind(snapshot.parent.map(|parent| parent.to_string()))
        .bind(snapshot.vm.to_string())
        .bind(snapshot.id.to_string())
        .execute(&mut *to)
        .await?;
    sqlx::query("DELETE FROM snapshots WHERE id = $1")
        .bind(snapshot.id.to_string())
        .execute(&mut *to)
        .await?;
    if snapshot.current {
        set_current(to, snapshot.vm, snapshot.parent).await?;
    }
    Ok(())
}
