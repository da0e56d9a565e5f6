//! What is kept of a VM that runs, while fio in its guest writes and verifies and another program there has its history judged: a snapshot,
//! a linked clone and an incremental backup are of one instant, and a revert of the VM that runs brings that back and nothing else.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use vmseal_history::load::Flushed;
use vmseal_tests::fio_guest::{
    keep_history, next_flushed, ready, started, stop_and_check, write_and_verify,
};
use vmseal_tests::guest::Console;
use vmseal_tests::held_steps::seeded;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::{console_again, has_its_turn};
use vmseal_tests::one_instant::{Disks, number_disks};
use vmseal_tests::shell_guest::run;

const VM: &str = "web";
const CLONE: &str = "copy";

/// How many blocks a second fio writes.
const WRITES: u32 = 300;

/// How often the guest flushes at most before something is done to its VM.
const FLUSHES_MAX: usize = 3;

/// How often [`next_flushed`] is asked until the program has ended the round that it is in, and another one: it says three lines in a
/// round, and two are heard each time.
const ROUNDS: usize = 4;

/// The most that is read for a backup where it is known what was changed: all of the disk that fio writes, and little of the others.
const READ_MAX: u64 = (32 << 20) + (4 << 20);

/// A VM whose guest writes both of its disks.
fn written(here: &Installation) -> Console {
    let mut console = started(here, VM, "encrypted", "local");
    write_and_verify(&mut console, WRITES);
    keep_history(&mut console, 0, None);
    number_disks(&mut console);
    console
}

/// The guest goes on for as long as the seed says; what it has flushed then.
fn goes_on(console: &mut Console, life: u32, random: &mut fastrand::Rng) -> Flushed {
    for _ in 0..random.usize(..FLUSHES_MAX) {
        next_flushed(console, life);
    }
    next_flushed(console, life)
}

/// The guest ends a round of its program, and begins others.
fn ends_rounds(console: &mut Console) {
    for _ in 0..ROUNDS {
        next_flushed(console, 0);
    }
}

/// The guest keeps a word in its memory.
fn remembers(console: &mut Console, word: &str) {
    run(console, &format!("echo {word} >/word; echo SET-$((6 * 7))"), "SET-42").unwrap();
}

/// The VM, which runs, goes back to a snapshot with memory, and its guest goes on from that: the programs that judge the disks know what
/// they had written by then. Disks that hold something later, or earlier, are found at the end of the round at the latest.
fn goes_back_with_its_memory(here: &Installation, mut console: Console) -> Console {
    remembers(&mut console, "KEPT");
    here.vmseal(&["snapshot", "create", VM, "asleep", "--memory"]).unwrap();
    remembers(&mut console, "LATER");
    ends_rounds(&mut console);
    here.vmseal(&["snapshot", "revert", VM, "asleep", "--running"]).unwrap();
    let mut console = console_again(here, VM, console);
    run(&mut console, "cat /word", "KEPT").unwrap();
    ends_rounds(&mut console);
    console
}

/// It fails where a snapshot takes the disks at two instants, or lacks a write that was answered; where a linked clone or its source writes
/// to what they share, or the source loses a write while its filter is replaced; and where a revert leaves something that was written
/// since, or the filter of the guest whose power was cut still writes.
#[test]
fn a_linked_clone_of_a_vm_that_runs_is_of_one_instant_and_a_revert_brings_that_back() {
    if !has_its_turn() {
        return;
    }
    let mut random = seeded();
    let here = Installation::new().unwrap();
    let mut console = written(&here);
    let before = goes_on(&mut console, 0, &mut random);
    here.vmseal(&["snapshot", "create", VM, "one"]).unwrap();
    let after = next_flushed(&mut console, 0);
    here.vmseal(&["vm", "clone", VM, CLONE, "--linked", "--snapshot", "one"]).unwrap();
    let kept = Disks::of(&here, VM, Some("one"));
    kept.are_of_one_instant([&before, &after]);
    Disks::of(&here, CLONE, None).are(&kept, "the clone");

    // Both guests write at once, above the same files.
    here.vmseal(&["vm", "start", CLONE]).unwrap();
    let mut copy = ready(&here, CLONE);
    keep_history(&mut copy, 1, Some(&before.to_string()));
    let mut console = goes_back_with_its_memory(&here, console);
    stop_and_check(&mut copy);
    stop_and_check(&mut console);
    Disks::of(&here, VM, Some("one")).are(&kept, "what the snapshot keeps");

    // The power of a guest that writes is cut. The one that boots instead writes nothing yet.
    write_and_verify(&mut console, WRITES);
    keep_history(&mut console, 1, None);
    goes_on(&mut console, 1, &mut random);
    drop(console);
    here.vmseal(&["snapshot", "revert", VM, "one", "--running"]).unwrap();
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    Disks::of(&here, VM, None).are(&kept, "the VM that went back");
}

/// It fails where a backup reads what the guest goes on to write, or the disks at two instants; and where a bitmap misses a write, or
/// files are stacked in another order: the last backup then differs from the disks, which nobody has written since.
#[test]
fn incremental_backups_of_a_vm_that_runs_are_of_one_instant_and_miss_no_write() {
    if !has_its_turn() {
        return;
    }
    let mut random = seeded();
    let here = Installation::new().unwrap();
    let mut console = written(&here);
    let to = here.path("backups");
    std::fs::create_dir(&to).unwrap();
    goes_on(&mut console, 0, &mut random);
    here.vmseal(&["backup", "create", VM, "first", "--to", text(&to).unwrap()]).unwrap();
    let before = goes_on(&mut console, 0, &mut random);
    here.vmseal(&["backup", "create", VM, "next"]).unwrap();
    let after = next_flushed(&mut console, 0);
    stop_and_check(&mut console);
    here.vmseal(&["backup", "create", VM, "last"]).unwrap();
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    for (name, parent) in [("next", "first"), ("last", "next")] {
        let shown = here.json(&["backup", "show", VM, name]).unwrap();
        assert_eq!(shown["parent"], parent, "{shown}");
        let read = shown["read_bytes"].as_u64().unwrap();
        assert!(read <= READ_MAX, "{name}: it was not known what was changed: {read}");
        here.vmseal(&["backup", "restore", VM, name, "--as", name]).unwrap();
    }
    Disks::of(&here, "next", None).are_of_one_instant([&before, &after]);
    Disks::of(&here, "last", None).are(&Disks::of(&here, VM, None), "the last backup");
}
