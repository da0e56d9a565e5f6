//! VMs with snapshots, and linked clones, that move while they run to a host that has none of their datastores: each snapshot keeps there
//! what it kept, its memory too, the guest loses nothing, and nothing is left where they were.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::{Path, PathBuf};

use vmseal_tests::counting_guest::{count, stop_counting};
use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{self, booted, run};
use vmseal_tests::two_hosts::{
    self, HERE, THERE, Victim, add_host_with_datastore, other, own_datastore, own_directory,
};

const VM: &str = "web";

/// A place of the guest's disks that its system does not use, in MiB from the beginning.
const TEXT_AT: u32 = 20;
const SYSTEM_TEXT_AT: u32 = 62;

/// Texts are typed in two parts, so that no log has them.
fn spoken(text: &str) -> String {
    let (one, two) = text.split_at(text.len() / 2);
    format!("{one}''{two}")
}

/// The guest writes a text to both of its disks, and has it in its memory.
fn write(console: &mut Console, text: &str) {
    let to = |disk: &str, at: u32| {
        format!("echo $m | dd of=/dev/{disk} bs=1M seek={at} conv=notrunc,fsync 2>/dev/null")
    };
    let both = format!("{}; {}", to("vda", SYSTEM_TEXT_AT), to("vdb", TEXT_AT));
    run(console, &format!("m={}; {both}; echo WROTE-$((6 * 7))", spoken(text)), "WROTE-42")
        .unwrap();
}

/// The guest reads this text from both of its disks.
fn reads(console: &mut Console, text: &str) {
    run(console, "echo 3 >/proc/sys/vm/drop_caches; echo DROPPED-$((6 * 7))", "DROPPED-42")
        .unwrap();
    for (disk, at) in [("vda", SYSTEM_TEXT_AT), ("vdb", TEXT_AT)] {
        let read = format!("$(dd if=/dev/{disk} bs=1M skip={at} count=1 2>/dev/null | head -n 1)");
        run(console, &format!("echo READ-{disk}-{read}-"), &format!("READ-{disk}-{text}-"))
            .unwrap();
    }
}

/// The guest has this text in its memory.
fn remembers(console: &mut Console, text: &str) {
    run(console, "echo HAS-$m-", &format!("HAS-{text}-")).unwrap();
}

