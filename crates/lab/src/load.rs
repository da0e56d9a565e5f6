//! Workloads, and the loop that drives one through an [`Initiator`] and measures it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use vmseal_initiator::{Completion, Initiator, InitiatorError, Operation, STALL};

use crate::clock::{self, ProcessClock};
use crate::pattern::Pattern;
use crate::stop::{self, LOOK_EVERY, Stopped};
use crate::system_error::SystemError;

/// Latencies are recorded from 1 ns to a minute with two significant digits: finer than the noise of a run.
const LATENCY_MAX: u64 = 60_000_000_000;
const LATENCY_DIGITS: u8 = 2;

/// The order in which blocks are accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Uniformly at random.
    Random,
    /// One after the other, and again from the start.
    Sequential,
}

/// What the requests do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Only reads.
    Read,
    /// Only writes.
    Write,
    /// So many of 100 are reads, and the others writes; which ones is chosen at random.
    #[serde(rename = "reads")]
    Mixed(u8),
}

/// One kind of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Workload {
    /// Its name in goals and results.
    pub id: &'static str,
    /// The order in which blocks are accessed.
    pub order: Order,
    /// What the requests do.
    pub direction: Direction,
    /// Bytes of a request.
    pub block: u32,
    /// Requests in flight.
    pub depth: u16,
}

/// How long to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// For a time, after a warm-up.
    Time {
        /// The warm-up: caches fill, a polling server notices that there is work.
        warm_up: Duration,
        /// The measured time.
        measured: Duration,
    },
    /// For this many requests; all count.
    Requests(u64),
}

/// The results.
#[derive(Clone, Debug)]
pub struct LoadResult {
    /// Requests completed within the measured time.
    pub requests: u64,
    /// The measured time.
    pub elapsed: Duration,
    /// CPU time of the server within it.
    pub server: Duration,
    /// CPU time of the storage below the server within it, where its processes are known.
    pub storage: Duration,
    /// CPU time of this process within it.
    pub client: Duration,
    /// CPU time of everything else on the machine within it, in ticks of 10 ms.
    pub others: Duration,
    /// Latencies in nanoseconds, from submitting to reaping.
    pub latency: Histogram<u64>,
    /// The same, reads and writes apart.
    pub apart: Latencies,
    /// The times in which no request ended; of several disks, of each.
    pub gaps: Gaps,
}

/// Latencies in nanoseconds, of reads and of writes.
#[derive(Clone, Debug)]
pub struct Latencies {
    /// Of reads.
    pub reads: Histogram<u64>,
    /// Of writes.
    pub writes: Histogram<u64>,
}

impl Latencies {
    fn new() -> Self {
        Self { reads: latencies(), writes: latencies() }
    }

    fn record(&mut self, operation: Operation, took: Duration) {
        let of = match operation {
            Operation::Read => &mut self.reads,
            Operation::Write | Operation::Flush => &mut self.writes,
        };
        of.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    fn add(&mut self, other: &Self) {
        add(&mut self.reads, &other.reads);
        add(&mut self.writes, &other.writes);
    }

    fn reset(&mut self) {
        self.reads.reset();
        self.writes.reset();
    }

    /// Of both together.
    #[must_use]
    pub fn all(&self) -> Histogram<u64> {
        let mut all = self.reads.clone();
        add(&mut all, &self.writes);
        all
    }
}

fn add(to: &mut Histogram<u64>, more: &Histogram<u64>) {
    to.add(more).expect("all have the same bounds");
}

/// The shortest time without the end of a request that is kept.
const GAP_MIN: Duration = Duration::from_micros(100);

/// How many of them are kept: some seconds of a load that has one after the other.
const GAPS_MAX: usize = 100_000;

/// Times in which no request ended, of [`GAP_MIN`] or longer.
#[derive(Clone, Debug, Default)]
pub struct Gaps(Vec<(Instant, Instant)>);

impl Gaps {
    fn add(&mut self, from: Instant, to: Instant) {
        if to - from >= GAP_MIN && self.0.len() < GAPS_MAX {
            self.0.push((from, to));
        }
    }

    /// The longest; where a time is given, of those that overlap with it.
    #[must_use]
    pub fn longest(&self, within: Option<(Instant, Instant)>) -> Duration {
        let overlaps =
            |gap: &&(Instant, Instant)| within.is_none_or(|(from, to)| gap.0 < to && from < gap.1);
        let lengths = self.0.iter().filter(overlaps).map(|(from, to)| *to - *from);
        lengths.max().unwrap_or(GAP_MIN)
    }
}

/// An empty histogram of latencies.
#[must_use]
pub fn latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LATENCY_MAX, LATENCY_DIGITS).expect("the bounds are constants")
}

