//! The copies of mirrored disks while no filter of a guest keeps them: a filter that serves nobody copies, and lets the disks
//! pivot.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};
use vmseal_api::filter::{DiskActivity, DiskStatus, FilterStatus};
use vmseal_api::former_image::FormerImage;
use vmseal_api::host::{DiskFacts, DiskSpec, VmSpec};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use super::internal;
use super::lacking::{self, Nearing, Sizes, dirty};
use super::report::{Progress, Report};
use super::service::FILTER_RESTART_TIMEOUT;
use crate::filter::pace::Pace;
use crate::filter::{self, Control, FilterError};
use crate::process::Process;
use crate::process::users::Slot;
use crate::storage::builder::{self, DiskBuilder};
use crate::storage::filling::end_idle;
use crate::storage::gate::Gate;
use crate::storage::in_place;
use crate::storage::mirror::source::{Removed, Speed};
use crate::storage::mirror::{self, source};
use crate::storage::opening::Open;

/// How often a filter is asked how far its copies are.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

/// The same while a guest waits.
const PIVOT_INTERVAL: Duration = Duration::from_millis(10);

/// How long a guest may wait for the rest of its disks to be copied, without the pivots: Linux gives a request 30 seconds, and
/// what a pivot may take ([`vmseal_api::filter::pivot_bytes`]) needs a fraction of one on most storage, and a second or two on the
/// largest disks.
const REST_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a filter may have no copy of a disk until that counts as given up: it may be about to be replaced.
const WITHOUT_COPY_MAX: Duration = Duration::from_secs(10);

/// How long the storage of a copy may fail while a guest runs, until the copy is given up: a full datastore or one that is away
/// is to be noticed, and a moment's failure is not to cost hours of work.
const TROUBLE_MAX: Duration = Duration::from_secs(60);

/// Disks of a VM that no filter serves, or will while this is there.
pub struct Copying {
    pub spec: VmSpec,
    pub disks: Vec<(DiskSpec, DiskFacts)>,
    pub kek: Option<SecretBytes>,
    pub builder: DiskBuilder,
}

/// Kills a filter whose work has failed or is given up: it has keys, and nobody else would end it before the next one is started in
/// its directory.
struct KilledWithWork<'a>(&'a Process);

impl Drop for KilledWithWork<'_> {
    fn drop(&mut self) {
        self.0.kill();
    }
}

/// A filter that copies.
struct Copier {
    process: Process,
    control: Control,
    builder: DiskBuilder,
    disk: DiskId,
    /// Of all its disks.
    sizes: Sizes,
    // Released when the process has ended.
    _slot: Slot,
}

impl Copying {
    /// Copies one disk until the copy is as good as complete.
    ///
    /// # Errors
    /// The problem of the disks or the filter; what was copied is kept.
    pub async fn copy(
        self,
        show: &Progress,
        cancelled: oneshot::Receiver<()>,
    ) -> Result<(), Problem> {
        let directory = self.builder.directory.clone();
        let work = async {
            let Some(copier) = self.start(|_| {}).await? else { return Ok(()) };
            copier.until_ready(show).await?;
            copier.end().await
        };
        let copied = tokio::select! {
            copied = work => copied,
            Ok(()) = cancelled => Err(Problem::new(ErrorCode::Cancelled, "the copy is stopped")),
        };
        if copied.is_err()
            && let Err(error) = directory.sweep().await
        {
            tracing::warn!(directory = directory.name(), %error, "the filter of a copy is left");
        }
        copied
    }

    /// Copies the rest of all disks, and lets them pivot, one after the other.
    ///
    /// # Errors
    /// `timed-out` when that takes too long: those that have not pivoted are as before.
    pub async fn pivot(self) -> Result<(), Problem> {
        let directory = self.builder.directory.clone();
        let pivoted = async {
            // A guest may wait.
            let at_once = |mirror: &mut filter::Mirror| mirror.pace = CopyPace::default();
            let Some(copier) = self.start(at_once).await? else { return Ok(()) };
            let disks = copier.until_small().await?;
            for disk in disks {
                copier.control.pivot(disk).await.map_err(|error| match error {
                    FilterError::Refused { message, .. } => {
                        Problem::new(ErrorCode::TimedOut, message)
                    }
                    other => Problem::new(ErrorCode::TimedOut, other.to_string()),
                })?;
            }
            copier.end().await
        };
        let pivoted = pivoted.await;
        if pivoted.is_err() {
            directory.sweep().await.map_err(internal)?;
        }
        pivoted
    }

