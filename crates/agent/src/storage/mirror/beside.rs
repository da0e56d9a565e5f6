//! The sealed files beside a disk, which follow when the disk is copied: the memory that snapshots keep, that of a VM that is suspended,
//! and core dumps.
//!
//! ```text
//!  FILE ─ opened, sealed anew ─► copy of FILE.new ─ flushed ─► copy of FILE       beside the copy of the disk
//!        ── the disk pivots: its map says so ──
//!  FILE ─► source of FILE ;  copy of FILE ─► FILE
//!              └─► overwritten as it was stored, removed: with the former image
//! ```
//! What a guest's memory belongs to is what the disks hold, or what the snapshot keeps of them, and that is the same in their copies. Each
//! file is written with a key of its own. The name of a copy says that it is whole; before the disk pivots the former file stays as it
//! is, and afterwards any process that opens the disk puts the names right before the disk's own.
//!
//! The memory of a suspended VM may be used up before the disk pivots, and a core dump removed. So the note says which files they were when
//! the copy was begun, and a copy takes its place only where that one is there: no memory comes back that a guest has gone on from.

use std::collections::BTreeSet;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::sys::statfs::{FUSE_SUPER_MAGIC, statfs};
use vmseal_api::atomic_file;
use vmseal_api::host::{DiskFacts, DiskSpec, VmSpec};
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_seal::file::{FileError, HEADER_LEN, Header, Kind};
use vmseal_seal::frame::CONTENT_MAX;
use vmseal_seal::stream::SealedReader;
use vmseal_secret::SecretBytes;
use zeroize::Zeroizing;

use super::Mirror;
use super::note::{Following, MemoryForm, Note, Written};
use crate::storage::builder::internal;
use crate::storage::file_error::failed;
use crate::storage::file_identity::FileIdentity;
use crate::storage::gate::Gate;
use crate::storage::home::{Beside, Home};
use crate::storage::locked::{Access, open_locked};
use crate::storage::memory::{MemoryFiles, way_out};
use crate::storage::sealed::{self, remove_if_there, vm_key};

/// How much is written between two flushes, in bytes: a guest's own flushes do not wait for gigabytes.
const FLUSH_AFTER: u64 = 64 << 20;

/// How much is copied between two reports of the progress, in bytes.
const SHOW_AFTER: u64 = 8 << 20;

/// What is beside a disk and follows its copy, and how it is to be when that has taken its place; none where there is nothing. `home` is that of
/// the disk's image.
pub(super) fn following(
    home: &Home,
    spec: &VmSpec,
    disk: DiskId,
    forgets_key: bool,
) -> Result<Option<Following>, Problem> {
    let all = home.all_beside()?;
    if !MemoryFiles::are_beside(spec, disk) || all.is_empty() {
        return Ok(None);
    }
    let seals = spec.key.is_some() && !forgets_key;
    let form = if seals { MemoryForm::Sealed } else { MemoryForm::InTheClear };
    let (suspended, suspended_written, cores) = (None, None, Vec::new());
    let mut following = Following { form, suspended, suspended_written, cores };
    for (what, path) in all {
        match what {
            Beside::SnapshotMemory(_) => {}
            Beside::Memory => {
                let Some(metadata) = metadata(&path)? else { continue };
                let identity = FileIdentity::in_metadata(&metadata);
                if identity.born.is_none() && !keeps_no_times(&path)? {
                    following.suspended_written = Some(Written::in_metadata(&metadata));
                }
                following.suspended = Some(identity);
            }
            Beside::Core(name) => following.cores.push(name),
        }
    }
    Ok(Some(following))
}

/// Whether a file is in a pool of Ceph: those have the times of their mount, and inodes that are never used again.
fn keeps_no_times(path: &Path) -> Result<bool, Problem> {
    match statfs(path) {
        Ok(about) => Ok(about.filesystem_type() == FUSE_SUPER_MAGIC),
        Err(error) => Err(failed(path, "looked at", &io::Error::from(error))),
    }
}

/// How much room copies of all files here take, in bytes.
pub(super) fn room(home: &Home) -> Result<u64, Problem> {
    let each = home.all_beside()?.into_values();
    Ok(each.filter_map(|path| path.metadata().ok()).map(|it| it.blocks() * 512).sum())
}

/// Whether a file beside the image is one that follows: what came later stays where it is.
fn follows(mirror: &Mirror, what: &Beside, path: &Path) -> Result<bool, Problem> {
    let note = &mirror.note;
    match what {
        Beside::SnapshotMemory(_) => Ok(note.memory.is_some()),
        Beside::Memory => Ok(metadata(path)?.is_some_and(|found| is_noted(note, &found))),
        Beside::Core(name) => Ok(note.cores.contains(name)),
    }
}

