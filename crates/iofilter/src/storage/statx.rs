//! What the kernel says of an open file by statx(2).

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;

/// How long a file is for this kernel. The server of a network file system, or of FUSE, is not asked: who waited for its answer while it
/// stalls could not fail requests meanwhile.
///
/// # Errors
/// Those of statx(2).
pub(super) fn length_here(fd: &OwnedFd) -> Result<u64, Errno> {
    Ok(statx(fd, libc::AT_STATX_DONT_SYNC, libc::STATX_SIZE)?.stx_size)
}

/// Asks for the fields of `mask`.
///
/// # Errors
/// Those of statx(2).
pub(super) fn statx(
    fd: &OwnedFd,
    flags: libc::c_int,
    mask: libc::c_uint,
) -> Result<libc::statx, Errno> {
    let mut statx = MaybeUninit::<libc::statx>::zeroed();
    let flags = libc::AT_EMPTY_PATH | flags;
    // SAFETY: an empty path with AT_EMPTY_PATH names the descriptor; the kernel fills the structure,
    // of which all-zero is a valid value.
    unsafe {
        let failed = libc::statx(fd.as_raw_fd(), c"".as_ptr(), flags, mask, statx.as_mut_ptr());
        Errno::result(failed)?;
        Ok(statx.assume_init())
    }
}
