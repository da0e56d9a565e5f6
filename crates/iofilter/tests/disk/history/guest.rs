//! A guest that sends random requests to several queues of a disk, all at once, and keeps the history. One thread
//! runs all queues, in an order that the seed decides.

use std::collections::HashMap;

use vmseal_iofilter::disk::Disk;
use vmseal_iofilter::stack::chain::{Chain, Storage};
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::Operation;

use crate::history::checker::{End, Finding, History, Read, Write};
use crate::history::stamp::{self, Found, Stamp};
use crate::platter::Platter;
use crate::waiting;

/// How many queues.
pub const QUEUES: usize = 3;

/// The most requests of a queue in flight.
const DEPTH: usize = 12;

/// The number of the disk in its stamps.
const DISK: u64 = 0x7665_7269_6679;

/// A request that is not answered yet, with its memory.
enum Asked {
    Write(usize),
    Read { first: u64, asked: u64 },
    Flush { asked: u64 },
}

struct Queue {
    chain: Chain,
    under_way: HashMap<u64, (Asked, Vec<u8>)>,
}

/// Storage that forgets at a power cut what was not flushed.
pub trait Forgets {
    fn queue(&mut self) -> Box<dyn Storage>;

    /// The power fails. The queues so far must not be used any more.
    fn cut(&mut self);
}

impl Forgets for Platter {
    fn queue(&mut self) -> Box<dyn Storage> {
        Self::queue(self)
    }

    fn cut(&mut self) {
        Self::cut(self);
    }
}

pub struct Guest<'a> {
    disk: &'a dyn Fn() -> Disk,
    storage: &'a mut dyn Forgets,
    queues: Vec<Queue>,
    unit: usize,
    random: fastrand::Rng,
    sequence: u64,
    pub history: History,
}

impl<'a> Guest<'a> {
    /// A guest of the disk that `disk` makes over `storage`, which reads as zeroes.
    pub fn new(
        disk: &'a dyn Fn() -> Disk,
        storage: &'a mut dyn Forgets,
        unit: usize,
        random: fastrand::Rng,
    ) -> Self {
        let units = disk().size() as usize / unit;
        let history = History::new(vec![Found::Zeroes; units]);
        let queues = Vec::new();
        let mut guest = Self { disk, storage, queues, unit, random, sequence: 1, history };
        guest.begin();
        guest
    }

    fn begin(&mut self) {
        let disk = (self.disk)();
        let storage = &mut *self.storage;
        let chain = |_| disk.chain_over(storage.queue()).unwrap();
        let queue = |chain| Queue { chain, under_way: HashMap::new() };
        self.queues = (0..QUEUES).map(chain).map(queue).collect();
    }

