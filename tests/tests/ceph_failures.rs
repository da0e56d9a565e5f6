//! Pools that `datastore add --create` has made on a real Ceph cluster outlive as many failures as they were made for, by mirroring and by
//! erasure coding: while so many OSDs are dead guests go on writing, and what they wrote is there when others are dead later.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use vmseal_tests::ceph::{Cluster, is_installed};
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
use vmseal_tests::ceph_pool::Pool;
use vmseal_tests::counting_guest::{count, stop_counting};
use vmseal_tests::guest::Console;
use vmseal_tests::installation::text;
use vmseal_tests::kills::is_soak_run;
use vmseal_tests::shell_guest::{booted, image, run};

const VM: &str = "kept";

/// The datastores of its two disks, and the beginnings of the names of their pools.
const MIRRORED: &str = "mirrored";
const CODED: &str = "coded";

/// What the guest does at places of both disks, one for each object, beside its system: it writes the number of a round, or finds that it is
/// there. What went wrong it keeps in mind.
const AT_EACH_PLACE: &str = r#"
each() {
    for i in $(seq 8 14); do $1 /dev/vda $((i * 4)); done
    for i in $(seq 0 15); do $1 /dev/vdb $((i * 4)); done
}
put() {
    printf '%-4095s\n' "$round-$1-$2" | dd of=$1 bs=4096 seek=$(($2 * 256)) conv=notrunc,fsync 2>/dev/null || : >/bad
}
get() {
    r=$(dd if=$1 bs=4096 skip=$(($2 * 256)) count=1 2>/dev/null)
    case $r in "$round-$1-$2 "*) ;; *) echo "LACKS-$round-$1-$2"; : >/bad ;; esac
}
"#;

/// Adds datastores with new pools for so many failures, and starts a guest that has a disk in each of them. Its policy asks for that.
fn started(bench: &CephInstallation, failures: &str) -> Console {
    add(bench, MIRRORED, failures);
    add(bench, CODED, &format!("{failures},erasure-coding,osd"));
    let here = &bench.here;
    let policy = ["policy", "create", "kept", "--encrypt", "--failures-to-tolerate", failures];
    here.vmseal(&policy).unwrap();
    let image = image().unwrap();
    let system = format!("datastore={MIRRORED},format=raw,image={},size=64MiB", image.display());
    let data = format!("name=data,datastore={CODED},size=64MiB");
    let create = ["vm", "create", VM, "--policy", "kept", "--disk", &system, "--disk", &data];
    let machine = ["--nic", "user,mac=52:54:0a:00:02:0f", "--memory", "192MiB"];
    here.vmseal(&[&create[..], &machine].concat()).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(here, VM).unwrap();
    run(&mut console, &format!("{AT_EACH_PLACE}echo KNOWS-$((6 * 7))"), "KNOWS-42").unwrap();
    console
}

/// Adds a datastore whose pools are made, as an administrator of the cluster.
fn add(bench: &CephInstallation, name: &str, create: &str) {
    let (here, cluster) = (&bench.here, &bench.cluster);
    let administrator = cluster.directory().join("keys/client.admin.keyring");
    let (monitors, place, data) = (cluster.monitors(), here.path(name), format!("{name}-data"));
    let mut add = vec!["datastore", "add", name, "--host", "here", "--pool", name];
    add.extend(["--create", create, "--monitors", &monitors, "--messenger", "crc"]);
    add.extend(["--user", "client.admin", "--key-file", text(&administrator).unwrap()]);
    add.extend(["--path", text(&place).unwrap()]);
    if create.contains("erasure-coding") {
        add.extend(["--data-pool", &data]);
    }
    here.vmseal(&add).unwrap();
}

/// The guest does this at each place, with the number of a round, past what it has in memory. It says so when all of it is done.
fn at_each_place(console: &mut Console, what: &str, round: usize) {
    let verdict = format!("{what}-{round}-$([ -e /bad ] && echo badly || echo well)");
    let all = format!("echo 3 >/proc/sys/vm/drop_caches; round={round}; each {what}");
    run(console, &format!("{all}; echo {verdict}"), &format!("{what}-{round}-well")).unwrap();
}

/// Finds that nobody has started these OSDs again.
fn are_dead(bench: &CephInstallation, osds: &[&str]) {
    let status = bench.cluster.json(&["status"]);
    let daemons = status["daemons"].as_array().unwrap();
    for osd in osds {
        let daemon = daemons.iter().find(|it| it["name"] == *osd).unwrap();
        assert_eq!(daemon["alive"], false, "{osd} is back: {status:#}");
    }
}

/// OSDs of a cluster are killed, some after the others are back, which are as many as pools are made for. The guest writes at once while they
/// are dead, and reads what it wrote while others were.
pub(crate) fn guests_go_on(bench: &CephInstallation, killed: &[&[&str]]) {
    let mut console = started(bench, &killed[0].len().to_string());
    at_each_place(&mut console, "put", 0);
    for (round, osds) in (1..).zip(killed) {
        count(&mut console);
        osds.iter().for_each(|osd| bench.cluster.kill_daemons(osd));
        at_each_place(&mut console, "get", round - 1);
        at_each_place(&mut console, "put", round);
        at_each_place(&mut console, "get", round);
        are_dead(bench, osds);
        // It waits until each object has all of its copies, or chunks, again.
        bench.cluster.up();
        stop_counting(&mut console);
        at_each_place(&mut console, "get", round);
    }
    drop(console);
    let here = &bench.here;
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "prove", VM]).unwrap();
    here.vmseal(&["vm", "delete", VM]).unwrap();
}

/// With one failure it is a part of the test in `ceph_datastore`, which has a cluster of three OSDs. This one takes minutes: with `VMSEAL_ALL`
/// alone, as `scripts/soak` has it.
#[test]
fn guests_go_on_while_two_of_six_osds_are_dead_on_pools_made_for_two_failures() {
    if !is_soak_run() || !is_installed() {
        return;
    }
    let cluster = Cluster::new();
    cluster.up_with(&["--messenger", "crc", "--osds", "6"]);
    let options = Options { messenger: "crc", erasure_coded: false, key_at_server: false };
    let bench = CephInstallation::on(Pool::usual_of(cluster), options);
    guests_go_on(&bench, &[&["osd.0", "osd.1"], &["osd.2", "osd.3"], &["osd.4", "osd.5"]]);
}
