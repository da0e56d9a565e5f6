//! The memory that snapshots of VMs keep on datastores. It is in files beside a VM's first disk, and descriptors do not say which snapshots
//! have it: the inventory that is lost did.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use vmseal_api::host::HostAgent;
use vmseal_api::host::survey::{FoundDescriptor, FoundVm};
use vmseal_api::id::DatastoreId;

use super::Known;

/// Has what was found of VMs say which memory their snapshots keep, also where the first disk is on another datastore of the host. A datastore
/// that cannot be looked at has none: the disk is not there, either.
pub(super) async fn complete(agent: &dyn HostAgent, known: &Known, found: &mut [FoundVm]) {
    let mut others: HashMap<DatastoreId, Vec<FoundVm>> = HashMap::new();
    for vm in found {
        let Some(place) = elsewhere(known, vm) else { continue };
        let there = match others.entry(place) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(surveyed(agent, known, place).await),
        };
        let its = there.iter().find(|it| it.vm == vm.vm);
        vm.memories = its.map(|it| it.memories.clone()).unwrap_or_default();
    }
}

/// The other datastore that has the first disk of a VM with snapshots that the inventory does not have.
fn elsewhere(known: &Known, found: &FoundVm) -> Option<DatastoreId> {
    let FoundDescriptor::Read { descriptor, .. } = &found.descriptor else { return None };
    if known.vms.contains_key(&found.vm) || descriptor.snapshots.is_empty() {
        return None;
    }
    descriptor.disks.first()?.datastore.filter(|place| *place != known.datastore.id)
}

async fn surveyed(agent: &dyn HostAgent, known: &Known, place: DatastoreId) -> Vec<FoundVm> {
    let Some(spec) = known.places.get(&place) else { return Vec::new() };
    match agent.survey_datastore(spec.location.clone()).await {
        Ok(survey) if survey.mark == Some(place) => survey.vms,
        Ok(_) => Vec::new(),
        Err(problem) => {
            tracing::warn!(datastore = %place, %problem, "which memory snapshots keep there is not known");
            Vec::new()
        }
    }
}
