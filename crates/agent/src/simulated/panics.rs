//! Guests that panic.

use jiff::Timestamp;
use vmseal_api::dump::{DumpFormat, PanicDump};
use vmseal_api::hardware::OnCrash;
use vmseal_api::host::{KeyState, Notice, Power, StopReason};
use vmseal_api::id::VmId;

use super::{Inside, Known, SimulatedHost};
use crate::process::panics::{Outcome, check_dumps, outcome};
use crate::rules;

/// The length of a simulated core dump, in bytes.
const LENGTH: u64 = 1 << 20;

impl Known {
    /// What operators should know of the panics of its guest.
    pub fn notice_of_panics(&self) -> Option<Notice> {
        if matches!(self.power, Power::Off | Power::Suspended) {
            return None;
        }
        self.panics.notice(&self.spec, Timestamp::now())
    }
}

impl SimulatedHost {
    /// The guest of a running VM panics.
    pub fn panic_guest(&self, vm: VmId) {
        let mut inside = self.inside();
        if inside.persisted.guests.contains_key(&vm) {
            inside.guest_panicked(vm);
            inside.agent.publish(vm);
        }
    }

    /// Has a core dump of this age, that the host has written by itself, be older than it is.
    pub fn age_panic_dumps(&self) {
        for (_, known) in &mut self.inside().persisted.panic_dumps {
            known.created = Timestamp::UNIX_EPOCH;
        }
    }
}

impl Inside {
    /// Finds the core dumps of a VM that the host has written by itself.
    pub fn list_panic_dumps(&mut self, vm: VmId) {
        let of_vm = self.persisted.panic_dumps.iter().filter(|(of, _)| *of == vm);
        let found = of_vm.map(|(_, known)| known.clone()).collect();
        if let Some(known) = self.agent.vms.get_mut(&vm) {
            known.panic_dumps = found;
        }
    }

    fn guest_panicked(&mut self, vm: VmId) {
        let at = Timestamp::now();
        let Ok(known) = self.known(vm) else { return };
        let on_crash = known.spec.hardware.on_crash;
        let now = known.panics.begin(at);
        if on_crash.dumps() || on_crash == OnCrash::Preserve {
            self.panicked_while_sent(vm);
        }
        let dumped = on_crash.dumps().then(|| self.dump_panic(vm, now.dump, at));
        self.list_panic_dumps(vm);
        let Some(guest) = self.persisted.guests.get_mut(&vm) else { return };
        let Some(known) = self.agent.vms.get_mut(&vm) else { return };
        let stopping = known.power == Power::Stopping;
        match outcome(on_crash, stopping, known.panics.may_restart(at)) {
            Outcome::Off => {
                let why = known.panics.why_off(&known.spec.name, on_crash, dumped.as_deref());
                known.request = None;
                known.stop(StopReason::GuestPanicked, &why);
                self.persisted.guests.remove(&vm);
            }
            Outcome::Keep => {
                known.panics.done(false, dumped.as_deref());
                guest.paused = true;
                known.power = guest.power();
                guest.panics = known.panics.clone();
            }
            Outcome::Restart => {
                known.panics.done(true, dumped.as_deref());
                known.panics.over();
                guest.resets += 1;
                guest.panics = known.panics.clone();
            }
        }
    }

    /// Writes a core dump; returns what became of it, for people.
    fn dump_panic(&mut self, vm: VmId, dump: vmseal_api::id::DumpId, at: Timestamp) -> String {
        let Ok(known) = self.known(vm) else { return String::new() };
        let (name, key) = (known.spec.name.clone(), rules::key_state(&known.spec, known.key_held));
        let format = known.spec.hardware.crash_dump_format.unwrap_or(DumpFormat::Kdump);
        if key == KeyState::Missing {
            return "no core dump was written: it is locked".to_owned();
        }
        let of_vm = self.persisted.panic_dumps.iter().filter(|(of, _)| *of == vm);
        let there: Vec<_> = of_vm.map(|(_, known)| known.created).collect();
        if let Err(why) = check_dumps(&name, there.len(), there.iter().max().copied(), at) {
            return why;
        }
        if self.full {
            return "no core dump was written: the simulated datastore is full".to_owned();
        }
        let encrypted = key == KeyState::Held;
        let known = PanicDump { dump, format, created: at, bytes: LENGTH, encrypted };
        self.persisted.panic_dumps.push((vm, known));
        "a core dump was written".to_owned()
    }
}
