//! CD-ROM drives: guests start from what is in them, once or always, and read what is put in while they run.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::PathBuf;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use vmseal_tests::eventually;
use vmseal_tests::guest::{Console, medium};
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::process::{Process, kill_hard};
use vmseal_tests::two_hosts::{HERE, QEMU, THERE, only_host};

/// What the guest on a medium says first.
const STARTED: &str = "VMSEAL-STARTED-FROM-MEDIUM";

fn make_medium(here: &Installation, name: &str) -> PathBuf {
    let path = here.path(&format!("{name}, v1.iso"));
    medium(&path, name).unwrap();
    path
}

/// What the guest reads from its drive.
fn reads(guest: &mut Console, expected: &str) {
    guest.type_text("r").unwrap();
    let read = guest.expect("VMSEAL-READ ", expected.len()).unwrap();
    assert_eq!(read, expected);
}

/// Resets the guest, and has it start from what is in its drive now. The firmware cannot read a medium that was put in
/// since it started.
fn starts_again(guest: &mut Console, expected: &str) {
    guest.type_text("b").unwrap();
    guest.expect(STARTED, 0).unwrap();
    reads(guest, expected);
}

fn create(here: &Installation, vm: &str, more: &[&str]) {
    let disk = format!(
        "datastore=local,format=raw,image={}",
        text(&here.counter_image().unwrap()).unwrap()
    );
    let create =
        ["vm", "create", vm, "--policy", "encrypted", "--memory", "32MiB", "--disk", &disk];
    here.vmseal(&[&create[..], more].concat()).unwrap();
}

/// The console of a guest that has started so often from a medium: one that is opened again shows what was said before.
fn console_again(here: &Installation, former: Console, starts: u32) -> Console {
    drop(former);
    let mut guest = here.console("web").unwrap();
    for _ in 0..starts {
        guest.expect(STARTED, 0).unwrap();
    }
    guest
}

/// What is in the drive is changed, and the agent dies meanwhile: QEMU stands still, so that it cannot have done it. Who asked for it is
/// told so, and asks again.
fn agent_dies_while_it_changes(here: &mut Installation, change: &[&str], drive: &Value) {
    let qemu = Pid::from_raw(here.processes_of("web", QEMU).unwrap()[0]);
    kill(qemu, Signal::SIGSTOP).unwrap();
    let log = here.path(&format!("{}.log", change[2]));
    let mut asking = Process::start(here.command().unwrap().args(change), &log).unwrap();
    eventually("the change is in the inventory", || {
        (here.vm("web").ok()?["hardware"]["cdrom"] == *drive).then_some(())
    })
    .unwrap();
    assert!(!asking.ended(), "{}", std::fs::read_to_string(&log).unwrap());
    here.kill_agent();
    kill(qemu, Signal::SIGCONT).unwrap();
    let ended = asking.wait().unwrap();
    let said = std::fs::read_to_string(&log).unwrap();
    assert!(!ended.success() && said.contains("Do it again"), "{said}");
    here.start_agent().unwrap();
    here.wait_host().unwrap();
    here.vmseal(change).unwrap();
    assert_eq!(here.vm("web").unwrap()["hardware"]["cdrom"], *drive);
}

fn off(here: &Installation, vm: &str) {
    here.vmseal(&["vm", "stop", vm, "--force"]).unwrap();
}

