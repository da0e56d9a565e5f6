//! Which VMs of a datastore a request names.

use std::collections::HashMap;

use vmseal_api::host::survey::{FoundDescriptor, FoundVm};
use vmseal_api::id::VmId;

use crate::store::vms::Vm;

/// Whether a VM is called by one of these names or ids. A VM of the inventory, whose name is shown, may have another one in its descriptor;
/// that is not meant where the inventory has another VM of this name.
pub(super) fn is_one_of(inventory: &HashMap<VmId, Vm>, found: &FoundVm, names: &[String]) -> bool {
    let here = inventory.get(&found.vm).map(|vm| &vm.name);
    let is_taken = |name: &String| here.is_some() && inventory.values().any(|vm| vm.name == *name);
    let described = match &found.descriptor {
        FoundDescriptor::Read { descriptor, .. } => Some(&descriptor.name),
        FoundDescriptor::Missing { .. } | FoundDescriptor::Unusable { .. } => None,
    };
    let described = described.filter(|&name| !is_taken(name));
    let is_it = |asked: &String| {
        Some(asked) == here || Some(asked) == described || *asked == found.vm.to_string()
    };
    names.iter().any(is_it)
}