/// A guest with two disks and two snapshots, one of them with memory, that has written since and counts; and a second host with a
/// datastore of its own.
fn with_snapshots(policy: &str) -> Installation {
    let mut here = Installation::new().unwrap();
    let disks = ["--disk", "name=data,datastore=local,size=64MiB"];
    shell_guest::start(&here, VM, policy, &disks).unwrap();
    let mut console = booted(&here, VM).unwrap();
    write(&mut console, "TEXT-OF-ONE");
    here.vmseal(&["snapshot", "create", VM, "one"]).unwrap();
    write(&mut console, "TEXT-OF-TWO");
    here.vmseal(&["snapshot", "create", VM, "asleep", "--memory"]).unwrap();
    write(&mut console, "TEXT-OF-NOW");
    add_host_with_datastore(&mut here).unwrap();
    count(&mut console);
    here
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

fn files(home: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(home).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// The VM runs on this host alone, with all of its files on that host's datastore, nothing half made among them, and nothing of it is
/// left on the other's.
fn is_on(here: &Installation, host: &str, encrypted: bool) {
    assert_eq!(two_hosts::only_host(here, VM).unwrap(), host);
    let vm = here.vm(VM).unwrap();
    for disk in vm["disks"].as_array().unwrap() {
        assert_eq!(disk["datastore"], own_datastore(host), "{vm}");
        assert_eq!(disk["encrypted"], encrypted, "{vm}");
    }
    let home = own_directory(here, other(host)).join(vm["id"].as_str().unwrap());
    eventually("nothing is left at the other host", || (!home.exists()).then_some(()))
        .unwrap_or_else(|error| panic!("{error}: {:?}", files(&home)));
    let home = own_directory(here, host).join(vm["id"].as_str().unwrap());
    let half_made = ["creating", "copy", "source", ".new", "arriving", "base"];
    let left = files(&home).into_iter().map(|path| name(&path));
    let left: Vec<_> = left.filter(|name| half_made.iter().any(|it| name.contains(it))).collect();
    assert_eq!(left, Vec::<String>::new());
    let has = |file: &PathBuf| {
        let bytes = std::fs::read(file).unwrap();
        contains(&bytes, b"TEXT-OF")
    };
    let clear = files(&home).iter().filter(|file| has(file)).count();
    assert_eq!(clear == 0, encrypted, "{clear} files have what the guest wrote");
}

/// The guest goes on, and has what it had.
fn has_lost_nothing(here: &Installation, text: &str) {
    let mut console = here.console(VM).unwrap();
    stop_counting(&mut console);
    remembers(&mut console, text);
    reads(&mut console, text);
    count(&mut console);
}

/// What people see of the snapshots.
fn listed(here: &Installation) -> String {
    let mut listed = here.json(&["snapshot", "list", VM]).unwrap();
    for snapshot in listed.as_array_mut().unwrap() {
        // What it takes on the datastore is measured.
        snapshot.as_object_mut().unwrap().retain(|key, _| !key.contains("size"));
    }
    listed.to_string()
}

/// Each snapshot has what it kept, its memory too.
fn reverts(here: &Installation) {
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["snapshot", "revert", VM, "one"]).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    reads(&mut booted(here, VM).unwrap(), "TEXT-OF-ONE");
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["snapshot", "revert", VM, "asleep"]).unwrap();
    here.wait_power(VM, "suspended").unwrap();
    here.vmseal(&["vm", "resume", VM]).unwrap();
    let mut console = here.console(VM).unwrap();
    remembers(&mut console, "TEXT-OF-TWO");
    reads(&mut console, "TEXT-OF-TWO");
    count(&mut console);
}

#[test]
fn a_guest_moves_with_its_snapshots_and_their_memory_and_each_is_reverted_to_at_the_other_host() {
    let here = with_snapshots("encrypted");
    let before = listed(&here);
    let planned = here.vmseal(&["vm", "migrate", VM, THERE, "--dry-run"]).unwrap();
    assert!(planned.contains("and what 2 snapshots keep ("), "{planned}");
    here.vmseal(&["vm", "migrate", VM, THERE]).unwrap();
    is_on(&here, THERE, true);
    has_lost_nothing(&here, "TEXT-OF-NOW");
    assert_eq!(listed(&here), before);
    reverts(&here);
    // The guest has branched off since, and moves back with all of that.
    here.vmseal(&["vm", "migrate", VM, HERE]).unwrap();
    is_on(&here, HERE, true);
    has_lost_nothing(&here, "TEXT-OF-TWO");
    here.vmseal(&["snapshot", "delete", VM, "one"]).unwrap();
    here.vmseal(&["snapshot", "delete", VM, "asleep"]).unwrap();
    has_lost_nothing(&here, "TEXT-OF-TWO");
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "prove", VM]).unwrap();
}

#[test]
fn a_guest_that_is_not_encrypted_moves_with_its_snapshots_as_well() {
    if !has_its_turn() {
        return;
    }
    let here = with_snapshots("plain");
    here.vmseal(&["vm", "migrate", VM, THERE]).unwrap();
    is_on(&here, THERE, false);
    has_lost_nothing(&here, "TEXT-OF-NOW");
    reverts(&here);
}

