//! A VM's home on one datastore: the files of its disks, their locks, and notes of imports in progress.
//!
//! ```text
//! <datastore>/<vm id>/vm.json                 the VM of these disks, readable without any key
//! <datastore>/<vm id>/<disk id>.raw           a disk
//! <datastore>/<vm id>/<disk id>.raw.creating  a disk that is being made, or debris of one
//! <datastore>/<vm id>/<disk id>.raw.importing how far the import is that makes it ([`Note`])
//! <datastore>/<vm id>/<disk id>.map           what the replica of a disk may lack ([`crate::storage::replica`])
//! <datastore>/<vm id>/<disk id>.pair          the image and replica that the map is of, beside both
//! <datastore>/<vm id>/<disk id>.tpm/          what the VM's TPM keeps ([`crate::storage::tpm_state`])
//! <datastore>/<vm id>/<disk id>.tpm-<migration id>/  the same of a guest that comes from another host ([`crate::storage::tpm_place`])
//! <datastore>/<vm id>/<disk id>.copy-tpm/     the same, to take its place with the disk's copy ([`crate::storage::mirror::tpm`])
//! <datastore>/<vm id>/<disk id>.source-tpm/   what it was before
//! <datastore>/<vm id>/<disk id>.replica       the replica of a disk that is on another datastore
//! <datastore>/<vm id>/<disk id>.former-replica  that of the image that the disk had before
//! <datastore>/<vm id>/<disk id>.mirror        the note of a copy that is to be the disk ([`crate::storage::mirror`])
//! <datastore>/<vm id>/<disk id>.copy          that copy
//! <datastore>/<vm id>/<disk id>.mirror-map    what the copy may lack
//! <datastore>/<vm id>/<disk id>.mirror-pace   how fast it is copied, where something holds it back
//! <datastore>/<vm id>/<disk id>.source        what the disk was before
//! <datastore>/<vm id>/<disk id>.in-place      the note of a disk that is converted in its file ([`crate::storage::in_place`])
//! <datastore>/<vm id>/<disk id>.in-place-header   the header that it gets, or had
//! <datastore>/<vm id>/<disk id>.in-place-journal  how far that is
//! <datastore>/<vm id>/<disk id>.converting    its image meanwhile
//! <datastore>/<vm id>/<disk id>.restoring     what is to be the disk, from a backup ([`crate::storage::backup`])
//! <datastore>/<vm id>/<disk id>.restored-<task id>  the same when it is whole
//! <datastore>/<vm id>/<disk id>.tpm-restored-<task id>  what the VM's TPM is to keep, from a backup
//! <datastore>/<vm id>/vm.lease                which placement of the VM last used its disks ([`crate::storage::lease`])
//! <datastore>/<vm id>/vm.arriving             which disks have come from another host ([`crate::storage::arriving`])
//! <datastore>/<vm id>/vm.memory               the memory of a suspended VM ([`crate::storage::memory`])
//! <datastore>/<vm id>/vm.core-<dump id>*      a core dump ([`crate::storage::core_file`])
//! <datastore>/<vm id>/<disk id>.layers        the note of its layers ([`crate::storage::layers`])
//! <datastore>/<vm id>/<disk id>.layer-<id>    a layer
//! <datastore>/<vm id>/<disk id>.base          the image that a linked clone stands on ([`crate::storage::linking`])
//! <datastore>/<vm id>/<disk id>.base-<n>      a layer between the two
//! <datastore>/<vm id>/<disk id>.copy-layers   the note of the layers of its copy
//! <datastore>/<vm id>/<disk id>.source-layers the note of the layers of what the disk was before
//! <datastore>/<vm id>/<disk id>.merge         what is locked while a layer is merged into the one below it
//! <datastore>/<vm id>/<disk id>.copy-memory-<snapshot id>    a snapshot's memory, to take its place with the disk's copy
//! <datastore>/<vm id>/<disk id>.source-memory-<snapshot id>  what it was before ([`crate::storage::mirror::beside`])
//! <datastore>/<vm id>/<disk id>.copy-memory-vm, .copy-core-<name>      the same of the VM's own memory, and of a core dump
//! <datastore>/<vm id>/<disk id>.source-memory-vm, .source-core-<name>  what they were before
//! ```
//! A disk gets its name when it is complete and flushed. Each process that works on an image holds a lock on
//! the open file (F_OFD_SETLK); the filter inherits the open file and the lock with it.

