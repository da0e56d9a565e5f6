//! The descriptors of VMs on the simulated datastores.

use std::collections::{BTreeMap, BTreeSet};

use vmseal_api::datastore::HeaderRole;
use vmseal_api::host::descriptor::VmDescriptor;
use vmseal_api::host::survey::{
    DatastoreSurvey, FoundDescriptor, FoundVm, HeaderDisk, KeptMemory, UnusableMemory,
};
use vmseal_api::host::version::SURVEY_MEMORIES;
use vmseal_api::host::{DatastoreLocation, DiskFacts};
use vmseal_api::id::{DatastoreId, DiskId, SnapshotId, VmId};
use vmseal_api::problem::Problem;
use vmseal_api::usage::{HostUsage, UsageCounters, UsageOnHost};

use super::{Inside, SimulatedDisk, SimulatedHost};
use crate::rules;
use crate::storage::descriptor;

impl SimulatedHost {
    /// Changes the descriptors of a VM on all its datastores, as an attacker would who can write to them.
    pub fn change_descriptors(&self, vm: VmId, change: impl Fn(&mut VmDescriptor)) {
        let mut inside = self.inside();
        let all = inside.persisted.descriptors.iter_mut();
        all.filter(|((_, of), _)| *of == vm).for_each(|(_, descriptor)| change(descriptor));
    }

    /// Puts an image of another key in the place of a disk's, with a header that names the right one.
    pub fn exchange_image(&self, disk: DiskId) {
        self.exchange_image_for(disk, "another");
    }

    /// The same, of the key with this check value.
    pub fn exchange_image_for(&self, disk: DiskId, check: &str) {
        if let Some(there) = self.inside().persisted.disks.get_mut(&disk) {
            there.checks = BTreeSet::from([check.to_owned()]);
        }
    }

    /// Removes the descriptors of a VM from its datastores.
    pub fn lose_descriptors(&self, vm: VmId) {
        self.inside().persisted.descriptors.retain(|(_, of), _| *of != vm);
    }

    /// Removes the descriptor of a VM from one of them.
    pub fn lose_descriptor_on(&self, datastore: DatastoreId, vm: VmId) {
        self.inside().persisted.descriptors.remove(&(datastore, vm));
    }

    /// Has the file with the memory of a snapshot be one that cannot be used, for this reason.
    pub fn spoil_memory(&self, snapshot: SnapshotId, why: &str) {
        self.inside().persisted.unusable_memories.insert(snapshot, why.to_owned());
    }

    /// Has the file be as it was before.
    pub fn mend_memory(&self, snapshot: SnapshotId) {
        self.inside().persisted.unusable_memories.remove(&snapshot);
    }
}

impl Inside {
    /// Writes the descriptors of a VM to the datastores that have a disk of it.
    pub fn describe_on_datastores(&mut self, vm: VmId) -> Result<(), Problem> {
        let known = self.agent.vms.get(&vm).ok_or_else(|| rules::unknown(vm))?;
        if known.spec.key.is_some() && known.kek.is_none() {
            return Ok(());
        }
        let there = |disk| self.persisted.disks.contains_key(disk);
        let with_disks = known.spec.disks().filter(|disk| there(&disk.disk));
        let places: Vec<_> = with_disks.map(|disk| disk.datastore.datastore).collect();
        let spec = known.registered();
        for here in places {
            if let (Some(key), Some(kek)) = (&spec.key, &known.kek) {
                let before = self.persisted.descriptors.get(&(here, vm));
                let authentic =
                    before.map(|it| descriptor::is_authentic(it, key, kek)).transpose()?;
                let all = self.persisted.disks.values();
                let mut encrypted =
                    all.filter(|it| (it.vm, it.datastore) == (vm, here) && !it.keys.is_empty());
                // As on a real host: a key that does not open the disks is put into no descriptor.
                let opens =
                    encrypted.all(|it| it.keys.contains(key) && it.checks.contains(&key.check));
                if authentic != Some(true) && !opens {
                    continue;
                }
            }
            let before = self.persisted.descriptors.get(&(here, vm));
            let descriptor = descriptor::of(spec, here, known.kek.as_ref(), before)?;
            self.persisted.descriptors.insert((here, vm), descriptor);
        }
        Ok(())
    }

