//! Processes that die exactly before a step of a task, or after it and before that is recorded.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fmt::Debug;
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::Output;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::eventually;
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

/// More moments than any operation has.
pub const MOMENTS_MAX: usize = 60;

/// At which of its moments a task has something die. They are counted from 0 on, before and after each step that is done or undone.
#[derive(Clone, Copy, Debug)]
pub enum Moment {
    /// At this one, if it has so many.
    Number(usize),
    /// At one of all that it has: this number chooses.
    OneOfAll(usize),
    /// After the last step.
    Last,
}

impl Moment {
    /// One of all, whatever is disturbed: how many there are is known when it has begun.
    #[must_use]
    pub fn chosen(random: &mut fastrand::Rng) -> Self {
        Self::OneOfAll(random.usize(..))
    }

    /// Its number, where there are so many.
    #[must_use]
    pub fn of(self, moments: usize) -> usize {
        match self {
            Self::Number(number) => number,
            Self::OneOfAll(chooses) => chooses % moments,
            Self::Last => moments - 1,
        }
    }
}

/// Disturbs one of these operations at one of all its moments, chosen by `random`; with `VMSEAL_ALL`, each of them at every moment. `victims` is
/// what can die, and `disturbed` says whether the operation has the moment.
pub fn disturb_one_or_all<Operation: Copy + Debug, Dies: Copy + 'static>(
    random: &mut fastrand::Rng,
    operations: &[Operation],
    victims: impl Fn(Operation) -> &'static [Dies],
    mut disturbed: impl FnMut(Operation, (Dies, Moment)) -> bool,
) {
    if !all_of_all() {
        let operation = operations[random.usize(..operations.len())];
        let (victims, moment) = (victims(operation), Moment::chosen(random));
        let victim = victims[random.usize(..victims.len())];
        assert!(disturbed(operation, (victim, moment)), "nothing died in {operation:?}");
        return;
    }
    for operation in operations {
        for moment in 0..MOMENTS_MAX {
            let mut reached = false;
            for victim in victims(*operation) {
                reached |= disturbed(*operation, (*victim, Moment::Number(moment)));
            }
            if !reached {
                break;
            }
        }
    }
}

/// How a task ended in which something was killed.
pub struct Ended {
    /// The step before or after which it was; none where the task has fewer.
    pub at: Option<String>,
    /// How many moments the task has if each of its steps is done once, as the server says.
    pub moments: usize,
    /// Whether the guest's own process was killed, where that is asked for.
    pub guest_died: bool,
    /// What `vmseal task wait` says.
    pub output: Output,
}

/// Begins a task by a command, kills something at this moment of it, and waits until it has ended. `directory` is that of
/// [`Installation::hold_steps`].
pub fn killed_at(
    here: &mut Installation,
    directory: &Path,
    vm: &str,
    command: &[&str],
    victim: Victim,
    moment: Moment,
) -> Ended {
    eprintln!("{command:?}");
    let task = begun(here, command);
    killed_in(here, directory, (vm, &task), (victim, moment), |_| {})
}

/// Begins a task by a command; its id.
#[must_use]
pub fn begun(here: &Installation, command: &[&str]) -> String {
    let task = here.json(&[command, &["--no-wait"]].concat()).unwrap();
    task["id"].as_str().unwrap().to_owned()
}

/// The id of the task of a kind that has not ended, as soon as there is one: of one that no command names.
#[must_use]
pub fn open_task(here: &Installation, kind: &str) -> String {
    let found = || {
        let tasks = here.json(&["task", "list"]).ok()?;
        let mut tasks = tasks.as_array()?.iter();
        let open = tasks.find(|task| task["kind"] == kind && task["ended"].is_null())?;
        open["id"].as_str().map(str::to_owned)
    };
    eventually(&format!("a task {kind}"), found).unwrap()
}

/// The same as [`killed_at`], of a task that has begun. `meanwhile` is done again and again while the task works on a step: what its
/// guest has to do for it.
pub fn killed_in(
    here: &mut Installation,
    directory: &Path,
    (vm, task): (&str, &str),
    (victim, moment): (Victim, Moment),
    meanwhile: impl FnMut(&Installation),
) -> Ended {
    let mut guest_died = false;
    let ended = dying_at(here, directory, (task, moment), meanwhile, |here, file| {
        eprintln!("{victim:?} is killed");
        guest_died = matches!(victim, Victim::Qemu | Victim::Machine)
            && here.processes_of(vm, QEMU).is_ok_and(|found| !found.is_empty());
        victim.end(here, vm);
        if let Victim::Server | Victim::Machine = victim {
            // The next server would hold the step again, and its file is the same.
            std::fs::remove_file(file).unwrap();
        }
        victim.begin_again(here);
    });
    Ended { guest_died, ..ended }
}

