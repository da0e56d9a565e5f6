//! The end of a conversion: the header, or the end of the file, is put right. All of it can be done again.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

use crate::storage::holes::next_data;
use crate::storage::mirror::source::Zeroes;

/// The unit in which a header is copied, in bytes: what direct I/O takes everywhere.
const BLOCK: usize = 4096;

/// How much is overwritten at once, in bytes.
const PIECE: u64 = 4 << 20;

/// Overwrites what a file has before `end`, durably, and gives the room back unless it `keeps_room`.
///
/// # Errors
/// Those of the file system.
pub fn overwrite(file: &File, end: u64, keeps_room: bool) -> io::Result<()> {
    let (zeroes, mut at) = (Zeroes::new(file), 0);
    while let Some(data) = next_data(file, at, end)? {
        at = data.start;
        while at < data.end {
            let piece = (data.end - at).min(PIECE);
            zeroes.write(piece as usize, at)?;
            at += piece;
        }
    }
    file.sync_data()?;
    if !keeps_room {
        punch(file, 0..end)?;
    }
    Ok(())
}

/// Gives room back, where the file system does that.
fn punch(file: &File, part: Range<u64>) -> io::Result<()> {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let sign = |at: u64| i64::try_from(at).map_err(|_| io::Error::from(Errno::EFBIG));
    match fallocate(file, flags, sign(part.start)?, sign(part.end - part.start)?) {
        Ok(()) | Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Copies what is not zero of the first `end` bytes of a file to another one, durably.
///
/// # Errors
/// Those of the file system.
pub fn copy_beginning(from: &File, to: &File, end: u64) -> io::Result<()> {
    let mut block = vec![0; BLOCK];
    let mut at = 0;
    while let Some(data) = next_data(from, at, end)? {
        at = data.start / BLOCK as u64 * BLOCK as u64;
        while at < data.end {
            let length = (end - at).min(BLOCK as u64) as usize;
            from.read_exact_at(&mut block[..length], at)?;
            if block[..length].iter().any(|byte| *byte != 0) {
                to.write_all_at(&block[..length], at)?;
            }
            at += length as u64;
        }
    }
    to.sync_all()
}
