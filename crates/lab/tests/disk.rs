//! The initiator, the loads and the experiment against real servers.

#![allow(clippy::unwrap_used)] // a test may

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmseal_api::filter::{ControlReply, Direct};
use vmseal_initiator::{Initiator, InitiatorError, Operation, VhostUser, Wait};
use vmseal_lab::clock::ProcessClock;
use vmseal_lab::experiment::{self, Plan, Progress, ServedDirectory};
use vmseal_lab::idle;
use vmseal_lab::load::{self, Direction, Extent, LoadError, Order, Workload};
use vmseal_lab::pattern::Pattern;
use vmseal_lab::sections::SECTIONS;
use vmseal_lab::systems::{
    Beside, Nbdkit, OwnLoad, OwnResult, Place, Program, Server, StorageDaemon, System, SystemError,
    Transport, Vmseal, check_at_rest,
};

const SIZE: u64 = 16 << 20;
const PATTERN: u64 = 42;

/// How long the copy of such a disk may take.
const COPIED: Duration = Duration::from_secs(60);

fn program(path: &str) -> Program {
    Program { path: path.into(), advice: "install QEMU" }
}

fn storage_daemon(luks: bool) -> StorageDaemon {
    StorageDaemon { luks, daemon: program("qemu-storage-daemon"), image_tool: program("qemu-img") }
}

fn nbdkit(luks: bool) -> Nbdkit {
    Nbdkit { luks, nbdkit: program("nbdkit"), image_tool: program("qemu-img") }
}

/// A disk in memory, and a server on it.
struct ServedDisk {
    server: Server,
    place: Place,
    _directory: tempfile::TempDir,
}

fn vmseal(encrypted: bool) -> Vmseal {
    // target/PROFILE/deps/disk-HASH
    let test = std::env::current_exe().unwrap();
    let path = test.ancestors().nth(2).unwrap().join("vmseal-filter");
    assert!(path.exists(), "{} is missing: cargo build -p vmseal-iofilter", path.display());
    Vmseal {
        filter: Program { path, advice: "build it" },
        encrypted,
        transport: Transport::VhostUser,
        direct: Direct::Auto,
        disks: 1,
        named_by_disks: false,
        by_files: false,
        delay_us: 0,
        snapshot: None,
        beside: None,
    }
}

fn serve() -> ServedDisk {
    serve_with(&storage_daemon(false))
}

fn serve_with(system: &dyn System) -> ServedDisk {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let place =
        Place { directory: directory.path().to_owned(), storage: None, channel: None, size: SIZE };
    system.prepare(&place).unwrap();
    let server = system.start(&place, None).unwrap();
    ServedDisk { server, place, _directory: directory }
}

fn workload(order: Order, direction: Direction, block: u32, depth: u16) -> Workload {
    Workload { id: "test", order, direction, block, depth }
}

impl ServedDisk {
    fn connect(&self, workload: &Workload, wait: Wait) -> Box<dyn Initiator> {
        self.server.connect(0, workload.depth, workload.block, wait).unwrap()
    }

    fn run(&self, workload: &Workload, wait: Wait, requests: u64) -> Result<(), LoadError> {
        let clock = ProcessClock::of(self.server.pid()).unwrap();
        let mut initiator = self.connect(workload, wait);
        let pattern = Some(Pattern::new(PATTERN));
        let extent = Extent::Requests(requests);
        let measured = load::run(initiator.as_mut(), workload, extent, pattern, &clock, 1)?;
        assert_eq!(measured.requests, requests);
        assert_eq!(measured.latency.len(), requests);
        Ok(())
    }

    fn fill(&self, wait: Wait) {
        let fill = workload(Order::Sequential, Direction::Write, 64 << 10, 4);
        self.run(&fill, wait, SIZE / u64::from(fill.block)).unwrap();
    }
}

