//! Opens what a disk is converted with, in the file that it has.

use vmseal_api::filter::{BackendSpec, ConvertSpec, Direct, DiskConfig, IN_PLACE_JOURNAL};

use crate::copy::in_place::{InPlace, PART_MAX, Side};
use crate::disk::allocation::Allocation;
use crate::disk::stack::Stack;
use crate::disk::{Disk, DiskStorage};
use crate::handle::Handles;
use crate::process::open_stack::{Layers, layers_of, storage};
use crate::process::{StartError, config};
use crate::stack::chain::Chain;
use crate::storage::file::FileDisk;

/// Opens the disk as it is to be, and the journal; `from` is the disk as it was.
pub(super) fn open(
    config: &DiskConfig,
    spec: &ConvertSpec,
    from: &Disk,
    handles: &mut Handles,
) -> Result<InPlace, StartError> {
    let (id, size, pools) = (config.disk, config.size, config::pools(config));
    let failed = |error| StartError::Chain { disk: id, error };
    let chain = |size, layers: Layers, storage: DiskStorage| -> Result<Chain, StartError> {
        Disk::of(Stack::new(layers, storage, size), false, pools).chain().map_err(failed)
    };
    let offset = |backend: &BackendSpec| match backend {
        BackendSpec::File { offset, keeps_room, .. } => (*offset, *keeps_room),
        BackendSpec::Qcow2 { .. } | BackendSpec::Nbd { .. } | BackendSpec::Mem {} => (0, false),
    };
    let (from_offset, _) = offset(&config.backend);
    let (to_offset, keeps_room) = offset(&spec.into.backend);
    let to = storage(id, size, false, &spec.into.backend, handles)?.storage;
    // The configuration's check lets only encryption through, no copies.
    let to_layers = layers_of(id, &spec.into.chain, handles, |_| None)?;
    let journal = handles.file(&spec.journal, true).map_err(|error| {
        let what = format!("disk {id}, the journal of its conversion");
        StartError::Handle { what, error }
    })?;
    let opened = FileDisk::open(journal, 0, IN_PLACE_JOURNAL, Direct::Auto, false);
    let journal = opened.map_err(|error| StartError::Open { disk: id, error })?;
    let from_parts = Box::new(Allocation::of(from.storage(), config::keeps_zeroes(&config.chain)));
    // A hole of the file reads as zeroes in the disk as it is to be, which the configuration's check has seen to.
    let to_parts = Box::new(Allocation::of(&to, true));
    Ok(InPlace {
        from: Side { chain: from.chain().map_err(failed)?, parts: from_parts, offset: from_offset },
        to: Side { chain: chain(size, to_layers, to)?, parts: to_parts, offset: to_offset },
        stored: chain(size, Layers::new(), from.storage().clone())?,
        journal: chain(IN_PLACE_JOURNAL, Layers::new(), DiskStorage::File(journal))?,
        overwrites: config.chain.is_empty(),
        keeps_room,
        rate: spec.bytes_per_second,
        part: PART_MAX,
    })
}
