//! The vhost-user-blk front end against a driver of its own: everything a guest may do, everything
//! it should not do, VMMs that disconnect and connect.

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vm_memory::{Bytes, GuestAddress};
use vmseal_api::filter::{
    Budget, DelaySpec, Direct, DiskActivity, Holes, LimitSpec, OperationKind, StallSpec,
};
use vmseal_api::id::DiskId;
use vmseal_initiator::driver::{BASE, DATA, Driver, INDIRECT, NEXT, RING, WRITE};
use vmseal_iofilter::disk::allocation::Allocation;
use vmseal_iofilter::disk::status::DiskState;
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::front_ends::ServedDisk;
use vmseal_iofilter::front_ends::vhost_user::serve;
use vmseal_iofilter::handle::Socket;
use vmseal_iofilter::layers::delay::Delay;
use vmseal_iofilter::layers::limit::Limit;
use vmseal_iofilter::layers::stall::Stall;
use vmseal_iofilter::stack::chain::{Chain, Io, Storage};
use vmseal_iofilter::stack::layer::{Layer, Place};
use vmseal_iofilter::stack::orders::Orders;
use vmseal_iofilter::stack::request::{Operation, RequestId};
use vmseal_iofilter::stack::stop::Stop;
use vmseal_iofilter::storage::file::FileDisk;
use vmseal_iofilter::storage::mem::MemDisk;
use vmseal_secret::SecretBytes;

use crate::seed;

const SIZE: u64 = 1 << 20;
const ALL: u64 = u64::MAX;
const FLUSH: u64 = 1 << 9;
const EVENT_IDX: u64 = 1 << 29;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;
const SOON: Duration = Duration::from_millis(300);

/// A disk that is being served.
pub struct Server {
    path: std::path::PathBuf,
    state: Arc<DiskState>,
    mem: MemDisk,
    queues: usize,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<std::io::Result<Vec<Chain>>>>,
    _directory: tempfile::TempDir,
}

impl Server {
    fn start(read_only: bool) -> Self {
        let mem = MemDisk::new(SIZE as usize);
        Self::start_on(DiskStorage::Mem(mem.clone()), mem, read_only)
    }

    fn start_on(rest: DiskStorage, mem: MemDisk, read_only: bool) -> Self {
        let key = SecretBytes::random(64).unwrap();
        let encryption = Some(Encryption { key, holes: Holes::Zero });
        let disk = Disk::new(SIZE, read_only, encryption, rest, 2);
        Self::start_chains((0..2).map(|_| disk.chain().unwrap()).collect(), mem, read_only)
    }

    pub fn start_chains(chains: Vec<Chain>, mem: MemDisk, read_only: bool) -> Self {
        let (size, queues) = (chains[0].size(), chains.len());
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let socket = Socket::Listening(UnixListener::bind(&path).unwrap());
        let state = Arc::new(DiskState::new(DiskId::new(), queues));
        let served = Arc::new(ServedDisk {
            size: size.into(),
            read_only,
            serial: "serial-1".into(),
            state: Arc::clone(&state),
            allocation: Allocation::Unknown.into(),
        });
        let stop = Arc::new(Stop::new().unwrap());
        let orders = Orders::new(Arc::clone(&stop)).unwrap();
        let uid = nix::unistd::geteuid().as_raw();
        let thread = std::thread::spawn(move || serve(&socket, uid, &served, chains, &orders));
        Self { path, state, mem, queues, stop, thread: Some(thread), _directory: directory }
    }

    pub fn stream(&self) -> UnixStream {
        UnixStream::connect(&self.path).unwrap()
    }

    fn connect(&self, features: u64) -> Driver {
        Driver::connect(self.stream(), 0, features)
    }
}

impl Drop for Server {
    /// Whatever happened, the server still ends cleanly, with all its chains.
    fn drop(&mut self) {
        self.stop.ask();
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            assert_eq!(ended.expect("no panic").unwrap().len(), self.queues);
        }
    }
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

