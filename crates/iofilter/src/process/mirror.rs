//! Puts a mirrored disk together: its own stack, that of its copy, and what switches between them.

use std::sync::Arc;

use vmseal_api::filter::{DiskConfig, FilterSpec, MirrorSpec};
use vmseal_api::id::DiskId;

use crate::disk::{Disk, DiskStorage, Encryption};
use crate::handle::Handles;
use crate::layers;
use crate::layers::crypt::CryptError;
use crate::layers::replicate;
use crate::layers::replicate::blocking_disk::BlockingDisk;
use crate::layers::replicate::mirror::{OpenedMirror, Pivot};
use crate::layers::replicate::open::ReplicaError;
use crate::process::{Layers, StartError, config, encryption, sides, storage};
use crate::stack::chain::Chain;
use crate::stack::figures::CipherTime;
use crate::stack::layer::Layer;

/// Everything that the copy of a disk needs, open.
pub(super) struct OpenedCopy<'a> {
    disk: DiskId,
    size: u64,
    spec: &'a MirrorSpec,
    opened: OpenedMirror,
    storage: DiskStorage,
    encryption: Option<Encryption>,
}

/// What switches a disk to its copy.
pub(super) struct Mirrored {
    pub pivot: Arc<Pivot>,
    /// The chains to serve, if the disk has pivoted before.
    pub copy: Option<Vec<Chain>>,
    /// The layers of the copy alone.
    pub layers: Layers,
    /// The time of the copy's cipher, if it has one.
    pub cipher_time: Option<Arc<CipherTime>>,
}

/// Opens what the copy of a disk needs; none if it is not mirrored.
pub(super) fn open<'a>(
    config: &'a DiskConfig,
    image: &DiskStorage,
    handles: &mut Handles,
) -> Result<Option<OpenedCopy<'a>>, StartError> {
    let Some(spec) = config::mirror(config) else { return Ok(None) };
    let (disk, size) = (config.disk, config.size);
    let storage = storage(disk, size, false, &spec.to.backend, handles)?.storage;
    let encryption = encryption(disk, &spec.to.chain, handles)?;
    let refused = |error| StartError::Replica { disk, error };
    let places: Vec<_> = [image, &storage].into_iter().filter_map(DiskStorage::file).collect();
    if let [image, copy] = places[..]
        && image.is_same_file(copy)
    {
        return Err(refused(ReplicaError::Same));
    }
    let opened = OpenedMirror::open(disk, size, &spec.map, spec.pace, &places, handles);
    let opened = opened.map_err(refused)?;
    Ok(Some(OpenedCopy { disk, size, spec, opened, storage, encryption }))
}

impl OpenedCopy<'_> {
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
            .map_err(|error| StartError::Crypt { disk: id, error })
    }

    fn put_together(
        self,
        disk: &Disk,
        queues: usize,
        pools: usize,
    ) -> Result<Mirrored, CryptError> {
        let layers = disk.layers();
        let shared = layers.iter().take_while(|layer| layer.kind() != replicate::MIRROR);
        let shared: Vec<_> = shared.cloned().collect();
        let count = shared.len();
        let layer_of = |link: &FilterSpec| layers::of(link);
        let (above, below) = sides(&self.spec.to.chain, layer_of);
        let own = [&above[..], &below].concat();
        let copy = Disk::new(self.size, false, self.encryption, self.storage, pools)
            .with_layers([shared, above].concat(), below)
            .as_copy_of(disk);
        let chains = (0..queues).map(|_| copy.chain()).collect::<Result<Vec<_>, _>>()?;
        let (layers, cipher_time) = (own, copy.cipher_time());
        if self.opened.mirror.status().pivoted {
            let pivot = Arc::new(self.opened.pivoted());
            return Ok(Mirrored { pivot, copy: Some(chains), layers, cipher_time });
        }
        let source = BlockingDisk::new(disk.beneath(count + 1, true)?);
        let target = copy.beneath(count, false)?;
        let target = BlockingDisk::over(target, copy.file().cloned(), copy.holes().is_some());
        let pivot = self.opened.between(source, disk.holes(), target, chains);
        Ok(Mirrored { pivot: Arc::new(pivot), copy: None, layers, cipher_time })
    }
}
