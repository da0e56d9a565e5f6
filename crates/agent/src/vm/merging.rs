//! Merging a layer of a disk into what is below it: a filter that serves nobody writes it there.

use std::fs::File;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use vmseal_api::filter::{Direct, DiskActivity};
use vmseal_api::host::{DiskFacts, DiskSpec};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::internal;
use super::report::{Progress, Report};
use crate::filter::pace::Pace;
use crate::filter::{self, Control, Lower};
use crate::process::Process;
use crate::process::run_dir::ProcessDir;
use crate::process::users::Slot;
use crate::storage::builder::{self, DiskBuilder};
use crate::storage::filling::end_idle;
use crate::storage::gate::{Gate, Told};
use crate::storage::home::Home;
use crate::storage::layers::{self, LayerId};
use crate::storage::opening::data_offset;

/// How often the filter is asked how far it is.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

/// The same while a guest waits, which is a few times: an answer takes a fraction of a millisecond.
const FAST_INTERVAL: Duration = Duration::from_millis(1);

/// Has a filter that serves nobody write what `open` opens, if that is anything, at the pace of `builder`; returns what that gave
/// beside. `progress` gets that, the bytes done and the total.
///
/// # Errors
/// The problem of the files or the filter; it can be done again.
pub async fn with_filter<T: Send + 'static>(
    vm: VmId,
    builder: &DiskBuilder,
    guest_waits: bool,
    open: impl FnOnce() -> Result<Option<(filter::Disk, T)>, Problem> + Send + 'static,
    progress: impl Fn(&T, u64, u64),
) -> Result<Option<T>, Problem> {
    let Some((begun, beside)) = Begun::with(vm, builder, open).await? else { return Ok(None) };
    let show = |done, total| progress(&beside, done, total);
    let gate = (!guest_waits).then_some(&*builder.gate);
    let done = begun.write(gate, show).await?;
    done.leave().await?;
    Ok(Some(beside))
}

/// A filter that has started, has its files open, and uses none of them yet.
pub struct Begun {
    filter: filter::Held,
    disk: DiskId,
    directory: ProcessDir,
    slot: Slot,
}

/// One that has written all, and has closed its files: it writes nothing any more.
pub struct Written {
    process: Process,
    directory: ProcessDir,
    _slot: Slot,
}

impl Begun {
    async fn with<T: Send + 'static>(
        vm: VmId,
        builder: &DiskBuilder,
        open: impl FnOnce() -> Result<Option<(filter::Disk, T)>, Problem> + Send + 'static,
    ) -> Result<Option<(Self, T)>, Problem> {
        let slot = builder.users.take().ok_or_else(builder::too_many)?;
        let directory = builder.directory.clone();
        // A filter of an earlier attempt is ended, which releases the lock.
        directory.renew().await.map_err(internal)?;
        let Some((opened, beside)) = spawn_blocking(open).await.map_err(internal)?? else {
            directory.sweep().await.map_err(internal)?;
            return Ok(None);
        };
        let disk = opened.disk;
        let filter =
            filter::Held::start(&builder.filter, vm, &directory, vec![opened], slot.filter())
                .await
                .map_err(internal)?;
        Ok(Some((Self { filter, disk, directory, slot }, beside)))
    }

    /// Has it write all, at the pace of `gate`, or, where a guest waits and there is none, as fast as it can; `progress` gets the bytes done and the total.
    ///
    /// # Errors
    /// The problem of the files or the filter; it can be done again. The filter may be there until its directory is swept.
    pub async fn write(
        self,
        gate: Option<&Gate>,
        progress: impl Fn(u64, u64),
    ) -> Result<Written, Problem> {
        let Self { filter, disk, directory, slot } = self;
        let (process, keys) = filter.go_on().map_err(internal)?;
        let control = Control::of(&directory);
        control.ready(&process, &directory).await.map_err(internal)?;
        drop(keys);
        let (pace, mut told) = (Pace::up_to(PROGRESS_INTERVAL), gate.map(Told::nothing));
        loop {
            if let Some(told) = &mut told {
                told.tell(&control, &[disk]).await;
            }
            let status = control.status_of(&process, &directory).await.map_err(internal)?;
            match status.disks.into_iter().next().map(|disk| disk.state) {
                Some(
                    DiskActivity::Merging { done, total } | DiskActivity::Exporting { done, total },
                ) => progress(done, total),
                Some(DiskActivity::Idle) => break,
                Some(DiskActivity::Failed { message }) => return Err(internal(message)),
                other => return Err(internal(format!("the filter of a merge says {other:?}"))),
            }
            match &told {
                None => tokio::time::sleep(FAST_INTERVAL).await,
                Some(told) => tokio::select! {
                    () = pace.pause() => {}
                    () = told.changed() => {}
                },
            }
        }
        if !end_idle(&control, disk).await? {
            process.end_within(filter::SHUTDOWN_TIMEOUT).await;
        }
        Ok(Written { process, directory, _slot: slot })
    }

    /// Ends it before it has used its files.
    pub async fn give_up(self) {
        let Self { filter, directory, slot: _until_it_has_ended, .. } = self;
        drop(filter);
        if let Err(error) = directory.sweep().await {
            tracing::warn!(directory = directory.name(), %error, "the filter of a merge is left");
        }
    }
}

