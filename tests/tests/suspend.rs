//! VMs that are suspended: what their guests had in memory is there again when they are resumed, is in no file in the clear, and is not lost
//! when a process dies meanwhile.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::PathBuf;

use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::{Victim, during, during_which, has_its_turn, some_of};
use vmseal_tests::process::kill_hard;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{self, booted, run};
use vmseal_tests::two_hosts::FILTER;

const VM: &str = "web";

/// A text that the guest has in its memory alone: typed in two parts, so that no log has it.
const SECRET: (&str, &str) = ("MARKER-OF-", "THE-MEMORY-7351");

/// The place of the guest's number on its disk, in sectors: its system does not use it.
const NUMBER_AT: u32 = 60 * 2048;

/// A guest that counts in its memory and on its disk.
fn started(policy: &str) -> (Installation, Console) {
    let here = Installation::new().unwrap();
    shell_guest::start(&here, VM, policy, &[]).unwrap();
    let mut console = booted(&here, VM).unwrap();
    let (one, two) = SECRET;
    run(&mut console, &format!("m={one}; m=${{m}}{two}; n=0; echo SET-$((6 * 7))"), "SET-42")
        .unwrap();
    (here, console)
}

/// The guest counts on by one, in its memory and on its disk, and finds both equal before that.
fn counts(console: &mut Console, from: u32) {
    let disk = format!("dd if=/dev/vda bs=512 skip={NUMBER_AT} count=1 2>/dev/null | tr -dc 0-9");
    let to = format!("dd of=/dev/vda bs=512 seek={NUMBER_AT} conv=notrunc,fsync 2>/dev/null");
    if from > 0 {
        let drop = "echo 3 >/proc/sys/vm/drop_caches";
        run(
            console,
            &format!("{drop}; echo DISK-$({disk})-RAM-$n-"),
            &format!("DISK-{from}-RAM-{from}-"),
        )
        .unwrap();
    }
    let next = from + 1;
    let count = format!("n=$((n + 1)); printf '%-511s\\n' $n | {to}; echo COUNTED-$n-");
    run(console, &count, &format!("COUNTED-{next}-")).unwrap();
}

fn home(here: &Installation) -> PathBuf {
    here.home(VM).unwrap()
}

fn memory(here: &Installation) -> PathBuf {
    home(here).join("vm.memory")
}

fn is_in_the_clear(here: &Installation) -> bool {
    let text = format!("{}{}", SECRET.0, SECRET.1).into_bytes();
    let files = std::fs::read_dir(home(here)).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|file| file.is_file()).any(|file| {
        let content = std::fs::read(file).unwrap();
        contains(&content, &text)
    })
}

/// How the file has its key (docs/formats/sealed-file.md).
fn key_slot(here: &Installation) -> u8 {
    std::fs::read(memory(here)).unwrap()[512]
}

fn suspend(here: &Installation, console: Console) {
    here.vmseal(&["vm", "suspend", VM]).unwrap();
    drop(console);
}

fn resume(here: &Installation) -> Console {
    here.vmseal(&["vm", "resume", VM]).unwrap();
    here.console(VM).unwrap()
}

fn is_off_and_saved(here: &Installation) {
    assert_eq!(here.vm(VM).unwrap()["power"], "suspended");
    assert!(memory(here).exists() && !home(here).join("vm.memory.creating").exists());
    for process in ["qemu-system-x86_64", "vmseal-filter"] {
        assert!(here.processes_of(VM, process).unwrap().is_empty(), "{process} lives");
    }
}

