//! `vmseal lab run` on a real Ceph cluster: vmseal's disks are measured beside librbd's, and beside what fio measures itself. It ends when
//! it is told to, also where the cluster does not answer.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use vmseal_tests::ceph::{Cluster, StoppedDaemons, is_installed, mounts_below};
use vmseal_tests::ceph_pool::while_pools_stay;
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::process::using;
use vmseal_tests::{eventually, program, skipped};

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

/// The experiment with other systems.
fn with_systems(systems: &[&str]) -> String {
    let (before, rest) = EXPERIMENT.split_once("systems = [").unwrap();
    let (_, after) = rest.split_once(']').unwrap();
    format!("{before}systems = {systems:?}{after}")
}

/// Whether there is a cluster to be had, by root, as the laboratory mounts pools. Where not, the run says why.
fn can_run() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        skipped("it takes root");
    }
    root && is_installed()
}

/// Measures an experiment on a cluster that tests share. Its cells; none where it is refused for want of a program, with this advice.
fn cells_of(experiment: &str, advice: &str) -> Option<Vec<Value>> {
    // The laboratory makes a pool of its own in a cluster, and has nobody else change that cluster till it has ended.
    let (experiment, status) = while_pools_stay("crc", |cluster| {
        (cluster.measured(experiment), cluster.json(&["status"]))
    });
    if let Some(why) = experiment["refused"].as_str() {
        assert!(why.contains(advice), "{why}");
        skipped(why);
        return None;
    }
    // The images went with their pool.
    let pools = status["pools"].as_array().unwrap();
    assert!(pools.iter().all(|it| it["name"] != "vmseal-lab-run"), "{status:#}");
    Some(experiment["measured"][0]["cells"].as_array().unwrap().clone())
}

/// Checks that each of these systems was measured under both loads in both rounds.
fn are_measured(systems: &[&str], cells: &[Value]) {
    for system in systems {
        for load in ["write", "read"] {
            let wanted = |it: &&Value| it["system"] == *system && it["workload"] == load;
            let found: Vec<_> = cells.iter().filter(wanted).collect();
            assert_eq!(found.len(), 2, "{system} {load}: {cells:#?}");
            for cell in found {
                for value in ["iops", "cpu_per_io", "p50"] {
                    assert!(cell[value].as_f64().is_some_and(|it| it > 0.0), "{value}: {cell:#}");
                }
            }
        }
    }
}

#[test]
fn librbd_and_fio_are_measured_beside_vmseal_on_one_pool() {
    if !can_run() {
        return;
    }
    let Some(cells) = cells_of(EXPERIMENT, "install Debian's package") else { return };
    let vmseal = ["vmseal-encrypted", "vmseal-plain", "vmseal-encrypted-files"];
    let others = ["librbd-luks2", "librbd-plain", "fio-rbd"];
    are_measured(&[vmseal, others].concat(), &cells);
}

#[test]
fn several_clients_are_measured_that_each_mount_the_pool() {
    if !can_run() {
        return;
    }
    let systems = ["vmseal-encrypted", "vmseal-plain"];
    let experiment = with_systems(&systems).replace("[matrix]", "[matrix]\nclients = [2]");
    let Some(cells) = cells_of(&experiment, "install Debian's package") else { return };
    are_measured(&systems, &cells);
}

#[test]
fn librbd_in_the_filter_s_process_is_measured_beside_vmseal_rbd() {
    if !can_run() {
        return;
    }
    let systems = ["vmseal-encrypted", "vmseal-encrypted-one-process"];
    let experiment = with_systems(&systems);
    // `cargo test --workspace` builds it, and `cargo build` does not.
    let advice = "build it with: cargo build --release -p vmseal-lab --example librbd-in-filter";
    let Some(cells) = cells_of(&experiment, advice) else { return };
    are_measured(&systems, &cells);
}

#[test]
fn a_run_whose_cluster_does_not_answer_ends_on_a_signal_with_all_that_it_has_started() {
    if !can_run() || !has_its_turn() {
        return;
    }
    let cluster = Cluster::new();
    cluster.up();
    // While a disk is filled, by a file of the mounted pool. The monitor answers, and no OSD does.
    ends(&cluster, "vmseal-encrypted-files: fill", "osd.");
    // While disks are under load. No daemon answers.
    let said = ends(&cluster, "round 1 of", "");
    assert!(said.contains("this is left") && said.contains("vmseal-lab-run"), "{said}");
}

/// Starts a run, has these daemons stand still once it says a line that begins so, and tells it to end; what it says from then on.
fn ends(cluster: &Cluster, line: &str, daemons: &str) -> String {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("mine.toml");
    let others = ", \"librbd-luks2\", \"librbd-plain\", \"fio-rbd\"";
    // A cell takes longer than this test.
    let long = EXPERIMENT.replace(others, "").replace("seconds = 0.5", "seconds = 300.0");
    std::fs::write(&file, long).unwrap();
    let mut command = Command::new(program("vmseal").unwrap());
    command.args(["lab", "run"]).arg(&file).arg("--ceph-directory").arg(cluster.directory());
    // All that it makes is there.
    command.arg("--directory").arg(home.path()).env("TMPDIR", home.path());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let daemons = cluster.daemons(daemons);
    let mut run = command.spawn().unwrap();
    let mut lines = BufReader::new(run.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut before = Vec::new();
    let found = lines.any(|said| {
        before.push(said);
        before.last().is_some_and(|said| said.starts_with(line))
    });
    let stopped = StoppedDaemons::stop(daemons);
    let _ = kill(Pid::from_raw(run.id().cast_signed()), Signal::SIGTERM);
    let ended = eventually("the run has ended", || run.try_wait().unwrap());
    if ended.is_err() {
        run.kill().unwrap();
        run.wait().unwrap();
    }
    let said = lines.collect::<Vec<_>>().join("\n");
    assert!(found, "it never said '{line}': {before:?}");
    let status = ended.unwrap_or_else(|error| panic!("{error}: {said}"));
    assert_eq!(status.code(), Some(130), "{said}");
    // Those that were killed last may take a moment.
    let left = eventually("no process of it is left", || {
        let left = using(home.path());
        left.is_empty().then_some(())
    });
    left.unwrap_or_else(|error| panic!("{error}: {:?}: {said}", using(home.path())));
    assert_eq!(mounts_below(home.path()), [] as [std::path::PathBuf; 0], "{said}");
    drop(stopped);
    said
}
