//! A disk whose requests fail while storage does not answer: no write that has failed lands after one that was acknowledged later. Judged by
//! the history of a guest that writes each block again after an error, over storage that answers in any order, or not until later.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmseal_api::filter::{Holes, StallSpec};
use vmseal_history::checker::{End, Finding, History, Read, Write};
use vmseal_history::stamp::{self, Found, Stamp};
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::layers::stall::Stall;
use vmseal_iofilter::stack::chain::{Chain, Io, Storage};
use vmseal_iofilter::stack::layer::Layer;
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::{IoError, Operation, RequestId};
use vmseal_iofilter::storage::mem::MemDisk;
use vmseal_secret::SecretBytes;

use crate::seed::{rounds, seed};

const UNIT: usize = 512;

/// Few units, so that most requests overlap with others.
const UNITS: u64 = 64;

const SIZE: u64 = UNITS * UNIT as u64;

const QUEUES: usize = 3;

/// The most requests of a queue in flight.
const DEPTH: usize = 8;

/// The number of the disk in its stamps.
const DISK: u64 = 0x7374_616c_6c21;

const TIMEOUT: Duration = Duration::from_millis(1);

/// A time that does not pass during a test.
const FAR: Duration = Duration::from_secs(86_400);

/// More passes than any request takes once storage answers.
const PASSES: usize = 10_000;

/// What is stored, and whether some requests are not answered.
struct Inside {
    bytes: Vec<u8>,
    stuck: bool,
    random: fastrand::Rng,
}

impl Inside {
    fn change(&mut self, offset: usize, bytes: &[u8]) {
        self.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

/// Storage of one queue, which carries requests out when it answers them.
struct Late {
    inside: Arc<Mutex<Inside>>,
    /// It fails writes that it does not answer, and carries them out later: as with a time limit below the filter.
    gives_up: bool,
    /// What it has, and whether it answers that only once it is not stuck.
    has: Vec<(RequestId, bool)>,
    /// What it has given up: where, and what.
    given_up: Vec<(usize, Vec<u8>)>,
}

/// What a request writes; none if it writes nothing.
fn written(id: RequestId, io: &Io<'_>) -> Option<Vec<u8>> {
    let request = io.request(id);
    let mut bytes = vec![0; request.length as usize];
    match request.operation {
        Operation::Write => {
            assert_eq!(request.copy_to(0, &mut bytes), bytes.len());
            Some(bytes)
        }
        Operation::WriteZeroes { .. } | Operation::Discard => Some(bytes),
        Operation::Read | Operation::Flush => None,
    }
}

impl Late {
    fn carry_out(inside: &mut Inside, id: RequestId, io: &mut Io<'_>) {
        let (offset, length) = (io.request(id).offset as usize, io.request(id).length as usize);
        if let Some(bytes) = written(id, io) {
            inside.change(offset, &bytes);
        } else if length > 0 {
            let copied = io.request(id).copy_from(0, &inside.bytes[offset..offset + length]);
            assert_eq!(copied, length);
        }
        io.complete(id, Ok(()));
    }
}

impl Storage for Late {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, _io: &mut Io<'_>) {
        let mut inside = self.inside.lock().unwrap();
        let late = inside.stuck && inside.random.bool();
        self.has.push((id, late));
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        let inside = &mut *self.inside.lock().unwrap();
        inside.random.shuffle(&mut self.has);
        for (id, late) in std::mem::take(&mut self.has) {
            let waits = late && inside.stuck;
            let write = if waits && self.gives_up { written(id, io) } else { None };
            if let Some(bytes) = write {
                self.given_up.push((io.request(id).offset as usize, bytes));
                io.complete(id, Err(IoError::Device(libc::EIO)));
            } else if waits || inside.random.u8(..3) == 0 {
                self.has.push((id, late));
            } else {
                Self::carry_out(inside, id, io);
            }
        }
        if !inside.stuck {
            self.given_up.drain(..).for_each(|(offset, bytes)| inside.change(offset, &bytes));
        }
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn works_at_once(&self) -> bool {
        false
    }
}

/// A request that is not answered yet.
enum Asked {
    Write(usize),
    Read { first: u64, asked: u64 },
    Flush,
}

struct Queue {
    chain: Chain,
    /// By the request's number, with its memory.
    under_way: Vec<(u64, Asked, Vec<u8>)>,
}

/// A guest that writes what has failed again. One thread runs all of its queues, in an order that the seed decides.
struct Guest {
    start: Instant,
    inside: Arc<Mutex<Inside>>,
    queues: Vec<Queue>,
    /// What has failed, and is to be written again.
    again: Vec<std::ops::Range<u64>>,
    random: fastrand::Rng,
    last: u64,
    history: History,
    flushed: bool,
}

impl Guest {
    fn new(disk: &Disk, gives_up: bool, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let bytes = vec![0; SIZE as usize];
        let inside = Inside { bytes, stuck: false, random: random.fork() };
        let inside = Arc::new(Mutex::new(inside));
        let queue = |_| {
            let inside = Arc::clone(&inside);
            let storage = Late { inside, gives_up, has: Vec::new(), given_up: Vec::new() };
            let chain = disk.chain_over(Box::new(storage)).unwrap();
            Queue { chain, under_way: Vec::new() }
        };
        let queues = (0..QUEUES).map(queue).collect();
        let start = Instant::now();
        // From now on a request that has begun then is too old.
        while start.elapsed() <= TIMEOUT * 2 {
            std::hint::spin_loop();
        }
        let history = History::new(vec![Found::Zeroes; UNITS as usize]);
        let (again, last, flushed) = (Vec::new(), 0, false);
        Self { start, inside, queues, again, random, last, history, flushed }
    }

    fn stick(&self, stuck: bool) {
        self.inside.lock().unwrap().stuck = stuck;
    }

    fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            if self.random.u8(..40) == 0 {
                let stuck = self.random.bool();
                self.stick(stuck);
            }
            let queue = self.random.usize(..QUEUES);
            if self.random.bool() && self.queues[queue].under_way.len() < DEPTH {
                self.ask(queue);
            } else {
                self.poll(queue);
            }
        }
    }

