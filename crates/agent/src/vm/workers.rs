//! Who works on the disks of a VM: each is made, exported or exposed by a task that can be cancelled.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::io::DuplexStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use vmseal_api::host::{DiskFacts, Notice};
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;
use vmseal_api::request_id;

use super::Shared;
use super::exposed::Exposure;
use crate::process::run_dir::ProcessDir;
use crate::storage::disk::{self, DiskBuilder, Recipe};
use crate::storage::export::{self, Order};

/// Progress that may wait for the owner.
const REPORTS_MAX: usize = 16;

/// What a task says of itself.
pub enum Report {
    /// It is being made or exported: bytes done, and in all.
    Progress(u64, u64),
    /// It has been made, or could not be.
    Made(Result<DiskFacts, Problem>),
    /// It has been exported, or could not be.
    Written(Result<(), Problem>),
    /// It is exposed, and answers with these errors.
    ExposedErrors(Vec<Notice>),
    /// The disk is no longer exposed. The end of the stream tells the client that held it.
    Exposed(Option<DuplexStream>),
}

impl Report {
    /// Whether the task goes on.
    fn is_progress(&self) -> bool {
        match self {
            Self::Progress(..) | Self::ExposedErrors(_) => true,
            Self::Made(_) | Self::Written(_) | Self::Exposed(_) => false,
        }
    }
}

struct Worker {
    /// Tells reports of this attempt from those of an earlier one.
    number: u64,
    cancel: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

/// Work under way.
pub struct Workers {
    workers: BTreeMap<DiskId, Worker>,
    started: u64,
    sender: mpsc::Sender<(DiskId, u64, Report)>,
    reports: mpsc::Receiver<(DiskId, u64, Report)>,
}

impl Workers {
    pub fn new() -> Self {
        let (sender, reports) = mpsc::channel(REPORTS_MAX);
        Self { workers: BTreeMap::new(), started: 0, sender, reports }
    }

    /// Begins to make a disk.
    pub fn begin(&mut self, shared: &Arc<Shared>, recipe: Recipe) {
        let disk = recipe.disk.disk;
        let builder = builder(shared, shared.run_dir.import(disk));
        self.spawn(disk, |cancelled, show| async move {
            let progress = |done, total| show.progress(Report::Progress(done, total));
            Report::Made(make(recipe, builder, cancelled, progress).await)
        });
    }

    /// Begins to export a disk.
    pub fn begin_export(&mut self, shared: &Arc<Shared>, order: Order) {
        let disk = order.disk.disk;
        let builder = builder(shared, shared.run_dir.export(disk));
        self.spawn(disk, |cancelled, show| async move {
            let progress = |done, total| show.progress(Report::Progress(done, total));
            let written = export::write(order, &builder, progress, cancelled).await;
            Report::Written(written.inspect_err(
                |problem| tracing::warn!(%disk, %problem, "a disk could not be exported"),
            ))
        });
    }

    /// Begins to expose a disk.
    pub fn begin_exposure(&mut self, shared: &Arc<Shared>, exposure: Exposure) {
        let disk = exposure.disk();
        let builder = builder(shared, shared.run_dir.export(disk));
        self.spawn(disk, |cancelled, show| async move {
            Report::Exposed(exposure.serve(builder, show, cancelled).await)
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
        self.workers.insert(disk, Worker { number, cancel, task });
    }

    /// The next report of an attempt that is still wanted.
    pub async fn next(&mut self) -> (DiskId, Report) {
        loop {
            // The sender is held here: there is always an end of the channel.
            let Some((disk, number, report)) = self.reports.recv().await else {
                return std::future::pending().await;
            };
            if self.workers.get(&disk).is_none_or(|worker| worker.number != number) {
                continue;
            }
            if !report.is_progress() {
                self.workers.remove(&disk);
            }
            return (disk, report);
        }
    }

    /// Stops making or exporting a disk; when this returns, nothing of the attempt is left.
    pub async fn cancel(&mut self, disk: DiskId) {
        if let Some(worker) = self.workers.remove(&disk) {
            // It may have ended by itself.
            let _ = worker.cancel.send(());
            // Room for its last report, so that it can end.
            while !worker.task.is_finished() {
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

fn builder(shared: &Shared, directory: ProcessDir) -> DiskBuilder {
    let (filter, users) = (shared.filter.clone(), shared.users.clone());
    DiskBuilder { filter, users, directory, transfer: shared.transfer.clone() }
}

async fn make(
    recipe: Recipe,
    builder: DiskBuilder,
    cancelled: oneshot::Receiver<()>,
    progress: impl Fn(u64, u64) + Send,
) -> Result<DiskFacts, Problem> {
    let (vm, disk) = (recipe.spec.vm, recipe.disk.disk);
    let made = disk::create(recipe, &builder, progress, cancelled).await;
    made.inspect_err(|problem| tracing::warn!(%vm, %disk, %problem, "a disk could not be made"))
}
