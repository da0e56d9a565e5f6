//! The tasks that work on a VM's disks: each disk is made, exported, copied or exposed by a task that can be
//! cancelled.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use vmseal_api::host::DiskFacts;
use vmseal_api::host::backup::BackupManifest;
use vmseal_api::id::DiskId;
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id;

use super::Shared;
use super::convergence::Slowdown;
use super::converting::Converting;
use super::dumping::{Decrypting, Dumping};
use super::exposed::Exposure;
use super::merging::Merging;
use super::mirroring::{self, Copying, FormerSource};
use super::proving::prove;
use super::report::{Progress, Report};
use super::sending_at_rest::SendingAtRest;
use super::tree_copying::TreeCopying;
use crate::filter::Control;
use crate::storage::backup::{Creating, Restoring, Verifying};
use crate::storage::builder::DiskBuilder;
use crate::storage::disk::{self, NewDisk};
use crate::storage::export::{self, ExportRequest};
use crate::storage::gate::Gate;
use crate::storage::proof::Proving;

/// Progress reports that may wait for the owner.
const REPORTS_MAX: usize = 16;

struct Worker {
    /// Distinguishes reports of this attempt from those of an earlier one.
    number: u64,
    cancel: oneshot::Sender<()>,
    task: JoinHandle<()>,
    /// What holds it to its pace, where it has one.
    gate: Option<Arc<Gate>>,
}