    /// What its guests use: the same each.
    pub fn used(&self) -> HostUsage {
        let used = |vm: &VmId| UsageOnHost {
            vm: *vm,
            counters: UsageCounters {
                cpu_nanoseconds: 1_000_000_000,
                memory_resident: 16 << 20,
                ..UsageCounters::default()
            },
        };
        let vms = self.persisted.guests.keys().map(used).collect();
        HostUsage { vms, memory_available: Some(32 << 30) }
    }

    pub fn survey(&self, location: &DatastoreLocation) -> Result<DatastoreSurvey, Problem> {
        self.may_mount(location)?;
        let path = location.path();
        let mark = self.persisted.storage.mark(path);
        let here = self.persisted.descriptors.iter().filter(|((on, _), _)| Some(*on) == mark);
        let vms = here.map(|((_, vm), descriptor)| {
            let (memories, unusable_memories) = self.memories_beside(descriptor, mark);
            let descriptor = Box::new(descriptor.clone());
            let descriptor = FoundDescriptor::Read { descriptor, made: Vec::new() };
            FoundVm { vm: *vm, descriptor, memories, unusable_memories }
        });
        let mut vms: Vec<_> = vms.collect();
        let images = self.persisted.disks.iter().filter(|(_, it)| Some(it.datastore) == mark);
        let mut without: BTreeMap<VmId, Vec<(&DiskId, &SimulatedDisk)>> = BTreeMap::new();
        for (disk, image) in images.filter(|(_, image)| !vms.iter().any(|it| it.vm == image.vm)) {
            without.entry(image.vm).or_default().push((disk, image));
        }
        for (vm, images) in without {
            let key = images.iter().find_map(|(_, image)| image.keys.first());
            let key = key.map(|key| (key.provider, key.key_id.clone()));
            let image = |(disk, image): &(&DiskId, &SimulatedDisk)| {
                let offset = match &image.facts {
                    DiskFacts::Raw => 0,
                    DiskFacts::Luks2 { data_offset, .. } => *data_offset,
                };
                let size = image.length - offset;
                // A disk in the clear has no header.
                let role = if image.keys.is_empty() { HeaderRole::Data } else { image.role };
                HeaderDisk { disk: **disk, size, facts: image.facts.clone(), role }
            };
            let images = images.iter().map(image).collect();
            let descriptor = FoundDescriptor::Missing { images, key };
            let (memories, unusable_memories) = (Vec::new(), Vec::new());
            vms.push(FoundVm { vm, descriptor, memories, unusable_memories });
        }
        Ok(DatastoreSurvey { mark, vms, incomplete: None })
    }

    /// The memory that snapshots of a VM keep, where its first disk is on this datastore, and what cannot be used of it. An agent of an
    /// earlier version does not look for it.
    fn memories_beside(
        &self,
        descriptor: &VmDescriptor,
        here: Option<DatastoreId>,
    ) -> (Vec<KeptMemory>, Vec<UnusableMemory>) {
        let (mut kept, mut unusable) = (Vec::new(), Vec::new());
        let first = descriptor.disks.first();
        let is_elsewhere =
            first.is_none_or(|disk| disk.datastore.is_some_and(|at| Some(at) != here));
        if is_elsewhere || !self.features.iter().any(|feature| feature == SURVEY_MEMORIES) {
            return (kept, unusable);
        }
        for described in &descriptor.snapshots {
            let snapshot = described.snapshot;
            if let Some(why) = self.persisted.unusable_memories.get(&snapshot) {
                unusable.push(UnusableMemory { snapshot, detail: why.clone() });
            } else if let Some(memory) = self.persisted.kept_memories.get(&snapshot) {
                kept.push(KeptMemory { snapshot, generation: memory.generation });
            }
        }
        (kept, unusable)
    }
}
