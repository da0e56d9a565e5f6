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

use vmseal_tests::counting_guest::{count, read_marker_of_disk, stop_counting, write_marker};
use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::held_steps::{
    Moment, begun, disturb_one_or_all, dying_at, half_made, open_task, seeded, without_holding,
};
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::process::kill_hard;
use vmseal_tests::shell_guest::{self, booted, run};
use vmseal_tests::two_hosts::{FILTER, KNOWN_LIMIT, QEMU};

const VM: &str = "web";

/// A text that the guest has in its memory alone: typed in two parts, so that no log has it.
const IN_MEMORY: (&str, &str) = ("MARKER-OF-", "THE-MEMORY-2099");

/// The control planes, as they know each other.
const NAMES: [&str; 2] = ["west", "east"];

/// More options of their agents: guests of the second one's host have other users, as both hosts are this machine.
const AGENTS: [&[&str]; 2] = [&[], &["--uid-base", "2300000"]];

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
    SourceQemu,
    DestinationQemu,
    SourceFilter,
    DestinationFilter,
}

impl Dies {
    const ALL: [Self; 9] = [
        Self::SourceServer,
        Self::DestinationServer,
        Self::BothServers,
        Self::SourceAgent,
        Self::DestinationAgent,
        Self::SourceQemu,
        Self::DestinationQemu,
        Self::SourceFilter,
        Self::DestinationFilter,
    ];

    const OF_BEGINNING: [Self; 7] = [
        Self::SourceServer,
        Self::DestinationServer,
        Self::BothServers,
        Self::SourceAgent,
        Self::DestinationAgent,
        Self::SourceQemu,
        Self::SourceFilter,
    ];

    fn is_server(self) -> bool {
        matches!(self, Self::SourceServer | Self::DestinationServer | Self::BothServers)
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
            Self::SourceQemu => return end_all(source, QEMU),
            Self::DestinationQemu => return end_all(destination, QEMU),
            Self::SourceFilter => return end_all(source, FILTER),
            Self::DestinationFilter => return end_all(destination, FILTER),
        }
        0
    }

    /// Whether a guest has ended with these processes: one that was not sent as a whole, or has arrived.
    fn ends_guest(self, killed: usize, arrived: bool) -> bool {
        match self {
            Self::SourceQemu => killed > 0 && !arrived,
            Self::DestinationQemu => killed > 0 && arrived,
            _ => false,
        }
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

/// That of the control plane with this index.
fn restart_agent(here: &mut Installation, index: usize) {
    here.kill_agent();
    here.start_agent_with(AGENTS[index]).unwrap();
}

/// Kills all processes of guests with this program; how many there were.
fn end_all(here: &Installation, program: &str) -> usize {
    let found = here.guest_processes(program);
    found.iter().copied().for_each(kill_hard);
    found.len()
}

/// Has one control plane know another one by this name; a user compares the fingerprint.
fn introduce(one: &Installation, other: &Installation, name: &str) {
    let (url, token) = (other.url(), other.path("server/admin.token"));
    let add = ["remote", "add", name, &url, "--remote-token-file", text(&token).unwrap()];
    let added = one.answered(&add, "yes\n").unwrap();
    assert!(added.status.success(), "{}", String::from_utf8_lossy(&added.stderr));
}

/// The guest has the text in its memory, and counts on its disk.
fn prepare(console: &mut Console) {
    let (one, two) = IN_MEMORY;
    run(console, &format!("m={one}; m=${{m}}{two}; echo SET-$((6 * 7))"), "SET-42").unwrap();
    count(console);
}

/// The guest has what it had, and goes on counting.
fn has_lost_nothing(at: &Installation) {
    let mut console = at.console(VM).unwrap();
    stop_counting(&mut console);
    let (one, two) = IN_MEMORY;
    run(&mut console, "echo HAS-$m-", &format!("HAS-{one}{two}-")).unwrap();
    read_marker_of_disk(&mut console);
    count(&mut console);
}

/// The guest boots, and has what it wrote in its former life.
fn starts_again(at: &Installation) {
    at.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(at, VM).unwrap();
    read_marker_of_disk(&mut console);
    prepare(&mut console);
}

/// The command that sends the VM to the control plane with this index.
fn migrate(to: usize, slowly: bool) -> Vec<&'static str> {
    let mut command = vec!["vm", "migrate", VM, "--remote", NAMES[to]];
    if slowly {
        command.extend(["--rate", RATE]);
    }
    command
}

/// Waits until a task sends this.
fn sends(source: &Installation, task: &str, phase: &str) {
    let is_so_far = || {
        let shown = source.json(&["task", "show", task]).ok()?;
        (shown["migration"]["phase"] == phase).then_some(())
    };
    eventually(&format!("it sends: {phase}"), is_so_far).unwrap();
}

