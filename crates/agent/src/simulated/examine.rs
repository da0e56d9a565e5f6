//! Whether a VM could be changed now.

use vmseal_api::host::{VmChange, VmSpec};
use vmseal_api::id::VmId;
use vmseal_api::problem::Problem;

use super::Inside;
use super::starting::AtStart;
use crate::rules::exclusion::Action;
use crate::rules::plugging::{with_disk, with_link, with_nic, without_disk, without_nic};
use crate::rules::{self, find_disk, restored};

impl Inside {
    pub fn examine_change(&mut self, vm: VmId, change: &VmChange) -> Result<(), Problem> {
        match change {
            VmChange::AddDisk { disk } => {
                let known = self.known(vm)?;
                let key = rules::key_state(&known.spec, known.key_held);
                let new = with_disk(known.registered(), disk, key)?;
                self.examine_registration(&new)
            }
            VmChange::RemoveDisk { disk } => {
                let registered = self.known(vm)?.registered().clone();
                let disk = find_disk(&registered, *disk)?;
                self.examine_registration(&without_disk(&registered, disk))?;
                // A guest that runs does not have it any more when it is deleted.
                let mut situation = self.situation(vm)?;
                situation.unused.push(disk.disk);
                situation.may(Action::DeleteDisk, Some(disk)).map(drop)
            }
            VmChange::GrowDisk { disk, size } => self.may_grow(vm, *disk, *size).map(drop),
            VmChange::Start { first, discard_memory: true, .. } => {
                self.examine_start(vm, *first, AtStart::Discarded)
            }
            VmChange::Start { first, discard_memory: false, generation } => {
                self.examine_start(vm, *first, AtStart::Loaded(*generation))
            }
            VmChange::AddNic { nic } => {
                let new = with_nic(self.known(vm)?.registered(), nic)?;
                self.examine_registration(&new)
            }
            VmChange::RemoveNic { nic } => {
                let new = without_nic(self.known(vm)?.registered(), *nic)?;
                self.examine_registration(&new)
            }
            VmChange::SetLink { nic, link } => {
                let new = with_link(self.known(vm)?.registered(), *nic, *link)?;
                self.examine_registration(&new)
            }
            VmChange::Restored { spec } => {
                let all = self.persisted.descriptors.iter().filter(|((_, of), _)| *of == spec.vm);
                all.map(|(_, there)| there).try_for_each(|there| restored::check(spec, there))
            }
        }
    }

    fn examine_registration(&mut self, new: &VmSpec) -> Result<(), Problem> {
        // Repeating the same is always allowed.
        if self.known(new.vm)?.registered() == new {
            return Ok(());
        }
        match self.persisted.guests.contains_key(&new.vm) {
            true => self.may_set_running(new).map(drop),
            false => self.may_register(new),
        }
    }
}