/// QEMU takes memory only with the cards that it was saved with: their ROMs, where the guest was started from the network, and their
/// addresses. Whether a cable is plugged in is as it was set last.
#[test]
fn a_guest_goes_on_with_the_cards_that_it_had_and_the_cables_as_they_are_now() {
    let (here, console) = started("encrypted");
    drop(console);
    let off = || here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    let card = |link: &str| here.vmseal(&["nic", "set", VM, "nic0", "--link", link]).unwrap();
    let is_connected = |console: &mut Console, wanted: u8| {
        let carrier = format!("[ $(cat /sys/class/net/eth0/carrier) = {wanted} ]");
        shell_guest::holds(console, &carrier).unwrap();
    };
    off();
    // Nothing there starts it: its disk does.
    here.vmseal(&["vm", "start", VM, "--boot-once", "network"]).unwrap();
    let mut console = booted(&here, VM).unwrap();
    is_connected(&mut console, 1);
    suspend(&here, console);
    card("down");
    let mut console = resume(&here);
    is_connected(&mut console, 0);
    here.vmseal(&["snapshot", "create", VM, "cut", "--memory"]).unwrap();
    card("up");
    is_connected(&mut console, 1);
    drop(console);
    here.vmseal(&["snapshot", "revert", VM, "cut", "--running"]).unwrap();
    is_connected(&mut here.console(VM).unwrap(), 1);

    off();
    here.vmseal(&["nic", "remove", VM, "nic0"]).unwrap();
    here.vmseal(&["snapshot", "revert", VM, "cut"]).unwrap();
    let refused = here.refused(&["vm", "resume", VM]).unwrap();
    assert!(refused.contains("52:54:0a:00:02:0f"), "{refused}");
    here.vmseal(&["vm", "start", VM, "--discard-memory"]).unwrap();
    off();
    let again = "user,mac=52:54:0a:00:02:0f,name=again";
    here.vmseal(&["nic", "add", VM, "--nic", again]).unwrap();
    here.vmseal(&["snapshot", "revert", VM, "cut", "--running"]).unwrap();
    is_connected(&mut here.console(VM).unwrap(), 1);
}

#[test]
fn a_guest_goes_on_where_it_was_and_its_memory_is_ciphertext() {
    let (here, mut console) = started("encrypted");
    counts(&mut console, 0);
    suspend(&here, console);
    is_off_and_saved(&here);
    assert!(!is_in_the_clear(&here), "the memory is in the clear");
    assert_eq!(key_slot(&here), 1, "the file's key is wrapped under the VM's");
    // What would change what its guest knows is refused, with the way out.
    for change in [
        &["vm", "stop", VM, "--force"][..],
        &["disk", "add", VM, "--disk", "name=more,datastore=local,size=8MiB"],
        &["vm", "delete", VM],
        &["vm", "start", VM, "--boot-once", "network"],
    ] {
        let refused = here.refused(change).unwrap();
        assert!(refused.contains("suspended"), "{change:?}: {refused}");
    }
    // Another key opens the memory, and the former one does not.
    let before = std::fs::read(memory(&here)).unwrap();
    here.vmseal(&["vm", "recrypt", VM]).unwrap();
    let after = std::fs::read(memory(&here)).unwrap();
    assert!(before[512..1536] != after[512..1536], "its key slots are as before");
    assert!(before[4096..] == after[4096..], "its frames were written again");
    is_off_and_saved(&here);
    // What takes effect when the guest next boots may change.
    here.vmseal(&["vm", "set", VM, "--memory", "256MiB", "--vcpus", "2"]).unwrap();
    is_off_and_saved(&here);
    assert!(here.refused(&["vm", "suspend", VM]).unwrap().contains("suspended already"));
    let mut console = resume(&here);
    counts(&mut console, 1);
    assert!(!memory(&here).exists() && !home(&here).join("vm.memory.used").exists());
    assert!(here.refused(&["vm", "resume", VM]).unwrap().contains("not suspended"));
    // Once more. The memory of before, put back, is not taken for the one that was saved.
    suspend(&here, console);
    let saved = std::fs::read(memory(&here)).unwrap();
    std::fs::write(memory(&here), &after).unwrap();
    let why = here.refused(&["vm", "resume", VM]).unwrap();
    for part in ["vm.memory is not", "of generation", "is expected", "--discard-memory"] {
        assert!(why.contains(part), "{why}");
    }
    is_off_and_saved(&here);
    std::fs::write(memory(&here), saved).unwrap();
    // Started in place of resumed.
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = here.console(VM).unwrap();
    counts(&mut console, 2);
    // One that cannot be saved: its guest goes on, and what has its name is removed before that.
    std::fs::create_dir(home(&here).join("vm.memory.creating")).unwrap();
    std::fs::write(memory(&here), &after).unwrap();
    let why = here.refused(&["vm", "suspend", VM]).unwrap();
    assert!(why.contains("it runs on"), "{why}");
    assert!(!memory(&here).exists(), "the next start would take it");
    counts(&mut console, 3);
}