/// Lets every step of both control planes go on meanwhile.
fn without_holding_either<T>(held: &[PathBuf; 2], work: impl FnOnce() -> T) -> T {
    without_holding(&held[0], || without_holding(&held[1], work))
}

/// The server hears its host, and works on nothing.
fn rests(here: &Installation) {
    let is_connected = || {
        let host = here.json(&["host", "show", "here"]).ok()?;
        (host["connection"] == "connected").then_some(())
    };
    eventually("the host is connected", is_connected).unwrap();
    let have_ended = || {
        let tasks = here.json(&["task", "list"]).ok()?;
        tasks.as_array()?.iter().all(|task| !task["ended"].is_null()).then_some(())
    };
    eventually("all tasks have ended", have_ended).unwrap();
}

/// How many keys a provider has made and not destroyed.
fn living_keys(here: &Installation) -> usize {
    let count = |kind| {
        let events = here.json(&["events", "--kind", kind]).unwrap();
        events.as_array().unwrap().len()
    };
    count("key.created") - count("key.destroyed")
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
        let mut planes = [(); 2].map(|()| Installation::new().unwrap());
        restart_agent(&mut planes[1], 1);
        introduce(&planes[0], &planes[1], NAMES[1]);
        introduce(&planes[1], &planes[0], NAMES[0]);
        // With one disk, which it uses all the time.
        shell_guest::start(&planes[0], VM, "encrypted", &[]).unwrap();
        let mut console = booted(&planes[0], VM).unwrap();
        write_marker(&mut console);
        prepare(&mut console);
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
            assert!(self.runs(to), "it has ended on its way");
            has_lost_nothing(&self.planes[to]);
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
            rests(left);
            rests(there);
        });
        let vm = there.vm(VM).unwrap();
        assert_eq!(vm["lifecycle"], "ready", "{vm}");
        assert_eq!(left.json(&["vm", "list"]).unwrap(), serde_json::json!([]));
        for program in [QEMU, FILTER] {
            let is_gone = || left.guest_processes(program).is_empty().then_some(());
            eventually(&format!("no {program} is left at the other one"), is_gone).unwrap();
        }
        let files = |here: &Installation| here.datastore_entries(&here.path("datastore")).ok();
        let is_empty = || files(left).filter(Vec::is_empty).map(drop);
        eventually("no file is left at the other one", is_empty)
            .unwrap_or_else(|error| panic!("{error}: {:?}", files(left)));
        let is_whole =
            || files(there).filter(|files| !files.iter().any(|it| half_made(it))).map(drop);
        eventually("nothing is left of what made its disks, or copied them", is_whole)
            .unwrap_or_else(|error| panic!("{error}: {:?}", files(there)));
        let is_told = || left.alarms(VM).ok().filter(Vec::is_empty).map(drop);
        eventually("no alarm is left at the other one", is_told)
            .unwrap_or_else(|error| panic!("{error}: {:?}", left.alarms(VM)));
        assert_eq!((living_keys(there), living_keys(left)), (1, 0), "keys here, and there");
    }

    /// Whether the guest runs, as soon as that is known: its death, or that of its filter, is reported later than it happens.
    fn runs(&self, at: usize) -> bool {
        let here = &self.planes[at];
        let known = || {
            let power = here.vm(VM).ok()?["power"].as_str()?.to_owned();
            let guests = here.guest_processes(QEMU).len();
            let is_served = !here.guest_processes(FILTER).is_empty()
                && here.alarms(VM).ok()?.iter().all(|alarm| alarm["code"] != "disks-down");
            match (&*power, guests) {
                ("running", 1) if is_served => Some(true),
                ("off", 0) => Some(false),
                _ => None,
            }
        };
        eventually("it is known whether the guest runs", known)
            .unwrap_or_else(|error| panic!("{error}: {:?}", here.vm(VM)))
    }

    /// The guest lacks nothing; if it `has_ended` with what died, it is started, and lacks nothing that it had written.
    fn has_all(&self, at: usize, has_ended: bool, dies: Dies) {
        let here = &self.planes[at];
        if self.runs(at) {
            assert!(!has_ended, "its QEMU was killed, and it runs");
            return has_lost_nothing(here);
        }
        let vm = here.vm(VM).unwrap();
        let why = vm["stopped"]["detail"].as_str().unwrap_or_default();
        let is_lost = matches!(dies, Dies::SourceFilter | Dies::DestinationFilter)
            && why.contains(KNOWN_LIMIT);
        assert!(has_ended || is_lost, "the guest has ended: {vm}");
        without_holding_either(&self.held, || starts_again(here));
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
