//! A real Ceph cluster that does not answer. A guest waits, or gets errors, as its policy says; an alarm at its VM tells which; and it goes
//! on without a loss when the cluster answers. What `vmseal-rbd` holds meanwhile is bounded, however much is asked of it. That a pool has no
//! room left is said with the alarm, and what room it has before that.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use vmseal_channel::Operation;
use vmseal_lab::clock::own_memory;
use vmseal_tests::ceph::is_installed;
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
use vmseal_tests::counting_guest::{count, read_marker_of_disk, stop_counting};
use vmseal_tests::guest::Console;
use vmseal_tests::shell_guest::{booted, holds, run};
use vmseal_tests::{eventually, rest};

use crate::ceph_channel::{Queue, attach, connection_at, piece, ticket};
use crate::ceph_datastore::started;
use crate::ceph_files::make;

pub(crate) const VM: &str = "web";

const DISK: &str = "web/disk0";

/// After how many seconds the agent is to report it.
const STALL: &str = "5";

/// A write, to a place of the disk that nothing else uses.
const WRITE: &str =
    "dd if=/dev/zero of=/dev/vda bs=512 count=1 seek=126976 conv=notrunc,fsync 2>/dev/null";

/// How many images are written beside the guest's, each by a queue of its own, and how much is asked of each at once: 1 GiB in all. It is
/// far more than may be under way, and soon written when the cluster answers again.
const IMAGES: usize = 8;
const REQUESTS: usize = 32;

/// The bytes of a request: an object.
const REQUEST: usize = 4 << 20;

/// What the quota of the pool leaves, in bytes: more than the guest writes meanwhile.
const QUOTA_LEFT: u64 = 64 << 20;

/// In what units room is told, in bytes.
const BLOCK: u64 = 4096;

/// What alarms say while the quota of the pool is used up.
const USED_UP: &str = "pool 'coded' is full: its quota is used up";

/// By how many bytes the private memory of `vmseal-rbd` grows at least. These images have 360 MiB under way or more, for which memory may be
/// used again that it has had before.
const GROWTH_MIN: u64 = 128 << 20;

/// And at most: as much as may be in flight to the cluster (docs/ceph.md).
const GROWTH_MAX: u64 = 640 << 20;

/// By how many bytes the private memory of the guest's filter grows at most: a filter with one disk has no more in all (docs/storage.md).
const FILTER_GROWTH_MAX: u64 = 32 << 20;

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
    let mut console = starts(&mut bench);
    let stop = || bench.cluster.stop_daemons("osd.");
    waits(&bench, &mut console, stop, || ());
    shows_what_room_there_is(&bench);
    waits_while_the_pool_is_full(&bench, &mut console);
    drop(console);
    let mut console = starts_with_errors(&bench);
    gets_errors(&bench, &mut console, stop);
    gets_errors_while_the_pool_is_full(&bench, &mut console);
}

/// Starts a guest that waits for the cluster, at a host that soon reports that.
pub(crate) fn starts(bench: &mut CephInstallation) -> Console {
    bench.here.kill_agent();
    bench.here.start_agent_with(&["--disk-stall", STALL]).unwrap();
    let console = started(&bench.here, "ceph");
    bench.shares_data();
    console
}

/// Has the policy of the guest say that it gets errors, and starts it again.
pub(crate) fn starts_with_errors(bench: &CephInstallation) -> Console {
    let fails = ["policy", "set", "encrypted", "--on-stall", "error,5s"];
    bench.here.vmseal(&fails).unwrap();
    // It holds from the next start on.
    bench.here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    bench.here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(&bench.here, VM).unwrap();
    // What the kernel says of errors is not to come in the middle of a line that is waited for.
    run(&mut console, "echo 1 >/proc/sys/kernel/printk; echo QUIET-$((6 * 7))", "QUIET-42")
        .unwrap();
    console
}

/// An image of the pool, and a queue for it as a filter has it.
struct Written {
    path: PathBuf,
    file: File,
    connection: OwnedFd,
    queue: Queue,
}

/// A process, and what it had as private memory before something.
struct Measured {
    process: i32,
    before: u64,
}

impl Measured {
    fn new(process: i32) -> Self {
        Self { process, before: memory(process) }
    }

    /// By how much its private memory has grown.
    fn growth(&self) -> u64 {
        memory(self.process).saturating_sub(self.before)
    }
}

/// Writes that ask for more than may be under way.
struct Load {
    images: Vec<Written>,
    /// The `vmseal-rbd` that they are asked of.
    server: Measured,
    /// The filter of the guest, which writes, too.
    filter: Measured,
}

