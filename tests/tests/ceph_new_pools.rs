//! Pools of a real Ceph cluster that are made with a datastore: for a policy, and where a former attempt was left half way.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::process::Output;

use serde_json::{Value, json};
use vmseal_tests::ceph::said;
use vmseal_tests::ceph_datastore::CephInstallation;
use vmseal_tests::installation::text;

/// Adds a pool as a datastore, with a user that may make pools.
fn add(bench: &CephInstallation, name: &str, pool: &str, more: &[&str]) -> Output {
    let administrator = bench.cluster.directory().join("keys/client.admin.keyring");
    let (monitors, place) = (bench.cluster.monitors(), bench.here.path(name));
    let mut add = vec!["datastore", "add", name, "--host", "here", "--pool", pool];
    add.extend(["--monitors", &monitors, "--messenger", "crc", "--user", "client.admin"]);
    add.extend(["--key-file", text(&administrator).unwrap(), "--path", text(&place).unwrap()]);
    add.extend_from_slice(more);
    bench.here.try_vmseal(&add).unwrap()
}

/// A policy that is named in place of numbers says how pools are made. How they are compressed is asked for beside it.
pub(crate) fn pools_for_policy(bench: &CephInstallation) {
    let here = &bench.here;
    let for_policy = ["--create-for-policy", "silver"];
    let add = |name: &str, pool: &str, more: &[&str]| {
        add(bench, name, pool, &[&for_policy[..], more].concat())
    };
    let asks = ["--plain", "--failures-to-tolerate", "2,mirroring", "--failure-domain", "host"];
    here.vmseal(&[&["policy", "create", "silver"], &asks[..]].concat()).unwrap();
    let compressed = ["--compression", "aggressive"];
    let refused = said(&add("silver", "silver", &compressed));
    assert!(refused.contains("3 hosts, and the cluster has 1"), "{refused}");
    here.vmseal(&["policy", "set", "silver", "--failure-domain", "osd"]).unwrap();
    let refused = said(&add("silver", "silver", &["--data-pool", "silver-data"]));
    assert!(refused.contains("--data-pool: must not be given"), "{refused}");

    let planned = add("silver", "silver", &[&compressed[..], &["--dry-run"]].concat());
    let steps = String::from_utf8_lossy(&planned.stdout);
    let made = "make the pool 'silver' for policy 'silver' (2 failures, mirroring, each copy in another osd; compression aggressive)";
    assert!(steps.contains(made), "{steps}");
    let added = add("silver", "silver", &compressed);
    assert!(added.status.success(), "{}", said(&added));
    for output in [&planned, &added] {
        let told = said(output);
        assert!(told.contains("saves no room for encrypted disks"), "{told}");
        assert!(!told.contains("is not as policy"), "{told}");
    }
    let shown = here.vmseal(&["datastore", "show", "silver"]).unwrap();
    let copies = "silver: mirroring, 3 copies: outlives 2 failed osds, guests go on with 2, and";
    assert!(shown.contains(copies) && shown.contains("compression aggressive, which"), "{shown}");
    let told = bench.cluster.ask(&["osd", "pool", "get", "silver", "compression_mode"]);
    assert_eq!(told["compression_mode"], "aggressive", "{told}");
    let disk = "datastore=silver,size=16MiB";
    here.vmseal(&["vm", "create", "silver", "--policy", "silver", "--disk", disk]).unwrap();
    assert_eq!(here.vm("silver").unwrap()["compliance"], json!({ "compliant": true }));
    here.vmseal(&["vm", "delete", "silver"]).unwrap();

    // A pool that is there stays as it is, and what it lacks is said.
    let made = bench.cluster.rbd(&["namespace", "create", "vmseal/bronze"]);
    assert!(made.status.success(), "{}", said(&made));
    let added = add("bronze", "vmseal/bronze", &compressed);
    assert!(added.status.success(), "{}", said(&added));
    let lacks =
        "'bronze' is not as policy 'silver' requires: pool 'vmseal' has mirroring, 3 copies";
    assert!(said(&added).contains(lacks), "{}", said(&added));
    let shown = here.vmseal(&["datastore", "show", "bronze"]).unwrap();
    assert!(shown.contains("vmseal: mirroring") && !shown.contains("compression"), "{shown}");
    here.vmseal(&["datastore", "remove", "bronze"]).unwrap();
}

