//! The running filter: a thread per disk, and its shutdown.
//!
//! ```text
//!  disk:  [Importing | Exporting | Merging | Converting] → Idle ⇄ Connected → stopped: drained, flushed
//!              └──────────────── any of them ──> Failed (says why; the other disks go on)
//! ```
//! A mirrored disk is copied meanwhile, and its thread exchanges its chains when it is told to pivot.

pub mod config;
pub mod confinement;
pub mod control;
mod convert;
mod descriptors;
mod flags;
mod mirror;
mod open_stack;
pub mod replica;
pub mod slice;
pub mod stacks;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Scope};

use nix::unistd::geteuid;
use vmseal_api::filter::{
    BesideSpec, DiskActivity, DiskConfig, ExportSpec, FilterConfig, FilterSpec, FrontEndSpec,
    Handle, ImportSpec, MergeSpec, NBD_CONNECTIONS, TargetFormat,
};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::transfer::ImageFormat;

use crate::copy::export;
use crate::copy::export::{ExportError, Target};
use crate::copy::import;
use crate::copy::import::ImportError;
use crate::copy::in_place::{InPlace, InPlaceError};
use crate::copy::merge::{Merge, Parts};
use crate::copy::source::Source;
use crate::copy::sums::Sums;
use crate::disk::Disk;
use crate::disk::allocation::Allocation;
use crate::disk::current::CurrentDisk;
use crate::disk::pacing::WorkPace;
use crate::disk::status::DiskState;
use crate::front_ends::ServedDisk;
use crate::front_ends::nbd;
use crate::front_ends::vhost_user;
use crate::handle::{HandleError, Handles, Socket};
use crate::layers::replicate::copier::Copier;
use crate::layers::replicate::mirror::Pivot;
use crate::layers::replicate::open::ReplicaError;
use crate::layers::replicate::threads::Replicating;
use crate::layers::replicate::{self, Replicate};
use crate::process::open_stack::{IMAGE, OpenedStack, WantedStack};
use crate::process::stacks::DiskStack;
use crate::stack::blocking;
use crate::stack::chain::Chain;
use crate::stack::layer::Layer;
use crate::stack::orders::Orders;
use crate::stack::stop::Stop;
use crate::storage::DiskStorage;
use crate::storage::file::OpenError;
use crate::storage::nbd::NbdError;
use crate::storage::own::LayerParts;
use crate::storage::qcow2::Qcow2Error;
use crate::storage::rings;

/// The stack size of a disk's thread.
const STACK: usize = 512 * 1024;

/// The stack size of the thread that accepts readers beside a front end; it is locked memory.
const BESIDE_STACK: usize = 128 * 1024;

/// Why the process cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Part of the configuration.
    #[error("{what}: {error}")]
    Handle {
        /// Which part.
        what: String,
        /// Why.
        error: HandleError,
    },
    /// A disk's file, or that of a leg.
    #[error("disk {disk}, {what}: {error}")]
    Open {
        /// Which disk.
        disk: DiskId,
        /// Which of its files.
        what: &'static str,
        /// Why.
        error: OpenError,
    },
    /// The same, in QEMU's format.
    #[error("disk {disk}, {what}: {error}")]
    Image {
        /// Which disk.
        disk: DiskId,
        /// Which of its images.
        what: &'static str,
        /// Why.
        error: Qcow2Error,
    },
    /// The export that a disk, or a leg, is stored in.
    #[error("disk {disk}, {what}: {error}")]
    Nbd {
        /// Which disk.
        disk: DiskId,
        /// What is stored there.
        what: &'static str,
        /// Why.
        error: NbdError,
    },
    /// A disk's replica.
    #[error("disk {disk}, {error}")]
    Replica {
        /// Which disk.
        disk: DiskId,
        /// Why.
        error: ReplicaError,
    },
    /// A disk's chains: what the system refuses, or a key.
    #[error("disk {disk} cannot be put together: {error}")]
    Chain {
        /// Which disk.
        disk: DiskId,
        /// Why.
        error: std::io::Error,
    },
    /// The file that a disk is exported to.
    #[error("disk {disk}: {error}")]
    Export {
        /// Which disk.
        disk: DiskId,
        /// Why.
        error: ExportError,
    },
    /// How a disk is to be in its file.
    #[error("disk {disk}: {error}")]
    Convert {
        /// Which disk.
        disk: DiskId,
        /// Why.
        error: InPlaceError,
    },
    /// No thread or no descriptor.
    #[error("the system refuses what the process needs: {0}")]
    System(#[from] std::io::Error),
}

