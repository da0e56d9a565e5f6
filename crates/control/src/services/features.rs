//! What the agent of a VM's host must know for an operation.

use vmseal_api::problem::{ErrorCode, Problem};

use super::Services;
use crate::store::vms::Vm;

/// Refuses what an agent of an earlier version cannot do; `cannot` completes "the agent of host 'x' cannot …".
///
/// # Errors
/// `unsupported`; `unreachable` for a host that does not answer, whose agent may know it.
pub(super) fn require(
    services: &Services,
    vm: &Vm,
    feature: &str,
    cannot: &str,
) -> Result<(), Problem> {
    if services.hosts.view(vm.host).has(feature) {
        return Ok(());
    }
    services.hosts.connected(vm.host)?;
    let host = &vm.host_name;
    let detail = format!("the agent of host '{host}' cannot {cannot}: upgrade vmseal there");
    Err(Problem::new(ErrorCode::Unsupported, detail))
}

/// The same for what a task does when its host answers: a host that is away may know it.
///
/// # Errors
/// `unsupported`.
pub(super) fn require_unless_away(
    services: &Services,
    vm: &Vm,
    feature: &str,
    cannot: &str,
) -> Result<(), Problem> {
    match require(services, vm, feature, cannot) {
        Err(problem) if problem.code != ErrorCode::Unsupported => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests;
