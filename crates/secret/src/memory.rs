//! Memory for secrets: the one module of this crate that maps memory.
//!
//! A region is a mapping of its own `memfd_secret` (Linux 5.14): its pages are locked, are removed from the
//! kernel's direct map, and appear in no core dump, no swap and no `/proc/PID/mem`. Where the kernel has no
//! `memfd_secret` (`ENOSYS`: old, or `secretmem.enable=0`) it is anonymous memory that is locked and excluded
//! from dumps; a secret is then passed on in an ordinary memfd that is locked, wiped by its maker and sealed
//! against other writers ([`SecretFd`]). Either way a forked child does not get it, so that the child's
//! destructors cannot wipe the parent's secret through a shared mapping.
//!
//! A region is at least one page. vmseal holds at most a few secrets per VM, so that a hundred VMs
//! cost some megabytes; all of it counts against `RLIMIT_MEMLOCK` for a process without CAP_IPC_LOCK.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::fstat;
use nix::unistd::ftruncate;
use zeroize::Zeroize;

/// The longest secret, in bytes: far above a key, a passphrase or a private key in PEM form, and low
/// enough that a wrong length is an error and not a shortage of locked memory.
pub const SECRET_LEN_MAX: usize = 64 * 1024;

/// `SECRETMEM_MAGIC` of linux/magic.h: the file system type of a `memfd_secret`.
const SECRETMEM_MAGIC: i64 = 0x5345_434d;

/// Why memory for a secret is unavailable, or why a descriptor holds no secret.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// Zero bytes, or more than [`SECRET_LEN_MAX`].
    #[error("a secret of {0} bytes was asked for; 1 to {SECRET_LEN_MAX} are allowed")]
    Length(usize),
    /// The process may not lock so much memory.
    #[error(
        "no more memory can be locked for secrets: raise the limit (ulimit -l, or LimitMEMLOCK= in the systemd unit)"
    )]
    LockLimit,
    /// The descriptor is not one that [`crate::SecretBytes::to_memfd`] made.
    #[error(
        "descriptor {0} holds no secret: it is not a memfd_secret (or, without those, a sealed memfd)"
    )]
    NotSecretMemory(i32),
    /// The descriptor holds another number of bytes than the secret has.
    #[error("descriptor {fd} holds {found} bytes where a secret of {expected} is expected")]
    Size {
        /// The descriptor's number.
        fd: i32,
        /// The expected length of the secret.
        expected: usize,
        /// The size that the descriptor reports.
        found: i64,
    },
    /// The random generator failed; the secret would be predictable.
    #[error("the random generator of AWS-LC failed")]
    Random,
    /// A system call failed.
    #[error("{call} for secret memory failed")]
    System {
        /// The call.
        call: &'static str,
        /// The error.
        source: io::Error,
    },
}

pub(crate) fn system(call: &'static str) -> impl FnOnce(Errno) -> MemoryError {
    move |errno| match errno {
        // The errors of mmap of a memfd_secret and of mlock beyond RLIMIT_MEMLOCK.
        Errno::EAGAIN | Errno::EPERM | Errno::ENOMEM => MemoryError::LockLimit,
        errno => MemoryError::System { call, source: errno.into() },
    }
}

/// The kind of memory that holds a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// `memfd_secret`: not even in the kernel's direct map.
    SecretMemory,
    /// Anonymous memory, locked and left out of dumps: the kernel has no `memfd_secret`.
    LockedMemory,
}

impl Backing {
    /// The kind on this machine; determined once.
    #[must_use]
    pub fn of_this_machine() -> Self {
        static FOUND: OnceLock<Backing> = OnceLock::new();
        *FOUND.get_or_init(|| match memfd_secret() {
            // Only a kernel without memfd_secret is a reason for the weaker kind; any other failure becomes
            // an error when a secret is made.
            Err(Errno::ENOSYS) => Self::LockedMemory,
            _ => Self::SecretMemory,
        })
    }
}

