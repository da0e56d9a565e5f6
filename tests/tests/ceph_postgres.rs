//! PostgreSQL in a guest whose database is on a pool of a real Ceph cluster, while pgbench runs: an OSD is killed, the monitor,
//! `vmseal-rbd`, the VM's filter, and all daemons of the cluster at once. Each time the guest goes on by itself, and when it is lost itself,
//! what the database has confirmed is on the pool.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use vmseal_tests::ceph::is_installed;
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
use vmseal_tests::guest::Console;
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::postgres_guest::{
    KEPT, bench, confirmed, errors, goes_on, has_whole_pages, is_consistent, keep, kept, recorded,
    started, stop_bench, with_database,
};
use vmseal_tests::process::kill_hard;
use vmseal_tests::scan::{Needle, Scanner};
use vmseal_tests::two_hosts::QEMU;

const VM: &str = "db1";

/// What rows of the database have: no OSD may store it as it is.
const MARK: &str = "VMSEAL-ROW-8";

/// What is stored as it is, to show that it would be found.
const READABLE: &str = "VMSEAL-READABLE-5";

/// How often that is stored.
const READABLE_TIMES: usize = 1000;

/// What is killed while the database works.
#[derive(Clone, Copy, Debug)]
enum Killed {
    /// An OSD; two of three are enough to go on.
    Osd,
    /// The only monitor; OSDs serve without it.
    Monitor,
    /// The process that serves the pool to the host, and the VM's filter with it.
    Server,
    /// The filter alone.
    Filter,
    /// All daemons of the cluster: nothing goes on before they are back.
    Cluster,
}

impl Killed {
    /// Kills it, and starts again of it what nothing else starts.
    fn happen(self, ceph: &CephInstallation, console: &mut Console) {
        let goes_on_without = |daemon: &str, console: &mut Console| {
            ceph.cluster.kill_daemons(daemon);
            goes_on(console);
            ceph.cluster.up();
        };
        match self {
            Self::Osd => goes_on_without("osd.1", console),
            Self::Monitor => goes_on_without("mon.a", console),
            Self::Server => {
                let former = ceph.server();
                ceph.kill_server_of_pool();
                ceph.is_served_again(VM, former);
            }
            Self::Filter => ceph.kill_filter(VM),
            Self::Cluster => {
                ceph.cluster.kill_daemons("");
                ceph.cluster.up();
            }
        }
    }
}

#[test]
fn a_database_on_ceph_loses_nothing_whatever_dies() {
    if !is_installed() || !has_its_turn() {
        return;
    }
    let options = Options { messenger: "crc", erasure_coded: false, key_at_server: false };
    let ceph = CephInstallation::new(options);
    let here = &ceph.here;
    let mut console = started(here, VM, "encrypted", "ceph");
    keep(&mut console, MARK);
    bench(&mut console);
    ceph.shares_data();
    for killed in [Killed::Osd, Killed::Monitor, Killed::Server, Killed::Filter, Killed::Cluster] {
        eprintln!("{killed:?} is killed");
        killed.happen(&ceph, &mut console);
        goes_on(&mut console);
        is_consistent(&mut console);
    }
    stop_bench(&mut console);
    let all = confirmed(&mut console);
    assert_eq!(errors(&mut console), 0, "the database has seen that something died");
    assert_eq!(recorded(&mut console), all);
    println!("{all} transactions while others died");

    // What it has confirmed is on the pool, and not in the guest alone.
    drop(console);
    here.processes_of(VM, QEMU).unwrap().into_iter().for_each(kill_hard);
    here.wait_power(VM, "off").unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = with_database(here, VM);
    is_consistent(&mut console);
    assert_eq!(recorded(&mut console), all);
    assert_eq!(kept(&mut console, MARK), KEPT);
    has_whole_pages(&mut console);
    drop(console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "prove", VM]).unwrap();
    is_ciphertext(&ceph);
}

/// No OSD stores what the guest has written as it is, and each has what was stored so.
fn is_ciphertext(ceph: &CephInstallation) {
    let needle = |text: &str| Needle { name: text.to_owned(), bytes: text.as_bytes().to_vec() };
    let scanner = Scanner::new(vec![needle(MARK), needle(READABLE)]).unwrap();
    let readable = READABLE.repeat(READABLE_TIMES);
    ceph.cluster.import(readable.as_bytes(), &format!("{}/readable", ceph.pool.name), &[]);
    for id in 0..ceph.cluster.daemons("osd.").len() {
        let block = ceph.cluster.directory().join(format!("osd/{id}/block"));
        let found = scanner.file(&block).unwrap();
        let has = |text: &str| found.iter().any(|find| find.needle == text);
        assert!(has(READABLE), "the search does not find what OSD {id} stores as it is");
        assert!(!has(MARK), "OSD {id} stores a row of the database: {found:?}");
    }
}
