//! Removing the image that a disk had before its copy took its place.
//!
//! What was in the clear is overwritten with zeroes where the file has data, flushed, and removed; of what was encrypted the
//! header, without which the data key is lost. On storage that writes elsewhere (flash, copy-on-write and
//! log-structured file systems, snapshots of the datastore) earlier versions of the blocks may remain: no program above the
//! medium can promise otherwise.

use std::fs::File;
use std::os::unix::fs::FileExt;

use vmseal_api::host::{DiskFacts, DiskSpec, VmSpec};
use vmseal_api::problem::{ErrorCode, Problem};

use super::Mirror;
use crate::storage::builder::internal;
use crate::storage::home::Home;
use crate::storage::locked::{Access, open_locked};

/// How much is overwritten at once, in bytes; between two pieces it can be cancelled.
const PIECE: usize = 1 << 20;

/// How much is overwritten between two flushes, in bytes: so that progress is what is on the medium, and a guest's own
/// flushes do not wait for gigabytes.
const FLUSH_AFTER: u64 = 64 << 20;

/// Overwrites and removes the former image of a disk, then what was noted of its copy. Where nothing is left, nothing is done.
/// `progress` receives the bytes done and the total. Blocks.
///
/// # Errors
/// `wrong-state` before the disk has pivoted; `in-use` while a filter has the file open; `cancelled`.
pub fn remove(
    spec: &VmSpec,
    disk: &DiskSpec,
    progress: impl Fn(u64, u64),
    is_cancelled: impl Fn() -> bool,
) -> Result<(), Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    let Some(mirror) = Mirror::find(&home, disk.disk)? else { return Ok(()) };
    if !mirror.pivoted {
        let what = format!("disk '{}' is still being copied", disk.name);
        return Err(Problem::new(ErrorCode::WrongState, what));
    }
    mirror.settle()?;
    let home = mirror.source()?;
    let path = home.source(disk.disk);
    if let Some(file) = open_locked(&path, Access::Write)? {
        let length = file.metadata().map_err(internal)?.len();
        let end = match &mirror.note.source_facts {
            DiskFacts::Raw => length,
            DiskFacts::Luks2 { data_offset, .. } => length.min(*data_offset),
        };
        overwrite(&file, end, |done| progress(done, end), is_cancelled)
            .map_err(|problem| problem.unwrap_or_else(ended))?;
        home.remove_locked(&path)?;
    }
    home.remove(&home.mirror_map(disk.disk))?;
    home.remove_note(&home.mirror_pace(disk.disk))?;
    mirror.remove_notes()
}

fn ended() -> Problem {
    Problem::new(ErrorCode::Cancelled, "the removal of the former image was cancelled")
}

/// Overwrites the data of a file before `end` with zeroes, durably. The error is none where it was cancelled.
fn overwrite(
    file: &File,
    end: u64,
    progress: impl Fn(u64),
    is_cancelled: impl Fn() -> bool,
) -> Result<(), Option<Problem>> {
    let failed = |error: std::io::Error| Some(internal(format!("the former image: {error}")));
    let zeroes = vec![0; PIECE];
    let (mut at, mut unflushed) = (0, 0);
    while let Some(data) = next_data(file, at, end).map_err(failed)? {
        at = data.start;
        while at < data.end {
            if is_cancelled() {
                return Err(None);
            }
            let piece = usize::try_from(data.end - at).unwrap_or(PIECE).min(PIECE);
            file.write_all_at(&zeroes[..piece], at).map_err(failed)?;
            at += piece as u64;
            unflushed += piece as u64;
            if unflushed >= FLUSH_AFTER {
                file.sync_data().map_err(failed)?;
                unflushed = 0;
                progress(at);
            }
        }
    }
    file.sync_all().map_err(failed)?;
    progress(end);
    Ok(())
}

/// The first range of a file that may hold data, from `at` on and before `end`.
fn next_data(file: &File, at: u64, end: u64) -> std::io::Result<Option<std::ops::Range<u64>>> {
    use nix::errno::Errno;
    use nix::unistd::{Whence, lseek};
    let seek = |at: u64, whence| {
        let at = i64::try_from(at).map_err(|_| Errno::EFBIG)?;
        lseek(file, at, whence).map(|at| at.max(0) as u64)
    };
    if at >= end {
        return Ok(None);
    }
    let start = match seek(at, Whence::SeekData) {
        Ok(start) if start < end => start,
        Ok(_) | Err(Errno::ENXIO) => return Ok(None),
        // The file system does not say where holes are.
        Err(Errno::EINVAL | Errno::EOPNOTSUPP) => return Ok(Some(at..end)),
        Err(error) => return Err(error.into()),
    };
    let hole = seek(start, Whence::SeekHole)?;
    Ok(Some(start..hole.min(end)))
}
