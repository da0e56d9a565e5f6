//! Writing an image through a chain.
//!
//! Holes of the source and blocks of zeroes become write-zeroes that may unmap, and so does the rest
//! of the disk: a fresh image stays sparse.
//!
//! Written data is flushed regularly, and only then reported as durable: a caller that records that can
//! have a later import resume there.

use std::time::{Duration, Instant};

use vmseal_api::filter::{CRYPT_SECTOR, DiskActivity};

use crate::copy::source::{Source, SourceError};
use crate::disk::pacing::Paced;
use crate::disk::status::DiskState;
use crate::stack::blocking;
use crate::stack::chain::Chain;
use crate::stack::memory::Segment;
use crate::stack::request::{IoError, Operation};
use crate::stack::stop::Stop;

/// How much of the source is read at a time.
const CHUNK: usize = 1024 * 1024;

/// The unit in which zeroes are looked for.
const UNIT: u64 = CRYPT_SECTOR as u64;

/// The longest write-zeroes, so that a stop is noticed soon.
const ZEROES_MAX: u64 = 256 * 1024 * 1024;

/// The most bytes written between flushes: a few tenths of a second of work to repeat.
const FLUSH_BYTES: u64 = 32 * 1024 * 1024;

/// The longest time between flushes.
const FLUSH_EVERY: Duration = Duration::from_secs(2);

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
    /// Asked to resume where no import can have stopped.
    #[error("an import cannot resume at byte {from} of {image}")]
    From {
        /// Where.
        from: u64,
        /// The image's length.
        image: u64,
    },
    /// The source.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The disk cannot be written.
    #[error("the disk cannot be written: {0}")]
    Disk(#[from] IoError),
    /// Asked to stop.
    #[error("the import was stopped")]
    Stopped,
}

/// Writes `source` to the start of the disk and zeroes to the rest, and flushes. The part before `from`
/// is there already.
///
/// # Errors
/// [`ImportError`]; the disk's content after the part last reported as durable is undefined then.
pub fn run(
    source: &Source,
    from: u64,
    chain: &mut Chain,
    state: &DiskState,
    stop: &Stop,
) -> Result<(), ImportError> {
    let total = source.size();
    if total > chain.size() {
        return Err(ImportError::TooLong { image: total, disk: chain.size() });
    }
    if from > total || !from.is_multiple_of(UNIT) {
        return Err(ImportError::From { from, image: total });
    }
    let (buffer, paced) = (vec![0; CHUNK], state.paced());
    let mut import = Import { source, chain, stop, paced, buffer, written: 0 };
    let (mut at, mut durable, mut flushed) = (from, from, Instant::now());
    while at < total {
        state.set(DiskActivity::Importing { done: at, total, durable });
        at = import.step(at, total)?;
        if import.written >= FLUSH_BYTES || flushed.elapsed() >= FLUSH_EVERY {
            blocking::flush(import.chain)?;
            (import.written, flushed) = (0, Instant::now());
            // The last sector may be partial: no import resumes there.
            durable = at / UNIT * UNIT;
        }
    }
    state.set(DiskActivity::Importing { done: total, total, durable });
    let rest = total.next_multiple_of(UNIT);
    import.zeroes(rest, import.chain.size().saturating_sub(rest))?;
    blocking::flush(import.chain)?;
    Ok(())
}

struct Import<'a> {
    source: &'a Source,
    chain: &'a mut Chain,
    stop: &'a Stop,
    paced: Paced,
    buffer: Vec<u8>,
    /// Bytes since the last flush.
    written: u64,
}

