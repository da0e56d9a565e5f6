//! Whether the host of a VM reaches the port at which another one waits for VMs: tried before anything begins
//! (docs/decisions/320-the-port-for-vms-is-tried-before-a-migration.md).

use std::net::SocketAddr;

use vmseal_api::host::HostDescription;
use vmseal_api::host::version::EXAMINE_MIGRATION_PORT;

use crate::hosts::is_silence;
use crate::services::Services;
use crate::store::hosts::Host;
use crate::store::vms::Vm;
use crate::tasks::migrate_vm::reachable;

/// Refuses a host of this control plane whose port is not reached from the VM's host.
pub(in crate::services) async fn require_reached(
    services: &Services,
    vm: &Vm,
    host: &Host,
    there: &HostDescription,
) -> Result<(), String> {
    // A host without a port is refused for that.
    let Some(listens) = there.migration_address.filter(|_| is_known(services, vm)) else {
        return Ok(());
    };
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
        if is_silence(&problem) {
            // The VM's host has not answered. That says nothing of the other one.
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