#[test]
fn every_request_of_a_guest() {
    for features in [ALL, ALL & !EVENT_IDX] {
        let server = Server::start(false);
        let mut guest = server.connect(features);
        assert_eq!(guest.config()[..8], (SIZE / 512).to_le_bytes());
        let written: Vec<u8> = (0..20 * 512).map(|at| (at / 7) as u8).collect();
        assert_eq!(guest.request(1, 3, &written).0, OK);
        assert_eq!(guest.request(0, 3, &vec![0; written.len()]), (OK, written.clone()));
        assert!(!server.mem.bytes().windows(512).any(|window| *window == written[512..1024]));
        assert_eq!(guest.request(4, 0, &[]).0, OK, "flush");
        assert_eq!(
            guest.request(8, 0, &[0; 20]),
            (OK, b"serial-1\0\0\0\0\0\0\0\0\0\0\0\0".to_vec())
        );
        assert_eq!(guest.request(13, 0, &range(4, 1, 0)).0, OK, "write zeroes");
        assert_eq!(guest.request(13, 0, &range(5, 9, 1)).0, OK, "write zeroes, unmap");
        assert_eq!(guest.request(11, 0, &range(16, 8, 0)).0, OK, "discard");
        let (status, read) = guest.request(0, 3, &vec![1; written.len()]);
        assert_eq!((status, &read[..512]), (OK, &written[..512]));
        assert!(read[512..512 * 11].iter().all(|&byte| byte == 0));
        assert!(guest.notifications() > 0);
        let counters = server.state.totals();
        assert_eq!((counters.reads, counters.writes, counters.discards), (2, 1, 3));
        assert_eq!((counters.written_bytes, counters.flushes, counters.errors), (20 * 512, 1, 0));
    }
}

#[test]
fn impossible_requests_are_answered_and_the_queue_continues() {
    let server = Server::start(false);
    let mut guest = server.connect(ALL);
    let sectors = SIZE / 512;
    let cases: [(u32, u64, Vec<u8>, u8); 13] = [
        (0, sectors, vec![0; 512], IOERR),
        (0, sectors - 1, vec![0; 1024], IOERR),
        (1, u64::MAX, vec![0; 512], IOERR),
        (1, u64::MAX / 512, vec![0; 512], IOERR),
        (1, 0, vec![0; 100], IOERR),
        (11, 0, range(sectors, 1, 0), IOERR),
        (11, 0, range(u64::MAX, u32::MAX, 0), IOERR),
        (11, 0, range(0, 8, 1), UNSUPP),
        (13, 0, range(0, 8, 2), UNSUPP),
        (13, 0, range(0, u32::MAX, 0), IOERR),
        (13, 0, vec![0; 32], IOERR),
        (13, 0, vec![0; 3], IOERR),
        (99, 0, vec![0; 512], UNSUPP),
    ];
    let count = cases.len() as u64;
    for (kind, sector, data, status) in cases {
        assert_eq!(guest.request(kind, sector, &data).0, status, "{kind} {sector} {}", data.len());
    }
    assert_eq!(server.state.totals().errors, count);
    assert_eq!(guest.request(1, 0, &[5; 512]).0, OK);
}

#[test]
fn a_read_only_disk_is_not_changed() {
    let server = Server::start(true);
    let mut guest = server.connect(ALL);
    assert_eq!(guest.request(1, 0, &[5; 512]).0, IOERR);
    assert_eq!(guest.request(13, 0, &range(0, 8, 1)).0, IOERR);
    assert_eq!(guest.request(0, 0, &[5; 512]), (OK, vec![0; 512]));
}

