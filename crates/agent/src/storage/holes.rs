//! Where a file has no data.

use std::fs::File;
use std::io;
use std::ops::Range;

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};

/// The first range of a file that may hold data, from `at` on and before `end`.
pub(crate) fn next_data(file: &File, at: u64, end: u64) -> io::Result<Option<Range<u64>>> {
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
