//! A filter that exports a disk, from its start to its end.

use std::time::Duration;

use vmseal_api::filter::DiskActivity;
use vmseal_api::id::VmId;
use vmseal_api::problem::Problem;

use crate::filter::pace::Pace;
use crate::filter::{self, Control};
use crate::process::users::Slot;
use crate::storage::builder::{DiskBuilder, internal};
use crate::storage::filling::end_idle;

/// How often an export is asked for its progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Has a new filter carry out the export that is the work of `disk`. `progress` receives the bytes done and the total;
/// `failed` makes a problem of what the filter says. Returns how much of the disk was read, in bytes.
///
/// # Errors
/// The problem of the disk, the file or the process.
pub async fn run(
    vm: VmId,
    disk: filter::Disk,
    builder: &DiskBuilder,
    slot: &Slot,
    progress: impl Fn(u64, u64) + Send,
    failed: impl Fn(String) -> Problem + Send,
) -> Result<u64, Problem> {
    let directory = &builder.directory;
    let id = disk.disk;
    // One after another may run there.
    directory.renew().await.map_err(internal)?;
    let (process, keys) = filter::start(&builder.filter, vm, directory, vec![disk], slot.filter())
        .map_err(internal)?;
    let control = Control::of(directory);
    control.ready(&process, directory).await.map_err(internal)?;
    drop(keys);
    let pace = Pace::up_to(PROGRESS_INTERVAL);
    let read = loop {
        let status = control.status_of(&process, directory).await.map_err(internal)?;
        let disk = status.disks.into_iter().next();
        let read = disk.as_ref().map_or(0, |disk| disk.counters.read_bytes);
        match disk.map(|disk| disk.state) {
            Some(DiskActivity::Exporting { done, total }) => progress(done, total),
            Some(DiskActivity::Idle) => break read,
            Some(DiskActivity::Failed { message }) => return Err(failed(message)),
            other => return Err(internal(format!("the filter of an export says {other:?}"))),
        }
        pace.pause().await;
    };
    end_idle(&control, id).await?;
    process.end_within(filter::SHUTDOWN_TIMEOUT).await;
    directory.sweep().await.map_err(internal)?;
    Ok(read)
}
