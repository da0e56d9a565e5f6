//! The VMs of an inventory that was restored from a backup of before they got other keys.

use std::collections::{BTreeSet, HashMap};

use vmseal_api::datastore::ImageContent;
use vmseal_api::host::descriptor::VmDescriptor;
use vmseal_api::host::survey::{FoundDescriptor, FoundVm};
use vmseal_api::host::{KeyReference, VmSpec};
use vmseal_api::id::{ProviderId, VmId};
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::Problem;

use super::Known;
use crate::operation::Definition;
use crate::services::Services;
use crate::store::keys;
use crate::store::vms::Vm;

/// The VMs that the inventory has with another key than their descriptors or the headers of their disks name: they were
/// recrypted after the backup from which it was restored. Only the key is taken from there.
pub(super) async fn rekeyed(
    services: &Services,
    known: &Known,
    found: &[FoundVm],
) -> Result<HashMap<VmId, Result<Definition, String>>, Problem> {
    let mut rekeyed = HashMap::new();
    for found in found {
        let Some((vm, descriptor)) = encrypted(known, found) else { continue };
        let key = match descriptor.key.as_ref().filter(|key| Some(*key) != vm.key.as_ref()) {
            Some(key) => key.clone(),
            None => match key_of_headers(services, known, vm).await? {
                None => continue,
                Some(Ok(key)) => key,
                Some(Err(why)) => {
                    rekeyed.insert(vm.id, Err(why));
                    continue;
                }
            },
        };
        let Some((vm, spec)) = crate::hosts::definition(&services.store, vm.id).await? else {
            continue;
        };
        let definition = Definition {
            spec: VmSpec { key: Some(key), ..spec },
            host: vm.host,
            host_name: vm.host_name,
            policy: vm.policy,
            policy_name: vm.policy_name,
            replaces: vm.key,
            replaces_devices: None,
            replaces_snapshots: None,
            memories: Vec::new(),
        };
        rekeyed.insert(vm.id, Ok(definition));
    }
    Ok(rekeyed)
}

/// A VM with a key that the inventory has on the host that was asked, and that no task makes or removes, with its descriptor.
pub(super) fn encrypted<'a>(
    known: &'a Known,
    found: &'a FoundVm,
) -> Option<(&'a Vm, &'a VmDescriptor)> {
    let FoundDescriptor::Read { descriptor, .. } = &found.descriptor else { return None };
    let vm = known.vms.get(&found.vm).filter(|vm| vm.lifecycle == Lifecycle::Ready)?;
    let is_its = descriptor.vm == vm.id && vm.key.is_some() && vm.host == known.on.host;
    is_its.then_some((vm, &**descriptor))
}

/// The key that the headers of a VM's disks name, or why it cannot be had; none where they name that of the inventory, or not one of
/// this VM. Its descriptor may have been overwritten with the inventory's, by an earlier vmseal.
async fn key_of_headers(
    services: &Services,
    known: &Known,
    vm: &Vm,
) -> Result<Option<Result<KeyReference, String>>, Problem> {
    let Some(own) = &vm.key else { return Ok(None) };
    let mut named: Option<BTreeSet<(ProviderId, &str)>> = None;
    for ((_, disk), image) in known.images.iter().filter(|((of, _), _)| *of == vm.id) {
        let ImageContent::Vmseal { claims } = &image.content else { continue };
        let of_disk = claims.iter().filter(|claim| (claim.vm, claim.disk) == (vm.id, *disk));
        let of_disk = of_disk.map(|claim| (claim.provider, claim.key_id.as_str()));
        let of_disk: BTreeSet<_> = of_disk.collect();
        named = Some(match named {
            None => of_disk,
            Some(before) => before.intersection(&of_disk).copied().collect(),
        });
    }
    let named = named.unwrap_or_default();
    if named.contains(&(own.provider, own.key_id.as_str())) {
        return Ok(None);
    }
    let Some((provider, key_id)) = named.into_iter().next() else { return Ok(None) };
    let cannot = |why: &dyn std::fmt::Display| {
        let key = &own.key_id;
        Some(Err(format!(
            "the headers of its disks name key '{key_id}', and the inventory has key '{key}': {why}"
        )))
    };
    if !known.providers.contains(&provider) {
        return Ok(cannot(&format!("provider {provider}, which has that, is not here")));
    }
    let owner = keys::owner(&mut *services.store.read().await?, provider, key_id).await?;
    if let Some(other) = owner.filter(|owner| *owner != vm.id) {
        // Nobody gets another VM's key by writing its id to a datastore.
        return Ok(cannot(&format!("that is the key of VM {other}")));
    }
    Ok(match services.providers.get(provider)?.reference_of(vm.id, key_id).await {
        Ok(key) => Some(Ok(key)),
        Err(problem) => cannot(&problem),
    })
}
