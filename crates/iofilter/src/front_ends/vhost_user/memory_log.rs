//! The log of guest memory that this process has written, or the kernel for it. A VMM that moves a running guest reads
//! there which pages it must send again (vhost-user, "Migration").
//!
//! One bit for each page of 4 KiB, from guest address 0 on, in memory that the VMM shares:
//!
//! ```text
//!  here:     write the page ──> set its bit
//!  the VMM:  take the bit (exchange it with 0) ──> read the page
//! ```
//! The bit is set after the page is written, and only then. If the VMM has read the page before the write or in the
//! middle of it, it took the bit before we set it: it finds the bit the next time and sends the page again. If it took
//! our bit, it reads what we wrote. And it reads the log a last time when the rings are stopped, and so all
//! requests answered. A bit set before the write would add nothing, and alone it would lose the write.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use vhost::vhost_user::message::VhostUserLog;
use vm_memory::mmap::MmapRegionError;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

/// What a bit stands for, in bytes (`VHOST_LOG_PAGE`).
pub const PAGE: u64 = 4096;

/// Why a log is not used, or a page not marked.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// No descriptor of a file, or none whose seals can be asked for.
    #[error("the log of written memory is not in a file that can be sealed: {0}")]
    File(#[from] Errno),
    /// Its file could be truncated while it is mapped: SIGBUS would end the process.
    #[error("the file of the log of written memory is not sealed against shrinking")]
    Unsealed,
    /// Beyond the end of its file, or too long for this machine.
    #[error("the log of written memory reaches beyond the end of its file")]
    Short,
    /// Cannot be mapped.
    #[error("the log of written memory cannot be mapped: {0}")]
    Mapping(#[from] MmapRegionError),
    /// It has no bit for a page.
    #[error("the log of written memory has no bit for guest address {address:#x}")]
    Beyond {
        /// The last address that was to be marked.
        address: u64,
    },
    /// A segment that is not guest memory.
    #[error("written memory is not in the guest's memory")]
    Elsewhere,
}

/// See the module.
#[derive(Debug)]
pub struct MemoryLog {
    bits: MmapRegion,
}

impl MemoryLog {
    /// Maps the log that a VMM shares.
    ///
    /// # Errors
    /// [`LogError`]: its file is not sealed, or shorter than it says.
    pub fn map(about: &VhostUserLog, file: File) -> Result<Self, LogError> {
        let seals = SealFlag::from_bits_truncate(fcntl(&file, FcntlArg::F_GET_SEALS)?);
        if !seals.contains(SealFlag::F_SEAL_SHRINK) {
            return Err(LogError::Unsealed);
        }
        let end = about.mmap_offset.checked_add(about.mmap_size);
        let fits = end.is_some_and(|end| file.metadata().is_ok_and(|about| end <= about.len()));
        let size = usize::try_from(about.mmap_size).ok().filter(|_| fits);
        let size = size.ok_or(LogError::Short)?;
        let bits = MmapRegion::from_file(FileOffset::new(file, about.mmap_offset), size)?;
        Ok(Self { bits })
    }

    /// Checks that there are bits for `length` bytes at a guest address.
    ///
    /// # Errors
    /// [`LogError::Beyond`].
    pub fn check(&self, address: u64, length: u64) -> Result<(), LogError> {
        self.pages(address, length).map(drop)
    }

    /// Marks `length` bytes at a guest address as written.
    ///
    /// # Errors
    /// [`LogError::Beyond`]: nothing is marked.
    pub fn mark(&self, address: u64, length: u64) -> Result<(), LogError> {
        let Some((mut page, last)) = self.pages(address, length)? else { return Ok(()) };
        let bits = self.bits.as_volatile_slice();
        while page <= last {
            let until = last.min(page | 7);
            let mask = (0xff << (page % 8)) & (0xff >> (7 - until % 8)) as u8;
            let byte = usize::try_from(page / 8).ok();
            let byte = byte.and_then(|at| bits.get_atomic_ref::<AtomicU8>(at).ok());
            let byte = byte.ok_or(LogError::Beyond { address: until * PAGE })?;
            // Even where the bits are set already: only a write orders the data before the VMM's exchange. What a VMM
            // gets by that exchange includes all that was written before (release).
            byte.fetch_or(mask, Ordering::Release);
            page = until + 1;
        }
        Ok(())
    }

    /// The first and the last page of these bytes; none if there are no bytes.
    fn pages(&self, address: u64, length: u64) -> Result<Option<(u64, u64)>, LogError> {
        let Some(more) = length.checked_sub(1) else { return Ok(None) };
        let last = address.checked_add(more).ok_or(LogError::Beyond { address: u64::MAX })?;
        if last / PAGE / 8 >= self.bits.size() as u64 {
            return Err(LogError::Beyond { address: last });
        }
        Ok(Some((address / PAGE, last / PAGE)))
    }
}

/// The log for one ring.
#[derive(Clone, Debug)]
pub struct RingLog {
    /// The log.
    pub log: Arc<MemoryLog>,
    /// Where in it the used ring is (`log_guest_addr`); none if that is not to be marked.
    pub used: Option<u64>,
    /// Where to tell the VMM that something was marked.
    pub changed: Option<Arc<OwnedFd>>,
}

impl RingLog {
    /// Checks that it has bits for the used ring of a ring of `entries`.
    ///
    /// # Errors
    /// [`LogError::Beyond`].
    pub fn check_used(&self, entries: u16) -> Result<(), LogError> {
        self.used.map_or(Ok(()), |used| self.log.check(used, used_length(entries)))
    }
}

/// The length of a used ring: flags, index, entries of 8 bytes, and the index of the next wanted notification.
pub(super) fn used_length(entries: u16) -> u64 {
    6 + 8 * u64::from(entries)
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::FileExt;

    use nix::sys::memfd::{MFdFlags, memfd_create};
    use proptest::prelude::*;

    use super::*;

    fn file(length: u64, seals: SealFlag) -> File {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create(c"log", flags).unwrap());
        file.set_len(length).unwrap();
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
        file
    }

    /// A log of `length` bytes, and its file.
    pub fn log(length: u64) -> (MemoryLog, File) {
        let file = file(length, SealFlag::F_SEAL_SHRINK);
        let shared = file.try_clone().unwrap();
        (MemoryLog::map(&VhostUserLog::new(length, 0), shared).unwrap(), file)
    }

    /// The pages that are marked.
    pub fn marked(file: &File) -> Vec<u64> {
        let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let pages = 0..bytes.len() as u64 * 8;
        pages.filter(|page| bytes[(page / 8) as usize] & (1 << (page % 8)) != 0).collect()
    }

    #[test]
    fn a_page_is_marked_from_its_first_byte_to_its_last() {
        for (address, length, pages) in [
            (0, 0, vec![]),
            (0, 1, vec![0]),
            (4095, 1, vec![0]),
            (4095, 2, vec![0, 1]),
            (4096, 4096, vec![1]),
            (4096, 4097, vec![1, 2]),
            (7 * 4096 + 1, 4096, vec![7, 8]),
            (6 * 4096, 12 * 4096, (6..18).collect()),
            (31 * 4096, 4096, vec![31]),
            (0, 32 * 4096, (0..32).collect()),
        ] {
            let (log, file) = log(4);
            log.mark(address, length).unwrap();
            assert_eq!(marked(&file), pages, "{length} bytes at {address}");
        }
    }

    #[test]
    fn beyond_its_end_nothing_is_marked() {
        let (log, file) = log(4);
        let end = 32 * PAGE;
        log.check(end - 1, 1).unwrap();
        for (address, length) in
            [(end, 1), (end - 1, 2), (0, end + 1), (u64::MAX, 1), (u64::MAX, 2), (1, u64::MAX)]
        {
            assert!(matches!(log.mark(address, length), Err(LogError::Beyond { .. })));
            assert!(log.check(address, length).is_err(), "{length} bytes at {address}");
        }
        assert!(marked(&file).is_empty());
        log.mark(end, 0).unwrap();
        let ring = |used| RingLog { log: Arc::new(self::log(4).0), used, changed: None };
        ring(None).check_used(1024).unwrap();
        ring(Some(end - 6 - 8 * 16)).check_used(16).unwrap();
        assert!(ring(Some(end - 6 - 8 * 16 + 1)).check_used(16).is_err());
    }

    proptest! {
        #[test]
        fn what_is_marked_is_added_to_what_is_there(
            ranges in proptest::collection::vec((0u64..64 * PAGE, 0u64..20 * PAGE), 1..8),
        ) {
            let (log, file) = log(8);
            let mut expected = [false; 64];
            for (address, length) in ranges {
                let length = length.min(64 * PAGE - address);
                log.mark(address, length).unwrap();
                for byte in (address..address + length).step_by(64).chain((address + length).checked_sub(1)) {
                    if (address..address + length).contains(&byte) {
                        expected[(byte / PAGE) as usize] = true;
                    }
                }
            }
            let expected: Vec<u64> = (0..64).filter(|page| expected[*page as usize]).collect();
            prop_assert_eq!(marked(&file), expected);
        }
    }

    #[test]
    fn a_log_begins_at_its_offset_in_the_file() {
        let whole = file(3 * 4096, SealFlag::F_SEAL_SHRINK);
        let about = VhostUserLog::new(16, 4096);
        let log = MemoryLog::map(&about, whole.try_clone().unwrap()).unwrap();
        log.mark(9 * PAGE, 1).unwrap();
        assert_eq!(marked(&whole), [4096 * 8 + 9]);
    }

    #[test]
    fn a_file_that_could_be_cut_short_or_is_too_short_is_refused() {
        let map = |size, offset, file| MemoryLog::map(&VhostUserLog::new(size, offset), file);
        let sealed = || file(4096, SealFlag::F_SEAL_SHRINK);
        let loose = file(4096, SealFlag::F_SEAL_GROW);
        assert!(matches!(map(4096, 0, loose), Err(LogError::Unsealed)));
        assert!(matches!(map(4097, 0, sealed()), Err(LogError::Short)));
        assert!(matches!(map(4096, 4096, sealed()), Err(LogError::Short)));
        assert!(matches!(map(u64::MAX, 1, sealed()), Err(LogError::Short)));
        assert!(matches!(map(16, 8, sealed()), Err(LogError::Mapping(_))));
        let event = nix::sys::eventfd::EventFd::new().unwrap();
        assert!(matches!(map(8, 0, OwnedFd::from(event).into()), Err(LogError::File(_))));
        map(4096, 0, sealed()).unwrap();
    }
}
