//! Removing the image that a disk had before its copy took its place. First of all the copy is opened as it is on its datastore now
//! ([`super::copy_opens`]): what does not open is no reason to give up the only other image.
//!
//! With it go the layers that it had, its replica, and what was beside it: memory, core dumps, what a TPM kept. What was in the clear is overwritten with zeroes where the file has data, flushed, and removed; of what was encrypted the
//! header, without which the data key is lost. A file of the disk that has further names is not changed at all: linked clones stand on it, and only
//! the name here goes ([`crate::storage::linking`]). What has become of the image is returned, for who asked for its removal. The last clone that has the file overwrites it, when it is copied itself. On storage that writes elsewhere (flash, copy-on-write and
//! log-structured file systems, snapshots of the datastore) earlier versions of the blocks may remain: no program above the
//! medium can promise otherwise.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use vmseal_api::former_image::{Discard, FormerFate, FormerImage};
use vmseal_api::host::{DiskFacts, DiskSpec, VmSpec};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use super::{Mirror, beside, copy_opens, tpm};
use crate::mounts;
use crate::storage::builder::internal;
use crate::storage::gate::Gate;
use crate::storage::holes::next_data;
use crate::storage::home::Home;
use crate::storage::layers;
use crate::storage::locked::{Access, open_locked};
use crate::storage::replica::{self, former};
use crate::storage::sharing;

/// The most zeroes that are written at once, in bytes: enough that a device works on several parts of it.
const PIECE: usize = 4 << 20;

/// How much of a former image is overwritten at once, in bytes. A request of a guest may wait for this much. Between two pieces it is held
/// to its pace, and can be cancelled.
const OVERWRITE_PIECE: usize = 1 << 20;

/// How long nothing is overwritten after a piece while the guest runs, as a multiple of what the piece took: the guest has half of
/// the storage's time, unless a piece takes longer than [`REST_MAX`].
const REST: u32 = 1;

/// The longest of these rests: a cancelled removal, or one with another pace, does not wait longer for its end.
const REST_MAX: Duration = Duration::from_secs(1);

/// What direct I/O takes everywhere: places, lengths and memory are multiples of it.
const BLOCK: usize = 4096;

/// How much is overwritten between two flushes, in bytes: so that progress is what is on the medium, and a guest's own
/// flushes do not wait for gigabytes.
const FLUSH_AFTER: u64 = 64 << 20;

/// How fast a former image is overwritten.
#[derive(Clone, Copy)]
pub struct Speed<'a> {
    /// The pace that its task has; closed when it is cancelled.
    pub gate: &'a Gate,
    /// Whether the VM's guest runs now, with which the storage is shared.
    pub guest_runs: &'a AtomicBool,
    /// Sleeps for so long; tests count that.
    pub sleep: &'a dyn Fn(Duration),
}

impl Speed<'_> {
    /// Waits until so many bytes may be overwritten.
    fn pass(self, bytes: usize) -> Result<(), Problem> {
        self.gate.pass(bytes as u64).map_err(|_| ended())
    }

    /// Leaves the storage to the guest after a piece that took so long.
    fn rest(self, took: Duration) {
        (self.sleep)(self.rest_after(took));
    }

    /// How long that is.
    pub(super) fn rest_after(self, took: Duration) -> Duration {
        // It alone counts: nothing else is read by it.
        match self.guest_runs.load(Ordering::Relaxed) {
            true => took.saturating_mul(REST).min(REST_MAX),
            false => Duration::ZERO,
        }
    }
}

/// What has become so far of what a disk had before. A removal that meets a file in use is begun again with it.
#[derive(Debug, Default)]
pub struct Removed {
    /// Whether the image was there: else an earlier agent may have removed it, and files that follow it.
    image: bool,
    /// The files that were not overwritten, as they have further names, by inode.
    shared: BTreeSet<u64>,
    /// The linked clones that have those names, as far as they are known.
    clones: BTreeSet<String>,
    /// Whether the medium of the image is told which blocks are free.
    discard: Discard,
}

impl Removed {
    /// Whether a file stays as it is for who has further names of it; if so, that is noted.
    fn is_shared(&mut self, home: &Home, path: &Path, file: &File) -> Result<bool, Problem> {
        let Some(clones) = clones_with(home, path, file)? else { return Ok(false) };
        self.shared.insert(file.metadata().map_err(internal)?.ino());
        self.clones.extend(clones);
        Ok(true)
    }

