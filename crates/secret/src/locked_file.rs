//! [`LockedFile`]: secrets that another process reads as a file.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;

use crate::memory::{MemoryError, Region, system};

/// A file in memory that is locked, never dumped, and wiped for all who have it open when this value goes. It is
/// no `memfd_secret`, which cannot be read as a file; and it may be longer than a [`crate::SecretBytes`].
pub struct LockedFile {
    fd: OwnedFd,
    memory: Region,
}

impl LockedFile {
    /// `len` zero bytes.
    ///
    /// # Errors
    /// [`MemoryError`]: there is no memory that can be locked.
    pub fn zeroed(len: usize) -> Result<Self, MemoryError> {
        let fd = memfd_create(c"vmseal-secret", MFdFlags::MFD_CLOEXEC)
            .map_err(system("memfd_create"))?;
        let size = i64::try_from(len).map_err(|_| MemoryError::Length(len))?;
        ftruncate(&fd, size).map_err(system("ftruncate"))?;
        let memory = Region::shared(&fd, len)?;
        Ok(Self { fd, memory })
    }

    /// The content, to be changed.
    #[must_use]
    pub fn expose_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut_slice()
    }

    /// A descriptor for reading alone, with a position and locks of its own.
    ///
    /// # Errors
    /// Those of opening it.
    pub fn reader(&self) -> io::Result<File> {
        File::open(format!("/proc/self/fd/{}", self.fd.as_raw_fd()))
    }
}

impl fmt::Debug for LockedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockedFile({:?})", self.memory)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_reader_sees_the_content_and_zeroes_when_the_owner_is_gone() {
        let mut file = LockedFile::zeroed(100_000).unwrap();
        file.expose_mut()[99_990..].copy_from_slice(b"the secret");
        let reader = file.reader().unwrap();
        let mut read = [0; 10];
        reader.read_exact_at(&mut read, 99_990).unwrap();
        assert_eq!(&read, b"the secret");
        assert_eq!(reader.metadata().unwrap().len(), 100_000);
        assert!(reader.write_at(b"x", 0).is_err());
        assert_eq!(format!("{file:?}"), "LockedFile(Region(100000 bytes))");
        drop(file);
        reader.read_exact_at(&mut read, 99_990).unwrap();
        assert_eq!(read, [0; 10]);
    }
}
