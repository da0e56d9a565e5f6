//! What an operator does to a VM that runs, one thing after the other, while fio in its guest writes and verifies, and something
//! dies in the middle of each: it is done or undone, a retry works, and no write is lost. In a directory, and on Ceph.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::thread::sleep;
use std::time::Duration;

use vmseal_tests::ceph::is_installed;
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
use vmseal_tests::eventually;
use vmseal_tests::fio_guest::{keep_history, ready, started, stop_and_check, write_and_verify};
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::{
    Victim, console_again, during, during_which, has_its_turn, is_soak_run, retried,
};

const VM: &str = "web";

/// The longest time after which something is killed, in milliseconds: about as long as the operations take.
const LATEST_KILL: u64 = 1500;

/// How many blocks a second fio writes on Ceph: far fewer than a cluster of one machine takes beside all that is copied.
const SLOWLY: u32 = 40;

/// How long an outage of a cluster lasts: longer than it takes to notice.
const LASTS: Duration = Duration::from_secs(5);

/// Begins it, kills something meanwhile, and does it again if it was undone.
fn amid_a_kill(here: &mut Installation, operation: &[&str], victim: Victim) {
    let milliseconds = fastrand::u64(0..LATEST_KILL);
    eprintln!("{operation:?}: {victim:?} is killed after {milliseconds} ms");
    let ended = during(here, VM, operation, victim, milliseconds);
    retried(here, VM, operation, &ended);
}

/// A directory; its path.
fn directory(here: &Installation, name: &str) -> String {
    let path = here.path(name);
    std::fs::create_dir(&path).unwrap();
    text(&path).unwrap().to_owned()
}

