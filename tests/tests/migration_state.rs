//! VMs that move, while they run, with what their firmware and their TPM keep, to a host that has none of their datastores: nothing
//! of it is lost, nor readable, nor left where it was.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::thread::sleep;
use std::time::{Duration, Instant};

use vmseal_tests::firmware_shell::{self, has_variable, set_variable};
use vmseal_tests::guest::Console;
use vmseal_tests::held_steps::{Moment, begun, dying_at, without_holding};
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::process::kill_hard;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::run;
use vmseal_tests::tpm_guest::{self, DONE, MARKER, ask, define, extend, keeps, measured, write};
use vmseal_tests::two_hosts::{
    self, HERE, SWTPM, THERE, Victim, add_host_with_datastore, other, own_datastore, own_directory,
};
use vmseal_tests::{TIMEOUT, eventually};

const VM: &str = "web";

/// What only such a variable's name holds.
const NAME: &str = "VmsealMarker";

/// The VM runs on this host alone, with all of its disks on that host's datastore and unreadable; nothing of it is left on the
/// other's.
fn is_on(here: &Installation, host: &str) {
    assert_eq!(two_hosts::only_host(here, VM).unwrap(), host);
    let vm = here.vm(VM).unwrap();
    let disks = vm["disks"].as_array().unwrap();
    assert!(disks.iter().all(|disk| disk["datastore"] == own_datastore(host)), "{vm}");
    let left = || {
        let files = here.datastore_entries(&own_directory(here, other(host))).ok()?;
        let processes = two_hosts::processes(here, other(host), SWTPM);
        Some((files, processes))
    };
    let nothing = || left().filter(|(files, tpms)| files.is_empty() && tpms.is_empty()).map(drop);
    eventually("nothing is left at the other host", nothing)
        .unwrap_or_else(|error| panic!("{error}: {:?}", left()));
    assert_eq!(two_hosts::processes(here, host, SWTPM).len(), 1);

    let home = own_directory(here, host).join(vm["id"].as_str().unwrap());
    let mut names: Vec<_> = std::fs::read_dir(&home)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !["vm.json", "vm.lease"].contains(&name.as_str()))
        .collect();
    let mut expected = Vec::new();
    for disk in disks {
        let id = disk["id"].as_str().unwrap();
        expected.push(format!("{id}.raw"));
        if disk["role"] == "tpm" {
            expected.push(format!("{id}.tpm"));
        }
    }
    names.sort();
    expected.sort();
    assert_eq!(names, expected);
    let name: Vec<u8> = NAME.encode_utf16().flat_map(u16::to_le_bytes).collect();
    for file in here.datastore_entries(&home).unwrap().iter().filter(|file| file.is_file()) {
        let content = std::fs::read(file).unwrap();
        let has = |text: &[u8]| contains(&content, text);
        assert!(!has(&name) && !has(MARKER), "{} is readable", file.display());
    }
}

/// A guest that is the firmware's own shell, with a variable and a TPM.
fn with_firmware() -> Installation {
    let mut here = Installation::new().unwrap();
    add_host_with_datastore(&mut here).unwrap();
    let create = ["vm", "create", VM, "--policy", "encrypted", "--memory", "128MiB"];
    let hardware = ["--disk", "datastore=local,size=1MiB", "--firmware", "uefi", "--tpm"];
    here.vmseal(&[&create[..], &hardware].concat()).unwrap();
    set_variable(&mut shell_of(&here), NAME, "112233");
    here
}

fn shell_of(here: &Installation) -> Console {
    here.vmseal(&["vm", "start", VM]).unwrap();
    firmware_shell::open(here, VM)
}

#[test]
fn variables_move_with_their_guest_and_are_there_at_its_next_start() {
    let here = with_firmware();
    let planned = here.vmseal(&["vm", "migrate", VM, THERE, "--dry-run"]).unwrap();
    assert!(planned.contains("uefi-variables (") && planned.contains("'far'"), "{planned}");
    for (to, name, value) in [(THERE, "SecondOne", "44556677"), (HERE, "ThirdOne", "8899")] {
        here.vmseal(&["vm", "migrate", VM, to]).unwrap();
        is_on(&here, to);
        let mut shell = here.console(VM).unwrap();
        has_variable(&mut shell, NAME, "11 22 33");
        set_variable(&mut shell, name, value);
        drop(shell);
        here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
        here.vmseal(&["vm", "prove", VM]).unwrap();
        let mut shell = shell_of(&here);
        has_variable(&mut shell, NAME, "11 22 33");
        has_variable(&mut shell, "SecondOne", "44 55 66 77");
        is_on(&here, to);
    }
}