impl Load {
    fn new(bench: &CephInstallation) -> Self {
        let written = |number: usize| {
            let path = bench.mounted.join(format!("load-{number}"));
            let file = make(&path).unwrap();
            file.set_len((REQUESTS * REQUEST) as u64).unwrap();
            // A connection for each, as disks have: one thread serves all of its queues, and waits where one may not begin more.
            let connection = connection_at(&bench.mounted);
            let (mut queue, _) = attach(&connection, ticket(&file).unwrap()).unwrap();
            // From the first write on it has the lock of its image.
            assert_eq!(queue.ask(Operation::Write, 0, &[piece(0, 4096)]), 0);
            Written { path, file, connection, queue }
        };
        let images = (0..IMAGES).map(written).collect();
        let server = Measured::new(bench.server().expect("the pool is served"));
        let filters = bench.here.processes_of(VM, "vmseal-filter").unwrap();
        assert_eq!(filters.len(), 1, "the guest is not served by one filter");
        Self { images, server, filter: Measured::new(filters[0]) }
    }

    fn begin(&mut self) {
        for written in &mut self.images {
            for slot in 0..REQUESTS {
                let offset = (slot * REQUEST) as u64;
                let data = [piece(0, REQUEST)];
                written.queue.submit(slot as u32, Operation::Write, offset, &data);
            }
        }
    }

    /// `vmseal-rbd` has begun writes, while nothing is answered.
    fn is_held(&self) {
        let growth = || self.server.growth();
        eventually("vmseal-rbd holds what is written", || (growth() >= GROWTH_MIN).then_some(()))
            .unwrap_or_else(|error| panic!("{error}: it has grown by {}", growth()));
    }

    /// It has not begun all of them.
    fn is_bounded(&self) {
        for (name, measured, most) in [
            ("vmseal-rbd", &self.server, GROWTH_MAX),
            ("vmseal-filter", &self.filter, FILTER_GROWTH_MAX),
        ] {
            let (before, growth) = (measured.before, measured.growth());
            println!("{name}: {} MiB, and {} MiB more", before >> 20, growth >> 20);
            assert!(growth <= most, "{name} has grown by {growth} bytes");
        }
    }

    /// All of them are done, by the same process, and the images go.
    fn ends(self, bench: &CephInstallation) {
        for Written { path, file, connection, mut queue } in self.images {
            for _ in 0..REQUESTS {
                let (slot, errno) = queue.answer().expect("the queue is dropped");
                assert_eq!(errno, 0, "{}: request {slot}", path.display());
            }
            drop((queue, connection, file));
            std::fs::remove_file(path).unwrap();
        }
        let server = Some(self.server.process);
        assert_eq!(bench.server(), server, "another vmseal-rbd serves the pool");
    }
}

/// The private memory of a process, in bytes: not what filters share with it.
fn memory(process: i32) -> u64 {
    own_memory(process.cast_unsigned()).unwrap()
}

/// A guest waits while the cluster does not answer: from when `silence` is called until what it returns is dropped. `meanwhile` is called in
/// between, after the alarm.
pub(crate) fn waits<Silence>(
    bench: &CephInstallation,
    console: &mut Console,
    silence: impl FnOnce() -> Silence,
    meanwhile: impl FnOnce(),
) {
    let here = &bench.here;
    count(console);
    here.wait_no_alarm(DISK, "disk-stalled").unwrap();
    let mut load = Load::new(bench);
    let silent = silence();
    load.begin();
    load.is_held();
    let alarm = here.wait_alarm(DISK, "disk-stalled").unwrap();
    for part in [
        "disk 'disk0'",
        "has not ended a request of the guest since",
        "The guest waits; nothing fails",
        "ceph health detail",
    ] {
        assert!(alarm.contains(part), "{part}: {alarm}");
    }
    meanwhile();
    // The alarm comes seconds after the writes: by now memory has stopped growing.
    load.is_bounded();
    drop(silent);
    load.ends(bench);
    here.wait_no_alarm(DISK, "disk-stalled").unwrap();
    stop_counting(console);
    read_marker_of_disk(console);
    let errors = here.alarms(DISK).unwrap();
    assert!(errors.iter().all(|alarm| alarm["code"] != "disk-errors"), "{errors:?}");
}

