//! The core dumps of a VM: sealed files (docs/formats/sealed-file.md) in the home of its first disk. The content is what QEMU
//! writes.
//!
//! ```text
//! <datastore>/<vm id>/vm.core-<dump id>.creating  it is being written, or debris of that
//! <datastore>/<vm id>/vm.core-<dump id>           whole
//! ```

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use vmseal_api::atomic_file;
use vmseal_api::host::{DiskSpec, VmSpec};
use vmseal_api::id::{DumpId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_seal::file::{Identity, Kind};
use vmseal_seal::frame::CONTENT_MAX;
use vmseal_seal::stream::{SealedReader, SealedWriter};
use vmseal_secret::SecretBytes;

use crate::rules;
use crate::storage::home::Home;
use crate::storage::locked::make_locked;
use crate::storage::mark::failed;
use crate::storage::sealed::{self, remove_if_there, vm_key};

/// What to do about a core dump that does not open.
const REMEDY: &str = "It cannot be decrypted any more: delete it (vmseal dump delete)";

/// A core dump.
#[derive(Clone, Debug)]
pub struct CoreFile {
    vm: VmId,
    path: PathBuf,
}

/// One that is being written.
pub struct CoreWriter(SealedWriter<BufWriter<File>>);

impl CoreFile {
    /// That of a dump: where it is, among the homes of the VM's disks, and else where it will be.
    ///
    /// # Errors
    /// `wrong-state` where the VM has no disk, or a datastore is not there.
    pub fn of(spec: &VmSpec, dump: DumpId) -> Result<Self, Problem> {
        let of_disk = |disk: &DiskSpec| {
            let path = Home::of(&disk.datastore, spec.vm)?.core(dump);
            Ok::<_, Problem>(Self { vm: spec.vm, path })
        };
        for disk in spec.disks() {
            let here = of_disk(disk)?;
            if here.length()?.is_some() {
                return Ok(here);
            }
        }
        let first = spec.disks().next().ok_or_else(|| {
            let what = "has no disk, and core dumps are written beside its first one";
            rules::wrong_state(spec, what)
        })?;
        of_disk(first)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn creating(&self) -> PathBuf {
        self.path.with_added_extension("creating")
    }

    /// The length of a whole one, in bytes; none where there is none.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn length(&self) -> Result<Option<u64>, Problem> {
        match self.path.symlink_metadata() {
            Ok(metadata) => Ok(Some(metadata.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(&self.path, "looked for", &error)),
        }
    }

    /// Begins to write it: what an attempt before has left is replaced.
    ///
    /// # Errors
    /// Those of the file system; `locked`.
    pub fn create(&self, spec: &VmSpec, kek: Option<&SecretBytes>) -> Result<CoreWriter, Problem> {
        let path = self.creating();
        remove_if_there(&path)?;
        let file = BufWriter::new(make_locked(&path)?);
        let identity = Identity { vm: self.vm.0, kind: Kind::Core, generation: 0 };
        let writer = vmseal_seal::file::create(file, identity, vm_key(spec, kek)?.as_ref());
        Ok(CoreWriter(writer.map_err(|error| sealed::refused(&path, &error, REMEDY))?))
    }

    /// Writes the end, flushes, and gives the file its name; returns its length.
    ///
    /// # Errors
    /// Those of the file system; `no-space`.
    pub fn finish(&self, writer: CoreWriter) -> Result<u64, Problem> {
        let path = self.creating();
        let buffered = writer.0.finish();
        buffered
            .and_then(|buffered| buffered.into_inner().map_err(io::IntoInnerError::into_error))
            .and_then(|file| file.sync_all())
            .and_then(|()| std::fs::rename(&path, &self.path))
            .and_then(|()| atomic_file::flush_directory_of(&self.path))
            .map_err(|error| failed(&path, "written", &error))?;
        Ok(self.length()?.unwrap_or_default())
    }

    /// Removes it, whole or not.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn remove(&self) -> Result<(), Problem> {
        remove_if_there(&self.creating())?;
        remove_if_there(&self.path)?;
        match atomic_file::flush_directory_of(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed(&self.path, "removed", &error))
            }
            _ => Ok(()),
        }
    }

    /// Writes what it holds to a file, up to its authenticated end. `progress` gets the bytes of it that are read, and returns
    /// whether to go on.
    ///
    /// # Errors
    /// `not-found`, `locked`, `damaged`; `cancelled`; those of the file system.
    pub fn decrypt(
        &self,
        (spec, kek): (&VmSpec, Option<&SecretBytes>),
        to: &mut impl Write,
        mut progress: impl FnMut(u64) -> bool,
    ) -> Result<(), Problem> {
        let path = &self.path;
        if self.length()?.is_none() {
            let what = format!("{} is not there: the core dump was removed", path.display());
            return Err(Problem::new(ErrorCode::NotFound, what));
        }
        let key = vm_key(spec, kek)?;
        let mut reader: SealedReader<File> =
            vmseal_seal::file::open(sealed::open(path)?, self.vm.0, Kind::Core, key.as_ref())
                .map_err(|error| sealed::refused(path, &error, REMEDY))?;
        let mut part = zeroize::Zeroizing::new(vec![0; CONTENT_MAX]);
        let mut done = 0;
        loop {
            let length = reader
                .read(&mut part)
                .map_err(|error| sealed::unreadable(path, "the core dump", &error, REMEDY))?;
            if length == 0 {
                return Ok(());
            }
            to.write_all(&part[..length]).map_err(|error| failed(path, "decrypted", &error))?;
            done += length as u64;
            if !progress(done) {
                return Err(Problem::new(ErrorCode::Cancelled, "the core dump is not decrypted"));
            }
        }
    }
}

