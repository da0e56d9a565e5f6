//! The memory that snapshots of VMs keep on datastores. It is in files beside a VM's first disk, and descriptors do not say which snapshots
//! have it: the inventory that is lost did.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use vmseal_api::host::HostAgent;
use vmseal_api::host::survey::{FoundDescriptor, FoundVm};
use vmseal_api::id::{DatastoreId, VmId};

use super::Known;

/// Has what was found of VMs say which memory their snapshots keep, also where the first disk is on another datastore of the host. Returns of
/// which VMs that is not known, and why: adopted now, their snapshots would lose it.
pub(super) async fn complete(
    agent: &dyn HostAgent,
    known: &Known,
    found: &mut [FoundVm],
) -> HashMap<VmId, String> {
    let mut others: HashMap<DatastoreId, Result<Vec<FoundVm>, String>> = HashMap::new();
    let mut unknown = HashMap::new();
    for vm in found {
        let Some(place) = elsewhere(known, vm) else { continue };
        let there = match others.entry(place) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(surveyed(agent, known, place).await),
        };
        match there {
            Ok(there) => {
                let its = there.iter().find(|it| it.vm == vm.vm);
                vm.memories = its.map(|it| it.memories.clone()).unwrap_or_default();
            }
            Err(why) => {
                unknown.insert(vm.vm, why.clone());
            }
        }
    }
    unknown
}

/// The other datastore that has the first disk of a VM with snapshots that the inventory does not have.
fn elsewhere(known: &Known, found: &FoundVm) -> Option<DatastoreId> {
    let FoundDescriptor::Read { descriptor, .. } = &found.descriptor else { return None };
    if known.vms.contains_key(&found.vm) || descriptor.snapshots.is_empty() {
        return None;
    }
    descriptor.disks.first()?.datastore.filter(|place| *place != known.datastore.id)
}

/// The VMs there; or why it is not known which these are.
async fn surveyed(
    agent: &dyn HostAgent,
    known: &Known,
    place: DatastoreId,
) -> Result<Vec<FoundVm>, String> {
    // Without its first disk a VM is refused for that.
    let Some(spec) = known.places.get(&place) else { return Ok(Vec::new()) };
    match agent.survey_datastore(spec.location.clone()).await {
        Ok(survey) if survey.mark == Some(place) => Ok(survey.vms),
        Ok(_) => Ok(Vec::new()),
        Err(problem) => Err(format!(
            "its first disk is at {}, where its host cannot see which memory its snapshots keep: {problem}. Adopt it when the host can",
            spec.location.path().display()
        )),
    }
}
