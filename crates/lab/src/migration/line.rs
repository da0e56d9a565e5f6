//! The line between the hosts: a network of its own with nothing but a loopback, so that what goes over it is counted, and as slow
//! as a line is to be.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;

use nix::sched::{CloneFlags, setns, unshare};

use crate::outcome::OperationError;

/// The network of this thread.
const NETWORK: &str = "/proc/thread-self/ns/net";

/// How much a line may send at once after it was quiet, and how much waits for it, in bytes: some of the largest packets.
const BURST: u64 = 512 << 10;
const QUEUE: u64 = 4 << 20;

/// A network of its own for this thread and all that it starts; the former one again when this is dropped.
#[derive(Debug)]
pub(super) struct Line {
    former: File,
}

impl Line {
    /// Makes one; else says why there is none.
    pub fn new() -> Result<Self, String> {
        let no = |why: &dyn std::fmt::Display| format!("a network of its own takes root: {why}");
        let former = File::open(NETWORK).map_err(|error| no(&error))?;
        unshare(CloneFlags::CLONE_NEWNET).map_err(|error| no(&error))?;
        let line = Self { former };
        run("ip", &["link", "set", "lo", "up"]).map_err(|error| error.to_string())?;
        Ok(line)
    }

    /// Lets so many megabits through in a second; 0 is all.
    pub fn limit(&self, mbit: u64) -> Result<(), OperationError> {
        if mbit == 0 {
            // There may be no limit.
            let _ = run("tc", &["qdisc", "delete", "dev", "lo", "root"]);
            return Ok(());
        }
        let (rate, burst, queue) = (format!("{mbit}mbit"), BURST.to_string(), QUEUE.to_string());
        let limit = ["rate", &rate, "burst", &burst, "limit", &queue];
        run("tc", &[&["qdisc", "replace", "dev", "lo", "root", "tbf"][..], &limit].concat())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        // It was in it before.
        let _ = setns(&self.former, CloneFlags::CLONE_NEWNET);
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<(), OperationError> {
    let output = Command::new(program).args(arguments).output();
    let output = output
        .map_err(|source| OperationError::Program { program: PathBuf::from(program), source })?;
    if output.status.success() {
        return Ok(());
    }
    let what = format!("{program} {}", arguments.join(" "));
    Err(OperationError::Command {
        what,
        said: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// The bytes that have gone over the line of this thread.
pub(super) fn sent() -> Option<u64> {
    loopback(&fs::read_to_string("/proc/thread-self/net/dev").ok()?)
}

/// By proc(5): `lo: ` and eight numbers of what was received, then those of what was sent.
fn loopback(devices: &str) -> Option<u64> {
    let numbers = devices.lines().find_map(|line| line.trim().strip_prefix("lo:"))?;
    numbers.split_whitespace().nth(8)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_over_the_loopback_is_found() {
        let devices = "Inter-|   Receive      |  Transmit\n face |bytes ...\n  eth0: 1 2 3 4 5 6 7 8 99 1\n    lo: 11 2 0 0 0 0 0 0 12 2 0 0 0 0 0 0\n";
        assert_eq!(loopback(devices), Some(12));
        assert_eq!(loopback("eth0: 1 2 3 4 5 6 7 8 99 1\n"), None);
    }
}
