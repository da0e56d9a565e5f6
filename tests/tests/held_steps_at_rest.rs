//! What dies exactly before a step, or after it and before that is recorded, of operations on a VM with two disks that is off or
//! suspended, and of those that end a guest's life, begin it, or read its memory: a revert to a snapshot that has its guest run, suspend
//! and resume, a shutdown that the guest heeds, a reboot, and core dumps, of a guest that has panicked as well.
//!
//! Each operation has a state that it begins in, and leaves the VM as it was: encrypted, off, on one datastore, without snapshots and
//! backups. So a run tries one moment of one of them without doing all the others, chosen by a seed that is printed; with `VMSEAL_ALL`,
//! all of all. Guests write the number of their boots, and nothing else: what a disk has to hold is known to the last byte.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;
use vmseal_tests::eventually;
use vmseal_tests::guest::{COUNT, counter_disk};
use vmseal_tests::header::HEAD;
use vmseal_tests::held_steps::{
    Ended, Moment, begun, disturb_one_or_all, dying_when, half_made, killed_in, number_on, seeded,
    without_holding,
};
use vmseal_tests::installation::{Installation, create, text};
use vmseal_tests::kills::{Victim, has_its_turn};
use vmseal_tests::process::kill_hard;
use vmseal_tests::scan::contains;
use vmseal_tests::two_hosts::{FILTER, QEMU};

const VM: &str = "web";

/// Another VM, a copy of it.
const OTHER: &str = "other";

/// The sizes of the VM's disks, and of one that is added and grows, in bytes.
const DISK: usize = 16 << 20;
const DATA: usize = 8 << 20;
const GROWN: usize = 12 << 20;

/// Where noise is on the disk that the VM boots from, in bytes. All of the other one is noise.
const NOISE: std::ops::Range<usize> = 4 << 20..8 << 20;

/// More than a guest counts whatever dies: a disk that holds what it held before a revert shows.
const FAR: u32 = 10;

/// The most that a guest counts after it was made to run: a boot after each of two deaths, and once for each of two questions.
const COUNTS_MAX: u32 = 6;

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
    /// Of the VM, by copies of its disks.
    DecryptAll,
    EncryptAll,
    RecryptAll,
    DecryptDiskInPlace,
    /// With the key that the VM has.
    EncryptDiskInPlace,
    /// Of a VM that runs.
    BackUpIncrementally,
    /// Incrementally, of a VM that is off.
    BackUpWhileOff,
    /// Not incrementally, of a VM that is off.
    BackUpWhole,
    RestoreDeleted,
    /// Of one with a snapshot that keeps memory.
    Delete,
    AddDisk,
    GrowDisk,
    RemoveDisk,
    Suspend,
    Resume,
    /// The guest shuts down when it is asked to.
    ShutDown,
    Reboot,
    Dump,
    /// Of a guest that stands still since its panic.
    DumpPanicked,
}

