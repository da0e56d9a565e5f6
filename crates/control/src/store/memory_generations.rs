//! The generations of the memories that are saved of VMs: which one a VM must have when it is suspended, and which ones snapshots keep.
//!
//! ```text
//!  suspend          renew: a number that no memory has had ─► the host saves under it
//!  the guest runs   renew: no memory that was saved before is the expected one
//!  a snapshot       number: one of its own; of a VM that is suspended that of its memory, which the snapshot keeps then
//!  revert           expect: that of the snapshot; renew where it keeps none and the VM was suspended
//!  an arrival       expect: what the other inventory has expected, of a VM that is suspended
//!  an adoption      that of a snapshot's memory is what its file says
//! ```

use jiff::Timestamp;
use sqlx::SqliteConnection;
use vmseal_api::id::{SnapshotId, VmId};
use vmseal_api::model::SnapshotState;

use super::snapshots::Snapshot;
use super::{StoreError, to_name, unsigned};

/// What a generation is, for errors.
const GENERATION: &str = "the generation of a memory";

/// How far ahead of the clock, in seconds, a number may be that a file on a datastore says: no VM's memory is saved so much more often than once
/// a second. Who writes to the datastore could else leave no number for later memories.
const AHEAD_MAX: i64 = 24 * 60 * 60;

/// A number that no memory of the VM has had. It is not below the seconds since 1970, so that an inventory that does not know of former
/// memories (a VM was adopted, or this is an older copy of the inventory) gives no number twice either. None without the VM.
async fn next(to: &mut SqliteConnection, vm: VmId) -> Result<Option<i64>, StoreError> {
    let last: Option<i64> = sqlx::query_scalar("SELECT memory_last FROM vms WHERE id = $1")
        .bind(vm.to_string())
        .fetch_optional(&mut *to)
        .await?;
    let Some(last) = last else { return Ok(None) };
    let next = last.saturating_add(1).max(Timestamp::now().as_second());
    sqlx::query("UPDATE vms SET memory_last = $1 WHERE id = $2")
        .bind(next)
        .bind(vm.to_string())
        .execute(to)
        .await?;
    Ok(Some(next))
}

