//! The saved memory of suspended VMs, which other requests would lose.

use vmseal_api::host::version::MEMORY_GENERATION;
use vmseal_api::problem::{ErrorCode, Problem};

use super::Services;
use super::caller::Caller;
use crate::store::events::NewEvent;
use crate::store::memory_generations;
use crate::store::vms::Vm;

/// Gives the saved memory of a suspended VM up: it is off then.
pub(super) async fn discard(services: &Services, caller: &Caller, vm: &Vm) -> Result<(), Problem> {
    let agent = services.hosts.connected(vm.host)?;
    agent.discard_memory(vm.id).await?;
    let mut write = services.store.write().await?;
    memory_generations::renew(&mut write, vm.id).await?;
    let (kind, actor, target) = ("vm.memory-discarded", caller.name(), vm.name.as_str());
    write.event(NewEvent { kind, actor, target, detail: "" }).await?;
    write.commit().await?;
    let state = agent.state_now().await?;
    services.hosts.until_shown(vm.host, &state).await;
    Ok(())
}

/// The generation of the memory with which a host is asked whether a VM could start; none where it does not ask for one.
pub(super) async fn expected(services: &Services, vm: &Vm) -> Result<Option<u64>, Problem> {
    if !services.hosts.view(vm.host).has(MEMORY_GENERATION) {
        return Ok(None);
    }
    Ok(memory_generations::expected(&mut *services.store.read().await?, vm.id).await?)
}

/// A VM is suspended with memory that no snapshot keeps: a revert would lose it. `running` says that its guest was to run afterwards.
pub(super) fn refusal_of_revert(vm: &Vm, snapshot: &str, running: bool) -> Problem {
    let name = &vm.name;
    let running = if running { " --running" } else { "" };
    let detail = format!(
        "VM '{name}' is suspended, and a revert loses its memory, which no snapshot keeps: keep it first (vmseal snapshot create {name} --memory), or have it given up (vmseal snapshot revert {name} {snapshot} --discard-memory{running})"
    );
    Problem::new(ErrorCode::WrongState, detail)
}

/// A VM is suspended: what boots it or cuts its power would lose its memory.
pub(super) fn refusal(vm: &Vm) -> Problem {
    let name = &vm.name;
    let detail = format!(
        "VM '{name}' is suspended, and its memory is saved: resume it (vmseal vm resume {name}), or give the saved memory up and boot from its disks (vmseal vm start {name} --discard-memory)"
    );
    Problem::new(ErrorCode::WrongState, detail)
}

/// A VM is suspended: a disk itself is exported only of one that is off.
pub(super) fn refusal_of_export(vm: &Vm) -> Problem {
    let name = &vm.name;
    let detail = format!(
        "VM '{name}' is suspended, and a disk itself is exported only while its VM is off: export a snapshot (vmseal snapshot create {name} NAME, then --snapshot NAME), which keeps what the disk held when the VM was suspended; or resume the VM (vmseal vm resume {name}), then stop it (vmseal vm stop {name})"
    );
    Problem::new(ErrorCode::WrongState, detail)
}
