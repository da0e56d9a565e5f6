//! What dies exactly before a step of what an operator does to a VM, or after it and before that is recorded: server, agent, filter,
//! QEMU, and all of these at once. Each operation goes on or is undone, and a retry works.
//!
//! The VM runs, while fio in its guest writes and verifies, and another program there has its history judged: no write is lost, torn,
//! stale or back again, and after a kill of QEMU all that was flushed is there. What a linked clone and an incremental backup have of its
//! disks is of one instant. A run tries one moment of some of the operations. Or it is off, and its disk holds what it has to: a run
//! tries one moment of one. They are chosen by a seed that is printed; with `VMSEAL_ALL`, all of all.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use vmseal_history::load::{Flushed, WRITERS};
use vmseal_tests::eventually;
use vmseal_tests::figures::bounced_bytes;
use vmseal_tests::fio_guest::{
    flushed, keep_history, next_flushed, ready, started, stop_and_check, write_and_verify,
};
use vmseal_tests::guest::{Console, counter_disk};
use vmseal_tests::held_steps::{
    Ended, MOMENTS_MAX, Moment, NUMBER, all_of_all, begun, dying_when, killed_at, seeded,
    without_holding,
};
use vmseal_tests::installation::{Installation, create, text};
use vmseal_tests::kills::{Victim, console_again, retried};
use vmseal_tests::one_instant::{Disks, number_disks};
use vmseal_tests::process::kill_hard;
use vmseal_tests::shell_guest::run;
use vmseal_tests::two_hosts::FILTER;

const VM: &str = "web";

/// A linked clone of the VM while that runs, and a VM that is made of its incremental backup.
const LINKED: &str = "linked";
const AGAIN: &str = "again";

/// What dies while the VM runs: first what its guest survives.
const VICTIMS: [Victim; 5] =
    [Victim::Agent, Victim::Server, Victim::Filter, Victim::Qemu, Victim::Machine];

/// How many blocks a second fio writes.
const WRITES: u32 = 300;

/// A step that no writer of the guest gets to.
const NEVER: u64 = u32::MAX as u64;

/// What an operator does, one after the other; at the end all is as it was at the beginning. `to` is a directory for backups, and `files`
/// are for what is in the clear.
///
/// The VM that is made of a backup comes after a disk was added: that has started a filter which decrypts in its guest's memory, as no
/// other VM has the data keys then. It is replaced once more, as that of the source of a linked clone is.
fn operations<'a>(to: &'a str, files: &'a [String; 3]) -> Vec<Vec<&'a str>> {
    let [exported, core, again] = files.each_ref().map(String::as_str);
    let of_snapshot = ["--snapshot", "one", "--format", "raw", "--plaintext", "--to", exported];
    let disk = "datastore=local,size=16MiB,name=extra";
    vec![
        vec!["vm", "encrypt", VM, "--policy", "encrypted"],
        vec!["vm", "recrypt", VM],
        vec!["snapshot", "create", VM, "one"],
        vec!["vm", "clone", VM, LINKED, "--linked", "--snapshot", "one"],
        vec!["vm", "delete", LINKED],
        vec!["vm", "recrypt", VM, "--deep"],
        vec!["vm", "move", VM, "--datastore", "second"],
        vec!["backup", "create", VM, "full", "--to", to],
        vec!["snapshot", "create", VM, "asleep", "--memory"],
        vec!["vm", "prove", VM],
        vec!["vm", "clone", VM, "copy", "--snapshot", "one"],
        vec!["vm", "clone", VM, "twin"],
        vec!["vm", "delete", "twin"],
        [&["disk", "export", VM, "data"][..], &of_snapshot].concat(),
        vec!["backup", "create", VM, "next"],
        vec!["snapshot", "delete", VM, "one"],
        vec!["backup", "verify", VM, "full"],
        vec!["snapshot", "delete", VM, "asleep"],
        vec!["vm", "move", VM, "--datastore", "local"],
        vec!["vm", "dump", VM, "core", "--format", "kdump", "--decrypt-to", core],
        vec!["dump", "decrypt", VM, "core", "--to", again],
        vec!["dump", "delete", VM, "core"],
        vec!["disk", "add", VM, "--disk", disk],
        vec!["disk", "resize", VM, "extra", "--size", "32MiB"],
        vec!["disk", "remove", VM, "extra"],
        vec!["nic", "add", VM, "--nic", "user,name=second"],
        vec!["nic", "remove", VM, "second"],
        vec!["backup", "restore", VM, "next", "--as", AGAIN],
        vec!["vm", "delete", AGAIN],
        vec!["vm", "suspend", VM],
        vec!["vm", "resume", VM],
        vec!["vm", "decrypt", VM, "--policy", "plain", "--yes"],
    ]
}