/// The memories that snapshots keep.
fn kept(here: &Installation) -> Vec<PathBuf> {
    let files = std::fs::read_dir(home(here)).unwrap().map(|entry| entry.unwrap().path());
    let of_snapshot = |path: &PathBuf| {
        path.file_name().is_some_and(|it| it.to_string_lossy().starts_with("vm.memory.snapshot-"))
    };
    files.filter(of_snapshot).collect()
}

#[test]
fn a_snapshot_with_memory_brings_its_guest_back_as_often_as_wanted() {
    let (here, mut console) = started("encrypted");
    counts(&mut console, 0);
    here.vmseal(&["snapshot", "create", VM, "one", "--memory"]).unwrap();
    assert_eq!(here.json(&["snapshot", "show", VM, "one"]).unwrap()["memory"], true);
    assert_eq!(here.vm(VM).unwrap()["power"], "running");
    let files = kept(&here);
    assert_eq!(files.len(), 1, "{files:?}");
    assert_eq!(std::fs::read(&files[0]).unwrap()[512], 1, "its key is wrapped under the VM's");
    assert!(!is_in_the_clear(&here), "the memory is in the clear");
    // The guest has gone on, and does so from the snapshot, each time.
    counts(&mut console, 1);
    counts(&mut console, 2);
    for recrypt in [false, true] {
        drop(console);
        if recrypt {
            let before = std::fs::read(&files[0]).unwrap();
            here.vmseal(&["vm", "recrypt", VM]).unwrap();
            let after = std::fs::read(&files[0]).unwrap();
            assert!(before[512..1536] != after[512..1536], "its key slots are as before");
            here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
            here.vmseal(&["snapshot", "revert", VM, "one"]).unwrap();
            is_off_and_saved(&here);
            // The memory of the VM and that of the snapshot are one file now.
            here.vmseal(&["vm", "recrypt", VM]).unwrap();
            console = resume(&here);
        } else {
            // Of the VM that runs, in one command.
            here.vmseal(&["snapshot", "revert", VM, "one", "--running"]).unwrap();
            console = here.console(VM).unwrap();
        }
        counts(&mut console, 1);
        assert!(!memory(&here).exists() && kept(&here) == files);
    }
    here.vmseal(&["snapshot", "delete", VM, "one"]).unwrap();
    assert!(kept(&here).is_empty());
    counts(&mut console, 2);
    here.vmseal(&["snapshot", "create", VM, "two", "--memory"]).unwrap();
    drop(console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    let why = here.refused(&["snapshot", "create", VM, "three", "--memory"]).unwrap();
    assert!(why.contains("only a VM that runs"), "{why}");
    let home = home(&here);
    here.vmseal(&["vm", "delete", VM]).unwrap();
    assert!(!home.exists(), "{:?}", std::fs::read_dir(&home).map(Iterator::count));
}

/// Paused, a guest is kept as it is by a snapshot, and stays paused under the filter that it has; it is paused again when it goes on from that.
#[test]
fn a_paused_guest_is_kept_by_a_snapshot_and_is_paused_again() {
    let (here, mut console) = started("encrypted");
    counts(&mut console, 0);
    let power = || here.vm(VM).unwrap()["power"].as_str().unwrap().to_owned();
    let create = |name: &str| here.vmseal(&["snapshot", "create", VM, name, "--memory"]).unwrap();
    here.vmseal(&["vm", "pause", VM]).unwrap();
    let filters = here.processes_of(VM, "vmseal-filter").unwrap();
    create("still");
    let after = here.processes_of(VM, "vmseal-filter").unwrap();
    assert_eq!(after, filters, "the filter was restarted");
    assert_eq!((power().as_str(), kept(&here).len()), ("paused", 1));
    assert!(!is_in_the_clear(&here), "the memory is in the clear");
    // QEMU saves it again when it has run.
    for again in [&["vm", "suspend", VM][..], &["snapshot", "create", VM, "again", "--memory"]] {
        let why = here.refused(again).unwrap();
        assert!(why.contains("vmseal vm unpause"), "{again:?}: {why}");
    }
    assert_eq!((power().as_str(), kept(&here).len()), ("paused", 1));
    here.vmseal(&["vm", "unpause", VM]).unwrap();
    counts(&mut console, 1);
    counts(&mut console, 2);
    drop(console);
    here.vmseal(&["snapshot", "revert", VM, "still", "--running"]).unwrap();
    assert_eq!(power(), "paused");
    here.vmseal(&["vm", "unpause", VM]).unwrap();
    let mut console = here.console(VM).unwrap();
    counts(&mut console, 1);
    // It has run since.
    suspend(&here, console);
    let mut console = resume(&here);
    counts(&mut console, 2);

    // A reset is no run, and after it QEMU does not say any more that it has saved it.
    here.vmseal(&["vm", "pause", VM]).unwrap();
    create("before-reset");
    here.vmseal(&["vm", "reset", VM]).unwrap();
    let why = here.refused(&["vm", "suspend", VM]).unwrap();
    assert!(why.contains("vmseal vm unpause"), "{why}");
    here.vmseal(&["vm", "unpause", VM]).unwrap();
    shell_guest::boots(&mut console).unwrap();
    run(&mut console, "echo FORGOTTEN-$n-", "FORGOTTEN--").unwrap();
}

/// Asleep, a guest is kept by a snapshot, reverted to it, and rid of it, and each time goes on with the memory that fits its disks.
#[test]
fn a_suspended_guest_is_kept_by_a_snapshot_and_has_its_old_memory_again() {
    let (here, mut console) = started("encrypted");
    counts(&mut console, 0);
    suspend(&here, console);
    here.vmseal(&["snapshot", "create", VM, "asleep", "--memory"]).unwrap();
    here.vmseal(&["snapshot", "create", VM, "disks"]).unwrap();
    for (name, memory) in [("asleep", true), ("disks", false)] {
        let shown = here.json(&["snapshot", "show", VM, name]).unwrap();
        assert_eq!(shown["memory"], memory, "{name}");
    }
    is_off_and_saved(&here);
    assert_eq!(kept(&here).len(), 1);
    assert!(!is_in_the_clear(&here), "the memory is in the clear");
    // It goes on above new layers, and the snapshot keeps what it had.
    let mut console = resume(&here);
    counts(&mut console, 1);
    counts(&mut console, 2);
    suspend(&here, console);
    for running in [&[][..], &["--running"]] {
        let revert = [&["snapshot", "revert", VM, "asleep"][..], running].concat();
        let why = here.refused(&revert).unwrap();
        assert!(why.contains("--discard-memory"), "{why}");
        is_off_and_saved(&here);
    }
    here.vmseal(&["vm", "recrypt", VM]).unwrap();
    here.vmseal(&["snapshot", "revert", VM, "asleep", "--discard-memory"]).unwrap();
    is_off_and_saved(&here);
    // A snapshot keeps the memory that it has now: nothing is lost.
    here.vmseal(&["snapshot", "revert", VM, "asleep"]).unwrap();
    here.vmseal(&["snapshot", "delete", VM, "disks"]).unwrap();
    is_off_and_saved(&here);
    let mut console = resume(&here);
    counts(&mut console, 1);
    suspend(&here, console);
    here.vmseal(&["snapshot", "delete", VM, "asleep"]).unwrap();
    is_off_and_saved(&here);
    assert!(kept(&here).is_empty());
    let layers = here.home_files(VM).unwrap().into_iter().filter(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().contains(".layer-"))
    });
    assert_eq!(layers.count(), 0, "layers are not merged");
    let mut console = resume(&here);
    counts(&mut console, 2);
    // Without memory: it boots from what the disks held.
    here.vmseal(&["snapshot", "create", VM, "awake"]).unwrap();
    counts(&mut console, 3);
    suspend(&here, console);
    here.vmseal(&["snapshot", "revert", VM, "awake", "--discard-memory"]).unwrap();
    assert_eq!(here.vm(VM).unwrap()["power"], "off");
    assert!(!memory(&here).exists(), "the next start would take it");
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(&here, VM).unwrap();
    let disk = format!("dd if=/dev/vda bs=512 skip={NUMBER_AT} count=1 2>/dev/null | tr -dc 0-9");
    run(&mut console, &format!("echo DISK-$({disk})-RAM-$n-"), "DISK-3-RAM--").unwrap();
}

