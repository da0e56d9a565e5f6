//! A VM on a pool of a real Ceph cluster goes to a host that does not have the pool, and to another control plane: its disk, and what its
//! snapshot keeps, are copied to a directory there, and into the pool when it comes back. Nothing is left where it was.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::Path;

use vmseal_tests::ceph::is_installed;
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
use vmseal_tests::counting_guest::{MARKER, read_marker_of_disk};
use vmseal_tests::eventually;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::booted;
use vmseal_tests::two_hosts::{HERE, THERE, add_host_with_datastore, only_host, own_directory};

use crate::ceph_datastore::is_ciphertext;
use crate::ceph_migration::{
    AFTER, BEFORE, DISK, TEXT_AT, VM, has_lost_nothing, snapshot_keeps, start,
};
use crate::migration_remote::{introduce, other_control_plane};

#[test]
fn a_vm_goes_from_a_pool_to_a_directory_and_back_while_it_runs_and_while_it_is_off() {
    if !is_installed() {
        return;
    }
    let options = Options { messenger: "secure", erasure_coded: false, key_at_server: true };
    let mut ceph = CephInstallation::shared("copies", options);
    add_host_with_datastore(&mut ceph.here).unwrap();
    start(&ceph.here);
    is_in_pool(&ceph, &ceph.here);
    goes_to_another_host_and_back(&ceph);
    ceph.here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    goes_to_another_control_plane_and_back(&ceph);

    let here = &ceph.here;
    here.vmseal(&["vm", "start", VM]).unwrap();
    read_marker_of_disk(&mut booted(here, VM).unwrap());
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "prove", VM]).unwrap();
    assert!(here.disk_has(VM, DISK, TEXT_AT, AFTER).unwrap());
    here.vmseal(&["snapshot", "delete", VM, "one"]).unwrap();
    here.vmseal(&["vm", "delete", VM]).unwrap();
    ceph.is_empty();
}

/// The guest counts meanwhile.
fn goes_to_another_host_and_back(ceph: &CephInstallation) {
    let here = &ceph.here;
    let far = own_directory(here, THERE);
    let planned = here.vmseal(&["vm", "migrate", VM, THERE, "--dry-run"]).unwrap();
    for told in ["with copies of disks system", "what a snapshot keeps", "on datastore 'far'"] {
        assert!(planned.contains(told), "{told}: {planned}");
    }
    here.vmseal(&["vm", "migrate", VM, THERE]).unwrap();
    assert_eq!(only_host(here, VM).unwrap(), THERE);
    ceph.is_empty();
    is_in_directory(here, "far", &far);
    has_lost_nothing(here);
    snapshot_keeps(here, BEFORE);

    here.vmseal(&["vm", "migrate", VM, HERE, "--datastore", "ceph"]).unwrap();
    assert_eq!(only_host(here, VM).unwrap(), HERE);
    is_empty(here, &far);
    is_in_pool(ceph, here);
    has_lost_nothing(here);
    snapshot_keeps(here, BEFORE);
}

/// The VM is off.
fn goes_to_another_control_plane_and_back(ceph: &CephInstallation) {
    let (west, east) = (&ceph.here, other_control_plane());
    introduce(west, &east);
    west.vmseal(&["vm", "migrate", VM, "--remote", "east"]).unwrap();
    ceph.is_empty();
    assert_eq!(east.vm(VM).unwrap()["power"], "off");
    is_in_directory(&east, "local", &east.path("datastore"));
    snapshot_keeps(&east, BEFORE);
    assert!(east.disk_has(VM, DISK, TEXT_AT, AFTER).unwrap());

    let (url, token) = (west.url(), west.path("server/admin.token"));
    let add = ["remote", "add", "west", &url, "--remote-token-file", text(&token).unwrap()];
    assert!(east.answered(&add, "yes\n").unwrap().status.success());
    let back = ["vm", "migrate", VM, HERE, "--remote", "west", "--datastore", "ceph"];
    east.vmseal(&back).unwrap();
    assert_eq!(west.vm(VM).unwrap()["power"], "off");
    is_empty(&east, &east.path("datastore"));
    is_in_pool(ceph, west);
    snapshot_keeps(west, BEFORE);
}

/// The VM's only disk is on this datastore.
fn is_on(at: &Installation, datastore: &str) {
    let vm = at.vm(VM).unwrap();
    let on: Vec<_> =
        vm["disks"].as_array().unwrap().iter().map(|disk| &disk["datastore"]).collect();
    assert_eq!(on, [datastore], "{vm}");
}

/// The VM's disk is in the pool, where nothing can be read.
fn is_in_pool(ceph: &CephInstallation, at: &Installation) {
    is_on(at, "ceph");
    is_ciphertext(ceph);
}

/// The VM's disk is on this datastore, which is a directory, where nothing can be read.
fn is_in_directory(at: &Installation, datastore: &str, directory: &Path) {
    is_on(at, datastore);
    let mut files = at.datastore_entries(directory).unwrap();
    files.retain(|file| file.is_file());
    assert!(!files.is_empty(), "there is nothing");
    for file in files {
        let content = std::fs::read(&file).unwrap();
        let is_readable = [MARKER, BEFORE, AFTER].iter().any(|text| contains(&content, text));
        assert!(!is_readable, "{} is readable", file.display());
    }
}

/// Nothing is left in a directory.
fn is_empty(at: &Installation, directory: &Path) {
    let left = || at.datastore_entries(directory).ok();
    eventually("nothing is left", || left().filter(Vec::is_empty).map(drop))
        .unwrap_or_else(|error| panic!("{error}: {:?}", left()));
}
