//! What a filter serves in place of a disk while another host has it: as many zeroes, which nobody can write.
//!
//! QEMU asks for a disk's size when it starts, and reads the firmware's variables, which come with the guest's memory. The guest
//! does not run meanwhile; a write would fail, and not be lost without a word.

use std::fs::File;
use std::os::fd::AsFd;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use vmseal_api::filter::Holes;
use vmseal_api::host::{DiskFacts, DiskSpec, VmSpec};
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use crate::storage::arriving::ArrivingDisk;
use crate::storage::builder::internal;
use crate::storage::locked::Access;
use crate::storage::mirror::GuestDisk;
use crate::storage::opening::{self, Open, data_offset};

/// A placeholder for a disk whose first byte is at `offset`.
///
/// # Errors
/// Those of the kernel.
pub fn file(disk: &DiskSpec, offset: u64) -> Result<File, Problem> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = File::from(memfd_create(c"placeholder of a disk", flags).map_err(internal)?);
    file.set_len(offset.saturating_add(disk.size)).map_err(internal)?;
    let seals = SealFlag::F_SEAL_WRITE
        | SealFlag::F_SEAL_SHRINK
        | SealFlag::F_SEAL_GROW
        | SealFlag::F_SEAL_SEAL;
    fcntl(file.as_fd(), FcntlArg::F_ADD_SEALS(seals)).map_err(internal)?;
    Ok(file)
}

/// A disk that another host uses, with its key and a placeholder for its image. Its header is read without a lock: nobody
/// changes that while the VM is on its way. Blocks.
///
/// # Errors
/// As [`opening::open`].
pub fn open(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    kek: Option<&SecretBytes>,
) -> Result<GuestDisk, Problem> {
    let open = opening::open(spec, disk, facts, kek, Access::BesideGuest)?;
    let file = file(disk, open.offset)?;
    let shared = crate::filter::Shared { own: None, key: open.shared.key };
    let open = Open { file, layers: Vec::new(), shared, ..open };
    Ok(GuestDisk { open, mirror: None, has_pivoted: false })
}

/// A disk that is being filled, with its key and a placeholder for its image.
///
/// # Errors
/// Those of the kernel.
pub fn of_arriving(arriving: &ArrivingDisk) -> Result<GuestDisk, Problem> {
    let offset = data_offset(&arriving.facts);
    let key = arriving.dek.as_ref().map(SecretBytes::to_memfd).transpose().map_err(internal)?;
    let open = Open {
        file: file(&arriving.disk, offset)?,
        layers: Vec::new(),
        offset,
        key: key.map(|key| (key, Holes::Zero)),
        notice: None,
        shared: crate::filter::Shared::default(),
    };
    Ok(GuestDisk { open, mirror: None, has_pivoted: false })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_placeholder_is_as_long_as_header_and_disk_and_cannot_be_written() {
        let disk = crate::rules::tests::disk("system");
        let file = file(&disk, 4096).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 4096 + disk.size);
        let mut bytes = [1; 512];
        file.read_exact_at(&mut bytes, 4096).unwrap();
        assert_eq!(bytes, [0; 512]);
        assert!(file.write_all_at(&bytes, 4096).is_err());
        assert!(file.set_len(1).is_err());
    }
}