#[test]
fn what_is_written_is_read_back_sleeping_and_polling() {
    let nbd = Vmseal { transport: Transport::Nbd, ..vmseal(true) };
    let systems: [&dyn System; 4] = [&storage_daemon(false), &nbdkit(false), &nbdkit(true), &nbd];
    for (system, wait) in
        systems.iter().flat_map(|system| [Wait::Sleep, Wait::Poll].map(|wait| (*system, wait)))
    {
        let disk = serve_with(system);
        disk.fill(wait);
        check_at_rest(system, &disk.place, Pattern::new(PATTERN)).unwrap();
        disk.run(&workload(Order::Random, Direction::Read, 4096, 32), wait, 5000).unwrap();
        disk.run(&workload(Order::Random, Direction::Write, 512, 7), wait, 5000).unwrap();
        disk.run(&workload(Order::Random, Direction::Mixed(70), 4096, 2), wait, 5000).unwrap();
        disk.run(&workload(Order::Sequential, Direction::Read, 1 << 20, 1), wait, 32).unwrap();
    }
}

#[test]
fn one_changed_byte_on_the_disk_is_found() {
    let disk = serve();
    disk.fill(Wait::Sleep);
    let file = OpenOptions::new().read(true).write(true).open(disk.place.disk()).unwrap();
    let at = 5_000_003;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
    let read = workload(Order::Sequential, Direction::Read, 64 << 10, 4);
    let found = disk.run(&read, Wait::Sleep, SIZE >> 16);
    assert!(matches!(found, Err(LoadError::Mismatch { at: 5_000_000 })), "{found:?}");
}

#[test]
fn a_request_beyond_the_disk_is_an_error_and_not_a_figure() {
    let disk = serve();
    let shape = workload(Order::Random, Direction::Read, 4096, 1);
    let mut initiator = disk.connect(&shape, Wait::Sleep);
    assert_eq!(initiator.capacity(), SIZE);
    assert_eq!(initiator.run_one(Operation::Read, 0, 4096).unwrap(), 0);
    assert_ne!(initiator.run_one(Operation::Read, SIZE, 4096).unwrap(), 0);
}

#[test]
fn a_load_ends_with_the_first_request_that_fails() {
    let disk = serve_with(&vmseal(false));
    disk.fill(Wait::Sleep);
    let file = OpenOptions::new().write(true).open(disk.place.disk()).unwrap();
    file.set_len(SIZE / 2).unwrap();
    let read = workload(Order::Sequential, Direction::Read, 64 << 10, 1);
    let cut = disk.run(&read, Wait::Sleep, SIZE >> 16);
    let half = SIZE / 2;
    let failed = matches!(cut, Err(LoadError::Request { offset, status: 1, .. }) if offset == half);
    assert!(failed, "{cut:?}");
}

#[test]
fn a_server_that_dies_ends_the_load_at_once() {
    let systems: [&dyn System; 2] = [&storage_daemon(false), &nbdkit(false)];
    for (system, wait) in
        systems.iter().flat_map(|system| [Wait::Sleep, Wait::Poll].map(|wait| (*system, wait)))
    {
        let disk = serve_with(system);
        let shape = workload(Order::Random, Direction::Read, 4096, 32);
        let mut initiator = disk.connect(&shape, wait);
        let clock = ProcessClock::of(disk.server.pid()).unwrap();
        let pid = Pid::from_raw(disk.server.pid().try_into().unwrap());
        let (begin, killer) = (Instant::now(), Duration::from_millis(200));
        let killer = std::thread::spawn(move || {
            std::thread::sleep(killer);
            kill(pid, Signal::SIGKILL).unwrap();
        });
        let extent = Extent::Time { warm_up: Duration::ZERO, measured: Duration::from_secs(60) };
        let ended = load::run(initiator.as_mut(), &shape, extent, None, &clock, 1);
        killer.join().unwrap();
        let closed = matches!(ended, Err(LoadError::Initiator(InitiatorError::Closed)));
        assert!(closed, "{} {wait:?}: {ended:?}", system.id());
        assert!(begin.elapsed() < Duration::from_secs(9), "noticed before it counts as stuck");
    }
}

