//! What hosts have found when they read the files of VMs: the last report of each.

use sqlx::SqliteConnection;
use vmseal_api::id::{TaskId, VmId};
use vmseal_api::proof::SignedReport;

use super::{StoreError, from_json, to_json};

/// Keeps the report of a VM in place of the one before.
pub async fn set(
    to: &mut SqliteConnection,
    vm: VmId,
    task: TaskId,
    report: &SignedReport,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO proofs (vm_id, task_id, signed) VALUES ($1, $2, $3)
         ON CONFLICT (vm_id) DO UPDATE SET task_id = excluded.task_id, signed = excluded.signed",
    )
    .bind(vm.to_string())
    .bind(task.to_string())
    .bind(to_json(report))
    .execute(to)
    .await?;
    Ok(())
}

/// The report of a VM, if there is one.
pub async fn of_vm(
    from: &mut SqliteConnection,
    vm: VmId,
) -> Result<Option<SignedReport>, StoreError> {
    let signed: Option<String> = sqlx::query_scalar("SELECT signed FROM proofs WHERE vm_id = $1")
        .bind(vm.to_string())
        .fetch_optional(from)
        .await?;
    signed.map(|signed| from_json(&signed, "a proof")).transpose()
}
