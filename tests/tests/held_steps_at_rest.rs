//! What dies exactly before a step, or after it and before that is recorded, of operations on a VM with two disks that is off or
//! suspended, and of those that end a guest's life or begin it: a revert to a snapshot that has its guest run, suspend and resume.
//!
//! Each operation has a state that it begins in, and leaves the VM as it was: encrypted, off, on one datastore, without snapshots and
//! backups. So a run tries one moment of one of them without doing all the others, chosen by a seed that is printed; with `VMSEAL_ALL`,
//! all of all. Guests write the number of their boots, and nothing else: what a disk has to hold is known to the last byte.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::Output;

use vmseal_tests::eventually;
use vmseal_tests::guest::counter_disk;
use vmseal_tests::held_steps::{Ended, all_of_all, killed_at, seeded, without_holding};
use vmseal_tests::installation::{Installation, create, text};
use vmseal_tests::kills::{Victim, has_its_turn};
use vmseal_tests::two_hosts::QEMU;

const VM: &str = "web";

/// Another VM, a copy of it.
const OTHER: &str = "other";

/// The sizes of the VM's disks, and of one that is added and grows, in bytes.
const DISK: usize = 16 << 20;
const DATA: usize = 8 << 20;
const GROWN: usize = 12 << 20;

/// Where noise is on the disk that the VM boots from, in bytes. All of the other one is noise.
const NOISE: std::ops::Range<usize> = 4 << 20..8 << 20;

/// Where the guest counts, in bytes.
const NUMBER: usize = 512;

/// More than a guest counts whatever dies: a disk that holds what it held before a revert shows.
const FAR: u32 = 10;

/// The most that a guest counts after it was made to run: a boot after each of two deaths, and once for each of two questions.
const COUNTS_MAX: u32 = 6;

/// More moments than any operation has.
const MOMENTS_MAX: usize = 60;

/// An empty disk.
const EMPTY: &str = "datastore=local,size=8MiB,name=extra";

/// What an operator does to the VM, or to a copy of it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum AtRest {
    /// Of a VM whose guest runs, and has another one run that boots from what a snapshot keeps.
    RevertRunning,
    /// The same, with the memory that the snapshot keeps.
    RevertRunningToMemory,
    TakeSnapshot,
    DeleteSnapshot,
    /// With a snapshot, which opens with the new key, too.
    Recrypt,
    /// Of one disk, with a snapshot.
    RecryptDisk,
    MoveDisk,
    /// With its memory.
    MoveSuspended,
    DecryptDisk,
    EncryptDisk,
    /// Of a VM that runs.
    BackUpIncrementally,
    RestoreDeleted,
    /// Of one with a snapshot that keeps memory.
    Delete,
    AddDisk,
    GrowDisk,
    RemoveDisk,
    Suspend,
    Resume,
}

impl AtRest {
    const ALL: [Self; 18] = [
        Self::RevertRunning,
        Self::RevertRunningToMemory,
        Self::TakeSnapshot,
        Self::DeleteSnapshot,
        Self::Recrypt,
        Self::RecryptDisk,
        Self::MoveDisk,
        Self::MoveSuspended,
        Self::DecryptDisk,
        Self::EncryptDisk,
        Self::BackUpIncrementally,
        Self::RestoreDeleted,
        Self::Delete,
        Self::AddDisk,
        Self::GrowDisk,
        Self::RemoveDisk,
        Self::Suspend,
        Self::Resume,
    ];

