//! What depends on the kernel: the clock, io_uring, and the confinement of filters. The one module here with
//! `unsafe`.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use super::Finding;

/// The size of `struct io_uring_params` (linux/io_uring.h), in bytes.
const PARAMS: usize = 120;

/// Whether an io_uring can be created.
pub fn io_uring() -> Finding {
    const CHECK: &str = "io-uring";
    let mut params = [0_u8; PARAMS];
    // SAFETY: the call reads and writes the parameters, which are as long as the kernel's.
    let made = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr()) };
    match RawFd::try_from(made) {
        Ok(fd) if fd >= 0 => {
            // SAFETY: the kernel has just returned this descriptor, and nobody else knows it.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
            Finding::ok(CHECK, "rings can be created")
        }
        _ => {
            let error = io::Error::last_os_error();
            let disabled = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
            let disabled = disabled.unwrap_or_default();
            Finding::warning(
                CHECK,
                format!(
                    "no ring can be created ({error}; kernel.io_uring_disabled is '{}'): each request blocks its queue",
                    disabled.trim()
                ),
                "sysctl kernel.io_uring_disabled=0, and allow io_uring in the container's or unit's filter",
            )
        }
    }
}

/// The first Landlock version with everything that a filter asks for (Linux 6.12).
const LANDLOCK_WHOLE: i64 = 6;

/// Whether a filter that was taken over can reach only its disks.
pub fn confinement() -> Finding {
    let actions = std::fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail");
    let version = 1_u32; // LANDLOCK_CREATE_RULESET_VERSION
    // SAFETY: with this flag the call takes no structure, and makes nothing.
    let landlock = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0_usize, version)
    };
    judge_confinement(&actions.unwrap_or_default(), landlock)
}

fn judge_confinement(actions: &str, landlock: i64) -> Finding {
    const CHECK: &str = "confinement";
    if !["trap", "errno"].iter().all(|needed| actions.split_whitespace().any(|one| one == *needed))
    {
        return Finding::failed(
            CHECK,
            "the kernel does not filter system calls (seccomp): filters do not serve",
            "run a kernel with CONFIG_SECCOMP_FILTER",
        );
    }
    if landlock < 1 {
        return Finding::warning(
            CHECK,
            "filters are confined by seccomp, not by Landlock",
            "add landlock to the kernel's lsm= list, or run Linux 5.13 or later",
        );
    }
    let whole = if landlock < LANDLOCK_WHOLE { ", as far as this kernel knows it" } else { "" };
    Finding::ok(CHECK, format!("filters are confined by seccomp and Landlock {landlock}{whole}"))
}

/// Whether the clock is synchronised: certificates and the order of events depend on it.
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
            "the kernel does not report whether it is synchronised",
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
    fn unconfined_filters_are_reported() {
        let actions = "kill_process kill_thread trap errno user_notif trace log allow\n";
        let judged = |actions, landlock| judge_confinement(actions, landlock).result;
        assert_eq!(judged(actions, 7), Verdict::Ok);
        assert!(judge_confinement(actions, 2).found.contains("as far as"));
        assert_eq!(judged(actions, -1), Verdict::Warning);
        assert_eq!(judged("kill_thread errno", 7), Verdict::Failed);
        assert_eq!(judged("", 7), Verdict::Failed);
        assert_eq!(confinement().check, "confinement");
    }

    #[test]
    fn an_unsynchronised_clock_is_reported() {
        assert_eq!(judge_clock(libc::TIME_OK, libc::STA_PLL).result, Verdict::Ok);
        for (state, status) in [(libc::TIME_ERROR, 0), (libc::TIME_OK, libc::STA_UNSYNC), (-1, 0)] {
            assert_eq!(judge_clock(state, status).result, Verdict::Warning);
        }
        assert_eq!(clock().check, "clock");
        assert_eq!(io_uring().check, "io-uring");
    }
}