/// A disk with all it needs, not yet running.
struct Prepared {
    chains: Vec<Chain>,
    import: Option<ImportSource>,
    export: Option<ExportTarget>,
    merge: Option<LayerToMerge>,
    convert: Option<InPlace>,
    front_end: Option<FrontEnd>,
    beside: Option<Beside>,
    replica: Option<(Replicate, Copier)>,
    pivot: Arc<CurrentPivot>,
    stack: Option<Arc<DiskStack>>,
    /// The files of a stack that is not exchanged: what is open has their locks.
    _files: Vec<Arc<OwnedFd>>,
    /// The limit of a front end's own buffers, for each chain.
    pool_bytes: usize,
    served: Arc<ServedDisk>,
    disk: DiskId,
}

/// An image to import, and where to resume.
struct ImportSource {
    file: File,
    format: ImageFormat,
    from: u64,
}

/// The target of an export, and the sums that it writes.
struct ExportTarget {
    target: Target,
    sums: Option<Sums>,
}

/// A layer to write down to the image below it.
struct LayerToMerge {
    merge: Merge,
    /// Held until this process has ended, and the kernel has finished the requests of its target.
    _lock: OwnedFd,
}

/// A front end, and the user it serves.
enum FrontEnd {
    VhostUser(Socket, u32),
    Nbd(UnixListener, u32),
}

/// The socket beside the front end: the user it serves, and the disk to make chains from.
struct Beside {
    listener: UnixListener,
    uid: u32,
    served: Arc<ServedDisk>,
    disk: Arc<CurrentDisk>,
}

/// Disks that are not yet running, with everything in the configuration open.
pub struct Opened {
    vm: VmId,
    disks: Vec<Prepared>,
}

/// A running filter.
pub struct Running {
    stop: Arc<Stop>,
    threads: Vec<JoinHandle<bool>>,
    disks: Vec<RunningDisk>,
}

/// A disk that is being served, as others see it.
#[derive(Clone)]
pub struct RunningDisk {
    /// Its status.
    pub state: Arc<DiskState>,
    /// What its thread is told.
    pub orders: Arc<Orders>,
    /// What switches it to its copy, while it is mirrored.
    pub pivot: Arc<CurrentPivot>,
    /// Its stack, where that can be exchanged.
    pub stack: Option<Arc<DiskStack>>,
}

/// What switches a disk to its copy, while it is mirrored.
#[derive(Default)]
pub struct CurrentPivot(Mutex<Option<Arc<Pivot>>>);

impl CurrentPivot {
    fn new(pivot: Option<Arc<Pivot>>) -> Self {
        Self(Mutex::new(pivot))
    }

    fn now(&self) -> MutexGuard<'_, Option<Arc<Pivot>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// That of now.
    #[must_use]
    pub fn get(&self) -> Option<Arc<Pivot>> {
        self.now().clone()
    }

    fn set(&self, pivot: Option<Arc<Pivot>>) {
        *self.now() = pivot;
    }
}

impl Opened {
    /// Opens everything in the configuration and takes the keys. From then on nothing is opened by name,
    /// and no ring is made.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn open(config: &FilterConfig, handles: &mut Handles) -> Result<Self, StartError> {
        let all = config.disks.iter().map(config::pools).sum();
        let disks = config.disks.iter().map(|disk| prepare(disk, handles, all));
        let disks = disks.collect::<Result<_, _>>()?;
        rings::make_spare(config.disks.iter().map(config::spare_rings).sum());
        Ok(Self { vm: config.vm, disks })
    }
}

