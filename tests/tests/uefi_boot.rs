//! What UEFI firmware starts guests from: a disk or a CD-ROM drive, in the order that a VM has, or in another one once. The tests of the
//! same with a BIOS are in `cdrom`.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use vmseal_tests::guest::Console;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::uefi_guest::{self, started_from, starts_again_from};

const VM: &str = "web";

fn create(here: &Installation, disk: &str, iso: &str) {
    let create = ["vm", "create", VM, "--policy", "encrypted", "--memory", "128MiB"];
    let devices = ["--firmware", "uefi", "--disk", disk, "--cdrom", iso];
    here.vmseal(&[&create[..], &devices].concat()).unwrap();
}

/// A medium whose guest says this name.
fn medium(here: &Installation, name: &str) -> String {
    let path = here.path(&format!("{name}.iso"));
    uefi_guest::medium(&path, name).unwrap();
    text(&path).unwrap().to_owned()
}

/// Starts the VM, and checks what its guest is started from.
fn starts_from(here: &Installation, more: &[&str], name: &str) -> Console {
    here.vmseal(&[&["vm", "start", VM], more].concat()).unwrap();
    let mut guest = here.console(VM).unwrap();
    started_from(&mut guest, name).unwrap();
    guest
}

#[test]
fn guests_start_from_a_medium_once_or_always() {
    let here = Installation::new().unwrap();
    let [first, second] = ["first", "second"].map(|name| medium(&here, name));
    let image = here.path("disk.raw");
    uefi_guest::disk(&image, "disk").unwrap();
    let disk = format!("datastore=local,format=raw,image={}", text(&image).unwrap());
    create(&here, &disk, &first);

    // The disk comes first, except this time, and again after a reset.
    let mut guest = starts_from(&here, &["--boot-once", "cdrom"], "first");
    starts_again_from(&mut guest, "disk").unwrap();
    drop(guest);
    here.vmseal(&["vm", "set", VM, "--boot", "cdrom,disk"]).unwrap();
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();

    // Its variables have the boot entries that the firmware has made at the start before. The VM's order holds.
    let mut guest = starts_from(&here, &[], "first");
    here.vmseal(&["vm", "cdrom", "insert", VM, &second]).unwrap();
    starts_again_from(&mut guest, "second").unwrap();
    here.vmseal(&["vm", "cdrom", "eject", VM]).unwrap();
    // The firmware goes on to the disk.
    starts_again_from(&mut guest, "disk").unwrap();
    drop(guest);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

/// As a guest is installed.
#[test]
fn a_guest_with_an_empty_disk_starts_from_the_medium_behind_it() {
    let here = Installation::new().unwrap();
    let iso = medium(&here, "installer");
    create(&here, "datastore=local,size=1MiB", &iso);
    starts_from(&here, &[], "installer");
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}
