//! Disks of one VM that are made as each asks: what the guest writes to one in the clear is readable in its image, and of an encrypted one
//! nothing is.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use vmseal_tests::counting_guest::SECRET;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::Installation;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{self, booted, holds, run};

const VM: &str = "web";

/// The card of the guest.
const CARD: &str = "user,mac=52:54:0a:00:02:0f";

/// The disks, in the order in which the guest has them: what the guest calls each, and whether it is encrypted.
const DISKS: [(&str, &str, bool); 5] = [
    ("system", "vda", false),
    ("data", "vdb", true),
    ("cloud-init", "vdc", true),
    ("scratch", "vdd", false),
    ("more", "vde", true),
];

/// Where the guest writes, in MiB: its system does not use that place of its disk.
const AT: u32 = 60;

/// What the guest writes to a disk.
fn marker(disk: &str) -> String {
    format!("VMSEAL-MARKER-OF-{disk}-END")
}

/// Those that the guest writes: that of cloud-init it can only read.
fn written() -> impl Iterator<Item = (&'static str, &'static str)> {
    let of_guest = DISKS.into_iter().filter(|(name, ..)| *name != "cloud-init");
    of_guest.map(|(name, device, _)| (name, device))
}

fn write_markers(console: &mut Console) {
    for (name, device) in written() {
        let of = format!("of=/dev/{device} bs=1M seek={AT} conv=notrunc");
        let write = format!("echo {} | dd {of} 2>/dev/null; sync", marker(name));
        run(console, &format!("{write}; echo WROTE-$((6 * 7))"), "WROTE-42").unwrap();
    }
}

fn read_markers(console: &mut Console) {
    run(console, "echo 3 >/proc/sys/vm/drop_caches; echo DROPPED-$((6 * 7))", "DROPPED-42")
        .unwrap();
    for (name, device) in written() {
        let read = format!("dd if=/dev/{device} bs=1M skip={AT} count=1 2>/dev/null | head -n 1");
        run(console, &read, &marker(name)).unwrap();
    }
    run(console, &format!("grep -ao '{SECRET}' /dev/vdc | head -n 1"), SECRET).unwrap();
}

/// Each disk is as it should be, for the inventory and in its image.
fn are(here: &Installation, encrypted: impl Fn(bool) -> bool) {
    let vm = here.vm(VM).unwrap();
    let disks = vm["disks"].as_array().unwrap();
    let images = here.images(VM).unwrap();
    assert_eq!((disks.len(), images.len()), (DISKS.len(), DISKS.len()), "{vm}");
    for ((disk, image), (name, _, made)) in disks.iter().zip(images).zip(DISKS) {
        let is = encrypted(made);
        assert_eq!((&disk["name"], &disk["encrypted"]), (&name.into(), &is.into()), "{vm}");
        let bytes = std::fs::read(image).unwrap();
        let readable = DISKS.iter().any(|(of, ..)| contains(&bytes, marker(of)));
        assert_eq!(readable, !is, "{name}: whether what the guest wrote is in the clear");
        assert!(!contains(&bytes, SECRET), "{name}: what cloud-init is told is in the clear");
    }
}

#[test]
fn each_disk_is_made_as_it_asks() {
    let here = Installation::new().unwrap();
    std::fs::write(here.path("user-data"), format!("#cloud-config\n# {SECRET}\n")).unwrap();
    let documents = format!("user-data={}", here.path("user-data").display());
    let image = shell_guest::image().unwrap();
    let system = format!(
        "name=system,datastore=local,format=raw,image={},size=64MiB,encrypted=no",
        image.display()
    );
    let data = "name=data,datastore=local,size=64MiB,encrypted=yes";
    let machine = ["vm", "create", VM, "--memory", "192MiB", "--nic", CARD];
    let disks = ["--disk", &system, "--disk", data, "--cloud-init", &documents];
    let create = |policy: &str, more: &[&str]| {
        let create = [&machine[..], &["--policy", policy], &disks, more].concat();
        here.try_vmseal(&create).unwrap()
    };
    let refused = create("plain", &[]);
    let told = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && told.contains("--disk (the 2nd, encrypted)"), "{told}");
    let planned = create("encrypted", &["--dry-run"]);
    let told = String::from_utf8_lossy(&planned.stdout);
    assert!(told.contains("system (64 MiB on datastore 'local', in the clear), data ("), "{told}");
    let made = create("encrypted", &[]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));

    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(&here, VM).unwrap();
    let scratch = "name=scratch,size=64MiB,encrypted=no";
    for (disk, device) in [(scratch, "vdd"), ("name=more,size=64MiB", "vde")] {
        here.vmseal(&["disk", "add", VM, "--disk", disk]).unwrap();
        holds(&mut console, &format!("[ -e /sys/block/{device} ]")).unwrap();
    }
    write_markers(&mut console);
    are(&here, |made| made);
    let shown = here.vm(VM).unwrap();
    assert_eq!(shown["disks_in_the_clear"], serde_json::json!(["system", "scratch"]), "{shown}");
    assert_eq!(shown["compliance"]["compliant"], false, "{shown}");

    // Other processes read the same.
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    drop(console);
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(&here, VM).unwrap();
    read_markers(&mut console);

    // They are as disks that were decrypted later.
    here.vmseal(&["vm", "encrypt", VM]).unwrap();
    are(&here, |_| true);
    read_markers(&mut console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "prove", VM]).unwrap();
}
