//! The processes that this one starts. None is waited for without end: one that is killed while it waits for a mount that does not answer
//! ends only when nothing serves that any more.

use std::io::{self, Read};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::asked::{self, LOOK_EVERY};

/// The shortest and the longest pause between two looks whether a process has ended that ends now. The first is short, as some of them are
/// timed.
const ENDED_EVERY: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(2));
/// How long a killed process is waited for: one with much memory takes a second.
const KILLED: Duration = Duration::from_secs(10);
/// The same once the end was asked for. Who does not end by then waits for a mount, and that is ended next.
const KILLED_AT_THE_END: Duration = Duration::from_secs(1);

/// Waits for a child, at most so long; whether it has ended.
pub(crate) fn ended_within(child: &mut Child, limit: Duration) -> bool {
    let (begun, (mut pause, longest)) = (Instant::now(), ENDED_EVERY);
    loop {
        // One that cannot be waited for is not there any more.
        if !matches!(child.try_wait(), Ok(None)) {
            return true;
        }
        if begun.elapsed() >= limit {
            return false;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(longest);
    }
}

/// Kills a child, and waits until it has ended, but not without end.
pub(crate) fn end(child: &mut Child) {
    // One that has ended is not there any more.
    let _ = child.kill();
    ended_within(child, if asked::asked() { KILLED_AT_THE_END } else { KILLED });
}

/// Runs a command to its end, with what it prints and says. Where it does not end within the first time, or within the second from when
/// the end was asked for, it is killed; gives the time that it had.
///
/// # Errors
/// As running it.
pub(crate) fn output_within(
    command: &mut Command,
    limits: (Duration, Duration),
    asked: impl Fn() -> bool,
) -> io::Result<Result<Output, Duration>> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    // Both ends close when the program has ended, and then nobody sends any more.
    let (open, closed) = mpsc::channel();
    let printed = child.stdout.take().map(|pipe| read(pipe, open.clone()));
    let said = child.stderr.take().map(|pipe| read(pipe, open));
    if let Err(limit) = wait(&mut child, &closed, limits, asked) {
        end(&mut child);
        return Ok(Err(limit));
    }
    let status = child.wait()?;
    let text = |thread: Option<JoinHandle<Vec<u8>>>| {
        thread.and_then(|thread| thread.join().ok()).unwrap_or_default()
    };
    Ok(Ok(Output { status, stdout: text(printed), stderr: text(said) }))
}

/// Waits until nobody sends any more and the child has ended; else gives the time that it had.
fn wait(
    child: &mut Child,
    closed: &Receiver<()>,
    (limit, stopped_limit): (Duration, Duration),
    asked: impl Fn() -> bool,
) -> Result<(), Duration> {
    let begun = Instant::now();
    let mut stopped: Option<Instant> = None;
    let mut is_open = true;
    loop {
        if is_open {
            is_open = closed.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout);
        } else if ended_within(child, LOOK_EVERY) {
            return Ok(());
        }
        if stopped.is_none() && asked() {
            stopped = Some(Instant::now());
        }
        if stopped.is_some_and(|it| it.elapsed() >= stopped_limit) {
            return Err(stopped_limit);
        }
        if begun.elapsed() >= limit {
            return Err(limit);
        }
    }
}

fn read(mut pipe: impl Read + Send + 'static, open: mpsc::Sender<()>) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was read before an error is all that there is.
        let _ = pipe.read_to_end(&mut bytes);
        drop(open);
        bytes
    })
}

/// Kills all processes that descend from this one, so that nobody waits for them any more: requests to a mount fail once nothing serves
/// it. Daemons of clusters are not among them, as another command has started them.
pub(crate) fn kill_descendants() {
    descendants(std::process::id().cast_signed()).into_iter().for_each(kill_hard);
}

/// Kills a process. One that has just ended needs none, and its process id is not given away again as soon as this.
pub(crate) fn kill_hard(pid: i32) {
    let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
}

