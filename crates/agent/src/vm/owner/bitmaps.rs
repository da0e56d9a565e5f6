//! The dirty bitmaps of a disk in use. Its filter alone says which there are: none is reported that it does not mark. Files keep them
//! for the next filter ([`crate::vm::bitmap_files`]).

use std::time::Instant;

use vmseal_api::filter::{BitmapChange, BitmapStatus};
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id;

use super::{Owner, State};
use crate::filter::{Control, FilterError};
use crate::rules::exclusion::Action;
use crate::rules::{self, find_disk};
use crate::timed;
use crate::vm::service::Service;
use crate::vm::{Reply, internal};

impl Owner {
    /// Has the filter answer. That may take a while: the VM's other calls do not wait for it.
    pub(super) fn bitmaps(
        &self,
        disk: DiskId,
        change: Option<(String, BitmapChange)>,
        to: Reply<Vec<BitmapStatus>>,
    ) {
        let filter = self.keeper_of_bitmaps(disk, change.as_ref());
        let work = async move {
            let answer = match filter {
                Ok((control, what)) => {
                    answered(&control, disk, change).await.map_err(|error| explained(&what, error))
                }
                Err(problem) => Err(problem),
            };
            // The caller may have gone; the result stays.
            let _ = to.send(answer);
        };
        tokio::spawn(request_id::inherit(work));
    }

    /// The filter that serves the disk's guest, and the disk's name for messages.
    fn keeper_of_bitmaps(
        &self,
        disk: DiskId,
        change: Option<&(String, BitmapChange)>,
    ) -> Result<(Control, String), Problem> {
        let disk = find_disk(&self.spec, disk)?;
        if let Some((name, change)) = change {
            rules::check_bitmap(name, *change)?;
        }
        self.situation().may(Action::Bitmaps, Some(disk))?;
        let (State::Running(running) | State::Stopping { running, .. }) = &self.state else {
            return Err(internal("a VM that runs has no processes"));
        };
        if !matches!(running.service, Service::Served(_)) {
            return Err(rules::bitmaps_wait(&self.spec));
        }
        Ok((running.control.clone(), rules::disk_of(&self.spec, disk)))
    }
}

impl Owner {
    /// Keeps the bitmaps of a VM whose processes have ended.
    pub(super) async fn keep_bitmaps(&self) {
        for disk in self.spec.disks().filter(|disk| disk.role.is_data()) {
            let (bitmaps, spec, of) =
                (self.shared.bitmaps.clone(), self.spec.clone(), disk.clone());
            let (directory, began) = (self.shared.run_dir.vm(spec.vm), Instant::now());
            let keep = move || bitmaps.keep(&directory, &spec, &of, began);
            // It also writes to the state directory: where that is slow, the datastore is not to count as silent.
            let place = disk.datastore.location.path().join("bitmaps");
            if let Err(problem) = timed::quick_call(&place, keep).await {
                tracing::warn!(disk = %disk.disk, %problem, "the dirty bitmaps of a disk are lost");
            }
        }
    }
}

async fn answered(
    control: &Control,
    disk: DiskId,
    change: Option<(String, BitmapChange)>,
) -> Result<Vec<BitmapStatus>, FilterError> {
    match change {
        Some((name, change)) => control.change_bitmap(disk, name, change).await,
        None => {
            let disks = control.status().await?.disks;
            let found = disks.into_iter().find(|found| found.disk == disk);
            Ok(found.map(|disk| disk.bitmaps).unwrap_or_default())
        }
    }
}

/// The host's problem for a filter's refusal or silence.
pub(super) fn explained(what: &str, error: FilterError) -> Problem {
    let code = match &error {
        FilterError::Refused { code, message } => {
            return Problem::new(*code, format!("{what}: {message}"));
        }
        FilterError::TimedOut => ErrorCode::TimedOut,
        // It has just ended; another one may be starting.
        FilterError::Io(_) | FilterError::Ended { .. } => ErrorCode::Unreachable,
        FilterError::Protocol(_) => ErrorCode::Internal,
    };
    Problem::new(code, format!("{what}: {error}"))
}
