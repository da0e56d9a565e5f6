//! Whether the OSDs of a real Ceph cluster are encrypted is asked of its monitors: policies hold to what they say, and it is shown with
//! disks. The OSDs here store in the clear; what ceph-volume keeps for encrypted ones is put beside them. Other tests
//! that share the cluster have users who may not ask; the laboratory's may, and nothing that it measures depends on it.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use serde_json::Value;
use vmseal_api::osd_encryption::OSD_KEYS_CAPABILITY;
use vmseal_tests::ceph::{is_installed, said};
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
use vmseal_tests::eventually;

/// What the monitors have told of the OSDs, as the server has it.
fn told(bench: &CephInstallation) -> Value {
    let shown = bench.here.json(&["datastore", "show", "ceph"]).unwrap();
    shown["osd_encryption"]["told"].clone()
}

/// Has the host ask anew, and waits until the server has been told this.
fn asked_anew(bench: &CephInstallation, what: &str, is_it: impl Fn(&Value) -> bool) {
    // The cluster may be too slow for one trial of the key.
    eventually("the pool is mounted anew", || {
        let remount = ["datastore", "remount", "ceph", "--host", "here"];
        bench.here.try_vmseal(&remount).unwrap().status.success().then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}: {}", bench.log()));
    eventually(what, || is_it(&told(bench)).then_some(()))
        .unwrap_or_else(|error| panic!("{error}: {}: {}", told(bench), bench.log()));
}

fn is_plain(told: &Value, plain: u64) -> bool {
    told["is"] == "no" && told["osds"] == 3 && told["plain"] == plain
}

/// Makes a VM with a disk in the pool, or says why that is refused.
fn created(bench: &CephInstallation, name: &str, policy: &str) -> Result<(), String> {
    let create = ["vm", "create", name, "--policy", policy, "--disk", "datastore=ceph,size=16MiB"];
    let output = bench.here.try_vmseal(&create).unwrap();
    if output.status.success() { Ok(()) } else { Err(said(&output)) }
}

/// Where the disk of a VM is encrypted, as `disk list` has it.
fn place(bench: &CephInstallation, vm: &str) -> String {
    let disks = bench.here.json(&["disk", "list", vm]).unwrap();
    disks[0]["encrypted_at"].as_str().unwrap().to_owned()
}

#[test]
fn the_monitors_say_whether_osds_are_encrypted_to_those_who_may_ask() {
    if !is_installed() {
        return;
    }
    let options = Options { messenger: "crc", erasure_coded: false, key_at_server: false };
    let bench = CephInstallation::shared("at-rest", options);
    let (here, user, keyring) = (&bench.here, &*bench.pool.user, bench.pool.keyring());
    let below = ["policy", "create", "below", "--plain", "--osd-encryption", "required"];
    here.vmseal(&below).unwrap();

    // The user has the rights that a pool needs, and no others.
    eventually("the host has asked", || (told(&bench)["why"] == "not_allowed").then_some(()))
        .unwrap_or_else(|error| panic!("{error}: {}", told(&bench)));
    let refused = created(&bench, "web", "below").unwrap_err();
    assert!(refused.contains(&format!("ceph auth caps {user} ")), "{refused}");
    created(&bench, "above", "encrypted").unwrap();
    assert_eq!(place(&bench, "above"), "client_osd_unknown");

    let mon = format!("profile rbd, {OSD_KEYS_CAPABILITY}");
    let osd = format!("profile rbd pool={}", bench.pool.name);
    bench.cluster.ceph(&["auth", "caps", user, "mon", &mon, "osd", &osd]);
    asked_anew(&bench, "no OSD is encrypted", |told| is_plain(told, 3));
    let refused = created(&bench, "web", "below").unwrap_err();
    assert!(refused.contains("no key of dm-crypt for 3 of 3 OSDs"), "{refused}");
    assert_eq!(place(&bench, "above"), "client");

    let osds = bench.cluster.osd_uuids();
    let keep_key = |uuid: &String| {
        let key = format!("dm-crypt/osd/{uuid}/luks");
        bench.cluster.ceph(&["config-key", "set", &key, "x"]);
    };
    osds[..2].iter().for_each(keep_key);
    asked_anew(&bench, "one OSD is not encrypted", |told| is_plain(told, 1));
    osds[2..].iter().for_each(keep_key);
    asked_anew(&bench, "all OSDs are encrypted", |told| told["is"] == "yes" && told["osds"] == 3);
    let shown = here.vmseal(&["datastore", "show", "ceph"]).unwrap();
    assert!(shown.contains("a key of dm-crypt for each of 3 OSDs"), "{shown}");
    created(&bench, "web", "below").unwrap();
    assert_eq!((&*place(&bench, "web"), &*place(&bench, "above")), ("osd", "both"));
    let shown = here.vmseal(&["vm", "show", "above"]).unwrap();
    assert!(shown.contains("encrypted at: both"), "{shown}");

    // Only whether keys are there may be asked, not what they are.
    let mut read = std::process::Command::new("ceph");
    read.arg("-c").arg(bench.cluster.directory().join("ceph.conf"));
    read.args(["--name", user, "--keyring"]).arg(keyring);
    let output =
        read.args(["config-key", "get", &format!("dm-crypt/osd/{}/luks", osds[0])]).output();
    let output = output.unwrap();
    assert!(!output.status.success() && said(&output).contains("EACCES"), "{}", said(&output));

    // An administrator knows better.
    here.vmseal(&["datastore", "set", "ceph", "--osd-encryption", "no"]).unwrap();
    assert_eq!((&*place(&bench, "web"), &*place(&bench, "above")), ("none", "client"));
    let refused = here.refused(&["vm", "start", "web", "--dry-run"]).unwrap();
    assert!(refused.contains("an administrator has stated"), "{refused}");
    let refused = here.refused(&["vm", "start", "web"]).unwrap();
    assert!(refused.contains("--osd-encryption ask"), "{refused}");
    let alarm = here.wait_alarm("web", "osd-not-encrypted").unwrap();
    assert!(alarm.contains("an administrator has stated"), "{alarm}");
    here.vmseal(&["datastore", "set", "ceph", "--osd-encryption", "ask"]).unwrap();
    here.wait_no_alarm("web", "osd-not-encrypted").unwrap();
    assert_eq!(place(&bench, "web"), "osd");
    for vm in ["web", "above"] {
        here.vmseal(&["vm", "delete", vm]).unwrap();
    }
    bench.is_empty();
}
