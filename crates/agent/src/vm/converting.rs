//! The work of converting a disk in its file: a filter moves the data, then the header is put right.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use vmseal_api::filter::DiskActivity;
use vmseal_api::host::DiskFacts;
use vmseal_api::problem::{ErrorCode, Problem};

use super::internal;
use super::report::{Progress, Report};
use crate::filter::pace::Pace;
use crate::filter::{self, Control};
use crate::process::users::Slot;
use crate::storage::builder::{DiskBuilder, too_many};
use crate::storage::filling::{Failure, end_idle};
use crate::storage::in_place::Wanted;

/// How often a filter is asked how far it is.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// How many filters may die one after the other without getting ahead.
const FAILURES_MAX: u32 = 3;

/// A disk to convert, which was committed.
pub struct Converting {
    /// Which, and to what.
    pub wanted: Wanted,
    /// What its filter needs.
    pub builder: DiskBuilder,
    /// The highest rate, in bytes a second.
    pub rate: Option<u64>,
}

fn final_(error: impl std::fmt::Display) -> Failure {
    Failure::Final(internal(error))
}

impl Converting {
    /// Converts it, or goes on where an earlier attempt was cut off; what it is then. When this is cancelled it stands still,
    /// and another attempt goes on.
    ///
    /// # Errors
    /// The problem of the disk, its storage or the process.
    pub async fn run(
        self,
        show: &Progress,
        cancelled: oneshot::Receiver<()>,
    ) -> Result<DiskFacts, Problem> {
        let Self { wanted, builder, rate } = self;
        let (wanted, directory) = (Arc::new(wanted), builder.directory.clone());
        let work = async {
            move_data(&wanted, &builder, rate, show).await?;
            let wanted = Arc::clone(&wanted);
            spawn_blocking(move || wanted.seal()).await.map_err(internal)?
        };
        let converted = tokio::select! {
            converted = work => converted,
            Ok(()) = cancelled => Err(Problem::new(ErrorCode::Cancelled, "the conversion stands still")),
        };
        if converted.is_err()
            && let Err(error) = directory.sweep().await
        {
            tracing::warn!(directory = directory.name(), %error, "the filter of a conversion is left");
        }
        converted
    }
}

async fn move_data(
    wanted: &Arc<Wanted>,
    builder: &DiskBuilder,
    rate: Option<u64>,
    show: &Progress,
) -> Result<(), Problem> {
    let slot = builder.users.take().ok_or_else(too_many)?;
    let (mut furthest, mut failures) = (0, 0);
    loop {
        let before = furthest;
        let result = attempt(wanted, builder, &slot, rate, &mut furthest, show).await;
        failures = if furthest > before { 0 } else { failures + 1 };
        match result {
            Ok(()) => return Ok(()),
            Err(Failure::Final(problem)) => return Err(problem),
            Err(Failure::Died(problem)) if failures >= FAILURES_MAX => return Err(problem),
            Err(Failure::Died(problem)) => {
                let disk = wanted.disk.disk;
                tracing::warn!(%disk, %problem, "the filter that converts a disk has died; another one goes on");
            }
        }
    }
}

async fn attempt(
    wanted: &Arc<Wanted>,
    builder: &DiskBuilder,
    slot: &Slot,
    rate: Option<u64>,
    furthest: &mut u64,
    show: &Progress,
) -> Result<(), Failure> {
    let directory = &builder.directory;
    // A filter of an earlier attempt is ended, which releases the files.
    directory.renew().await.map_err(final_)?;
    let open = Arc::clone(wanted);
    let opened = spawn_blocking(move || open.open(rate)).await.map_err(final_)?;
    let Some(disk) = opened.map_err(Failure::Final)? else { return Ok(()) };
    let (vm, id) = (wanted.spec.vm, disk.disk);
    let (process, keys) = filter::start(&builder.filter, vm, directory, vec![disk], slot.filter())
        .await
        .map_err(final_)?;
    let control = Control::of(directory);
    control.ready(&process, directory).await?;
    drop(keys);
    let pace = Pace::up_to(PROGRESS_INTERVAL);
    loop {
        let status = control.status_of(&process, directory).await?;
        match status.disks.into_iter().next().map(|disk| disk.state) {
            Some(DiskActivity::Converting { done, total }) => {
                *furthest = done.max(*furthest);
                show.progress(Report::Progress(done, total));
            }
            Some(DiskActivity::Idle) => break,
            Some(DiskActivity::Failed { message }) => return Err(final_(message)),
            other => return Err(final_(format!("the filter that converts a disk says {other:?}"))),
        }
        pace.pause().await;
    }
    end_idle(&control, id).await.map_err(Failure::Final)?;
    process.end_within(filter::SHUTDOWN_TIMEOUT).await;
    directory.sweep().await.map_err(final_)?;
    // What it had open is closed: the files are opened anew.
    let moved = Arc::clone(wanted);
    spawn_blocking(move || moved.moved()).await.map_err(final_)?.map_err(Failure::Final)
}
