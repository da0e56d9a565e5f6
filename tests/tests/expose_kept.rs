//! What a snapshot keeps, exposed while the guest goes on: in the clear, and as ciphertext, with libnbd's tools as the judge.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::process::Command;

use vmseal_tests::counting_guest::{count, stop_counting};
use vmseal_tests::exposed::Exposed;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{self, booted, run};

const VM: &str = "web";

/// A place of the guest's disk that its system does not use, in MiB from the beginning.
const TEXT_AT: u32 = 60;

/// What the disk holds when the snapshot is taken.
const THEN: &str = "TEXT-OF-THEN";

/// What the guest writes over it.
const NOW: &str = "TEXT-OF-NOW";

fn tool(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
    said
}

fn write(console: &mut Console, text: &str) {
    let write = format!(
        "echo {text} | dd of=/dev/vda bs=1M seek={TEXT_AT} conv=notrunc,fsync 2>/dev/null; echo WROTE-$((6 * 7))"
    );
    run(console, &write, "WROTE-42").unwrap();
}

/// What `disk export` writes of the snapshot.
fn exported(here: &Installation, format: &str, more: &[&str]) -> Vec<u8> {
    let to = here.path(&format!("exported.{format}"));
    let of = ["disk", "export", VM, "disk0", "--snapshot", "one", "--format", format, "--to"];
    here.vmseal(&[&of[..], &[text(&to).unwrap()], more].concat()).unwrap();
    std::fs::read(to).unwrap()
}

/// What nbdcopy reads of an exposed disk.
fn copied(here: &Installation, exposed: &Exposed) -> Vec<u8> {
    let copy = here.path("copy");
    let _ = std::fs::remove_file(&copy);
    tool("nbdcopy", &[&exposed.uri, text(&copy).unwrap()]);
    std::fs::read(copy).unwrap()
}

/// The ciphertext of a disk that its guest writes is not of one instant.
fn is_not_exposed_sealed_without_a_snapshot(here: &Installation) {
    let socket = here.path("none.sock");
    let expose = ["disk", "expose", VM, "disk0", "--socket", text(&socket).unwrap(), "--sealed"];
    let refused = here.refused(&expose).unwrap();
    assert!(refused.contains("--snapshot NAME"), "{refused}");
    let absent = here.refused(&[&expose[..], &["--snapshot", "none"]].concat()).unwrap();
    assert!(absent.contains("no snapshot 'none'"), "{absent}");
    assert!(here.refused(&[&expose[..], &["--writable"]].concat()).unwrap().contains("--writable"));
}

#[test]
fn what_a_snapshot_keeps_is_copied_while_the_guest_goes_on_writing() {
    let here = Installation::new().unwrap();
    shell_guest::start(&here, VM, "encrypted", &[]).unwrap();
    let mut console = booted(&here, VM).unwrap();
    write(&mut console, THEN);
    is_not_exposed_sealed_without_a_snapshot(&here);
    here.vmseal(&["snapshot", "create", VM, "one"]).unwrap();
    count(&mut console);
    write(&mut console, NOW);
    let raw = exported(&here, "raw", &["--plaintext"]);
    let sealed = exported(&here, "sealed", &[]);
    assert!(contains(&raw, THEN) && !contains(&raw, NOW), "not what the snapshot keeps");

    let exposed = Exposed::start(&here, VM, &["--snapshot", "one"]).unwrap();
    assert!(copied(&here, &exposed) == raw, "not what the snapshot keeps");
    let info = tool("nbdinfo", &["--json", &exposed.uri]);
    assert!(info.contains("\"is_read_only\": true"), "{info}");
    let refused = here.refused(&["snapshot", "delete", VM, "one"]).unwrap();
    assert!(refused.contains("disk0") && refused.contains("disk expose"), "{refused}");
    assert_eq!(here.json(&["snapshot", "show", VM, "one"]).unwrap()["state"], "ready");
    exposed.interrupt().unwrap();

    let exposed = Exposed::start(&here, VM, &["--snapshot", "one", "--sealed"]).unwrap();
    let copy = copied(&here, &exposed);
    assert!(copy == sealed, "not what the sealed export of the snapshot is");
    assert!(!contains(&copy, THEN) && !contains(&copy, NOW), "in the clear");
    exposed.interrupt().unwrap();
    stop_counting(&mut console);
    let events = here.vmseal(&["events", "--kind", "disk.exposed", "-o", "csv"]).unwrap();
    for told in ["at snapshot 'one'", "IN THE CLEAR", "still under the VM's key"] {
        assert!(events.contains(told), "{told}: {events}");
    }

    here.vmseal(&["vm", "suspend", VM]).unwrap();
    drop(console);
    let exposed = Exposed::start(&here, VM, &["--snapshot", "one"]).unwrap();
    assert!(copied(&here, &exposed) == raw, "another content while the VM is suspended");
    let refused = here.refused(&["vm", "resume", VM]).unwrap();
    assert!(refused.contains("disk expose"), "{refused}");
    exposed.interrupt().unwrap();
    here.vmseal(&["vm", "resume", VM]).unwrap();

    // It does not keep the guest from starting again.
    let exposed = Exposed::start(&here, VM, &["--snapshot", "one"]).unwrap();
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    let (code, said) = exposed.ended().unwrap();
    assert!(code == Some(6) && said.contains("its VM was stopped, which ends this"), "{said}");

    let exposed = Exposed::start(&here, VM, &["--snapshot", "one", "--sealed"]).unwrap();
    assert!(copied(&here, &exposed) == sealed, "another ciphertext while the VM is off");
    exposed.interrupt().unwrap();
    here.vmseal(&["snapshot", "delete", VM, "one"]).unwrap();
    // The copy is a disk of its own: as the image of the VM it boots.
    std::fs::copy(here.path("copy"), here.images(VM).unwrap().remove(0)).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(&here, VM).unwrap();
    let read = format!("dd if=/dev/vda bs=1M skip={TEXT_AT} count=1 2>/dev/null | head -n 1");
    run(&mut console, &read, THEN).unwrap();
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();

    // The disk of a VM that is off has ciphertext without a snapshot, too.
    let exposed = Exposed::start(&here, VM, &["--sealed"]).unwrap();
    let copy = copied(&here, &exposed);
    assert!(copy == std::fs::read(here.images(VM).unwrap().remove(0)).unwrap(), "not its image");
    exposed.interrupt().unwrap();
}
