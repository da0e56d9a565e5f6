//! Processes that die in the middle of a task.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fmt::Debug;
use std::io::Write as _;
use std::process::Output;
use std::thread::sleep;
use std::time::Duration;

use crate::eventually;
use crate::guest::Console;
use crate::installation::Installation;
use crate::process::kill_hard;
use crate::two_hosts::QEMU;

/// What is killed. Agent and server are started again; another filter is started by the agent that has outlived it.
#[derive(Clone, Copy, Debug)]
pub enum Victim {
    /// The agent of the host.
    Agent,
    /// The filter of the VM's disks.
    Filter,
    /// The server.
    Server,
    /// The guest's own process: the VM is off then.
    Qemu,
    /// Server, agent and all that runs for guests at once, as where the machine that all of it is on loses power: VMs that ran are off
    /// then.
    Machine,
}

impl Victim {
    /// Each in turn that a guest survives.
    #[must_use]
    pub fn of_round(round: usize) -> Self {
        [Self::Agent, Self::Filter, Self::Server][round % 3]
    }

    /// Kills it, and starts it again.
    pub fn kill(self, here: &mut Installation, vm: &str) {
        self.end(here, vm);
        self.begin_again(here);
    }

    /// Kills it.
    pub fn end(self, here: &mut Installation, vm: &str) {
        match self {
            Self::Agent => here.kill_agent(),
            Self::Filter => {
                here.processes_of(vm, "vmseal-filter").unwrap().into_iter().for_each(kill_hard);
            }
            Self::Server => here.kill_server(),
            Self::Qemu => {
                here.processes_of(vm, QEMU).unwrap().into_iter().for_each(kill_hard);
            }
            Self::Machine => {
                // Those first that would start others again.
                here.kill_server();
                here.kill_agent();
                here.all_guest_processes().into_iter().for_each(kill_hard);
            }
        }
    }

    /// Starts again of it what nothing else starts.
    pub fn begin_again(self, here: &mut Installation) {
        if let Self::Server | Self::Machine = self {
            here.start_server().unwrap();
        }
        if let Self::Agent | Self::Machine = self {
            here.start_agent().unwrap();
        }
    }
}

/// How many moments a run tries: each victim of [`Victim::of_round`] has its turn.
const MOMENTS: usize = 3;

/// One of how many tests of what dies, is cancelled, or comes together seldom, has its turn.
const TURNS: u64 = 3;

/// Whether this test has its turn: of the tests of what dies at any moment, and of those of what comes together seldom, each run tries a
/// third. With `VMSEAL_ALL` all of them have their turn, which takes most of an hour, and with `VMSEAL_SEED`, which one of them has printed;
/// the steps of tasks are tried by `held_steps` in any case.
#[must_use]
pub fn has_its_turn() -> bool {
    let is_given = |name: &&str| std::env::var_os(name).is_some();
    if ["VMSEAL_ALL", "VMSEAL_SEED"].iter().any(is_given) || fastrand::u64(..TURNS) == 0 {
        return true;
    }
    let thread = std::thread::current();
    let name = thread.name().unwrap_or_default();
    let message = format!("not tried in this run: {name} (VMSEAL_ALL=1 has all tried)\n");
    // Not by a macro, whose output the harness hides when a test passes.
    std::io::stderr().write_all(message.as_bytes()).unwrap();
    false
}

/// Whether all is tried (`VMSEAL_ALL`, as `scripts/soak` has it): for a test that takes minutes. Where not, the run says that it was
/// skipped.
#[must_use]
pub fn is_soak_run() -> bool {
    let all = std::env::var_os("VMSEAL_ALL").is_some();
    if !all {
        crate::skipped("it is for soak runs (VMSEAL_ALL=1)");
    }
    all
}

/// Some of these moments (milliseconds, or parts of an operation), chosen by `VMSEAL_SEED` or a seed that is printed; with
/// `VMSEAL_ALL`, as `scripts/soak` has it, all of them, in order.
#[must_use]
pub fn some_of<T: Copy + Debug>(moments: &[T]) -> Vec<T> {
    if std::env::var_os("VMSEAL_ALL").is_some() {
        return moments.to_vec();
    }
    let given = std::env::var("VMSEAL_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(|| fastrand::u64(..));
    let chosen = fastrand::Rng::with_seed(seed).choose_multiple(moments.iter().copied(), MOMENTS);
    eprintln!("VMSEAL_SEED={seed}: {chosen:?}");
    chosen
}

/// Begins a task by a command, kills something so many milliseconds later, and waits until the task has ended: what `vmseal task
/// wait` says.
pub fn during(
    here: &mut Installation,
    vm: &str,
    command: &[&str],
    victim: Victim,
    milliseconds: u64,
) -> Output {
    let task = begun(here, command, milliseconds);
    victim.kill(here, vm);
    here.try_vmseal(&["task", "wait", &task]).unwrap()
}

/// The same where something else is killed.
pub fn during_which(
    here: &Installation,
    command: &[&str],
    milliseconds: u64,
    kill: impl FnOnce(),
) -> Output {
    let task = begun(here, command, milliseconds);
    kill();
    here.try_vmseal(&["task", "wait", &task]).unwrap()
}

/// Begins a task, and lets it work for so many milliseconds; its id.
fn begun(here: &Installation, command: &[&str], milliseconds: u64) -> String {
    let task = here.json(&[command, &["--no-wait"]].concat()).unwrap();
    sleep(Duration::from_millis(milliseconds));
    task["id"].as_str().unwrap().to_owned()
}

/// Checks that a VM goes on after an operation was disturbed, and repeats an operation that failed.
pub fn retried(here: &Installation, vm: &str, operation: &[&str], ended: &Output) {
    disks_are_served(here, vm);
    let shown = here.vm(vm).unwrap();
    let goes_on =
        ["running", "suspended", "suspending"].iter().any(|power| shown["power"] == *power);
    assert!(goes_on, "{operation:?}: {}: {}", shown["power"], shown["stopped"]);
    if !ended.status.success() {
        eprintln!("undone: {operation:?}: {}", String::from_utf8_lossy(&ended.stderr));
        here.vmseal(operation).unwrap();
    }
}

/// Waits until the disks of a running VM are served.
pub fn disks_are_served(here: &Installation, vm: &str) {
    eventually("the guest is served", || {
        here.alarms(vm).ok()?.iter().all(|it| it["code"] != "disks-down").then_some(())
    })
    .unwrap();
}

/// The same where the guest's own process is killed; starts the VM again when the task has ended. Whether that was done.
pub fn while_the_guest_dies(
    here: &mut Installation,
    vm: &str,
    command: &[&str],
    milliseconds: u64,
) -> bool {
    let ended = during(here, vm, command, Victim::Qemu, milliseconds);
    eventually("the VM is off", || (here.vm(vm).ok()?["power"] == "off").then_some(())).unwrap();
    here.vmseal(&["vm", "start", vm]).unwrap();
    ended.status.success()
}

/// The console of a guest that is served again; the agent or the server may have ended the former connection.
#[must_use]
pub fn console_again(here: &Installation, vm: &str, former: Console) -> Console {
    disks_are_served(here, vm);
    drop(former);
    here.console(vm).unwrap()
}
