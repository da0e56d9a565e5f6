//! Memory of guests that snapshots keep, and such that is not saved or loaded as it should be.

use vmseal_api::host::{JobSpec, Power, RevertJob, SnapshotJob, StopReason};
use vmseal_api::id::{SnapshotId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::running::RunningGuest;
use super::{Inside, SimulatedHost, Work};
use crate::rules;
use crate::storage::memory::NOT_COUNTED;

/// The memory that a snapshot keeps.
#[derive(Clone, Copy)]
pub struct SnapshotMemory {
    /// Its generation.
    pub generation: u64,
    /// Whether its guest was paused, and is so again when it goes on.
    paused: bool,
}

impl Inside {
    /// Checks what snapshots with memory need, and what becomes of the memory of a VM that is reverted.
    pub fn ready_for_memory(&mut self, vm: VmId, job: &JobSpec) -> Result<(), Problem> {
        let known = self.known(vm)?;
        let (spec, power) = (known.spec.clone(), known.power);
        match job {
            JobSpec::Snapshot(job) if job.memory => match power {
                Power::Running | Power::Suspended => Ok(()),
                Power::Paused if self.persisted.kept_memories.contains_key(&job.snapshot) => Ok(()),
                Power::Paused => self.require_unsaved(vm),
                _ => Err(rules::has_no_memory(&spec)),
            },
            JobSpec::Revert(job) => {
                if job.memory && !self.persisted.kept_memories.contains_key(&job.snapshot) {
                    let what = format!("the memory that snapshot {} keeps is gone", job.snapshot);
                    return Err(Problem::new(ErrorCode::Damaged, what));
                }
                if job.memory && self.is_suspended_with(vm, job.snapshot) {
                    return Ok(());
                }
                rules::check_revert(&spec, job, power)
            }
            _ => Ok(()),
        }
    }

    /// Refuses to save a guest that has been saved while it was paused, or to send it, before it has run again.
    pub fn require_unsaved(&self, vm: VmId) -> Result<(), Problem> {
        match self.persisted.guests.get(&vm) {
            Some(guest) if guest.paused && guest.saved_paused => {
                Err(rules::saved_while_paused(&guest.spec))
            }
            _ => Ok(()),
        }
    }

    /// Whether a VM is suspended with the memory that a snapshot keeps.
    fn is_suspended_with(&self, vm: VmId, snapshot: SnapshotId) -> bool {
        let (suspended, kept) = (&self.persisted.suspended, &self.persisted.kept_memories);
        let found = suspended.get(&vm).map(|guest| guest.generation);
        let kept = kept.get(&snapshot).map(|kept| kept.generation);
        found.is_some() && found == kept
    }

    /// A snapshot was taken: it keeps the memory of a guest that runs or is paused, or what a VM is suspended with.
    pub fn keep_memory(&mut self, vm: VmId, job: &SnapshotJob) {
        if !job.memory {
            return;
        }
        let persisted = &mut self.persisted;
        let kept = match persisted.suspended.get(&vm) {
            Some(saved) => SnapshotMemory { generation: saved.generation, paused: saved.paused },
            None => {
                let generation = job.generation.unwrap_or(NOT_COUNTED);
                let guest = persisted.guests.get_mut(&vm);
                let paused = guest.as_ref().is_some_and(|guest| guest.paused);
                if let Some(guest) = guest {
                    guest.saved_paused = paused;
                }
                SnapshotMemory { generation, paused }
            }
        };
        persisted.kept_memories.insert(job.snapshot, kept);
    }

    /// A VM was reverted: what memory it had is gone, and it is suspended with that of the snapshot, if there is one.
    pub fn revert_memory(&mut self, vm: VmId, job: &RevertJob) {
        let kept = self.persisted.kept_memories.get(&job.snapshot).copied();
        let kept = kept.filter(|_| job.memory);
        let Ok(known) = self.known(vm) else { return };
        // It may be started while this simulated work goes on.
        if !matches!(known.power, Power::Off | Power::Suspended) {
            return;
        }
        known.power = if kept.is_some() { Power::Suspended } else { Power::Off };
        let spec = known.spec.clone();
        match kept {
            Some(SnapshotMemory { generation, paused }) => {
                let guest = RunningGuest { generation, paused, ..RunningGuest::new(spec) };
                self.persisted.suspended.insert(vm, guest);
            }
            None => drop(self.persisted.suspended.remove(&vm)),
        }
    }
}

impl SimulatedHost {
    /// The generation of the memory that is saved of a VM, or that is being saved.
    #[must_use]
    pub fn memory_generation(&self, vm: VmId) -> Option<u64> {
        let inside = self.inside();
        let (suspended, guests) = (&inside.persisted.suspended, &inside.persisted.guests);
        suspended.get(&vm).or_else(|| guests.get(&vm)).map(|guest| guest.generation)
    }

    /// What another host will send with a VM that is suspended.
    pub fn will_receive_memory(&self, vm: VmId, generation: u64) {
        self.inside().persisted.coming_memories.insert(vm, generation);
    }

    /// The memory that is being saved of a VM cannot be saved for this reason: its guest goes on.
    pub fn fail_to_save(&self, vm: VmId, why: &str) {
        let mut inside = self.inside();
        let Some(known) = inside.agent.vms.get_mut(&vm) else { return };
        if known.power == Power::Suspending {
            known.work.remove(&Work::Power);
            known.power = Power::Running;
            known.not_suspended = Some(why.to_owned());
            inside.agent.publish(vm);
        }
    }

    /// The guest of a VM that is being started has gone on from its saved memory, and has ended before anybody saw it run.
    pub fn end_resumed(&self, vm: VmId) {
        let mut inside = self.inside();
        let Some(known) = inside.agent.vms.get_mut(&vm) else { return };
        if known.power == Power::Starting {
            known.stop(StopReason::QemuDied, "the simulated guest has ended");
            inside.persisted.suspended.remove(&vm);
            inside.agent.publish(vm);
        }
    }

    /// The guest of a VM that is being started runs just before a call that ends the start.
    pub fn start_before_it_is_cancelled(&self, vm: VmId) {
        self.inside().agent.starts_first.insert(vm);
    }

    /// Puts a memory of this generation beside the disks of a VM that is off, as anybody can who writes to its datastore.
    pub fn put_memory_back(&self, vm: VmId, generation: u64) {
        let mut inside = self.inside();
        let Some(known) = inside.agent.vms.get_mut(&vm) else { return };
        if known.power == Power::Off {
            known.power = Power::Suspended;
            let guest = RunningGuest { generation, ..RunningGuest::new(known.spec.clone()) };
            inside.persisted.suspended.insert(vm, guest);
            inside.agent.publish(vm);
        }
    }
}