impl Running {
    /// Starts the disks.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(opened: Opened) -> Result<Self, StartError> {
        let stop = Arc::new(Stop::new()?);
        let mut running = Self { stop, threads: Vec::new(), disks: Vec::new() };
        for disk in opened.disks {
            let orders = Arc::new(Orders::new(Arc::clone(&running.stop))?);
            let (state, pivot) = (Arc::clone(&disk.served.state), Arc::clone(&disk.pivot));
            let (orders_of, stack) = (Arc::clone(&orders), disk.stack.clone());
            running.disks.push(RunningDisk { state, orders: orders_of, pivot, stack });
            // Not in the span of the request: later events of a disk are not part of the start.
            let span =
                tracing::info_span!(parent: None, "filter", vm = %opened.vm, disk = %disk.disk);
            let thread = std::thread::Builder::new()
                .name("disk".into())
                .stack_size(STACK)
                .spawn(move || span.in_scope(|| disk.run(&orders)))?;
            running.threads.push(thread);
        }
        Ok(running)
    }

    /// The disks, in the configuration's order.
    #[must_use]
    pub fn disks(&self) -> &[RunningDisk] {
        &self.disks
    }

    /// Finishes the requests in flight and flushes; false if some disk could not.
    #[must_use]
    pub fn shut_down(self) -> bool {
        self.stop.ask();
        let ended: Vec<bool> =
            self.threads.into_iter().map(|thread| thread.join().unwrap_or(false)).collect();
        ended.into_iter().all(|well| well)
    }
}

