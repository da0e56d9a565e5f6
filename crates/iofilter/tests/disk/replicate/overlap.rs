//! A copy elsewhere is flushed while the next batch is copied: what a flush finds done, what is under way beside it, and what
//! stays marked until it has ended well.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use vmseal_api::filter::{
    DelaySpec, Direct, FaultKind, FaultRange, FaultRule, FaultSpec, FilterSpec, OperationKind,
};
use vmseal_api::id::DiskId;
use vmseal_iofilter::layers;
use vmseal_iofilter::layers::delay::Delay;
use vmseal_iofilter::layers::leg::LegChain;
use vmseal_iofilter::layers::replicate::Replicate;
use vmseal_iofilter::layers::replicate::copier::{Batch, BatchLimits, Copier, CopyError};
use vmseal_iofilter::layers::replicate::format::{Geometry, Image};
use vmseal_iofilter::layers::replicate::pipe::DEPTH;
use vmseal_iofilter::stack::chain::{Filter, Io, Limits};
use vmseal_iofilter::stack::layer::{Layer, Place};
use vmseal_iofilter::stack::request::{IoError, Operation, RequestId};
use vmseal_iofilter::storage::file::FileDisk;
use vmseal_iofilter::storage::mem::MemDisk;

use super::mirror::{chain, noise};

const CHUNK: u64 = 1 << 20;
const CHUNKS: usize = 8;
const SIZE: u64 = CHUNK * CHUNKS as u64;

/// How many chunks a batch has, and how many batches the disk.
const BATCH: usize = 2;
const BATCHES: usize = CHUNKS / BATCH;

/// How long a flush and the changes beside it wait for each other.
const TIMEOUT: Duration = Duration::from_secs(10);

/// What was done when a flush of the copy arrived.
#[derive(Clone, Debug)]
struct Found {
    /// Of each chunk: the bytes of it that were written and answered.
    written: [u64; CHUNKS],
    /// Flushes of the disk that were answered.
    disk_flushes: usize,
    /// The bytes that count as different.
    dirty: u64,
    /// The chunks that the next process would copy, if this one were killed here.
    on_record: Vec<usize>,
    /// Whether changes of the next batch were under way while the flush was.
    beside: bool,
}

/// What the disk and the copy have seen.
#[derive(Debug, Default)]
struct Seen {
    written: [u64; CHUNKS],
    read: [u64; CHUNKS],
    /// Of each chunk, what was read when a flush of the disk arrived.
    read_at_flushes: Vec<[u64; CHUNKS]>,
    disk_flushes: usize,
    copy_flushes: Vec<Found>,
}

/// Watches what is read of the disk.
struct Disk(Arc<Mutex<Seen>>);

impl Filter for Disk {
    fn limits(&self) -> Limits {
        Limits { children: 0 }
    }

    fn prepare(&mut self, _capacity: usize) {}

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        if io.request(id).operation == Operation::Flush {
            let mut seen = self.0.lock().unwrap();
            let read = seen.read;
            seen.read_at_flushes.push(read);
        }
        io.pass(id);
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        let request = io.request(id);
        let (result, mut seen) = (request.result, self.0.lock().unwrap());
        match request.operation {
            Operation::Flush => seen.disk_flushes += 1,
            _ => seen.read[(request.offset / CHUNK) as usize] += request.length,
        }
        io.complete(id, result);
    }
}

/// Watches what is written to the copy. The first flushes are answered only when a change of the next batch is under way, and
/// such a change only when the flush before it has arrived: so each of them is seen beside the other, however fast they are.
struct Server {
    seen: Arc<Mutex<Seen>>,
    replicate: Replicate,
    geometry: Geometry,
    map: MemDisk,
    /// How many flushes wait.
    waiting: usize,
    flush: Option<RequestId>,
    changes: Vec<RequestId>,
    /// Until when they wait for each other.
    until: Option<Instant>,
}

impl Server {
    fn flush(&mut self, id: RequestId, io: &mut Io<'_>) {
        let (image, _) = Image::read(self.geometry, &self.map.bytes()).unwrap();
        let dirty = self.replicate.status().dirty_bytes;
        let mut seen = self.seen.lock().unwrap();
        let found = Found {
            written: seen.written,
            disk_flushes: seen.disk_flushes,
            dirty,
            on_record: (0..CHUNKS).filter(|chunk| image.is_dirty(*chunk)).collect(),
            beside: false,
        };
        seen.copy_flushes.push(found);
        let waits = seen.copy_flushes.len() <= self.waiting;
        drop(seen);
        self.flush = Some(id);
        io.hold(id);
        if !waits || !self.changes.is_empty() {
            self.pass_all(io);
        } else {
            self.until = Some(Instant::now() + TIMEOUT);
        }
    }

    /// Whether this change is one of the batch after that whose flush is to arrive next.
    fn is_early(&self, chunk: usize) -> bool {
        let flushes = self.seen.lock().unwrap().copy_flushes.len();
        flushes < self.waiting && chunk >= BATCH * (flushes + 1)
    }

