//! `vmseal lab ceph`: a cluster of Ceph's own programs comes up, keeps images, loses an OSD, and goes.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use serde_json::Value;
use vmseal_tests::ceph::{self, Cluster, can_encrypt_osds, files, is_installed, mounts_below};
use vmseal_tests::eventually;
use vmseal_tests::process::{kill_hard, using};
use vmseal_tests::scan::{Needle, Scanner};

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

/// The options of a cluster whose OSDs are encrypted.
const ENCRYPTED: [&str; 1] = ["--osd-encryption"];
/// How often the pattern is in what is stored: once in each block that BlueStore allocates.
const PATTERN_EVERY: usize = 4096;

#[test]
fn what_encrypted_osds_store_is_nowhere_in_the_clear() {
    if !is_installed() || !can_encrypt_osds() {
        return;
    }
    let cluster = Cluster::new();
    // What an `up` has made when it dies is made anew, or gone on with: a block that is served is in the way of neither.
    for line in ["block.0: started", "osd.1: made", "block.2: started"] {
        cluster.up_killed_at(line, &ENCRYPTED);
    }
    let first = cluster.up_with(&ENCRYPTED);
    check_encrypted(&cluster, &first);

    let pattern: [u8; 16] = std::array::from_fn(|_| fastrand::u8(..));
    let mut content: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(CONTENT).collect();
    for block in content.chunks_exact_mut(PATTERN_EVERY) {
        block[..pattern.len()].copy_from_slice(&pattern);
    }
    let needle = Needle { name: "pattern".to_owned(), bytes: pattern.to_vec() };
    let scanner = Scanner::new(vec![needle]).unwrap();
    cluster.import(&content, "vmseal/image", &[]);
    assert!(cluster.export("vmseal/image") == content);
    // The OSD itself stores it as it is: otherwise the search below could find nothing.
    let served = cluster.directory().join("block/0");
    assert!(!scanner.file(&served).unwrap().is_empty(), "the OSD does not have the pattern");

    assert!(cluster.run(&["down"]).status.success());
    assert_eq!(using(&cluster.directory()), [] as [i32; 0]);
    assert_eq!(mounts_below(&cluster.directory()), [] as [PathBuf; 0]);
    assert_eq!(served.metadata().unwrap().len(), 0);
    let found = scanner.directory(&cluster.directory(), &[]).unwrap();
    assert!(found.is_empty(), "in the clear: {found:?}");

    // Nothing is asked for: the cluster is as it was made.
    check_encrypted(&cluster, &cluster.up());
    assert!(cluster.export("vmseal/image") == content);
    lose_a_block(&cluster, &content);
    lose_all(&cluster, &content);

    let output = cluster.run(&["down", "--destroy", "--yes"]);
    assert!(output.status.success(), "{}", ceph::said(&output));
    assert_eq!(mounts_below(&cluster.directory()), [] as [PathBuf; 0]);
    assert!(!cluster.directory().exists());
    assert_eq!(using(&cluster.directory()), [] as [i32; 0]);
}

/// Finds that everything runs, and each OSD has its block from a process beside it.
fn check_encrypted(cluster: &Cluster, status: &Value) {
    check_whole(status);
    assert_eq!(status["osd_encryption"], true, "{status:#}");
    for id in 0..3 {
        assert_eq!(daemon(status, &format!("block.{id}"))["alive"], true, "{status:#}");
        let block = cluster.directory().join(format!("osd/{id}/block")).canonicalize().unwrap();
        assert!(block.ends_with(format!("block/{id}")), "{}", block.display());
        let stored = cluster.directory().join(format!("luks/{id}"));
        assert_eq!(stored.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let mut begin = [0; 6];
        std::fs::File::open(stored).unwrap().read_exact(&mut begin).unwrap();
        assert_eq!(begin, *b"LUKS\xba\xbe");
    }
    assert_eq!(mounts_below(&cluster.directory()).len(), 3);
    // Clients that ask for the keys of dm-crypt find that OSDs are encrypted, and not with what.
    let kept = cluster.ask(&["config-key", "ls"]);
    let kept = kept.as_array().unwrap();
    for uuid in cluster.osd_uuids() {
        assert!(kept.iter().any(|key| *key == format!("dm-crypt/osd/{uuid}/luks")), "{kept:?}");
    }
}

/// When what serves a block is killed, it is started again, and its OSD with it.
fn lose_a_block(cluster: &Cluster, content: &[u8]) {
    let before = cluster.json(&["status"]);
    kill_hard(daemon(&before, "block.1")["pid"].as_i64().unwrap().try_into().unwrap());
    let dead = eventually("what served the block is seen to be dead", || {
        let status = cluster.json(&["status"]);
        (daemon(&status, "block.1")["alive"] == false).then_some(status)
    })
    .unwrap();
    assert!(dead["problems"].to_string().contains("block.1 does not run"), "{dead:#}");
    let again = cluster.up();
    check_encrypted(cluster, &again);
    for name in ["mon.a", "mgr.a", "block.0", "osd.0", "block.1", "osd.1", "block.2", "osd.2"] {
        let same = daemon(&before, name)["pid"] == daemon(&again, name)["pid"];
        assert_eq!(same, !name.ends_with(".1"), "{name}: {before:#} {again:#}");
    }
    assert!(cluster.export("vmseal/image") == content);
}

/// When all is killed, mounts are left that nobody serves.
fn lose_all(cluster: &Cluster, content: &[u8]) {
    using(&cluster.directory()).into_iter().for_each(kill_hard);
    eventually("all have ended", || using(&cluster.directory()).is_empty().then_some(())).unwrap();
    assert_eq!(mounts_below(&cluster.directory()).len(), 3);
    check_encrypted(cluster, &cluster.up());
    assert!(cluster.export("vmseal/image") == content);
}
