//! Hardening changes the whole process, so this test has its own: it starts itself again.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use vmseal_secret::SecretBytes;
use vmseal_secret::process::{MemoryLock, harden};

const ROLE: &str = "VMSEAL_TEST_ROLE";

fn again(role: &str) -> std::process::Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_role_that_the_parent_asked_for", "--nocapture"])
        .env(ROLE, role)
        .output()
        .unwrap()
}

fn status_kib(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Without a role it does nothing: the tests below give one to a child process.
#[test]
fn the_role_that_the_parent_asked_for() {
    let Ok(role) = std::env::var(ROLE) else { return };
    if role == "limited" {
        drop_privileges_and_limit();
    }
    let achieved = harden();
    assert!(achieved.not_dumpable && achieved.no_core, "{achieved:?}");
    let dumpable = nix::sys::prctl::get_dumpable().unwrap();
    assert!(!dumpable);
    let core = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_CORE).unwrap();
    assert_eq!(core, (1, 1));
    match role.as_str() {
        "limited" => {
            assert_eq!(achieved.memory, MemoryLock::LimitTooLow(65536));
            // The process still works: it gets memory, and secrets up to the limit.
            let big = vec![1u8; 64 << 20];
            assert_eq!(big.iter().map(|byte| u64::from(*byte)).sum::<u64>(), 64 << 20);
            let mut kept = Vec::new();
            let refused = loop {
                match SecretBytes::random(32) {
                    Ok(secret) => kept.push(secret),
                    Err(error) => break error,
                }
            };
            assert!((1..=16).contains(&kept.len()), "{} pages", kept.len());
            assert!(refused.to_string().contains("ulimit -l"), "{refused}");
        }
        "locked" => {
            if achieved.memory == MemoryLock::Locked {
                let before = status_kib("VmLck:");
                let more = vec![1u8; 16 << 20];
                assert!(status_kib("VmLck:") >= before + (16 << 10), "later memory is locked");
                drop(more);
            }
        }
        _ => std::process::abort(),
    }
}

fn drop_privileges_and_limit() {
    use nix::sys::resource::{Resource, setrlimit};
    setrlimit(Resource::RLIMIT_MEMLOCK, 65536, 65536).unwrap();
    if nix::unistd::geteuid().is_root() {
        nix::unistd::setgid(65534.into()).unwrap();
        nix::unistd::setuid(65534.into()).unwrap();
    }
}

#[test]
fn all_memory_is_locked_where_that_is_allowed() {
    let child = again("locked");
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
}

#[test]
fn a_low_limit_is_reported_and_survived() {
    let child = again("limited");
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
}

#[test]
fn a_crash_leaves_no_core() {
    let child = again("crash");
    assert_eq!(child.status.signal(), Some(nix::libc::SIGABRT));
    assert!(!child.status.core_dumped());
}
