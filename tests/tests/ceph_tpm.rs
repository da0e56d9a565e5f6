//! A VM whose TPM keeps what it does on a pool of a real Ceph cluster. When what serves the pool ends, the guest's disks go on, and its TPM
//! is lost until the VM is stopped and started (docs/decisions/342): the alarm says so, the guest is told of what is not kept, and what was
//! kept is there at the next start.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::PathBuf;

use vmseal_tests::ceph::is_installed;
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
use vmseal_tests::counting_guest::{count, read_marker_of_disk, stop_counting, write_marker};
use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::shell_guest::{booted, image};
use vmseal_tests::tpm_guest::{DONE, ask, ask_on_and_on, define, keeps, read, undefine, write};

const VM: &str = "web";

/// How an answer begins that is an error.
const REFUSED: &str = "8001";

fn start(here: &Installation) -> Console {
    here.vmseal(&["vm", "start", VM]).unwrap();
    booted(here, VM).unwrap()
}

fn stop(here: &Installation, console: Console) {
    drop(console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

/// The guest's TPM does this.
fn does(console: &mut Console, command: &[u8]) {
    assert_eq!(ask(console, command, DONE.len()), DONE);
}

/// The file in which the VM's TPM keeps all, on the pool.
fn kept(bench: &CephInstallation) -> PathBuf {
    let vm = bench.here.vm(VM).unwrap();
    let disks = vm["disks"].as_array().unwrap();
    let disk = disks.iter().find(|disk| disk["role"] == "tpm").unwrap();
    assert_eq!(disk["datastore"], "ceph", "{vm}");
    let home = bench.mounted.join(vm["id"].as_str().unwrap());
    home.join(format!("{}.tpm", disk["id"].as_str().unwrap())).join("tpm2-00.permall")
}

/// Operators are told, and what the VM cannot do without its TPM is refused.
fn is_lost(here: &Installation) {
    let told = here.wait_alarm(VM, "tpm-died").unwrap();
    assert!(told.contains("has lost its pool") && told.contains("vmseal vm start web"), "{told}");
    for needs_it in ["suspend", "reset"] {
        let told = here.refused(&["vm", needs_it, VM]).unwrap();
        assert!(told.contains("has lost its TPM"), "{needs_it}: {told}");
    }
}

#[test]
fn a_tpm_is_lost_with_what_serves_its_pool_and_has_what_it_kept_at_the_next_start() {
    if !is_installed() || !has_its_turn() {
        return;
    }
    let options = Options { messenger: "crc", erasure_coded: false, key_at_server: false };
    let bench = CephInstallation::shared("tpm", options);
    let here = &bench.here;
    let disk = format!("datastore=ceph,format=raw,image={},size=64MiB", image().unwrap().display());
    let create = ["vm", "create", VM, "--policy", "encrypted", "--disk", &disk, "--tpm"];
    let machine = ["--nic", "user,mac=52:54:0a:00:02:0f", "--memory", "192MiB"];
    here.vmseal(&[&create[..], &machine].concat()).unwrap();
    let kept = kept(&bench);
    let mut console = start(here);
    write_marker(&mut console);
    does(&mut console, &define());
    does(&mut console, &write());
    keeps(&mut console);

    count(&mut console);
    let server = bench.server();
    bench.kill_server_of_pool();
    bench.is_served_again(VM, server);
    stop_counting(&mut console);
    is_lost(here);
    // What is not kept is not said to be done, and after that the TPM does nothing.
    assert_eq!(ask(&mut console, &undefine(), REFUSED.len()), REFUSED);
    assert_eq!(ask(&mut console, &read(), REFUSED.len()), REFUSED);
    read_marker_of_disk(&mut console);
    stop(here, console);
    here.wait_no_alarm(VM, "tpm-died").unwrap();
    let mut console = start(here);
    keeps(&mut console);
    does(&mut console, &undefine());

    // A remount in the middle of what the TPM stores leaves what it can load.
    let before = std::fs::read(&kept).unwrap();
    ask_on_and_on(&mut console, &[define(), undefine()]);
    eventually("the TPM stores", || {
        std::fs::read(&kept).is_ok_and(|now| now != before).then_some(())
    })
    .unwrap();
    let server = bench.server();
    // The cluster may be too slow for one trial of the key.
    eventually("the pool is mounted anew", || {
        let remount = ["datastore", "remount", "ceph", "--host", "here"];
        here.try_vmseal(&remount).unwrap().status.success().then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}: {}", bench.log()));
    bench.is_served_again(VM, server);
    is_lost(here);
    stop(here, console);
    let mut console = start(here);
    // The last of them may have been kept or not.
    ask(&mut console, &undefine(), REFUSED.len());
    does(&mut console, &define());
    does(&mut console, &write());
    stop(here, console);
    let mut console = start(here);
    keeps(&mut console);
    read_marker_of_disk(&mut console);
    stop(here, console);
    here.vmseal(&["vm", "delete", VM]).unwrap();
    bench.is_empty();
}
