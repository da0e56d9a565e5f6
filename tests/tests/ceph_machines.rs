//! What a machine has beside the disks of its guest, on a pool of a real Ceph cluster: variables of UEFI firmware, and what a TPM keeps. They move with
//! the guest's memory to another host and back, and go to a directory and back while the VM is off. And disks there that are encrypted and
//! decrypted in their own images.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::{Path, PathBuf};

use vmseal_tests::ceph::is_installed;
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
use vmseal_tests::counting_guest::{MARKER, read_marker_of_disk, write_marker};
use vmseal_tests::eventually;
use vmseal_tests::firmware_shell::{self, has_variable, set_variable};
use vmseal_tests::guest::Console;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{boots, uefi_image};
use vmseal_tests::tpm_guest::{self, DONE, ask, define, extend, keeps, measured, write};
use vmseal_tests::two_hosts::{self, HERE, SWTPM, THERE, other};

const VM: &str = "web";

/// The variable that the firmware keeps.
const NAME: &str = "VmsealMarker";

/// The VM whose disk is converted; it is never started.
const CONVERTED: &str = "store";

/// The size of its disk, in bytes.
const DISK: usize = 24 << 20;

/// How slowly it is converted, so that something can die meanwhile: some six seconds.
const RATE: [&str; 3] = ["--rate", "4M", "--no-wait"];

#[test]
fn a_machine_is_whole_on_a_pool_and_disks_are_converted_there() {
    if !is_installed() || !has_its_turn() {
        return;
    }
    let options = Options { messenger: "secure", erasure_coded: false, key_at_server: true };
    let mut bench = CephInstallation::shared("machines", options);
    converts_in_place(&mut bench);
    let there = bench.add_host(THERE);
    keeps_variables_and_tpm(&bench, &there);
}

/// Makes the VM with a guest that UEFI firmware starts, and a TPM.
fn create(here: &Installation) {
    let image = here.path("uefi.raw");
    uefi_image(&image).unwrap();
    let disk =
        format!("name=system,datastore=ceph,format=raw,image={},size=64MiB", image.display());
    let create = ["vm", "create", VM, "--policy", "encrypted", "--disk", &disk, "--host", HERE];
    let machine = ["--firmware", "uefi", "--tpm", "--memory", "192MiB"];
    let card = ["--nic", "user,mac=52:54:0a:00:02:0f"];
    here.vmseal(&[&create[..], &machine, &card].concat()).unwrap();
}

/// Starts the VM, does something at its firmware's shell, and has that start the guest.
fn start(here: &Installation, at_firmware: impl FnOnce(&mut Console)) -> Console {
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = firmware_shell::open(here, VM);
    at_firmware(&mut console);
    firmware_shell::start_guest(&mut console);
    boots(&mut console).unwrap();
    console
}

/// The VM's home on a datastore, where all of its disks are, and the directory of what its TPM keeps.
fn home_on(here: &Installation, datastore: &str, place: &Path) -> (PathBuf, PathBuf) {
    let vm = here.vm(VM).unwrap();
    let disks = vm["disks"].as_array().unwrap();
    let mut roles: Vec<_> = disks.iter().map(|disk| disk["role"].as_str().unwrap()).collect();
    roles.sort_unstable();
    assert_eq!(roles, ["data", "tpm", "uefi_variables"], "{vm}");
    assert!(disks.iter().all(|disk| disk["datastore"] == datastore), "{vm}");
    let home = place.join(vm["id"].as_str().unwrap());
    let tpm = disks.iter().find(|disk| disk["role"] == "tpm").unwrap();
    let kept = home.join(format!("{}.tpm", tpm["id"].as_str().unwrap()));
    (home, kept)
}

/// Nothing in the VM's home on a datastore can be read, and one directory there has what its TPM keeps.
fn is_ciphertext(here: &Installation, datastore: &str, place: &Path) {
    let (home, kept) = home_on(here, datastore, place);
    let directories = || {
        let entries = std::fs::read_dir(&home).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.is_dir()).collect::<Vec<_>>()
    };
    eventually("one directory is there", || (directories() == [kept.clone()]).then_some(()))
        .unwrap_or_else(|error| panic!("{error}: {:?}", directories()));
    assert!(kept.join("tpm2-00.permall").is_file(), "nothing is kept in {}", kept.display());
    let name = in_utf16(NAME);
    for file in here.datastore_entries(&home).unwrap().iter().filter(|file| file.is_file()) {
        let content = std::fs::read(file).unwrap();
        let has = |text: &[u8]| contains(&content, text);
        let is_readable = has(&name) || has(tpm_guest::MARKER) || has(MARKER.as_bytes());
        assert!(!is_readable, "{} is readable", file.display());
    }
}

