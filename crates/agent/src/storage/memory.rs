//! The saved memory of a suspended VM: a sealed file (docs/formats/sealed-file.md) in the home of its first disk.
//!
//! ```text
//! <datastore>/<vm id>/vm.memory.creating  it is being written, or debris of that
//! <datastore>/<vm id>/vm.memory           the VM is suspended
//! <datastore>/<vm id>/vm.memory.snapshot-ID  what a snapshot keeps; a revert has vm.memory be another name (hard link) of it, and so is
//!                                         this one of vm.memory where the snapshot is of a VM that is suspended
//! <datastore>/<vm id>/vm.memory.used      its guest has gone on, or was about to: it is of no use any more
//! ```
//! The content is the machine ([`SavedMachine`]), then QEMU's stream. The name decides: a VM with a `vm.memory` is suspended, whatever
//! processes it has; a guest goes on only when that name is gone, so that no guest's memory is ever used with disks that have changed since.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use vmseal_api::atomic_file;
use vmseal_api::host::VmSpec;
use vmseal_api::id::{DiskId, SnapshotId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_seal::file::{FileError, HEADER_LEN, Header, Identity, Kind, Wanted};
use vmseal_seal::frame::{END_LEN, may_be_end};
use vmseal_seal::stream::{CopyError, SealedReader, SealedWriter};
use vmseal_secret::SecretBytes;

use crate::process::run_record::{LENGTH_MAX, Record};
use crate::storage::file_error::failed;
use crate::storage::home::{Home, SNAPSHOT_MEMORY};
use crate::storage::sealed::{self, remove_if_there, vm_key};

/// The version of [`SavedMachine`].
const MACHINE_VERSION: u32 = 1;

/// The longest description of a machine, in bytes: a run record, and some words more.
const MACHINE_MAX: u64 = LENGTH_MAX + 4096;

/// The generation of a memory that nobody counts.
pub const NOT_COUNTED: u64 = 0;

/// Where the memory of a VM is saved.
#[derive(Clone, Debug)]
pub struct MemoryFiles {
    vm: VmId,
    name: String,
    saved: PathBuf,
}

/// What the guest's memory belongs to.
pub struct SavedMachine {
    /// The type of the machine, with its version: `pc-q35-7.2`.
    pub machine: String,
    /// What it was, and how QEMU had its devices.
    pub record: Record,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredMachine {
    version: u32,
    machine: String,
    record: Box<RawValue>,
}

/// A saved memory that is being written.
pub struct MemoryWriter(SealedWriter<BufWriter<File>>);

/// A saved memory, open behind its machine: what is read is QEMU's stream.
pub struct MemoryReader {
    reader: SealedReader<File>,
    path: PathBuf,
    vm: String,
}

/// Why a file with the name of a snapshot's memory is not used as one.
#[derive(Debug, thiserror::Error)]
pub enum KeptError {
    /// A link, a pipe, a directory.
    #[error("it is no regular file")]
    NotAFile,
    /// It is too short, or does not have the end of a stream.
    #[error("it is cut off, or its end is damaged")]
    CutOff,
    /// Its header is not that of a memory of this VM.
    #[error(transparent)]
    Header(FileError),
    /// It could not be read: perhaps it can be later.
    #[error("it cannot be read: {0}")]
    Read(io::Error),
}

impl MemoryFiles {
    /// Those of a VM.
    ///
    /// # Errors
    /// `wrong-state` where it has no disk, or its first disk's datastore is not there.
    pub fn of(spec: &VmSpec) -> Result<Self, Problem> {
        let first = spec.disks().next().ok_or_else(|| {
            let what = format!(
                "VM '{}' has no disk, and its memory would be saved beside one: add a disk first",
                spec.name
            );
            Problem::new(ErrorCode::WrongState, what)
        })?;
        let saved = Home::of(&first.datastore, spec.vm)?.memory();
        Ok(Self { vm: spec.vm, name: spec.name.clone(), saved })
    }

    /// Where a snapshot keeps the memory.
    ///
    /// # Errors
    /// As [`MemoryFiles::of`].
    pub fn of_snapshot(spec: &VmSpec, snapshot: SnapshotId) -> Result<Self, Problem> {
        let files = Self::of(spec)?;
        let saved = files.saved.with_file_name(format!("{SNAPSHOT_MEMORY}{snapshot}"));
        Ok(Self { saved, ..files })
    }

    /// Whether what is saved of a VM is beside this disk.
    #[must_use]
    pub fn are_beside(spec: &VmSpec, disk: DiskId) -> bool {
        spec.disks().next().is_some_and(|first| first.disk == disk)
    }

    /// Removes what snapshots keep beside a disk that is deleted, if it is the first one: then the VM is. Blocks.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn discard_with(spec: &VmSpec, disk: DiskId) -> Result<(), Problem> {
        if !Self::are_beside(spec, disk) {
            return Ok(());
        }
        let files = Self::of(spec)?;
        let Some(home) = files.saved.parent() else { return Ok(()) };
        for entry in std::fs::read_dir(home).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(SNAPSHOT_MEMORY) {
                remove_if_there(&entry.path())?;
            }
        }
        Ok(())
    }

    /// Has the VM be suspended with the memory that a snapshot keeps. The snapshot keeps it: the file gets another name.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn suspend_with(&self, kept: &Self) -> Result<(), Problem> {
        self.name_too(kept)
    }

    /// Has a snapshot keep the memory that the VM is suspended with. The VM keeps it as well: the file gets another name, so both have one
    /// pair of key slots, and whatever key opens one opens the other.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn keep_suspended(&self, suspended: &Self) -> Result<(), Problem> {
        self.name_too(suspended)
    }

    /// Has the file of `other` have this name, too.
    fn name_too(&self, other: &Self) -> Result<(), Problem> {
        let creating = self.creating();
        remove_if_there(&creating)?;
        if self.is_suspended_with(other)? {
            // An attempt before has given it the name: a rename of one name to another of the same file would do nothing, and leave both.
            return atomic_file::flush_directory_of(&self.saved)
                .map_err(|error| failed(&self.saved, "given its name", &error));
        }
        std::fs::hard_link(&other.saved, &creating)
            .map_err(|error| failed(&other.saved, "given another name", &error))?;
        self.keep()
    }

    /// Whether the VM is suspended with the memory that a snapshot keeps: both names are of one file.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn is_suspended_with(&self, kept: &Self) -> Result<bool, Problem> {
        let inode = |path: &Path| match path.metadata() {
            Ok(metadata) => Ok(Some((metadata.dev(), metadata.ino()))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(path, "looked for", &error)),
        };
        let saved = inode(&self.saved)?;
        Ok(saved.is_some() && saved == inode(&kept.saved)?)
    }

    fn beside(&self, ending: &str) -> PathBuf {
        let mut path = self.saved.as_os_str().to_owned();
        path.push(ending);
        path.into()
    }

    fn creating(&self) -> PathBuf {
        self.beside(".creating")
    }

    fn used(&self) -> PathBuf {
        self.beside(".used")
    }

    /// Whether the VM is suspended.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn is_saved(&self) -> Result<bool, Problem> {
        self.saved.try_exists().map_err(|error| failed(&self.saved, "looked for", &error))
    }

    /// Begins to save as of this generation: what an attempt before has left is replaced.
    ///
    /// # Errors
    /// Those of the file system; `no-space`.
    pub fn create(
        &self,
        saved: &SavedMachine,
        generation: u64,
        kek: Option<&SecretBytes>,
    ) -> Result<MemoryWriter, Problem> {
        let path = self.creating();
        let broken = |error: &io::Error| failed(&path, "written", error);
        remove_if_there(&path)?;
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let file = BufWriter::new(file.map_err(|error| broken(&error))?);
        let identity = Identity { vm: self.vm.0, kind: Kind::Memory, generation };
        let spec = &saved.record.spec;
        let key = vm_key(spec, kek)?;
        let mut writer = vmseal_seal::file::create(file, identity, key.as_ref())
            .map_err(|error| self.refused(&path, &error))?;
        let text = saved.to_text().map_err(|error| broken(&error))?;
        let length = u32::try_from(text.len()).map_err(|error| broken(&io::Error::other(error)))?;
        writer
            .write_all(&length.to_be_bytes())
            .and_then(|()| writer.write_all(&text))
            .map_err(|error| broken(&error))?;
        Ok(MemoryWriter(writer))
    }

    /// Writes the end and flushes. The file still has the name of one that is being made.
    ///
    /// # Errors
    /// Those of the file system; `no-space`.
    pub fn finish(&self, writer: MemoryWriter) -> Result<(), Problem> {
        let path = self.creating();
        writer
            .0
            .finish()
            .and_then(|buffered| buffered.into_inner().map_err(io::IntoInnerError::into_error))
            .and_then(|file| file.sync_all())
            .map_err(|error| failed(&path, "written", &error))
    }

    /// Gives a finished file its name: from here on, the VM is suspended.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn keep(&self) -> Result<(), Problem> {
        std::fs::rename(self.creating(), &self.saved)
            .and_then(|()| atomic_file::flush_directory_of(&self.saved))
            .map_err(|error| failed(&self.saved, "given its name", &error))
    }

    /// Takes the file's name away: from here on, the VM is not suspended, and its guest may go on.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn use_up(&self) -> Result<(), Problem> {
        // Two names of one file: a rename of one to the other does nothing, and the VM would stay suspended.
        remove_if_there(&self.used())?;
        std::fs::rename(&self.saved, self.used())
            .and_then(|()| atomic_file::flush_directory_of(&self.saved))
            .map_err(|error| failed(&self.saved, "put aside", &error))
    }

    /// Removes the saved memory.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn discard(&self) -> Result<(), Problem> {
        remove_if_there(&self.saved)?;
        self.sweep()
    }

    /// Removes what is of no use.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn sweep(&self) -> Result<(), Problem> {
        remove_if_there(&self.creating())?;
        remove_if_there(&self.used())?;
        match atomic_file::flush_directory_of(&self.saved) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(failed(&self.saved, "removed", &error))
            }
            _ => Ok(()),
        }
    }

    /// Opens the saved memory with the key of `spec`. Where a generation is given, it must be of that one: another one is of disks that have
    /// changed since. The file's first frame, which is opened, tells whether its header says the truth.
    ///
    /// # Errors
    /// `damaged`, also for another generation, `locked` where it needs another key, and those of the file system; each says how to give it up.
    pub fn open(
        &self,
        spec: &VmSpec,
        kek: Option<&SecretBytes>,
        generation: Option<u64>,
    ) -> Result<(SavedMachine, MemoryReader), Problem> {
        let path = &self.saved;
        let file = sealed::open(path)?;
        let key = vm_key(spec, kek)?;
        let wanted = Wanted { vm: self.vm.0, kind: Kind::Memory, generation };
        let opened = vmseal_seal::file::open_wanted(file, wanted, key.as_ref());
        let mut reader = opened.map_err(|error| match error {
            FileError::OtherGeneration { found, expected } => {
                other_generation(&path.display().to_string(), &self.name, found, expected)
            }
            error => self.refused(path, &error),
        })?;
        let saved = SavedMachine::read(&mut reader)
            .map_err(|error| unreadable(path, &self.name, &error))?;
        if saved.record.spec.vm != self.vm {
            let error = io::Error::new(ErrorKind::InvalidData, "its machine is another VM's");
            return Err(unreadable(path, &self.name, &error));
        }
        Ok((saved, MemoryReader { reader, path: path.clone(), vm: self.name.clone() }))
    }

    fn refused(&self, path: &Path, error: &FileError) -> Problem {
        sealed::refused(path, error, &way_out(&self.name))
    }
}

