//! Dirty bitmaps that note what a guest changes after a backup, so that the next one reads no more (docs/decisions/170).
//!
//! ```text
//!   backup 1: [bitmap 1 starts] ─► snapshot ─► ...        backup 2: [bitmap 2 starts] ─► snapshot ─► bitmap 1 is read ─► ... ─► named: bitmap 1 ends
//! ```
//! While the VM is off or suspended no filter marks: what its last one has kept is read and changed at the same instants, if nothing has written to
//! the disk since. Of a backup that fails it is as after one of a running VM that does: the bitmap of the backup below is there, with all
//! that it had.
//!
//! A bitmap is a hint: who finds none reads the disks. What it says is believed, so it is only ever started just before the
//! snapshot of its backup is taken, never after that. It goes on with each filter of the disk, as long as nobody else writes to that
//! ([`crate::vm::bitmap_files`]). What it notes too much, before the snapshot of its own backup and after that of the next one, is only
//! read. So nothing here fails.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use jiff::Timestamp;
use tokio::task::spawn_blocking;
use vmseal_api::filter::BitmapChange;
use vmseal_api::host::backup::{TRACKING_PREFIX, tracking_name};
use vmseal_api::host::{BackupJob, Tracked};
use vmseal_api::id::{BackupId, DiskId, SnapshotId};

use super::{Owner, State};
use crate::filter::Control;
use crate::rules::find_disk;
use crate::storage::backup;
use crate::timed;
use crate::vm::bitmap_files::Kept;
use crate::vm::internal;

impl Owner {
    fn filter_of_guest(&self) -> Option<Control> {
        match &self.state {
            State::Running(running) | State::Stopping { running, .. } => {
                Some(running.control.clone())
            }
            _ => None,
        }
    }

    /// Has the filter note what the guest changes from now on: the snapshot of this backup is about to be taken, and was not taken
    /// before. What was noted for other backups than its parent is of no use.
    pub(super) async fn begin_tracking(&self, tracked: Tracked, disks: &[DiskId]) {
        if self.is_off() {
            return self.begin_tracking_while_off(tracked, disks).await;
        }
        let Some(control) = self.filter_of_guest() else { return };
        let Ok(status) = control.status().await else { return };
        let (own, parent) = (tracking_name(tracked.backup), tracked.parent.map(tracking_name));
        for served in status.disks.iter().filter(|served| disks.contains(&served.disk)) {
            let ours = served.bitmaps.iter().map(|bitmap| &bitmap.name);
            let ours = ours.filter(|name| name.starts_with(TRACKING_PREFIX));
            for old in ours.filter(|name| Some(*name) != parent.as_ref()) {
                // One of the same name that stays has noted all since an earlier attempt.
                let change = BitmapChange::Remove;
                let _ = control.change_bitmap(served.disk, old.clone(), change).await;
            }
            let started = control.change_bitmap(served.disk, own.clone(), BitmapChange::Start);
            if let Err(error) = started.await {
                tracing::info!(disk = %served.disk, %error, "what changes after a backup is not noted");
            }
        }
    }

    /// Has the filter note no longer what has changed since a backup.
    pub(super) async fn end_tracking(&self, since: BackupId, disks: &[DiskId]) {
        if self.is_off() {
            return self.end_tracking_while_off(since, disks).await;
        }
        let Some(control) = self.filter_of_guest() else { return };
        for disk in disks {
            let (name, change) = (tracking_name(since), BitmapChange::Remove);
            if let Err(error) = control.change_bitmap(*disk, name, change).await {
                tracing::debug!(%disk, %error, "what changed after a backup was not noted");
            }
        }
    }

