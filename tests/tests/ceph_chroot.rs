//! `vmseal lab ceph up --chroot`: a cluster whose programs run in a chroot (`scripts/build-ceph-chroot`) survives what others survive, is
//! used by clients of this machine's own packages, and leaves the chroot as it was. And what is mounted for it is never removed with it.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::{Path, PathBuf};

use serde_json::Value;
use vmseal_lab::ceph::chroot;
use vmseal_lab::ceph::layout::Layout;
use vmseal_tests::ceph::{Cluster, is_installed, mounts_below, said};
use vmseal_tests::guest::built;
use vmseal_tests::kills::is_soak_run;
use vmseal_tests::process::using;
use vmseal_tests::{eventually, skipped};

/// What is stored in an image: more than one object of 4 MiB, and not a whole number of them.
const CONTENT: usize = (9 << 20) + 512;

/// What a cluster has mounted while it is up: the chroot, and in it the kernel's files and its own.
const MOUNTS: usize = 4;

/// Short: that `vmseal-rbd` reaches the cluster matters, and no figure.
const EXPERIMENT: &str = r#"
id = "mine"
title = "a cluster of another release"
subject = "disk"
measures = ["iops"]

[matrix]
systems = ["vmseal-encrypted", "vmseal-plain"]

[[matrix.loads]]
id = "write"
order = "random"
direction = "write"
block = 65536
depth = 8

[steps]
storage = "ceph"
transport = "vhost-user-blk"
places = 2
small = { rounds = 2, seconds = 0.5, size_mib = 16 }
full = { rounds = 2, seconds = 0.5, size_mib = 16 }
"#;

/// Whether this is root, which may mount; where not, the run says so.
fn is_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        skipped("it takes root");
    }
    is_root
}

/// The chroot that scripts/build-ceph-chroot has built; none where the test cannot run, and then the run says why.
fn built_chroot() -> Option<PathBuf> {
    if !is_soak_run() || !is_installed() || !is_root() {
        return None;
    }
    let cached = built("build-ceph-chroot", &["--cached"]);
    if cached.is_err() {
        skipped("there is no chroot with Ceph: scripts/build-ceph-chroot builds it");
    }
    cached.ok()
}

/// Finds that all daemons run, from the chroot, and that all is well.
fn check_whole(cluster: &Cluster, status: &Value, chroot: &Path) {
    let daemons = status["daemons"].as_array().unwrap();
    assert_eq!(daemons.len(), 5, "{status:#}");
    assert!(daemons.iter().all(|it| it["alive"] == true), "{status:#}");
    assert!(status["release"].as_str().unwrap().ends_with("(reef)"), "{status:#}");
    assert_eq!(status["chroot"].as_str(), chroot.to_str());
    assert_eq!(mounts_below(&cluster.directory()).len(), MOUNTS);
    // So several clusters may have one chroot, and may be removed one by one.
    assert_eq!(mounts_below(chroot), [] as [PathBuf; 0]);
    eventually("all is well", || {
        (cluster.json(&["status"])["health"] == "HEALTH_OK").then_some(())
    })
    .unwrap();
}

/// Ends it: nothing runs any more, and nothing is mounted.
fn down(cluster: &Cluster) {
    let output = cluster.run(&["down"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(using(&cluster.directory()), [] as [i32; 0]);
    assert_eq!(mounts_below(&cluster.directory()), [] as [PathBuf; 0]);
}

/// Measures disks that `vmseal-rbd` has in the cluster. The report names its release.
fn measure(cluster: &Cluster, release: &Value) {
    let experiment = cluster.measured(EXPERIMENT);
    assert!(experiment["refused"].is_null(), "{experiment:#}");
    let cells = experiment["measured"][0]["cells"].as_array().unwrap();
    assert!(!cells.is_empty() && cells.iter().all(|it| it["iops"].as_f64() > Some(0.0)));
    assert_eq!(experiment["clusters"][0]["release"], *release);
}

#[test]
fn a_cluster_in_a_chroot_survives_what_is_killed_serves_other_releases_and_leaves_the_chroot() {
    let Some(chroot) = built_chroot() else { return };
    let cluster = Cluster::new();
    let options = ["--chroot", chroot.to_str().unwrap()];
    // Whatever an `up` has made when it dies, `down` removes the mounts, and the next `up` goes on.
    for line in ["mon.a: made", "osd.0: made"] {
        cluster.up_killed_at(line, &options);
        down(&cluster);
    }
    cluster.up_killed_at("osd.1: started", &options);
    // Nothing is asked for: the cluster is as it was made.
    let first = cluster.up();
    check_whole(&cluster, &first, &chroot);

    let content: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(CONTENT).collect();
    cluster.import(&content, "vmseal/image", &[]);
    assert!(cluster.export("vmseal/image") == content);
    measure(&cluster, &first["release"]);

    cluster.kill_daemons("osd.1");
    check_whole(&cluster, &cluster.up(), &chroot);
    // Mounts are left by daemons that are killed.
    cluster.kill_daemons("");
    assert_eq!(mounts_below(&cluster.directory()).len(), MOUNTS);
    check_whole(&cluster, &cluster.up(), &chroot);
    assert!(cluster.export("vmseal/image") == content);

    down(&cluster);
    check_whole(&cluster, &cluster.up(), &chroot);
    assert!(cluster.export("vmseal/image") == content);
    let output = cluster.run(&["down", "--destroy", "--yes"]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(!cluster.directory().exists());
    assert!(chroot.join("usr/bin/ceph-osd").is_file(), "the chroot was removed with the cluster");
}

#[test]
fn while_a_chroot_is_mounted_nothing_of_its_cluster_is_removed_and_the_chroot_always_stays() {
    // Ceph's programs are not needed.
    if !is_root() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("reef");
    let program = root.join("usr/bin/ceph-osd");
    std::fs::create_dir_all(program.parent().unwrap()).unwrap();
    std::fs::write(&program, "").unwrap();
    // It unmounts what is left when this fails.
    let cluster = Cluster::new();
    let layout = Layout::make(&cluster.directory()).unwrap();
    layout.make_directories().unwrap();
    layout.write(&layout.record(), "{}").unwrap();
    let keyring = layout.keyring("client.admin");
    layout.write(&keyring, "").unwrap();

    // The second `up` finds what the first has left.
    for _ in 0..2 {
        chroot::mount(&layout, &root, false).unwrap();
        assert_eq!(mounts_below(layout.root()).len(), MOUNTS);
        assert_eq!(mounts_below(&root), [] as [PathBuf; 0]);
    }
    chroot::mount(&layout, &root, true).unwrap();
    assert_eq!(mounts_below(layout.root()).len(), MOUNTS);
    // By the path in the chroot, which is the same.
    let inside = layout.chroot_place().join(keyring.strip_prefix("/").unwrap());
    assert!(inside.is_file());

    let mounted = layout.chroot_place().join("usr/bin/ceph-osd");
    let by_hand = std::fs::remove_file(&mounted).unwrap_err();
    assert_eq!(by_hand.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    assert!(layout.remove().is_err());
    assert!(layout.record().is_file() && keyring.is_file() && mounted.is_file());

    chroot::unmount(&layout).unwrap();
    assert_eq!(mounts_below(layout.root()), [] as [PathBuf; 0]);
    layout.remove().unwrap();
    assert!(!cluster.directory().exists());
    assert!(program.is_file(), "the chroot was removed with the cluster");
}