/// Chains that cannot be answered: the queue stops, reports it, and a new VMM is served.
#[test]
fn malformed_chains_stop_the_queue_and_nothing_else() {
    let outside = BASE + (64 << 20);
    type Trick = (&'static str, fn(&mut Driver, u64));
    let tricks: [Trick; 13] = [
        ("loop", |guest, _| guest.describe(0, (DATA, 16, NEXT, 0))),
        ("loop that has a place for the status", |guest, _| {
            guest.describe(0, (DATA, 16, NEXT, 1));
            guest.describe(1, (DATA + 512, 512, NEXT | WRITE, 1));
        }),
        ("next out of the table", |guest, _| guest.describe(0, (DATA, 16, NEXT, RING))),
        ("head out of the table", |guest, _| guest.offer(RING)),
        ("more pieces than a request can have", |guest, _| {
            guest.describe(0, (DATA, 16 * 1100, INDIRECT, 0));
            for index in 0..1100_u16 {
                let piece = (DATA + 0x10000, 1, NEXT, index + 1);
                guest.describe_at(DATA + 16 * u64::from(index), piece);
            }
        }),
        ("address outside", |guest, outside| guest.describe(0, (outside, 16, 0, 0))),
        ("address wraps", |guest, _| guest.describe(0, (u64::MAX - 8, 16, WRITE, 0))),
        ("end outside", |guest, _| guest.describe(0, (DATA, 64 << 20, WRITE, 0))),
        ("no status", |guest, _| guest.describe(0, (DATA, 16, 0, 0))),
        ("readable after writable", |guest, _| {
            guest.describe(0, (DATA, 16, NEXT | WRITE, 1));
            guest.describe(1, (DATA, 16, 0, 0));
        }),
        ("indirect within indirect", |guest, _| {
            guest.describe(0, (DATA, 16, INDIRECT, 0));
            guest.describe_at(DATA, (DATA, 16, INDIRECT, 0));
        }),
        ("indirect of odd length", |guest, _| guest.describe(0, (DATA, 17, INDIRECT, 0))),
        ("indirect loop", |guest, _| {
            guest.describe(0, (DATA, 32, INDIRECT, 0));
            guest.describe_at(DATA, (DATA, 16, NEXT, 1));
            guest.describe_at(DATA + 16, (DATA, 16, NEXT, 0));
        }),
    ];
    let server = Server::start(false);
    for (name, trick) in tricks {
        let mut guest = server.connect(ALL);
        trick(&mut guest, outside);
        guest.offer(0);
        guest.kick();
        assert_eq!(guest.answer(SOON), None, "{name}");
        drop(guest);
        assert_eq!(server.connect(ALL).request(0, 0, &[1; 512]).0, OK, "after {name}");
    }
    let mut guest = server.connect(ALL);
    guest.publish(RING + 1);
    guest.kick();
    assert_eq!(guest.answer(SOON), None, "an available index too far ahead");
}

#[test]
fn parts_of_a_request_may_be_cut_in_any_way() {
    let server = Server::start(false);
    let mut guest = server.connect(ALL);
    assert_eq!(guest.request(1, 8, &[0xa5; 4096]).0, OK);
    // A read of 4096 bytes through an indirect table: the header in three pieces, the status with the data's end.
    let header = BASE + 0x3000;
    let put = |bytes: &[u8], at| guest.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    put(&[0; 8], header);
    put(&8u64.to_le_bytes(), header + 8);
    put(&[0; 4097], DATA + 0x1001);
    let table = BASE + 0x4000;
    let pieces = [
        (header, 1, NEXT, 1),
        (header + 1, 0, NEXT, 2),
        (header + 1, 14, NEXT, 3),
        (header + 15, 1, NEXT, 4),
        (DATA + 0x1001, 1, NEXT | WRITE, 5),
        (DATA + 0x1002, 4096, WRITE, 0),
    ];
    for (index, piece) in pieces.into_iter().enumerate() {
        guest.describe_at(table + index as u64 * 16, piece);
    }
    guest.describe(0, (table, 16 * pieces.len() as u32, INDIRECT, 0));
    guest.offer(0);
    guest.kick();
    assert_eq!(guest.answer(Duration::from_secs(5)), Some((0, 4097)));
    let mut read = [1; 4097];
    guest.memory.read_slice(&mut read, GuestAddress(DATA + 0x1001)).unwrap();
    assert!(read[..4096].iter().all(|&byte| byte == 0xa5) && read[4096] == OK);
}

#[test]
fn a_new_vmm_is_served_when_one_is_gone_and_stopped_rings_start_again() {
    let server = Server::start(false);
    for round in 0..3u8 {
        let mut guest = server.connect(ALL);
        assert!(matches!(server.state.status().state, DiskActivity::Connected));
        assert_eq!(guest.request(1, u64::from(round), &[round + 1; 512]).0, OK);
        let base = guest.frontend.get_vring_base(0).unwrap();
        assert_eq!(base, 1);
        guest.offer(0);
        guest.kick();
        assert_eq!(guest.answer(SOON), None, "a stopped ring is not served");
        guest.start(0, 1);
        assert!(guest.answer(Duration::from_secs(5)).is_some(), "it goes on where it was");
    }
    let mut guest = server.connect(ALL);
    let (_, read) = guest.request(0, 0, &[0; 1536]);
    assert_eq!((read[0], read[512], read[1024]), (1, 2, 3));
}

#[test]
fn memory_beyond_the_end_of_its_file_is_refused() {
    let server = Server::start(false);
    let mut guest = server.connect(ALL);
    guest.frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 16).unwrap();
    let region = |memory_size, mmap_offset| VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size,
        userspace_addr: 0x1000,
        mmap_offset,
        mmap_handle: file.as_raw_fd(),
    };
    for (size, offset) in [(1 << 17, 0), (1 << 16, 4096), (4096, 1 << 16)] {
        assert!(guest.frontend.set_mem_table(&[region(size, offset)]).is_err(), "{size} {offset}");
    }
    assert_eq!(guest.request(1, 0, &[5; 512]).0, OK, "the memory that was is still used");
    assert!(guest.frontend.set_mem_table(&[region(1 << 15, 1 << 15)]).is_ok());
}

