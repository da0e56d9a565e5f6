//! Puts a mirrored disk together: its own stack, that of its copy, and what switches between them.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmseal_api::filter::MirrorSpec;
use vmseal_api::id::DiskId;

use crate::disk::Disk;
use crate::handle::Handles;
use crate::layers::replicate;
use crate::layers::replicate::mirror::{OpenedMirror, Pivot};
use crate::process::StartError;
use crate::process::open_stack::{self, IMAGE};
use crate::stack::chain::Chain;
use crate::stack::figures::CipherTime;
use crate::stack::layer::Layer;
use crate::storage::DiskStorage;
use crate::storage::own::LayerParts;
use crate::storage::qcow2::Qcow2Error;

/// What a mirror's leg is called in messages.
const COPY: &str = "its copy";

/// Everything that the copy of a disk needs, open.
pub(super) struct OpenedCopy {
    disk: DiskId,
    opened: OpenedMirror,
}

/// What switches a disk to its copy.
pub(super) struct Mirrored {
    pub pivot: Arc<Pivot>,
    /// The chains to serve, if the disk has pivoted before.
    pub chains: Option<Vec<Chain>>,
    /// The layers of the copy alone.
    pub layers: Vec<Arc<dyn Layer>>,
    /// The time of the copy's cipher, if it has one.
    pub cipher_time: Option<Arc<CipherTime>>,
    /// The copy; none where the disk stays.
    pub copy: Option<Copy>,
}

/// A copy, for when the disk has pivoted to it.
pub(super) struct Copy {
    pub disk: Arc<Disk>,
    /// Its files.
    pub files: Vec<Arc<OwnedFd>>,
}

/// Opens what the copy of a disk of `size` bytes needs. `image` is the disk's own, and whether zeroes there are zeroes to the guest.
pub(super) fn open(
    disk: DiskId,
    size: u64,
    spec: &MirrorSpec,
    (image, zeroes): (&DiskStorage, bool),
    handles: &mut Handles,
) -> Result<OpenedCopy, StartError> {
    let leg = open_stack::leg(disk, COPY, size, &spec.to, handles)?;
    let opened = OpenedMirror::open(disk, size, &spec.map, spec.pace, image, leg, handles);
    let mut opened =
        opened.map_err(|error| StartError::Replica { disk, error })?.that_stays(spec.stays);
    if let (true, DiskStorage::Qcow2(image)) = (spec.same_below, image) {
        let extents = image.extents().map_err(|error| {
            let error = Qcow2Error::System(error);
            StartError::Image { disk, what: IMAGE, error }
        })?;
        opened = opened.of_layer(Some(LayerParts::new(extents, zeroes)));
    }
    Ok(OpenedCopy { disk, opened })
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
        let leg = self.opened.leg();
        let copy = Disk::of(leg.stack().under(shared), disk.read_only(), pools).as_copy_of(disk);
        let (stays, queues) = (self.opened.stays(), if self.opened.stays() { 0 } else { queues });
        let chains = (0..queues).map(|_| copy.chain()).collect::<Result<Vec<_>, _>>()?;
        let (layers, cipher_time) = (copy.layers().split_off(count), copy.cipher_time());
        let copy = Copy { disk: Arc::new(copy), files: leg.files().to_vec() };
        let copy = (!stays).then_some(copy);
        if self.opened.mirror.status().pivoted {
            let pivot = Arc::new(self.opened.pivoted());
            return Ok(Mirrored { pivot, chains: Some(chains), layers, cipher_time, copy });
        }
        let source = disk.beneath(count + 1, true)?;
        let time = cipher_time.clone().unwrap_or_default();
        let pivot = Arc::new(self.opened.between(source, disk.holes(), chains, &time)?);
        Ok(Mirrored { pivot, chains: None, layers, cipher_time, copy })
    }
}
