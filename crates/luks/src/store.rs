//! Where a header lies: a file, or whatever holds a disk. Only the first [`crate::DATA_OFFSET`] bytes
//! are touched.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A place that holds a disk with its header. The holder of the disk's lease calls it, nobody else.
pub trait HeaderStore {
    /// How many bytes it holds, header included.
    ///
    /// # Errors
    /// Of the backend.
    fn size(&self) -> io::Result<u64>;

    /// Fills `buffer` from `offset`. Past the end is an error.
    ///
    /// # Errors
    /// Of the backend.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Writes all of `bytes` at `offset`; durable after the next [`HeaderStore::flush`], not before.
    ///
    /// # Errors
    /// Of the backend.
    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Returns when everything written is durable.
    ///
    /// # Errors
    /// Of the backend.
    fn flush(&mut self) -> io::Result<()>;
}

/// A regular file or block device, opened without `O_DIRECT`.
impl HeaderStore for File {
    fn size(&self) -> io::Result<u64> {
        use std::io::{Seek, SeekFrom};
        let mut file = self;
        // The length in the metadata is zero for a block device; its end is not.
        file.seek(SeekFrom::End(0))
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }

    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sync_data()
    }
}