/// What is made beside the VM, and is in the way of the next turn.
fn tidy_up(here: &Installation, files: &[String]) {
    here.vmseal(&["vm", "delete", "copy"]).unwrap();
    for backup in ["next", "full"] {
        here.vmseal(&["backup", "delete", VM, backup]).unwrap();
    }
    files.iter().for_each(|file| std::fs::remove_file(file).unwrap());
}

/// What an operation keeps of the disks, if another VM has that later.
fn keeps(operation: &[&str]) -> Option<&'static str> {
    match *operation {
        ["snapshot", "create", VM, "one"] => Some("one"),
        ["backup", "create", VM, "next"] => Some("next"),
        _ => None,
    }
}

/// After which flush of the guest, and before which one, each of these was kept.
type Kept = BTreeMap<&'static str, [Flushed; 2]>;

/// The guest that writes, reads and verifies.
struct Guest {
    console: Console,
    /// How often it was killed with its QEMU.
    life: u32,
}

impl Guest {
    /// It begins to write, in its life of this number; `former` is what it had flushed in the one before.
    fn writes(mut console: Console, life: u32, former: Option<&str>) -> Self {
        write_and_verify(&mut console, WRITES);
        keep_history(&mut console, life, former);
        number_disks(&mut console);
        Self { console, life }
    }

    /// What it has flushed by a flush that it began after this was called.
    fn next_flushed(&mut self) -> Flushed {
        next_flushed(&mut self.console, self.life)
    }

    /// After which flush and before which one something was kept by an operation that began after this one, and may have been done `again`.
    fn kept_since(&mut self, before: Flushed, again: bool) -> [Flushed; 2] {
        let generation = u64::from(self.life);
        if before.generation == generation {
            return [before, self.next_flushed()];
        }
        if again {
            // In this life, which began with a write of all units.
            return [Flushed { generation, steps: [0; WRITERS] }, self.next_flushed()];
        }
        // Of the former life, which has ended meanwhile.
        let after = Flushed { steps: [NEVER; WRITERS], ..before };
        [before, after]
    }
}

/// A guest that was killed with its QEMU: the VM starts again, and has what its guest had flushed.
fn started_again(here: &Installation, guest: Guest) -> Guest {
    let Guest { console, life } = guest;
    let former = flushed(&console, life);
    eprintln!("the guest is killed in its life {life}; known to be flushed: {former:?}");
    drop(console);
    eventually("the VM is off", || (here.vm(VM).ok()?["power"] == "off").then_some(())).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = ready(here, VM);
    run(&mut console, "dd if=/dev/vda bs=1M skip=58 count=1 2>/dev/null | head -n 1", "FLUSHED")
        .unwrap();
    Guest::writes(console, life + 1, former.as_deref())
}

/// An operation that was undone has left nothing of what it makes.
fn has_left_nothing(here: &Installation, operation: &[&str]) {
    match *operation {
        ["vm", "clone", VM, other, ..] | ["backup", "restore", VM, _, "--as", other] => {
            here.refused(&["vm", "show", other]).unwrap();
        }
        ["backup", "create", VM, backup, ..] => {
            here.refused(&["backup", "show", VM, backup]).unwrap();
            let known = here.json(&["backup", "list", VM]).unwrap();
            let of_vms = std::fs::read_dir(here.path("backups")).unwrap();
            let there = of_vms.map(|it| std::fs::read_dir(it.unwrap().path()).unwrap().count());
            let there: usize = there.sum();
            assert_eq!(there, known.as_array().unwrap().len(), "something of {backup} is left");
        }
        _ => {}
    }
    is_tidy(here);
}