impl Import<'_> {
    /// Handles a hole or a chunk at `at` (a multiple of [`UNIT`]); returns where it ends.
    fn step(&mut self, at: u64, total: u64) -> Result<u64, ImportError> {
        // For the rate holes do not count.
        self.pass(0)?;
        let extent = self.source.extent(at)?;
        if !extent.data {
            // The part after the source's end is zero, too.
            let end = if extent.end == total { total.next_multiple_of(UNIT) } else { extent.end };
            let end = end / UNIT * UNIT;
            if end > at {
                self.zeroes(at, end - at)?;
                return Ok(end.min(total));
            }
        }
        let end = extent.end.next_multiple_of(UNIT).min(total);
        let length = (end - at).min(CHUNK as u64) as usize;
        self.pass(length as u64)?;
        self.source.read(&mut self.buffer[..length], at)?;
        // The last sector may be partial; the part after it on the disk is zero.
        let whole = length.next_multiple_of(UNIT as usize);
        self.buffer[length..whole].fill(0);
        self.chunk(at, whole)?;
        self.written += whole as u64;
        Ok(at + length as u64)
    }

    /// Waits until the pace allows so many bytes.
    fn pass(&mut self, bytes: u64) -> Result<(), ImportError> {
        if self.paced.wait(bytes, self.stop) { Ok(()) } else { Err(ImportError::Stopped) }
    }

    /// Writes the buffer's first `length` bytes, run by run of zeroes and data.
    fn chunk(&mut self, at: u64, length: usize) -> Result<(), ImportError> {
        let mut start = 0;
        while let Some((end, zero)) = run_of_zeroes_or_data(&self.buffer[..length], start) {
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
        // At most CHUNK / UNIT = 256 runs per chunk, which a chain can hold.
        let id = self.chain.begin().ok_or(IoError::Overload)?;
        if let Some(segment) = segment {
            self.chain.data_mut(id).push(segment);
        }
        self.chain.submit(id, operation, offset, length, 0);
        Ok(())
    }
}

/// Where the run of zeroes or of data that begins at `start` ends, in units, and which of the two it is;
/// none at the end.
pub(crate) fn run_of_zeroes_or_data(bytes: &[u8], start: usize) -> Option<(usize, bool)> {
    let is_zero = |bytes: &[u8]| bytes.iter().all(|&byte| byte == 0);
    let mut units = bytes.get(start..)?.chunks(UNIT as usize);
    let first = units.next()?;
    let zero = is_zero(first);
    let more = units.take_while(|unit| is_zero(unit) == zero).map(<[u8]>::len).sum::<usize>();
    Some((start + first.len() + more, zero))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::BorrowedFd;
    use std::sync::Arc;

    use vmseal_api::id::DiskId;
    use vmseal_api::transfer::ImageFormat;

    use super::*;
    use crate::stack::chain::{Io, Storage};
    use crate::stack::request::RequestId;

    /// Knows what a power cut would leave, and checks at each request whether more is reported as durable.
    struct Forgetful {
        state: Arc<DiskState>,
        written: u64,
        flushed: u64,
        seen: u64,
    }

    impl Storage for Forgetful {
        fn prepare(&mut self, _capacity: usize) {}

        fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
            if let DiskActivity::Importing { durable, .. } = self.state.status().state {
                assert!(durable <= self.flushed, "{durable} durable, {} flushed", self.flushed);
                self.seen = self.seen.max(durable);
            }
            let request = io.request(id);
            match request.operation {
                Operation::Flush => self.flushed = self.written,
                _ => self.written = request.offset + request.length,
            }
            io.complete(id, Ok(()));
        }

        fn poll(&mut self, _io: &mut Io<'_>) {
            // The last request is the last flush.
            assert!(self.flushed < 100 << 20 || self.seen >= 2 * FLUSH_BYTES, "{}", self.seen);
        }

        fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
            None
        }
    }

    #[test]
    fn nothing_is_called_durable_that_a_power_cut_would_take() {
        let mut image: File = tempfile::tempfile().unwrap();
        let size = 100 << 20;
        image.write_all(&vec![0x5a; size]).unwrap();
        let source = Source::open(image, ImageFormat::Raw).unwrap();
        let state = Arc::new(DiskState::new(DiskId::new(), 1));
        let backend = Forgetful { state: Arc::clone(&state), written: 0, flushed: 0, seen: 0 };
        let mut chain = Chain::new(size as u64, false, Vec::new(), Box::new(backend)).unwrap();
        run(&source, 0, &mut chain, &state, &Stop::new().unwrap()).unwrap();
    }
}
