//! VMs that are off or suspended and get another host, which has their datastore: they are started there, or go on with their memory.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::thread::sleep;
use std::time::Duration;

use vmseal_tests::counting_guest::{
    count, read_marker_of_disk, started_with_one_disk, stop_counting,
};
use vmseal_tests::guest::Console;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::shell_guest::{booted, run};
use vmseal_tests::two_hosts::{FILTER, HERE, QEMU, THERE, Victim, only_host, other, processes};

const VM: &str = "web";

/// A text that the guest has in its memory alone.
const KEPT: &str = "KEPT-IN-MEMORY-42";

/// A guest in an encrypted VM, and a second host.
fn started() -> (Installation, Console) {
    let (mut here, console) = started_with_one_disk(VM, "encrypted");
    here.add_host(THERE).unwrap();
    (here, console)
}

fn share(here: &Installation) {
    let store = here.path("datastore");
    here.vmseal(&["datastore", "share", "local", "--host", THERE, "--path", text(&store).unwrap()])
        .unwrap();
}

fn host_of(here: &Installation) -> String {
    here.vm(VM).unwrap()["host"].as_str().unwrap().to_owned()
}

fn power_of(here: &Installation) -> String {
    here.vm(VM).unwrap()["power"].as_str().unwrap().to_owned()
}

/// No host has a process of it.
fn nothing_runs(here: &Installation) {
    for host in [HERE, THERE] {
        for name in [QEMU, FILTER] {
            assert!(processes(here, host, name).is_empty(), "{name} on {host}");
        }
    }
}

#[test]
fn a_vm_that_is_off_is_started_at_its_new_host() {
    let (here, console) = started();
    drop(console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    // A host that does not have its datastore.
    let refused = here.refused(&["vm", "migrate", VM, THERE]).unwrap();
    assert!(refused.contains("does not have datastore 'local'"), "{refused}");
    assert!(refused.contains("vmseal vm move web --datastore"), "{refused}");
    // As it says: the disks move to a datastore that both hosts have.
    let second = here.path("second");
    std::fs::create_dir(&second).unwrap();
    let second = text(&second).unwrap();
    here.vmseal(&["datastore", "add", "second", "--host", HERE, "--path", second]).unwrap();
    here.vmseal(&["datastore", "share", "second", "--host", THERE]).unwrap();
    here.vmseal(&["vm", "move", VM, "--datastore", "second"]).unwrap();
    let planned = here.vmseal(&["vm", "migrate", VM, THERE, "--dry-run"]).unwrap();
    assert!(planned.contains("choose host 'there'; the VM is off"), "{planned}");
    assert_eq!(host_of(&here), HERE);
    // Without a host, the only other one is chosen.
    here.vmseal(&["vm", "migrate", VM]).unwrap();
    assert_eq!((host_of(&here), power_of(&here)), (THERE.to_owned(), "off".to_owned()));
    nothing_runs(&here);
    here.vmseal(&["vm", "start", VM]).unwrap();
    assert_eq!(only_host(&here, VM).unwrap(), THERE);
    read_marker_of_disk(&mut booted(&here, VM).unwrap());
    let events = here.vmseal(&["events", "-c", "kind,detail"]).unwrap();
    assert!(events.contains("from host 'here' to host 'there', while it was off"), "{events}");
}

#[test]
fn a_suspended_guest_goes_on_at_its_new_host() {
    let (here, mut console) = started();
    share(&here);
    run(&mut console, &format!("m={KEPT}; echo SET-$((6 * 7))"), "SET-42").unwrap();
    count(&mut console);
    drop(console);
    for host in [THERE, HERE] {
        here.vmseal(&["vm", "suspend", VM]).unwrap();
        let told = here.try_vmseal(&["vm", "migrate", VM, host, "--watch"]).unwrap();
        let lines = String::from_utf8_lossy(&told.stderr).into_owned();
        assert!(told.status.success() && lines.contains("vm.migrate web: done"), "{lines}");
        assert_eq!((host_of(&here), power_of(&here)), (host.to_owned(), "suspended".to_owned()));
        nothing_runs(&here);
        here.vmseal(&["vm", "resume", VM]).unwrap();
        assert_eq!(only_host(&here, VM).unwrap(), host);
        // It has gone on counting, with what it had in memory.
        let mut console = here.console(VM).unwrap();
        stop_counting(&mut console);
        run(&mut console, "echo HAS-$m-", &format!("HAS-{KEPT}-")).unwrap();
        read_marker_of_disk(&mut console);
        count(&mut console);
    }
}

#[test]
fn whatever_dies_meanwhile_the_vm_is_at_one_host_and_goes_on_there() {
    if !has_its_turn() {
        return;
    }
    let (mut here, console) = started();
    share(&here);
    drop(console);
    here.vmseal(&["vm", "suspend", VM]).unwrap();
    let mut random = fastrand::Rng::new();
    for victim in [Victim::Server, Victim::AgentOf(true), Victim::AgentOf(false)] {
        let source = host_of(&here);
        let task = here.json(&["vm", "migrate", VM, other(&source), "--no-wait"]).unwrap();
        let milliseconds = random.u64(0..60);
        sleep(Duration::from_millis(milliseconds));
        victim.kill(&mut here, &source);
        let _ = here.try_vmseal(&["task", "wait", task["id"].as_str().unwrap()]).unwrap();
        let host = host_of(&here);
        eprintln!("{victim:?} after {milliseconds} ms: from {source}, and it is at {host}");
        here.wait_power(VM, "suspended").unwrap();
        here.vmseal(&["vm", "resume", VM]).unwrap();
        assert_eq!(only_host(&here, VM).unwrap(), host);
        read_marker_of_disk(&mut here.console(VM).unwrap());
        here.vmseal(&["vm", "suspend", VM]).unwrap();
    }
}
