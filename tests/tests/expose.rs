//! A disk as a local NBD socket, through command line, server and agent, with libnbd's tools as the judge.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::process::{Command, Output};
use std::time::Instant;

use vmseal_tests::eventually;
use vmseal_tests::exposed::Exposed;
use vmseal_tests::installation::{Installation, create, text};
use vmseal_tests::process::kill_hard;

const FILTER: &str = "vmseal-filter";

fn ran(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().unwrap()
}

fn succeeds(program: &str, arguments: &[&str]) -> String {
    let output = ran(program, arguments);
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
    said
}

fn noise(length: usize) -> Vec<u8> {
    let mut state = 1u64;
    let word = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    (0..length / 4).map(word).flat_map(u32::to_le_bytes).collect()
}

/// The disk of a VM that is off: it is filled and read, and the VM cannot start meanwhile.
#[test]
fn tools_fill_and_read_the_disk_of_a_vm_that_is_off_and_it_starts_afterwards() {
    let mut here = Installation::new().unwrap();
    here.vmseal(&create("web", "encrypted", "datastore=local,size=64MiB")).unwrap();
    let image = here.path("image");
    let mut bytes = noise(64 << 20);
    bytes[16 << 20..48 << 20].fill(0);
    std::fs::write(&image, &bytes).unwrap();
    let (from, to) = (text(&image).unwrap().to_owned(), here.path("copy"));
    let to = text(&to).unwrap();

    let exposed = Exposed::start(&here, "web", &["--writable"]).unwrap();
    succeeds("nbdcopy", &["--flush", &from, &exposed.uri]);
    let second = here.path("second.sock");
    let again = ["disk", "expose", "web", "disk0", "--socket", text(&second).unwrap()];
    assert!(here.refused(&again).unwrap().contains("is exposed"));
    let started = here.refused(&["vm", "start", "web"]).unwrap();
    assert!(started.contains("is exposed") && started.contains("disk expose"), "{started}");
    let socket = here.path("web.sock");
    exposed.interrupt().unwrap();
    assert!(!socket.exists(), "the socket is left");
    let stored = std::fs::read(&here.images("web").unwrap()[0]).unwrap();
    assert!(!stored.windows(64).step_by(16).any(|part| part == &bytes[4096..4160]), "in the clear");

    // Read-only unless otherwise said; several connections; and requests both ways at once.
    let exposed = Exposed::start(&here, "web", &[]).unwrap();
    let begun = Instant::now();
    succeeds("nbdcopy", &[&exposed.uri, to]);
    println!("64 MiB, half of them holes, were read in {:?}", begun.elapsed());
    assert!(std::fs::read(to).unwrap() == bytes, "the copy differs");
    let info = succeeds("nbdinfo", &["--json", &exposed.uri]);
    assert!(info.contains("\"is_read_only\": true") && info.contains("\"can_multi_conn\": true"));
    let map = succeeds("nbdinfo", &["--map", "--totals", &exposed.uri]);
    assert!(map.contains("50.0%"), "{map}");
    let write = ["-f", "raw", "-c", "write 0 4k", &exposed.uri];
    assert!(!ran("qemu-io", &write).status.success(), "a read-only disk is written to");
    let events = here.vmseal(&["events", "--kind", "disk.exposed", "-o", "csv"]).unwrap();
    assert!(events.contains("IN THE CLEAR") && events.contains("read-only"), "{events}");

    // The agent dies: it ends, says so, and nothing is left that holds the disk.
    here.kill_agent();
    here.start_agent().unwrap();
    let (code, said) = exposed.ended().unwrap();
    assert!(code == Some(6) && said.contains("no longer exposed"), "{code:?} {said}");
    here.wait_host().unwrap();
    eventually("the filter of the dead agent is gone", || {
        here.guest_processes(FILTER).is_empty().then_some(())
    })
    .unwrap();

    // A killed holder frees it, too; a new agent gets the key.
    let exposed = Exposed::start(&here, "web", &[]).unwrap();
    kill_hard(exposed.id());
    drop(exposed.ended().unwrap());
    eventually("the disk is free", || here.guest_processes(FILTER).is_empty().then_some(()))
        .unwrap();
}

/// A missing part of an image is an error to every tool, raises an alarm, and shows up in a scan.
#[test]
fn a_disk_whose_image_was_cut_is_read_with_errors_and_an_alarm() {
    let here = Installation::new().unwrap();
    here.vmseal(&create("web", "encrypted", "datastore=local,size=64MiB")).unwrap();
    let path = here.images("web").unwrap().remove(0);
    let image = std::fs::File::options().write(true).open(path).unwrap();
    let length = image.metadata().unwrap().len();
    let exposed = Exposed::start(&here, "web", &[]).unwrap();
    image.set_len(length - (32 << 20)).unwrap();
    let copy = here.path("copy");
    let copied = ran("nbdcopy", &[&exposed.uri, text(&copy).unwrap()]);
    assert!(!copied.status.success(), "what is lost is taken for zeroes");
    let told = here.wait_alarm("web", "disk-errors").unwrap();
    assert!(told.contains("truncated") && told.contains("disk0"), "{told}");
    let scan = here.json(&["datastore", "scan", "local"]).unwrap();
    assert_eq!(scan["images"][0]["status"], "truncated", "{scan}");
    // With the image whole again, the command ends normally; the error is reported once more.
    image.set_len(length).unwrap();
    let said = exposed.interrupt().unwrap_err().to_string();
    assert!(said.contains("truncated"), "{said}");
    here.wait_alarm("web", "disk-errors").unwrap();
    // Until it is used again.
    Exposed::start(&here, "web", &[]).unwrap().interrupt().unwrap();
    here.wait_no_alarm("web", "disk-errors").unwrap();
}

