//! Backups of a VM whose guest writes: all of one instant, ciphertext, openable by other tools, and restored without a loss;
//! also when the agent, the filter or the server dies meanwhile, and when the VM was deleted.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use vmseal_tests::counting_guest::{MARKER, count, read_marker, started, stop_counting};
use vmseal_tests::guest::Console;
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::{
    Victim, console_again, disks_are_served, during, has_its_turn, some_of, while_the_guest_dies,
};
use vmseal_tests::process::kill_hard;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{booted, run};

const VM: &str = "web";
const OTHER: &str = "again";

/// A place of the guest's disk that its system does not use, in MiB.
const TEXT_AT: u32 = 58;

/// The backups of the long test.
const NAMES: [&str; 4] = ["one", "two", "three", "four"];

fn write(console: &mut Console, text: &str) {
    let to = format!("dd of=/dev/vda bs=1M seek={TEXT_AT} conv=notrunc,fsync 2>/dev/null");
    run(console, &format!("echo {text} | {to}; echo WROTE-$((6 * 7))"), "WROTE-42").unwrap();
}

fn reads(console: &mut Console, text: &str) {
    let read = format!("dd if=/dev/vda bs=1M skip={TEXT_AT} count=1 2>/dev/null | head -n 1");
    run(console, &format!("echo 3 >/proc/sys/vm/drop_caches; {read}"), text).unwrap();
}

fn backup(here: &Installation, arguments: &[&str]) -> String {
    here.vmseal(&[&["backup"], arguments].concat()).unwrap()
}

fn listed(here: &Installation) -> Vec<Value> {
    here.json(&["backup", "list", VM]).unwrap().as_array().unwrap().clone()
}

/// How many bitmaps note what has changed since a backup.
fn tracked(here: &Installation) -> usize {
    let bitmaps = here.json(&["disk", "bitmap", "list", VM, "disk0"]).unwrap();
    let ours = |it: &&Value| it["name"].as_str().unwrap().starts_with("vmseal-backup-");
    bitmaps.as_array().unwrap().iter().filter(ours).count()
}

/// The directory of a backup.
fn path(here: &Installation, name: &str) -> PathBuf {
    let shown = here.json(&["backup", "show", VM, name]).unwrap();
    let part = |field: &str| shown[field].as_str().unwrap().to_owned();
    Path::new(&part("directory")).join(part("vm_id")).join(part("id"))
}

fn stop(here: &Installation, console: Console) {
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    drop(console);
}

fn restarted(here: &Installation) -> Console {
    here.vmseal(&["vm", "start", VM]).unwrap();
    booted(here, VM).unwrap()
}

/// What a tool of QEMU's reads of an image with all that it is above.
fn converted(here: &Installation, image: &Path) -> Vec<u8> {
    let to = here.path("converted");
    let mut command = Command::new("qemu-img");
    let ran = command.args(["convert", "-O", "raw"]).arg(image).arg(&to).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    std::fs::read(to).unwrap()
}

fn has(bytes: &[u8], text: &str) -> bool {
    contains(bytes, text)
}

