//! Exchanges the stacks of disks that are served (docs/decisions/140), begins to copy them, and lets their former places go
//! when they pivot (docs/decisions/152).
//!
//! ```text
//!  serving ──Drain──> draining: no further request begins ──none in flight, flushed──> drained ─┬─Replace─┐
//!     ^                   │ an error, or too long                                        ^      └─────────┘
//!     └───────────────────┴────────────── Resume, the connection ends, DRAINED_MAX ──────┘
//! ```
//! A copy of a disk that stays is completed while the disk is drained ([`Drained::complete`]), and ends when it gets another stack.
//!
//! A stack that is retired is never served again: if the disk would go on before it is replaced, the process ends.
//!
//! All disks of one [`Drained`] have no request in flight at one time, and get their new stacks together or not at all. The
//! former stacks stay whole and open until the disks are resumed, so a refusal costs nothing. Only what a new stack needs
//! from the former file is done before: an image of QEMU's format is left as if it were closed.
//!
//! The first descriptor of each file that a disk still has is kept: it holds the file's lock. A file that the new stack writes is
//! written by that very descriptor, where it is for writing, so that the lock lasts as long as the kernel works on the requests
//! of a process that was killed (docs/decisions/244). The former stack may have it by the same open file, whose flags it gets again
//! when the new one is refused.
//!
//! The chains of a disk that gets longer (docs/decisions/234) are made anew, as each knows the disk's size, and so are its dirty
//! bitmaps.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use vmseal_api::filter::{CacheSpec, DRAINED_MAX, DiskFile, DiskWaits, NewCopy, NewStack};
use vmseal_api::id::DiskId;

use crate::disk::Disk;
use crate::disk::allocation::Allocation;
use crate::disk::current::{CurrentDisk, IsRead};
use crate::front_ends::ServedDisk;
use crate::handle::Handles;
use crate::layers::replicate::mirror::{NotPivoted, Pivot};
use crate::process::flags::KeptFlags;
use crate::process::mirror::{self, Copy, Mirrored};
use crate::process::open_stack::{self, IMAGE, WantedStack};
use crate::process::{CurrentPivot, RunningDisk, StartError, config};
use crate::stack::chain::{Chain, Storage};
use crate::stack::dirty::Bitmaps;
use crate::stack::dirty::growing::Closed;
use crate::stack::gate::{Gate, Held};
use crate::stack::orders::{Asked, NotAsked, Orders};
use crate::stack::request::IoError;

