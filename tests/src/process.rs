//! Children that never outlive their test.

use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A child process; killed when dropped.
pub struct Process(Child);

impl Process {
    /// Starts it, its output appended to `log`.
    pub fn start(command: &mut Command, log: &Path) -> anyhow::Result<Self> {
        let output = std::fs::File::options().create(true).append(true).open(log)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        Ok(Self(child))
    }

    /// Its process id.
    #[must_use]
    pub fn id(&self) -> i32 {
        self.0.id().cast_signed()
    }

    /// Whether it has ended.
    pub fn ended(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(Some(_)))
    }

    /// Waits until it has ended, and tells how.
    pub fn wait(mut self) -> anyhow::Result<ExitStatus> {
        crate::eventually("the process has ended", || self.0.try_wait().ok().flatten())
    }

    /// Asks it to end in good order (SIGTERM).
    pub fn terminate(&self) {
        let _ = kill(Pid::from_raw(self.id()), Signal::SIGTERM);
    }

    /// Ends it as a power cut would (SIGKILL).
    pub fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// The processes, other than this one, that have a file below `directory` open: guests and filters of an
/// installation write their logs there. Without root a filter, which is not dumpable, does not show what it
/// has open: the agent's record of it has to do.
#[must_use]
pub fn using(directory: &Path) -> Vec<i32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let own = std::process::id().cast_signed();
    let recorded = on_record(directory);
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| *pid != own)
        .filter(|pid| has_open(*pid, directory) || recorded.contains(pid))
        .collect()
}

fn has_open(pid: i32, directory: &Path) -> bool {
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    descriptors
        .flatten()
        .filter_map(|descriptor| std::fs::read_link(descriptor.path()).ok())
        .any(|file| file.starts_with(directory))
}

/// The living processes of which there is a record, `*.process`, below `directory`: a copy of their
/// `/proc/PID/stat`. Process id and start time name a process for good.
fn on_record(directory: &Path) -> Vec<i32> {
    let (mut found, mut todo) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(directory) = todo.pop() {
        for entry in std::fs::read_dir(&directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                todo.push(path);
            } else if path.extension().is_some_and(|extension| extension == "process") {
                found.extend(std::fs::read_to_string(path).ok().as_deref().and_then(living));
            }
        }
    }
    found
}

/// The process that a `/proc/PID/stat` is of, if it lives.
fn living(stat: &str) -> Option<i32> {
    let pid: i32 = stat.split(' ').next()?.parse().ok()?;
    let now = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    (start_time(&now)? == start_time(stat)?).then_some(pid)
}

/// Field 22 of `/proc/PID/stat`; the second one, in parentheses, may hold spaces.
fn start_time(stat: &str) -> Option<&str> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)
}

/// Whether a process that is not a child has ended, with all of its threads: its files and addresses are free, even where nobody has
/// waited for it.
#[must_use]
pub fn has_ended(pid: i32) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    tasks.flatten().all(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
    })
}

/// Kills a process that is not a child; one that is gone is no error.
pub fn kill_hard(pid: i32) {
    let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
}