fn prepare(config: &DiskConfig, handles: &mut Handles, all: usize) -> Result<Prepared, StartError> {
    let id = config.disk;
    let named = |what: &str| {
        let what = format!("disk {id}, {what}");
        move |error| StartError::Handle { what, error }
    };
    let (size, read_only) = (config.size, config.read_only);
    // Without a cipher, or if the cipher reads a hole as zeroes, too.
    let zeroes = config::keeps_zeroes(&config.chain);
    let (mut replica, mut copy) = (None, None);
    let (chain, backend) = (&config.chain[..], &config.backend);
    let wanted = WantedStack { disk: id, what: IMAGE, size, read_only, chain, backend };
    let opened = open_stack::open(wanted, handles, |link, image, handles| {
        Ok(match link {
            FilterSpec::Replicate(spec) => {
                let opened = replica.insert(replica::open(id, size, spec, image, handles)?);
                Some(Arc::new(opened.replicate.clone()) as Arc<dyn Layer>)
            }
            FilterSpec::Mirror(spec) => {
                let opened = mirror::open(id, size, spec, (image, zeroes), handles)?;
                Some(copy.insert(opened).layer())
            }
            _ => None,
        })
    });
    let OpenedStack { stack, files } = opened?;
    let import = match &config.import {
        Some(ImportSpec { source, format, from }) => {
            let file = handles.file(source, false).map_err(named("the image to import"))?;
            Some(ImportSource { file: file.into(), format: *format, from: *from })
        }
        None => None,
    };
    let merge = match &config.merge {
        Some(spec) => Some(layer_to_merge(config, spec, (stack.storage(), zeroes), handles)?),
        None => None,
    };
    let export = match &config.export {
        Some(spec) => {
            let target = target(config, spec, handles)?;
            Some(ExportTarget { target, sums: sums(config, spec, handles)? })
        }
        None => None,
    };
    let uid = |peer_uid: &Option<u32>| peer_uid.unwrap_or(geteuid().as_raw());
    let front_end = match &config.front_end {
        Some(FrontEndSpec::VhostUserBlk { socket, connected, peer_uid, .. }) => {
            let socket = match connected {
                Some(pipe) => handles.connecting(socket, pipe),
                None => handles.socket(socket),
            };
            let socket = socket.map_err(named("its socket"))?;
            Some(FrontEnd::VhostUser(socket, uid(peer_uid)))
        }
        Some(FrontEndSpec::Nbd { listen, peer_uid }) => {
            let listener = handles.listener(listen).map_err(named("its socket"))?;
            Some(FrontEnd::Nbd(listener, uid(peer_uid)))
        }
        None => None,
    };
    let beside = match &config.beside {
        Some(BesideSpec { listen, peer_uid }) => {
            let listener = handles.listener(listen).map_err(named("its second socket"))?;
            Some((listener, uid(peer_uid)))
        }
        None => None,
    };
    let queues = config::queues(config);
    let disk = with_bitmaps(Disk::of(stack, read_only, all), config, handles)?;
    let convert = config.convert.as_ref();
    let convert = convert.map(|spec| convert::open(config, spec, &disk, handles)).transpose()?;
    let mirrored = copy.map(|copy| copy.between(&disk, queues, all)).transpose()?;
    let chains = (0..queues).map(|_| disk.chain()).collect::<Result<_, _>>();
    let chains = chains.map_err(|error| StartError::Chain { disk: id, error })?;
    let mut layers = disk.layers();
    let mut cipher_time = disk.cipher_time();
    let (chains, pivot, copy) = match mirrored {
        Some(mirrored) => {
            layers.extend(mirrored.layers);
            cipher_time = cipher_time.or(mirrored.cipher_time);
            (mirrored.chains.unwrap_or(chains), Some(mirrored.pivot), mirrored.copy)
        }
        None => (chains, None, None),
    };
    let state_beside = beside.is_some().then(|| {
        let state = DiskState::new(id, usize::from(NBD_CONNECTIONS));
        Arc::new(state.with_bitmaps(disk.bitmaps()))
    });
    let copies = export.is_some() || merge.is_some() || import.is_some();
    let pace = copies.then(WorkPace::new).transpose()?.map(Arc::new);
    let served = Arc::new(ServedDisk {
        size: config.size.into(),
        read_only: config.read_only,
        serial: config.serial.as_str().into(),
        state: Arc::new(
            DiskState::new(id, queues)
                .with_pace(pace)
                .with_cipher(cipher_time)
                .with_layers(layers)
                .with_bitmaps(disk.bitmaps())
                .with_replica(replica.as_ref().map(|opened| opened.replicate.clone()))
                .with_mirror(pivot.as_ref().map(|pivot| pivot.mirror()))
                .with_beside(state_beside.clone()),
        ),
        allocation: disk.allocation().into(),
    });
    served.state.set_file(stacks::written(&files));
    let replica = match replica {
        Some(opened) => {
            let (replicate, source) = (opened.replicate.clone(), disk.below(replicate::KIND)?);
            let copier = opened.copier(source, disk.file().cloned());
            Some((replicate, copier.map_err(|error| StartError::Chain { disk: id, error })?))
        }
        None => None,
    };
    if export.is_some() {
        served.state.set(DiskActivity::Exporting { done: 0, total: config.size });
    }
    if merge.is_some() {
        served.state.set(DiskActivity::Merging { done: 0, total: config.size });
    }
    if convert.is_some() {
        served.state.set(DiskActivity::Converting { done: 0, total: config.size });
    }
    if import.is_some() {
        served.state.set(DiskActivity::Importing { done: 0, total: 0, durable: 0 });
    }
    let pool_bytes = disk.pool_bytes();
    let can_change = config::can_change(config);
    let beside_allocation = beside.as_ref().map(|_| disk.allocation());
    let pivoted = pivot.as_ref().is_some_and(|pivot| pivot.mirror().status().pivoted);
    let pivot = Arc::new(CurrentPivot::new(pivot));
    let disk = Arc::new(CurrentDisk::new(disk));
    let beside = beside.zip(state_beside).zip(beside_allocation);
    let beside = beside.map(|(((listener, uid), state), allocation)| Beside {
        listener,
        uid,
        served: Arc::new(ServedDisk {
            size: config.size.into(),
            read_only: true,
            serial: Arc::clone(&served.serial),
            state,
            allocation: allocation.into(),
        }),
        disk: Arc::clone(&disk),
    });
    let of_copy = copy.iter().flat_map(|copy| &copy.files);
    let kept = if can_change { Vec::new() } else { files.iter().chain(of_copy).cloned().collect() };
    let stack = can_change.then(|| {
        let beside = beside.as_ref().map(|beside| Arc::clone(&beside.served));
        let pivot = Arc::clone(&pivot);
        let of_chains = (queues, all, config::cache(config).copied());
        let stack = DiskStack::new(disk, Arc::clone(&served), beside, files, of_chains, pivot);
        if let Some(copy) = copy {
            stack.set_copy(copy);
            if pivoted {
                // Nobody reads it yet.
                drop(stack.pivoted(None));
            }
        }
        Arc::new(stack)
    });
    Ok(Prepared {
        chains,
        import,
        export,
        merge,
        convert,
        front_end,
        beside,
        replica,
        pivot,
        stack,
        _files: kept,
        pool_bytes,
        served,
        disk: id,
    })
}

/// The disk with the bitmaps that its file keeps. One whose file cannot be used has none, and the file is emptied: it would miss what is
/// written.
fn with_bitmaps(
    disk: Disk,
    config: &DiskConfig,
    handles: &mut Handles,
) -> Result<Disk, StartError> {
    let Some(handle) = &config.bitmaps else { return Ok(disk) };
    let what = || format!("disk {}, the file of its dirty bitmaps", config.disk);
    let file = handles.file(handle, true);
    let file = File::from(file.map_err(|error| StartError::Handle { what: what(), error })?);
    match disk.clone().with_bitmaps_in(file.try_clone()?) {
        Ok(kept) => Ok(kept),
        Err(error) => {
            tracing::warn!(disk = %config.disk, %error, "the dirty bitmaps of a disk end with this process");
            file.set_len(0)?;
            Ok(disk)
        }
    }
}