    /// Starts a filter for the disks that have not pivoted, with their copies as they are on record and changed by `change`;
    /// none if that is none.
    async fn start(self, change: fn(&mut filter::Mirror)) -> Result<Option<Copier>, Problem> {
        let Self { spec, disks, kek, builder } = self;
        let slot = builder.users.take().ok_or_else(builder::too_many)?;
        let directory = &builder.directory;
        // A filter of an earlier attempt is ended, which releases the disks.
        directory.renew().await.map_err(internal)?;
        let vm = spec.vm;
        let opened = spawn_blocking(move || open(&spec, disks, kek.as_ref()));
        let mut opened = opened.await.map_err(internal)??;
        opened.iter_mut().filter_map(|disk| disk.mirror.as_mut()).for_each(change);
        let Some(disk) = opened.first().map(|disk| disk.disk) else {
            directory.sweep().await.map_err(internal)?;
            return Ok(None);
        };
        Copier::start(vm, opened, builder, slot, disk).await.map(Some)
    }
}

/// Copies what `open` opens of a disk to another host, whole. Nobody writes it; its guest may have it. `tell` gets how much the copy
/// lacks and how much was copied, in bytes.
///
/// # Errors
/// The problem of the disk or the filter.
pub async fn copy_whole(
    (vm, disk): (VmId, DiskSpec),
    open: impl FnOnce() -> Result<Open, Problem> + Send + 'static,
    copy: filter::Mirror,
    builder: DiskBuilder,
    tell: impl Fn(u64, u64),
) -> Result<(), Problem> {
    let slot = builder.users.take().ok_or_else(builder::too_many)?;
    builder.directory.renew().await.map_err(internal)?;
    let open = spawn_blocking(open).await.map_err(internal)??;
    let (id, disks) = (disk.disk, vec![copied(&disk, open, copy)]);
    let copier = Copier::start(vm, disks, builder, slot, id).await?;
    let given_up = KilledWithWork(&copier.process);
    let looks = Pace::up_to(PROGRESS_INTERVAL);
    loop {
        let status = copier.status().await?;
        if let Some(error) = status.disks.first().and_then(trouble) {
            return Err(error);
        }
        let copy = status.disks.first().and_then(|disk| disk.mirror.as_ref());
        let (lacking, copied) = copy.map_or((0, 0), |copy| (copy.dirty_bytes, copy.copied_bytes));
        tell(lacking, copied);
        if lacking == 0 {
            std::mem::forget(given_up);
            return copier.end().await;
        }
        looks.pause().await;
    }
}

/// A disk that a filter copies for nobody.
fn copied(disk: &DiskSpec, open: Open, mirror: filter::Mirror) -> filter::Disk {
    filter::Disk { mirror: Some(mirror), ..open.into_disk(disk, filter::Work::Mirror) }
}

/// Opens the disks that have not pivoted, with their copies.
fn open(
    spec: &VmSpec,
    disks: Vec<(DiskSpec, DiskFacts)>,
    kek: Option<&SecretBytes>,
) -> Result<Vec<filter::Disk>, Problem> {
    let mut opened = Vec::new();
    for (disk, facts) in disks {
        let Some((open, mirror)) = mirror::open_to_copy(spec, &disk, &facts, kek)? else {
            continue;
        };
        opened.push(copied(&disk, open, mirror));
    }
    Ok(opened)
}

impl Copier {
    async fn start(
        vm: VmId,
        disks: Vec<filter::Disk>,
        builder: DiskBuilder,
        slot: Slot,
        disk: DiskId,
    ) -> Result<Self, Problem> {
        let directory = &builder.directory;
        let sizes = disks.iter().map(|disk| (disk.disk, disk.size)).collect();
        let (process, keys) = filter::start(&builder.filter, vm, directory, disks, slot.filter())
            .await
            .map_err(internal)?;
        let control = Control::of(directory);
        let given_up = KilledWithWork(&process);
        control.ready(&process, directory).await.map_err(internal)?;
        std::mem::forget(given_up);
        drop(keys);
        Ok(Self { process, control, builder, disk, sizes, _slot: slot })
    }