    fn ask(&mut self, queue: usize) {
        if !self.again.is_empty() && self.random.bool() {
            let failed = self.again.swap_remove(0);
            return self.write(queue, failed, false);
        }
        let first = self.random.u64(..UNITS);
        let range = first..(first + self.random.u64(1..=12)).min(UNITS);
        match self.random.u8(..16) {
            0 => self.submit(queue, Operation::Flush, 0..0, Asked::Flush, Vec::new()),
            1 => self.write(queue, range, true),
            2..=7 => self.read(queue, range),
            _ => self.write(queue, range, false),
        }
    }

    fn write(&mut self, queue: usize, units: std::ops::Range<u64>, zeroes: bool) {
        let asked = self.history.tick();
        let sequence = asked;
        let mut data = Vec::new();
        if !zeroes {
            data = vec![0; (units.end - units.start) as usize * UNIT];
            for (unit, bytes) in units.clone().zip(data.chunks_mut(UNIT)) {
                Stamp { disk: DISK, unit, sequence }.fill(bytes);
            }
        }
        let write = Write { sequence, units: units.clone(), zeroes, asked, end: End::Open };
        self.history.writes.push(write);
        let asked = Asked::Write(self.history.writes.len() - 1);
        let operation =
            if zeroes { Operation::WriteZeroes { unmap: true } } else { Operation::Write };
        self.submit(queue, operation, units, asked, data);
    }

    fn read(&mut self, queue: usize, units: std::ops::Range<u64>) {
        let asked = Asked::Read { first: units.start, asked: self.history.tick() };
        let data = vec![0xee; (units.end - units.start) as usize * UNIT];
        self.submit(queue, Operation::Read, units, asked, data);
    }

    fn submit(
        &mut self,
        queue: usize,
        operation: Operation,
        units: std::ops::Range<u64>,
        asked: Asked,
        mut data: Vec<u8>,
    ) {
        // Only those of which it says so become too old: the seed decides, and not how fast the machine is.
        let too_old = self.random.u8(..24) == 0;
        let began = if too_old { self.start } else { self.start + FAR };
        let Queue { chain, under_way } = &mut self.queues[queue];
        let id = chain.begin().expect("fewer than the limit are in flight");
        // SAFETY: the memory is kept until the answer; nothing below uses it after that.
        chain.data_mut(id).push(unsafe { Segment::new(data.as_mut_ptr(), data.len()) });
        chain.began(id, began);
        let (offset, length) = (units.start, units.end - units.start);
        self.last += 1;
        chain.submit(id, operation, offset * UNIT as u64, length * UNIT as u64, self.last);
        under_way.push((self.last, asked, data));
    }

