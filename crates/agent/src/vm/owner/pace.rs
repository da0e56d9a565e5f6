//! Copies of disks go on at another pace: on record first, then the filter that copies is told.

use tokio::task::spawn_blocking;
use vmseal_api::host::{DiskSpec, Power};
use vmseal_api::id::{DiskId, TaskId};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::Problem;

use super::Owner;
use crate::filter::FilterError;
use crate::rules;
use crate::storage::mirror::{self, Mirror};
use crate::vm::internal;

impl Owner {
    /// Has the copies of a task's job, which is there, go on at this pace.
    pub(super) async fn set_pace(&mut self, task: TaskId, pace: CopyPace) -> Result<(), Problem> {
        if self.jobs.pace(task).is_none_or(|now| now == pace) {
            return Ok(());
        }
        rules::check_pace(pace)?;
        let of_job = self.jobs.spec(task).map(|job| job.disks()).unwrap_or_default();
        let disks = of_job.iter().filter_map(|disk| self.spec.disk(*disk));
        let copied: Vec<DiskSpec> = disks.cloned().collect();
        let vm = self.spec.vm;
        let record = move || copied.iter().try_for_each(|disk| mirror::record_pace(vm, disk, pace));
        spawn_blocking(record).await.map_err(internal)??;
        tracing::info!(%vm, %task, ?pace, "copies go on at another pace");
        let unfinished = self.jobs.set_pace(task, pace);
        for disk in of_job {
            if self.workers.set_pace(disk, pace) {
                continue;
            }
            self.bring_to_pace(disk, pace).await;
            if unfinished.contains(&disk) {
                self.workers.cancel(disk).await;
                self.work_on_copy(disk).await;
            }
        }
        Ok(())
    }

    /// Has the job of a task that works without a guest go on at this pace.
    pub(super) fn set_work_pace(&mut self, task: TaskId, pace: CopyPace) -> Result<(), Problem> {
        rules::check_pace(pace)?;
        let disks = self.jobs.set_work_pace(task, pace)?;
        tracing::info!(vm = %self.spec.vm, %task, ?pace, "work on disks goes on at another pace");
        for disk in disks {
            self.workers.set_pace(disk, pace);
        }
        Ok(())
    }

    /// Has the filter of the guest, where it keeps a copy of a disk, copy it at this pace. One that is not there reads the
    /// record when it starts.
    pub(super) async fn bring_to_pace(&mut self, disk: DiskId, pace: CopyPace) {
        if !matches!(self.power(), Power::Running | Power::Stopping | Power::Paused) {
            return;
        }
        let Some(running) = self.running() else { return };
        let control = running.control.clone();
        let Ok(status) = control.status().await else { return };
        let known = status.disks.into_iter().find(|known| known.disk == disk);
        // A filter that has no copy of it yet, or not any more.
        let Some(mirror) = known.and_then(|known| known.mirror) else { return };
        // A filter of an earlier vmseal holds nothing back.
        if mirror.pace.unwrap_or_default() == pace {
            return;
        }
        let replaced = match control.set_pace(disk, pace).await {
            Ok(()) => return,
            Err(FilterError::Refused { message, .. }) => {
                tracing::info!(%disk, message, "the filter is replaced to have another pace");
                match self.may_replace_filter().await {
                    Ok(()) => self.replace_filter().await,
                    refused => refused,
                }
            }
            Err(error) => Err(internal(error)),
        };
        if let Err(problem) = replaced {
            tracing::warn!(%disk, %problem, "the filter copies at another pace when it starts again");
            self.serve_again();
        }
    }

    /// Whether the copies of a task are paused, as this agent knows, or as an earlier one has put on record.
    pub(super) async fn copies_are_paused(&self, task: TaskId, known: &[Option<Mirror>]) -> bool {
        if let Some(pace) = self.jobs.pace(task) {
            return pace.paused;
        }
        let unfinished = known.iter().flatten().filter(|known| !known.pivoted);
        let unfinished: Vec<Mirror> = unfinished.cloned().collect();
        let look = move || unfinished.iter().any(|it| it.pace().is_ok_and(|pace| pace.paused));
        spawn_blocking(look).await.unwrap_or(false)
    }
}
