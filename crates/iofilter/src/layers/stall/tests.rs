//! A disk whose storage answers when the test says so.

use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vmseal_api::filter::BitmapChange;

use super::*;
use crate::layers::stack::Stack;
use crate::stack::blocking;
use crate::stack::chain::{Chain, Storage};
use crate::stack::dirty::Bitmaps;
use crate::stack::memory::Segment;
use crate::storage::DiskStorage;
use crate::storage::mem::MemDisk;

const SIZE: u64 = 16 << 20;
const TIMEOUT: Duration = Duration::from_secs(1000);

/// What the storage of one queue does.
#[derive(Debug, Default)]
struct Answers {
    /// It answers nothing that comes.
    stuck: bool,
    /// After so many passes it does.
    patience: Option<u32>,
    /// What it has and has not answered: the operation, where, and the length.
    has: Vec<(Operation, u64, u64)>,
}

type Shared = Arc<Mutex<Answers>>;

fn lock(answers: &Shared) -> MutexGuard<'_, Answers> {
    answers.lock().unwrap()
}

/// Answers reads with bytes of 7.
struct Waits(Shared, Vec<RequestId>);

impl Storage for Waits {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        let request = io.request(id);
        lock(&self.0).has.push((request.operation, request.offset, request.length));
        self.1.push(id);
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        let mut answers = lock(&self.0);
        if let Some(left) = answers.patience.take() {
            answers.patience = left.checked_sub(1);
            answers.stuck = answers.patience.is_some();
        }
        if answers.stuck {
            return;
        }
        answers.has.clear();
        for id in self.1.drain(..) {
            let length = io.request(id).length as usize;
            io.request(id).copy_from(0, &vec![7; length]);
            io.complete(id, Ok(()));
        }
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn deadline(&self) -> Option<Instant> {
        lock(&self.0).patience.map(|_| Instant::now())
    }
}

/// A disk with this many queues, each of which the test polls.
struct Bench {
    layer: Stall,
    queues: Vec<(Chain, Shared)>,
}

impl Bench {
    fn new(queues: usize) -> Self {
        Self::failing_after(queues, TIMEOUT)
    }

    fn failing_after(queues: usize, timeout: Duration) -> Self {
        let layer = Stall::new(StallSpec { milliseconds: timeout.as_millis() as u64 });
        let storage = DiskStorage::Mem(MemDisk::new(0));
        let stack = Stack::new(vec![Arc::new(layer.clone())], storage, SIZE);
        let queue = |_| {
            let answers = Shared::default();
            let storage = Box::new(Waits(Arc::clone(&answers), Vec::new()));
            (stack.chain(0, false, 1 << 20, &Arc::default(), storage).unwrap(), answers)
        };
        Self { layer, queues: (0..queues).map(queue).collect() }
    }

    fn chain(&mut self, queue: usize) -> &mut Chain {
        &mut self.queues[queue].0
    }

    fn stick(&self, queue: usize, stuck: bool) {
        lock(&self.queues[queue].1).stuck = stuck;
    }

    /// Asks for something, and polls once.
    fn ask(&mut self, queue: usize, operation: Operation, at: u64, data: &mut [u8]) {
        self.ask_since(Instant::now(), queue, operation, at, data);
    }

    /// The same of a request that is in flight since then.
    fn ask_since(
        &mut self,
        began: Instant,
        queue: usize,
        operation: Operation,
        at: u64,
        data: &mut [u8],
    ) {
        let chain = self.chain(queue);
        let id = chain.begin().unwrap();
        // SAFETY: every test has its answer before its memory goes.
        chain.data_mut(id).push(unsafe { Segment::new(data.as_mut_ptr(), data.len()) });
        chain.began(id, began);
        chain.submit(id, operation, at, data.len() as u64, 0);
        chain.poll();
    }

    fn write(&mut self, queue: usize, at: u64, data: &mut [u8]) {
        self.ask(queue, Operation::Write, at, data);
    }

    /// The disk has waited for too long.
    fn stall(&mut self, queue: usize) {
        assert!(self.layer.0.report(TIMEOUT), "storage has nothing");
        self.chain(queue).poll();
    }

    /// The results of what is done.
    fn done(&mut self, queue: usize) -> Vec<Result<(), IoError>> {
        let chain = self.chain(queue);
        chain.poll();
        std::iter::from_fn(|| chain.next_done()).map(|done| done.result).collect()
    }
}

const STALLED: Result<(), IoError> = Err(IoError::Stalled);