    fn poll(&mut self, queue: usize) {
        let Self { queues, history, again, flushed, .. } = self;
        let Queue { chain, under_way } = &mut queues[queue];
        chain.poll();
        while let Some(done) = chain.next_done() {
            let is_it = |(number, _, _): &(u64, Asked, Vec<u8>)| *number == done.tag;
            let place = under_way.iter().position(is_it).expect("one answer");
            let (_, asked, data) = under_way.swap_remove(place);
            let now = history.tick();
            match asked {
                Asked::Write(index) if done.result.is_ok() => {
                    history.writes[index].end = End::Done(now);
                }
                Asked::Write(index) => {
                    history.writes[index].end = End::Failed(now);
                    again.push(history.writes[index].units.clone());
                }
                Asked::Read { first, asked } if done.result.is_ok() => {
                    let units = (first..).zip(data.chunks(UNIT));
                    let found = units.map(|(unit, bytes)| stamp::find(bytes, DISK, unit));
                    let found = found.collect();
                    history.reads.push(Read { first, found, asked, done: now });
                }
                Asked::Flush => *flushed = done.result.is_ok(),
                Asked::Read { .. } => {}
            }
        }
    }

    /// Polls until all is answered, also by storage.
    fn drain(&mut self) {
        for _ in 0..PASSES {
            (0..QUEUES).for_each(|queue| self.poll(queue));
            if self.queues.iter().all(|queue| queue.chain.is_idle()) {
                assert!(self.queues.iter().all(|queue| queue.under_way.is_empty()));
                return;
            }
        }
        panic!("storage answers, and the disk is not served");
    }

    /// Storage answers: what has failed is written again, and all is read. Returns what is wrong.
    fn finish(mut self) -> Vec<Finding> {
        self.stick(false);
        self.drain();
        while let Some(failed) = self.again.pop() {
            self.write(0, failed, false);
            self.drain();
        }
        for _ in 0..PASSES {
            self.submit(1, Operation::Flush, 0..0, Asked::Flush, Vec::new());
            self.drain();
            if self.flushed {
                break;
            }
        }
        assert!(self.flushed, "it is flushed no more");
        let before = self.history.reads.len();
        while self.history.reads.len() == before {
            self.read(2, 0..UNITS);
            self.drain();
        }
        assert!(self.queues.iter().all(|queue| queue.chain.forgotten() == 0));
        self.history.check()
    }
}

/// A disk, with these layers above all that it has.
fn disk(holes: Option<Holes>, above: Vec<Arc<dyn Layer>>) -> Disk {
    let mut key: Vec<u8> = (0..64).collect();
    let key = SecretBytes::from_wiped(&mut key).unwrap();
    let encryption = holes.map(|holes| Encryption { key, holes });
    let storage = DiskStorage::Mem(MemDisk::new(0));
    Disk::new(SIZE, false, encryption, storage, QUEUES).with_layers(above, Vec::new())
}

#[test]
fn no_write_that_failed_lands_after_one_that_was_acknowledged_later() {
    let seed = seed();
    let (mut stalls, mut failed) = (0, 0);
    for holes in [None, Some(Holes::Zero)] {
        for round in 0..u64::from(rounds(120)) {
            let milliseconds = TIMEOUT.as_millis() as u64;
            let layer = Stall::new(StallSpec { milliseconds });
            let disk = disk(holes, vec![Arc::new(layer.clone())]);
            let mut guest = Guest::new(&disk, false, seed ^ round);
            guest.run(600);
            let found = guest.finish();
            let first: Vec<_> = found.iter().take(5).collect();
            assert!(first.is_empty(), "{holes:?}, round {round}: {} wrong: {first:?}", found.len());
            assert_eq!(layer.fails_for(), None);
            for (name, count) in layer.counters() {
                *if name == "stalls" { &mut stalls } else { &mut failed } += count;
            }
        }
    }
    println!("{stalls} stalls, {failed} requests failed");
    assert!(stalls > 0 && failed > stalls, "the test proves nothing");
}

/// What a time limit below the filter does, and the reason for it not to be the answer.
#[test]
fn writes_that_storage_gives_up_and_does_later_are_found_out() {
    let disk = disk(None, Vec::new());
    let seed = seed();
    let runs = |round: u64| {
        let mut guest = Guest::new(&disk, true, seed ^ round);
        guest.run(600);
        guest.finish()
    };
    assert!((0..64).any(|round| !runs(round).is_empty()), "nothing is found");
}