    /// They have waited for each other long enough.
    fn pass_all(&mut self, io: &mut Io<'_>) {
        self.until = None;
        if let Some(flush) = self.flush.take() {
            let beside = !self.changes.is_empty();
            self.seen.lock().unwrap().copy_flushes.last_mut().unwrap().beside = beside;
            io.pass(flush);
        }
        self.changes.drain(..).for_each(|change| io.pass(change));
    }
}

impl Filter for Server {
    fn limits(&self) -> Limits {
        Limits { children: 0 }
    }

    fn prepare(&mut self, _capacity: usize) {}

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        let request = io.request(id);
        if request.operation == Operation::Flush {
            return self.flush(id, io);
        }
        let early = self.is_early((request.offset / CHUNK) as usize);
        if !early && self.flush.is_none() {
            return io.pass(id);
        }
        io.hold(id);
        self.changes.push(id);
        if self.flush.is_some() {
            self.pass_all(io);
        } else {
            self.until.get_or_insert(Instant::now() + TIMEOUT);
        }
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        let request = io.request(id);
        let result = request.result;
        if request.operation.changes() && result.is_ok() {
            let chunk = (request.offset / CHUNK) as usize;
            self.seen.lock().unwrap().written[chunk] += request.length;
        }
        io.complete(id, result);
    }

    /// A copier that copies nothing beside a flush gets its answers, too.
    fn tick(&mut self, io: &mut Io<'_>) -> Option<Instant> {
        if self.until.is_some_and(|until| Instant::now() >= until) {
            self.waiting = 0;
            self.pass_all(io);
        }
        self.until
    }
}

/// A disk that is copied in batches of [`BATCH`] chunks.
struct Copying {
    seen: Arc<Mutex<Seen>>,
    replicate: Replicate,
    copier: Copier,
    geometry: Geometry,
    source: MemDisk,
    copy: MemDisk,
    map: MemDisk,
}

/// Faults of the disk and of the copy.
#[derive(Default)]
struct Broken {
    disk: Vec<FaultRule>,
    copy: Vec<FaultRule>,
}

fn fault(rules: Vec<FaultRule>) -> Box<dyn Filter> {
    let spec = FilterSpec::Fault(FaultSpec { seed: 1, rules });
    layers::of(&spec).unwrap().filter(&Place::simple(SIZE)).unwrap()
}

/// One error, after this many requests of the kind that had none.
fn once(operation: OperationKind, after: usize, range: Option<FaultRange>) -> Vec<FaultRule> {
    let kind = FaultKind::Error { errno: libc::EIO };
    let (operations, after) = (vec![operation], after as u64);
    vec![FaultRule { kind, operations, range, one_in: 1, after, times: Some(1) }]
}

impl Copying {
    /// Of data, or of holes. So many flushes of the copy wait for a change of the next batch.
    fn new(holes: bool, waiting: usize, broken: Broken) -> Self {
        let geometry = Geometry::new(DiskId::new(), SIZE).of_mirror();
        assert_eq!((geometry.chunk(), geometry.chunks()), (CHUNK, CHUNKS));
        let map = MemDisk::new(geometry.map_bytes());
        let of_map = chain(geometry.map_bytes() as u64, &map, vec![]);
        let (replicate, _) = Replicate::new(geometry, LegChain::new(of_map));
        let empty = MemDisk::new(SIZE as usize);
        let (source, copy) = if holes { (empty, noise(SIZE)) } else { (noise(SIZE), empty) };
        let seen = Arc::new(Mutex::new(Seen::default()));
        let server = Server {
            seen: Arc::clone(&seen),
            replicate: replicate.clone(),
            geometry,
            map: map.clone(),
            waiting,
            flush: None,
            changes: Vec::new(),
            until: None,
        };
        let line = DelaySpec {
            operations: vec![OperationKind::Write, OperationKind::Discard],
            microseconds: 500,
            jitter_microseconds: 1000,
            reorders: false,
            seed: 0,
        };
        let line = Delay::new(line).filter(&Place::simple(SIZE)).unwrap();
        let disk: Box<dyn Filter> = Box::new(Disk(Arc::clone(&seen)));
        let server: Box<dyn Filter> = Box::new(server);
        let from = chain(SIZE, &source, vec![disk, fault(broken.disk)]);
        let to = LegChain::new(chain(SIZE, &copy, vec![server, line, fault(broken.copy)]));
        let limits =
            BatchLimits { bytes: u64::MAX, chunks: BATCH, time: Duration::MAX, overlap: true };
        let holes = holes.then(all_hole);
        let copier = Copier::in_batches(&replicate, from, holes, to, DEPTH, limits);
        Self { seen, replicate, copier, geometry, source, copy, map }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap()
    }

    fn dirty(&self) -> u64 {
        self.replicate.status().dirty_bytes
    }

    /// Whether the next process would copy a chunk, if this one were killed now.
    fn is_on_record(&self, chunk: usize) -> bool {
        Image::read(self.geometry, &self.map.bytes()).unwrap().0.is_dirty(chunk)
    }