/// A QEMU that lets a guest go on writes all variables again. One that dies before, when the disks have just got their names, does
/// not: they have come as a copy.
#[test]
fn variables_are_copied_before_the_guest_goes_on() {
    let here = with_firmware();
    dies_when_its_disks_are_named(&here);
    has_variable(&mut shell_of(&here), NAME, "11 22 33");
    is_on(&here, THERE);
}

#[test]
fn variables_move_with_what_a_snapshot_keeps_of_them() {
    if !has_its_turn() {
        return;
    }
    let here = with_firmware();
    here.vmseal(&["snapshot", "create", VM, "before"]).unwrap();
    let mut shell = here.console(VM).unwrap();
    set_variable(&mut shell, "SecondOne", "44556677");
    drop(shell);
    dies_when_its_disks_are_named(&here);
    let mut shell = shell_of(&here);
    has_variable(&mut shell, NAME, "11 22 33");
    has_variable(&mut shell, "SecondOne", "44 55 66 77");
    drop(shell);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["snapshot", "revert", VM, "before"]).unwrap();
    let mut shell = shell_of(&here);
    has_variable(&mut shell, NAME, "11 22 33");
    has_variable(&mut shell, "SecondOne", "Unable to get");
    drop(shell);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["snapshot", "delete", VM, "before"]).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    is_on(&here, THERE);
}

/// Sends it, and kills the QEMU that has received it.
fn dies_when_its_disks_are_named(here: &Installation) {
    let task = here.json(&["vm", "migrate", VM, THERE, "--no-wait"]).unwrap();
    let vm = here.vm(VM).unwrap();
    let home = own_directory(here, THERE).join(vm["id"].as_str().unwrap());
    let image = home.join(format!("{}.raw", vm["disks"][1]["id"].as_str().unwrap()));
    let give_up = Instant::now() + TIMEOUT;
    while !image.exists() {
        assert!(Instant::now() < give_up, "it does not arrive");
        sleep(Duration::from_micros(200));
    }
    two_hosts::processes(here, THERE, two_hosts::QEMU).into_iter().for_each(kill_hard);
    let _ = here.try_vmseal(&["task", "wait", task["id"].as_str().unwrap()]).unwrap();
    here.wait_power(VM, "off").unwrap();
    assert_eq!(here.vm(VM).unwrap()["host"], THERE);
}

/// Starts the guest with a TPM, which uses its disk.
fn started(here: &Installation) -> Console {
    let mut guest = tpm_guest::start(here, VM);
    run(&mut guest, "insmod /virtio_blk.ko; echo DRIVER-$((6 * 7))", "DRIVER-42").unwrap();
    guest
}

/// A guest whose TPM keeps a marker, and has measured something: what its register has then.
fn with_tpm() -> (Installation, String) {
    let mut here = Installation::new().unwrap();
    add_host_with_datastore(&mut here).unwrap();
    tpm_guest::create(&here, VM, &[]);
    let mut guest = started(&here);
    assert_eq!(ask(&mut guest, &define(), DONE.len()), DONE);
    assert_eq!(ask(&mut guest, &write(), DONE.len()), DONE);
    let before = measured(&mut guest);
    assert_eq!(ask(&mut guest, &extend(), DONE.len()), DONE);
    let after = measured(&mut guest);
    assert_ne!(before, after);
    (here, after)
}

#[test]
fn what_a_tpm_keeps_moves_with_its_guest_and_is_there_at_its_next_start() {
    let (here, mut register) = with_tpm();
    for to in [THERE, HERE] {
        here.vmseal(&["vm", "migrate", VM, to]).unwrap();
        is_on(&here, to);
        let mut guest = here.console(VM).unwrap();
        keeps(&mut guest);
        assert_eq!(measured(&mut guest), register, "what it has measured since it booted");
        assert_eq!(ask(&mut guest, &extend(), DONE.len()), DONE);
        register = measured(&mut guest);
    }
    here.vmseal(&["vm", "migrate", VM, THERE]).unwrap();
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "prove", VM]).unwrap();
    let mut guest = started(&here);
    keeps(&mut guest);
    assert_ne!(measured(&mut guest), register, "the guest has booted since");
    is_on(&here, THERE);
}

