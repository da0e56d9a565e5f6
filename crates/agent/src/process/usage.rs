//! What the processes of a VM use, as the kernel counts it.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{ProcessIdentity, identity, parse_stat};

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
    parse(&stat_of(known)?, clock_ticks(), page_size())
}

/// What the kernel says of a process; none when it has ended.
fn stat_of(known: ProcessIdentity) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", known.pid)).ok()?;
    // Its id may be another process's by now.
    (parse_stat(&stat) == Some(known)).then_some(stat)
}

/// Whether the process on record has this file open; none when it has ended.
///
/// # Errors
/// The kernel's: this process may not look at that one.
pub fn has_open(record: &Path, file: &Metadata) -> io::Result<Option<bool>> {
    let Some(known) = identity(record)? else { return Ok(None) };
    if stat_of(known).is_none() {
        return Ok(None);
    }
    let listed = match std::fs::read_dir(format!("/proc/{}/fd", known.pid)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    for entry in listed {
        // One that is not there any more has been closed.
        let Ok(open) = entry.and_then(|entry| std::fs::metadata(entry.path())) else { continue };
        if (open.dev(), open.ino()) == (file.dev(), file.ino()) {
            return Ok(Some(true));
        }
    }
    Ok(stat_of(known).map(|_| false))
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
    fn a_file_that_is_open_is_told_from_one_that_took_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let (record, path) = (directory.path().join("own"), directory.path().join("file"));
        std::fs::write(&path, "one").unwrap();
        let file = std::fs::File::open(&path).unwrap();
        let facts = || std::fs::metadata(&path).unwrap();
        assert_eq!(has_open(&record, &facts()).unwrap(), None, "no process is on record");
        std::fs::write(&record, std::fs::read_to_string("/proc/self/stat").unwrap()).unwrap();
        assert_eq!(has_open(&record, &facts()).unwrap(), Some(true));
        std::fs::write(directory.path().join("new"), "two").unwrap();
        std::fs::rename(directory.path().join("new"), &path).unwrap();
        assert_eq!(has_open(&record, &facts()).unwrap(), Some(false));
        drop(file);
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