/// Whether a saved memory is the one of the note.
fn is_noted(note: &Note, found: &Metadata) -> bool {
    let written = note.suspended_written.as_ref();
    note.suspended.as_ref().is_some_and(|known| *known == FileIdentity::in_metadata(found))
        && written.is_none_or(|known| *known == Written::in_metadata(found))
}

/// Those that are to be copied with a disk; none where it has pivoted.
fn of(mirror: &Mirror) -> Result<Vec<Beside>, Problem> {
    if mirror.note.memory.is_none() || mirror.pivoted {
        return Ok(Vec::new());
    }
    let mut all = Vec::new();
    for (what, path) in mirror.source()?.all_beside()? {
        if follows(mirror, &what, &path)? {
            all.push(what);
        }
    }
    Ok(all)
}

/// How many are copied, and how many there are in all.
pub(super) fn progress(mirror: &Mirror) -> Result<(usize, usize), Problem> {
    let all = of(mirror)?;
    if all.is_empty() {
        return Ok((0, 0));
    }
    let copies = mirror.target()?.copies_beside(mirror.disk)?;
    Ok((all.iter().filter(|what| copies.contains_key(*what)).count(), all.len()))
}

/// One that is not copied yet.
pub(super) fn next(mirror: &Mirror) -> Result<Option<Beside>, Problem> {
    let all = of(mirror)?;
    if all.is_empty() {
        return Ok(None);
    }
    let copies = mirror.target()?.copies_beside(mirror.disk)?;
    Ok(all.into_iter().find(|what| !copies.contains_key(what)))
}

/// Copies a file, as fast as `gate` lets it; one that is gone meanwhile is no file to copy. `show` gets how many bytes are done, and the
/// total. Blocks.
///
/// # Errors
/// `damaged`, `locked`, `no-space`; `cancelled` when the gate is closed.
pub(super) fn copy(
    mirror: &Mirror,
    (spec, disk): (&VmSpec, &DiskSpec),
    kek: Option<&SecretBytes>,
    what: &Beside,
    gate: &Gate,
    show: impl Fn(u64, u64),
) -> Result<(), Problem> {
    let path = mirror.source()?.beside(what);
    let (mut from, header, total) = match open(&path, mirror, (spec, disk), kek, what) {
        Err(_) if !is_there(&path)? => return Ok(()),
        opened => opened?,
    };
    let kept = mirror.target()?.copy_beside(disk.disk, what);
    let new = unfinished(&kept);
    let broken = |error: &io::Error| failed(&new, "written", error);
    remove_if_there(&new)?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new);
    let file = file.map_err(|error| broken(&error))?;
    let to = BufWriter::new(file.try_clone().map_err(|error| broken(&error))?);
    let key = match mirror.note.memory {
        Some(MemoryForm::Sealed) => vm_key(spec, kek)?,
        _ => None,
    };
    let mut to = vmseal_seal::file::create(to, header.identity(), key.as_ref())
        .map_err(|error| sealed::refused(&new, &error, "Begin again"))?;
    let mut part = Zeroizing::new(vec![0; CONTENT_MAX]);
    let (mut done, mut flushed, mut shown) = (0, 0, 0);
    loop {
        let read = from.read(&mut part).map_err(|error| {
            sealed::unreadable(&path, name_of(what), &error, &remedy(spec, what))
        })?;
        if read == 0 {
            break;
        }
        gate.pass(read as u64)?;
        to.write_all(&part[..read]).map_err(|error| broken(&error))?;
        done += read as u64;
        if done - flushed >= FLUSH_AFTER {
            file.sync_data().map_err(|error| broken(&error))?;
            flushed = done;
        }
        if done - shown >= SHOW_AFTER {
            show(done, total.max(done));
            shown = done;
        }
    }
    to.finish()
        .and_then(|buffered| buffered.into_inner().map_err(io::IntoInnerError::into_error))
        .and_then(|file| file.sync_all())
        .and_then(|()| std::fs::rename(&new, &kept))
        .and_then(|()| atomic_file::flush_directory_of(&kept))
        .map_err(|error| broken(&error))
}

