//! Disks whose requests fail while storage does not answer: which agents know of them.

use vmseal_api::host::version::STALLS;
use vmseal_api::id::HostId;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::hosts::Hosts;
use crate::store::disks::Disk;
use crate::store::policies::Policy;

/// What an agent without [`STALLS`] cannot do.
pub(crate) const CANNOT: &str =
    "have requests fail that storage does not answer, as the VM's policy asks (--on-stall)";

/// Whether requests of one of these disks are to fail.
pub(crate) fn asked(disks: &[Disk]) -> bool {
    disks.iter().any(|disk| disk.limits.stall_timeout.is_some())
}

/// The agent of this host does not know of it.
pub(crate) fn refused(host: &str) -> Problem {
    let detail = format!("the agent of host '{host}' cannot {CANNOT}: upgrade vmseal there");
    Problem::new(ErrorCode::Unsupported, detail)
}

/// Refuses disks of a policy that asks for it, where the host's agent does not know of it.
///
/// # Errors
/// `unsupported`; `unreachable` for a host that does not answer, whose agent may know of it.
pub(crate) fn require(
    hosts: &Hosts,
    (host, name): (HostId, &str),
    policy: &Policy,
) -> Result<(), Problem> {
    if policy.limits.stall_timeout.is_none() || hosts.view(host).has(STALLS) {
        return Ok(());
    }
    hosts.connected(host)?;
    Err(refused(name))
}
