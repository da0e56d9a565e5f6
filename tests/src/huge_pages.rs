//! Huge pages of 2 MiB, which all tests of this machine share.

use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Context;

/// The kernel's directory of them.
pub const DIRECTORY: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

static TURN: Mutex<()> = Mutex::new(());

/// Waits for the turn of a test that takes or counts them, which it has until this is dropped: all tests are one process.
pub fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One of the kernel's counts of them, `free_hugepages`; 0 where it has none.
#[must_use]
pub fn count(which: &str) -> u64 {
    let text = std::fs::read_to_string(format!("{DIRECTORY}/{which}")).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// How much of a process's memory is in them, as the kernel says it: `32768 kB`.
///
/// # Errors
/// There is no such process, or the kernel does not say it.
pub fn mapped(process: i32) -> anyhow::Result<String> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let mapped = status.lines().find_map(|line| line.strip_prefix("HugetlbPages:"));
    Ok(mapped.context("the kernel has no huge pages")?.trim().to_owned())
}
