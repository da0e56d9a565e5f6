//! What dies exactly before a step, or after it and before that is recorded, of operations on a VM whose disks have replicas, which no
//! task is about alone: what makes a replica, gives a disk another one, gives it another key, makes it longer, or shows the guest something
//! else. The VM is off, or runs, when its operation begins.
//!
//! Afterwards the disks hold what they have to, and each replica is its disk's as soon as it is said to have caught up. Nothing is
//! left of a former one. A run tries one moment of one operation, where it has its turn, chosen by a seed that is printed; with
//! `VMSEAL_ALL`, all of all.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::ops::RangeInclusive;
use std::path::PathBuf;

use serde_json::Value;
use vmseal_tests::eventually;
use vmseal_tests::guest::counter_disk;
use vmseal_tests::held_steps::{
    Ended, Moment, begun, borrowed, disturb_one_or_all, half_made, killed_in, number_on, owned,
    seeded, without_holding,
};
use vmseal_tests::installation::{Installation, create, text};
use vmseal_tests::kills::{Victim, has_its_turn};
use vmseal_tests::two_hosts::QEMU;

const VM: &str = "web";

/// Another VM, with a replica of its own.
const OTHER: &str = "other";

/// The policies: replicas of ciphertext, and of plaintext.
const SEALED: &str = "replicated";
const OPEN: &str = "replicated-open";

/// The datastore of the replicas, and another one for disks.
const SECOND: &str = "second";
const THIRD: &str = "third";

/// The size of the VM's disk, where noise is on it, in bytes.
const DISK: usize = 16 << 20;
const NOISE: std::ops::Range<usize> = 4 << 20..12 << 20;

/// The size of a disk that is added, and to which it grows, in bytes.
const EXTRA: usize = 8 << 20;
const GROWN: usize = 12 << 20;

/// The most that a guest counts after it was made to run: a boot after its death, and once for each of the questions.
const COUNTS_MAX: u32 = 6;

/// What an operator does to the VM, or to the other one.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Operation {
    Create,
    Clone,
    Delete,
    /// Another key, for which the replica gets the header of its disk.
    Recrypt,
    RecryptRunning,
    /// The disk is copied, and gets another replica.
    RecryptDeep,
    RecryptDeepRunning,
    Move,
    MoveRunning,
    Decrypt,
    DecryptRunning,
    Encrypt,
    EncryptRunning,
    AddDisk,
    RemoveDisk,
    /// The replica grows with its disk.
    Grow,
    GrowRunning,
    TakeSnapshotRunning,
    DeleteSnapshotRunning,
    /// All of the disk is to be copied again.
    Revert,
    Restore,
}

impl Operation {
    const ALL: [Self; 21] = [
        Self::Create,
        Self::Clone,
        Self::Delete,
        Self::Recrypt,
        Self::RecryptRunning,
        Self::RecryptDeep,
        Self::RecryptDeepRunning,
        Self::Move,
        Self::MoveRunning,
        Self::Decrypt,
        Self::DecryptRunning,
        Self::Encrypt,
        Self::EncryptRunning,
        Self::AddDisk,
        Self::RemoveDisk,
        Self::Grow,
        Self::GrowRunning,
        Self::TakeSnapshotRunning,
        Self::DeleteSnapshotRunning,
        Self::Revert,
        Self::Restore,
    ];

    /// Whether the VM runs when it begins.
    fn runs(self) -> bool {
        matches!(
            self,
            Self::RecryptRunning
                | Self::RecryptDeepRunning
                | Self::MoveRunning
                | Self::DecryptRunning
                | Self::EncryptRunning
                | Self::GrowRunning
                | Self::TakeSnapshotRunning
                | Self::DeleteSnapshotRunning
        )
    }

    /// Whether it makes the other VM.
    fn makes(self) -> bool {
        matches!(self, Self::Create | Self::Clone)
    }

    /// What dies. No filter alone: QEMU before 9.0 may lose a guest that is not using its disk with its filter (docs/decisions/020).
    fn victims(self) -> &'static [Victim] {
        match self.runs() {
            true => &[Victim::Agent, Victim::Server, Victim::Qemu, Victim::Machine],
            false => &[Victim::Agent, Victim::Server, Victim::Machine],
        }
    }
}

/// The VM, which is off and encrypted between operations, with one disk on one datastore and its replica on another one.
struct Replicas {
    here: Installation,
    held: PathBuf,
    /// What its disk holds before its first boot.
    content: Vec<u8>,
    /// What a disk holds that is added.
    extra: Vec<u8>,
    /// The number on its disk.
    number: u32,
}