/// How long the requests of a disk may take to end: as long as Linux gives a request.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Why disks are not drained, or do not get other stacks. They are served as before, or wait on with the stacks that they
/// have.
#[derive(Debug, thiserror::Error)]
pub enum NotChanged {
    /// A disk that this filter does not serve.
    #[error("this filter does not serve disk {0}")]
    Unknown(DiskId),
    /// Named twice, or none named.
    #[error("each disk is named once, and at least one is")]
    Names,
    /// The connection has drained disks already.
    #[error("this connection has drained disks already: resume them first")]
    Drained,
    /// It has not, or they have gone on.
    #[error("disk {0} does not wait: drain it first, and be quick")]
    NotDrained(DiskId),
    /// Nothing is drained.
    #[error("no disk waits: drain them first, and be quick")]
    NothingWaits,
    /// A disk that has a replica, or is not served to a guest.
    #[error(
        "the stack of disk {0} is not exchanged while it runs: it is replicated, in memory, or not served"
    )]
    Fixed(DiskId),
    /// It is being copied.
    #[error("disk {0} is being mirrored: let it pivot first, or restart the filter without that")]
    Mirrored(DiskId),
    /// A reader beside the guest.
    #[error("disk {0}: {1}: end that first")]
    Read(DiskId, IsRead),
    /// Another order is there first.
    #[error("disk {0} is drained or pivots already")]
    Another(DiskId),
    /// It ends.
    #[error("disk {0} is no longer served")]
    Ending(DiskId),
    /// Storage does not answer.
    #[error("the requests of disk {0} in flight do not end; it is served on when they do")]
    Busy(DiskId),
    /// What was written could not be made durable.
    #[error("disk {0} cannot be flushed: {1}")]
    Flush(DiskId, IoError),
    /// Its former image.
    #[error("disk {0}: its image cannot be left as if it were closed: {1}")]
    Settle(DiskId, std::io::Error),
    /// The new stack, or the copy, makes no sense.
    #[error("disk {0}: {1}")]
    Sense(DiskId, String),
    /// Its copy is not complete.
    #[error("disk {0}: {1}")]
    Copy(DiskId, NotPivoted),
    /// The new stack cannot be opened.
    #[error("{0}")]
    Open(#[from] StartError),
    /// No descriptor.
    #[error("the system refuses what is needed: {0}")]
    System(#[from] std::io::Error),
}

/// The stack of a disk that is served.
pub struct DiskStack {
    current: Arc<CurrentDisk>,
    served: Arc<ServedDisk>,
    beside: Option<Arc<ServedDisk>>,
    files: Mutex<BTreeMap<(u64, u64), Arc<OwnedFd>>>,
    /// How many chains serve it.
    queues: usize,
    /// The chains of the whole process, which share its buffers.
    pools: usize,
    /// The cache that it was started with, whose memory a copy's may take.
    cache: Option<CacheSpec>,
    /// What switches it to its copy, while it has one.
    pivot: Arc<CurrentPivot>,
    /// The copy, until the disk has pivoted to it.
    copy: Mutex<Option<Copy>>,
}

fn identity(file: &OwnedFd) -> std::io::Result<(u64, u64)> {
    let stat = nix::sys::stat::fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}

fn is_for_writing(file: &OwnedFd) -> std::io::Result<bool> {
    let flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?);
    Ok(flags & OFlag::O_ACCMODE == OFlag::O_RDWR)
}

/// The file that is written, of those that a disk has.
pub(super) fn written(files: &[Arc<OwnedFd>]) -> Option<DiskFile> {
    let (device, inode) = identity(files.first()?).ok()?;
    Some(DiskFile { device, inode })
}

impl DiskStack {
    pub(super) fn new(
        current: Arc<CurrentDisk>,
        served: Arc<ServedDisk>,
        beside: Option<Arc<ServedDisk>>,
        files: Vec<Arc<OwnedFd>>,
        (queues, pools, cache): (usize, usize, Option<CacheSpec>),
        pivot: Arc<CurrentPivot>,
    ) -> Self {
        let (files, copy) = (Mutex::new(by_identity(files)), Mutex::default());
        Self { current, served, beside, files, queues, pools, cache, pivot, copy }
    }

    fn id(&self) -> DiskId {
        self.served.state.disk()
    }

    /// The disk is copied, and is to pivot to this.
    pub(super) fn set_copy(&self, copy: Copy) {
        *self.copy() = Some(copy);
    }

