//! What only the kernel can be asked: the clock, and io_uring. The one module here with `unsafe`.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use super::Finding;

/// The size of `struct io_uring_params` (linux/io_uring.h), in bytes.
const PARAMS: usize = 120;

/// Whether a ring can be made.
pub fn io_uring() -> Finding {
    const CHECK: &str = "io-uring";
    let mut params = [0_u8; PARAMS];
    // SAFETY: the call reads and writes the parameters, which are as long as the kernel's.
    let made = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr()) };
    match RawFd::try_from(made) {
        Ok(fd) if fd >= 0 => {
            // SAFETY: the kernel has just returned this descriptor, and nobody else knows it.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
            Finding::ok(CHECK, "rings can be made")
        }
        _ => {
            let error = io::Error::last_os_error();
            let disabled = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
            let disabled = disabled.unwrap_or_default();
            Finding::warning(
                CHECK,
                format!(
                    "no ring can be made ({error}; kernel.io_uring_disabled is '{}'): each request blocks its queue",
                    disabled.trim()
                ),
                "sysctl kernel.io_uring_disabled=0, and allow io_uring in the container's or unit's filter",
            )
        }
    }
}

/// Whether the clock is kept right: certificates, and the order of events, depend on it.
pub fn clock() -> Finding {
    // SAFETY: all bytes zero is a `timex` with which nothing is set.
    let mut timex: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes to a structure of ours, and with no modes changes nothing.
    let state = unsafe { libc::adjtimex(&raw mut timex) };
    judge_clock(state, timex.status)
}

fn judge_clock(state: libc::c_int, status: libc::c_int) -> Finding {
    const CHECK: &str = "clock";
    const REMEDY: &str = "run chrony or systemd-timesyncd (timedatectl set-ntp true)";
    if state < 0 {
        return Finding::warning(
            CHECK,
            "the kernel does not say whether it is synchronised",
            REMEDY,
        );
    }
    if state == libc::TIME_ERROR || status & libc::STA_UNSYNC != 0 {
        let found = "it is not synchronised: certificates may seem not yet valid, or no longer";
        return Finding::warning(CHECK, found, REMEDY);
    }
    Finding::ok(CHECK, "it is synchronised")
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn a_clock_that_nobody_keeps_is_told() {
        assert_eq!(judge_clock(libc::TIME_OK, libc::STA_PLL).result, Verdict::Ok);
        for (state, status) in [(libc::TIME_ERROR, 0), (libc::TIME_OK, libc::STA_UNSYNC), (-1, 0)] {
            assert_eq!(judge_clock(state, status).result, Verdict::Warning);
        }
        assert_eq!(clock().check, "clock");
        assert_eq!(io_uring().check, "io-uring");
    }
}
