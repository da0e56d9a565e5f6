//! Whether the OSDs of a real Ceph cluster are encrypted is asked of its monitors: policies hold to what they say, and it is shown with
//! disks. The OSDs of the shared cluster store in the clear; what ceph-volume keeps for encrypted ones is put beside them. Other tests
//! that share it have users who may not ask; the laboratory's may, and nothing that it measures depends on it. OSDs that are encrypted
//! are those of a cluster of its own.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use serde_json::Value;
use vmseal_api::osd_encryption::OSD_KEYS_CAPABILITY;
use vmseal_tests::ceph::{Cluster, can_encrypt_osds, is_installed, said};
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
use vmseal_tests::ceph_pool::Pool;
use vmseal_tests::counting_guest::{MARKER, count, read_marker_of_disk, stop_counting};
use vmseal_tests::eventually;
use vmseal_tests::installation::text;
use vmseal_tests::kills::is_soak_run;
use vmseal_tests::scan::{Needle, Scanner};

use crate::ceph_datastore::started;

/// What a disk in the clear has, and how often: a MiB of it.
const READABLE: &str = "VMSEAL-READABLE6";
const READABLE_TIMES: usize = 65_536;

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

/// Gives the user of the pool the right to ask for the keys of OSDs, beside those that a pool needs.
fn may_ask(bench: &CephInstallation) {
    let mon = format!("profile rbd, {OSD_KEYS_CAPABILITY}");
    let osd = format!("profile rbd pool={}", bench.pool.name);
    bench.cluster.ceph(&["auth", "caps", &bench.pool.user, "mon", &mon, "osd", &osd]);
}

/// Requires encrypted OSDs of the policy `below`, whose disks are in the clear above them.
fn create_policy_below(bench: &CephInstallation) {
    let below = ["policy", "create", "below", "--plain", "--osd-encryption", "required"];
    bench.here.vmseal(&below).unwrap();
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
    create_policy_below(&bench);

    // The user has the rights that a pool needs, and no others.
    eventually("the host has asked", || (told(&bench)["why"] == "not_allowed").then_some(()))
        .unwrap_or_else(|error| panic!("{error}: {}", told(&bench)));
    let refused = created(&bench, "web", "below").unwrap_err();
    assert!(refused.contains(&format!("ceph auth caps {user} ")), "{refused}");
    created(&bench, "above", "encrypted").unwrap();
    assert_eq!(place(&bench, "above"), "client_osd_unknown");

    may_ask(&bench);
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

/// On a cluster whose OSDs are encrypted a disk of an encrypted VM is encrypted twice, and one in the clear once, below the OSDs. It takes
/// minutes: with `VMSEAL_ALL` alone, as `scripts/soak` has it.
#[test]
fn a_vm_on_encrypted_osds_is_encrypted_above_and_below_them() {
    if !is_soak_run() || !is_installed() || !can_encrypt_osds() {
        return;
    }
    let cluster = Cluster::new();
    cluster.up_with(&["--messenger", "secure", "--osd-encryption"]);
    let options = Options { messenger: "secure", erasure_coded: false, key_at_server: false };
    let bench = CephInstallation::on(Pool::usual_of(cluster), options);
    let here = &bench.here;
    create_policy_below(&bench);
    may_ask(&bench);
    asked_anew(&bench, "all OSDs are encrypted", |told| told["is"] == "yes" && told["osds"] == 3);

    let content = here.path("readable");
    std::fs::write(&content, READABLE.repeat(READABLE_TIMES)).unwrap();
    let disk = format!("datastore=ceph,format=raw,image={},size=16MiB", text(&content).unwrap());
    here.vmseal(&["vm", "create", "open", "--policy", "below", "--disk", &disk]).unwrap();
    let mut console = started(here, "ceph");
    count(&mut console);
    assert_eq!((&*place(&bench, "web"), &*place(&bench, "open")), ("both", "osd"));
    let shown = here.vmseal(&["vm", "show", "web"]).unwrap();
    assert!(shown.contains("encrypted at: both"), "{shown}");
    here.vmseal(&["vm", "start", "open", "--dry-run"]).unwrap();
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
    drop(console);
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    stores(&bench);
    for vm in ["web", "open"] {
        here.vmseal(&["vm", "delete", vm]).unwrap();
    }
    bench.is_empty();
}

/// Each OSD itself has the disk in the clear as it is and the other one not, and what it is stored in has neither.
fn stores(bench: &CephInstallation) {
    let needle = |text: &str| Needle { name: text.to_owned(), bytes: text.as_bytes().to_vec() };
    let scanner = Scanner::new(vec![needle(MARKER), needle(READABLE)]).unwrap();
    for id in 0..bench.cluster.daemons("osd.").len() {
        let within = |part: &str| {
            let found = scanner.file(&bench.cluster.directory().join(format!("{part}/{id}")));
            found.unwrap().into_iter().map(|find| find.needle).collect::<Vec<_>>()
        };
        let (served, stored) = (within("block"), within("luks"));
        assert!(served.iter().any(|it| it == READABLE), "OSD {id} does not have the other disk");
        assert!(!served.iter().any(|it| it == MARKER), "OSD {id} has what was encrypted above it");
        assert!(stored.is_empty(), "OSD {id} is stored in the clear: {stored:?}");
    }
}