/// Waits until a task has ended, and has something `die` at this moment of it, which is given the file that holds the step: it removes
/// that before it starts a server.
pub fn dying_at(
    here: &mut Installation,
    directory: &Path,
    (task, moment): (&str, Moment),
    meanwhile: impl FnMut(&Installation),
    die: impl FnOnce(&mut Installation, &Path),
) -> Ended {
    let mut seen = 0;
    let is_it = |_: &Installation, step: &str| {
        seen += 1;
        seen - 1 == moment.of(moments_of(step))
    };
    let ended = dying_when(here, directory, task, is_it, meanwhile, die);
    if ended.at.is_none() {
        let moments = ended.moments;
        eprintln!("task {task} has {moments} moments, and none is {moment:?}: nothing died");
    }
    ended
}

/// The same at the first moment of which `is_it` is true. It is asked at each, with what the server says of the step there.
pub fn dying_when(
    here: &mut Installation,
    directory: &Path,
    task: &str,
    mut is_it: impl FnMut(&Installation, &str) -> bool,
    mut meanwhile: impl FnMut(&Installation),
    die: impl FnOnce(&mut Installation, &Path),
) -> Ended {
    let file = directory.join(task);
    let (mut at, mut moments, mut die) = (None, 0, Some(die));
    while let Some(step) = next(here, &file, task, &mut meanwhile) {
        moments = moments_of(&step);
        let dies = if is_it(here, &step) { die.take() } else { None };
        let Some(die) = dies else {
            std::fs::remove_file(&file).unwrap();
            continue;
        };
        eprintln!("task {task} is at '{}'", step.trim());
        at = Some(step.trim().to_owned());
        let held = here.server_process();
        die(here, &file);
        if here.server_process() == held {
            std::fs::remove_file(&file).unwrap();
        }
    }
    let output = here.try_vmseal(&["task", "wait", task]).unwrap();
    here.wait_hosts().unwrap();
    Ended { at, moments, guest_died: false, output }
}

/// How many moments the task has that is held at a step, as the server says there.
fn moments_of(step: &str) -> usize {
    let (_, moments) = step.rsplit_once(" of ").unwrap();
    moments.trim().parse().unwrap()
}

/// The step at which a task is held next; none when it has ended.
fn next(
    here: &Installation,
    file: &Path,
    task: &str,
    mut meanwhile: impl FnMut(&Installation),
) -> Option<String> {
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
            meanwhile(here);
        }
        assert!(began.elapsed() < STEP_MAX, "task {task} is at a step for ever");
        sleep(INTERVAL);
    }
}

/// The endings of what works on a disk, or has half made it: files and directories that are beside a disk for as long as its task.
const HALF_MADE: [&str; 18] = [
    "creating",
    "importing",
    "copy",
    "copy-layers",
    "source",
    "source-layers",
    "mirror",
    "mirror-map",
    "mirror-pace",
    "copy-tpm",
    "source-tpm",
    "converting",
    "in-place",
    "in-place-header",
    "in-place-journal",
    "restoring",
    "arriving",
    "former-replica",
];

/// How the endings of others begin, which have a task, a snapshot or a core dump behind that.
const HALF_MADE_OF: [&str; 6] =
    ["restored-", "tpm-", "copy-memory-", "source-memory-", "copy-core-", "source-core-"];

/// Whether a file is one that no task leaves that has ended as done, failed or undone.
#[must_use]
pub fn half_made(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let (_, ending) = name.split_once('.').unwrap_or_default();
    HALF_MADE_OF.iter().any(|begin| ending.starts_with(begin))
        || file.extension().is_some_and(|it| HALF_MADE.iter().any(|ending| it == *ending))
}

/// A command that is kept.
#[must_use]
pub fn owned(command: &[&str]) -> Vec<String> {
    command.iter().map(|it| (*it).to_owned()).collect()
}

/// A command that was kept, as it is given.
#[must_use]
pub fn borrowed(command: &[String]) -> Vec<&str> {
    command.iter().map(String::as_str).collect()
}

/// Where the disk of the counting guest has its number (`tests/images/counter.S`).
pub const NUMBER: usize = 512;

/// The number on a disk of the counting guest, which is one of these. Beside it the disk has what it had at first.
///
/// # Panics
/// It has something else.
#[must_use]
pub fn number_on(vm: &str, found: &[u8], first: &[u8], expected: RangeInclusive<u32>) -> u32 {
    let number = u32::from_le_bytes(found[NUMBER..NUMBER + 4].try_into().unwrap());
    assert!(expected.contains(&number), "{vm} has {number}, and should have {expected:?}");
    let mut wanted = first.to_vec();
    wanted[NUMBER..NUMBER + 4].copy_from_slice(&number.to_le_bytes());
    assert!(found == wanted, "the first disk of {vm} holds something else");
    number
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
