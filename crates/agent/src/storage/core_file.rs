//! The core dumps of a VM: sealed files (docs/formats/sealed-file.md) in the home of its first disk. The content is what QEMU
//! writes.
//!
//! ```text
//! <datastore>/<vm id>/vm.core-<dump id>.creating  it is being written, or debris of that
//! <datastore>/<vm id>/vm.core-<dump id>           whole
//! <datastore>/<vm id>/vm.core-<dump id>.panic-elf, .panic-kdump   one that the host wrote by itself, as the guest panicked
//! ```
//! Those that the host writes by itself have their format in their names: the server may learn of them much later.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use vmseal_api::atomic_file;
use vmseal_api::dump::{DumpFormat, PanicDump};
use vmseal_api::host::{DiskSpec, VmSpec};
use vmseal_api::id::{DumpId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_seal::file::{Header, Identity, Kind};
use vmseal_seal::frame::CONTENT_MAX;
use vmseal_seal::stream::{SealedReader, SealedWriter};
use vmseal_secret::SecretBytes;

use crate::rules;
use crate::storage::file_error::failed;
use crate::storage::home::{CORE, Home, PANIC_CORE};
use crate::storage::locked::make_locked;
use crate::storage::sealed::{self, remove_if_there, vm_key};

/// What to do about a core dump that does not open.
const REMEDY: &str = "It cannot be decrypted any more: delete it (vmseal dump delete)";

/// A core dump.
#[derive(Clone, Debug)]
pub struct CoreFile {
    vm: VmId,
    path: PathBuf,
}

/// The core dumps of a VM that its host has written by itself, oldest first.
///
/// # Errors
/// `wrong-state` where a datastore is not there; those of the file system.
pub fn of_panics(spec: &VmSpec) -> Result<Vec<PanicDump>, Problem> {
    let mut found = Vec::new();
    for path in in_homes(spec)? {
        let Some((dump, format)) = path.file_name().and_then(|it| named(it.to_str()?)) else {
            continue;
        };
        let read = File::open(&path).and_then(|mut file| {
            let metadata = file.metadata()?;
            let created = Timestamp::try_from(metadata.modified()?).map_err(io::Error::other)?;
            // Whether a damaged one was encrypted is not known; nothing of it can be read in either case.
            let encrypted =
                Header::read(&mut file).map_or(true, |header| !header.keys().is_empty());
            Ok(PanicDump { dump, format, created, bytes: metadata.len(), encrypted })
        });
        match read {
            Ok(known) => found.push(known),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(&path, "read", &error)),
        }
    }
    found.sort_by_key(|known| known.created);
    Ok(found)
}

/// Removes what the host has begun to write by itself and never ended.
///
/// # Errors
/// As [`of_panics`].
pub fn sweep_panics(spec: &VmSpec) -> Result<(), Problem> {
    for path in in_homes(spec)? {
        let name = path.file_name().and_then(|it| it.to_str()?.strip_suffix(".creating"));
        if name.and_then(named).is_some() {
            remove_if_there(&path)?;
        }
    }
    Ok(())
}

/// The id and format of one that the host wrote by itself, by its name.
fn named(name: &str) -> Option<(DumpId, DumpFormat)> {
    let (dump, format) = name.strip_prefix(CORE)?.split_once('.')?;
    let format = match format.strip_prefix(PANIC_CORE)? {
        "elf" => DumpFormat::Elf,
        "kdump" => DumpFormat::Kdump,
        _ => return None,
    };
    Some((dump.parse().ok()?, format))
}