fn in_utf16(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

/// A disk of a VM that is off, as its guest has it.
fn exported(here: &Installation, vm: &str, disk: &str) -> Vec<u8> {
    let to = here.path("exported");
    let export = ["disk", "export", vm, disk, "--format", "raw", "--plaintext", "--to"];
    here.vmseal(&[&export[..], &[text(&to).unwrap()]].concat()).unwrap();
    let content = std::fs::read(&to).unwrap();
    std::fs::remove_file(&to).unwrap();
    content
}

/// The proof of a VM reads all of it, and finds nothing in the clear.
fn is_proved(here: &Installation, vm: &str) {
    let proof = here.vmseal(&["vm", "prove", vm, "--all"]).unwrap();
    assert!(proof.starts_with(&format!("VM {vm}: encrypted; every byte was read")), "{proof}");
    assert!(proof.contains("header authentic") && proof.contains(" 0 in the clear"), "{proof}");
}

/// The VM moves to this host without a copy of a disk, and its TPM has what it had, also of what was measured.
fn moves_to(bench: &CephInstallation, to: &str, register: &str) {
    let here = &bench.here;
    let planned = here.vmseal(&["vm", "migrate", VM, to, "--dry-run"]).unwrap();
    let copies = ["with a copy", "with copies"].iter().any(|it| planned.contains(it));
    assert!(planned.contains(&format!("choose host '{to}'")) && !copies, "{planned}");
    here.vmseal(&["vm", "migrate", VM, to]).unwrap();
    assert_eq!(two_hosts::only_host(here, VM).unwrap(), to);
    let mut console = here.console(VM).unwrap();
    keeps(&mut console);
    assert_eq!(measured(&mut console), register, "what it has measured since it booted");
    read_marker_of_disk(&mut console);
    let left = || two_hosts::processes(here, other(to), SWTPM).is_empty().then_some(());
    eventually("no TPM is left at the other host", left).unwrap();
    assert_eq!(two_hosts::processes(here, to, SWTPM).len(), 1);
}

fn keeps_variables_and_tpm(bench: &CephInstallation, there: &Path) {
    let here = &bench.here;
    create(here);
    let mut console = start(here, |shell| set_variable(shell, NAME, "112233"));
    write_marker(&mut console);
    assert_eq!(ask(&mut console, &define(), DONE.len()), DONE);
    assert_eq!(ask(&mut console, &write(), DONE.len()), DONE);
    assert_eq!(ask(&mut console, &extend(), DONE.len()), DONE);
    let register = measured(&mut console);
    keeps(&mut console);
    drop(console);

    moves_to(bench, THERE, &register);
    is_ciphertext(here, "ceph", there);
    moves_to(bench, HERE, &register);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    is_ciphertext(here, "ceph", &bench.mounted);
    is_proved(here, VM);
    assert!(contains(&exported(here, VM, "uefi-variables"), in_utf16(NAME)), "it is not there");

    here.vmseal(&["vm", "move", VM, "--datastore", "local"]).unwrap();
    bench.is_empty();
    is_ciphertext(here, "local", &here.path("datastore"));
    is_proved(here, VM);
    here.vmseal(&["vm", "move", VM, "--datastore", "ceph"]).unwrap();
    let left = here.datastore_entries(&here.path("datastore")).unwrap();
    assert!(left.is_empty(), "{left:?}");
    let mut console = start(here, |shell| has_variable(shell, NAME, "11 22 33"));
    keeps(&mut console);
    read_marker_of_disk(&mut console);
    drop(console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    is_ciphertext(here, "ceph", &bench.mounted);
    is_proved(here, VM);
    here.vmseal(&["vm", "delete", VM]).unwrap();
    bench.is_empty();
}

/// A disk with data and a hole on the pool, of a VM that is off, is encrypted in its own image and decrypted again. Each time the agent dies
/// meanwhile.
fn converts_in_place(bench: &mut CephInstallation) {
    // Not random bytes: a proof cannot tell these from ciphertext.
    let lines = (0..DISK / 16).flat_map(|line| format!("{line:015}\n").into_bytes());
    let mut content: Vec<u8> = lines.collect();
    content[8 << 20..12 << 20].fill(0);
    for place in [0, 14 << 20, DISK - 4096] {
        content[place..place + MARKER.len()].copy_from_slice(MARKER.as_bytes());
    }
    let image = bench.here.path("data.raw");
    std::fs::write(&image, &content).unwrap();
    let disk = format!("name=data,datastore=ceph,format=raw,image={}", image.display());
    let create = ["vm", "create", CONVERTED, "--policy", "plain", "--memory", "32MiB", "--disk"];
    bench.here.vmseal(&[&create[..], &[disk.as_str()]].concat()).unwrap();
    is_in(bench, false, &content);
    let (encrypt, decrypt) = (
        ["vm", "encrypt", CONVERTED, "--policy", "encrypted"],
        ["vm", "decrypt", CONVERTED, "--yes"],
    );
    converts_as_its_agent_dies(bench, &[&encrypt[..], &["--in-place"]].concat());
    is_in(bench, true, &content);
    is_proved(&bench.here, CONVERTED);
    let to_plain = ["--policy", "plain", "--in-place"];
    converts_as_its_agent_dies(bench, &[&decrypt[..], &to_plain].concat());
    is_in(bench, false, &content);
    bench.here.vmseal(&["vm", "delete", CONVERTED]).unwrap();
    bench.is_empty();
}

/// The images of the pool that have this ending of a file's name.
fn images_of(bench: &CephInstallation, ending: &str) -> Vec<String> {
    let mut images = bench.images();
    images.retain(|image| {
        let told = bench.cluster.rbd(&["image-meta", "get", image, "vmseal.path"]);
        String::from_utf8(told.stdout).unwrap().trim().ends_with(ending)
    });
    images
}

/// Begins a conversion, kills the agent in the middle of it, and waits for its end.
fn converts_as_its_agent_dies(bench: &mut CephInstallation, change: &[&str]) {
    let task = bench.here.json(&[change, &RATE].concat()).unwrap();
    let task = task["id"].as_str().unwrap();
    let shown = |here: &Installation| here.json(&["task", "show", task]).unwrap();
    eventually("data has moved", || {
        (shown(&bench.here)["progress"]["done"].as_u64()? > 0).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}: {}", shown(&bench.here)));
    // Before `rbd` is asked: on a busy machine the conversion may end meanwhile.
    bench.here.kill_agent();
    let interrupted = shown(&bench.here);
    assert!(interrupted["ended"].is_null(), "it has ended before: {interrupted}");
    assert_eq!(images_of(bench, ".converting").len(), 1, "{interrupted}");
    bench.here.start_agent().unwrap();
    bench.here.vmseal(&["task", "wait", task]).unwrap();
}

/// The disk has its content, in one image that is ciphertext or not, and no other image is left.
fn is_in(bench: &CephInstallation, encrypted: bool, content: &[u8]) {
    let vm = bench.here.vm(CONVERTED).unwrap();
    assert_eq!(vm["disks"][0]["encrypted"], encrypted, "{vm}");
    assert_eq!(vm["disks"][0]["datastore"], "ceph", "{vm}");
    let image = eventually("only the disk's image is there", || {
        let mut images = bench.images();
        (images.len() == 1).then(|| images.remove(0))
    })
    .unwrap_or_else(|error| panic!("{error}: {:?}", bench.images()));
    assert_eq!(images_of(bench, ".raw"), [image.as_str()]);
    let stored = bench.cluster.export(&image);
    assert_eq!(stored.starts_with(b"LUKS\xba\xbe"), encrypted, "{vm}");
    assert_eq!(contains(&stored, MARKER), !encrypted, "{vm}");
    if !encrypted {
        assert!(stored.starts_with(content), "the image holds something else");
    }
    let found = exported(&bench.here, CONVERTED, "data");
    assert!(found == content, "the disk holds something else");
}