    /// Copies what is marked; there are no more errors.
    fn becomes_equal(&mut self) {
        for _ in 0..2 * BATCHES {
            if self.dirty() == 0 {
                assert!(self.source.bytes() == self.copy.bytes(), "it counts as equal and differs");
                return;
            }
            self.copier.batch().unwrap();
        }
        panic!("{} bytes are copied and stay marked", self.dirty());
    }
}

/// A file without data.
fn all_hole() -> FileDisk {
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(SIZE).unwrap();
    FileDisk::open(file.into(), 0, SIZE, Direct::Off, true).unwrap()
}

/// What the copy lacks while this batch is flushed, the first being 0.
fn dirty_at(batch: usize) -> u64 {
    (BATCHES - batch) as u64 * BATCH as u64 * CHUNK
}

fn a_flush_covers_its_batch_and_the_next_is_under_way(holes: bool) {
    // Nothing comes after the last one.
    let mut copying = Copying::new(holes, BATCHES - 1, Broken::default());
    assert_eq!(copying.copier.batch(), Ok(Batch::Pass), "a pass is copied in one go");
    assert_eq!(copying.dirty(), 0, "a batch still waits for its flush");
    let flushes = copying.seen().copy_flushes.clone();
    assert_eq!(flushes.len(), BATCHES);
    for (batch, found) in flushes.iter().enumerate() {
        let until = BATCH * (batch + 1);
        let whole = found.written[..until].iter().all(|written| *written == CHUNK);
        assert!(whole, "batch {batch} is flushed before all of it is written: {found:?}");
        assert_eq!(found.disk_flushes, batch + 1, "the disk first: {found:?}");
        // Whether the process lives or is killed here.
        assert_eq!(found.dirty, dirty_at(batch), "unmarked before its flush: {found:?}");
        let marked: Vec<_> = (BATCH * batch..CHUNKS).collect();
        assert_eq!(found.on_record, marked, "batch {batch}");
        let last = batch + 1 == BATCHES;
        assert!(found.beside || last, "nothing is copied beside the flush of batch {batch}");
    }
    let read = copying.seen().read_at_flushes.clone();
    for (batch, read) in read.iter().enumerate().filter(|_| !holes) {
        let whole = read[..BATCH * (batch + 1)].iter().all(|read| *read == CHUNK);
        assert!(whole, "the disk is flushed before batch {batch} is read: {read:?}");
    }
    copying.becomes_equal();
}

#[test]
fn the_flush_of_a_batch_covers_all_of_it_and_the_next_batch_is_copied_meanwhile() {
    a_flush_covers_its_batch_and_the_next_is_under_way(false);
}

#[test]
fn so_does_that_of_holes() {
    a_flush_covers_its_batch_and_the_next_is_under_way(true);
}

#[test]
fn a_flush_of_the_copy_that_fails_leaves_its_batch_marked_and_what_was_written_beside_it() {
    for batch in 0..BATCHES - 1 {
        let copy = once(OperationKind::Flush, batch, None);
        let mut copying = Copying::new(false, batch + 1, Broken { copy, ..Broken::default() });
        let failed = Err(CopyError::Replica(IoError::Device(libc::EIO)));
        assert_eq!(copying.copier.batch(), failed);
        assert_eq!(copying.dirty(), dirty_at(batch), "batch {batch}");
        let beside = copying.seen().written[BATCH * (batch + 1)];
        assert!(beside > 0, "nothing was written beside the flush: the test proves little");
        for chunk in BATCH * batch..CHUNKS {
            assert!(copying.is_on_record(chunk), "chunk {chunk} after batch {batch}");
        }
        copying.becomes_equal();
        let written = copying.seen().written;
        let again = &written[BATCH * batch..=BATCH * (batch + 1)];
        assert!(again.iter().all(|written| *written > CHUNK), "not written again: {written:?}");
    }
}

#[test]
fn a_flush_of_the_disk_that_fails_leaves_its_batch_marked_and_the_copy_is_not_flushed() {
    for batch in 0..BATCHES {
        let disk = once(OperationKind::Flush, batch, None);
        let mut copying = Copying::new(false, 0, Broken { disk, ..Broken::default() });
        let failed = Err(CopyError::Source(IoError::Device(libc::EIO)));
        assert_eq!(copying.copier.batch(), failed);
        assert_eq!(copying.dirty(), dirty_at(batch), "batch {batch}");
        assert_eq!(copying.seen().copy_flushes.len(), batch);
        copying.becomes_equal();
    }
}

/// The last piece of the first batch fails, which is in flight while the next batch begins.
#[test]
fn a_piece_that_fails_leaves_its_chunk_marked_and_no_other_of_its_batch() {
    let range = Some(FaultRange { offset: BATCH as u64 * CHUNK - 4096, length: 4096 });
    let copy = once(OperationKind::Write, 0, range);
    let mut copying = Copying::new(false, 0, Broken { copy, ..Broken::default() });
    let failed = Err(CopyError::Replica(IoError::Device(libc::EIO)));
    assert_eq!(copying.copier.batch(), failed);
    assert!(copying.is_on_record(BATCH - 1), "the chunk whose piece failed");
    assert!(!copying.is_on_record(0), "a chunk that is durable");
    copying.becomes_equal();
}
