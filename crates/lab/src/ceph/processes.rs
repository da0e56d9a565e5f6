//! The daemons of a cluster as processes.
//!
//! A daemon is known by its command line, which names its program, its id and the cluster's configuration file, or the
//! block of the cluster that it serves: no record of a process can be stale, or missing because who would have written it
//! has died.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::block;
use super::daemon::{BLOCK_SERVER, Daemon};
use super::error::CephError;
use super::layout::Layout;
use super::tools;

/// How long a daemon may take until it serves; an OSD that has died replays its log first.
const START: Duration = Duration::from_secs(120);
/// How long daemons may take to end in good order; then they are killed.
const STOP: Duration = Duration::from_secs(30);
/// How long killed ones may take: a disk may be slow to let go.
const KILLED: Duration = Duration::from_secs(30);
/// How often it is looked whether they have.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A process of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    /// Which daemon it is.
    pub daemon: Daemon,
    /// Its process id.
    pub pid: i32,
    /// Whether it makes the daemon's store, and then ends.
    pub makes: bool,
}

/// The living processes of a cluster.
#[must_use]
pub fn find(layout: &Layout) -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|it| it.file_name().to_str()?.parse().ok());
    let mut found: Vec<Process> =
        pids.filter_map(|pid| process(pid, &line_of(pid), layout)).collect();
    found.sort_unstable();
    found
}

/// The daemons that run, and those that are being started.
#[must_use]
pub fn running(layout: &Layout) -> Vec<Process> {
    let mut found = find(layout);
    found.retain(|process| !process.makes);
    found
}

/// The command line; empty for a process that has ended.
fn line_of(pid: i32) -> Vec<u8> {
    fs::read(PathBuf::from(format!("/proc/{pid}/cmdline"))).unwrap_or_default()
}

