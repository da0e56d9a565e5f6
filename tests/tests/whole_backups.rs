//! Backups of a VM with a TPM and a disk for cloud-init: both come back with its disks, in place and when the VM was deleted, and
//! what the TPM kept is checked.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::{Path, PathBuf};

use serde_json::Value;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::{Victim, during, has_its_turn, some_of};
use vmseal_tests::scan::contains;
use vmseal_tests::tpm_guest::{
    self, DONE, MARKER, ask, define, has_tpm, keeps, read, start, undefine, write,
};

const VM: &str = "web";

/// What cloud-init is told.
const TOLD: &str = "VMSEAL-TOLD-184";

/// An installation with a VM that has a TPM and is told something, and a directory for backups.
fn created() -> (Installation, String) {
    let here = Installation::new().unwrap();
    std::fs::write(here.path("user-data"), format!("#cloud-config\n# {TOLD}\n")).unwrap();
    let documents = format!("user-data={}", here.path("user-data").display());
    tpm_guest::create(&here, VM, &["--cloud-init", &documents]);
    let to = here.path("backups");
    std::fs::create_dir(&to).unwrap();
    let to = to.to_str().unwrap().to_owned();
    (here, to)
}

fn backup(here: &Installation, arguments: &[&str]) -> String {
    here.vmseal(&[&["backup"], arguments].concat()).unwrap()
}

/// The directory of a backup.
fn path(here: &Installation, name: &str) -> PathBuf {
    let shown = here.json(&["backup", "show", VM, name]).unwrap();
    let part = |field: &str| shown[field].as_str().unwrap().to_owned();
    Path::new(&part("directory")).join(part("vm_id")).join(part("id"))
}

/// The guest's TPM keeps the marker.
fn keep(guest: &mut Console) {
    assert_eq!(ask(guest, &define(), DONE.len()), DONE);
    assert_eq!(ask(guest, &write(), DONE.len()), DONE);
    keeps(guest);
}

fn keeps_nothing(guest: &mut Console) {
    assert_ne!(ask(guest, &read(), DONE.len()), DONE);
}

/// The guest reads what it is told.
fn reads_what_it_is_told(guest: &mut Console) {
    guest.type_text("insmod /virtio_blk.ko; grep -ao 'VMSEAL-TOLD-[0-9]*' /dev/vdb\r").unwrap();
    guest.expect(TOLD, 0).unwrap();
}

