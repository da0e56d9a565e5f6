//! What a guest is told at its first boot: the guest reads it, and it is nowhere else.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fmt::Write;

use serde_json::Value;
use vmseal_tests::first_boot::{self, TOLD};
use vmseal_tests::installation::{Installation, LOUDEST, text};
use vmseal_tests::scan::{Scanner, forms};

/// What only the guest may read.
const SECRET: &str = "5C1F-what-only-the-guest-may-read-7D22";

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
    let (image, user_data) = (here.path("guest.raw"), here.path("user-data"));
    first_boot::disk(&image).unwrap();
    std::fs::write(&user_data, format!("#cloud-config\n{TOLD}{SECRET}\n")).unwrap();
    let disk = format!("datastore=local,format=raw,image={}", text(&image).unwrap());
    let told = format!("user-data={}", text(&user_data).unwrap());
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
    let found = first_boot::found(&mut here.console("web").unwrap()).unwrap();
    let hash = sha256(&format!("{TOLD}{SECRET}\n"));
    assert_eq!(found, format!("label=cidata read-only=1 writes=no hash={hash}"));

    let scanner = Scanner::new(forms("what the guest was told", SECRET.as_bytes())).unwrap();
    let elsewhere = scanner.directory(&here.path(""), std::slice::from_ref(&user_data)).unwrap();
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
