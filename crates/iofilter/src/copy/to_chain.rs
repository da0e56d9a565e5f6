//! A chain that is copied to: the runs of a piece are in flight together.

use crate::copy::engine::{Sink, next_run};
use crate::stack::blocking;
use crate::stack::chain::{Chain, ROOTS_MAX};
use crate::stack::memory::Segment;
use crate::stack::request::{IoError, Operation};

/// See the module. Zeroes may become holes.
pub struct ToChain<'a>(pub &'a mut Chain);

impl ToChain<'_> {
    /// Submits the runs of a piece. They use `bytes` until the chain is drained.
    fn submit_runs(&mut self, bytes: &mut [u8], at: u64) -> Result<(), IoError> {
        let mut start = 0;
        while let Some((end, zero)) = next_run(bytes, start, at) {
            let place = at + start as u64;
            if self.0.in_flight() == ROOTS_MAX {
                blocking::drain(self.0)?;
            }
            let id = self.0.begin().ok_or(IoError::Overload)?;
            if zero {
                let zeroes = Operation::WriteZeroes { unmap: true };
                self.0.submit(id, zeroes, place, (end - start) as u64, 0);
            } else {
                let run = &mut bytes[start..end];
                // SAFETY: the bytes stay borrowed until `piece` has seen everything complete.
                let segment = unsafe { Segment::new(run.as_mut_ptr(), run.len()) };
                self.0.data_mut(id).push(segment);
                self.0.submit(id, Operation::Write, place, 0, 0);
            }
            start = end;
        }
        Ok(())
    }
}

impl Sink for ToChain<'_> {
    type Error = IoError;

    fn write(&mut self, bytes: &mut [u8], at: u64) -> Result<(), IoError> {
        blocking::move_bytes(self.0, Operation::Write, bytes, at)
    }

    fn zero(&mut self, at: u64, length: u64) -> Result<(), IoError> {
        blocking::write_zeroes(self.0, at, length, true)
    }

    fn piece(&mut self, bytes: &mut [u8], at: u64) -> Result<(), IoError> {
        let submitted = self.submit_runs(bytes, at);
        // After an error, too: what is in flight uses the bytes.
        let written = blocking::drain(self.0);
        submitted.and(written)
    }

    fn flush(&mut self) -> Result<(), IoError> {
        blocking::flush(self.0)
    }
}
