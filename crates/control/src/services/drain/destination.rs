//! Where a VM of a host that is emptied can go.

use vmseal_api::id::HostId;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::services::migrate::{self, Fit, Promised, Tried};
use crate::services::{Privilege, Services};
use crate::store::disks;
use crate::store::drains::Drain;
use crate::store::vms::Vm;

/// Why a VM cannot go anywhere.
pub(super) struct Refused {
    pub(super) why: String,
    pub(super) until: Until,
}

/// What has to happen before a VM can go somewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// Somebody changes the VM.
    Changed,
    /// A host can take it.
    Taken,
    /// Its key can be had. It is not shut down for want of it: nobody could start it then, and what its host holds may be the last that
    /// is left of its key.
    Key,
}

/// The host that a VM that runs can go to; rather another one than `avoided`.
pub(super) async fn of(
    services: &Services,
    drain: &Drain,
    vm: &Vm,
    (promised, tried): (&Promised, &Tried),
    avoided: Option<HostId>,
) -> Result<Fit, Refused> {
    let for_good = |why: String| Refused { why, until: Until::Changed };
    let for_key = |problem: Problem| Refused { why: problem.detail, until: Until::Key };
    let for_now = |problem: Problem| match problem.code {
        // The key is not on its host, either.
        ErrorCode::Locked => for_key(problem),
        _ => Refused { why: problem.detail, until: Until::Taken },
    };
    let disks = async { disks::of_vm(&mut *services.store.read().await?, vm.id).await };
    let disks = disks.await.map_err(|error| for_now(error.into()))?;
    if vm.key.is_some() && !drain.migrate_encrypted {
        let (user, privilege) = (&drain.actor, Privilege::Migrate.name());
        return Err(for_good(format!("user '{user}' lacks the privilege '{privilege}'")));
    }
    migrate::require_sendable(services, vm, &disks).map_err(for_now)?;
    migrate::require_compression(services, vm, drain.compress).map_err(for_now)?;
    let asked = migrate::Asked { promised, tried, place: None, compresses: drain.compress };
    let chosen = migrate::choose(services, vm, &disks, &asked, avoided).await;
    let (fit, _) = chosen.map_err(for_now)?;
    // At last: no provider is asked again and again for a VM that no host can take.
    migrate::require_key_or_wait(services, vm).await.map_err(for_key)?;
    Ok(fit)
}

/// Why a VM that cannot be moved, for this reason, is not shut down either; none where it may be. One whose key is not given now could not
/// be started again.
pub(super) async fn why_not_stopped(services: &Services, vm: &Vm, why: &str) -> Option<String> {
    let fault = migrate::fault_of_start(services, vm).await?;
    Some(format!(
        "{why}; it is not shut down, as it could not be started again: its provider does not give its key now: {}",
        fault.detail
    ))
}

/// Whether a task has failed because the key of its VM could not be had, or is not the one that opens its disks.
pub(super) fn is_for_key(problem: &Problem) -> bool {
    problem.reason.is_some() || matches!(problem.code, ErrorCode::Locked | ErrorCode::KeyMismatch)
}

/// The order in which VMs are moved: the largest first, as what is left of hosts for small ones is no use to large ones.
pub(super) fn largest_first(vms: &mut [Vm]) {
    vms.sort_by(|one, other| other.memory.cmp(&one.memory).then_with(|| one.name.cmp(&other.name)));
}