    async fn status(&self) -> Result<FilterStatus, Problem> {
        let status = self.control.status_of(&self.process, &self.builder.directory).await;
        let status = status.map_err(internal)?;
        let failed = status.disks.iter().find_map(|disk| match &disk.state {
            DiskActivity::Failed { message } => Some(message.clone()),
            _ => None,
        });
        failed.map_or(Ok(status), |message| Err(internal(message)))
    }

    async fn until_ready(&self, show: &Progress) -> Result<(), Problem> {
        let pace = Pace::up_to(PROGRESS_INTERVAL);
        let mut nearing = Nearing::of(self.sizes.get(&self.disk).copied());
        loop {
            let status = self.status().await?;
            let Some(disk) = status.disks.first() else { return Ok(()) };
            if let Some(error) = trouble(disk) {
                return Err(error);
            }
            if tell(disk, &mut nearing, show) {
                return Ok(());
            }
            pace.pause().await;
        }
    }

    /// Waits until no copy lacks more than a pivot may take; the disks that are to pivot.
    async fn until_small(&self) -> Result<BTreeSet<DiskId>, Problem> {
        let give_up = Instant::now() + REST_TIMEOUT;
        loop {
            let status = self.status().await?;
            if all_are_small(&status, &self.sizes, give_up)? {
                return Ok(status.disks.iter().map(|disk| disk.disk).collect());
            }
            sleep(PIVOT_INTERVAL).await;
        }
    }

    async fn end(self) -> Result<(), Problem> {
        end_idle(&self.control, self.disk).await?;
        self.process.end_within(filter::SHUTDOWN_TIMEOUT).await;
        self.builder.directory.sweep().await.map_err(internal)
    }
}

/// Whether no copy lacks more than a pivot may take.
///
/// # Errors
/// The error that keeps a disk from being copied; `timed-out` after `give_up`.
fn all_are_small(status: &FilterStatus, sizes: &Sizes, give_up: Instant) -> Result<bool, Problem> {
    let Some(disk) = lacking::too_far(status, sizes) else { return Ok(true) };
    if let Some(error) = trouble(disk) {
        return Err(error);
    }
    if Instant::now() > give_up {
        let what = format!(
            "the copy of disk {} lacks more than its guest could wait for; the copy goes on",
            disk.disk
        );
        return Err(Problem::new(ErrorCode::TimedOut, what));
    }
    Ok(false)
}

/// Has disks pivot that the filter of their guest serves and copies, one after the other, when no copy lacks more than a pivot
/// may take. `sizes` are those of all disks of the VM.
///
/// # Errors
/// [`NotTurned`].
pub async fn pivot_served(
    control: &Control,
    disks: &[DiskId],
    sizes: &Sizes,
) -> Result<(), NotTurned> {
    let give_up = Instant::now() + REST_TIMEOUT;
    loop {
        let status = control.status().await.map_err(NotTurned::from)?;
        if all_are_small(&status, sizes, give_up).map_err(NotTurned::AsBefore)? {
            break;
        }
        sleep(PIVOT_INTERVAL).await;
    }
    for disk in disks {
        control.pivot(*disk).await.map_err(NotTurned::from)?;
    }
    Ok(())
}

/// Why not all disks of a guest have pivoted.
pub enum NotTurned {
    /// The filter serves those that have not as before.
    AsBefore(Problem),
    /// Only the maps of the copies say which have: the filter is to be replaced.
    Unknown(Problem),
}

impl From<FilterError> for NotTurned {
    fn from(error: FilterError) -> Self {
        let problem = |what| Problem::new(ErrorCode::TimedOut, what);
        match error {
            FilterError::Refused { message, .. } => Self::AsBefore(problem(message)),
            other => Self::Unknown(problem(other.to_string())),
        }
    }
}

/// Tells how far the copy of a disk is; returns whether it is as good as complete.
fn tell(disk: &DiskStatus, nearing: &mut Nearing, show: &Progress) -> bool {
    let dirty = dirty(disk);
    show.progress(Report::Lacking(dirty));
    nearing.is_ready(dirty)
}

/// The error that keeps a disk from being copied: nobody waits for a copy that fails without a guest.
fn trouble(disk: &DiskStatus) -> Option<Problem> {
    let error = disk.mirror.as_ref()?.last_error.as_ref()?;
    Some(internal(format!("the disk cannot be copied: {error}")))
}

