//! What the descriptor of a VM says otherwise than the inventory: name, size, policy, what users say of a VM, and its snapshots. Nothing of it
//! is authenticated. Where a descriptor says nothing, as that of an agent of an earlier version, nothing is compared.

use std::collections::BTreeMap;

use vmseal_api::host::AboutVm;
use vmseal_api::host::descriptor::{VmDescriptor, WITHOUT_ABOUT, WITHOUT_TREATMENT};
use vmseal_api::id::SnapshotId;
use vmseal_api::model::SnapshotState;
use vmseal_api::size::Size;

use super::definition::about;
use crate::store::snapshots::Snapshot;
use crate::store::vms::Vm;

/// How much of a description is shown, in characters: enough to know it again.
const SHOWN_MAX: usize = 60;

/// What a descriptor and the inventory say of one thing; nothing where both say the same.
fn differs<T: PartialEq>(
    what: &str,
    (there, here): (T, T),
    show: impl Fn(&T) -> String,
) -> Option<String> {
    (there != here).then(|| {
        format!("{what}: {} on the datastore, {} in the inventory", show(&there), show(&here))
    })
}

/// What a descriptor says otherwise of a VM than the inventory, for people: a sentence each.
pub(crate) fn differing(vm: &Vm, snapshots: &[Snapshot], there: &VmDescriptor) -> Vec<String> {
    let name = |name: &&String| format!("'{name}'");
    let mut said = Vec::new();
    said.extend(differs("name", (&there.name, &vm.name), name));
    if let Some(vcpus) = there.vcpus {
        said.extend(differs("processors", (vcpus, vm.vcpus), u32::to_string));
    }
    if let Some(memory) = there.memory {
        said.extend(differs("memory", (memory, vm.memory), |it| Size(*it).to_string()));
    }
    if let Some(policy) = &there.policy {
        said.extend(differs("policy", (policy, &vm.policy_name), name));
    }
    said.extend(of_users(vm, there));
    said.extend(of_snapshots(snapshots, there));
    said
}

/// What users say of the VM.
fn of_users(vm: &Vm, there: &VmDescriptor) -> Vec<String> {
    let here = about(vm);
    let on_or_off = |is: &bool| String::from(if *is { "on" } else { "off" });
    let mut said = Vec::new();
    if there.version > WITHOUT_ABOUT {
        let AboutVm { description, labels, autostart, .. } = &there.about;
        said.extend(differs("description", (description, &here.description), |it| shown(it)));
        said.extend(differs("labels", (labels, &here.labels), |it| labelled(it)));
        said.extend(differs("autostart", (*autostart, here.autostart), on_or_off));
    }
    if there.version > WITHOUT_TREATMENT {
        let AboutVm { migration_encryption, on_drain, template, .. } = there.about;
        let encryption = (migration_encryption, here.migration_encryption);
        let by_name = differs("migration-encryption", encryption, |it| it.name().to_owned());
        said.extend(by_name);
        said.extend(differs("on-drain", (on_drain, here.on_drain), |it| it.name().to_owned()));
        said.extend(differs("template", (template, here.template), on_or_off));
    }
    said
}

fn of_snapshots(here: &[Snapshot], there: &VmDescriptor) -> Vec<String> {
    let mut said = Vec::new();
    for snapshot in &there.snapshots {
        if !here.iter().any(|known| known.id == snapshot.snapshot) {
            let (name, created) = (&snapshot.name, snapshot.created);
            said.push(format!(
                "snapshot '{name}' of {created}: on the datastore, and not in the inventory"
            ));
        }
    }
    // One that is being taken or deleted is in no descriptor.
    let whole = || here.iter().filter(|known| known.state == SnapshotState::Ready);
    for known in whole() {
        if !there.snapshots.iter().any(|snapshot| snapshot.snapshot == known.id) {
            said.push(format!(
                "snapshot '{}': in the inventory, and not on the datastore",
                known.name
            ));
        }
    }
    if said.is_empty() {
        let current = there.snapshots.iter().find(|it| it.current);
        let current: Option<(SnapshotId, &str)> = current.map(|it| (it.snapshot, &*it.name));
        let known = whole().find(|it| it.current).map(|it| (it.id, &*it.name));
        let name = |it: &Option<(SnapshotId, &str)>| match it {
            Some((_, name)) => format!("'{name}'"),
            None => "none".to_owned(),
        };
        said.extend(differs("the snapshot that its disks began with", (current, known), name));
    }
    said
}

/// A description, on one line and not too long.
fn shown(description: &str) -> String {
    if description.is_empty() {
        return "none".to_owned();
    }
    let more = if description.chars().count() > SHOWN_MAX { "…" } else { "" };
    let begin: String = description.chars().take(SHOWN_MAX).collect();
    format!("{begin:?}{more}")
}

fn labelled(labels: &BTreeMap<String, String>) -> String {
    if labels.is_empty() {
        return "none".to_owned();
    }
    let labels = labels.iter().map(|(key, value)| format!("{key}={value}"));
    labels.collect::<Vec<_>>().join(",")
}