/// A backend that takes its time and records its requests.
struct Slow {
    asked: Arc<Mutex<Vec<Operation>>>,
    waiting: Vec<(Instant, RequestId)>,
    always_readable: Stop,
}

impl Slow {
    fn chain(asked: &Arc<Mutex<Vec<Operation>>>) -> Chain {
        let (asked, always_readable) = (Arc::clone(asked), Stop::new().unwrap());
        always_readable.ask();
        let backend = Self { asked, waiting: Vec::new(), always_readable };
        Chain::new(SIZE, false, Vec::new(), Box::new(backend)).unwrap()
    }
}

impl Storage for Slow {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        self.asked.lock().unwrap().push(io.request(id).operation);
        self.waiting.push((Instant::now(), id));
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        self.waiting.retain(|&(since, id)| {
            let done = since.elapsed() > Duration::from_millis(30);
            if done {
                io.complete(id, Ok(()));
            }
            !done
        });
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        Some(self.always_readable.event())
    }
}

#[test]
fn a_driver_that_does_not_flush_gets_its_writes_flushed_and_counted_as_writes() {
    for (features, flushed) in [(ALL, false), (ALL & !FLUSH, true)] {
        let asked = Arc::default();
        let chains = (0..2).map(|_| Slow::chain(&asked)).collect();
        let server = Server::start_chains(chains, MemDisk::new(0), false);
        let mut guest = server.connect(features);
        assert_eq!(guest.request(1, 1, &[3; 1024]).0, OK);
        let expected =
            if flushed { vec![Operation::Write, Operation::Flush] } else { vec![Operation::Write] };
        assert_eq!(*asked.lock().unwrap(), expected);
        let counters = server.state.totals();
        assert_eq!((counters.writes, counters.written_bytes, counters.flushes), (1, 1024, 0));
    }
}

/// Offers five writes at once and notifies the device.
fn offer_five(guest: &mut Driver) {
    for index in 0..5u16 {
        let header = BASE + 0x3000 + u64::from(index) * 64;
        guest.memory.write_slice(&1u32.to_le_bytes(), GuestAddress(header)).unwrap();
        guest.memory.write_slice(&0u64.to_le_bytes(), GuestAddress(header + 8)).unwrap();
        guest.describe(index * 3, (header, 16, NEXT, index * 3 + 1));
        guest.describe(index * 3 + 1, (DATA, 512, NEXT, index * 3 + 2));
        guest.describe(index * 3 + 2, (header + 32, 1, WRITE, 0));
        guest.offer(index * 3);
    }
    guest.kick();
}

#[test]
fn a_ring_that_is_stopped_has_answered_all_that_it_took() {
    let asked = Arc::default();
    let chains = (0..2).map(|_| Slow::chain(&asked)).collect();
    let server = Server::start_chains(chains, MemDisk::new(0), false);
    let mut guest = server.connect(ALL);
    offer_five(&mut guest);
    while asked.lock().unwrap().is_empty() {
        std::thread::yield_now();
    }
    let base = guest.frontend.get_vring_base(0).unwrap();
    let mut answers = 0;
    while guest.answer(Duration::ZERO).is_some() {
        answers += 1;
    }
    assert_eq!(base, answers, "the ring's position and its answers agree");
    assert_eq!(asked.lock().unwrap().len(), answers as usize);
}