#[test]
fn a_socket_that_is_there_before_its_server_listens_is_tried_again() {
    let disk = serve();
    let socket = &disk.server.sockets()[0];
    let aside = socket.with_extension("aside");
    std::fs::rename(socket, &aside).unwrap();
    // Bound, but not listening.
    drop(std::os::unix::net::UnixDatagram::bind(socket).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            std::fs::rename(&aside, socket).unwrap();
        });
        let begin = Instant::now();
        disk.run(&workload(Order::Random, Direction::Read, 4096, 1), Wait::Sleep, 0).unwrap();
        assert!(
            begin.elapsed() >= Duration::from_millis(50),
            "the connection was refused too early"
        );
    });
}

#[test]
fn impossible_queues_are_refused() {
    let disk = serve();
    for (depth, block) in [(0, 4096), (342, 4096), (1, 0), (1, 513), (1, 8 << 20)] {
        let refused = VhostUser::connect(&disk.server.sockets()[0], depth, block, Wait::Sleep);
        assert!(matches!(refused, Err(InitiatorError::Shape { .. })), "{depth} {block}");
    }
}

#[test]
fn plaintext_is_distinguished_from_ciphertext() {
    let disk = serve();
    let pattern = Pattern::new(PATTERN);
    // Nothing is written: a system that does not encrypt should have left the pattern.
    let empty = check_at_rest(&storage_daemon(false), &disk.place, pattern);
    assert!(matches!(empty, Err(SystemError::AtRest { found: 0, .. })), "{empty:?}");
    disk.fill(Wait::Sleep);
    // The same file, as if it came from a system that encrypts.
    let leak = check_at_rest(&storage_daemon(true), &disk.place, pattern);
    assert!(matches!(leak, Err(SystemError::AtRest { expected: 0, found: 4096, .. })), "{leak:?}");
}

#[test]
fn qemu_s_luks_keeps_what_is_written_and_no_plaintext() {
    let disk = serve_with(&storage_daemon(true));
    disk.fill(Wait::Sleep);
    disk.run(&workload(Order::Random, Direction::Read, 4096, 32), Wait::Sleep, 1000).unwrap();
    check_at_rest(&storage_daemon(true), &disk.place, Pattern::new(PATTERN)).unwrap();
}

/// How much the copy lacks of a disk that is being encrypted, in bytes; none where its filter does not say.
fn lacks(place: &Place) -> Option<u64> {
    let mut stream = UnixStream::connect(place.directory.join("control")).ok()?;
    stream.write_all(b"{\"do\":\"status\"}\n").ok()?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    let ControlReply::Status(status) = serde_json::from_str(&line).ok()? else { return None };
    Some(status.disks.first()?.mirror.as_ref()?.dirty_bytes)
}

#[test]
fn a_disk_that_is_encrypted_meanwhile_is_in_the_clear_and_its_key_opens_the_copy() {
    let (encrypting, encrypted) =
        (Vmseal { beside: Some(Beside::Encrypting), ..vmseal(false) }, vmseal(true));
    let disk = serve_with(&encrypting);
    disk.fill(Wait::Sleep);
    let begun = Instant::now();
    while lacks(&disk.place) != Some(0) {
        assert!(begun.elapsed() < COPIED, "the copy lacks {:?}", lacks(&disk.place));
        std::thread::sleep(Duration::from_millis(10));
    }
    let ServedDisk { server, place, _directory } = disk;
    drop(server);
    let pattern = Pattern::new(PATTERN);
    check_at_rest(&encrypting, &place, pattern).unwrap();
    // The copy, as an encrypted disk by itself.
    let copy = Place { directory: place.directory.join("copied"), ..place.clone() };
    std::fs::create_dir(&copy.directory).unwrap();
    for (from, to) in [("copy", "disk"), ("key", "key")] {
        std::fs::rename(place.directory.join(from), copy.directory.join(to)).unwrap();
    }
    check_at_rest(&encrypted, &copy, pattern).unwrap();
    let server = encrypted.start(&copy, None).unwrap();
    let copied = ServedDisk { server, place: copy, _directory };
    let read = workload(Order::Sequential, Direction::Read, 64 << 10, 4);
    copied.run(&read, Wait::Sleep, SIZE >> 16).unwrap();
}

