//! The start of a guest.

use std::path::Path;

use vmseal_api::boot::BootDevice;
use vmseal_api::host::{DiskSpec, Power, StopReason, VmSpec};
use vmseal_api::id::VmId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id;

use super::calls::{Later, check_key};
use super::running::{RunningGuest, open_medium};
use super::{Inside, Work};
use crate::rules;
use crate::rules::exclusion::{Action, Permission};
use crate::storage::memory;

/// What becomes of the saved memory of a VM that is started.
#[derive(Clone, Copy)]
pub enum AtStart {
    /// Its guest goes on from it; it must be of this generation, where one is given.
    Loaded(Option<u64>),
    /// It is given up before.
    Discarded,
}

impl Inside {
    /// Checks that a VM may be started, where it is suspended with the memory that is saved or without.
    fn may_power_on(
        &mut self,
        vm: VmId,
        first: Option<BootDevice>,
        memory: AtStart,
    ) -> Result<Permission, Problem> {
        let may = self.situation(vm)?.may(Action::PowerOn, None)?;
        if may == Permission::Already {
            return Ok(may);
        }
        let disks: Vec<_> = self.known(vm)?.spec.disks().map(|disk| disk.disk).collect();
        self.check_no_conversion(vm, &disks)?;
        let known = self.known(vm)?;
        rules::check_not_sent(&known.spec, known.jobs.sends_at_rest())?;
        let key = rules::key_state(&known.spec, known.key_held);
        rules::check_start(&known.spec, key, |disk| known.has_made(disk))?;
        rules::boot::check_once(&known.spec, first)?;
        if let (Power::Suspended, AtStart::Loaded(expected)) = (known.power, memory) {
            rules::check_resume(&known.spec, first)?;
            self.check_generation(vm, expected)?;
        }
        Ok(may)
    }

    /// Checks that the saved memory of a VM is the one that is expected.
    fn check_generation(&mut self, vm: VmId, expected: Option<u64>) -> Result<(), Problem> {
        let found = self.persisted.suspended.get(&vm).map(|guest| guest.generation);
        match (found, expected) {
            (Some(found), Some(expected)) if found != expected => {
                let name = &self.known(vm)?.spec.name;
                Err(memory::other_generation("vm.memory", name, found, expected))
            }
            _ => Ok(()),
        }
    }

    /// Checks that a VM could be started now.
    pub fn examine_start(
        &mut self,
        vm: VmId,
        first: Option<BootDevice>,
        memory: AtStart,
    ) -> Result<(), Problem> {
        match self.may_power_on(vm, first, memory)? {
            Permission::Already => Ok(()),
            Permission::Granted => self.open_disks(vm),
        }
    }

    pub fn power_on(
        &mut self,
        vm: VmId,
        first: Option<BootDevice>,
        generation: Option<u64>,
    ) -> Result<Later, Problem> {
        if self.may_power_on(vm, first, AtStart::Loaded(generation))? == Permission::Already {
            return Ok(None);
        }
        let known = self.known(vm)?;
        known.boot_once = first;
        known.power = Power::Starting;
        known.request = request_id::current();
        self.numbered(vm, Work::Power, self.work)
    }

    pub fn started(&mut self, vm: VmId, _: Work) {
        let opened = self.open_disks(vm);
        let resumed = match opened {
            Ok(()) => self.persisted.suspended.remove(&vm),
            Err(_) => None,
        };
        let is_suspended = self.persisted.suspended.contains_key(&vm);
        let Ok(known) = self.known(vm) else { return };
        match opened {
            Ok(()) => {
                known.power = Power::Running;
                known.died = None;
                let mut guest = resumed.unwrap_or_else(|| RunningGuest {
                    boot_once: known.boot_once,
                    ..RunningGuest::new(known.spec.clone())
                });
                if let Some(drive) = &mut guest.spec.hardware.cdrom {
                    drive.medium = known.spec.hardware.medium().map(Path::to_owned);
                }
                known.power = guest.power();
                known.asleep = guest.asleep;
                known.panics = guest.panics.clone();
                known.in_use.clone_from(&guest.disks);
                self.persisted.guests.insert(vm, guest);
            }
            Err(problem) => {
                known.stop(StopReason::FailedToStart, &problem.detail);
                if is_suspended {
                    known.power = Power::Suspended;
                }
            }
        }
    }

    fn open_disks(&mut self, vm: VmId) -> Result<(), Problem> {
        let spec = self.known(vm)?.spec.clone();
        open_medium(&spec.hardware)?;
        spec.disks().try_for_each(|disk| self.open_disk(&spec, disk))
    }

    pub fn open_disk(&self, spec: &VmSpec, disk: &DiskSpec) -> Result<(), Problem> {
        self.check_place(&disk.datastore)?;
        let there = self.persisted.disks.get(&disk.disk).ok_or_else(|| {
            Problem::new(ErrorCode::NotFound, format!("disk '{}' has no image", disk.name))
        })?;
        if disk.facts.as_ref().is_some_and(|facts| *facts != there.facts) {
            let what = format!("disk '{}' is not as the inventory has it", disk.name);
            return Err(Problem::new(ErrorCode::Damaged, what));
        }
        let reference = spec.key.as_ref().filter(|_| disk.encrypted);
        check_key(disk, there, reference.map(|reference| reference.check.as_str()))
    }
}
