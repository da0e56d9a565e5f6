//! The replicas of disks that are made of a backup: a backup has none, and where one is kept says the VM's policy.

use vmseal_api::host::version::REPLICA_SNAPSHOTS;
use vmseal_api::host::{DiskRole, DiskSpec};
use vmseal_api::problem::{ErrorCode, Problem};

use crate::services::Services;
use crate::services::create_vm::{ChosenHost, replica};
use crate::store::Write;
use crate::store::backups::Backup;
use crate::store::disks::Disk;
use crate::store::policies::Policy;

/// What an agent of an earlier version cannot do.
pub(super) const RESTORE: &str = "restore disks that have replicas";

/// Gives disks that are made of a backup the replicas that their policy asks for, as new disks have them.
///
/// # Errors
/// `wrong-state` where the host has no place for them; those of the inventory.
pub(super) async fn place(
    write: &mut Write<'_>,
    policy: &Policy,
    backup: &Backup,
    disks: &mut [DiskSpec],
) -> Result<(), Problem> {
    let host = ChosenHost { id: backup.host, name: backup.host_name.clone() };
    for disk in disks.iter_mut().filter(|disk| disk.role == DiskRole::Data) {
        let placed = replica(write, policy, &host, &disk.datastore).await;
        let placed = placed.map_err(|problem| match problem.code {
            ErrorCode::InvalidRequest => {
                let what = format!("{}: name another policy (--policy)", problem.detail);
                Problem::new(ErrorCode::WrongState, what)
            }
            _ => problem,
        });
        disk.replica = placed?.map(|(place, _)| place);
    }
    Ok(())
}

/// Refuses disks with replicas where the agent of the host that restores them cannot do that.
///
/// # Errors
/// `unsupported`; `unreachable` for a host that does not answer, whose agent may know it.
pub(super) fn require(services: &Services, backup: &Backup, made: &[Disk]) -> Result<(), Problem> {
    let without = made.iter().all(|disk| disk.replica.is_none());
    if without || services.hosts.view(backup.host).has(REPLICA_SNAPSHOTS) {
        return Ok(());
    }
    services.hosts.connected(backup.host)?;
    let detail = format!(
        "the agent of host '{}' cannot {RESTORE}: upgrade vmseal there, or name a policy without replicas (--policy)",
        backup.host_name
    );
    Err(Problem::new(ErrorCode::Unsupported, detail))
}