#[test]
fn a_linked_clone_moves_as_a_vm_of_its_own_and_what_it_stood_on_stays() {
    let here = with_snapshots("encrypted");
    // What it stands on is an image and a layer.
    let clone = ["vm", "clone", VM, "clone", "--linked", "--snapshot", "asleep"];
    here.vmseal(&clone).unwrap();
    let refused = here.refused(&["vm", "migrate", VM, THERE]).unwrap();
    assert!(refused.contains("linked clones stand on VM 'web': 'clone'"), "{refused}");
    has_lost_nothing(&here, "TEXT-OF-NOW");
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();

    here.vmseal(&["vm", "start", "clone"]).unwrap();
    let mut console = booted(&here, "clone").unwrap();
    reads(&mut console, "TEXT-OF-TWO");
    write(&mut console, "TEXT-OF-THE-CLONE");
    let planned = here.try_vmseal(&["vm", "migrate", "clone", THERE, "--dry-run"]).unwrap();
    let warned = String::from_utf8(planned.stderr).unwrap();
    assert!(warned.contains("become disks of their own"), "{warned}");
    drop(console);
    here.vmseal(&["vm", "migrate", "clone", THERE]).unwrap();
    let mut console = here.console("clone").unwrap();
    remembers(&mut console, "TEXT-OF-THE-CLONE");
    reads(&mut console, "TEXT-OF-THE-CLONE");
    drop(console);
    let shown = here.vm("clone").unwrap();
    assert_eq!(shown["host"], THERE);
    let home = own_directory(&here, THERE).join(shown["id"].as_str().unwrap());
    let base = files(&home).into_iter().filter(|path| name(path).contains(".base"));
    assert_eq!(base.collect::<Vec<_>>(), Vec::<PathBuf>::new());
    here.vmseal(&["vm", "stop", "clone", "--force"]).unwrap();
    here.vmseal(&["vm", "start", "clone"]).unwrap();
    reads(&mut booted(&here, "clone").unwrap(), "TEXT-OF-THE-CLONE");
    here.vmseal(&["vm", "stop", "clone", "--force"]).unwrap();
    here.vmseal(&["vm", "prove", "clone"]).unwrap();

    // Nothing stands on the other VM's snapshots any more.
    here.vmseal(&["snapshot", "revert", VM, "one"]).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    reads(&mut booted(&here, VM).unwrap(), "TEXT-OF-ONE");
    here.vmseal(&["snapshot", "delete", VM, "asleep"]).unwrap();
    here.vmseal(&["vm", "migrate", VM, THERE]).unwrap();
    is_on(&here, THERE, true);
}

#[test]
fn cancelled_while_snapshots_are_copied_it_stays_and_no_process_and_no_file_is_left() {
    if !has_its_turn() {
        return;
    }
    let here = with_snapshots("encrypted");
    let slowly = ["vm", "migrate", VM, THERE, "--rate", "8M", "--no-wait"];
    let task = here.json(&slowly).unwrap();
    let filters = || two_hosts::processes(&here, HERE, two_hosts::FILTER).len();
    eventually("a file is copied beside the guest", || (filters() == 2).then_some(())).unwrap();
    here.vmseal(&["task", "cancel", task["id"].as_str().unwrap()]).unwrap();
    let _ = here.try_vmseal(&["task", "wait", task["id"].as_str().unwrap()]).unwrap();
    eventually("no filter copies", || (filters() == 1).then_some(())).unwrap();
    is_on(&here, HERE, true);
    has_lost_nothing(&here, "TEXT-OF-NOW");
}

#[test]
fn whatever_dies_while_snapshots_are_copied_nothing_is_lost_and_nothing_is_left() {
    if !has_its_turn() {
        return;
    }
    let mut here = with_snapshots("encrypted");
    let before = listed(&here);
    let starts = |here: &Installation| {
        here.vmseal(&["vm", "start", VM]).unwrap();
        let mut console = booted(here, VM).unwrap();
        write(&mut console, "TEXT-OF-NOW");
        count(&mut console);
    };
    let victims = (&Victim::OF_ANY_VM[..], 4000);
    two_hosts::move_while_processes_die(&mut here, VM, victims, starts, |here, host| {
        is_on(here, host, true);
        has_lost_nothing(here, "TEXT-OF-NOW");
        assert_eq!(listed(here), before);
    });
    reverts(&here);
}
