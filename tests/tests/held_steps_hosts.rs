//! What dies exactly before a step, or after it and before that is recorded, of what gives a VM to another host: of one that is off, or
//! suspended, and whose datastore both have; of one that runs, there as well, and with copies of its disk. The VM is at one host, and
//! has lost nothing. The same of clones for another host, on a datastore that both have, and sent: the clone is at that host alone and
//! whole, or nothing of it is left at either; and the VM is as it was. (`held_steps_guests` has the deaths of QEMU and filters.)
//!
//! A run tries one moment of one of each, chosen by a seed that is printed; with `VMSEAL_ALL`, all of all.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use vmseal_tests::eventually;
use vmseal_tests::held_steps::{
    Ended, Moment, begun, disturb_one_or_all, dying_at, half_made, seeded, without_holding,
};
use vmseal_tests::installation::{Installation, create, text};
use vmseal_tests::two_hosts::{
    self, FILTER, HERE, QEMU, THERE, add_host_with_datastore, only_host, other, own_datastore,
    processes,
};

const VM: &str = "web";

/// The datastore that both hosts have; each has another one alone.
const SHARED: &str = "shared";

/// The clone, and the datastores that files of it may be on.
const CLONE: &str = "copy";
const DATASTORES: [&str; 3] = [SHARED, "local", "far"];

/// What an operator does.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Change {
    Off,
    Suspended,
    Running,
    /// Its disk is on a datastore that the other host does not have.
    RunningWithDisk,
}

impl Change {
    const ALL: [Self; 4] = [Self::Off, Self::Suspended, Self::Running, Self::RunningWithDisk];
}

/// What is cloned for the other host.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cloned {
    /// A VM that is off: its datastore is that of the clone.
    HandedOver,
    /// The same, and the clone's disk is sent to a datastore that the other host has alone.
    Sent,
    /// A VM that runs: a snapshot is taken, and dropped.
    RunningHandedOver,
    RunningSent,
}

impl Cloned {
    const ALL: [Self; 4] =
        [Self::HandedOver, Self::Sent, Self::RunningHandedOver, Self::RunningSent];

    fn runs(self) -> bool {
        matches!(self, Self::RunningHandedOver | Self::RunningSent)
    }

    fn is_sent(self) -> bool {
        matches!(self, Self::Sent | Self::RunningSent)
    }

    /// Where the clone is in the end.
    fn datastore(self) -> &'static str {
        if self.is_sent() { own_datastore(THERE) } else { SHARED }
    }
}

/// What dies. No guest ends with it.
#[derive(Clone, Copy, Debug)]
enum Dies {
    Server,
    Source,
    Destination,
    /// The server, and the agents of both hosts.
    All,
}

impl Dies {
    const ALL: [Self; 4] = [Self::Server, Self::Source, Self::Destination, Self::All];

    /// Kills it, while the VM is to go from this host, and starts it again. `file` holds the step.
    fn kill(self, here: &mut Installation, source: &str, file: &Path) {
        match self {
            Self::Server => {
                here.kill_server();
                std::fs::remove_file(file).unwrap();
                here.start_server().unwrap();
            }
            Self::Source => two_hosts::Victim::AgentOf(true).kill(here, source),
            Self::Destination => two_hosts::Victim::AgentOf(false).kill(here, source),
            Self::All => {
                here.kill_agent_of(THERE).unwrap();
                here.kill_agent();
                here.kill_server();
                std::fs::remove_file(file).unwrap();
                here.start_server().unwrap();
                here.start_agent().unwrap();
                here.start_agent_of(THERE).unwrap();
            }
        }
    }
}

/// The VM, which is off between operations, at either host.
struct Hosts {
    here: Installation,
    held: PathBuf,
    /// What the guest has counted to.
    number: u32,
}

impl Hosts {
    fn new() -> Self {
        let mut here = Installation::new().unwrap();
        add_host_with_datastore(&mut here).unwrap();
        let shared = here.path(SHARED);
        std::fs::create_dir(&shared).unwrap();
        let shared = text(&shared).unwrap();
        here.vmseal(&["datastore", "add", SHARED, "--host", HERE, "--path", shared]).unwrap();
        here.vmseal(&["datastore", "share", SHARED, "--host", THERE]).unwrap();
        let image = here.counter_image().unwrap();
        let disk = format!("datastore={HERE}:{SHARED},format=raw,image={}", text(&image).unwrap());
        here.vmseal(&[&create(VM, "encrypted", &disk)[..], &["--host", HERE]].concat()).unwrap();
        let held = here.hold_steps().unwrap();
        for host in [HERE, THERE] {
            let connected = || {
                let shown = here.json(&["host", "show", host]).ok()?;
                (shown["connection"] == "connected").then_some(())
            };
            eventually(&format!("{host} is connected"), connected).unwrap();
        }
        Self { here, held, number: 0 }
    }

    fn does(&self, command: &[&str]) {
        without_holding(&self.held, || self.here.vmseal(command).unwrap());
    }

