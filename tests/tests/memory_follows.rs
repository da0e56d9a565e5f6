//! The memory that a snapshot keeps follows its VM when that is encrypted, rekeyed, moved and decrypted: its guest goes on from
//! there afterwards, and what it was before is gone. What is copied of a tree stands still while its task is paused.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::{Victim, console_again, during, has_its_turn, some_of};
use vmseal_tests::shell_guest::{self, booted, run};

const VM: &str = "web";

const ENCRYPT: [&str; 5] = ["vm", "encrypt", VM, "--policy", "encrypted"];
const DECRYPT: [&str; 6] = ["vm", "decrypt", VM, "--policy", "plain", "--yes"];

/// The place of the guest's number on its first disk, in sectors: its system does not use it.
const NUMBER_AT: u32 = 60 * 2048;

/// States of a file's key slot (docs/formats/sealed-file.md).
const WRAPPED: u8 = 1;
const IN_THE_CLEAR: u8 = 2;

/// A guest with two disks that counts in its memory and on both of them.
fn started(policy: &str) -> (Installation, Console) {
    let here = Installation::new().unwrap();
    let more = ["--disk", "name=data,datastore=local,size=64MiB"];
    shell_guest::start(&here, VM, policy, &more).unwrap();
    let mut console = booted(&here, VM).unwrap();
    run(&mut console, "n=0; echo SET-$((6 * 7))", "SET-42").unwrap();
    (here, console)
}

