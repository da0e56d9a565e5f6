//! The end of a guest: it shuts down, loses its power, or is suspended.

use std::time::Duration;

use vmseal_api::host::{KeyState, Power, PowerOff, StopReason};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::Problem;
use vmseal_api::request_id;

use super::calls::Later;
use super::{Inside, Work};
use crate::rules;
use crate::rules::exclusion::{Action, Permission};

impl Inside {
    pub(super) fn power_off(&mut self, vm: VmId, how: PowerOff) -> Result<Later, Problem> {
        let obeys = self.heeds_shutdown.then_some(self.work);
        let shutdown_time = match how {
            PowerOff::Shutdown { seconds } => {
                let shutdown_time = rules::shutdown_time(seconds)?;
                self.situation(vm)?.may(Action::ShutDown, None)?;
                shutdown_time
            }
            PowerOff::Force | PowerOff::CancelStart => Duration::ZERO,
        };
        if self.agent.starts_first.remove(&vm) {
            self.known(vm)?.work.remove(&Work::Power);
            self.started(vm, Work::Power);
        }
        let is_suspended = self.persisted.suspended.contains_key(&vm);
        let known = self.known(vm)?;
        if known.power == Power::Suspended && how != PowerOff::CancelStart {
            return Err(rules::suspended(&known.spec));
        }
        if known.power != Power::Off {
            known.request = request_id::current();
        }
        match (known.power, how) {
            (Power::Off | Power::Suspended, _) => Ok(None),
            (power, PowerOff::CancelStart) if power != Power::Starting => {
                self.agent.publish(vm);
                Err(rules::has_started(&self.known(vm)?.spec))
            }
            (_, PowerOff::Force | PowerOff::CancelStart) => {
                known.stop(StopReason::PoweredOff, "an operator cut the power");
                // Of a start from a saved memory, which is still there.
                if is_suspended {
                    known.power = Power::Suspended;
                }
                let disks: Vec<DiskId> = known.spec.disks().map(|disk| disk.disk).collect();
                disks.into_iter().for_each(|disk| self.agent.exposed.end(disk));
                self.persisted.guests.remove(&vm);
                self.agent.publish(vm);
                Ok(None)
            }
            (_, PowerOff::Shutdown { .. }) => {
                known.power = Power::Stopping;
                known.work.remove(&Work::ShutdownTimeout);
                match obeys {
                    Some(work) => self.numbered(vm, Work::Power, work),
                    None => self.numbered(vm, Work::ShutdownTimeout, shutdown_time),
                }
            }
        }
    }

    pub(super) fn suspend(&mut self, vm: VmId, generation: u64) -> Result<Later, Problem> {
        if self.situation(vm)?.may(Action::Suspend, None)? == Permission::Already {
            return Ok(None);
        }
        let known = self.known(vm)?;
        let key = rules::key_state(&known.spec, known.key_held);
        rules::check_suspend(&known.spec, key == KeyState::Missing)?;
        self.require_unsaved(vm)?;
        let known = self.known(vm)?;
        known.power = Power::Suspending;
        known.not_suspended = None;
        known.request = request_id::current();
        if let Some(guest) = self.persisted.guests.get_mut(&vm) {
            guest.generation = generation;
        }
        self.numbered(vm, Work::Power, self.work)
    }

    pub(super) fn suspended(&mut self, vm: VmId, _: Work) {
        let Some(guest) = self.persisted.guests.remove(&vm) else { return };
        self.persisted.suspended.insert(vm, guest);
        let Ok(known) = self.known(vm) else { return };
        known.stop(StopReason::Suspended, "an operator suspended it: its memory is saved");
        known.power = Power::Suspended;
    }

    pub(super) fn discard_memory(&mut self, vm: VmId) -> Result<(), Problem> {
        let known = self.known(vm)?;
        if known.power == Power::Suspended {
            known.power = Power::Off;
            self.persisted.suspended.remove(&vm);
            self.agent.publish(vm);
        }
        Ok(())
    }

    pub(super) fn shut_down(&mut self, vm: VmId, work: Work) {
        let Ok(known) = self.known(vm) else { return };
        if work == Work::ShutdownTimeout {
            known.power = Power::Running;
            return;
        }
        known.stop(StopReason::GuestShutdown, "the guest powered itself off");
        self.persisted.guests.remove(&vm);
    }
}
