//! Changing the key that opens the sealed files of a VM: suspended memory, core dumps. Only key slots are written; frames stay
//! as they are.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use vmseal_api::host::VmSpec;
use vmseal_api::problem::Problem;
use vmseal_seal::file::{Header, SlotChange};
use vmseal_seal::slot::VmKey;

use crate::storage::file_error::failed;
use crate::storage::home::{CORE, Home, SNAPSHOT_MEMORY};
use crate::storage::locked::{Access, open_locked};
use crate::storage::sealed;

/// What to do about a file that does not open with the VM's key.
const REMEDY: &str = "Delete the core dump (vmseal dump delete), or give the saved memory up (vmseal vm start --discard-memory)";

/// A sealed file whose key slots may be changed.
pub struct SealedKeys {
    path: PathBuf,
    file: File,
    header: Header,
}

impl SealedKeys {
    /// Opens all of a VM that are whole. Blocks.
    ///
    /// # Errors
    /// `locked`: the key does not open one; `damaged`; `in-use`; those of the file system.
    pub fn open_all(spec: &VmSpec, key: &VmKey<'_>, access: Access) -> Result<Vec<Self>, Problem> {
        let homes = spec.disks().map(|disk| Home::of(&disk.datastore, spec.vm));
        let homes = homes.collect::<Result<Vec<_>, Problem>>()?;
        let files: BTreeSet<PathBuf> = homes.iter().flat_map(whole_files).collect();
        let (mut opened, mut inodes) = (Vec::new(), BTreeSet::new());
        for path in files {
            // A VM that was reverted to a snapshot is suspended with the snapshot's file, by another name.
            let inode = path.metadata().map(|metadata| (metadata.dev(), metadata.ino()));
            if inode.is_ok_and(|inode| !inodes.insert(inode)) {
                continue;
            }
            let Some(file) = open_locked(&path, access)? else { continue };
            let mut this = Self { header: read(&path, &file)?, path, file };
            this.opens(key)?;
            opened.push(this);
        }
        Ok(opened)
    }

    /// Whether a key opens it.
    fn opens(&mut self, key: &VmKey<'_>) -> Result<(), Problem> {
        let refused = |error| sealed::refused(&self.path, &error, REMEDY);
        // Nothing is to be added where the key opens it already.
        self.header.add_key(key, key).map(drop).map_err(refused)
    }

    /// Adds a key that opens it beside the registered one, and reads it back.
    ///
    /// # Errors
    /// As [`SealedKeys::open_all`].
    pub fn add(&mut self, registered: &VmKey<'_>, other: &VmKey<'_>) -> Result<(), Problem> {
        let changed = self.header.add_key(registered, other);
        let changed = changed.map_err(|error| sealed::refused(&self.path, &error, REMEDY))?;
        self.write(changed.as_slice())?;
        self.header = read(&self.path, &self.file)?;
        self.opens(other)
    }

    /// Has the registered key alone open it.
    ///
    /// # Errors
    /// As [`SealedKeys::open_all`].
    pub fn keep_only(&mut self, registered: &VmKey<'_>) -> Result<(), Problem> {
        let changes = self.header.keep_only(registered);
        let changes = changes.map_err(|error| sealed::refused(&self.path, &error, REMEDY))?;
        self.write(&changes)
    }

    fn write(&self, changes: &[SlotChange]) -> Result<(), Problem> {
        let written =
            changes.iter().try_for_each(|change| self.file.write_all_at(&change.bytes, change.at));
        written
            .and_then(|()| self.file.sync_all())
            .map_err(|error| failed(&self.path, "written", &error))
    }
}

fn read(path: &Path, file: &File) -> Result<Header, Problem> {
    struct FromBegin<'a>(&'a File, u64);
    impl std::io::Read for FromBegin<'_> {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            let length = self.0.read_at(into, self.1)?;
            self.1 += length as u64;
            Ok(length)
        }
    }
    let header = Header::read(&mut FromBegin(file, 0));
    header.map_err(|error| sealed::refused(path, &error, REMEDY))
}

/// A file of a VM that is whole and under its key, if there is one. Blocks.
///
/// # Errors
/// Those of the file system; `wrong-state` where a datastore is not there.
pub fn first_sealed(spec: &VmSpec) -> Result<Option<PathBuf>, Problem> {
    for disk in spec.disks() {
        for path in whole_files(&Home::of(&disk.datastore, spec.vm)?) {
            let Some(mut file) = open_locked(&path, Access::BesideGuest)? else { continue };
            if Header::read(&mut file).is_ok_and(|header| !header.keys().is_empty()) {
                return Ok(Some(path));
            }
        }
    }
    Ok(None)
}

