//! `vmseal lab ceph`: a cluster of Ceph's own programs comes up, keeps images, loses an OSD, and goes.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::os::unix::fs::PermissionsExt;

use serde_json::Value;
use vmseal_tests::ceph::{self, Cluster, files, is_installed};
use vmseal_tests::eventually;
use vmseal_tests::process::{kill_hard, using};

/// What is stored in images: more than one object of 4 MiB, and not a whole number of them.
const CONTENT: usize = (9 << 20) + 512;

/// The daemon of this name in a status.
fn daemon<'a>(status: &'a Value, name: &str) -> &'a Value {
    status["daemons"].as_array().unwrap().iter().find(|it| it["name"] == name).unwrap()
}

fn pids(status: &Value) -> Vec<i64> {
    let daemons = status["daemons"].as_array().unwrap();
    daemons.iter().map(|it| it["pid"].as_i64().unwrap_or(-1)).collect()
}

/// Finds that everything runs.
fn check_whole(status: &Value) {
    for name in ["mon.a", "mgr.a", "osd.0", "osd.1", "osd.2"] {
        assert_eq!(daemon(status, name)["alive"], true, "{status:#}");
    }
    for name in ["osd.0", "osd.1", "osd.2"] {
        let osd = daemon(status, name);
        assert!(osd["up"] == true && osd["in"] == true, "{status:#}");
    }
    let pools = status["pools"].as_array().unwrap();
    let usual = pools.iter().find(|it| it["name"] == "vmseal").unwrap();
    assert!(usual["size"] == 3 && usual["min_size"] == 2, "{status:#}");
}

#[test]
fn a_cluster_comes_up_survives_what_is_killed_and_goes() {
    if !is_installed() {
        return;
    }
    let cluster = Cluster::new();
    let said = cluster.refused(&["status"], 3);
    assert!(said.contains("there is no cluster"), "{said}");

    // Whatever an `up` has made when it dies, the next one goes on.
    for line in ["mon.a: made", "osd.0: made", "osd.1: started"] {
        cluster.up_killed_at(line, &[]);
    }
    let first = cluster.up();
    check_whole(&first);
    assert_eq!(first["messenger"], "crc");
    eventually("all is well", || {
        (cluster.json(&["status"])["health"] == "HEALTH_OK").then_some(())
    })
    .unwrap();

    let content: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(CONTENT).collect();
    cluster.import(&content, "vmseal/image", &[]);
    assert!(cluster.export("vmseal/image") == content);
    let listed = cluster.json(&["status"]);
    assert!(listed["used"].as_u64() < listed["size"].as_u64(), "{listed:#}");

    // All is of this user alone.
    let others: Vec<_> = files(&cluster.directory())
        .into_iter()
        .filter(|it| {
            let found = it.symlink_metadata(); // stores remove files while they are looked at
            found.is_ok_and(|found| found.permissions().mode() & 0o077 != 0)
        })
        .collect();
    assert!(others.is_empty(), "others may read or write: {others:?}");

    lose_an_osd(&cluster, &first, &content);
    add_pools(&cluster, &content);
    encrypt_connections(&cluster, &content);
    remove(&cluster);
}

/// A killed OSD is seen, and started again, beside the others.
fn lose_an_osd(cluster: &Cluster, first: &Value, content: &[u8]) {
    kill_hard(daemon(first, "osd.1")["pid"].as_i64().unwrap().try_into().unwrap());
    let dead = eventually("the monitor takes the OSD for dead", || {
        let status = cluster.json(&["status"]);
        let known = daemon(&status, "osd.1")["up"] == false && status["health"] == "HEALTH_WARN";
        known.then_some(status)
    })
    .unwrap();
    assert_eq!(daemon(&dead, "osd.1")["alive"], false, "{dead:#}");
    let problems = dead["problems"].to_string();
    assert!(problems.contains("osd.1 does not run"), "{problems}");
    // Two of three copies are enough to go on.
    assert!(cluster.export("vmseal/image") == content);

    let again = cluster.up();
    check_whole(&again);
    let (before, after) = (pids(first), pids(&again));
    let changed: Vec<_> = (0..5).filter(|at| before[*at] != after[*at]).collect();
    assert_eq!(changed, [3], "{before:?} {after:?}");
    assert!(cluster.export("vmseal/image") == content);
}

/// Pools of other redundancy; asked for again, they stay.
fn add_pools(cluster: &Cluster, content: &[u8]) {
    let coded = ["pool", "add", "coded", "--erasure", "2+1"];
    for _ in 0..2 {
        let output = cluster.run(&coded);
        assert!(output.status.success(), "{}", ceph::said(&output));
    }
    cluster.import(content, "coded-metadata/image", &["--data-pool", "coded"]);
    assert!(cluster.export("coded-metadata/image") == content);
    // OSDs tell how much they store every few seconds.
    let coded = eventually("what was imported is counted", || {
        let status = cluster.json(&["status"]);
        let mut pools = status["pools"].as_array()?.iter();
        let coded = pools.find(|it| it["name"] == "coded")?;
        (coded["stored"].as_u64()? >= CONTENT as u64).then(|| coded.clone())
    })
    .unwrap();
    assert!(coded["size"] == 3 && coded["min_size"] == 2, "{coded}");

    let said = cluster.refused(&["pool", "add", "coded", "--size", "2"], 4);
    assert!(said.contains("'coded'") && said.contains("already"), "{said}");
    let said = cluster.refused(&["pool", "add", "more", "--erasure", "4+2"], 2);
    assert!(said.contains("vmseal lab ceph up --osds 6"), "{said}");
}

/// The messenger's mode changes while no daemon runs, and then every connection has it.
fn encrypt_connections(cluster: &Cluster, content: &[u8]) {
    let said = cluster.refused(&["up", "--messenger", "secure"], 4);
    assert!(said.contains("vmseal lab ceph down"), "{said}");
    assert!(cluster.run(&["down"]).status.success());
    assert_eq!(using(&cluster.directory()), [] as [i32; 0]);
    let down = cluster.json(&["status"]);
    assert!(down["health"].is_null() && pids(&down).iter().all(|pid| *pid == -1), "{down:#}");

    let secure = cluster.json(&["up", "--messenger", "secure"]);
    check_whole(&secure);
    assert_eq!(secure["messenger"], "secure");
    assert!(cluster.export("vmseal/image") == content);
    let in_the_clear = ["--ms-client-mode=crc", "--ms-mon-client-mode=crc"];
    let command = [&in_the_clear[..], &["--client-mount-timeout=5", "ls", "vmseal"]].concat();
    let refused = cluster.rbd(&command);
    assert!(!refused.status.success(), "a client in the clear was let in");
    assert!(ceph::said(&refused).contains("connect"), "{}", ceph::said(&refused));
    let listed = cluster.rbd(&["ls", "vmseal"]);
    assert!(listed.status.success(), "{}", ceph::said(&listed));
}

fn remove(cluster: &Cluster) {
    let said = cluster.refused(&["down", "--destroy"], 2);
    assert!(said.contains("--yes"), "{said}");
    assert_eq!(using(&cluster.directory()).len(), 5);
    let output = cluster.run(&["down", "--destroy", "--yes"]);
    assert!(output.status.success(), "{}", ceph::said(&output));
    assert!(!cluster.directory().exists());
    assert_eq!(using(&cluster.directory()), [] as [i32; 0]);
    cluster.refused(&["down"], 3);
}
