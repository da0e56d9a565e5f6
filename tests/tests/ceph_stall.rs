//! A real Ceph cluster that does not answer: the guest waits, an alarm at its VM says so, and it goes on without a loss.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmseal_tests::ceph::is_installed;
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
use vmseal_tests::counting_guest::{count, read_marker_of_disk, stop_counting};

use crate::ceph_datastore::started;

/// After how many seconds the agent is to report it.
const STALL: &str = "5";

#[test]
fn a_guest_whose_cluster_does_not_answer_waits_with_an_alarm_and_goes_on() {
    if !is_installed() {
        return;
    }
    let mut bench = CephInstallation::new(Options {
        messenger: "crc",
        erasure_coded: false,
        key_at_server: false,
    });
    bench.here.kill_agent();
    bench.here.start_agent_with(&["--disk-stall", STALL]).unwrap();
    let here = &bench.here;
    let mut console = started(here, "ceph");
    bench.shares_data();
    count(&mut console);
    here.wait_no_alarm("web/disk0", "disk-stalled").unwrap();
    // Known before, as a cluster that stands still may not say them.
    let osds = bench.osds();
    assert!(!osds.is_empty(), "the cluster has no OSD");
    let signal =
        |signal: Signal| osds.iter().for_each(|osd| kill(Pid::from_raw(*osd), signal).unwrap());
    signal(Signal::SIGSTOP);
    let alarm = here.wait_alarm("web/disk0", "disk-stalled").unwrap();
    for part in ["disk 'disk0'", "has not ended a request of the guest since", "ceph health detail"]
    {
        assert!(alarm.contains(part), "{part}: {alarm}");
    }
    signal(Signal::SIGCONT);
    here.wait_no_alarm("web/disk0", "disk-stalled").unwrap();
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
    let errors = here.alarms("web/disk0").unwrap();
    assert!(errors.iter().all(|alarm| alarm["code"] != "disk-errors"), "{errors:?}");
}