impl Replicas {
    fn new(random: &mut fastrand::Rng) -> Self {
        let mut here = Installation::new().unwrap();
        let [image, added] = ["boot.raw", "extra.raw"].map(|name| here.path(name));
        counter_disk(&image, DISK as u64).unwrap();
        let (mut content, mut extra) = (std::fs::read(&image).unwrap(), vec![0; EXTRA]);
        random.fill(&mut content[NOISE]);
        random.fill(&mut extra);
        // Nothing shows of random data alone that it is encrypted.
        extra[..4096].fill(b'x');
        std::fs::write(&image, &content).unwrap();
        std::fs::write(&added, &extra).unwrap();
        for name in [SECOND, THIRD, "backups"] {
            std::fs::create_dir(here.path(name)).unwrap();
        }
        for name in [SECOND, THIRD] {
            let path = here.path(name);
            let place = ["--host", "here", "--path", text(&path).unwrap()];
            here.vmseal(&[&["datastore", "add", name], &place[..]].concat()).unwrap();
        }
        for (name, kind) in [(SEALED, "--encrypt"), (OPEN, "--plain")] {
            let copied = ["--replicate-to", SECOND, "--replicate-rate", "64MiB"];
            here.vmseal(&[&["policy", "create", name, kind], &copied[..]].concat()).unwrap();
        }
        let held = here.hold_steps().unwrap();
        let mut this = Self { here, held, content, extra, number: 0 };
        this.does(&this.create(VM));
        this.has_equal_replicas();
        this
    }

    /// A path of the installation as an argument.
    fn at(&self, name: &str) -> String {
        text(&self.here.path(name)).unwrap().to_owned()
    }

    /// The command that makes a VM with a replica.
    fn create(&self, vm: &str) -> Vec<String> {
        let disk = format!("datastore=local,format=raw,image={},name=disk0", self.at("boot.raw"));
        owned(&create(vm, SEALED, &disk))
    }

    fn command(&self, operation: Operation) -> Vec<String> {
        let extra = format!("datastore=local,format=raw,image={},name=extra", self.at("extra.raw"));
        match operation {
            Operation::Create => self.create(OTHER),
            Operation::Clone => owned(&["vm", "clone", VM, OTHER]),
            Operation::Delete => owned(&["vm", "delete", OTHER]),
            Operation::Recrypt | Operation::RecryptRunning => owned(&["vm", "recrypt", VM]),
            Operation::RecryptDeep | Operation::RecryptDeepRunning => {
                owned(&["vm", "recrypt", VM, "--deep"])
            }
            Operation::Move | Operation::MoveRunning => {
                owned(&["vm", "move", VM, "--datastore", THIRD])
            }
            Operation::Decrypt | Operation::DecryptRunning => {
                owned(&["vm", "decrypt", VM, "--policy", OPEN, "--yes"])
            }
            Operation::Encrypt | Operation::EncryptRunning => {
                owned(&["vm", "encrypt", VM, "--policy", SEALED])
            }
            Operation::AddDisk => owned(&["disk", "add", VM, "--disk", &extra]),
            Operation::RemoveDisk => owned(&["disk", "remove", VM, "extra"]),
            Operation::Grow | Operation::GrowRunning => {
                owned(&["disk", "resize", VM, "extra", "--size", "12MiB"])
            }
            Operation::TakeSnapshotRunning => owned(&["snapshot", "create", VM, "one"]),
            Operation::DeleteSnapshotRunning => owned(&["snapshot", "delete", VM, "one"]),
            Operation::Revert => owned(&["snapshot", "revert", VM, "one"]),
            Operation::Restore => owned(&["backup", "restore", VM, "full"]),
        }
    }

    /// Does this, and nothing dies.
    fn does(&self, command: &[String]) {
        without_holding(&self.held, || self.here.vmseal(&borrowed(command)).unwrap());
    }

    /// Does these one after the other, and nothing dies.
    fn does_all(&self, commands: &[&[&str]]) {
        commands.iter().for_each(|command| self.does(&owned(command)));
    }

    /// The guest of a VM boots, and has this number.
    fn boots(&self, vm: &str, number: u32) {
        let counted = without_holding(&self.held, || self.here.boot_counter(vm).unwrap());
        assert_eq!(counted, number, "{vm} does not count on from its last number");
    }

    fn stops(&self, vm: &str) {
        self.does_all(&[&["vm", "stop", vm, "--force"]]);
    }

    /// What the VM does, as soon as that is known: the death of a guest is reported later than it happens.
    fn power(&self) -> String {
        let known = || {
            let power = self.here.vm(VM).ok()?["power"].as_str()?.to_owned();
            let has_guest = !self.here.processes_of(VM, QEMU).ok()?.is_empty();
            let agrees = (power == "running") == has_guest;
            (agrees && ["running", "off"].contains(&&*power)).then_some(power)
        };
        eventually("it is known what the VM does", known).unwrap()
    }

