//! Disks that linked clones stand on: they get copies, and the clones keep the former files, which they share, as when the VM is deleted.

use vmseal_api::host::version::MIRROR_PARENTS;
use vmseal_api::problem::Problem;

use super::Wanted;
use crate::operation::Operation;
use crate::services::vms::{named, require_no_clones};
use crate::services::{Services, features};
use crate::store::disks::Disk;
use crate::store::links;

/// What linked clones keep of disks that an operation copies. Refuses to convert the files of a VM with clones, which read them.
pub(super) async fn examine(services: &Services, wanted: &Wanted) -> Result<Vec<String>, Problem> {
    let Wanted { vm, operation, .. } = wanted;
    let mut read = services.store.read().await?;
    if operation.is_in_place() {
        require_no_clones(&mut read, vm, None).await?;
        return Ok(Vec::new());
    }
    let mut keeps = Vec::new();
    for encrypted in [false, true] {
        // Also one that is copied as it is.
        let copied = |disk: &&Disk| disk.encrypted == encrypted;
        let disks: Vec<_> = wanted.disks().filter(copied).map(|disk| disk.id).collect();
        let clones = links::clones_of_disks(&mut read, vm.id, &disks).await?;
        if !clones.is_empty() {
            keeps.push(kept(operation, encrypted, &clones));
        }
    }
    drop(read);
    if !keeps.is_empty() {
        let cannot = "copy disks that linked clones stand on";
        features::require(services, vm, MIRROR_PARENTS, cannot)?;
    }
    Ok(keeps)
}

/// What clones keep of disks that were encrypted, or not.
fn kept(operation: &Operation, encrypted: bool, clones: &[String]) -> String {
    let form = if encrypted { "under the former data key" } else { "in the clear" };
    let advice = match operation {
        Operation::EncryptVm { .. } => ": encrypt them as well (vmseal vm encrypt NAME)",
        Operation::DeepRecryptVm { .. } => {
            ": give them data of their own as well (vmseal vm recrypt NAME --deep)"
        }
        Operation::MoveVm { .. } => ", where it is: move them as well (vmseal vm move NAME)",
        _ => "",
    };
    format!("linked clones {} keep what they share with it, {form}{advice}", named(clones))
}
