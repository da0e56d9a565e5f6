//! The cache filter: it answers from memory, and never with old data, whatever other requests write
//! meanwhile, and however those end.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vmseal_api::filter::{
    CacheSpec, DelaySpec, FaultKind, FaultRule, FaultSpec, FilterSpec, Holes, OperationKind,
};
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::layers;
use vmseal_iofilter::stack::chain::{Chain, Io, Storage};
use vmseal_iofilter::stack::layer::Layer;
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::{IoError, Operation, RequestId};
use vmseal_iofilter::storage::mem::MemDisk;
use vmseal_secret::SecretBytes;

use crate::waiting;

const SIZE: u64 = 1 << 20;
const SECTOR: u64 = 4096;

fn of(spec: FilterSpec) -> Arc<dyn Layer> {
    layers::of(&spec).unwrap()
}

fn cache() -> Arc<dyn Layer> {
    of(FilterSpec::Cache(CacheSpec { bytes: SIZE }))
}

/// Fails all requests of a kind after this many.
fn fails(kind: FaultKind, operation: OperationKind, after: u64) -> Arc<dyn Layer> {
    let operations = vec![operation];
    let rule = FaultRule { operations, range: None, after, one_in: 1, times: None, kind };
    of(FilterSpec::Fault(FaultSpec { seed: 0, rules: vec![rule] }))
}

fn error() -> FaultKind {
    FaultKind::Error { errno: libc::EIO }
}

fn jitter() -> Arc<dyn Layer> {
    of(FilterSpec::Delay(DelaySpec {
        operations: Vec::new(),
        microseconds: 0,
        jitter_microseconds: 60,
        reorders: true,
        seed: 3,
    }))
}

/// A disk with these layers above its storage, below the encryption if there is one.
fn disk(mem: &MemDisk, encrypted: bool, layers: &[&Arc<dyn Layer>]) -> Disk {
    let mut key: Vec<u8> = (0..64).collect();
    let key = SecretBytes::from_wiped(&mut key).unwrap();
    let encryption = encrypted.then_some(Encryption { key, holes: Holes::Zero });
    let layers = layers.iter().map(|layer| Arc::clone(layer)).collect();
    Disk::new(SIZE, false, encryption, DiskStorage::Mem(mem.clone()), 1)
        .with_layers(Vec::new(), layers)
}

fn begin(chain: &mut Chain, operation: Operation, offset: u64, bytes: &mut [u8]) {
    let id = chain.begin().unwrap();
    if matches!(operation, Operation::Read | Operation::Write) {
        // SAFETY: every test drains the chain before its buffers go.
        chain.data_mut(id).push(unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) });
    }
    chain.submit(id, operation, offset, bytes.len() as u64, 0);
}

fn drain(chain: &mut Chain) -> Result<(), IoError> {
    let mut result = Ok(());
    while chain.in_flight() > 0 {
        chain.poll();
        while let Some(done) = chain.next_done() {
            result = result.and(done.result);
        }
        waiting::sleep([&mut *chain]);
    }
    result
}

fn run(
    chain: &mut Chain,
    operation: Operation,
    offset: u64,
    bytes: &mut [u8],
) -> Result<(), IoError> {
    begin(chain, operation, offset, bytes);
    drain(chain)
}

fn write(chain: &mut Chain, offset: u64, length: u64, fill: u8) -> Result<(), IoError> {
    run(chain, Operation::Write, offset, &mut vec![fill; length as usize])
}

fn read(chain: &mut Chain, offset: u64, length: u64) -> Result<Vec<u8>, IoError> {
    let mut bytes = vec![0xee; length as usize];
    run(chain, Operation::Read, offset, &mut bytes).map(|()| bytes)
}

/// Hits, misses, passed, installed, invalidated, evicted.
fn counters(cache: &Arc<dyn Layer>) -> [u64; 6] {
    let counters: Vec<u64> = cache.counters().into_iter().map(|(_, value)| value).collect();
    counters.try_into().unwrap()
}