#[test]
fn guests_start_from_a_medium_once_or_always_and_read_what_is_put_in() {
    let mut here = Installation::new().unwrap();
    let (first, second) = (make_medium(&here, "first"), make_medium(&here, "second"));
    let (first, second) = (text(&first).unwrap(), text(&second).unwrap());
    create(&here, "web", &["--cdrom", first]);
    let shown = here.vmseal(&["vm", "show", "web"]).unwrap();
    assert!(shown.contains(first) && shown.contains("disk,cdrom"), "{shown}");

    // The disk comes first, except this time, and again after a reset.
    assert_eq!(here.boot_counter("web").unwrap(), 1);
    off(&here, "web");
    here.vmseal(&["vm", "start", "web", "--boot-once", "cdrom"]).unwrap();
    let mut guest = here.console("web").unwrap();
    guest.expect(STARTED, 0).unwrap();
    reads(&mut guest, "first");
    guest.type_text("b").unwrap();
    assert_eq!(guest.next_count().unwrap(), 2);
    drop(guest);
    off(&here, "web");
    assert_eq!(here.boot_counter("web").unwrap(), 3);
    let set = here.json(&["vm", "set", "web", "--boot", "cdrom,disk"]).unwrap();
    assert_eq!(set["at_next_start"], json!(["boot"]), "{set}");
    off(&here, "web");

    here.vmseal(&["vm", "start", "web"]).unwrap();
    let mut guest = here.console("web").unwrap();
    guest.expect(STARTED, 0).unwrap();
    let planned = here.vmseal(&["vm", "cdrom", "insert", "web", second, "--dry-run"]).unwrap();
    assert!(planned.contains(second), "{planned}");
    reads(&mut guest, "first");
    for _ in 0..2 {
        here.vmseal(&["vm", "cdrom", "insert", "web", second]).unwrap();
        starts_again(&mut guest, "second");
    }
    assert_eq!(here.vm("web").unwrap()["hardware"]["cdrom"]["medium"], second);
    // The next agent has the medium on record, and can take it out.
    here.kill_agent();
    std::fs::remove_file(second).unwrap();
    here.start_agent().unwrap();
    here.wait_host().unwrap();
    let mut guest = console_again(&here, guest, 3);
    // After the last start it has read this before.
    guest.expect("VMSEAL-READ second", 0).unwrap();
    reads(&mut guest, "second");
    let third = make_medium(&here, "third");
    let third = text(&third).unwrap();
    let insert = ["vm", "cdrom", "insert", "web", third];
    agent_dies_while_it_changes(&mut here, &insert, &json!({ "medium": third }));
    let mut guest = console_again(&here, guest, 3);
    starts_again(&mut guest, "third");
    // The drive is none of the filter's, which the firmware needs for the disk when it starts again.
    kill_hard(here.processes_of("web", "vmseal-filter").unwrap()[0]);
    here.wait_alarm("web", "filter-restarted").unwrap();
    here.vmseal(&["vm", "cdrom", "insert", "web", first]).unwrap();
    starts_again(&mut guest, "first");
    // The next QEMU has what was in the drive of this one.
    for qemu in here.processes_of("web", "qemu-system-x86_64").unwrap() {
        kill_hard(qemu);
    }
    here.wait_power("web", "off").unwrap();
    drop(guest);
    here.vmseal(&["vm", "start", "web"]).unwrap();
    let mut guest = here.console("web").unwrap();
    guest.expect(STARTED, 0).unwrap();
    reads(&mut guest, "first");
    let eject = ["vm", "cdrom", "eject", "web"];
    agent_dies_while_it_changes(&mut here, &eject, &json!({}));
    here.vmseal(&eject).unwrap();
    let mut guest = console_again(&here, guest, 1);
    // The firmware goes on to the disk.
    guest.type_text("b").unwrap();
    assert_eq!(guest.next_count().unwrap(), 4);
    off(&here, "web");
}

#[test]
fn a_guest_with_an_empty_disk_starts_from_the_medium_behind_it() {
    let here = Installation::new().unwrap();
    let iso = make_medium(&here, "installer");
    let new = ["vm", "create", "web", "--policy", "encrypted", "--memory", "32MiB"];
    let devices = ["--disk", "datastore=local,size=1MiB", "--cdrom", text(&iso).unwrap()];
    here.vmseal(&[&new[..], &devices].concat()).unwrap();
    here.vmseal(&["vm", "start", "web"]).unwrap();
    let mut guest = here.console("web").unwrap();
    guest.expect(STARTED, 0).unwrap();
    reads(&mut guest, "installer");
    off(&here, "web");
}

/// The file that was in the drive is not there any more when the guest goes on.
#[test]
fn a_guest_that_is_resumed_has_in_its_drive_what_was_put_in_meanwhile() {
    let here = Installation::new().unwrap();
    let media = ["first", "second", "third"].map(|name| make_medium(&here, name));
    let [first, second, third] = media.each_ref().map(|path| text(path).unwrap());
    create(&here, "web", &["--cdrom", first, "--boot", "cdrom,disk"]);
    here.vmseal(&["vm", "start", "web"]).unwrap();
    let mut guest = here.console("web").unwrap();
    guest.expect(STARTED, 0).unwrap();
    reads(&mut guest, "first");
    drop(guest);
    here.vmseal(&["vm", "suspend", "web"]).unwrap();
    here.wait_power("web", "suspended").unwrap();
    std::fs::remove_file(first).unwrap();
    let refused = here.refused(&["vm", "resume", "web"]).unwrap();
    assert!(refused.contains(first), "{refused}");
    here.vmseal(&["vm", "cdrom", "eject", "web"]).unwrap();
    here.vmseal(&["vm", "resume", "web"]).unwrap();
    assert_eq!(here.vm("web").unwrap()["hardware"]["cdrom"], json!({}));
    here.vmseal(&["vm", "cdrom", "insert", "web", second]).unwrap();
    let mut guest = here.console("web").unwrap();
    starts_again(&mut guest, "second");
    drop(guest);

    here.vmseal(&["vm", "suspend", "web"]).unwrap();
    here.wait_power("web", "suspended").unwrap();
    here.vmseal(&["vm", "cdrom", "insert", "web", third]).unwrap();
    here.vmseal(&["vm", "resume", "web"]).unwrap();
    let mut guest = here.console("web").unwrap();
    starts_again(&mut guest, "third");
    assert_eq!(here.vm("web").unwrap()["hardware"]["cdrom"]["medium"], third);
}

