//! Whether the host of a VM reaches the port at which another one waits for VMs: tried before anything begins
//! (docs/decisions/320-the-port-for-vms-is-tried-before-a-migration.md).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vmseal_api::host::version::EXAMINE_MIGRATION_PORT;
use vmseal_api::id::HostId;
use vmseal_api::problem::ErrorCode;

use crate::services::Services;
use crate::store::hosts::Host;
use crate::store::vms::Vm;
use crate::tasks::migrate_vm::reachable;

/// What was found between two hosts, the VM's first.
type Found = HashMap<(HostId, HostId), Result<(), String>>;

/// The hosts whose ports were tried. A port that does not answer takes five seconds, so each is tried once for all VMs of a host that
/// is emptied.
#[derive(Default)]
pub(in crate::services) struct Tried(Mutex<Found>);

impl Tried {
    /// Refuses a host whose port is not reached from the VM's host.
    pub(in crate::services) async fn require_reached(
        &self,
        services: &Services,
        vm: &Vm,
        host: &Host,
    ) -> Result<(), String> {
        let between = (vm.host, host.id);
        let before = self.found().get(&between).cloned();
        if let Some(found) = before {
            return found;
        }
        let found = require_reached(services, vm, host).await;
        self.found().insert(between, found.clone());
        found
    }

    fn found(&self) -> MutexGuard<'_, Found> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Refuses a host of this control plane whose port is not reached from the VM's host.
pub(in crate::services) async fn require_reached(
    services: &Services,
    vm: &Vm,
    host: &Host,
) -> Result<(), String> {
    if !is_known(services, vm) {
        return Ok(());
    }
    let there = services.hosts.view(host.id).description;
    // A host without a port is refused for that.
    let Some(listens) = there.and_then(|there| there.migration_address) else { return Ok(()) };
    let port = reachable(listens, &host.name, &host.address).await;
    require_port_reached(services, vm, port.map_err(|problem| problem.detail)?).await
}

/// Refuses a port of another host that is not reached from the VM's host.
pub(super) async fn require_port_reached(
    services: &Services,
    vm: &Vm,
    port: SocketAddr,
) -> Result<(), String> {
    if !is_known(services, vm) {
        return Ok(());
    }
    let source = services.hosts.connected(vm.host).map_err(|problem| problem.detail)?;
    source.examine_migration_port(port).await.map_err(|problem| {
        if problem.code != ErrorCode::WrongState {
            // The VM's host has not tried it, or does not answer. That says nothing of the other one.
            return problem.detail;
        }
        let (from, why) = (&vm.host_name, problem.detail);
        format!(
            "its port for VMs, {port}, is not reached from the VM's host '{from}': {why}. Have firewalls between the two hosts let it through, or start its agent with an address that host '{from}' reaches (vmseal agent --migration-listen IP:PORT)"
        )
    })
}

/// Whether the agent of the VM's host can try a port. One of an earlier version finds out when the VM is sent.
fn is_known(services: &Services, vm: &Vm) -> bool {
    services.hosts.view(vm.host).has(EXAMINE_MIGRATION_PORT)
}