impl CoreWriter {
    /// Writes a part.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn write(&mut self, part: &[u8]) -> io::Result<()> {
        self.0.write_all(part)
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{Allocation, DatastoreLocation, DatastoreSpec, Device};
    use vmseal_api::id::{DatastoreId, DiskId};
    use vmseal_secret::KEK_LEN;

    use super::*;
    use crate::keys;

    struct Bench {
        _directory: tempfile::TempDir,
        spec: VmSpec,
        kek: SecretBytes,
    }

    impl Bench {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let mut spec = crate::process::run_dir::tests::spec();
            let kek = SecretBytes::random(KEK_LEN).unwrap();
            spec.key = Some(keys::reference_of(&kek, spec.vm, "key"));
            let location = DatastoreLocation::Dir { path: directory.path().to_owned() };
            let datastore = DatastoreSpec { datastore: DatastoreId::new(), location };
            crate::storage::datastore::probe(&datastore).unwrap();
            let disk = DiskSpec {
                disk: DiskId::new(),
                name: "disk0".to_owned(),
                datastore,
                size: 1 << 20,
                encrypted: true,
                allocation: Allocation::Thin,
                role: Default::default(),
                limits: Default::default(),
                cache: None,
                replica: None,
                facts: None,
            };
            spec.devices = vec![Device::Disk(disk)];
            std::fs::create_dir(directory.path().join(spec.vm.to_string())).unwrap();
            Self { _directory: directory, spec, kek }
        }

        fn file(&self, dump: DumpId) -> CoreFile {
            CoreFile::of(&self.spec, dump).unwrap()
        }

        fn write(&self, dump: DumpId, content: &[u8]) -> CoreFile {
            let file = self.file(dump);
            let mut writer = file.create(&self.spec, Some(&self.kek)).unwrap();
            writer.write(content).unwrap();
            let length = file.finish(writer).unwrap();
            assert_eq!(file.length().unwrap(), Some(length));
            file
        }

        fn read(&self, file: &CoreFile) -> Result<Vec<u8>, Problem> {
            let mut content = Vec::new();
            file.decrypt((&self.spec, Some(&self.kek)), &mut content, |_| true).map(|()| content)
        }
    }

    #[test]
    fn a_core_dump_is_ciphertext_and_gives_back_what_was_written() {
        let bench = Bench::new();
        let content = b"a marker of the guest".repeat(100_000);
        let file = bench.write(DumpId::new(), &content);
        let stored = std::fs::read(&file.path).unwrap();
        assert!(!stored.windows(21).any(|part| part == b"a marker of the guest"));
        assert!(bench.read(&file).unwrap() == content);
        file.remove().unwrap();
        assert_eq!(file.length().unwrap(), None);
        assert_eq!(bench.read(&file).unwrap_err().code, ErrorCode::NotFound);
        file.remove().unwrap();
    }

    #[test]
    fn what_was_changed_cut_or_belongs_to_another_key_is_refused() {
        let bench = Bench::new();
        let file = bench.write(DumpId::new(), &[7; 500_000]);
        let whole = std::fs::read(&file.path).unwrap();
        for at in [4096 + 20, whole.len() - 1] {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            std::fs::write(&file.path, changed).unwrap();
            assert_eq!(bench.read(&file).unwrap_err().code, ErrorCode::Damaged, "at {at}");
        }
        std::fs::write(&file.path, &whole[..whole.len() - 32]).unwrap();
        assert_eq!(bench.read(&file).unwrap_err().code, ErrorCode::Damaged, "without its end");
        std::fs::write(&file.path, &whole).unwrap();
        let other = SecretBytes::random(KEK_LEN).unwrap();
        let mut spec = bench.spec.clone();
        spec.key = Some(keys::reference_of(&other, spec.vm, "other"));
        let refused = file.decrypt((&spec, Some(&other)), &mut Vec::new(), |_| true).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Locked, "{refused}");
        let locked = file.decrypt((&spec, None), &mut Vec::new(), |_| true).unwrap_err();
        assert_eq!(locked.code, ErrorCode::Locked, "{locked}");
    }

    #[test]
    fn an_attempt_that_ended_is_begun_again_and_leaves_no_name() {
        let bench = Bench::new();
        let file = bench.file(DumpId::new());
        let mut writer = file.create(&bench.spec, Some(&bench.kek)).unwrap();
        writer.write(b"half").unwrap();
        drop(writer);
        assert_eq!(file.length().unwrap(), None);
        let again = bench.write(DumpId::new(), b"whole");
        let mut count = 0;
        let stopped = again.decrypt((&bench.spec, Some(&bench.kek)), &mut Vec::new(), |_| {
            count += 1;
            false
        });
        assert_eq!((stopped.unwrap_err().code, count), (ErrorCode::Cancelled, 1));
        let home = Home::of(&bench.spec.disk_at(0).unwrap().datastore, bench.spec.vm).unwrap();
        again.remove().unwrap();
        file.remove().unwrap();
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }
}