#[test]
fn cached_data_is_read_again_without_storage_and_by_every_queue() {
    for encrypted in [false, true] {
        let (mem, cache) = (MemDisk::new(SIZE as usize), cache());
        let broken = fails(error(), OperationKind::Read, 2);
        let disk = disk(&mem, encrypted, &[&cache, &broken]);
        let [mut one, mut other] = [disk.chain().unwrap(), disk.chain().unwrap()];
        write(&mut one, 0, 4 * SECTOR, 5).unwrap();
        let content = vec![5; 4 * SECTOR as usize];
        assert!(read(&mut one, 0, 4 * SECTOR).unwrap() == content);
        assert!(read(&mut one, 16 * SECTOR, SECTOR).unwrap() == [0; 4096], "a hole");
        // From here on storage answers no more.
        assert!(read(&mut other, 0, 4 * SECTOR).unwrap() == content);
        assert!(read(&mut other, SECTOR + 512, 1024).unwrap() == [5; 1024]);
        assert!(read(&mut other, 16 * SECTOR, SECTOR).unwrap() == [0; 4096]);
        assert_eq!(read(&mut other, 3 * SECTOR, 2 * SECTOR), Err(IoError::Device(libc::EIO)));
        assert_eq!(counters(&cache), [3, 3, 0, 5, 0, 0], "encrypted: {encrypted}");
    }
}

#[test]
fn long_reads_go_past_it() {
    let (mem, cache) = (MemDisk::new(SIZE as usize), cache());
    let mut chain = disk(&mem, false, &[&cache]).chain().unwrap();
    for _ in 0..2 {
        read(&mut chain, 0, 65536 + 512).unwrap();
    }
    assert_eq!(counters(&cache), [0, 0, 2, 0, 0, 0]);
    read(&mut chain, 512, 65536).unwrap();
    assert_eq!(counters(&cache), [0, 1, 2, 15, 0, 0]);
    // More at once than there are buffers.
    let mut buffers = vec![vec![0; 65536]; 15];
    for (index, buffer) in buffers.iter_mut().enumerate() {
        begin(&mut chain, Operation::Read, index as u64 * 65536, buffer);
    }
    drain(&mut chain).unwrap();
    assert_eq!(counters(&cache)[..3], [0, 16, 9]);
}

#[test]
fn changed_blocks_are_forgotten_however_the_change_ends() {
    let length = 4 * SECTOR;
    let torn = fails(FaultKind::Torn, OperationKind::Write, 1);
    let failed = fails(error(), OperationKind::Write, 1);
    for (fault, now) in [(torn, [9, 9, 5, 5]), (failed, [5; 4])] {
        for encrypted in [false, true] {
            let (mem, cache) = (MemDisk::new(SIZE as usize), cache());
            let disk = disk(&mem, encrypted, &[&cache, &fault]);
            let mut chain = disk.chain().unwrap();
            // The rule has let its first request pass in the first round.
            let first = write(&mut chain, 0, length, 5);
            if first.is_err() {
                continue;
            }
            read(&mut chain, 0, length).unwrap();
            write(&mut chain, 0, length, 9).unwrap_err();
            let expected: Vec<u8> = now.iter().flat_map(|fill| [*fill; 4096]).collect();
            assert!(read(&mut chain, 0, length).unwrap() == expected, "{now:?} {encrypted}");
            assert_eq!(counters(&cache)[4], 4);
        }
    }
    for zeroes in [
        Operation::Discard,
        Operation::WriteZeroes { unmap: false },
        Operation::WriteZeroes { unmap: true },
    ] {
        let (mem, cache) = (MemDisk::new(SIZE as usize), cache());
        let mut chain = disk(&mem, true, &[&cache]).chain().unwrap();
        write(&mut chain, 0, length, 5).unwrap();
        read(&mut chain, 0, length).unwrap();
        run(&mut chain, zeroes, SECTOR, &mut vec![0; SECTOR as usize]).unwrap();
        let expected: Vec<u8> = [5, 0, 5, 5].iter().flat_map(|fill| [*fill; 4096]).collect();
        assert!(read(&mut chain, 0, length).unwrap() == expected, "{zeroes:?}");
        run(&mut chain, Operation::Flush, 0, &mut []).unwrap();
        assert!(read(&mut chain, 0, length).unwrap() == expected, "{zeroes:?}");
        let [hits, misses, ..] = counters(&cache);
        assert_eq!((hits, misses), (1, 2), "a flush forgets nothing");
    }
}

/// Storage that makes the guest change its memory between storage's answer and its end.
struct Racing {
    guest: Segment,
    waiting: Vec<RequestId>,
}