impl Written {
    /// Waits for its end, and removes what it leaves.
    ///
    /// # Errors
    /// Those of the file system.
    pub async fn leave(self) -> Result<(), Problem> {
        self.process.end_within(filter::SHUTDOWN_TIMEOUT).await;
        self.directory.sweep().await.map_err(internal)
    }
}

/// A layer to merge.
pub struct Merging {
    pub vm: VmId,
    pub disk: DiskSpec,
    pub facts: DiskFacts,
    pub upper: LayerId,
    pub builder: DiskBuilder,
    /// Whether the guest waits for it.
    pub guest_waits: bool,
}

impl Merging {
    /// Starts the filter that will merge it.
    ///
    /// # Errors
    /// The problem of the files or the filter; it can be done again.
    pub async fn begin(self) -> Result<Begun, Problem> {
        let (vm, builder) = (self.vm, self.builder.clone());
        let begun = Begun::with(vm, &builder, move || self.open().map(|it| Some((it, ())))).await;
        if begun.is_err()
            && let Err(error) = builder.directory.sweep().await
        {
            let directory = builder.directory.name();
            tracing::warn!(directory, %error, "the filter of a merge is left");
        }
        begun?.map(|(begun, ())| begun).ok_or_else(|| internal("there is nothing to merge"))
    }

    /// Merges it. Nothing is put on record: that is the caller's.
    ///
    /// # Errors
    /// The problem of the files or the filter; it can be done again.
    pub async fn run(
        self,
        show: Option<&Progress>,
        cancelled: Option<oneshot::Receiver<()>>,
    ) -> Result<(), Problem> {
        let directory = self.builder.directory.clone();
        let cancelled = async {
            let asked = match cancelled {
                Some(cancelled) => cancelled.await.is_ok(),
                None => false,
            };
            if !asked {
                std::future::pending::<()>().await;
            }
        };
        let merged = tokio::select! {
            merged = self.merge(show) => merged,
            () = cancelled => Err(Problem::new(ErrorCode::Cancelled, "the merge is stopped")),
        };
        if merged.is_err()
            && let Err(error) = directory.sweep().await
        {
            tracing::warn!(directory = directory.name(), %error, "the filter of a merge is left");
        }
        merged
    }

    async fn merge(self, show: Option<&Progress>) -> Result<(), Problem> {
        let (vm, builder, waits) = (self.vm, self.builder.clone(), self.guest_waits);
        let open = move || self.open().map(|disk| Some((disk, ())));
        let progress = |(): &(), done, total| {
            if let Some(show) = show {
                show.progress(Report::Progress(done, total));
            }
        };
        with_filter(vm, &builder, waits, open, progress).await.map(drop)
    }

    /// The layer with all below it, and what is below it to be written. Only ciphertext moves, so no key is needed.
    fn open(self) -> Result<filter::Disk, Problem> {
        let Self { vm, disk, facts, upper, .. } = self;
        let home = Home::of(&disk.datastore, vm)?;
        let lock = layers::lock_merge(&home, disk.disk)?;
        let known = layers::read(&home, disk.disk)?;
        let (file, above): (File, Vec<File>) = layers::open_upper(&home, disk.disk, &known, upper)?;
        let lower = layers::open_lower(&home, disk.disk, &known, upper)?;
        Ok(filter::Disk {
            disk: disk.disk,
            size: data_offset(&facts) + disk.size,
            file,
            layers: above,
            offset: 0,
            key: None,
            shared: filter::Shared::default(),
            keeps_room: builder::is_preallocated(&disk),
            work: filter::Work::Merge {
                lower: Lower {
                    file: lower.image,
                    layers: lower.layers,
                    offset: 0,
                    key: None,
                    direct: Direct::Off,
                },
                lock,
            },
            beside: None,
            replica: None,
            mirror: None,
        })
    }
}