/// Whatever dies meanwhile, the memory that is there is that of the disks.
#[test]
fn what_dies_while_a_suspended_vm_is_reverted_leaves_no_memory_of_other_disks() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut console) = started("encrypted");
    counts(&mut console, 0);
    suspend(&here, console);
    here.vmseal(&["snapshot", "create", VM, "asleep", "--memory"]).unwrap();
    console = resume(&here);
    counts(&mut console, 1);
    let revert = ["snapshot", "revert", VM, "asleep", "--discard-memory"];
    for (round, milliseconds) in some_of(&[0, 20, 50, 120, 250]).into_iter().enumerate() {
        suspend(&here, console);
        // There is no filter to kill.
        let victim = [Victim::Agent, Victim::Server, Victim::Machine][round % 3];
        let ended = during(&mut here, VM, &revert, victim, milliseconds);
        here.wait_host().unwrap();
        if ended.status.success() {
            here.wait_power(VM, "suspended").unwrap();
        } else {
            let power = eventually("the VM is at rest", || {
                let power = here.vm(VM).ok()?["power"].as_str()?.to_owned();
                matches!(power.as_str(), "off" | "suspended").then_some(power)
            });
            println!("after {milliseconds} ms of {victim:?}: {}", power.unwrap());
            here.vmseal(&revert).unwrap();
        }
        is_off_and_saved(&here);
        console = resume(&here);
        counts(&mut console, 1);
    }
}

