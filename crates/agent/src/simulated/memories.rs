//! Memory of guests that is not saved or loaded as it should be.

use vmseal_api::host::{Power, StopReason};
use vmseal_api::id::VmId;

use super::running::RunningGuest;
use super::{SimulatedHost, Work};

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