/// The files in the homes of a VM's disks.
fn in_homes(spec: &VmSpec) -> Result<BTreeSet<PathBuf>, Problem> {
    let mut files = BTreeSet::new();
    for disk in spec.disks() {
        let home = Home::of(&disk.datastore, spec.vm)?;
        match std::fs::read_dir(home.path()) {
            Ok(entries) => files.extend(entries.flatten().map(|entry| entry.path())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(home.path(), "listed", &error)),
        }
    }
    Ok(files)
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
            for named in
                [here.of_a_panic(DumpFormat::Elf), here.of_a_panic(DumpFormat::Kdump), here]
            {
                if named.length()?.is_some() {
                    return Ok(named);
                }
            }
        }
        let first = spec.disks().next().ok_or_else(|| {
            let what = "has no disk, and core dumps are written beside its first one";
            rules::wrong_state(spec, what)
        })?;
        of_disk(first)
    }

    /// The same that the host writes by itself.
    #[must_use]
    pub fn of_a_panic(&self, format: DumpFormat) -> Self {
        let ending = format!("{PANIC_CORE}{}", format.name());
        Self { vm: self.vm, path: self.path.with_added_extension(ending) }
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

    /// Checks that there is room to write it, unless it is whole: as much as the guest has memory, which it takes at most. A
    /// datastore that it filled would fail the writes of all VMs there.
    ///
    /// # Errors
    /// `no-space`; `wrong-state` where the datastore is not there; those of the file system.
    pub fn check_room(&self, spec: &VmSpec) -> Result<(), Problem> {
        let Some(disk) = spec.disks().next() else { return Ok(()) };
        if self.length()?.is_some() {
            return Ok(());
        }
        // What an attempt before has left is removed first.
        let left = match self.creating().symlink_metadata() {
            Ok(metadata) => metadata.blocks().saturating_mul(512),
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            Err(error) => return Err(failed(&self.creating(), "looked for", &error)),
        };
        let (vm, name) = (&spec.name, &disk.name);
        let remedy = format!(
            "free some room, or delete core dumps of the VM (vmseal dump list {vm}), or move disk '{name}', beside which they are written (vmseal vm move {vm} --disk {name} --datastore NAME)"
        );
        let needed = spec.memory.saturating_sub(left);
        Home::of(&disk.datastore, spec.vm)?.check_room_or(needed, &remedy)
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
    use vmseal_api::host::{DatastoreLocation, DatastoreSpec, Device};
    use vmseal_api::id::DatastoreId;
    use vmseal_secret::KEK_LEN;

    use super::*;
    use crate::keys;
    use crate::process::run_dir;

    struct Bench {
        _directory: tempfile::TempDir,
        spec: VmSpec,
        kek: SecretBytes,
    }

    impl Bench {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let mut spec = run_dir::tests::spec();
            let kek = SecretBytes::random(KEK_LEN).unwrap();
            spec.key = Some(keys::reference_of(&kek, spec.vm, "key"));
            let location = DatastoreLocation::Dir { path: directory.path().to_owned() };
            let datastore = DatastoreSpec { datastore: DatastoreId::new(), location };
            crate::storage::datastore::probe(&datastore).unwrap();
            let disk = run_dir::tests::disk("disk0", &datastore);
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
    fn a_core_dump_needs_as_much_room_as_its_guest_has_memory_until_it_is_whole() {
        let mut bench = Bench::new();
        let dump = DumpId::new();
        bench.spec.memory = 4096;
        bench.file(dump).check_room(&bench.spec).unwrap();
        bench.spec.memory = u64::MAX;
        let refused = bench.file(dump).check_room(&bench.spec).unwrap_err();
        assert_eq!(refused.code, ErrorCode::NoSpace, "{refused}");
        let DiskSpec { name, .. } = bench.spec.disk_at(0).unwrap();
        let remedy = format!("vmseal vm move {} --disk {name} --datastore NAME", bench.spec.name);
        assert!(refused.detail.contains(&remedy), "{refused}");
        // A task that is done again finds it.
        bench.write(dump, b"whole").check_room(&bench.spec).unwrap();
    }

    #[test]
    fn those_of_panics_are_listed_with_what_their_names_say_and_half_ones_are_swept() {
        let bench = Bench::new();
        let home = Home::of(&bench.spec.disk_at(0).unwrap().datastore, bench.spec.vm).unwrap();
        let (asked, own) = (DumpId::new(), DumpId::new());
        bench.write(asked, b"asked for");
        for format in [DumpFormat::Elf, DumpFormat::Kdump] {
            let file = bench.file(own).of_a_panic(format);
            let mut writer = file.create(&bench.spec, Some(&bench.kek)).unwrap();
            writer.write(b"half").unwrap();
            drop(writer);
            assert_eq!(of_panics(&bench.spec).unwrap(), []);
            let mut writer = file.create(&bench.spec, Some(&bench.kek)).unwrap();
            writer.write(b"whole").unwrap();
            let bytes = file.finish(writer).unwrap();
            let [known] = &of_panics(&bench.spec).unwrap()[..] else { panic!("one") };
            assert_eq!((known.dump, known.format, known.bytes), (own, format, bytes));
            assert!(known.encrypted);
            // It is found by its id alone.
            let found = bench.file(own);
            assert_eq!(bench.read(&found).unwrap(), b"whole");
            let half = bench.file(DumpId::new()).of_a_panic(format);
            drop(half.create(&bench.spec, Some(&bench.kek)).unwrap());
            drop(bench.file(DumpId::new()).create(&bench.spec, Some(&bench.kek)).unwrap());
            let count = || std::fs::read_dir(home.path()).unwrap().count();
            let before = count();
            sweep_panics(&bench.spec).unwrap();
            assert_eq!(count(), before - 1, "that of a task stays: the task removes it");
            found.remove().unwrap();
        }
        let plain = VmSpec { key: None, ..bench.spec.clone() };
        let file = bench.file(own).of_a_panic(DumpFormat::Elf);
        file.finish(file.create(&plain, None).unwrap()).unwrap();
        assert!(!of_panics(&plain).unwrap()[0].encrypted);
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
