//! A real Ceph cluster that does not answer. A guest waits, or gets errors, as its policy says; an alarm at its VM tells which; and it goes
//! on without a loss when the cluster answers.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use vmseal_tests::ceph::is_installed;
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
use vmseal_tests::counting_guest::{count, read_marker_of_disk, stop_counting};
use vmseal_tests::guest::Console;
use vmseal_tests::shell_guest::{booted, holds, run};
use vmseal_tests::{eventually, rest};

use crate::ceph_datastore::started;

const VM: &str = "web";

const DISK: &str = "web/disk0";

/// After how many seconds the agent is to report it.
const STALL: &str = "5";

/// A write, to a place of the disk that nothing else uses.
const WRITE: &str =
    "dd if=/dev/zero of=/dev/vda bs=512 count=1 seek=126976 conv=notrunc,fsync 2>/dev/null";

#[test]
fn a_guest_whose_cluster_does_not_answer_waits_or_gets_errors_and_goes_on() {
    if !is_installed() {
        return;
    }
    let mut bench = CephInstallation::new(Options {
        messenger: "crc",
        // The pool of data can be full alone.
        erasure_coded: true,
        key_at_server: false,
    });
    bench.here.kill_agent();
    bench.here.start_agent_with(&["--disk-stall", STALL]).unwrap();
    let console = started(&bench.here, "ceph");
    bench.shares_data();
    waits(&bench, console);
    let fails = ["policy", "set", "encrypted", "--on-stall", "error,5s"];
    bench.here.vmseal(&fails).unwrap();
    // It holds from the next start on.
    bench.here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    bench.here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(&bench.here, VM).unwrap();
    // What the kernel says of errors is not to come in the middle of a line that is waited for.
    run(&mut console, "echo 1 >/proc/sys/kernel/printk; echo QUIET-$((6 * 7))", "QUIET-42")
        .unwrap();
    gets_errors(&bench, &mut console);
    gets_errors_while_the_pool_is_full(&bench, &mut console);
}

fn waits(bench: &CephInstallation, mut console: Console) {
    let here = &bench.here;
    count(&mut console);
    here.wait_no_alarm(DISK, "disk-stalled").unwrap();
    let stopped = bench.cluster.stop_daemons("osd.");
    let alarm = here.wait_alarm(DISK, "disk-stalled").unwrap();
    for part in [
        "disk 'disk0'",
        "has not ended a request of the guest since",
        "The guest waits; nothing fails",
        "ceph health detail",
    ] {
        assert!(alarm.contains(part), "{part}: {alarm}");
    }
    drop(stopped);
    here.wait_no_alarm(DISK, "disk-stalled").unwrap();
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
    let errors = here.alarms(DISK).unwrap();
    assert!(errors.iter().all(|alarm| alarm["code"] != "disk-errors"), "{errors:?}");
}

fn gets_errors(bench: &CephInstallation, console: &mut Console) {
    assert!(is_written(console), "the cluster is well");
    let stopped = bench.cluster.stop_daemons("osd.");
    assert!(!is_written(console), "the cluster has written while its OSDs stood still");
    // And at once from then on.
    assert!(!is_written(console), "the cluster has written while its OSDs stood still");
    says_that_requests_fail(bench);
    drop(stopped);
    goes_on(bench, console);
    let told = rest::scrape(&bench.here, "/metrics/hosts/here").unwrap();
    for name in ["vmseal_disk_stalls_total{", "vmseal_disk_stalled_requests_total{"] {
        let lines = told.lines().filter(|line| line.starts_with(name));
        let values = lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap());
        assert!(values.sum::<f64>() >= 1.0, "{name}: {told}");
    }
}

/// A full pool takes no writes, and the cluster says nothing about them until there is room.
fn gets_errors_while_the_pool_is_full(bench: &CephInstallation, console: &mut Console) {
    let quota = |bytes| {
        bench.cluster.ceph(&["osd", "pool", "set-quota", "coded", "max_bytes", bytes]);
    };
    quota("1");
    eventually("the pool is full", || {
        let status = bench.cluster.json(&["status"]);
        status["problems"].to_string().contains("POOL_FULL").then_some(())
    })
    .unwrap();
    // Who writes learns of it from the OSDs a moment after the monitors say so.
    eventually("a full pool takes no write", || (!is_written(console)).then_some(())).unwrap();
    says_that_requests_fail(bench);
    quota("0");
    goes_on(bench, console);
}

/// Has the guest write something: whether that is done, or has failed.
fn is_written(console: &mut Console) -> bool {
    let mark = fastrand::u32(..);
    let command = format!("if {WRITE}; then r=written; else r=refused; fi");
    console.type_text(&format!("{command}; echo ENDED-{mark}-$r-\n")).unwrap();
    let ended = console.expect(&format!("ENDED-{mark}-"), "written".len()).unwrap();
    match ended.as_str() {
        "written" => true,
        "refused" => false,
        _ => panic!("the guest says {ended}"),
    }
}

fn says_that_requests_fail(bench: &CephInstallation) {
    eventually("an alarm says that requests fail", || {
        let alarm = bench.here.wait_alarm(DISK, "disk-stalled").ok()?;
        alarm.contains("Requests of the disk fail, as its policy says").then_some(())
    })
    .unwrap();
}

/// The disk serves again without anybody's doing, and the guest has lost nothing.
fn goes_on(bench: &CephInstallation, console: &mut Console) {
    // The first flush fails once more.
    holds(console, WRITE).unwrap();
    bench.here.wait_no_alarm(DISK, "disk-stalled").unwrap();
    count(console);
    stop_counting(console);
    read_marker_of_disk(console);
}
