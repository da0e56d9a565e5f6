//! A disk, its replica and the map, each on storage that forgets unflushed data, and a guest that sends random
//! requests, also while a chunk is being copied. One thread does all of it, in an order that the seed decides.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmseal_api::filter::{FilterSpec, ReplicaStatus};
use vmseal_api::id::DiskId;
use vmseal_iofilter::layers;
use vmseal_iofilter::layers::leg::LegChain;
use vmseal_iofilter::layers::replicate::Replicate;
use vmseal_iofilter::layers::replicate::copier::{BatchLimits, Copier};
use vmseal_iofilter::layers::replicate::format::{Geometry, Image};
use vmseal_iofilter::layers::replicate::pipe::DEPTH as PIECES;
use vmseal_iofilter::stack::chain::{Chain, Filter, Io, Limits, Storage};
use vmseal_iofilter::stack::layer::{Layer, Place};
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::{Operation, RequestId};

use crate::platter::{Fault, Platter};
use crate::waiting;

/// Chunks of 16 KiB; the last is not whole.
const SIZE: u64 = (13 << 14) + 4096;
/// Of a disk that grows to that, in its last chunk and beyond.
const SHORT_SIZE: u64 = (8 << 14) + 2048;
const SHIFT: u32 = 14;
const BLOCK: u64 = 512;
const QUEUES: usize = 2;
const DEPTH: usize = 6;

/// The filters that make the disk (as the copier reads it), the replica and the map fail.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    pub source: Vec<FilterSpec>,
    pub replica: Vec<FilterSpec>,
    pub map: Vec<FilterSpec>,
}

pub struct Rig {
    disk: DiskId,
    geometry: Geometry,
    faults: Faults,
    source: Platter,
    replica: Platter,
    map: Platter,
    random: fastrand::Rng,
}

fn filters(specs: &[FilterSpec]) -> Vec<Box<dyn Filter>> {
    specs
        .iter()
        .map(|spec| layers::of(spec).unwrap().filter(&Place::simple(SIZE)).unwrap())
        .collect()
}

impl Rig {
    pub fn new(faults: Faults, mut random: fastrand::Rng) -> Self {
        let disk: DiskId = "01890a5d-ac96-774b-bcce-b302099a8058".parse().unwrap();
        let geometry = Geometry::new(disk, SIZE).with_shift(SHIFT);
        let mut platter = |size| Platter::new(size, BLOCK as usize, Fault::Nothing, random.fork());
        let (source, replica) = (platter(SIZE as usize), platter(SIZE as usize));
        let map = platter(geometry.map_bytes());
        Self { disk, geometry, faults, source, replica, map, random }
    }

    /// The disk is shorter at first: its files are as long as they will be, as a file may be longer than its disk.
    pub fn begin_short(&mut self) {
        self.geometry = Geometry::new(self.disk, SHORT_SIZE).with_shift(SHIFT);
    }

    /// The disk has its whole size from the next process on; returns whether it had not.
    pub fn grow(&mut self) -> bool {
        let before = self.geometry.size();
        self.geometry = Geometry::new(self.disk, SIZE).with_shift(SHIFT);
        before < SIZE
    }

    /// The disk's size.
    pub fn size(&self) -> u64 {
        self.geometry.size()
    }

    /// A process that serves the disk.
    pub fn start(&mut self) -> Guest {
        let (size, map_bytes) = (self.geometry.size(), self.geometry.map_bytes() as u64);
        let map =
            Chain::new(map_bytes, false, filters(&self.faults.map), self.map.queue()).unwrap();
        let (replicate, _) = Replicate::new(self.geometry, LegChain::new(map));
        let chain = |_| {
            let filters = vec![replicate.filter(&Place::simple(size)).unwrap()];
            let chain = Chain::new(size, false, filters, self.source.queue()).unwrap();
            Queue { chain, under_way: HashMap::new() }
        };
        let queues = (0..QUEUES).map(chain).collect();
        let asking = Arc::new(Mutex::new(Asking { size, queues, random: self.random.fork() }));
        let meddler = |filters: Vec<Box<dyn Filter>>, backend: Box<dyn Storage>| {
            let meddler: Box<dyn Filter> = Box::new(Meddler(Arc::clone(&asking)));
            Chain::new(size, false, [vec![meddler], filters].concat_boxes(), backend).unwrap()
        };
        let source = meddler(filters(&self.faults.source), self.source.queue());
        let replica = meddler(filters(&self.faults.replica), self.replica.queue());
        let leg = LegChain::new(replica);
        let copier = if self.random.bool() {
            Copier::new(&replicate, source, None, leg)
        } else {
            // As to a server elsewhere.
            let (chunks, time) = (self.random.usize(1..4), Duration::MAX);
            let limits = BatchLimits { bytes: u64::MAX, chunks, time, overlap: true };
            Copier::in_batches(&replicate, source, None, leg, PIECES, limits)
        };
        Guest { replicate, copier, asking, random: self.random.fork() }
    }

    /// The power fails. No process is left.
    pub fn cut(&self) {
        [&self.source, &self.replica, &self.map].into_iter().for_each(Platter::cut);
    }

    /// The process is killed.
    pub fn kill(&self) {
        [&self.source, &self.replica, &self.map].into_iter().for_each(Platter::kill);
    }

    /// There are no more errors.
    pub fn heal(&mut self) {
        self.faults = Faults::default();
    }