/// The words of a program, also while it is being started in a chroot.
fn started<'a>(words: &'a [&'a str]) -> &'a [&'a str] {
    match words {
        [tools::CHROOT, _, program @ ..] => program,
        program => program,
    }
}

/// What process a command line is of.
fn process(pid: i32, line: &[u8], layout: &Layout) -> Option<Process> {
    let words: Vec<&str> =
        line.split(|byte| *byte == 0).map(std::str::from_utf8).collect::<Result<_, _>>().ok()?;
    let words = started(&words);
    let after = |option| {
        let at = words.iter().position(|word| *word == option)?;
        words.get(at + 1).copied()
    };
    let program = Path::new(words.first()?).file_name()?.to_str()?;
    if program == BLOCK_SERVER {
        let daemon = Daemon::Block(block::osd_of(layout, after("--export")?)?);
        return Some(Process { daemon, pid, makes: false });
    }
    let daemon = Daemon::of(program, after("-i")?)?;
    let ours = after("-c").map(Path::new) == Some(&*layout.configuration());
    ours.then(|| Process { daemon, pid, makes: words.contains(&"--mkfs") })
}

/// The program of a daemon.
fn command(layout: &Layout, daemon: Daemon) -> Command {
    match daemon {
        Daemon::Block(id) => block::server(layout, id),
        Daemon::Monitor | Daemon::Manager | Daemon::Osd(_) => {
            let mut command = tools::command(daemon.program(), layout);
            command.args(["-i", &daemon.id()]);
            command
        }
    }
}

/// Starts a daemon, and waits until it serves.
///
/// # Errors
/// It does not start; what it said is in the error.
pub fn start(layout: &Layout, daemon: Daemon) -> Result<(), CephError> {
    let log = layout.start_log(daemon);
    let failed = |source| CephError::File { path: log.clone(), source };
    let output = File::create(&log).map_err(failed)?;
    let mut command = command(layout, daemon);
    let what = tools::shown(&command);
    command
        // Ctrl-C is for the command that starts it.
        .process_group(0)
        .stdout(Stdio::from(output.try_clone().map_err(failed)?))
        .stderr(Stdio::from(output));
    let failed = |source| CephError::Program { program: daemon.program().to_owned(), source };
    let mut child = command.spawn().map_err(failed)?;
    let begun = Instant::now();
    // It goes to the background once it serves.
    let ended = loop {
        match child.try_wait().map_err(failed)? {
            Some(status) => break Some(status),
            None if begun.elapsed() > START => break None,
            None => std::thread::sleep(LOOK_EVERY),
        }
    };
    match ended {
        Some(status) if status.success() => Ok(()),
        Some(_) => {
            let mut logs = vec![log.clone(), layout.log(daemon)];
            logs.dedup();
            let said = logs.iter().map(|it| tools::end_of(it)).collect::<Vec<_>>().join("\n");
            Err(CephError::Command { what, said: said.trim().to_owned() })
        }
        None => {
            end(layout, |process| process.daemon == daemon, &mut |_| ())?;
            child.wait().map_err(failed)?;
            Err(CephError::NoAnswer { what, seconds: START.as_secs() })
        }
    }
}

/// Ends processes in good order, or else kills them; `ended` is told of each daemon.
///
/// # Errors
/// One does not end even so.
pub fn end(
    layout: &Layout,
    which: impl Fn(&Process) -> bool,
    ended: &mut dyn FnMut(Daemon),
) -> Result<(), CephError> {
    let left = || find(layout).into_iter().filter(&which).collect::<Vec<_>>();
    let begun = Instant::now();
    let (mut known, mut asked): (Vec<Process>, Vec<i32>) = (Vec::new(), Vec::new());
    loop {
        // Read again each time: a daemon that is being started becomes another process.
        let living = left();
        for gone in known.iter().filter(|it| !living.iter().any(|one| one.daemon == it.daemon)) {
            ended(gone.daemon);
        }
        known.clone_from(&living);
        known.dedup_by_key(|it| it.daemon);
        let Some(first) = living.first() else { return Ok(()) };
        if begun.elapsed() > STOP + KILLED {
            return Err(CephError::Lives { daemon: first.daemon.to_string(), pid: first.pid });
        }
        let killed = begun.elapsed() > STOP;
        for process in &living {
            // Its command line was read just now: the number is not that of another process.
            match killed {
                true => signal(process.pid, Signal::SIGKILL),
                false if asked.contains(&process.pid) => {}
                false => {
                    asked.push(process.pid);
                    signal(process.pid, Signal::SIGTERM);
                }
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Sends a signal; a process that has just ended needs none, and one that cannot be reached is found to live.
fn signal(pid: i32, signal: Signal) {
    let _: Result<(), Errno> = kill(Pid::from_raw(pid), signal);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(line: &str) -> Option<Process> {
        process(7, line.replace(' ', "\0").as_bytes(), &Layout::at(Path::new("/lab")))
    }

    #[test]
    fn what_serves_a_block_of_the_cluster_is_found() {
        let line = |root: &str, id| {
            let command = block::server(&Layout::at(Path::new(root)), id);
            let words = std::iter::once(command.get_program()).chain(command.get_args());
            words.map(|word| format!("{} ", word.display())).collect::<String>()
        };
        let known = Some(Process { daemon: Daemon::Block(12), pid: 7, makes: false });
        assert_eq!(found(&line("/lab", 12)), known);
        assert_eq!(found(&format!("/usr/bin/{}", line("/lab", 12))), known);
        assert_eq!(found(&line("/lab2", 12)), None);
        assert_eq!(found(&format!("sh -c {}", line("/lab", 12))), None);
        assert_eq!(found("qemu-storage-daemon --export type=nbd,id=block1 "), None);
        assert_eq!(found("qemu-storage-daemon --export "), None);
    }

    #[test]
    fn a_daemon_is_found_also_while_it_is_started_in_a_chroot() {
        let layout = Layout::at(Path::new("/lab")).with_chroot(true);
        let command = command(&layout, Daemon::Osd(12));
        let line = format!("{} ", tools::shown(&command));
        assert_eq!(line, "chroot /lab/chroot ceph-osd -c /lab/ceph.conf -i 12 ");
        let known = Some(Process { daemon: Daemon::Osd(12), pid: 7, makes: false });
        assert_eq!(found(&line), known);
        // What it is a moment later.
        assert_eq!(found(line.trim_start_matches("chroot /lab/chroot ")), known);
        assert_eq!(found("chroot /lab/chroot "), None);
        assert_eq!(found("chroot "), None);
    }

    #[test]
    fn only_the_clusters_own_daemons_are_found() {
        let one = |daemon, makes| Some(Process { daemon, pid: 7, makes });
        let osd = Daemon::Osd(12);
        assert_eq!(found("ceph-osd -c /lab/ceph.conf -i 12 "), one(osd, false));
        assert_eq!(found("/usr/bin/ceph-mon -c /lab/ceph.conf -i a "), one(Daemon::Monitor, false));
        assert_eq!(found("ceph-mgr -c /lab/ceph.conf -i a "), one(Daemon::Manager, false));
        assert_eq!(found("ceph-osd -c /lab/ceph.conf -i 12 --mkfs --osd-uuid x "), one(osd, true));
        for line in [
            "",
            "ceph-osd -c /etc/ceph/ceph.conf -i 12 ",
            "ceph-osd -i 12 ",
            "ceph-osd -c /lab/ceph.conf -i x ",
            "ceph-osd -c /lab/ceph.conf -i 012 ",
            "ceph-mon -c /lab/ceph.conf -i b ",
            "ceph-mon -c /lab/ceph.conf ",
            "python3 /usr/bin/ceph -c /lab/ceph.conf -s ",
            "vi -c /lab/ceph.conf -i 1 ",
        ] {
            assert_eq!(found(line), None, "{line}");
        }
    }
}