mod beside;
mod places;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{DirBuilder, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use serde::{Deserialize, Serialize};
use vmseal_api::host::descriptor::VmDescriptor;
use vmseal_api::host::{DatastoreSpec, DiskSpec, VmSpec};
use vmseal_api::id::{DiskId, MigrationId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::size::Size;
use vmseal_secret::SecretBytes;

pub use self::beside::Beside;
use crate::storage::descriptor;
use crate::storage::file_error::failed;
use crate::storage::image::ImageIdentity;
use crate::storage::image_layout;
use crate::storage::json_file;
use crate::storage::locked::{Access, make_locked, open_locked, open_once};
use crate::storage::mark::{marked, usage};
use crate::storage::named_keys;
use crate::storage::sealed::remove_if_there;
use crate::storage::tpm_state;
use vmseal_api::atomic_file::{self, PRIVATE};

/// The version of notes.
const NOTE_VERSION: u32 = 2;

/// The file that names the VM of a directory.
pub const DESCRIPTOR: &str = "vm.json";

/// The file with the lease of the VM's disks.
pub const LEASE: &str = "vm.lease";

/// The name of the note of the disks that have come from another host.
pub const ARRIVING: &str = "vm.arriving";

/// What the names of core dumps begin with.
pub const CORE: &str = "vm.core-";

/// How the endings of those begin that the host writes by itself.
pub const PANIC_CORE: &str = "panic-";

/// The memory of a suspended VM.
pub const MEMORY: &str = "vm.memory";

/// How the names of memories begin that snapshots keep.
pub const SNAPSHOT_MEMORY: &str = "vm.memory.snapshot-";

/// How long a half-made disk of an interrupted import is kept: longer than a host is usually down.
const INTERRUPTED_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);

/// The longest note of an import, in bytes.
const NOTE_MAX: u64 = 4096;

/// A failed write with less free room than this (in bytes) is reported as a full datastore.
const FULL_BELOW: u64 = 16 << 20;

/// One lock per datastore, held while a home gets a file, while a descriptor is written and while an empty home is removed, as
/// disks of one VM are made, recrypted and removed concurrently. A datastore that hangs blocks no other one.
static HOMES: Mutex<BTreeMap<PathBuf, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());

fn homes(datastore: &Path) -> Arc<Mutex<()>> {
    let mut homes = HOMES.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(homes.entry(datastore.to_owned()).or_default())
}

/// The progress of an import, as noted beside its disk.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Note {
    version: u32,
    /// The image that is imported.
    pub image: ImageIdentity,
    /// The bytes before it have been written and flushed.
    pub durable: u64,
}

impl Note {
    /// A note with this progress.
    #[must_use]
    pub fn new(image: ImageIdentity, durable: u64) -> Self {
        Self { version: NOTE_VERSION, image, durable }
    }
}

/// Whether a file with this end of its name is what a linked clone's disk stands on.
#[must_use]
pub fn is_base(rest: &str) -> bool {
    rest == "base" || rest.strip_prefix("base-").is_some_and(|at| at.parse::<usize>().is_ok())
}

/// Whose name it is, where it is that of what the TPM keeps of a guest that comes from another host ([`Home::arriving_tpm`]).
#[must_use]
pub fn of_arriving_tpm(name: &str) -> Option<(DiskId, MigrationId)> {
    let (disk, migration) = name.split_once(".tpm-")?;
    Some((disk.parse().ok()?, migration.parse().ok()?))
}

/// Whether the import has a note that is not too old.
fn is_interrupted(note: &Path) -> bool {
    kept_until(note).is_some_and(|until| until > SystemTime::now())
}

/// Until when a half-made disk is kept for its import to continue; none without a note.
#[must_use]
pub fn kept_until(note: &Path) -> Option<SystemTime> {
    let modified = note.symlink_metadata().and_then(|metadata| metadata.modified());
    modified.ok()?.checked_add(INTERRUPTED_KEPT)
}

