//! Linked clones of this VM: what is shared with them ([`crate::storage::linking`]) stays as it is.

use tokio::task::spawn_blocking;
use vmseal_api::host::{DiskSpec, DropSnapshotJob};
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
        if !disk.encrypted || !self.is_served(disk.disk) || self.bounces(disk).await {
            return Ok(());
        }
        self.may_replace_filter().await?;
        self.replace_filter_or_retry().await;
        if self.bounces(disk).await {
            return Ok(());
        }
        let what = "the guest's filter is being replaced, so that it can share a disk: try again";
        Err(Problem::new(ErrorCode::TimedOut, what))
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
