//! Backups of a VM whose disk is in a pool of a real Ceph cluster: they read what the disk has, not all of its length, also where it has
//! snapshots; and what was changed where that is known, also by a guest that was stopped since, unless somebody else may have written.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::Path;

use vmseal_tests::ceph::is_installed;
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
use vmseal_tests::guest::Console;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::shell_guest::{booted, image, run};

const VM: &str = "web";

/// A place of the guest's disk that its system does not use, in MiB.
const TEXT_AT: usize = 58;
const TEXT: &str = "WRITTEN-AFTER-ONE";

/// The disk's length, how much of it anything is written to, and the most that may be read: that, with its header, in whole objects.
const LENGTH: usize = 256 << 20;
const USED: usize = 64 << 20;
const READ_MAX: u64 = 128 << 20;

fn backup(here: &Installation, arguments: &[&str]) {
    here.vmseal(&[&["backup"], arguments].concat()).unwrap();
}

fn reads_little(here: &Installation, name: &str) {
    let read = read_bytes(here, name);
    assert!(read > 0 && read <= READ_MAX, "{name}: {read} bytes are read");
}

/// Has the guest write at a place that its system does not use.
fn write(console: &mut Console, text: &str) {
    let write = format!("dd of=/dev/vda bs=1M seek={TEXT_AT} conv=notrunc,fsync 2>/dev/null");
    run(console, &format!("echo {text} | {write}; echo WROTE-$((6 * 7))"), "WROTE-42").unwrap();
}

fn read_bytes(here: &Installation, name: &str) -> u64 {
    here.json(&["backup", "show", VM, name]).unwrap()["read_bytes"].as_u64().unwrap()
}

/// What the disk has of a VM that is made of a backup, up to where its system is.
fn restored(here: &Installation, name: &str) -> Vec<u8> {
    let mut content = exported(here, name);
    assert!(content.drain(USED..).all(|byte| byte == 0), "{name}: there is more");
    content
}

/// All that the disk has of a VM that is made of a backup.
fn exported(here: &Installation, name: &str) -> Vec<u8> {
    backup(here, &["restore", VM, name, "--as", "copy"]);
    let to = here.path("exported");
    let export = ["disk", "export", "copy", "disk0", "--format", "raw", "--plaintext", "--to"];
    here.vmseal(&[&export[..], &[text(&to).unwrap()]].concat()).unwrap();
    let content = std::fs::read(&to).unwrap();
    std::fs::remove_file(&to).unwrap();
    here.vmseal(&["vm", "delete", "copy"]).unwrap();
    assert_eq!(content.len(), LENGTH);
    content
}

/// A VM with a thin disk in the pool.
fn create(here: &Installation, image: &Path) {
    let thin =
        format!("datastore=ceph,format=raw,image={},size={}MiB", image.display(), LENGTH >> 20);
    let create = ["vm", "create", VM, "--policy", "encrypted", "--disk", &thin];
    let machine = ["--nic", "user,mac=52:54:0a:00:02:0f", "--memory", "192MiB"];
    here.vmseal(&[&create[..], &machine].concat()).unwrap();
}

#[test]
fn a_backup_of_a_thin_disk_in_a_pool_reads_what_it_has() {
    if !is_installed() {
        return;
    }
    let options = Options { messenger: "crc", erasure_coded: false, key_at_server: false };
    let bench = CephInstallation::shared("backups", options);
    let (here, image) = (&bench.here, image().unwrap());
    create(here, &image);
    let to = here.path("backups");
    std::fs::create_dir(&to).unwrap();
    backup(here, &["create", VM, "one", "--to", text(&to).unwrap()]);
    reads_little(here, "one");

    // From here on the disk is an image and a layer above it.
    here.vmseal(&["snapshot", "create", VM, "kept"]).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(here, VM).unwrap();
    write(&mut console, TEXT);
    drop(console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    backup(here, &["create", VM, "two"]);
    backup(here, &["create", VM, "three", "--full"]);
    for name in ["two", "three"] {
        reads_little(here, name);
        backup(here, &["verify", VM, name]);
    }

    let (changed, whole) = (restored(here, "two"), restored(here, "three"));
    assert!(changed == whole, "a change is missing, or there are too many");
    let place = TEXT_AT << 20..(TEXT_AT << 20) + TEXT.len();
    assert!(whole[place.clone()] == *TEXT.as_bytes());
    let before = restored(here, "one");
    assert!(before[place] != *TEXT.as_bytes());
    assert!(before.starts_with(&std::fs::read(image).unwrap()), "it is not what was imported");
    here.vmseal(&["snapshot", "delete", VM, "kept"]).unwrap();
    here.vmseal(&["vm", "delete", VM]).unwrap();
    bench.is_empty();
}

/// How much the guest has filled, at this place, in MiB; and the most that a backup may read that knows what was changed, in bytes.
const FILLED_AT: usize = 64;
const FILLED: u64 = 32;
const FEW: u64 = 8 << 20;

#[test]
fn a_backup_in_a_pool_reads_what_was_changed_though_the_vm_was_stopped_since() {
    if !is_installed() {
        return;
    }
    let options = Options { messenger: "crc", erasure_coded: false, key_at_server: false };
    let bench = CephInstallation::shared("stopped", options);
    let here = &bench.here;
    create(here, &image().unwrap());
    let to = here.path("backups");
    std::fs::create_dir(&to).unwrap();
    let start = || {
        here.vmseal(&["vm", "start", VM]).unwrap();
        booted(here, VM).unwrap()
    };
    let stop = |console: Console| {
        drop(console);
        here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    };
    let few = |name: &str| {
        let read = read_bytes(here, name);
        assert!(read > 0 && read <= FEW, "{name}: {read} bytes are read");
    };
    let all = |name: &str| {
        let read = read_bytes(here, name);
        assert!(read > FILLED << 20, "{name}: {read} bytes are read");
    };

    let mut console = start();
    let fill =
        format!("dd if=/dev/urandom of=/dev/vda bs=1M seek={FILLED_AT} count={FILLED} conv=fsync");
    run(&mut console, &format!("{fill} 2>/dev/null; echo FILLED-$((6 * 7))"), "FILLED-42").unwrap();
    backup(here, &["create", VM, "one", "--to", text(&to).unwrap()]);
    all("one");
    write(&mut console, "TEXT-OF-TWO");
    stop(console);
    let mut console = start();
    backup(here, &["create", VM, "two"]);
    few("two");
    write(&mut console, "TEXT-OF-THREE");
    stop(console);
    backup(here, &["create", VM, "three"]);
    few("three");
    backup(here, &["create", VM, "whole", "--full"]);
    let (changed, whole) = (exported(here, "three"), exported(here, "whole"));
    assert!(changed == whole, "a change is missing");
    assert!(whole[TEXT_AT << 20..].starts_with(b"TEXT-OF-THREE"));
    assert!(exported(here, "two")[TEXT_AT << 20..].starts_with(b"TEXT-OF-TWO"));

    // Another program takes the lock of the image, and may have written to it.
    let console = start();
    backup(here, &["create", VM, "four"]);
    stop(console);
    let pool = &bench.pool.name;
    let images = bench.cluster.rbd(&["ls", pool]);
    for image in String::from_utf8(images.stdout).unwrap().lines() {
        let set = bench.cluster.rbd(&["image-meta", "set", &format!("{pool}/{image}"), "a", "b"]);
        assert!(set.status.success(), "{set:?}");
    }
    backup(here, &["create", VM, "five"]);
    all("five");
    here.vmseal(&["vm", "delete", VM]).unwrap();
    bench.is_empty();
}
