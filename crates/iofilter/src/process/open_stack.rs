//! Opens the stack that a configuration asks for: the storage, and the layers above it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmseal_api::filter::{BackendSpec, BackingSpec, FilterSpec};
use vmseal_api::id::DiskId;

use crate::copy::export::Sparse;
use crate::disk::{DiskStorage, Encryption};
use crate::handle::Handles;
use crate::layers;
use crate::process::StartError;
use crate::stack::layer::Layer;
use crate::storage::file::FileDisk;
use crate::storage::nbd::NbdDisk;
use crate::storage::qcow2::Qcow2Disk;

/// Where a disk is stored, open.
pub(super) struct StoredDisk {
    pub storage: DiskStorage,
    /// Where its holes are, if that is known.
    pub sparse: Option<Sparse>,
    /// Its files, the one that is written first.
    pub files: Vec<OwnedFd>,
}

/// Layers, from the guest downwards.
pub(super) type Layers = Vec<Arc<dyn Layer>>;

/// The layers of a chain, from the guest downwards; keys are taken. `copied` has the layers of copies, whose legs are open.
pub(super) fn layers_of(
    id: DiskId,
    chain: &[FilterSpec],
    handles: &mut Handles,
    copied: impl Fn(&FilterSpec) -> Option<Arc<dyn Layer>>,
) -> Result<Layers, StartError> {
    let mut of = |link: &FilterSpec| -> Result<Option<Arc<dyn Layer>>, StartError> {
        Ok(match link {
            FilterSpec::Crypt { key, holes } => {
                let what = || format!("disk {id}, its key");
                let key =
                    handles.key(key).map_err(|error| StartError::Handle { what: what(), error })?;
                Some(Arc::new(Encryption { key, holes: *holes }))
            }
            FilterSpec::Replicate(_) | FilterSpec::Mirror(_) => copied(link),
            FilterSpec::Limit(_)
            | FilterSpec::Delay(_)
            | FilterSpec::Fault(_)
            | FilterSpec::Bounce {}
            | FilterSpec::Cache(_) => layers::of(link),
        })
    };
    chain.iter().filter_map(|link| of(link).transpose()).collect()
}

/// Opens what a disk is stored in.
pub(super) fn storage(
    id: DiskId,
    size: u64,
    read_only: bool,
    backend: &BackendSpec,
    handles: &mut Handles,
) -> Result<StoredDisk, StartError> {
    let named = |what: &str| {
        let what = format!("disk {id}, {what}");
        move |error| StartError::Handle { what, error }
    };
    let opened = |error| StartError::Open { disk: id, error };
    match backend {
        BackendSpec::File { file, offset, direct, keeps_room } => {
            let fd = handles.image(file, !read_only).map_err(named("its image"))?;
            let sparse = Some(Sparse(fd.try_clone()?.into(), *offset));
            let files = vec![fd.try_clone()?];
            let file = FileDisk::open(fd, *offset, size, *direct, read_only).map_err(opened)?;
            if *keeps_room {
                file.keep_room();
            }
            Ok(StoredDisk { storage: DiskStorage::File(file), sparse, files })
        }
        BackendSpec::Qcow2 { file, backing, offset, lock } => {
            let fd = handles.image(file, !read_only).map_err(named("its image"))?;
            let (mut files, mut below) = (vec![fd.try_clone()?], Vec::new());
            for BackingSpec { file, format } in backing {
                let fd = handles.image(file, false).map_err(named("a file below its image"))?;
                files.push(fd.try_clone()?);
                below.push((fd, *format));
            }
            if let Some(lock) = lock {
                files.push(handles.file(lock, false).map_err(named("the file of its lock"))?);
            }
            let image = Qcow2Disk::open(fd, below, *offset, size, read_only);
            let image = image.map_err(|error| StartError::Image { disk: id, error })?;
            Ok(StoredDisk { storage: DiskStorage::Qcow2(image), sparse: None, files })
        }
        BackendSpec::Nbd { sockets, export, offset } => {
            let connected = sockets.iter().map(|socket| handles.stream(socket));
            let connected = connected.collect::<Result<_, _>>();
            let connected = connected.map_err(named("a connection to its NBD server"))?;
            let export = NbdDisk::open(connected, export, *offset, size, read_only);
            let export = export.map_err(|error| StartError::Nbd { disk: id, error })?;
            Ok(StoredDisk { storage: DiskStorage::Nbd(export), sparse: None, files: Vec::new() })
        }
        BackendSpec::Mem {} => {
            let file = FileDisk::in_memory(size).map_err(opened)?;
            Ok(StoredDisk { storage: DiskStorage::File(file), sparse: None, files: Vec::new() })
        }
    }
}