/// There is nothing of a VM that the inventory does not have, and no snapshot that a task took for itself.
fn is_tidy(here: &Installation) {
    let vms = here.json(&["vm", "list"]).unwrap();
    let is_known = |id: &str| vms.as_array().unwrap().iter().any(|vm| vm["id"] == id);
    for datastore in ["datastore", "second"] {
        let entries = std::fs::read_dir(here.path(datastore)).unwrap();
        for home in entries.map(|it| it.unwrap()).filter(|it| it.path().is_dir()) {
            let name = home.file_name();
            assert!(name.to_str().is_some_and(is_known), "{name:?} is there, and its VM is not");
        }
    }
    let snapshots = here.json(&["snapshot", "list", VM]).unwrap();
    let is_asked_for = |it: &Value| ["one", "asleep"].iter().any(|name| it["name"] == *name);
    assert!(snapshots.as_array().unwrap().iter().all(is_asked_for), "{snapshots}");
}

/// Nothing is decrypted in the guest's memory: another VM has the data keys.
fn reads_through_buffers(here: &Installation) {
    let bounced = || bounced_bytes(here, VM).ok().filter(|bytes| *bytes > 0);
    eventually("what the guest reads goes through buffers", bounced).unwrap();
}

/// Looks at what an operation has made of what was kept of the disks, and that it has left nothing else.
fn check(here: &Installation, operation: &[&str], kept: &Kept) {
    match *operation {
        ["vm", "clone", VM, LINKED, ..] => {
            let shown = here.vm(LINKED).unwrap();
            assert_eq!(shown["lifecycle"], "ready", "{shown}");
            assert_eq!(shown["linked"]["vm"], VM, "{shown}");
            assert_eq!(shown["linked"]["snapshot"], "one", "{shown}");
            let snapshot = Disks::of(here, VM, Some("one"));
            snapshot.are_of_one_instant(kept["one"].each_ref());
            Disks::of(here, LINKED, None).are(&snapshot, "the linked clone");
            reads_through_buffers(here);
        }
        ["backup", "create", VM, "next"] => {
            // Above the other one in any case. Where it is not known what was changed, all of the disks is read.
            let shown = here.json(&["backup", "show", VM, "next"]).unwrap();
            assert_eq!(shown["parent"], "full", "{shown}");
            eprintln!("read for the incremental backup: {} bytes", shown["read_bytes"]);
        }
        ["backup", "restore", VM, "next", ..] => {
            Disks::of(here, AGAIN, None).are_of_one_instant(kept["next"].each_ref());
            reads_through_buffers(here);
        }
        _ => {}
    }
    is_tidy(here);
}

/// What became of an operation in which something was to die.
struct Tried {
    /// Whether it has so many moments.
    reached: bool,
    /// Whether it was undone, and done again.
    again: bool,
}

/// Does an operation, and kills something at this moment of it, if it has so many.
fn disturbed(
    here: &mut Installation,
    held: &Path,
    guest: &mut Option<Guest>,
    operation: &[&str],
    (victim, moment): (Victim, Moment),
) -> Tried {
    let Ended { at, guest_died, output, .. } = killed_at(here, held, VM, operation, victim, moment);
    let again = !output.status.success();
    without_holding(held, || {
        if again {
            has_left_nothing(here, operation);
        }
        // The task may have ended before the death of QEMU is reported.
        let seen = || {
            let power = here.vm(VM).ok()?["power"].as_str()?.to_owned();
            ["off", "suspended"].contains(&&*power).then_some(power)
        };
        if guest_died && eventually("QEMU's death is seen", seen).unwrap() == "off" {
            let unplugs = matches!(operation[..2], ["disk" | "nic", "remove"]);
            let is_undone = unplugs && again;
            if is_undone {
                eprintln!("undone: {operation:?}: {}", String::from_utf8_lossy(&output.stderr));
                // What a guest is started with is unplugged while it is off.
                here.vmseal(operation).unwrap();
            }
            *guest = guest.take().map(|guest| started_again(here, guest));
            if is_undone {
                return;
            }
        }
        retried(here, VM, operation, &output);
        if here.vm(VM).unwrap()["power"] == "running" {
            // What its guest flushes is heard by a connection that the victim has not ended.
            *guest = guest.take().map(|Guest { console, life }| Guest {
                console: console_again(here, VM, console),
                life,
            });
        }
    });
    Tried { reached: at.is_some(), again }
}

