//! Opens the stacks that a configuration asks for, those of disks and those of legs: the storage, and the layers above it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmseal_api::filter::{BackendSpec, BackingSpec, FilterSpec, StackSpec};
use vmseal_api::id::DiskId;

use crate::disk::Encryption;
use crate::handle::Handles;
use crate::layers;
use crate::layers::leg::Leg;
use crate::layers::stack::Stack;
use crate::process::StartError;
use crate::stack::layer::Layer;
use crate::storage::DiskStorage;
use crate::storage::channel::Connection;
use crate::storage::file::FileDisk;
use crate::storage::nbd::NbdDisk;
use crate::storage::qcow2::Qcow2Disk;

/// What a disk's own stack is called in messages.
pub(super) const IMAGE: &str = "its image";

/// A stack that is to be opened.
#[derive(Clone, Copy)]
pub(super) struct WantedStack<'a> {
    /// Whose.
    pub disk: DiskId,
    /// What it is to the disk, for messages.
    pub what: &'static str,
    pub size: u64,
    pub read_only: bool,
    /// The layers, from the guest downwards.
    pub chain: &'a [FilterSpec],
    pub backend: &'a BackendSpec,
}

/// A stack that is open.
pub(super) struct OpenedStack {
    pub stack: Stack,
    /// Its files, the one that is written first.
    pub files: Vec<Arc<OwnedFd>>,
}

/// A layer that owns a leg; none where there is none.
type CopyingLayer = Result<Option<Arc<dyn Layer>>, StartError>;

/// Opens a stack; keys are taken. `copying` makes the layers that have legs, given where the stack is stored.
pub(super) fn open(
    wanted: WantedStack<'_>,
    handles: &mut Handles,
    mut copying: impl FnMut(&FilterSpec, &DiskStorage, &mut Handles) -> CopyingLayer,
) -> Result<OpenedStack, StartError> {
    let StoredDisk { storage, files } = storage(wanted, handles)?;
    let mut of = |link: &FilterSpec| -> CopyingLayer {
        Ok(match link {
            FilterSpec::Crypt { key, holes } => {
                let what = || format!("disk {}, the key of {}", wanted.disk, wanted.what);
                let key =
                    handles.key(key).map_err(|error| StartError::Handle { what: what(), error })?;
                Some(Arc::new(Encryption { key, holes: *holes }))
            }
            FilterSpec::Replicate(_) | FilterSpec::Mirror(_) => copying(link, &storage, handles)?,
            FilterSpec::Limit(_)
            | FilterSpec::Delay(_)
            | FilterSpec::Fault(_)
            | FilterSpec::Bounce {}
            | FilterSpec::Stall(_)
            | FilterSpec::Cache(_) => layers::of(link),
        })
    };
    let layers = wanted.chain.iter().filter_map(|link| of(link).transpose());
    let layers = layers.collect::<Result<Vec<_>, _>>()?;
    Ok(OpenedStack { stack: Stack::new(layers, storage, wanted.size), files })
}

/// A stack that has no legs: the configuration's check lets none through.
pub(super) fn open_without_legs(
    wanted: WantedStack<'_>,
    handles: &mut Handles,
) -> Result<OpenedStack, StartError> {
    open(wanted, handles, |_, _, _| Ok(None))
}

/// Opens a leg of a disk of `size` bytes.
pub(super) fn leg(
    disk: DiskId,
    what: &'static str,
    size: u64,
    to: &StackSpec,
    handles: &mut Handles,
) -> Result<Leg, StartError> {
    let (chain, backend) = (&to.chain[..], &to.backend);
    let wanted = WantedStack { disk, what, size, read_only: false, chain, backend };
    let OpenedStack { stack, files, .. } = open_without_legs(wanted, handles)?;
    Ok(Leg::new(stack, files))
}

/// Where a stack is stored, open.
struct StoredDisk {
    storage: DiskStorage,
    files: Vec<Arc<OwnedFd>>,
}

/// A connection for queues to the file; none, with a warning, where the file's server gives no ticket for it.
fn connection(disk: DiskId, socket: OwnedFd, file: &OwnedFd) -> Option<Connection> {
    let opened = Connection::open(socket, file);
    let refused = |error: &io::Error| {
        tracing::warn!(%disk, %error, "the server of the disk's file gives no ticket; data goes through the file");
    };
    opened.inspect_err(refused).ok()
}

fn storage(wanted: WantedStack<'_>, handles: &mut Handles) -> Result<StoredDisk, StartError> {
    let WantedStack { disk, what, size, read_only, backend, .. } = wanted;
    let named = |part: &str| {
        let what = format!("disk {disk}, {part}{what}");
        move |error| StartError::Handle { what, error }
    };
    match backend {
        BackendSpec::File { file, offset, direct, keeps_room, channel } => {
            let fd = handles.image(file, !read_only).map_err(named(""))?;
            let channel = channel.as_ref().map(|channel| handles.packets(channel)).transpose();
            let channel = channel.map_err(named("the channel to vmseal-rbd of "))?;
            let channel = channel.and_then(|socket| connection(disk, socket, &fd));
            let files = vec![fd.try_clone()?.into()];
            let file = FileDisk::open(fd, *offset, size, *direct, read_only);
            let mut file = file.map_err(|error| StartError::Open { disk, what, error })?;
            if *keeps_room {
                file.keep_room();
            }
            if let Some(channel) = channel {
                file = file.with_channel(channel.into());
            }
            Ok(StoredDisk { storage: DiskStorage::File(file), files })
        }
        BackendSpec::Qcow2 { file, backing, offset, lock } => {
            let fd = handles.image(file, !read_only).map_err(named(""))?;
            let (mut files, mut below) = (vec![fd.try_clone()?.into()], Vec::new());
            for BackingSpec { file, format } in backing {
                let fd = handles.image(file, false).map_err(named("a file below "))?;
                files.push(fd.try_clone()?.into());
                below.push((fd, *format));
            }
            if let Some(lock) = lock {
                let lock =
                    handles.file(lock, false).map_err(named("the file with the lock of "))?;
                files.push(lock.into());
            }
            let image = Qcow2Disk::open(fd, below, *offset, size, read_only);
            let image = image.map_err(|error| StartError::Image { disk, what, error })?;
            Ok(StoredDisk { storage: DiskStorage::Qcow2(image), files })
        }
        BackendSpec::Nbd { sockets, export, offset } => {
            let connected = sockets.iter().map(|socket| handles.stream(socket));
            let connected = connected.collect::<Result<_, _>>();
            let connected = connected.map_err(named("a connection to the NBD server with "))?;
            let export = NbdDisk::open(connected, export, *offset, size, read_only);
            let export = export.map_err(|error| StartError::Nbd { disk, what, error })?;
            Ok(StoredDisk { storage: DiskStorage::Nbd(export), files: Vec::new() })
        }
        BackendSpec::Mem {} => {
            let file = FileDisk::in_memory(size);
            let file = file.map_err(|error| StartError::Open { disk, what, error })?;
            Ok(StoredDisk { storage: DiskStorage::File(file), files: Vec::new() })
        }
    }
}
