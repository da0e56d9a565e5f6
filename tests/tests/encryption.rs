//! A VM is encrypted, rekeyed and decrypted while its guest writes, and loses nothing: not when the agent, the filter or the
//! server dies meanwhile, nor when the guest is stopped.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use vmseal_api::filter::{BITMAP_GRANULE, ControlReply, ControlRequest, DiskStatus};
use vmseal_api::pace::CopyPace;
use vmseal_tests::counting_guest::{
    COUNTER_AT, MARKER, SECRET, count, read_marker, started, stop_counting,
};
use vmseal_tests::eventually;
use vmseal_tests::firmware_shell::{self, has_variable, set_variable};
use vmseal_tests::guest::Console;
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::{
    Victim, console_again, during, has_its_turn, some_of, while_the_guest_dies,
};
use vmseal_tests::process::kill_hard;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{booted, run};

const VM: &str = "web";

/// The files beside the VM's disks in which the marker can be read.
fn in_the_clear(here: &Installation) -> Vec<PathBuf> {
    let images = here.images(VM).unwrap();
    let home = images[0].parent().unwrap();
    let files = std::fs::read_dir(home).unwrap().map(|entry| entry.unwrap().path());
    let has_marker = |file: &PathBuf| {
        let bytes = std::fs::read(file).unwrap();
        contains(&bytes, MARKER) || contains(&bytes, SECRET)
    };
    files.filter(has_marker).collect()
}

/// What belongs to a copy, or to what a disk was before.
fn left_over(here: &Installation) -> Vec<PathBuf> {
    let images = here.images(VM).unwrap();
    let home = images[0].parent().unwrap();
    let files = std::fs::read_dir(home).unwrap().map(|entry| entry.unwrap().path());
    let of_copies = ["copy", "mirror", "mirror-map", "source"];
    files
        .filter(|file| file.extension().is_some_and(|it| of_copies.iter().any(|of| it == *of)))
        .collect()
}

fn is_encrypted(here: &Installation, encrypted: bool) {
    let vm = here.vm(VM).unwrap();
    for disk in vm["disks"].as_array().unwrap() {
        assert_eq!(disk["encrypted"], encrypted, "{vm}");
        assert_eq!(disk["facts"]["format"], if encrypted { "luks2" } else { "raw" }, "{vm}");
    }
    assert_eq!(vm["policy"], if encrypted { "encrypted" } else { "plain" });
    assert_eq!(vm.get("key").is_some(), encrypted, "{vm}");
    assert_eq!(in_the_clear(here).is_empty(), encrypted, "{:?}", in_the_clear(here));
    assert_eq!(left_over(here), Vec::<PathBuf>::new());
}

