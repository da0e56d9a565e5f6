//! The links of the network cards of guests that run: those that were set while the host was away.
//!
//! The inventory has a link as it is to be, and the host says how QEMU has it. Where these differ and no task changes the VM's devices, its
//! host is told of the VM again. A VM that is off or suspended gets its links when it is started.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tokio::time::timeout;
use vmseal_api::host::{HostAgent, HostDescription, HostState, Power, VmState};
use vmseal_api::id::{HostId, NicId, VmId};
use vmseal_api::model::Lifecycle;
use vmseal_api::nic::NicLink;
use vmseal_api::problem::{ErrorCode, Problem};

use super::earlier_agents::for_agent;
use super::{registration, restored};
use crate::locks::Locks;
use crate::store::{Store, nics, tasks};

/// How long a host may take to set the links of a VM: QEMU does it within milliseconds, and the host's other VMs do not wait for one
/// whose QEMU stands still. The host goes on with it.
const SET_WITHIN: Duration = Duration::from_secs(5);

/// The pause before a host is told again of a VM whose links it could not set.
const SET_AGAIN: Duration = Duration::from_secs(30);

/// Sets the links of one host's VMs.
#[derive(Default)]
pub(super) struct CardLinks {
    /// The VMs whose links could not be set; why, and when it was tried.
    failed: HashMap<VmId, (Problem, Instant)>,
}

impl CardLinks {
    /// Tells a host again of the VMs whose guests have cards with other links than the inventory. Fails only if the host does not answer,
    /// or the inventory.
    pub(super) async fn set(
        &mut self,
        store: &Store,
        agent: &dyn HostAgent,
        locks: &Locks<VmId>,
        here: (HostId, &HostDescription),
        state: &HostState,
    ) -> Result<(), Problem> {
        let wanted = nics::links_on_host(&mut *store.read().await?, here.0).await?;
        let others: Vec<_> = state.vms.iter().filter(|seen| differs(seen, &wanted)).collect();
        self.failed.retain(|vm, _| others.iter().any(|seen| seen.vm == *vm));
        for seen in others {
            if self.failed.get(&seen.vm).is_some_and(|(_, at)| at.elapsed() < SET_AGAIN) {
                continue;
            }
            // Who has it may be telling the host of it just now, for as long as QEMU takes.
            let Some(_unchanged) = locks.try_lock(seen.vm) else { continue };
            match register(store, agent, here, seen).await {
                Ok(()) => {}
                Err(problem) if problem.code == ErrorCode::Unreachable => return Err(problem),
                // If it is the host that does not answer in time, the next reading of its state fails, too.
                Err(problem) => self.note(seen.vm, problem),
            }
        }
        Ok(())
    }

    /// What stood against telling a host of a VM is settled: its links are set at once, however long ago that was refused.
    pub(super) fn try_again(&mut self, vm: VmId) {
        self.failed.remove(&vm);
    }

    /// Notes why the links of a VM could not be set.
    fn note(&mut self, vm: VmId, problem: Problem) {
        if self.failed.get(&vm).is_none_or(|(known, _)| *known != problem) {
            tracing::warn!(%vm, %problem, "its network cards are plugged in otherwise than they are to be");
        }
        self.failed.insert(vm, (problem, Instant::now()));
    }
}

/// Whether the guest of a VM runs, and has a card with another link than it is to have.
fn differs(seen: &VmState, wanted: &HashMap<NicId, NicLink>) -> bool {
    matches!(seen.power, Power::Running | Power::Paused)
        && seen.nics.iter().any(|nic| match (nic.link, wanted.get(&nic.nic)) {
            (Some(link), Some(wanted)) => link != *wanted,
            // Its agent does not say it, or a task takes the card from the VM.
            _ => false,
        })
}

/// Registers a VM anew, whose lock the caller has, if nothing but links can change by that.
async fn register(
    store: &Store,
    agent: &dyn HostAgent,
    (host, description): (HostId, &HostDescription),
    seen: &VmState,
) -> Result<(), Problem> {
    let working = tasks::holding(&mut *store.read().await?, seen.vm).await?;
    if working.is_some_and(|task| task.operation.changes_devices()) {
        return Ok(());
    }
    let Some((vm, spec)) = registration::read(store, seen.vm).await? else { return Ok(()) };
    if vm.lifecycle != Lifecycle::Ready || vm.host != host {
        return Ok(());
    }
    let disks = spec.disks().map(|disk| disk.disk);
    if !registration::has_devices(seen, disks, spec.nics().map(|nic| nic.nic)) {
        return Ok(());
    }
    restored::settle(store, agent, Some(description), (&vm, &spec)).await?;
    let told = agent.register_vm(for_agent(spec, Some(description)));
    timeout(SET_WITHIN, told).await.unwrap_or_else(|_| {
        let (vm, seconds) = (&vm.name, SET_WITHIN.as_secs());
        let detail = format!("its host has not set the links of VM '{vm}' within {seconds} s");
        Err(Problem::new(ErrorCode::TimedOut, detail))
    })
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{KeyState, NicState};

    use super::*;

    #[test]
    fn links_are_compared_of_guests_that_run_where_their_agent_says_them() {
        let nic = NicId::new();
        let seen = |power, link| {
            let (forwards, addresses) = (Vec::new(), Vec::new());
            let card = NicState { nic, forwards, interface: None, addresses, link };
            let nics = vec![card];
            VmState { nics, ..VmState::new(VmId::new(), power, KeyState::NotNeeded) }
        };
        let down = HashMap::from([(nic, NicLink::Down)]);
        assert!(differs(&seen(Power::Running, Some(NicLink::Up)), &down));
        assert!(differs(&seen(Power::Paused, Some(NicLink::Up)), &down));
        assert!(!differs(&seen(Power::Running, Some(NicLink::Down)), &down));
        assert!(!differs(&seen(Power::Migrating, Some(NicLink::Up)), &down));
        // An agent of an earlier version, and a card that a task takes from its VM.
        assert!(!differs(&seen(Power::Running, None), &down));
        assert!(!differs(&seen(Power::Running, Some(NicLink::Up)), &HashMap::new()));
    }
}
