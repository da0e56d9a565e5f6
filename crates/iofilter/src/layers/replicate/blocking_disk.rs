//! A disk used by a thread that may sleep, one request after the other: the source of a copy, the replica, the map.
//! Each is a chain of its own.

use std::io;

use crate::stack::blocking;
use crate::stack::chain::Chain;
use crate::stack::memory::Segment;
use crate::stack::request::{IoError, Operation};
use crate::storage::file::FileDisk;

/// See the module.
pub struct BlockingDisk {
    chain: Chain,
    /// The file below, where a flush that has failed may be tried again.
    file: Option<FileDisk>,
}

impl BlockingDisk {
    /// What this chain leads to.
    #[must_use]
    pub fn new(chain: Chain) -> Self {
        Self { chain, file: None }
    }

    /// A file of ours alone. After a flush that has failed all that was written since the last good one is to be
    /// written again; then the next one may be good.
    ///
    /// # Errors
    /// The system refuses what a chain needs.
    pub fn file(file: FileDisk, size: u64) -> io::Result<Self> {
        let chain = Chain::new(size, false, Vec::new(), file.blocking_queue())?;
        Ok(Self { chain, file: Some(file) })
    }

    /// Reads what fills the segment.
    ///
    /// # Errors
    /// [`IoError`].
    pub fn read(&mut self, offset: u64, into: Segment) -> Result<(), IoError> {
        self.run(Operation::Read, offset, into.len() as u64, Some(into))
    }

    /// Writes what is in the segment.
    ///
    /// # Errors
    /// [`IoError`].
    pub fn write(&mut self, offset: u64, from: Segment) -> Result<(), IoError> {
        self.run(Operation::Write, offset, from.len() as u64, Some(from))
    }

    /// Makes a part of it zeroes, if possible by giving its room back.
    ///
    /// # Errors
    /// [`IoError`].
    pub fn zero(&mut self, offset: u64, length: u64) -> Result<(), IoError> {
        self.run(Operation::WriteZeroes { unmap: true }, offset, length, None)
    }

    /// Whether zeroes cost no more than a hole.
    #[must_use]
    pub fn punches(&self) -> bool {
        self.file.as_ref().is_some_and(FileDisk::punches)
    }

    /// Makes durable what was written.
    ///
    /// # Errors
    /// [`IoError`]; see [`BlockingDisk::file`].
    pub fn flush(&mut self) -> Result<(), IoError> {
        let flushed = self.run(Operation::Flush, 0, 0, None);
        if let (Err(_), Some(file)) = (&flushed, &self.file) {
            file.forget_failed_flush();
        }
        flushed
    }

    fn run(
        &mut self,
        operation: Operation,
        offset: u64,
        length: u64,
        memory: Option<Segment>,
    ) -> Result<(), IoError> {
        let id = self.chain.begin().ok_or(IoError::Overload)?;
        if let Some(segment) = memory {
            self.chain.data_mut(id).push(segment);
        }
        self.chain.submit(id, operation, offset, length, 0);
        let result = blocking::drain(&mut self.chain);
        if let (Err(IoError::Truncated), Some(file)) = (result, &self.file) {
            file.forget_cut();
        }
        result
    }
}