#[test]
fn what_is_written_after_a_snapshot_is_in_its_layer_alone() {
    let snapshots = Vmseal { beside: Some(Beside::Snapshot(program("qemu-img"))), ..vmseal(true) };
    let disk = serve_with(&snapshots);
    disk.fill(Wait::Sleep);
    let kept = std::fs::read(disk.place.disk()).unwrap();
    let layer = disk.place.directory.join("layer");
    assert!(std::fs::metadata(&layer).unwrap().len() < SIZE);
    let (begun, ended) = snapshots.act(&disk.place, Duration::ZERO).unwrap().unwrap();
    assert!(begun < ended);
    // It is served as before.
    let read = workload(Order::Sequential, Direction::Read, 64 << 10, 4);
    disk.run(&read, Wait::Sleep, SIZE >> 16).unwrap();
    let clock = ProcessClock::of(disk.server.pid()).unwrap();
    let (extent, other) = (Extent::Requests(SIZE >> 16), Some(Pattern::new(PATTERN + 1)));
    for direction in [Direction::Write, Direction::Read] {
        let whole = Workload { direction, ..read };
        let mut initiator = disk.connect(&whole, Wait::Sleep);
        load::run(initiator.as_mut(), &whole, extent, other, &clock, 1).unwrap();
    }
    assert!(
        std::fs::read(disk.place.disk()).unwrap() == kept,
        "what the snapshot keeps is changed"
    );
    assert!(std::fs::metadata(&layer).unwrap().len() > SIZE, "the layer has no room for it");
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let directory = tempfile::tempdir().unwrap();
    let place =
        Place { directory: directory.path().to_owned(), storage: None, channel: None, size: SIZE };
    let error = storage_daemon(false).start(&place, None).unwrap_err().to_string();
    assert!(error.contains("it ended with") && error.contains("No such file"), "{error}");
    let missing = StorageDaemon { daemon: program("/nonexistent/daemon"), ..storage_daemon(false) };
    let error = missing.start(&place, None).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/daemon cannot be run; install QEMU"), "{error}");
}

fn plan(directory: &Path, size: u64) -> Plan {
    let loads = SECTIONS[0].workloads;
    Plan {
        neighbours: 0,
        workloads: vec![loads[0], loads[3]],
        idle: true,
        limit: true,
        rounds: 2,
        places: 2,
        // Eight disks have requests of 512 KiB under way that take more than 100 ms of a busy processor.
        cell: Duration::from_millis(400),
        warm_up: Duration::from_millis(10),
        wait: Wait::Sleep,
        verify: true,
        directory: directory.to_owned(),
        served: Vec::new(),
        size,
        cores: None,
    }
}

#[test]
fn eight_disks_hold_what_each_was_given_and_are_counted_together() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let eight = Vmseal { disks: 8, named_by_disks: true, ..vmseal(true) };
    let place = Place {
        directory: directory.path().to_owned(),
        storage: None,
        channel: None,
        size: 8 * SIZE,
    };
    eight.prepare(&place).unwrap();
    let server = eight.start(&place, None).unwrap();
    let clock = ProcessClock::of(server.pid()).unwrap();
    let fill = workload(Order::Sequential, Direction::Write, 64 << 10, 4);
    let extent = Extent::Requests(SIZE / u64::from(fill.block));
    let connect =
        |load: &Workload, disk| server.connect(disk, load.depth, load.block, Wait::Sleep).unwrap();
    // Each disk has its own content: one that is served for another would be noticed.
    for disk in 0..8 {
        let pattern = Some(Pattern::new(disk as u64));
        load::run(connect(&fill, disk).as_mut(), &fill, extent, pattern, &clock, 1).unwrap();
    }
    let read = workload(Order::Random, Direction::Read, 4096, 32);
    for disk in 0..8 {
        let pattern = Some(Pattern::new(disk as u64));
        let extent = Extent::Requests(100);
        load::run(connect(&read, disk).as_mut(), &read, extent, pattern, &clock, 1).unwrap();
    }
    let (warm_up, measured) = (Duration::from_millis(20), Duration::from_millis(200));
    let mut together: Vec<_> = (0..8).map(|disk| connect(&read, disk)).collect();
    let times = (warm_up, measured);
    let found = load::run_side_by_side(&mut together, &read, times, None, &clock, 1).unwrap();
    assert!(found.requests >= 8 && !found.latency.is_empty(), "{}", found.requests);
    assert!(found.elapsed >= measured && found.server > Duration::ZERO, "{:?}", found.elapsed);
    drop(together);
    // A disk without work, of a server that has work elsewhere, costs more than an idle one, and that is
    // noticed.
    let stop = std::sync::atomic::AtomicBool::new(false);
    let busy = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let extent = Extent::Requests(100);
                load::run(connect(&read, 1).as_mut(), &read, extent, None, &clock, 1).unwrap();
            }
        });
        let busy = idle::measure(&server, &read, measured, 0, "busy");
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        busy.unwrap()
    });
    assert!(busy.cpu > 0.0 && busy.waits > 0.0, "{busy:?}");
    // The first disk has its own content, not that of the second: the load ends.
    let pattern = Some(Pattern::new(0));
    let mut two: Vec<_> = (0..2).map(|disk| connect(&read, disk)).collect();
    let wrong = load::run_side_by_side(&mut two, &read, times, pattern, &clock, 1);
    assert!(matches!(wrong, Err(LoadError::Mismatch { .. })), "{:?}", wrong.err());
}