    pub fn is_equal(&self, when: &str) {
        let (source, replica) = (self.source.bytes(), self.replica.bytes());
        let differs = (0..source.len()).find(|at| source[*at] != replica[*at]);
        assert_eq!(differs, None, "{when}: the replica counts as equal and differs");
    }

    /// Checks what the next process would rely on.
    pub fn unmarked_chunks_are_equal(&self) {
        let Ok((image, _)) = Image::read(self.geometry, &self.map.bytes()) else { return };
        let (source, replica) = (self.source.bytes(), self.replica.bytes());
        for chunk in (0..self.geometry.chunks()).filter(|chunk| !image.is_dirty(*chunk)) {
            let (start, end) = self.geometry.range(chunk);
            let range = start as usize..end as usize;
            assert!(source[range.clone()] == replica[range], "chunk {chunk} is stale");
        }
    }
}

/// Puts lists of boxes together.
trait ConcatBoxes {
    fn concat_boxes(self) -> Vec<Box<dyn Filter>>;
}

impl ConcatBoxes for [Vec<Box<dyn Filter>>; 2] {
    fn concat_boxes(self) -> Vec<Box<dyn Filter>> {
        self.into_iter().flatten().collect()
    }
}

struct Queue {
    chain: Chain,
    under_way: HashMap<u64, Vec<u8>>,
}

/// The guest's requests.
struct Asking {
    /// The disk's size.
    size: u64,
    queues: Vec<Queue>,
    random: fastrand::Rng,
}

impl Asking {
    /// Submits a request, or looks for answers.
    fn step(&mut self) {
        let queue = self.random.usize(..QUEUES);
        if self.random.bool() && self.queues[queue].under_way.len() < DEPTH {
            self.ask(queue);
        } else {
            self.poll(queue);
        }
    }

    fn ask(&mut self, queue: usize) {
        let random = &mut self.random;
        let blocks = self.size / BLOCK;
        let first = random.u64(..blocks);
        let most = if random.u8(..8) == 0 { 100 } else { 16 };
        let count = random.u64(1..=most).min(blocks - first);
        let operation = match random.u8(..16) {
            0 => Operation::Flush,
            1 => Operation::Discard,
            2 => Operation::WriteZeroes { unmap: true },
            3 => Operation::WriteZeroes { unmap: false },
            4 => Operation::Read,
            _ => Operation::Write,
        };
        let mut data = vec![random.u8(1..); (count * BLOCK) as usize];
        let tag = random.u64(..);
        let Queue { chain, under_way } = &mut self.queues[queue];
        let id = chain.begin().unwrap();
        // SAFETY: the memory is kept until the answer, or the chain's end; nothing below uses it after.
        chain.data_mut(id).push(unsafe { Segment::new(data.as_mut_ptr(), data.len()) });
        chain.submit(id, operation, first * BLOCK, count * BLOCK, tag);
        under_way.insert(tag, data);
    }

    fn poll(&mut self, queue: usize) {
        let Queue { chain, under_way } = &mut self.queues[queue];
        chain.poll();
        while let Some(done) = chain.next_done() {
            assert_eq!(done.result, Ok(()), "the guest sees an error");
            under_way.remove(&done.tag).expect("one answer");
        }
    }

    fn is_idle(&self) -> bool {
        self.queues.iter().all(|queue| queue.under_way.is_empty())
    }
}

/// Lets the guest work while the copier reads and writes.
struct Meddler(Arc<Mutex<Asking>>);

impl Filter for Meddler {
    fn limits(&self) -> Limits {
        Limits { children: 0 }
    }

    fn prepare(&mut self, _capacity: usize) {}

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        self.meddle();
        io.pass(id);
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        self.meddle();
        io.complete(id, io.request(id).result);
    }

    fn tick(&mut self, _io: &mut Io<'_>) -> Option<Instant> {
        None
    }
}

impl Meddler {
    fn meddle(&self) {
        // Not while the guest itself runs, or has been told to be quiet.
        let Ok(mut asking) = self.0.try_lock() else { return };
        for _ in 0..asking.random.usize(..4) {
            asking.step();
        }
    }
}

/// A process that serves the disk, and its users.
pub struct Guest {
    replicate: Replicate,
    copier: Copier,
    asking: Arc<Mutex<Asking>>,
    random: fastrand::Rng,
}

impl Guest {
    pub fn status(&self) -> ReplicaStatus {
        self.replicate.status()
    }

    pub fn dirty(&self) -> u64 {
        self.status().dirty_bytes
    }

    /// Submits, marks and copies this many times.
    pub fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            match self.random.u8(..16) {
                0 => _ = self.copier.batch(),
                1..=3 => _ = self.replicate.mark_waiting(),
                _ => self.asking.lock().unwrap().step(),
            }
        }
    }

    /// Waits for the requests in flight, submits no more, and copies the marked chunks, as far as possible.
    pub fn settle(&mut self) {
        let asking = Arc::clone(&self.asking);
        let mut quiet = asking.lock().unwrap();
        for _ in 0..10_000 {
            if quiet.is_idle() {
                break;
            }
            let marked = self.replicate.mark_waiting();
            (0..QUEUES).for_each(|queue| quiet.poll(queue));
            // The marker would run here.
            if marked {
                waiting::sleep(quiet.queues.iter_mut().map(|queue| &mut queue.chain));
            }
        }
        assert!(quiet.is_idle(), "requests wait for ever");
        for _ in 0..100 {
            if self.status().dirty_bytes == 0 {
                break;
            }
            let _ = self.copier.batch();
        }
    }
}