    /// What has become of the former image of a disk, which had these facts.
    fn of(&self, disk: &DiskSpec, facts: &DiskFacts) -> FormerImage {
        let in_the_clear = *facts == DiskFacts::Raw;
        let fate = match (self.shared.is_empty(), self.image) {
            (false, _) => FormerFate::Shared {
                in_the_clear,
                clones: self.clones.iter().cloned().collect(),
                inodes: self.shared.iter().copied().collect(),
            },
            (true, false) => FormerFate::NotKnown,
            (true, true) if in_the_clear => FormerFate::Overwritten,
            (true, true) => FormerFate::HeaderOverwritten,
        };
        FormerImage { disk: disk.disk, name: disk.name.clone(), fate, discard: self.discard }
    }
}

/// Overwrites and removes the former image of a disk, then what was noted of its copy. Returns what has become of it; where nothing is
/// left, nothing is done. `progress` receives the bytes done and the total. Blocks.
///
/// # Errors
/// `wrong-state` before the disk has pivoted; those of the copy that does not open: nothing is changed then; `locked` without the key
/// of an encrypted copy; `in-use` while a filter has the file open; `cancelled`.
pub fn remove(
    spec: &VmSpec,
    disk: &DiskSpec,
    kek: Option<&SecretBytes>,
    removed: &mut Removed,
    progress: impl Fn(u64, u64),
    speed: Speed<'_>,
) -> Result<Option<FormerImage>, Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    let Some(mirror) = Mirror::find(&home, disk.disk)? else { return Ok(None) };
    if !mirror.pivoted {
        let what = format!("disk '{}' is still being copied", disk.name);
        return Err(Problem::new(ErrorCode::WrongState, what));
    }
    mirror.settle()?;
    copy_opens::require(&mirror, spec, disk, kek)?;
    let home = mirror.source()?;
    let path = home.source(disk.disk);
    let facts = &mirror.note.source_facts;
    if let Some(file) = open_locked(&path, Access::Write)? {
        removed.image = true;
        removed.discard = mounts::discard(&file).unwrap_or_default();
        let end = end_of(facts, &file, true)?;
        if !removed.is_shared(&home, &path, &file)? {
            overwrite(&file, end, |done| progress(done, end), speed)?;
        }
        home.remove_locked(&path)?;
    }
    if mirror.note.layers {
        // After the image, whose header has the key of encrypted ones.
        drop_layers(&home, &mirror, removed, |file, has_header| {
            let end = end_of(facts, file, has_header)?;
            overwrite(file, end, |done| progress(done, end), speed)
        })?;
    }
    beside::drop_sources(&mirror, |file, end| overwrite(file, end, |_| {}, speed))?;
    former::remove(spec.vm, disk, &mirror.note.copy, |file| {
        let end = end_of(facts, file, true)?;
        overwrite(file, end, |done| progress(done, end), speed)
    })?;
    if mirror.moves() {
        // What the former replica was known by. That of the copy is known beside the copy.
        replica::remove_beside(&home, disk.disk)?;
    }
    tpm::drop_sources(&mirror)?;
    home.remove(&home.mirror_map(disk.disk))?;
    home.remove_note(&home.mirror_pace(disk.disk))?;
    mirror.remove_notes()?;
    Ok(Some(removed.of(disk, facts)))
}

/// Removes the former layers of a disk, and the names of what it stood on; `overwrite` gets each file that nobody else has, and whether it
/// begins with the header.
fn drop_layers(
    home: &Home,
    mirror: &Mirror,
    removed: &mut Removed,
    overwrite: impl Fn(&File, bool) -> Result<(), Problem>,
) -> Result<(), Problem> {
    // They are found by the names that are removed here.
    let clones = sharing::clones_of(home, &home.base_files(Some(mirror.disk))?);
    let mut left = Vec::new();
    let drop_layer = |path: &Path, file: &File| match removed.is_shared(home, path, file)? {
        true => Ok(()),
        false => overwrite(file, false),
    };
    let dropped = layers::drop_sources(home, mirror.disk, drop_layer, &overwrite, &mut left);
    if !left.is_empty() {
        removed.shared.extend(left);
        removed.clones.extend(clones.unwrap_or_default());
    }
    dropped
}