#[test]
fn a_running_vm_is_encrypted_rekeyed_and_decrypted() {
    let (here, mut console) = started(VM, "plain");
    is_encrypted(&here, false);
    assert_eq!(in_the_clear(&here).len(), 2, "the markers are not searched for well");
    let planned =
        here.vmseal(&["vm", "encrypt", VM, "--policy", "encrypted", "--dry-run"]).unwrap();
    assert!(planned.contains("copy"), "{planned}");
    is_encrypted(&here, false);
    count(&mut console);
    let said = here.try_vmseal(&["vm", "encrypt", VM, "--policy", "encrypted"]).unwrap();
    let said = String::from_utf8(said.stderr).unwrap();
    assert!(said.contains("overwritten with zeroes once"), "{said}");
    stop_counting(&mut console);
    read_marker(&mut console);
    is_encrypted(&here, true);
    let header = |here: &Installation| {
        std::fs::read(&here.images(VM).unwrap()[0]).unwrap()[..16 << 20].to_vec()
    };
    let before = header(&here);
    count(&mut console);
    here.vmseal(&["vm", "recrypt", VM, "--deep"]).unwrap();
    stop_counting(&mut console);
    read_marker(&mut console);
    is_encrypted(&here, true);
    assert!(header(&here) != before, "it has the same data key");
    // The guest is started anew from what is there now.
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    drop(console);
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(&here, VM).unwrap();
    read_marker(&mut console);
    count(&mut console);
    here.vmseal(&["vm", "decrypt", VM, "--policy", "plain", "--yes"]).unwrap();
    stop_counting(&mut console);
    read_marker(&mut console);
    is_encrypted(&here, false);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    // The same while it is off.
    here.vmseal(&["vm", "encrypt", VM, "--policy", "encrypted"]).unwrap();
    is_encrypted(&here, true);
    let second = "datastore=local,size=16MiB,name=second";
    here.vmseal(&["disk", "add", VM, "--disk", second]).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    drop(console);
    let mut console = booted(&here, VM).unwrap();
    read_marker(&mut console);
    one_disk_alone(&here, &mut console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    is_encrypted(&here, true);
}

/// The disk that the guest writes is decrypted and encrypted again, and others of the VM are not.
fn one_disk_alone(here: &Installation, console: &mut Console) {
    let disk = here.vm(VM).unwrap()["disks"][0]["name"].as_str().unwrap().to_owned();
    let key = |here: &Installation| here.vm(VM).unwrap()["key"].clone();
    let before = key(here);
    count(console);
    here.vmseal(&["vm", "decrypt", VM, "--disk", &disk, "--yes"]).unwrap();
    stop_counting(console);
    read_marker(console);
    let vm = here.vm(VM).unwrap();
    for known in vm["disks"].as_array().unwrap() {
        assert_eq!(known["encrypted"], known["name"] != disk, "{vm}");
    }
    assert_eq!(vm["disks_in_the_clear"], serde_json::json!([disk]), "{vm}");
    assert_eq!((&vm["policy"], &vm["key"]), (&serde_json::json!("encrypted"), &before), "{vm}");
    assert_eq!(in_the_clear(here).len(), 1, "{:?}", in_the_clear(here));
    assert!(!here.try_vmseal(&["vm", "prove", VM]).unwrap().status.success(), "all is encrypted");
    here.vmseal(&["vm", "recrypt", VM]).unwrap();
    assert_ne!(key(here), before);
    count(console);
    here.vmseal(&["vm", "encrypt", VM, "--disk", &disk]).unwrap();
    stop_counting(console);
    read_marker(console);
}

/// The guest writes to the part of its disk that one bit of a dirty bitmap stands for: the one with this number, counted from where
/// `count` writes.
fn write_part(console: &mut Console, number: u64) {
    let at = (u64::from(COUNTER_AT) << 20) / BITMAP_GRANULE + number;
    let to = format!("of=/dev/vda bs={BITMAP_GRANULE} seek={at} count=1 conv=notrunc,fsync");
    let write = format!("dd if=/dev/urandom {to} 2>/dev/null; echo CHANGED-$((6 * 7))");
    run(console, &write, "CHANGED-42").unwrap();
}

/// The one dirty bitmap of a disk notes so many of these parts, and nothing else.
fn notes(here: &Installation, disk: &str, changed: u64) {
    let bitmaps = here.json(&["disk", "bitmap", "list", VM, disk]).unwrap();
    let dirty = bitmaps[0]["dirty_bytes"].as_u64();
    assert_eq!(dirty, Some(changed * BITMAP_GRANULE), "what has changed: {bitmaps}");
}

/// Disks are copied, and pivot, by the filter that serves them, which keeps what their dirty bitmaps note: one that the guest writes, and
/// that of cloud-init, which it only reads; and where the agent dies meanwhile, too.
#[test]
fn a_running_vm_is_encrypted_and_decrypted_by_the_filter_that_serves_it() {
    let (mut here, mut console) = started(VM, "plain");
    let filter = here.processes_of(VM, "vmseal-filter").unwrap();
    let disk = here.vm(VM).unwrap()["disks"][0]["name"].as_str().unwrap().to_owned();
    here.vmseal(&["disk", "bitmap", "add", VM, &disk, "since"]).unwrap();
    // The numbers alone, which are in this part, would be noted again after a pivot.
    write_part(&mut console, 0);
    let mut changed = 1;
    let encrypt = &["vm", "encrypt", VM, "--policy", "encrypted"][..];
    let decrypt = &["vm", "decrypt", VM, "--policy", "plain", "--yes"][..];
    for (change, encrypted) in
        [(encrypt, true), (&["vm", "recrypt", VM, "--deep"][..], true), (decrypt, false)]
    {
        write_part(&mut console, changed);
        changed += 1;
        count(&mut console);
        here.vmseal(change).unwrap();
        stop_counting(&mut console);
        read_marker(&mut console);
        is_encrypted(&here, encrypted);
        assert_eq!(here.processes_of(VM, "vmseal-filter").unwrap(), filter, "it was restarted");
        notes(&here, &disk, changed);
    }
    // By what serves the disk now, too.
    write_part(&mut console, changed);
    notes(&here, &disk, changed + 1);
    here.vmseal(&["disk", "bitmap", "remove", VM, &disk, "since"]).unwrap();
    // While the guest is paused, too.
    for (change, encrypted) in [(encrypt, true), (decrypt, false)] {
        count(&mut console);
        here.vmseal(&["vm", "pause", VM]).unwrap();
        here.vmseal(change).unwrap();
        here.vmseal(&["snapshot", "create", VM, "paused"]).unwrap();
        here.vmseal(&["snapshot", "delete", VM, "paused"]).unwrap();
        assert_eq!(here.vm(VM).unwrap()["power"], "paused");
        here.vmseal(&["vm", "unpause", VM]).unwrap();
        stop_counting(&mut console);
        read_marker(&mut console);
        is_encrypted(&here, encrypted);
        assert_eq!(here.processes_of(VM, "vmseal-filter").unwrap(), filter, "it was restarted");
    }
    let mut encrypted = false;
    for milliseconds in some_of(&[30, 100, 170, 240, 310, 400]) {
        count(&mut console);
        let change = if encrypted { decrypt } else { encrypt };
        let ended = during(&mut here, VM, change, Victim::Agent, milliseconds);
        if ended.status.success() {
            encrypted = !encrypted;
        }
        console = console_again(&here, VM, console);
        stop_counting(&mut console);
        read_marker(&mut console);
        is_encrypted(&here, encrypted);
    }
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    // What its copy is read from then is a cache of its own.
    for policy in ["plain", "encrypted"] {
        here.vmseal(&["policy", "set", policy, "--cache", "4MiB"]).unwrap();
    }
    here.vmseal(&["vm", "start", VM]).unwrap();
    drop(console);
    let mut console = booted(&here, VM).unwrap();
    let filter = here.processes_of(VM, "vmseal-filter").unwrap();
    for _ in 0..2 {
        encrypted = !encrypted;
        read_marker(&mut console);
        count(&mut console);
        here.vmseal(if encrypted { encrypt } else { decrypt }).unwrap();
        stop_counting(&mut console);
        read_marker(&mut console);
        is_encrypted(&here, encrypted);
        assert_eq!(here.processes_of(VM, "vmseal-filter").unwrap(), filter, "it was restarted");
    }
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

/// The key of a VM changes while its guest writes, also where an agent, filter or server dies meanwhile: the guest goes on,
/// and the disk opens with the new key alone.
#[test]
fn a_vm_that_runs_gets_a_new_key_whatever_dies_meanwhile() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut console) = started(VM, "encrypted");
    let key = |here: &Installation| here.vm(VM).unwrap()["key"]["key_id"].clone();
    let mut before = key(&here);
    count(&mut console);
    here.vmseal(&["vm", "recrypt", VM]).unwrap();
    assert_ne!(key(&here), before);
    for (round, milliseconds) in some_of(&[0, 20, 50, 80, 120, 200]).into_iter().enumerate() {
        before = key(&here);
        let victim = Victim::of_round(round);
        let ended = during(&mut here, VM, &["vm", "recrypt", VM], victim, milliseconds);
        assert_eq!(ended.status.success(), key(&here) != before, "{ended:?}");
    }
    let mut console = console_again(&here, VM, console);
    stop_counting(&mut console);
    read_marker(&mut console);
    is_encrypted(&here, true);
    // From here on the new key alone opens what is on the datastore.
    here.vmseal(&["vm", "recrypt", VM]).unwrap();
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    drop(console);
    read_marker(&mut booted(&here, VM).unwrap());
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

/// What a firmware keeps is encrypted with the rest.
#[test]
fn a_vm_with_uefi_is_encrypted_with_its_variables() {
    if !has_its_turn() {
        return;
    }
    let here = Installation::new().unwrap();
    let disk = "datastore=local,size=16MiB";
    let create = ["vm", "create", VM, "--policy", "plain", "--firmware", "uefi", "--disk", disk];
    here.vmseal(&create).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    // The firmware has written its variables when it finds nothing to start.
    let mut guest = firmware_shell::open(&here, VM);
    let filter = here.processes_of(VM, "vmseal-filter").unwrap();
    let encrypt = ["vm", "encrypt", VM, "--policy", "encrypted"];
    let decrypt = ["vm", "decrypt", VM, "--policy", "plain", "--yes"];
    for (number, operation) in
        [&encrypt[..], &["vm", "recrypt", VM, "--deep"], &decrypt].into_iter().enumerate()
    {
        here.vmseal(operation).unwrap();
        // It writes a variable to the copy.
        set_variable(&mut guest, &format!("Written{number}"), "424242");
        if operation != decrypt {
            is_encrypted(&here, true);
        }
        assert_eq!(here.processes_of(VM, "vmseal-filter").unwrap(), filter, "it was restarted");
    }
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&encrypt).unwrap();
    is_encrypted(&here, true);
    assert_eq!(here.vm(VM).unwrap()["disks"].as_array().unwrap().len(), 2);
    here.vmseal(&["vm", "start", VM]).unwrap();
    drop(guest);
    let mut guest = firmware_shell::open(&here, VM);
    for number in 0..3 {
        has_variable(&mut guest, &format!("Written{number}"), "42 42 42");
    }
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

/// Whatever dies while a VM is encrypted, the task goes on or is undone, and the guest has lost nothing.
#[test]
fn what_dies_while_a_vm_is_encrypted_loses_nothing() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut console) = started(VM, "plain");
    let mut encrypted = false;
    for (round, milliseconds) in some_of(&[50, 150, 300, 500, 800, 1200]).into_iter().enumerate() {
        count(&mut console);
        let change = change_from(encrypted);
        let ended = during(&mut here, VM, change, Victim::of_round(round), milliseconds);
        if ended.status.success() {
            encrypted = !encrypted;
        }
        console = console_again(&here, VM, console);
        stop_counting(&mut console);
        read_marker(&mut console);
        is_encrypted(&here, encrypted);
    }
    let change = change_from(encrypted);
    encrypted ^= while_the_guest_dies(&mut here, VM, change, fastrand::u64(0..1000));
    drop(console);
    read_marker(&mut booted(&here, VM).unwrap());
    is_encrypted(&here, encrypted);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