/// A new, empty `memfd_secret`, close-on-exec.
fn memfd_secret() -> Result<OwnedFd, Errno> {
    // SAFETY: the call takes one integer and touches no memory of ours.
    let fd = unsafe { libc::syscall(libc::SYS_memfd_secret, libc::O_CLOEXEC) };
    let fd = Errno::result(fd)?;
    // SAFETY: the kernel has just returned this descriptor, and nobody else knows it. It is an int.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// A mapping of `len` bytes with one owner, wiped and unmapped when dropped.
pub(crate) struct Region {
    start: NonNull<u8>,
    len: usize,
    backing: Backing,
}

/// A descriptor with a copy of a secret, for another process to inherit and read by
/// [`crate::SecretBytes::from_memfd`].
///
/// Keep it until that has happened. A `memfd_secret` is cleared by the kernel when its last user is gone.
/// Otherwise it is an ordinary memfd, which is locked in memory while this value exists, and wiped for all
/// holders of the descriptor when it is dropped.
#[derive(Debug)]
pub struct SecretFd {
    fd: OwnedFd,
    /// The locked mapping of an ordinary memfd.
    #[expect(dead_code, reason = "it locks the memory, and wipes it when it goes")]
    memory: Option<Region>,
}

impl AsFd for SecretFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

// SAFETY: the mapping is owned by this value alone and is reached only through its `&` and `&mut`.
unsafe impl Send for Region {}
// SAFETY: as above; `&Region` gives only shared reads.
unsafe impl Sync for Region {}

impl Region {
    /// `len` zero bytes.
    pub(crate) fn zeroed(len: usize, backing: Backing) -> Result<Self, MemoryError> {
        check_len(len)?;
        match backing {
            Backing::SecretMemory => {
                let fd = memfd_secret().map_err(system("memfd_secret"))?;
                ftruncate(&fd, len as i64).map_err(system("ftruncate"))?;
                // The mapping keeps the memory; the descriptor is closed here, so that it cannot be passed to
                // another process by accident.
                Self::map_secret(&fd, len)
            }
            Backing::LockedMemory => Self::map_locked(len),
        }
    }

    fn map_secret(fd: &OwnedFd, len: usize) -> Result<Self, MemoryError> {
        let start = map(len, libc::MAP_SHARED, fd.as_raw_fd())?;
        let region = Self { start, len, backing: Backing::SecretMemory };
        region.advise(libc::MADV_DONTFORK)?;
        Ok(region)
    }

    fn map_locked(len: usize) -> Result<Self, MemoryError> {
        let start = map(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
        let region = Self { start, len, backing: Backing::LockedMemory };
        region.lock()?;
        Ok(region)
    }

    /// The content of an ordinary memfd of this length, locked.
    pub(crate) fn shared(fd: &OwnedFd, len: usize) -> Result<Self, MemoryError> {
        let start = map(len, libc::MAP_SHARED, fd.as_raw_fd())?;
        let region = Self { start, len, backing: Backing::LockedMemory };
        region.lock()?;
        Ok(region)
    }

    /// Locks ordinary memory, and excludes it from dumps and from forked children.
    fn lock(&self) -> Result<(), MemoryError> {
        // SAFETY: the range is the mapping that `self` owns.
        let locked = unsafe { libc::mlock(self.start.as_ptr().cast(), self.len) };
        Errno::result(locked).map_err(system("mlock"))?;
        self.advise(libc::MADV_DONTDUMP)?;
        self.advise(libc::MADV_DONTFORK)
    }

    fn advise(&self, advice: i32) -> Result<(), MemoryError> {
        // SAFETY: the range is our mapping; none of the advice used here changes what it holds.
        let done = unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, advice) };
        Errno::result(done).map_err(system("madvise"))?;
        Ok(())
    }

    pub(crate) fn backing(&self) -> Backing {
        self.backing
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` bytes from `start` are mapped and initialized while `self` lives.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// A new descriptor with a copy.
    pub(crate) fn to_memfd(&self) -> Result<SecretFd, MemoryError> {
        match self.backing {
            Backing::SecretMemory => {
                let fd = memfd_secret().map_err(system("memfd_secret"))?;
                ftruncate(&fd, self.len as i64).map_err(system("ftruncate"))?;
                // A memfd_secret can only be filled through a mapping. This one must not be wiped when it is
                // unmapped: its bytes are the descriptor's content.
                let mut copy = std::mem::ManuallyDrop::new(Self::map_secret(&fd, self.len)?);
                copy.as_mut_slice().copy_from_slice(self.as_slice());
                copy.unmap();
                Ok(SecretFd { fd, memory: None })
            }
            Backing::LockedMemory => {
                let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
                let fd = memfd_create(c"vmseal-secret", flags).map_err(system("memfd_create"))?;
                ftruncate(&fd, self.len as i64).map_err(system("ftruncate"))?;
                // Locked before the secret is written to it.
                let mut memory = Self::shared(&fd, self.len)?;
                memory.as_mut_slice().copy_from_slice(self.as_slice());
                // From now on only this mapping can write to it.
                fcntl(&fd, FcntlArg::F_ADD_SEALS(all_seals())).map_err(system("fcntl"))?;
                Ok(SecretFd { fd, memory: Some(memory) })
            }
        }
    }

    /// A copy of the content of a descriptor of [`Region::to_memfd`].
    pub(crate) fn from_memfd(fd: BorrowedFd<'_>, len: usize) -> Result<Self, MemoryError> {
        check_len(len)?;
        let number = fd.as_raw_fd();
        let kind = nix::sys::statfs::fstatfs(fd).map_err(system("fstatfs"))?.filesystem_type();
        let secret = kind.0 == SECRETMEM_MAGIC;
        if !secret && fcntl(fd, FcntlArg::F_GET_SEALS) != Ok(all_seals().bits()) {
            return Err(MemoryError::NotSecretMemory(number));
        }
        let found = fstat(fd).map_err(system("fstat"))?.st_size;
        if found != len as i64 {
            return Err(MemoryError::Size { fd: number, expected: len, found });
        }
        let mut region = Self::zeroed(len, Backing::of_this_machine())?;
        if secret {
            // The size of a memfd_secret is fixed once set, so this mapping cannot be truncated. It belongs
            // to the descriptor: unmapped, not wiped.
            let start = map(len, libc::MAP_SHARED, number)?;
            let mut source =
                std::mem::ManuallyDrop::new(Self { start, len, backing: Backing::SecretMemory });
            region.as_mut_slice().copy_from_slice(source.as_slice());
            source.unmap();
        } else if nix::sys::uio::pread(fd, region.as_mut_slice(), 0).map_err(system("pread"))?
            != len
        {
            return Err(MemoryError::NotSecretMemory(number));
        }
        Ok(region)
    }

    /// Unmaps; the region must not be used again.
    fn unmap(&mut self) {
        // SAFETY: the range is our mapping, and every caller lets go of `self` at once. munmap of a
        // whole mapping has no failure that could be acted on.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes)", self.len)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.as_mut_slice().zeroize();
        self.unmap();
    }
}

/// Whether a page can be locked now.
pub(crate) fn can_lock() -> bool {
    Region::map_locked(1).is_ok()
}

/// For an ordinary memfd: its size is fixed, and only the mapping that filled it, and will wipe it, can
/// write.
fn all_seals() -> SealFlag {
    SealFlag::F_SEAL_SEAL
        | SealFlag::F_SEAL_SHRINK
        | SealFlag::F_SEAL_GROW
        | SealFlag::F_SEAL_FUTURE_WRITE
}

fn check_len(len: usize) -> Result<(), MemoryError> {
    if len == 0 || len > SECRET_LEN_MAX { Err(MemoryError::Length(len)) } else { Ok(()) }
}

fn map(len: usize, flags: i32, fd: i32) -> Result<NonNull<u8>, MemoryError> {
    // SAFETY: a new mapping at an address of the kernel's choice; nothing of ours is replaced.
    let start = unsafe {
        libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0)
    };
    if start == libc::MAP_FAILED {
        return Err(system("mmap")(Errno::last()));
    }
    NonNull::new(start.cast()).ok_or_else(|| system("mmap")(Errno::EINVAL))
}
