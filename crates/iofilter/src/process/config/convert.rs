//! Checks the configuration of a disk that is converted in its file.

use vmseal_api::filter::{BackendSpec, CRYPT_SECTOR, DiskConfig, FilterSpec, Holes};

use super::encrypts_only;

/// Checks what is converted, and that nothing else is done with the disk.
pub(super) fn check(disk: &DiskConfig) -> Result<(), String> {
    let Some(convert) = &disk.convert else { return Ok(()) };
    let used = disk.front_end.is_some()
        || disk.import.is_some()
        || disk.export.is_some()
        || disk.merge.is_some();
    if disk.read_only || used || !encrypts_only(&disk.chain) || !encrypts_only(&convert.into.chain)
    {
        return Err(
            "a disk that is converted must be writable, without filters but encryption, and neither served, filled, exported nor merged"
                .into(),
        );
    }
    let offset = |backend: &BackendSpec| match backend {
        BackendSpec::File { offset, .. } => Some(*offset),
        BackendSpec::Qcow2 { .. } | BackendSpec::Nbd { .. } | BackendSpec::Mem {} => None,
    };
    let (Some(from), Some(to)) = (offset(&disk.backend), offset(&convert.into.backend)) else {
        return Err("only a raw file can be converted in its place".into());
    };
    if !from.abs_diff(to).is_multiple_of(u64::from(CRYPT_SECTOR)) {
        return Err(format!("its data cannot move from {from} to {to}"));
    }
    let noise = |link: &FilterSpec| matches!(link, FilterSpec::Crypt { holes, .. } if *holes != Holes::Zero);
    if convert.into.chain.iter().any(noise) {
        return Err("its holes would be noise: what it is to be must read them as zeroes".into());
    }
    if convert.bytes_per_second == Some(0) {
        return Err("a conversion of 0 bytes a second has no end".into());
    }
    Ok(())
}
