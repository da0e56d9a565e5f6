//! How much room is taken by what a VM has beside its disks as they are: what snapshots keep, and saved memory. Nothing is opened.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use vmseal_api::host::{KeptOfDisk, KeptRoom, PlacedDisk};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::Problem;

use crate::storage::home::Home;
use crate::storage::layers;

/// Measures it for these disks of a VM. Blocks.
///
/// # Errors
/// Those of the notes of layers, and of the file system.
pub fn measure(vm: VmId, disks: &[PlacedDisk]) -> Result<KeptRoom, Problem> {
    let (mut kept, mut homes) = (KeptRoom::default(), BTreeSet::new());
    for PlacedDisk { disk, datastore } in disks {
        let home = Home::of(datastore, vm)?;
        kept.disks.extend(of_disk(&home, *disk)?);
        if homes.insert(home.path().to_owned()) {
            let memories = home.snapshot_memories()?.into_values().chain([home.memory()]);
            let taken = memories.map(|path| room(&path)).fold(0, u64::saturating_add);
            kept.memories = kept.memories.saturating_add(taken);
        }
    }
    Ok(kept)
}

/// What files of a disk take that nobody writes; none where the disk is its image.
fn of_disk(home: &Home, disk: DiskId) -> Result<Option<KeptOfDisk>, Problem> {
    let known = layers::read(home, disk)?;
    if known.is_empty() {
        return Ok(None);
    }
    let image = match known.base().map(|base| base.files.len()) {
        Some(count) => {
            let files = (0..count).map(|place| room(&home.base(disk, place, count)));
            files.fold(0, u64::saturating_add)
        }
        // After a revert to it, it may be what is written.
        None if known.active().is_none() => 0,
        None => room(&home.image(disk)),
    };
    let layers = known.unwritten().into_iter().map(|layer| layers::room(home, disk, layer));
    let layers = layers.fold(0, u64::saturating_add);
    Ok(Some(KeptOfDisk { disk, image, layers }))
}

/// How much room a file takes, in bytes; 0 where it is not there.
fn room(path: &Path) -> u64 {
    path.symlink_metadata().map_or(0, |metadata| metadata.blocks().saturating_mul(512))
}