/// The guest counts on by one, and finds its memory and its disks equal before that.
fn counts(console: &mut Console, from: u32) {
    let read = |disk: &str, at: u32| {
        format!("$(dd if=/dev/{disk} bs=512 skip={at} count=1 2>/dev/null | tr -dc 0-9)")
    };
    let write = |disk: &str, at: u32| {
        format!(
            "printf '%-511s\\n' $n | dd of=/dev/{disk} bs=512 seek={at} conv=notrunc,fsync 2>/dev/null"
        )
    };
    if from > 0 {
        let drop = "echo 3 >/proc/sys/vm/drop_caches";
        let says = format!("echo SEES-{}-{}-$n-", read("vda", NUMBER_AT), read("vdb", 8));
        run(console, &format!("{drop}; {says}"), &format!("SEES-{from}-{from}-{from}-")).unwrap();
    }
    let both = format!("{}; {}", write("vda", NUMBER_AT), write("vdb", 8));
    let count = format!("n=$((n + 1)); {both}; echo COUNTED-$n-");
    run(console, &count, &format!("COUNTED-{}-", from + 1)).unwrap();
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

/// The one memory that a snapshot keeps.
fn memory(here: &Installation) -> PathBuf {
    let mut kept = here.home_files(VM).unwrap();
    kept.retain(|path| name(path).starts_with("vm.memory"));
    assert_eq!(kept.len(), 1, "{kept:?}");
    kept.remove(0)
}

/// Nothing is left of a copy or of what was before, and the memory is kept in this form.
fn is_whole(here: &Installation, slot: u8) {
    let left =
        here.home_files(VM).unwrap().into_iter().map(|path| name(&path)).filter(|name| {
            ["copy", "source", "mirror", ".new"].iter().any(|part| name.contains(part))
        });
    assert_eq!(left.collect::<Vec<_>>(), Vec::<String>::new());
    let content = std::fs::read(memory(here)).unwrap();
    let mut slots = [content[512], content[1024]];
    slots.sort_unstable();
    assert_eq!(slots, [0, slot], "its key slots");
    let vm = here.vm(VM).unwrap();
    for disk in vm["disks"].as_array().unwrap() {
        assert_eq!(disk["encrypted"], slot == WRAPPED, "{vm}");
    }
}

/// The guest goes on from the snapshot, where it had counted to this.
fn comes_back(here: &Installation, console: Option<Console>, counted: u32) -> Console {
    drop(console);
    if here.vm(VM).unwrap()["power"] != "off" {
        here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    }
    here.vmseal(&["snapshot", "revert", VM, "asleep"]).unwrap();
    here.wait_power(VM, "suspended").unwrap();
    here.vmseal(&["vm", "resume", VM]).unwrap();
    let mut console = here.console(VM).unwrap();
    counts(&mut console, counted);
    console
}

/// Has a file have another name, under which can be read what becomes of it.
fn held(here: &Installation, file: &Path) -> PathBuf {
    let held = here.path("held");
    let _ = std::fs::remove_file(&held);
    std::fs::hard_link(file, &held).unwrap();
    held
}

/// No frame of a memory is what it was: it has another key.
fn has_another_key(before: &[u8], after: &[u8]) {
    let parts = before[4096..].chunks(4096).zip(after[4096..].chunks(4096));
    assert_eq!(parts.filter(|(one, other)| one == other).count(), 0);
}

#[test]
fn a_snapshot_with_memory_is_encrypted_rekeyed_moved_and_decrypted_with_its_vm() {
    if !has_its_turn() {
        return;
    }
    let (here, mut console) = started("plain");
    counts(&mut console, 0);
    here.vmseal(&["snapshot", "create", VM, "asleep", "--memory"]).unwrap();
    counts(&mut console, 1);
    is_whole(&here, IN_THE_CLEAR);

    let clear = std::fs::read(memory(&here)).unwrap();
    let was = held(&here, &memory(&here));
    here.vmseal(&ENCRYPT).unwrap();
    counts(&mut console, 2);
    is_whole(&here, WRAPPED);
    let left = std::fs::read(&was).unwrap();
    assert!(left.len() > 1 << 20 && left.iter().all(|byte| *byte == 0), "its former file is left");
    let proof = here.vmseal(&["vm", "prove", VM]).unwrap();
    assert!(proof.contains("(sealed): encrypted, opens with the VM's key"), "{proof}");
    // One that is left in the clear is found.
    let snapshot = name(&memory(&here)).replace("vm.memory.snapshot-", "source-memory-");
    let left = here.images(VM).unwrap()[0].with_extension(snapshot);
    std::fs::write(&left, &clear).unwrap();
    let found = here.refused(&["vm", "prove", VM]).unwrap();
    assert!(found.contains("is not encrypted"), "{found}");
    // So is one whose header was changed.
    let mut forged = std::fs::read(memory(&here)).unwrap();
    forged[600] ^= 1;
    std::fs::write(&left, &forged).unwrap();
    let found = here.refused(&["vm", "prove", VM]).unwrap();
    assert!(found.contains("is not proved"), "{found}");
    std::fs::remove_file(&left).unwrap();
    let mut console = comes_back(&here, Some(console), 1);
    counts(&mut console, 2);

    // Another key of the VM opens it, then it gets one of its own.
    here.vmseal(&["vm", "recrypt", VM]).unwrap();
    is_whole(&here, WRAPPED);
    let before = std::fs::read(memory(&here)).unwrap();
    let was = held(&here, &memory(&here));
    here.vmseal(&["vm", "recrypt", VM, "--deep"]).unwrap();
    is_whole(&here, WRAPPED);
    has_another_key(&before, &std::fs::read(memory(&here)).unwrap());
    assert!(std::fs::read(&was).unwrap()[..4096].iter().all(|byte| *byte == 0), "its key is left");
    counts(&mut console, 3);

    let (former, second) = (here.home(VM).unwrap(), here.path("second"));
    std::fs::create_dir(&second).unwrap();
    let place = ["datastore", "add", "second", "--host", "here", "--path", text(&second).unwrap()];
    here.vmseal(&place).unwrap();
    here.vmseal(&["vm", "move", VM, "--datastore", "second"]).unwrap();
    assert!(here.home(VM).unwrap().starts_with(&second));
    assert!(!former.exists(), "something is left where the VM was");
    is_whole(&here, WRAPPED);
    let console = comes_back(&here, Some(console), 1);

    let planned = here.try_vmseal(&[&DECRYPT[..], &["--dry-run"]].concat()).unwrap();
    let warned = String::from_utf8(planned.stderr).unwrap();
    assert!(warned.contains("the memory that its snapshots keep will be"), "{warned}");
    here.vmseal(&DECRYPT).unwrap();
    is_whole(&here, IN_THE_CLEAR);
    let console = comes_back(&here, Some(console), 1);

    // The same while it is off.
    drop(console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&ENCRYPT).unwrap();
    is_whole(&here, WRAPPED);
    let console = comes_back(&here, None, 1);
    drop(console);
    here.vmseal(&["snapshot", "delete", VM, "asleep"]).unwrap();
    assert!(here.home_files(VM).unwrap().iter().all(|path| !name(path).starts_with("vm.memory")));
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

/// Whatever dies meanwhile, the snapshot is as its VM is, and its guest comes back.
#[test]
fn what_dies_while_a_memory_is_copied_loses_nothing() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut console) = started("plain");
    counts(&mut console, 0);
    here.vmseal(&["snapshot", "create", VM, "asleep", "--memory"]).unwrap();
    let mut encrypted = false;
    for (round, milliseconds) in some_of(&[150, 500, 900, 350]).into_iter().enumerate() {
        let operation = if encrypted { &DECRYPT[..] } else { &ENCRYPT[..] };
        let victim = Victim::of_round(round * 2);
        let ended = during(&mut here, VM, operation, victim, milliseconds);
        encrypted ^= ended.status.success();
        console = console_again(&here, VM, console);
        is_whole(&here, if encrypted { WRAPPED } else { IN_THE_CLEAR });
    }
    comes_back(&here, Some(console), 1);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

/// The room that the copies take so far, in bytes.
fn copied(here: &Installation) -> u64 {
    let room = here.home_files(VM).unwrap().into_iter().filter_map(|path| path.metadata().ok());
    room.map(|it| it.blocks() * 512).sum()
}

/// The task is paused, and nothing more is copied.
fn stands_still(here: &Installation, task: &str) {
    here.vmseal(&["task", "pause", task]).unwrap();
    eventually("the task is paused", || {
        let task = here.json(&["task", "show", task]).ok()?;
        (task["state"] == "waiting" && task["paused"] == true).then_some(())
    })
    .unwrap();
    // As long as a pause may take to be felt; at its rate the copy would go on by more.
    sleep(Duration::from_secs(1));
    let before = copied(here);
    sleep(Duration::from_secs(2));
    assert_eq!(copied(here), before, "it is copied on");
}

/// Copies have begun.
fn copies(here: &Installation, before: u64) {
    eventually("it copies", || (copied(here) > before + (2 << 20)).then_some(())).unwrap();
}

#[test]
fn the_copy_of_a_tree_stands_still_while_its_task_is_paused() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut console) = started("plain");
    let noise = "dd if=/dev/urandom of=/dev/vdb bs=1M seek=1 count=40 conv=fsync";
    run(&mut console, &format!("{noise} 2>/dev/null; echo NOISE-$((6 * 7))"), "NOISE-42").unwrap();
    counts(&mut console, 0);
    here.vmseal(&["snapshot", "create", VM, "one"]).unwrap();

    let before = copied(&here);
    let slowly = |operation: &[&str]| {
        let task = here.json(&[operation, &["--rate", "1M", "--no-wait"]].concat()).unwrap();
        task["id"].as_str().unwrap().to_owned()
    };
    let task = slowly(&ENCRYPT);
    copies(&here, before);
    stands_still(&here, &task);
    counts(&mut console, 1);
    // It is paused for whoever comes after, and goes on where that is told.
    here.kill_agent();
    here.start_agent().unwrap();
    here.wait_host().unwrap();
    sleep(Duration::from_secs(1));
    let paused = copied(&here);
    sleep(Duration::from_secs(2));
    assert_eq!(copied(&here), paused, "it is copied on");
    here.vmseal(&["task", "set", &task, "--rate", "1G"]).unwrap();
    here.vmseal(&["task", "resume", &task]).unwrap();
    here.vmseal(&["task", "wait", &task]).unwrap();
    console = console_again(&here, VM, console);
    counts(&mut console, 2);

    // The memory of a snapshot, which the agent copies; and given up from there.
    here.vmseal(&["snapshot", "create", VM, "asleep", "--memory"]).unwrap();
    let before = copied(&here);
    let slowly = [&DECRYPT[..], &["--rate", "1M", "--no-wait"]].concat();
    let task = here.json(&slowly).unwrap()["id"].as_str().unwrap().to_owned();
    eventually("a memory is being copied", || {
        here.home_files(VM).unwrap().iter().any(|path| name(path).ends_with(".new")).then_some(())
    })
    .unwrap();
    copies(&here, before);
    stands_still(&here, &task);
    here.vmseal(&["task", "cancel", &task]).unwrap();
    assert!(!here.try_vmseal(&["task", "wait", &task]).unwrap().status.success());
    is_whole(&here, WRAPPED);
    counts(&mut console, 3);
    comes_back(&here, Some(console), 3);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}