#[test]
fn a_damaged_memory_is_named_and_the_vm_boots_when_it_is_given_up() {
    let (here, mut console) = started("encrypted");
    counts(&mut console, 0);
    suspend(&here, console);
    let file = memory(&here);
    let mut content = std::fs::read(&file).unwrap();
    let middle = content.len() / 2;
    content[middle] ^= 1;
    std::fs::write(&file, &content).unwrap();
    let why = here.refused(&["vm", "resume", VM]).unwrap();
    assert!(why.contains("is damaged") && why.contains("--discard-memory"), "{why}");
    is_off_and_saved(&here);
    // Cut at the end of a frame, it has no end.
    content[middle] ^= 1;
    std::fs::write(&file, &content[..content.len() - 32]).unwrap();
    let why = here.refused(&["vm", "resume", VM]).unwrap();
    assert!(why.contains("cut off"), "{why}");
    is_off_and_saved(&here);
    // The whole file is good still.
    std::fs::write(&file, &content).unwrap();
    let mut console = resume(&here);
    counts(&mut console, 1);
    suspend(&here, console);
    here.vmseal(&["vm", "start", VM, "--discard-memory"]).unwrap();
    let mut console = booted(&here, VM).unwrap();
    run(&mut console, "echo FORGOTTEN-$n-", "FORGOTTEN--").unwrap();
    assert!(!memory(&here).exists());
}

