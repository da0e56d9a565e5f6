//! `vmseal lab run` on a real Ceph cluster: vmseal's disks are measured beside librbd's, and beside what fio measures itself.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::process::{Command, Stdio};

use serde_json::Value;
use vmseal_tests::ceph::{Cluster, is_installed, said};
use vmseal_tests::program;

/// Short, and small blocks: that all are measured matters, and no figure.
const EXPERIMENT: &str = r#"
id = "mine"
title = "clients of Ceph"
subject = "disk"
measures = ["iops"]

[matrix]
systems = ["vmseal-encrypted", "vmseal-plain", "vmseal-encrypted-files", "librbd-luks2", "librbd-plain", "fio-rbd"]

[[matrix.loads]]
id = "write"
order = "random"
direction = "write"
block = 65536
depth = 8

[[matrix.loads]]
id = "read"
order = "sequential"
direction = "read"
block = 4096
depth = 1

[steps]
storage = "ceph"
transport = "vhost-user-blk"
places = 2
small = { rounds = 2, seconds = 0.5, size_mib = 16 }
full = { rounds = 2, seconds = 0.5, size_mib = 16 }
"#;

#[test]
fn librbd_and_fio_are_measured_beside_vmseal_on_one_pool() {
    if !is_installed() || !nix::unistd::geteuid().is_root() {
        return;
    }
    let cluster = Cluster::new();
    cluster.up();
    let home = tempfile::tempdir().unwrap();
    let (file, report) = (home.path().join("mine.toml"), home.path().join("report.json"));
    std::fs::write(&file, EXPERIMENT).unwrap();
    let mut command = Command::new(program("vmseal").unwrap());
    command.args(["lab", "run"]).arg(&file).arg("--report").arg(&report);
    command.arg("--ceph-directory").arg(cluster.directory()).stdin(Stdio::null());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let report: Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    let experiment = &report["experiments"][0];
    if let Some(why) = experiment["refused"].as_str() {
        assert!(why.contains("install Debian's package"), "{why}");
        println!("SKIPPED: {why}");
        return;
    }
    let cells = experiment["measured"][0]["cells"].as_array().unwrap();
    let vmseal = ["vmseal-encrypted", "vmseal-plain", "vmseal-encrypted-files"];
    for system in vmseal.into_iter().chain(["librbd-luks2", "librbd-plain", "fio-rbd"]) {
        for load in ["write", "read"] {
            let wanted = |it: &&Value| it["system"] == system && it["workload"] == load;
            let found: Vec<_> = cells.iter().filter(wanted).collect();
            assert_eq!(found.len(), 2, "{system} {load}: {cells:#?}");
            for cell in found {
                for value in ["iops", "cpu_per_io", "p50"] {
                    assert!(cell[value].as_f64().is_some_and(|it| it > 0.0), "{value}: {cell:#}");
                }
            }
        }
    }
    // The images went with their pool.
    let status = cluster.json(&["status"]);
    let pools = status["pools"].as_array().unwrap();
    assert!(pools.iter().all(|it| it["name"] != "vmseal-lab-run"), "{status:#}");
}