#[test]
fn fio_verifies_whatever_is_done_to_its_vm_and_whatever_dies_meanwhile() {
    if !has_its_turn() {
        return;
    }
    let mut here = Installation::new().unwrap();
    let mut console = started(&here, VM, "plain", "local");
    let second = directory(&here, "second");
    here.vmseal(&["datastore", "add", "second", "--host", "here", "--path", &second]).unwrap();
    let to = directory(&here, "backups");
    write_and_verify(&mut console, 300);
    keep_history(&mut console, 0, None);
    let operations: [&[&str]; 12] = [
        &["vm", "encrypt", VM, "--policy", "encrypted"],
        &["snapshot", "create", VM, "one"],
        &["vm", "recrypt", VM],
        &["backup", "create", VM, "first", "--to", &to],
        &["snapshot", "create", VM, "asleep", "--memory"],
        &["vm", "recrypt", VM, "--deep"],
        &["snapshot", "delete", VM, "one"],
        &["vm", "move", VM, "--datastore", "second"],
        &["vm", "dump", VM, "core"],
        &["backup", "create", VM, "second"],
        &["snapshot", "delete", VM, "asleep"],
        &["vm", "suspend", VM],
    ];
    // Not the filter: one of the disks is not used, and then QEMU before 9.0 may not accept another filter (docs/decisions/020).
    let victims = [Victim::Agent, Victim::Server];
    let first = fastrand::usize(..victims.len());
    for (number, operation) in operations.into_iter().enumerate() {
        amid_a_kill(&mut here, operation, victims[(first + number) % victims.len()]);
    }
    here.wait_power(VM, "suspended").unwrap();
    here.vmseal(&["vm", "resume", VM]).unwrap();
    console = console_again(&here, VM, console);
    stop_and_check(&mut console);
    here.vmseal(&["vm", "prove", VM, "--all"]).unwrap();
    for backup in ["first", "second"] {
        here.vmseal(&["backup", "verify", VM, backup]).unwrap();
    }
    here.vmseal(&["dump", "delete", VM, "core"]).unwrap();
    write_and_verify(&mut console, 300);
    keep_history(&mut console, 1, None);
    amid_a_kill(&mut here, &["vm", "decrypt", VM, "--policy", "plain", "--yes"], Victim::Agent);
    console = console_again(&here, VM, console);
    stop_and_check(&mut console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

/// What fails in a cluster.
#[derive(Clone, Copy, Debug)]
enum Outage {
    /// An OSD; two of three are enough to go on.
    Osd,
    /// The only monitor.
    Monitor,
    /// Two OSDs of three: fewer than the pool needs.
    Osds,
    /// All daemons at once.
    Cluster,
    /// Not the cluster, but the process that serves its pool to the host.
    Server,
    /// The pool's quota is reached.
    Full,
}

impl Outage {
    /// Has it happen, and ends it some seconds later.
    fn happen(self, ceph: &CephInstallation) {
        let quota =
            |bytes| ceph.cluster.ceph(&["osd", "pool", "set-quota", "coded", "max_bytes", bytes]);
        let kill = |daemons: &[&str]| {
            daemons.iter().for_each(|name| ceph.cluster.kill_daemons(name));
        };
        match self {
            Self::Osd => kill(&["osd.1"]),
            Self::Monitor => kill(&["mon.a"]),
            Self::Osds => kill(&["osd.0", "osd.2"]),
            Self::Cluster => kill(&[""]),
            Self::Server => {
                let former = ceph.server();
                ceph.kill_server_of_pool();
                ceph.is_served_again(VM, former);
            }
            Self::Full => {
                quota("1");
                eventually("the pool is full", || {
                    let status = ceph.cluster.json(&["status"]);
                    status["problems"].to_string().contains("POOL_FULL").then_some(())
                })
                .unwrap();
            }
        }
        sleep(LASTS);
        match self {
            Self::Full => quota("0"),
            // The agent has started another one.
            Self::Server => {}
            Self::Osd | Self::Monitor | Self::Osds | Self::Cluster => drop(ceph.cluster.up()),
        }
    }
}

/// On a pool that has its data in an erasure-coded one, over connections that are encrypted. It takes many minutes: with `VMSEAL_ALL`
/// alone, as `scripts/soak` has it.
#[test]
fn fio_verifies_on_ceph_whatever_is_done_to_its_vm_and_whatever_fails_meanwhile() {
    if !is_soak_run() || !is_installed() {
        return;
    }
    let ceph = CephInstallation::new(Options {
        messenger: "secure",
        erasure_coded: true,
        key_at_server: false,
    });
    let here = &ceph.here;
    let mut console = started(here, VM, "plain", "ceph");
    let to = directory(here, "backups");
    write_and_verify(&mut console, SLOWLY);
    let operations: [(&[&str], Outage); 8] = [
        (&["vm", "encrypt", VM, "--policy", "encrypted"], Outage::Osd),
        (&["snapshot", "create", VM, "one"], Outage::Monitor),
        (&["backup", "create", VM, "first", "--to", &to], Outage::Cluster),
        (&["vm", "clone", VM, "copy", "--snapshot", "one"], Outage::Osds),
        (&["vm", "clone", VM, "linked", "--linked", "--snapshot", "one"], Outage::Server),
        (&["snapshot", "create", VM, "asleep", "--memory"], Outage::Full),
        (&["vm", "recrypt", VM], Outage::Monitor),
        (&["vm", "suspend", VM], Outage::Osd),
    ];
    for (operation, outage) in operations {
        let milliseconds = fastrand::u64(0..LATEST_KILL);
        eprintln!("{operation:?}: {outage:?} after {milliseconds} ms");
        let ended = during_which(here, operation, milliseconds, || outage.happen(&ceph));
        retried(here, VM, operation, &ended);
    }
    here.wait_power(VM, "suspended").unwrap();
    here.vmseal(&["vm", "resume", VM]).unwrap();
    console = console_again(here, VM, console);
    stop_and_check(&mut console);
    here.vmseal(&["vm", "prove", VM, "--all"]).unwrap();
    here.vmseal(&["backup", "verify", VM, "first"]).unwrap();
    for clone in ["linked", "copy"] {
        here.vmseal(&["vm", "start", clone]).unwrap();
        vmseal_tests::shell_guest::booted(here, clone).unwrap();
        here.vmseal(&["vm", "stop", clone, "--force"]).unwrap();
        here.vmseal(&["vm", "delete", clone]).unwrap();
    }
    for snapshot in ["one", "asleep"] {
        here.vmseal(&["snapshot", "delete", VM, snapshot]).unwrap();
    }
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["backup", "restore", VM, "first"]).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    console = ready(here, VM);
    write_and_verify(&mut console, SLOWLY);
    here.vmseal(&["vm", "decrypt", VM, "--policy", "plain", "--yes"]).unwrap();
    stop_and_check(&mut console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "delete", VM]).unwrap();
    ceph.is_empty();
}