/// Opens a file to be copied: its content, its header, and its length in bytes.
fn open(
    path: &Path,
    mirror: &Mirror,
    (spec, disk): (&VmSpec, &DiskSpec),
    kek: Option<&SecretBytes>,
    what: &Beside,
) -> Result<(SealedReader<File>, Header, u64), Problem> {
    let refused = |error: FileError| sealed::refused(path, &error, &remedy(spec, what));
    let mut file = sealed::open(path)?;
    let header = Header::read(&mut file).map_err(refused)?;
    let total = file.metadata().map_err(|error| failed(path, "read", &error))?.len();
    let in_the_clear = header.is_in_the_clear();
    // A VM gets its key before its first disk is encrypted: what it had before that is in the clear. Once any of its disks is
    // encrypted, all of this is sealed, also beside a disk that is in the clear.
    let was_sealed =
        mirror.note.source_facts != DiskFacts::Raw || spec.disks().any(|disk| disk.encrypted);
    if in_the_clear && spec.key.is_some() && was_sealed {
        let why = format!(
            "{} is in the clear, and what is beside disk '{}' of VM '{}' is sealed: somebody has put it there. {}",
            path.display(),
            disk.name,
            spec.name,
            remedy(spec, what)
        );
        return Err(Problem::new(ErrorCode::Damaged, why));
    }
    let key = if in_the_clear { None } else { vm_key(spec, kek)? };
    let remedy = remedy(spec, what);
    let from = sealed::open_as(path, &header, (spec.vm, kind_of(what)), key.as_ref(), &remedy)?;
    Ok((from, header, total))
}

/// What a sealed file of this name says that it is.
pub(super) fn kind_of(what: &Beside) -> Kind {
    match what {
        Beside::SnapshotMemory(_) | Beside::Memory => Kind::Memory,
        Beside::Core(_) => Kind::Core,
    }
}

/// What errors call a file.
fn name_of(what: &Beside) -> &'static str {
    match what {
        Beside::SnapshotMemory(_) => "the memory that a snapshot keeps",
        Beside::Memory => "the saved memory",
        Beside::Core(_) => "the core dump",
    }
}

fn remedy(spec: &VmSpec, what: &Beside) -> String {
    let vm = &spec.name;
    match what {
        Beside::SnapshotMemory(_) => format!(
            "Put the file back, or delete the snapshot (vmseal snapshot list {vm}, vmseal snapshot delete {vm})"
        ),
        Beside::Memory => way_out(vm),
        Beside::Core(_) => format!(
            "Put the file back, or delete the core dump (vmseal dump list {vm}, vmseal dump delete {vm})"
        ),
    }
}

/// The name of a copy that is being written.
fn unfinished(copy: &Path) -> PathBuf {
    copy.with_added_extension("new")
}

/// Removes the copies of what is beside a disk, whole or not. They have not taken their places.
pub(super) fn drop_copies(target: &Home, disk: DiskId) -> Result<(), Problem> {
    for path in target.copies_beside(disk)?.into_values() {
        target.remove_note(&path)?;
    }
    target.remove_unfinished_beside(disk)
}

/// Gives what is now a former file its name, where the copy of the disk is in another home.
pub(super) fn set_aside(mirror: &Mirror) -> Result<(), Problem> {
    if mirror.note.memory.is_none() || !mirror.moves() {
        return Ok(());
    }
    let source = mirror.source()?;
    for (what, path) in source.all_beside()? {
        if follows(mirror, &what, &path)? {
            super::rename(&path, &source.source_beside(mirror.disk, &what))?;
        }
    }
    Ok(())
}

/// Gives the copies the names of the files, which are set aside where they have those.
pub(super) fn take_place(mirror: &Mirror) -> Result<(), Problem> {
    let target = mirror.target()?;
    for (what, copy) in target.copies_beside(mirror.disk)? {
        let (kept, former) = (target.beside(&what), target.source_beside(mirror.disk, &what));
        // Where it is there, this has been done: what has the name is the copy, or nothing.
        let is_former = !mirror.moves() && is_there(&kept)? && !is_there(&former)?;
        if is_former && follows(mirror, &what, &kept)? {
            super::rename(&kept, &former)?;
        }
        if is_needed(mirror, &what)? {
            super::rename(&copy, &kept)?;
        } else {
            tracing::info!(copy = %copy.display(), "it is of a file that is gone, and takes no place");
            target.remove_note(&copy)?;
        }
    }
    Ok(())
}

/// Whether a copy is of a file that was there to the end. The memory of snapshots always was.
fn is_needed(mirror: &Mirror, what: &Beside) -> Result<bool, Problem> {
    if matches!(what, Beside::SnapshotMemory(_)) {
        return Ok(true);
    }
    // Its name says so, which it may not have got yet.
    set_aside(mirror)?;
    is_there(&mirror.source()?.source_beside(mirror.disk, what))
}

fn is_there(path: &Path) -> Result<bool, Problem> {
    metadata(path).map(|found| found.is_some())
}

fn metadata(path: &Path) -> Result<Option<Metadata>, Problem> {
    match path.symlink_metadata() {
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(path, "looked at", &error)),
    }
}

