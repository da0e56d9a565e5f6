//! Guests that are moved to another machine while they read and write: what arrives is the memory of the guest, byte for
//! byte, whatever the disk is made of; and when the move is given up, nothing of it is left.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::json;
use vhost::{VhostBackend, VhostUserDirtyLogRegion};
use vm_memory::{Bytes, GuestAddress};
use vmseal_api::filter::{
    CacheSpec, DelaySpec, Direct, FaultKind, FaultRule, FaultSpec, FilterSpec, Holes, OperationKind,
};
use vmseal_initiator::driver::{BASE, Driver, MEMORY, NEXT, WRITE};
use vmseal_initiator::moved::{Asked, DATA, Destination, Log, MovedGuest};
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::layers;
use vmseal_iofilter::stack::chain::Chain;
use vmseal_iofilter::stack::layer::Layer;
use vmseal_iofilter::storage::file::FileDisk;
use vmseal_iofilter::storage::mem::MemDisk;
use vmseal_iofilter::storage::nbd::NbdDisk;
use vmseal_iofilter::storage::qcow2::Qcow2Disk;
use vmseal_secret::SecretBytes;

use crate::nbd_server::NbdServer;
use crate::seed::seed;
use crate::successor::Filter;
use crate::vhost_user::Server;

const SIZE: u64 = 1 << 20;
const SECTORS: u64 = SIZE / 512;
const QUEUES: usize = 3;
/// The longest request, in blocks.
const LONGEST: u64 = 64;
const EVENT_IDX: u64 = 1 << 29;
const FLUSH: u64 = 1 << 9;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Between two looks at what others do: giving the processor up without one would wait for all that runs on a busy machine.
const STEP: Duration = Duration::from_micros(30);
/// Well above the time for which a queue polls before it sleeps.
const ASLEEP: Duration = Duration::from_millis(5);

/// A guest that asks for anything, anywhere in its memory.
struct Load {
    guest: MovedGuest,
    random: fastrand::Rng,
    fill: u8,
}

impl Load {
    fn new(guest: MovedGuest, random: fastrand::Rng) -> Self {
        Self { guest, random, fill: 0 }
    }

    /// Memory for a request, in one piece or two, which may have bytes in common.
    fn memory(&mut self, length: u64) -> Vec<(u64, u32)> {
        let cut = if self.random.bool() { length } else { self.random.u64(1..=length) };
        let grain = [1, 512, 4096][self.random.usize(..3)];
        let pieces = [cut, length - cut].into_iter().filter(|piece| *piece > 0);
        let place = |length| {
            let at = self.random.u64(DATA.start..DATA.end - length) / grain * grain;
            (at, length as u32)
        };
        pieces.map(place).collect()
    }

    fn ask(&mut self) -> Asked {
        let blocks = self.random.u64(1..=LONGEST);
        let sector = self.random.u64(..SECTORS - blocks);
        match self.random.u8(..24) {
            0 => Asked { kind: 4, sector: 0, data: Vec::new() },
            1 => Asked { kind: 99, sector, data: self.memory(512) },
            2 => Asked { kind: 0, sector: SECTORS, data: self.memory(512) },
            3..6 => Asked { kind: 8, sector: 0, data: self.memory(20) },
            kind @ 6..8 => {
                let range = [sector.to_le_bytes(), blocks.to_le_bytes()].concat();
                let at = self.random.u64(DATA.start..DATA.end - 16);
                self.guest.write(at, &range);
                Asked { kind: [11, 13][usize::from(kind - 6)], sector: 0, data: vec![(at, 16)] }
            }
            8..14 => {
                let data = self.memory(blocks * 512);
                for &(at, length) in &data {
                    self.fill = self.fill.wrapping_add(1);
                    self.guest.write(at, &vec![self.fill; length as usize]);
                }
                Asked { kind: 1, sector, data }
            }
            _ => Asked { kind: 0, sector, data: self.memory(blocks * 512) },
        }
    }

    /// Puts some requests into a queue.
    fn offer(&mut self, queue: usize) {
        for _ in 0..self.random.u8(1..8) {
            let asked = self.ask();
            if !self.guest.offer(queue, &asked) {
                break;
            }
        }
    }

    fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            let queue = self.random.usize(..self.guest.queues());
            if self.random.bool() {
                self.offer(queue);
                self.guest.kick(queue);
            } else {
                self.guest.take_answers(queue);
                std::thread::sleep(STEP);
            }
        }
    }

    /// Waits until all is answered.
    fn finish(&mut self) {
        let until = Instant::now() + TIMEOUT;
        for queue in 0..self.guest.queues() {
            while self.guest.in_flight(queue) > 0 {
                assert!(Instant::now() < until, "queue {queue} does not answer");
                if self.guest.take_answers(queue) == 0 {
                    std::thread::sleep(STEP);
                }
            }
        }
    }

    /// Gets a log.
    fn log(&mut self, name: &str) {
        self.guest.use_log(Log::new(&CString::new(name).unwrap()));
    }

    /// Stops the rings, sends what is left, and compares. Requests may be in flight.
    fn arrive(&mut self, mut destination: Destination) {
        self.guest.stop();
        destination.round();
        let differing = destination.differing();
        assert!(differing.is_empty(), "pages that did not arrive: {differing:x?}");
        self.guest.go_on();
    }

    /// Everything that the guest asks for is sent before the disk sees it, so that what the disk writes, and only that, is
    /// missing at the other end.
    fn move_with_nothing_but_the_log(&mut self, at_rest: bool) {
        self.finish();
        std::thread::sleep(ASLEEP);
        let mut destination = Destination::new(self.guest.source());
        (0..self.guest.queues()).for_each(|queue| self.offer(queue));
        destination.round();
        (0..self.guest.queues()).for_each(|queue| self.guest.kick(queue));
        if at_rest {
            self.finish();
            std::thread::sleep(ASLEEP);
        }
        self.arrive(destination);
    }

    /// Reads, writes and sends at the same time.
    fn move_under_load(&mut self, busy: impl FnOnce(&mut Self)) -> usize {
        let mut destination = Destination::new(self.guest.source());
        let (ended, marked) = (AtomicBool::new(false), AtomicUsize::new(0));
        let destination = std::thread::scope(|scope| {
            let sending = scope.spawn(|| {
                while !ended.load(Ordering::Acquire) {
                    marked.fetch_add(destination.round(), Ordering::Relaxed);
                    std::thread::sleep(STEP);
                }
                destination
            });
            // If it panics, the other thread ends, too.
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| busy(self)));
            ended.store(true, Ordering::Release);
            let destination = sending.join().unwrap();
            result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            destination
        });
        self.arrive(destination);
        marked.into_inner()
    }
}

/// How often a log of this name is mapped in this process.
fn mapped(name: &str) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(&format!("/memfd:{name} "))).count()
}

/// Moves that are begun in the middle of a load, given up, and begun again.
fn moves(name: &str, mut load: Load) -> [u64; 3] {
    let logs: Vec<String> = (0..3).map(|log| format!("{name}-{log}")).collect();
    load.run(100);
    load.log(&logs[0]);
    load.guest.begin_logging();
    load.run(100);
    let marked = load.move_under_load(|load| {
        load.run(200);
        load.log(&logs[1]);
        load.run(200);
    });
    assert!(marked > 0, "{name}: nothing was logged");
    for at_rest in [true, false, true, false] {
        load.move_with_nothing_but_the_log(at_rest);
    }
    // The first one is mapped here, as long as it may have bits that were not taken.
    assert_eq!((mapped(&logs[0]), mapped(&logs[1])), (1, 2), "{name}");
    load.run(100);
    let log: Arc<Log> = load.guest.source().log().unwrap();
    load.guest.end_logging();
    log.take();
    load.run(100);
    load.finish();
    assert!(log.take().is_empty(), "{name}: logged without being asked to");
    assert_eq!((mapped(&logs[0]), mapped(&logs[1])), (0, 1), "{name}: the disk has a former log");
    load.run(20);
    load.log(&logs[2]);
    load.guest.begin_logging();
    load.move_under_load(|load| load.run(200));
    load.move_with_nothing_but_the_log(true);
    load.finish();
    load.guest.answered()
}

/// Any content, so that each read changes the guest's memory.
fn noise(length: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(5);
    (0..length).map(|_| random.u8(..)).collect()
}

fn file(directory: &Path) -> FileDisk {
    let path = directory.join("disk");
    std::fs::write(&path, noise(SIZE)).unwrap();
    let file = File::options().read(true).write(true).open(path).unwrap();
    FileDisk::open(file.into(), 0, SIZE, Direct::Auto, false).unwrap()
}

