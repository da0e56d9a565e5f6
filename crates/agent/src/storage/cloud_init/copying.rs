//! The disk for cloud-init of a clone. That of the other VM, which no guest writes to, is decrypted in locked memory; a new image
//! gets its documents, in which the clone is named.

use std::os::unix::fs::FileExt;

use vmseal_api::cloud_init::CLOUD_INIT_DISK_SIZE;
use vmseal_api::filter::Holes;
use vmseal_api::host::VmSpec;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::xts::{Direction, SECTOR, Xts, XtsError};
use vmseal_secret::{DEK_LEN, LockedFile, SecretBytes};
use zeroize::Zeroizing;

use super::{image_of, reading};
use crate::storage::builder::internal;
use crate::storage::cloning::Lent;
use crate::storage::image::Image;
use crate::storage::locked::Access;
use crate::storage::mirror::{as_it_is, has_its_names};
use crate::storage::opening;

/// The image of a disk of this size, in bytes, with what `lent` tells its guest, for a clone of its VM. Blocks.
///
/// # Errors
/// `damaged` where vmseal has not made what is on it; those of the other disk; `no-space` where the documents do not fit.
pub fn copied(lent: &Lent, clone: &VmSpec, size: u64) -> Result<Image, Problem> {
    let mut memory = decrypted(lent)?;
    let documents = reading::documents(memory.expose_mut());
    let documents = documents.map_err(|why| refused(lent, &why.to_string()))?;
    image_of(&documents.for_clone(clone.vm, &clone.name), size)
}

fn refused(lent: &Lent, why: &str) -> Problem {
    let (disk, vm) = (&lent.disk.name, &lent.spec.name);
    let what = format!(
        "disk '{disk}' of VM '{vm}' is not as vmseal makes disks for cloud-init ({why}): give the clone data of its own (--ssh-key, --cloud-init)"
    );
    Problem::new(ErrorCode::Damaged, what)
}

/// What the disk holds.
fn decrypted(lent: &Lent) -> Result<LockedFile, Problem> {
    if !has_its_names(&lent.spec, &lent.disk)? {
        let (disk, vm) = (&lent.disk.name, &lent.spec.name);
        let what =
            format!("disk '{disk}' of VM '{vm}' has just been copied: try again in a moment");
        return Err(Problem::new(ErrorCode::TimedOut, what));
    }
    let (disk, facts) = as_it_is(&lent.spec, &lent.disk, &lent.facts, Access::Read)?;
    if disk.size > CLOUD_INIT_DISK_SIZE {
        return Err(refused(lent, "it is longer"));
    }
    let open = opening::open_beside(&lent.spec, &disk, &facts, lent.kek.as_ref())?;
    if !open.layers.is_empty() {
        return Err(refused(lent, "it has layers"));
    }
    let length = usize::try_from(disk.size).map_err(internal)?;
    let mut memory = LockedFile::zeroed(length).map_err(internal)?;
    let read = open.file.read_exact_at(memory.expose_mut(), open.offset);
    read.map_err(|error| refused(lent, &format!("it cannot be read: {error}")))?;
    if let Some((key, holes)) = &open.key {
        let dek = SecretBytes::from_memfd(key, DEK_LEN).map_err(internal)?;
        decrypt(memory.expose_mut(), &dek, *holes).map_err(internal)?;
    }
    Ok(memory)
}

