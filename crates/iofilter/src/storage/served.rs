//! Files in a pool of Ceph, which `vmseal-rbd` serves (FUSE).
//!
//! When that process dies, its files fail with errors of their own: requests in flight and all later ones. They are not the disk's
//! errors, and no guest must see them. So this process ends at once, with all that it has in flight on QEMU's record; its agent has the
//! pool mounted again and starts another filter, which does the requests on record again
//! ([`crate::front_ends::vhost_user::inflight`]).

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use vmseal_api::rbd::{ASK_TICKET, ASK_WHOLE, WHOLE};
use vmseal_channel::TICKET_BYTES;

/// The exit code then: `EX_TEMPFAIL` (sysexits.h).
const GONE: i32 = 75;

/// Whether `vmseal-rbd` serves a file.
pub(super) fn is_served(fd: &OwnedFd) -> bool {
    let mut told: u32 = 0;
    // SAFETY: the kernel writes four bytes, as the request says, and others do not know the request.
    let asked = unsafe { libc::ioctl(fd.as_raw_fd(), ASK_WHOLE.into(), &raw mut told) };
    asked == 0 && told == WHOLE
}

/// Whether an error of a served file says that its server is gone (fs/fuse/dev.c, `fuse_abort_conn`).
fn says_gone(errno: i32) -> bool {
    matches!(errno, libc::ENOTCONN | libc::ECONNABORTED)
}

/// Ends the process if the server of the file is gone.
pub(super) fn check(served: bool, errno: i32) {
    if served && says_gone(errno) {
        end();
    }
}

/// Ends the process: the server of the file is gone.
pub(super) fn end() -> ! {
    tracing::error!(
        "vmseal-rbd, which serves the disk's file, is gone; this filter ends, and another one goes on"
    );
    // SAFETY: ends the process; nothing of it is used any more. Nothing may be answered or flushed before.
    unsafe { libc::_exit(GONE) }
}

/// Asks the server of a file for a ticket: whoever has it reads the file by a channel, and writes it if this open file may.
pub(super) fn ticket(fd: &impl AsRawFd) -> io::Result<[u8; TICKET_BYTES]> {
    let mut ticket = [0; TICKET_BYTES];
    // SAFETY: the kernel writes as many bytes as the request says, and others do not know the request.
    let asked = unsafe { libc::ioctl(fd.as_raw_fd(), ASK_TICKET.into(), &raw mut ticket) };
    if asked == 0 { Ok(ticket) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_are_not_served_and_their_errors_end_nothing() {
        assert!(!is_served(&OwnedFd::from(tempfile::tempfile().unwrap())));
        assert!(ticket(&tempfile::tempfile().unwrap()).is_err());
        check(false, libc::ENOTCONN);
        check(true, libc::EIO);
        assert!(says_gone(libc::ENOTCONN) && says_gone(libc::ECONNABORTED));
    }
}
