//! A VM's life: created, booted from its disk through firmware, stopped, started, deleted; encrypted and
//! in the clear.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::Path;

use vmseal_tests::guest::COUNT;
use vmseal_tests::installation::Installation;
use vmseal_tests::scan::contains;

fn holds(file: &Path, text: &str) -> bool {
    let content = std::fs::read(file).unwrap();
    contains(&content, text)
}

/// Boots the counting guest; gives its number.
fn boot(here: &Installation, vm: &str) -> u32 {
    here.vmseal(&["vm", "start", vm]).unwrap();
    here.console(vm).unwrap().next_count().unwrap()
}

#[test]
fn an_encrypted_guest_boots_from_ciphertext_and_keeps_its_data() {
    let here = Installation::new().unwrap();
    here.create_counter("sealed", "encrypted").unwrap();
    let image = here.images("sealed").unwrap().remove(0);

    assert_eq!(boot(&here, "sealed"), 1);
    here.vmseal(&["vm", "stop", "sealed", "--force"]).unwrap();
    assert_eq!(boot(&here, "sealed"), 2, "the first boot's write is gone");

    // The guest's own end, asked for on its console.
    let mut console = here.console("sealed").unwrap();
    console.type_text("p").unwrap();
    let stopped = here.wait_power("sealed", "off").unwrap();
    assert_eq!(stopped["stopped"]["reason"], "guest_shutdown");
    assert!(!holds(&image, COUNT), "the guest's code is readable in {}", image.display());

    here.vmseal(&["vm", "delete", "sealed"]).unwrap();
    assert!(!image.exists());
    assert!(here.refused(&["vm", "show", "sealed"]).unwrap().contains("no VM 'sealed'"));
}

#[test]
fn a_plain_guest_boots_and_its_image_is_readable() {
    let here = Installation::new().unwrap();
    here.create_counter("open", "plain").unwrap();
    assert_eq!(boot(&here, "open"), 1);
    here.vmseal(&["vm", "stop", "open", "--force"]).unwrap();
    // Without this the search in the encrypted image would prove nothing.
    assert!(holds(&here.images("open").unwrap()[0], COUNT));
}

#[test]
fn a_guest_that_does_not_shut_down_is_not_reported_as_off() {
    let here = Installation::new().unwrap();
    here.create_counter("stubborn", "encrypted").unwrap();
    assert_eq!(boot(&here, "stubborn"), 1);
    // A boot sector hears no ACPI power button.
    let said = here.refused(&["vm", "stop", "stubborn", "--grace-period", "2s"]).unwrap();
    assert!(said.contains("--force"), "it does not say what to do: {said}");
    assert_eq!(here.vm("stubborn").unwrap()["power"], "running");
}