impl MemoryWriter {
    /// Copies all of QEMU's stream, of which parts are read and sealed while others are written.
    ///
    /// # Errors
    /// Those of reading and of the file system.
    pub fn copy_from(&mut self, from: impl Read) -> io::Result<u64> {
        self.0.copy_from(from)
    }
}

impl MemoryReader {
    /// Copies all of QEMU's stream to QEMU, up to its authenticated end; parts are opened while QEMU takes others. A QEMU that has closed
    /// its end sooner says itself why; what is left is checked all the same.
    ///
    /// # Errors
    /// `damaged`, with the frame; those of the file system.
    pub fn copy_to(self, mut to: impl Write) -> Result<(), Problem> {
        let Self { reader, path, vm } = self;
        let mut open = true;
        let copied = reader.copy_to(|part| {
            if !open {
                return Ok(());
            }
            match to.write_all(part) {
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                    open = false;
                    Ok(())
                }
                other => other,
            }
        });
        copied.map_err(|error| match error {
            CopyError::Read(error) => unreadable(&path, &vm, &error),
            CopyError::Give(error) => failed(&path, "given to QEMU", &error),
        })
    }
}

impl SavedMachine {
    fn to_text(&self) -> io::Result<Vec<u8>> {
        let record = String::from_utf8(self.record.to_text()?).map_err(io::Error::other)?;
        let stored = StoredMachine {
            version: MACHINE_VERSION,
            machine: self.machine.clone(),
            record: RawValue::from_string(record)?,
        };
        Ok(serde_json::to_vec(&stored)?)
    }

