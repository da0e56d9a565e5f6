//! What dies exactly before a step, or after it and before that is recorded, of what follows a loss: VMs that the inventory does not have
//! are adopted, while they are off and while they run; and VMs are started as their host has rebooted.
//!
//! A run tries one moment of one of them, chosen by a seed that is printed; with `VMSEAL_ALL`, all of all.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::PathBuf;
use std::process::Command;

use vmseal_tests::held_steps::{
    Ended, Moment, disturb_one_or_all, killed_in, open_task, seeded, without_holding,
};
use vmseal_tests::installation::{Installation, PASSPHRASE, text};
use vmseal_tests::kills::Victim;
use vmseal_tests::two_hosts::QEMU;
use vmseal_tests::{eventually, skipped};

const VM: &str = "web";

/// What follows a loss.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Follows {
    /// The server comes back from a backup that does not have the VM, which is off.
    Adopt,
    /// The same while it runs.
    AdoptRunning,
    Autostart,
}

impl Follows {
    const ALL: [Self; 3] = [Self::Adopt, Self::AdoptRunning, Self::Autostart];

    fn victims(self) -> &'static [Victim] {
        match self {
            // QEMU is found by what the inventory has of its VM.
            Self::Adopt => &[Victim::Agent, Victim::Server, Victim::Machine],
            Self::AdoptRunning => &[Victim::Agent, Victim::Server],
            Self::Autostart => &[Victim::Agent, Victim::Server, Victim::Machine, Victim::Qemu],
        }
    }
}

/// An installation without VMs, between operations.
struct Losses {
    here: Installation,
    held: PathBuf,
    /// How many backups of the server were written.
    backups: u32,
}

impl Losses {
    fn new() -> Self {
        let mut here = Installation::new().unwrap();
        std::fs::write(here.path("backup.passphrase"), PASSPHRASE).unwrap();
        let held = here.hold_steps().unwrap();
        here.wait_host().unwrap();
        Self { here, held, backups: 0 }
    }

    /// A path of the installation as an argument.
    fn at(&self, name: &str) -> String {
        text(&self.here.path(name)).unwrap().to_owned()
    }

    /// Does these one after the other, and nothing dies.
    fn does(&self, commands: &[&[&str]]) {
        without_holding(&self.held, || {
            for command in commands {
                self.here.vmseal(command).unwrap();
            }
        });
    }

    /// The guest boots, and has counted so far.
    fn boots(&self, number: u32) {
        let counted = without_holding(&self.held, || self.here.boot_counter(VM).unwrap());
        assert_eq!(counted, number, "it does not count on from its last number");
    }

    fn stops(&self) {
        self.does(&[&["vm", "stop", VM, "--force"]]);
    }

    /// Makes the VM, whose guest has counted its first boot.
    fn makes(&self) {
        without_holding(&self.held, || self.here.create_counter(VM, "encrypted").unwrap());
        self.boots(1);
    }

    /// The server is lost after a VM was made, and comes back from a backup of before.
    fn loses_server(&mut self, follows: Follows) {
        self.backups += 1;
        let backup = self.at(&format!("server.backup-{}", self.backups));
        let (data_dir, given) = (self.at("server"), self.at("backup.passphrase"));
        let passphrase = ["--passphrase-file", &given];
        self.does(&[&[&["server", "backup", "--to", &backup][..], &passphrase].concat()]);
        self.makes();
        if follows == Follows::Adopt {
            self.stops();
        }
        let id = self.here.vm(VM).unwrap()["id"].as_str().unwrap().to_owned();
        self.here.lose_server().unwrap();
        let restore = ["server", "restore", &backup, "--data-dir", &data_dir];
        self.does(&[&[&restore[..], &passphrase].concat()]);
        self.here.start_server().unwrap();
        self.here.wait_host().unwrap();
        self.here.refused(&["vm", "show", VM]).unwrap();
        if follows == Follows::AdoptRunning {
            self.here.wait_alarm(&id, "vm-unknown").unwrap();
        }
    }

    /// Brings about what the operation follows; the id of its task.
    fn begun(&mut self, follows: Follows) -> String {
        match follows {
            Follows::Adopt | Follows::AdoptRunning => {
                self.loses_server(follows);
                let adopted = self.here.json(&["datastore", "adopt", "local", "--no-wait"]);
                let adopted = adopted.unwrap();
                adopted["vms"][0]["task"].as_str().unwrap().to_owned()
            }
            Follows::Autostart => {
                self.makes();
                self.does(&[&["vm", "set", VM, "--autostart", "on"]]);
                self.here.reboot_host().unwrap();
                open_task(&self.here, "vm.autostart")
            }
        }
    }