#[test]
fn an_experiment_measures_every_cell_and_leaves_nothing() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let eight = Vmseal { disks: 8, named_by_disks: true, ..vmseal(true) };
    let systems: Vec<Box<dyn System>> =
        vec![Box::new(storage_daemon(false)), Box::new(vmseal(true)), Box::new(eight)];
    let mut filled = Vec::new();
    let outcome = experiment::run(&plan(directory.path(), 2 * SIZE), &systems, &mut |progress| {
        if let Progress::Filling(system) = progress {
            filled.push(system.to_owned());
        }
    });
    let outcome = outcome.unwrap();
    // All are made again for the second round, and the one that was first is last then.
    assert_eq!((filled.len(), &filled[0]), (6, &filled[5]));
    // With the computed limit of the large one.
    assert_eq!(outcome.cells.len(), 14);
    assert_eq!(outcome.latencies.len(), 7);
    for cell in &outcome.cells {
        assert!(cell.requests > 0 && cell.cpu_per_io > 0.0 && cell.server_busy > 0.0, "{cell:?}");
    }
    // The order changes from round to round.
    let first = |round| outcome.cells.iter().find(|cell| cell.round == round).unwrap();
    assert_ne!(first(0).system, first(1).system);
    assert_eq!(outcome.idle.len(), 6);
    for idle in &outcome.idle {
        assert!(idle.seconds >= 0.1, "{idle:?}");
        let ours = idle.system.starts_with("vmseal");
        assert!(!ours || (idle.cpu, idle.waits) == (0.0, 0.0), "{idle:?}");
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "debris");
}

/// A disk under a load generator of its own, which knows without measuring.
struct ByItself(StorageDaemon);

impl System for ByItself {
    fn id(&self) -> &'static str {
        "by-itself"
    }

    fn encrypts(&self) -> bool {
        self.0.encrypts()
    }

    fn prepare(&self, place: &Place) -> Result<(), SystemError> {
        self.0.prepare(place)
    }

    fn start(&self, place: &Place, core: Option<usize>) -> Result<Server, SystemError> {
        self.0.start(place, core)
    }

    fn own_load(&self) -> Option<&dyn OwnLoad> {
        Some(self)
    }
}

impl OwnLoad for ByItself {
    fn measure(
        &self,
        place: &Place,
        workload: &Workload,
        (_, measured): (Duration, Duration),
        seed: u64,
    ) -> Result<OwnResult, SystemError> {
        assert!(place.disk().exists() && !place.directory.join("socket").exists());
        let mut latency = load::latencies();
        latency.saturating_record(1000 * (seed + 1));
        let (requests, elapsed) = (u64::from(workload.block), measured);
        Ok(OwnResult { requests, elapsed, cpu: elapsed / 2, others: Duration::ZERO, latency })
    }
}

