//! Which disks are those of linked clones, and what they stand on. A disk that has a copy in its place is not what others stand on any more: these
//! keep its former files ([`part`]).

use std::collections::{BTreeMap, BTreeSet};

use sqlx::{FromRow, SqliteConnection};
use vmseal_api::id::{DiskId, SnapshotId, VmId};

use super::{StoreError, parse};

/// What a disk of a linked clone stands on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The VM.
    pub vm: VmId,
    /// Its name when it was cloned.
    pub vm_name: String,
    /// Its snapshot.
    pub snapshot: SnapshotId,
    /// The name of that when it was cloned.
    pub snapshot_name: String,
}

#[derive(FromRow)]
struct Row {
    vm_id: String,
    source_vm: String,
    source_name: String,
    snapshot_id: String,
    snapshot_name: String,
}

impl Row {
    fn read(self) -> Result<(VmId, Link), StoreError> {
        let link = Link {
            vm: parse(&self.source_vm, "a VM's id")?,
            vm_name: self.source_name,
            snapshot: parse(&self.snapshot_id, "a snapshot's id")?,
            snapshot_name: self.snapshot_name,
        };
        Ok((parse(&self.vm_id, "a VM's id")?, link))
    }
}

/// Notes what a disk stands on: on this disk of the other VM.
pub async fn insert(
    to: &mut SqliteConnection,
    disk: DiskId,
    link: &Link,
    on: Option<DiskId>,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO linked_disks
             (disk_id, source_vm, source_name, snapshot_id, snapshot_name, source_disk)
         VALUES ($1, $2, $3, $4, $5, $6)",
    )
    .bind(disk.to_string())
    .bind(link.vm.to_string())
    .bind(&link.vm_name)
    .bind(link.snapshot.to_string())
    .bind(&link.snapshot_name)
    .bind(on.map(|on| on.to_string()))
    .execute(to)
    .await?;
    Ok(())
}

/// What the disks of a VM stand on: one link, as all of a clone's are of one snapshot. Where some of these have been copied to other files since,
/// and the VM of that snapshot is a clone itself, it is that of some disk. None of a VM of its own.
pub async fn of_vm(from: &mut SqliteConnection, vm: VmId) -> Result<Option<Link>, StoreError> {
    let row: Option<Row> = sqlx::query_as(
        "SELECT d.vm_id, l.source_vm, l.source_name, l.snapshot_id, l.snapshot_name
         FROM disks d JOIN linked_disks l ON l.disk_id = d.id WHERE d.vm_id = $1 LIMIT 1",
    )
    .bind(vm.to_string())
    .fetch_optional(from)
    .await?;
    row.map(|row| row.read().map(|(_, link)| link)).transpose()
}

/// What all linked clones stand on.
pub async fn all(from: &mut SqliteConnection) -> Result<BTreeMap<VmId, Link>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT DISTINCT d.vm_id, l.source_vm, l.source_name, l.snapshot_id, l.snapshot_name
         FROM linked_disks l JOIN disks d ON d.id = l.disk_id",
    )
    .fetch_all(from)
    .await?;
    rows.into_iter().map(Row::read).collect()
}

/// The names of the linked clones of a VM, or of one snapshot of it, in their order.
pub async fn clones_of(
    from: &mut SqliteConnection,
    vm: VmId,
    snapshot: Option<SnapshotId>,
) -> Result<Vec<String>, StoreError> {
    let names: Vec<(String, String)> = sqlx::query_as(
        "SELECT DISTINCT v.name, l.snapshot_id FROM linked_disks l JOIN disks d ON d.id = l.disk_id
         JOIN vms v ON v.id = d.vm_id WHERE l.source_vm = $1 ORDER BY v.name",
    )
    .bind(vm.to_string())
    .fetch_all(from)
    .await?;
    let wanted = snapshot.map(|snapshot| snapshot.to_string());
    let is_wanted = |of: &String| wanted.as_ref().is_none_or(|wanted| wanted == of);
    Ok(names.into_iter().filter(|(_, of)| is_wanted(of)).map(|(name, _)| name).collect())
}

/// The names of the linked clones that have disks which stand on one of these disks of a VM, in their order.
pub async fn clones_of_disks(
    from: &mut SqliteConnection,
    vm: VmId,
    disks: &[DiskId],
) -> Result<Vec<String>, StoreError> {
    let mut names = BTreeSet::new();
    for disk in disks {
        let found: Vec<(String,)> = sqlx::query_as(
            "SELECT v.name FROM linked_disks l JOIN disks d ON d.id = l.disk_id
             JOIN vms v ON v.id = d.vm_id
             WHERE l.source_vm = $1 AND (l.source_disk = $2 OR l.source_disk IS NULL)",
        )
        .bind(vm.to_string())
        .bind(disk.to_string())
        .fetch_all(&mut *from)
        .await?;
        names.extend(found.into_iter().map(|(name,)| name));
    }
    Ok(names.into_iter().collect())
}

/// A copy has taken the place of a VM's disk: no disk stands on it any more. Those that did keep its former files, and with them what it stood on
/// itself, which is then what they stand on. To be called before that is forgotten ([`forget`]).
pub async fn part(to: &mut SqliteConnection, vm: VmId, disk: DiskId) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE linked_disks SET
             (source_vm, source_name, snapshot_id, snapshot_name, source_disk) =
             (SELECT source_vm, source_name, snapshot_id, snapshot_name, source_disk
              FROM linked_disks WHERE disk_id = $2)
         WHERE source_vm = $1 AND (source_disk = $2 OR source_disk IS NULL)
             AND EXISTS (SELECT 1 FROM linked_disks WHERE disk_id = $2)",
    )
    .bind(vm.to_string())
    .bind(disk.to_string())
    .execute(&mut *to)
    .await?;
    sqlx::query(
        "DELETE FROM linked_disks
         WHERE source_vm = $1 AND (source_disk = $2 OR source_disk IS NULL)",
    )
    .bind(vm.to_string())
    .bind(disk.to_string())
    .execute(to)
    .await?;
    Ok(())
}

/// A disk stands on nothing any more.
pub async fn forget(to: &mut SqliteConnection, disk: DiskId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM linked_disks WHERE disk_id = $1")
        .bind(disk.to_string())
        .execute(to)
        .await?;
    Ok(())
}
