//! The options of a connection between hosts.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use super::STALL_TIMEOUT;

/// How much the kernel may hold of a connection that it has not yet sent, in bytes. What is behind it waits in QEMU, which then knows
/// how fast the connection is and stops the guest at the right time: with unbounded buffers on a path of 150 ms the guest stood still for
/// 1.2 to 2.7 s, with this for half a second. What is on its way is not bounded: that is the kernel's to tune, up to bandwidth times
/// round trip, so no buffer gets a fixed size here.
pub const NOT_SENT_MAX: i32 = 128 * 1024;

/// When a silent connection is asked first, and then how often: a host that is gone is found within [`STALL_TIMEOUT`].
const KEEPALIVE_IDLE_S: i32 = 10;
const KEEPALIVE_INTERVAL_S: i32 = 5;
const KEEPALIVE_PROBES: i32 = 4;

nix::ioctl_read_bad!(
    /// `SIOCOUTQNSD`: what of a connection was not sent yet.
    not_sent,
    0x894b,
    libc::c_int
);

fn set(socket: &impl AsFd, level: i32, option: i32, value: i32) -> io::Result<()> {
    let (value, length) = (&raw const value, size_of::<i32>() as libc::socklen_t);
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel reads `length` bytes of the integer, which lives until the call returns.
    let done = unsafe { libc::setsockopt(fd, level, option, value.cast(), length) };
    nix::errno::Errno::result(done)?;
    Ok(())
}

/// Sets the options of a connection, on either end.
///
/// # Errors
/// Those of the system.
pub fn prepare(socket: &impl AsFd) -> io::Result<()> {
    let stall = i32::try_from(STALL_TIMEOUT.as_millis()).unwrap_or(i32::MAX);
    let tcp = |option, value| set(socket, libc::IPPROTO_TCP, option, value);
    tcp(libc::TCP_NODELAY, 1)?;
    tcp(libc::TCP_NOTSENT_LOWAT, NOT_SENT_MAX)?;
    tcp(libc::TCP_USER_TIMEOUT, stall)?;
    set(socket, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    tcp(libc::TCP_KEEPIDLE, KEEPALIVE_IDLE_S)?;
    tcp(libc::TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)?;
    tcp(libc::TCP_KEEPCNT, KEEPALIVE_PROBES)
}

/// What the kernel holds of a connection and has not sent, in bytes.
pub fn unsent(socket: &impl AsFd) -> u64 {
    let mut bytes = 0;
    // SAFETY: the kernel writes one integer, which lives until the call returns.
    let asked = unsafe { not_sent(socket.as_fd().as_raw_fd(), &raw mut bytes) };
    // A connection that is gone holds nothing.
    asked.ok().and_then(|_| u64::try_from(bytes).ok()).unwrap_or(0)
}
