//! The parts of an image: data and holes.

use std::io;
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};

/// A part of an image: data or a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Whether there are bytes to be read; else all of it is zero.
    pub data: bool,
    /// Where it ends.
    pub end: u64,
}

/// What an image has itself, without the files below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// Bytes.
    Data,
    /// Zeroes, whatever is below.
    Zeroes,
    /// Nothing: what is below shows.
    Nothing,
}

/// A part of an image with the files below it left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnExtent {
    /// What is there.
    pub content: Own,
    /// Where it ends.
    pub end: u64,
}

/// A file that ends before the requested part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the image ends at byte {length} of its file, before the end of the disk: it was truncated; restore it from a copy"
)]
pub struct Short {
    /// The length of the file, in bytes.
    pub length: u64,
}

/// The hole or the data at `at`, in a file that may have holes and should have at least `size` bytes.
///
/// # Errors
/// As lseek; [`Short`] in an error of kind `UnexpectedEof` where the file ends at `at` or before it: the
/// missing part is no hole.
pub fn raw_extent(file: impl AsFd, at: u64, size: u64) -> io::Result<Extent> {
    let file = file.as_fd();
    // A file system, or a device, without holes counts as all data.
    let seek = |whence, without| match lseek(file, at as i64, whence) {
        Ok(found) => Ok(Some(u64::try_from(found).unwrap_or(0).clamp(at, size))),
        Err(Errno::ENXIO) => Ok(None),
        Err(Errno::EINVAL | Errno::EOPNOTSUPP) => Ok(Some(without)),
        Err(error) => Err(io::Error::from(error)),
    };
    match seek(Whence::SeekData, at)? {
        // A hole that the file ends with, or the end of the file.
        None => {
            let length = lseek(file, 0, Whence::SeekEnd).map_err(io::Error::from)?;
            let length = u64::try_from(length).unwrap_or(0);
            if at >= length && at < size {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, Short { length }));
            }
            Ok(Extent { data: false, end: length.min(size) })
        }
        Some(data) if data > at => Ok(Extent { data: false, end: data }),
        Some(_) => {
            let end = seek(Whence::SeekHole, size)?.unwrap_or(size);
            Ok(Extent { data: true, end: if end > at { end } else { size } })
        }
    }
}
