//! Snapshots of a VM whose guest writes: what they keep comes back, what the guest writes is not lost, and nothing is in the
//! clear; not when the agent, the filter or the server dies meanwhile.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::PathBuf;

use vmseal_tests::counting_guest::{count, stop_counting};
use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::{Victim, console_again, during, has_its_turn, while_the_guest_dies};
use vmseal_tests::process::kill_hard;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{self, booted, run};

const VM: &str = "web";

/// A place of the guest's disk that its system does not use, in MiB from the beginning.
const TEXT_AT: u32 = 60;

fn started(policy: &str) -> (Installation, Console) {
    let here = Installation::new().unwrap();
    let more = ["--disk", "name=data,datastore=local,size=32MiB"];
    shell_guest::start(&here, VM, policy, &more).unwrap();
    let console = booted(&here, VM).unwrap();
    (here, console)
}

/// The guest writes a text to both of its disks.
fn write(console: &mut Console, text: &str) {
    let to = |disk: &str, at: u32| {
        format!("echo {text} | dd of=/dev/{disk} bs=1M seek={at} conv=notrunc,fsync 2>/dev/null")
    };
    let both = format!("{}; {}", to("vda", TEXT_AT), to("vdb", 5));
    run(console, &format!("{both}; echo WROTE-$((6 * 7))"), "WROTE-42").unwrap();
}

/// The guest reads the same text from both of its disks.
fn reads(console: &mut Console, text: &str) {
    run(console, "echo 3 >/proc/sys/vm/drop_caches; echo DROPPED-$((6 * 7))", "DROPPED-42")
        .unwrap();
    for (disk, at) in [("vda", TEXT_AT), ("vdb", 5)] {
        let read = format!("dd if=/dev/{disk} bs=1M skip={at} count=1 2>/dev/null | head -n 1");
        run(console, &read, text).unwrap();
    }
}