/// How the cluster describes a pool; none if it has no pool of this name.
fn described(bench: &CephInstallation, name: &str) -> Option<Value> {
    let dump = bench.cluster.ask(&["osd", "dump"]);
    let mut pools = dump["pools"].as_array().unwrap().iter();
    pools.find(|pool| pool["pool_name"] == name).cloned()
}

/// Pools that vmseal had made and not set up are completed by the same command. Others stay as they are. It takes what [`pools_for_policy`]
/// and a coded pool with two data chunks have left.
pub(crate) fn half_made_pools(bench: &CephInstallation) {
    // What vmseal makes for two data chunks and one failure: the profile, and the rule.
    const CHUNKS: &str = "vmseal-2-1-osd";
    let (here, cluster) = (&bench.here, &bench.cluster);
    let make = |name: &str, more: &[&str]| {
        cluster.ceph(&[&["osd", "pool", "create", name, "8", "8"][..], more].concat());
    };
    let add = |name: &str, pool: &str, data: &str| {
        add(bench, name, pool, &["--create", "1,erasure-coding,osd", "--data-pool", data])
    };
    let wanted = [("half", 2, 1), ("half-data", 3, 2)];
    let unfinished = |name: &str| described(bench, &format!("{name}.vmseal-unfinished"));
    make("half.vmseal-unfinished", &["replicated"]);
    make("half-data.vmseal-unfinished", &["erasure", CHUNKS, CHUNKS]);
    let left = wanted.map(|(name, ..)| unfinished(name).unwrap());
    assert_ne!(left[0]["size"], 2, "{}", left[0]);
    let added = add("half", "half", "half-data");
    assert!(added.status.success(), "{}", said(&added));
    assert!(!said(&added).contains("is not as"), "{}", said(&added));
    for ((name, size, min_size), left) in wanted.into_iter().zip(left) {
        assert_eq!(unfinished(name), None);
        let pool = described(bench, name).unwrap();
        assert_eq!(pool["pool"], left["pool"], "'{name}' is another pool");
        assert_eq!((&pool["size"], &pool["min_size"]), (&json!(size), &json!(min_size)), "{pool}");
        assert_eq!(pool["application_metadata"], json!({ "rbd": {} }), "{pool}");
        let flags = pool["flags_names"].as_str().unwrap();
        assert_eq!(flags.contains("ec_overwrites"), name == "half-data", "{pool}");
    }
    let disk = "datastore=half,size=16MiB";
    here.vmseal(&["vm", "create", "half", "--policy", "encrypted", "--disk", disk]).unwrap();

    // A pool with its own name keeps what an administrator sets.
    let set_min = |to: &str| cluster.ceph(&["osd", "pool", "set", "half", "min_size", to]);
    set_min("2");
    let made = cluster.rbd(&["namespace", "create", "half/again"]);
    assert!(made.status.success(), "{}", said(&made));
    let again = add("again", "half/again", "half-data");
    assert!(again.status.success(), "{}", said(&again));
    let lacks =
        "pool 'half' has min_size 2, not 1. To change it: ceph osd pool set half min_size 1";
    assert!(said(&again).contains(lacks), "{}", said(&again));
    assert_eq!(described(bench, "half").unwrap()["min_size"], 2);
    set_min("1");
    // One that takes no images is refused.
    make("bare", &["erasure", CHUNKS, CHUNKS]);
    let refused = said(&add("bare", "half/again", "bare"));
    assert!(refused.contains("allow_ec_overwrites is false, not true"), "{refused}");
    assert!(refused.contains("ceph osd pool set bare allow_ec_overwrites true"), "{refused}");
    here.vmseal(&["datastore", "remove", "again"]).unwrap();
    here.vmseal(&["vm", "delete", "half"]).unwrap();
}
