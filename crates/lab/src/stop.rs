//! Whether a run is to end before it is through. What measures looks at it again and again, and ends as after an error: guests,
//! filters, mounts and files go with the values that have made them. Where that takes too long, as with a cluster that does not answer,
//! the processes that were started are killed, and at last this one ends and says what it leaves.
//!
//! ```text
//! signal ─► what measures ends ─► SERVED: what serves mounts is killed ─► END: all processes that were started are killed
//!                              ─► KILLED: what is left is told, and the process ends
//! ```

use std::io::{self, Write};
use std::process::{Command, Output};
use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use crate::asked;
pub(crate) use crate::asked::{LOOK_EVERY, asked};
use crate::children;

/// How often it is looked whether a signal has come: while something is measured, that is all that this does.
const WATCH_EVERY: Duration = Duration::from_secs(1);
/// How long the end may take after a signal until what serves mounts is killed. It takes seconds. Who asks a mount of a cluster that does
/// not answer waits in the kernel, where no signal reaches him, until nothing serves it.
const SERVED: Duration = Duration::from_secs(20);
/// How long it may take from then on until all processes are killed: a cluster that does not answer is asked for 10 seconds, and there may
/// be three.
const END: Duration = Duration::from_secs(35);
/// How long it may take once the processes are killed that it may be waiting for.
const KILLED: Duration = Duration::from_secs(15);
/// How long it may take to say something. Nobody may read it.
const TOLD: Duration = Duration::from_secs(1);
/// The exit code of `vmseal` when a signal ends it, as its --help says.
const INTERRUPTED: i32 = 130;

/// What asks for the end.
const SIGNALS: [Signal; 2] = [Signal::SIGTERM, Signal::SIGINT];

/// The processes that serve mounts, while they do.
static SERVING: Mutex<Vec<i32>> = Mutex::new(Vec::new());

/// What would be left if this process ended now, in the words of a message.
static LEFT: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// A signal has asked for the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stopped by a signal: {}", ended(&left()))]
pub struct Stopped;

/// Something that has to be removed before this process ends, while it lasts.
#[derive(Debug)]
pub(crate) struct Left {
    what: String,
    stays: bool,
}

impl Left {
    /// Notes it: what it is, and how it goes when this process has not removed it.
    pub(crate) fn new(what: String) -> Self {
        lock(&LEFT).push(what.clone());
        Self { what, stays: false }
    }

    /// It could not be removed.
    pub(crate) fn stays(&mut self) {
        self.stays = true;
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        if !self.stays {
            let mut left = lock(&LEFT);
            if let Some(at) = left.iter().position(|it| *it == self.what) {
                left.remove(at);
            }
        }
    }
}

/// A process that serves a mount, while this lasts.
#[derive(Debug)]
pub(crate) struct Serves(i32);

impl Serves {
    /// Notes it.
    pub(crate) fn new(pid: u32) -> Self {
        lock(&SERVING).push(pid.cast_signed());
        Self(pid.cast_signed())
    }
}

impl Drop for Serves {
    fn drop(&mut self) {
        lock(&SERVING).retain(|pid| *pid != self.0);
    }
}

fn lock<T>(list: &'static Mutex<Vec<T>>) -> std::sync::MutexGuard<'static, Vec<T>> {
    // A list is whole whatever has panicked.
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

fn left() -> Vec<String> {
    lock(&LEFT).clone()
}

/// How a run has ended that leaves this.
fn ended(left: &[String]) -> String {
    match left {
        [] => "what was started for measuring has ended, and nothing is reported".to_owned(),
        _ => format!("nothing is reported, and this is left: {}", left.join("; ")),
    }
}

/// Has SIGTERM and SIGINT ask for the end, instead of leaving behind what was started, and ends this process where that takes too
/// long. From then on what its children leave when they die are its own children.
///
/// # Errors
/// The kernel refuses a handler, or a thread.
pub fn on_signals() -> io::Result<()> {
    set_child_subreaper(true)?;
    let handler = SigHandler::Handler(note);
    let action = SigAction::new(handler, SaFlags::SA_RESTART, SigSet::empty());
    for signal in SIGNALS {
        // SAFETY: the handler stores to an atomic and does nothing else, which may be done in any signal handler.
        let set = unsafe { sigaction(signal, &action) };
        set?;
    }
    std::thread::Builder::new().name("stop".to_owned()).spawn(watch).map(drop)
}

/// Ends this process when the end was asked for and does not come.
fn watch() {
    while !asked() {
        std::thread::sleep(WATCH_EVERY);
        if is_pending(&std::fs::read_to_string("/proc/self/status").unwrap_or_default()) {
            asked::note();
        }
    }
    std::thread::sleep(SERVED);
    kill_serving();
    std::thread::sleep(END);
    tell(format!("the end takes more than {} s: processes are killed", (SERVED + END).as_secs()));
    children::kill_descendants();
    std::thread::sleep(KILLED);
    // What was started meanwhile, or by what has died.
    children::kill_descendants();
    tell(format!("stopped by a signal: {}", ended(&left())));
    // SAFETY: it only ends the process. Nothing is called that could wait for another thread.
    unsafe { nix::libc::_exit(INTERRUPTED) }
}

/// Whether such a signal has come and no thread has taken it, by the text of a process's `status`: the kernel gives it to one of them,
/// and that may wait for a mount that does not answer.
fn is_pending(status: &str) -> bool {
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
    let pending = pending.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0);
    SIGNALS.into_iter().any(|signal| pending & (1_u64 << (signal as i32 - 1)) != 0)
}

/// Kills what serves mounts: requests to them fail then.
fn kill_serving() {
    for pid in lock(&SERVING).iter() {
        children::kill_hard(*pid);
    }
}

/// Says something on standard error. Where nobody reads that, or another thread waits there, this does not wait for long.
fn tell(text: String) {
    let (told, heard) = channel();
    let say = move || {
        let _ = writeln!(io::stderr(), "{text}");
        let _ = told.send(());
    };
    if std::thread::Builder::new().name("tell".to_owned()).spawn(say).is_ok() {
        let _ = heard.recv_timeout(TOLD);
    }
}

extern "C" fn note(_signal: std::ffi::c_int) {
    asked::note();
}

/// Goes on unless the end was asked for.
///
/// # Errors
/// [`Stopped`].
pub(crate) fn check() -> Result<(), Stopped> {
    match asked() {
        true => Err(Stopped),
        false => Ok(()),
    }
}

/// Sleeps, at most until the end is asked for.
pub(crate) fn sleep(time: Duration) {
    let until = Instant::now() + time;
    while !asked() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(LOOK_EVERY));
    }
}

