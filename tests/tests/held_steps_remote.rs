//! What dies while a VM that runs goes to another control plane: a server, an agent, QEMU or a filter, of either side, or both servers. It
//! dies exactly before a step of either task, or after it and before that is recorded, also of a migration that is undone; and while disks
//! or memory are sent.
//!
//! Afterwards one control plane alone has the VM, and its guest lacks nothing, unless the QEMU that died was its own. Nothing of it is left
//! at the other one: no task, process, file, key or alarm. A migration that was undone succeeds when it is begun again.
//!
//! A run tries one moment, where it has its turn, chosen by a seed that is printed; with `VMSEAL_ALL`, all of all.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::{Path, PathBuf};

use vmseal_tests::counting_guest::{remember, starts_again, write_marker};
use vmseal_tests::dying_guest::{End, GuestProcess, goes_on};
use vmseal_tests::held_steps::{
    Moment, begun, disturb_one_or_all, dying_at, open_task, seeded, without_holding,
};
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::shell_guest::{self, booted};
use vmseal_tests::two_hosts::{HERE, sends};
use vmseal_tests::two_planes::{self, NAMES, introduce, is_alone, restart_agent};

const VM: &str = "web";

/// So slow that disks and memory take some seconds each.
const RATE: &str = "4MiB";

/// What is sent, one after the other, as the task names it.
const PHASES: [&str; 2] = ["disks", "memory"];

/// When something dies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    /// At a step of the source's task, before anything is sent.
    Begins,
    /// At a step of the source's task, once all is sent.
    HandsOver,
    /// At a step of the destination's task.
    Arrives,
    /// Between two steps, while something is sent.
    Sends,
    /// It was cancelled while memory was sent: at a step of the source's task.
    IsUndone,
    /// The same at a step of the destination's task.
    IsUndoneThere,
}

impl Part {
    const ALL: [Self; 6] = [
        Self::Begins,
        Self::HandsOver,
        Self::Arrives,
        Self::Sends,
        Self::IsUndone,
        Self::IsUndoneThere,
    ];

    /// How many moments it has.
    fn moments(self) -> usize {
        match self {
            // Before and after each of two steps, and before that which sends.
            Self::Begins => 5,
            // After that, and before and after each of four.
            Self::HandsOver => 9,
            Self::Arrives => 8,
            Self::Sends => PHASES.len(),
            // After the step that was cancelled, and before and after each of three is undone.
            Self::IsUndone | Self::IsUndoneThere => 7,
        }
    }

    /// Whether it may have so many moments: how many steps follow in the other parts is found out as their tasks run.
    fn may_have(self, moment: usize) -> bool {
        !matches!(self, Self::Begins | Self::Sends) || moment < self.moments()
    }

    fn victims(self) -> &'static [Dies] {
        match self {
            // The destination has none of its processes yet.
            Self::Begins => &Dies::OF_BEGINNING,
            _ => &Dies::ALL,
        }
    }

    fn is_undone(self) -> bool {
        matches!(self, Self::IsUndone | Self::IsUndoneThere)
    }

    /// What must be under way for it; none where that is not waited for.
    fn phase(self, moment: usize) -> Option<&'static str> {
        match self {
            Self::Begins | Self::HandsOver | Self::Arrives => None,
            Self::Sends => Some(PHASES[moment]),
            Self::IsUndone | Self::IsUndoneThere => Some(PHASES[1]),
        }
    }
}

/// What dies. The agents and servers are started again.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Dies {
    SourceServer,
    DestinationServer,
    BothServers,
    SourceAgent,
    DestinationAgent,
    Guest(GuestProcess),
}

impl Dies {
    const ALL: [Self; 9] = [
        Self::SourceServer,
        Self::DestinationServer,
        Self::BothServers,
        Self::SourceAgent,
        Self::DestinationAgent,
        Self::Guest(GuestProcess::SourceQemu),
        Self::Guest(GuestProcess::DestinationQemu),
        Self::Guest(GuestProcess::SourceFilter),
        Self::Guest(GuestProcess::DestinationFilter),
    ];

    const OF_BEGINNING: [Self; 7] = [
        Self::SourceServer,
        Self::DestinationServer,
        Self::BothServers,
        Self::SourceAgent,
        Self::DestinationAgent,
        Self::Guest(GuestProcess::SourceQemu),
        Self::Guest(GuestProcess::SourceFilter),
    ];

