//! The disks that are being made or exported for a VM, each by a task that can be cancelled.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::io::DuplexStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use vmseal_api::host::{DiskPhase, ExportPhase, ExportState, Notice};
use vmseal_api::id::DiskId;
use vmseal_api::request_id;

use super::Shared;
use super::exposed::Exposure;
use crate::process::run_dir::ProcessDir;
use crate::storage::disk::{self, Recipe, Workshop};
use crate::storage::export::{self, Order};

/// Progress that may wait for the owner.
const REPORTS_MAX: usize = 16;

/// What a task says of itself.
pub enum Report {
    /// A disk is being made, or has been.
    Making(DiskPhase),
    /// It is being exported, or has been.
    Exporting(ExportState),
    /// It is exposed, and answers with these errors.
    ExposedErrors(Vec<Notice>),
    /// The disk is no longer exposed. The end of the stream tells the client that held it.
    Exposed(Option<DuplexStream>),
}

impl Report {
    /// Whether the task goes on.
    fn is_progress(&self) -> bool {
        match self {
            Self::Making(phase) => matches!(phase, DiskPhase::Creating { .. }),
            Self::Exporting(state) => matches!(state.phase, ExportPhase::Writing { .. }),
            Self::ExposedErrors(_) => true,
            Self::Exposed(_) => false,
        }
    }
}

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
    sender: mpsc::Sender<(DiskId, u64, Report)>,
    reports: mpsc::Receiver<(DiskId, u64, Report)>,
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
        let workshop = workshop(shared, shared.run_dir.import(disk));
        self.spawn(disk, |cancelled, show| async move {
            let progress =
                |done, total| show.progress(Report::Making(DiskPhase::Creating { done, total }));
            Report::Making(make(recipe, workshop, cancelled, progress).await)
        });
    }

    /// Begins to export a disk.
    pub fn begin_export(&mut self, shared: &Arc<Shared>, order: Order) {
        let (disk, export) = (order.disk.disk, order.export.export);
        let workshop = workshop(shared, shared.run_dir.export(disk));
        let report = move |phase| Report::Exporting(ExportState { export, disk, phase });
        self.spawn(disk, |cancelled, show| async move {
            let progress =
                |done, total| show.progress(report(ExportPhase::Writing { done, total }));
            let written = export::write(order, &workshop, progress, cancelled).await;
            report(match written {
                Ok(()) => ExportPhase::Written,
                Err(problem) => {
                    tracing::warn!(%disk, %problem, "a disk could not be exported");
                    ExportPhase::Failed { problem }
                }
            })
        });
    }

    /// Begins to expose a disk.
    pub fn begin_exposure(&mut self, shared: &Arc<Shared>, exposure: Exposure) {
        let disk = exposure.disk();
        let workshop = workshop(shared, shared.run_dir.export(disk));
        self.spawn(disk, |cancelled, show| async move {
            Report::Exposed(exposure.serve(workshop, show, cancelled).await)
        });
    }

    fn spawn<F>(&mut self, disk: DiskId, work: impl FnOnce(oneshot::Receiver<()>, Progress) -> F)
    where
        F: Future<Output = Report> + Send + 'static,
    {
        self.started += 1;
        let (number, sender) = (self.started, self.sender.clone());
        let (cancel, cancelled) = oneshot::channel();
        let work = work(cancelled, Progress { disk, number, sender: sender.clone() });
        let work = async move {
            let last = work.await;
            // The owner may be gone.
            let _ = sender.send((disk, number, last)).await;
        };
        let task = tokio::spawn(request_id::inherit(work));
        self.jobs.insert(disk, Job { number, cancel, task });
    }

    /// The next report of an attempt that is still wanted.
    pub async fn next(&mut self) -> (DiskId, Report) {
        loop {
            // The sender is held here: there is always an end of the channel.
            let Some((disk, number, report)) = self.reports.recv().await else {
                return std::future::pending().await;
            };
            if self.jobs.get(&disk).is_none_or(|job| job.number != number) {
                continue;
            }
            if !report.is_progress() {
                self.jobs.remove(&disk);
            }
            return (disk, report);
        }
    }

    /// Stops making or exporting a disk; when this returns, nothing of the attempt is left.
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

/// The way of a task to say how far it is.
pub struct Progress {
    disk: DiskId,
    number: u64,
    sender: mpsc::Sender<(DiskId, u64, Report)>,
}

impl Progress {
    /// Says something that must arrive.
    pub async fn tell(&self, report: Report) {
        // The owner may be gone.
        let _ = self.sender.send((self.disk, self.number, report)).await;
    }

    fn progress(&self, report: Report) {
        // A report that finds no room is followed by a newer one.
        let _ = self.sender.try_send((self.disk, self.number, report));
    }
}

fn workshop(shared: &Shared, directory: ProcessDir) -> Workshop {
    let (filter, users) = (shared.filter.clone(), shared.users.clone());
    Workshop { filter, users, directory, transfer: shared.transfer.clone() }
}

async fn make(
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