/// Copies what a bitmap calls dirty to the same places of a file, as docs/backup.md has it; says how much that was.
fn copy_dirty(socket: &str, uri: &str, bitmap: &str, to: &str) -> u64 {
    let map = succeeds("nbdinfo", &[&format!("--map=qemu:dirty-bitmap:{bitmap}"), uri]);
    let mut copied = 0;
    for line in map.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [offset, length, "1", "dirty"] = words[..] else { continue };
        let part = format!("driver=raw,offset={offset},size={length}");
        let from =
            format!("{part},file.driver=nbd,file.server.type=unix,file.server.path={socket}");
        let into = format!("{part},file.driver=file,file.filename={to}");
        let options = ["convert", "-n", "--image-opts", &from, "--target-image-opts", &into];
        succeeds("qemu-img", &options);
        copied += length.parse::<u64>().unwrap();
    }
    copied
}

/// The dirty bitmaps of the VM's disk, and how much each calls dirty.
fn bitmaps(here: &Installation) -> Vec<(String, u64)> {
    let listed = here.json(&["disk", "bitmap", "list", "web", "disk0"]).unwrap();
    let bitmap = |it: &serde_json::Value| {
        (it["name"].as_str().unwrap().to_owned(), it["dirty_bytes"].as_u64().unwrap())
    };
    listed.as_array().unwrap().iter().map(bitmap).collect()
}

/// A full backup of a disk whose guest goes on, and one of what has changed since. Bitmaps go on with another filter, and when the VM
/// was off.
#[test]
fn a_backup_with_the_changes_since_then_equals_the_disk() {
    let here = Installation::new().unwrap();
    here.create_counter("web", "encrypted").unwrap();
    let bitmap = |verb, name| {
        let command = ["disk", "bitmap", verb, "web", "disk0", name];
        here.try_vmseal(&command).unwrap()
    };
    let refused = |verb, name, why: &str| {
        let output = bitmap(verb, name);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(why), "{verb} {name}: {said}");
    };
    refused("add", "early", "does not run");
    assert_eq!(here.boot_counter("web").unwrap(), 1);
    let exposed = Exposed::start(&here, "web", &[]).unwrap();
    let (uri, socket, copy) = (exposed.uri.clone(), here.path("web.sock"), here.path("copy"));
    let (socket, copy) = (text(&socket).unwrap(), text(&copy).unwrap());

    refused("clear", "other", "make a full backup");
    assert!(!ran("nbdinfo", &["--map=qemu:dirty-bitmap:other", &uri]).status.success());
    assert!(bitmap("add", "sunday").status.success());
    here.processes_of("web", FILTER).unwrap().into_iter().for_each(kill_hard);
    here.wait_alarm("web", "filter-restarted").unwrap();
    refused("add", "sunday", "already");
    succeeds("nbdcopy", &[&uri, copy]);
    let full = std::fs::read(copy).unwrap();
    let mut console = here.console("web").unwrap();
    console.type_text("r").unwrap();
    while console.next_count().unwrap() != 2 {}
    assert_eq!(bitmaps(&here), [("sunday".to_owned(), 64 << 10)]);
    assert!(bitmap("add", "monday").status.success());
    assert_eq!(copy_dirty(socket, &uri, "sunday", copy), 64 << 10);
    // The server may not have missed the last client yet.
    eventually("the old bitmap is removed", || {
        bitmap("remove", "sunday").status.success().then_some(())
    })
    .unwrap();
    assert_eq!(bitmaps(&here), [("monday".to_owned(), 0)]);
    let events = here.vmseal(&["events", "--kind", "disk.bitmap-added", "-o", "csv"]).unwrap();
    assert!(events.contains("'sunday' of disk 'disk0'"), "{events}");

    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    drop(exposed.ended().unwrap());
    let off = here.refused(&["disk", "bitmap", "list", "web", "disk0"]).unwrap();
    assert!(off.contains("does not run"), "{off}");
    let (exposed, disk) = (Exposed::start(&here, "web", &[]).unwrap(), here.path("disk"));
    succeeds("nbdcopy", &[&exposed.uri, text(&disk).unwrap()]);
    let disk = std::fs::read(&disk).unwrap();
    assert!(std::fs::read(copy).unwrap() == disk, "the backup is not the disk");
    assert!(full != disk, "nothing has changed");
    exposed.interrupt().unwrap();

    here.vmseal(&["vm", "start", "web"]).unwrap();
    assert_eq!(bitmaps(&here)[0].0, "monday", "it ended with the VM's run");
}

/// A backup of a disk whose guest goes on, and the end of the exposure with that of the guest.
#[test]
fn a_disk_in_use_is_read_beside_its_guest_and_not_written_to() {
    let here = Installation::new().unwrap();
    here.create_counter("web", "encrypted").unwrap();
    assert_eq!(here.boot_counter("web").unwrap(), 1);
    let socket = here.path("web.sock");
    let writable =
        ["disk", "expose", "web", "disk0", "--writable", "--socket", text(&socket).unwrap()];
    assert!(here.refused(&writable).unwrap().contains("in use"));
    let exposed = Exposed::start(&here, "web", &[]).unwrap();
    let copy = here.path("copy");
    succeeds("nbdcopy", &[&exposed.uri, text(&copy).unwrap()]);
    let image = std::fs::read(here.counter_image().unwrap()).unwrap();
    let copied = std::fs::read(&copy).unwrap();
    assert!(copied[..440] == image[..440], "not the guest's boot sector");
    assert_eq!(here.vm("web").unwrap()["power"], "running", "the guest does not go on");
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    let (code, said) = exposed.ended().unwrap();
    assert!(code == Some(6) && said.contains("stopped"), "{code:?} {said}");
}