#[test]
fn a_process_that_dies_leaves_a_vm_that_runs_or_a_whole_memory() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut console) = started("encrypted");
    counts(&mut console, 0);
    let mut count = 1;
    for delay in some_of(&[0, 150, 400, 900]) {
        drop(console);
        let suspending = here.command().unwrap().args(["vm", "suspend", VM]).spawn();
        std::thread::sleep(std::time::Duration::from_millis(delay));
        here.kill_agent();
        if delay % 100 == 0 {
            here.kill_server();
            here.start_server().unwrap();
        }
        here.start_agent().unwrap();
        here.wait_host().unwrap();
        let _ = suspending.unwrap().wait();
        // The task goes on, or has ended.
        let power = eventually("the VM to run or to be suspended", || {
            let power = here.vm(VM).ok()?["power"].as_str()?.to_owned();
            matches!(power.as_str(), "running" | "suspended").then_some(power)
        });
        let power = power.unwrap();
        let tasks = here.json(&["task", "list"]).unwrap();
        println!("after {delay} ms: {power}; {}", tasks[0]["state"]);
        // A task that is open may suspend it still.
        let _ = here.try_vmseal(&["vm", "suspend", VM]);
        here.wait_power(VM, "suspended").unwrap();
        console = resume(&here);
        counts(&mut console, count);
        count += 1;
    }
    // The agent dies while it resumes.
    for delay in [0, 300, 800] {
        suspend(&here, console);
        let resuming = here.command().unwrap().args(["vm", "resume", VM]).spawn();
        std::thread::sleep(std::time::Duration::from_millis(delay));
        here.kill_agent();
        here.start_agent().unwrap();
        here.wait_host().unwrap();
        let _ = resuming.unwrap().wait();
        let _ = here.try_vmseal(&["vm", "resume", VM]);
        here.wait_power(VM, "running").unwrap();
        console = here.console(VM).unwrap();
        counts(&mut console, count);
        count += 1;
    }
    // QEMU dies while the memory is saved: the VM is off, and nothing is left of the attempt.
    drop(console);
    let suspending = here.command().unwrap().args(["vm", "suspend", VM]).spawn();
    kill_hard(here.processes_of(VM, "qemu-system-x86_64").unwrap()[0]);
    let _ = suspending.unwrap().wait();
    here.wait_power(VM, "off").unwrap();
    assert!(!memory(&here).exists());
    here.vmseal(&["vm", "start", VM]).unwrap();
    booted(&here, VM).unwrap();
}

/// A resume that is cancelled at any moment leaves a guest that runs, or its memory.
#[test]
fn a_resume_that_is_cancelled_loses_nothing() {
    if !has_its_turn() {
        return;
    }
    let (here, mut console) = started("encrypted");
    counts(&mut console, 0);
    suspend(&here, console);
    let mut count = 1;
    for delay in (0..16).map(|step| step * 60 + fastrand::u64(..60)) {
        let begun = here.json(&["vm", "resume", VM, "--no-wait"]).unwrap();
        let task = begun["id"].as_str().unwrap().to_owned();
        std::thread::sleep(std::time::Duration::from_millis(delay));
        let _ = here.try_vmseal(&["task", "cancel", &task]);
        let _ = here.try_vmseal(&["task", "wait", &task]);
        let power = here.vm(VM).unwrap()["power"].as_str().unwrap().to_owned();
        println!("cancelled after {delay} ms: {power}");
        match power.as_str() {
            "suspended" => {}
            "running" => {
                let mut console = here.console(VM).unwrap();
                counts(&mut console, count);
                count += 1;
                suspend(&here, console);
            }
            other => panic!("cancelled after {delay} ms it is {other}"),
        }
    }
    let mut console = resume(&here);
    counts(&mut console, count);
}

#[test]
fn a_vm_without_a_key_is_suspended_in_the_clear() {
    let (here, mut console) = started("plain");
    counts(&mut console, 0);
    suspend(&here, console);
    is_off_and_saved(&here);
    assert_eq!(key_slot(&here), 2, "the file's key is in the clear");
    let mut console = resume(&here);
    counts(&mut console, 1);
}

const ENCRYPT: [&str; 5] = ["vm", "encrypt", VM, "--policy", "encrypted"];
const DECRYPT: [&str; 6] = ["vm", "decrypt", VM, "--policy", "plain", "--yes"];

/// Gives the saved memory another name, under which can be read what becomes of it.
fn held(here: &Installation) -> PathBuf {
    let held = here.path("held");
    let _ = std::fs::remove_file(&held);
    std::fs::hard_link(memory(here), &held).unwrap();
    held
}