/// Decrypts what a disk holds, from its first sector on.
fn decrypt(data: &mut [u8], dek: &SecretBytes, holes: Holes) -> Result<(), XtsError> {
    let mut cipher = Xts::new(dek.expose(), Direction::Decrypt)?;
    let mut opened = Zeroizing::new([0; SECTOR]);
    for (index, sector) in data.chunks_exact_mut(SECTOR).enumerate() {
        let Ok(sealed) = <&[u8; SECTOR]>::try_from(&*sector) else { continue };
        if holes == Holes::Zero && sealed.iter().all(|byte| *byte == 0) {
            continue;
        }
        cipher.one((index * SECTOR) as u64, sealed, &mut opened)?;
        sector.copy_from_slice(&*opened);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use vmseal_api::cloud_init::Documents;
    use vmseal_api::host::{
        Allocation, DatastoreLocation, DatastoreSpec, DiskFacts, DiskRole, DiskSpec,
    };
    use vmseal_api::id::{DatastoreId, DiskId, VmId};
    use vmseal_luks::Identity;
    use vmseal_secret::KEK_LEN;

    use super::super::write;
    use super::*;
    use crate::keys;
    use crate::storage::datastore;
    use crate::storage::facts::to_api;
    use crate::storage::home::Home;

    /// Encrypts as a filter does: holes stay zeroes.
    fn encrypt(data: &mut [u8], dek: &SecretBytes) {
        let mut cipher = Xts::new(dek.expose(), Direction::Encrypt).unwrap();
        for (index, sector) in data.chunks_exact_mut(SECTOR).enumerate() {
            let plain = <[u8; SECTOR]>::try_from(&*sector).unwrap();
            if plain.iter().any(|byte| *byte != 0) {
                let sector = <&mut [u8; SECTOR]>::try_from(sector).unwrap();
                cipher.one((index * SECTOR) as u64, &plain, sector).unwrap();
            }
        }
    }

    /// A disk of a VM that holds this, and its open image, with the lock of who serves it.
    fn made(
        directory: &std::path::Path,
        encrypted: bool,
        mut data: Vec<u8>,
    ) -> (Lent, std::fs::File) {
        let location = DatastoreLocation::Dir { path: directory.to_owned() };
        let place = DatastoreSpec { datastore: DatastoreId::new(), location };
        datastore::probe(&place).unwrap();
        let kek = SecretBytes::random(KEK_LEN).unwrap();
        let mut spec = crate::process::run_dir::tests::spec();
        let key = keys::reference_of(&kek, spec.vm, "k");
        spec.key = Some(key.clone());
        let context = keys::context(spec.vm, &key);
        let disk = DiskSpec {
            disk: DiskId::new(),
            name: "cloud-init".to_owned(),
            datastore: place.clone(),
            size: data.len() as u64,
            encrypted,
            allocation: Allocation::Thin,
            role: DiskRole::CloudInit,
            limits: Default::default(),
            cache: None,
            replica: None,
            facts: None,
        };
        let home = Home::of(&place, spec.vm).unwrap();
        let offset = if encrypted { vmseal_luks::DATA_OFFSET } else { 0 };
        let mut file = home.begin(&spec, &disk, offset + disk.size).unwrap();
        let facts = if encrypted {
            let dek = SecretBytes::random(DEK_LEN).unwrap();
            let identity = Identity {
                disk: disk.disk.0,
                holes: vmseal_luks::Holes::Zero,
                shared: false,
                role: Default::default(),
            };
            let made = vmseal_luks::create(&mut file, disk.size, &dek, &kek, &context, identity);
            encrypt(&mut data, &dek);
            to_api(&made.unwrap())
        } else {
            DiskFacts::Raw
        };
        file.write_all_at(&data, offset).unwrap();
        home.finish(disk.disk, &file).unwrap();
        let (kek, snapshot) = (Some(kek), None);
        (Lent { spec, disk, facts, kek, snapshot, linked: false }, file)
    }

    #[test]
    fn a_clone_is_told_what_the_other_vm_is_and_has_its_own_name_while_that_runs() {
        let documents = Documents {
            user_data: "#cloud-config\n# secret\n".to_owned().into(),
            meta_data: "instance-id: web\nlocal-hostname: web\nown: 1\n".to_owned().into(),
            network_config: Some("version: 2\n".to_owned().into()),
        };
        let mut data = vec![0; CLOUD_INIT_DISK_SIZE as usize];
        write(&mut data, &documents).unwrap();
        for encrypted in [false, true] {
            let directory = tempfile::tempdir().unwrap();
            let (lent, _served) = made(directory.path(), encrypted, data.clone());
            let (vm, name) = (VmId::new(), "copy".to_owned());
            let clone = VmSpec { vm, name, ..lent.spec.clone() };
            let image = copied(&lent, &clone, CLOUD_INIT_DISK_SIZE).unwrap();
            let mut content = Vec::new();
            image.file.try_clone().unwrap().read_to_end(&mut content).unwrap();
            let found = reading::documents(&content).unwrap();
            assert_eq!(found, documents.for_clone(vm, "copy"));
            let expected = format!("own: 1\ninstance-id: {vm}\nlocal-hostname: \"copy\"\n");
            assert_eq!(found.meta_data.expose(), expected);
        }
    }

    #[test]
    fn what_vmseal_has_not_made_is_not_copied() {
        let directory = tempfile::tempdir().unwrap();
        let other = vec![0; CLOUD_INIT_DISK_SIZE as usize];
        let (mut lent, _served) = made(directory.path(), false, other);
        let refused = copied(&lent, &lent.spec, CLOUD_INIT_DISK_SIZE).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Damaged);
        assert!(refused.detail.contains("give the clone data of its own"), "{refused}");
        // A raw image is not taken for what must be encrypted.
        lent.disk.encrypted = true;
        let refused = copied(&lent, &lent.spec, CLOUD_INIT_DISK_SIZE).unwrap_err();
        assert!(refused.detail.contains("must be encrypted"), "{refused}");
    }

    #[test]
    fn sectors_are_decrypted_at_their_places_and_holes_stay_zeroes() {
        let dek = SecretBytes::random(DEK_LEN).unwrap();
        let plain: Vec<u8> = (0..3 * SECTOR).map(|at| (at / SECTOR) as u8).collect();
        let mut disk = plain.clone();
        encrypt(&mut disk, &dek);
        assert_ne!(disk, plain);
        decrypt(&mut disk, &dek, Holes::Zero).unwrap();
        assert_eq!(disk, plain);
        // Where a hole is ciphertext it is noise.
        decrypt(&mut disk, &dek, Holes::Ciphertext).unwrap();
        assert_ne!(disk[..SECTOR], plain[..SECTOR]);
    }
}
