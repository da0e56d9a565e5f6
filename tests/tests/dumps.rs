//! Core dumps: what a guest has in memory is in them, encrypted until somebody who may has them decrypted; the guest goes on.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::{has_its_turn, some_of};
use vmseal_tests::process::kill_hard;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{self, booted, run};

const VM: &str = "web";

/// A text that the guest has in its memory alone: typed in two parts, so that no log has it.
const SECRET: (&str, &str) = ("MARKER-IN-", "A-CORE-9184");

fn started(policy: &str) -> (Installation, Console) {
    let here = Installation::new().unwrap();
    shell_guest::start(&here, VM, policy, &[]).unwrap();
    let mut console = booted(&here, VM).unwrap();
    keep_secret(&mut console);
    (here, console)
}

/// The guest has the text in its memory.
pub(crate) fn keep_secret(console: &mut Console) {
    let (one, two) = SECRET;
    run(console, &format!("m={one}; m=${{m}}{two}; echo SET-$((6 * 7))"), "SET-42").unwrap();
}

fn goes_on(console: &mut Console) {
    run(console, "echo LIVES-$((6 * 7))", "LIVES-42").unwrap();
}

pub(crate) fn has_secret(file: &Path) -> bool {
    let secret = format!("{}{}", SECRET.0, SECRET.1).into_bytes();
    let content = std::fs::read(file).unwrap();
    contains(&content, secret)
}

fn home(here: &Installation) -> PathBuf {
    here.home(VM).unwrap()
}

/// The files of core dumps, whole or not.
pub(crate) fn cores(here: &Installation) -> Vec<PathBuf> {
    let files = std::fs::read_dir(home(here)).unwrap().map(|entry| entry.unwrap().path());
    let is_core =
        |file: &PathBuf| file.file_name().unwrap().to_string_lossy().starts_with("vm.core-");
    files.filter(is_core).collect()
}

fn dumps(here: &Installation) -> Vec<Value> {
    here.json(&["dump", "list", VM]).unwrap().as_array().unwrap().clone()
}

fn readelf(core: &Path) -> String {
    let output = Command::new("readelf").args(["-h", "-n", "-l"]).arg(core).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// `file` names it, and gdb shows the registers of the guest's processor.
fn debuggers_accept(core: &Path) {
    let output = Command::new("file").arg("--brief").arg(core).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.starts_with("ELF 64-bit LSB core file, x86-64"), "{said}");
    let show =
        ["-nx", "-batch", "-ex", "info threads", "-ex", "print/x $cs", "-ex", "print/x $rip"];
    let output = Command::new("gdb").args(show).arg("--core").arg(core).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    // The kernel's code segment, and an address of the kernel: the guest waits for what is typed.
    assert!(said.contains("$1 = 0x10") && said.contains("$2 = 0xffffffff"), "{said}");
}

/// One event says who had this core dump of the VM decrypted, and to which file.
fn is_told(here: &Installation, dump: &str, to: &str) {
    let events = here.json(&["events", "--kind", "dump.decrypt"]).unwrap();
    let what = format!("core dump '{dump}' to {to} on host 'here', IN THE CLEAR");
    let is_it = |event: &&Value| event["detail"] == what.as_str();
    let told: Vec<&Value> = events.as_array().unwrap().iter().filter(is_it).collect();
    let [event] = told[..] else { panic!("{what}: {events}") };
    assert_eq!((&event["actor"], &event["target"]), (&"admin".into(), &VM.into()), "{event}");
}