/// Who dies in an operation, and when: as the turn says, or by chance.
fn dies(
    turn: Option<(Victim, Moment)>,
    operation: &[&str],
    random: &mut fastrand::Rng,
) -> (Victim, Moment) {
    let by_chance = || {
        // Those that cost a boot are tried less often.
        let of = if random.u8(..8) == 0 { 5 } else { 3 };
        (VICTIMS[random.usize(..of)], Moment::chosen(random))
    };
    let is_suspended = operation[1] == "resume";
    match turn.unwrap_or_else(by_chance) {
        // A guest that is suspended has neither a filter nor QEMU, and has both after the last step.
        (Victim::Filter, _) if is_suspended && turn.is_none() => (Victim::Filter, Moment::Last),
        (Victim::Qemu | Victim::Machine, moment) if is_suspended => (Victim::Agent, moment),
        at => at,
    }
}

/// Each of these at every moment.
fn every_moment(victims: &[Victim]) -> impl Iterator<Item = (Victim, Moment)> + '_ {
    let moments = (0..MOMENTS_MAX).map(Moment::Number);
    moments.flat_map(move |moment| victims.iter().map(move |victim| (*victim, moment)))
}

#[test]
fn whatever_dies_at_a_step_of_whatever_operation_it_goes_on_or_is_undone() {
    let (all, mut random) = (all_of_all(), seeded());
    let mut here = Installation::new().unwrap();
    let mut console = started(&here, VM, "plain", "local");
    let [second, to] = ["second", "backups"].map(|name| {
        let path = here.path(name);
        std::fs::create_dir(&path).unwrap();
        text(&path).unwrap().to_owned()
    });
    here.vmseal(&["datastore", "add", "second", "--host", "here", "--path", &second]).unwrap();
    let flush = "echo FLUSHED | dd of=/dev/vda bs=1M seek=58 conv=notrunc,fsync 2>/dev/null";
    run(&mut console, &format!("{flush}; echo WROTE-$((6 * 7))"), "WROTE-42").unwrap();
    let mut guest = Guest::writes(console, 0, None);
    let held = here.hold_steps().unwrap();
    here.wait_hosts().unwrap();
    // The server that passed it on has ended.
    guest.console = console_again(&here, VM, guest.console);
    let mut guest = Some(guest);
    // Not `exported`, which the disks are read by.
    let files =
        ["of-snapshot", "core", "core-again"].map(|it| text(&here.path(it)).unwrap().to_owned());

    let turns: Vec<Option<(Victim, Moment)>> = match all {
        // The whole machine at one moment: what it takes is that of QEMU and of the server together.
        true => std::iter::once((Victim::Machine, Moment::chosen(&mut random)))
            .chain(every_moment(&VICTIMS[..4]))
            .map(Some)
            .collect(),
        false => vec![None],
    };
    for turn in turns {
        let mut reached = false;
        let mut added_in = None;
        let mut kept = Kept::new();
        for operation in operations(&to, &files) {
            match operation[..2] {
                ["disk" | "nic", "add"] => added_in = guest.as_ref().map(|guest| guest.life),
                // What a guest was started with is unplugged while it is off.
                ["disk" | "nic", "remove"]
                    if guest.as_ref().map(|guest| guest.life) != added_in =>
                {
                    without_holding(&held, || {
                        here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
                        here.vmseal(&operation).unwrap();
                        guest = guest.take().map(|guest| started_again(&here, guest));
                    });
                    continue;
                }
                _ => {}
            }
            let keeps = keeps(&operation);
            let before = keeps.map(|_| guest.as_mut().unwrap().next_flushed());
            let mut again = false;
            if turn.is_none() && !random.bool() {
                without_holding(&held, || here.vmseal(&operation).unwrap());
            } else {
                let at = dies(turn, &operation, &mut random);
                let tried = disturbed(&mut here, &held, &mut guest, &operation, at);
                assert!(all || tried.reached, "nothing died in {operation:?}");
                reached |= tried.reached;
                again = tried.again;
            }
            if let Some((name, before)) = keeps.zip(before) {
                kept.insert(name, guest.as_mut().unwrap().kept_since(before, again));
            }
            without_holding(&held, || check(&here, &operation, &kept));
        }
        without_holding(&held, || tidy_up(&here, &files));
        if !reached {
            break;
        }
    }
    let mut console = console_again(&here, VM, guest.unwrap().console);
    stop_and_check(&mut console);
    without_holding(&held, || here.vmseal(&["vm", "stop", VM, "--force"]).unwrap());
}