/// A guest gets errors while the cluster does not answer: from when `silence` is called until what it returns is dropped.
pub(crate) fn gets_errors<Silence>(
    bench: &CephInstallation,
    console: &mut Console,
    silence: impl FnOnce() -> Silence,
) {
    assert!(is_written(console), "the cluster is well");
    let silent = silence();
    assert!(!is_written(console), "the cluster has written while it did not answer");
    // And at once from then on.
    assert!(!is_written(console), "the cluster has written while it did not answer");
    says_that_requests_fail(bench);
    drop(silent);
    goes_on(bench, console);
    let told = rest::scrape(&bench.here, "/metrics/hosts/here").unwrap();
    for name in ["vmseal_disk_stalls_total{", "vmseal_disk_stalled_requests_total{"] {
        let lines = told.lines().filter(|line| line.starts_with(name));
        let values = lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap());
        assert!(values.sum::<f64>() >= 1.0, "{name}: {told}");
    }
}

/// How much the pool of data may hold, in bytes; 0 is as much as there is room for.
fn set_quota(bench: &CephInstallation, bytes: u64) {
    let bytes = bytes.to_string();
    bench.cluster.ceph(&["osd", "pool", "set-quota", "coded", "max_bytes", &bytes]);
}

/// Room is shown up to the quota of the pool, and that OSDs are nearly full.
fn shows_what_room_there_is(bench: &CephInstallation) {
    let here = &bench.here;
    let status = bench.cluster.json(&["status"]);
    let mut pools = status["pools"].as_array().unwrap().iter();
    let stored = pools.find(|it| it["name"] == "coded").unwrap()["stored"].as_u64().unwrap();
    let quota = (stored + QUOTA_LEFT) / BLOCK * BLOCK;
    set_quota(bench, quota);
    eventually("the room ends with the quota", || {
        let shown = here.json(&["datastore", "show", "ceph"]).unwrap();
        let capacity = shown["usage"]["capacity"].as_u64()?;
        (capacity <= quota && capacity + BLOCK >= quota).then_some(())
    })
    .unwrap();
    set_quota(bench, 0);
    here.wait_no_alarm("ceph", "datastore-full").unwrap();

    let set_ratio = |ratio| bench.cluster.ceph(&["osd", "set-nearfull-ratio", ratio]);
    set_ratio("0.0001");
    alarm_says(bench, "ceph", "datastore-full", &["is nearly full: an OSD"]);
    let shown = here.vmseal(&["datastore", "show", "ceph"]).unwrap();
    assert!(shown.contains("pool 'coded' is nearly full"), "{shown}");
    set_ratio("0.85");
    here.wait_no_alarm("ceph", "datastore-full").unwrap();
}

/// A full pool takes no writes, and the cluster says nothing about them until there is room: the alarms say what the guest waits for.
fn waits_while_the_pool_is_full(bench: &CephInstallation, console: &mut Console) {
    count(console);
    set_quota(bench, 1);
    alarm_says(bench, DISK, "disk-stalled", &["The guest waits; nothing fails", USED_UP]);
    alarm_says(bench, "ceph", "datastore-full", &[USED_UP, "stand still at their writes"]);
    let shown = bench.here.vmseal(&["datastore", "show", "ceph"]).unwrap();
    assert!(shown.contains(USED_UP), "{shown}");
    set_quota(bench, 0);
    bench.here.wait_no_alarm(DISK, "disk-stalled").unwrap();
    stop_counting(console);
    read_marker_of_disk(console);
    bench.here.wait_no_alarm("ceph", "datastore-full").unwrap();
}

/// The same where the policy has requests fail.
fn gets_errors_while_the_pool_is_full(bench: &CephInstallation, console: &mut Console) {
    set_quota(bench, 1);
    eventually("the pool is full", || {
        let status = bench.cluster.json(&["status"]);
        status["problems"].to_string().contains("POOL_FULL").then_some(())
    })
    .unwrap();
    // Who writes learns of it from the OSDs a moment after the monitors say so.
    eventually("a full pool takes no write", || (!is_written(console)).then_some(())).unwrap();
    says_that_requests_fail(bench);
    alarm_says(bench, DISK, "disk-stalled", &[USED_UP]);
    set_quota(bench, 0);
    goes_on(bench, console);
}

/// Waits until an alarm says all of this.
fn alarm_says(bench: &CephInstallation, target: &str, code: &str, parts: &[&str]) {
    let mut last = String::new();
    let says = || {
        last = bench.here.wait_alarm(target, code).ok()?;
        parts.iter().all(|part| last.contains(*part)).then_some(())
    };
    eventually(&format!("alarm {code} says {parts:?}"), says)
        .unwrap_or_else(|error| panic!("{error}: {last}"));
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
    alarm_says(bench, DISK, "disk-stalled", &["Requests of the disk fail, as its policy says"]);
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
