//! Memory that two processes share.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::stat::fstat;
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use nix::unistd::ftruncate;

/// Memory that two processes share: a memfd, sealed so that it never shrinks or grows. So no access to it can fail.
///
/// The other process changes it at any time. Who has it makes no reference to what is in it, but copies.
#[derive(Debug)]
pub struct SharedMemory {
    file: OwnedFd,
    base: NonNull<u8>,
    length: NonZeroUsize,
}

// SAFETY: the mapping belongs to the process and not to a thread; those who access it answer for how.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what.into())
}

impl SharedMemory {
    /// Makes memory of this many bytes, all zeroes.
    ///
    /// # Errors
    /// `InvalidInput` for none; the system's.
    pub fn create(bytes: usize) -> io::Result<Self> {
        let length = NonZeroUsize::new(bytes).ok_or_else(|| invalid("no bytes to share"))?;
        let end = i64::try_from(bytes).map_err(|_| invalid("too many bytes to share"))?;
        let file = memfd_create(c"channel", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        ftruncate(&file, end)?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        Self::mapped(file, length)
    }

    /// Maps memory that another process has made.
    ///
    /// # Errors
    /// `InvalidInput`: it could shrink, is empty, is longer than `bytes_max`, or is no memory of the usual kind. The system's.
    pub fn map(fd: OwnedFd, bytes_max: usize) -> io::Result<Self> {
        // Huge pages may be missing when they are touched, which ends the process.
        if fstatfs(&fd)?.filesystem_type() != TMPFS_MAGIC {
            return Err(invalid("what is to be shared is no memfd of usual pages"));
        }
        let seals = SealFlag::from_bits_truncate(fcntl(&fd, FcntlArg::F_GET_SEALS)?);
        if !seals.contains(SealFlag::F_SEAL_SHRINK) {
            return Err(invalid("the memory that is to be shared could shrink: it is not sealed"));
        }
        // After the seal was seen: from then on it holds.
        let length = usize::try_from(fstat(&fd)?.st_size).unwrap_or(0);
        match NonZeroUsize::new(length) {
            None => Err(invalid("the memory that is to be shared is empty")),
            Some(_) if length > bytes_max => Err(invalid(format!(
                "the memory that is to be shared has {length} bytes; {bytes_max} are allowed"
            ))),
            Some(length) => Self::mapped(fd, length),
        }
    }

    fn mapped(file: OwnedFd, length: NonZeroUsize) -> io::Result<Self> {
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping takes the place of no other.
        let base = unsafe { mmap(None, length, access, MapFlags::MAP_SHARED, &file, 0) }?;
        Ok(Self { file, base: base.cast(), length })
    }

    /// Its descriptor, for the other process.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Where it begins.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// How many bytes it has.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // It is never empty.
    pub fn len(&self) -> usize {
        self.length.get()
    }

    /// Where a part begins; none if it is not within.
    #[must_use]
    pub fn part(&self, offset: u64, length: usize) -> Option<NonNull<u8>> {
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(length)?;
        if end > self.len() {
            return None;
        }
        // SAFETY: the part is within the mapping.
        Some(unsafe { self.base.add(offset) })
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: nobody has it any more. It fails for no mapping that was made by `mapped`.
        let _ = unsafe { munmap(self.base.cast(), self.length.get()) };
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn memfd(bytes: i64, seals: SealFlag) -> OwnedFd {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = memfd_create(c"test", flags).unwrap();
        ftruncate(&file, bytes).unwrap();
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
        file
    }

    #[test]
    fn both_see_what_one_writes_and_nobody_changes_its_length() {
        let made = SharedMemory::create(3 << 12).unwrap();
        let file = made.fd().try_clone_to_owned().unwrap();
        let mapped = SharedMemory::map(file, 3 << 12).unwrap();
        assert_eq!(mapped.len(), 3 << 12);
        // SAFETY: both are within their mappings, and only this thread accesses them.
        unsafe {
            made.base().add(5000).write_volatile(7);
            assert_eq!(mapped.base().add(5000).read_volatile(), 7);
        }
        let file = File::from(made.fd().try_clone_to_owned().unwrap());
        assert!(file.set_len(1 << 12).is_err());
        assert!(file.set_len(4 << 12).is_err());
    }

    #[test]
    fn what_could_shrink_is_refused_and_what_is_empty_or_too_long() {
        let refused = |fd, bytes_max| SharedMemory::map(fd, bytes_max).unwrap_err().kind();
        let invalid = io::ErrorKind::InvalidInput;
        assert_eq!(refused(memfd(4096, SealFlag::F_SEAL_GROW), 8192), invalid);
        assert_eq!(refused(memfd(0, SealFlag::F_SEAL_SHRINK), 8192), invalid);
        assert_eq!(refused(memfd(8193, SealFlag::F_SEAL_SHRINK), 8192), invalid);
        assert!(SharedMemory::map(memfd(8192, SealFlag::F_SEAL_SHRINK), 8192).is_ok());
        // No memfd.
        assert_eq!(refused(OwnedFd::from(File::open("/proc/self/stat").unwrap()), 8192), invalid);
        assert_eq!(SharedMemory::create(0).unwrap_err().kind(), invalid);
    }

    #[test]
    fn parts_are_within() {
        let memory = SharedMemory::create(4096).unwrap();
        assert_eq!(memory.part(0, 4096), Some(memory.base()));
        assert!(memory.part(4096, 0).is_some());
        assert!(memory.part(1, 4096).is_none());
        assert!(memory.part(u64::MAX, 2).is_none());
        assert!(memory.part(2, usize::MAX).is_none());
    }
}
