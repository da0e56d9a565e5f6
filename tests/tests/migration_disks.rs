//! VMs that move, while they run, to a host that has none of their datastores: their disks are copied, the guest loses nothing of
//! what it had in memory and on its disks, and nothing is left where they were.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::{Path, PathBuf};

use serde_json::Value;
use vmseal_tests::counting_guest::{MARKER, SECRET, count, read_marker, started, stop_counting};
use vmseal_tests::fio_guest;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::{console_again, has_its_turn};
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{booted, run};
use vmseal_tests::two_hosts::{
    self, HERE, THERE, Victim, add_host_with_datastore, nothing_is_left, other, own_datastore,
    own_directory,
};

const VM: &str = "web";

/// A text that the guest has in its memory alone: typed in two parts, so that no log has it.
const IN_MEMORY: (&str, &str) = ("MARKER-OF-", "THE-MEMORY-2095");

/// A guest that counts on its disk, and a second host with a datastore of its own.
fn two_hosts(policy: &str) -> Installation {
    let (mut here, mut console) = started(VM, policy);
    add_host_with_datastore(&mut here).unwrap();
    prepare(&mut console);
    here
}

/// The guest has the text in its memory, and counts.
fn prepare(console: &mut Console) {
    let (one, two) = IN_MEMORY;
    run(console, &format!("m={one}; m=${{m}}{two}; echo SET-$((6 * 7))"), "SET-42").unwrap();
    count(console);
}

/// The VM runs on this host alone, with all of its disks on that host's datastore, and nothing of it is left on the other's.
fn is_on(here: &Installation, host: &str, encrypted: bool) {
    assert_eq!(two_hosts::only_host(here, VM).unwrap(), host);
    let vm = here.vm(VM).unwrap();
    for disk in vm["disks"].as_array().unwrap() {
        assert_eq!(disk["datastore"], own_datastore(host), "{vm}");
        assert_eq!(disk["encrypted"], encrypted, "{vm}");
    }
    nothing_is_left(here, other(host));
    let home = own_directory(here, host).join(vm["id"].as_str().unwrap());
    let mut names: Vec<_> = files(&home).iter().map(|path| name(path)).collect();
    names.retain(|name| !["vm.json", "vm.lease"].contains(&name.as_str()));
    names.sort();
    let disks = vm["disks"].as_array().unwrap().iter();
    let mut expected: Vec<_> =
        disks.map(|disk| format!("{}.raw", disk["id"].as_str().unwrap())).collect();
    expected.sort();
    assert_eq!(names, expected);
    let clear = files(&home).into_iter().filter(|path| has_marker(path)).count();
    assert_eq!(clear == 0, encrypted, "{clear} files have what the guest wrote");
}