impl Storage for Racing {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, _io: &mut Io<'_>) {
        self.waiting.push(id);
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        for id in self.waiting.drain(..) {
            let bytes = vec![7; io.request(id).length as usize];
            io.request(id).copy_from(0, &bytes);
            // SAFETY: the test keeps the guest's buffer until the chain is drained.
            unsafe { self.guest.base().write_bytes(0xbd, SECTOR as usize) };
            io.complete(id, Ok(()));
        }
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[test]
fn a_program_in_the_guest_cannot_change_what_others_read_by_changing_its_buffer() {
    let mut bytes = vec![0; SECTOR as usize];
    // SAFETY: the buffer outlives the chain, which is drained.
    let guest = unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) };
    let cache = cache();
    let disk = disk(&MemDisk::new(0), false, &[&cache]);
    let mut chain = disk.chain_over(Box::new(Racing { guest, waiting: Vec::new() })).unwrap();
    let id = chain.begin().unwrap();
    chain.data_mut(id).push(guest);
    chain.submit(id, Operation::Read, 0, 0, 0);
    drain(&mut chain).unwrap();
    assert!(read(&mut chain, 0, SECTOR).unwrap() == [7; SECTOR as usize]);
    assert_eq!(counters(&cache)[0], 1, "it was not kept, and the test proves nothing");
}

/// How many blocks the threads write and read; a writer has half of them.
const BLOCKS: u64 = 48;

/// The offset of a block: eight of them, then a gap, so that a write does not bar all of them.
fn place(block: u64) -> u64 {
    (block / 8 * 16 + block % 8) * SECTOR
}

/// A guest's view of its disk: the last answered version of each block.
struct Versions {
    answered: [AtomicU64; BLOCKS as usize],
    over: AtomicBool,
}

impl Versions {
    fn write(&self, disk: &Disk, writer: u64) {
        let (mut chain, mut version) = (disk.chain().unwrap(), 0_u64);
        let mut random = fastrand::Rng::with_seed(writer);
        while !self.over.load(Ordering::Relaxed) {
            version += 1;
            // Three writes at once, each in its own part of this writer's half.
            let mut writes: Vec<(u64, Vec<u8>)> = (0..3)
                .map(|part| {
                    let length = random.u64(1..=4);
                    let first = writer * BLOCKS / 2 + part * 8 + random.u64(..=8 - length);
                    (first, version.to_le_bytes().repeat((length * SECTOR / 8) as usize))
                })
                .collect();
            for (first, bytes) in &mut writes {
                begin(&mut chain, Operation::Write, place(*first), bytes);
            }
            drain(&mut chain).unwrap();
            for (first, bytes) in writes {
                for block in first..first + bytes.len() as u64 / SECTOR {
                    self.answered[block as usize].store(version, Ordering::SeqCst);
                }
            }
            thread::sleep(Duration::from_micros(random.u64(..400)));
        }
    }

    fn read(&self, disk: &Disk, seed: u64) {
        let (mut chain, mut random) = (disk.chain().unwrap(), fastrand::Rng::with_seed(seed));
        while !self.over.load(Ordering::Relaxed) {
            let length = random.u64(1..=3);
            let first = random.u64(..BLOCKS / 8) * 8 + random.u64(..=8 - length);
            let blocks = first as usize..(first + length) as usize;
            let answered = |block: &AtomicU64| block.load(Ordering::SeqCst);
            let before: Vec<u64> = self.answered[blocks].iter().map(answered).collect();
            let bytes = read(&mut chain, place(first), length * SECTOR).unwrap();
            for (before, found) in before.iter().zip(bytes.chunks(SECTOR as usize)) {
                let version = u64::from_le_bytes(found[..8].try_into().unwrap());
                let whole = found.chunks(8).all(|word| word == version.to_le_bytes());
                assert!(whole, "a block of {version} is mixed");
                assert!(version >= *before, "{version} is read, {before} was answered before");
            }
        }
    }
}

#[test]
fn answered_writes_are_read_by_every_queue_under_load() {
    for encrypted in [false, true] {
        let (mem, cache) = (MemDisk::new(SIZE as usize), cache());
        let disk = disk(&mem, encrypted, &[&cache, &jitter()]);
        let versions = Versions {
            answered: [const { AtomicU64::new(0) }; BLOCKS as usize],
            over: AtomicBool::new(false),
        };
        let (versions, disk, begun) = (&versions, &disk, Instant::now());
        thread::scope(|scope| {
            let writers = (0..2).map(|writer| scope.spawn(move || versions.write(disk, writer)));
            let readers = (5..8).map(|seed| scope.spawn(move || versions.read(disk, seed)));
            let threads: Vec<_> = writers.chain(readers).collect();
            while begun.elapsed() < Duration::from_millis(1500)
                && !threads.iter().any(thread::ScopedJoinHandle::is_finished)
            {
                thread::sleep(Duration::from_millis(5));
            }
            versions.over.store(true, Ordering::Relaxed);
        });
        let [hits, misses, _, installed, invalidated, _] = counters(&cache);
        println!("{hits} hits, {misses} misses, {installed} kept, {invalidated} forgotten");
        assert!(hits > 100 && installed > 100 && invalidated > 100, "too little happened");
    }
}
