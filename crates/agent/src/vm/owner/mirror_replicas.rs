//! Disks with replicas use their copies: each gets another replica, which its guest's filter fills (docs/decisions/233).
//!
//! ```text
//!  the disks have pivoted ─┬─ served ─► the filter, which writes to the former replicas, is replaced ─► the next one makes the new ones
//!                          └─ off ────► made here, empty ───────────────────────────────────────────► filled from the next start on
//! ```
//! An agent that dies in between leaves a filter that writes to no replica of the copies: the next agent replaces it
//! ([`crate::vm::serve::has_stacks_of`]).

use std::fs::File;

use vmseal_api::host::{DiskSpec, MirrorJob};
use vmseal_api::problem::Problem;

use super::Owner;
use crate::storage::mirror;
use crate::vm::serve;

impl Owner {
    /// Whether the guest has a disk of a job that has a replica: its filter is replaced when that has pivoted.
    pub(super) fn replicates_served(&mut self, job: &MirrorJob) -> bool {
        job.disks.iter().any(|of| {
            let has_replica = self.spec.disk(of.disk).is_some_and(|disk| disk.replica.is_some());
            has_replica && self.is_served(of.disk)
        })
    }

    /// Has the guest's filter replaced where disks with replicas have pivoted in it. The guest sees a pause.
    ///
    /// # Errors
    /// As [`Owner::may_replace_filter`]: the filter goes on, and the caller asks again.
    pub(super) async fn serve_with_replicas(&mut self) -> Result<(), Problem> {
        let Some(running) = self.running() else { return Ok(()) };
        // One that does not answer is replaced in any case.
        let Ok(status) = running.control.status().await else { return Ok(()) };
        if !serve::leaves_replicas(&self.spec, &status) {
            return Ok(());
        }
        self.may_replace_filter().await?;
        self.replace_filter_or_retry().await;
        Ok(())
    }

    /// Makes the replicas of disks that nobody uses, whose copies have just taken their places.
    pub(super) async fn make_replicas(&self, taken: &[(DiskSpec, File)]) {
        for (disk, image) in taken {
            if let Err(problem) = mirror::make_replica(&self.spec, disk, image).await {
                tracing::warn!(vm = %self.spec.vm, disk = %disk.disk, %problem, "its replica is made at its next start");
            }
        }
    }
}
