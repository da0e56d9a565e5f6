//! Hosts that must mark disks whose data keys several VMs have (docs/decisions/237).

use vmseal_api::host::version::SHARE_DATA_KEYS;
use vmseal_api::problem::{ErrorCode, Problem};

use super::OfVm;
use crate::services::{Services, features};
use crate::store::backups::{self, Backup};

/// What an agent of an earlier version cannot do.
const MARK: &str = "mark disks whose data keys other VMs have";

/// Refuses to make another VM of a backup while the host of the VM that was backed up could not mark that one's disks.
pub(super) fn require_of_origin(services: &Services, of: &OfVm) -> Result<(), Problem> {
    match of.vm.as_ref().filter(|vm| vm.key.is_some()) {
        Some(vm) => features::require(services, vm, SHARE_DATA_KEYS, MARK),
        None => Ok(()),
    }
}

/// Refuses to restore a backup whose data keys other VMs have with an agent that would not mark the disks.
pub(super) async fn require_of_reader(services: &Services, backup: &Backup) -> Result<(), Problem> {
    let shared = backups::shares_data_keys(&mut *services.store.read().await?, backup.id).await?;
    if !shared || services.hosts.view(backup.host).has(SHARE_DATA_KEYS) {
        return Ok(());
    }
    services.hosts.connected(backup.host)?;
    let host = &backup.host_name;
    let detail = format!("the agent of host '{host}' cannot {MARK}: upgrade vmseal there");
    Err(Problem::new(ErrorCode::Unsupported, detail))
}