/// Opens the header of each file that has taken the place of one that is still there. A file that is gone is not missed: a guest has gone
/// on from its memory, a user has deleted the snapshot or the core dump.
///
/// # Errors
/// `damaged`, `locked`; those of the file system.
pub(super) fn require_open(
    mirror: &Mirror,
    spec: &VmSpec,
    kek: Option<&SecretBytes>,
) -> Result<(), Problem> {
    let target = mirror.target()?;
    for what in mirror.source()?.sources_beside(mirror.disk)?.into_keys() {
        let path = target.beside(&what);
        match open_header(&path, mirror, spec, kek, &what) {
            Err(_) if !is_there(&path)? => {}
            opened => opened?,
        }
    }
    Ok(())
}

/// Opens the header of a file that has taken its place.
fn open_header(
    path: &Path,
    mirror: &Mirror,
    spec: &VmSpec,
    kek: Option<&SecretBytes>,
    what: &Beside,
) -> Result<(), Problem> {
    let remedy = "Begin again when that file is as it was, or is deleted";
    let header = Header::read(&mut sealed::open(path)?)
        .map_err(|error| sealed::refused(path, &error, remedy))?;
    // One that is to be sealed and is not is refused for the key that it does not need.
    let in_the_clear = header.is_in_the_clear() && mirror.note.memory != Some(MemoryForm::Sealed);
    let key = if in_the_clear { None } else { vm_key(spec, kek)? };
    let of = (spec.vm, kind_of(what));
    sealed::open_as(path, &header, of, key.as_ref(), remedy).map(drop)
}

/// Removes what the files were before. `overwrite` gets each file before that, and up to where its content is to be lost: of
/// what was sealed that is the header, without which its key is.
pub(super) fn drop_sources(
    mirror: &Mirror,
    overwrite: impl Fn(&File, u64) -> Result<(), Problem>,
) -> Result<(), Problem> {
    let home = mirror.source()?;
    let mut overwritten = BTreeSet::new();
    for path in home.sources_beside(mirror.disk)?.into_values() {
        let Some(file) = open_locked(&path, Access::Write)? else { continue };
        let found = file.metadata().map_err(internal)?;
        // What a VM is suspended with and a snapshot keeps is one file: its header, which says up to where, is gone the second time.
        if overwritten.insert(found.ino()) {
            let length = found.len();
            let sealed = Header::read(&mut &file).is_ok_and(|header| !header.is_in_the_clear());
            overwrite(&file, if sealed { length.min(HEADER_LEN as u64) } else { length })?;
        }
        home.remove_locked(&path)?;
    }
    Ok(())
}

/// Whether a VM is suspended, also where the copy of its first disk has its memory and not yet all names are right. Changes nothing. Blocks.
///
/// # Errors
/// As [`Mirror::find`]; `wrong-state` when a datastore is not there.
pub fn is_suspended(spec: &VmSpec) -> Result<bool, Problem> {
    let Some(first) = spec.disks().next() else { return Ok(false) };
    let home = Home::of(&first.datastore, spec.vm)?;
    let Some(mirror) = Mirror::find(&home, first.disk)?.filter(|mirror| mirror.pivoted) else {
        return is_there(&home.memory());
    };
    if is_there(&mirror.target()?.memory())? {
        return Ok(true);
    }
    if mirror.note.suspended.is_none() || mirror.is_settled() {
        return Ok(false);
    }
    let source = mirror.source()?;
    Ok(is_there(&source.source_beside(first.disk, &Beside::Memory))?
        || follows(&mirror, &Beside::Memory, &source.memory())?)
}

impl Mirror {
    /// Whether the VM is suspended, and its memory would stay behind when this disk, its first one, pivots: it was not when the copy was begun.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn leaves_memory(&self) -> Result<bool, Problem> {
        let memory = self.source()?.memory();
        Ok(!self.pivoted && is_there(&memory)? && !follows(self, &Beside::Memory, &memory)?)
    }

    /// A core dump beside this disk, the VM's first one, that was written since the copy was begun, and would be where nobody looks for it
    /// or not as the VM's are to be: sealed, or in the clear.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn leaves_core(&self, seals: bool) -> Result<Option<PathBuf>, Problem> {
        if self.pivoted {
            return Ok(None);
        }
        for (what, path) in self.source()?.all_beside()? {
            if !matches!(what, Beside::Core(_)) || follows(self, &what, &path)? {
                continue;
            }
            let sealed =
                |mut file: File| Header::read(&mut file).is_ok_and(|it| !it.is_in_the_clear());
            if self.moves() || sealed(sealed::open(&path)?) != seals {
                return Ok(Some(path));
            }
        }
        Ok(None)
    }
}