/// A VM that migrates or ends waits for no limit or delay either: requests that they hold back go on at once.
#[test]
fn a_ring_that_is_stopped_waits_for_no_delay() {
    let delay = Delay::new(DelaySpec {
        operations: vec![OperationKind::Write],
        microseconds: 20_000_000,
        jitter_microseconds: 0,
        reorders: false,
        seed: 0,
    });
    let mem = MemDisk::new(SIZE as usize);
    let chain = || {
        Chain::new(SIZE, false, vec![delay.filter(&Place::simple(SIZE)).unwrap()], mem.queue())
            .unwrap()
    };
    let server = Server::start_chains(vec![chain(), chain()], mem.clone(), false);
    let mut guest = server.connect(ALL);
    offer_five(&mut guest);
    let held = || delay.counters()[0].1;
    while held() < 5 {
        std::thread::yield_now();
    }
    assert!(guest.answer(Duration::ZERO).is_none());
    let asked = Instant::now();
    assert_eq!(guest.frontend.get_vring_base(0).unwrap(), 5);
    assert!(asked.elapsed() < Duration::from_secs(10), "it waited for the delay");
    for _ in 0..5 {
        assert!(guest.answer(Duration::ZERO).is_some(), "one was left behind");
    }
}

/// A chain with this filter alone, over memory.
fn chain_with(layer: &impl Layer, mem: &MemDisk) -> Chain {
    let filter = layer.filter(&Place::simple(SIZE)).unwrap();
    Chain::new(SIZE, false, vec![filter], mem.queue()).unwrap()
}

#[test]
fn how_long_storage_keeps_a_request_is_told_until_it_ends() {
    let delay = Delay::new(DelaySpec {
        operations: vec![OperationKind::Write],
        microseconds: 20_000_000,
        jitter_microseconds: 0,
        reorders: false,
        seed: 0,
    });
    let mem = MemDisk::new(SIZE as usize);
    let chains = (0..2).map(|_| chain_with(&delay, &mem)).collect();
    let server = Server::start_chains(chains, mem.clone(), false);
    let mut guest = server.connect(ALL);
    assert_eq!(server.state.status().oldest_milliseconds, None);
    let begun = Instant::now();
    offer_five(&mut guest);
    let age = || server.state.oldest_request().unwrap_or_default();
    while age() < SOON {
        assert!(begun.elapsed() < Duration::from_secs(10), "it is not told: {:?}", age());
        std::thread::yield_now();
    }
    let told = server.state.status().oldest_milliseconds.unwrap();
    assert!(u128::from(told) >= SOON.as_millis());
    assert!(u128::from(told) <= begun.elapsed().as_millis(), "older than the request");
    // What is held back goes on, and all is answered.
    assert_eq!(guest.frontend.get_vring_base(0).unwrap(), 5);
    assert_eq!(server.state.status().oldest_milliseconds, None);
}

#[test]
fn a_disk_that_fails_serves_again_when_storage_has_answered_though_its_guest_asks_for_nothing() {
    let stall = Stall::new(StallSpec { milliseconds: 100 });
    // Storage that takes its time.
    let delay = Delay::new(DelaySpec {
        operations: vec![OperationKind::Write],
        microseconds: 3_000_000,
        jitter_microseconds: 0,
        reorders: false,
        seed: 0,
    });
    let mem = MemDisk::new(SIZE as usize);
    let chain = || {
        let place = Place::simple(SIZE);
        let filters = vec![stall.filter(&place).unwrap(), delay.filter(&place).unwrap()];
        Chain::new(SIZE, false, filters, mem.queue()).unwrap()
    };
    let server = Server::start_chains(vec![chain(), chain()], mem.clone(), false);
    server.state.set_layers(vec![Arc::new(stall.clone())]);
    let mut guest = server.connect(ALL);
    assert_eq!(guest.request(1, 0, &[5; 512]).0, IOERR, "a write");
    assert_eq!(guest.request(0, 8, &[0; 512]).0, IOERR, "a read while the write has not landed");
    let told = server.state.status();
    assert!(told.fails && told.oldest_milliseconds.is_some(), "{told:?}");
    let begun = Instant::now();
    while stall.fails_for().is_some() {
        assert!(begun.elapsed() < Duration::from_secs(20), "nothing wakes its queue");
        std::thread::yield_now();
    }
    // What has failed was done all the same, and before.
    assert_eq!(guest.request(0, 0, &[0; 512]), (OK, vec![5; 512]));
    assert!(!server.state.status().fails);
}

