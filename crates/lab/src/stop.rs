//! Whether a run is to end before it is through. What measures looks at it again and again, and ends as after an error: guests,
//! filters, mounts and files go with the values that have made them.

use std::io;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::unistd::Pid;

/// How often what waits looks: seldom enough that nothing of it shows in what is measured meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// No other data depends on it, so no memory ordering is needed.
static ASKED: AtomicBool = AtomicBool::new(false);

/// A signal has asked for the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stopped by a signal: what was started for measuring has ended, and nothing is reported")]
pub struct Stopped;

/// Has SIGTERM and SIGINT ask for the end, instead of leaving behind what was started.
///
/// # Errors
/// The kernel refuses a handler.
pub fn on_signals() -> io::Result<()> {
    let handler = SigHandler::Handler(note);
    let action = SigAction::new(handler, SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        // SAFETY: the handler stores to an atomic and does nothing else, which may be done in any signal handler.
        let set = unsafe { sigaction(signal, &action) };
        set?;
    }
    Ok(())
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
