//! Clones of a VM that is off, of one that runs, of one that is suspended, and of a snapshot, also on another datastore: they hold the same, and
//! share no key.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use vmseal_tests::guest::Console;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::{has_its_turn, some_of};
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{self, booted, run};
use vmseal_tests::tpm_guest::{self, DONE, ask, define, keeps};

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

/// The file of a VM's first disk, wherever that is.
fn first_image(here: &Installation, vm: &str) -> PathBuf {
    let shown = here.vm(vm).unwrap();
    here.home(vm).unwrap().join(format!("{}.raw", shown["disks"][0]["id"].as_str().unwrap()))
}

/// The master keys' ciphertext in the headers, and the first sectors of data.
fn beginnings(here: &Installation, vms: &[&str]) -> BTreeSet<Vec<u8>> {
    let first = |vm: &&str| std::fs::read(first_image(here, vm)).unwrap();
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

/// A VM has no snapshots, and no file of a layer.
fn has_no_snapshots(here: &Installation, vm: &str) {
    let snapshots = here.json(&["snapshot", "list", vm]).unwrap();
    assert_eq!(snapshots.as_array().unwrap().len(), 0, "{snapshots}");
    let files = here.home_files(vm).unwrap();
    let is_layer = |file: &&std::path::PathBuf| file.to_string_lossy().contains(".layer-");
    assert_eq!(files.iter().find(is_layer), None, "a layer of {vm} is left");
}

#[test]
fn a_vm_that_runs_is_cloned_and_no_snapshot_is_left() {
    let here = Installation::new().unwrap();
    shell_guest::start(&here, "web", "encrypted", &[]).unwrap();
    let mut console = booted(&here, "web").unwrap();
    write(&mut console, "TEXT-OF-ONE");
    let linked = here.refused(&["vm", "clone", "web", "copy", "--linked"]).unwrap();
    assert!(linked.contains("a linked clone shares files with a snapshot"), "{linked}");
    let planned = here.try_vmseal(&["vm", "clone", "web", "copy", "--dry-run"]).unwrap();
    let warned = String::from_utf8_lossy(&planned.stderr).into_owned();
    assert!(planned.status.success(), "{warned}");
    assert!(warned.contains("VM 'web' runs: a snapshot of it is taken"), "{warned}");
    has_no_snapshots(&here, "web");

    here.vmseal(&["vm", "clone", "web", "copy"]).unwrap();
    has_no_snapshots(&here, "web");
    // The guest has no agent that could freeze anything.
    let events = here.json(&["events"]).unwrap().to_string();
    assert!(events.contains("of a VM that ran, as after a power cut"), "{events}");
    write(&mut console, "TEXT-OF-TWO");
    here.vmseal(&["vm", "start", "copy"]).unwrap();
    let mut copy = booted(&here, "copy").unwrap();
    reads(&mut copy, "TEXT-OF-ONE");
    reads(&mut console, "TEXT-OF-TWO");
    for vm in ["copy", "web"] {
        here.vmseal(&["vm", "stop", vm, "--force"]).unwrap();
    }
    assert_eq!(of(&here, &["web", "copy"]).len(), 4, "VMs share a key or an address");
    assert_eq!(beginnings(&here, &["web", "copy"]).len(), 4, "VMs share a data key");
    // What the guest has written since is in the disk itself.
    assert!(here.disk_has("web", "disk0", TEXT_AT, "TEXT-OF-TWO").unwrap());
}

/// A suspended VM is cloned, also as a linked clone, as its disks were then. The clone boots; the VM stays suspended, and its guest goes on.
#[test]
fn a_suspended_vm_is_cloned_and_its_guest_goes_on() {
    let here = Installation::new().unwrap();
    shell_guest::start(&here, "web", "encrypted", &[]).unwrap();
    let mut console = booted(&here, "web").unwrap();
    write(&mut console, "TEXT-OF-ONE");
    run(&mut console, "m=REMEMBERED; echo SET-$((6 * 7))", "SET-42").unwrap();
    drop(console);
    here.vmseal(&["vm", "suspend", "web"]).unwrap();
    let memory = here.home("web").unwrap().join("vm.memory");
    let saved = std::fs::read(&memory).unwrap();
    let clone = ["vm", "clone", "web", "copy"];
    let planned = here.try_vmseal(&[&clone[..], &["--dry-run"]].concat()).unwrap();
    let warned = String::from_utf8_lossy(&planned.stderr).into_owned();
    assert!(planned.status.success() && warned.contains("as after a power cut"), "{warned}");

    here.vmseal(&clone).unwrap();
    for vm in ["web", "copy"] {
        has_no_snapshots(&here, vm);
    }
    let events = here.json(&["events"]).unwrap().to_string();
    assert!(events.contains("of a VM that was suspended, as after a power cut"), "{events}");
    here.vmseal(&["snapshot", "create", "web", "base"]).unwrap();
    here.vmseal(&["vm", "clone", "web", "linked", "--linked", "--snapshot", "base"]).unwrap();
    assert_eq!(here.vm("web").unwrap()["power"], "suspended");
    assert!(std::fs::read(&memory).unwrap() == saved, "its memory is another one");
    assert!(!here.home("copy").unwrap().join("vm.memory").exists(), "the clone has its memory");
    assert_eq!(of(&here, &["web", "copy"]).len(), 4, "VMs share a key or an address");
    assert_eq!(beginnings(&here, &["web", "copy"]).len(), 4, "VMs share a data key");
    assert!(here.disk_has("linked", "disk0", TEXT_AT, "TEXT-OF-ONE").unwrap());

    here.vmseal(&["vm", "start", "copy"]).unwrap();
    let mut copy = booted(&here, "copy").unwrap();
    here.vmseal(&["vm", "resume", "web"]).unwrap();
    let mut web = here.console("web").unwrap();
    for (guest, has) in [(&mut copy, "HAS--"), (&mut web, "HAS-REMEMBERED-")] {
        reads(guest, "TEXT-OF-ONE");
        run(guest, "echo HAS-$m-", has).unwrap();
    }
    for vm in ["copy", "web"] {
        here.vmseal(&["vm", "stop", vm, "--force"]).unwrap();
    }
}

/// All disks of a VM are on this datastore, and no file there has any of these texts.
fn is_sealed_on(here: &Installation, vm: &str, datastore: &str, texts: &[&str]) {
    let shown = here.vm(vm).unwrap();
    let disks = shown["disks"].as_array().unwrap();
    assert!(disks.iter().all(|disk| disk["datastore"] == datastore), "{shown}");
    let files = here.home_files(vm).unwrap();
    for disk in disks {
        let name = format!("{}.raw", disk["id"].as_str().unwrap());
        assert!(files.iter().any(|file| file.ends_with(&name)), "{name} is not in {files:?}");
    }
    for file in files.into_iter().filter(|file| file.is_file()) {
        let content = std::fs::read(&file).unwrap();
        let found = texts.iter().find(|text| contains(&content, text));
        assert_eq!(found, None, "in {}", file.display());
    }
}

/// From one directory to another and back: of a VM that runs, of its snapshot, and of a VM that is off.
#[test]
fn a_clone_is_on_another_datastore_of_the_host() {
    let here = Installation::new().unwrap();
    let second = here.path("second");
    std::fs::create_dir(&second).unwrap();
    let add = ["datastore", "add", "second", "--host", "here", "--path", text(&second).unwrap()];
    here.vmseal(&add).unwrap();
    std::fs::write(here.path("user-data"), "#cloud-config\n# VMSEAL-TOLD-91\n").unwrap();
    let documents = format!("user-data={}", text(&here.path("user-data")).unwrap());
    shell_guest::start(&here, "web", "encrypted", &["--cloud-init", &documents]).unwrap();
    let mut console = booted(&here, "web").unwrap();
    write(&mut console, "TEXT-OF-ONE");
    here.vmseal(&["snapshot", "create", "web", "one"]).unwrap();
    write(&mut console, "TEXT-OF-TWO");

    let to = ["--datastore", "second"];
    let kept = [&["vm", "clone", "web", "kept", "--snapshot", "one"][..], &to].concat();
    let linked = here.refused(&[&kept[..], &["--linked"]].concat()).unwrap();
    assert!(linked.contains("a linked clone shares its files there"), "{linked}");
    let nowhere = here.refused(&["vm", "clone", "web", "kept", "--datastore", "none"]).unwrap();
    assert!(nowhere.contains("--datastore") && nowhere.contains("'none'"), "{nowhere}");
    let planned = here.vmseal(&[&kept[..], &["--dry-run"]].concat()).unwrap();
    assert!(planned.contains("disk0 (64 MiB on datastore 'second')"), "{planned}");
    assert_eq!(here.datastore_entries(&second).unwrap(), Vec::<PathBuf>::new());

    here.vmseal(&kept).unwrap();
    here.vmseal(&[&["vm", "clone", "web", "live"][..], &to].concat()).unwrap();
    reads(&mut console, "TEXT-OF-TWO");
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    drop(console);
    let texts = ["TEXT-OF-ONE", "TEXT-OF-TWO", "VMSEAL-TOLD-91"];
    for vm in ["kept", "live"] {
        is_sealed_on(&here, vm, "second", &texts);
        has_no_snapshots(&here, vm);
    }
    is_sealed_on(&here, "web", "local", &texts);
    let all = ["web", "kept", "live"];
    assert_eq!(of(&here, &all).len(), 6, "VMs share a key or an address");
    assert_eq!(beginnings(&here, &all).len(), 6, "VMs share a data key");
    here.vmseal(&["vm", "delete", "web"]).unwrap();
    assert_eq!(here.datastore_entries(&here.path("datastore")).unwrap(), Vec::<PathBuf>::new());

    for (vm, holds) in [("kept", "TEXT-OF-ONE"), ("live", "TEXT-OF-TWO")] {
        here.vmseal(&["vm", "start", vm]).unwrap();
        let mut guest = booted(&here, vm).unwrap();
        reads(&mut guest, holds);
        finds(&mut guest, "VMSEAL-TOLD-[0-9]*", "VMSEAL-TOLD-91");
        here.vmseal(&["vm", "stop", vm, "--force"]).unwrap();
    }
    here.vmseal(&["vm", "clone", "kept", "back", "--datastore", "local"]).unwrap();
    is_sealed_on(&here, "back", "local", &texts);
    assert!(here.disk_has("back", "disk0", TEXT_AT, "TEXT-OF-ONE").unwrap());
    for vm in ["kept", "live"] {
        here.vmseal(&["vm", "delete", vm]).unwrap();
    }
    assert_eq!(here.datastore_entries(&second).unwrap(), Vec::<PathBuf>::new());
    here.vmseal(&["datastore", "remove", "second"]).unwrap();
}

/// Agent and server die while a VM that runs is cloned: the clone is whole, the guest goes on, and no snapshot is left.
#[test]
fn the_clone_of_a_vm_that_runs_is_whole_whatever_dies() {
    if !has_its_turn() {
        return;
    }
    let mut here = Installation::new().unwrap();
    shell_guest::start(&here, "web", "encrypted", &[]).unwrap();
    let mut console = booted(&here, "web").unwrap();
    write(&mut console, "TEXT-OF-ONE");
    for (round, milliseconds) in some_of(&[40, 80, 120, 200, 300, 400]).into_iter().enumerate() {
        let name = format!("clone{round}");
        here.vmseal(&["vm", "clone", "web", &name, "--no-wait"]).unwrap();
        sleep(Duration::from_millis(milliseconds));
        if round % 2 == 0 {
            here.kill_agent();
            here.start_agent().unwrap();
        } else {
            here.kill_server();
            here.start_server().unwrap();
        }
        here.wait_host().unwrap();
        here.wait_made(&name).unwrap();
        has_no_snapshots(&here, "web");
        assert!(here.disk_has(&name, "disk0", TEXT_AT, "TEXT-OF-ONE").unwrap(), "{name}");
        here.vmseal(&["vm", "delete", &name]).unwrap();
    }
    drop(console);
    let mut console = here.console("web").unwrap();
    reads(&mut console, "TEXT-OF-ONE");
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
}

/// The guest finds this on its disk for cloud-init. Files there end with zeroes, at which its grep would end, too.
fn finds(guest: &mut Console, pattern: &str, found: &str) {
    let find = format!("tr '\\0' '\\n' </dev/vdb | grep -ao '{pattern}'");
    run(guest, &find, found).unwrap();
}

/// What is on the disk for cloud-init of a VM that is off.
fn told(here: &Installation, vm: &str) -> Vec<u8> {
    let file = here.path("told");
    let export = ["disk", "export", vm, "cloud-init", "--format", "raw", "--plaintext", "--to"];
    here.vmseal(&[&export[..], &[text(&file).unwrap()]].concat()).unwrap();
    let content = std::fs::read(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    content
}

/// The clone of a VM that runs, with cloud-init and a TPM: it is told the same, is another instance, and has an empty TPM.
#[test]
fn a_clone_is_told_the_same_as_another_instance_and_has_a_tpm_of_its_own() {
    let here = Installation::new().unwrap();
    let (user, network) = (here.path("user-data"), here.path("network"));
    std::fs::write(&user, "#cloud-config\n# VMSEAL-TOLD-77\n").unwrap();
    std::fs::write(&network, "version: 2 # VMSEAL-NET-78\n").unwrap();
    let documents =
        format!("user-data={},network-config={}", text(&user).unwrap(), text(&network).unwrap());
    tpm_guest::create(&here, "web", &["--cloud-init", &documents]);
    here.vmseal(&["vm", "start", "web"]).unwrap();
    let mut web = booted(&here, "web").unwrap();
    assert_eq!(ask(&mut web, &define(), DONE.len()), DONE);
    assert_eq!(ask(&mut web, &tpm_guest::write(), DONE.len()), DONE);
    keeps(&mut web);

    here.vmseal(&["vm", "clone", "web", "copy"]).unwrap();
    has_no_snapshots(&here, "web");
    let shown = here.vm("copy").unwrap();
    let disks = shown["disks"].as_array().unwrap();
    let names: Vec<_> = disks.iter().map(|disk| disk["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["disk0", "cloud-init", "tpm"], "{shown}");
    assert_eq!(of(&here, &["web", "copy"]).len(), 4, "VMs share a key or an address");
    for file in here.home_files("copy").unwrap().into_iter().filter(|file| file.is_file()) {
        let clear = contains(&std::fs::read(&file).unwrap(), "VMSEAL-TOLD-77");
        assert!(!clear, "{} is in the clear", file.display());
    }

    here.vmseal(&["vm", "start", "copy"]).unwrap();
    let mut copy = booted(&here, "copy").unwrap();
    for (guest, vm) in [(&mut copy, "copy"), (&mut web, "web")] {
        let id = here.vm(vm).unwrap()["id"].as_str().unwrap().to_owned();
        let instance = format!("instance-id: {id}");
        finds(guest, "instance-id: [0-9a-f-]*", &instance);
        let host = format!("local-hostname: \"{vm}\"");
        finds(guest, "local-hostname: .*", &host);
        finds(guest, "VMSEAL-TOLD-[0-9]*", "VMSEAL-TOLD-77");
        finds(guest, "VMSEAL-NET-[0-9]*", "VMSEAL-NET-78");
    }
    assert_ne!(ask(&mut copy, &tpm_guest::read(), DONE.len()), DONE, "its TPM has a marker");
    keeps(&mut web);
    for vm in ["copy", "web"] {
        here.vmseal(&["vm", "stop", vm, "--force"]).unwrap();
    }

    // So has one that is linked, and one that is told something else has that alone.
    here.vmseal(&["snapshot", "create", "web", "base"]).unwrap();
    here.vmseal(&["vm", "clone", "web", "linked", "--linked", "--snapshot", "base"]).unwrap();
    let id = here.vm("linked").unwrap()["id"].as_str().unwrap().to_owned();
    let content = told(&here, "linked");
    assert!(contains(&content, format!("instance-id: {id}\n")), "it is another instance");
    assert!(contains(&content, "VMSEAL-TOLD-77") && contains(&content, "VMSEAL-NET-78"));
    std::fs::write(&user, "#cloud-config\n# VMSEAL-TOLD-79\n").unwrap();
    let other = format!("user-data={}", text(&user).unwrap());
    here.vmseal(&["vm", "clone", "copy", "other", "--cloud-init", &other]).unwrap();
    let content = told(&here, "other");
    assert!(contains(&content, "VMSEAL-TOLD-79") && !contains(&content, "VMSEAL-TOLD-77"));
    assert!(!contains(&content, "VMSEAL-NET-78"), "it has the network of the other VM");
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
