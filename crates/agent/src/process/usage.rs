//! What the processes of a VM use, as the kernel counts it.

use std::path::Path;

use super::{identity, parse_stat};

/// What a process uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessUsage {
    /// CPU time, user and system, in nanoseconds.
    pub cpu_nanoseconds: u64,
    /// Memory that is in use, in bytes.
    pub resident: u64,
}

/// The places of user time, system time and resident pages in `/proc/PID/stat`, counted from field 3 (proc(5)).
const USER_TIME: usize = 14 - 3;
const SYSTEM_TIME: usize = 15 - 3;
const RESIDENT: usize = 24 - 3;

/// What the process on record uses; none when it has ended.
#[must_use]
pub fn of(record: &Path) -> Option<ProcessUsage> {
    let known = identity(record).ok()??;
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", known.pid)).ok()?;
    // Its id may be another process's by now.
    if parse_stat(&stat) != Some(known) {
        return None;
    }
    parse(&stat, clock_ticks(), page_size())
}

fn parse(stat: &str, ticks: u64, page: u64) -> Option<ProcessUsage> {
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    let cpu = number(USER_TIME)?.checked_add(number(SYSTEM_TIME)?)?;
    Some(ProcessUsage {
        cpu_nanoseconds: cpu.saturating_mul(1_000_000_000 / ticks.max(1)),
        resident: number(RESIDENT)?.saturating_mul(page),
    })
}

fn clock_ticks() -> u64 {
    let known = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten();
    known.and_then(|ticks| u64::try_from(ticks).ok()).unwrap_or(100)
}

fn page_size() -> u64 {
    let known = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
    known.and_then(|size| u64::try_from(size).ok()).unwrap_or(4096)
}

/// Memory that new processes can have without swapping, in bytes.
#[must_use]
pub fn memory_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_memory_are_read_whatever_the_program_is_called() {
        let stat = "42 (a) b (c) S 1 42 42 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 1 0 12345 1000000 300 18446744073709551615";
        let usage = parse(stat, 100, 4096).unwrap();
        assert_eq!((usage.cpu_nanoseconds, usage.resident), (3_000_000_000, 300 * 4096));
        assert_eq!(parse("42 (x) S 1", 100, 4096), None);
        assert!(memory_available().is_some_and(|bytes| bytes > 0));
    }

    #[test]
    fn a_process_that_has_ended_uses_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let record = directory.path().join("own");
        assert_eq!(of(&record), None);
        let own = std::fs::read_to_string("/proc/self/stat").unwrap();
        std::fs::write(&record, &own).unwrap();
        assert!(of(&record).is_some_and(|usage| usage.resident > 0));
        // The same id, of a process that started at another time.
        let started = parse_stat(&own).unwrap().started.to_string();
        std::fs::write(&record, own.replace(&format!(" {started} "), " 1 ")).unwrap();
        assert_eq!(of(&record), None);
    }
}