    fn is_server(self) -> bool {
        matches!(self, Self::SourceServer | Self::DestinationServer | Self::BothServers)
    }

    fn of_guest(self) -> Option<GuestProcess> {
        match self {
            Self::Guest(process) => Some(process),
            _ => None,
        }
    }

    /// Kills it while the VM goes from the control plane with this index to the other one. Returns how many processes of guests were there
    /// to be killed.
    fn kill(
        self,
        source: &mut Installation,
        destination: &mut Installation,
        held: &[PathBuf; 2],
        from: usize,
    ) -> usize {
        let to = 1 - from;
        match self {
            Self::SourceServer => restart_server(source, &held[from]),
            Self::DestinationServer => restart_server(destination, &held[to]),
            Self::BothServers => {
                destination.kill_server();
                restart_server(source, &held[from]);
                restart_server(destination, &held[to]);
            }
            Self::SourceAgent => restart_agent(source, from),
            Self::DestinationAgent => restart_agent(destination, to),
            Self::Guest(process) => {
                let (source, destination) = (&*source, &*destination);
                let end = |here| End { here, host: HERE };
                return process.kill(end(source), end(destination));
            }
        }
        0
    }

    /// Whether a guest has ended with these processes.
    fn ends_guest(self, killed: usize, arrived: bool) -> bool {
        self.of_guest().is_some_and(|process| process.ends_guest(killed, arrived))
    }
}

fn restart_server(here: &mut Installation, held: &Path) {
    here.kill_server();
    // The next one would take what was held for steps of its own: the files have the same names.
    for entry in std::fs::read_dir(held).unwrap().flatten() {
        let _ = std::fs::remove_file(entry.path());
    }
    here.start_server().unwrap();
}

/// The command that sends the VM to the control plane with this index.
fn migrate(to: usize, slowly: bool) -> Vec<&'static str> {
    let mut command = vec!["vm", "migrate", VM, "--remote", NAMES[to]];
    if slowly {
        command.extend(["--rate", RATE]);
    }
    command
}

/// Lets every step of both control planes go on meanwhile.
fn without_holding_either<T>(held: &[PathBuf; 2], work: impl FnOnce() -> T) -> T {
    without_holding(&held[0], || without_holding(&held[1], work))
}

/// What became of a migration while something died.
struct Tried {
    /// Whether it has so many moments.
    reached: bool,
    /// How many processes of guests were killed.
    killed: usize,
    /// Whether it has succeeded, and what it says if not.
    arrived: bool,
    said: String,
}

/// Two control planes that know each other, and the VM, which runs at one of both.
struct Planes {
    planes: [Installation; 2],
    /// Where each of them holds steps.
    held: [PathBuf; 2],
    /// The index of that which has the VM.
    at: usize,
}

impl Planes {
    fn new() -> Self {
        let mut planes = two_planes::planes();
        for (one, other) in [(0, 1), (1, 0)] {
            let url = planes[other].url();
            introduce(&planes[one], &planes[other], (NAMES[other], &url));
        }
        // With one disk, which it uses all the time.
        shell_guest::start(&planes[0], VM, "encrypted", &[]).unwrap();
        let mut console = booted(&planes[0], VM).unwrap();
        write_marker(&mut console);
        remember(&mut console);
        drop(console);
        let held = planes.each_mut().map(|here| {
            let held = here.hold_steps().unwrap();
            here.wait_host().unwrap();
            held
        });
        Self { planes, held, at: 0 }
    }

    /// Sends the VM to the other control plane, and something dies at this moment; whether there is such a moment.
    fn disturbed(&mut self, part: Part, (dies, moment): (Dies, Moment)) -> bool {
        let moment = moment.of(part.moments());
        if !part.may_have(moment) {
            return false;
        }
        eprintln!("from {}, {part:?}, moment {moment}: {dies:?} dies", NAMES[self.at]);
        let (from, to) = (self.at, 1 - self.at);
        let Tried { reached, killed, arrived, said } = self.tried(part, (dies, moment));
        if part.is_undone() {
            assert!(!arrived, "it was cancelled, and has arrived");
        } else if dies.is_server() {
            assert!(arrived, "a migration goes on when its server is back: {said}");
        }
        let at = if arrived { to } else { from };
        self.is_alone(at);
        self.has_all(at, dies.ends_guest(killed, arrived), dies);
        if !arrived {
            eprintln!("undone: {said}");
            without_holding_either(&self.held, || {
                self.planes[from].vmseal(&migrate(to, false)).unwrap();
            });
            self.is_alone(to);
            let there = End { here: &self.planes[to], host: HERE };
            assert!(goes_on(there, VM, false, None), "it has ended on its way");
        }
        self.at = to;
        reached
    }

