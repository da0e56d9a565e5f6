//! What other VMs share with this one: the files that linked clones stand on ([`crate::storage::linking`]) stay as they are, and
//! what is read under a data key that others have goes through buffers.

use tokio::task::spawn_blocking;
use vmseal_api::host::{Attachment, DiskSpec, DropSnapshotJob};
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};

use super::{Owner, State};
use crate::rules::{self, find_disk};
use crate::storage::home::Home;
use crate::storage::layers;
use crate::vm::internal;

/// The layer of a filter that keeps ciphertext out of the guest's memory.
const BOUNCE: &str = "bounce";

impl Owner {
    /// Prepares to share a disk with a linked clone: before another VM has its key, the guest that has the disk is served
    /// through buffers of the filter's own.
    pub(super) async fn share(&mut self, disk: &DiskSpec) -> Result<(), Problem> {
        self.are_not_copied(&[disk.disk]).await?;
        if matches!(self.state, State::Starting { .. }) {
            return Err(rules::wrong_state(&self.spec, "is being started: wait until it runs"));
        }
        self.shared_out.insert(disk.disk);
        self.bounce_all(std::slice::from_ref(disk)).await
    }

    /// Has disks whose headers say that others may have their data keys be served so to a guest that runs.
    pub(super) async fn serve_as_shared(&mut self, disks: &[DiskId]) -> Result<(), Problem> {
        let disks = disks.iter().map(|disk| find_disk(&self.spec, *disk).cloned());
        let disks = disks.collect::<Result<Vec<_>, _>>()?;
        self.bounce_all(&disks).await
    }

    /// Replaces the filter of the guest if it decrypts one of these disks in the guest's memory.
    async fn bounce_all(&mut self, disks: &[DiskSpec]) -> Result<(), Problem> {
        if self.all_bounce(disks).await {
            return Ok(());
        }
        self.may_replace_filter().await?;
        self.replace_filter_or_retry().await;
        if self.all_bounce(disks).await {
            return Ok(());
        }
        let what = "the guest's filter is being replaced, so that it can share a disk: try again";
        Err(Problem::new(ErrorCode::TimedOut, what))
    }

    /// Whether the guest has none of these disks decrypted in its memory.
    async fn all_bounce(&mut self, disks: &[DiskSpec]) -> bool {
        for disk in disks {
            // What the firmware keeps is in no memory of the guest's.
            let by_guest = disk.encrypted && disk.role.attachment() == Attachment::Disk;
            if by_guest && self.is_served(disk.disk) && !self.bounces(disk).await {
                return false;
            }
        }
        true
    }

    /// Whether the filter of the guest does not decrypt this disk in the guest's memory.
    async fn bounces(&mut self, disk: &DiskSpec) -> bool {
        let Some(running) = self.running() else { return false };
        let Ok(figures) = running.control.figures().await else { return false };
        let served = figures.disks.iter().find(|served| served.disk == disk.disk);
        served.is_some_and(|served| served.layers.iter().any(|layer| layer.kind == BOUNCE))
    }

    /// Checks that no linked clone stands on what a snapshot keeps.
    pub(super) async fn can_drop(&self, job: &DropSnapshotJob) -> Result<(), Problem> {
        let (vm, disks, snapshot) = (self.spec.vm, self.disks_of(&job.disks)?, job.snapshot);
        let check = move || {
            disks.iter().try_for_each(|disk| {
                let home = Home::of(&disk.datastore, vm)?;
                layers::check_droppable(&home, disk.disk, snapshot)
            })
        };
        spawn_blocking(check).await.map_err(internal)?
    }

    /// Checks that no linked clone stands on disks that are to be sent to another host, which are removed here.
    pub(super) async fn are_unshared(
        &self,
        disks: impl Iterator<Item = DiskId>,
    ) -> Result<(), Problem> {
        let disks = disks.map(|disk| find_disk(&self.spec, disk).cloned());
        let (vm, disks) = (self.spec.vm, disks.collect::<Result<Vec<_>, _>>()?);
        let check = move || {
            disks.iter().try_for_each(|disk| {
                layers::check_unshared(&Home::of(&disk.datastore, vm)?, disk.disk)
            })
        };
        spawn_blocking(check).await.map_err(internal)?
    }
}