    fn command(self) -> &'static [&'static str] {
        match self {
            Self::RevertRunning => &["snapshot", "revert", VM, "one", "--running"],
            Self::RevertRunningToMemory => &["snapshot", "revert", VM, "asleep", "--running"],
            Self::TakeSnapshot => &["snapshot", "create", VM, "one"],
            Self::DeleteSnapshot => &["snapshot", "delete", VM, "one"],
            Self::Recrypt => &["vm", "recrypt", VM],
            Self::RecryptDisk => &["vm", "recrypt", VM, "--deep", "--disk", "data"],
            Self::MoveDisk => &["vm", "move", VM, "--datastore", "second", "--disk", "data"],
            Self::MoveSuspended => &["vm", "move", VM, "--datastore", "second"],
            Self::DecryptDisk => &["vm", "decrypt", VM, "--disk", "data", "--yes"],
            Self::EncryptDisk => &["vm", "encrypt", VM, "--disk", "data"],
            Self::BackUpIncrementally => &["backup", "create", VM, "next"],
            Self::RestoreDeleted => &["backup", "restore", OTHER, "full"],
            Self::Delete => &["vm", "delete", OTHER],
            Self::AddDisk => &["disk", "add", VM, "--disk", EMPTY],
            Self::GrowDisk => &["disk", "resize", VM, "extra", "--size", "12MiB"],
            Self::RemoveDisk => &["disk", "remove", VM, "extra"],
            Self::Suspend => &["vm", "suspend", VM],
            Self::Resume => &["vm", "resume", VM],
        }
    }

    /// What dies. No filter alone: QEMU before 9.0 may lose a guest that is not using its disk with its filter (docs/decisions/020).
    fn victims(self) -> &'static [Victim] {
        match self {
            Self::RevertRunning
            | Self::RevertRunningToMemory
            | Self::BackUpIncrementally
            | Self::Suspend
            | Self::Resume => &[Victim::Agent, Victim::Server, Victim::Qemu, Victim::Machine],
            _ => &[Victim::Agent, Victim::Server, Victim::Machine],
        }
    }

    /// How many moments a run chooses from: no more than the operation has, before and after each step.
    fn moments(self) -> usize {
        match self {
            Self::GrowDisk | Self::Suspend | Self::Resume => 4,
            Self::AddDisk | Self::RemoveDisk => 6,
            _ => 8,
        }
    }
}

/// The VM, which is off between operations.
struct Rest {
    here: Installation,
    held: PathBuf,
    /// What its disks hold before its first boot.
    content: Vec<u8>,
    data: Vec<u8>,
    /// The number on its disk.
    number: u32,
    /// A disk like its second one, as an option.
    extra: String,
    /// Where its backups are.
    to: String,
}

impl Rest {
    fn new(random: &mut fastrand::Rng) -> Self {
        let mut here = Installation::new().unwrap();
        let [image, filled, to, second] =
            ["boot.raw", "data.raw", "backups", "second"].map(|name| here.path(name));
        counter_disk(&image, DISK as u64).unwrap();
        let (mut content, mut data) = (std::fs::read(&image).unwrap(), vec![0; DATA]);
        random.fill(&mut content[NOISE]);
        random.fill(&mut data);
        std::fs::write(&image, &content).unwrap();
        std::fs::write(&filled, &data).unwrap();
        std::fs::create_dir(&to).unwrap();
        std::fs::create_dir(&second).unwrap();
        let place = ["--host", "here", "--path", text(&second).unwrap()];
        here.vmseal(&[&["datastore", "add", "second"], &place[..]].concat()).unwrap();
        let of = |image: &PathBuf, name: &str| {
            let image = text(image).unwrap();
            format!("datastore=local,format=raw,image={image},name={name}")
        };
        let (first, data_disk) = (of(&image, "disk0"), of(&filled, "data"));
        let disks = [&create(VM, "encrypted", &first)[..], &["--disk", &data_disk]].concat();
        here.vmseal(&disks).unwrap();
        let (extra, to) = (of(&filled, "extra"), text(&to).unwrap().to_owned());
        let held = here.hold_steps().unwrap();
        Self { here, held, content, data, number: 0, extra, to }
    }

    /// Does these one after the other, and nothing dies.
    fn does(&self, commands: &[&[&str]]) {
        without_holding(&self.held, || {
            for command in commands {
                self.here.vmseal(command).unwrap();
            }
        });
    }

    /// The guest boots, counts that, and runs.
    fn starts(&self) {
        let counted = without_holding(&self.held, || self.here.boot_counter(VM).unwrap());
        assert_eq!(counted, self.number + 1);
    }