/// The file that a disk is exported to.
fn target(
    config: &DiskConfig,
    spec: &ExportSpec,
    handles: &mut Handles,
) -> Result<Target, StartError> {
    let id = config.disk;
    let named = |what: &str| {
        let what = format!("disk {id}, {what}");
        move |error| StartError::Handle { what, error }
    };
    let file = handles.file(&spec.target, true).map_err(named("the file to export to"))?;
    let made = match &spec.format {
        TargetFormat::Raw => Ok(Target::Raw(file.into())),
        TargetFormat::Qcow2 => Target::qcow2(file.into(), config.size),
        TargetFormat::Overlay => Target::overlay(file.into()),
        TargetFormat::Sums => Ok(Target::Nothing),
        TargetFormat::Disk { key, offset, keeps_room } => {
            let key = key.as_ref().map(|key| handles.key(key)).transpose();
            let key = key.map_err(named("the key of the new disk"))?;
            Target::disk(file.into(), *offset, config.size, key, *keeps_room)
        }
        TargetFormat::Luks2 { key, offset } => {
            let key = handles.key(key).map_err(named("the key of the export"))?;
            Target::luks2(file.into(), *offset, config.size, key)
        }
    };
    made.map_err(|error| StartError::Export { disk: id, error })
}

/// The sums of an export's blocks.
fn sums(
    config: &DiskConfig,
    spec: &ExportSpec,
    handles: &mut Handles,
) -> Result<Option<Sums>, StartError> {
    let id = config.disk;
    let named =
        |error| StartError::Handle { what: format!("disk {id}, the sums of its blocks"), error };
    let mut file = |handle: &Option<Handle>, write| {
        let file = handle.as_ref().map(|handle| handles.file(handle, write)).transpose();
        file.map(|file| file.map(File::from)).map_err(named)
    };
    let (written, except) = (file(&spec.sums, true)?, file(&spec.except, false)?);
    let changed = file(&spec.changed, false)?;
    let sums = written.map(|written| Sums::new(written, except, changed)).transpose();
    sums.map_err(|error| StartError::Export { disk: id, error: ExportError::Sums(error) })
}

/// Opens the image that a layer is written to.
fn layer_to_merge(
    config: &DiskConfig,
    spec: &MergeSpec,
    (layer, zeroes): (&DiskStorage, bool),
    handles: &mut Handles,
) -> Result<LayerToMerge, StartError> {
    let id = config.disk;
    let failed = |error| StartError::Image { disk: id, what: IMAGE, error };
    let parts = match layer {
        DiskStorage::Qcow2(image) => {
            let extents = image.extents().map_err(|error| failed(Qcow2Error::System(error)))?;
            Parts::Layer(LayerParts::new(extents, zeroes))
        }
        DiskStorage::File(_) => Parts::Flat(Allocation::of(layer, zeroes)),
        DiskStorage::Nbd(_) | DiskStorage::Mem(_) => return Err(failed(Qcow2Error::NotALayer)),
    };
    let (size, what) = (config.size, "what it is merged into");
    let (chain, backend) = (&spec.into.chain[..], &spec.into.backend);
    let wanted = WantedStack { disk: id, what, size, read_only: false, chain, backend };
    let OpenedStack { stack: target, .. } = open_stack::open_without_legs(wanted, handles)?;
    let what = || format!("disk {id}, the lock of its merge");
    let lock = handles.file(&spec.lock, false);
    let lock = lock.map_err(|error| StartError::Handle { what: what(), error })?;
    // The image that is written has a lock of its own, if any, that others hold, too.
    let storage = target.storage().clone().holding(lock.try_clone()?);
    let target = Disk::of(target.over(storage, size), false, 2).chain();
    let target = target.map_err(|error| StartError::Chain { disk: id, error })?;
    Ok(LayerToMerge { merge: Merge { parts, target }, _lock: lock })
}

