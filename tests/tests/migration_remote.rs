//! A VM that moves, while it runs, is off or suspended, to a host of another control plane: it loses nothing of what it had in memory
//! and on its disks and in its TPM, is under a key of the other control plane's provider there, with its snapshots and the memory that
//! they keep, and nothing of it is left where it was.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::{Path, PathBuf};

use vmseal_tests::counting_guest::{
    MARKER, SECRET, count, read_marker, read_marker_of_disk, started, stop_counting, write_marker,
};
use vmseal_tests::eventually;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{self, booted, run};
use vmseal_tests::tpm_guest::{self, DONE, ask, define, extend, keeps, measured, write};

const VM: &str = "web";

/// A text that the guest has in its memory alone: typed in two parts, so that no log has it.
const IN_MEMORY: (&str, &str) = ("MARKER-OF-", "THE-MEMORY-2097");

/// The user ids of the guests of the second control plane's host.
const UID_BASE: &str = "2300000";

/// A guest that counts on its disk, and another control plane with a host of its own, which the first one knows as `east`.
fn two_control_planes(policy: &str) -> (Installation, Installation) {
    let (west, mut console) = started(VM, policy);
    let (one, two) = IN_MEMORY;
    run(&mut console, &format!("m={one}; m=${{m}}{two}; echo SET-$((6 * 7))"), "SET-42").unwrap();
    count(&mut console);
    (west, other_control_plane())
}

/// A control plane whose host has other users for its guests.
pub(crate) fn other_control_plane() -> Installation {
    let mut east = Installation::new().unwrap();
    restart_agent(&mut east);
    east
}

/// The agent of that control plane's host dies, and another one starts.
fn restart_agent(east: &mut Installation) {
    east.kill_agent();
    east.start_agent_with(&["--uid-base", UID_BASE]).unwrap();
}

/// Has the first control plane know the second one; a user compares the fingerprint.
pub(crate) fn introduce(west: &Installation, east: &Installation) {
    let (url, token) = (east.url(), east.path("server/admin.token"));
    let add = ["remote", "add", "east", &url, "--remote-token-file", text(&token).unwrap()];
    let refused = west.refused(&add).unwrap();
    assert!(refused.contains("SHA-256") && refused.contains("--fingerprint"), "{refused}");
    let other = "AB".repeat(32);
    let wrong = [&add[..], &["--fingerprint", &other]].concat();
    let refused = west.refused(&wrong).unwrap();
    assert!(refused.contains("it is another control plane, or somebody is between"), "{refused}");
    let no = west.answered(&add, "no\n").unwrap();
    assert!(!no.status.success());
    assert_eq!(west.json(&["remote", "list"]).unwrap().as_array().unwrap().len(), 0);
    let yes = west.answered(&add, "yes\n").unwrap();
    assert!(yes.status.success(), "{}", String::from_utf8_lossy(&yes.stderr));
    let checked = west.vmseal(&["remote", "check", "east"]).unwrap();
    assert!(checked.contains("takes VMs"), "{checked}");
}

