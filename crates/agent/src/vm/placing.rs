//! Whether the memory of a guest that comes is placed by this agent, and where that is. See [`crate::migration::placement`].

use vmseal_api::host::VmSpec;

use super::Shared;
use crate::hypervisor::qemu::MEMORY_BLOCK;
use crate::hypervisor::ram;
use crate::migration::placement::{GuestMemory, Placement};
use crate::process::Process;
use crate::process::live::Live;

/// What places the memory of a guest whose QEMU waits for it; none where QEMU is to load it.
pub fn placement(shared: &Shared, qemu: &Process, spec: &VmSpec, live: &Live) -> Option<Placement> {
    if !shared.place_memory {
        return None;
    }
    let file = match ram::file(qemu) {
        Ok(file) => file,
        Err(error) => {
            tracing::warn!(vm = %spec.vm, %error, "QEMU loads the guest's memory itself, which takes longer: its file is not found");
            return None;
        }
    };
    match GuestMemory::new(file, spec.memory + live.memory_padding) {
        Ok(memory) => Some(Placement::new(MEMORY_BLOCK, memory)),
        Err(why) => {
            tracing::info!(vm = %spec.vm, %why, "QEMU loads the guest's memory itself");
            None
        }
    }
}
