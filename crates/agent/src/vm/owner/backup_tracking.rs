//! Dirty bitmaps that note what a guest changes after a backup, so that the next one reads no more (docs/decisions/170).
//!
//! ```text
//!   backup 1: [bitmap 1 starts] ─► snapshot ─► ...        backup 2: [bitmap 2 starts] ─► snapshot ─► bitmap 1 is read ─► ... ─► named: bitmap 1 ends
//! ```
//! A bitmap is a hint: who finds none reads the disks. What it says is believed, so it is only ever started just before the
//! snapshot of its backup is taken, never after that. It goes on with each filter of the disk, as long as nobody else writes to that
//! ([`crate::vm::bitmap_files`]). What it notes too much, before the snapshot of its own backup and after that of the next one, is only
//! read. So nothing here fails.

use std::collections::BTreeMap;
use std::fs::File;

use tokio::task::spawn_blocking;
use vmseal_api::filter::BitmapChange;
use vmseal_api::host::backup::{TRACKING_PREFIX, tracking_name};
use vmseal_api::host::{BackupJob, Tracked};
use vmseal_api::id::{BackupId, DiskId};

use super::{Owner, State};
use crate::filter::Control;
use crate::storage::backup;

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