/// Removes half-made disks that no process works on, of the VMs that `of` names, and homes in which no file of a VM is left. Blocks.
pub fn sweep(path: &Path, of: &dyn Fn(VmId) -> bool) {
    let entries = |path: &Path| {
        let entries = std::fs::read_dir(path).into_iter().flatten().filter_map(Result::ok);
        entries.map(|entry| entry.path())
    };
    let homes = entries(path).filter(|home| {
        let vm = home.file_name().and_then(|name| name.to_string_lossy().parse::<VmId>().ok());
        vm.is_some_and(of)
    });
    for home in homes {
        for debris in entries(&home).collect::<Vec<_>>() {
            if is_half_made_disk(&debris) {
                remove_debris(&debris);
            }
        }
        // Also of a process that ended before the disk was begun.
        Home { path: home }.remove_empty();
    }
}

/// Sweeps until this is so: a process that another test starts has the locks of this one until it executes its program.
#[cfg(test)]
pub fn sweep_until(path: &Path, done: &dyn Fn() -> bool) {
    const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(30);
    let begun = std::time::Instant::now();
    loop {
        sweep(path, &|_| true);
        if done() || begun.elapsed() > TIMEOUT {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Whether this is the name of a half-made disk. Memories and core dumps that are being written have no lock, and their VM's owner
/// removes what is left of them.
fn is_half_made_disk(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let disk = name.and_then(|name| name.strip_suffix(".raw.creating"));
    disk.is_some_and(|disk| disk.parse::<DiskId>().is_ok())
}

/// Removes a half-made disk that no process works on, unless its import may continue.
fn remove_debris(path: &Path) {
    // A process that makes a file here has locked it before this lock is released.
    let homes = path.parent().and_then(Path::parent).map(homes).unwrap_or_default();
    let _homes = homes.lock().unwrap_or_else(PoisonError::into_inner);
    let note = path.with_extension("importing");
    if is_interrupted(&note) {
        return;
    }
    // The lock is held until the file is gone, so that no process begins to work on it meanwhile.
    let Ok(Some(_lock)) = open_once(path, Access::Write) else { return };
    tracing::info!(path = %path.display(), "removing a half-made disk");
    // An old note first: it is about this file.
    let _ = std::fs::remove_file(note);
    let image = path.with_extension("");
    if let Err(problem) = remove_state_of_none(&image) {
        tracing::warn!(path = %path.display(), %problem, "cannot remove what a half-made TPM keeps");
    }
    let home = path.parent().map(|home| Home { path: home.to_owned() });
    let disk = image.file_stem().and_then(|disk| disk.to_string_lossy().parse::<DiskId>().ok());
    if let Some((home, disk)) = home.zip(disk)
        && let Err(problem) = home.remove_half_layered(disk)
    {
        tracing::warn!(path = %path.display(), %problem, "cannot remove the layers of a half-made disk");
        return;
    }
    if let Err(error) = std::fs::remove_file(path) {
        tracing::warn!(path = %path.display(), %error, "cannot remove a half-made disk");
    }
}

/// The directory of a VM's disks on one datastore.
#[derive(Clone, Debug)]
pub struct Home {
    path: PathBuf,
}

impl Home {
    /// A VM's home on a datastore with the right mark.
    ///
    /// # Errors
    /// `wrong-state` when the place carries no mark, or another one (not mounted?).
    pub fn of(spec: &DatastoreSpec, vm: VmId) -> Result<Self, Problem> {
        Ok(Self { path: marked(spec)?.join(vm.to_string()) })
    }

    /// The home of the same VM on another datastore.
    ///
    /// # Errors
    /// As [`Home::of`].
    pub fn on(&self, spec: &DatastoreSpec) -> Result<Self, Problem> {
        Ok(Self { path: marked(spec)?.join(self.path.file_name().unwrap_or_default()) })
    }

    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Notes an import's progress, durably.
    ///
    /// # Errors
    /// As the file system.
    pub fn note(&self, disk: DiskId, note: &Note) -> Result<(), Problem> {
        let path = self.importing(disk);
        json_file::write(&path, note)
    }

    /// A half-made disk, locked, and the note of its import; none when there is none to continue.
    ///
    /// # Errors
    /// `in-use` when another process works on it; `damaged` when the note is.
    pub fn noted(&self, disk: DiskId) -> Result<Option<(File, Note)>, Problem> {
        let path = self.importing(disk);
        let Some(text) = json_file::read(&path, NOTE_MAX)? else { return Ok(None) };
        let note = serde_json::from_slice::<Note>(&text).ok();
        let note = note.filter(|note| note.version == NOTE_VERSION).ok_or_else(|| {
            Problem::new(ErrorCode::Damaged, format!("{} cannot be parsed", path.display()))
        })?;
        Ok(open_locked(&self.creating(disk), Access::Write)?.map(|file| (file, note)))
    }

    /// Makes the directory and writes its descriptor, authenticated if the VM's KEK is at hand.
    ///
    /// # Errors
    /// As the file system.
    pub fn describe(
        &self,
        spec: &VmSpec,
        here: &DatastoreSpec,
        kek: Option<&SecretBytes>,
    ) -> Result<(), Problem> {
        let homes = homes(self.datastore());
        let _homes = homes.lock().unwrap_or_else(PoisonError::into_inner);
        self.describe_locked(spec, here, kek)
    }

    /// The same under the lock of the datastore's homes: a descriptor has one writer at a time.
    fn describe_locked(
        &self,
        spec: &VmSpec,
        here: &DatastoreSpec,
        kek: Option<&SecretBytes>,
    ) -> Result<(), Problem> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.path)
            .and_then(|()| atomic_file::flush_directory_of(&self.path))
            .map_err(|error| failed(&self.path, "made", &error))?;
        image_layout::note(&self.path, here, spec.images.as_ref())?;
        let before = self.descriptor();
        self.write_descriptor(&descriptor::of(spec, here.datastore, kek, before.as_ref())?)
    }

    /// The descriptor that is there, if it can be read.
    #[must_use]
    pub fn descriptor(&self) -> Option<VmDescriptor> {
        descriptor::read(&self.path.join(DESCRIPTOR)).1.ok()
    }

    fn write_descriptor(&self, descriptor: &VmDescriptor) -> Result<(), Problem> {
        let path = self.path.join(DESCRIPTOR);
        serde_json::to_vec_pretty(descriptor)
            .map_err(io::Error::from)
            .and_then(|json| atomic_file::write(&path, &json, PRIVATE))
            .map_err(|error| failed(&path, "written", &error))
    }

    /// Writes the descriptor again if it is not as the VM is. Does nothing where no disk of the VM has been begun.
    ///
    /// # Errors
    /// As the file system.
    pub fn describe_again(
        &self,
        spec: &VmSpec,
        here: &DatastoreSpec,
        kek: Option<&SecretBytes>,
    ) -> Result<(), Problem> {
        let homes = homes(self.datastore());
        // An empty home is removed under this lock, and must not come back.
        let _homes = homes.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.path.is_dir() {
            return Ok(());
        }
        image_layout::note(&self.path, here, spec.images.as_ref())?;
        let there = self.descriptor();
        let wanted = descriptor::of(spec, here.datastore, kek, there.as_ref())?;
        if there.is_some_and(|there| there == wanted) {
            return Ok(());
        }
        self.write_descriptor(&wanted)
    }

    /// Writes the descriptor of a disk that is being made. What is there stays if it says the same, so that it stays
    /// authenticated. It refuses to name another key than the VM's disks do.
    fn describe_begun(&self, spec: &VmSpec, here: &DatastoreSpec) -> Result<(), Problem> {
        let there = self.descriptor();
        let wanted = descriptor::of(spec, here.datastore, None, there.as_ref())?;
        if there.is_some_and(|there| VmDescriptor { mac: None, ..there } == wanted) {
            return image_layout::note(&self.path, here, spec.images.as_ref());
        }
        if let (Some(before), Some(key)) = (self.descriptor(), &spec.key)
            && before.vm == spec.vm
            && before.key.as_ref().is_some_and(|named| named != key)
        {
            let encrypted = before.disks.iter().filter(|disk| disk.encrypted);
            encrypted.map(|disk| disk.disk).try_for_each(|it| self.check_named_key(spec, it))?;
        }
        self.describe_locked(spec, here, None)
    }

    /// Refuses if the header of a disk in this home, or of a disk's replica, does not name the VM's key. Blocks.
    ///
    /// # Errors
    /// As [`named_keys::check`].
    pub fn check_named_key(&self, spec: &VmSpec, disk: DiskId) -> Result<(), Problem> {
        named_keys::check(&[self.image(disk), self.replica(disk)], spec, disk)
    }

    /// Opens a replica or a map in this home, or makes an empty one; locked. `here` is the datastore.
    ///
    /// # Errors
    /// `in-use` when another process has it; `damaged` when it is not a regular file; those of the file
    /// system.
    pub fn open_or_make(
        &self,
        spec: &VmSpec,
        here: &DatastoreSpec,
        path: &Path,
    ) -> Result<File, Problem> {
        if let Some(file) = open_locked(path, Access::Write)? {
            return Ok(file);
        }
        let homes = homes(self.datastore());
        let _homes = homes.lock().unwrap_or_else(PoisonError::into_inner);
        self.describe_begun(spec, here)?;
        let file = make_locked(path)?;
        atomic_file::flush_directory_of(path).map_err(|error| failed(path, "made", &error))?;
        Ok(file)
    }

    /// Begins a disk of this length, one of `spec`'s: a sparse file, locked. Debris of an earlier attempt is
    /// removed.
    ///
    /// # Errors
    /// `in-use` when another process works on it; `no-space`.
    pub fn begin(&self, spec: &VmSpec, disk: &DiskSpec, length: u64) -> Result<File, Problem> {
        let path = self.creating(disk.disk);
        self.remove_half_made(disk.disk)?;
        let homes = homes(self.datastore());
        let _homes = homes.lock().unwrap_or_else(PoisonError::into_inner);
        self.describe_begun(spec, &disk.datastore)?;
        let file = make_locked(&path)?;
        file.set_len(length).map_err(|error| failed(&path, "made", &error))?;
        Ok(file)
    }

    /// Allocates a part of a disk that was begun, or grows.
    ///
    /// # Errors
    /// `no-space`; `unsupported` where the file system cannot.
    pub fn allocate(&self, disk: DiskId, file: &File, part: Range<u64>) -> Result<(), Problem> {
        let path = self.creating(disk);
        let sign = |at: u64| i64::try_from(at).unwrap_or(i64::MAX);
        let (from, length) = (sign(part.start), sign(part.end - part.start));
        match fallocate(file, FallocateFlags::empty(), from, length) {
            Ok(()) => Ok(()),
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => Err(Problem::new(
                ErrorCode::Unsupported,
                format!(
                    "the file system of {} cannot take room ahead (fallocate): use a policy with thin allocation",
                    path.display()
                ),
            )),
            Err(error) => Err(failed(&path, "allocated", &error.into())),
        }
    }

    /// Flushes a disk that was begun and gives it its name.
    ///
    /// # Errors
    /// `no-space`, or those of the file system.
    pub fn finish(&self, disk: DiskId, file: &File) -> Result<(), Problem> {
        let (from, to) = (self.creating(disk), self.image(disk));
        file.sync_all()
            .and_then(|()| std::fs::rename(&from, &to))
            .and_then(|()| atomic_file::flush_directory_of(&to))
            .map_err(|error| failed(&to, "finished", &error))?;
        // It means nothing without the half-made disk.
        remove_if_there(&self.importing(disk))
    }

    /// Opens a complete disk, locked; none when there is none.
    ///
    /// # Errors
    /// `in-use` when another process has it; `damaged` when it is not a regular file.
    pub fn open(&self, disk: DiskId) -> Result<Option<File>, Problem> {
        open_locked(&self.image(disk), Access::Write)
    }

    /// The same for reading only: others may read it too, none may write. The datastore may be mounted
    /// read-only.
    ///
    /// # Errors
    /// As [`Home::open`].
    pub fn open_to_read(&self, disk: DiskId) -> Result<Option<File>, Problem> {
        open_locked(&self.image(disk), Access::Read)
    }

    /// Opens a complete disk without its lock, which the process that serves it to the VM's guest holds.
    ///
    /// # Errors
    /// As [`Home::open`].
    pub fn open_beside_guest(&self, disk: DiskId) -> Result<Option<File>, Problem> {
        open_locked(&self.image(disk), Access::BesideGuest)
    }

    /// The same for reading only: the process that holds the lock may be another host's.
    ///
    /// # Errors
    /// As [`Home::open`].
    pub fn read_beside_guest(&self, disk: DiskId) -> Result<Option<File>, Problem> {
        open_locked(&self.image(disk), Access::ReadBesideGuest)
    }

    /// Opens the replica of a disk, locked, or without its lock beside the process that serves the disk to the VM's guest; none when
    /// there is none.
    ///
    /// # Errors
    /// As [`Home::open`].
    pub fn open_replica(&self, disk: DiskId, access: Access) -> Result<Option<File>, Problem> {
        open_locked(&self.replica(disk), access)
    }

    /// Removes a half-made disk that is not locked.
    ///
    /// # Errors
    /// `in-use`, or those of the file system.
    pub fn discard(&self, disk: DiskId) -> Result<(), Problem> {
        self.remove_half_made(disk)?;
        self.remove_empty();
        Ok(())
    }

    /// The note first: it is about the file that is there.
    fn remove_half_made(&self, disk: DiskId) -> Result<(), Problem> {
        let Some(_lock) = open_locked(&self.creating(disk), Access::Write)? else {
            return remove_if_there(&self.importing(disk));
        };
        let note = self.importing(disk);
        remove_if_there(&note)?;
        // The remains of a note that was being written.
        remove_if_there(&self.path.join(format!("{disk}.raw.importing.new")))?;
        atomic_file::flush_directory_of(&note).map_err(|error| failed(&note, "removed", &error))?;
        remove_state_of_none(&self.image(disk))?;
        self.remove_half_layered(disk)?;
        let path = self.creating(disk);
        std::fs::remove_file(&path)
            .and_then(|()| atomic_file::flush_directory_of(&path))
            .map_err(|error| failed(&path, "removed", &error))
    }

    /// Removes what is beside a disk that has no image yet: layers and their note, what a linked clone's stands on, and memories that
    /// came with it from another host.
    fn remove_half_layered(&self, disk: DiskId) -> Result<(), Problem> {
        // A disk whose image has another name meanwhile is not half made.
        let images = [self.image(disk), self.copy(disk), self.source(disk), self.converting(disk)];
        if images.iter().any(|image| image.symlink_metadata().is_ok()) {
            return Ok(());
        }
        for (_, path) in self.layer_files(disk) {
            self.remove_file(&path)?;
        }
        remove_if_there(&self.layers_note(disk))?;
        for path in self.half_received(disk)? {
            remove_if_there(&path)?;
        }
        self.remove_base(disk)
    }

    /// Removes a disk, complete or half-made, with its layers, its copy and its former image, and with the last one the
    /// directory.
    ///
    /// # Errors
    /// `in-use`, or those of the file system.
    pub fn delete(&self, disk: DiskId) -> Result<(), Problem> {
        self.remove_note(&self.mirror_note(disk))?;
        self.remove_note(&self.mirror_pace(disk))?;
        self.remove_note(&self.in_place_note(disk))?;
        let files = [
            self.image(disk),
            self.copy(disk),
            self.source(disk),
            self.mirror_map(disk),
            self.converting(disk),
            self.in_place_header(disk),
            self.in_place_journal(disk),
        ];
        for path in files.into_iter().chain(self.all_restored(disk)) {
            self.remove_file(&path)?;
        }
        // After the image, whose header has their key: without that nobody can read them.
        for (_, path) in self.layer_files(disk) {
            self.remove_file(&path)?;
        }
        self.remove_base(disk)?;
        let beside = self.copies_beside(disk)?.into_iter().chain(self.sources_beside(disk)?);
        for (_, path) in beside {
            self.remove_note(&path)?;
        }
        self.remove_unfinished_beside(disk)?;
        self.remove_note(&self.layers_note(disk))?;
        self.remove_note(&self.copy_layers_note(disk))?;
        self.remove_note(&self.source_layers_note(disk))?;
        self.remove_note(&self.merge_lock(disk))?;
        remove_state_of_none(&self.image(disk))?;
        let arriving = self.arriving_tpms(disk)?.into_iter().map(|(_, path)| path);
        let copies = [self.copy_tpm(disk), self.unfinished_tpm(disk), self.source_tpm(disk)];
        for path in copies.into_iter().chain(arriving) {
            tpm_state::remove(&path)?;
        }
        self.discard(disk)
    }

    /// Removes a replica or a map that is not locked, and with the last file the directory.
    ///
    /// # Errors
    /// `in-use`, or those of the file system.
    pub fn remove(&self, path: &Path) -> Result<(), Problem> {
        self.remove_file(path)?;
        self.remove_empty();
        Ok(())
    }

    /// Removes a note, and with the last file the directory.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn remove_note(&self, path: &Path) -> Result<(), Problem> {
        remove_if_there(path)?;
        // The remains of a note that was being written.
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(".new");
        remove_if_there(Path::new(&temporary))?;
        match atomic_file::flush_directory_of(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed(path, "removed", &error))
            }
            _ => {
                self.remove_empty();
                Ok(())
            }
        }
    }

    fn remove_file(&self, path: &Path) -> Result<(), Problem> {
        // The lock is held while the file is removed, so that no process has begun to use it.
        let Some(_lock) = open_locked(path, Access::Write)? else { return Ok(()) };
        self.remove_locked(path)
    }

    /// Removes a file whose lock the caller has, durably.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn remove_locked(&self, path: &Path) -> Result<(), Problem> {
        std::fs::remove_file(path)
            .and_then(|()| atomic_file::flush_directory_of(path))
            .map_err(|error| failed(path, "removed", &error))
    }

    /// Removes the directory when no disk is left in it.
    fn remove_empty(&self) {
        let homes = homes(self.datastore());
        let _homes = homes.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(entries) = std::fs::read_dir(&self.path) else { return };
        let names = entries.map(|entry| entry.map(|entry| entry.file_name()));
        let Ok(names) = names.collect::<io::Result<Vec<_>>>() else { return };
        let is_ours = |name: &OsString| {
            let name = name.to_string_lossy();
            name.starts_with(DESCRIPTOR) || name.starts_with(LEASE)
        };
        if !names.iter().all(is_ours) {
            return;
        }
        // One by one: another host may have begun a disk since, and the lock is this process's.
        let removed = names.iter().try_for_each(|name| remove_if_there(&self.path.join(name)));
        let removed = removed.and_then(|()| match std::fs::remove_dir(&self.path) {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::NotFound
                ) =>
            {
                Ok(())
            }
            other => other.map_err(|error| failed(&self.path, "removed", &error)),
        });
        if let Err(problem) = removed {
            tracing::warn!(path = %self.path.display(), %problem, "cannot remove an empty directory");
        }
    }

    /// Whether the datastore is so full that this explains a failure.
    #[must_use]
    pub fn is_full(&self) -> bool {
        usage(self.datastore()).is_ok_and(|usage| usage.free < FULL_BELOW)
    }

    /// Fails if there is not enough room.
    ///
    /// # Errors
    /// `no-space`.
    pub fn check_room(&self, needed: u64) -> Result<(), Problem> {
        self.check_room_or(needed, "free some room or use another datastore")
    }

    /// The same for what has no choice of its datastore: `remedy` says what to do.
    ///
    /// # Errors
    /// `no-space`.
    pub fn check_room_or(&self, needed: u64, remedy: &str) -> Result<(), Problem> {
        let free = usage(self.datastore())?.free;
        if needed <= free {
            return Ok(());
        }
        Err(Problem::new(
            ErrorCode::NoSpace,
            format!(
                "{} are needed in {} and {} are free: {remedy}",
                Size(needed),
                self.datastore().display(),
                Size(free)
            ),
        ))
    }

    /// The directory that the home is in.
    #[must_use]
    pub fn datastore(&self) -> &Path {
        self.path.parent().unwrap_or(&self.path)
    }
}

/// Removes what a TPM keeps if the image with its key is gone. An image gets its name last, under the lock of the half-made
/// one.
fn remove_state_of_none(image: &Path) -> Result<(), Problem> {
    match image.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            tpm_state::remove(&image.with_extension("tpm"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
