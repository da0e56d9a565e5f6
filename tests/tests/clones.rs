//! Clones of a VM that is off, and of a snapshot of one that runs: they hold the same, and share no key.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::collections::BTreeSet;

use vmseal_tests::guest::Console;
use vmseal_tests::installation::Installation;
use vmseal_tests::shell_guest::{self, booted, run};

/// A place of the guest's disk that its system does not use, in MiB from the beginning.
const TEXT_AT: u32 = 60;

fn write(console: &mut Console, text: &str) {
    let write =
        format!("echo {text} | dd of=/dev/vda bs=1M seek={TEXT_AT} conv=notrunc,fsync 2>/dev/null");
    run(console, &format!("{write}; echo WROTE-$((6 * 7))"), "WROTE-42").unwrap();
}

fn reads(console: &mut Console, text: &str) {
    let read = format!("dd if=/dev/vda bs=1M skip={TEXT_AT} count=1 2>/dev/null | head -n 1");
    run(console, &read, text).unwrap();
}

/// The keys of VMs, and the addresses of their cards.
fn of(here: &Installation, vms: &[&str]) -> BTreeSet<String> {
    let told = vms.iter().flat_map(|vm| {
        let vm = here.vm(vm).unwrap();
        [vm["key"]["key_id"].to_string(), vm["nics"][0]["mac"].to_string()]
    });
    told.collect()
}

/// The master keys' ciphertext in the headers, and the first sectors of data.
fn beginnings(here: &Installation, vms: &[&str]) -> BTreeSet<Vec<u8>> {
    let first = |vm: &&str| std::fs::read(&here.images(vm).unwrap()[0]).unwrap();
    let parts = |image: Vec<u8>| {
        let data = 16 << 20;
        [image[32 << 10..64 << 10].to_vec(), image[data..data + 4096].to_vec()]
    };
    vms.iter().map(first).flat_map(parts).collect()
}

#[test]
fn a_clone_holds_the_same_under_keys_of_its_own() {
    let here = Installation::new().unwrap();
    shell_guest::start(&here, "web", "encrypted", &[]).unwrap();
    let mut console = booted(&here, "web").unwrap();
    write(&mut console, "TEXT-OF-ONE");
    let running = here.try_vmseal(&["vm", "clone", "web", "copy"]).unwrap();
    let said = String::from_utf8_lossy(&running.stderr).into_owned();
    assert!(!running.status.success() && said.contains("--snapshot"), "{said}");
    here.vmseal(&["snapshot", "create", "web", "one"]).unwrap();
    write(&mut console, "TEXT-OF-TWO");

    // The snapshot, while the guest runs and writes.
    let clone = ["vm", "clone", "web", "first", "--snapshot", "one"];
    let planned = here.try_vmseal(&[&clone[..], &["--dry-run"]].concat()).unwrap();
    let warned = String::from_utf8_lossy(&planned.stderr).into_owned();
    assert!(planned.status.success() && warned.contains("host name"), "{warned}");
    here.vmseal(&clone).unwrap();
    reads(&mut console, "TEXT-OF-TWO");
    here.vmseal(&["vm", "start", "first"]).unwrap();
    let mut first = booted(&here, "first").unwrap();
    reads(&mut first, "TEXT-OF-ONE");
    write(&mut first, "TEXT-OF-FIRST");
    reads(&mut console, "TEXT-OF-TWO");
    here.vmseal(&["vm", "stop", "first", "--force"]).unwrap();
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    drop((first, console));

    // What it holds now, layers included; and the clone of a clone.
    here.vmseal(&["vm", "clone", "web", "second"]).unwrap();
    here.vmseal(&["vm", "clone", "first", "third"]).unwrap();
    for (vm, text) in [("second", "TEXT-OF-TWO"), ("third", "TEXT-OF-FIRST")] {
        here.vmseal(&["vm", "start", vm]).unwrap();
        reads(&mut booted(&here, vm).unwrap(), text);
        here.vmseal(&["vm", "stop", vm, "--force"]).unwrap();
    }
    let all = ["web", "first", "second", "third"];
    assert_eq!(of(&here, &all).len(), 8, "VMs share a key or an address");
    assert_eq!(beginnings(&here, &all).len(), 8, "VMs share a data key");
    let snapshots = here.json(&["snapshot", "list", "first"]).unwrap();
    assert_eq!(snapshots.as_array().unwrap().len(), 0, "{snapshots}");
    let sparse = |vm: &str| {
        use std::os::unix::fs::MetadataExt;
        here.images(vm).unwrap()[0].metadata().unwrap().blocks()
    };
    assert!(sparse("second") <= sparse("web") * 3 / 2, "holes are filled");
    // The one goes, the others stay.
    here.vmseal(&["vm", "delete", "web"]).unwrap();
    here.vmseal(&["vm", "start", "first"]).unwrap();
    reads(&mut booted(&here, "first").unwrap(), "TEXT-OF-FIRST");
    here.vmseal(&["vm", "stop", "first", "--force"]).unwrap();
}

/// What cannot be cloned is refused, and nothing of it is left.
#[test]
fn what_cannot_be_cloned_is_refused() {
    let here = Installation::new().unwrap();
    shell_guest::start(&here, "web", "plain", &[]).unwrap();
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    for refused in [
        &["vm", "clone", "web", "web"][..],
        &["vm", "clone", "none", "copy"],
        &["vm", "clone", "web", "copy", "--snapshot", "none"],
        &["vm", "clone", "web", "a..b"],
    ] {
        assert!(!here.try_vmseal(refused).unwrap().status.success(), "{refused:?} was done");
    }
    let vms = here.json(&["vm", "list"]).unwrap();
    assert_eq!(vms.as_array().unwrap().len(), 1, "{vms}");
    // A plain one.
    here.vmseal(&["vm", "clone", "web", "copy"]).unwrap();
    here.vmseal(&["vm", "start", "copy"]).unwrap();
    booted(&here, "copy").unwrap();
    here.vmseal(&["vm", "stop", "copy", "--force"]).unwrap();
}
