//! Ceph's tools, which do one thing and end.

use std::ffi::OsStr;
use std::io::{self, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::error::CephError;
use super::layout::Layout;
use crate::{children, stop};

/// The programs that a cluster needs.
pub const PROGRAMS: [&str; 7] =
    ["ceph-mon", "ceph-mgr", "ceph-osd", "ceph", "ceph-authtool", "monmaptool", "rbd"];

/// The program that starts another one in a chroot.
pub const CHROOT: &str = "chroot";
/// Where programs are in a chroot, as PATH has it.
const PATH_IN_CHROOT: &str = "/usr/sbin:/usr/bin:/sbin:/bin";
/// The tool for images. Clients of this machine's packages use it, whatever programs the cluster has.
const IMAGE_TOOL: &str = "rbd";

/// How long `ceph` tries to reach the monitor, in seconds.
const CONNECT: &str = "10";
/// How long a tool may take. Making a store takes seconds; this is for a machine that is busy with other work.
const LIMIT: Duration = Duration::from_secs(120);
/// How long it may take once a signal has asked for the end: as long as `ceph` tries to reach the monitor. A cluster whose disk is full
/// may never answer.
const STOPPED_LIMIT: Duration = Duration::from_secs(10);
/// How much of what a failed tool said an error quotes, in bytes.
const QUOTED: usize = 600;

/// Finds the programs, in a chroot if one is named, else on this machine.
///
/// # Errors
/// The first that is not there.
pub fn check_programs(chroot: Option<&Path>) -> Result<(), CephError> {
    let Some(directory) = chroot else { return PROGRAMS.into_iter().try_for_each(check_program) };
    match PROGRAMS.into_iter().find(|program| !is_in_chroot(directory, program)) {
        Some(program) => {
            let why = format!(
                "it has no program {program}; scripts/build-ceph-chroot makes one that has"
            );
            Err(CephError::Chroot { directory: directory.to_owned(), why })
        }
        None => Ok(()),
    }
}

/// Finds what makes images for clients other than `vmseal-rbd`, on this machine.
///
/// # Errors
/// It is not there.
pub fn check_image_tool() -> Result<(), CephError> {
    check_program(IMAGE_TOOL)
}

fn check_program(program: &'static str) -> Result<(), CephError> {
    match is_in(&std::env::var_os("PATH").unwrap_or_default(), program) {
        true => Ok(()),
        false => Err(CephError::Missing { program }),
    }
}

/// Whether a program is in a chroot.
fn is_in_chroot(directory: &Path, program: &str) -> bool {
    let mut places = PATH_IN_CHROOT.split(':').map(|it| directory.join(it.trim_start_matches('/')));
    places.any(|place| place.join(program).is_file())
}

/// Whether a program is in a search path.
#[must_use]
pub fn is_in(path: &OsStr, program: &str) -> bool {
    std::env::split_paths(path).any(|directory| directory.join(program).is_file())
}

/// A program of Ceph's, for a cluster and no other.
#[must_use]
pub fn command(program: &str, layout: &Layout) -> Command {
    let mut command = isolated(started(program, layout.chroot().as_deref()));
    command.arg("-c").arg(layout.configuration()).stdin(Stdio::null());
    command
}

/// A program of this machine, or of a chroot.
fn started(program: &str, chroot: Option<&Path>) -> Command {
    let Some(directory) = chroot else { return Command::new(program) };
    let mut command = Command::new(CHROOT);
    command.arg(directory).arg(program).env("PATH", PATH_IN_CHROOT);
    command
}

/// A command for which what the user has set of Ceph is not there: it is for another cluster.
#[must_use]
pub fn isolated(mut command: Command) -> Command {
    command.env_remove("CEPH_CONF").env_remove("CEPH_ARGS").env_remove("CEPH_KEYRING");
    command
}

/// Runs a program that ends, and gives what it printed.
///
/// # Errors
/// It cannot be run, failed, or did not end in time.
pub fn run(command: Command) -> Result<Vec<u8>, CephError> {
    run_within(command, (LIMIT, STOPPED_LIMIT), stop::asked)
}

/// Runs a program that ends within the first of these times, or within the second from when the end was asked for.
fn run_within(
    mut command: Command,
    limits: (Duration, Duration),
    asked: impl Fn() -> bool,
) -> Result<Vec<u8>, CephError> {
    let what = shown(&command);
    let ended = children::output_within(&mut command, limits, asked).map_err(|source| {
        let program = command.get_program().to_string_lossy().into_owned();
        CephError::Program { program, source }
    })?;
    match ended {
        Ok(output) if output.status.success() => Ok(output.stdout),
        Ok(output) => Err(CephError::Command { what, said: end(&output.stderr) }),
        Err(limit) => Err(CephError::NoAnswer { what, seconds: limit.as_secs() }),
    }
}

/// A command as a user types it; the one with which it was given `-c` has the same for all.
#[must_use]
pub fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

/// The end of a text.
#[must_use]
pub fn end(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(&text[text.len().saturating_sub(QUOTED)..]);
    text.trim().to_owned()
}

/// The end of a file; nothing if there is none.
#[must_use]
pub fn end_of(path: &Path) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        std::fs::File::open(path)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    end(&read().unwrap_or_default())
}

