//! Writing a raw image through a chain.
//!
//! Holes of the source and blocks of zeroes become write-zeroes that may unmap, and so does the rest
//! of the disk: a fresh image stays sparse, and an import that was cut off can simply be done again.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt};

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use vmseal_api::filter::{CRYPT_SECTOR, DiskActivity};

use crate::blocking;
use crate::chain::Chain;
use crate::memory::Segment;
use crate::request::{IoError, Operation};
use crate::status::DiskState;
use crate::stop::Stop;

/// How much of the source is read at once.
const CHUNK: usize = 1024 * 1024;

/// The unit in which zeroes are looked for.
const UNIT: usize = CRYPT_SECTOR as usize;

/// The longest write-zeroes, so that a stop is noticed soon.
const ZEROES_MAX: u64 = 256 * 1024 * 1024;

/// Why an import failed.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The source is longer than the disk.
    #[error(
        "the image has {image} bytes and does not fit the disk of {disk}; make the disk larger"
    )]
    TooLong {
        /// The image's length.
        image: u64,
        /// The disk's size.
        disk: u64,
    },
    /// The source cannot be read.
    #[error("the image cannot be read: {0}")]
    Source(#[from] io::Error),
    /// The source became shorter.
    #[error("the image became shorter while it was read")]
    Shrunk,
    /// The disk cannot be written.
    #[error("the disk cannot be written: {0}")]
    Disk(#[from] IoError),
    /// Asked to stop.
    #[error("the import was stopped; start it again, it begins anew")]
    Stopped,
}

/// Writes `source` to the start of the disk and zeroes to the rest, and flushes.
///
/// # Errors
/// [`ImportError`]; the disk's content is undefined then.
pub fn run(
    source: &File,
    chain: &mut Chain,
    state: &DiskState,
    stop: &Stop,
) -> Result<(), ImportError> {
    let total = length(source)?;
    if total > chain.size() {
        return Err(ImportError::TooLong { image: total, disk: chain.size() });
    }
    let mut import = Import { source, chain, stop, buffer: vec![0; CHUNK] };
    let mut at = 0;
    while at < total {
        state.set(DiskActivity::Importing { done: at, total });
        at = import.step(at, total)?;
    }
    state.set(DiskActivity::Importing { done: total, total });
    let rest = total.next_multiple_of(UNIT as u64);
    import.zeroes(rest, import.chain.size().saturating_sub(rest))?;
    blocking::flush(import.chain)?;
    Ok(())
}

fn length(source: &File) -> io::Result<u64> {
    let metadata = source.metadata()?;
    if metadata.file_type().is_block_device() {
        return Ok(u64::try_from(lseek(source, 0, Whence::SeekEnd)?).unwrap_or(0));
    }
    Ok(metadata.len())
}

struct Import<'a> {
    source: &'a File,
    chain: &'a mut Chain,
    stop: &'a Stop,
    buffer: Vec<u8>,
}

impl Import<'_> {
    /// Deals with a hole or a chunk at `at` (a multiple of [`UNIT`]); returns where it ends.
    fn step(&mut self, at: u64, total: u64) -> Result<u64, ImportError> {
        if self.stop.asked() {
            return Err(ImportError::Stopped);
        }
        let data = self.next_data(at, total)? / UNIT as u64 * UNIT as u64;
        if data > at {
            self.zeroes(at, data - at)?;
            return Ok(data);
        }
        let length = (total - at).min(CHUNK as u64) as usize;
        self.source.read_exact_at(&mut self.buffer[..length], at).map_err(|error| {
            match error.kind() {
                io::ErrorKind::UnexpectedEof => ImportError::Shrunk,
                _ => ImportError::Source(error),
            }
        })?;
        // The last sector may be partial; what is behind it on the disk is zero.
        let whole = length.next_multiple_of(UNIT);
        self.buffer[length..whole].fill(0);
        self.chunk(at, whole)?;
        Ok(at + length as u64)
    }

    /// Where data comes next; `total` if there is none.
    fn next_data(&self, at: u64, total: u64) -> Result<u64, ImportError> {
        match lseek(self.source, at as i64, Whence::SeekData) {
            Ok(data) => Ok(u64::try_from(data).unwrap_or(0).clamp(at, total)),
            Err(Errno::ENXIO) => Ok(total.next_multiple_of(UNIT as u64)),
            // A file system, or a device, that does not know of holes.
            Err(Errno::EINVAL | Errno::EOPNOTSUPP) => Ok(at),
            Err(error) => Err(ImportError::Source(error.into())),
        }
    }

    /// Writes the buffer's first `length` bytes, run by run of zeroes and data.
    fn chunk(&mut self, at: u64, length: usize) -> Result<(), ImportError> {
        let mut start = 0;
        while start < length {
            let zero = is_zero(&self.buffer[start..start + UNIT]);
            let mut end = start + UNIT;
            while end < length && is_zero(&self.buffer[end..end + UNIT]) == zero {
                end += UNIT;
            }
            let offset = at + start as u64;
            if zero {
                self.submit(
                    Operation::WriteZeroes { unmap: true },
                    offset,
                    (end - start) as u64,
                    None,
                )?;
            } else {
                let part = &mut self.buffer[start..end];
                // SAFETY: the buffer stays until `drain` below has seen everything complete.
                let segment = unsafe { Segment::new(part.as_mut_ptr(), part.len()) };
                self.submit(Operation::Write, offset, 0, Some(segment))?;
            }
            start = end;
        }
        Ok(blocking::drain(self.chain)?)
    }

    fn zeroes(&mut self, mut at: u64, length: u64) -> Result<(), ImportError> {
        let end = at + length;
        while at < end {
            if self.stop.asked() {
                return Err(ImportError::Stopped);
            }
            let piece = (end - at).min(ZEROES_MAX);
            self.submit(Operation::WriteZeroes { unmap: true }, at, piece, None)?;
            blocking::drain(self.chain)?;
            at += piece;
        }
        Ok(())
    }

    fn submit(
        &mut self,
        operation: Operation,
        offset: u64,
        length: u64,
        segment: Option<Segment>,
    ) -> Result<(), ImportError> {
        // At most CHUNK / UNIT = 256 runs a chunk, which is what a chain takes.
        let id = self.chain.begin().ok_or(IoError::Overload)?;
        if let Some(segment) = segment {
            self.chain.data_mut(id).push(segment);
        }
        self.chain.submit(id, operation, offset, length, 0);
        Ok(())
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}