/// It is suspended, its memory has its key like this, and nothing is left of a copy or of what was before.
fn is_saved_as(here: &Installation, slot: u8) {
    is_off_and_saved(here);
    assert_eq!(key_slot(here), slot, "its key slot");
    let names = here.home_files(VM).unwrap().into_iter();
    let names = names.map(|path| path.file_name().unwrap().to_string_lossy().into_owned());
    let left =
        |name: &String| ["copy", "source", "mirror", ".new"].iter().any(|it| name.contains(it));
    assert_eq!(names.filter(left).collect::<Vec<_>>(), Vec::<String>::new());
    for disk in here.vm(VM).unwrap()["disks"].as_array().unwrap() {
        assert_eq!(disk["encrypted"], slot == 1, "{disk}");
    }
}

#[test]
fn a_suspended_vm_is_encrypted_rekeyed_moved_and_decrypted_and_its_guest_goes_on() {
    let (here, mut console) = started("plain");
    counts(&mut console, 0);
    suspend(&here, console);
    is_saved_as(&here, 2);
    let was = held(&here);
    here.vmseal(&ENCRYPT).unwrap();
    is_saved_as(&here, 1);
    let left = std::fs::read(&was).unwrap();
    assert!(left.len() > 1 << 20 && left.iter().all(|byte| *byte == 0), "its former file is left");
    assert!(!is_in_the_clear(&here), "the memory is in the clear");
    here.vmseal(&["vm", "prove", VM]).unwrap();

    let (was, before) = (held(&here), std::fs::read(memory(&here)).unwrap());
    here.vmseal(&["vm", "recrypt", VM, "--deep"]).unwrap();
    is_saved_as(&here, 1);
    assert!(std::fs::read(&was).unwrap()[..4096].iter().all(|byte| *byte == 0), "its key is left");
    let after = std::fs::read(memory(&here)).unwrap();
    let parts = before[4096..].chunks(4096).zip(after[4096..].chunks(4096));
    assert_eq!(parts.filter(|(one, other)| one == other).count(), 0, "it has the former key");
    let mut console = resume(&here);
    counts(&mut console, 1);

    suspend(&here, console);
    let (former, second) = (home(&here), here.path("second"));
    std::fs::create_dir(&second).unwrap();
    let place = ["datastore", "add", "second", "--host", "here", "--path", text(&second).unwrap()];
    here.vmseal(&place).unwrap();
    here.vmseal(&["vm", "move", VM, "--datastore", "second"]).unwrap();
    assert!(home(&here).starts_with(&second) && !former.exists(), "something is left behind");
    is_saved_as(&here, 1);
    let mut console = resume(&here);
    counts(&mut console, 2);

    suspend(&here, console);
    let planned = here.try_vmseal(&[&DECRYPT[..], &["--dry-run"]].concat()).unwrap();
    let warned = String::from_utf8(planned.stderr).unwrap();
    assert!(warned.contains("the saved memory of its guest will be"), "{warned}");
    here.vmseal(&DECRYPT).unwrap();
    is_saved_as(&here, 2);
    let mut console = resume(&here);
    counts(&mut console, 3);
    assert!(!memory(&here).exists());
}

/// How much of the disks was read for a backup, in bytes.
fn read_bytes(here: &Installation, backup: &str) -> u64 {
    here.json(&["backup", "show", VM, backup]).unwrap()["read_bytes"].as_u64().unwrap()
}

/// The VM is suspended with this memory, and nothing is left of a backup beside it.
fn is_as_suspended(here: &Installation, saved: &[u8]) {
    is_off_and_saved(here);
    assert!(std::fs::read(memory(here)).unwrap() == saved, "its memory is another one");
    let names = here.home_files(VM).unwrap().into_iter();
    let names = names.map(|path| path.file_name().unwrap().to_string_lossy().into_owned());
    let layers: Vec<_> = names.filter(|name| name.contains(".layer-")).collect();
    assert_eq!(layers, Vec::<String>::new(), "a layer is not merged");
}

