//! What dies exactly before a step, or after it and before that is recorded, of operations on a VM that is off and has what no guest's
//! disk is: a disk for cloud-init, variables of UEFI firmware, a TPM, and a network card; of its start and its stop; and of exports, which
//! write a file that is not the VM's.
//!
//! A run tries one moment of one operation, chosen by a seed that is printed; with `VMSEAL_ALL`, all of all.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Output;

use vmseal_tests::eventually;
use vmseal_tests::held_steps::{
    Ended, Moment, begun, borrowed, disturb_one_or_all, half_made, killed_in, open_task, owned,
    seeded, without_holding,
};
use vmseal_tests::installation::{Installation, PASSPHRASE, text};
use vmseal_tests::kills::Victim;
use vmseal_tests::process::Process;
use vmseal_tests::scan::contains;
use vmseal_tests::two_hosts::{FILTER, QEMU, SWTPM};

const VM: &str = "web";

/// Another VM, which an operation makes.
const OTHER: &str = "other";

const STOP: [&str; 4] = ["vm", "stop", VM, "--force"];

/// The size of each of the two disks of the guest, in bytes.
const DISK: usize = 4 << 20;

/// What cloud-init is told, and what it is told instead.
const TOLD: &str = "VMSEAL-TOLD-31";
const TOLD_ELSE: &str = "VMSEAL-TOLD-32";

/// The network card of a VM: a port of the host leads to its guest.
const CARD: &str = "user,forward=tcp:80";

/// The roles of the disks that the VM has.
const ROLES: [&str; 5] = ["cloud_init", "data", "data", "tpm", "uefi_variables"];

const VICTIMS: [Victim; 3] = [Victim::Agent, Victim::Server, Victim::Machine];

/// What dies while the VM starts. A guest whose filter dies before it has drivers may end with it (docs/decisions/020): that is tried
/// elsewhere.
const VICTIMS_OF_START: [Victim; 4] =
    [Victim::Agent, Victim::Server, Victim::Machine, Victim::Qemu];

/// What dies while it stops.
const VICTIMS_OF_STOP: [Victim; 5] =
    [Victim::Agent, Victim::Server, Victim::Machine, Victim::Qemu, Victim::Filter];

/// What an operator does to the VM, or makes of it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Operation {
    Create,
    Clone,
    /// A clone that is told something else.
    CloneTold,
    /// A clone on another datastore.
    CloneElsewhere,
    BackUp,
    Restore,
    /// As a new VM, which gets a new TPM.
    RestoreAs,
    Delete,
    Start,
    Stop,
    Move,
    Recrypt,
    RecryptDeep,
    RemoveTpm,
    AddTpm,
    ExportSealed,
    /// With a passphrase, which is sealed to the run of the agent.
    ExportLuks,
}

impl Operation {
    const ALL: [Self; 17] = [
        Self::Create,
        Self::Clone,
        Self::CloneTold,
        Self::CloneElsewhere,
        Self::BackUp,
        Self::Restore,
        Self::RestoreAs,
        Self::Delete,
        Self::Start,
        Self::Stop,
        Self::Move,
        Self::Recrypt,
        Self::RecryptDeep,
        Self::RemoveTpm,
        Self::AddTpm,
        Self::ExportSealed,
        Self::ExportLuks,
    ];

    /// Whether it makes the other VM.
    fn makes(self) -> bool {
        matches!(
            self,
            Self::Create | Self::Clone | Self::CloneTold | Self::CloneElsewhere | Self::RestoreAs
        )
    }

    fn victims(self) -> &'static [Victim] {
        match self {
            Self::Start => &VICTIMS_OF_START,
            Self::Stop => &VICTIMS_OF_STOP,
            _ => &VICTIMS,
        }
    }
}

/// The VM, which is off between operations.
struct Devices {
    here: Installation,
    held: PathBuf,
    /// What its two disks hold.
    content: [Vec<u8>; 2],
}

impl Devices {
    fn new(random: &mut fastrand::Rng) -> Self {
        let mut here = Installation::new().unwrap();
        let content = ["one", "two"].map(|name| {
            let mut content = vec![0; DISK];
            random.fill(&mut content);
            std::fs::write(here.path(name), &content).unwrap();
            content
        });
        for (name, told) in [("user-data", TOLD), ("user-data-else", TOLD_ELSE)] {
            std::fs::write(here.path(name), format!("#cloud-config\n# {told}\n")).unwrap();
        }
        std::fs::write(here.path("export.passphrase"), PASSPHRASE).unwrap();
        for name in ["backups", "second"] {
            std::fs::create_dir(here.path(name)).unwrap();
        }
        let second = here.path("second");
        let place = ["--host", "here", "--path", text(&second).unwrap()];
        here.vmseal(&[&["datastore", "add", "second"], &place[..]].concat()).unwrap();
        let held = here.hold_steps().unwrap();
        let this = Self { here, held, content };
        this.does(&this.create(VM));
        this
    }