    /// The guest boots, counts that, and has its power cut.
    fn boots(&self) {
        self.starts();
        self.stops();
    }

    fn stops(&self) {
        self.does(&[&["vm", "stop", VM, "--force"]]);
    }

    /// The guest, which runs, counts until it is there.
    fn counts_to(&self, number: u32) {
        let mut console = self.here.console(VM).unwrap();
        console.type_text("r").unwrap();
        while console.next_count().unwrap() < number {
            console.type_text("r").unwrap();
        }
    }

    /// The guest, which runs, can use its disk.
    fn answers(&self) {
        self.counts_to(0);
    }

    fn has_qemu(&self) -> bool {
        !self.here.processes_of(VM, QEMU).unwrap().is_empty()
    }

    /// What the VM does, as soon as that is known: the death of a guest is reported later than it happens.
    fn power(&self) -> String {
        let known = || {
            let power = self.here.vm(VM).ok()?["power"].as_str()?.to_owned();
            let agrees = (power == "running") == self.has_qemu();
            (agrees && ["running", "off", "suspended"].contains(&&*power)).then_some(power)
        };
        eventually("it is known what the VM does", known).unwrap()
    }

    /// A guest that has died with its QEMU or with the machine is started again; one that is suspended goes on.
    fn lives_again(&self) {
        match &*self.power() {
            "off" => self.does(&[&["vm", "start", VM]]),
            "suspended" => self.does(&[&["vm", "resume", VM]]),
            _ => {}
        }
        self.answers();
    }

    /// A disk of a VM that is off, as it is read.
    fn read(&self, vm: &str, disk: &str) -> Vec<u8> {
        let to = self.here.path("exported");
        let export = ["disk", "export", vm, disk, "--format", "raw", "--plaintext", "--to"];
        self.does(&[&[&export[..], &[text(&to).unwrap()]].concat()]);
        let found = std::fs::read(&to).unwrap();
        std::fs::remove_file(&to).unwrap();
        found
    }

    /// The disks of a VM have all that they had at first, and one of these numbers is there; returns it.
    fn found_on(&self, vm: &str, expected: RangeInclusive<u32>) -> u32 {
        let found = self.read(vm, "disk0");
        let number = u32::from_le_bytes(found[NUMBER..NUMBER + 4].try_into().unwrap());
        assert!(expected.contains(&number), "{vm} has {number}, and should have {expected:?}");
        let mut wanted = self.content.clone();
        wanted[NUMBER..NUMBER + 4].copy_from_slice(&number.to_le_bytes());
        assert!(found == wanted, "the first disk of {vm} holds something else");
        assert!(self.read(vm, "data") == self.data, "the second disk of {vm} holds something else");
        number
    }

    /// The same of the VM, whose number that is from now on.
    fn holds(&mut self, expected: RangeInclusive<u32>) {
        self.number = self.found_on(VM, expected);
    }

    /// The same where it must be this one.
    fn holds_number(&mut self, number: u32) {
        self.holds(number..=number);
    }

    /// A disk of the VM, as it is shown; none that it does not have.
    fn shown(&self, disk: &str) -> serde_json::Value {
        let vm = self.here.vm(VM).unwrap();
        let disks = vm["disks"].as_array().unwrap();
        disks.iter().find(|it| it["name"] == disk).cloned().unwrap_or_default()
    }