    fn files(&self) -> MutexGuard<'_, BTreeMap<(u64, u64), Arc<OwnedFd>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn copy(&self) -> MutexGuard<'_, Option<Copy>> {
        self.copy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The disk is about to pivot: nobody may read what it has now.
    pub(super) fn close_to_readers(&self) -> Result<Option<Arc<Disk>>, IsRead> {
        self.current.take()
    }

    /// It has not pivoted: what it has may be read again.
    pub(super) fn open_to_readers(&self, disk: Option<Arc<Disk>>) {
        if let Some(disk) = disk {
            drop(self.current.exchange(disk));
        }
    }

    /// The disk has pivoted: it has its copy from now on, and no other file.
    pub(super) fn pivoted(&self, former: Option<Arc<Disk>>) -> FormerStack {
        let (chains, files) = (Vec::new().into(), BTreeMap::new());
        let mut stack =
            FormerStack { _chains: chains, _copier: None, _disk: former, _files: files };
        let Some(Copy { disk, files }) = self.copy().take() else { return stack };
        stack._files = self.show(&disk, files);
        drop(self.current.exchange(disk));
        stack
    }

    /// Has the status and the readers' view be those of this disk in these files; returns the files that it has no more.
    fn show(&self, disk: &Disk, files: Vec<Arc<OwnedFd>>) -> BTreeMap<(u64, u64), Arc<OwnedFd>> {
        let state = &self.served.state;
        state.set_file(written(&files));
        state.set_layers(disk.layers());
        state.set_cipher(disk.cipher_time());
        self.served.allocation.set(disk.allocation());
        if let Some(beside) = &self.beside {
            beside.allocation.set(disk.allocation());
        }
        let mut kept = self.files();
        let mut before = std::mem::take(&mut *kept);
        for (identity, file) in by_identity(files) {
            kept.insert(identity, before.remove(&identity).unwrap_or(file));
        }
        before
    }

    /// The disk is served no longer: nothing here keeps its image open.
    pub(super) fn end(&self) {
        self.current.end();
        drop(self.copy().take());
        self.served.allocation.set(Allocation::Unknown);
        if let Some(beside) = &self.beside {
            beside.allocation.set(Allocation::Unknown);
        }
    }

    /// Opens a new stack for `chains`, which it is not yet put under.
    fn open(
        &self,
        spec: &NewStack,
        handles: &mut Handles,
        chains: usize,
    ) -> Result<OpenedDisk, NotChanged> {
        let id = self.id();
        config::check_new_stack(spec).map_err(|what| NotChanged::Sense(id, what))?;
        if self.is_to_pivot() {
            return Err(NotChanged::Mirrored(id));
        }
        self.current.is_free().map_err(|error| NotChanged::Read(id, error))?;
        let served = self.current.disk().ok_or(NotChanged::Ending(id))?;
        let former = served.unmirrored();
        let (size, read_only) = (spec.size.unwrap_or(former.size()), former.read_only());
        let grows = self.may_grow(former.size(), size)?;
        let flags = KeptFlags::of(self.files().values())?;
        // Who passes a file that the disk has passes no lock of it: that is the disk's.
        handles.exchange(|passed| self.held_for_writing(passed))?;
        former.settle().map_err(|error| NotChanged::Settle(id, error))?;
        let (chain, backend) = (spec.chain.as_deref().unwrap_or_default(), &spec.backend);
        let wanted = WantedStack { disk: id, what: IMAGE, size, read_only, chain, backend };
        let open_stack::OpenedStack { stack, files, .. } =
            open_stack::open_without_legs(wanted, handles)?;
        let disk = match &spec.chain {
            None => former.moved_to(&stack),
            Some(_) => Disk::of(stack, read_only, self.pools).as_copy_of(&former),
        };
        let is_mirrored = self.copier().is_some();
        let is_as_before = spec.chain.is_none() && !is_mirrored && !grows;
        let keeps_filters = is_as_before && former.filters_suit(&disk);
        let new = if keeps_filters {
            NewChains::Storage((0..chains).map(|_| disk.queue_storage()).collect::<Result<_, _>>()?)
        } else {
            let made = (0..chains).map(|_| disk.chain()).collect::<std::io::Result<_>>();
            NewChains::Whole(made.map_err(|error| StartError::Chain { disk: id, error })?)
        };
        // Last: nobody can read or change them until the disk is longer.
        let bitmaps = grows.then(|| Closed::close(former.bitmaps())).transpose();
        let bitmaps = bitmaps.map_err(|_| NotChanged::Read(id, IsRead))?;
        Ok(OpenedDisk { disk, new, files, bitmaps, flags })
    }

    /// Whether the disk gets longer, if it may get this size.
    fn may_grow(&self, has: u64, size: u64) -> Result<bool, NotChanged> {
        if size < has {
            let what = format!("it has {has} bytes, and does not shrink to {size}");
            return Err(NotChanged::Sense(self.id(), what));
        }
        // Its copy would stay as long as it is.
        if size > has && self.copier().is_some() {
            return Err(NotChanged::Mirrored(self.id()));
        }
        Ok(size > has)
    }

    /// The descriptor that the disk has to write to this file, if it has one; none for a file that is only to be read.
    fn held_for_writing(&self, file: &OwnedFd) -> std::io::Result<Option<OwnedFd>> {
        let files = self.files();
        let Some(held) = files.get(&identity(file)?) else { return Ok(None) };
        let both = is_for_writing(file)? && is_for_writing(held)?;
        both.then(|| held.try_clone()).transpose()
    }

    /// The disk has so many bytes from now on, and these dirty bitmaps.
    fn grow(&self, size: u64, bitmaps: &Arc<Bitmaps>) {
        for served in [Some(&self.served), self.beside.as_ref()].into_iter().flatten() {
            served.size.set(size);
            served.state.set_bitmaps(Arc::clone(bitmaps));
        }
        tracing::info!(disk = %self.id(), size, "the disk is longer");
    }

    /// Puts a new stack under the disk.
    fn put(&self, opened: OpenedDisk, chains: &mut Vec<Chain>) -> FormerStack {
        let OpenedDisk { mut disk, mut new, files, bitmaps, flags } = opened;
        flags.let_go();
        let size = disk.size();
        let bitmaps = bitmaps.map(|former| Arc::new(former.longer(size)));
        if let Some(bitmaps) = &bitmaps {
            new.mark_in(bitmaps);
            disk = disk.with_bitmaps(Arc::clone(bitmaps));
        }
        let disk = Arc::new(disk);
        let before = self.show(&disk, files);
        // Of a copy that it has pivoted to, nothing is left to be said.
        self.served.state.set_mirror(None);
        let copier = self.copier();
        self.pivot.set(None);
        let former = match new {
            NewChains::Storage(storages) => {
                let pairs = chains.iter_mut().zip(storages);
                FormerChains::Storage(
                    pairs.map(|(chain, new)| chain.exchange_storage(new)).collect(),
                )
            }
            NewChains::Whole(new) => FormerChains::Whole(std::mem::replace(chains, new)),
        };
        let disk = self.current.exchange(disk);
        if let Some(bitmaps) = &bitmaps {
            // Last: a reader beside the guest that is told of the new size gets a chain of it.
            self.grow(size, bitmaps);
        }
        FormerStack { _chains: former, _copier: copier, _disk: disk, _files: before }
    }

    /// What copies the disk, while something does.
    fn copier(&self) -> Option<Arc<Pivot>> {
        let pivot = self.pivot.get()?;
        (!pivot.mirror().status().pivoted).then_some(pivot)
    }

    /// Whether the disk is copied, and is to pivot to its copy.
    fn is_to_pivot(&self) -> bool {
        self.copier().is_some_and(|copier| !copier.stays())
    }

    /// Opens a copy of the disk, and makes chains that mark what changes; the disk does not have them yet.
    fn open_copy(&self, spec: &NewCopy, handles: &mut Handles) -> Result<OpenedMirror, NotChanged> {
        let id = self.id();
        config::check_new_copy(&spec.mirror, self.cache.as_ref())
            .map_err(|what| NotChanged::Sense(id, what))?;
        if self.copier().is_some() {
            return Err(NotChanged::Mirrored(id));
        }
        let (former, chains) = (self.current.disk().ok_or(NotChanged::Ending(id))?, self.queues);
        let image = (former.storage(), former.keeps_zeroes());
        let opened = mirror::open(id, former.size(), &spec.mirror, image, handles)?;
        let disk = former.mirrored_by(opened.layer());
        let mirrored = opened.between(&disk, chains, self.pools)?;
        if mirrored.chains.is_some() {
            let what = "its map says that it has pivoted to the copy: serve it from there";
            return Err(NotChanged::Sense(id, what.into()));
        }
        let made = (0..chains).map(|_| disk.chain()).collect::<std::io::Result<_>>();
        let chains = made.map_err(|error| StartError::Chain { disk: id, error })?;
        Ok(OpenedMirror { of: former, disk: Arc::new(disk), chains, mirrored })
    }

    /// Has a disk be copied from now on.
    fn put_copy(&self, opened: OpenedMirror, chains: &mut Vec<Chain>) -> FormerStack {
        let OpenedMirror { disk, chains: new, mirrored, .. } = opened;
        let Mirrored { pivot: new_pivot, layers, cipher_time, copy, .. } = mirrored;
        let state = &self.served.state;
        state.set_layers([disk.layers(), layers].concat());
        state.set_cipher(disk.cipher_time().or(cipher_time));
        state.set_mirror(Some(new_pivot.mirror()));
        *self.copy() = copy;
        // All of the disk is marked: nothing waits for the threads if there are none.
        if let Err(error) = new_pivot.start() {
            new_pivot
                .cannot_copy(format!("the disk is not copied, the system refuses it: {error}"));
        }
        self.pivot.set(Some(new_pivot));
        let former = std::mem::replace(chains, new).into();
        let disk = self.current.exchange(disk);
        FormerStack { _chains: former, _copier: None, _disk: disk, _files: BTreeMap::new() }
    }
}

/// A copy that is open, with chains that are not yet the disk's.
struct OpenedMirror {
    /// The disk as it is served.
    of: Arc<Disk>,
    /// The same, with what copies it.
    disk: Arc<Disk>,
    chains: Vec<Chain>,
    mirrored: Mirrored,
}

fn by_identity(files: Vec<Arc<OwnedFd>>) -> BTreeMap<(u64, u64), Arc<OwnedFd>> {
    files.into_iter().filter_map(|file| Some((identity(&file).ok()?, file))).collect()
}

/// A stack that is open, and not yet in use.
struct OpenedDisk {
    disk: Disk,
    new: NewChains,
    files: Vec<Arc<OwnedFd>>,
    /// Those of the disk as it is, where it gets longer.
    bitmaps: Option<Closed>,
    /// Those of the files that the disk has, as long as it may go on by the stack that it has.
    flags: KeptFlags,
}

enum NewChains {
    /// To be put under the filters of the chains that there are.
    Storage(Vec<Box<dyn Storage>>),
    Whole(Vec<Chain>),
}

impl NewChains {
    /// Has chains that are made anew mark their changes in these bitmaps.
    fn mark_in(&mut self, bitmaps: &Arc<Bitmaps>) {
        if let Self::Whole(chains) = self {
            chains.iter_mut().for_each(|chain| chain.mark_in(Arc::clone(bitmaps)));
        }
    }
}

#[expect(dead_code, reason = "they are closed when this goes")]
enum FormerChains {
    Storage(Vec<Box<dyn Storage>>),
    Whole(Vec<Chain>),
}

impl From<Vec<Chain>> for FormerChains {
    fn from(chains: Vec<Chain>) -> Self {
        Self::Whole(chains)
    }
}

/// What a disk had before; closed when this is dropped, which may take long.
pub(super) struct FormerStack {
    _chains: FormerChains,
    _copier: Option<Arc<Pivot>>,
    _disk: Option<Arc<Disk>>,
    _files: BTreeMap<(u64, u64), Arc<OwnedFd>>,
}

/// What disks had before they got other stacks.
pub struct FormerStacks(#[expect(dead_code, reason = "closed when this goes")] Vec<FormerStack>);

/// Disks that wait, until this is dropped.
#[derive(Default)]
pub struct Drained {
    disks: Vec<DrainedDisk>,
    former: Vec<FormerStack>,
}

struct DrainedDisk {
    running: RunningDisk,
    stack: Arc<DiskStack>,
    gate: Arc<Gate>,
}

/// Has disks of those that run be copied from now on: all of those named, or none. What takes time is opened while they are
/// served.
///
/// # Errors
/// [`NotChanged`]; none of them is copied.
pub fn mirror(
    running: &[RunningDisk],
    copies: &[NewCopy],
    handles: &mut Handles,
) -> Result<FormerStacks, NotChanged> {
    let named: Vec<DiskId> = copies.iter().map(|copy| copy.disk).collect();
    let mut opened = Vec::new();
    for copy in copies {
        let disk = running.iter().find(|running| running.state.disk() == copy.disk);
        let disk = disk.ok_or(NotChanged::Unknown(copy.disk))?;
        let stack = disk.stack.as_ref().ok_or(NotChanged::Fixed(copy.disk))?;
        opened.push(stack.open_copy(copy, handles)?);
    }
    let mut drained = Drained::drain(running, &named)?;
    let mut changes: Vec<(&DrainedDisk, Held<'_>, OpenedMirror)> = Vec::new();
    for (disk, opened) in drained.disks.iter().zip(opened) {
        let id = disk.stack.id();
        let mut held = disk.gate.held();
        let chains = held.chains().ok_or(NotChanged::NotDrained(id))?.len();
        let is_of_now = disk.stack.current.disk().is_some_and(|now| Arc::ptr_eq(&now, &opened.of));
        if disk.stack.copier().is_some() || !is_of_now || chains != opened.chains.len() {
            return Err(NotChanged::Another(id));
        }
        changes.push((disk, held, opened));
    }
    for (disk, mut held, opened) in changes {
        if let Some(chains) = held.chains() {
            drained.former.push(disk.stack.put_copy(opened, chains));
            tracing::info!(disk = %disk.stack.id(), "the disk is copied from now on");
        }
    }
    let former = std::mem::take(&mut drained.former);
    // The disks go on.
    drop(drained);
    Ok(FormerStacks(former))
}

/// A disk that was asked to be drained.
struct Draining {
    asked: Asked,
    outcome: Receiver<Result<(), IoError>>,
}

impl Drained {
    /// Drains disks of those that run.
    ///
    /// # Errors
    /// [`NotChanged`]; none of them waits.
    pub fn drain(running: &[RunningDisk], named: &[DiskId]) -> Result<Self, NotChanged> {
        let mut seen = std::collections::HashSet::new();
        if named.is_empty() || !named.iter().all(|disk| seen.insert(*disk)) {
            return Err(NotChanged::Names);
        }
        let mut drained = Self::default();
        for id in named {
            let running = running.iter().find(|running| running.state.disk() == *id);
            let running = running.ok_or(NotChanged::Unknown(*id))?.clone();
            let stack = running.stack.clone().ok_or(NotChanged::Fixed(*id))?;
            stack.current.is_free().map_err(|error| NotChanged::Read(*id, error))?;
            drained.disks.push(DrainedDisk { running, stack, gate: Gate::new()? });
        }
        // While the guests work: little is left for when they wait.
        for disk in &drained.disks {
            let id = disk.stack.id();
            let current = disk.stack.current.disk().ok_or(NotChanged::Ending(id))?;
            let flushed = current.flush_beside();
            flushed.map_err(|error| NotChanged::Flush(id, error))?;
        }
        let asked = drained.disks.iter().map(DrainedDisk::ask).collect::<Result<Vec<_>, _>>();
        // After an error those that were asked are let go with `drained`.
        let until = Instant::now() + DRAIN_TIMEOUT;
        for (disk, asked) in drained.disks.iter().zip(asked?) {
            disk.wait(&asked, until)?;
        }
        Ok(drained)
    }

    /// Has the process end rather than serve a disk by the stack that it has: another one is about to be on record.
    ///
    /// # Errors
    /// [`NotChanged::NotDrained`]: nothing has changed.
    pub fn retire(&self) -> Result<(), NotChanged> {
        let mut all = Vec::new();
        for disk in &self.disks {
            let mut held = disk.gate.held();
            if held.chains().is_none() {
                return Err(NotChanged::NotDrained(disk.stack.id()));
            }
            all.push(held);
        }
        all.iter_mut().for_each(Held::retire);
        Ok(())
    }

    /// Completes the copies of these disks.
    ///
    /// # Errors
    /// [`NotChanged`]: one lacks something, or may.
    pub fn complete(&self, disks: &[DiskId]) -> Result<(), NotChanged> {
        for id in disks {
            let found = self.disks.iter().find(|disk| disk.stack.id() == *id);
            let disk = found.ok_or(NotChanged::NotDrained(*id))?;
            let copier = disk.stack.copier();
            let completed = copier.ok_or(NotPivoted::NoMirror).and_then(|it| it.complete());
            completed.map_err(|error| NotChanged::Copy(*id, error))?;
        }
        // What went on meanwhile may have changed since.
        let waits = |disk: &DrainedDisk| disk.gate.held().chains().is_some();
        match self.disks.iter().find(|disk| !waits(disk)) {
            Some(disk) => Err(NotChanged::NotDrained(disk.stack.id())),
            None => Ok(()),
        }
    }

    /// Gives disks other stacks: all of those named, or none.
    ///
    /// # Errors
    /// [`NotChanged`]; they wait on, with the stacks that they have.
    pub fn replace(
        &mut self,
        stacks: &[NewStack],
        handles: &mut Handles,
    ) -> Result<(), NotChanged> {
        let mut seen = std::collections::HashSet::new();
        if stacks.is_empty() || !stacks.iter().all(|stack| seen.insert(stack.disk)) {
            return Err(NotChanged::Names);
        }
        let mut changes: Vec<(&DrainedDisk, Held<'_>, OpenedDisk)> = Vec::new();
        for spec in stacks {
            let found = self.disks.iter().find(|disk| disk.stack.id() == spec.disk);
            let disk = found.ok_or(NotChanged::NotDrained(spec.disk))?;
            let mut held = disk.gate.held();
            let chains = held.chains().ok_or(NotChanged::NotDrained(spec.disk))?.len();
            let opened = disk.stack.open(spec, handles, chains)?;
            changes.push((disk, held, opened));
        }
        for (disk, mut held, opened) in changes {
            if let Some(chains) = held.chains() {
                self.former.push(disk.stack.put(opened, chains));
                held.is_replaced();
                tracing::info!(disk = %disk.stack.id(), "the disk has another stack");
            }
        }
        Ok(())
    }

    /// Lets the disks go on. What they had before is closed with what is returned.
    ///
    /// # Errors
    /// A disk has gone on before.
    pub fn resume(mut self) -> Result<FormerStacks, NotChanged> {
        let waited: Vec<bool> = self.disks.iter().map(|disk| disk.gate.open()).collect();
        let early = self.disks.iter().zip(waited).find(|(_, waited)| !waited);
        match early {
            Some((disk, _)) => Err(NotChanged::NotDrained(disk.stack.id())),
            None => Ok(FormerStacks(std::mem::take(&mut self.former))),
        }
    }
}

impl Drop for Drained {
    fn drop(&mut self) {
        for disk in &self.disks {
            disk.gate.open();
        }
        // The former stacks are closed after that.
    }
}

impl DrainedDisk {
    fn orders(&self) -> &Orders {
        &self.running.orders
    }

    fn ask(&self) -> Result<Draining, NotChanged> {
        let id = self.stack.id();
        let (tell, outcome) = mpsc::channel();
        let stop = Arc::clone(self.orders().stop());
        let hold = self.gate.holding(DRAINED_MAX, stop, tell);
        let state = Arc::clone(&self.running.state);
        let waits = Arc::clone(&self.running.state);
        waits.set_waits(Some(DiskWaits::Draining));
        let exchange = Box::new(move |chains| {
            state.set_waits(Some(DiskWaits::Drained));
            let chains = hold(chains);
            state.set_waits(None);
            chains
        });
        let asked = self.orders().ask(exchange).map_err(|why| {
            waits.set_waits(None);
            match why {
                NotAsked::Another => NotChanged::Another(id),
                NotAsked::Ended => NotChanged::Ending(id),
            }
        })?;
        Ok(Draining { asked, outcome })
    }

    fn wait(&self, draining: &Draining, until: Instant) -> Result<(), NotChanged> {
        let id = self.stack.id();
        let left = until.saturating_duration_since(Instant::now());
        match draining.outcome.recv_timeout(left) {
            Ok(flushed) => flushed.map_err(|error| NotChanged::Flush(id, error)),
            Err(RecvTimeoutError::Timeout) => {
                if self.orders().take_back(draining.asked) {
                    self.running.state.set_waits(None);
                }
                Err(NotChanged::Busy(id))
            }
            Err(RecvTimeoutError::Disconnected) => Err(NotChanged::Ending(id)),
        }
    }
}