/// A suspended VM is backed up as it was when it was suspended, but for its memory. Its guest goes on; another VM that is made of the backup
/// boots from what the disk held then.
#[test]
fn a_suspended_vm_is_backed_up_and_its_guest_goes_on() {
    let (here, mut console) = started("encrypted");
    // All of this has to be read where it is not known what has changed.
    let fill = "dd if=/dev/urandom of=/dev/vda bs=1M seek=40 count=16 conv=fsync 2>/dev/null";
    run(&mut console, &format!("{fill}; echo FILLED-$((6 * 7))"), "FILLED-42").unwrap();
    let to = here.path("backups");
    std::fs::create_dir(&to).unwrap();
    here.vmseal(&["backup", "create", VM, "running", "--to", text(&to).unwrap()]).unwrap();
    counts(&mut console, 0);
    suspend(&here, console);
    let saved = std::fs::read(memory(&here)).unwrap();
    let why = here.refused(&["vm", "dump", VM]).unwrap();
    assert!(why.contains("vmseal vm resume web"), "{why}");

    for (name, more) in [("changed", &[][..]), ("again", &[][..]), ("full", &["--full"][..])] {
        let create = [&["backup", "create", VM, name][..], more].concat();
        for dry in [&["--dry-run"][..], &[][..]] {
            let ran = here.try_vmseal(&[&create[..], dry].concat()).unwrap();
            let told = String::from_utf8(ran.stderr).unwrap();
            assert!(ran.status.success() && told.contains("as after a power cut"), "{told}");
        }
        is_as_suspended(&here, &saved);
        let shown = here.json(&["backup", "show", VM, name]).unwrap();
        assert_eq!(shown["contents"]["suspended"], true, "{shown}");
        let told = here.vmseal(&["backup", "show", VM, name]).unwrap();
        assert!(told.contains("as after a power cut"), "{told}");
        here.vmseal(&["backup", "verify", VM, name]).unwrap();
    }
    let (all, few) = (16 << 20, 4 << 20);
    assert!(read_bytes(&here, "running") > all && read_bytes(&here, "full") > all);
    for name in ["changed", "again"] {
        let read = read_bytes(&here, name);
        assert!(read <= few, "{name}: {read} bytes are read");
    }
    let why = here.refused(&["backup", "restore", VM, "changed"]).unwrap();
    assert!(why.contains("vmseal vm resume web") && why.contains("--discard-memory"), "{why}");
    // As another VM, with the data keys of the one that is suspended: the headers of its disks are marked meanwhile.
    here.vmseal(&["backup", "restore", VM, "changed", "--as", "other"]).unwrap();
    is_as_suspended(&here, &saved);

    let mut console = resume(&here);
    counts(&mut console, 1);
    here.vmseal(&["backup", "create", VM, "resumed"]).unwrap();
    here.vmseal(&["backup", "verify", VM, "resumed"]).unwrap();
    let shown = here.json(&["backup", "show", VM, "resumed"]).unwrap();
    assert!(shown["contents"].get("suspended").is_none(), "{shown}");
    here.vmseal(&["vm", "start", "other"]).unwrap();
    let mut other = booted(&here, "other").unwrap();
    let disk = format!("dd if=/dev/vda bs=512 skip={NUMBER_AT} count=1 2>/dev/null | tr -dc 0-9");
    run(&mut other, &format!("echo DISK-$({disk})-RAM-$n-"), "DISK-1-RAM--").unwrap();
    counts(&mut console, 2);
}

/// Whatever dies meanwhile, the memory is as the VM is, and its guest goes on.
#[test]
fn what_dies_while_a_suspended_vm_is_copied_loses_nothing() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut console) = started("plain");
    counts(&mut console, 0);
    let (mut encrypted, mut count) = (false, 1);
    for (round, milliseconds) in some_of(&[100, 300, 600, 1000]).into_iter().enumerate() {
        suspend(&here, console);
        let operation = if encrypted { &DECRYPT[..] } else { &ENCRYPT[..] };
        let ended = match Victim::of_round(round) {
            // The filter that copies: none serves a guest.
            Victim::Filter => during_which(&here, operation, milliseconds, || {
                here.guest_processes(FILTER).into_iter().for_each(kill_hard);
            }),
            victim => during(&mut here, VM, operation, victim, milliseconds),
        };
        here.wait_host().unwrap();
        here.wait_power(VM, "suspended").unwrap();
        encrypted ^= ended.status.success();
        is_saved_as(&here, if encrypted { 1 } else { 2 });
        console = resume(&here);
        counts(&mut console, count);
        count += 1;
    }
}
