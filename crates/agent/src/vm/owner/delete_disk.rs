//! Deletes a disk of a VM.

use tokio::task::spawn_blocking;
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;

use super::Owner;
use crate::rules::exclusion::Action;
use crate::rules::find_disk;
use crate::storage::memory::MemoryFiles;
use crate::storage::mirror::delete_elsewhere;
use crate::storage::replica;
use crate::vm::internal;

impl Owner {
    /// Deletes a disk, with its replica, its copies and what snapshots of memory are beside it.
    pub(super) async fn delete_disk(&mut self, disk: DiskId) -> Result<(), Problem> {
        let disk = find_disk(&self.spec, disk)?.clone();
        self.situation().may(Action::DeleteDisk, Some(&disk))?;
        self.let_go_of_disks().await?;
        if let Some((task, job)) = self.jobs.mirror_of(disk.disk) {
            self.cancel_mirror(task, &job).await?;
        }
        for given_up in self.jobs.remove_disk(disk.disk) {
            self.workers.cancel(given_up).await;
        }
        let (spec, deleted) = (self.spec.clone(), disk.clone());
        let others = move || {
            delete_elsewhere(spec.vm, &deleted)?;
            MemoryFiles::discard_with(&spec, deleted.disk)
        };
        spawn_blocking(others).await.map_err(internal)??;
        replica::delete_with(self.spec.vm, &disk).await?;
        self.shared.bitmaps.forget(disk.disk);
        self.made.remove(&disk.disk);
        self.exposed_errors.remove(&disk.disk);
        self.exchanged.retain(|notice| notice.disk != Some(disk.disk));
        self.header_notices.retain(|notice| notice.disk != Some(disk.disk));
        Ok(())
    }
}