#[test]
fn a_request_that_waits_for_a_limit_of_its_disk_is_not_storages() {
    let requests = Some(Budget { per_second: 2, burst: 1 });
    let limit = Limit::new(&LimitSpec { requests, bytes: None });
    let mem = MemDisk::new(SIZE as usize);
    let chains = (0..2).map(|_| chain_with(&limit, &mem)).collect();
    let server = Server::start_chains(chains, mem.clone(), false);
    let mut guest = server.connect(ALL);
    offer_five(&mut guest);
    for _ in 0..3 {
        assert!(guest.answer(Duration::from_secs(20)).is_some());
    }
    // Those that are left have waited for as long, and storage has not seen them.
    let age = server.state.oldest_request();
    assert!(limit.counters()[0].1 > 0, "nothing was held back");
    assert!(age.is_none_or(|age| age < Duration::from_millis(500)), "{age:?}");
}

/// A file system of 256 KiB; only root can make it.
struct Small(tempfile::TempDir);

impl Small {
    fn mount() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=256k", "small"])
            .arg(directory.path())
            .status();
        assert!(mounted.unwrap().success());
        Self(directory)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_datastore_is_an_io_error_and_a_mark_and_the_disk_goes_on() {
    if !nix::unistd::geteuid().is_root() {
        // Not by a macro, whose output the harness hides when a test passes.
        let message = b"skipped: mounting a small file system needs root\n";
        return std::io::Write::write_all(&mut std::io::stderr(), message).unwrap();
    }
    let small = Small::mount();
    let mut options = File::options();
    let options = options.create_new(true).read(true).write(true);
    let file = options.open(small.0.path().join("disk")).unwrap();
    file.set_len(SIZE).unwrap();
    let file = FileDisk::open(file.into(), 0, SIZE, Direct::Auto, false).unwrap();
    let server = Server::start_on(DiskStorage::File(file), MemDisk::new(0), false);
    let mut guest = server.connect(ALL);
    assert_eq!(guest.request(1, 0, &vec![7; 128 << 10]).0, OK);
    assert_eq!(guest.request(1, 512, &vec![8; 256 << 10]).0, IOERR);
    assert!(server.state.status().last_error.unwrap().contains("no space"));
    assert_eq!(guest.request(0, 0, &vec![0; 128 << 10]), (OK, vec![7; 128 << 10]));
    assert_eq!(guest.request(11, 0, &range(0, 2048, 0)).0, OK, "the guest makes room");
    assert_eq!(guest.request(1, 512, &vec![8; 128 << 10]).0, OK);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 40,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(seed::seed()),
        ..ProptestConfig::default()
    })]

    /// Rings full of noise: the server may refuse, but it neither dies nor hangs.
    #[test]
    fn noise_in_the_ring_does_no_harm(
        noise in prop::collection::vec((any::<u64>(), any::<u32>(), 0u16..8, 0u16..20), 16),
        near in prop::collection::vec((0u64..(8 << 20), 0u32..8192), 16),
        heads in prop::collection::vec(0u16..18, 1..16),
    ) {
        let server = Server::start(false);
        let mut guest = server.connect(ALL);
        for (index, ((address, length, flags, next), (offset, short))) in
            noise.into_iter().zip(near).enumerate()
        {
            let close = address % 4 != 0;
            let (address, length) = if close { (BASE + offset, short) } else { (address, length) };
            guest.describe(index as u16, (address, length, flags, next));
        }
        for head in heads {
            guest.offer(head);
        }
        guest.kick();
        guest.answer(Duration::from_millis(5));
        drop(guest);
        prop_assert_eq!(server.connect(ALL).request(0, 0, &[1; 512]).0, OK);
    }
}