    /// Has it happen, and kills something at this moment of it; whether it has so many.
    fn disturbed(&mut self, follows: Follows, (victim, moment): (Victim, Moment)) -> bool {
        let task = self.begun(follows);
        eprintln!("{follows:?}");
        let guests = self.here.guest_processes(QEMU);
        let when = (victim, moment);
        let Ended { at, guest_died, output, .. } =
            killed_in(&mut self.here, &self.held, (VM, &task), when, |_| {});
        let done = output.status.success();
        if !done {
            eprintln!("undone: {follows:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        match follows {
            Follows::Autostart => {
                // Only a guest's end, or that of all, may be the end of its start.
                let survives = matches!(victim, Victim::Agent | Victim::Server);
                assert!(done || !survives, "it was not started: {output:?}");
                self.has_started(guest_died);
            }
            Follows::Adopt | Follows::AdoptRunning => {
                if !done {
                    self.here.refused(&["vm", "show", VM]).unwrap();
                    self.does(&[&["datastore", "adopt", "local"]]);
                }
                self.is_adopted(follows, &guests);
            }
        }
        self.stops();
        self.does(&[&["vm", "delete", VM]]);
        let left = self.here.datastore_entries(&self.here.path("datastore")).unwrap();
        assert!(left.is_empty(), "something of the VM is left: {left:?}");
        at.is_some()
    }

    /// The inventory has the VM once, its guest goes on or starts, and has what it had.
    fn is_adopted(&self, follows: Follows, guests: &[i32]) {
        let listed = self.here.json(&["vm", "list"]).unwrap();
        assert_eq!(listed.as_array().unwrap().len(), 1, "{listed}");
        let power = if follows == Follows::Adopt { "off" } else { "running" };
        self.here.wait_power(VM, power).unwrap();
        if follows == Follows::AdoptRunning {
            assert_eq!(self.here.guest_processes(QEMU), guests, "its guest was ended");
            self.stops();
        }
        self.does(&[&["vm", "prove", VM, "--all"]]);
        self.boots(2);
    }

    /// The VM was started once, and runs unless its guest has died with what was killed.
    fn has_started(&self, guest_died: bool) {
        let tasks = self.here.json(&["task", "list"]).unwrap();
        let known = || {
            let power = self.here.vm(VM).ok()?["power"].as_str()?.to_owned();
            let has_guest = !self.here.guest_processes(QEMU).is_empty();
            let agrees = (power == "running") == has_guest;
            (agrees && ["running", "off"].contains(&&*power)).then_some(power)
        };
        let power = eventually("it is known whether it runs", known).unwrap();
        assert!(power == "running" || guest_died, "it does not run: {tasks}");
        assert_eq!(self.here.guest_processes(QEMU).len(), usize::from(power == "running"));
        let open = tasks.as_array().unwrap().iter().filter(|task| task["ended"].is_null()).count();
        assert_eq!(open, 0, "it is started once more: {tasks}");
        if power == "off" {
            self.does(&[&["vm", "start", VM]]);
        }
        // It has counted what it counted before, and this boot.
        let mut console = self.here.console(VM).unwrap();
        while console.next_count().unwrap() < 2 {}
    }
}

/// Whether an agent can be shown another boot of the machine: by a mount of its own. Without that this says so.
fn can_reboot() -> bool {
    let mut mounts = Command::new("unshare");
    mounts.args(["--mount", "mount", "--bind", "/dev/null", "/proc/sys/kernel/random/boot_id"]);
    let can = mounts.output().is_ok_and(|output| output.status.success());
    if !can {
        skipped("automatic starts take mounts (root with CAP_SYS_ADMIN)");
    }
    can
}

#[test]
fn whatever_dies_at_a_step_after_a_loss_the_vm_is_there_once_and_has_what_it_had() {
    let mut random = seeded();
    let mut losses = Losses::new();
    let can_reboot = can_reboot();
    let all: Vec<_> =
        Follows::ALL.into_iter().filter(|it| can_reboot || *it != Follows::Autostart).collect();
    disturb_one_or_all(&mut random, &all, Follows::victims, |follows, at| {
        losses.disturbed(follows, at)
    });
}