/// The sealed files of a home that are whole; what is being written, or was used, is about to go.
fn whole_files(home: &Home) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(home.path()).into_iter().flatten().flatten();
    let cores = entries.map(|entry| entry.path()).filter(|path| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        name.is_some_and(|name| name.starts_with(CORE) || name.starts_with(SNAPSHOT_MEMORY))
            && path.extension().is_none_or(|it| it != "creating")
    });
    cores.chain([home.memory()]).collect()
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{DatastoreLocation, DatastoreSpec, Device};
    use vmseal_api::id::{DatastoreId, DumpId};
    use vmseal_api::problem::ErrorCode;
    use vmseal_secret::{KEK_LEN, SecretBytes};

    use super::*;
    use crate::keys;
    use crate::process::run_dir;
    use crate::storage::core_file::CoreFile;
    use crate::storage::datastore;

    /// A VM with a core dump, which its key opens.
    fn with_dump(directory: &Path) -> (VmSpec, SecretBytes, CoreFile) {
        let mut spec = run_dir::tests::spec();
        let kek = SecretBytes::random(KEK_LEN).unwrap();
        spec.key = Some(keys::reference_of(&kek, spec.vm, "old"));
        let location = DatastoreLocation::Dir { path: directory.to_owned() };
        let place = DatastoreSpec { datastore: DatastoreId::new(), location };
        datastore::probe(&place).unwrap();
        std::fs::create_dir(directory.join(spec.vm.to_string())).unwrap();
        spec.devices = vec![Device::Disk(run_dir::tests::disk("disk0", &place))];
        let file = CoreFile::of(&spec, DumpId::new()).unwrap();
        let mut writer = file.create(&spec, Some(&kek)).unwrap();
        writer.write(b"a guest's memory").unwrap();
        file.finish(writer).unwrap();
        // What an attempt has left does not matter.
        std::fs::write(file.path().with_added_extension("creating"), "half").unwrap();
        (spec, kek, file)
    }

    fn opens(file: &CoreFile, spec: &VmSpec, kek: &SecretBytes) -> Result<(), ErrorCode> {
        let mut content = Vec::new();
        file.decrypt((spec, Some(kek)), &mut content, |_| true).map_err(|problem| problem.code)?;
        assert_eq!(content, b"a guest's memory");
        Ok(())
    }

    fn key<'a>(spec: &'a VmSpec, kek: &'a SecretBytes) -> VmKey<'a> {
        VmKey { kek, context: keys::context(spec.vm, spec.key.as_ref().unwrap()) }
    }

    #[test]
    fn what_is_under_the_key_is_found_and_what_is_in_the_clear_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let (spec, _, file) = with_dump(directory.path());
        assert_eq!(first_sealed(&spec).unwrap().as_deref(), Some(file.path()));
        file.remove().unwrap();
        assert_eq!(first_sealed(&spec).unwrap(), None);
        let plain = VmSpec { key: None, ..spec.clone() };
        file.finish(file.create(&plain, None).unwrap()).unwrap();
        assert_eq!(first_sealed(&spec).unwrap(), None, "it needs no key");
    }

    #[test]
    fn both_keys_open_a_core_dump_until_the_former_one_is_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let (old, old_kek, file) = with_dump(directory.path());
        let with = |id: &str| {
            let kek = SecretBytes::random(KEK_LEN).unwrap();
            (VmSpec { key: Some(keys::reference_of(&kek, old.vm, id)), ..old.clone() }, kek)
        };
        // An attempt that was called off has left another key.
        for id in ["left", "new"] {
            let (new, new_kek) = with(id);
            let mut all = SealedKeys::open_all(&old, &key(&old, &old_kek), Access::Write).unwrap();
            assert_eq!(all.len(), 1);
            all[0].add(&key(&old, &old_kek), &key(&new, &new_kek)).unwrap();
            all[0].add(&key(&old, &old_kek), &key(&new, &new_kek)).unwrap();
            drop(all);
            opens(&file, &old, &old_kek).unwrap();
            opens(&file, &new, &new_kek).unwrap();
            if id == "new" {
                let mut all =
                    SealedKeys::open_all(&new, &key(&new, &new_kek), Access::Write).unwrap();
                all[0].keep_only(&key(&new, &new_kek)).unwrap();
                all[0].keep_only(&key(&new, &new_kek)).unwrap();
                drop(all);
                opens(&file, &new, &new_kek).unwrap();
                assert_eq!(opens(&file, &old, &old_kek), Err(ErrorCode::Locked));
            }
        }
        let refused = SealedKeys::open_all(&old, &key(&old, &old_kek), Access::Read).err().unwrap();
        assert_eq!(refused.code, ErrorCode::Locked, "{refused}");
    }
}
