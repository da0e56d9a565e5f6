//! The memory that a snapshot keeps beside what the disks held.
//!
//! ```text
//!  take    guest stopped ─► memory in vm.memory.snapshot-ID.creating, flushed ─► its name without .creating
//!          ─► layers put on the notes (the snapshot is there) ─► guest goes on, or stays paused where it was
//!  take, of a VM that is suspended    vm.memory.snapshot-ID is another name of vm.memory ─► layers put on the notes
//!  revert  [vm.memory removed: a VM that was suspended is off] ─► disks reverted
//!          ─► vm.memory is another name of the snapshot's file: the VM is suspended
//! ```
//! At no moment is vm.memory there while the disks hold something else than what its guest knows.
//! An agent that dies before the notes are written has the guest go on when it starts again, and the job is put again. A guest that was paused
//! stays so: if QEMU had saved it already, the job is refused and the snapshot undone.

use tokio::task::spawn_blocking;
use vmseal_api::host::{DiskSpec, JobSpec, JobState, KeyState, Power, SnapshotJob};
use vmseal_api::id::{SnapshotId, TaskId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::Owner;
use crate::rules;
use crate::storage::memory::MemoryFiles;
use crate::vm::internal;

/// A snapshot whose memory is being saved.
pub struct Keeping {
    task: TaskId,
    job: SnapshotJob,
    spec: JobSpec,
    disks: Vec<DiskSpec>,
    files: MemoryFiles,
}

impl Owner {
    /// Begins a snapshot with memory.
    pub(super) async fn keep_memory(
        &mut self,
        task: TaskId,
        job: SnapshotJob,
        disks: Vec<DiskSpec>,
        spec: JobSpec,
    ) -> Result<(), Problem> {
        if !matches!(self.power(), Power::Running | Power::Paused) {
            return Err(rules::has_no_memory(&self.spec));
        }
        rules::check_suspend(&self.spec, self.key() == KeyState::Missing)?;
        // Before the next check: a guest that sleeps may use no disk, which is not the reason.
        self.require_awake("cannot be saved").await?;
        self.may_put_layers(&disks).await?;
        let files = self.files_of(job.snapshot).await?;
        self.save_memory(files.clone(), job.generation).await?;
        self.jobs.begin(task, spec.clone());
        self.keeping = Some(Keeping { task, job, spec, disks, files });
        Ok(())
    }

    /// Checks, before the guest is saved, that layers can be put above its disks afterwards. QEMU before 9.0 takes no other filter for a guest
    /// that is paused, and none is needed where the one that serves can exchange the layers, or where none serves.
    async fn may_put_layers(&mut self, disks: &[DiskSpec]) -> Result<(), Problem> {
        if self.power() == Power::Paused {
            if self.stands_unserved() {
                return Ok(());
            }
            let named: Vec<_> = disks.iter().map(|disk| disk.disk).collect();
            let has_replica = disks.iter().any(|disk| disk.replica.is_some());
            if !has_replica && self.filter_that_replaces(&named).await.is_some() {
                return Ok(());
            }
        }
        self.may_replace_filter().await
    }

    /// The memory is saved, or is not: the disks are kept, and the guest goes on, unless it was paused.
    pub(super) async fn memory_kept(&mut self, keeping: Keeping, saved: Result<(), Problem>) {
        let kept = match saved {
            Ok(()) => self.keep_with_disks(&keeping).await,
            Err(problem) => Err(problem),
        };
        self.let_go_on().await;
        match kept {
            Ok(()) => {
                // The memory has what the file systems had not written.
                self.jobs.quiesced(keeping.task, Some(false));
                keeping.job.disks.iter().for_each(|disk| self.jobs.made(*disk));
            }
            Err(problem) => self.not_kept(keeping, problem).await,
        }
    }

    /// Has a snapshot keep the memory that the VM is suspended with.
    pub(super) async fn keep_saved_memory(&self, snapshot: SnapshotId) -> Result<(), Problem> {
        let kept = self.files_of(snapshot).await?;
        self.with_files(move |suspended| kept.keep_suspended(suspended)).await
    }

    async fn keep_with_disks(&mut self, keeping: &Keeping) -> Result<(), Problem> {
        let files = keeping.files.clone();
        spawn_blocking(move || files.keep()).await.map_err(internal)??;
        self.take_standing(keeping.job.snapshot, keeping.disks.clone()).await
    }

    async fn not_kept(&mut self, keeping: Keeping, problem: Problem) {
        tracing::error!(vm = %self.spec.vm, %problem, "a snapshot with memory is not taken");
        // What has its name may belong to disks that are kept: dropping the snapshot removes both.
        let files = keeping.files;
        if let Ok(Err(problem)) = spawn_blocking(move || files.sweep()).await {
            tracing::warn!(vm = %self.spec.vm, %problem, "what was saved cannot be removed");
        }
        if let Some(disk) = keeping.job.disks.first() {
            self.give_up(*disk, problem).await;
        }
    }

    /// Ends the saving of a memory for a snapshot that is not wanted any more.
    pub(super) async fn stop_keeping(&mut self, task: TaskId) {
        if let Some(keeping) = self.keeping.take_if(|keeping| keeping.task == task) {
            if let Some(running) = self.running() {
                running.saving = None;
            }
            self.let_go_on().await;
            let problem = Problem::new(ErrorCode::Cancelled, "it was cancelled");
            self.not_kept(keeping, problem).await;
        }
    }

    /// The VM is off before its memory was kept.
    pub(super) async fn fail_keeping(&mut self) {
        if let Some(keeping) = self.keeping.take() {
            let at_work = self.jobs.same(keeping.task, &keeping.spec);
            if matches!(at_work, Ok(Some(JobState::Waiting | JobState::Running))) {
                let what = "stopped while its memory was being saved";
                let problem = rules::wrong_state(&self.spec, what);
                self.not_kept(keeping, problem).await;
            }
        }
    }

    async fn files_of(&self, snapshot: SnapshotId) -> Result<MemoryFiles, Problem> {
        let spec = self.spec.clone();
        let of = move || MemoryFiles::of_snapshot(&spec, snapshot);
        spawn_blocking(of).await.map_err(internal)?
    }

    /// The memory that a snapshot keeps.
    pub(super) async fn memory_of(&self, snapshot: SnapshotId) -> Result<MemoryFiles, Problem> {
        let files = self.files_of(snapshot).await?;
        let found = files.clone();
        match spawn_blocking(move || found.is_saved()).await.map_err(internal)?? {
            true => Ok(files),
            false => {
                let what = format!(
                    "the memory that a snapshot of VM '{}' keeps, vm.memory.snapshot-{snapshot} beside its first disk, is not there: put it back, or delete the snapshot",
                    self.spec.name
                );
                Err(Problem::new(ErrorCode::Damaged, what))
            }
        }
    }

    /// Whether the VM has been reverted to a snapshot with memory, and has not gone on since.
    pub(super) async fn is_reverted(&self, snapshot: SnapshotId) -> Result<bool, Problem> {
        if self.power() != Power::Suspended {
            return Ok(false);
        }
        let spec = self.spec.clone();
        let look = move || {
            let kept = MemoryFiles::of_snapshot(&spec, snapshot)?;
            MemoryFiles::of(&spec)?.is_suspended_with(&kept)
        };
        spawn_blocking(look).await.map_err(internal)?
    }

    /// Has the VM, whose disks are reverted, be suspended with the memory of the snapshot.
    pub(super) async fn suspend_with(&mut self, memory: MemoryFiles) -> Result<(), Problem> {
        let spec = self.spec.clone();
        let suspend = move || MemoryFiles::of(&spec)?.suspend_with(&memory);
        spawn_blocking(suspend).await.map_err(internal)??;
        self.suspended = true;
        Ok(())
    }

    /// Removes the memory of a snapshot that is dropped, if it keeps one.
    pub(super) async fn forget_memory(&self, snapshot: SnapshotId) -> Result<(), Problem> {
        let files = self.files_of(snapshot).await?;
        spawn_blocking(move || files.discard()).await.map_err(internal)?
    }
}