#[test]
fn what_is_in_flight_and_what_comes_fails_until_storage_has_answered_all_and_then_one_flush() {
    let mut bench = Bench::new(1);
    let [mut one, mut other, mut third] = [[1; 4096], [2; 4096], [3; 4096]];
    bench.write(0, 0, &mut one);
    assert_eq!(bench.done(0), [Ok(())]);
    bench.stick(0, true);
    bench.write(0, 0, &mut one);
    bench.ask(0, Operation::Flush, 0, &mut []);
    assert_eq!(bench.done(0), []);
    assert_eq!(bench.layer.fails_for(), None);
    bench.stall(0);
    assert_eq!(bench.done(0), [STALLED, STALLED]);
    assert!(bench.layer.fails_for().is_some());
    bench.write(0, 4096, &mut other);
    bench.ask(0, Operation::Flush, 0, &mut []);
    assert_eq!(bench.done(0), [STALLED, STALLED]);
    assert_eq!(lock(&bench.queues[0].1).has.len(), 2, "what came later went down");
    assert!(!bench.chain(0).is_idle() && bench.chain(0).in_flight() == 0);
    bench.stick(0, false);
    bench.chain(0).poll();
    assert!(bench.chain(0).is_idle() && bench.layer.fails_for().is_none());
    bench.write(0, 4096, &mut third);
    assert_eq!(bench.done(0), [Ok(())]);
    for expected in [STALLED, Ok(())] {
        bench.ask(0, Operation::Flush, 0, &mut []);
        assert_eq!(bench.done(0), [expected]);
    }
    assert_eq!(bench.layer.counters(), [("stalls", 1), ("failed_requests", 5)]);
    assert_eq!(bench.chain(0).forgotten(), 0);
}

#[test]
fn the_age_of_the_oldest_request_decides() {
    let mut bench = Bench::new(1);
    bench.stick(0, true);
    let mut data = [1; 512];
    bench.write(0, 0, &mut data);
    assert_eq!(bench.done(0), []);
    let due = bench.chain(0).deadline().expect("it is to look then");
    let left = due.saturating_duration_since(Instant::now());
    assert!(left <= TIMEOUT && left > TIMEOUT / 2, "{left:?}");
    // With another layer, whose time is up at once.
    let mut bench = Bench { layer: Stall::new(StallSpec { milliseconds: 1 }), ..bench };
    let storage = Box::new(Waits(Arc::clone(&bench.queues[0].1), Vec::new()));
    let filter = bench.layer.filter(&Place::simple(SIZE)).unwrap();
    let chain = Chain::new(SIZE, false, vec![filter], storage).unwrap();
    *bench.chain(0) = chain;
    bench.write(0, 0, &mut data);
    let mut failed = Vec::new();
    // It never sleeps beyond its time, or this does not end.
    while failed.is_empty() {
        bench.chain(0).wait([], None).unwrap();
        failed = bench.done(0);
    }
    assert_eq!(failed, [STALLED]);
    bench.stick(0, false);
    assert_eq!(bench.done(0), []);
    assert!(bench.chain(0).is_idle());
}

/// Returns when so much time has passed.
fn pass(time: Duration) {
    let start = Instant::now();
    while start.elapsed() <= time {
        std::hint::spin_loop();
    }
}

/// Longer than this thread is kept from running between two lines.
const SHORT: Duration = Duration::from_millis(100);

#[test]
fn what_storage_answered_while_the_thread_did_not_run_is_no_stall() {
    let mut bench = Bench::failing_after(1, SHORT);
    bench.stick(0, true);
    let mut data = [1; 512];
    bench.write(0, 0, &mut data);
    bench.stick(0, false);
    pass(SHORT * 2);
    assert_eq!(bench.done(0), [Ok(())]);
    assert_eq!(bench.layer.counters(), [("stalls", 0), ("failed_requests", 0)]);
    // A look that comes much too late leaves time to who answers for storage.
    assert_eq!(pause(LATE, TIMEOUT), Duration::ZERO);
    assert_eq!(pause(LATE * 2, TIMEOUT), LATE);
    assert_eq!(pause(LATE * 2, SHORT), SHORT);
}

#[test]
fn a_request_that_has_ended_is_not_too_old_though_nobody_has_fetched_its_answer() {
    let mut bench = Bench::failing_after(1, SHORT);
    let (mut ended, mut young) = ([1; 512], [2; 512]);
    bench.write(0, 0, &mut ended);
    pass(SHORT * 2);
    bench.stick(0, true);
    bench.ask_since(Instant::now() + TIMEOUT, 0, Operation::Write, 512, &mut young);
    bench.chain(0).poll();
    assert_eq!(bench.done(0), [Ok(())]);
    bench.stick(0, false);
    assert_eq!(bench.done(0), [Ok(())]);
    assert_eq!(bench.layer.counters(), [("stalls", 0), ("failed_requests", 0)]);
}

#[test]
fn what_was_read_too_late_is_nowhere() {
    let mut bench = Bench::new(1);
    let mut data = [5; 8192];
    bench.ask(0, Operation::Read, 512, &mut data[..4096]);
    assert_eq!(bench.done(0), [Ok(())]);
    assert_eq!((data[4095], data[4096]), (7, 5));
    data = [5; 8192];
    bench.stick(0, true);
    bench.ask(0, Operation::Read, 0, &mut data);
    bench.stall(0);
    assert_eq!(bench.done(0), [STALLED]);
    bench.stick(0, false);
    // Another one has the slot of the one that failed, as soon as the disk serves again.
    bench.chain(0).poll();
    let mut later = [6; 4096];
    bench.write(0, 0, &mut later);
    assert_eq!(bench.done(0), [Ok(())]);
    assert_eq!(data, [5; 8192], "memory that the guest may have given to something else");
}

