//! What another control plane is told of the snapshots of a VM that is to go there.

use sqlx::SqliteConnection;
use vmseal_api::model::SnapshotState;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::remote::SnapshotOfArrival;

use crate::store::vms::Vm;
use crate::store::{memory_generations, snapshots};

/// Those of a VM.
///
/// # Errors
/// `wrong-state`: one is not complete. The inventory's.
pub(super) async fn of_vm(
    read: &mut SqliteConnection,
    vm: &Vm,
) -> Result<Vec<SnapshotOfArrival>, Problem> {
    let mut all = Vec::new();
    for known in snapshots::of_vm(read, vm.id).await? {
        if known.state != SnapshotState::Ready {
            let detail = format!(
                "snapshot '{1}' of VM '{0}' is not complete, and goes nowhere: delete it first (vmseal snapshot delete {0} {1})",
                vm.name, known.name
            );
            return Err(Problem::new(ErrorCode::WrongState, detail));
        }
        let memory_generation = memory_generations::of_snapshot(read, known.id).await?;
        all.push(SnapshotOfArrival {
            id: known.id,
            name: known.name,
            description: known.description,
            parent: known.parent,
            created: known.created,
            quiesced: known.quiesced,
            current: known.current,
            memory: known.memory,
            memory_generation,
            disks: known.disks,
        });
    }
    Ok(all)
}