fn files(home: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(home).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

fn has_marker(file: &Path) -> bool {
    let bytes = std::fs::read(file).unwrap();
    contains(&bytes, MARKER) || contains(&bytes, SECRET)
}

/// What was sent of the memory and of the disks is told apart, while the guest is sent and at its end.
fn counts_disks(watched: &str) {
    let documents: Vec<Value> =
        watched.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let last = &documents.last().unwrap()["migrated"];
    let of = |what: &Value, name: &str| {
        what[name].as_u64().unwrap_or_else(|| panic!("no {name} in {watched}"))
    };
    let (all, disks) = (of(last, "milliseconds"), &last["disks"]);
    // More than what is said before anything is copied.
    assert!(of(disks, "bytes") + of(disks, "later_bytes") > 4096, "{watched}");
    assert!(of(last, "memory_milliseconds") > 0, "{watched}");
    assert!(of(disks, "milliseconds") + of(last, "memory_milliseconds") <= all, "{watched}");
    let seen = documents.iter().map(|task| &task["migration"]["progress"]);
    // Of one that has begun: the first looks may come before anything is measured.
    let mut begun = seen.filter(|progress| progress["sent"].as_u64().is_some_and(|sent| sent > 0));
    assert!(begun.all(|progress| progress["disks"].is_object()), "{watched}");
}

/// The guest has what it had, and goes on counting.
fn has_lost_nothing(here: &Installation) {
    let mut console = here.console(VM).unwrap();
    stop_counting(&mut console);
    let (one, two) = IN_MEMORY;
    run(&mut console, "echo HAS-$m-", &format!("HAS-{one}{two}-")).unwrap();
    read_marker(&mut console);
    count(&mut console);
}

#[test]
fn a_guest_moves_with_its_disks_to_a_host_that_has_none_of_them_and_back() {
    let here = two_hosts("encrypted");
    let planned = here.vmseal(&["vm", "migrate", VM, THERE, "--dry-run"]).unwrap();
    assert!(planned.contains("with copies of disks") && planned.contains("'far'"), "{planned}");
    let refused = here.refused(&["vm", "migrate", VM, "--datastore", "nowhere"]).unwrap();
    assert!(refused.contains("it has no datastore 'nowhere'"), "{refused}");
    for (to, datastore) in [(THERE, Some("far")), (HERE, None), (THERE, None)] {
        let options = datastore.map(|name| ["--datastore", name]);
        let command = ["vm", "migrate", VM, to, "--watch", "-o", "json"];
        let command = command.into_iter().chain(options.into_iter().flatten());
        let watched = here.vmseal(&command.collect::<Vec<_>>()).unwrap();
        counts_disks(&watched);
        is_on(&here, to, true);
        has_lost_nothing(&here);
    }
    // The copies are its disks, also for the next guest.
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "prove", VM]).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    read_marker(&mut booted(&here, VM).unwrap());
    is_on(&here, THERE, true);
}

#[test]
fn a_guest_that_is_not_encrypted_moves_with_its_disks_as_well() {
    let here = two_hosts("plain");
    here.vmseal(&["vm", "migrate", VM, THERE]).unwrap();
    is_on(&here, THERE, false);
    has_lost_nothing(&here);
}

#[test]
fn whatever_dies_while_disks_are_copied_the_guest_runs_on_one_host_and_no_image_is_left_on_the_other()
 {
    if !has_its_turn() {
        return;
    }
    let mut here = two_hosts("encrypted");
    let starts = |here: &Installation| {
        here.vmseal(&["vm", "start", VM]).unwrap();
        prepare(&mut booted(here, VM).unwrap());
    };
    let victims = (&Victim::OF_ANY_VM[..], 3000);
    two_hosts::move_while_processes_die(&mut here, VM, victims, starts, |here, host| {
        is_on(here, host, true);
        has_lost_nothing(here);
    });
}

/// There and back; and with `VMSEAL_ALL`, as `scripts/soak` has it.
const MOVES: usize = 2;
const ALL_MOVES: usize = 20;

/// How many blocks a second fio writes: more is copied again and again than a guest leaves alone, and less than is copied meanwhile.
const WRITES_A_SECOND: u32 = 100;

#[test]
fn fio_verifies_while_its_guest_moves_with_its_disks_there_and_back() {
    if !has_its_turn() {
        return;
    }
    let mut here = Installation::new().unwrap();
    let mut console = fio_guest::started(&here, VM, "encrypted", "local");
    add_host_with_datastore(&mut here).unwrap();
    fio_guest::write_and_verify(&mut console, WRITES_A_SECOND);
    fio_guest::keep_history(&mut console, 0, None);
    let moves = if std::env::var_os("VMSEAL_ALL").is_some() { ALL_MOVES } else { MOVES };
    for number in 0..moves {
        let to = if number % 2 == 0 { THERE } else { HERE };
        here.vmseal(&["vm", "migrate", VM, to]).unwrap();
        assert_eq!(two_hosts::only_host(&here, VM).unwrap(), to);
    }
    console = console_again(&here, VM, console);
    fio_guest::stop_and_check(&mut console);
    here.vmseal(&["vm", "prove", VM]).unwrap();
}
