//! Children that never outlive their test.

use std::path::Path;
use std::process::{Child, Command, Stdio};

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

/// The processes whose command line holds `text`, other than this one: guests and filters of an
/// installation name its directory.
#[must_use]
pub fn naming(text: &str) -> Vec<i32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let own = std::process::id().to_string();
    entries
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().into_string().ok()?;
            if pid == own || !pid.bytes().all(|byte| byte.is_ascii_digit()) {
                return None;
            }
            let line = std::fs::read(entry.path().join("cmdline")).ok()?;
            let found = line.windows(text.len()).any(|window| window == text.as_bytes());
            found.then(|| pid.parse().ok()).flatten()
        })
        .collect()
}

/// Kills a process that is not a child; one that is gone is no error.
pub fn kill_hard(pid: i32) {
    let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
}