impl AtRest {
    const ALL: [Self; 29] = [
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
        Self::DecryptAll,
        Self::EncryptAll,
        Self::RecryptAll,
        Self::DecryptDiskInPlace,
        Self::EncryptDiskInPlace,
        Self::BackUpIncrementally,
        Self::BackUpWhileOff,
        Self::BackUpWhole,
        Self::RestoreDeleted,
        Self::Delete,
        Self::AddDisk,
        Self::GrowDisk,
        Self::RemoveDisk,
        Self::Suspend,
        Self::Resume,
        Self::ShutDown,
        Self::Reboot,
        Self::Dump,
        Self::DumpPanicked,
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
            Self::DecryptAll => &["vm", "decrypt", VM, "--policy", "plain", "--yes"],
            Self::EncryptAll => &["vm", "encrypt", VM, "--policy", "encrypted"],
            Self::RecryptAll => &["vm", "recrypt", VM, "--deep"],
            Self::DecryptDiskInPlace => {
                &["vm", "decrypt", VM, "--disk", "data", "--yes", "--in-place"]
            }
            Self::EncryptDiskInPlace => &["vm", "encrypt", VM, "--disk", "data", "--in-place"],
            Self::BackUpIncrementally | Self::BackUpWhileOff => &["backup", "create", VM, "next"],
            Self::BackUpWhole => &["backup", "create", VM, "next", "--full"],
            Self::RestoreDeleted => &["backup", "restore", OTHER, "full"],
            Self::Delete => &["vm", "delete", OTHER],
            Self::AddDisk => &["disk", "add", VM, "--disk", EMPTY],
            Self::GrowDisk => &["disk", "resize", VM, "extra", "--size", "12MiB"],
            Self::RemoveDisk => &["disk", "remove", VM, "extra"],
            Self::Suspend => &["vm", "suspend", VM],
            Self::Resume => &["vm", "resume", VM],
            Self::ShutDown => &["vm", "stop", VM],
            Self::Reboot => &["vm", "reboot", VM],
            Self::Dump | Self::DumpPanicked => &["vm", "dump", VM, "core"],
        }
    }

    /// What dies. Seldom a filter alone: QEMU before 9.0 may lose a guest that is not using its disk with its filter (docs/decisions/020).
    /// The filter that copies a disk of a VM that is off begins and ends within a step of the task, so that no moment has one. That of a
    /// conversion in place works at two moments; here it may have ended by then, as the disks are small, and `held_steps` kills it.
    fn victims(self) -> &'static [Victim] {
        match self {
            Self::RevertRunning | Self::RevertRunningToMemory | Self::Resume => {
                &[Victim::Agent, Victim::Server, Victim::Qemu, Victim::Machine, Victim::Filter]
            }
            Self::BackUpIncrementally
            | Self::Suspend
            | Self::ShutDown
            | Self::Reboot
            | Self::Dump => &[Victim::Agent, Victim::Server, Victim::Qemu, Victim::Machine],
            // What has panicked is gone with its QEMU.
            Self::DumpPanicked => &[Victim::Agent, Victim::Server],
            _ => &[Victim::Agent, Victim::Server, Victim::Machine],
        }
    }

    /// The moments at which a filter serves the guest, as the server tells them, where [`Self::victims`] has it.
    fn moments_with_filter(self) -> &'static [&'static str] {
        match self {
            Self::RevertRunning | Self::RevertRunningToMemory => {
                &["cut-power do Before", "start do After"]
            }
            Self::Resume => &["power-on do After"],
            _ => &[],
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
    /// Its QEMU before an operation.
    qemu: Vec<i32>,
    /// The first ciphertext of each of its disks before an operation.
    ciphertext: Vec<Vec<u8>>,
}

/// The filters of the VM's guest.
fn filters(here: &Installation) -> Vec<i32> {
    here.processes_of(VM, FILTER).unwrap()
}

/// A guest that is asked to shut down does so: it hears what is typed, and no button.
fn heeds(here: &Installation) {
    let stops = || here.vm(VM).is_ok_and(|vm| vm["power"] == "stopping");
    if !stops() {
        return;
    }
    // Where its agent has gone again, it is asked again.
    let Ok(mut console) = here.console(VM) else { return };
    if console.type_text("p").is_ok() {
        let _ = eventually("the guest shuts down", || (!stops()).then_some(()));
    }
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
        // Nothing shows of random data alone that it is encrypted.
        data[..4096].fill(b'x');
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
        let (qemu, ciphertext) = (Vec::new(), Vec::new());
        Self { here, held, content, data, number: 0, extra, to, qemu, ciphertext }
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

    fn qemu(&self) -> Vec<i32> {
        self.here.processes_of(VM, QEMU).unwrap()
    }

    /// The first ciphertext of each disk: it is another one under another data key.
    fn ciphertext(&self) -> Vec<Vec<u8>> {
        let first = |image: &PathBuf| std::fs::read(image).unwrap()[HEAD..HEAD + 4096].to_vec();
        self.here.images(VM).unwrap().iter().map(first).collect()
    }

    /// Nothing is left beside the disks of what works on them.
    fn is_tidy(&self) {
        let files = self.here.home_files(VM).unwrap();
        let left: Vec<_> = files.iter().filter(|file| half_made(file)).collect();
        assert!(left.is_empty(), "what worked on the disks has left {left:?}");
    }

    /// What the VM does, as soon as that is known: the death of a guest is reported later than it happens.
    fn power(&self) -> String {
        let known = || {
            let power = self.here.vm(VM).ok()?["power"].as_str()?.to_owned();
            let lives = ["running", "paused"].contains(&&*power);
            let known = lives || ["off", "suspended"].contains(&&*power);
            (known && lives != self.qemu().is_empty()).then_some(power)
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
        let number = number_on(vm, &self.read(vm, "disk0"), &self.content, expected);
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
    fn shown(&self, disk: &str) -> Value {
        let vm = self.here.vm(VM).unwrap();
        let disks = vm["disks"].as_array().unwrap();
        disks.iter().find(|it| it["name"] == disk).cloned().unwrap_or_default()
    }

    /// Brings the VM into the state in which an operation begins.
    fn prepare(&mut self, operation: AtRest) {
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
            AtRest::EncryptDisk | AtRest::EncryptDiskInPlace => {
                self.does(&[AtRest::DecryptDisk.command()]);
            }
            AtRest::EncryptAll => self.does(&[AtRest::DecryptAll.command()]),
            AtRest::RecryptAll => self.ciphertext = self.ciphertext(),
            AtRest::BackUpWhileOff | AtRest::BackUpWhole => {
                self.does(&[&["backup", "create", VM, "full", "--to", &self.to]]);
                self.boots();
            }
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
            AtRest::DumpPanicked => {
                self.does(&[&["vm", "set", VM, "--on-crash", "preserve"]]);
                self.starts();
                let mut console = self.here.console(VM).unwrap();
                console.type_text("c").unwrap();
                self.here.wait_power(VM, "paused").unwrap();
            }
            AtRest::Suspend | AtRest::ShutDown | AtRest::Reboot | AtRest::Dump => self.starts(),
            AtRest::TakeSnapshot
            | AtRest::MoveDisk
            | AtRest::DecryptDisk
            | AtRest::DecryptDiskInPlace
            | AtRest::DecryptAll
            | AtRest::AddDisk => {}
        }
        self.qemu = self.qemu();
    }

    /// Does an operation, and kills something at this moment of it; whether it has so many.
    fn disturbed(&mut self, operation: AtRest, at: (Victim, Moment)) -> bool {
        let of_filter = match at {
            (Victim::Filter, moment) => {
                let moments = operation.moments_with_filter();
                let Some(of_filter) = moments.get(moment.of(moments.len())) else { return false };
                Some(*of_filter)
            }
            _ => None,
        };
        self.prepare(operation);
        let Ended { at, output, .. } = match of_filter {
            Some(moment) => self.tried_without_filter(operation, moment),
            None => self.tried(operation, at),
        };
        if !output.status.success() {
            self.retry(operation, &output);
        }
        self.check(operation);
        at.is_some()
    }

    /// Does an operation while something dies; its guest does its part.
    fn tried(&mut self, operation: AtRest, at: (Victim, Moment)) -> Ended {
        eprintln!("{operation:?}");
        let task = begun(&self.here, operation.command());
        killed_in(&mut self.here, &self.held, (VM, &task), at, |here| {
            if matches!(operation, AtRest::ShutDown | AtRest::Reboot) {
                heeds(here);
            }
        })
    }

    /// Does an operation while the guest's filter dies at this moment, of [`AtRest::moments_with_filter`]. A guest that was made to run
    /// counts on with another filter.
    fn tried_without_filter(&mut self, operation: AtRest, moment: &str) -> Ended {
        eprintln!("{operation:?}: the filter is killed at '{moment}'");
        let task = begun(&self.here, operation.command());
        let known = operation.moments_with_filter();
        let is_it = |here: &Installation, at: &str| {
            let is_known = known.iter().any(|known| at.contains(known));
            assert!(is_known || filters(here).is_empty(), "a filter is not killed at '{at}'");
            at.contains(moment)
        };
        let die = |here: &mut Installation, _: &Path| {
            // A guest whose filter dies before it has booted may be lost by QEMU, or hang in its firmware (docs/decisions/020, 093).
            if operation == AtRest::RevertRunning {
                here.console(VM).unwrap().next_count().unwrap();
            }
            let found = filters(here);
            assert!(!found.is_empty(), "the guest has no filter");
            found.into_iter().for_each(kill_hard);
        };
        let ended = dying_when(&mut self.here, &self.held, &task, is_it, |_| {}, die);
        assert!(ended.at.is_some(), "{operation:?} has no moment '{moment}'");
        if moment.ends_with("After") {
            self.here.wait_alarm(VM, "filter-restarted").unwrap();
            // More than it had counted when its filter died.
            self.counts_to(self.number + 2);
        }
        ended
    }

    /// Repeats an operation that was undone.
    fn retry(&mut self, operation: AtRest, ended: &Output) {
        eprintln!("undone: {operation:?}: {}", String::from_utf8_lossy(&ended.stderr));
        match (operation, &*self.power()) {
            // Its guest has died, or has gone on although its task was undone.
            (AtRest::Suspend | AtRest::ShutDown | AtRest::Reboot, "off")
            | (AtRest::Resume, "off" | "running") => {}
            (AtRest::ShutDown | AtRest::Reboot, _) => {
                let never = Moment::Number(usize::MAX);
                let again = self.tried(operation, (Victim::Agent, never));
                assert!(again.output.status.success(), "{operation:?} again: {:?}", again.output);
            }
            (AtRest::Dump, "off") => {
                self.lives_again();
                self.does(&[operation.command()]);
            }
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
            AtRest::DecryptDiskInPlace => {
                assert_eq!(self.shown("data")["encrypted"], false);
                self.holds_number(before);
                self.is_tidy();
                self.does(&[AtRest::EncryptDisk.command()]);
            }
            AtRest::DecryptAll => {
                let vm = self.here.vm(VM).unwrap();
                assert_eq!((&vm["policy"], vm.get("key")), (&"plain".into(), None), "{vm}");
                self.holds_number(before);
                self.is_tidy();
                self.does(&[AtRest::EncryptAll.command()]);
            }
            AtRest::EncryptDiskInPlace | AtRest::EncryptAll => {
                assert_eq!(self.here.vm(VM).unwrap()["policy"], "encrypted");
                self.holds_number(before);
                self.is_tidy();
                self.does(&[&["vm", "prove", VM, "--all"]]);
            }
            AtRest::RecryptAll => {
                let former = std::mem::take(&mut self.ciphertext);
                let same =
                    self.ciphertext().iter().zip(&former).filter(|(it, was)| it == was).count();
                assert_eq!((same, former.len()), (0, 2), "a disk has the data key that it had");
                self.holds_number(before);
                self.is_tidy();
            }
            AtRest::BackUpIncrementally | AtRest::BackUpWhileOff => self.has_backup(before, "full"),
            AtRest::BackUpWhole => self.has_backup(before, ()),
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
            AtRest::ShutDown => {
                assert_eq!(self.power(), "off");
                self.holds_number(before + 1);
            }
            AtRest::Reboot => {
                self.lives_again();
                assert_ne!(self.qemu(), self.qemu, "it is the QEMU of before");
                self.stops();
                self.holds(before + 2..=before + COUNTS_MAX);
            }
            AtRest::Dump => {
                self.has_dump();
                if self.power() == "running" {
                    self.stops();
                }
                self.holds(before + 1..=before + COUNTS_MAX);
            }
            AtRest::DumpPanicked => {
                assert_eq!(self.power(), "paused");
                self.has_dump();
                self.stops();
                self.does(&[&["vm", "set", VM, "--on-crash", "destroy"]]);
                self.holds_number(before + 1);
            }
        }
    }

    /// There is one core dump, which has the guest's code, and nothing of it is left when it is deleted.
    fn has_dump(&self) {
        let cores = || {
            let files = self.here.home_files(VM).unwrap();
            let is_core = |file: &&PathBuf| file.to_string_lossy().contains("/vm.core-");
            files.iter().filter(is_core).count()
        };
        let listed = self.here.json(&["dump", "list", VM]).unwrap();
        assert_eq!((listed.as_array().unwrap().len(), cores()), (1, 1), "{listed}");
        let to = self.here.path("core");
        self.does(&[&["dump", "decrypt", VM, "core", "--to", text(&to).unwrap()]]);
        let core = std::fs::read(&to).unwrap();
        std::fs::remove_file(&to).unwrap();
        assert!(core.starts_with(b"\x7fELF") && contains(&core, COUNT), "it is no core dump of it");
        self.does(&[&["dump", "delete", VM, "core"]]);
        let listed = self.here.json(&["dump", "list", VM]).unwrap();
        assert_eq!((listed.as_array().unwrap().len(), cores()), (0, 0), "{listed}");
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

    /// A backup, above this one or above none, has what the guest has written since the first one.
    fn has_backup(&mut self, before: u32, parent: impl Into<Value>) {
        if self.power() == "running" {
            self.stops();
        }
        self.holds_number(before + 1);
        let listed = self.here.json(&["backup", "list", VM]).unwrap();
        let next = listed.as_array().unwrap().iter().find(|it| it["name"] == "next").unwrap();
        let parent: Value = parent.into();
        assert_eq!(next["parent"], parent, "{listed}");
        let vm = self.here.vm(VM).unwrap()["id"].as_str().unwrap().to_owned();
        let written = std::fs::read_dir(PathBuf::from(&self.to).join(vm)).unwrap();
        let written = written.filter(|it| it.as_ref().unwrap().path().is_dir()).count();
        assert_eq!(written, 2, "something of an attempt is left");
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
    disturb_one_or_all(&mut random, &AtRest::ALL, AtRest::victims, |operation, at| {
        rest.disturbed(operation, at)
    });
}
