//! The rows of snapshots that a task takes for itself, and drops ([`crate::tasks::temporary_snapshot`]).

use jiff::Timestamp;
use vmseal_api::id::{DiskId, SnapshotId};
use vmseal_api::limits::SNAPSHOTS_MAX;
use vmseal_api::model::SnapshotState;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::store::Write;
use crate::store::snapshots::{self, Snapshot};
use crate::store::vms::Vm;
use crate::tasks::temporary_snapshot::Purpose;

/// Adds the row of such a snapshot, which keeps these disks.
///
/// # Errors
/// `limit-exceeded`; those of the inventory.
pub(super) async fn reserve(
    write: &mut Write<'_>,
    vm: &Vm,
    purpose: Purpose,
    disks: Vec<DiskId>,
) -> Result<Snapshot, Problem> {
    let known = snapshots::of_vm(write, vm.id).await?;
    if known.len() >= SNAPSHOTS_MAX {
        let what = match purpose {
            Purpose::Backup => "a backup takes one",
            Purpose::Clone => "a clone of a VM that runs or is suspended takes one",
        };
        let detail = format!(
            "VM '{}' has {SNAPSHOTS_MAX} snapshots, and {what} for a while: delete one first",
            vm.name
        );
        return Err(Problem::new(ErrorCode::LimitExceeded, detail));
    }
    let id = SnapshotId::new();
    let snapshot = Snapshot {
        id,
        vm: vm.id,
        name: purpose.name(id),
        description: purpose.description().to_owned(),
        parent: known.iter().find(|known| known.current).map(|known| known.id),
        created: Timestamp::now(),
        state: SnapshotState::Taking,
        quiesced: None,
        current: false,
        memory: false,
        disks,
    };
    snapshots::insert(write, &snapshot).await?;
    Ok(snapshot)
}