#[test]
fn backups_of_a_running_vm_are_verified_and_restored() {
    let (here, mut console) = started(VM, "encrypted");
    let to = here.path("backups");
    std::fs::create_dir(&to).unwrap();
    let to = to.to_str().unwrap();
    let nowhere = here.refused(&["backup", "create", VM]).unwrap();
    assert!(nowhere.contains("--to"), "{nowhere}");
    let missing = here.path("missing");
    let missing = missing.to_str().unwrap();
    for more in [&[][..], &["--dry-run"]] {
        let asked = [&["backup", "create", VM, "--to", missing], more].concat();
        let refused = here.refused(&asked).unwrap();
        assert!(refused.contains(missing) && refused.contains("--to"), "{refused}");
    }
    let planned = backup(&here, &["create", VM, "--to", to, "--dry-run"]);
    assert!(planned.contains("write the backup"), "{planned}");
    assert_eq!(listed(&here), Vec::<Value>::new());
    write(&mut console, "TEXT-OF-ONE");
    count(&mut console);
    backup(&here, &["create", VM, "one", "--to", to]);
    write(&mut console, "TEXT-OF-TWO");
    backup(&here, &["create", VM, "two"]);
    stop_counting(&mut console);
    // What the guest changes from now on is noted, so that the next backup reads no more than that.
    assert_eq!(tracked(&here), 1);
    write(&mut console, "TEXT-OF-THREE");
    backup(&here, &["create", VM, "three"]);
    assert_eq!(tracked(&here), 1);
    // What a filter has noted outlives it.
    here.processes_of(VM, "vmseal-filter").unwrap().into_iter().for_each(kill_hard);
    reads(&mut console, "TEXT-OF-THREE");
    // The guest may be served before the agent knows it.
    disks_are_served(&here, VM);
    assert_eq!(tracked(&here), 1);
    write(&mut console, "TEXT-OF-FOUR");
    backup(&here, &["create", VM, "four"]);
    let sparse = ["three", "four"].map(|name| path(&here, name).join("disk0.qcow2"));
    for (image, text) in sparse.iter().zip(["TEXT-OF-THREE", "TEXT-OF-FOUR"]) {
        assert!(!has(&converted(&here, image), text), "{text} is in the clear");
    }
    write(&mut console, "TEXT-OF-NOW");
    let all = listed(&here);
    assert_eq!((&all[0]["parent"], &all[1]["parent"]), (&Value::Null, &"one".into()), "{all:?}");
    let bytes = |at: usize| all[at]["bytes"].as_u64().unwrap();
    assert!(bytes(1) * 4 < bytes(0), "{all:?}");
    assert_eq!(here.json(&["snapshot", "list", VM]).unwrap(), Value::Array(Vec::new()));

    // Ciphertext, for any tool that knows the format; a header of LUKS2 that opens with nothing but the VM's key.
    let full = std::fs::read(path(&here, "one").join("disk0.luks")).unwrap();
    let above = converted(&here, &path(&here, "two").join("disk0.qcow2"));
    assert_eq!(full.len(), above.len());
    for (image, name) in [(&full, "one"), (&above, "two")] {
        assert!(image.starts_with(b"LUKS\xba\xbe"), "{name} is no LUKS2 volume");
        for text in [MARKER, "TEXT-OF-ONE", "TEXT-OF-TWO"] {
            assert!(!has(image, text), "{text} is in the clear in backup {name}");
        }
    }
    let needed = here.refused(&["backup", "delete", VM, "one"]).unwrap();
    assert!(needed.contains("needed by two"), "{needed}");
    for name in NAMES {
        backup(&here, &["verify", VM, name]);
    }
    assert!(listed(&here).iter().all(|it| it["verified"].is_string()));
    let running = here.refused(&["backup", "restore", VM, "one"]).unwrap();
    assert!(running.contains("stop it first"), "{running}");

    // With another key since, of which the backups know nothing.
    here.vmseal(&["vm", "recrypt", VM]).unwrap();
    backup(&here, &["verify", VM, "two"]);
    stop(&here, console);
    for (name, text) in NAMES.into_iter().zip(["ONE", "TWO", "THREE", "FOUR"]) {
        let text = &format!("TEXT-OF-{text}");
        backup(&here, &["restore", VM, name]);
        assert!(here.disk_has(VM, "disk0", TEXT_AT, text).unwrap(), "{name}: {text}");
    }
    let mut console = restarted(&here);
    reads(&mut console, "TEXT-OF-FOUR");
    read_marker(&mut console);
    stop(&here, console);

    // A VM that was deleted, with its key that the backups have kept.
    here.vmseal(&["vm", "delete", VM]).unwrap();
    assert!(listed(&here).iter().all(|it| it["vm_deleted"] == true));
    backup(&here, &["restore", VM, "two"]);
    assert!(here.disk_has(VM, "disk0", TEXT_AT, "TEXT-OF-TWO").unwrap());
    let elsewhere = ["restore", VM, "two", "--name", OTHER, "--datastore", "second"];
    let there = here.refused(&[&["backup"], &elsewhere[..]].concat()).unwrap();
    assert!(there.contains("exists, and its disks are restored in their places"), "{there}");
    // Another time, by another name and on another datastore.
    here.vmseal(&["vm", "delete", VM]).unwrap();
    let unknown = here.refused(&[&["backup"], &elsewhere[..]].concat()).unwrap();
    assert!(unknown.contains("no datastore 'second'"), "{unknown}");
    let second = here.path("second");
    std::fs::create_dir(&second).unwrap();
    let second = second.to_str().unwrap();
    here.vmseal(&["datastore", "add", "second", "--host", "here", "--path", second]).unwrap();
    backup(&here, &elsewhere);
    let shown = here.vm(OTHER).unwrap();
    let disks = shown["disks"].as_array().unwrap();
    assert!(disks.iter().all(|disk| disk["datastore"] == "second"), "{shown}");
    here.vmseal(&["vm", "start", OTHER]).unwrap();
    let mut console = booted(&here, OTHER).unwrap();
    reads(&mut console, "TEXT-OF-TWO");
    for name in NAMES.into_iter().rev() {
        backup(&here, &["delete", OTHER, name]);
    }
    assert_eq!(std::fs::read_dir(to).unwrap().count(), 0, "something of a backup is left");
    reads(&mut console, "TEXT-OF-TWO");
}

