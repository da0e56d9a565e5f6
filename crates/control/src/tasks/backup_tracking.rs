//! Dirty bitmaps that note what a guest changes since a backup, so that the next one reads no more than that. They are a hint: a
//! host without them, or that has lost them with a filter, reads the disks. So nothing here fails.

use vmseal_api::backup::{TRACKING_PREFIX, tracking_name};
use vmseal_api::filter::BitmapChange;
use vmseal_api::host::HostAgent;
use vmseal_api::id::{BackupId, DiskId};
use vmseal_api::problem::ErrorCode;

use super::run::Run;
use crate::store::vms::Vm;

/// Has the host note what the guest changes from now on. Before the snapshot: what it notes too much is only read.
pub(super) async fn begin(run: &Run<'_>, vm: &Vm, disks: &[DiskId], backup: BackupId) {
    let Ok(agent) = run.agent(vm) else { return };
    for disk in disks {
        let start = || {
            let name = tracking_name(backup);
            agent.change_bitmap(vm.id, *disk, name, BitmapChange::Start)
        };
        match start().await {
            Err(problem) if problem.code == ErrorCode::LimitExceeded => {
                if end_oldest(&*agent, vm, *disk).await {
                    let _ = start().await;
                }
            }
            Err(problem) => tracing::debug!(%disk, %problem, "its changes are not noted"),
            Ok(_) => {}
        }
    }
}

/// Makes room for another bitmap; returns whether there was one of an earlier backup.
async fn end_oldest(agent: &dyn HostAgent, vm: &Vm, disk: DiskId) -> bool {
    let Ok(known) = agent.bitmaps(vm.id, disk).await else { return false };
    let ours = known.into_iter().filter(|bitmap| bitmap.name.starts_with(TRACKING_PREFIX));
    let Some(oldest) = ours.min_by_key(|bitmap| bitmap.since) else { return false };
    agent.change_bitmap(vm.id, disk, oldest.name, BitmapChange::Remove).await.is_ok()
}

/// Has the host note no longer what has changed since a backup.
pub(super) async fn end(run: &Run<'_>, vm: &Vm, disks: &[DiskId], backup: BackupId) {
    let Ok(agent) = run.agent(vm) else { return };
    for disk in disks {
        let name = tracking_name(backup);
        if let Err(problem) = agent.change_bitmap(vm.id, *disk, name, BitmapChange::Remove).await {
            tracing::debug!(%disk, %problem, "its changes were not noted");
        }
    }
}