/// Has the VM's memory be of a new generation: none that was saved before is the expected one.
pub async fn renew(to: &mut SqliteConnection, vm: VmId) -> Result<(), StoreError> {
    let next = next(&mut *to, vm).await?;
    sqlx::query("UPDATE vms SET memory_expected = $1 WHERE id = $2")
        .bind(next)
        .bind(vm.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Has any memory of the VM be taken: which one it must be is not known.
pub async fn accept_any(to: &mut SqliteConnection, vm: VmId) -> Result<(), StoreError> {
    sqlx::query("UPDATE vms SET memory_expected = NULL WHERE id = $1")
        .bind(vm.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Has any memory of all VMs be taken: this is an older copy of the inventory.
pub async fn accept_all(to: &mut SqliteConnection) -> Result<(), StoreError> {
    sqlx::query("UPDATE vms SET memory_expected = NULL").execute(to).await?;
    Ok(())
}

/// The generation that the VM's saved memory must be of; none where any is taken.
pub async fn expected(from: &mut SqliteConnection, vm: VmId) -> Result<Option<u64>, StoreError> {
    let found: Option<Option<i64>> =
        sqlx::query_scalar("SELECT memory_expected FROM vms WHERE id = $1")
            .bind(vm.to_string())
            .fetch_optional(from)
            .await?;
    found.flatten().map(|generation| unsigned(generation, GENERATION)).transpose()
}

/// Gives the memory that a snapshot of the VM is to keep a generation of its own.
pub async fn number_snapshot(
    to: &mut SqliteConnection,
    vm: VmId,
    snapshot: SnapshotId,
) -> Result<(), StoreError> {
    let next = next(&mut *to, vm).await?;
    sqlx::query("UPDATE snapshots SET memory_generation = $1 WHERE id = $2")
        .bind(next)
        .bind(snapshot.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Records that a snapshot keeps the memory that its VM is suspended with: it is of the same generation.
pub async fn keep_expected(
    to: &mut SqliteConnection,
    vm: VmId,
    snapshot: SnapshotId,
) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE snapshots SET memory_generation = (SELECT memory_expected FROM vms WHERE id = $1)
         WHERE id = $2",
    )
    .bind(vm.to_string())
    .bind(snapshot.to_string())
    .execute(to)
    .await?;
    Ok(())
}

/// Whether a snapshot of the VM keeps the memory that the VM must have if it is suspended: then that is not lost where the VM's is.
pub async fn is_kept(from: &mut SqliteConnection, vm: VmId) -> Result<bool, StoreError> {
    let count: i64 = sqlx::query_scalar(
        "SELECT COUNT(*) FROM snapshots JOIN vms ON vms.id = snapshots.vm_id
         WHERE vms.id = $1 AND snapshots.state = $2
         AND snapshots.memory_generation = vms.memory_expected",
    )
    .bind(vm.to_string())
    .bind(to_name(&SnapshotState::Ready))
    .fetch_one(from)
    .await?;
    Ok(count > 0)
}

/// The generation of the memory that a snapshot keeps; none where that is not known.
pub async fn of_snapshot(
    from: &mut SqliteConnection,
    snapshot: SnapshotId,
) -> Result<Option<u64>, StoreError> {
    let found: Option<Option<i64>> =
        sqlx::query_scalar("SELECT memory_generation FROM snapshots WHERE id = $1")
            .bind(snapshot.to_string())
            .fetch_optional(from)
            .await?;
    found.flatten().map(|generation| unsigned(generation, GENERATION)).transpose()
}

/// Records the generation of the memory that a snapshot keeps, which another inventory has given it. No memory of the VM gets it, or a
/// lower one, from now on.
pub async fn take_over(
    to: &mut SqliteConnection,
    snapshot: &Snapshot,
    generation: u64,
) -> Result<(), StoreError> {
    // A number that is too high is of no memory: the caller has refused it.
    let generation = i64::try_from(generation).unwrap_or(i64::MAX);
    sqlx::query("UPDATE snapshots SET memory_generation = $1 WHERE id = $2")
        .bind(generation)
        .bind(snapshot.id.to_string())
        .execute(&mut *to)
        .await?;
    sqlx::query("UPDATE vms SET memory_last = $1 WHERE id = $2 AND memory_last < $1")
        .bind(generation)
        .bind(snapshot.vm.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// The same of a generation that a file on a datastore says, whose VM is adopted. The file says the truth where it opens, as its key depends on
/// that. One that is not counted, or cannot be, is not recorded: any memory is taken then.
pub async fn take_found(
    to: &mut SqliteConnection,
    snapshot: &Snapshot,
    generation: u64,
) -> Result<(), StoreError> {
    let most = Timestamp::now().as_second().saturating_add(AHEAD_MAX);
    match i64::try_from(generation).is_ok_and(|number| (1..=most).contains(&number)) {
        true => take_over(to, snapshot, generation).await,
        false => Ok(()),
    }
}

/// Has the VM's memory be of the generation that another inventory has given it: the VM comes from there, suspended. No memory gets it, or
/// a lower one, from now on. None means that any is taken.
pub async fn take_over_own(
    to: &mut SqliteConnection,
    vm: VmId,
    generation: Option<u64>,
) -> Result<(), StoreError> {
    let Some(generation) = generation else { return accept_any(to, vm).await };
    // A number that is too high is of no memory: the caller has refused it.
    let generation = i64::try_from(generation).unwrap_or(i64::MAX);
    sqlx::query("UPDATE vms SET memory_expected = $1 WHERE id = $2")
        .bind(generation)
        .bind(vm.to_string())
        .execute(&mut *to)
        .await?;
    sqlx::query("UPDATE vms SET memory_last = $1 WHERE id = $2 AND memory_last < $1")
        .bind(generation)
        .bind(vm.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Has the VM's memory be the one that a snapshot keeps: the VM is reverted to it.
pub async fn expect_snapshots(
    to: &mut SqliteConnection,
    vm: VmId,
    snapshot: SnapshotId,
) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE vms SET memory_expected = (SELECT memory_generation FROM snapshots WHERE id = $1)
         WHERE id = $2",
    )
    .bind(snapshot.to_string())
    .bind(vm.to_string())
    .execute(to)
    .await?;
    Ok(())
}