/// The size of the disk of the VM that is off, and where noise is on it, in bytes: on both sides of its middle. A conversion in place
/// takes 16 MiB at a time at most, so that [`RATE`] holds it back before it is done.
const DISK: u64 = 32 << 20;
const NOISE: std::ops::Range<usize> = 12 << 20..20 << 20;

/// How much is converted in a second at most where the filter that converts is to die: so it works for some seconds.
const RATE: &str = "2MiB";

/// The moments at which a filter converts a disk in place, as the server tells them. The filter that copies a disk otherwise begins and
/// ends within a step of the task, so that no moment has one.
const CONVERTS: [&str; 2] = ["begin do After", "convert do Before"];

/// Another VM, its disk, which is empty, and the command that makes it.
const OTHER: &str = "other";
const EMPTY: &str = "datastore=local,size=16MiB";
const CREATE: [&str; 9] =
    ["vm", "create", OTHER, "--policy", "encrypted", "--memory", "32MiB", "--disk", EMPTY];

/// What an operator does to a VM that is off, in this order; at the end it is in the clear as at the beginning, and the other VM is gone.
#[derive(Clone, Copy, Debug, PartialEq)]
enum WhileOff {
    EncryptInPlace,
    RecryptInPlace,
    Revert,
    CloneLinked,
    RevertToMemory,
    Restore,
    RestoreAs,
    DeleteBackup,
    DecryptInPlace,
    Create,
    Start,
    Stop,
    Delete,
}

impl WhileOff {
    const ALL: [Self; 13] = [
        Self::EncryptInPlace,
        Self::RecryptInPlace,
        Self::Revert,
        Self::CloneLinked,
        Self::RevertToMemory,
        Self::Restore,
        Self::RestoreAs,
        Self::DeleteBackup,
        Self::DecryptInPlace,
        Self::Create,
        Self::Start,
        Self::Stop,
        Self::Delete,
    ];

    fn command(self) -> &'static [&'static str] {
        match self {
            Self::EncryptInPlace => &["vm", "encrypt", VM, "--policy", "encrypted", "--in-place"],
            Self::RecryptInPlace => &["vm", "recrypt", VM, "--deep", "--in-place"],
            Self::Revert => &["snapshot", "revert", VM, "one"],
            Self::CloneLinked => &["vm", "clone", VM, "linked", "--linked", "--snapshot", "one"],
            Self::RevertToMemory => &["snapshot", "revert", VM, "asleep"],
            Self::Restore => &["backup", "restore", VM, "full"],
            Self::RestoreAs => &["backup", "restore", VM, "full", "--as", "copy"],
            Self::DeleteBackup => &["backup", "delete", VM, "full"],
            Self::DecryptInPlace => {
                &["vm", "decrypt", VM, "--policy", "plain", "--yes", "--in-place"]
            }
            Self::Create => &CREATE,
            Self::Start => &["vm", "start", OTHER],
            Self::Stop => &["vm", "stop", OTHER, "--force"],
            Self::Delete => &["vm", "delete", OTHER],
        }
    }

    fn is_in_place(self) -> bool {
        matches!(self, Self::EncryptInPlace | Self::RecryptInPlace | Self::DecryptInPlace)
    }
}

/// Whether a filter has begun to convert the disk of the VM that is off: it notes that in a journal, which is all zeroes before.
fn converts(here: &Installation) -> bool {
    let is_journal = |file: &PathBuf| file.extension().is_some_and(|it| it == "in-place-journal");
    let journal = here.home_files(VM).unwrap().into_iter().find(is_journal).unwrap();
    std::fs::read(journal).unwrap().chunks(4096).any(|part| part != [0; 4096])
}

/// A VM that is off: the counting guest, and noise on its disk.
struct Off {
    here: Installation,
    held: PathBuf,
    /// What its disk holds before its first boot.
    content: Vec<u8>,
    /// Where its backups are.
    to: String,
}

