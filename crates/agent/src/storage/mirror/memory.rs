//! The memory that snapshots keep beside a disk, which follows when the disk is copied.
//!
//! ```text
//!  vm.memory.snapshot-S ─ opened, sealed anew ─► DISK.copy-memory-S.new ─ flushed ─► DISK.copy-memory-S    beside the copy
//!        ── the disk pivots: its map says so ──
//!  vm.memory.snapshot-S ─► DISK.source-memory-S ;  DISK.copy-memory-S ─► vm.memory.snapshot-S
//!                                 └─► overwritten as it was stored, removed: with the former image
//! ```
//! What the guest's memory belongs to is what the snapshot keeps of the disks, and that is the same in their copies. Each file is
//! written with a key of its own. The name of a copy says that it is whole; before the disk pivots the former file stays as it
//! is, and afterwards any process that opens the disk puts the names right before the disk's own.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use vmseal_api::atomic_file;
use vmseal_api::host::{DiskFacts, DiskSpec, VmSpec};
use vmseal_api::id::{DiskId, SnapshotId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_seal::file::{FileError, HEADER_LEN, Header, Kind};
use vmseal_seal::frame::CONTENT_MAX;
use vmseal_seal::stream::SealedReader;
use vmseal_secret::SecretBytes;
use zeroize::Zeroizing;

use super::Mirror;
use super::note::MemoryForm;
use crate::storage::builder::internal;
use crate::storage::file_error::failed;
use crate::storage::gate::Gate;
use crate::storage::home::Home;
use crate::storage::locked::{Access, open_locked};
use crate::storage::memory::MemoryFiles;
use crate::storage::sealed::{self, remove_if_there, vm_key};

/// How much is written between two flushes, in bytes: a guest's own flushes do not wait for gigabytes.
const FLUSH_AFTER: u64 = 64 << 20;

/// How much is copied between two reports of the progress, in bytes.
const SHOW_AFTER: u64 = 8 << 20;

/// How the memories beside a disk are to be when its copy has taken its place; none where there are none. `home` is that of the
/// disk's image.
pub(super) fn form(
    home: &Home,
    spec: &VmSpec,
    disk: DiskId,
    forgets_key: bool,
) -> Result<Option<MemoryForm>, Problem> {
    if !MemoryFiles::are_beside(spec, disk) || home.snapshot_memories()?.is_empty() {
        return Ok(None);
    }
    let seals = spec.key.is_some() && !forgets_key;
    Ok(Some(if seals { MemoryForm::Sealed } else { MemoryForm::InTheClear }))
}

/// How much room copies of all memories here take, in bytes.
pub(super) fn room(home: &Home) -> Result<u64, Problem> {
    let each = home.snapshot_memories()?.into_values();
    Ok(each.filter_map(|path| path.metadata().ok()).map(|it| it.blocks() * 512).sum())
}

/// Those that are to be copied of a disk; none where it has pivoted.
fn of(mirror: &Mirror) -> Result<Vec<SnapshotId>, Problem> {
    if mirror.note.memory.is_none() || mirror.pivoted {
        return Ok(Vec::new());
    }
    Ok(mirror.source()?.snapshot_memories()?.into_keys().collect())
}

/// How many are copied, and how many there are in all.
pub(super) fn progress(mirror: &Mirror) -> Result<(usize, usize), Problem> {
    let all = of(mirror)?;
    let copied =
        if all.is_empty() { 0 } else { mirror.target()?.copy_memories(mirror.disk)?.len() };
    Ok((copied.min(all.len()), all.len()))
}

/// One that is not copied yet.
pub(super) fn next(mirror: &Mirror) -> Result<Option<SnapshotId>, Problem> {
    let all = of(mirror)?;
    if all.is_empty() {
        return Ok(None);
    }
    let copied = mirror.target()?.copy_memories(mirror.disk)?;
    Ok(all.into_iter().find(|snapshot| !copied.contains_key(snapshot)))
}

/// Copies a memory, as fast as `gate` lets it. `show` gets how many bytes are done, and the total. Blocks.
///
/// # Errors
/// `damaged`, `locked`, `no-space`; `cancelled` when the gate is closed.
pub(super) fn copy(
    mirror: &Mirror,
    (spec, disk): (&VmSpec, &DiskSpec),
    kek: Option<&SecretBytes>,
    snapshot: SnapshotId,
    gate: &Gate,
    show: impl Fn(u64, u64),
) -> Result<(), Problem> {
    let path = mirror.source()?.snapshot_memory(snapshot);
    let (mut from, header, total) = open(&path, mirror, (spec, disk), kek)?;
    let kept = mirror.target()?.copy_memory(disk.disk, snapshot);
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
            sealed::unreadable(&path, "the memory that a snapshot keeps", &error, &remedy(spec))
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

/// Opens a memory to be copied: its content, its header, and its length in bytes.
fn open(
    path: &Path,
    mirror: &Mirror,
    (spec, disk): (&VmSpec, &DiskSpec),
    kek: Option<&SecretBytes>,
) -> Result<(SealedReader<File>, Header, u64), Problem> {
    let refused = |error: FileError| sealed::refused(path, &error, &remedy(spec));
    let mut file = sealed::open(path)?;
    let header = Header::read(&mut file).map_err(refused)?;
    let total = file.metadata().map_err(|error| failed(path, "read", &error))?.len();
    let in_the_clear = header.is_in_the_clear();
    if in_the_clear && spec.key.is_some() && mirror.note.source_facts != DiskFacts::Raw {
        let what = format!(
            "{} is in the clear, and disk '{}', beside which it is, is not: somebody has put it there. {}",
            path.display(),
            disk.name,
            remedy(spec)
        );
        return Err(Problem::new(ErrorCode::Damaged, what));
    }
    let key = if in_the_clear { None } else { vm_key(spec, kek)? };
    let opened =
        vmseal_seal::file::open(sealed::open(path)?, spec.vm.0, Kind::Memory, key.as_ref());
    Ok((opened.map_err(refused)?, header, total))
}

fn remedy(spec: &VmSpec) -> String {
    format!(
        "Put the file back, or delete the snapshot (vmseal snapshot list {0}, vmseal snapshot delete {0})",
        spec.name
    )
}

/// The name of a copy that is being written.
fn unfinished(copy: &Path) -> PathBuf {
    copy.with_added_extension("new")
}

/// Removes the copies of a disk's memories, whole or not. They have not taken their places.
pub(super) fn drop_copies(target: &Home, disk: DiskId) -> Result<(), Problem> {
    for path in target.copy_memories(disk)?.into_values() {
        target.remove_note(&path)?;
    }
    target.remove_unfinished_memories(disk)
}

/// Gives what is now a former memory its name, where the copy of the disk is in another home.
pub(super) fn set_aside(mirror: &Mirror) -> Result<(), Problem> {
    if mirror.note.memory.is_none() || !mirror.moves() {
        return Ok(());
    }
    let source = mirror.source()?;
    for (snapshot, path) in source.snapshot_memories()? {
        super::rename(&path, &source.source_memory(mirror.disk, snapshot))?;
    }
    Ok(())
}

/// Gives the copies the names of the memories, which are set aside where they have those.
pub(super) fn take_place(mirror: &Mirror) -> Result<(), Problem> {
    let target = mirror.target()?;
    for (snapshot, copy) in target.copy_memories(mirror.disk)? {
        let (kept, former) =
            (target.snapshot_memory(snapshot), target.source_memory(mirror.disk, snapshot));
        // Where it is there, this has been done: what has the name is the copy, or nothing.
        if !mirror.moves() && is_there(&kept)? && !is_there(&former)? {
            super::rename(&kept, &former)?;
        }
        super::rename(&copy, &kept)?;
    }
    Ok(())
}

fn is_there(path: &Path) -> Result<bool, Problem> {
    match path.symlink_metadata() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed(path, "looked at", &error)),
    }
}

/// Removes what the memories were before. `overwrite` gets each file before that, and up to where its content is to be lost: of
/// what was sealed that is the header, without which its key is.
pub(super) fn drop_sources(
    mirror: &Mirror,
    overwrite: impl Fn(&File, u64) -> Result<(), Problem>,
) -> Result<(), Problem> {
    let home = mirror.source()?;
    for path in home.source_memories(mirror.disk)?.into_values() {
        let Some(file) = open_locked(&path, Access::Write)? else { continue };
        let length = file.metadata().map_err(internal)?.len();
        let sealed = Header::read(&mut &file).is_ok_and(|header| !header.is_in_the_clear());
        overwrite(&file, if sealed { length.min(HEADER_LEN as u64) } else { length })?;
        home.remove_locked(&path)?;
    }
    Ok(())
}