/// Up to where a former file is overwritten: of what was encrypted that is the header, where it begins with that.
fn end_of(facts: &DiskFacts, file: &File, has_header: bool) -> Result<u64, Problem> {
    let length = file.metadata().map_err(internal)?.len();
    Ok(match facts {
        DiskFacts::Raw => length,
        DiskFacts::Luks2 { data_offset, .. } if has_header => length.min(*data_offset),
        DiskFacts::Luks2 { .. } => 0,
    })
}

/// The linked clones that have further names of a former file, as far as they are known: it stays as it is for who has those. None where it has
/// no further name. That alone decides, and not whether clones are found, as a clone's directory may have been renamed. Nobody gives the
/// file another name from here on: its disk has pivoted, and [`crate::storage::linking`] looks for that afterwards.
fn clones_with(home: &Home, path: &Path, file: &File) -> Result<Option<Vec<String>>, Problem> {
    if !sharing::has_other_names(file).map_err(internal)? {
        return Ok(None);
    }
    let clones = sharing::clones_of(home, &[path.to_owned()]).unwrap_or_default();
    // Those may have gone while they were looked for, and have left the file to who is the last.
    if !sharing::has_other_names(file).map_err(internal)? {
        return Ok(None);
    }
    tracing::warn!(path = %path.display(), clones = %clones.join(", "), "it has further names and is not overwritten: linked clones keep it");
    Ok(Some(clones))
}

fn ended() -> Problem {
    Problem::new(ErrorCode::Cancelled, "the removal of the former image was cancelled")
}

/// Overwrites the data of a file before `end` with zeroes, durably.
fn overwrite(
    file: &File,
    end: u64,
    progress: impl Fn(u64),
    speed: Speed<'_>,
) -> Result<(), Problem> {
    let failed = |error: io::Error| internal(format!("the former image: {error}"));
    let zeroes = Zeroes::new(file);
    let (mut at, mut unflushed) = (0, 0);
    while let Some(data) = next_data(file, at, end).map_err(failed)? {
        at = data.start;
        while at < data.end {
            let left = usize::try_from(data.end - at).unwrap_or(OVERWRITE_PIECE);
            let piece = left.min(OVERWRITE_PIECE);
            speed.pass(piece)?;
            let begun = Instant::now();
            zeroes.write(piece, at).map_err(failed)?;
            at += piece as u64;
            unflushed += piece as u64;
            if unflushed >= FLUSH_AFTER {
                file.sync_data().map_err(failed)?;
                unflushed = 0;
                progress(at);
            }
            speed.rest(begun.elapsed());
        }
    }
    file.sync_all().map_err(failed)?;
    progress(end);
    Ok(())
}

/// Zeroes, and where they are written: past the page cache where the file system can, as nobody reads them. There they would
/// take the place of what others use, and on a host whose memory is full of it that takes longer than writing them.
pub(crate) struct Zeroes<'a> {
    file: &'a File,
    bytes: Vec<u8>,
    /// Where those in `bytes` begin that are aligned for direct I/O.
    aligned: usize,
}

impl<'a> Zeroes<'a> {
    pub(crate) fn new(file: &'a File) -> Self {
        let bytes = vec![0; PIECE + BLOCK];
        let aligned = bytes.as_ptr().align_offset(BLOCK).min(BLOCK);
        Self { file, bytes, aligned }
    }

    /// Writes so many, at most [`PIECE`], at `at`.
    pub(crate) fn write(&self, length: usize, at: u64) -> io::Result<()> {
        let zeroes = &self.bytes[self.aligned..][..length];
        let whole = length.is_multiple_of(BLOCK) && at.is_multiple_of(BLOCK as u64);
        if whole && set_direct(self.file, true).is_ok() {
            match self.file.write_all_at(zeroes, at) {
                // It has blocks of another size, or takes the flag and no such writes.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                written => return written,
            }
        }
        set_direct(self.file, false)?;
        self.file.write_all_at(zeroes, at)
    }
}

/// Has a file written past the page cache, or through it.
fn set_direct(file: &File, direct: bool) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?);
    if flags.contains(OFlag::O_DIRECT) == direct {
        return Ok(());
    }
    let mut wanted = flags;
    wanted.set(OFlag::O_DIRECT, direct);
    Ok(fcntl(file, FcntlArg::F_SETFL(wanted)).map(drop)?)
}