    fn host(&self) -> String {
        self.here.vm(VM).unwrap()["host"].as_str().unwrap().to_owned()
    }

    /// The guest boots, and counts that.
    fn boots(&mut self) {
        self.number += 1;
        let counted = without_holding(&self.held, || self.here.boot_counter(VM).unwrap());
        assert_eq!(counted, self.number, "it does not count on from its last number");
    }

    /// The guest, which has not booted since, counts once more.
    fn counts_on(&mut self) {
        self.number += 1;
        let mut console = self.here.console(VM).unwrap();
        console.type_text("r").unwrap();
        // What was said before is said again.
        while console.next_count().unwrap() < self.number {}
    }

    /// The files of VMs that are on a datastore, but for leases, which hosts take and give up. None where a directory is removed meanwhile.
    fn files(&self, datastore: &str) -> Option<BTreeSet<PathBuf>> {
        let directory = match datastore {
            "local" => self.here.path("datastore"),
            other => self.here.path(other),
        };
        let mut files = self.here.datastore_entries(&directory).ok()?;
        files.retain(|file| !file.ends_with("vm.lease"));
        Some(files.into_iter().collect())
    }

    /// The same when none of them is being written: an agent writes down what VMs are when their tasks have ended.
    fn settled_files(&self, datastore: &str) -> BTreeSet<PathBuf> {
        let is_new = |file: &PathBuf| file.extension().is_some_and(|it| it == "new");
        let settled = || self.files(datastore).filter(|files| !files.iter().any(is_new));
        eventually(&format!("no file of {datastore} is being written"), settled).unwrap()
    }

    /// Gives the VM to the other host, and something dies at this moment of it; whether it has so many.
    fn disturbed(&mut self, change: Change, (dies, moment): (Dies, Moment)) -> bool {
        let source = self.host();
        let destination = other(&source);
        let before = self.settled_files(SHARED);
        if change == Change::RunningWithDisk {
            self.does(&["vm", "move", VM, "--datastore", own_datastore(&source)]);
        }
        if change != Change::Off {
            self.boots();
        }
        if change == Change::Suspended {
            self.does(&["vm", "suspend", VM]);
        }
        let mut command = vec!["vm", "migrate", VM, destination];
        if change == Change::RunningWithDisk {
            command.extend(["--datastore", own_datastore(destination)]);
        }
        eprintln!("{change:?}: {dies:?} dies");
        let task = begun(&self.here, &command);
        let die = |here: &mut Installation, file: &Path| dies.kill(here, &source, file);
        let Ended { at, output, .. } =
            dying_at(&mut self.here, &self.held, (&task, moment), |_| {}, die);
        if !output.status.success() {
            eprintln!("undone: {}", String::from_utf8_lossy(&output.stderr));
            self.is_at_rest_or_runs();
            // It may be there although the task is not done: then it stays.
            if self.host() == source {
                self.does(&command);
            }
        }
        self.check(change, &source);
        if change == Change::RunningWithDisk {
            let gone = || self.files(own_datastore(&source)).filter(BTreeSet::is_empty).map(drop);
            eventually(&format!("nothing is left at {source}"), gone).unwrap();
            self.does(&["vm", "move", VM, "--datastore", SHARED]);
        }
        let same = || self.files(SHARED).filter(|files| *files == before).map(drop);
        eventually("all files are there, and nothing else is left", same)
            .unwrap_or_else(|error| panic!("{error}: {:?}, not {before:?}", self.files(SHARED)));
        at.is_some()
    }

    /// Waits until the VM is not between two hosts, and its host is heard: until then it may not move.
    fn is_at_rest_or_runs(&self) {
        let settled = || {
            let power = self.here.vm(VM).ok()?["power"].as_str()?.to_owned();
            ["off", "suspended", "running"].contains(&&*power).then_some(())
        };
        eventually("the VM is off, is suspended or runs", settled).unwrap();
    }

    /// The VM is at the other host alone, as it was, and its guest goes on there; then it is off.
    fn check(&mut self, change: Change, source: &str) {
        let destination = other(source);
        assert_eq!(self.host(), destination);
        for name in [QEMU, FILTER] {
            let left = || processes(&self.here, source, name).is_empty().then_some(());
            eventually(&format!("no {name} is left at {source}"), left).unwrap();
        }
        match change {
            Change::Off => {
                self.here.wait_power(VM, "off").unwrap();
                self.boots();
            }
            Change::Suspended => {
                self.here.wait_power(VM, "suspended").unwrap();
                self.does(&["vm", "resume", VM]);
                self.counts_on();
            }
            Change::Running | Change::RunningWithDisk => self.counts_on(),
        }
        assert_eq!(only_host(&self.here, VM).unwrap(), destination);
        self.does(&["vm", "stop", VM, "--force"]);
        // It would count further than it should if it had booted meanwhile.
        self.boots();
        self.does(&["vm", "stop", VM, "--force"]);
    }

