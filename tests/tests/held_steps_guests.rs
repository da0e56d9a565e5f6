//! What dies while a VM that runs goes to another host of its control plane: QEMU or a filter, at either host. It dies exactly before a
//! step of the task, or after it and before that is recorded, also of a migration that is undone; and while disks or memory are sent.
//! (`held_steps_hosts` has what dies there and takes no guest along.)
//!
//! Afterwards one host has the VM, and its guest lacks nothing. If the QEMU that died was the guest's own, the VM is off there, and starts
//! with all that its guest had written. Nothing of it is left at the other host, and a migration that was undone succeeds when it is begun
//! again.
//!
//! A run tries one moment, where it has its turn, with disks that both hosts have or with copies of them, chosen by a seed that is
//! printed; with `VMSEAL_ALL`, all of all.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::{Path, PathBuf};

use vmseal_tests::counting_guest::{remember, started_with_one_disk, starts_again};
use vmseal_tests::dying_guest::{End, GuestProcess, goes_on};
use vmseal_tests::eventually;
use vmseal_tests::held_steps::{
    Moment, all_of_all, begun, disturb_one_or_all, dying_at, half_made, seeded, without_holding,
};
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::two_hosts::{
    HERE, THERE, add_host_with_datastore, nothing_is_left, only_host, other, own_directory, sends,
};

const VM: &str = "web";

/// So slow that disks and memory take some seconds each.
const RATE: &str = "4MiB";

/// Where the disks of the VM are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Disks {
    /// On a datastore that both hosts have.
    Shared,
    /// On a datastore that its host has alone: they are sent.
    Sent,
}

impl Disks {
    /// What is sent, one after the other, as the task names it.
    fn phases(self) -> &'static [&'static str] {
        match self {
            Self::Shared => &["memory"],
            Self::Sent => &["disks", "memory"],
        }
    }
}

/// When something dies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    /// At a step of the task, before anything is sent.
    Begins,
    /// At a step, once all is sent.
    HandsOver,
    /// Between two steps, while something is sent.
    Sends,
    /// At a step that is undone: the task was cancelled while memory was sent.
    IsUndone,
}

impl Part {
    const ALL: [Self; 4] = [Self::Begins, Self::HandsOver, Self::Sends, Self::IsUndone];

    /// How many moments there are.
    fn moments(self, disks: Disks) -> usize {
        match self {
            // Before and after the first step, and before that which sends.
            Self::Begins => 3,
            // After that, and before and after each of two.
            Self::HandsOver => 5,
            Self::Sends => disks.phases().len(),
            // After the step that was cancelled, and before and after it and the first one are undone.
            Self::IsUndone => 5,
        }
    }

    /// Whether it may have so many: how many steps follow is found out as the task runs.
    fn may_have(self, moment: usize, disks: Disks) -> bool {
        !matches!(self, Self::Begins | Self::Sends) || moment < self.moments(disks)
    }

    fn victims(self) -> &'static [GuestProcess] {
        match self {
            Self::Begins => &GuestProcess::OF_SOURCE,
            _ => &GuestProcess::ALL,
        }
    }

    /// Whether a process is there for certain.
    fn has(self, process: GuestProcess, moment: usize) -> bool {
        match (self, process) {
            // The guest stands still between both until it is let go on.
            (Self::HandsOver, GuestProcess::SourceQemu | GuestProcess::DestinationQemu) => {
                moment < 2
            }
            (Self::HandsOver, _) => false,
            // It runs at its host.
            (_, process) => GuestProcess::OF_SOURCE.contains(&process),
        }
    }

    /// What must be under way for it; none where that is not waited for.
    fn phase(self, moment: usize, disks: Disks) -> Option<&'static str> {
        match self {
            Self::Begins | Self::HandsOver => None,
            Self::Sends => Some(disks.phases()[moment]),
            Self::IsUndone => Some("memory"),
        }
    }
}

/// The command that sends the VM to a host.
fn migrate(to: &str, slowly: bool) -> Vec<&str> {
    let mut command = vec!["vm", "migrate", VM, to];
    if slowly {
        command.extend(["--rate", RATE]);
    }
    command
}

/// What became of a migration while something died.
struct Tried {
    /// Whether it has so many moments.
    reached: bool,
    /// How many processes of guests were killed.
    killed: usize,
    /// Whether it has succeeded, and what it says if not.
    succeeded: bool,
    said: String,
}

/// The VM, which runs on one of two hosts.
struct Hosts {
    here: Installation,
    held: PathBuf,
    disks: Disks,
}

impl Hosts {
    fn new(disks: Disks) -> Self {
        // With one disk, which it uses all the time.
        let (mut here, mut console) = started_with_one_disk(VM, "encrypted");
        match disks {
            Disks::Sent => add_host_with_datastore(&mut here).unwrap(),
            Disks::Shared => {
                here.add_host(THERE).unwrap();
                let store = here.path("datastore");
                let path = text(&store).unwrap();
                here.vmseal(&["datastore", "share", "local", "--host", THERE, "--path", path])
                    .unwrap();
            }
        }
        remember(&mut console);
        drop(console);
        let held = here.hold_steps().unwrap();
        here.wait_hosts().unwrap();
        Self { here, held, disks }
    }

