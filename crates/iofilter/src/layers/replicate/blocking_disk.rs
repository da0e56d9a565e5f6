//! A disk used by a thread that may sleep, one request after the other: the source of a copy, the replica, the map.
//! Each has a chain of its own.

use std::io;

use crate::stack::blocking;
use crate::stack::chain::Chain;
use crate::stack::memory::Segment;
use crate::stack::request::{IoError, Operation};
use crate::storage::file::FileDisk;
use crate::storage::nbd::NbdDisk;

/// See the module.
pub struct BlockingDisk {
    pub(super) chain: Chain,
    /// The file below, where a failed flush may be tried again.
    file: Option<FileDisk>,
    /// The same of a server.
    server: Option<NbdDisk>,
    /// Whether zeroes become holes, where the file can have them.
    punches: bool,
}

impl BlockingDisk {
    /// The chain to the disk.
    #[must_use]
    pub fn new(chain: Chain) -> Self {
        Self { chain, file: None, server: None, punches: false }
    }

    /// A chain over a file that only we write, as with [`BlockingDisk::file`]; `punches`: its zeroes become holes.
    #[must_use]
    pub fn over(chain: Chain, file: Option<FileDisk>, punches: bool) -> Self {
        Self { chain, file, server: None, punches }
    }

    /// The same, over an export that only we write: as with [`BlockingDisk::file`].
    #[must_use]
    pub fn at_server(self, export: NbdDisk) -> Self {
        Self { server: Some(export), ..self }
    }

    /// A file that only we write. After a failed flush the caller must write again everything since the last good one;
    /// then the next flush may succeed.
    ///
    /// # Errors
    /// The system refuses what a chain needs.
    pub fn file(file: FileDisk, size: u64) -> io::Result<Self> {
        let chain = Chain::new(size, false, Vec::new(), file.blocking_queue())?;
        Ok(Self { chain, file: Some(file), server: None, punches: true })
    }

    /// Fills the segment from the disk.
    ///
    /// # Errors
    /// [`IoError`].
    pub fn read(&mut self, offset: u64, into: Segment) -> Result<(), IoError> {
        self.run(Operation::Read, offset, into.len() as u64, Some(into))
    }

    /// Writes the segment.
    ///
    /// # Errors
    /// [`IoError`].
    pub fn write(&mut self, offset: u64, from: Segment) -> Result<(), IoError> {
        self.run(Operation::Write, offset, from.len() as u64, Some(from))
    }

    /// Makes a range of it zeroes, if possible by giving back its space.
    ///
    /// # Errors
    /// [`IoError`].
    pub fn zero(&mut self, offset: u64, length: u64) -> Result<(), IoError> {
        self.run(Operation::WriteZeroes { unmap: true }, offset, length, None)
    }

    /// Whether zeroes cost no more than a hole.
    #[must_use]
    pub fn punches(&self) -> bool {
        self.punches && self.file.as_ref().is_some_and(FileDisk::punches)
    }

    /// Makes earlier writes durable.
    ///
    /// # Errors
    /// [`IoError`]; see [`BlockingDisk::file`].
    pub fn flush(&mut self) -> Result<(), IoError> {
        let flushed = self.run(Operation::Flush, 0, 0, None);
        if let (Err(_), Some(file)) = (&flushed, &self.file) {
            file.forget_failed_flush();
        }
        if let (Err(_), Some(export)) = (&flushed, &self.server) {
            export.forget_failed_flush();
        }
        flushed
    }

    /// The caller will write all of a truncated file again if it gets its length back.
    pub(super) fn forget_cut(&self) {
        if let Some(file) = &self.file {
            file.forget_cut();
        }
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
        if result == Err(IoError::Truncated) {
            self.forget_cut();
        }
        result
    }
}
