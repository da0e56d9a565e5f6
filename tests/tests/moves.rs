//! Disks are moved to another datastore while their guest writes, and it loses nothing: not when the agent, the filter or the
//! server dies meanwhile, nor when it is cancelled. Nothing is left where they were.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use vmseal_tests::counting_guest::{MARKER, SECRET, count, read_marker, started, stop_counting};
use vmseal_tests::eventually;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::{
    Victim, console_again, during, has_its_turn, some_of, while_the_guest_dies,
};
use vmseal_tests::process::kill_hard;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::booted;

const VM: &str = "web";

/// A second datastore of the host.
fn add_second(here: &Installation) -> PathBuf {
    let path = here.path("second");
    std::fs::create_dir(&path).unwrap();
    let place = ["datastore", "add", "second", "--host", "here", "--path", text(&path).unwrap()];
    here.vmseal(&place).unwrap();
    path
}

fn place_of(here: &Installation, datastore: &str) -> PathBuf {
    here.path(if datastore == "local" { "datastore" } else { datastore })
}

/// All disks are on one datastore, in the inventory and in fact, and nothing of the VM on the other one.
fn is_on(here: &Installation, datastore: &str, encrypted: bool) {
    let vm = here.vm(VM).unwrap();
    let home = place_of(here, datastore).join(vm["id"].as_str().unwrap());
    let disks = vm["disks"].as_array().unwrap();
    let mut expected = vec!["vm.json".to_owned()];
    for disk in disks {
        assert_eq!(disk["datastore"], datastore, "{vm}");
        assert_eq!(disk["encrypted"], encrypted, "{vm}");
        expected.push(format!("{}.raw", disk["id"].as_str().unwrap()));
    }
    expected.sort();
    assert_eq!(names(&home), expected);
    let other = if datastore == "local" { "second" } else { "local" };
    let left = here.datastore_entries(&place_of(here, other)).unwrap();
    assert_eq!(left, Vec::<PathBuf>::new(), "on datastore '{other}'");
    if encrypted {
        assert_eq!(in_the_clear(&home), Vec::<PathBuf>::new());
    }
}

fn names(home: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.unwrap().file_name().into_string().unwrap()
    };
    let mut names: Vec<_> = std::fs::read_dir(home).unwrap().map(name).collect();
    names.sort();
    names
}

fn in_the_clear(home: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(home).unwrap().map(|entry| entry.unwrap().path());
    let has_marker = |file: &PathBuf| {
        let bytes = std::fs::read(file).unwrap();
        contains(&bytes, MARKER) || contains(&bytes, SECRET)
    };
    files.filter(has_marker).collect()
}

#[test]
fn the_disks_of_a_vm_move_while_it_runs_and_while_it_is_off() {
    let (here, mut console) = started(VM, "encrypted");
    add_second(&here);
    is_on(&here, "local", true);
    let planned = here.vmseal(&["vm", "move", VM, "--datastore", "second", "--dry-run"]).unwrap();
    assert!(
        planned.contains("to go to datastore 'second'") && planned.contains("64 MiB"),
        "{planned}"
    );
    is_on(&here, "local", true);
    count(&mut console);
    // Once, though it is named twice, and by its id.
    let id = here.vm(VM).unwrap()["id"].as_str().unwrap().to_owned();
    here.vmseal(&["vm", "move", VM, VM, &id, "--datastore", "second"]).unwrap();
    stop_counting(&mut console);
    read_marker(&mut console);
    is_on(&here, "second", true);
    let events = here.json(&["events", "--kind", "vm.moved"]).unwrap();
    assert!(events.to_string().contains("to datastore 'second'"), "{events}");
    let again = here.refused(&["vm", "move", VM, "--datastore", "second"]).unwrap();
    assert!(again.contains("already"), "{again}");
    // The datastore that they were on is not needed any more.
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    drop(console);
    let away = here.path("away");
    std::fs::rename(place_of(&here, "local"), &away).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    read_marker(&mut booted(&here, VM).unwrap());
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    std::fs::rename(&away, place_of(&here, "local")).unwrap();
    // One disk, while the VM is off; then the other.
    let vm = here.vm(VM).unwrap();
    let first = vm["disks"][0]["name"].as_str().unwrap().to_owned();
    here.vmseal(&["vm", "move", VM, "--datastore", "local", "--disk", &first]).unwrap();
    let vm = here.vm(VM).unwrap();
    let on = |index: usize| vm["disks"][index]["datastore"].as_str().unwrap().to_owned();
    assert_eq!((on(0), on(1)), ("local".to_owned(), "second".to_owned()));
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(&here, VM).unwrap();
    read_marker(&mut console);
    here.vmseal(&["vm", "move", VM, "--datastore", "local"]).unwrap();
    read_marker(&mut console);
    is_on(&here, "local", true);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["datastore", "remove", "second"]).unwrap();
    here.vmseal(&["vm", "delete", VM]).unwrap();
    assert_eq!(here.datastore_entries(&place_of(&here, "local")).unwrap(), Vec::<PathBuf>::new());
}