    /// A path of the installation as an argument.
    fn at(&self, name: &str) -> String {
        text(&self.here.path(name)).unwrap().to_owned()
    }

    /// The command that makes a VM with all of it.
    fn create(&self, vm: &str) -> Vec<String> {
        let of = |image: &str, name: &str| {
            format!("datastore=local,format=raw,image={},name={name}", self.at(image))
        };
        let (one, two) = (of("one", "disk0"), of("two", "data"));
        let told = format!("user-data={}", self.at("user-data"));
        let create = ["vm", "create", vm, "--policy", "encrypted", "--memory", "64MiB"];
        let devices = ["--firmware", "uefi", "--tpm", "--cloud-init", &told, "--nic", CARD];
        let disks = ["--disk", &one, "--disk", &two];
        owned(&[&create[..], &disks, &devices].concat())
    }

    fn command(&self, operation: Operation) -> Vec<String> {
        let (to, file) = (self.at("backups"), self.at("exported"));
        let told = format!("user-data={}", self.at("user-data-else"));
        let passphrase = self.at("export.passphrase");
        let export = ["disk", "export", VM, "disk0", "--to", &file, "--format"];
        match operation {
            Operation::Create => self.create(OTHER),
            Operation::Clone => owned(&["vm", "clone", VM, OTHER]),
            Operation::CloneTold => owned(&["vm", "clone", VM, OTHER, "--cloud-init", &told]),
            Operation::CloneElsewhere => {
                owned(&["vm", "clone", VM, OTHER, "--datastore", "second"])
            }
            Operation::BackUp => owned(&["backup", "create", VM, "full", "--to", &to]),
            Operation::Restore => owned(&["backup", "restore", VM, "full"]),
            Operation::RestoreAs => owned(&["backup", "restore", VM, "full", "--as", OTHER]),
            Operation::Delete => owned(&["vm", "delete", OTHER]),
            Operation::Start => owned(&["vm", "start", VM]),
            Operation::Stop => owned(&STOP),
            Operation::Move => owned(&["vm", "move", VM, "--datastore", "second"]),
            Operation::Recrypt => owned(&["vm", "recrypt", VM]),
            Operation::RecryptDeep => owned(&["vm", "recrypt", VM, "--deep"]),
            Operation::RemoveTpm => owned(&["vm", "set", VM, "--tpm", "off", "--yes"]),
            Operation::AddTpm => owned(&["vm", "set", VM, "--tpm", "on"]),
            Operation::ExportSealed => owned(&[&export[..], &["sealed"]].concat()),
            Operation::ExportLuks => {
                owned(&[&export[..], &["luks2", "--passphrase-file", &passphrase]].concat())
            }
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

    /// What a disk of a VM that is off holds.
    fn read(&self, vm: &str, disk: &str) -> Vec<u8> {
        let to = self.at("read");
        let export = ["disk", "export", vm, disk, "--format", "raw", "--plaintext", "--to", &to];
        self.does_all(&[&export]);
        let found = std::fs::read(&to).unwrap();
        std::fs::remove_file(&to).unwrap();
        found
    }

    /// Whether what a VM's TPM keeps is on the datastore.
    fn keeps_tpm(&self, vm: &str) -> bool {
        let files = self.here.home_files(vm).unwrap();
        let kept: Vec<_> = files.iter().filter(|file| file.is_dir()).collect();
        assert!(kept.len() <= 1, "{vm} has more than one TPM: {kept:?}");
        !kept.is_empty()
    }

    /// A VM has all of it: its disks hold what they have to, it is told this, and a guest starts with its TPM.
    fn is_whole(&self, vm: &str, told: &str) {
        let shown = self.here.vm(vm).unwrap();
        assert_eq!(shown["lifecycle"], "ready", "{shown}");
        let disks = shown["disks"].as_array().unwrap();
        let mut roles: Vec<_> = disks.iter().map(|it| it["role"].as_str().unwrap()).collect();
        roles.sort_unstable();
        assert_eq!(roles, ROLES, "{shown}");
        for (disk, content) in ["disk0", "data"].iter().zip(&self.content) {
            assert!(self.read(vm, disk) == *content, "disk {disk} of {vm} holds something else");
        }
        let read = self.read(vm, "cloud-init");
        let has = [TOLD, TOLD_ELSE].map(|it| contains(&read, it));
        assert_eq!(has, [told == TOLD, told == TOLD_ELSE], "{vm} is told something else");
        assert!(self.keeps_tpm(vm), "what the TPM of {vm} keeps is not there");
        self.is_tidy(vm);
        self.starts(vm);
    }

    /// Nothing is left beside the disks of what works on them.
    fn is_tidy(&self, vm: &str) {
        let files = self.here.home_files(vm).unwrap();
        let left: Vec<_> = files.iter().filter(|file| half_made(file)).collect();
        assert!(left.is_empty(), "what worked on the disks of {vm} has left {left:?}");
    }

    /// A start opens every disk, and has the TPM load what it keeps.
    fn starts(&self, vm: &str) {
        self.does_all(&[&["vm", "start", vm], &["vm", "stop", vm, "--force"]]);
    }

    /// Whether the VM runs, as soon as that is known.
    fn runs(&self) -> bool {
        let known = || match self.here.vm(VM).ok()?["power"].as_str()? {
            "running" => Some(true),
            "off" => Some(false),
            _ => None,
        };
        eventually("it is known whether the VM runs", known).unwrap()
    }

    /// How many processes of these programs the VM has.
    fn processes(&self) -> [usize; 3] {
        [QEMU, FILTER, SWTPM].map(|name| self.here.processes_of(VM, name).unwrap().len())
    }

    /// The VM runs, once, with what serves its disks, its TPM and its card.
    fn runs_whole(&self) {
        assert!(self.runs());
        assert_eq!(self.processes(), [1; 3], "QEMU, the filter and the TPM");
        let shown = self.here.vm(VM).unwrap();
        let port = shown["nics"][0]["forwards"][0]["host_port"].as_u64().unwrap();
        TcpStream::connect(("127.0.0.1", u16::try_from(port).unwrap())).unwrap();
    }

    /// The VM is off, and nothing of its guest is left. Where it had ended before its stop, that may be shown a moment later.
    fn has_ended(&self) {
        self.here.wait_power(VM, "off").unwrap();
        let ended = || (self.processes() == [0; 3]).then_some(());
        eventually("nothing runs for the VM", ended).unwrap();
    }

    /// The directories of VMs on both datastores.
    fn homes(&self) -> usize {
        let homes = |name| {
            let entries = std::fs::read_dir(self.here.path(name)).unwrap();
            entries.filter(|it| it.as_ref().unwrap().path().is_dir()).count()
        };
        homes("datastore") + homes("second")
    }

    /// Nothing is left of the other VM.
    fn is_alone(&self) {
        self.here.refused(&["vm", "show", OTHER]).unwrap();
        assert_eq!(self.homes(), 1, "something of the other VM is left");
    }

    /// Brings the VM into the state in which an operation begins.
    fn prepare(&self, operation: Operation) {
        match operation {
            Operation::Restore | Operation::RestoreAs => {
                self.does(&self.command(Operation::BackUp));
            }
            Operation::Delete => self.does(&self.command(Operation::Clone)),
            Operation::Stop => self.does(&self.command(Operation::Start)),
            Operation::AddTpm => self.does(&self.command(Operation::RemoveTpm)),
            _ => {}
        }
    }

    /// Does an operation, and kills something at this moment of it; whether it has so many.
    fn disturbed(&mut self, operation: Operation, at: (Victim, Moment)) -> bool {
        self.prepare(operation);
        eprintln!("{operation:?}");
        let command = self.command(operation);
        let kind = match operation {
            Operation::AddTpm => Some("tpm.add"),
            Operation::RemoveTpm => Some("tpm.remove"),
            _ => None,
        };
        // One that waits for its task, which its server may not outlive.
        let mut waits = None;
        let task = match kind {
            None => begun(&self.here, &borrowed(&command)),
            Some(kind) => {
                let mut waiting = self.here.command().unwrap();
                waiting.args(&command);
                waits = Some(Process::start(&mut waiting, &self.here.path("waits.log")).unwrap());
                open_task(&self.here, kind)
            }
        };
        let Ended { at: reached, guest_died, output, .. } =
            killed_in(&mut self.here, &self.held, (VM, &task), at, |_| {});
        drop(waits);
        if let (Victim::Qemu, true) = (at.0, guest_died) {
            // The task may have ended before that is reported.
            self.here.wait_power(VM, "off").unwrap();
        }
        if !output.status.success() {
            self.is_undone(operation, &output);
            self.does(&command);
        }
        self.check(operation);
        reached.is_some()
    }

    /// An operation that was undone has left nothing.
    fn is_undone(&self, operation: Operation, ended: &Output) {
        eprintln!("undone: {operation:?}: {}", String::from_utf8_lossy(&ended.stderr));
        if operation.makes() {
            self.is_alone();
        }
        if let Operation::ExportSealed | Operation::ExportLuks = operation {
            self.has_exported(0);
        }
        if operation != Operation::Delete {
            self.is_tidy(VM);
        }
    }

    /// So many files of an export are there, whole or not.
    fn has_exported(&self, number: usize) {
        let entries = std::fs::read_dir(self.here.path("")).unwrap();
        let names = entries.map(|it| it.unwrap().file_name().to_string_lossy().into_owned());
        let found: Vec<_> = names.filter(|name| name.contains("exported")).collect();
        assert_eq!(found.len(), number, "{found:?}");
    }

    /// Checks what an operation has done, and has the VM be as before.
    fn check(&self, operation: Operation) {
        let delete_backup = ["backup", "delete", VM, "full"];
        match operation {
            Operation::Create | Operation::Clone | Operation::RestoreAs => {
                self.is_whole(OTHER, TOLD);
            }
            Operation::CloneTold => self.is_whole(OTHER, TOLD_ELSE),
            Operation::CloneElsewhere => {
                let shown = self.here.vm(OTHER).unwrap();
                let disks = shown["disks"].as_array().unwrap();
                assert!(disks.iter().all(|it| it["datastore"] == "second"), "{shown}");
                assert_eq!(self.homes(), 2, "something of the other VM is beside the first one");
                self.is_whole(OTHER, TOLD);
            }
            Operation::BackUp => {
                self.does_all(&[&["backup", "verify", VM, "full"], &delete_backup]);
                self.here.refused(&["backup", "show", VM, "full"]).unwrap();
            }
            Operation::Delete => self.is_alone(),
            Operation::Start => {
                // It may have started, and gone with what died.
                if !self.runs() {
                    self.does(&self.command(operation));
                }
                self.runs_whole();
                self.does_all(&[&STOP]);
                self.has_ended();
            }
            Operation::Stop => self.has_ended(),
            Operation::RemoveTpm => {
                assert!(self.here.vm(VM).unwrap()["hardware"].get("tpm").is_none());
                assert!(!self.keeps_tpm(VM), "what the TPM kept is left");
                self.does(&self.command(Operation::AddTpm));
            }
            Operation::ExportSealed | Operation::ExportLuks => self.check_export(operation),
            Operation::Move => {
                let shown = self.here.vm(VM).unwrap();
                let disks = shown["disks"].as_array().unwrap();
                assert!(disks.iter().all(|it| it["datastore"] == "second"), "{shown}");
                assert_eq!(self.homes(), 1, "something is left on the former datastore");
                self.is_whole(VM, TOLD);
                self.does_all(&[&["vm", "move", VM, "--datastore", "local"]]);
            }
            Operation::Restore
            | Operation::Recrypt
            | Operation::RecryptDeep
            | Operation::AddTpm => {}
        }
        if operation.makes() {
            self.does_all(&[&["vm", "delete", OTHER]]);
            self.is_alone();
        }
        if let Operation::Restore | Operation::RestoreAs = operation {
            self.does_all(&[&delete_backup]);
        }
        self.is_whole(VM, TOLD);
    }

    /// There is one file, of the form that was asked for.
    fn check_export(&self, operation: Operation) {
        self.has_exported(1);
        let file = self.here.path("exported");
        let found = std::fs::read(&file).unwrap();
        assert!(found.starts_with(b"LUKS\xba\xbe"), "it has no header");
        let image = &self.here.images(VM).unwrap()[0];
        // Another key than that of the disk, but for the disk as it is.
        let same = is_end_of(&found, image);
        assert_eq!(same, operation == Operation::ExportSealed, "the ciphertext of the file");
        std::fs::remove_file(&file).unwrap();
    }
}

/// Whether a file ends as an image does: with its last ciphertext.
fn is_end_of(found: &[u8], image: &Path) -> bool {
    let image = std::fs::read(image).unwrap();
    found.ends_with(&image[image.len() - 4096..])
}

#[test]
fn whatever_dies_at_a_step_a_vm_has_all_of_its_devices_and_nothing_of_another_is_left() {
    let mut random = seeded();
    let mut devices = Devices::new(&mut random);
    disturb_one_or_all(&mut random, &Operation::ALL, Operation::victims, |operation, at| {
        devices.disturbed(operation, at)
    });
}