    /// What the guest has changed of disks since the backup below, where the filter that serves it has noted that all the
    /// time. It is asked after the snapshot was taken, so it says too much rather than too little.
    pub(super) async fn changed_since(&self, job: &BackupJob) -> BTreeMap<DiskId, File> {
        if let Some(parent) = job.parent.filter(|_| self.is_off()) {
            return self.changed_while_off(parent, job).await;
        }
        let Some((parent, control)) = job.parent.zip(self.filter_of_guest()) else {
            return BTreeMap::new();
        };
        let disks = job.disks.clone();
        let read = move || {
            let of = |disk: DiskId| {
                let file = backup::in_memory().ok()?;
                control.read_bitmap(disk, tracking_name(parent), &file).ok()?;
                Some((disk, file))
            };
            disks.into_iter().filter_map(of).collect()
        };
        spawn_blocking(read).await.unwrap_or_default()
    }
}

impl Owner {
    /// Whether no filter serves its disks to a guest: it is off, or suspended.
    fn is_off(&self) -> bool {
        matches!(self.state, State::Off)
    }

    /// The bitmaps that the last filter of a disk has left, if nothing has written to the disk since; to what a snapshot keeps of it, if
    /// one is named.
    async fn kept_of(&self, disk: DiskId, snapshot: Option<SnapshotId>) -> Option<Kept> {
        let of = find_disk(&self.spec, disk).ok()?.clone();
        let place = of.datastore.location.path().to_owned();
        let (bitmaps, spec) = (self.shared.bitmaps.clone(), self.spec.clone());
        let look = move || bitmaps.look(&spec, &of, snapshot);
        timed::quick_call(&place, look).await.unwrap_or_else(|problem| {
            tracing::info!(%disk, %problem, "what has changed of a disk since a backup is not known");
            None
        })
    }

    async fn begin_tracking_while_off(&self, tracked: Tracked, disks: &[DiskId]) {
        let (own, parent) = (tracking_name(tracked.backup), tracked.parent.map(tracking_name));
        for disk in disks {
            let Some(mut kept) = self.kept_of(*disk, None).await else { continue };
            let ours = kept.bitmaps.names().filter(|name| name.starts_with(TRACKING_PREFIX));
            let others = ours.filter(|name| *name != own && Some(*name) != parent.as_deref());
            for old in others.map(str::to_owned).collect::<Vec<_>>() {
                kept.bitmaps.remove(&old);
            }
            if !kept.bitmaps.start(&own, Timestamp::now()) {
                tracing::info!(%disk, "what changes after a backup is not noted: the disk has no room for another bitmap");
                continue;
            }
            // To its end: none is to be there again after the VM was started.
            let (bitmaps, of) = (self.shared.bitmaps.clone(), *disk);
            let put = spawn_blocking(move || bitmaps.put(of, &kept));
            if let Err(problem) = put.await.map_err(internal).flatten() {
                tracing::info!(%disk, %problem, "what changes after a backup is not noted");
            }
        }
    }

    async fn end_tracking_while_off(&self, since: BackupId, disks: &[DiskId]) {
        for disk in disks {
            let Ok(of) = find_disk(&self.spec, *disk).cloned() else { continue };
            let bitmaps = self.shared.bitmaps.clone();
            let remove = spawn_blocking(move || bitmaps.remove(&of, &tracking_name(since)));
            if let Err(problem) = remove.await.map_err(internal).flatten() {
                tracing::debug!(%disk, %problem, "what changed after a backup is noted on");
            }
        }
    }

    async fn changed_while_off(&self, parent: BackupId, job: &BackupJob) -> BTreeMap<DiskId, File> {
        let mut changed = BTreeMap::new();
        for disk in &job.disks {
            let Some(kept) = self.kept_of(*disk, Some(job.snapshot)).await else { continue };
            let read = spawn_blocking(move || {
                let extents = kept.bitmaps.extents(&tracking_name(parent))?;
                let file = backup::in_memory().ok()?;
                file.write_all_at(&extents, 0).ok()?;
                Some(file)
            });
            if let Ok(Some(file)) = read.await {
                changed.insert(*disk, file);
            }
        }
        changed
    }
}
