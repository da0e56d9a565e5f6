//! Copies disks of a running guest, and has them pivot to their copies, while its filter serves them (docs/decisions/152).
//!
//! ```text
//!   copies made, noted ─► opened ─► copied from now on      commit: each pivots ─► names put right
//!                            └── not possible: the filter is restarted, by the notes ◄── an error: it may be so or not
//! ```
//! The notes and the maps of the copies say all that another filter, or another agent, needs to know.

use tokio::task::spawn_blocking;
use vmseal_api::filter::FilterStatus;
use vmseal_api::host::{DiskSpec, MirrorJob};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::Problem;

use super::Owner;
use super::stacks::Put;
use crate::filter::{Control, FilterError, Mirror};
use crate::rules::find_disk;
use crate::storage::mirror;
use crate::vm::internal;
use crate::vm::lacking;
use crate::vm::mirroring::{self, NotTurned};
use crate::vm::service::Service;

impl Owner {
    /// The guest's filter and its status, where it begins copies while it runs, and another one could be started after an
    /// error.
    async fn filter_that_mirrors(&mut self) -> Option<(Control, FilterStatus)> {
        if self.spec.disks().any(|disk| disk.encrypted) && self.kek.is_none() {
            return None;
        }
        let running = self.running()?;
        if !matches!(running.service, Service::Served(_)) {
            return None;
        }
        let control = running.control.clone();
        let status = control.status().await.ok()?;
        status.mirrors.then_some((control, status))
    }

    /// Whether the guest's filter can begin copies of its disks without a restart.
    pub(super) async fn can_mirror_served(&mut self) -> bool {
        self.filter_that_mirrors().await.is_some()
    }

    /// Has the guest's filter copy disks that have noted copies, and that it does not copy yet.
    pub(super) async fn mirror_served(&mut self, disks: &[DiskId]) -> Result<Put, Problem> {
        let Some((control, status)) = self.filter_that_mirrors().await else {
            return Ok(Put::NotPossible);
        };
        let copied = |disk: &DiskId| {
            let served = status.disks.iter().find(|served| served.disk == *disk);
            served.and_then(|served| served.mirror.as_ref()).is_some_and(|mirror| !mirror.pivoted)
        };
        let disks = disks.iter().filter(|disk| !copied(disk));
        let disks = disks.map(|disk| find_disk(&self.spec, *disk).cloned());
        let disks = disks.collect::<Result<Vec<DiskSpec>, _>>()?;
        let (spec, kek) = (self.spec.clone(), self.clone_kek()?);
        let begin = move || {
            let open = |disk: &DiskSpec| {
                let copy = mirror::open_beside_guest(&spec, disk, kek.as_ref())?;
                Ok(copy.map(|copy| (disk.disk, copy)))
            };
            match disks.iter().map(open).collect::<Result<Option<Vec<_>>, Problem>>() {
                Ok(Some(copies)) => begin(spec.vm, &control, &copies),
                Ok(None) => Put::NotPossible,
                Err(problem) => {
                    tracing::warn!(vm = %spec.vm, %problem, "a copy cannot be opened beside the guest");
                    Put::NotPossible
                }
            }
        };
        spawn_blocking(begin).await.map_err(internal)
    }

    /// The guest's filter, where it can have all disks of a job pivot without a restart.
    pub(super) async fn filter_that_pivots(&mut self, job: &MirrorJob) -> Option<Control> {
        let (control, status) = self.filter_that_mirrors().await?;
        let mut cached = Vec::new();
        for disk in job.disks.iter().map(|disk| disk.disk) {
            let served = status.disks.iter().find(|served| served.disk == disk)?;
            let pivoted = served.mirror.as_ref()?.pivoted;
            if !pivoted && self.spec.disk(disk)?.cache.is_some() {
                cached.push(disk);
            }
        }
        copies_are_cached(&control, &cached).await.then_some(control)
    }

    /// Has all disks of a job pivot while they are served. Names and records are put right by the caller.
    pub(super) async fn pivot_served(
        &mut self,
        control: &Control,
        job: &MirrorJob,
    ) -> Result<(), Problem> {
        let disks: Vec<DiskId> = job.disks.iter().map(|disk| disk.disk).collect();
        let sizes = lacking::sizes(self.spec.disks());
        match mirroring::pivot_served(control, &disks, &sizes).await {
            Ok(()) => Ok(()),
            Err(NotTurned::AsBefore(problem)) => Err(problem),
            Err(NotTurned::Unknown(problem)) => {
                tracing::warn!(vm = %self.spec.vm, %problem, "the filter is restarted where its disks are");
                self.replace_filter_or_retry().await;
                Err(problem)
            }
        }
    }
}

/// Whether the copies of disks with a cache have one as well. A filter of an earlier vmseal gives them none; another one would.
async fn copies_are_cached(control: &Control, disks: &[DiskId]) -> bool {
    if disks.is_empty() {
        return true;
    }
    let Ok(figures) = control.figures().await else { return false };
    let two = |disk: &DiskId| {
        let figures = figures.disks.iter().find(|figures| figures.disk == *disk);
        let layers = figures.map(|figures| &figures.layers[..]).unwrap_or_default();
        layers.iter().filter(|layer| layer.kind == "cache").count() == 2
    };
    disks.iter().all(two)
}

/// Blocks.
fn begin(vm: VmId, control: &Control, copies: &[(DiskId, Mirror)]) -> Put {
    if copies.is_empty() {
        return Put::Served;
    }
    match control.mirror(copies) {
        Ok(()) => Put::Served,
        Err(error @ FilterError::Refused { .. }) => {
            tracing::info!(%vm, %error, "the filter is restarted for copies");
            Put::NotPossible
        }
        Err(error) => Put::Unknown(internal(error)),
    }
}
