//! Puts a mirrored disk together: its own stack, that of its copy, and what switches between them.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmseal_api::filter::MirrorSpec;
use vmseal_api::id::DiskId;

use crate::disk::stack::Stack;
use crate::disk::{Disk, DiskStorage};
use crate::handle::Handles;
use crate::layers::replicate;
use crate::layers::replicate::blocking_disk::BlockingDisk;
use crate::layers::replicate::mirror::{OpenedMirror, Pivot};
use crate::layers::replicate::open::ReplicaError;
use crate::process::StartError;
use crate::process::open_stack::{Layers, StoredDisk, layers_of, storage};
use crate::stack::chain::Chain;
use crate::stack::figures::CipherTime;
use crate::stack::layer::Layer;
use crate::storage::own::LayerParts;
use crate::storage::qcow2::Qcow2Error;

/// Everything that the copy of a disk needs, open.
pub(super) struct OpenedCopy {
    disk: DiskId,
    size: u64,
    opened: OpenedMirror,
    storage: StoredDisk,
    /// Of the copy alone, from the guest downwards.
    layers: Layers,
}

/// What switches a disk to its copy.
pub(super) struct Mirrored {
    pub pivot: Arc<Pivot>,
    /// The chains to serve, if the disk has pivoted before.
    pub chains: Option<Vec<Chain>>,
    /// The layers of the copy alone.
    pub layers: Layers,
    /// The time of the copy's cipher, if it has one.
    pub cipher_time: Option<Arc<CipherTime>>,
    /// The copy.
    pub copy: Copy,
}

/// A copy, for when the disk has pivoted to it.
pub(super) struct Copy {
    pub disk: Arc<Disk>,
    /// Its file.
    pub files: Vec<OwnedFd>,
}

/// Opens what the copy of a disk of `size` bytes needs. `image` is the disk's own, and whether zeroes there are zeroes to the guest.
pub(super) fn open(
    disk: DiskId,
    size: u64,
    spec: &MirrorSpec,
    (image, zeroes): (&DiskStorage, bool),
    handles: &mut Handles,
) -> Result<OpenedCopy, StartError> {
    let storage = storage(disk, size, false, &spec.to.backend, handles)?;
    let layers = layers_of(disk, &spec.to.chain, handles, |_| None)?;
    let refused = |error| StartError::Replica { disk, error };
    let places = [image, &storage.storage].into_iter().filter_map(DiskStorage::file);
    let places: Vec<_> = places.collect();
    if let [image, copy] = places[..]
        && image.is_same_file(copy)
    {
        return Err(refused(ReplicaError::Same));
    }
    let opened = OpenedMirror::open(disk, size, &spec.map, spec.pace, &places, handles);
    let mut opened = opened.map_err(refused)?;
    if let (true, DiskStorage::Qcow2(image)) = (spec.same_below, image) {
        let extents = image.extents().map_err(|error| {
            let error = Qcow2Error::System(error);
            StartError::Image { disk, error }
        })?;
        opened = opened.of_layer(Some(LayerParts::new(extents, zeroes)));
    }
    Ok(OpenedCopy { disk, size, opened, storage, layers })
}

impl OpenedCopy {
    /// The layer for the disk's own chains.
    pub(super) fn layer(&self) -> Arc<dyn Layer> {
        Arc::new(self.opened.replicate.clone())
    }

    /// Puts the copy under the layers that stand above the mirror of `disk`.
    pub(super) fn between(
        self,
        disk: &Disk,
        queues: usize,
        pools: usize,
    ) -> Result<Mirrored, StartError> {
        let id = self.disk;
        self.put_together(disk, queues, pools)
            .map_err(|error| StartError::Chain { disk: id, error })
    }

    fn put_together(self, disk: &Disk, queues: usize, pools: usize) -> std::io::Result<Mirrored> {
        let layers = disk.layers();
        let shared = layers.iter().take_while(|layer| layer.kind() != replicate::MIRROR);
        let shared: Vec<_> = shared.cloned().collect();
        let count = shared.len();
        let StoredDisk { storage, files, .. } = self.storage;
        let stack = Stack::new([shared, self.layers].concat(), storage, self.size);
        let copy = Disk::of(stack, false, pools).as_copy_of(disk);
        let chains = (0..queues).map(|_| copy.chain()).collect::<Result<Vec<_>, _>>()?;
        let (layers, cipher_time) = (copy.layers().split_off(count), copy.cipher_time());
        if self.opened.mirror.status().pivoted {
            let pivot = Arc::new(self.opened.pivoted());
            let copy = Copy { disk: Arc::new(copy), files };
            return Ok(Mirrored { pivot, chains: Some(chains), layers, cipher_time, copy });
        }
        let source = BlockingDisk::new(disk.beneath(count + 1, true)?);
        let target = copy.beneath(count, false)?;
        let target = BlockingDisk::over(target, copy.file().cloned(), copy.holes().is_some());
        let target = match copy.storage() {
            DiskStorage::Nbd(export) => target.at_server(export.clone()),
            _ => target,
        };
        let pivot = Arc::new(self.opened.between(source, disk.holes(), target, chains));
        let copy = Copy { disk: Arc::new(copy), files };
        Ok(Mirrored { pivot, chains: None, layers, cipher_time, copy })
    }
}
