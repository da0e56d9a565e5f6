//! A hardened process without root: it is not dumpable, so much of its own /proc is inaccessible. This
//! changes the whole process, so the test starts itself again.

#![allow(clippy::unwrap_used, reason = "a test")]

mod disk;

use std::process::Command;

const ROLE: &str = "VMSEAL_TEST_ROLE";

/// Without a role it does nothing: the test below gives one to a child process.
#[test]
fn the_role_that_the_parent_asked_for() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    if nix::unistd::geteuid().is_root() {
        nix::unistd::setgid(65534.into()).unwrap();
        nix::unistd::setuid(65534.into()).unwrap();
    }
    assert!(vmseal_secret::process::harden().not_dumpable);
    let store = disk::created();
    assert_eq!(disk::open(&store).unwrap().dek, disk::dek());
}

#[test]
fn headers_are_made_and_opened_without_root_and_not_dumpable() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_role_that_the_parent_asked_for", "--nocapture"])
        .env(ROLE, "unprivileged")
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
    // libcryptsetup reports errors to the library's caller, and prints nothing.
    let text = String::from_utf8_lossy(&child.stderr).to_lowercase();
    assert!(!text.contains("luks") && !text.contains("crypt"), "{text}");
}