/// Runs a command, which is killed when the end is asked for; how it ended, and what it said.
///
/// # Errors
/// As running it; [`Stopped`] of one that was killed.
pub(crate) fn output(command: &mut Command) -> io::Result<Output> {
    output_unless(asked, command)
}

fn output_unless(asked: impl Fn() -> bool, command: &mut Command) -> io::Result<Output> {
    // It has as long as it takes, and no time once the end is asked for.
    let ended = children::output_within(command, (Duration::MAX, Duration::ZERO), asked)?;
    ended.map_err(|_| io::Error::other(Stopped))
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::kill;
    use nix::unistd::Pid;

    use super::*;

    #[test]
    fn what_is_left_is_told_until_it_is_removed() {
        let told = |what: &str| left().iter().any(|it| it == what);
        let removed = Left::new("a mount".to_owned());
        let mut kept = Left::new("a pool".to_owned());
        assert!(told("a mount") && told("a pool"));
        kept.stays();
        drop((removed, kept));
        assert!(!told("a mount") && told("a pool"));
        assert_eq!(
            ended(&["a pool".to_owned(), "a file".to_owned()]),
            "nothing is reported, and this is left: a pool; a file"
        );
        assert!(ended(&[]).contains("has ended"));
    }

    #[test]
    fn what_serves_a_mount_is_known_while_it_does() {
        let is_known = |pid: i32| lock(&SERVING).contains(&pid);
        // No process has such an id.
        let (one, other) = (Serves::new(i32::MAX as u32), Serves::new(i32::MAX as u32 - 1));
        assert!(is_known(i32::MAX) && is_known(i32::MAX - 1));
        drop(one);
        assert!(!is_known(i32::MAX) && is_known(i32::MAX - 1));
        drop(other);
    }

    #[test]
    fn a_signal_that_no_thread_takes_is_seen() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = child.id();
        let status = || std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let send = |signal| kill(Pid::from_raw(pid.cast_signed()), signal).unwrap();
        send(Signal::SIGSTOP);
        let begun = Instant::now();
        while !status().lines().any(|line| line.starts_with("State:\tT")) {
            assert!(begun.elapsed() < Duration::from_secs(60), "{}", status());
            std::thread::sleep(Duration::from_millis(1));
        }
        send(Signal::SIGUSR1);
        assert!(!is_pending(&status()), "{}", status());
        send(Signal::SIGTERM);
        assert!(is_pending(&status()), "{}", status());
        children::end(&mut child);
    }

    /// What a user may rely on: docs/benchmarks.md.
    #[test]
    fn a_run_ends_within_75_seconds_of_a_signal() {
        let longest = WATCH_EVERY + SERVED + END + TOLD + KILLED + TOLD;
        assert!(longest <= Duration::from_secs(75), "{longest:?}");
    }

    #[test]
    fn a_command_is_killed_when_the_end_is_asked_for() {
        let said = output_unless(|| false, Command::new("echo").arg("done")).unwrap();
        assert!(said.status.success() && said.stdout == b"done\n");
        let begun = Instant::now();
        let killed = output_unless(|| true, Command::new("sleep").arg("600")).unwrap_err();
        assert!(killed.to_string().contains("stopped by a signal"), "{killed}");
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
}
