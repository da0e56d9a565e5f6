//! Where a header is stored: a file, or any other backend of a disk. Only the first [`crate::DATA_OFFSET`]
//! bytes are accessed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Storage of a disk with its header. Only the holder of the disk's lease calls it.
pub trait HeaderStore {
    /// Its size in bytes, header included.
    ///
    /// # Errors
    /// Those of the backend.
    fn size(&self) -> io::Result<u64>;

    /// Fills `buffer` from `offset`. Past the end is an error.
    ///
    /// # Errors
    /// Those of the backend.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Writes all of `bytes` at `offset`; durable after the next [`HeaderStore::flush`], not before.
    ///
    /// # Errors
    /// Those of the backend.
    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Returns when everything written is durable.
    ///
    /// # Errors
    /// Those of the backend.
    fn flush(&mut self) -> io::Result<()>;
}

/// A regular file or block device, opened without `O_DIRECT`.
impl HeaderStore for File {
    fn size(&self) -> io::Result<u64> {
        use std::io::{Seek, SeekFrom};
        let mut file = self;
        // The length in the metadata of a block device is zero; its end is not.
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