#[test]
fn what_has_a_load_generator_of_its_own_is_measured_by_that() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let systems: Vec<Box<dyn System>> =
        vec![Box::new(storage_daemon(false)), Box::new(ByItself(storage_daemon(false)))];
    let plan = plan(directory.path(), SIZE);
    let outcome = experiment::run(&plan, &systems, &mut |_| {}).unwrap();
    let cells: Vec<_> = outcome.cells.iter().filter(|cell| cell.system == "by-itself").collect();
    assert_eq!(cells.len(), 4);
    for cell in cells {
        let load = plan.workloads.iter().find(|load| load.id == cell.workload).unwrap();
        assert_eq!(cell.requests, u64::from(load.block));
        assert_eq!((cell.iops, cell.server_busy), (cell.requests as f64 / 0.4, 0.5));
        assert!(cell.p50 >= 1000.0 * f64::from(cell.round + 1), "{cell:?}");
    }
    // Without a server there is nothing that is idle.
    assert!(outcome.idle.iter().all(|idle| idle.system == "storage-daemon-plain"));
    assert_eq!(outcome.idle.len(), 2);
}

#[test]
fn loads_of_two_storages_take_turns_and_their_reads_are_told_from_their_writes() {
    let storages = [(); 2].map(|()| tempfile::tempdir_in("/dev/shm").unwrap());
    let systems: Vec<Box<dyn System>> =
        vec![Box::new(storage_daemon(false)), Box::new(vmseal(true))];
    let of = |at: usize, ids: [&'static str; 2]| {
        let mixed = workload(Order::Random, Direction::Mixed(70), 4096, 2);
        let workloads = ids.map(|id| Workload { id, ..mixed }).to_vec();
        let plan = plan(storages[at].path(), SIZE);
        Plan { workloads, idle: false, limit: false, places: 1, ..plan }
    };
    let (first, second) = (of(0, ["x-1", "y-1"]), of(1, ["x-2", "y-2"]));
    let parts = [(&first, &systems[..]), (&second, &systems[..])];
    let outcome = experiment::run_joined(&parts, &mut |_| {}).unwrap();
    let loads: Vec<_> = outcome.cells.iter().map(|cell| cell.workload.as_str()).collect();
    // Each storage begins in turn.
    let rounds = [
        ["x-1", "x-1", "x-2", "x-2", "y-1", "y-1", "y-2", "y-2"],
        ["x-2", "x-2", "x-1", "x-1", "y-2", "y-2", "y-1", "y-1"],
    ];
    assert_eq!(loads, rounds.concat());
    for cell in &outcome.cells {
        let times = cell.times.unwrap();
        let (reads, writes) = (times.reads.unwrap(), times.writes.unwrap());
        assert!(
            reads.mean > 0.0 && writes.mean > 0.0 && times.all.p95 >= times.all.p50,
            "{cell:?}"
        );
        assert_eq!(cell.storage_cpu_per_io, None, "files have no processes below them");
    }
    for storage in &storages {
        assert_eq!(std::fs::read_dir(storage.path()).unwrap().count(), 0, "debris");
    }
}

#[test]
fn the_cpu_time_of_what_stores_a_disk_is_counted_apart() {
    let disk = serve();
    disk.fill(Wait::Sleep);
    let shape = workload(Order::Random, Direction::Read, 4096, 8);
    let extent = Extent::Requests(20_000);
    // The server, seen as the storage below another process.
    let own = ProcessClock::of(std::process::id()).unwrap();
    let above = own.clone().above([disk.server.pid()]).unwrap();
    let run = |clock: &ProcessClock| {
        let mut initiator = disk.connect(&shape, Wait::Sleep);
        load::run(initiator.as_mut(), &shape, extent, None, clock, 1).unwrap()
    };
    assert!(run(&above).storage > Duration::ZERO);
    assert_eq!(run(&own).storage, Duration::ZERO);
}