    /// A guest that has died with what was killed is started again; it can use its disk.
    fn lives_again(&self) {
        if self.power() == "off" {
            self.does_all(&[&["vm", "start", VM]]);
        }
        let mut console = self.here.console(VM).unwrap();
        console.type_text("r").unwrap();
        console.next_count().unwrap();
    }

    /// A disk of a VM that is off, as it is read.
    fn read(&self, vm: &str, disk: &str) -> Vec<u8> {
        let to = self.at("read");
        let export = ["disk", "export", vm, disk, "--format", "raw", "--plaintext", "--to", &to];
        self.does_all(&[&export]);
        let found = std::fs::read(&to).unwrap();
        std::fs::remove_file(&to).unwrap();
        found
    }

    /// The first disk of a VM has all that it had at first, and one of these numbers is there; returns it.
    fn found_on(&self, vm: &str, expected: RangeInclusive<u32>) -> u32 {
        number_on(vm, &self.read(vm, "disk0"), &self.content, expected)
    }

    /// The directories of a VM: where its first disk is, and where the replicas are.
    fn homes_of(&self, vm: &str) -> [PathBuf; 2] {
        let home = self.here.home(vm).unwrap();
        let replicas = self.here.path(SECOND).join(home.file_name().unwrap());
        [home, replicas]
    }

    /// The disks of a VM, as they are shown.
    fn disks_of(&self, vm: &str) -> Vec<Value> {
        self.here.vm(vm).unwrap()["disks"].as_array().unwrap().clone()
    }

    /// Nothing is left beside disks and replicas of what works on them, and of replicas that others have taken the place of.
    fn is_tidy(&self, vm: &str) {
        for home in self.homes_of(vm) {
            let files = std::fs::read_dir(&home).unwrap().map(|entry| entry.unwrap().path());
            let left: Vec<_> = files.filter(|file| half_made(file)).collect();
            assert!(left.is_empty(), "what worked on the disks of {vm} has left {left:?}");
        }
    }

    /// The guest of a VM, which runs, is served until each replica is said to have all that its disk has; then the VM is off, and each
    /// has that.
    fn replicas_catch_up(&self, vm: &str) {
        let disks = self.disks_of(vm);
        for disk in &disks {
            let name = disk["name"].as_str().unwrap();
            let caught_up = || {
                let shown = self.here.json(&["disk", "replica", vm, name]).ok()?;
                let known = shown["lag_milliseconds"].is_u64();
                (known && shown["dirty_bytes"] == 0).then_some(())
            };
            eventually(&format!("the replica of {name} of {vm} has caught up"), caught_up).unwrap();
        }
        self.stops(vm);
        self.is_tidy(vm);
        let [home, replicas] = self.homes_of(vm);
        for disk in &disks {
            let id = disk["id"].as_str().unwrap();
            let image = std::fs::read(home.join(format!("{id}.raw"))).unwrap();
            let replica = std::fs::read(replicas.join(format!("{id}.replica"))).unwrap();
            assert!(image == replica, "the map of {disk} says that they are equal, and it lies");
        }
    }

    /// The VM boots, its replicas catch up, and are equal to its disks.
    fn has_equal_replicas(&mut self) {
        self.number += 1;
        self.boots(VM, self.number);
        self.replicas_catch_up(VM);
    }

    /// The directories of VMs on all datastores.
    fn homes(&self) -> usize {
        let homes = |name: &str| {
            let entries = std::fs::read_dir(self.here.path(name)).unwrap();
            entries.filter(|it| it.as_ref().unwrap().path().is_dir()).count()
        };
        ["datastore", SECOND, THIRD].map(homes).iter().sum()
    }

    /// The VM has one directory for its disk and one for the replica, and nothing of the other VM is left.
    fn is_alone(&self) {
        self.here.refused(&["vm", "show", OTHER]).unwrap();
        assert_eq!(self.homes(), 2, "something of another VM, or at another place, is left");
    }

    /// Brings the VM into the state in which an operation begins.
    fn prepare(&mut self, operation: Operation) {
        match operation {
            Operation::Delete => self.does(&self.command(Operation::Clone)),
            Operation::Encrypt | Operation::EncryptRunning => {
                self.does(&self.command(Operation::Decrypt));
            }
            Operation::RemoveDisk => self.does(&self.command(Operation::AddDisk)),
            Operation::Grow | Operation::GrowRunning => {
                self.does(&self.command(Operation::AddDisk));
                // Of what has a whole replica nothing is to be copied again.
                self.has_equal_replicas();
            }
            Operation::DeleteSnapshotRunning => {
                self.does(&self.command(Operation::TakeSnapshotRunning));
            }
            Operation::Revert => {
                self.does(&self.command(Operation::TakeSnapshotRunning));
                self.boots(VM, self.number + 1);
                self.stops(VM);
            }
            Operation::Restore => {
                self.does_all(&[&["backup", "create", VM, "full", "--to", &self.at("backups")]]);
                self.boots(VM, self.number + 1);
                self.stops(VM);
            }
            _ => {}
        }
        if operation.runs() {
            self.boots(VM, self.number + 1);
        }
    }

