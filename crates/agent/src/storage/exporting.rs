//! A filter that exports disks, from its start to its end.

use std::collections::BTreeMap;
use std::time::Duration;

use vmseal_api::filter::DiskActivity;
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::Problem;

use crate::filter::pace::Pace;
use crate::filter::{self, Control};
use crate::process::users::Slot;
use crate::storage::builder::{DiskBuilder, internal};
use crate::storage::filling::end_idle;
use crate::storage::gate::Told;

/// How often an export is asked for its progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Has a new filter carry out the exports that are the work of `disks`, side by side. `progress` receives the bytes done and the
/// total of all of them; `failed` makes a problem of what the filter says. Returns how much of each disk was read, in bytes.
///
/// # Errors
/// The problem of a disk, a file or the process.
pub async fn run_all(
    vm: VmId,
    disks: Vec<filter::Disk>,
    builder: &DiskBuilder,
    slot: &Slot,
    progress: impl Fn(u64, u64) + Send,
    failed: impl Fn(String) -> Problem + Send,
) -> Result<BTreeMap<DiskId, u64>, Problem> {
    let directory = &builder.directory;
    let sizes: BTreeMap<DiskId, u64> = disks.iter().map(|disk| (disk.disk, disk.size)).collect();
    let first = disks.first().map_or_else(DiskId::default, |disk| disk.disk);
    // One after another may run there.
    directory.renew().await.map_err(internal)?;
    let (process, keys) = filter::start(&builder.filter, vm, directory, disks, slot.filter())
        .await
        .map_err(internal)?;
    let control = Control::of(directory);
    control.ready(&process, directory).await.map_err(internal)?;
    drop(keys);
    let (pace, mut told) = (Pace::up_to(PROGRESS_INTERVAL), Told::nothing(&builder.gate));
    let all: Vec<DiskId> = sizes.keys().copied().collect();
    let read = loop {
        told.tell(&control, &all).await;
        let status = control.status_of(&process, directory).await.map_err(internal)?;
        let (mut left, mut finished) = (0, 0);
        for disk in &status.disks {
            match &disk.state {
                DiskActivity::Exporting { done, total } => left += total - done,
                DiskActivity::Idle => finished += 1,
                DiskActivity::Failed { message } => return Err(failed(message.clone())),
                other => {
                    return Err(internal(format!("the filter of an export says {other:?}")));
                }
            }
        }
        if finished == sizes.len() {
            break status.disks.iter().map(|it| (it.disk, it.counters.read_bytes)).collect();
        }
        let total: u64 = sizes.values().sum();
        progress(total.saturating_sub(left), total);
        tokio::select! {
            () = pace.pause() => {}
            () = told.changed() => {}
        }
    };
    end_idle(&control, first).await?;
    process.end_within(filter::SHUTDOWN_TIMEOUT).await;
    directory.sweep().await.map_err(internal)?;
    Ok(read)
}

/// The same of one disk.
///
/// # Errors
/// As [`run_all`].
pub async fn run(
    vm: VmId,
    disk: filter::Disk,
    builder: &DiskBuilder,
    slot: &Slot,
    progress: impl Fn(u64, u64) + Send,
    failed: impl Fn(String) -> Problem + Send,
) -> Result<u64, Problem> {
    let id = disk.disk;
    let read = run_all(vm, vec![disk], builder, slot, progress, failed).await?;
    Ok(read.get(&id).copied().unwrap_or_default())
}