/// The work in progress.
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
    pub fn begin(&mut self, shared: &Arc<Shared>, new_disk: NewDisk) {
        let disk = new_disk.disk.disk;
        let builder = shared.builder(shared.run_dir.import(disk));
        let gate = Arc::clone(&builder.gate);
        self.spawn_at(gate, disk, |cancelled, show| async move {
            let progress = |done, total| show.progress(Report::Progress(done, total));
            Report::Made(make(new_disk, builder, cancelled, progress).await)
        });
    }

    /// Begins to export a disk.
    pub fn begin_export(&mut self, shared: &Arc<Shared>, request: ExportRequest) {
        let disk = request.disk.disk;
        let builder = shared.builder(shared.run_dir.export(disk));
        let gate = Arc::clone(&builder.gate);
        self.spawn_at(gate, disk, |cancelled, show| async move {
            let progress = |done, total| show.progress(Report::Progress(done, total));
            let written = export::write(request, &builder, progress, cancelled).await;
            Report::Written(written.inspect_err(
                |problem| tracing::warn!(%disk, %problem, "a disk could not be exported"),
            ))
        });
    }

    /// Begins to expose a disk.
    pub fn begin_exposure(&mut self, shared: &Arc<Shared>, exposure: Exposure) {
        let disk = exposure.disk();
        let builder = shared.builder(shared.run_dir.export(disk));
        self.spawn(disk, |cancelled, show| async move {
            Report::Exposed(exposure.serve(builder, show, cancelled).await)
        });
    }

    /// Begins to copy a disk that no filter of a guest serves.
    pub fn begin_copy(&mut self, disk: DiskId, copying: Copying) {
        self.spawn(disk, |cancelled, show| async move {
            let copied = copying.copy(&show, cancelled).await;
            Report::Copied(copied.inspect_err(
                |problem| tracing::warn!(%disk, %problem, "a disk could not be copied"),
            ))
        });
    }

    /// Begins to convert a disk in its file.
    pub fn begin_conversion(&mut self, disk: DiskId, converting: Converting) {
        self.spawn(disk, |cancelled, show| async move {
            let converted = converting.run(&show, cancelled).await;
            Report::Converted(converted.inspect_err(
                |problem| tracing::warn!(%disk, %problem, "a disk could not be converted"),
            ))
        });
    }

    /// Begins to copy what nobody writes of a disk, after a pause.
    pub fn begin_tree(&mut self, disk: DiskId, copying: TreeCopying, pause: Duration) {
        let gate = Arc::clone(&copying.builder.gate);
        self.spawn_at(gate, disk, |cancelled, show| async move {
            let copied = copying.run(pause, show, cancelled).await;
            Report::TreeCopied(copied.inspect_err(
                |problem| tracing::warn!(%disk, %problem, "the layers of a disk could not be copied"),
            ))
        });
    }

    /// Has what copies a disk go on at another pace; false where it is to be begun anew for that.
    pub fn set_pace(&self, disk: DiskId, pace: CopyPace) -> bool {
        let gate = self.workers.get(&disk).and_then(|worker| worker.gate.as_ref());
        if let Some(gate) = gate {
            gate.set(pace);
        }
        gate.is_some()
    }

    /// Begins to follow the copy of a disk, of this size, that the filter of its guest keeps.
    pub fn begin_following(
        &mut self,
        (disk, size): (DiskId, u64),
        control: Control,
        pace: CopyPace,
    ) {
        self.spawn(disk, |cancelled, show| async move {
            let followed = tokio::select! {
                followed = mirroring::follow(control, (disk, size), pace, &show) => followed,
                _ = cancelled => Err(Problem::new(ErrorCode::Cancelled, "it is not followed")),
            };
            Report::Copied(followed)
        });
    }

    /// Begins to merge a layer of a disk into what is below it, and slows the guest meanwhile where that is wanted.
    pub fn begin_merge(&mut self, disk: DiskId, merging: Merging, slowdown: Option<Slowdown>) {
        let (upper, gate) = (merging.upper, Arc::clone(&merging.builder.gate));
        self.spawn_at(Arc::clone(&gate), disk, |cancelled, show| async move {
            let merge = merging.run(Some(&show), Some(cancelled));
            let merged = match slowdown {
                Some(slowdown) => slowdown.during(&gate, merge).await,
                None => merge.await,
            };
            Report::Merged(
                upper,
                merged.inspect_err(
                    |problem| tracing::warn!(%disk, %problem, "a layer could not be merged"),
                ),
            )
        });
    }

    /// Begins to read the files of a VM; the work counts as that of this disk.
    pub fn begin_proof(&mut self, shared: &Arc<Shared>, disk: DiskId, proving: Proving) {
        let (shared, gate) = (Arc::clone(shared), Arc::new(Gate::new(CopyPace::default())));
        self.spawn_at(Arc::clone(&gate), disk, |cancelled, show| async move {
            Report::Proved(prove(shared, proving, show, gate, cancelled).await)
        });
    }

    /// Begins to write a core dump of the guest; the work counts as that of this disk.
    pub fn begin_dump(&mut self, disk: DiskId, dumping: Dumping) {
        self.spawn(disk, |cancelled, show| async move {
            let progress = |done, total| show.progress(Report::Progress(done, total));
            let dumped = dumping.run(progress, cancelled).await;
            Report::Dumped(
                dumped.inspect_err(|problem| tracing::warn!(%problem, "no core dump was written")),
            )
        });
    }

    /// Begins to decrypt a core dump; the work counts as that of this disk.
    pub fn begin_decryption(&mut self, disk: DiskId, decrypting: Decrypting) {
        self.spawn(disk, |cancelled, show| async move {
            let written = decrypting.run(Arc::new(show), cancelled).await;
            Report::Written(written.inspect_err(
                |problem| tracing::warn!(%problem, "a core dump could not be decrypted"),
            ))
        });
    }

    /// Begins to write a backup; the work counts as that of this disk.
    pub fn begin_backup(&mut self, disk: DiskId, creating: Creating) {
        let gate = Arc::clone(&creating.builder.gate);
        self.spawn_at(gate, disk, |cancelled, show| async move {
            let progress = |done, total| show.progress(Report::Progress(done, total));
            let written = creating.run(progress, cancelled).await;
            backed_up(written, "a backup could not be written")
        });
    }

    /// Begins to read a backup; the work counts as that of this disk.
    pub fn begin_verification(&mut self, disk: DiskId, verifying: Verifying) {
        let gate = Arc::clone(&verifying.builder.gate);
        self.spawn_at(gate, disk, |cancelled, show| async move {
            let progress = |done, total| show.progress(Report::Progress(done, total));
            let found = verifying.run(progress, cancelled).await;
            backed_up(found.map(|found| (found, None)), "a backup could not be verified")
        });
    }

    /// Begins to restore disks; the work counts as that of this disk.
    pub fn begin_restore(&mut self, disk: DiskId, restoring: Restoring) {
        let gate = Arc::clone(&restoring.builder.gate);
        self.spawn_at(gate, disk, |cancelled, show| async move {
            let progress = |done, total| show.progress(Report::Progress(done, total));
            let restored = restoring.run(progress, cancelled).await;
            backed_up(restored.map(|found| (found, None)), "disks could not be restored")
        });
    }

    /// Begins to send the disks of a VM that is off to another host; the work counts as that of this disk.
    pub fn begin_sending(&mut self, disk: DiskId, sending: SendingAtRest) {
        self.spawn(disk, |cancelled, show| async move {
            let sent = sending.run(&show, cancelled).await;
            Report::SentAtRest(
                sent.inspect_err(
                    |problem| tracing::warn!(%problem, "the VM is not sent, and stays"),
                ),
            )
        });
    }

    /// Whether anything works on a disk.
    pub fn works_on(&self, disk: DiskId) -> bool {
        self.workers.contains_key(&disk)
    }

    /// Begins to remove the image that a disk had before its copy took its place.
    pub fn begin_removal(&mut self, of: FormerSource) {
        let (disk, gate) = (of.disk.disk, Arc::new(Gate::new(CopyPace::default())));
        self.spawn_at(Arc::clone(&gate), disk, |cancelled, show| async move {
            let removed = mirroring::remove_source(of, Arc::new(show), gate, cancelled).await;
            Report::SourceRemoved(removed.inspect_err(
                |problem| tracing::warn!(%disk, %problem, "a former image could not be removed"),
            ))
        });
    }

    /// What a filter that copies a disk needs.
    pub fn builder(shared: &Shared, disk: DiskId) -> DiskBuilder {
        shared.builder(shared.run_dir.import(disk))
    }

    /// What a filter that reads a disk needs.
    pub fn builder_of_export(shared: &Shared, disk: DiskId) -> DiskBuilder {
        shared.builder(shared.run_dir.export(disk))
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
        self.workers.insert(disk, Worker { number, cancel, task, gate: None });
    }

    /// The same of work at the pace of this gate.
    fn spawn_at<F>(
        &mut self,
        gate: Arc<Gate>,
        disk: DiskId,
        work: impl FnOnce(oneshot::Receiver<()>, Progress) -> F,
    ) where
        F: Future<Output = Report> + Send + 'static,
    {
        self.spawn(disk, work);
        if let Some(worker) = self.workers.get_mut(&disk) {
            worker.gate = Some(gate);
        }
    }

    /// The next report of an attempt that has not been cancelled.
    pub async fn next(&mut self) -> (DiskId, Report) {
        loop {
            // The sender is held here, so the channel never closes.
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

fn backed_up(result: Result<(BackupManifest, Option<u64>), Problem>, failure: &str) -> Report {
    let told = result.inspect_err(|problem| tracing::warn!(%problem, "{failure}"));
    Report::BackedUp(told.map(|(manifest, read)| (Box::new(manifest), read)))
}

async fn make(
    new_disk: NewDisk,
    builder: DiskBuilder,
    cancelled: oneshot::Receiver<()>,
    progress: impl Fn(u64, u64) + Send,
) -> Result<DiskFacts, Problem> {
    let (vm, disk) = (new_disk.spec.vm, new_disk.disk.disk);
    let made = disk::create(new_disk, &builder, progress, cancelled).await;
    made.inspect_err(|problem| tracing::warn!(%vm, %disk, %problem, "a disk could not be made"))
}