#[test]
fn a_core_dump_is_ciphertext_until_it_is_decrypted_and_the_guest_goes_on() {
    let (here, mut console) = started("encrypted");
    here.vmseal(&["vm", "dump", VM, "--dry-run"]).unwrap();
    assert!(dumps(&here).is_empty() && cores(&here).is_empty(), "a dry run has left something");
    here.vmseal(&["vm", "dump", VM, "first"]).unwrap();
    goes_on(&mut console);
    let [core] = &cores(&here)[..] else { panic!("{:?}", cores(&here)) };
    assert!(!has_secret(core), "the core dump is in the clear");
    let known = &dumps(&here)[0];
    assert_eq!((known["name"].as_str(), known["encrypted"].as_bool()), (Some("first"), Some(true)));
    assert_eq!(known["bytes"].as_u64(), Some(core.metadata().unwrap().len()));

    let clear = here.path("core");
    let to = text(&clear).unwrap();
    here.vmseal(&["dump", "decrypt", VM, "first", "--to", to]).unwrap();
    assert!(has_secret(&clear), "what was decrypted lacks the guest's memory");
    let said = readelf(&clear);
    assert!(said.contains("CORE (Core file)") && said.contains("NT_PRSTATUS"), "{said}");
    debuggers_accept(&clear);
    is_told(&here, "first", to);
    let again = here.refused(&["dump", "decrypt", VM, "first", "--to", to]).unwrap();
    assert!(again.contains("there already"), "{again}");

    // Both at once, in the other format.
    let clear = here.path("kdump");
    let to = text(&clear).unwrap();
    here.vmseal(&["vm", "dump", VM, "--format", "kdump", "--decrypt-to", to]).unwrap();
    is_told(&here, "dump-1", to);
    goes_on(&mut console);
    assert!(std::fs::read(&clear).unwrap().starts_with(b"makedumpfile"));
    assert_eq!(dumps(&here)[1]["name"], "dump-1");
    // A paused guest stays paused.
    here.vmseal(&["vm", "pause", VM]).unwrap();
    here.vmseal(&["vm", "dump", VM, "paused"]).unwrap();
    assert_eq!(here.vm(VM).unwrap()["power"], "paused");
    here.vmseal(&["vm", "unpause", VM]).unwrap();
    goes_on(&mut console);
    here.vmseal(&["vm", "prove", VM, "--all"]).unwrap();

    let taken = here.refused(&["vm", "dump", VM, "first"]).unwrap();
    assert!(taken.contains("'first'"), "{taken}");
    here.vmseal(&["dump", "delete", VM, "dump-1"]).unwrap();
    assert_eq!((dumps(&here).len(), cores(&here).len()), (2, 2));
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    let off = here.refused(&["vm", "dump", VM]).unwrap();
    assert!(off.contains("is off"), "{off}");
    // Decrypted while the VM is off, with another key than it was encrypted with.
    here.vmseal(&["vm", "recrypt", VM]).unwrap();
    let late = here.path("late");
    here.vmseal(&["dump", "decrypt", VM, "paused", "--to", text(&late).unwrap()]).unwrap();
    assert!(has_secret(&late));
    follow(&here);
    let home = home(&here);
    here.vmseal(&["vm", "delete", VM]).unwrap();
    assert!(!home.exists(), "core dumps outlive their VM");
}

/// Core dumps are as their VM is, and where it is.
fn follow(here: &Installation) {
    let second = here.path("second");
    std::fs::create_dir(&second).unwrap();
    let place = ["datastore", "add", "second", "--host", "here", "--path", text(&second).unwrap()];
    here.vmseal(&place).unwrap();
    let operations = [
        (&["vm", "decrypt", VM, "--yes", "--policy", "plain"][..], false),
        (&["vm", "encrypt", VM, "--policy", "encrypted"][..], true),
        (&["vm", "move", VM, "--datastore", "second"][..], true),
    ];
    for (operation, encrypted) in operations {
        here.vmseal(operation).unwrap();
        let (known, files) = (dumps(here), cores(here));
        assert_eq!((known.len(), files.len()), (2, 2), "{operation:?}");
        for dump in known {
            assert_eq!(dump["encrypted"], encrypted, "{operation:?}: {dump}");
        }
        // How the file has its key (docs/formats/sealed-file.md).
        for file in files {
            assert_eq!(std::fs::read(&file).unwrap()[512], if encrypted { 1 } else { 2 });
        }
        let to = here.path(operation[1]);
        here.vmseal(&["dump", "decrypt", VM, "first", "--to", text(&to).unwrap()]).unwrap();
        assert!(has_secret(&to), "{operation:?}");
    }
}

