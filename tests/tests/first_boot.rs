//! What a guest is told at its first boot: the guest reads it, and it is nowhere else.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fmt::Write;

use serde_json::Value;
use vmseal_tests::eventually;
use vmseal_tests::first_boot::{self, TOLD};
use vmseal_tests::installation::{Installation, LOUDEST, text};
use vmseal_tests::process::kill_hard;
use vmseal_tests::scan::{Scanner, forms};

/// What only the guest may read.
const SECRET: &str = "5C1F-what-only-the-guest-may-read-7D22";

/// The documents, in the order of what the guest sorts, and how each begins.
const DOCUMENTS: [(&str, &str); 3] = [
    ("meta-data", "instance-id: web"),
    ("network-config", "version: 2"),
    ("user-data", "#cloud-config"),
];

/// The SHA-256 of a text, as sha256sum prints it.
fn sha256(text: &str) -> String {
    let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, text.as_bytes());
    hash.as_ref().iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").unwrap();
        hex
    })
}

#[test]
fn a_guest_reads_what_it_is_told_and_it_is_nowhere_else() {
    let here = Installation::logging(LOUDEST).unwrap();
    let image = here.path("guest.raw");
    first_boot::disk(&image).unwrap();
    let documents = DOCUMENTS.map(|(name, _)| here.path(name));
    for (path, (name, begin)) in documents.iter().zip(DOCUMENTS) {
        std::fs::write(path, format!("{begin}\n{TOLD}{SECRET} in {name}\n")).unwrap();
    }
    let disk = format!("datastore=local,format=raw,image={}", text(&image).unwrap());
    let told = DOCUMENTS.map(|(name, _)| format!("{name}={}", here.path(name).display()));
    let told = told.join(",");
    let create = ["vm", "create", "web", "--policy", "encrypted", "--memory", "256MiB"];
    let create = [&create[..], &["--disk", &disk, "--cloud-init", &told]].concat();

    here.vmseal(&[&create[..], &["--dry-run"]].concat()).unwrap();
    here.vmseal(&create).unwrap();
    let disks = here.vm("web").unwrap()["disks"].clone();
    let of = |index: usize, field: &str| disks[index][field].clone();
    assert_eq!((of(1, "name"), of(1, "role")), ("cloud-init".into(), "cloud_init".into()));
    assert_eq!((of(0, "role"), of(1, "encrypted")), ("data".into(), true.into()));
    assert_eq!(disks.as_array().map(Vec::len), Some(2));

    here.vmseal(&["vm", "start", "web"]).unwrap();
    let mut guest = here.console("web").unwrap();
    let hash = sha256(&DOCUMENTS.map(|(name, _)| format!("{TOLD}{SECRET} in {name}\n")).concat());
    let wanted = format!("label=cidata read-only=1 writes=no hash={hash}");
    assert_eq!(first_boot::found(&mut guest).unwrap(), format!("typed=0 {wanted}"));
    // Another filter has the same for it.
    kill_hard(here.processes_of("web", "vmseal-filter").unwrap()[0]);
    here.wait_alarm("web", "filter-restarted").unwrap();
    guest.type_text("\n").unwrap();
    let again = eventually("the guest reads again", || {
        first_boot::found(&mut guest).ok().filter(|found| !found.starts_with("typed=0 "))
    });
    assert_eq!(again.unwrap(), format!("typed=1 {wanted}"));
    drop(guest);

    let scanner = Scanner::new(forms("what the guest was told", SECRET.as_bytes())).unwrap();
    let elsewhere = scanner.directory(&here.path(""), &documents).unwrap();
    assert!(elsewhere.is_empty(), "{elsewhere:#?}");
    let everywhere = scanner.directory(&here.path(""), &[]).unwrap();
    assert!(!everywhere.is_empty(), "the search does not find what is there");
    let tasks: Value = here.json(&["task", "list"]).unwrap();
    let events: Value = here.json(&["events"]).unwrap();
    assert!(!format!("{tasks}{events}").contains(SECRET));
    for pid in [here.own_processes(), here.guest_processes("web")].concat() {
        assert!(scanner.arguments_and_environment(pid).unwrap().is_empty());
    }
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    here.vmseal(&["vm", "delete", "web"]).unwrap();
}

#[test]
fn what_is_wrong_is_refused_and_nothing_is_made() {
    let here = Installation::new().unwrap();
    let file = |name: &str, content: &str| {
        std::fs::write(here.path(name), content).unwrap();
        text(&here.path(name)).unwrap().to_owned()
    };
    let (bad, good) = (file("bad", "password: x\n"), file("good", "#!/bin/sh\n"));
    let long = file("long", &format!("#cloud-config\n{}", "#".repeat(70_000)));
    let (private, key) =
        (file("key", "-----BEGIN OPENSSH PRIVATE KEY-----\n"), file("k", "ssh-x A\n"));
    let disk = ["--disk", "datastore=local,size=1MiB"];
    let taken = ["--disk", "datastore=local,size=1MiB,name=cloud-init"];
    let told = |file: &str| format!("user-data={file}");
    let (bad, good, long) = (told(&bad), told(&good), told(&long));
    for (disk, more, said) in [
        (disk, &["--cloud-init", &bad][..], "#cloud-config"),
        (disk, &["--cloud-init", &long], "longer than"),
        (disk, &["--cloud-init", "user-data=/does/not/exist"], "/does/not/exist"),
        (disk, &["--cloud-init", &good, "--ssh-key", &key], "leave out"),
        (taken, &["--cloud-init", &good], "name of the disk"),
        (disk, &["--ssh-key", &private], "private key"),
        (disk, &["--ssh-key", &key], "no public key"),
        (disk, &["--user", "me"], "--ssh-key or --password"),
        (disk, &["--password"], "--password-file"),
    ] {
        let create = ["vm", "create", "web", "--policy", "plain"];
        let message = here.refused(&[&create[..], &disk[..], more].concat()).unwrap();
        assert!(message.contains(said), "{more:?}: {message}");
    }
    assert_eq!(here.json(&["vm", "list"]).unwrap(), Value::Array(Vec::new()));
    let create = ["vm", "create", "web", "--policy", "plain"];
    let told = ["--cloud-init", &good];
    let warned = here.try_vmseal(&[&create[..], &disk, &told].concat()).unwrap();
    let warned = String::from_utf8_lossy(&warned.stderr).into_owned();
    assert!(warned.contains("warning: policy 'plain' does not encrypt"), "{warned}");
}
