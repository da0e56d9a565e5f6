//! Opens what a disk is converted with, in the file that it has.

use vmseal_api::filter::{BackendSpec, ConvertSpec, Direct, DiskConfig, IN_PLACE_JOURNAL};

use crate::copy::in_place::{InPlace, PART_MAX, Side};
use crate::disk::Disk;
use crate::disk::allocation::Allocation;
use crate::handle::Handles;
use crate::layers::stack::Stack;
use crate::process::open_stack::{OpenedStack, WantedStack, open_without_legs};
use crate::process::{StartError, config};
use crate::stack::chain::Chain;
use crate::storage::DiskStorage;
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
    let chain = |stack: Stack| -> Result<Chain, StartError> {
        Disk::of(stack, false, pools).chain().map_err(failed)
    };
    let offset = |backend: &BackendSpec| match backend {
        BackendSpec::File { offset, keeps_room, .. } => (*offset, *keeps_room),
        BackendSpec::Qcow2 { .. } | BackendSpec::Nbd { .. } | BackendSpec::Mem {} => (0, false),
    };
    let (from_offset, _) = offset(&config.backend);
    let (to_offset, keeps_room) = offset(&spec.into.backend);
    let (into, what) = (&spec.into, "what it is to be");
    let (chain_to, backend) = (&into.chain[..], &into.backend);
    let wanted = WantedStack { disk: id, what, size, read_only: false, chain: chain_to, backend };
    let OpenedStack { stack: to, .. } = open_without_legs(wanted, handles)?;
    let journal = handles.file(&spec.journal, true).map_err(|error| {
        let what = format!("disk {id}, the journal of its conversion");
        StartError::Handle { what, error }
    })?;
    let opened = FileDisk::open(journal, 0, IN_PLACE_JOURNAL, Direct::Auto, false);
    let what = "the journal of its conversion";
    let journal = opened.map_err(|error| StartError::Open { disk: id, what, error })?;
    let from_parts = Box::new(Allocation::of(from.storage(), config::keeps_zeroes(&config.chain)));
    // A hole of the file reads as zeroes in the disk as it is to be, which the configuration's check has seen to.
    let to_parts = Box::new(Allocation::of(to.storage(), true));
    Ok(InPlace {
        from: Side { chain: from.chain().map_err(failed)?, parts: from_parts, offset: from_offset },
        to: Side { chain: chain(to)?, parts: to_parts, offset: to_offset },
        stored: chain(Stack::new(Vec::new(), from.storage().clone(), size))?,
        journal: chain(Stack::new(Vec::new(), DiskStorage::File(journal), IN_PLACE_JOURNAL))?,
        overwrites: config.chain.is_empty(),
        keeps_room,
        rate: spec.bytes_per_second,
        part: PART_MAX,
    })
}