    /// Submits and polls this many times.
    pub fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            let queue = self.random.usize(..QUEUES);
            if self.random.u8(..3) > 0 && self.queues[queue].under_way.len() < DEPTH {
                self.ask(queue);
            } else {
                self.poll(queue);
            }
        }
    }

    /// Waits until all requests are answered, and reads everything.
    pub fn finish(&mut self) {
        self.drain();
        let units = self.history.start.len() as u64;
        self.read(0, 0..units);
        self.drain();
    }

    /// The power fails with requests in flight; the disk's content then begins a new history. Returns
    /// what is wrong with the old one.
    pub fn lose_power(&mut self) -> Vec<Finding> {
        self.storage.cut();
        self.queues.clear();
        self.begin();
        let units = self.history.start.len() as u64;
        let before = std::mem::replace(&mut self.history, History::new(Vec::new()));
        self.read(0, 0..units);
        self.drain();
        let after = std::mem::take(&mut self.history.reads[0].found);
        self.history = History::new(after.clone());
        [before.check(), before.check_cut(&after)].concat()
    }

    /// Writes every unit, durably: no hole is left.
    pub fn fill(&mut self) {
        let units = self.history.start.len() as u64;
        for first in (0..units).step_by(64) {
            self.write(0, first..(first + 64).min(units));
            self.drain();
        }
        self.flush(0);
        self.drain();
    }

    fn drain(&mut self) {
        while self.queues.iter().any(|queue| !queue.under_way.is_empty()) {
            (0..QUEUES).for_each(|queue| self.poll(queue));
            waiting::sleep(self.queues.iter_mut().map(|queue| &mut queue.chain));
        }
    }

    fn ask(&mut self, queue: usize) {
        let units = self.history.start.len() as u64;
        let most = if self.random.u8(..8) == 0 { 150 } else { 20 };
        let first = self.random.u64(..units);
        let range = first..(first + self.random.u64(1..=most)).min(units);
        match self.random.u8(..32) {
            0..=2 => self.flush(queue),
            3 => self.zero(queue, range, Operation::Discard),
            4 => self.zero(queue, range, Operation::WriteZeroes { unmap: true }),
            5 => self.zero(queue, range, Operation::WriteZeroes { unmap: false }),
            6..=15 => self.read(queue, range),
            _ => self.write(queue, range),
        }
    }

    fn note(&mut self, units: std::ops::Range<u64>, zeroes: bool) -> (Asked, u64) {
        let (asked, sequence) = (self.history.tick(), self.sequence);
        self.sequence += 1;
        self.history.writes.push(Write { sequence, units, zeroes, asked, end: End::Open });
        (Asked::Write(self.history.writes.len() - 1), sequence)
    }

    fn write(&mut self, queue: usize, units: std::ops::Range<u64>) {
        let (asked, sequence) = self.note(units.clone(), false);
        let mut data = vec![0; (units.end - units.start) as usize * self.unit];
        for (unit, bytes) in units.clone().zip(data.chunks_mut(self.unit)) {
            Stamp { disk: DISK, unit, sequence }.fill(bytes);
        }
        self.submit(queue, Operation::Write, units, asked, data);
    }

    fn zero(&mut self, queue: usize, units: std::ops::Range<u64>, operation: Operation) {
        let (asked, _) = self.note(units.clone(), true);
        self.submit(queue, operation, units, asked, Vec::new());
    }

    fn read(&mut self, queue: usize, units: std::ops::Range<u64>) {
        let asked = Asked::Read { first: units.start, asked: self.history.tick() };
        let data = vec![0xee; (units.end - units.start) as usize * self.unit];
        self.submit(queue, Operation::Read, units, asked, data);
    }

    fn flush(&mut self, queue: usize) {
        let asked = Asked::Flush { asked: self.history.tick() };
        self.submit(queue, Operation::Flush, 0..0, asked, Vec::new());
    }

    fn submit(
        &mut self,
        queue: usize,
        operation: Operation,
        units: std::ops::Range<u64>,
        asked: Asked,
        mut data: Vec<u8>,
    ) {
        let Queue { chain, under_way } = &mut self.queues[queue];
        let id = chain.begin().expect("fewer than the limit are in flight");
        // SAFETY: the memory is kept until the answer, or the chain's end; nothing below uses it after.
        chain.data_mut(id).push(unsafe { Segment::new(data.as_mut_ptr(), data.len()) });
        let (offset, length) = (units.start, units.end - units.start);
        let (offset, length) = (offset * self.unit as u64, length * self.unit as u64);
        let tag = self.random.u64(..);
        chain.submit(id, operation, offset, length, tag);
        under_way.insert(tag, (asked, data));
    }

    fn poll(&mut self, queue: usize) {
        self.queues[queue].chain.poll();
        while let Some(done) = self.queues[queue].chain.next_done() {
            let (asked, data) = self.queues[queue].under_way.remove(&done.tag).expect("one answer");
            let now = self.history.tick();
            match asked {
                Asked::Write(index) => {
                    let write = &mut self.history.writes[index];
                    // A discard is a hint: each unit is zeroes then, or what it was.
                    let sure = done.result.is_ok() && done.operation != Operation::Discard;
                    write.end = if sure { End::Done(now) } else { End::Failed(now) };
                }
                Asked::Flush { asked } if done.result.is_ok() => self.history.flushes.push(asked),
                Asked::Read { first, asked } if done.result.is_ok() => {
                    let units = (first..).zip(data.chunks(self.unit));
                    let found = units.map(|(unit, bytes)| stamp::find(bytes, DISK, unit));
                    let found = found.collect();
                    self.history.reads.push(Read { first, found, asked, done: now });
                }
                Asked::Flush { .. } | Asked::Read { .. } => {}
            }
        }
    }
}
