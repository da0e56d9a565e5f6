//! Backups of a VM whose disk is in a pool of a real Ceph cluster: they read what the disk has, not all of its length, also where it has
//! snapshots, and have what its guest has changed though nothing notes that when a VM in a pool stops.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use vmseal_tests::ceph::is_installed;
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
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
    let shown = here.json(&["backup", "show", VM, name]).unwrap();
    let read = shown["read_bytes"].as_u64().unwrap();
    assert!(read > 0 && read <= READ_MAX, "{name}: {read} bytes are read: {shown}");
}

/// What the disk has of a VM that is made of a backup.
fn restored(here: &Installation, name: &str) -> Vec<u8> {
    backup(here, &["restore", VM, name, "--as", "copy"]);
    let to = here.path("exported");
    let export = ["disk", "export", "copy", "disk0", "--format", "raw", "--plaintext", "--to"];
    here.vmseal(&[&export[..], &[text(&to).unwrap()]].concat()).unwrap();
    let mut content = std::fs::read(&to).unwrap();
    std::fs::remove_file(&to).unwrap();
    here.vmseal(&["vm", "delete", "copy"]).unwrap();
    assert_eq!(content.len(), LENGTH);
    assert!(content.drain(USED..).all(|byte| byte == 0), "{name}: there is more");
    content
}

#[test]
fn a_backup_of_a_thin_disk_in_a_pool_reads_what_it_has() {
    if !is_installed() {
        return;
    }
    let options = Options { messenger: "crc", erasure_coded: false, key_at_server: false };
    let bench = CephInstallation::shared("backups", options);
    let (here, image) = (&bench.here, image().unwrap());
    let thin =
        format!("datastore=ceph,format=raw,image={},size={}MiB", image.display(), LENGTH >> 20);
    let create = ["vm", "create", VM, "--policy", "encrypted", "--disk", &thin];
    let machine = ["--nic", "user,mac=52:54:0a:00:02:0f", "--memory", "192MiB"];
    here.vmseal(&[&create[..], &machine].concat()).unwrap();
    let to = here.path("backups");
    std::fs::create_dir(&to).unwrap();
    backup(here, &["create", VM, "one", "--to", text(&to).unwrap()]);
    reads_little(here, "one");

    // From here on the disk is an image and a layer above it.
    here.vmseal(&["snapshot", "create", VM, "kept"]).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(here, VM).unwrap();
    let write = format!("dd of=/dev/vda bs=1M seek={TEXT_AT} conv=notrunc,fsync 2>/dev/null");
    let write = format!("echo {TEXT} | {write}; echo WROTE-$((6 * 7))");
    run(&mut console, &write, "WROTE-42").unwrap();
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
