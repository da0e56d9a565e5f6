//! Snapshots of a VM's disks.
//!
//! ```text
//!  take    layers made ─► file systems frozen ─► disks wait ─► layers put on the notes, and in the filter ─► thawed
//!  revert  a layer above what the snapshot keeps, of each disk ─► [saved memory given up] ─► put on the note ─► what nothing needs is removed; a replica is copied anew
//!  drop    taken off the note ─► while a layer can be merged:
//!            one that nobody writes ─────────────► merged beside the guest
//!            the active one, VM off or suspended ► merged; ends when the VM starts
//!            the active one, large, VM running ──► a new layer above it: it is the first case now ([`crate::vm::convergence`])
//!            the active one, small, VM running ──► disk waits, merged, taken off the note, and out of the filter ([`super::merge_served`])
//! ```
//! All disks are kept at one instant: one filter serves them all, and none has a request in flight while the notes are put
//! ([`super::stacks`]). A filter of an earlier vmseal, or of disks that have replicas, ends before that and another one starts after.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::timeout;
use uuid::Uuid;
use vmseal_api::host::{
    DiskSpec, DropSnapshotJob, JobSpec, LAYERS_MAX, Power, RevertJob, SnapshotJob,
};
use vmseal_api::id::{DiskId, SnapshotId, TaskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::freeze::Thaw;
use super::stacks::Put;
use super::{Owner, State};
use crate::rules::exclusion::Action;
use crate::rules::{self, find_disk};
use crate::storage::backup::TpmToKeep;
use crate::storage::home::Home;
use crate::storage::layers::{self, Layer, LayerId, ToMerge};
use crate::storage::mirror;
use crate::storage::replica;
use crate::vm::convergence::{Convergence, Slowdown};
use crate::vm::internal;
use crate::vm::merging::Merging;
use crate::vm::workers::Workers;

/// The longest that a guest waits for its active layer to be merged, without the start of its filter: Linux gives a request
/// 30 seconds.
const GUEST_WAITS_MAX: Duration = Duration::from_secs(15);

/// A layer that was begun for each disk.
type Begun = Vec<(DiskSpec, Layer)>;

impl Owner {
    pub(super) fn disks_of(&self, disks: &[DiskId]) -> Result<Vec<DiskSpec>, Problem> {
        disks.iter().map(|disk| find_disk(&self.spec, *disk).cloned()).collect()
    }

    pub(super) async fn put_snapshot(
        &mut self,
        task: TaskId,
        job: &SnapshotJob,
        spec: JobSpec,
    ) -> Result<(), Problem> {
        self.may_work(Action::TakeSnapshot, &spec)?;
        self.are_not_copied(&job.disks).await?;
        let (vm, disks) = (self.spec.vm, self.disks_of(&job.disks)?);
        let (snapshot, of) = (job.snapshot, disks.clone());
        let taken = spawn_blocking(move || is_taken(vm, &of, snapshot));
        let taken = taken.await.map_err(internal)??;
        if job.memory && !taken && self.power() != Power::Suspended {
            return self.keep_memory(task, job.clone(), disks, spec).await;
        }
        let quiesced = match taken {
            true => None,
            false => {
                if let Some(tracked) = job.tracked {
                    self.begin_tracking(tracked, &job.disks).await;
                }
                Some(self.take(job, disks).await?)
            }
        };
        self.jobs.begin(task, spec);
        self.jobs.quiesced(task, quiesced);
        job.disks.iter().for_each(|disk| self.jobs.made(*disk));
        Ok(())
    }

    /// Takes a snapshot, with the memory of a guest only where that is saved; returns whether its file systems were frozen meanwhile.
    async fn take(&mut self, job: &SnapshotJob, disks: Vec<DiskSpec>) -> Result<bool, Problem> {
        let served = disks.iter().map(|disk| disk.disk).collect::<Vec<_>>();
        let served = served.into_iter().any(|disk| self.is_served(disk));
        let vm = self.spec.vm;
        let begun = spawn_blocking(move || begin(vm, disks)).await.map_err(internal)??;
        let tpm = self.tpm_to_keep(job).await?;
        if job.memory {
            // Before the notes: a snapshot with memory is never there without it.
            self.keep_saved_memory(job.snapshot).await?;
        }
        let frozen = served && job.quiesce && self.freeze().await;
        if served && self.running().is_none() {
            let what = "stopped while its guest was asked to freeze its file systems. Try again";
            return Err(rules::wrong_state(&self.spec, what));
        }
        let taken = self.put_above(served, begun, Some((job.snapshot, Uuid::now_v7())), tpm).await;
        // Somebody may have thawed them meanwhile.
        let quiesced = frozen && self.thaw().await != Thaw::WereThawed;
        taken.map(|()| quiesced)
    }

    /// Puts layers above what the disks of a guest hold that stands still, and is to go on above them. Where its filter has ended while it was
    /// paused, the next one finds them on the notes.
    pub(super) async fn take_standing(
        &mut self,
        snapshot: SnapshotId,
        disks: Vec<DiskSpec>,
    ) -> Result<(), Problem> {
        let served = disks.iter().map(|disk| disk.disk).collect::<Vec<_>>();
        let served = served.into_iter().any(|disk| self.is_served(disk)) && !self.stands_unserved();
        let vm = self.spec.vm;
        let begun = spawn_blocking(move || begin(vm, disks)).await.map_err(internal)??;
        self.put_above(served, begun, Some((snapshot, Uuid::now_v7())), None).await
    }

    /// Has layers be active that were begun, while no request is in flight.
    async fn put_above(
        &mut self,
        served: bool,
        begun: Begun,
        keep: Option<(SnapshotId, Uuid)>,
        tpm: Option<Arc<TpmToKeep>>,
    ) -> Result<(), Problem> {
        if served {
            match self.put_above_served(&begun, keep, tpm.clone()).await? {
                Put::Served => return Ok(()),
                Put::NotPossible => {}
                Put::Unknown(problem) => {
                    tracing::warn!(vm = %self.spec.vm, %problem, "the filter is restarted with the new layers");
                    self.replace_filter_or_retry().await;
                    return self.are_put(&begun).await;
                }
            }
            self.may_replace_filter().await?;
            self.end_filter_to_replace().await?;
        }
        let vm = self.spec.vm;
        let put = move || {
            if let Some(tpm) = tpm {
                tpm.take();
            }
            begun.into_iter().try_for_each(|(disk, layer)| {
                layers::put_active(&Home::of(&disk.datastore, vm)?, disk.disk, layer, keep)
            })
        };
        let put = spawn_blocking(put).await.map_err(internal).flatten();
        if served && let Err(problem) = self.start_filter().await {
            // It is started again until it serves: the guest waits.
            tracing::warn!(%vm, %problem, "the disks of a guest are not served yet");
            self.serve_again();
        }
        put
    }

    /// Checks that layers are active after an attempt that may have put them.
    async fn are_put(&self, begun: &Begun) -> Result<(), Problem> {
        let (vm, begun) = (self.spec.vm, begun.clone());
        let check = move || {
            begun.iter().try_for_each(|(disk, layer)| {
                let known = layers::read(&Home::of(&disk.datastore, vm)?, disk.disk)?;
                if known.active() == Some(layer.layer) {
                    return Ok(());
                }
                let what =
                    format!("the new layer of disk '{}' is not in use: try again", disk.name);
                Err(Problem::new(ErrorCode::TimedOut, what))
            })
        };
        spawn_blocking(check).await.map_err(internal)?
    }

    pub(super) async fn put_revert(
        &mut self,
        task: TaskId,
        job: &RevertJob,
        spec: JobSpec,
    ) -> Result<(), Problem> {
        if matches!(self.state, State::Off) {
            // A memory that is found later would be used with other disks: where it cannot be looked for, nothing is reverted.
            let of = self.spec.clone();
            let look = move || mirror::is_suspended(&of);
            self.suspended = spawn_blocking(look).await.map_err(internal)??;
        }
        if job.memory && self.is_reverted(job.snapshot).await? {
            self.jobs.begin(task, spec);
            job.disks.iter().for_each(|disk| self.jobs.made(*disk));
            return Ok(());
        }
        self.ready_to_revert(job, &spec)?;
        self.are_not_copied(&job.disks).await?;
        let memory = if job.memory { Some(self.memory_of(job.snapshot).await?) } else { None };
        let (vm, disks, snapshot) = (self.spec.vm, self.disks_of(&job.disks)?, job.snapshot);
        let name = self.spec.name.clone();
        // All of them, before anything is changed, and their new layers: a full datastore is found while the memory is there.
        let make = move || {
            let homes = disks.iter().map(|disk| {
                let home = Home::of(&disk.datastore, vm)?;
                let kept = layers::read(&home, disk.disk)?.layer_of(snapshot);
                let kept = kept.ok_or_else(|| rules::no_snapshot(&name, disk, snapshot))?;
                Ok((home, disk.disk, kept))
            });
            let homes = homes.collect::<Result<Vec<_>, Problem>>()?;
            let begun = homes.into_iter().map(|(home, disk, kept)| {
                let layer = layers::begin_layer(&home, disk, kept)?;
                Ok((home, disk, layer))
            });
            begun.collect::<Result<Vec<_>, Problem>>()
        };
        let begun = spawn_blocking(make).await.map_err(internal)??;
        // Before the first disk changes: with disks of the snapshot the guest would destroy its file systems.
        self.discard_memory().await?;
        let revert = move || {
            begun.into_iter().try_for_each(|(home, disk, layer)| {
                // Before the note: a replica has what the disk holds now.
                replica::copy_again(&home, disk)?;
                layers::put_active(&home, disk, layer, None)?;
                layers::remove_unneeded(&home, disk, None).map(drop)
            })
        };
        spawn_blocking(revert).await.map_err(internal)??;
        if let Some(memory) = memory {
            self.suspend_with(memory).await?;
        }
        self.jobs.begin(task, spec);
        job.disks.iter().for_each(|disk| self.jobs.made(*disk));
        Ok(())
    }

    /// Checks whether the VM could be reverted so.
    pub(super) fn ready_to_revert(&self, job: &RevertJob, spec: &JobSpec) -> Result<(), Problem> {
        self.may_work(Action::Revert, spec)?;
        rules::check_revert(&self.spec, job, self.power())
    }

    pub(super) async fn put_drop_snapshot(
        &mut self,
        task: TaskId,
        job: &DropSnapshotJob,
        spec: JobSpec,
    ) -> Result<(), Problem> {
        self.may_work(Action::DropSnapshot, &spec)?;
        self.are_not_copied(&job.disks).await?;
        self.can_drop(job).await?;
        let (vm, disks, snapshot) = (self.spec.vm, self.disks_of(&job.disks)?, job.snapshot);
        let forget = move || {
            disks.iter().try_for_each(|disk| {
                let home = Home::of(&disk.datastore, vm)?;
                layers::remove_unneeded(&home, disk.disk, Some(snapshot)).map(drop)
            })
        };
        spawn_blocking(forget).await.map_err(internal)??;
        // Last: a snapshot with memory is never there without it.
        self.forget_memory(snapshot).await?;
        self.kept_tpm.take_if(|(kept, _)| *kept == snapshot);
        self.jobs.begin(task, spec);
        for disk in &job.disks {
            self.merges.remove(disk);
            self.go_on_merging(*disk).await;
        }
        Ok(())
    }

    /// Begins the next merge of a disk's layers, or ends its part of the job.
    pub(super) async fn go_on_merging(&mut self, disk: DiskId) {
        match self.next_merge(disk).await {
            Ok(Next::Done) => {
                self.merges.remove(&disk);
                self.jobs.made(disk);
            }
            Ok(Next::Begun | Next::Later) => {}
            // The guest's filter cannot be replaced now: it is tried again.
            Err(problem) if problem.code == ErrorCode::TimedOut => {
                tracing::info!(%disk, %problem, "the layers of a disk are merged later");
            }
            Err(problem) => self.give_up(disk, problem).await,
        }
    }

    /// Goes on with merges that wait for the VM.
    pub(super) async fn go_on_with_merges(&mut self) {
        for disk in self.jobs.unfinished_merges() {
            if !self.workers.works_on(disk) {
                self.go_on_merging(disk).await;
            }
        }
    }

    /// Ends merges: a guest is about to have the disks.
    pub(super) async fn stop_merging(&mut self) {
        for disk in self.jobs.unfinished_merges() {
            self.workers.cancel(disk).await;
        }
    }

    async fn next_merge(&mut self, disk: DiskId) -> Result<Next, Problem> {
        loop {
            let spec = find_disk(&self.spec, disk)?.clone();
            let (vm, of) = (self.spec.vm, spec.clone());
            let read = move || {
                let home = Home::of(&of.datastore, vm)?;
                let known = layers::remove_unneeded(&home, of.disk, None)?;
                let next = known.next_merge();
                let size = next.map_or(0, |merge| layers::room(&home, of.disk, merge.upper));
                let debris = home.layer_files(of.disk).len() > known.count();
                Ok::<_, Problem>((next, size, debris))
            };
            let (next, size, debris) = spawn_blocking(read).await.map_err(internal)??;
            let served = self.is_served(disk);
            match (next, self.power()) {
                (None, Power::Running | Power::Paused) if served && debris => {
                    // Its filter reads files that were merged: they take room until it lets them go.
                    match self.let_go_of_merged(&spec).await? {
                        Put::Served => {}
                        Put::NotPossible => {
                            self.may_replace_filter().await?;
                            self.replace_filter_or_retry().await;
                        }
                        Put::Unknown(problem) => {
                            tracing::warn!(%vm, %problem, "the filter is restarted without merged layers");
                            self.replace_filter_or_retry().await;
                        }
                    }
                    remove_merged(vm, spec).await?;
                    return Ok(Next::Done);
                }
                (None, _) => return Ok(Next::Done),
                (Some(ToMerge { upper, active: false }), _)
                | (Some(ToMerge { upper, active: true }), Power::Off | Power::Suspended) => {
                    let mut merging = self.merging(&spec, upper, false)?;
                    if self.merges.get(&disk).is_none_or(Convergence::rests) {
                        merging.builder = merging.builder.beside(&self.guest_runs);
                    }
                    let slowdown = self.slowdown(disk).await;
                    self.workers.begin_merge(disk, merging, slowdown);
                    return Ok(Next::Begun);
                }
                (Some(_), Power::Running | Power::Paused) if served => {
                    if self.merges.entry(disk).or_default().is_large(size) {
                        let begun = spawn_blocking(move || begin(vm, vec![spec]));
                        let begun = begun.await.map_err(internal)??;
                        self.put_above(true, begun, None, None).await?;
                        self.merges.entry(disk).or_default().begin_round();
                    } else if let Some(merge) = next {
                        let merged = self.merge_active(&spec, merge.upper).await;
                        if merged.as_ref().is_err_and(|it| it.code == ErrorCode::TimedOut) {
                            self.merges.entry(disk).or_default().took_too_long();
                        }
                        merged?;
                    }
                }
                // When it runs, is off or suspended.
                (Some(_), _) => return Ok(Next::Later),
            }
        }
    }

    /// How the guest is to be slowed while a layer of its disk is merged.
    async fn slowdown(&mut self, disk: DiskId) -> Option<Slowdown> {
        let wait = self.merges.get(&disk)?.wait()?;
        let (control, _) = self.filter_that_replaces(&[disk]).await?;
        Some(Slowdown { control, disk, wait })
    }

    /// Merges the active layer of a disk while the guest waits.
    async fn merge_active(&mut self, disk: &DiskSpec, upper: LayerId) -> Result<(), Problem> {
        let merging = self.merging(disk, upper, true)?;
        match self.merge_active_served(disk, upper, merging).await? {
            Put::Served => return remove_merged(self.spec.vm, disk.clone()).await,
            Put::NotPossible => {}
            Put::Unknown(problem) => {
                tracing::warn!(vm = %self.spec.vm, %problem, "the filter is restarted without the merged layer");
                self.replace_filter_or_retry().await;
                return is_merged(self.spec.vm, disk.clone(), upper, problem).await;
            }
        }
        self.may_replace_filter().await?;
        let merging = self.merging(disk, upper, true)?;
        self.end_filter_to_replace().await?;
        let merged = match timeout(GUEST_WAITS_MAX, merging.run(None, None)).await {
            Ok(Ok(())) => note_merged(self.spec.vm, disk.clone(), upper).await,
            Ok(Err(problem)) => Err(problem),
            Err(_) => {
                let what = format!("disk '{}' takes too long to be merged", disk.name);
                Err(Problem::new(ErrorCode::TimedOut, what))
            }
        };
        if let Err(problem) = self.start_filter().await {
            tracing::warn!(vm = %self.spec.vm, %problem, "the disks of a guest are not served yet");
            self.serve_again();
        }
        merged
    }

    pub(super) async fn replace_filter_or_retry(&mut self) {
        if let Err(problem) = self.replace_filter().await {
            tracing::warn!(vm = %self.spec.vm, %problem, "the disks of a guest are not served yet");
            self.serve_again();
        }
    }

    fn merging(
        &self,
        disk: &DiskSpec,
        upper: LayerId,
        guest_waits: bool,
    ) -> Result<Merging, Problem> {
        let facts = self.facts(disk).ok_or_else(|| internal("a disk without facts"))?;
        let builder = Workers::builder(&self.shared, disk.disk);
        builder.gate.set(self.jobs.pace_of(disk.disk));
        Ok(Merging { vm: self.spec.vm, disk: disk.clone(), facts, upper, builder, guest_waits })
    }

    /// A layer has been merged, or could not be.
    pub(super) async fn layer_merged(
        &mut self,
        disk: DiskId,
        upper: LayerId,
        merged: Result<(), Problem>,
    ) {
        let spec = find_disk(&self.spec, disk).cloned();
        let noted = match (merged, spec) {
            (Ok(()), Ok(spec)) => note_merged(self.spec.vm, spec, upper).await,
            (Err(problem), _) | (_, Err(problem)) => Err(problem),
        };
        match noted {
            Ok(()) => self.go_on_merging(disk).await,
            Err(problem) if problem.code == ErrorCode::Cancelled => {}
            Err(problem) => self.give_up(disk, problem).await,
        }
    }
}

/// What comes next for the layers of a disk.
enum Next {
    /// Nothing: there is none to merge.
    Done,
    /// A merge has begun.
    Begun,
    /// One that waits for the VM.
    Later,
}

/// Whether all disks have a snapshot of one instant. Blocks.
fn is_taken(vm: VmId, disks: &[DiskSpec], snapshot: SnapshotId) -> Result<bool, Problem> {
    let attempt = |disk: &DiskSpec| {
        let home = Home::of(&disk.datastore, vm)?;
        Ok(layers::read(&home, disk.disk)?.attempt(snapshot))
    };
    let attempts = disks.iter().map(attempt).collect::<Result<Vec<_>, Problem>>()?;
    Ok(attempts.first().is_some_and(Option::is_some)
        && attempts.iter().all(|attempt| *attempt == attempts[0]))
}

/// Begins a layer above the active one of each disk. Blocks.
fn begin(vm: VmId, disks: Vec<DiskSpec>) -> Result<Begun, Problem> {
    let begin = |disk: DiskSpec| {
        let home = Home::of(&disk.datastore, vm)?;
        let known = layers::remove_unneeded(&home, disk.disk, None)?;
        if !known.has_room() {
            let what = format!(
                "disk '{}' has {LAYERS_MAX} layers above each other, and more would make it slow: delete a snapshot first",
                disk.name
            );
            return Err(Problem::new(ErrorCode::LimitExceeded, what));
        }
        let layer = layers::begin_layer(&home, disk.disk, known.active())?;
        Ok((disk, layer))
    };
    disks.into_iter().map(begin).collect()
}

async fn remove_merged(vm: VmId, disk: DiskSpec) -> Result<(), Problem> {
    let remove =
        move || layers::remove_merged(&Home::of(&disk.datastore, vm)?, disk.disk).map(drop);
    spawn_blocking(remove).await.map_err(internal)?
}

/// After an attempt that may have put a layer on the note as merged: returns `problem` where it is not.
async fn is_merged(
    vm: VmId,
    disk: DiskSpec,
    upper: LayerId,
    problem: Problem,
) -> Result<(), Problem> {
    let look = move || {
        let active = layers::read(&Home::of(&disk.datastore, vm)?, disk.disk)?.active();
        if active == Some(upper) { Err(problem) } else { Ok(()) }
    };
    spawn_blocking(look).await.map_err(internal)?
}

async fn note_merged(vm: VmId, disk: DiskSpec, upper: LayerId) -> Result<(), Problem> {
    let note =
        move || layers::note_merged(&Home::of(&disk.datastore, vm)?, disk.disk, upper).map(drop);
    spawn_blocking(note).await.map_err(internal)?
}