/// Both hosts are this machine, and have the same files.
#[test]
fn a_guest_that_moves_to_another_host_goes_on_reading_its_medium() {
    let mut here = Installation::new().unwrap();
    let media = ["first", "second"].map(|name| make_medium(&here, name));
    let [first, second] = media.each_ref().map(|path| text(path).unwrap());
    let store = here.path("datastore");
    here.add_host(THERE).unwrap();
    here.vmseal(&["datastore", "share", "local", "--host", THERE, "--path", text(&store).unwrap()])
        .unwrap();
    create(&here, "web", &["--cdrom", first, "--boot", "cdrom,disk"]);
    here.vmseal(&["vm", "start", "web"]).unwrap();
    let mut guest = here.console("web").unwrap();
    guest.expect(STARTED, 0).unwrap();
    reads(&mut guest, "first");
    drop(guest);

    // Another file takes the name of the one that the guest has open, and that one comes back.
    let kept = here.path("kept.iso");
    std::fs::rename(first, &kept).unwrap();
    std::fs::copy(&kept, first).unwrap();
    let refused = here.refused(&["vm", "migrate", "web", THERE, "--dry-run"]).unwrap();
    assert!(refused.contains("the guest has another file open"), "{refused}");
    assert!(refused.contains("vmseal vm cdrom eject web"), "{refused}");
    std::fs::rename(&kept, first).unwrap();
    let planned = here.vmseal(&["vm", "migrate", "web", THERE, "--dry-run"]).unwrap();
    assert!(planned.contains("choose host 'there'"), "{planned}");

    here.vmseal(&["vm", "migrate", "web", THERE]).unwrap();
    assert_eq!(only_host(&here, "web").unwrap(), THERE);
    let mut guest = here.console("web").unwrap();
    reads(&mut guest, "first");
    // There it can be changed, and goes back with what was put in.
    here.vmseal(&["vm", "cdrom", "insert", "web", second]).unwrap();
    starts_again(&mut guest, "second");
    drop(guest);
    here.vmseal(&["vm", "migrate", "web", HERE]).unwrap();
    assert_eq!(only_host(&here, "web").unwrap(), HERE);
    let mut guest = here.console("web").unwrap();
    reads(&mut guest, "second");

    std::fs::remove_file(second).unwrap();
    let refused = here.refused(&["vm", "migrate", "web", THERE]).unwrap();
    assert!(refused.contains("on host 'here' it cannot be compared"), "{refused}");
    here.vmseal(&["vm", "cdrom", "eject", "web"]).unwrap();
    here.vmseal(&["vm", "migrate", "web", THERE]).unwrap();
    assert_eq!(only_host(&here, "web").unwrap(), THERE);
}

#[test]
fn what_no_drive_takes_is_refused_and_nothing_changes() {
    let here = Installation::new().unwrap();
    let good = make_medium(&here, "good");
    let good = text(&good).unwrap();
    let short = here.path("short.iso");
    std::fs::write(&short, "short").unwrap();
    let missing = here.path("missing.iso");
    let refused = |with: &[&str], option: &str, what: &str| {
        let told = here.refused(with).unwrap();
        assert!(told.contains(option) && told.contains(what), "{with:?}: {told}");
    };
    let disk = "datastore=local,size=1MiB";
    let new = ["vm", "create", "web", "--policy", "plain", "--memory", "32MiB", "--disk", disk];
    let with = |more: &[&'static str]| [&new[..], more].concat();
    for dry in [&[][..], &["--dry-run"]] {
        for (iso, what) in [
            ("relative.iso", "not absolute"),
            (text(&missing).unwrap(), "No such file"),
            (text(&short).unwrap(), "5 bytes"),
            ("/etc", "no regular file"),
        ] {
            refused(&[&new[..], &["--cdrom", iso], dry].concat(), "--cdrom", what);
        }
    }
    refused(&with(&["--boot", "cdrom,disk"]), "--boot", "no CD-ROM drive");
    refused(&with(&["--boot", "disk,disk"]), "--boot", "twice");
    refused(&with(&["--boot", "network"]), "--boot", "no network card");
    assert_eq!(here.json(&["vm", "list"]).unwrap(), Value::Array(Vec::new()));

    create(&here, "web", &[]);
    for (first, what) in [("cdrom", "no CD-ROM drive"), ("network", "no network card")] {
        refused(&["vm", "start", "web", "--boot-once", first], "--boot-once", what);
    }
    refused(&["vm", "cdrom", "eject", "web"], "VM 'web'", "no CD-ROM drive");
    assert_eq!(here.boot_counter("web").unwrap(), 1);
    refused(&["vm", "cdrom", "insert", "web", good], "VM 'web'", "stop it first");
    off(&here, "web");
    assert!(here.vm("web").unwrap()["hardware"].get("cdrom").is_none());
    refused(&["vm", "cdrom", "insert", "web", "/etc"], "ISO", "no regular file");
    here.vmseal(&["vm", "cdrom", "insert", "web", good]).unwrap();

    // What has gone since is missed when the VM starts, until it is taken out.
    std::fs::remove_file(good).unwrap();
    refused(&["vm", "start", "web"], good, "No such file");
    here.vmseal(&["vm", "cdrom", "eject", "web"]).unwrap();
    assert_eq!(here.boot_counter("web").unwrap(), 2);
    off(&here, "web");
}