/// The tools of one cluster.
#[derive(Clone, Copy, Debug)]
pub struct Tools<'a> {
    /// Where its files are.
    pub layout: &'a Layout,
}

impl Tools<'_> {
    fn ceph_command(self, arguments: &[&str]) -> Command {
        let mut command = command("ceph", self.layout);
        command.args(["--connect-timeout", CONNECT]).args(arguments);
        command
    }

    /// Has the cluster do something.
    ///
    /// # Errors
    /// It does not answer, or refuses.
    pub fn ceph(self, arguments: &[&str]) -> Result<(), CephError> {
        run(self.ceph_command(arguments)).map(drop)
    }

    /// Asks the cluster something.
    ///
    /// # Errors
    /// It does not answer, or with something else.
    pub fn ask<T: DeserializeOwned>(self, arguments: &[&str]) -> Result<T, CephError> {
        let printed = run(self.ceph_command(&[arguments, &["-f", "json"]].concat()))?;
        let what = || format!("ceph {} -f json", arguments.join(" "));
        serde_json::from_slice(&printed)
            .map_err(|source| CephError::Answer { what: what(), source })
    }

    /// Runs another tool.
    ///
    /// # Errors
    /// It fails.
    pub fn other(self, program: &str, arguments: &[&str]) -> Result<(), CephError> {
        let mut command = command(program, self.layout);
        command.args(arguments);
        run(command).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_missing_program_is_told_with_the_packages() {
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("ceph"), "").unwrap();
        assert!(is_in(place.path().as_os_str(), "ceph"));
        assert!(!is_in(place.path().as_os_str(), "ceph-osd"));
        let said = CephError::Missing { program: "ceph-osd" }.to_string();
        assert!(said.contains("ceph-osd") && said.contains("ceph-mon ceph-mgr"), "{said}");
    }

    #[test]
    fn a_program_that_fails_is_told_with_what_it_said() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo 'no such pool' >&2; exit 2"]);
        let said = run(command).unwrap_err().to_string();
        assert!(said.ends_with("failed: no such pool"), "{said}");
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo warning >&2"]);
        assert_eq!(run(command).unwrap(), b"out\n");
    }

    #[test]
    fn a_program_has_less_time_once_the_end_is_asked_for() {
        let sleeps = || {
            let mut command = Command::new("sleep");
            command.arg("600");
            command
        };
        let (short, long) = (Duration::from_secs(1), Duration::from_secs(500));
        let begun = Instant::now();
        for (limits, asked) in [((long, short), true), ((short, long), false)] {
            let refused = run_within(sleeps(), limits, || asked).unwrap_err();
            assert!(matches!(refused, CephError::NoAnswer { seconds: 1, .. }), "{refused}");
        }
        assert!(begun.elapsed() < Duration::from_secs(60));
        let mut answers = Command::new("echo");
        answers.arg("there");
        assert_eq!(run_within(answers, (long, long), || true).unwrap(), b"there\n");
    }

    #[test]
    fn tools_ask_the_lab_cluster_whatever_the_user_has_set() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(place.path()).unwrap();
        let asked = command("ceph", &layout);
        let words: Vec<_> = asked.get_args().collect();
        assert_eq!(words, [OsStr::new("-c"), layout.configuration().as_os_str()]);
        let removed: Vec<_> = asked.get_envs().filter(|(_, value)| value.is_none()).collect();
        assert_eq!(removed.len(), 3);
    }

    #[test]
    fn tools_of_a_cluster_in_a_chroot_run_there_with_the_same_files() {
        let layout = Layout::at(Path::new("/srv/lab")).with_chroot(true);
        let mut asked = command("ceph-osd", &layout);
        asked.args(["-i", "3"]);
        assert_eq!(shown(&asked), "chroot /srv/lab/chroot ceph-osd -c /srv/lab/ceph.conf -i 3");
        let set: Vec<_> =
            asked.get_envs().filter_map(|(name, value)| Some((name, value?))).collect();
        assert_eq!(set, [(OsStr::new("PATH"), OsStr::new(PATH_IN_CHROOT))]);
        assert_eq!(asked.get_envs().count(), 4);
        let of_this_machine = command("ceph", &layout.with_chroot(false));
        assert_eq!(shown(&of_this_machine), "ceph -c /srv/lab/ceph.conf");
    }

    #[test]
    fn a_chroot_without_a_program_is_told_with_what_makes_one() {
        let place = tempfile::tempdir().unwrap();
        let programs = place.path().join("usr/bin");
        std::fs::create_dir_all(&programs).unwrap();
        let (last, others) = PROGRAMS.split_last().unwrap();
        for program in others {
            std::fs::write(programs.join(program), "").unwrap();
        }
        let said = check_programs(Some(place.path())).unwrap_err().to_string();
        let expected = format!("it has no program {last}; scripts/build-ceph-chroot");
        assert!(said.contains(&expected), "{said}");
        std::fs::write(programs.join(last), "").unwrap();
        check_programs(Some(place.path())).unwrap();
    }
}
