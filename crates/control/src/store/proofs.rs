//! What hosts have found when they read the files of VMs: the last reports of each.

use sqlx::SqliteConnection;
use vmseal_api::id::{TaskId, VmId};
use vmseal_api::proof::SignedReport;

use super::{StoreError, from_json, to_json};

/// How many reports of a VM are kept: a month of daily ones. Most are some kilobytes; that of a VM with as many files as are read
/// ([`vmseal_api::proof::FILES_MAX`]) is most of a megabyte.
pub const PROOFS_MAX: u32 = 32;

/// The SHA-256 of a report's text, in hexadecimal: what names it.
#[must_use]
pub fn digest_of(report: &SignedReport) -> String {
    crate::sha256_hex(report.report.as_bytes())
}

/// Keeps a report of a VM, and removes the oldest beyond [`PROOFS_MAX`]. Whether it was not kept before: a task has one.
pub async fn keep(
    to: &mut SqliteConnection,
    vm: VmId,
    task: TaskId,
    report: &SignedReport,
) -> Result<bool, StoreError> {
    let kept = sqlx::query(
        "INSERT INTO proofs (vm_id, task_id, digest, signed) VALUES ($1, $2, $3, $4)
         ON CONFLICT (vm_id, task_id) DO NOTHING",
    )
    .bind(vm.to_string())
    .bind(task.to_string())
    .bind(digest_of(report))
    .bind(to_json(report))
    .execute(&mut *to)
    .await?;
    sqlx::query(
        "DELETE FROM proofs WHERE vm_id = $1 AND number NOT IN
             (SELECT number FROM proofs WHERE vm_id = $1 ORDER BY number DESC LIMIT $2)",
    )
    .bind(vm.to_string())
    .bind(PROOFS_MAX)
    .execute(to)
    .await?;
    Ok(kept.rows_affected() > 0)
}

/// The newest report of a VM, if there is one.
pub async fn newest(
    from: &mut SqliteConnection,
    vm: VmId,
) -> Result<Option<SignedReport>, StoreError> {
    let signed: Option<String> = sqlx::query_scalar(
        "SELECT signed FROM proofs WHERE vm_id = $1 ORDER BY number DESC LIMIT 1",
    )
    .bind(vm.to_string())
    .fetch_optional(from)
    .await?;
    signed.map(|signed| from_json(&signed, "a proof")).transpose()
}

/// The report of a VM that has this digest, or that this task has made.
pub async fn find(
    from: &mut SqliteConnection,
    vm: VmId,
    digest_or_task: &str,
) -> Result<Option<SignedReport>, StoreError> {
    let signed: Option<String> = sqlx::query_scalar(
        "SELECT signed FROM proofs WHERE vm_id = $1 AND (digest = $2 OR task_id = $2)
         ORDER BY number DESC LIMIT 1",
    )
    .bind(vm.to_string())
    .bind(digest_or_task.to_owned())
    .fetch_optional(from)
    .await?;
    signed.map(|signed| from_json(&signed, "a proof")).transpose()
}