/// The files in the VM's directory.
fn files(here: &Installation) -> Vec<PathBuf> {
    let images = here.images(VM).unwrap();
    let home = images[0].parent().unwrap();
    std::fs::read_dir(home).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Those of layers: overlays, notes, locks.
fn of_layers(here: &Installation) -> Vec<PathBuf> {
    let of_layers = |file: &PathBuf| {
        let extension = file.extension().unwrap_or_default().to_string_lossy().into_owned();
        extension == "layers" || extension == "merge" || extension.starts_with("layer-")
    };
    files(here).into_iter().filter(of_layers).collect()
}

fn is_in_the_clear(here: &Installation, text: &str) -> bool {
    files(here).iter().any(|file| contains(&std::fs::read(file).unwrap(), text))
}

fn snapshot(here: &Installation, arguments: &[&str]) {
    here.vmseal(&[&["snapshot"], arguments].concat()).unwrap();
}

fn names(here: &Installation) -> Vec<String> {
    let listed = here.json(&["snapshot", "list", VM]).unwrap();
    let name = |it: &serde_json::Value| it["name"].as_str().unwrap().to_owned();
    listed.as_array().unwrap().iter().map(name).collect()
}

fn restarted(here: &Installation) -> Console {
    here.vmseal(&["vm", "start", VM]).unwrap();
    booted(here, VM).unwrap()
}

/// Has the disk of the VM, which is off, hold this.
fn holds(here: &Installation, text: &str) {
    assert!(here.disk_has(VM, "disk0", TEXT_AT, text).unwrap(), "it does not hold {text}");
}

fn stop(here: &Installation, console: Console) {
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    drop(console);
}

/// A disk is copied as it was at one instant while its guest goes on writing: as ciphertext, and in the clear.
#[test]
fn what_a_snapshot_keeps_is_exported_while_the_guest_goes_on() {
    let (here, mut console) = started("encrypted");
    write(&mut console, "TEXT-OF-ONE");
    let export = |format: &str, more: &[&str]| {
        let to = here.path(format);
        let to = to.to_str().unwrap();
        let all = ["disk", "export", VM, "disk0", "--format", format, "--to", to];
        here.try_vmseal(&[&all, more].concat()).unwrap()
    };
    let refused = export("raw", &["--plaintext"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("--snapshot NAME"), "{said}");
    let absent = export("raw", &["--plaintext", "--snapshot", "one"]);
    assert!(!absent.status.success());
    snapshot(&here, &["create", VM, "one"]);
    count(&mut console);
    write(&mut console, "TEXT-OF-NOW");
    for (format, plaintext) in [("sealed", &[][..]), ("raw", &["--plaintext"])] {
        let told = export(format, &[&["--snapshot", "one"], plaintext].concat());
        assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
        let file = std::fs::read(here.path(format)).unwrap();
        let text_at = |text: &str| {
            let at = (TEXT_AT as usize) << 20;
            file[at..at + text.len()] == *text.as_bytes()
        };
        let has = |text: &str| contains(&file, text);
        assert_eq!(text_at("TEXT-OF-ONE"), format == "raw", "{format}");
        assert_eq!(has("TEXT-OF-ONE"), format == "raw", "{format}");
        assert!(!has("TEXT-OF-NOW"), "{format}: it is not what the snapshot keeps");
    }
    stop_counting(&mut console);
    snapshot(&here, &["delete", VM, "one"]);
    reads(&mut console, "TEXT-OF-NOW");
    // The ciphertext is a disk of its own: as the image of the VM it boots.
    stop(&here, console);
    let image = here.images(VM).unwrap().remove(0);
    std::fs::copy(here.path("sealed"), image).unwrap();
    let mut console = restarted(&here);
    let read = format!("dd if=/dev/vda bs=1M skip={TEXT_AT} count=1 2>/dev/null | head -n 1");
    run(&mut console, &read, "TEXT-OF-ONE").unwrap();
    stop(&here, console);
}

#[test]
fn what_snapshots_keep_comes_back_and_is_ciphertext() {
    let (mut here, mut console) = started("encrypted");
    write(&mut console, "TEXT-OF-ONE");
    let planned = here.vmseal(&["snapshot", "create", VM, "one", "--dry-run"]).unwrap();
    assert!(planned.contains("keep what the disks hold"), "{planned}");
    assert_eq!(names(&here), Vec::<String>::new());
    count(&mut console);
    let filters = here.processes_of(VM, "vmseal-filter").unwrap();
    snapshot(&here, &["create", VM, "one", "--description", "the first"]);
    stop_counting(&mut console);
    write(&mut console, "TEXT-OF-TWO");
    snapshot(&here, &["create", VM, "two"]);
    let after = here.processes_of(VM, "vmseal-filter").unwrap();
    assert_eq!(after, filters, "the filter was restarted");
    write(&mut console, "TEXT-OF-NOW");
    reads(&mut console, "TEXT-OF-NOW");
    assert_eq!(names(&here), ["one", "two"]);
    let one = here.json(&["snapshot", "show", VM, "one"]).unwrap();
    assert_eq!((&one["state"], &one["current"]), (&"ready".into(), &false.into()), "{one}");
    // The guest has no agent that could freeze anything.
    assert_eq!(one["quiesced"], false, "{one}");
    assert_eq!(one["disks"].as_array().unwrap().len(), 2, "{one}");
    let two = here.json(&["snapshot", "show", VM, "two"]).unwrap();
    assert_eq!((&two["parent"], &two["current"]), (&"one".into(), &true.into()), "{two}");
    // What layers cannot take.
    for refused in [
        &["snapshot", "revert", VM, "one"][..],
        &["snapshot", "create", VM, "two"],
        &["snapshot", "delete", VM, "three"],
        &["disk", "resize", VM, "data", "--size", "64MiB"],
        &["disk", "remove", VM, "data"],
    ] {
        let answer = here.try_vmseal(refused).unwrap();
        assert!(!answer.status.success(), "{refused:?} was done");
    }
    for text in ["TEXT-OF-ONE", "TEXT-OF-TWO", "TEXT-OF-NOW"] {
        assert!(!is_in_the_clear(&here, text), "{text} is in the clear");
    }
    // Another key opens all of it, beside the filter that has written the layers.
    here.vmseal(&["vm", "recrypt", VM]).unwrap();
    // The agent finds the layers when it adopts the VM, and so does the next filter.
    here.kill_agent();
    here.start_agent().unwrap();
    here.processes_of(VM, "vmseal-filter").unwrap().into_iter().for_each(kill_hard);
    eventually("the guest is served", || {
        here.alarms(VM).ok()?.iter().all(|it| it["code"] != "disks-down").then_some(())
    })
    .unwrap();
    drop(console);
    console = here.console(VM).unwrap();
    reads(&mut console, "TEXT-OF-NOW");
    stop(&here, console);

    // Another key opens all of it.
    here.vmseal(&["vm", "recrypt", VM]).unwrap();
    snapshot(&here, &["revert", VM, "one"]);
    let mut console = restarted(&here);
    reads(&mut console, "TEXT-OF-ONE");
    write(&mut console, "TEXT-OF-BRANCH");
    snapshot(&here, &["create", VM, "branch"]);
    let branch = here.json(&["snapshot", "show", VM, "branch"]).unwrap();
    assert_eq!(branch["parent"], "one", "{branch}");
    // Its power is cut, and it starts again.
    drop(console);
    snapshot(&here, &["revert", VM, "two", "--running"]);
    let mut console = booted(&here, VM).unwrap();
    reads(&mut console, "TEXT-OF-TWO");
    write(&mut console, "TEXT-OF-NOW");

    // While the guest runs, and with the image alone at the end.
    count(&mut console);
    for name in ["one", "branch", "two"] {
        snapshot(&here, &["delete", VM, name]);
    }
    stop_counting(&mut console);
    reads(&mut console, "TEXT-OF-NOW");
    assert_eq!(names(&here), Vec::<String>::new());
    assert_eq!(of_layers(&here), Vec::<PathBuf>::new());
    assert!(!is_in_the_clear(&here, "TEXT-OF-NOW"));
    stop(&here, console);
    holds(&here, "TEXT-OF-NOW");
    here.vmseal(&["vm", "recrypt", VM, "--deep"]).unwrap();
}

/// The same of a VM that is off, plain, and with a large layer.
#[test]
fn a_vm_that_is_off_has_snapshots_too() {
    let (here, mut console) = started("plain");
    write(&mut console, "TEXT-OF-ONE");
    stop(&here, console);
    snapshot(&here, &["create", VM]);
    assert_eq!(names(&here), ["snapshot-1"]);
    let mut console = restarted(&here);
    // More than is merged while a guest waits.
    let fill = "dd if=/dev/urandom of=/dev/vdb bs=1M count=24 conv=fsync 2>/dev/null; sha1sum /dev/vdb | cut -c1-40 >/sum";
    run(&mut console, &format!("{fill}; echo FILLED-$((6 * 7))"), "FILLED-42").unwrap();
    count(&mut console);
    snapshot(&here, &["delete", VM, "snapshot-1"]);
    stop_counting(&mut console);
    let check = "echo 3 >/proc/sys/vm/drop_caches; sha1sum /dev/vdb | cut -c1-40 | cmp - /sum && echo SAME-$((6 * 7))";
    run(&mut console, check, "SAME-42").unwrap();
    assert_eq!(of_layers(&here), Vec::<PathBuf>::new());
    snapshot(&here, &["create", VM, "kept"]);
    write(&mut console, "TEXT-OF-NOW");
    stop(&here, console);
    snapshot(&here, &["revert", VM, "kept"]);
    holds(&here, "TEXT-OF-ONE");
    snapshot(&here, &["delete", VM, "kept"]);
    assert_eq!(of_layers(&here), Vec::<PathBuf>::new());
    snapshot(&here, &["create", VM, "last"]);
    let home = here.images(VM).unwrap()[0].parent().unwrap().to_owned();
    here.vmseal(&["vm", "delete", VM]).unwrap();
    assert!(!home.exists(), "something of the VM is left");
}

/// The layers of a guest that writes are merged, also what it writes last, and its filter is not restarted for that: what it has
/// counted and noted stays.
#[test]
fn the_filter_of_a_guest_stays_while_snapshots_are_made_and_deleted() {
    let (here, mut console) = started("encrypted");
    write(&mut console, "TEXT-OF-ONE");
    here.vmseal(&["disk", "bitmap", "add", VM, "disk0", "kept"]).unwrap();
    let filters = here.processes_of(VM, "vmseal-filter").unwrap();
    assert_eq!(filters.len(), 1);
    count(&mut console);
    for round in 0..2 {
        snapshot(&here, &["create", VM, "one"]);
        snapshot(&here, &["create", VM, "two"]);
        // More than is merged while a guest waits.
        let fill = "dd if=/dev/urandom of=/dev/vdb bs=1M seek=8 count=20 conv=fsync 2>/dev/null";
        run(
            &mut console,
            &format!("{fill}; echo FILLED-$((6 * 7 + {round}))"),
            &format!("FILLED-{}", 42 + round),
        )
        .unwrap();
        // The one below, which nobody writes, and then the active one.
        for name in if round == 0 { ["one", "two"] } else { ["two", "one"] } {
            snapshot(&here, &["delete", VM, name]);
            let after = here.processes_of(VM, "vmseal-filter").unwrap();
            assert_eq!(after, filters, "the filter was restarted");
        }
        assert_eq!(of_layers(&here), Vec::<PathBuf>::new());
    }
    stop_counting(&mut console);
    reads(&mut console, "TEXT-OF-ONE");
    let bitmaps = here.json(&["disk", "bitmap", "list", VM, "disk0"]).unwrap();
    assert_eq!(bitmaps[0]["name"], "kept", "{bitmaps}");
    stop(&here, console);
    holds(&here, "TEXT-OF-ONE");
}

/// Whatever dies while a snapshot is taken or deleted, the task goes on or is undone, and the guest has lost nothing.
#[test]
fn what_dies_while_snapshots_change_loses_nothing() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut console) = started("encrypted");
    write(&mut console, "TEXT-OF-NOW");
    for (round, milliseconds) in [10, 60, 120, 200, 300, 450].into_iter().enumerate() {
        count(&mut console);
        let take = names(&here).is_empty();
        let change = match take {
            true => ["snapshot", "create", VM, "one"],
            false => ["snapshot", "delete", VM, "one"],
        };
        let victim = Victim::of_round(round / 2);
        let ended = during(&mut here, VM, &change, victim, milliseconds);
        assert_eq!(names(&here).is_empty(), take != ended.status.success(), "{ended:?}");
        console = console_again(&here, VM, console);
        stop_counting(&mut console);
        reads(&mut console, "TEXT-OF-NOW");
    }
    for name in names(&here) {
        snapshot(&here, &["delete", VM, &name]);
    }
    // Attempts that were undone have left nothing either.
    snapshot(&here, &["create", VM, "last"]);
    snapshot(&here, &["delete", VM, "last"]);
    assert_eq!(of_layers(&here), Vec::<PathBuf>::new());
    reads(&mut console, "TEXT-OF-NOW");
    let take = ["snapshot", "create", VM, "one"];
    let taken = while_the_guest_dies(&mut here, VM, &take, fastrand::u64(0..200));
    drop(console);
    assert_eq!(names(&here).len(), usize::from(taken));
    reads(&mut booted(&here, VM).unwrap(), "TEXT-OF-NOW");
}
