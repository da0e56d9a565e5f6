//! Asks a VM's host whether a change of the VM could be made now. A dry run does, and so is refused as the change would be.

use vmseal_api::host::VmChange;
use vmseal_api::model::Task;
use vmseal_api::problem::{ErrorCode, Problem};

use super::{Outcome, Services};
use crate::store::vms::Vm;

/// Adds to a plan what the host could not be asked; what is begun is as it is. No transaction may be held.
///
/// # Errors
/// The host's problem with the change.
pub(super) async fn of_plan(
    services: &Services,
    vm: &Vm,
    change: VmChange,
    begun: Outcome<Task>,
) -> Result<Outcome<Task>, Problem> {
    match begun {
        Outcome::Planned(mut plan) => {
            plan.warnings.extend(ask(services, vm, change).await?);
            Ok(Outcome::Planned(plan))
        }
        done @ Outcome::Done(_) => Ok(done),
    }
}

/// Asks the host. Returns why it was not asked, where it could not be.
pub(super) async fn ask(
    services: &Services,
    vm: &Vm,
    change: VmChange,
) -> Result<Option<String>, Problem> {
    let host = &vm.host_name;
    let not_asked = |why: &str| {
        Ok(Some(format!("host '{host}' was not asked whether it can do it now: {why}")))
    };
    let agent = services.hosts.connected(vm.host)?;
    if !services.hosts.view(vm.host).has(change.feature()) {
        return not_asked("its agent is of an earlier vmseal, and does not know how. Upgrade it");
    }
    let seen = agent.state_now().await?;
    if seen.vms.iter().all(|seen| seen.vm != vm.id) {
        return not_asked("its agent has just restarted, and the task gives it the VM");
    }
    match agent.examine_change(vm.id, change).await {
        // The task delivers the key.
        Err(problem) if problem.code == ErrorCode::Locked => not_asked(&problem.detail),
        // The task tries again: a guest boots, or a filter has just been started again.
        Err(problem) if problem.code == ErrorCode::TimedOut && !problem.in_doubt => {
            let why = &problem.detail;
            Ok(Some(format!(
                "host '{host}' cannot do it now, and the task tries for about a minute: {why}"
            )))
        }
        answer => answer.map(|()| None),
    }
}