#[test]
fn a_damaged_core_dump_is_named_and_nothing_is_left_of_its_decryption() {
    let (here, _console) = started("encrypted");
    here.vmseal(&["vm", "dump", VM]).unwrap();
    let core = cores(&here).remove(0);
    let mut content = std::fs::read(&core).unwrap();
    let middle = content.len() / 2;
    content[middle] ^= 1;
    std::fs::write(&core, &content).unwrap();
    let clear = here.path("clear");
    std::fs::create_dir(&clear).unwrap();
    let to = clear.join("core");
    let decrypt = ["dump", "decrypt", VM, "dump-1", "--to", text(&to).unwrap()];
    let why = here.refused(&decrypt).unwrap();
    assert!(why.contains("is damaged"), "{why}");
    assert_eq!(std::fs::read_dir(&clear).unwrap().count(), 0, "a part of it is left");
    content[middle] ^= 1;
    std::fs::write(&core, &content).unwrap();
    here.vmseal(&decrypt).unwrap();
    assert!(has_secret(&to));
}

#[test]
fn the_core_dump_of_a_vm_without_a_key_is_said_to_be_in_the_clear() {
    let (here, mut console) = started("plain");
    here.vmseal(&["vm", "dump", VM]).unwrap();
    goes_on(&mut console);
    assert_eq!(dumps(&here)[0]["encrypted"], false);
    let events = here.json(&["events"]).unwrap();
    let told = |event: &Value| {
        event["kind"] == "vm.dumped" && event["detail"].as_str().unwrap().contains("IN THE CLEAR")
    };
    assert!(events.as_array().unwrap().iter().any(told), "{events}");
    let clear = here.path("core");
    here.vmseal(&["dump", "decrypt", VM, "dump-1", "--to", text(&clear).unwrap()]).unwrap();
    assert!(has_secret(&clear));
}

#[test]
fn a_process_that_dies_leaves_a_whole_core_dump_or_none() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut console) = started("encrypted");
    for delay in some_of(&[0, 100, 250, 500]) {
        let dumping = here.command().unwrap().args(["vm", "dump", VM]).spawn();
        std::thread::sleep(Duration::from_millis(delay));
        here.kill_agent();
        if delay % 100 == 0 {
            here.kill_server();
            here.start_server().unwrap();
        }
        here.start_agent().unwrap();
        here.wait_host().unwrap();
        let _ = dumping.unwrap().wait();
        eventually("the tasks to end", || {
            let tasks = here.json(&["task", "list"]).ok()?;
            // The first one may not have begun.
            let is_open =
                |task: &&Value| !matches!(task["state"].as_str(), Some("done" | "failed"));
            tasks.as_array()?.iter().find(is_open).is_none().then_some(())
        })
        .unwrap();
        println!("after {delay} ms: {} core dumps", dumps(&here).len());
        drop(console);
        console = here.console(VM).unwrap();
        goes_on(&mut console);
        let (known, files) = (dumps(&here), cores(&here));
        assert!(known.iter().all(|dump| dump["bytes"].is_u64()), "{known:?}");
        assert_eq!(known.len(), files.len(), "{known:?} {files:?}");
    }
    for (number, dump) in dumps(&here).iter().enumerate() {
        let clear = here.path(&format!("core-{number}"));
        let name = dump["name"].as_str().unwrap();
        here.vmseal(&["dump", "decrypt", VM, name, "--to", text(&clear).unwrap()]).unwrap();
        assert!(has_secret(&clear), "{name}");
    }
    // QEMU dies while it dumps.
    let before = cores(&here).len();
    let mut dumping = here.command().unwrap().args(["vm", "dump", VM]).spawn().unwrap();
    eventually("the dump to begin", || (cores(&here).len() > before).then_some(())).unwrap();
    kill_hard(here.processes_of(VM, "qemu-system-x86_64").unwrap()[0]);
    let _ = dumping.wait();
    here.wait_power(VM, "off").unwrap();
    let known = dumps(&here).len();
    assert_eq!(known, cores(&here).len(), "{:?}", cores(&here));
}
