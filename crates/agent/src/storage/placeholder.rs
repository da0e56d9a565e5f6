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

/// A disk that another host uses, with its key and a placeholder for its image. Blocks.
///
/// # Errors
/// As [`opening::open`].
pub fn open(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    kek: Option<&SecretBytes>,
) -> Result<GuestDisk, Problem> {
    let open = look_at(spec, disk, facts, kek)?;
    let file = file(disk, open.offset)?;
    let shared = crate::filter::Shared { own: None, key: open.shared.key };
    let open = Open { file, layers: Vec::new(), shared, ..open };
    Ok(GuestDisk { open, mirror: None, has_pivoted: false })
}

/// A disk that another host uses. Its header is read without a lock: nobody changes that while the VM is on its way. Nothing of it is
/// opened to be written: where it is an image in a pool of Ceph, the other host has the exclusive lock of that until the guest is
/// handed over (docs/decisions/256).
fn look_at(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    kek: Option<&SecretBytes>,
) -> Result<Open, Problem> {
    opening::open(spec, disk, facts, kek, Access::ReadBesideGuest)
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

    use uuid::Uuid;
    use vmseal_api::host::{DatastoreLocation, Device};
    use vmseal_api::id::SnapshotId;
    use vmseal_api::problem::ErrorCode;
    use vmseal_luks::Identity;
    use vmseal_secret::{DEK_LEN, KEK_LEN};

    use super::*;
    use crate::keys;
    use crate::storage::datastore;
    use crate::storage::facts::to_api;
    use crate::storage::home::Home;
    use crate::storage::layers::{begin_layer, put_active};
    use crate::storage::locked::open_once;

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

    /// A VM with an encrypted disk, of which a snapshot keeps the image.
    fn with_snapshot(directory: &std::path::Path, kek: &SecretBytes) -> (VmSpec, DiskFacts) {
        let mut disk = crate::rules::tests::disk("system");
        disk.datastore.location = DatastoreLocation::Dir { path: directory.to_owned() };
        disk.encrypted = true;
        datastore::probe(&disk.datastore).unwrap();
        let mut spec = crate::process::run_dir::tests::spec();
        spec.key = Some(keys::reference_of(kek, spec.vm, "key"));
        spec.devices = vec![Device::Disk(disk.clone())];
        let home = Home::of(&disk.datastore, spec.vm).unwrap();
        let mut file = home.begin(&spec, &disk, vmseal_luks::DATA_OFFSET + disk.size).unwrap();
        let dek = SecretBytes::random(DEK_LEN).unwrap();
        let context = keys::context(spec.vm, spec.key.as_ref().unwrap());
        let identity = Identity {
            disk: disk.disk.0,
            holes: vmseal_luks::Holes::Zero,
            shared: false,
            role: Default::default(),
        };
        let facts =
            vmseal_luks::create(&mut file, disk.size, &dek, kek, &context, identity).unwrap();
        home.finish(disk.disk, &file).unwrap();
        drop(file);
        let layer = begin_layer(&home, disk.disk, None).unwrap();
        put_active(&home, disk.disk, layer, Some((SnapshotId::new(), Uuid::now_v7()))).unwrap();
        (spec, to_api(&facts))
    }

    #[test]
    fn of_a_disk_that_another_host_writes_nothing_is_opened_to_be_written() {
        let directory = tempfile::tempdir().unwrap();
        let kek = SecretBytes::random(KEK_LEN).unwrap();
        let (spec, facts) = with_snapshot(directory.path(), &kek);
        let disk = spec.disk_at(0).unwrap();
        // The other host has it.
        let guest = opening::open(&spec, disk, &facts, Some(&kek), Access::Write).unwrap();
        let looked = look_at(&spec, disk, &facts, Some(&kek)).unwrap();
        assert_eq!(looked.layers.len(), 1);
        for file in looked.layers.iter().chain([&looked.file]) {
            let refused = file.write_all_at(b"other", 0).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::EBADF), "{refused}");
        }
        let placeholder = open(&spec, disk, &facts, Some(&kek)).unwrap().open;
        assert!(placeholder.key.is_some() && placeholder.layers.is_empty());
        assert_eq!(placeholder.offset, data_offset(&facts));
        // Its lock is still the other host's.
        let image = Home::of(&disk.datastore, spec.vm).unwrap().image(disk.disk);
        assert_eq!(open_once(&image, Access::Write).unwrap_err().code, ErrorCode::InUse);
        drop(guest);
    }
}