    /// Brings the VM into the state in which an operation begins.
    fn prepare(&self, operation: AtRest) {
        match operation {
            AtRest::RevertRunning => {
                self.does(&[&["snapshot", "create", VM, "one"]]);
                self.starts();
                self.counts_to(self.number + FAR);
            }
            AtRest::RevertRunningToMemory => {
                self.starts();
                self.does(&[&["snapshot", "create", VM, "asleep", "--memory"]]);
                self.counts_to(self.number + FAR);
            }
            AtRest::DeleteSnapshot | AtRest::Recrypt | AtRest::RecryptDisk => {
                self.does(&[&["snapshot", "create", VM, "one"]]);
                self.boots();
            }
            AtRest::MoveSuspended | AtRest::Resume => {
                self.starts();
                self.does(&[AtRest::Suspend.command()]);
            }
            AtRest::EncryptDisk => self.does(&[AtRest::DecryptDisk.command()]),
            AtRest::BackUpIncrementally => {
                self.does(&[&["backup", "create", VM, "full", "--to", &self.to]]);
                self.starts();
            }
            AtRest::RestoreDeleted => self.does(&[
                &["vm", "clone", VM, OTHER],
                &["backup", "create", OTHER, "full", "--to", &self.to],
                &["vm", "delete", OTHER],
            ]),
            AtRest::Delete => self.does(&[
                &["vm", "clone", VM, OTHER],
                &["vm", "start", OTHER],
                &["snapshot", "create", OTHER, "asleep", "--memory"],
                &["vm", "stop", OTHER, "--force"],
            ]),
            AtRest::GrowDisk | AtRest::RemoveDisk => {
                self.does(&[&["disk", "add", VM, "--disk", &self.extra]]);
            }
            AtRest::Suspend => self.starts(),
            AtRest::TakeSnapshot | AtRest::MoveDisk | AtRest::DecryptDisk | AtRest::AddDisk => {}
        }
    }

    /// Does an operation, and kills something at this moment of it; whether it has so many.
    fn disturbed(&mut self, operation: AtRest, (victim, moment): (Victim, usize)) -> bool {
        self.prepare(operation);
        let command = operation.command();
        let Ended { at, output, .. } =
            killed_at(&mut self.here, &self.held, VM, command, victim, moment);
        if !output.status.success() {
            self.retry(operation, &output);
        }
        self.check(operation);
        at.is_some()
    }

    /// Repeats an operation that was undone.
    fn retry(&self, operation: AtRest, ended: &Output) {
        eprintln!("undone: {operation:?}: {}", String::from_utf8_lossy(&ended.stderr));
        match (operation, &*self.power()) {
            // Its guest has died, or has gone on although its task was undone.
            (AtRest::Suspend, "off") | (AtRest::Resume, "off" | "running") => {}
            _ => self.does(&[operation.command()]),
        }
    }

    /// Checks what an operation has done, and has the VM be as before.
    fn check(&mut self, operation: AtRest) {
        let before = self.number;
        match operation {
            AtRest::RevertRunning => self.has_reverted("one", before),
            AtRest::RevertRunningToMemory => self.has_reverted("asleep", before + 1),
            AtRest::TakeSnapshot => {
                self.boots();
                self.keeps_before(before);
            }
            AtRest::DeleteSnapshot => {
                self.holds_number(before + 1);
                let left = self.here.json(&["snapshot", "list", VM]).unwrap();
                assert_eq!(left, serde_json::json!([]));
            }
            AtRest::Recrypt | AtRest::RecryptDisk => {
                self.holds_number(before + 1);
                self.does(&[&["vm", "prove", VM, "--all"]]);
                self.keeps_before(before);
            }
            AtRest::MoveDisk => {
                assert_eq!(self.shown("data")["datastore"], "second");
                assert_eq!(self.shown("disk0")["datastore"], "local");
                self.holds_number(before);
                self.does(&[&["vm", "move", VM, "--datastore", "local", "--disk", "data"]]);
            }
            AtRest::MoveSuspended => {
                assert_eq!(self.power(), "suspended");
                self.lives_again();
                self.stops();
                self.holds(before + 1..=before + 2);
                assert_eq!(self.shown("disk0")["datastore"], "second");
                self.does(&[&["vm", "move", VM, "--datastore", "local"]]);
            }
            AtRest::DecryptDisk => {
                assert_eq!(self.shown("data")["encrypted"], false);
                self.holds_number(before);
                self.does(&[AtRest::EncryptDisk.command()]);
            }
            AtRest::EncryptDisk => {
                self.holds_number(before);
                self.does(&[&["vm", "prove", VM, "--all"]]);
            }
            AtRest::BackUpIncrementally => self.has_backup(before),
            AtRest::RestoreDeleted => {
                self.found_on(OTHER, before..=before);
                self.does(&[&["backup", "delete", OTHER, "full"], &["vm", "delete", OTHER]]);
            }
            AtRest::Delete => self.is_alone(),
            AtRest::AddDisk => {
                let found = self.read(VM, "extra");
                assert_eq!(found.len(), DATA);
                assert!(found.iter().all(|byte| *byte == 0), "what is new is not empty");
                self.does(&[AtRest::RemoveDisk.command()]);
            }
            AtRest::GrowDisk => {
                let found = self.read(VM, "extra");
                assert_eq!(found.len(), GROWN);
                let (kept, new) = found.split_at(DATA);
                assert!(kept == self.data, "it has lost what it held");
                assert!(new.iter().all(|byte| *byte == 0), "what is new is not empty");
                self.does(&[AtRest::RemoveDisk.command()]);
            }
            AtRest::RemoveDisk => {
                assert!(self.shown("extra").is_null());
                self.holds_number(before);
            }
            AtRest::Suspend | AtRest::Resume => {
                self.lives_again();
                self.stops();
                self.holds(before + 1..=before + COUNTS_MAX);
            }
        }
    }

