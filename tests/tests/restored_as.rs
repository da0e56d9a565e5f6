//! Backups that become VMs of their own, while the VM that was backed up runs in another form, and when it is deleted.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use serde_json::Value;
use vmseal_tests::counting_guest::{MARKER, read_marker, started};
use vmseal_tests::figures::bounced_bytes;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::Installation;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{booted, run};

const VM: &str = "web";

/// A place of the guest's disk that its system does not use, in MiB.
const TEXT_AT: u32 = 58;

/// The length of a header, in bytes.
const HEADER: usize = 16 << 20;

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

/// What is warned of before a backup becomes this VM.
fn warned(here: &Installation, backup: &str, other: &str) -> String {
    let asked = ["backup", "restore", VM, backup, "--as", other, "--dry-run"];
    let planned = here.try_vmseal(&asked).unwrap();
    let said = String::from_utf8_lossy(&planned.stderr).into_owned();
    assert!(planned.status.success(), "{said}");
    said
}

/// Starts a VM whose guest reads what it had written, beside that of the VM that was backed up; returns whether its
/// filter decrypts in memory of its own.
fn started_as(here: &Installation, vm: &str, text: &str) -> bool {
    here.vmseal(&["vm", "start", vm]).unwrap();
    let mut console = booted(here, vm).unwrap();
    reads(&mut console, text);
    read_marker(&mut console);
    let bounced = bounced_bytes(here, vm).unwrap();
    drop(console);
    here.vmseal(&["vm", "stop", vm, "--force"]).unwrap();
    bounced > 0
}

fn image(here: &Installation, vm: &str) -> Vec<u8> {
    std::fs::read(&here.images(vm).unwrap()[0]).unwrap()
}

fn id(vm: &Value) -> &str {
    vm["id"].as_str().unwrap()
}

#[test]
fn backups_of_before_and_after_an_encryption_become_vms_of_their_own() {
    let (here, mut console) = started(VM, "plain");
    let to = here.path("backups");
    std::fs::create_dir(&to).unwrap();
    write(&mut console, "TEXT-OF-CLEAR");
    backup(&here, &["create", VM, "clear", "--to", to.to_str().unwrap()]);
    here.vmseal(&["vm", "encrypt", VM, "--policy", "encrypted"]).unwrap();
    write(&mut console, "TEXT-OF-SEALED");
    backup(&here, &["create", VM, "sealed"]);
    write(&mut console, "TEXT-OF-NOW");
    assert_eq!(bounced_bytes(&here, VM).unwrap(), 0, "it has its data key alone");

    let refused = here.refused(&["backup", "restore", VM, "clear"]).unwrap();
    assert!(refused.contains("stop it first") && refused.contains("--as NAME"), "{refused}");
    let told = warned(&here, "clear", "then");
    assert!(told.contains("new addresses") && !told.contains("data keys"), "{told}");
    backup(&here, &["restore", VM, "clear", "--as", "then"]);
    let told = warned(&here, "sealed", "since");
    assert!(told.contains("has the same data keys"), "{told}");
    backup(&here, &["restore", VM, "sealed", "--as", "since"]);
    let taken = here.refused(&["backup", "restore", VM, "sealed", "--as", "since"]).unwrap();
    assert!(taken.contains("since"), "{taken}");

    // As it was in the clear, beside the one that is encrypted and runs; and as it was encrypted, under a key of its own.
    let [web, then, since] = [VM, "then", "since"].map(|vm| here.vm(vm).unwrap());
    assert_eq!((&then["policy"], then.get("key")), (&"plain".into(), None), "{then}");
    assert_eq!(since["policy"], "encrypted");
    assert_ne!(since["key"]["key_id"], web["key"]["key_id"]);
    assert!(since["nics"][0]["mac"] != web["nics"][0]["mac"], "{since}");
    assert!(contains(&image(&here, "then"), MARKER), "the marker is not searched for well");
    let sealed = image(&here, "since");
    assert!(!contains(&sealed, MARKER), "it is in the clear");
    // Its header names itself, and nothing of the other VM is left there. The data is as it was.
    assert!(contains(&sealed[..HEADER], id(&since)) && !contains(&sealed[..HEADER], id(&web)));
    let data = |image: &[u8]| image[HEADER..HEADER + 4096].to_vec();
    assert_eq!(data(&sealed), data(&image(&here, VM)));
    assert!(!started_as(&here, "then", "TEXT-OF-CLEAR"), "there is nothing to decrypt");
    // Others have its data keys.
    assert!(started_as(&here, "since", "TEXT-OF-SEALED"), "it decrypts in its guest's memory");
    reads(&mut console, "TEXT-OF-NOW");
    assert!(bounced_bytes(&here, VM).unwrap() > 0, "it decrypts in its guest's memory");

    // In place what has another form does not fit; what has the same does, and other VMs are as they were.
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    drop(console);
    let refused = here.refused(&["backup", "restore", VM, "clear"]).unwrap();
    assert!(refused.contains("is encrypted now") && refused.contains("--as NAME"), "{refused}");
    backup(&here, &["restore", VM, "sealed"]);
    let head = &image(&here, VM)[..HEADER];
    assert!(
        contains(head, "\"shared\":true"),
        "the backup of before has no mark, and was given none"
    );
    // With data keys of its own it has nothing in common with the backup, and outlives all of that.
    here.vmseal(&["vm", "recrypt", "since", "--deep"]).unwrap();
    assert_ne!(data(&image(&here, "since")), data(&sealed));
    here.vmseal(&["vm", "delete", VM]).unwrap();
    backup(&here, &["restore", VM, "sealed", "--as", "later"]);
    for name in ["sealed", "clear"] {
        backup(&here, &["delete", VM, name]);
    }
    assert!(started_as(&here, "later", "TEXT-OF-SEALED"), "it decrypts in its guest's memory");
    assert!(here.disk_has("since", "disk0", TEXT_AT, "TEXT-OF-SEALED").unwrap());
}
