//! Guests that start by UEFI: their variables outlive them, kills of all that serves them, and a change of the key,
//! and are ciphertext on the datastore. The guest is the firmware's own shell, on the serial console.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use serde_json::Value;
use vmseal_tests::firmware_shell::{self, has_variable, set_variable};
use vmseal_tests::installation::Installation;
use vmseal_tests::process::kill_hard;
use vmseal_tests::scan::contains;

/// What only such a variable's name holds.
const NAME: &str = "VmsealMarker";

/// The disk of the test's VMs: the firmware finds nothing on it, and starts its shell.
const EMPTY: [&str; 2] = ["--disk", "datastore=local,size=1MiB"];

fn create(here: &Installation, vm: &str, policy: &str, more: &[&str]) {
    let create = ["vm", "create", vm, "--policy", policy, "--memory", "128MiB"];
    here.vmseal(&[&create[..], &EMPTY, more].concat()).unwrap();
}

/// Whether the image of a VM's variables holds the name of the test's in the clear.
fn is_readable(here: &Installation, vm: &str) -> bool {
    let image = std::fs::read(&here.images(vm).unwrap()[1]).unwrap();
    let name: Vec<u8> = NAME.encode_utf16().flat_map(u16::to_le_bytes).collect();
    contains(&image, name)
}

#[test]
fn variables_outlive_guests_and_kills_and_are_ciphertext() {
    let mut here = Installation::new().unwrap();
    create(&here, "web", "encrypted", &["--firmware", "uefi"]);
    let shown = here.vm("web").unwrap();
    let disk = &shown["disks"][1];
    assert_eq!(
        (&disk["name"], &disk["role"]),
        (&"uefi-variables".into(), &"uefi_variables".into())
    );
    assert_eq!(disk["encrypted"], true);
    assert_eq!(shown["hardware"]["firmware"], "uefi");

    here.vmseal(&["vm", "start", "web"]).unwrap();
    let mut guest = firmware_shell::open(&here, "web");
    set_variable(&mut guest, NAME, "112233");
    has_variable(&mut guest, NAME, "11 22 33");

    let filter = here.processes_of("web", "vmseal-filter").unwrap()[0];
    kill_hard(filter);
    here.wait_alarm("web", "filter-restarted").unwrap();
    set_variable(&mut guest, "SecondOne", "44556677");
    drop(guest);
    here.kill_agent();
    here.start_agent().unwrap();
    here.wait_host().unwrap();
    let mut guest = here.console("web").unwrap();
    has_variable(&mut guest, "SecondOne", "44 55 66 77");
    for qemu in here.processes_of("web", "qemu-system-x86_64").unwrap() {
        kill_hard(qemu);
    }
    here.wait_power("web", "off").unwrap();
    drop(guest);

    here.vmseal(&["vm", "recrypt", "web"]).unwrap();
    here.vmseal(&["vm", "start", "web"]).unwrap();
    let mut guest = firmware_shell::open(&here, "web");
    has_variable(&mut guest, NAME, "11 22 33");
    has_variable(&mut guest, "SecondOne", "44 55 66 77");
    drop(guest);
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    assert!(!is_readable(&here, "web"), "the variables are in the clear on the datastore");

    create(&here, "open", "plain", &["--firmware", "uefi"]);
    here.vmseal(&["vm", "start", "open"]).unwrap();
    set_variable(&mut firmware_shell::open(&here, "open"), NAME, "112233");
    here.vmseal(&["vm", "stop", "open", "--force"]).unwrap();
    assert!(is_readable(&here, "open"), "the search does not find what is there");
    let images = here.images("web").unwrap();
    here.vmseal(&["vm", "delete", "web"]).unwrap();
    assert!(images.iter().all(|image| !image.exists()), "a disk is left");
}

#[test]
fn secure_boot_starts_nothing_that_is_not_signed() {
    let here = Installation::new().unwrap();
    create(&here, "safe", "encrypted", &["--firmware", "uefi-secure-boot"]);
    here.vmseal(&["vm", "start", "safe"]).unwrap();
    here.console("safe").unwrap().expect("Security Violation", 0).unwrap();
}

