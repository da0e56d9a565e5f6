//! Hosts that are emptied before maintenance, or are empty. A host of which there is none is active.

use jiff::Timestamp;
use sqlx::{FromRow, SqliteConnection};
use vmseal_api::drain::{DrainState, Maintenance};
use vmseal_api::id::{HostId, TaskId, VmId};
use vmseal_api::request_id::RequestId;

use super::{StoreError, from_name, parse, to_name};

/// The drain of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drain {
    /// The host.
    pub host: HostId,
    /// Whether it goes on, or the host is empty.
    pub state: Maintenance,
    /// The user who began it.
    pub actor: String,
    /// Whether that user may move VMs that have a key.
    pub migrate_encrypted: bool,
    /// How many VMs are sent at a time.
    pub parallel: u32,
    /// Whether those that cannot be moved are shut down.
    pub stop_others: bool,
    /// The highest rate at which each VM is sent, in bytes a second.
    pub rate: Option<u64>,
    /// Whether memory is compressed where that is faster.
    pub compress: bool,
    /// When it was begun.
    pub begun: Timestamp,
    /// The id of the request that began it.
    pub request_id: Option<RequestId>,
}

#[derive(FromRow)]
struct Row {
    host_id: String,
    state: String,
    actor: String,
    migrate_encrypted: bool,
    parallel: i64,
    stop_others: bool,
    rate: Option<i64>,
    compress: bool,
    begun: String,
    request_id: Option<String>,
}

impl TryFrom<Row> for Drain {
    type Error = StoreError;
    fn try_from(row: Row) -> Result<Self, StoreError> {
        Ok(Self {
            host: parse(&row.host_id, "a host's id")?,
            state: from_name(&row.state, "how far a host is emptied")?,
            actor: row.actor,
            migrate_encrypted: row.migrate_encrypted,
            parallel: u32::try_from(row.parallel).unwrap_or(1),
            stop_others: row.stop_others,
            rate: row.rate.and_then(|rate| u64::try_from(rate).ok()),
            compress: row.compress,
            begun: parse(&row.begun, "a time")?,
            request_id: row.request_id.and_then(|id| parse(&id, "a request's id").ok()),
        })
    }
}

/// The columns of a [`Row`].
macro_rules! select {
    ($rest:literal) => {
        concat!(
            "SELECT host_id, state, actor, migrate_encrypted, parallel, stop_others, rate, compress, begun, request_id FROM drains ",
            $rest
        )
    };
}

/// A VM of a host that is emptied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrainedVm {
    /// The VM.
    pub vm: VmId,
    /// Its name now.
    pub name: String,
    /// How far it is.
    pub state: DrainState,
    /// How often a task of the kind of the last one was begun for it.
    pub attempts: u32,
    /// The last task.
    pub task: Option<TaskId>,
    /// What happens, or why nothing does.
    pub detail: String,
}

#[derive(FromRow)]
struct VmRow {
    vm_id: String,
    name: String,
    state: String,
    attempts: i64,
    task_id: Option<String>,
    detail: String,
}

impl TryFrom<VmRow> for DrainedVm {
    type Error = StoreError;
    fn try_from(row: VmRow) -> Result<Self, StoreError> {
        Ok(Self {
            vm: parse(&row.vm_id, "a VM's id")?,
            name: row.name,
            state: from_name(&row.state, "how far a VM of a drained host is")?,
            attempts: u32::try_from(row.attempts).unwrap_or(u32::MAX),
            task: row.task_id.map(|id| parse(&id, "a task's id")).transpose()?,
            detail: row.detail,
        })
    }
}

/// Begins the drain of a host. It replaces an earlier one, with what that says of VMs.
pub async fn begin(to: &mut SqliteConnection, drain: &Drain) -> Result<(), StoreError> {
    end(to, drain.host).await?;
    sqlx::query(
        "INSERT INTO drains (host_id, state, actor, migrate_encrypted, parallel, stop_others, rate,
                             compress, begun, request_id)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
    )
    .bind(drain.host.to_string())
    .bind(to_name(&drain.state))
    .bind(&drain.actor)
    .bind(drain.migrate_encrypted)
    .bind(i64::from(drain.parallel))
    .bind(drain.stop_others)
    .bind(drain.rate.map(|rate| i64::try_from(rate).unwrap_or(i64::MAX)))
    .bind(drain.compress)
    .bind(drain.begun.to_string())
    .bind(drain.request_id.as_ref().map(RequestId::as_str))
    .execute(to)
    .await?;
    Ok(())
}

/// Has a host active again.
pub async fn end(to: &mut SqliteConnection, host: HostId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM drains WHERE host_id = $1").bind(host.to_string()).execute(to).await?;
    Ok(())
}

/// The drain of a host; none where it is active.
pub async fn of_host(
    from: &mut SqliteConnection,
    host: HostId,
) -> Result<Option<Drain>, StoreError> {
    let row: Option<Row> = sqlx::query_as(select!("WHERE host_id = $1"))
        .bind(host.to_string())
        .fetch_optional(from)
        .await?;
    row.map(Drain::try_from).transpose()
}

/// Those that go on.
pub async fn going_on(from: &mut SqliteConnection) -> Result<Vec<Drain>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(select!("WHERE state = $1 ORDER BY host_id"))
        .bind(to_name(&Maintenance::Draining))
        .fetch_all(from)
        .await?;
    rows.into_iter().map(Drain::try_from).collect()
}

/// Records that a host is empty.
pub async fn set_drained(to: &mut SqliteConnection, host: HostId) -> Result<(), StoreError> {
    sqlx::query("UPDATE drains SET state = $1 WHERE host_id = $2")
        .bind(to_name(&Maintenance::Drained))
        .bind(host.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// The VMs of a host's drain, by name.
pub async fn vms_of(
    from: &mut SqliteConnection,
    host: HostId,
) -> Result<Vec<DrainedVm>, StoreError> {
    let rows: Vec<VmRow> = sqlx::query_as(
        "SELECT d.vm_id, v.name, d.state, d.attempts, d.task_id, d.detail
         FROM drained_vms d JOIN vms v ON v.id = d.vm_id WHERE d.host_id = $1 ORDER BY v.name",
    )
    .bind(host.to_string())
    .fetch_all(from)
    .await?;
    rows.into_iter().map(DrainedVm::try_from).collect()
}

/// Records how far a VM of a host's drain is.
pub async fn set_vm(
    to: &mut SqliteConnection,
    host: HostId,
    vm: &DrainedVm,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO drained_vms (host_id, vm_id, state, attempts, task_id, detail)
         VALUES ($1, $2, $3, $4, $5, $6)
         ON CONFLICT (host_id, vm_id) DO UPDATE SET state = excluded.state, attempts = excluded.attempts,
                                                    task_id = excluded.task_id, detail = excluded.detail",
    )
    .bind(host.to_string())
    .bind(vm.vm.to_string())
    .bind(to_name(&vm.state))
    .bind(i64::from(vm.attempts))
    .bind(vm.task.map(|task| task.to_string()))
    .bind(&vm.detail)
    .execute(to)
    .await?;
    Ok(())
}