/// The processes that descend from one. A parent comes before its children: it starts no others once it is killed.
fn descendants(of: i32) -> Vec<i32> {
    let mut parents = Vec::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // Empty for one that has ended.
        let stat = std::fs::read_to_string(process.path().join("stat")).unwrap_or_default();
        parents.extend(parent(&stat).map(|parent| (pid, parent)));
    }
    below(of, &parents)
}

/// The same of processes that are given, each with its parent.
fn below(of: i32, parents: &[(i32, i32)]) -> Vec<i32> {
    let (mut found, mut next) = (vec![of], 0);
    while let Some(&one) = found.get(next) {
        let children = parents.iter().filter(|(pid, parent)| *parent == one && *pid != of);
        let new: Vec<i32> =
            children.map(|(pid, _)| *pid).filter(|pid| !found.contains(pid)).collect();
        found.extend(new);
        next += 1;
    }
    found.split_off(1)
}

/// The parent of a process, by the text of its `stat`. The name of its program is in parentheses and may have any characters.
fn parent(stat: &str) -> Option<i32> {
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use super::*;

    const LONG: Duration = Duration::from_secs(500);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        command
    }

    #[test]
    fn a_command_ends_by_itself_or_is_killed_in_time() {
        let long = (LONG, LONG);
        let ended = output_within(&mut shell("echo out; echo err >&2; exit 3"), long, || true);
        let ended = ended.unwrap().unwrap();
        assert_eq!((ended.status.code(), &ended.stdout[..]), (Some(3), &b"out\n"[..]));
        assert_eq!(ended.stderr, b"err\n");
        let (begun, short) = (Instant::now(), Duration::from_secs(1));
        for (script, limits, asked) in [
            ("exec sleep 600", (short, LONG), false),
            ("exec sleep 600", (LONG, short), true),
            // Whose pipes close is not taken for one that has ended.
            ("exec >&- 2>&-; exec sleep 600", (short, LONG), false),
        ] {
            let late = output_within(&mut shell(script), limits, || asked).unwrap();
            assert_eq!(late.unwrap_err(), short, "{script}");
        }
        assert!(begun.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_child_that_goes_on_is_not_waited_for_without_end() {
        let mut sleeper = shell("exec sleep 600").spawn().unwrap();
        assert!(!ended_within(&mut sleeper, Duration::from_millis(10)));
        end(&mut sleeper);
        assert!(ended_within(&mut sleeper, Duration::ZERO));
        // Also one that does nothing, as it was stopped.
        let mut stopped = shell("kill -STOP $$; exec sleep 600").spawn().unwrap();
        end(&mut stopped);
        assert!(ended_within(&mut stopped, Duration::ZERO));
    }

    #[test]
    fn descendants_are_found_behind_their_parents() {
        assert_eq!(below(1, &[(4, 3), (3, 2), (2, 1), (9, 8), (5, 2)]), [2, 3, 5, 4]);
        // As process ids may be read while they are given away again.
        assert_eq!(below(1, &[(2, 3), (3, 2), (2, 1), (1, 2)]), [2, 3]);
        assert_eq!(parent("17 (a ) S 3 (b)) S 4 17 17 0 -1"), Some(4));
        assert_eq!(parent(""), None);
    }

    #[test]
    fn what_a_child_has_started_is_killed_too() {
        let mut child = shell("sleep 600 & echo $!; wait").stdout(Stdio::piped()).spawn().unwrap();
        let mut told = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut told).unwrap();
        let (own, grandchild) = (child.id().cast_signed(), told.trim().parse::<i32>().unwrap());
        let of_this = descendants(std::process::id().cast_signed());
        let at = |pid: i32| of_this.iter().position(|it| *it == pid);
        assert!(at(own).is_some() && at(own) < at(grandchild), "{own} {grandchild}: {of_this:?}");
        assert_eq!(descendants(own), [grandchild]);
        kill_hard(grandchild);
        assert!(ended_within(&mut child, Duration::from_secs(60)), "its child goes on");
    }
}
