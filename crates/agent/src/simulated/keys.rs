//! The keys that open the disks of a simulated host.

use std::collections::BTreeSet;

use vmseal_api::host::{KeyReference, OtherKey, ShareDataKeys};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::{Inside, gone};
use crate::rules::exclusion::Action;
use crate::rules::{self, find_disk};

impl Inside {
    /// The encrypted disks of a VM, all of which open with its registered key.
    pub fn key_opens(
        &mut self,
        vm: VmId,
        registered: &KeyReference,
    ) -> Result<Vec<DiskId>, Problem> {
        self.situation(vm)?.may(Action::ChangeKeys, None)?;
        let known = self.known(vm)?;
        let key = rules::key_state(&known.spec, known.key_held);
        rules::check_key_change(&known.spec, key, registered)?;
        let spec = known.spec.clone();
        let encrypted: Vec<_> = spec.disks().filter(|disk| disk.encrypted).collect();
        for disk in &encrypted {
            if disk.facts.is_none() {
                let what = format!("has not made its disk '{}' yet", disk.name);
                return Err(rules::wrong_state(&spec, &what));
            }
            self.open_disk(&spec, disk)?;
        }
        Ok(encrypted.into_iter().map(|disk| disk.disk).collect())
    }

    pub fn add_key(&mut self, vm: VmId, other: &OtherKey) -> Result<(), Problem> {
        let disks = self.key_opens(vm, &other.beside)?;
        self.agent.key_box.open(vm, &other.key, &other.sealed)?;
        self.set_keys(&disks, [&other.beside, &other.key])
    }

    pub fn drop_other_keys(&mut self, vm: VmId, keep: &KeyReference) -> Result<(), Problem> {
        let disks = self.key_opens(vm, keep)?;
        self.set_keys(&disks, [keep])
    }

    pub fn share_data_keys(&mut self, vm: VmId, shared: &ShareDataKeys) -> Result<(), Problem> {
        let encrypted = self.key_opens(vm, &shared.key)?;
        let spec = self.known(vm)?.spec.clone();
        shared.disks.iter().try_for_each(|disk| find_disk(&spec, *disk).map(drop))?;
        for disk in encrypted.iter().filter(|disk| shared.disks.contains(disk)) {
            let Some(there) = self.persisted.disks.get_mut(disk) else { continue };
            if there.keys.len() > 1 {
                return Err(Problem::new(ErrorCode::InUse, "a disk opens with two keys"));
            }
            there.shared = true;
        }
        Ok(())
    }

    fn set_keys<const N: usize>(
        &mut self,
        disks: &[DiskId],
        keys: [&KeyReference; N],
    ) -> Result<(), Problem> {
        for (written, disk) in disks.iter().enumerate() {
            if self.halfway && written > 0 {
                return Err(gone());
            }
            if let Some(there) = self.persisted.disks.get_mut(disk) {
                there.checks = BTreeSet::from(keys.map(|key| key.check.clone()));
                there.keys = keys.map(KeyReference::clone).into();
            }
        }
        Ok(())
    }
}