    fn read(from: &mut impl Read) -> io::Result<Self> {
        let invalid = |why: String| io::Error::new(ErrorKind::InvalidData, why);
        let mut length = [0; 4];
        from.read_exact(&mut length)?;
        let length = u64::from(u32::from_be_bytes(length));
        if length > MACHINE_MAX {
            return Err(invalid("its machine is too long".to_owned()));
        }
        let mut text = Vec::new();
        from.take(length).read_to_end(&mut text)?;
        let stored: StoredMachine = serde_json::from_slice(&text)?;
        if stored.version != MACHINE_VERSION {
            let version = stored.version;
            return Err(invalid(format!("its machine is described in version {version}")));
        }
        let record = Record::parse(stored.record.get().as_bytes());
        let record = record.map_err(|error| invalid(format!("its machine {error}")))?;
        Ok(Self { machine: stored.machine, record })
    }
}

/// The memory that a snapshot keeps in this home of a VM: the generation that its file says. None without such a file. Its header and its
/// end are looked at, and nothing is opened, as the VM's key is not at hand. Who writes to the datastore decides what is there.
///
/// # Errors
/// [`KeptError`]: the file is there, and cannot be read or is not a whole memory of this VM.
pub fn kept_in(home: &Path, vm: VmId, snapshot: SnapshotId) -> Result<Option<u64>, KeptError> {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(home.join(format!("{SNAPSHOT_MEMORY}{snapshot}")));
    match opened {
        Ok(file) => generation_in(&file, vm).map(Some),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        // What the open says of a link that it is not to follow.
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => Err(KeptError::NotAFile),
        Err(error) => Err(KeptError::Read(error)),
    }
}

