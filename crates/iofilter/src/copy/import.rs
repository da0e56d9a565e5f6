//! Writing an image through a chain.
//!
//! Holes of the source and blocks of zeroes become write-zeroes that may unmap, and so does the rest
//! of the disk: a fresh image stays sparse.
//!
//! Written data is flushed regularly, and only then reported as durable: a caller that records that can
//! have a later import resume there.

use std::time::Duration;

use vmseal_api::filter::DiskActivity;

use crate::copy::engine::{self, Engine, Flushes, UNIT};
use crate::copy::source::{Source, SourceError};
use crate::copy::to_chain::{ToChain, Zeroes};
use crate::disk::status::DiskState;
use crate::stack::chain::Chain;
use crate::stack::request::IoError;
use crate::stack::stop::Stop;
use crate::storage::extent::{Own, OwnExtent};

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
    let range = from..chain.size();
    let (mut image, mut disk) = (Image(source), ToChain::new(chain, Zeroes::Unmap));
    let flushes = Some(Flushes { bytes: FLUSH_BYTES, every: FLUSH_EVERY });
    let engine = Engine { range, pace: &mut state.paced(), stop, flushes };
    let imported = engine.run(&mut image, &mut disk, &mut |progress| {
        // The last sector may be partial: no import resumes there.
        let durable = progress.durable.min(total) / UNIT * UNIT;
        state.set(DiskActivity::Importing { done: progress.done.min(total), total, durable });
    });
    imported
        .map_err(|error| error.told(ImportError::Stopped, ImportError::Source, ImportError::Disk))
}

/// An image, and zeroes after it.
struct Image<'a>(&'a Source);

impl engine::Source for Image<'_> {
    type Error = SourceError;

    /// A hole or data at `at`, a multiple of [`UNIT`], up to another one.
    fn part(&mut self, at: u64, end: u64) -> Result<OwnExtent, SourceError> {
        let total = self.0.size();
        if at >= total {
            return Ok(OwnExtent { content: Own::Zeroes, end });
        }
        let extent = self.0.extent(at)?;
        if !extent.data {
            // The part after the image's end is zero, too.
            let hole = if extent.end == total { end } else { extent.end / UNIT * UNIT };
            if hole > at {
                return Ok(OwnExtent { content: Own::Zeroes, end: hole });
            }
        }
        Ok(OwnExtent { content: Own::Data, end: extent.end.next_multiple_of(UNIT).min(end) })
    }

    fn read(&mut self, bytes: &mut [u8], at: u64) -> Result<(), SourceError> {
        // The last sector may be partial; the part after it on the disk is zero.
        let there = self.0.size().saturating_sub(at).min(bytes.len() as u64) as usize;
        bytes[there..].fill(0);
        self.0.read(&mut bytes[..there], at)
    }
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
    use crate::stack::request::{Operation, RequestId};

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
