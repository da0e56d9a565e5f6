//! The memory that snapshots of VMs keep on datastores. It is in files beside a VM's first disk, and descriptors do not say which snapshots
//! have it: the inventory that is lost did.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use vmseal_api::host::HostAgent;
use vmseal_api::host::survey::{FoundDescriptor, FoundVm};
use vmseal_api::host::version::SURVEY_MEMORIES;
use vmseal_api::id::{DatastoreId, VmId};

use super::Known;
use crate::hosts::HostView;
use crate::operation::Definition;

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
        if let Some(place) = elsewhere(known, vm) {
            let there = match others.entry(place) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(surveyed(agent, known, place).await),
            };
            let taken = there.as_deref().map_err(Clone::clone);
            if let Err(why) = taken.and_then(|there| take(known, vm, place, there)) {
                unknown.insert(vm.vm, why);
                continue;
            }
        }
        if let Some(why) = unusable(known, vm) {
            unknown.insert(vm.vm, why);
        }
    }
    unknown
}

/// Takes what was found of the memory beside a VM's first disk, among the VMs there; or says why it is not known.
fn take(
    known: &Known,
    vm: &mut FoundVm,
    place: DatastoreId,
    there: &[FoundVm],
) -> Result<(), String> {
    // Without its first disk a VM is refused for that.
    let Some(spec) = known.places.get(&place) else { return Ok(()) };
    let is_its =
        |it: &&FoundVm| it.vm == vm.vm && matches!(it.descriptor, FoundDescriptor::Read { .. });
    let its = there.iter().find(is_its).ok_or_else(|| {
        let (id, here) = (vm.vm, known.on.location.path().display());
        format!(
            "its first disk is at {}, where its host cannot read {id}/vm.json, and does not see which memory its snapshots keep. Adopt it when the host can, or copy that file from {here} to there",
            spec.location.path().display()
        )
    })?;
    vm.memories.clone_from(&its.memories);
    vm.unusable_memories.clone_from(&its.unusable_memories);
    Ok(())
}

/// Why it is not known which memory the snapshots of a VM keep that the inventory does not have, although its first disk was looked at:
/// files of it cannot be used. Adopted now, the snapshots would come back without memory, whatever becomes of the files.
fn unusable(known: &Known, found: &FoundVm) -> Option<String> {
    let FoundDescriptor::Read { descriptor, .. } = &found.descriptor else { return None };
    if known.vms.contains_key(&found.vm) || found.unusable_memories.is_empty() {
        return None;
    }
    let first = descriptor.disks.first().and_then(|disk| disk.datastore);
    let place = first.and_then(|place| known.places.get(&place));
    let location = place.map_or(&known.on.location, |place| &place.location);
    let said = found.unusable_memories.iter().map(|it| {
        let named = descriptor.snapshots.iter().find(|of| of.snapshot == it.snapshot);
        let name = named.map_or_else(|| it.snapshot.to_string(), |of| of.name.clone());
        format!("of snapshot '{name}', {}", it.detail)
    });
    let said: Vec<String> = said.collect();
    Some(format!(
        "its host cannot use files in {} that are memory of its snapshots: {}. Adopt it when the host can, or put whole files in their place; to have such a snapshot come back without memory, move its file to another directory",
        location.path().join(found.vm.to_string()).display(),
        said.join("; "),
    ))
}

/// What a VM with snapshots loses that is adopted while its host's agent is of an earlier version: the survey did not look for memory.
pub(super) fn lost(view: &HostView, definition: &Definition) -> Option<String> {
    // Of a VM that the inventory has, it has the snapshots as well.
    let is_new = definition.replaces.is_none() && definition.replaces_devices.is_none();
    if !is_new || definition.spec.snapshots.is_empty() || view.has(SURVEY_MEMORIES) {
        return None;
    }
    Some(format!(
        "it has snapshots, and the agent of host '{}' does not tell which of them keep memory: all come back without it, for good. To keep it, upgrade vmseal there before the VM is adopted",
        definition.host_name
    ))
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