/// Why a load ended early.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A signal has asked for the end.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// The server violates the protocol, or is gone.
    #[error(transparent)]
    Initiator(#[from] InitiatorError),
    /// A request failed.
    #[error("the server answered a request ({operation:?}) at byte {offset} with status {status}")]
    Request {
        /// The operation.
        operation: Operation,
        /// The offset on the disk, in bytes.
        offset: u64,
        /// VIRTIO_BLK_S_IOERR (1), VIRTIO_BLK_S_UNSUPP (2), or 255 if none was written; over NBD its error.
        status: u8,
    },
    /// A read returned other data than was written there.
    #[error("the disk does not hold at byte {at} what was written there")]
    Mismatch {
        /// The offset of the first wrong word on the disk, in bytes.
        at: u64,
    },
    /// The disk is smaller than one block.
    #[error("the disk of {capacity} bytes is smaller than one block of {block}")]
    TooSmall {
        /// The disk's size.
        capacity: u64,
        /// The workload's block.
        block: u32,
    },
    /// A neighbour cannot be started.
    #[error("a CPU-bound neighbour cannot be started")]
    Neighbour(#[source] io::Error),
    /// What is done with the disk meanwhile was not done.
    #[error("what is done with the disk beside the load failed")]
    Beside(#[source] Box<SystemError>),
    /// CPU clocks cannot be read.
    #[error("the CPU time of the server (process ended?) or of this machine cannot be read")]
    Clock(#[source] io::Error),
}

/// Drives `workload` until `extent` is done. With a `pattern`, writes contain it and reads are compared with
/// it, at some cost for the calling thread.
///
/// # Errors
/// [`LoadError`]; the first one ends the load.
pub fn run(
    initiator: &mut dyn Initiator,
    workload: &Workload,
    extent: Extent,
    pattern: Option<Pattern>,
    server: &ProcessClock,
    seed: u64,
) -> Result<LoadResult, LoadError> {
    let mut load = Load::new(initiator, workload, extent, pattern, seed)?;
    load.prime()?;
    let begin = load.warm_up()?;
    let start = Reading::now(server)?;
    load.measure(begin)?;
    let end = Reading::now(server)?;
    let latencies = (load.latency.clone(), std::mem::take(&mut load.gaps));
    let measured = LoadResult::between(&start, &end, load.completed, latencies);
    load.drain()?;
    Ok(measured)
}

/// Drives `workload` on several disks of one server at a time, each from its own thread, and returns what all
/// of them did between two moments.
///
/// # Errors
/// [`LoadError`]; a disk that fails does not stop the others.
pub fn run_side_by_side(
    initiators: &mut [Box<dyn Initiator>],
    workload: &Workload,
    (warm_up, measured): (Duration, Duration),
    pattern: Option<Pattern>,
    server: &ProcessClock,
    seed: u64,
) -> Result<LoadResult, LoadError> {
    let signals = Signals::default();
    let done: Vec<AtomicU64> = initiators.iter().map(|_| AtomicU64::new(0)).collect();
    let all_done = || done.iter().map(|done| done.load(Ordering::Relaxed)).sum::<u64>();
    std::thread::scope(|scope| {
        let signals = &signals;
        let threads: Vec<_> = initiators
            .iter_mut()
            .zip(&done)
            .zip(seed..)
            .map(|((initiator, done), seed)| {
                scope.spawn(move || {
                    drive(initiator.as_mut(), workload, pattern, seed, signals, done)
                })
            })
            .collect();
        stop::sleep(warm_up);
        let (start, before) = (Reading::now(server), all_done());
        signals.measuring.store(true, Ordering::Relaxed);
        stop::sleep(measured);
        let (end, after) = (Reading::now(server), all_done());
        signals.over.store(true, Ordering::Relaxed);
        let (mut latency, mut all) = (Latencies::new(), Gaps::default());
        for thread in threads {
            let (times, gaps) = thread.join().expect("a load does not panic")?;
            latency.add(&times);
            all.0.extend(gaps.0);
        }
        Ok(LoadResult::between(&start?, &end?, after - before, (latency, all)))
    })
}

/// Signals for the threads of several disks. No other data depends on it, so no memory ordering is needed.
#[derive(Default)]
struct Signals {
    measuring: AtomicBool,
    over: AtomicBool,
}

/// One disk's part: returns the latencies while all were measured. `done` is read by the main thread together
/// with the clocks, so that it does not matter when this thread notices the beginning or the end.
fn drive(
    initiator: &mut dyn Initiator,
    workload: &Workload,
    pattern: Option<Pattern>,
    seed: u64,
    signals: &Signals,
    done: &AtomicU64,
) -> Result<(Latencies, Gaps), LoadError> {
    let extent = Extent::Time { warm_up: Duration::ZERO, measured: Duration::MAX };
    let mut load = Load::new(initiator, workload, extent, pattern, seed)?;
    load.prime()?;
    for signal in [&signals.measuring, &signals.over] {
        load.begin_anew();
        while !signal.load(Ordering::Relaxed) {
            load.turn()?;
            done.store(load.completed, Ordering::Relaxed);
        }
    }
    let measured = (load.latency.clone(), std::mem::take(&mut load.gaps));
    load.drain()?;
    Ok(measured)
}

/// The clocks at one moment.
struct Reading {
    wall: Instant,
    server: Duration,
    storage: Duration,
    client: Duration,
    machine: Duration,
}

impl Reading {
    fn now(server: &ProcessClock) -> Result<Self, LoadError> {
        Ok(Self {
            wall: Instant::now(),
            server: server.read().map_err(LoadError::Clock)?,
            storage: server.read_storage().map_err(LoadError::Clock)?,
            client: clock::own().map_err(LoadError::Clock)?,
            machine: clock::machine().map_err(LoadError::Clock)?,
        })
    }
}

impl LoadResult {
    fn between(
        start: &Reading,
        end: &Reading,
        requests: u64,
        (apart, gaps): (Latencies, Gaps),
    ) -> Self {
        let server = end.server.saturating_sub(start.server);
        let storage = end.storage.saturating_sub(start.storage);
        let client = end.client.saturating_sub(start.client);
        let machine = end.machine.saturating_sub(start.machine);
        Self {
            requests,
            elapsed: end.wall - start.wall,
            server,
            storage,
            client,
            others: machine.saturating_sub(server + storage + client),
            latency: apart.all(),
            apart,
            gaps,
        }
    }
}

/// The state of a slot.
#[derive(Clone, Copy)]
struct Request {
    operation: Operation,
    offset: u64,
    submitted: Instant,
}

struct Load<'a> {
    initiator: &'a mut dyn Initiator,
    workload: Workload,
    extent: Extent,
    pattern: Option<Pattern>,
    blocks: u64,
    next_block: u64,
    random: fastrand::Rng,
    slots: Vec<Option<Request>>,
    in_flight: usize,
    submitted: u64,
    completed: u64,
    latency: Latencies,
    gaps: Gaps,
    /// When a request ended last.
    last: Instant,
    completions: Vec<Completion>,
    scratch: Vec<u8>,
}

impl<'a> Load<'a> {
    fn new(
        initiator: &'a mut dyn Initiator,
        workload: &Workload,
        extent: Extent,
        pattern: Option<Pattern>,
        seed: u64,
    ) -> Result<Self, LoadError> {
        let (capacity, block) = (initiator.capacity(), workload.block);
        let blocks = capacity / u64::from(block);
        if blocks == 0 {
            return Err(LoadError::TooSmall { capacity, block });
        }
        let depth = usize::from(workload.depth.min(initiator.depth()));
        let latency = Latencies::new();
        Ok(Self {
            initiator,
            workload: *workload,
            extent,
            pattern,
            blocks,
            next_block: 0,
            random: fastrand::Rng::with_seed(seed),
            slots: vec![None; depth],
            in_flight: 0,
            submitted: 0,
            completed: 0,
            latency,
            gaps: Gaps::default(),
            last: Instant::now(),
            completions: Vec::with_capacity(depth),
            scratch: vec![0; block as usize],
        })
    }

    /// Fills the queue. Buffers of a load without a pattern keep one content that is not constant, as a
    /// server might treat constant data specially; those of a mixed load write what was last read into them.
    fn prime(&mut self) -> Result<(), LoadError> {
        let slots = 0..self.slots.len() as u16;
        for slot in slots.clone() {
            Pattern::new(u64::from(slot)).fill(0, &mut self.scratch);
            self.initiator.fill(slot, &self.scratch);
        }
        let now = Instant::now();
        for slot in slots {
            self.submit(slot, now);
        }
        Ok(self.initiator.publish()?)
    }

    /// Of a load of one direction no random number is taken: its offsets are those that it always had.
    fn next_operation(&mut self) -> Operation {
        match self.workload.direction {
            Direction::Read => Operation::Read,
            Direction::Write => Operation::Write,
            Direction::Mixed(reads) => match self.random.u8(..100) < reads {
                true => Operation::Read,
                false => Operation::Write,
            },
        }
    }

    fn next_offset(&mut self) -> u64 {
        let block = match self.workload.order {
            Order::Random => self.random.u64(..self.blocks),
            Order::Sequential => {
                let block = self.next_block;
                self.next_block = (block + 1) % self.blocks;
                block
            }
        };
        block * u64::from(self.workload.block)
    }

    /// Submits the next request unless all requested ones are submitted.
    fn submit(&mut self, slot: u16, now: Instant) {
        if matches!(self.extent, Extent::Requests(count) if self.submitted == count) {
            return;
        }
        let (offset, operation) = (self.next_offset(), self.next_operation());
        if let (Some(pattern), Operation::Write) = (self.pattern, operation) {
            pattern.fill(offset, &mut self.scratch);
            self.initiator.fill(slot, &self.scratch);
        }
        self.initiator.submit(slot, operation, offset, self.workload.block);
        self.slots[usize::from(slot)] = Some(Request { operation, offset, submitted: now });
        self.in_flight += 1;
        self.submitted += 1;
    }

    /// Waits for at least one completion and checks all that have arrived; returns the time.
    fn reap(&mut self) -> Result<Instant, LoadError> {
        self.completions.clear();
        loop {
            self.initiator.reap(&mut self.completions)?;
            if !self.completions.is_empty() {
                break;
            }
            match self.initiator.wait_for(LOOK_EVERY) {
                Err(InitiatorError::Stalled) if self.last.elapsed() < STALL => stop::check()?,
                waited => waited?,
            }
        }
        let now = Instant::now();
        self.gaps.add(self.last, now);
        self.last = now;
        for i in 0..self.completions.len() {
            self.check(self.completions[i], now)?;
        }
        Ok(now)
    }

    fn check(&mut self, completion: Completion, now: Instant) -> Result<(), LoadError> {
        let Completion { slot, status } = completion;
        let request = self.slots[usize::from(slot)].take();
        let request = request.ok_or(InitiatorError::NotInFlight { id: slot.into() })?;
        self.in_flight -= 1;
        self.completed += 1;
        let Request { operation, offset, submitted } = request;
        self.latency.record(operation, now.duration_since(submitted));
        if status != 0 {
            return Err(LoadError::Request { operation, offset, status });
        }
        if let (Some(pattern), Operation::Read) = (self.pattern, operation) {
            self.initiator.copy(slot, &mut self.scratch);
            if let Some(at) = pattern.mismatch(offset, &self.scratch) {
                return Err(LoadError::Mismatch { at });
            }
        }
        Ok(())
    }

    /// One pass: completed requests are replaced by new ones.
    fn turn(&mut self) -> Result<Instant, LoadError> {
        let now = self.reap()?;
        for i in 0..self.completions.len() {
            self.submit(self.completions[i].slot, now);
        }
        self.initiator.publish()?;
        Ok(now)
    }

    /// What was measured does not count when the end was asked for.
    fn turn_until(&mut self, moment: Instant) -> Result<(), LoadError> {
        while self.turn()? < moment && !stop::asked() {}
        Ok(())
    }

    /// What was measured so far does not count.
    fn begin_anew(&mut self) {
        self.latency.reset();
        self.gaps = Gaps::default();
    }

    fn warm_up(&mut self) -> Result<Instant, LoadError> {
        if let Extent::Time { warm_up, .. } = self.extent {
            self.turn_until(Instant::now() + warm_up)?;
            self.begin_anew();
            self.completed = 0;
        }
        Ok(Instant::now())
    }

    fn measure(&mut self, begin: Instant) -> Result<(), LoadError> {
        match self.extent {
            Extent::Time { measured, .. } => self.turn_until(begin + measured)?,
            Extent::Requests(_) => {
                while self.in_flight > 0 {
                    self.turn()?;
                    stop::check()?;
                }
            }
        }
        Ok(())
    }

    fn drain(&mut self) -> Result<(), LoadError> {
        while self.in_flight > 0 {
            self.reap()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u32 = 512;
    const BLOCKS: u64 = 64;

    fn pattern() -> Pattern {
        Pattern::new(7)
    }

    /// A disk in memory whose requests end when they are reaped.
    struct Disk {
        content: Vec<u8>,
        buffers: Vec<Vec<u8>>,
        submitted: Vec<(u16, Operation, u64)>,
        /// All requests, in their order.
        seen: Vec<(Operation, u64)>,
    }

    impl Disk {
        fn new(depth: usize) -> Self {
            let mut content = vec![0; (BLOCKS * u64::from(BLOCK)) as usize];
            pattern().fill(0, &mut content);
            let buffers = vec![vec![0; BLOCK as usize]; depth];
            Self { content, buffers, submitted: Vec::new(), seen: Vec::new() }
        }

        fn run(&mut self, direction: Direction, seed: u64) -> Result<LoadResult, LoadError> {
            let depth = self.buffers.len() as u16;
            let workload =
                Workload { id: "w", order: Order::Random, direction, block: BLOCK, depth };
            let own = ProcessClock::of(std::process::id()).unwrap();
            run(self, &workload, Extent::Requests(1000), Some(pattern()), &own, seed)
        }

        fn reads(&self) -> usize {
            self.seen.iter().filter(|(operation, _)| *operation == Operation::Read).count()
        }
    }

    impl Initiator for Disk {
        fn capacity(&self) -> u64 {
            self.content.len() as u64
        }

        fn depth(&self) -> u16 {
            self.buffers.len() as u16
        }

        fn fill(&mut self, slot: u16, bytes: &[u8]) {
            self.buffers[usize::from(slot)].copy_from_slice(bytes);
        }

        fn copy(&self, slot: u16, bytes: &mut [u8]) {
            bytes.copy_from_slice(&self.buffers[usize::from(slot)]);
        }

        fn submit(&mut self, slot: u16, operation: Operation, offset: u64, length: u32) {
            assert_eq!(length, BLOCK);
            self.submitted.push((slot, operation, offset));
            self.seen.push((operation, offset));
        }

        fn publish(&mut self) -> Result<(), InitiatorError> {
            Ok(())
        }

        fn reap(&mut self, completions: &mut Vec<Completion>) -> Result<(), InitiatorError> {
            for (slot, operation, offset) in self.submitted.drain(..) {
                let at = offset as usize..offset as usize + BLOCK as usize;
                let buffer = &mut self.buffers[usize::from(slot)];
                match operation {
                    Operation::Read => buffer.copy_from_slice(&self.content[at]),
                    Operation::Write => self.content[at].copy_from_slice(buffer),
                    Operation::Flush => {}
                }
                completions.push(Completion { slot, status: 0 });
            }
            Ok(())
        }

        fn wait_for(&mut self, _limit: Duration) -> Result<(), InitiatorError> {
            Err(InitiatorError::Stalled)
        }
    }

    #[test]
    fn a_mixed_load_has_as_many_reads_as_it_says_and_tells_them_from_writes() {
        for percent in [20, 70] {
            let mut disk = Disk::new(2);
            let measured = disk.run(Direction::Mixed(percent), 1).unwrap();
            let reads = disk.reads();
            // Five standard deviations of 1000 draws are 73 at most.
            assert!(reads.abs_diff(usize::from(percent) * 10) < 75, "{reads} at {percent} %");
            assert_eq!(measured.apart.reads.len(), reads as u64);
            assert_eq!(measured.apart.writes.len(), 1000 - reads as u64);
            assert_eq!((measured.requests, measured.latency.len()), (1000, 1000));
        }
    }

    #[test]
    fn the_same_seed_makes_the_same_requests_and_offsets_do_not_depend_on_a_direction() {
        let seen = |direction, seed| {
            let mut disk = Disk::new(2);
            disk.run(direction, seed).unwrap();
            disk.seen
        };
        let mixed = seen(Direction::Mixed(50), 3);
        assert_eq!(mixed, seen(Direction::Mixed(50), 3));
        assert_ne!(mixed, seen(Direction::Mixed(50), 4));
        let offsets = |direction| -> Vec<u64> {
            seen(direction, 3).into_iter().map(|(_, offset)| offset).collect()
        };
        assert_eq!(offsets(Direction::Read), offsets(Direction::Write));
    }

    #[test]
    fn a_load_of_one_direction_has_only_that() {
        let mut disk = Disk::new(4);
        let measured = disk.run(Direction::Write, 1).unwrap();
        assert_eq!((disk.reads(), measured.apart.reads.len()), (0, 0));
        let measured = disk.run(Direction::Read, 1).unwrap();
        assert_eq!((disk.reads(), measured.apart.writes.len()), (1000, 0));
    }

    #[test]
    fn the_reads_of_a_mixed_load_are_compared_with_what_its_writes_leave() {
        let mut disk = Disk::new(2);
        disk.run(Direction::Mixed(50), 1).unwrap();
        let mut whole = vec![0; disk.content.len()];
        pattern().fill(0, &mut whole);
        assert_eq!(disk.content, whole, "writes contain the pattern");
        disk.content.fill(0x33);
        let wrong = disk.run(Direction::Mixed(99), 1);
        assert!(matches!(wrong, Err(LoadError::Mismatch { .. })), "{:?}", wrong.err());
    }
}