/// What changes whether the VM is encrypted.
fn change_from(encrypted: bool) -> &'static [&'static str] {
    match encrypted {
        true => &["vm", "decrypt", VM, "--policy", "plain", "--yes"],
        false => &["vm", "encrypt", VM, "--policy", "encrypted"],
    }
}

/// A task that is cancelled before its commit leaves the VM as it was.
#[test]
fn an_encryption_that_is_cancelled_leaves_nothing() {
    if !has_its_turn() {
        return;
    }
    let (here, mut console) = started(VM, "plain");
    count(&mut console);
    for milliseconds in some_of(&[0, 50, 100, 400]) {
        let task = here.json(&["vm", "encrypt", VM, "--policy", "encrypted", "--no-wait"]).unwrap();
        sleep(Duration::from_millis(milliseconds));
        let id = task["id"].as_str().unwrap();
        let cancelled = here.try_vmseal(&["task", "cancel", id]).unwrap().status.success();
        let ended = here.try_vmseal(&["task", "wait", id]).unwrap();
        let done = ended.status.success();
        // While the copies are being taken into use, it may be too late.
        assert!(cancelled || done, "{ended:?}");
        is_encrypted(&here, done);
        if done {
            here.vmseal(&["vm", "decrypt", VM, "--policy", "plain", "--yes"]).unwrap();
        }
    }
    stop_counting(&mut console);
    read_marker(&mut console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

/// What the guest's filter says of the disk that is copied; none while there is no filter, or no copy.
fn copied_disk(here: &Installation) -> Option<DiskStatus> {
    let id = here.vm(VM).unwrap()["id"].as_str().unwrap().to_owned();
    let mut stream = UnixStream::connect(here.path("run/vms").join(id).join("filter.sock")).ok()?;
    let line = serde_json::to_vec(&ControlRequest::Status).unwrap();
    stream.write_all(&[&line[..], b"\n"].concat()).ok()?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).ok()?;
    let ControlReply::Status(status) = serde_json::from_str(&answer).ok()? else { return None };
    status.disks.into_iter().find(|disk| disk.mirror.is_some())
}

fn copied_bytes(here: &Installation) -> Option<u64> {
    Some(copied_disk(here)?.mirror?.copied_bytes)
}

/// The filter copies at this pace, sooner or later.
fn copies_at(here: &Installation, pace: CopyPace) {
    let so = || (copied_disk(here)?.mirror?.pace == Some(pace)).then_some(());
    eventually(&format!("the filter copies at {pace:?}"), so).unwrap();
}

/// Nothing is copied while the guest writes.
fn stands_still(here: &Installation, pace: CopyPace) {
    copies_at(here, pace);
    let seen = |here| eventually("the filter serves", || copied_disk(here)).unwrap();
    let before = seen(here);
    let written = || {
        let written = copied_disk(here)?.counters.written_bytes;
        (written > before.counters.written_bytes + (16 << 10)).then_some(())
    };
    eventually("the guest goes on", written).unwrap();
    let (before, after) = (before.mirror.unwrap(), seen(here).mirror.unwrap());
    assert_eq!((after.copied_bytes, after.pace), (before.copied_bytes, Some(pace)));
    assert!(after.dirty_bytes >= before.dirty_bytes, "{before:?} {after:?}");
}

/// A copy has a rate, which the filter keeps; it is paused while the guest writes, also where filter, agent and server die, and
/// goes on where it was.
#[test]
fn a_copy_is_slowed_and_paused_whatever_dies_and_goes_on() {
    if !has_its_turn() {
        return;
    }
    const RATE: u64 = 2 << 20;
    let (mut here, mut console) = started(VM, "plain");
    // Beside what the system of the guest is, so that there is much to copy.
    let noise = "dd if=/dev/urandom of=/dev/vda bs=1M seek=36 count=22 conv=notrunc,fsync";
    run(&mut console, &format!("{noise} 2>/dev/null; echo NOISE-$((6 * 7))"), "NOISE-42").unwrap();
    count(&mut console);
    let encrypt = ["vm", "encrypt", VM, "--policy", "encrypted", "--rate", "2M", "--no-wait"];
    let task = here.json(&encrypt).unwrap();
    assert_eq!(task["rate"], RATE);
    let id = task["id"].as_str().unwrap();
    let shown = |here: &Installation| here.json(&["task", "show", id]).unwrap();
    eventually("it copies", || copied_bytes(&here).filter(|copied| *copied > 0)).unwrap();
    let (begun, first) = (Instant::now(), copied_bytes(&here).unwrap());
    let last = eventually("it copies more", || {
        copied_bytes(&here).filter(|copied| *copied >= first + RATE)
    });
    // Taken ahead of the rate is one piece; the time is the longest that can have been between the two looks.
    let most = begun.elapsed().as_secs_f64() * RATE as f64 + f64::from(512 << 10);
    let copied = last.unwrap() - first;
    assert!(copied as f64 <= most, "{copied} bytes, and at most {most} at its rate");
    let told = eventually("the task says how fast it is, and how long it lasts", || {
        let task = shown(&here);
        (task["bytes_per_second"].is_u64() && task["seconds_left"].is_u64()).then_some(task)
    });
    assert_eq!(told.unwrap()["state"], "running");

    here.vmseal(&["task", "pause", id]).unwrap();
    let paused = CopyPace { bytes_per_second: Some(RATE), paused: true };
    stands_still(&here, paused);
    let waits = |here: &Installation| {
        eventually("the task is paused", || {
            let task = shown(here);
            (task["state"] == "waiting" && task["paused"] == true).then_some(())
        })
        .unwrap();
    };
    waits(&here);
    assert!(here.vmseal(&["task", "list"]).unwrap().contains("paused (vmseal task resume"));
    here.processes_of(VM, "vmseal-filter").unwrap().into_iter().for_each(kill_hard);
    stands_still(&here, paused);
    here.kill_agent();
    here.processes_of(VM, "vmseal-filter").unwrap().into_iter().for_each(kill_hard);
    here.start_agent().unwrap();
    stands_still(&here, paused);
    here.kill_server();
    here.start_server().unwrap();
    waits(&here);
    stands_still(&here, paused);
    drop(console);
    let mut console = here.console(VM).unwrap();
    is_plain_yet(&here);

    here.vmseal(&["task", "set", id, "--rate", "1G"]).unwrap();
    here.vmseal(&["task", "resume", id]).unwrap();
    here.vmseal(&["task", "wait", id]).unwrap();
    stop_counting(&mut console);
    read_marker(&mut console);
    is_encrypted(&here, true);
    let late = here.refused(&["task", "pause", id]).unwrap();
    assert!(late.contains("has ended"), "{late}");
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

/// The VM uses no copy.
fn is_plain_yet(here: &Installation) {
    let vm = here.vm(VM).unwrap();
    assert!(vm["disks"].as_array().unwrap().iter().all(|disk| disk["encrypted"] == false), "{vm}");
}