    /// Clones the VM for the other host, and something dies at this moment of it; whether it has so many.
    fn disturbed_clone(&mut self, cloned: Cloned, (dies, moment): (Dies, Moment)) -> bool {
        if cloned.runs() {
            self.boots();
        }
        let mut command = vec!["vm", "clone", VM, CLONE, "--host", THERE];
        if cloned.is_sent() {
            command.extend(["--datastore", cloned.datastore()]);
        }
        eprintln!("{cloned:?}: {dies:?} dies");
        let task = begun(&self.here, &command);
        let id = self.id_of_clone();
        let die = |here: &mut Installation, file: &Path| dies.kill(here, HERE, file);
        let Ended { at, output, .. } =
            dying_at(&mut self.here, &self.held, (&task, moment), |_| {}, die);
        if !output.status.success() {
            eprintln!("undone: {}", String::from_utf8_lossy(&output.stderr));
            self.here.refused(&["vm", "show", CLONE]).unwrap();
            self.has_nothing_on(&DATASTORES, &id);
            self.does(&command);
        }
        self.check_origin(cloned);
        self.check_clone(cloned);
        at.is_some()
    }

    fn id_of_clone(&self) -> String {
        self.here.vm(CLONE).unwrap()["id"].as_str().unwrap().to_owned()
    }

    /// No file of a VM, by its id, is left on these datastores.
    fn has_nothing_on(&self, datastores: &[&str], id: &str) {
        for datastore in datastores {
            let is_of_it = |file: &PathBuf| file.to_string_lossy().contains(id);
            let gone = || self.files(datastore).filter(|files| !files.iter().any(is_of_it));
            eventually(&format!("nothing of the clone is left on {datastore}"), gone).unwrap();
        }
    }

    /// The VM that is cloned is where it was, has lost nothing, and no snapshot of it is left; then it is off.
    fn check_origin(&mut self, cloned: Cloned) {
        assert_eq!(self.host(), HERE);
        if cloned.runs() {
            self.counts_on();
            self.does(&["vm", "stop", VM, "--force"]);
        }
        let snapshots = self.here.json(&["snapshot", "list", VM]).unwrap();
        assert_eq!(snapshots, serde_json::json!([]));
        let files = self.settled_files(SHARED);
        let is_layer = |file: &&PathBuf| file.to_string_lossy().contains(".layer");
        let layers: Vec<_> = files.iter().filter(is_layer).collect();
        assert!(layers.is_empty(), "layers of the snapshot are left: {layers:?}");
    }

    /// The other host alone has the clone, whole, and its guest counts on from what was cloned; then it is deleted.
    fn check_clone(&mut self, cloned: Cloned) {
        let shown = self.here.wait_power(CLONE, "off").unwrap();
        assert_eq!((&shown["host"], &shown["lifecycle"]), (&THERE.into(), &"ready".into()));
        assert_eq!(shown["disks"][0]["datastore"], cloned.datastore(), "{shown}");
        let id = self.id_of_clone();
        let others: Vec<_> =
            DATASTORES.into_iter().filter(|datastore| *datastore != cloned.datastore()).collect();
        self.has_nothing_on(&others, &id);
        let is_half_made = |file: &PathBuf| half_made(file);
        let tidy = || self.files(cloned.datastore()).filter(|it| !it.iter().any(is_half_made));
        eventually("nothing is left of what made the clone", tidy).unwrap();
        let counted = without_holding(&self.held, || self.here.boot_counter(CLONE).unwrap());
        // The guest of a VM that ran has counted once more since.
        let cloned_at = self.number - u32::from(cloned.runs());
        assert_eq!(counted, cloned_at + 1, "the clone does not hold what the VM held");
        assert_eq!(only_host(&self.here, CLONE).unwrap(), THERE);
        self.does(&["vm", "stop", CLONE, "--force"]);
        self.does(&["vm", "delete", CLONE]);
        self.has_nothing_on(&DATASTORES, &id);
        // What the VM itself holds is what it held.
        self.boots();
        self.does(&["vm", "stop", VM, "--force"]);
    }
}

#[test]
fn whatever_dies_at_a_step_the_vm_is_at_the_other_host_alone_and_its_guest_goes_on() {
    let mut random = seeded();
    let mut hosts = Hosts::new();
    disturb_one_or_all(
        &mut random,
        &Change::ALL,
        |_| -> &'static [Dies] { &Dies::ALL },
        |change, at| hosts.disturbed(change, at),
    );
}

#[test]
fn whatever_dies_at_a_step_a_clone_is_at_the_other_host_alone_or_nothing_of_it_is_left() {
    let mut random = seeded();
    let mut hosts = Hosts::new();
    disturb_one_or_all(
        &mut random,
        &Cloned::ALL,
        |_| -> &'static [Dies] { &Dies::ALL },
        |cloned, at| hosts.disturbed_clone(cloned, at),
    );
}