/// Gives the other host the datastore that the VM is on.
fn share(here: &Installation) {
    let place = here.path("datastore");
    let share = ["datastore", "share", "local", "--host", THERE, "--path"];
    here.vmseal(&[&share[..], &[text(&place).unwrap()]].concat()).unwrap();
}

/// The datastores of the VM's disks.
fn places(here: &Installation) -> Vec<String> {
    let vm = here.vm(VM).unwrap();
    let disks = vm["disks"].as_array().unwrap().iter();
    disks.map(|disk| disk["datastore"].as_str().unwrap().to_owned()).collect()
}

/// What is beside the VM's disks on the datastore that both hosts have: the directories of what a TPM keeps.
fn tpm_directories(here: &Installation) -> Vec<String> {
    let vm = here.vm(VM).unwrap();
    let home = here.path("datastore").join(vm["id"].as_str().unwrap());
    let entries = std::fs::read_dir(home).unwrap().map(|entry| entry.unwrap());
    let directories = entries.filter(|entry| entry.file_type().unwrap().is_dir());
    directories.map(|entry| entry.file_name().into_string().unwrap()).collect()
}

/// The guest is on this host alone, on the datastore that both hosts have, with what its TPM keeps and has measured; and nothing is left
/// beside that.
fn is_on_shared(here: &Installation, host: &str, register: &str) {
    assert_eq!(two_hosts::only_host(here, VM).unwrap(), host);
    assert_eq!(places(here), ["local", "local"]);
    let mut guest = here.console(VM).unwrap();
    keeps(&mut guest);
    assert_eq!(measured(&mut guest), register, "what it has measured since it booted");
    drop(guest);
    let left = || two_hosts::processes(here, other(host), SWTPM).is_empty().then_some(());
    eventually("no TPM is left at the other host", left).unwrap();
    let vm = here.vm(VM).unwrap();
    let id =
        vm["disks"].as_array().unwrap().iter().find(|disk| disk["role"] == "tpm").unwrap()["id"]
            .as_str()
            .unwrap();
    let only = || (tpm_directories(here) == [format!("{id}.tpm")]).then_some(());
    eventually("one directory has what the TPM keeps", only)
        .unwrap_or_else(|error| panic!("{error}: {:?}", tpm_directories(here)));
}

#[test]
fn what_a_tpm_keeps_stays_on_a_datastore_that_both_hosts_have() {
    let (here, mut register) = with_tpm();
    share(&here);
    let planned = here.vmseal(&["vm", "migrate", VM, THERE, "--dry-run"]).unwrap();
    assert!(planned.contains("choose host 'there'") && !planned.contains("copies"), "{planned}");
    for to in [THERE, HERE, THERE] {
        here.vmseal(&["vm", "migrate", VM, to]).unwrap();
        is_on_shared(&here, to, &register);
        let mut guest = here.console(VM).unwrap();
        assert_eq!(ask(&mut guest, &extend(), DONE.len()), DONE);
        let next = measured(&mut guest);
        assert_ne!(next, register);
        register = next;
    }
    // It is what the next start finds, and a migration after that.
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "prove", VM]).unwrap();
    let mut guest = started(&here);
    keeps(&mut guest);
    let register = measured(&mut guest);
    drop(guest);
    here.vmseal(&["vm", "migrate", VM, HERE]).unwrap();
    is_on_shared(&here, HERE, &register);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "delete", VM]).unwrap();
    let left = here.datastore_entries(&here.path("datastore")).unwrap();
    assert!(left.is_empty(), "{left:?}");
}

/// The steps of a migration before the one at which the guest changes hosts: each is held before and after it is done.
const BEFORE_SWITCH: usize = 2;

