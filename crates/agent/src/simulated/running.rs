//! A guest that runs, and what is done to it.

use std::collections::BTreeSet;

use vmseal_api::boot::BootDevice;
use vmseal_api::hardware::Hardware;
use vmseal_api::host::{
    Allocation, DiskSettings, DiskSpec, GuestControl, Power, StartedWith, VmSpec,
};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::console::Guest;
use super::{CAPACITY, Inside, Known, SimulatedHost};
use crate::process::live::Live;
use crate::process::panics::Panics;
use crate::process::ports::PORTS;
use crate::rules::exclusion::{Action, Permission};
use crate::rules::set_running::{self, Difference};
use crate::rules::{self, plugging};
use crate::storage::medium;
use crate::storage::memory::NOT_COUNTED;
use crate::storage::transfer::TransferDirectories;

/// A guest that runs: it outlives the agent.
pub struct RunningGuest {
    /// What it runs with.
    pub spec: VmSpec,
    pub guest: Guest,
    pub paused: bool,
    /// Whether its memory has been saved since it was paused.
    pub saved_paused: bool,
    /// Whether it sleeps (ACPI S3).
    pub asleep: bool,
    /// Whether all of it is sent to another host.
    pub handed_over: bool,
    /// The generation of its memory, where that is saved.
    pub generation: u64,
    /// The disks that it has.
    pub disks: BTreeSet<DiskId>,
    /// Those that are in no port: they cannot be unplugged.
    pub fixed_disks: BTreeSet<DiskId>,
    /// How often it was reset.
    pub resets: u32,
    /// What it was started from, where that was for this start alone.
    pub boot_once: Option<BootDevice>,
    /// Its panics.
    pub panics: Panics,
}

impl RunningGuest {
    pub fn new(spec: VmSpec) -> Self {
        let disks: BTreeSet<_> = spec.disks().map(|disk| disk.disk).collect();
        let live = Live::at_start(&spec);
        let fixed = live.disks.iter().filter(|disk| disk.port.is_none());
        let (guest, fixed_disks) = (Guest::new(), fixed.map(|disk| disk.disk).collect());
        let panics = Panics::default();
        Self {
            spec,
            guest,
            paused: false,
            saved_paused: false,
            asleep: false,
            handed_over: false,
            generation: NOT_COUNTED,
            disks,
            fixed_disks,
            resets: 0,
            boot_once: None,
            panics,
        }
    }

    pub fn power(&self) -> Power {
        match (self.handed_over, self.paused) {
            (true, _) => Power::Migrating,
            (false, true) => Power::Paused,
            (false, false) => Power::Running,
        }
    }
}

impl Known {
    /// The disks that its guest does not have, while it runs.
    pub fn unused(&self) -> Vec<DiskId> {
        if matches!(self.power, Power::Off | Power::Starting | Power::Suspended) {
            return Vec::new();
        }
        let disks = self.spec.disks().map(|disk| disk.disk);
        disks.filter(|disk| !self.in_use.contains(disk)).collect()
    }

    /// What its guest has that cannot change while it runs.
    pub fn started_with(&self) -> Option<StartedWith> {
        if matches!(self.power, Power::Off | Power::Starting | Power::Suspended) {
            return None;
        }
        let settings = |disk: &DiskSpec| {
            let (limits, cache) = (disk.limits, disk.cache);
            DiskSettings { disk: disk.disk, limits, cache }
        };
        let disks = self.spec.disks().filter(|disk| self.in_use.contains(&disk.disk));
        let (vcpus, memory) = (self.spec.vcpus, self.spec.memory);
        let boot = self.spec.hardware.boot.clone();
        Some(StartedWith { vcpus, memory, disks: disks.map(settings).collect(), boot })
    }
}

impl SimulatedHost {
    /// Sets whether guests let devices go.
    pub fn set_releases_devices(&self, releases: bool) {
        self.inside().keeps_devices = !releases;
    }

    /// Reboots the machine: no guest runs any more, and another agent starts.
    pub fn reboot(&self) {
        let mut inside = self.inside();
        inside.persisted.guests.clear();
        inside.boots += 1;
        inside.restart();
    }

    /// A running guest falls asleep (ACPI S3).
    pub fn falls_asleep(&self, vm: VmId) {
        let mut inside = self.inside();
        if let Some(guest) = inside.persisted.guests.get_mut(&vm) {
            guest.asleep = true;
            inside.note_sleep(vm);
            inside.agent.publish(vm);
        }
    }

    /// How often a running guest was reset.
    #[must_use]
    pub fn resets(&self, vm: VmId) -> u32 {
        self.inside().persisted.guests.get(&vm).map_or(0, |guest| guest.resets)
    }

