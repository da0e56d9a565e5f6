//! Processes that die exactly before a step of a task, or after it and before that is recorded.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::{Path, PathBuf};
use std::process::Output;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::installation::Installation;
use crate::kills::Victim;
use crate::two_hosts::QEMU;

/// The longest that a step, or the time between two, may take.
const STEP_MAX: Duration = Duration::from_secs(300);

/// How often a task that is not held is looked at.
const INTERVAL: Duration = Duration::from_millis(20);

/// Whether a run tries every moment of every operation.
#[must_use]
pub fn all_of_all() -> bool {
    std::env::var_os("VMSEAL_ALL").is_some()
}

/// What chooses, of a seed that is given or printed.
#[must_use]
pub fn seeded() -> fastrand::Rng {
    let given = std::env::var("VMSEAL_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(|| fastrand::u64(..));
    eprintln!("VMSEAL_SEED={seed}");
    fastrand::Rng::with_seed(seed)
}

/// How a task ended in which something was killed.
pub struct Ended {
    /// The step before or after which it was; none where the task has fewer.
    pub at: Option<String>,
    /// Whether the guest's own process was killed.
    pub guest_died: bool,
    /// What `vmseal task wait` says.
    pub output: Output,
}

/// Begins a task by a command, kills something at this moment of it, counted from 0 on, before and after each step, and waits until it
/// has ended. `directory` is that of [`Installation::hold_steps`].
pub fn killed_at(
    here: &mut Installation,
    directory: &Path,
    vm: &str,
    command: &[&str],
    victim: Victim,
    moment: usize,
) -> Ended {
    let task = here.json(&[command, &["--no-wait"]].concat()).unwrap();
    let task = task["id"].as_str().unwrap().to_owned();
    let file = directory.join(&task);
    let (mut at, mut seen, mut guest_died) = (None, 0, false);
    while let Some(step) = next(here, &file, &task) {
        let is_now = seen == moment;
        seen += 1;
        if is_now {
            eprintln!("{command:?}: {victim:?} is killed at '{}'", step.trim());
            at = Some(step.trim().to_owned());
            guest_died = matches!(victim, Victim::Qemu | Victim::Machine)
                && !here.processes_of(vm, QEMU).unwrap().is_empty();
            if let Victim::Server | Victim::Machine = victim {
                // Before the file is removed: the server would go on.
                victim.end(here, vm);
                std::fs::remove_file(&file).unwrap();
                victim.begin_again(here);
                continue;
            }
            victim.kill(here, vm);
        }
        std::fs::remove_file(&file).unwrap();
    }
    Ended { at, guest_died, output: here.try_vmseal(&["task", "wait", &task]).unwrap() }
}

/// The step at which a task is held next; none when it has ended.
fn next(here: &Installation, file: &PathBuf, task: &str) -> Option<String> {
    let began = Instant::now();
    let mut looked = Instant::now();
    loop {
        if let Ok(step) = std::fs::read_to_string(file) {
            return Some(step);
        }
        if looked.elapsed() > INTERVAL * 10 {
            looked = Instant::now();
            let shown = here.json(&["task", "show", task]);
            if shown.is_ok_and(|shown| !shown["ended"].is_null()) {
                return None;
            }
        }
        assert!(began.elapsed() < STEP_MAX, "task {task} is at a step for ever");
        sleep(INTERVAL);
    }
}

/// Lets every step of all tasks go on meanwhile that are held in a directory.
pub fn without_holding<T>(directory: &Path, work: impl FnOnce() -> T) -> T {
    std::thread::scope(|scope| {
        let (done, until) = std::sync::mpsc::channel::<()>();
        scope.spawn(move || {
            while until.recv_timeout(INTERVAL) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
                    let _ = std::fs::remove_file(entry.path());
                }
            }
        });
        let worked = work();
        drop(done);
        worked
    })
}