/// The destination's agent dies when all has been loaded there, and when the guest runs there and the server does not know it yet.
#[test]
fn what_a_tpm_keeps_on_a_shared_datastore_is_where_its_guest_is_when_the_destination_s_agent_dies()
{
    let (mut here, register) = with_tpm();
    share(&here);
    let held = here.hold_steps().unwrap();
    let mut source = HERE;
    for moment in [2 * BEFORE_SWITCH, 2 * BEFORE_SWITCH + 1] {
        let connected = || {
            let hosts = here.json(&["host", "list"]).ok()?;
            let is_connected = |host: &serde_json::Value| host["connection"] == "connected";
            hosts.as_array()?.iter().all(is_connected).then_some(())
        };
        eventually("both hosts are connected", connected).unwrap();
        let task = begun(&here, &["vm", "migrate", VM, other(source)]);
        let die = |here: &mut Installation, _: &std::path::Path| {
            Victim::AgentOf(false).kill(here, source);
        };
        let dies = (&*task, Moment::Number(moment));
        let at = dying_at(&mut here, &held, dies, |_| {}, die).at;
        assert!(at.is_some_and(|at| at.contains("switch")), "moment {moment}");
        let host = two_hosts::only_host(&here, VM).unwrap();
        is_on_shared(&here, &host, &register);
        // Whether it has moved or not: it moves on.
        let to = other(&host);
        without_holding(&held, || here.vmseal(&["vm", "migrate", VM, to]).unwrap());
        is_on_shared(&here, to, &register);
        source = to;
    }
    without_holding(&held, || here.vmseal(&["vm", "stop", VM, "--force"]).unwrap());
    without_holding(&held, || keeps(&mut started(&here)));
}

#[test]
fn what_a_tpm_keeps_goes_to_another_datastore_that_is_named() {
    let (here, register) = with_tpm();
    share(&here);
    let same = ["vm", "migrate", VM, THERE, "--datastore", "local"];
    let refused = here.refused(&same).unwrap();
    assert!(refused.contains("has the datastores of all disks"), "{refused}");
    here.vmseal(&["vm", "migrate", VM, THERE, "--datastore", "far"]).unwrap();
    assert_eq!(two_hosts::only_host(&here, VM).unwrap(), THERE);
    assert_eq!(places(&here), ["local", "far"]);
    let mut guest = here.console(VM).unwrap();
    keeps(&mut guest);
    assert_eq!(measured(&mut guest), register);
    drop(guest);
    assert_eq!(tpm_directories(&here), [""; 0]);
    here.vmseal(&["vm", "migrate", VM, HERE]).unwrap();
    is_on_shared(&here, HERE, &register);
    let far = here.path("far");
    eventually("nothing is left there", || {
        here.datastore_entries(&far).ok().filter(Vec::is_empty).map(drop)
    })
    .unwrap();
}

/// Moves the VM while processes die; `has_all` checks that its guest has lost nothing.
fn move_while_processes_die(
    here: &mut Installation,
    starts: impl Fn(&Installation),
    has_all: impl Fn(&mut Console),
) {
    let victims = [&Victim::OF_ANY_VM[..], &[Victim::Tpm]].concat();
    two_hosts::move_while_processes_die(here, VM, (&victims, 1800), starts, |here, host| {
        is_on(here, host);
        has_all(&mut here.console(VM).unwrap());
    });
}

#[test]
fn whatever_dies_the_variables_are_where_their_guest_is() {
    if !has_its_turn() {
        return;
    }
    let mut here = with_firmware();
    let has_all = |shell: &mut Console| has_variable(shell, NAME, "11 22 33");
    let starts = |here: &Installation| drop(shell_of(here));
    move_while_processes_die(&mut here, starts, has_all);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    has_variable(&mut shell_of(&here), NAME, "11 22 33");
}

#[test]
fn whatever_dies_what_a_tpm_keeps_is_where_its_guest_is() {
    if !has_its_turn() {
        return;
    }
    let (mut here, register) = with_tpm();
    let starts = |here: &Installation| {
        assert_eq!(ask(&mut started(here), &extend(), DONE.len()), DONE);
    };
    move_while_processes_die(&mut here, starts, |guest| {
        keeps(guest);
        assert_eq!(measured(guest), register);
    });
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    keeps(&mut started(&here));
}

#[test]
fn whatever_dies_what_a_tpm_keeps_on_a_shared_datastore_is_where_its_guest_is() {
    if !has_its_turn() {
        return;
    }
    let (mut here, register) = with_tpm();
    share(&here);
    let starts = |here: &Installation| {
        assert_eq!(ask(&mut started(here), &extend(), DONE.len()), DONE);
    };
    let victims = [&Victim::OF_ANY_VM[..], &[Victim::Tpm]].concat();
    two_hosts::move_while_processes_die(&mut here, VM, (&victims, 1800), starts, |here, host| {
        is_on_shared(here, host, &register);
    });
}