    /// What a running guest runs with.
    #[must_use]
    pub fn runs_with(&self, vm: VmId) -> Option<VmSpec> {
        self.inside().persisted.guests.get(&vm).map(|guest| guest.spec.clone())
    }

    /// What a running guest was started from, where that was for one start alone.
    #[must_use]
    pub fn booted_once_from(&self, vm: VmId) -> Option<BootDevice> {
        self.inside().persisted.guests.get(&vm)?.boot_once
    }

    /// The disks that a running guest has.
    #[must_use]
    pub fn disks_in_use(&self, vm: VmId) -> BTreeSet<DiskId> {
        let inside = self.inside();
        inside.persisted.guests.get(&vm).map(|guest| guest.disks.clone()).unwrap_or_default()
    }
}

/// Opens what is in a drive, as a host that imports from everywhere does.
pub fn open_medium(hardware: &Hardware) -> Result<(), Problem> {
    let Some(path) = hardware.medium() else { return Ok(()) };
    medium::open_file(path, &TransferDirectories::anywhere()).map(drop)
}

/// Checks that the devices that a guest gets find ports.
fn check_ports(
    known: &VmSpec,
    guest: &RunningGuest,
    difference: &Difference,
) -> Result<(), Problem> {
    let Difference { new_nics, gone_nics, new_disks, gone_disks, .. } = difference;
    let new = new_nics.len() + new_disks.len();
    let plugged = known.nics().count() + guest.disks.difference(&guest.fixed_disks).count();
    let left = plugged.saturating_sub(gone_nics.len() + gone_disks.len());
    match new > 0 && u32::try_from(left + new).is_ok_and(|all| all > PORTS) {
        true => Err(plugging::no_free_port(known, PORTS)),
        false => Ok(()),
    }
}

impl Inside {
    /// Notes whether a VM's guest sleeps.
    pub fn note_sleep(&mut self, vm: VmId) {
        let asleep = self.persisted.guests.get(&vm).is_some_and(|guest| guest.asleep);
        if let Some(known) = self.agent.vms.get_mut(&vm) {
            known.asleep = asleep;
        }
    }

    pub fn control_guest(&mut self, vm: VmId, what: GuestControl) -> Result<(), Problem> {
        let action = match what {
            GuestControl::Pause => Action::Pause,
            GuestControl::Unpause => Action::Unpause,
            GuestControl::Reset => Action::Reset,
            GuestControl::Wakeup => Action::Wakeup,
        };
        if self.situation(vm)?.may(action, None)? == Permission::Already {
            return Ok(());
        }
        if let Some(guest) = self.persisted.guests.get_mut(&vm) {
            match what {
                GuestControl::Pause => guest.paused = true,
                GuestControl::Unpause => (guest.paused, guest.saved_paused) = (false, false),
                GuestControl::Reset => {
                    guest.resets += 1;
                    guest.asleep = false;
                }
                GuestControl::Wakeup if !guest.asleep => {
                    return Err(rules::not_asleep(&guest.spec));
                }
                GuestControl::Wakeup => guest.asleep = false,
            }
            if matches!(what, GuestControl::Unpause | GuestControl::Reset) {
                guest.panics.over();
            }
            let (power, panics) = (guest.power(), guest.panics.clone());
            let known = self.known(vm)?;
            known.panics = panics;
            if matches!(what, GuestControl::Pause | GuestControl::Unpause) {
                known.power = power;
            }
            self.note_sleep(vm);
            self.agent.publish(vm);
        }
        Ok(())
    }

    /// Checks that a VM may be registered anew while it runs, before its guest is asked to let devices go.
    pub fn may_set_running(&mut self, new: &VmSpec) -> Result<Difference, Problem> {
        let vm = new.vm;
        let known = self.known(vm)?;
        let (known, in_use) = (known.spec.clone(), known.in_use.clone());
        let encrypted = || known.disks().filter(|disk| disk.encrypted);
        let both = new.key.as_ref().is_some_and(|key| {
            encrypted().all(|disk| {
                let there = self.persisted.disks.get(&disk.disk);
                there.is_some_and(|there| there.keys.contains(key))
            })
        });
        let in_use = |disk| in_use.contains(&disk);
        let difference = set_running::difference(&known, new, in_use, both)?;
        let Some(guest) = self.persisted.guests.get(&vm) else {
            return Err(rules::wrong_state(&known, "has ended"));
        };
        for disk in &difference.gone_disks {
            plugging::check_unplugged(&known, *disk, !guest.fixed_disks.contains(disk))?;
        }
        // What a snapshot keeps of them, too.
        let gone = difference.gone_disks.iter().copied();
        plugging::check_exposed(&known, gone.filter(|disk| self.agent.exposed.has(*disk)))?;
        if !(difference.gone_disks.is_empty() && difference.new_disks.is_empty()) {
            self.may_replace_filter(vm)?;
        }
        check_ports(&known, guest, &difference)?;
        difference.new_nics.iter().try_for_each(|nic| self.may_connect(nic))?;
        Ok(difference)
    }