/// Follows the copy of a disk, of this size, that the filter of its guest keeps, until it is as good as complete. A filter that
/// was being started when the pace was set may have another one, and is told.
///
/// # Errors
/// The filter has no copy of the disk: it could not be opened. Or its storage has failed for [`TROUBLE_MAX`].
pub async fn follow(
    control: Control,
    (disk, size): (DiskId, u64),
    pace: CopyPace,
    show: &Progress,
) -> Result<(), Problem> {
    let mut without: Option<Instant> = None;
    let (mut well, mut nearing) = (Instant::now(), Nearing::of([size]));
    let looks = Pace::up_to(PROGRESS_INTERVAL);
    loop {
        // A filter that does not answer is replaced.
        if let Ok(status) = control.status().await {
            let known = status.disks.iter().find(|known| known.disk == disk);
            let mirror = known.and_then(|known| known.mirror.as_ref());
            if mirror.and_then(|mirror| mirror.pace).is_some_and(|now| now != pace) {
                // If it fails it is done at the next look.
                let _ = control.set_pace(disk, pace).await;
            }
            match known.filter(|known| known.mirror.is_some()) {
                // It may be far from complete when it goes on. Nor is an error about what is not tried.
                Some(known) if pace.paused => {
                    show.progress(Report::Lacking(dirty(known)));
                    (without, well) = (None, Instant::now());
                }
                // A small disk is as good as complete before anything of it has been copied.
                Some(known) => match (trouble(known), tell(known, &mut nearing, show)) {
                    (Some(problem), _) if well.elapsed() > TROUBLE_MAX => return Err(problem),
                    (Some(_), _) => without = None,
                    (None, true) => return Ok(()),
                    (None, false) => (without, well) = (None, Instant::now()),
                },
                None => drop(without.get_or_insert_with(Instant::now)),
            }
        }
        if without.is_some_and(|since| since.elapsed() > WITHOUT_COPY_MAX) {
            let what = "the filter of the guest keeps no copy of the disk: the copy could not be opened. The agent's log says why";
            return Err(Problem::new(ErrorCode::Damaged, what));
        }
        looks.pause().await;
    }
}

/// A disk whose former image is to be removed.
pub struct FormerSource {
    pub spec: VmSpec,
    pub disk: DiskSpec,
    /// The VM's KEK, where it is here.
    pub kek: Option<SecretBytes>,
    /// Whether the guest runs: then it and the removal take turns at the storage. It may start or stop meanwhile.
    pub guest_runs: Arc<AtomicBool>,
}

/// Removes the former image of a disk, at the pace of `gate`. Returns what has become of it; none where there is none. When this returns,
/// nothing is overwritten any more.
///
/// # Errors
/// Those of [`source::remove`]. A filter that still has the file open is about to be replaced: that is waited for.
pub async fn remove_source(
    of: FormerSource,
    show: Arc<Progress>,
    gate: Arc<Gate>,
    mut cancelled: oneshot::Receiver<()>,
) -> Result<Option<FormerImage>, Problem> {
    let mut removal = pin!(remove_when_free(Arc::new(of), show, Arc::clone(&gate)));
    tokio::select! {
        former = &mut removal => return former,
        _ = &mut cancelled => gate.close(),
    }
    removal.await
}

/// Removes it when no filter has it open any more, or ends with the gate.
async fn remove_when_free(
    of: Arc<FormerSource>,
    show: Arc<Progress>,
    gate: Arc<Gate>,
) -> Result<Option<FormerImage>, Problem> {
    let give_up = Instant::now() + FILTER_RESTART_TIMEOUT;
    let pace = Pace::up_to(PROGRESS_INTERVAL);
    let mut removed = Removed::default();
    loop {
        let (of, show, at) = (Arc::clone(&of), Arc::clone(&show), Arc::clone(&gate));
        let work = move || {
            let progress = |done, total| show.progress(Report::Progress(done, total));
            let FormerSource { spec, disk, kek, guest_runs } = &*of;
            let speed = Speed { gate: &at, guest_runs, sleep: &std::thread::sleep };
            // One that was converted in its file gets its name.
            let former = in_place::settle(spec, disk).and_then(|()| {
                source::remove(spec, disk, kek.as_ref(), &mut removed, progress, speed)
            });
            (removed, former)
        };
        let (so_far, former) = spawn_blocking(work).await.map_err(internal)?;
        match former {
            Err(problem)
                if problem.code == ErrorCode::InUse
                    && Instant::now() < give_up
                    && !gate.is_closed() =>
            {
                removed = so_far;
                pace.pause().await;
            }
            former => return former,
        }
    }
}
