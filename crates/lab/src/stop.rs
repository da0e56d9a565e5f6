//! Whether a run is to end before it is through. What measures looks at it again and again, and ends as after an error: guests,
//! filters, mounts and files go with the values that have made them. Where that takes too long, as with a cluster that does not answer,
//! the processes that were started are killed, and at last this one ends and says what it leaves.
//!
//! ```text
//! signal ─► what measures ends ─► END: children are killed ─► KILLED: what is left is told, and the process ends
//! ```

use std::io;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::unistd::Pid;

/// How often what waits looks: seldom enough that nothing of it shows in what is measured meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How long the end may take after a signal. It takes seconds; a pool that does not answer is unmounted within 20 of them, and a
/// cluster that does not answer is asked for 10.
const END: Duration = Duration::from_secs(60);
/// How long it may take once the processes are killed that it may be waiting for.
const KILLED: Duration = Duration::from_secs(15);
/// How often it is looked whether a signal has come: while something is measured, that is all that this does.
const WATCH_EVERY: Duration = Duration::from_secs(1);
/// The exit code of `vmseal` when a signal ends it, as its --help says.
const INTERRUPTED: i32 = 130;

/// What would be left if this process ended now, in the words of a message.
static LEFT: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// No other data depends on it, so no memory ordering is needed.
static ASKED: AtomicBool = AtomicBool::new(false);

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
        lock().push(what.clone());
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
            let mut left = lock();
            if let Some(at) = left.iter().position(|it| *it == self.what) {
                left.remove(at);
            }
        }
    }
}

fn lock() -> std::sync::MutexGuard<'static, Vec<String>> {
    // A list of texts is whole whatever has panicked.
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn left() -> Vec<String> {
    lock().clone()
}

/// How a run has ended that leaves this.
fn ended(left: &[String]) -> String {
    match left {
        [] => "what was started for measuring has ended, and nothing is reported".to_owned(),
        _ => format!("nothing is reported, and this is left: {}", left.join("; ")),
    }
}

/// Has SIGTERM and SIGINT ask for the end, instead of leaving behind what was started, and ends this process where that takes too
/// long.
///
/// # Errors
/// The kernel refuses a handler, or a thread.
pub fn on_signals() -> io::Result<()> {
    let handler = SigHandler::Handler(note);
    let action = SigAction::new(handler, SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
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
    }
    std::thread::sleep(END);
    eprintln!("the end takes more than {} s: processes are killed", END.as_secs());
    kill_children();
    std::thread::sleep(KILLED);
    eprintln!("stopped by a signal: {}", ended(&left()));
    std::process::exit(INTERRUPTED);
}

/// Kills the processes that this one has started, so that nobody waits for them any more: requests to a mount fail once nothing serves
/// it. Daemons of clusters are not among them, as they were started before.
fn kill_children() {
    let this = std::process::id();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let stat = std::fs::read_to_string(process.path().join("stat")).unwrap_or_default();
        if parent(&stat) == Some(this) {
            // One that has just ended needs none. Its process id is not given away again as soon as this.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// The parent of a process, by the text of its `stat`. The name of its program is in parentheses and may have any characters.
fn parent(stat: &str) -> Option<u32> {
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_whitespace().nth(1)?.parse().ok()
}

extern "C" fn note(_signal: std::ffi::c_int) {
    ASKED.store(true, Ordering::Relaxed);
}

/// Whether the end was asked for.
pub(crate) fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
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
/// As running it.
pub(crate) fn output(command: &mut Command) -> io::Result<Output> {
    output_unless(&ASKED, command)
}

fn output_unless(asked: &AtomicBool, command: &mut Command) -> io::Result<Output> {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let pid = Pid::from_raw(child.id().cast_signed());
    let (ends, ended) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while ended.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
                if asked.load(Ordering::Relaxed) {
                    // One that has just ended needs none. Its process id is not given away again as soon as this.
                    let _ = kill(pid, Signal::SIGKILL);
                }
            }
        });
        let output = child.wait_with_output();
        drop(ends);
        output
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

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
    fn children_are_known_by_their_parent_whatever_they_are_named() {
        assert_eq!(parent("17 (a ) S 3 (b)) S 4 17 17 0 -1"), Some(4));
        assert_eq!(parent(""), None);
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(parent(&stat), Some(std::process::id()));
    }

    #[test]
    fn a_command_is_killed_when_the_end_is_asked_for() {
        let (going_on, asked) = (AtomicBool::new(false), AtomicBool::new(true));
        let said = output_unless(&going_on, Command::new("echo").arg("done")).unwrap();
        assert!(said.status.success() && said.stdout == b"done\n");
        let begun = Instant::now();
        let killed = output_unless(&asked, Command::new("sleep").arg("600")).unwrap();
        assert_eq!(killed.status.signal(), Some(Signal::SIGKILL as i32));
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
}
