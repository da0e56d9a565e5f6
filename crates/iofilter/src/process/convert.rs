//! Opens what a disk is converted with, in the file that it has.

use vmseal_api::filter::{BackendSpec, ConvertSpec, Direct, DiskConfig, IN_PLACE_JOURNAL};

use crate::copy::in_place::{InPlace, PART_MAX, Side};
use crate::disk::allocation::Allocation;
use crate::disk::{Disk, DiskStorage, Encryption};
use crate::handle::Handles;
use crate::process::{StartError, config, encryption, storage};
use crate::stack::chain::Chain;
use crate::storage::file::FileDisk;

/// Opens the disk as it is to be, and the journal; `from` is the disk as it was.
pub(super) fn open(
    config: &DiskConfig,
    spec: &ConvertSpec,
    (from, from_encryption): (&DiskStorage, Option<&Encryption>),
    handles: &mut Handles,
) -> Result<InPlace, StartError> {
    let (id, size, pools) = (config.disk, config.size, config::pools(config));
    let chain = |size, encryption, storage| -> Result<Chain, StartError> {
        let disk = Disk::new(size, false, encryption, storage, pools);
        disk.chain().map_err(|error| StartError::Crypt { disk: id, error })
    };
    let offset = |backend: &BackendSpec| match backend {
        BackendSpec::File { offset, keeps_room, .. } => (*offset, *keeps_room),
        BackendSpec::Qcow2 { .. } | BackendSpec::Mem {} => (0, false),
    };
    let (from_offset, _) = offset(&config.backend);
    let (to_offset, keeps_room) = offset(&spec.into.backend);
    let to = storage(id, size, false, &spec.into.backend, handles)?.storage;
    let to_encryption = encryption(id, &spec.into.chain, handles)?;
    let journal = handles.file(&spec.journal, true).map_err(|error| {
        let what = format!("disk {id}, the journal of its conversion");
        StartError::Handle { what, error }
    })?;
    let opened = FileDisk::open(journal, 0, IN_PLACE_JOURNAL, Direct::Auto, false);
    let journal = opened.map_err(|error| StartError::Open { disk: id, error })?;
    let again = |encryption: &Encryption| {
        let key = encryption
            .key
            .try_clone()
            .map_err(|error| StartError::System(std::io::Error::other(error.to_string())))?;
        Ok::<_, StartError>(Encryption { key, holes: encryption.holes })
    };
    let was_encrypted = from_encryption.is_some();
    let from_parts = Box::new(Allocation::of(from, from_encryption));
    // A hole of the file reads as zeroes in the disk as it is to be, which the configuration's check has seen to.
    let to_parts = Box::new(Allocation::of(&to, None));
    Ok(InPlace {
        from: Side {
            chain: chain(size, from_encryption.map(again).transpose()?, from.clone())?,
            parts: from_parts,
            offset: from_offset,
        },
        to: Side { chain: chain(size, to_encryption, to)?, parts: to_parts, offset: to_offset },
        stored: chain(size, None, from.clone())?,
        journal: chain(IN_PLACE_JOURNAL, None, DiskStorage::File(journal))?,
        overwrites: !was_encrypted,
        keeps_room,
        rate: spec.bytes_per_second,
        part: PART_MAX,
    })
}
