//! What the descriptors of VMs say otherwise than the inventory. After that was restored from a backup, it is what was changed since. It is
//! told and not taken, apart from snapshots ([`super::newer`]).

use std::collections::HashMap;

use vmseal_api::host::survey::{FoundDescriptor, FoundVm};
use vmseal_api::id::VmId;
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::Problem;

use super::Known;
use crate::hosts;
use crate::services::Services;
use crate::store::snapshots;

/// The VMs of the inventory whose descriptors say something else, and what, for people: a sentence each.
pub(super) async fn differing(
    services: &Services,
    known: &Known,
    found: &[FoundVm],
) -> Result<HashMap<VmId, Vec<String>>, Problem> {
    let mut differing = HashMap::new();
    let mut read = services.store.read().await?;
    for found in found {
        let FoundDescriptor::Read { descriptor, .. } = &found.descriptor else { continue };
        let vm = known.vms.get(&found.vm).filter(|vm| vm.lifecycle == Lifecycle::Ready);
        let Some(vm) = vm.filter(|vm| vm.id == descriptor.vm) else { continue };
        let snapshots = snapshots::of_vm(&mut read, vm.id).await?;
        let said = hosts::differing(vm, &snapshots, descriptor);
        if !said.is_empty() {
            differing.insert(vm.id, said);
        }
    }
    Ok(differing)
}
