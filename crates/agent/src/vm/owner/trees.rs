//! The layers of mirrored disks, which are copied before anything else ([`crate::storage::mirror::tree`]).
//!
//! ```text
//!  begun ─► what nobody writes is copied ─► an active layer for the copy ─┬─ the guest has the disk ─► its filter copies
//!                                                                         └─ nobody has it ─────────► a filter of its own copies
//! ```
//! The guest goes on until the last arrow. It may begin or end to run meanwhile: the copy of the first arrow rests while it runs.

use std::time::Duration;

use tokio::task::spawn_blocking;
use vmseal_api::host::DiskSpec;
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};

use super::Owner;
use crate::rules::find_disk;
use crate::storage::locked::Access;
use crate::storage::mirror::{self, tree};
use crate::vm::internal;
use crate::vm::tree_copying::TreeCopying;
use crate::vm::workers::Workers;

/// The pause before another attempt to replace the guest's filter, which cannot be replaced now.
const TRY_AGAIN: Duration = Duration::from_secs(1);

impl Owner {
    /// Whether what nobody writes of a mirrored disk is still being copied.
    pub(super) async fn is_incomplete(&self, disk: DiskId) -> Result<bool, Problem> {
        let (vm, disk) = (self.spec.vm, find_disk(&self.spec, disk)?.clone());
        let look = move || match mirror::of_disk(vm, &disk)? {
            Some(mirror) => tree::is_incomplete(&mirror),
            None => Ok(false),
        };
        spawn_blocking(look).await.map_err(internal)?
    }

    /// Refuses to change the layers of disks that are copied, also by a job that the agent has forgotten. One that has pivoted
    /// has those of its copy first.
    pub(super) async fn are_not_copied(&self, disks: &[DiskId]) -> Result<(), Problem> {
        let of = |disk: &DiskId| {
            let disk = find_disk(&self.spec, *disk)?.clone();
            let facts = self.facts(&disk).ok_or_else(|| internal("a disk without facts"))?;
            Ok((disk, facts))
        };
        let disks = disks.iter().map(of).collect::<Result<Vec<_>, Problem>>()?;
        let spec = self.spec.clone();
        let look = move || {
            disks.iter().try_for_each(|(disk, facts)| {
                mirror::as_it_is(&spec, disk, facts, Access::Write).map(drop)
            })
        };
        spawn_blocking(look).await.map_err(internal)?
    }

    fn tree_of(&self, disk: DiskId) -> Result<TreeCopying, Problem> {
        let disk: DiskSpec = find_disk(&self.spec, disk)?.clone();
        let facts = self.facts(&disk).ok_or_else(|| internal("a disk without facts"))?;
        let builder = Workers::builder(&self.shared, disk.disk).beside(&self.guest_runs);
        let (spec, kek) = (self.spec.clone(), self.clone_kek()?);
        let pace = self.jobs.mirror_of(disk.disk).map(|(_, job)| job.pace).unwrap_or_default();
        builder.gate.set(pace);
        Ok(TreeCopying { spec, disk, facts, kek, builder })
    }

    /// Begins to copy what nobody writes of a disk, after a pause.
    pub(super) async fn begin_tree(&mut self, disk: DiskId, pause: Duration) {
        match self.tree_of(disk) {
            Ok(copying) => self.workers.begin_tree(disk, copying, pause),
            Err(problem) => self.copy_failed(disk, problem).await,
        }
    }

    async fn finish_tree(&self, disk: DiskId) -> Result<(), Problem> {
        let (spec, disk) = (self.spec.clone(), find_disk(&self.spec, disk)?.clone());
        spawn_blocking(move || tree::finish(&spec, &disk)).await.map_err(internal)?
    }

    /// What nobody writes of a disk is copied, or cannot be.
    pub(super) async fn tree_copied(&mut self, disk: DiskId, copied: Result<(), Problem>) {
        let next = match copied {
            Ok(()) => self.go_on_above(disk).await,
            Err(problem) => Err(problem),
        };
        match next {
            Ok(()) => {}
            Err(problem) if problem.code == ErrorCode::Cancelled => {}
            Err(problem) if problem.code == ErrorCode::TimedOut => {
                tracing::info!(%disk, %problem, "the copy of a disk goes on in a moment");
                self.begin_tree(disk, TRY_AGAIN).await;
            }
            Err(problem) => self.copy_failed(disk, problem).await,
        }
    }

    /// Has the active layer of a disk copied.
    async fn go_on_above(&mut self, disk: DiskId) -> Result<(), Problem> {
        let served = self.is_served(disk);
        if served && !self.keeps_copies(&[disk]).await && !self.can_mirror_served().await {
            self.may_replace_filter().await?;
        }
        self.finish_tree(disk).await?;
        if served && self.must_restart_for_copies(&[disk]).await? {
            self.restart_with_copies().await;
        }
        self.work_on_copy(disk).await;
        Ok(())
    }
}