/// The generation of a memory of this VM, as its header says.
fn generation_in(mut file: &File, vm: VmId) -> Result<u64, KeptError> {
    let metadata = file.metadata().map_err(KeptError::Read)?;
    if !metadata.is_file() {
        return Err(KeptError::NotAFile);
    }
    let at = metadata.len().checked_sub(END_LEN as u64).filter(|at| *at >= HEADER_LEN as u64);
    let at = at.ok_or(KeptError::CutOff)?;
    let header = Header::read(&mut file).map_err(|error| match error {
        FileError::Io(error) => KeptError::Read(error),
        other => KeptError::Header(other),
    })?;
    let Identity { vm: of, kind, generation } = header.identity();
    if of != vm.0 {
        return Err(KeptError::Header(FileError::OtherVm(of)));
    }
    if kind != Kind::Memory {
        let other = FileError::OtherKind { found: kind, expected: Kind::Memory };
        return Err(KeptError::Header(other));
    }
    let mut end = [0; END_LEN];
    file.read_exact_at(&mut end, at).map_err(KeptError::Read)?;
    if may_be_end(&end) { Ok(generation) } else { Err(KeptError::CutOff) }
}

/// How a user gives a saved memory up.
pub fn way_out(vm: &str) -> String {
    format!(
        "Restore the file from a backup of the same time as the disks, or give the saved memory up and boot from the disks (vmseal vm start {vm} --discard-memory)"
    )
}