fn qcow2(directory: &Path) -> Qcow2Disk {
    let (raw, image) = (directory.join("raw"), directory.join("image"));
    std::fs::write(&raw, noise(SIZE)).unwrap();
    let convert = ["convert", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=4k"];
    let made = Command::new("qemu-img").args(convert).arg(&raw).arg(&image).status();
    assert!(made.unwrap().success());
    let image = OwnedFd::from(File::options().read(true).write(true).open(image).unwrap());
    Qcow2Disk::open(image, Vec::new(), 0, SIZE, false).unwrap()
}

fn fails(operations: &[OperationKind]) -> FilterSpec {
    let kind = FaultKind::Error { errno: libc::EIO };
    let (operations, one_in) = (operations.to_vec(), 8);
    let rule = FaultRule { kind, operations, range: None, one_in, after: 0, times: None };
    FilterSpec::Fault(FaultSpec { seed: 1, rules: vec![rule] })
}

fn delays() -> FilterSpec {
    FilterSpec::Delay(DelaySpec {
        operations: Vec::new(),
        microseconds: 100,
        jitter_microseconds: 400,
        reorders: true,
        seed: 0,
    })
}

type Filters<'a> = (&'a [FilterSpec], &'a [FilterSpec]);

fn check(
    name: &str,
    storage: impl Fn() -> DiskStorage,
    encrypted: bool,
    (above, below): Filters<'_>,
    random: &mut fastrand::Rng,
) {
    let layers = |specs: &[FilterSpec]| -> Vec<Arc<dyn Layer>> {
        specs.iter().map(|spec| layers::of(spec).unwrap()).collect()
    };
    for features in [u64::MAX, !EVENT_IDX, !FLUSH] {
        println!("{name}, features {features:x}");
        let mut key: Vec<u8> = (0..64).collect();
        let key = SecretBytes::from_wiped(&mut key).unwrap();
        let encryption = encrypted.then_some(Encryption { key, holes: Holes::Ciphertext });
        let disk = Disk::new(SIZE, false, encryption, storage(), QUEUES)
            .with_layers(layers(above), layers(below));
        let chains = (0..QUEUES).map(|_| disk.chain().unwrap()).collect();
        let server = Server::start_chains(chains, MemDisk::new(0), false);
        let guest = MovedGuest::connect(server.stream(), QUEUES, features, random.bool());
        let [good, bad, unsupported] = moves(name, Load::new(guest, random.fork()));
        assert!(good > 0 && bad > 0 && unsupported > 0, "{name}: {good} {bad} {unsupported}");
    }
}

fn in_memory() -> DiskStorage {
    DiskStorage::Mem(MemDisk::new(SIZE as usize))
}

#[test]
fn the_memory_of_a_guest_arrives_whatever_its_disk_is_made_of() {
    let mut random = fastrand::Rng::with_seed(seed());
    let random = &mut random;
    let cache = [FilterSpec::Cache(CacheSpec { bytes: 64 << 10 })];
    let bounce = [FilterSpec::Bounce {}];
    let errors = [fails(&[OperationKind::Read, OperationKind::Write])];
    check("plain", in_memory, false, (&[], &[]), random);
    check("encrypted", in_memory, true, (&[], &[]), random);
    check("cached", in_memory, true, (&[], &cache), random);
    check("bounced", in_memory, true, (&bounce, &[]), random);
    check("failing", in_memory, true, (&[], &errors), random);
    check("delayed", in_memory, true, (&[delays()], &errors), random);
}

#[test]
fn the_memory_of_a_guest_arrives_wherever_its_disk_is() {
    let mut random = fastrand::Rng::with_seed(seed());
    let random = &mut random;
    let on_disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let on_tmpfs = tempfile::tempdir_in("/dev/shm").unwrap();
    let slow = [delays()];
    for (name, place) in [("file", &on_disk), ("tmpfs", &on_tmpfs)] {
        let raw = || DiskStorage::File(file(place.path()));
        check(name, raw, true, (&[], &[]), random);
        check(name, raw, false, (&slow, &[]), random);
        check(name, || DiskStorage::Qcow2(qcow2(place.path())), true, (&[], &[]), random);
    }
}

#[test]
fn the_memory_of_a_guest_arrives_with_its_disk_at_a_server() {
    let mut random = fastrand::Rng::with_seed(seed());
    let server = || {
        let mem = MemDisk::new(SIZE as usize);
        let chain = |_| Chain::new(SIZE, false, Vec::new(), mem.queue()).unwrap();
        NbdServer::start((0..QUEUES).map(chain).collect())
    };
    let servers = std::cell::RefCell::new(Vec::new());
    let export = || {
        let mut servers = servers.borrow_mut();
        servers.push(server());
        let sockets = servers.last().unwrap().connect(QUEUES);
        DiskStorage::Nbd(NbdDisk::open(sockets, "", 0, SIZE, false).unwrap())
    };
    check("server", export, true, (&[], &[]), &mut random);
}

/// Killed at any instant, with requests in flight and pages written that are not marked yet.
#[test]
fn the_memory_of_a_guest_arrives_though_its_filter_dies_meanwhile() {
    const KILLS: usize = 12;
    let mut random = fastrand::Rng::with_seed(seed());
    for directory in [env!("CARGO_TARGET_TMPDIR"), "/dev/shm"] {
        let place = tempfile::tempdir_in(directory).unwrap();
        std::fs::write(place.path().join("disk"), noise(SIZE)).unwrap();
        let backend = json!({ "kind": "file", "offset": 0 });
        let delay = json!({ "kind": "delay", "microseconds": 50, "jitter_microseconds": 300, "reorders": true });
        let start = || Filter::start(place.path(), &backend, SIZE, &json!([delay]));
        let (mut filter, stream) = start();
        let guest = MovedGuest::connect(stream, 1, u64::MAX, true);
        let mut load = Load::new(guest, random.fork());
        load.log("killed");
        load.guest.begin_logging();
        let mut destination = Destination::new(load.guest.source());
        let mut resumed = 0;
        for _ in 0..KILLS {
            let steps = load.random.usize(1..60);
            load.run(steps);
            destination.round();
            load.offer(0);
            load.guest.kick(0);
            filter.kill();
            destination.round();
            resumed += load.guest.in_flight(0);
            let stream;
            (filter, stream) = start();
            load.guest.reconnect(stream);
        }
        load.arrive(destination);
        load.move_with_nothing_but_the_log(true);
        println!("{directory}: {resumed} requests were in flight when a filter was killed");
        assert!(resumed > 0);
        assert!(filter.end().success());
    }
}

/// Of the memory of [`Driver`].
const LOG: u64 = (BASE + MEMORY) / 4096 / 8;

fn plain_server() -> Server {
    let mem = MemDisk::new(SIZE as usize);
    let chain = || Chain::new(SIZE, false, Vec::new(), mem.queue()).unwrap();
    Server::start_chains(vec![chain(), chain()], mem.clone(), false)
}

fn log_file(seals: SealFlag) -> File {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = File::from(memfd_create(c"log", flags).unwrap());
    file.set_len(LOG).unwrap();
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    file
}

fn give(guest: &Driver, file: &File, mmap_size: u64) -> bool {
    let region =
        VhostUserDirtyLogRegion { mmap_size, mmap_offset: 0, mmap_handle: file.as_raw_fd() };
    guest.frontend.set_log_base(0, Some(region)).is_ok()
}

#[test]
fn a_log_that_does_not_cover_memory_or_may_shrink_ends_the_session_and_no_other() {
    let server = plain_server();
    let connect = || Driver::connect(server.stream(), 0, u64::MAX);
    for (size, seals, taken) in [
        (LOG, SealFlag::F_SEAL_SHRINK, true),
        (LOG - 1, SealFlag::F_SEAL_SHRINK, false),
        (LOG + 1, SealFlag::F_SEAL_SHRINK, false),
        (LOG, SealFlag::F_SEAL_GROW, false),
    ] {
        let mut guest = connect();
        assert_eq!(guest.request(1, 0, &[1; 512]).0, 0);
        assert_eq!(give(&guest, &log_file(seals), size), taken, "{size} bytes, {seals:?}");
        assert_eq!(guest.frontend.get_features().is_ok(), taken);
    }
    // A used ring whose end is not in the log.
    let mut guest = connect();
    assert!(give(&guest, &log_file(SealFlag::F_SEAL_SHRINK), LOG));
    let features = guest.frontend.get_features().unwrap();
    guest.frontend.set_features(features).unwrap();
    let mut set = |used| guest.set_addresses(0, Some(used));
    assert!(set(BASE + MEMORY - 6 - 16 * 8));
    assert!(!set(BASE + MEMORY - 6 - 16 * 8 + 1));
    assert!(!set(u64::MAX));
    drop(guest);
    assert_eq!(connect().request(1, 0, &[1; 512]).0, 0);
}

#[test]
fn a_ring_that_is_to_be_logged_waits_for_its_log_and_the_vmm_is_told_of_each_change() {
    let server = plain_server();
    let mut guest = Driver::connect(server.stream(), 0, u64::MAX);
    assert_eq!(guest.request(1, 0, &[1; 512]).0, 0);
    let features = guest.frontend.get_features().unwrap();
    guest.frontend.set_features(features).unwrap();
    guest.memory.write_obj(4u64, GuestAddress(BASE + 0x3000)).unwrap();
    guest.describe(0, (BASE + 0x3000, 16, NEXT, 1));
    guest.describe(1, (BASE + 0x3100, 1, WRITE, 0));
    guest.offer(0);
    guest.kick();
    assert!(guest.answer(Duration::from_millis(200)).is_none(), "it runs, and nothing is logged");
    let told = nix::sys::eventfd::EventFd::new().unwrap();
    guest.frontend.set_log_fd(told.as_raw_fd()).unwrap();
    let file = log_file(SealFlag::F_SEAL_SHRINK);
    assert!(give(&guest, &file, LOG));
    assert!(guest.answer(TIMEOUT).is_some());
    // Blocks until there was one.
    assert!(told.read().unwrap() > 0);
    let mut bits = vec![0; LOG as usize];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bits, 0).unwrap();
    let page = (BASE + 0x3100) / 4096;
    assert!(bits[(page / 8) as usize] & (1 << (page % 8)) != 0, "the status is not in the log");
}