impl Off {
    fn new(random: &mut fastrand::Rng) -> Self {
        let mut here = Installation::new().unwrap();
        let [image, to] = ["off.raw", "backups"].map(|name| here.path(name));
        counter_disk(&image, DISK).unwrap();
        let mut content = std::fs::read(&image).unwrap();
        random.fill(&mut content[NOISE]);
        std::fs::write(&image, &content).unwrap();
        std::fs::create_dir(&to).unwrap();
        let disk = format!("datastore=local,format=raw,image={}", text(&image).unwrap());
        here.vmseal(&create(VM, "plain", &disk)).unwrap();
        let held = here.hold_steps().unwrap();
        Self { here, held, content, to: text(&to).unwrap().to_owned() }
    }

    /// Does these one after the other, and nothing dies.
    fn does(&self, commands: &[&[&str]]) {
        without_holding(&self.held, || {
            for command in commands {
                self.here.vmseal(command).unwrap();
            }
        });
    }

    /// The guest boots, counts that, and has its power cut; `meanwhile` it runs.
    fn boots(&self, number: u32, meanwhile: &[&[&str]]) {
        let counted = without_holding(&self.held, || self.here.boot_counter(VM).unwrap());
        assert_eq!(counted, number);
        self.does(meanwhile);
        self.does(&[&["vm", "stop", VM, "--force"]]);
    }

    /// Makes what an operation needs; the guest had booted so often before the first one.
    fn prepare(&self, operation: WhileOff, booted: u32) {
        match operation {
            WhileOff::Revert => {
                self.boots(booted + 1, &[&["snapshot", "create", VM, "asleep", "--memory"]]);
                self.does(&[
                    &["snapshot", "create", VM, "one"],
                    &["backup", "create", VM, "full", "--to", &self.to],
                ]);
                self.boots(booted + 2, &[]);
            }
            WhileOff::Restore => self
                .does(&[&["snapshot", "delete", VM, "one"], &["snapshot", "delete", VM, "asleep"]]),
            _ => {}
        }
    }

    /// Does an operation, and kills something at this moment of it; whether it has so many.
    fn disturbed(&mut self, operation: WhileOff, (victim, moment): (Victim, Moment)) -> bool {
        let command = operation.command();
        let Ended { at, output, .. } = match victim {
            Victim::Filter => self.converted_without_filter(command, moment),
            _ => killed_at(&mut self.here, &self.held, VM, command, victim, moment),
        };
        if !output.status.success() {
            eprintln!("undone: {operation:?}: {}", String::from_utf8_lossy(&output.stderr));
            self.does(&[command]);
        }
        at.is_some()
    }

    /// Converts the disk in place, and kills the filter that does so at one of the moments that have one: another one goes on.
    fn converted_without_filter(&mut self, command: &[&str], moment: Moment) -> Ended {
        let step = CONVERTS[moment.of(CONVERTS.len())];
        eprintln!("{command:?}: the filter is killed at '{step}'");
        let task = begun(&self.here, &[command, &["--rate", RATE]].concat());
        let die = |here: &mut Installation, _: &Path| {
            eventually("a filter converts", || converts(here).then_some(())).unwrap();
            // Its directory is not that of the VM: no guest has it.
            let found = here.guest_processes(FILTER);
            assert!(!found.is_empty(), "no filter converts the disk any more");
            found.into_iter().for_each(kill_hard);
        };
        let is_it = |_: &Installation, at: &str| at.contains(step);
        let ended = dying_when(&mut self.here, &self.held, &task, is_it, |_| {}, die);
        assert!(ended.output.status.success(), "no other one goes on: {:?}", ended.output);
        ended
    }

    /// Whether a VM is running or off, as soon as that is known.
    fn power(&self, vm: &str) -> String {
        let known = || {
            let power = self.here.vm(vm).ok()?["power"].as_str()?.to_owned();
            ["running", "off"].contains(&power.as_str()).then_some(power)
        };
        eventually(&format!("{vm} is running or off"), known).unwrap()
    }