    /// The guest runs from what a snapshot keeps, which has this number, and the snapshot is not needed any more.
    fn has_reverted(&mut self, snapshot: &str, kept: u32) {
        self.lives_again();
        self.stops();
        self.holds(kept..=kept + COUNTS_MAX);
        self.does(&[&["snapshot", "delete", VM, snapshot]]);
    }

    /// A snapshot keeps what the disks held before the last boot.
    fn keeps_before(&mut self, number: u32) {
        self.does(&[&["snapshot", "revert", VM, "one"]]);
        self.holds_number(number);
        self.does(&[&["snapshot", "delete", VM, "one"]]);
    }

    /// A backup above another one has what the guest has written since that one.
    fn has_backup(&mut self, before: u32) {
        if self.power() == "running" {
            self.stops();
        }
        self.holds_number(before + 1);
        let listed = self.here.json(&["backup", "list", VM]).unwrap();
        let next = listed.as_array().unwrap().iter().find(|it| it["name"] == "next").unwrap();
        assert_eq!(next["parent"], "full", "{listed}");
        self.boots();
        self.does(&[&["backup", "restore", VM, "next"]]);
        self.holds_number(before + 1);
        self.does(&[&["backup", "delete", VM, "next"], &["backup", "delete", VM, "full"]]);
    }

    /// The other VM is gone, with all that it had on the datastore.
    fn is_alone(&self) {
        self.here.refused(&["vm", "show", OTHER]).unwrap();
        let entries = std::fs::read_dir(self.here.path("datastore")).unwrap();
        let homes = entries.filter(|it| it.as_ref().unwrap().path().is_dir()).count();
        assert_eq!(homes, 1, "something of the other VM is left");
    }
}

#[test]
fn whatever_dies_at_a_step_of_an_operation_at_rest_both_disks_hold_what_they_have_to() {
    if !has_its_turn() {
        return;
    }
    let mut random = seeded();
    let mut rest = Rest::new(&mut random);
    if !all_of_all() {
        let operation = AtRest::ALL[random.usize(..AtRest::ALL.len())];
        let (victims, moment) = (operation.victims(), random.usize(..operation.moments()));
        let victim = victims[random.usize(..victims.len())];
        assert!(rest.disturbed(operation, (victim, moment)), "{operation:?} has fewer moments");
        return;
    }
    for operation in AtRest::ALL {
        for moment in 0..MOMENTS_MAX {
            let mut reached = false;
            for victim in operation.victims() {
                reached |= rest.disturbed(operation, (*victim, moment));
            }
            if !reached {
                break;
            }
        }
    }
}