impl Beside {
    fn spawn<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, stop: &'scope Stop) {
        let span = tracing::Span::current();
        let serve = move || {
            let Self { listener, uid, served, disk } = self;
            let served = span.in_scope(|| nbd::beside::serve(listener, *uid, served, disk, stop));
            if let Err(error) = served {
                tracing::warn!(%error, "the disk is no longer served beside the guest");
            }
        };
        let builder = std::thread::Builder::new().name("beside".into()).stack_size(BESIDE_STACK);
        if let Err(error) = builder.spawn_scoped(scope, serve) {
            tracing::warn!(%error, "the disk is not served beside the guest");
        }
    }
}

impl Prepared {
    /// Runs a disk until it ends; true if it ended well, with everything flushed.
    fn run(mut self, orders: &Orders) -> bool {
        let lived = self.live(orders);
        orders.close();
        if let Some(pivot) = self.pivot.get() {
            pivot.end();
        }
        // The control socket knows the disk until the process ends: what only that keeps open is closed here, so that images
        // give back what they have reserved.
        self.pivot.set(None);
        if let Some(stack) = &self.stack {
            stack.end();
        }
        self.served.allocation.set(Allocation::Unknown);
        match lived {
            Ok(()) => true,
            Err(message) => {
                tracing::error!(%message, "the disk cannot go on");
                self.served.state.set(DiskActivity::Failed { message });
                false
            }
        }
    }

    fn live(&mut self, orders: &Orders) -> Result<(), String> {
        let (state, stop) = (&self.served.state, orders.stop());
        if let Some(pivot) = self.pivot.get() {
            pivot.start().map_err(|error| format!("it cannot be copied: {error}"))?;
        }
        let _until_all_is_flushed = match self.replica.take() {
            Some((replicate, copier)) => Some(
                Replicating::start(&replicate, copier)
                    .map_err(|error| format!("its replica cannot be kept: {error}"))?,
            ),
            None => None,
        };
        if let (Some(source), Some(chain)) = (self.import.take(), self.chains.first_mut()) {
            let ImportSource { file, format, from } = source;
            Source::open(file, format)
                .map_err(ImportError::from)
                .and_then(|source| import::run(&source, from, chain, state, stop))
                .map_err(|error| error.to_string())?;
            tracing::info!("the image is imported and flushed");
            state.set(DiskActivity::Idle);
        }
        if let (Some(mut export), Some(chain)) = (self.export.take(), self.chains.first_mut()) {
            let (ExportTarget { target, sums }, allocation) =
                (&mut export, self.served.allocation.get());
            export::run(chain, &allocation, target, sums.as_mut(), state, stop)
                .map_err(|error| error.to_string())?;
            tracing::info!("the disk is exported and flushed");
            state.set(DiskActivity::Idle);
        }
        if let (Some(mut layer), Some(chain)) = (self.merge.take(), self.chains.first_mut()) {
            layer.merge.run(chain, state, stop).map_err(|error| error.to_string())?;
            tracing::info!("the layer is merged and flushed");
            state.set(DiskActivity::Idle);
        }
        if let Some(conversion) = self.convert.take() {
            conversion.run(self.disk, state, stop).map_err(|error| error.to_string())?;
            tracing::info!("the disk is converted and flushed");
            state.set(DiskActivity::Idle);
        }
        if let Some(front_end) = &self.front_end {
            let (chains, served) = (std::mem::take(&mut self.chains), &self.served);
            let beside = self.beside.as_ref();
            let chains = std::thread::scope(|scope| {
                let _ends_with_the_front_end = beside.map(|beside| beside.spawn(scope, stop));
                let ended = match front_end {
                    FrontEnd::VhostUser(socket, uid) => {
                        vhost_user::serve(socket, *uid, served, chains, orders)
                    }
                    FrontEnd::Nbd(listener, uid) => {
                        nbd::serve(listener, *uid, served, chains, self.pool_bytes, orders)
                    }
                };
                // At once: a reader beside the front end may still read until everything is asked to stop.
                if let Err(error) = &ended {
                    state.set(DiskActivity::Failed { message: error.to_string() });
                }
                ended
            });
            self.chains = chains.map_err(|error| error.to_string())?;
        } else if self.pivot.get().is_some() {
            let idled = orders.idle(None, std::mem::take(&mut self.chains));
            (self.chains, _) = idled.map_err(|error| error.to_string())?;
        }
        if let Some(chain) = self.chains.first_mut() {
            blocking::flush(chain).map_err(|error| format!("the last flush failed: {error}"))?;
        }
        Ok(())
    }
}