    /// Checks what an operation has done, and removes what is in the way of the next turn.
    fn check(&self, operation: WhileOff, booted: u32) {
        match operation {
            WhileOff::EncryptInPlace => {
                self.holds(VM, booted);
                self.does(&[&["vm", "prove", VM, "--all"]]);
            }
            WhileOff::RecryptInPlace => self.holds(VM, booted),
            WhileOff::Revert | WhileOff::Restore => self.holds(VM, booted + 1),
            WhileOff::CloneLinked => {
                self.holds("linked", booted + 1);
                self.does(&[&["vm", "delete", "linked"]]);
            }
            WhileOff::RevertToMemory => {
                self.here.wait_power(VM, "suspended").unwrap();
                self.does(&[&["vm", "resume", VM]]);
                // It reads the number and counts on, without a boot.
                let mut console = self.here.console(VM).unwrap();
                console.type_text("r").unwrap();
                assert_eq!(console.next_count().unwrap(), booted + 2);
                drop(console);
                self.does(&[&["vm", "stop", VM, "--force"]]);
                self.holds(VM, booted + 2);
            }
            WhileOff::RestoreAs => {
                self.holds("copy", booted + 1);
                self.does(&[&["vm", "delete", "copy"]]);
            }
            WhileOff::DeleteBackup => {
                self.here.refused(&["backup", "show", VM, "full"]).unwrap();
            }
            WhileOff::DecryptInPlace => {
                self.holds(VM, booted + 1);
                assert_eq!(self.here.vm(VM).unwrap()["policy"], "plain");
            }
            WhileOff::Create => assert_eq!(self.power(OTHER), "off"),
            // It may have started, and gone with the machine.
            WhileOff::Start if self.power(OTHER) == "off" => self.does(&[operation.command()]),
            WhileOff::Start => {}
            WhileOff::Stop => assert_eq!(self.power(OTHER), "off"),
            WhileOff::Delete => {
                self.here.refused(&["vm", "show", OTHER]).unwrap();
            }
        }
    }

    /// The disk of a VM has all that it had at first, and so many boots were counted there.
    fn holds(&self, vm: &str, booted: u32) {
        let to = self.here.path("exported");
        let export = ["disk", "export", vm, "disk0", "--format", "raw", "--plaintext", "--to"];
        self.does(&[&[&export[..], &[text(&to).unwrap()]].concat()]);
        let found = std::fs::read(&to).unwrap();
        std::fs::remove_file(&to).unwrap();
        let mut wanted = self.content.clone();
        wanted[NUMBER..NUMBER + 4].copy_from_slice(&booted.to_le_bytes());
        assert_eq!(found[NUMBER..NUMBER + 4], wanted[NUMBER..NUMBER + 4], "the boots of {vm}");
        assert!(found == wanted, "the disk of {vm} holds something else");
    }
}

#[test]
fn whatever_dies_at_a_step_of_an_operation_of_a_vm_that_is_off_its_disk_holds_what_it_has_to() {
    let (all, mut random) = (all_of_all(), seeded());
    let mut off = Off::new(&mut random);
    let victims = [Victim::Agent, Victim::Server, Victim::Machine, Victim::Filter];
    let one = WhileOff::ALL[random.usize(..WhileOff::ALL.len())];
    // Only a conversion in place has moments with a filter.
    let of = if one.is_in_place() { 4 } else { 3 };
    let turns: Vec<(Victim, Moment)> = match all {
        true => (0..CONVERTS.len())
            .map(|moment| (Victim::Filter, Moment::Number(moment)))
            .chain(every_moment(&victims[..3]))
            .collect(),
        false => vec![(victims[random.usize(..of)], Moment::chosen(&mut random))],
    };
    // Each turn leaves the disk as the guest had it after one more boot.
    for (turn, at) in turns.into_iter().enumerate() {
        let booted = u32::try_from(turn).unwrap();
        let mut reached = false;
        for operation in WhileOff::ALL {
            off.prepare(operation, booted);
            let has_victim = operation.is_in_place() || !matches!(at.0, Victim::Filter);
            if (all || operation == one) && has_victim {
                reached |= off.disturbed(operation, at);
            } else {
                off.does(&[operation.command()]);
            }
            off.check(operation, booted);
        }
        assert!(all || reached, "nothing died in {one:?}");
        if !reached {
            break;
        }
    }
}