#[test]
fn plans_that_are_measured_in_turn_have_disks_and_results_of_their_own() {
    let [one, other] = [(), ()].map(|()| tempfile::tempdir_in("/dev/shm").unwrap());
    let quiet = |plan| Plan { idle: false, places: 1, ..plan };
    let first = quiet(plan(one.path(), SIZE));
    let mut second = quiet(plan(other.path(), SIZE));
    for (load, id) in second.workloads.iter_mut().zip(["other-small", "other-large"]) {
        load.id = id;
    }
    let of_first: Vec<Box<dyn System>> =
        vec![Box::new(storage_daemon(false)), Box::new(vmseal(true))];
    let of_second: Vec<Box<dyn System>> = vec![Box::new(vmseal(true))];
    let parts = [(&first, &of_first[..]), (&second, &of_second[..])];
    let (mut filled, mut rounds) = (0, 0);
    let outcome = experiment::run_joined(&parts, &mut |progress| match progress {
        Progress::Filling(_) => filled += 1,
        Progress::Round(..) => rounds += 1,
        _ => {}
    });
    let outcome = outcome.unwrap();
    // The rounds are those of both together.
    assert_eq!((filled, rounds), (3, 2));
    assert!(outcome.cells.iter().all(|cell| cell.requests > 0), "{:?}", outcome.cells);
    for (plan, systems) in [(&first, 2), (&second, 1)] {
        let of_plan = outcome
            .cells
            .iter()
            .filter(|cell| plan.workloads.iter().any(|load| load.id == cell.workload));
        // Two loads in each of two rounds, and the computed limit of the large one.
        assert_eq!(of_plan.count(), 2 * (2 * systems + 1));
    }
    for directory in [one, other] {
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "debris");
    }
}

/// How many files have this name below a directory.
fn files_named(name: &str, directory: &Path) -> usize {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let of = |path: std::path::PathBuf| match path.is_dir() {
        true => files_named(name, &path),
        false => usize::from(path.ends_with(name)),
    };
    entries.map(of).sum()
}

#[test]
fn each_client_has_servers_of_its_own_and_its_disks_on_its_own_storage() {
    let [directory, one, other] = [(); 3].map(|()| tempfile::tempdir_in("/dev/shm").unwrap());
    let storages = [&one, &other];
    // As if this process served them; the systems get to their disks by the files alone.
    let served = |storage: &tempfile::TempDir| ServedDirectory {
        directory: storage.path().to_owned(),
        channel: storage.path().join("socket"),
        process: std::process::id(),
        daemons: Vec::new(),
    };
    let plan = Plan {
        served: storages.into_iter().map(served).collect(),
        idle: false,
        limit: false,
        places: 1,
        ..plan(directory.path(), 2 * SIZE)
    };
    let by_files = |encrypted| Vmseal { by_files: true, ..vmseal(encrypted) };
    let systems: Vec<Box<dyn System>> = vec![Box::new(by_files(true)), Box::new(by_files(false))];
    let mut rounds = 0;
    let outcome = experiment::run(&plan, &systems, &mut |progress| {
        if let Progress::Round(..) = progress {
            rounds += 1;
            // Both systems have a filter for each client.
            assert_eq!(files_named("filter.json", directory.path()), 4);
            for storage in storages {
                assert_eq!(files_named("disk", storage.path()), 2);
            }
        }
    });
    let outcome = outcome.unwrap();
    // Two loads in each of two rounds.
    assert_eq!((rounds, outcome.cells.len()), (2, 8));
    for cell in &outcome.cells {
        assert!(cell.requests > 0 && cell.cpu_per_io > 0.0 && cell.memory > 0.0, "{cell:?}");
    }
    for directory in [&directory, &one, &other] {
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "debris");
    }
}

#[test]
fn an_experiment_without_room_is_refused_before_it_writes() {
    let systems: Vec<Box<dyn System>> = vec![Box::new(storage_daemon(false))];
    let plan = plan(Path::new("/dev/shm"), 1 << 50);
    let refused = experiment::run(&plan, &systems, &mut |_| {}).unwrap_err().to_string();
    assert!(refused.contains("choose smaller disks"), "{refused}");
}