#[test]
fn what_a_host_does_not_have_is_refused_and_nothing_is_made() {
    let here = Installation::new().unwrap();
    for (more, said) in [
        (&["--cpu-model", "host"][..], "--cpu-model: 'host' is this host's own processor"),
        (&["--cpu-model", "i860"], "no processor model 'i860'"),
        (&["--cpu-model", "max,+vmx"], "--cpu-model: is no name"),
        (&["--memory-backing", "hugepages"], "sysctl vm.nr_hugepages"),
        (&["--memory-backing", "hugepages", "--memory", "65MiB"], "--memory-backing"),
        (&["--firmware", "openfirmware"], "uefi-secure-boot"),
    ] {
        let create = ["vm", "create", "web", "--policy", "encrypted"];
        for dry in [&[][..], &["--dry-run"]] {
            let message = here.refused(&[&create[..], &EMPTY, more, dry].concat()).unwrap();
            assert!(message.contains(said), "{more:?}: {message}");
        }
    }
    // A model that nobody typed is the policy's.
    let old = ["policy", "create", "old", "--encrypt", "--cpu-model", "i860"];
    for dry in [&["--dry-run"][..], &[]] {
        let made = here.try_vmseal(&[&old[..], dry].concat()).unwrap();
        let warned = String::from_utf8_lossy(&made.stderr).into_owned();
        assert!(made.status.success(), "{warned}");
        assert!(warned.contains("warning: host 'here'") && warned.contains("'i860'"), "{warned}");
    }
    let create = ["vm", "create", "web", "--policy", "old"];
    let message = here.refused(&[&create[..], &EMPTY].concat()).unwrap();
    assert!(message.contains("--policy: 'old' gives VMs the processor model 'i860'"), "{message}");
    let named = "datastore=local,size=1MiB,name=uefi-variables";
    let create =
        ["vm", "create", "web", "--policy", "plain", "--firmware", "uefi", "--disk", named];
    let message = here.refused(&create).unwrap();
    assert!(message.contains("name of the disk"), "{message}");
    assert_eq!(here.json(&["vm", "list"]).unwrap(), Value::Array(Vec::new()));
}

/// Variables are a disk in layers, too: these follow while the firmware has them, and each snapshot brings its own back.
#[test]
fn variables_follow_with_their_snapshots() {
    let here = Installation::new().unwrap();
    create(&here, "web", "plain", &["--firmware", "uefi"]);
    here.vmseal(&["vm", "start", "web"]).unwrap();
    let mut guest = firmware_shell::open(&here, "web");
    set_variable(&mut guest, NAME, "112233");
    here.vmseal(&["snapshot", "create", "web", "one"]).unwrap();
    set_variable(&mut guest, "SecondOne", "44556677");
    here.vmseal(&["snapshot", "create", "web", "two"]).unwrap();
    set_variable(&mut guest, "ThirdOne", "8899");
    for operation in [
        &["vm", "encrypt", "web", "--policy", "encrypted"][..],
        &["vm", "recrypt", "web", "--deep"],
    ] {
        here.vmseal(operation).unwrap();
        assert!(!is_readable(&here, "web"), "{operation:?}");
        here.vmseal(&["vm", "prove", "web", "--all"]).unwrap();
        set_variable(&mut guest, "FourthOne", "aabbcc");
        has_variable(&mut guest, "ThirdOne", "88 99");
    }
    drop(guest);
    for (snapshot, second) in [("two", "44 55 66 77"), ("one", "Unable to get")] {
        here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
        here.vmseal(&["snapshot", "revert", "web", snapshot]).unwrap();
        here.vmseal(&["vm", "start", "web"]).unwrap();
        let mut guest = firmware_shell::open(&here, "web");
        has_variable(&mut guest, NAME, "11 22 33");
        has_variable(&mut guest, "SecondOne", second);
    }
}