    /// Registers a VM anew while it runs.
    pub fn set_running(&mut self, new: VmSpec) -> Result<(), Problem> {
        let (vm, keeps) = (new.vm, self.keeps_devices);
        let known = self.known(vm)?.spec.clone();
        let difference = self.may_set_running(&new)?;
        let Some(guest) = self.persisted.guests.get_mut(&vm) else {
            return Err(rules::wrong_state(&known, "has ended"));
        };
        if keeps && !(difference.gone_disks.is_empty() && difference.gone_nics.is_empty()) {
            let what = "the simulated guest does not let the device go";
            return Err(Problem::new(ErrorCode::TimedOut, what));
        }
        if difference.medium {
            open_medium(&new.hardware)?;
        }
        guest.disks.retain(|disk| !difference.gone_disks.contains(disk));
        guest.disks.extend(difference.new_disks.iter().map(|disk| disk.disk));
        let until = set_running::until_next_start(&known, &new);
        guest.spec = until.clone();
        let in_use = guest.disks.clone();
        difference.gone_disks.iter().for_each(|disk| self.forget_bitmaps(vm, *disk));
        let known = self.known(vm)?;
        if known.spec.key != new.key {
            known.key_held = false;
            known.kek = None;
        }
        known.in_use = in_use;
        known.made.retain(|disk, _| new.disk(*disk).is_some());
        known.jobs.keep_disks_of(&new);
        known.next = (until != new).then_some(new);
        known.spec = until;
        Ok(())
    }

    /// Whether the filter of a guest can be replaced without a loss.
    fn may_replace_filter(&self, vm: VmId) -> Result<(), Problem> {
        self.may_start_filter(vm)?;
        let spec = &self.agent.vms.get(&vm).ok_or_else(|| rules::unknown(vm))?.spec;
        let exposed =
            spec.disks().map(|disk| disk.disk).filter(|disk| self.agent.exposed.has_beside(*disk));
        plugging::check_exposed(spec, exposed)
    }

    /// Whether another filter of a guest could be started.
    fn may_start_filter(&self, vm: VmId) -> Result<(), Problem> {
        let known = self.agent.vms.get(&vm).ok_or_else(|| rules::unknown(vm))?;
        if known.spec.disks().any(|disk| disk.encrypted) && !known.key_held {
            return Err(rules::locked(&known.spec));
        }
        Ok(())
    }

    /// Checks that a disk may be made so long, and returns it.
    pub fn may_grow(&mut self, vm: VmId, disk: DiskId, size: u64) -> Result<DiskSpec, Problem> {
        let known = self.known(vm)?;
        let of = rules::find_disk(&known.spec, disk)?.clone();
        let (made, grows) = (known.has_made(&of), of.size != size);
        self.situation(vm)?.may(Action::GrowDisk, Some(&of))?;
        let known = self.known(vm)?;
        rules::check_growth(&known.spec, &of, made, size)?;
        if grows && known.in_use.contains(&disk) {
            self.may_start_filter(vm)?;
        }
        self.check_place(&of.datastore)?;
        if grows && self.has_snapshots(disk) {
            return Err(rules::has_snapshots(&self.known(vm)?.spec, &of));
        }
        let more = size.saturating_sub(of.size);
        if self.full || of.allocation == Allocation::Preallocated && more > CAPACITY {
            return Err(Problem::new(ErrorCode::NoSpace, "the simulated datastore is full"));
        }
        Ok(of)
    }

    pub fn grow_disk(&mut self, vm: VmId, disk: DiskId, size: u64) -> Result<(), Problem> {
        let of = self.may_grow(vm, disk, size)?;
        if of.size != size {
            self.forget_bitmaps(vm, disk);
        }
        let grow = |spec: &mut VmSpec| {
            spec.disks_mut().filter(|known| known.disk == disk).for_each(|it| it.size = size);
        };
        let known = self.known(vm)?;
        grow(&mut known.spec);
        known.next.as_mut().map(grow);
        if let Some(guest) = self.persisted.guests.get_mut(&vm) {
            grow(&mut guest.spec);
        }
        if let Some(image) = self.persisted.disks.get_mut(&disk) {
            image.length += size.saturating_sub(of.size);
        }
        self.describe_on_datastores(vm)?;
        self.agent.publish(vm);
        Ok(())
    }
}