    /// Does an operation, and kills something at this moment of it; whether it has so many.
    fn disturbed(&mut self, operation: Operation, at: (Victim, Moment)) -> bool {
        self.prepare(operation);
        eprintln!("{operation:?}");
        let command = self.command(operation);
        let task = begun(&self.here, &borrowed(&command));
        let Ended { at, output, .. } =
            killed_in(&mut self.here, &self.held, (VM, &task), at, |_| {});
        if operation.runs() {
            self.lives_again();
        }
        if !output.status.success() {
            eprintln!("undone: {operation:?}: {}", String::from_utf8_lossy(&output.stderr));
            if operation.makes() {
                self.is_alone();
            }
            self.does(&command);
        }
        if operation.runs() {
            self.lives_again();
            self.stops(VM);
            self.number = self.found_on(VM, self.number + 1..=self.number + COUNTS_MAX);
        } else {
            self.number = self.found_on(VM, self.number..=self.number);
        }
        self.check(operation);
        at.is_some()
    }

    /// Checks what an operation has done, and has the VM be as before.
    fn check(&mut self, operation: Operation) {
        match operation {
            Operation::Create | Operation::Clone => self.check_other(operation),
            Operation::Delete => self.is_alone(),
            Operation::Recrypt
            | Operation::RecryptRunning
            | Operation::RecryptDeep
            | Operation::RecryptDeepRunning => {}
            Operation::Move | Operation::MoveRunning => {
                assert_eq!(self.disks_of(VM)[0]["datastore"], THIRD);
                self.is_alone();
            }
            Operation::Decrypt | Operation::DecryptRunning => {
                assert_eq!(self.here.vm(VM).unwrap()["policy"], OPEN);
            }
            Operation::Encrypt | Operation::EncryptRunning => {
                assert_eq!(self.here.vm(VM).unwrap()["policy"], SEALED);
            }
            Operation::AddDisk => {
                assert!(self.read(VM, "extra") == self.extra, "the new disk holds something else");
            }
            Operation::RemoveDisk => assert_eq!(self.disks_of(VM).len(), 1),
            Operation::Grow | Operation::GrowRunning => {
                let found = self.read(VM, "extra");
                assert_eq!(found.len(), GROWN);
                assert!(found[..EXTRA] == self.extra, "it has lost what it held");
                assert!(found[EXTRA..].iter().all(|it| *it == 0), "what is new is not empty");
            }
            Operation::TakeSnapshotRunning | Operation::Revert => {
                // Layers are another file; the replica has what the disk shows through them.
                self.does(&self.command(Operation::DeleteSnapshotRunning));
            }
            Operation::DeleteSnapshotRunning => {
                let left = self.here.json(&["snapshot", "list", VM]).unwrap();
                assert_eq!(left, serde_json::json!([]));
            }
            Operation::Restore => self.does_all(&[&["backup", "delete", VM, "full"]]),
        }
        self.has_equal_replicas();
        if self.here.vm(VM).unwrap()["policy"] == SEALED {
            // Of replicas, too.
            self.does_all(&[&["vm", "prove", VM, "--all"]]);
        }
        self.put_back(operation);
        self.is_alone();
    }

    /// The other VM has what it has to, with a replica of its own; then it is deleted.
    fn check_other(&self, operation: Operation) {
        let number = if operation == Operation::Clone { self.number } else { 0 };
        self.found_on(OTHER, number..=number);
        assert_eq!(self.homes(), 4, "something is at another place");
        self.boots(OTHER, number + 1);
        self.replicas_catch_up(OTHER);
        self.does(&self.command(Operation::Delete));
    }

    /// Has the VM be as it was before an operation.
    fn put_back(&self, operation: Operation) {
        match operation {
            Operation::Move | Operation::MoveRunning => {
                self.does_all(&[&["vm", "move", VM, "--datastore", "local"]]);
            }
            Operation::Decrypt | Operation::DecryptRunning => {
                self.does(&self.command(Operation::Encrypt));
            }
            Operation::AddDisk | Operation::Grow | Operation::GrowRunning => {
                self.does(&self.command(Operation::RemoveDisk));
            }
            _ => {}
        }
        self.is_tidy(VM);
    }
}

#[test]
fn whatever_dies_at_a_step_a_replica_is_its_disks_and_nothing_of_a_former_one_is_left() {
    if !has_its_turn() {
        return;
    }
    let mut random = seeded();
    let mut replicas = Replicas::new(&mut random);
    disturb_one_or_all(&mut random, &Operation::ALL, Operation::victims, |operation, at| {
        replicas.disturbed(operation, at)
    });
}