/// A file system of this size that is gone with this.
struct Small(PathBuf);

impl Small {
    fn mounted(at: PathBuf, size: &str) -> Self {
        std::fs::create_dir(&at).unwrap();
        let options = format!("size={size},mode=0755");
        let mut mount = Command::new("mount");
        let mounted = mount.args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(&at).status();
        assert!(mounted.unwrap().success(), "this test needs root");
        Self(at)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["--lazy"]).arg(&self.0).status();
    }
}

/// Where the directory of backups is full, nothing is said to be damaged.
#[test]
fn a_full_directory_is_no_damage() {
    let (here, console) = started(VM, "encrypted");
    let small = Small::mounted(here.path("small"), "200m");
    backup(&here, &["create", VM, "one", "--to", small.0.to_str().unwrap()]);
    stop(&here, console);
    let filler = small.0.join("filler");
    let from = std::fs::File::open("/dev/zero").unwrap();
    let filled = std::io::copy(&mut &from, &mut std::fs::File::create(&filler).unwrap());
    assert_eq!(filled.unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    for verb in ["verify", "restore"] {
        let told = here.refused(&["backup", verb, VM, "one"]).unwrap();
        let says = told.contains("no space on the directory of backups");
        assert!(says && !told.contains("damaged"), "{verb}: {told}");
    }
    assert!(listed(&here)[0]["verification_failed"].is_null());
    let told = here.refused(&["backup", "create", VM, "two", "--full"]).unwrap();
    assert!(told.contains("needed for the backup"), "{told}");
    std::fs::remove_file(filler).unwrap();
    backup(&here, &["verify", VM, "one"]);
    backup(&here, &["restore", VM, "one"]);
}

/// How much of its disks was read for a backup, in bytes.
fn read_bytes(here: &Installation, name: &str) -> u64 {
    here.json(&["backup", "show", VM, name]).unwrap()["read_bytes"].as_u64().unwrap()
}

/// A backup reads what its guest has changed; all of it where that is not known for sure, and then it is no less right.
#[test]
fn a_backup_reads_no_more_than_was_changed_where_that_is_known() {
    let (here, mut console) = started(VM, "encrypted");
    let to = here.path("backups");
    std::fs::create_dir(&to).unwrap();
    // All of its disk is there, so that all of it has to be read.
    let fill = "dd if=/dev/urandom of=/dev/vda bs=1M seek=40 count=16 conv=fsync 2>/dev/null";
    run(&mut console, &format!("{fill}; echo FILLED-$((6 * 7))"), "FILLED-42").unwrap();
    write(&mut console, "TEXT-OF-ONE");
    backup(&here, &["create", VM, "one", "--to", to.to_str().unwrap()]);
    let all = read_bytes(&here, "one");
    assert!(all > 16 << 20, "{all}");
    let filters = here.processes_of(VM, "vmseal-filter").unwrap();
    let few = |name: &str| {
        let read = read_bytes(&here, name);
        // What no snapshot keeps, such as the disk for cloud-init, is small, and read whole.
        assert!(read > 0 && read <= 4 << 20, "{name}: {read} of {all}");
    };
    let much = |name: &str| {
        let read = read_bytes(&here, name);
        assert!(read > 16 << 20, "{name}: {read} of {all}");
    };
    // About a hundredth of the disk's 64 MiB.
    let change =
        "dd if=/dev/urandom of=/dev/vda bs=64k seek=640 count=10 conv=notrunc,fsync 2>/dev/null";
    run(&mut console, &format!("{change}; echo CHANGED-$((6 * 7))"), "CHANGED-42").unwrap();
    write(&mut console, "TEXT-OF-TWO");
    backup(&here, &["create", VM, "two"]);
    few("two");
    write(&mut console, "TEXT-OF-THREE");
    backup(&here, &["create", VM, "three"]);
    few("three");
    assert_eq!(here.processes_of(VM, "vmseal-filter").unwrap(), filters, "it was restarted");
    // Nobody may make it look as if nothing had changed.
    let name = here.json(&["disk", "bitmap", "list", VM, "disk0"]).unwrap()[0]["name"].clone();
    let told = here.refused(&["disk", "bitmap", "clear", VM, "disk0", name.as_str().unwrap()]);
    assert!(told.unwrap().contains("choose another"), "it was cleared");

    // A filter that has died.
    write(&mut console, "TEXT-OF-FOUR");
    here.processes_of(VM, "vmseal-filter").unwrap().into_iter().for_each(kill_hard);
    reads(&mut console, "TEXT-OF-FOUR");
    backup(&here, &["create", VM, "four"]);
    few("four");
    // A VM that is off: its last filter has left what it knew.
    write(&mut console, "TEXT-OF-OFF");
    stop(&here, console);
    backup(&here, &["create", VM, "off"]);
    few("off");
    // One that was: what changes after that backup is known, too.
    let mut console = restarted(&here);
    write(&mut console, "TEXT-OF-NEXT");
    backup(&here, &["create", VM, "next"]);
    few("next");
    stop(&here, console);
    // Something that has written past the filter.
    backup(&here, &["restore", VM, "two"]);
    let mut console = restarted(&here);
    reads(&mut console, "TEXT-OF-TWO");
    backup(&here, &["create", VM, "five"]);
    much("five");
    here.vmseal(&["snapshot", "create", VM, "kept"]).unwrap();
    write(&mut console, "TEXT-OF-SIX");
    backup(&here, &["create", VM, "six"]);
    few("six");
    stop(&here, console);
    here.vmseal(&["snapshot", "revert", VM, "kept"]).unwrap();
    let console = restarted(&here);
    backup(&here, &["create", VM, "reverted"]);
    much("reverted");
    // Its key is another one, in another header.
    here.vmseal(&["vm", "recrypt", VM]).unwrap();
    backup(&here, &["create", VM, "recrypted"]);
    much("recrypted");
    stop(&here, console);
    here.vmseal(&["snapshot", "delete", VM, "kept"]).unwrap();
    for (name, text) in [
        ("three", "THREE"),
        ("four", "FOUR"),
        ("six", "SIX"),
        ("recrypted", "TWO"),
        ("off", "OFF"),
        ("next", "NEXT"),
    ] {
        backup(&here, &["verify", VM, name]);
        backup(&here, &["restore", VM, name]);
        let text = format!("TEXT-OF-{text}");
        assert!(here.disk_has(VM, "disk0", TEXT_AT, &text).unwrap(), "{name}: {text}");
    }
    reads(&mut restarted(&here), "TEXT-OF-NEXT");
}

/// What was changed in a backup is found, and nothing of it is restored.
#[test]
fn a_backup_that_was_changed_is_found() {
    use std::os::unix::fs::FileExt;
    let (here, mut console) = started(VM, "encrypted");
    let to = here.path("backups");
    std::fs::create_dir(&to).unwrap();
    write(&mut console, "TEXT-OF-ONE");
    backup(&here, &["create", VM, "one", "--to", to.to_str().unwrap()]);
    write(&mut console, "TEXT-OF-NOW");
    backup(&here, &["create", VM, "two"]);
    stop(&here, console);
    let directory = path(&here, "one");
    let (image, manifest) = (directory.join("disk0.luks"), directory.join("manifest.json"));
    let file = std::fs::File::options().read(true).write(true).open(&image).unwrap();
    let at = (16 << 20) + (u64::from(TEXT_AT) << 20);
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    for verb in ["verify", "restore"] {
        let told = here.refused(&["backup", verb, VM, "one"]).unwrap();
        assert!(told.contains("is damaged") && told.contains(&at.to_string()), "{verb}: {told}");
    }
    // It is not forgotten until it is found whole, and nothing is put above it.
    let failed = listed(&here).remove(0)["verification_failed"].clone();
    assert!(failed["why"].as_str().unwrap().contains("is damaged"), "{failed}");
    assert!(here.vmseal(&["backup", "list", VM]).unwrap().contains("failed at 2"));
    let told = here.json(&["events"]).unwrap().to_string();
    assert_eq!(told.matches("backup.verification-failed").count(), 1, "{told}");
    here.vmseal(&["vm", "start", VM]).unwrap();
    backup(&here, &["create", VM, "three"]);
    assert!(listed(&here)[2]["parent"].is_null(), "it is above a backup that is damaged");
    backup(&here, &["delete", VM, "three"]);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    file.write_all_at(&byte, at).unwrap();
    backup(&here, &["verify", VM, "one"]);
    assert!(listed(&here)[0]["verification_failed"].is_null());
    let text = std::fs::read_to_string(&manifest).unwrap();
    std::fs::write(&manifest, text.replacen("\"one\"", "\"eno\"", 1)).unwrap();
    let told = here.refused(&["backup", "restore", VM, "one"]).unwrap();
    assert!(told.contains("was changed"), "{told}");
    std::fs::write(&manifest, text).unwrap();
    file.set_len(32 << 20).unwrap();
    let told = here.refused(&["backup", "verify", VM, "two"]).unwrap();
    assert!(told.contains("cut off"), "{told}");
    reads(&mut restarted(&here), "TEXT-OF-NOW");
}

/// Whatever dies while a backup is made, it is made or nothing of it is left, and the guest has lost nothing.
#[test]
fn what_dies_while_a_backup_is_made_loses_nothing() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut console) = started(VM, "encrypted");
    let to = here.path("backups");
    std::fs::create_dir(&to).unwrap();
    let to = to.to_str().unwrap();
    for (round, milliseconds) in some_of(&[20, 100, 200, 350, 500, 700]).into_iter().enumerate() {
        count(&mut console);
        let name = format!("round-{round}");
        let create = ["backup", "create", VM, &name, "--to", to];
        let ended = during(&mut here, VM, &create, Victim::of_round(round), milliseconds);
        let there = listed(&here).iter().any(|it| it["name"] == name.as_str());
        assert_eq!(there, ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        console = console_again(&here, VM, console);
        stop_counting(&mut console);
        assert_eq!(here.json(&["snapshot", "list", VM]).unwrap(), Value::Array(Vec::new()));
    }
    let made = listed(&here);
    let directories = std::fs::read_dir(to).unwrap().map(|it| it.unwrap().path());
    let entries: usize = directories.map(|it| std::fs::read_dir(it).unwrap().count()).sum();
    assert_eq!(entries, made.len(), "something is left of what was given up");
    for it in &made {
        backup(&here, &["verify", VM, it["name"].as_str().unwrap()]);
    }
    read_marker(&mut console);
    let create = ["backup", "create", VM, "last", "--to", to];
    let there = while_the_guest_dies(&mut here, VM, &create, fastrand::u64(0..500));
    drop(console);
    assert_eq!(listed(&here).len(), made.len() + usize::from(there));
    if there {
        backup(&here, &["verify", VM, "last"]);
    }
    read_marker(&mut booted(&here, VM).unwrap());
}
