//! A backend that forgets at a power cut everything that was not flushed: of every write that no flush covers, any
//! granules may survive, in any combination. Requests are done in any order, some passes late.
//!
//! It can also misbehave, so that a test can show that the checker notices.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use vmseal_iofilter::stack::chain::{Io, Storage};
use vmseal_iofilter::stack::request::{Operation, RequestId};
use vmseal_iofilter::stack::stop::Stop;

/// Its fault.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    Nothing,
    /// Flushes are answered and not done.
    IgnoresFlushes,
    /// A flush leaves out the last write that it covers.
    FlushesAllButOne,
    /// Some writes are answered and not done.
    Loses,
    /// Some old writes are done again.
    Repeats,
    /// Of some writes half of a sector is written.
    Tears,
    /// Some writes go one sector too far.
    Misplaces,
    /// Some reads return older content.
    ReadsTheOld,
}

struct Cached {
    /// When it was done; none while it is in flight.
    done: Option<u64>,
    key: u64,
    offset: usize,
    bytes: Vec<u8>,
}

struct Inside {
    granule: usize,
    fault: Fault,
    random: fastrand::Rng,
    /// The content that is certain to survive a power cut.
    durable: Vec<u8>,
    visible: Vec<u8>,
    /// The content of some time ago, for faults.
    old: Vec<u8>,
    cached: Vec<Cached>,
    clock: u64,
}

/// The disk, shared by its queues.
#[derive(Clone)]
pub struct Platter(Arc<Mutex<Inside>>);

impl Platter {
    /// A disk of zeroes; `granule` bytes are written whole or not at all.
    pub fn new(size: usize, granule: usize, fault: Fault, random: fastrand::Rng) -> Self {
        let (zeroes, cached) = (|| vec![0; size], Vec::new());
        let (durable, visible, old) = (zeroes(), zeroes(), zeroes());
        let clock = 0;
        let inside = Inside { granule, fault, random, durable, visible, old, cached, clock };
        Self(Arc::new(Mutex::new(inside)))
    }

    pub fn queue(&self) -> Box<dyn Storage> {
        self.queue_at(0)
    }

    /// A queue whose disk begins here, in bytes.
    pub fn queue_at(&self, offset: usize) -> Box<dyn Storage> {
        let awake = Stop::new().unwrap();
        awake.ask();
        Box::new(Queue { platter: self.clone(), offset, waiting: Vec::new(), awake })
    }

    /// The power fails. The queues so far must not be used any more.
    pub fn cut(&self) {
        let inside = &mut *self.inside();
        for write in std::mem::take(&mut inside.cached) {
            let granules = write.bytes.chunks(inside.granule).enumerate();
            for (index, granule) in granules {
                if inside.random.bool() {
                    let at = write.offset + index * inside.granule;
                    inside.durable[at..at + granule.len()].copy_from_slice(granule);
                }
            }
        }
        inside.visible.clone_from(&inside.durable);
    }

    /// The process is killed: each write in flight was done or will never be.
    pub fn kill(&self) {
        let inside = &mut *self.inside();
        let under_way = |write: &&Cached| write.done.is_none();
        let keys =
            inside.cached.iter().filter(under_way).map(|write| (write.key, write.bytes.clone()));
        for (key, bytes) in keys.collect::<Vec<_>>() {
            if inside.random.bool() {
                inside.write(key, bytes);
            } else {
                inside.cached.retain(|write| write.key != key);
            }
        }
    }

    /// The content that a read returns.
    pub fn bytes(&self) -> Vec<u8> {
        self.inside().visible.clone()
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().unwrap()
    }
}

impl Inside {
    fn strikes(&mut self, fault: Fault) -> bool {
        self.fault == fault && self.random.u8(..16) == 0
    }

    fn write(&mut self, key: u64, bytes: Vec<u8>) {
        self.clock += 1;
        let Some(write) = self.cached.iter_mut().find(|write| write.key == key) else { return };
        (write.done, write.bytes) = (Some(self.clock), bytes);
        let (mut at, mut bytes) = (write.offset, write.bytes.clone());
        if self.random.u8(..8) == 0 {
            self.old.clone_from(&self.visible);
        }
        if self.strikes(Fault::Loses) {
            return;
        }
        if self.strikes(Fault::Tears) {
            bytes.truncate(bytes.len() - self.granule / 2);
        }
        if self.strikes(Fault::Misplaces) {
            at = (at + self.granule).min(self.visible.len() - bytes.len());
        }
        self.visible[at..at + bytes.len()].copy_from_slice(&bytes);
        if self.strikes(Fault::Repeats) {
            let again = self.random.usize(..self.cached.len());
            let Cached { offset, bytes, .. } = &self.cached[again];
            self.visible[*offset..offset + bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Makes durable what was done before `until`.
    fn flush(&mut self, until: u64) {
        if self.fault == Fault::IgnoresFlushes {
            return;
        }
        let covered = |write: &mut Cached| write.done.is_some_and(|done| done <= until);
        let mut covered: Vec<_> = self.cached.extract_if(.., covered).collect();
        covered.sort_by_key(|write| write.done);
        if self.fault == Fault::FlushesAllButOne {
            covered.pop();
        }
        for Cached { offset, bytes, .. } in covered {
            self.durable[offset..offset + bytes.len()].copy_from_slice(&bytes);
        }
    }
}

struct Waiting {
    id: RequestId,
    /// The time of the last write that was done before this request was submitted.
    since: u64,
    /// The index of its write among the cached ones.
    key: u64,
}

struct Queue {
    platter: Platter,
    offset: usize,
    waiting: Vec<Waiting>,
    /// Always readable: a caller that waits for a request checks again.
    awake: Stop,
}

/// The change that a request makes to the disk.
fn written(id: RequestId, io: &Io<'_>) -> Option<Vec<u8>> {
    let request = io.request(id);
    let mut bytes = vec![0; request.length as usize];
    match request.operation {
        Operation::Write => {
            request.copy_to(0, &mut bytes);
        }
        Operation::Discard | Operation::WriteZeroes { .. } => {}
        Operation::Read | Operation::Flush => return None,
    }
    Some(bytes)
}

impl Storage for Queue {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        let inside = &mut *self.platter.inside();
        let key = inside.random.u64(..);
        if let Some(bytes) = written(id, io) {
            let offset = self.offset + io.request(id).offset as usize;
            inside.cached.push(Cached { done: None, key, offset, bytes });
        }
        self.waiting.push(Waiting { id, since: inside.clock, key });
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        let inside = &mut *self.platter.inside();
        inside.random.shuffle(&mut self.waiting);
        let keep = inside.random.usize(..=self.waiting.len());
        for Waiting { id, since, key } in self.waiting.drain(keep..) {
            let request = io.request(id);
            match request.operation {
                Operation::Flush => inside.flush(since),
                Operation::Read => {
                    let old = inside.strikes(Fault::ReadsTheOld);
                    let from = if old { &inside.old } else { &inside.visible };
                    let start = self.offset + request.offset as usize;
                    let range = start..start + request.length as usize;
                    request.copy_from(0, &from[range]);
                }
                _ => inside.write(key, written(id, io).unwrap()),
            }
            io.complete(id, Ok(()));
        }
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        Some(self.awake.event())
    }
}