/// A memory of a VM that is not the one that was saved last.
pub fn other_generation(file: &str, vm: &str, found: u64, expected: u64) -> Problem {
    let detail = format!(
        "{file} is not the memory that VM '{vm}' was last suspended with: it is of generation {found}, and generation {expected} is expected, so its disks have changed since. Put the file of generation {expected} back if there is one, or give the saved memory up and boot from the disks (vmseal vm start {vm} --discard-memory). Only if the disks were put back together with this file, have the guest go on from it (vmseal vm resume {vm} --accept-memory)"
    );
    Problem::new(ErrorCode::Damaged, detail)
}

fn unreadable(path: &Path, vm: &str, error: &io::Error) -> Problem {
    sealed::unreadable(path, "the saved memory", error, &way_out(vm))
}

/// Makes durable what the images of a VM's disks hold. Its guest stands still: nothing is written meanwhile.
///
/// # Errors
/// Those of the file system.
pub fn flush_disks(spec: &VmSpec) -> Result<(), Problem> {
    for disk in spec.disks() {
        let home = Home::of(&disk.datastore, spec.vm)?;
        let layers = home.layer_files(disk.disk).into_iter().map(|(_, path)| path);
        let others = [home.image(disk.disk), home.copy(disk.disk), home.source(disk.disk)];
        for path in layers.chain(others) {
            match File::open(&path) {
                Ok(file) => file.sync_data().map_err(|error| failed(&path, "flushed", &error))?,
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(failed(&path, "flushed", &error)),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{DatastoreLocation, DatastoreSpec, Device, DiskSpec};
    use vmseal_api::id::DatastoreId;

    use super::*;
    use crate::process::run_dir;
    use crate::storage::datastore;

    /// A VM that is suspended with this.
    fn suspended(directory: &Path, memory: &str) -> (VmSpec, MemoryFiles) {
        let mut spec = run_dir::tests::spec();
        let location = DatastoreLocation::Dir { path: directory.to_owned() };
        let place = DatastoreSpec { datastore: DatastoreId::new(), location };
        datastore::probe(&place).unwrap();
        std::fs::create_dir(directory.join(spec.vm.to_string())).unwrap();
        let disk = DiskSpec { encrypted: false, ..run_dir::tests::disk("disk0", &place) };
        spec.devices = vec![Device::Disk(disk)];
        let files = MemoryFiles::of(&spec).unwrap();
        std::fs::write(&files.saved, memory).unwrap();
        (spec, files)
    }

    #[test]
    fn a_snapshot_keeps_the_memory_of_a_suspended_vm_whatever_becomes_of_it() {
        let directory = tempfile::tempdir().unwrap();
        let (spec, files) = suspended(directory.path(), "kept");
        let kept = MemoryFiles::of_snapshot(&spec, SnapshotId::new()).unwrap();
        assert!(!files.is_suspended_with(&kept).unwrap());
        // An agent that has died after any step does all of them again.
        for _ in 0..2 {
            std::fs::hard_link(&files.saved, kept.creating()).unwrap();
            kept.keep_suspended(&files).unwrap();
            assert!(files.is_suspended_with(&kept).unwrap() && files.is_saved().unwrap());
            assert!(!kept.creating().exists(), "a third name is left");
        }
        files.use_up().unwrap();
        files.sweep().unwrap();
        assert!(!files.is_saved().unwrap() && kept.is_saved().unwrap());
        std::fs::write(&files.saved, "another").unwrap();
        assert!(!files.is_suspended_with(&kept).unwrap());
        // As a revert does.
        files.discard().unwrap();
        assert!(!files.is_saved().unwrap() && kept.is_saved().unwrap());
        for _ in 0..2 {
            files.suspend_with(&kept).unwrap();
            assert!(!files.creating().exists(), "a third name is left");
        }
        assert_eq!(std::fs::read_to_string(&files.saved).unwrap(), "kept");
        kept.discard().unwrap();
        assert!(files.is_saved().unwrap() && !kept.is_saved().unwrap());
    }

    /// "Not there" is said of no other file: who adopts the VM would lose the memory.
    #[test]
    fn a_memory_that_cannot_be_read_is_told_apart_from_one_that_is_not_there() {
        let directory = tempfile::tempdir().unwrap();
        let (home, vm, snapshot) = (directory.path(), VmId::new(), SnapshotId::new());
        assert!(matches!(kept_in(home, vm, snapshot), Ok(None)));
        let path = home.join(format!("{SNAPSHOT_MEMORY}{snapshot}"));
        let write = |kind: Kind| {
            let identity = Identity { vm: vm.0, kind, generation: 7 };
            let mut to =
                vmseal_seal::file::create(File::create(&path).unwrap(), identity, None).unwrap();
            to.write_all(&[1; 5000]).unwrap();
            to.finish().unwrap();
        };
        write(Kind::Core);
        let of_core = kept_in(home, vm, snapshot);
        let is_of_core = matches!(
            of_core,
            Err(KeptError::Header(FileError::OtherKind { found: Kind::Core, .. }))
        );
        assert!(is_of_core, "{of_core:?}");
        write(Kind::Memory);
        assert!(matches!(kept_in(home, vm, snapshot), Ok(Some(7))));
        let other = kept_in(home, VmId::new(), snapshot);
        assert!(matches!(other, Err(KeptError::Header(FileError::OtherVm(_)))), "{other:?}");
        // Reads of it fail, as those of a device may.
        let without_reads = OpenOptions::new().write(true).open(&path).unwrap();
        let unread = generation_in(&without_reads, vm);
        assert!(matches!(unread, Err(KeptError::Read(_))), "{unread:?}");
        without_reads.set_len(END_LEN as u64).unwrap();
        let short = kept_in(home, vm, snapshot);
        assert!(matches!(short, Err(KeptError::CutOff)), "{short:?}");
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        let no_file = kept_in(home, vm, snapshot);
        assert!(matches!(no_file, Err(KeptError::NotAFile)), "{no_file:?}");
        // Whatever does not open is there, too: a name that is too long for the file system says so to everybody.
        let long = kept_in(&home.join("a".repeat(300)), vm, snapshot);
        assert!(matches!(long, Err(KeptError::Read(_))), "{long:?}");
    }

    #[test]
    fn a_memory_that_is_gone_is_not_kept() {
        let directory = tempfile::tempdir().unwrap();
        let (spec, files) = suspended(directory.path(), "kept");
        files.discard().unwrap();
        let kept = MemoryFiles::of_snapshot(&spec, SnapshotId::new()).unwrap();
        assert!(kept.keep_suspended(&files).is_err());
        assert!(!kept.is_saved().unwrap());
    }
}
