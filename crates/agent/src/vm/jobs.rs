//! The disks that are being made for a VM, each by a task that can be cancelled.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use vmseal_api::host::DiskPhase;
use vmseal_api::id::DiskId;

use super::Shared;
use crate::disk::{self, Recipe, Workshop};

/// Progress that may wait for the owner.
const REPORTS_MAX: usize = 16;

struct Job {
    /// Tells reports of this attempt from those of an earlier one.
    number: u64,
    cancel: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

/// Work under way.
pub struct Jobs {
    jobs: BTreeMap<DiskId, Job>,
    started: u64,
    sender: mpsc::Sender<(DiskId, u64, DiskPhase)>,
    reports: mpsc::Receiver<(DiskId, u64, DiskPhase)>,
}

impl Jobs {
    pub fn new() -> Self {
        let (sender, reports) = mpsc::channel(REPORTS_MAX);
        Self { jobs: BTreeMap::new(), started: 0, sender, reports }
    }

    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    pub fn has(&self, disk: DiskId) -> bool {
        self.jobs.contains_key(&disk)
    }

    /// Begins to make a disk.
    pub fn begin(&mut self, shared: &Arc<Shared>, recipe: Recipe) {
        let disk = recipe.disk.disk;
        self.started += 1;
        let (number, sender) = (self.started, self.sender.clone());
        let (cancel, cancelled) = oneshot::channel();
        let workshop = Workshop {
            filter: shared.filter.clone(),
            users: shared.users.clone(),
            directory: shared.run_dir.import(disk),
        };
        let task = tokio::spawn(async move {
            let phase = work(recipe, workshop, cancelled, |done, total| {
                // A report that finds no room is followed by a newer one.
                let _ = sender.try_send((disk, number, DiskPhase::Creating { done, total }));
            })
            .await;
            // The owner may be gone.
            let _ = sender.send((disk, number, phase)).await;
        });
        self.jobs.insert(disk, Job { number, cancel, task });
    }

    /// The next report of an attempt that is still wanted.
    pub async fn next(&mut self) -> (DiskId, DiskPhase) {
        loop {
            // The sender is held here: there is always an end of the channel.
            let Some((disk, number, phase)) = self.reports.recv().await else {
                return std::future::pending().await;
            };
            if self.jobs.get(&disk).is_none_or(|job| job.number != number) {
                continue;
            }
            if !matches!(phase, DiskPhase::Creating { .. }) {
                self.jobs.remove(&disk);
            }
            return (disk, phase);
        }
    }

    /// Stops making a disk; when this returns, nothing of the attempt is left.
    pub async fn cancel(&mut self, disk: DiskId) {
        if let Some(job) = self.jobs.remove(&disk) {
            // It may have ended by itself.
            let _ = job.cancel.send(());
            // Room for its last report, so that it can end.
            while !job.task.is_finished() {
                tokio::select! {
                    _ = self.reports.recv() => {}
                    () = tokio::time::sleep(std::time::Duration::from_millis(5)) => {}
                }
            }
        }
    }
}

async fn work(
    recipe: Recipe,
    workshop: Workshop,
    cancelled: oneshot::Receiver<()>,
    progress: impl Fn(u64, u64) + Send,
) -> DiskPhase {
    let (vm, disk) = (recipe.spec.vm, recipe.disk.disk);
    let result = disk::create(recipe, &workshop, progress, cancelled).await;
    match result {
        Ok(facts) => DiskPhase::Ready { facts },
        Err(problem) => {
            tracing::warn!(%vm, %disk, %problem, "a disk could not be made");
            DiskPhase::Failed { problem }
        }
    }
}