/// Whatever dies while the disks of a VM move, the task goes on or is undone, and the guest has lost nothing.
#[test]
fn what_dies_while_disks_move_loses_nothing() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut console) = started(VM, "plain");
    add_second(&here);
    let mut place = "local";
    let times = some_of(&[30, 100, 200, 350, 500, 700, 900, 1100, 1400]);
    for (round, milliseconds) in times.into_iter().enumerate() {
        count(&mut console);
        let other = if place == "local" { "second" } else { "local" };
        let change = ["vm", "move", VM, "--datastore", other];
        let ended = during(&mut here, VM, &change, Victim::of_round(round), milliseconds);
        if ended.status.success() {
            place = other;
        }
        console = console_again(&here, VM, console);
        stop_counting(&mut console);
        read_marker(&mut console);
        is_on(&here, place, false);
    }
    let other = if place == "local" { "second" } else { "local" };
    let change = ["vm", "move", VM, "--datastore", other];
    if while_the_guest_dies(&mut here, VM, &change, fastrand::u64(0..1000)) {
        place = other;
    }
    drop(console);
    read_marker(&mut booted(&here, VM).unwrap());
    is_on(&here, place, false);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

/// A move that is cancelled before its commit leaves the VM where it was.
#[test]
fn a_move_that_is_cancelled_leaves_nothing() {
    if !has_its_turn() {
        return;
    }
    let (here, mut console) = started(VM, "encrypted");
    add_second(&here);
    let mut place = "local";
    count(&mut console);
    for milliseconds in some_of(&[0, 50, 100, 400]) {
        let other = if place == "local" { "second" } else { "local" };
        let task = here.json(&["vm", "move", VM, "--datastore", other, "--no-wait"]).unwrap();
        let removed = here.refused(&["datastore", "remove", other]).unwrap();
        assert!(removed.contains("in use") || removed.contains("moves disks"), "{removed}");
        sleep(Duration::from_millis(milliseconds));
        let id = task["id"].as_str().unwrap();
        let cancelled = here.try_vmseal(&["task", "cancel", id]).unwrap().status.success();
        let ended = here.try_vmseal(&["task", "wait", id]).unwrap();
        let done = ended.status.success();
        // While the copies are being taken into use, it may be too late.
        assert!(cancelled || done, "{ended:?}");
        if done {
            place = other;
        }
        is_on(&here, place, true);
    }
    stop_counting(&mut console);
    read_marker(&mut console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

/// Of a VM that is off, a copy is paused, too: no process works on it then.
#[test]
fn the_copy_of_a_vm_that_is_off_is_paused_and_goes_on() {
    let (mut here, console) = started(VM, "encrypted");
    add_second(&here);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    drop(console);
    // Until the disks are there, at this rate, it can be paused.
    let begin = ["vm", "move", VM, "--datastore", "second", "--rate", "1M", "--no-wait"];
    let task = here.json(&begin).unwrap();
    let id = task["id"].as_str().unwrap();
    here.vmseal(&["task", "pause", id]).unwrap();
    let waits = |here: &Installation| {
        eventually("it is paused", || {
            let task = here.json(&["task", "show", id]).unwrap();
            (task["state"] == "waiting" && task["paused"] == true).then_some(())
        })
        .unwrap();
        let none = || here.guest_processes("vmseal-filter").is_empty().then_some(());
        eventually("nothing works on it", none).unwrap();
    };
    waits(&here);
    here.kill_agent();
    here.start_agent().unwrap();
    here.kill_server();
    here.start_server().unwrap();
    waits(&here);
    here.vmseal(&["task", "set", id, "--rate", "0"]).unwrap();
    here.vmseal(&["task", "resume", id]).unwrap();
    here.vmseal(&["task", "wait", id]).unwrap();
    is_on(&here, "second", true);
    here.vmseal(&["vm", "start", VM]).unwrap();
    read_marker(&mut booted(&here, VM).unwrap());
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

/// A lease that was left where the disk was before is no other host's; one that is taken afterwards is.
#[test]
fn a_guest_whose_disk_comes_to_a_later_lease_keeps_it_until_another_host_takes_it() {
    let (here, console) = started(VM, "encrypted");
    drop(console);
    add_second(&here);
    let vm = here.vm(VM).unwrap();
    let first = vm["disks"][0]["name"].as_str().unwrap();
    let lease_on =
        |datastore| place_of(&here, datastore).join(vm["id"].as_str().unwrap()).join("vm.lease");
    let generation = |generation: u64| format!(r#"{{"version":1,"generation":{generation}}}"#);
    let move_first = |to| {
        here.vmseal(&["vm", "move", VM, "--disk", first, "--datastore", to]).unwrap();
    };
    // The other disk stays, and with it a lease that the guest did not begin with.
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    move_first("second");
    std::fs::write(lease_on("local"), generation(9)).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(&here, VM).unwrap();
    move_first("local");
    assert_eq!(std::fs::read_to_string(lease_on("local")).unwrap(), generation(9));
    let kill_filter = || {
        let filters = here.processes_of(VM, "vmseal-filter").unwrap();
        assert!(!filters.is_empty(), "its disks are served");
        filters.into_iter().for_each(kill_hard);
    };
    count(&mut console);
    kill_filter();
    here.wait_alarm(VM, "filter-restarted").unwrap();
    stop_counting(&mut console);
    read_marker(&mut console);
    // As another host does that gets the VM.
    std::fs::write(lease_on("local"), generation(10)).unwrap();
    kill_filter();
    here.wait_power(VM, "off").unwrap();
    drop(console);
    here.vmseal(&["vm", "start", VM]).unwrap();
    read_marker(&mut booted(&here, VM).unwrap());
    // The disk takes it along.
    move_first("second");
    assert_eq!(std::fs::read_to_string(lease_on("second")).unwrap(), generation(10));
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}