#[test]
fn large_requests_and_those_that_wait_for_buffers_fail_whole() {
    let mut bench = Bench::new(1);
    let mut large = vec![4; 6 << 20];
    bench.ask(0, Operation::Read, 0, &mut large);
    assert_eq!(bench.done(0), [Ok(())]);
    assert!(large.iter().all(|byte| *byte == 7), "a part is not there");
    bench.stick(0, true);
    let mut data: Vec<_> = (0..6).map(|_| vec![4; 2 << 20]).collect();
    for (place, data) in (0..).zip(&mut data) {
        bench.ask(0, Operation::Read, place << 20, data);
    }
    assert_eq!(bench.done(0), []);
    let given: u64 = lock(&bench.queues[0].1).has.iter().map(|(_, _, length)| length).sum();
    assert_eq!(given, POOL_BYTES as u64, "its buffers are not all that storage has");
    bench.stall(0);
    assert_eq!(bench.done(0), [STALLED; 6]);
    bench.stick(0, false);
    assert_eq!(bench.done(0), []);
    assert!(data.iter().flatten().all(|byte| *byte == 4));
    // All buffers are back.
    bench.ask(0, Operation::Read, 0, &mut large);
    assert_eq!(bench.done(0), [Ok(())]);
    assert!(bench.chain(0).is_idle());
}

#[test]
fn what_is_below_never_has_more_requests_than_the_front_end() {
    let mut bench = Bench::new(1);
    bench.stick(0, true);
    let mut large: Vec<_> = (0..2).map(|_| vec![4; 2 << 20]).collect();
    for (place, data) in (0..).zip(&mut large) {
        bench.ask(0, Operation::Read, place << 21, data);
    }
    let mut data = [0; 512];
    for _ in 2..ROOTS_MAX {
        bench.ask(0, Operation::WriteZeroes { unmap: true }, 8 << 20, &mut data);
    }
    assert_eq!(lock(&bench.queues[0].1).has.len(), ROOTS_MAX);
    bench.stick(0, false);
    assert_eq!(bench.done(0), [Ok(()); ROOTS_MAX]);
    assert!(large.iter().flatten().all(|byte| *byte == 7));
}

#[test]
fn all_queues_of_the_disk_fail_and_wait_for_the_last_of_them() {
    let mut bench = Bench::new(3);
    let mut data = [[1; 4096]; 3];
    for (queue, data) in data.iter_mut().enumerate().take(2) {
        bench.stick(queue, true);
        bench.write(queue, 0, data);
    }
    // The second one sleeps.
    assert!(bench.chain(1).arm());
    bench.stall(0);
    assert_eq!(bench.done(0), [STALLED]);
    let mut fds = [PollFd::new(bench.queues[1].0.wait_set().0, PollFlags::POLLIN)];
    assert_eq!(poll(&mut fds, PollTimeout::ZERO), Ok(1), "nobody has woken it");
    bench.chain(1).disarm(true);
    assert_eq!(bench.done(1), [STALLED]);
    bench.stick(0, false);
    assert_eq!(bench.done(0), []);
    assert!(bench.chain(0).is_idle());
    // Its own storage is well.
    bench.write(2, 0, &mut data[2]);
    assert_eq!(bench.done(2), [STALLED], "a write of the second queue may land over it");
    bench.stick(1, false);
    assert_eq!(bench.done(1), []);
    bench.write(2, 0, &mut data[2]);
    assert_eq!(bench.done(2), [Ok(())]);
}

#[test]
fn who_drains_waits_for_storage_and_its_own_flush_takes_no_failure_of_the_guests() {
    let mut bench = Bench::new(1);
    bench.stick(0, true);
    let mut data = [1; 4096];
    bench.write(0, 0, &mut data);
    bench.stall(0);
    assert_eq!(bench.done(0), [STALLED]);
    assert_eq!(bench.chain(0).in_flight(), 0);
    lock(&bench.queues[0].1).patience = Some(9);
    assert_eq!(blocking::drain(bench.chain(0)), Ok(()));
    assert!(bench.chain(0).is_idle() && lock(&bench.queues[0].1).has.is_empty());
    assert_eq!(blocking::flush(bench.chain(0)), Ok(()));
    bench.ask(0, Operation::Flush, 0, &mut []);
    assert_eq!(bench.done(0), [STALLED]);
}

#[test]
fn a_write_that_failed_is_marked_when_it_lands() {
    let mut bench = Bench::new(1);
    let bitmaps = Arc::new(Bitmaps::new(SIZE));
    bench.chain(0).mark_in(Arc::clone(&bitmaps));
    bench.stick(0, true);
    let mut data = [1; 4096];
    bench.write(0, 0, &mut data);
    bench.stall(0);
    assert_eq!(bench.done(0), [STALLED]);
    bitmaps.change("backup", BitmapChange::Start).unwrap();
    let dirty = || bitmaps.status().iter().map(|it| it.dirty_bytes).sum::<u64>();
    assert_eq!(dirty(), 0);
    bench.stick(0, false);
    bench.chain(0).poll();
    assert!(dirty() > 0, "a backup would not have what landed after it was begun");
}
