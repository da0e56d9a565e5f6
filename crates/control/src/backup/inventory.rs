//! The inventory in a backup: its copy, and what it must forget when it is restored.

use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, query, query_scalar};
use vmseal_api::model::{Lifecycle, TaskState};
use vmseal_api::problem::{ErrorCode, Problem};

use crate::operation::Operation;
use crate::store::events::NewEvent;
use crate::store::{
    Part, Store, StoreError, evacuations, hosts, memory_generations, placements, policies,
    providers, tasks, vms,
};
use crate::task_alarms;

/// How long the copy may wait for a lock of the inventory: as long as a request does.
const BUSY_TIMEOUT: Duration = Duration::from_secs(15);

/// Copies the inventory at `from`, as it is at one instant, while it is read and written. `to` must not exist.
pub(super) async fn copy(from: &Path, to: &Path) -> Result<(), StoreError> {
    let options = SqliteConnectOptions::new().filename(from).busy_timeout(BUSY_TIMEOUT);
    let mut inventory = options.connect().await?;
    // SQLite's own statement: another database has programs of its own for this.
    query("VACUUM INTO $1").bind(to.to_string_lossy()).execute(&mut inventory).await?;
    inventory.close().await?;
    check(to).await
}

/// Reads all of an inventory, and checks its structure.
pub(super) async fn check(file: &Path) -> Result<(), StoreError> {
    let options = SqliteConnectOptions::new().filename(file).read_only(true);
    let mut inventory = options.connect().await?;
    let found: String = query_scalar("PRAGMA integrity_check").fetch_one(&mut inventory).await?;
    inventory.close().await?;
    match found.as_str() {
        "ok" => Ok(()),
        _ => Err(StoreError::Unreadable { value: found, expected: "a whole inventory" }),
    }
}

/// What a restored inventory has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InventoryCount {
    /// Hosts.
    pub hosts: usize,
    /// Virtual machines.
    pub vms: usize,
    /// Key providers.
    pub providers: usize,
    /// Policies.
    pub policies: usize,
    /// Tasks that had not ended when the backup was made.
    pub interrupted: usize,
}

/// Prepares a restored inventory for its first start. A task that was under way is not resumed: what it found may have
/// changed since, and undoing it could remove a disk that has been in use ever since. A VM that was being made is
/// forgotten; if it was finished, `datastore adopt` brings it back.
pub(super) async fn settle(store: &Store, made: Timestamp) -> Result<InventoryCount, Problem> {
    let mut write = store.write().await?;
    let interrupted = tasks::open(&mut write).await?;
    let number = interrupted.len();
    for mut task in interrupted {
        let being_made = match &task.operation {
            Operation::CreateVm { vm, .. }
            | Operation::RestoreDeletedVm { vm, .. }
            | Operation::RestoreNewVm { vm, .. } => vms::get(&mut write, *vm).await?,
            _ => None,
        };
        let detail = match being_made.filter(|vm| vm.lifecycle == Lifecycle::Creating) {
            Some(vm) => {
                vms::delete(&mut write, vm.id).await?;
                "the server was restored from a backup of that time, which does not tell how it ended. Its VM is forgotten: if it was finished, vmseal datastore adopt brings it back"
            }
            None => {
                "the server was restored from a backup of that time, which does not tell how it ended: look at the VM, and begin it again where that is needed"
            }
        };
        task.state = TaskState::Unknown;
        task.ended = Some(Timestamp::now());
        task.waiting = None;
        task.problem = Some(Problem::new(ErrorCode::WrongState, detail));
        tasks::update(&mut write, &task).await?;
        task_alarms::unfinished(&mut write, &task).await?;
    }
    // VMs may have been suspended and resumed since.
    memory_generations::accept_all(&mut write).await?;
    // They may have gone back to hosts that they were evacuated from, and to others.
    evacuations::remove_all(&mut write).await?;
    placements::skip_generations(&mut write, None).await?;
    // A host that has rebooted since the backup must not start VMs as they were then: `datastore adopt` comes first.
    hosts::forget_boots(&mut write).await?;
    let all = Part::all();
    let count = InventoryCount {
        hosts: hosts::list(&mut write, &all).await?.len(),
        vms: vms::list(&mut write, &all).await?.len(),
        providers: providers::list(&mut write, &all).await?.len(),
        policies: policies::list(&mut write, &all).await?.len(),
        interrupted: number,
    };
    let detail = format!("from a backup of {made:.0}; tasks that were interrupted: {number}");
    let (kind, actor, target) = ("server.restored", crate::SELF, "server");
    write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
    write.commit().await?;
    Ok(count)
}