    fn host(&self) -> String {
        self.here.vm(VM).unwrap()["host"].as_str().unwrap().to_owned()
    }

    fn end<'a>(&'a self, host: &'a str) -> End<'a> {
        End { here: &self.here, host }
    }

    /// Sends the VM to the other host, and something dies at this moment; whether there is such a moment.
    fn disturbed(&mut self, part: Part, (dies, moment): (GuestProcess, Moment)) -> bool {
        let moment = moment.of(part.moments(self.disks));
        if !part.may_have(moment, self.disks) {
            return false;
        }
        let source = self.host();
        let destination = other(&source);
        eprintln!("{:?}, from {source}, {part:?}, moment {moment}: {dies:?} dies", self.disks);
        let tried = self.tried(part, (dies, moment), (&source, destination));
        let Tried { reached, killed, succeeded, said } = tried;
        let is_there = !reached || killed > 0 || !part.has(dies, moment);
        assert!(is_there, "there was no such process: {said}");
        without_holding(&self.held, || self.here.wait_rest().unwrap());
        let host = self.host();
        let arrived = host == destination;
        // It may be there although the task is not done: then it stays.
        assert!(arrived || !succeeded, "it is at {host}: {said}");
        assert!(killed > 0 || arrived || part == Part::IsUndone, "nothing died: {said}");
        let is_sent = part == Part::HandsOver && dies == GuestProcess::SourceQemu;
        assert!(arrived || !is_sent, "its former QEMU died when all was sent: {said}");
        assert!(!(arrived && part == Part::IsUndone), "it was cancelled, and has arrived");
        self.is_alone(&host);
        if !goes_on(self.end(&host), VM, dies.ends_guest(killed, arrived), Some(dies)) {
            without_holding(&self.held, || starts_again(&self.here, VM));
        }
        assert_eq!(only_host(&self.here, VM).unwrap(), host);
        if !arrived {
            eprintln!("undone: {said}");
            without_holding(&self.held, || {
                self.here.vmseal(&migrate(destination, false)).unwrap();
                self.here.wait_rest().unwrap();
            });
            assert_eq!(only_host(&self.here, VM).unwrap(), destination);
            self.is_alone(destination);
            let there = self.end(destination);
            assert!(goes_on(there, VM, false, None), "it has ended on its way");
        }
        reached
    }

    /// Begins a migration, has something die, and waits until the task has ended.
    fn tried(
        &mut self,
        part: Part,
        (dies, moment): (GuestProcess, usize),
        (source, destination): (&str, &str),
    ) -> Tried {
        let phase = part.phase(moment, self.disks);
        let task = begun(&self.here, &migrate(destination, phase.is_some()));
        if let Some(phase) = phase {
            without_holding(&self.held, || sends(&self.here, &task, phase));
        }
        if part == Part::IsUndone {
            self.here.vmseal(&["task", "cancel", &task]).unwrap();
        }
        let mut killed = 0;
        let mut die = |here: &Installation| {
            killed = dies.kill(End { here, host: source }, End { here, host: destination });
        };
        let reached = match part {
            Part::Sends => {
                die(&self.here);
                true
            }
            Part::Begins | Part::HandsOver | Part::IsUndone => {
                let begins = Part::Begins.moments(self.disks);
                let before = if part == Part::HandsOver { begins } else { 0 };
                let at = (&*task, Moment::Number(before + moment));
                let die = |here: &mut Installation, _: &Path| die(here);
                let ended = dying_at(&mut self.here, &self.held, at, |_| {}, die);
                let whole = begins + Part::HandsOver.moments(self.disks);
                assert_eq!(ended.moments, whole, "the parts of the task");
                ended.at.is_some()
            }
        };
        let output = without_holding(&self.held, || {
            if phase.is_some() {
                // It is refused where the task has ended.
                self.here.try_vmseal(&["task", "set", &task, "--rate", "0"]).unwrap();
            }
            self.here.try_vmseal(&["task", "wait", &task]).unwrap()
        });
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Tried { reached, killed, succeeded: output.status.success(), said }
    }

    /// This host alone has the VM, and nothing of what sent it is left at either.
    fn is_alone(&self, host: &str) {
        let left = other(host);
        self.end(left).wait_free();
        let directory = match self.disks {
            Disks::Shared => own_directory(&self.here, HERE),
            Disks::Sent => {
                nothing_is_left(&self.here, left);
                own_directory(&self.here, host)
            }
        };
        let files = || self.here.datastore_entries(&directory).ok();
        let is_whole = || files().filter(|files| !files.iter().any(|it| half_made(it))).map(drop);
        eventually("nothing is left of what made its disks, or copied them", is_whole)
            .unwrap_or_else(|error| panic!("{error}: {:?}", files()));
    }
}

#[test]
fn whatever_process_of_a_guest_dies_on_its_way_one_host_has_the_vm_with_all_it_had() {
    if !has_its_turn() {
        return;
    }
    let mut random = seeded();
    let either = [Disks::Shared, Disks::Sent];
    let tried = if all_of_all() { &either[..] } else { &either[random.usize(..2)..][..1] };
    for disks in tried.iter().copied() {
        let mut hosts = Hosts::new(disks);
        disturb_one_or_all(&mut random, &Part::ALL, Part::victims, |part, at| {
            hosts.disturbed(part, at)
        });
    }
}
