//! Disks that are copied to other images, which take their place, of a VM that is off or suspended as of one that runs.
//!
//! ```text
//!  put ─► copies begun, noted ─┬─ the guest has the disk ──► its filter copies
//!                              └─ nobody has it ───────────► a filter of its own copies
//!  commit ─┬─ the guest's filter has copied all ─► the disks pivot ──────────────────────────────► names put right,
//!          └─ else: it ends ─► a filter of its own copies the rest, the disks pivot ─► another ◄── on record
//! ```
//! The guest's filter does both while it serves ([`super::mirror_served`]). One of an earlier vmseal is replaced, which is a longer
//! pause for the guest. Of a disk with layers everything but the active one is copied first, beside the guest ([`super::trees`]).
//! A disk with a replica gets another one after that ([`super::mirror_replicas`]). The disk with the key of a TPM pivots before the others
//! ([`super::mirror_tpm`]).

use std::sync::Arc;
use std::time::Duration;

use tokio::task::spawn_blocking;
use vmseal_api::filter::MirrorStatus;
use vmseal_api::host::{
    DiskFacts, DiskSpec, DiskToMirror, DropSourcesJob, JobSpec, MirrorJob, Power, VmSpec,
};
use vmseal_api::id::{DiskId, TaskId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::Owner;
use super::stacks::Put;
use crate::rules::exclusion::Action;
use crate::rules::{self, find_disk};
use crate::storage::lease;
use crate::storage::memory::MemoryFiles;
use crate::storage::mirror::{self, Mirror, NewMirror};
use crate::vm::mirroring::{Copying, FormerSource};
use crate::vm::workers::Workers;
use crate::vm::{images, internal};

/// A disk to copy: what is wanted, the disk, and its facts.
pub(super) type Wanted = (DiskToMirror, DiskSpec, DiskFacts);

impl Owner {
    /// Checks whether disks could be copied now.
    pub(super) async fn ready_to_mirror(
        &self,
        task: TaskId,
        job: &MirrorJob,
        spec: &JobSpec,
    ) -> Result<Vec<Wanted>, Problem> {
        self.may_work(Action::MirrorDisk, spec)?;
        self.may_copy_tpm(job)?;
        let wanted = self.wanted(job)?;
        for (known, (_, disk, _)) in self.mirrors(job).await?.into_iter().zip(&wanted) {
            match known {
                Some(other) if other.task() != task => {
                    return Err(rules::other_mirror(disk, other.task()));
                }
                Some(_) => {}
                None => mirror::examine_replica(&self.spec, disk).await?,
            }
        }
        Ok(wanted)
    }

    fn wanted(&self, job: &MirrorJob) -> Result<Vec<Wanted>, Problem> {
        let of = |wanted: &DiskToMirror| {
            let disk = find_disk(&self.spec, wanted.disk)?.clone();
            let facts = self.facts(&disk).ok_or_else(|| internal("a disk without facts"))?;
            Ok((wanted.clone(), disk, facts))
        };
        job.disks.iter().map(of).collect()
    }

    /// The mirrors of a job's disks.
    async fn mirrors(&self, job: &MirrorJob) -> Result<Vec<Option<Mirror>>, Problem> {
        let (vm, disks) = (self.spec.vm, self.wanted(job)?);
        let find = move || disks.iter().map(|(_, disk, _)| mirror::of_disk(vm, disk)).collect();
        spawn_blocking(find).await.map_err(internal)?
    }

    /// Whether the guest has a disk.
    pub(super) fn is_served(&mut self, disk: DiskId) -> bool {
        self.running().is_some_and(|running| running.live.disk(disk).is_some())
    }

    pub(super) async fn put_mirror(
        &mut self,
        task: TaskId,
        job: &MirrorJob,
        spec: JobSpec,
    ) -> Result<(), Problem> {
        let wanted = self.ready_to_mirror(task, job, &spec).await?;
        let disks: Vec<DiskId> = wanted.iter().map(|(_, disk, _)| disk.disk).collect();
        let served = disks.iter().copied().filter(|disk| self.is_served(*disk));
        let served: Vec<DiskId> = served.collect();
        let replaces = !served.is_empty() && !self.keeps_copies(&served).await;
        if replaces && !self.can_mirror_served().await {
            self.may_replace_filter().await?;
        }
        self.begin_copies(task, wanted, &served, job).await?;
        let mut kept = Vec::new();
        for disk in served {
            if !self.is_incomplete(disk).await? {
                kept.push(disk);
            }
        }
        let replaces = match self.must_restart_for_copies(&kept).await {
            Ok(replaces) => replaces,
            // In a moment it is tried again, and goes on with what is copied.
            Err(problem) if problem.code == ErrorCode::TimedOut => return Err(problem),
            Err(problem) => {
                self.give_up_copies(task, job).await?;
                return Err(problem);
            }
        };
        self.jobs.begin(task, spec);
        if replaces {
            self.restart_with_copies().await;
        }
        for disk in disks {
            self.bring_to_pace(disk, job.pace).await;
            self.work_on_copy(disk).await;
        }
        Ok(())
    }

    /// Whether the guest's filter keeps copies of all these disks.
    pub(super) async fn keeps_copies(&mut self, disks: &[DiskId]) -> bool {
        let Some(running) = self.running() else { return false };
        let Ok(status) = running.control.status().await else { return false };
        let kept = |disk: &DiskId| {
            let of_disk = status.disks.iter().find(|known| known.disk == *disk);
            let mirror = of_disk.and_then(|known| known.mirror.as_ref());
            mirror.is_some_and(|mirror| !mirror.pivoted)
        };
        disks.iter().all(kept)
    }

    /// Has the guest's filter copy disks of the guest that have noted copies; whether it must be restarted for that.
    ///
    /// # Errors
    /// It must, and cannot be now: these disks are not copied.
    pub(super) async fn must_restart_for_copies(
        &mut self,
        disks: &[DiskId],
    ) -> Result<bool, Problem> {
        if disks.is_empty() || self.keeps_copies(disks).await {
            return Ok(false);
        }
        match self.mirror_served(disks).await? {
            Put::Served => Ok(false),
            Put::NotPossible => self.may_replace_filter().await.map(|()| true),
            Put::Unknown(problem) => {
                tracing::warn!(vm = %self.spec.vm, %problem, "the filter is restarted with copies");
                Ok(true)
            }
        }
    }

    /// Restarts the guest's filter, which is to keep copies of the disks that have noted ones.
    pub(super) async fn restart_with_copies(&mut self) {
        if let Err(problem) = self.replace_filter().await {
            // It is started again until it serves: the guest waits.
            tracing::warn!(vm = %self.spec.vm, %problem, "the filter that is to keep copies does not serve yet");
            self.serve_again();
        }
    }

    /// Makes the copies, and notes them: all, or none.
    async fn begin_copies(
        &self,
        task: TaskId,
        wanted: Vec<Wanted>,
        served: &[DiskId],
        job: &MirrorJob,
    ) -> Result<(), Problem> {
        let (spec, kek, served) = (self.spec.clone(), self.clone_kek()?, served.to_vec());
        let directory = self.shared.run_dir.vm(self.spec.vm);
        let (pace, forgets_key) = (job.pace, job.forgets_key);
        let begin = move || {
            for (index, (to, disk, facts)) in wanted.iter().enumerate() {
                let (spec, kek) = (&spec, kek.as_ref());
                let new = NewMirror { spec, disk, facts, kek, wanted: to, task, pace, forgets_key };
                let begun = new.begin(|image| match served.contains(&disk.disk) {
                    true => images::check(&directory, &[(disk, image)]),
                    false => Ok(()),
                });
                if let Err(problem) = begun {
                    // A copy that an earlier attempt has begun goes with it: its task begins again.
                    for (to, disk, _) in &wanted[..index] {
                        let _ = mirror::give_up(spec, disk, to, Some(task));
                    }
                    return Err(problem);
                }
            }
            Ok(())
        };
        spawn_blocking(begin).await.map_err(internal)?
    }

    /// Has the copy of a disk go on, or follows it.
    pub(super) async fn work_on_copy(&mut self, disk: DiskId) {
        match self.is_incomplete(disk).await {
            Ok(false) => {}
            Ok(true) => return self.begin_tree(disk, Duration::ZERO).await,
            Err(problem) => return self.copy_failed(disk, problem).await,
        }
        let pace = self.jobs.mirror_of(disk).map(|(_, job)| job.pace).unwrap_or_default();
        let running = matches!(self.power(), Power::Running | Power::Stopping | Power::Paused);
        if running && self.is_served(disk) {
            let size = self.spec.disk(disk).map_or(0, |disk| disk.size);
            if let Some(running) = self.running() {
                let control = running.control.clone();
                self.workers.begin_following((disk, size), control, pace);
            }
        } else if self.power() != Power::Starting && !pace.paused && !self.is_of_tpm_in_use(disk) {
            match self.copying(&[disk]) {
                Ok(copying) => self.workers.begin_copy(disk, copying),
                Err(problem) => {
                    tracing::error!(%disk, %problem, "the copy of a disk cannot go on");
                }
            }
        }
    }

    /// What copies disks that no filter serves.
    pub(super) fn copying(&self, disks: &[DiskId]) -> Result<Copying, Problem> {
        let of = |disk: &DiskId| {
            let disk = find_disk(&self.spec, *disk)?.clone();
            let facts = self.facts(&disk).ok_or_else(|| internal("a disk without facts"))?;
            Ok((disk, facts))
        };
        let first = disks.first().ok_or_else(|| internal("a copy of no disk"))?;
        Ok(Copying {
            spec: self.spec.clone(),
            disks: disks.iter().map(of).collect::<Result<_, Problem>>()?,
            kek: self.clone_kek()?,
            builder: Workers::builder(&self.shared, *first),
        })
    }

    /// The VM is off or runs now, and was not before: its copies go on in another way.
    pub(super) async fn go_on_copying(&mut self) {
        for disk in self.jobs.unfinished_copies() {
            self.workers.cancel(disk).await;
            if self.is_left_out(disk).await {
                self.begin_tree(disk, Duration::ZERO).await;
            } else {
                self.work_on_copy(disk).await;
            }
        }
    }

    /// Whether the guest's filter has to be given this copy now: when the filter started, the VM's saved memory was not copied yet, so it
    /// started without the copy; the guest has used that memory up since.
    async fn is_left_out(&mut self, disk: DiskId) -> bool {
        let (vm, Ok(spec)) = (self.spec.vm, find_disk(&self.spec, disk).cloned()) else {
            return false;
        };
        let Some(running) = self.running() else { return false };
        let Ok(status) = running.control.status().await else { return false };
        let served = status.disks.iter().find(|known| known.disk == disk);
        if served.is_none_or(|served| served.mirror.is_some()) {
            return false;
        }
        let look = move || mirror::of_disk(vm, &spec).ok().flatten();
        let known = spawn_blocking(look).await.ok().flatten();
        known.is_some_and(|known| !known.pivoted)
    }

    /// Ends the filters that copy disks of a VM that is off: its guest is about to have them.
    pub(super) async fn stop_copying(&mut self) {
        for disk in self.jobs.unfinished_copies() {
            self.workers.cancel(disk).await;
        }
    }

    pub(super) async fn commit_mirror(
        &mut self,
        task: TaskId,
        job: &MirrorJob,
    ) -> Result<(), Problem> {
        let wanted = self.wanted(job)?;
        let known = self.mirrors(job).await?;
        for (known, (_, disk, _)) in known.iter().zip(&wanted) {
            let of_task = known.as_ref().is_some_and(|known| known.task() == task);
            // Of an agent that has restarted: the job is to be put again.
            if !of_task || self.is_incomplete(disk.disk).await? {
                return Err(rules::nothing_to_commit(task));
            }
        }
        if self.copies_are_paused(task, &known).await {
            return Err(rules::copies_are_paused(&self.spec, task));
        }
        if known.iter().any(|known| known.as_ref().is_none_or(|known| !known.pivoted)) {
            self.nothing_is_left_behind(job, &known).await?;
            self.pivot_tpm(job, &known).await?;
            self.pivot(job).await?;
        } else {
            self.take_copies(job).await?;
        }
        self.serve_with_replicas().await?;
        self.jobs.committed(task);
        Ok(())
    }

    /// Checks that what is beside the first disk follows it, where that is among the copied ones: it may have been written since they were
    /// begun.
    async fn nothing_is_left_behind(
        &mut self,
        job: &MirrorJob,
        known: &[Option<Mirror>],
    ) -> Result<(), Problem> {
        let is_first = |wanted: &DiskToMirror| MemoryFiles::are_beside(&self.spec, wanted.disk);
        let first = job.disks.iter().position(is_first);
        let Some(mirror) = first.and_then(|index| known.get(index)?.clone()) else {
            return Ok(());
        };
        if self.running().is_some_and(|running| running.dumping.is_some()) {
            let what = format!(
                "VM '{}' has a guest that panicked, and its core dump is being written: wait a moment",
                self.spec.name
            );
            return Err(Problem::new(ErrorCode::TimedOut, what));
        }
        let at_rest = self.running().is_none();
        let seals = self.spec.key.is_some() && !job.forgets_key;
        let look = move || {
            let memory = at_rest && mirror.leaves_memory()?;
            Ok::<_, Problem>((memory, mirror.leaves_core(seals)?))
        };
        match spawn_blocking(look).await.map_err(internal)?? {
            (true, _) => Err(rules::leaves_memory(&self.spec)),
            (false, Some(core)) => Err(rules::leaves_core(&self.spec, &core.display().to_string())),
            (false, None) => Ok(()),
        }
    }

    /// Has all disks of a job pivot, and the guest served from the copies.
    async fn pivot(&mut self, job: &MirrorJob) -> Result<(), Problem> {
        let served = job.disks.iter().map(|disk| disk.disk).collect::<Vec<_>>();
        let served = served.into_iter().any(|disk| self.is_served(disk));
        let pivots = match self.power() {
            Power::Running | Power::Paused if served => self.filter_that_pivots(job).await,
            _ => None,
        };
        match self.power() {
            Power::Off | Power::Suspended => {}
            Power::Running | Power::Paused => {
                if served && (pivots.is_none() || self.replicates_served(job)) {
                    self.may_replace_filter().await?;
                }
            }
            _ => return Err(rules::switched_later(&self.spec)),
        }
        for disk in &job.disks {
            self.workers.cancel(disk.disk).await;
        }
        if let Some(control) = pivots {
            let pivoted = self.pivot_served(&control, job).await;
            // Those that have pivoted, even if others have not.
            let taken = self.take_copies(job).await;
            return pivoted.and(taken);
        }
        if served {
            self.end_filter_to_replace().await?;
        }
        let disks: Vec<_> = job.disks.iter().map(|disk| disk.disk).collect();
        let pivoted = match self.copying(&disks) {
            Ok(copying) => copying.pivot().await,
            Err(problem) => Err(problem),
        };
        // Those that have pivoted, even if others have not.
        let taken = self.take_copies(job).await;
        if served && let Err(problem) = self.start_filter().await {
            tracing::warn!(vm = %self.spec.vm, %problem, "its disks are not served from their copies yet");
            self.serve_again();
        }
        pivoted.and(taken)
    }

    /// Puts on record what the disks are that have pivoted.
    pub(super) async fn take_copies(&mut self, job: &MirrorJob) -> Result<(), Problem> {
        let (vm, disks) = (self.spec.vm, self.wanted(job)?);
        let running = self.running().is_some();
        let directory = self.shared.run_dir.vm(vm);
        let take = move || {
            let mut taken = Vec::new();
            for (_, disk, _) in &disks {
                let Some((disk, image)) = mirror::take_place(vm, disk)? else { continue };
                if running {
                    images::replace(&directory, disk.disk, &image)?;
                }
                taken.push((disk, image));
            }
            Ok::<_, Problem>(taken)
        };
        let taken = spawn_blocking(take).await.map_err(internal)??;
        if !running {
            self.make_replicas(&taken).await;
        }
        let taken: Vec<DiskSpec> = taken.into_iter().map(|(disk, _)| disk).collect();
        let change = |spec: &VmSpec| {
            let mut spec = spec.clone();
            for known in spec.disks_mut() {
                if let Some(taken) = taken.iter().find(|taken| taken.disk == known.disk) {
                    (known.encrypted, known.facts) = (taken.encrypted, taken.facts.clone());
                    known.datastore = taken.datastore.clone();
                }
            }
            spec
        };
        let (spec, next) = (change(&self.spec), self.next.as_ref().map(change));
        let (known, new) = (self.spec.clone(), spec.clone());
        let began = self.running().and_then(|running| running.live.lease);
        let follow = move || lease::follow(&known, &new, began);
        spawn_blocking(follow).await.map_err(internal)??;
        for disk in &taken {
            self.made.extend(disk.facts.clone().map(|facts| (disk.disk, facts)));
            // Linked clones have its former data key.
            self.shared_out.remove(&disk.disk);
        }
        self.next = next;
        if running {
            self.keep(spec).await?;
        } else {
            self.spec = spec;
        }
        self.describe();
        // They have followed, and may not be as they were.
        self.list_panic_dumps().await;
        Ok(())
    }

    pub(super) async fn cancel_mirror(
        &mut self,
        task: TaskId,
        job: &MirrorJob,
    ) -> Result<(), Problem> {
        let of_task = |known: &&Mirror| known.task() == task;
        let known = self.mirrors(job).await?;
        if known.iter().flatten().filter(of_task).any(|known| known.pivoted) {
            return Err(rules::is_mirrored(&self.spec));
        }
        for disk in self.jobs.cancel(task) {
            self.workers.cancel(disk).await;
        }
        for disk in &job.disks {
            self.workers.cancel(disk.disk).await;
        }
        self.give_up_copies(task, job).await
    }

    /// Removes the copies of a job, and has the guest served without them.
    pub(super) async fn give_up_copies(
        &mut self,
        task: TaskId,
        job: &MirrorJob,
    ) -> Result<(), Problem> {
        let give_up = |owner: &Self| {
            let (spec, disks) = (owner.spec.clone(), owner.wanted(job));
            async move {
                let disks = disks?;
                let work = move || {
                    let each = disks
                        .iter()
                        .map(|(to, disk, _)| mirror::give_up(&spec, disk, to, Some(task)));
                    // All of them, even if one cannot be removed yet.
                    each.collect::<Vec<_>>().into_iter().collect::<Result<(), Problem>>()
                };
                spawn_blocking(work).await.map_err(internal)?
            }
        };
        match give_up(self).await {
            // The guest's filter has the files.
            Err(problem) if problem.code == ErrorCode::InUse => {}
            result => return result,
        }
        self.let_go_of_copies().await;
        match give_up(self).await {
            Err(problem) if problem.code == ErrorCode::InUse => {
                tracing::info!(vm = %self.spec.vm, %problem, "a copy that was given up is removed later");
                Ok(())
            }
            result => result,
        }
    }

    /// Has a filter replaced that keeps copies which were given up, or former images.
    pub(super) async fn let_go_of_copies(&mut self) {
        let Some(running) = self.running() else { return };
        if running.sending.is_some() {
            // Another host gets them.
            return;
        }
        let Ok(status) = running.control.status().await else { return };
        // One that has pivoted has closed its former image.
        let keeps = |mirror: &MirrorStatus| !mirror.pivoted;
        let kept = status.disks.iter().filter(|disk| disk.mirror.as_ref().is_some_and(keeps));
        let kept: Vec<_> =
            kept.filter_map(|disk| find_disk(&self.spec, disk.disk).ok().cloned()).collect();
        if kept.is_empty() {
            return;
        }
        let vm = self.spec.vm;
        let wanted = move || {
            let copied =
                |disk| mirror::of_disk(vm, disk).map(|it| it.is_some_and(|it| !it.pivoted));
            kept.iter().map(copied).collect::<Result<Vec<_>, _>>()
        };
        let Ok(Ok(wanted)) = spawn_blocking(wanted).await else { return };
        if wanted.iter().all(|wanted| *wanted) {
            return;
        }
        let replaced = match self.may_replace_filter().await {
            Ok(()) => self.replace_filter().await,
            refused => refused,
        };
        if let Err(problem) = replaced {
            tracing::info!(vm = %vm, %problem, "the filter keeps a copy that nobody needs");
            self.serve_again();
        }
    }

    pub(super) fn put_drop_sources(
        &mut self,
        task: TaskId,
        job: &DropSourcesJob,
        spec: JobSpec,
    ) -> Result<(), Problem> {
        self.may_work(Action::DropSource, &spec)?;
        let disks = job.disks.iter().map(|disk| find_disk(&self.spec, *disk).cloned());
        let each = disks.collect::<Result<Vec<_>, _>>()?.into_iter().map(|disk| {
            let (spec, kek) = (self.spec.clone(), self.clone_kek()?);
            let guest_runs = Arc::clone(&self.guest_runs);
            Ok(FormerSource { spec, disk, kek, guest_runs })
        });
        let each = each.collect::<Result<Vec<_>, Problem>>()?;
        self.jobs.begin(task, spec);
        each.into_iter().for_each(|of| self.workers.begin_removal(of));
        Ok(())
    }

    /// A copy cannot be made: all of its job is given up.
    pub(super) async fn copy_failed(&mut self, disk: DiskId, problem: Problem) {
        let job = self.jobs.mirror_of(disk);
        for other in self.jobs.failed(disk, problem) {
            self.workers.cancel(other).await;
        }
        if let Some((task, job)) = job
            && let Err(problem) = self.give_up_copies(task, &job).await
        {
            tracing::warn!(%disk, %problem, "the copy of a disk is left");
        }
    }
}