fn files(home: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(home).unwrap().map(|entry| entry.unwrap().path());
    // What a TPM keeps is in a directory.
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

fn has_marker(file: &Path) -> bool {
    let bytes = std::fs::read(file).unwrap();
    contains(&bytes, MARKER) || contains(&bytes, SECRET) || contains(&bytes, tpm_guest::MARKER)
}

/// The guest has what it had, and goes on counting.
fn has_lost_nothing(at: &Installation) {
    let mut console = at.console(VM).unwrap();
    stop_counting(&mut console);
    let (one, two) = IN_MEMORY;
    run(&mut console, "echo HAS-$m-", &format!("HAS-{one}{two}-")).unwrap();
    read_marker(&mut console);
    count(&mut console);
}

/// What people see of its snapshots.
fn listed(at: &Installation) -> String {
    let mut listed = at.json(&["snapshot", "list", VM]).unwrap();
    for snapshot in listed.as_array_mut().unwrap() {
        // What it takes on the datastore is measured.
        snapshot.as_object_mut().unwrap().retain(|key, _| !key.contains("size"));
    }
    listed.to_string()
}

/// The VM runs at one control plane, and nothing of it is left at the other one.
fn has_gone(from: &Installation, to: &Installation, encrypted: bool) {
    is_there(from, to, "running", encrypted);
}

/// The VM is so at one control plane, and nothing of it is left at the other one.
fn is_there(from: &Installation, to: &Installation, power: &str, encrypted: bool) {
    let vm = to.vm(VM).unwrap();
    assert_eq!(vm["power"], power, "{vm}");
    let refused = from.refused(&["vm", "show", VM]).unwrap();
    assert!(refused.contains("not exist") || refused.contains("no VM"), "{refused}");
    let left = || from.datastore_entries(&from.path("datastore")).ok();
    eventually("no file is left where it was", || left().filter(Vec::is_empty).map(drop))
        .unwrap_or_else(|error| panic!("{error}: {:?}", left()));
    let home = to.path("datastore").join(vm["id"].as_str().unwrap());
    let clear = files(&home).into_iter().filter(|path| has_marker(path)).count();
    assert_eq!(clear == 0, encrypted, "{clear} files have what the guest wrote");
}

#[test]
fn a_guest_goes_to_another_control_plane_with_its_disks_and_back() {
    let (west, east) = two_control_planes("encrypted");
    west.vmseal(&["snapshot", "create", VM, "fresh"]).unwrap();
    west.vmseal(&["snapshot", "create", VM, "asleep", "--memory"]).unwrap();
    let snapshots = listed(&west);
    let refused = west.refused(&["vm", "migrate", VM, "--remote", "east"]).unwrap();
    assert!(refused.contains("east"), "{refused}");
    introduce(&west, &east);
    let migrate = ["vm", "migrate", VM, "--remote", "east"];
    let wrong = [&migrate[..], &["--policy", "plain"]].concat();
    let refused = west.refused(&wrong).unwrap();
    assert!(refused.contains("no: policy") && refused.contains("ok: name"), "{refused}");
    let planned = west.vmseal(&[&migrate[..], &["--dry-run"]].concat()).unwrap();
    let kept = "and what 2 snapshots keep (";
    let counted = "ok: snapshots: 2 snapshots come with it, 1 with memory: ";
    let with = "in all with what snapshots keep";
    let others = ["ok: memory of host 'here'", "ok: network", "a new key of provider 'keys'"];
    for wanted in others.into_iter().chain([kept, counted, with]) {
        assert!(planned.contains(wanted), "{wanted}: {planned}");
    }
    assert!(east.refused(&["vm", "show", VM]).is_ok(), "a dry run leaves nothing");
    let task = west.json(&migrate).unwrap();
    has_gone(&west, &east, true);
    has_lost_nothing(&east);
    let placed = task["migrated"]["placed"].as_u64();
    assert!(placed.is_some_and(|bytes| bytes > 0), "QEMU has loaded the memory there: {task:#}");
    let told = west.vmseal(&["events"]).unwrap();
    assert!(told.contains("to remote 'east', encrypted"), "{told}");

    // What its snapshots keep is under that key as well: the guest goes on from the memory of one.
    assert_eq!(listed(&east), snapshots);
    east.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    east.vmseal(&["snapshot", "revert", VM, "asleep"]).unwrap();
    east.wait_power(VM, "suspended").unwrap();
    east.vmseal(&["vm", "resume", VM]).unwrap();
    has_lost_nothing(&east);

    // The copies are its disks under a key of that control plane, also for the next guest.
    east.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    east.vmseal(&["vm", "prove", VM]).unwrap();
    east.vmseal(&["vm", "start", VM]).unwrap();
    read_marker(&mut booted(&east, VM).unwrap());

    // And back: the name and the ids are free again there.
    let (url, token) = (west.url(), west.path("server/admin.token"));
    let add = ["remote", "add", "west", &url, "--remote-token-file", text(&token).unwrap()];
    assert!(east.answered(&add, "yes\n").unwrap().status.success());
    east.vmseal(&["vm", "migrate", VM, "here", "--remote", "west", "--datastore", "local"])
        .unwrap();
    has_gone(&east, &west, true);
    assert_eq!(listed(&west), snapshots);
    read_marker(&mut west.console(VM).unwrap());
}

/// Its memory is under the key of the other control plane as it arrives, and its guest goes on from it.
#[test]
fn a_vm_that_is_suspended_goes_there_with_its_memory_and_goes_on_there() {
    let (west, east) = two_control_planes("encrypted");
    introduce(&west, &east);
    west.vmseal(&["snapshot", "create", VM, "asleep", "--memory"]).unwrap();
    west.vmseal(&["vm", "suspend", VM]).unwrap();
    west.wait_power(VM, "suspended").unwrap();
    let snapshots = listed(&west);
    let migrate = ["vm", "migrate", VM, "--remote", "east"];
    let planned = west.try_vmseal(&[&migrate[..], &["--dry-run"]].concat()).unwrap();
    let warned = String::from_utf8_lossy(&planned.stderr);
    assert!(warned.contains("the memory of its guest are sent, and it is suspended"), "{warned}");
    let told = String::from_utf8_lossy(&planned.stdout);
    let named = told.contains("ok: saved memory: ") && told.contains(" and its saved memory (");
    assert!(named && !told.contains("not counted"), "{told}");
    west.vmseal(&migrate).unwrap();
    is_there(&west, &east, "suspended", true);
    let told = west.vmseal(&["events"]).unwrap();
    assert!(told.contains("encrypted, while it was suspended"), "{told}");
    assert_eq!(listed(&east), snapshots);
    let home = east.path("datastore").join(east.vm(VM).unwrap()["id"].as_str().unwrap());
    let (one, two) = IN_MEMORY;
    let text = format!("{one}{two}").into_bytes();
    let in_the_clear = |file: &PathBuf| contains(&std::fs::read(file).unwrap(), &text);
    assert!(!files(&home).iter().any(in_the_clear), "its memory is in the clear");
    east.vmseal(&["vm", "resume", VM]).unwrap();
    has_lost_nothing(&east);
    // The memory of the snapshot was not put in its place, and is there.
    east.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    east.vmseal(&["snapshot", "revert", VM, "asleep"]).unwrap();
    east.wait_power(VM, "suspended").unwrap();
    east.vmseal(&["vm", "resume", VM]).unwrap();
    has_lost_nothing(&east);
}

/// What its TPM keeps comes under the key of a disk that is made there. The agent there dies when it has just come: nothing is left of it.
#[test]
fn what_a_tpm_keeps_goes_there_with_a_vm_that_is_off_or_suspended() {
    let (west, mut east) = (Installation::new().unwrap(), other_control_plane());
    introduce(&west, &east);
    tpm_guest::create(&west, VM, &[]);
    let mut guest = tpm_guest::start(&west, VM);
    assert_eq!(ask(&mut guest, &define(), 20), DONE);
    assert_eq!(ask(&mut guest, &write(), 20), DONE);
    drop(guest);
    west.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    let state = |at: &Installation| {
        let all = at.datastore_entries(&at.path("datastore")).ok()?;
        let state = all.iter().find(|path| path.ends_with("tpm2-00.permall"))?;
        std::fs::read(state).ok()
    };
    let at_west = state(&west).unwrap();

    let migrate = ["vm", "migrate", VM, "--remote", "east"];
    let task = west.json(&[&migrate[..], &["--rate", "1M", "--no-wait"]].concat()).unwrap();
    let task = task["id"].as_str().unwrap().to_owned();
    eventually("what its TPM keeps has come", || state(&east).map(drop)).unwrap();
    let refused = east.refused(&["vm", "start", VM]).unwrap();
    assert!(refused.contains("is not made yet"), "{refused}");
    restart_agent(&mut east);
    // It begins again, unless it has failed.
    west.try_vmseal(&["task", "cancel", &task]).unwrap();
    assert!(!west.try_vmseal(&["task", "wait", &task]).unwrap().status.success());
    let left = || east.datastore_entries(&east.path("datastore")).ok();
    eventually("nothing is left there", || left().filter(Vec::is_empty).map(drop))
        .unwrap_or_else(|error| panic!("{error}: {:?}", left()));
    eventually("it is forgotten there", || east.refused(&["vm", "show", VM]).ok()).unwrap();
    assert_eq!(west.vm(VM).unwrap()["power"], "off");

    let planned = west.try_vmseal(&[&migrate[..], &["--dry-run"]].concat()).unwrap();
    let warned = String::from_utf8_lossy(&planned.stderr);
    assert!(
        warned.contains("its disks and what its TPM keeps are sent, and it is off"),
        "{warned}"
    );
    west.vmseal(&migrate).unwrap();
    is_there(&west, &east, "off", true);
    assert!(state(&east).unwrap() != at_west, "it is under the key of its former disk");
    let mut guest = tpm_guest::start(&east, VM);
    keeps(&mut guest);
    assert_eq!(ask(&mut guest, &extend(), 20), DONE);
    let register = measured(&mut guest);
    drop(guest);

    // And back, with what it has measured, which is in the memory.
    east.vmseal(&["vm", "suspend", VM]).unwrap();
    east.wait_power(VM, "suspended").unwrap();
    let (url, token) = (west.url(), west.path("server/admin.token"));
    let add = ["remote", "add", "west", &url, "--remote-token-file", text(&token).unwrap()];
    assert!(east.answered(&add, "yes\n").unwrap().status.success());
    east.vmseal(&["vm", "migrate", VM, "here", "--remote", "west"]).unwrap();
    is_there(&east, &west, "suspended", true);
    west.vmseal(&["vm", "resume", VM]).unwrap();
    let mut guest = west.console(VM).unwrap();
    keeps(&mut guest);
    assert_eq!(measured(&mut guest), register);
}

/// Each disk is there as it was: what the guest wrote to the one in the clear is readable in its image, and nothing else is.
#[test]
fn a_disk_in_the_clear_goes_there_as_it_is_and_back() {
    const SCRATCH: &str = "VMSEAL-SCRATCH-5";
    let (west, east) = (Installation::new().unwrap(), other_control_plane());
    introduce(&west, &east);
    let scratch = ["--disk", "name=scratch,datastore=local,size=16MiB,encrypted=no"];
    shell_guest::start(&west, VM, "encrypted", &scratch).unwrap();
    let mut console = booted(&west, VM).unwrap();
    write_marker(&mut console);
    let write = format!("echo {SCRATCH} >/dev/vdb; sync; echo WROTE-$((6 * 7))");
    run(&mut console, &write, "WROTE-42").unwrap();
    drop(console);
    let is_as_it_was = |at: &Installation| {
        let vm = at.vm(VM).unwrap();
        let disks = vm["disks"].as_array().unwrap();
        let are: Vec<_> = disks.iter().map(|disk| &disk["encrypted"]).collect();
        assert_eq!(are, [&true, &false], "{vm}");
        let images = at.images(VM).unwrap();
        let has_scratch = |image: &PathBuf| contains(&std::fs::read(image).unwrap(), SCRATCH);
        let readable: Vec<_> = images.iter().map(has_scratch).collect();
        assert_eq!(readable, [false, true], "{vm}");
    };
    let reads = |at: &Installation| {
        let mut console = at.console(VM).unwrap();
        read_marker_of_disk(&mut console);
        let read = "echo 3 >/proc/sys/vm/drop_caches; head -n 1 /dev/vdb";
        run(&mut console, read, SCRATCH).unwrap();
    };
    let migrate = ["vm", "migrate", VM, "--remote", "east"];
    let planned = west.vmseal(&[&migrate[..], &["--dry-run"]].concat()).unwrap();
    assert!(planned.contains("in the clear, as they are: disks 'scratch'"), "{planned}");
    west.vmseal(&migrate).unwrap();
    has_gone(&west, &east, true);
    is_as_it_was(&east);
    reads(&east);

    // And back, off.
    east.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    let (url, token) = (west.url(), west.path("server/admin.token"));
    let add = ["remote", "add", "west", &url, "--remote-token-file", text(&token).unwrap()];
    assert!(east.answered(&add, "yes\n").unwrap().status.success());
    east.vmseal(&["vm", "migrate", VM, "here", "--remote", "west"]).unwrap();
    is_there(&east, &west, "off", true);
    is_as_it_was(&west);
    west.vmseal(&["vm", "start", VM]).unwrap();
    drop(booted(&west, VM).unwrap());
    reads(&west);
}

/// The core dump that it has keeps it here until it is deleted; it can be decrypted before.
fn without_its_core_dump(west: &Installation, migrate: &[&str]) {
    for more in [&[][..], &["--dry-run"]] {
        let refused = west.refused(&[migrate, more].concat()).unwrap();
        assert!(refused.contains("('first')") && refused.contains("vmseal dump"), "{refused}");
    }
    let clear = west.path("core");
    west.vmseal(&["dump", "decrypt", VM, "first", "--to", text(&clear).unwrap()]).unwrap();
    let (one, two) = IN_MEMORY;
    assert!(contains(&std::fs::read(&clear).unwrap(), format!("{one}{two}").into_bytes()));
    std::fs::remove_file(&clear).unwrap();
    west.vmseal(&["dump", "delete", VM, "first"]).unwrap();
}

/// What has stayed where it was: its backup is listed, and another VM is made of it.
fn its_backup_opens_here(west: &Installation) {
    let listed = west.json(&["backup", "list", VM]).unwrap();
    let known: Vec<_> = listed.as_array().unwrap().iter().map(|it| &it["vm_deleted"]).collect();
    assert_eq!(known, [&true], "{listed}");
    west.vmseal(&["backup", "restore", VM, "one", "--as", "again"]).unwrap();
    west.vmseal(&["vm", "start", "again"]).unwrap();
    read_marker_of_disk(&mut booted(west, "again").unwrap());
    west.vmseal(&["vm", "stop", "again", "--force"]).unwrap();
    west.vmseal(&["vm", "delete", "again"]).unwrap();
    west.vmseal(&["backup", "delete", VM, "one"]).unwrap();
    let left = west.refused(&["backup", "list", VM]).unwrap();
    assert!(left.contains("no VM") || left.contains("not exist"), "{left}");
}

#[test]
fn a_vm_that_is_off_goes_there_with_its_snapshot_and_boots_there() {
    let (west, east) = two_control_planes("encrypted");
    introduce(&west, &east);
    west.vmseal(&["snapshot", "create", VM, "asleep", "--memory"]).unwrap();
    let backups = west.path("backups");
    std::fs::create_dir(&backups).unwrap();
    west.vmseal(&["backup", "create", VM, "one", "--to", text(&backups).unwrap()]).unwrap();
    west.vmseal(&["vm", "dump", VM, "first"]).unwrap();
    west.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    let snapshots = listed(&west);
    let migrate = ["vm", "migrate", VM, "--remote", "east"];
    without_its_core_dump(&west, &migrate);
    let planned = west.try_vmseal(&[&migrate[..], &["--dry-run"]].concat()).unwrap();
    let warned = String::from_utf8_lossy(&planned.stderr);
    assert!(warned.contains("its disks are sent, and it is off"), "{planned:?}");
    assert!(warned.contains("its backups stay in this inventory"), "{planned:?}");
    assert!(warned.contains("'one' under key '"), "{planned:?}");
    west.vmseal(&migrate).unwrap();
    is_there(&west, &east, "off", true);
    let told = west.vmseal(&["events"]).unwrap();
    assert!(told.contains("encrypted, while it was off"), "{told}");
    assert_eq!(listed(&east), snapshots);
    east.vmseal(&["vm", "prove", VM]).unwrap();
    east.vmseal(&["snapshot", "revert", VM, "asleep"]).unwrap();
    east.wait_power(VM, "suspended").unwrap();
    east.vmseal(&["vm", "resume", VM]).unwrap();
    has_lost_nothing(&east);
    east.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    east.vmseal(&["vm", "start", VM]).unwrap();
    read_marker(&mut booted(&east, VM).unwrap());
    its_backup_opens_here(&west);
    west.vmseal(&["remote", "remove", "east"]).unwrap();
    assert_eq!(west.json(&["remote", "list"]).unwrap().as_array().unwrap().len(), 0);
}
