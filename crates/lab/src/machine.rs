//! The machine that a result was measured on.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde::Serialize;

/// A machine and its software.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The model of its first CPU.
    pub cpu: String,
    /// CPUs that this process may use.
    pub cores: usize,
    /// Memory in bytes.
    pub memory: u64,
    /// The kernel's release.
    pub kernel: String,
    /// The version of QEMU's storage daemon; none if there is none.
    pub storage_daemon: Option<String>,
    /// The version of nbdkit; none if there is none.
    pub nbdkit: Option<String>,
    /// Runnable processes in the minute before.
    pub load_average: f64,
}

/// Stands for a missing value.
const UNKNOWN: &str = "unknown";

impl Machine {
    /// Describes this machine, before anything is measured.
    #[must_use]
    pub fn here(storage_daemon: &Path, nbdkit: &Path) -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let kilobytes = field(&read("/proc/meminfo"), "MemTotal").and_then(first_number);
        Self {
            cpu: field(&read("/proc/cpuinfo"), "model name").unwrap_or(UNKNOWN).to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory: kilobytes.unwrap_or(0) * 1024,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            storage_daemon: version(storage_daemon, 2),
            nbdkit: version(nbdkit, 1),
            load_average: read("/proc/loadavg")
                .split_whitespace()
                .next()
                .and_then(|word| word.parse().ok())
                .unwrap_or(0.0),
        }
    }
}

/// One word, counted from 0, of a program's version output.
fn version(program: &Path, word: usize) -> Option<String> {
    let line = first_line(Command::new(program).arg("--version"))?;
    line.split_whitespace().nth(word).map(str::to_owned)
}

/// The value after `name:` in the files of /proc.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

fn first_number(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

fn first_line(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    String::from_utf8_lossy(&output.stdout).lines().next().map(str::to_owned)
}

/// The commit of the tree in the working directory, with `-dirty` after it if files were changed.
#[must_use]
pub fn commit() -> String {
    let describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"];
    first_line(Command::new("git").args(describe)).unwrap_or_else(|| UNKNOWN.to_owned())
}

/// The type of the file system that a directory is on.
#[must_use]
pub fn file_system(directory: &Path) -> String {
    let Ok(directory) = directory.canonicalize() else { return UNKNOWN.to_owned() };
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    file_system_of(&directory, &mounts).unwrap_or(UNKNOWN).to_owned()
}

/// By fstab(5): device, mount point, type; the deepest mount point wins, and the latest of equals.
fn file_system_of<'a>(directory: &Path, mounts: &'a str) -> Option<&'a str> {
    let entries = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1);
        Some((Path::new(words.next()?), words.next()?))
    });
    entries
        .filter(|(point, _)| directory.starts_with(point))
        .max_by_key(|(point, _)| point.components().count())
        .map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_are_found_by_their_whole_name() {
        let text = "model\t\t: 2\nmodel name\t: A CPU\nmodel name\t: Another\n";
        assert_eq!(field(text, "model name"), Some("A CPU"));
        assert_eq!(field(text, "name"), None);
        assert_eq!(first_number("24 kB"), Some(24));
    }

    #[test]
    fn the_deepest_mount_point_says_the_file_system() {
        let mounts = "/dev/vda / ext4 rw 0 0\ntmpfs /dev tmpfs rw 0 0\nshm /dev/shm ramfs rw 0 0\n";
        assert_eq!(file_system_of(Path::new("/dev/shm/x"), mounts), Some("ramfs"));
        assert_eq!(file_system_of(Path::new("/dev/shmx"), mounts), Some("tmpfs"));
        assert_eq!(file_system_of(Path::new("/home"), mounts), Some("ext4"));
        assert_eq!(file_system_of(Path::new("/home"), ""), None);
    }

    #[test]
    fn a_machine_without_the_other_programs_is_described() {
        let machine =
            Machine::here(Path::new("/nonexistent/daemon"), Path::new("/nonexistent/kit"));
        assert_eq!((machine.storage_daemon, machine.nbdkit), (None, None));
        assert!(machine.cores > 0 && machine.memory > 0 && !machine.kernel.is_empty());
    }
}