    /// Begins a migration, has something die, and waits until the source's task has ended.
    fn tried(&mut self, part: Part, (dies, moment): (Dies, usize)) -> Tried {
        let Self { planes: [west, east], held, at } = self;
        let (held, from, to) = (&*held, *at, 1 - *at);
        let (source, destination) = if from == 0 { (west, east) } else { (east, west) };
        let phase = part.phase(moment);
        let task = begun(source, &migrate(to, phase.is_some()));
        if let Some(phase) = phase {
            without_holding_either(held, || sends(source, &task, phase));
        }
        let arrival = part.is_undone().then(|| open_task(destination, "vm.arrive"));
        if part.is_undone() {
            source.vmseal(&["task", "cancel", &task]).unwrap();
        }
        let mut killed = 0;
        let reached = match part {
            Part::Begins | Part::HandsOver | Part::IsUndone => {
                let before = if part == Part::HandsOver { Part::Begins.moments() } else { 0 };
                let die = |source: &mut Installation, _: &Path| {
                    killed = dies.kill(source, destination, held, from);
                };
                let at = (&*task, Moment::Number(before + moment));
                let ended =
                    without_holding(&held[to], || dying_at(source, &held[from], at, |_| {}, die));
                let whole = Part::Begins.moments() + Part::HandsOver.moments();
                assert_eq!(ended.moments, whole, "the parts of the source's task");
                ended.at
            }
            Part::Arrives | Part::IsUndoneThere => {
                let arrives = |destination: &mut Installation| {
                    let arrival = arrival.unwrap_or_else(|| open_task(destination, "vm.arrive"));
                    let die = |destination: &mut Installation, _: &Path| {
                        killed = dies.kill(source, destination, held, from);
                    };
                    let at = (&*arrival, Moment::Number(moment));
                    dying_at(destination, &held[to], at, |_| {}, die)
                };
                let ended = without_holding(&held[from], || arrives(destination));
                assert_eq!(ended.moments, Part::Arrives.moments(), "the destination's task");
                ended.at
            }
            Part::Sends => {
                killed = dies.kill(source, destination, held, from);
                phase.map(str::to_owned)
            }
        };
        let output = without_holding_either(held, || {
            if phase.is_some() {
                // It is refused where the task has ended.
                source.try_vmseal(&["task", "set", &task, "--rate", "0"]).unwrap();
            }
            source.try_vmseal(&["task", "wait", &task]).unwrap()
        });
        Tried {
            reached: reached.is_some(),
            killed,
            arrived: output.status.success(),
            said: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// The control plane with this index alone has the VM, and nothing of it is left at the other one.
    fn is_alone(&self, at: usize) {
        let (there, left) = (&self.planes[at], &self.planes[1 - at]);
        without_holding_either(&self.held, || {
            left.wait_rest().unwrap();
            there.wait_rest().unwrap();
        });
        is_alone(there, left, VM);
    }

    /// The guest lacks nothing; if it `has_ended` with what died, it is started, and lacks nothing that it had written.
    fn has_all(&self, at: usize, has_ended: bool, dies: Dies) {
        let here = &self.planes[at];
        if !goes_on(End { here, host: HERE }, VM, has_ended, dies.of_guest()) {
            without_holding_either(&self.held, || starts_again(here, VM));
        }
    }
}

#[test]
fn whatever_dies_on_the_way_to_another_control_plane_one_of_both_has_the_vm_with_all_it_had() {
    if !has_its_turn() {
        return;
    }
    let mut random = seeded();
    let mut planes = Planes::new();
    disturb_one_or_all(&mut random, &Part::ALL, Part::victims, |part, at| {
        planes.disturbed(part, at)
    });
}