fn stop(here: &Installation, guest: Console) {
    drop(guest);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

fn holds(path: &Path, text: &[u8]) -> bool {
    let content = std::fs::read(path).unwrap();
    contains(&content, text)
}

#[test]
fn a_tpm_and_what_cloud_init_reads_come_back_with_the_disks() {
    let (here, to) = created();
    let mut guest = start(&here, VM);
    keep(&mut guest);
    backup(&here, &["create", VM, "one", "--to", &to]);
    assert_eq!(ask(&mut guest, &undefine(), DONE.len()), DONE);
    keeps_nothing(&mut guest);
    backup(&here, &["create", VM, "two"]);

    let shown = here.json(&["backup", "show", VM, "one"]).unwrap();
    let parts = shown["contents"]["disks"].as_array().unwrap();
    let names: Vec<_> = parts.iter().map(|part| part["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["disk0", "cloud-init", "tpm"], "{shown}");
    // What the TPM kept is of the instant of the disks.
    assert!(shown["contents"]["tpm_later"].is_null(), "{shown}");
    let told = here.vmseal(&["backup", "show", VM, "one"]).unwrap();
    assert!(told.contains("tpm (what the TPM keeps)") && !told.contains("LACKS"), "{told}");
    for name in ["one", "two"] {
        for file in std::fs::read_dir(path(&here, name)).unwrap() {
            let file = file.unwrap().path();
            let clear = holds(&file, MARKER) || holds(&file, TOLD.as_bytes());
            assert!(!clear, "{} is in the clear", file.display());
        }
        // No guest is needed, nor is one in the way.
        backup(&here, &["verify", VM, name]);
    }
    assert!(here.guest_processes("swtpm").len() == 1, "a TPM is left that no guest uses");

    stop(&here, guest);
    backup(&here, &["restore", VM, "one"]);
    let mut guest = start(&here, VM);
    keeps(&mut guest);
    stop(&here, guest);
    backup(&here, &["restore", VM, "two"]);
    let mut guest = start(&here, VM);
    keeps_nothing(&mut guest);
    reads_what_it_is_told(&mut guest);
    stop(&here, guest);

    // With another key since, and when the VM was deleted: by another name, on another datastore.
    here.vmseal(&["vm", "recrypt", VM]).unwrap();
    backup(&here, &["restore", VM, "one"]);
    keeps(&mut start(&here, VM));
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "delete", VM]).unwrap();
    let second = here.path("second");
    std::fs::create_dir(&second).unwrap();
    let second = second.to_str().unwrap();
    here.vmseal(&["datastore", "add", "second", "--host", "here", "--path", second]).unwrap();
    backup(&here, &["restore", VM, "one", "--name", "again", "--datastore", "second"]);
    let mut guest = start(&here, "again");
    assert!(has_tpm(&mut guest));
    keeps(&mut guest);
    reads_what_it_is_told(&mut guest);
    drop(guest);
    here.vmseal(&["vm", "stop", "again", "--force"]).unwrap();
    for name in ["two", "one"] {
        backup(&here, &["delete", "again", name]);
    }
    assert_eq!(std::fs::read_dir(to).unwrap().count(), 0, "something of a backup is left");
}

/// One byte that is not as it was is found, and nothing of it is restored.
#[test]
fn what_a_tpm_kept_is_checked() {
    let (mut here, to) = created();
    let mut guest = start(&here, VM);
    keep(&mut guest);
    stop(&here, guest);
    backup(&here, &["create", VM, "one", "--to", &to]);
    let state = path(&here, "one").join("tpm.tpm");
    let good = std::fs::read(&state).unwrap();
    let mut flipped = good.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 1;
    std::fs::write(&state, flipped).unwrap();
    for verb in ["verify", "restore"] {
        let told = here.refused(&["backup", verb, VM, "one"]).unwrap();
        assert!(told.contains("TPM kept") && told.contains("is damaged"), "{verb}: {told}");
    }
    let failed = here.json(&["backup", "show", VM, "one"]).unwrap()["verification_failed"].clone();
    assert!(failed["why"].as_str().unwrap().contains("TPM kept"), "{failed}");
    std::fs::remove_file(&state).unwrap();
    let told = here.refused(&["backup", "verify", VM, "one"]).unwrap();
    assert!(told.contains("tpm.tpm is not there"), "{told}");
    std::fs::write(&state, good).unwrap();
    backup(&here, &["verify", VM, "one"]);
    // A host without swtpm cannot say anything of it.
    here.kill_agent();
    here.start_agent_with(&["--swtpm", "/nowhere/swtpm"]).unwrap();
    here.wait_host().unwrap();
    let told = here.refused(&["backup", "verify", VM, "one"]).unwrap();
    assert!(told.contains("package swtpm"), "{told}");
    assert!(here.json(&["backup", "show", VM, "one"]).unwrap()["verification_failed"].is_null());
}

/// As another VM it is told the same, and its TPM is a new one: two VMs with the keys of one TPM there are not.
#[test]
fn a_backup_becomes_another_vm_with_a_tpm_of_its_own() {
    let (here, to) = created();
    let mut guest = start(&here, VM);
    keep(&mut guest);
    backup(&here, &["create", VM, "one", "--to", &to]);
    let asked = ["backup", "restore", VM, "one", "--as", "other"];
    let planned = here.try_vmseal(&[&asked[..], &["--dry-run"]].concat()).unwrap();
    let warned = String::from_utf8_lossy(&planned.stderr).into_owned();
    assert!(planned.status.success() && warned.contains("new TPM"), "{warned}");
    // This guest has no driver for its disk, so its filter could not be replaced while it runs.
    stop(&here, guest);
    here.vmseal(&asked).unwrap();
    let mut other = start(&here, "other");
    assert!(has_tpm(&mut other));
    keeps_nothing(&mut other);
    reads_what_it_is_told(&mut other);
    keeps(&mut start(&here, VM));
}

/// What the agent has taken with the snapshot is lost with it: the backup has what the TPM keeps then, and says so.
#[test]
fn an_agent_that_dies_while_a_backup_is_made_loses_no_tpm() {
    if !has_its_turn() {
        return;
    }
    let (mut here, to) = created();
    let mut guest = start(&here, VM);
    keep(&mut guest);
    drop(guest);
    for (round, milliseconds) in some_of(&[50, 150, 300, 600]).into_iter().enumerate() {
        let name = format!("round-{round}");
        let create = ["backup", "create", VM, &name, "--to", &to];
        let ended = during(&mut here, VM, &create, Victim::Agent, milliseconds);
        let told = String::from_utf8_lossy(&ended.stderr).into_owned();
        let all = here.json(&["backup", "list", VM]).unwrap();
        let there = all.as_array().unwrap().iter().any(|it| it["name"] == name.as_str());
        assert_eq!(there, ended.status.success(), "{told}");
        if there {
            backup(&here, &["verify", VM, &name]);
        }
    }
    assert_eq!(here.json(&["snapshot", "list", VM]).unwrap(), Value::Array(Vec::new()));
}
