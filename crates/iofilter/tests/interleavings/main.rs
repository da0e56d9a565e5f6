//! The state that a disk's queues share, in every order in which their threads can run (Shuttle, depth first); where
//! these are too many, in those with few preemptions.
//!
//! The modules are included unchanged, over Shuttle's atomics and locks. It tries orders of steps, not the
//! reorderings of a processor with weakly ordered memory.

#![allow(clippy::unwrap_used)] // a test

#[path = "../../src/layers/cache/blocks.rs"]
#[allow(dead_code, unused_imports)] // its unit tests are run elsewhere
mod blocks;
#[path = "../../src/layers/limit/bucket.rs"]
#[allow(dead_code)]
mod bucket;
#[path = "../../src/layers/replicate/chunks.rs"]
#[allow(dead_code, unused_imports)]
mod chunks;
#[path = "../../src/storage/qcow2/exchange.rs"]
#[allow(dead_code)]
mod exchange;
#[path = "../../src/layers/align/locks.rs"]
#[allow(unused_imports)] // of its unit tests, which are run elsewhere
mod locks;
#[path = "../../src/stack/dirty/marks.rs"]
#[allow(dead_code)]
mod marks;
#[path = "../../src/stack/tally.rs"]
mod tally;

mod few_preemptions;
mod stack;
mod waking;
mod worker;

/// Replaces the module of this name in the crate.
mod sync {
    pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic};
    pub(crate) use shuttle::thread::JoinHandle;
}

use std::process::ExitCode;
use std::sync::Arc;

use shuttle::scheduler::{DfsScheduler, Scheduler};
use shuttle::sync::Mutex;
use shuttle::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering::SeqCst};
use shuttle::thread;
use shuttle::{Config, Runner};
use vmseal_api::filter::Budget;

use crate::blocks::Blocks;
use crate::bucket::{Bucket, SECOND};
use crate::chunks::{Chunks, Span};
use crate::few_preemptions::FewPreemptions;
use crate::locks::SectorLocks;
use crate::marks::Marks;
use crate::tally::{Counter, Tally};

/// The length of what one lock covers, and of a request within it, in bytes.
const STRETCH: u64 = 256 * 1024;
const SECTOR: u64 = 4096;

/// The locks, and who holds them.
#[derive(Default)]
struct Watched {
    locks: SectorLocks,
    writers: AtomicU32,
    modifies: AtomicBool,
}

impl Watched {
    /// Writes whole sectors, if it gets the lock.
    fn write(&self, offset: u64, length: u64) {
        if self.locks.try_shared(offset, length) {
            self.writers.fetch_add(1, SeqCst);
            assert!(!self.modifies.load(SeqCst), "written while somebody modifies");
            self.writers.fetch_sub(1, SeqCst);
            self.locks.release_shared(offset, length);
        }
    }

    /// Reads a sector, changes and writes it, if it gets the lock at the first attempt.
    fn modify(&self, offset: u64) {
        if self.locks.claim(offset) {
            if self.locks.is_exclusive(offset) {
                assert!(!self.modifies.swap(true, SeqCst), "two modify at once");
                assert_eq!(self.writers.load(SeqCst), 0, "modified while somebody writes");
                self.modifies.store(false, SeqCst);
            }
            self.locks.release_exclusive(offset);
        }
    }

    /// Reads whole sectors; a modification meanwhile is noticed afterwards.
    fn read(&self, offset: u64, length: u64) {
        let before = self.locks.claims(offset, length);
        let torn = self.modifies.load(SeqCst);
        if before.is_some() && before == self.locks.claims(offset, length) {
            assert!(!torn, "read while somebody modifies, and not seen");
        }
    }

    /// Nobody has left a lock behind.
    fn is_free(&self, offset: u64) {
        assert!(self.locks.claim(offset) && self.locks.is_exclusive(offset), "not released");
        self.locks.release_exclusive(offset);
    }
}

fn sectors_are_modified_alone_and_written_together() {
    few_preemptions(4, || {
        let watched = Arc::new(Watched::default());
        let (writer, modifier) = (Arc::clone(&watched), Arc::clone(&watched));
        let threads = [
            thread::spawn(move || writer.write(0, SECTOR)),
            thread::spawn(move || modifier.modify(SECTOR)),
        ];
        watched.modify(0);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        watched.is_free(0);
    });
}

fn a_reader_notices_a_concurrent_modification() {
    few_preemptions(4, || {
        let watched = Arc::new(Watched::default());
        let (one, other) = (Arc::clone(&watched), Arc::clone(&watched));
        let threads =
            [thread::spawn(move || one.modify(0)), thread::spawn(move || other.modify(SECTOR))];
        watched.read(0, 2 * SECTOR);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        watched.is_free(0);
    });
}

fn a_write_over_two_stretches_takes_both_or_none() {
    every_order(|| {
        let watched = Arc::new(Watched::default());
        let (writer, modifier) = (Arc::clone(&watched), Arc::clone(&watched));
        let threads = [
            thread::spawn(move || writer.write(STRETCH - SECTOR, 2 * SECTOR)),
            thread::spawn(move || modifier.modify(STRETCH)),
        ];
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        [0, STRETCH].into_iter().for_each(|offset| watched.is_free(offset));
    });
}

fn admitted_requests_are_charged_and_the_debt_is_one_request_per_queue() {
    every_order(|| {
        let bucket = Arc::new(Bucket::new(Budget { per_second: 1, burst: 1 }));
        let queue = |bucket: &Bucket| {
            let gone = (0..2).filter(|_| {
                let goes = bucket.wait(0, 1) == 0;
                if goes {
                    bucket.charge(0, 1);
                }
                goes
            });
            gone.count() as u64
        };
        let shared = Arc::clone(&bucket);
        let other = thread::spawn(move || queue(&shared));
        let gone = queue(&bucket) + other.join().unwrap();
        assert!((1..=2).contains(&gone), "{gone} went with a budget of one");
        assert_eq!(bucket.wait(0, 1), gone * SECOND as u64, "{gone} went");
    });
}

fn a_tally_never_goes_back_and_loses_nothing_of_its_one_writer() {
    every_order(|| {
        let tally = Arc::new(Tally::default());
        let writer = Arc::clone(&tally);
        let writer = thread::spawn(move || (0..3).for_each(|_| writer.add(1)));
        let seen = [tally.get(), tally.get(), tally.get()];
        assert!(seen.is_sorted(), "{seen:?}");
        writer.join().unwrap();
        assert_eq!(tally.get(), 3);
    });
}

fn a_counter_loses_nothing_of_anybody() {
    every_order(|| {
        let counter = Arc::new(Counter::default());
        let other = Arc::clone(&counter);
        let other = thread::spawn(move || (0..2).for_each(|_| other.add(1)));
        (0..2).for_each(|_| counter.add(1));
        other.join().unwrap();
        assert_eq!(counter.get(), 4);
    });
}

/// Two blocks of storage, in one stretch, and their cache.
struct Cached {
    storage: [AtomicU8; 2],
    blocks: Blocks,
}

impl Cached {
    fn new() -> Arc<Self> {
        Arc::new(Self { storage: [0, 0].map(AtomicU8::new), blocks: Blocks::new(0) })
    }

    /// Reads a block as the filter does; returns its content.
    fn read(&self, block: usize) -> u8 {
        let (offset, mut found) = (block as u64 * SECTOR, 0);
        if !self.blocks.read(offset, SECTOR, |bytes| found = bytes[0]) {
            let ticket = self.blocks.ticket(offset, SECTOR);
            found = self.storage[block].load(SeqCst);
            self.blocks.install(&ticket, |_, place| place.fill(found));
        }
        found
    }

    /// Writes a block as the filter does.
    fn write(&self, block: usize, value: u8) {
        let offset = block as u64 * SECTOR;
        self.blocks.begin_change(offset, SECTOR);
        self.storage[block].store(value, SeqCst);
        self.blocks.end_change(offset, SECTOR);
    }

    /// Cached blocks equal the stored ones.
    fn is_coherent(&self) {
        for (block, stored) in self.storage.iter().enumerate() {
            let stored = stored.load(SeqCst);
            self.blocks.read(block as u64 * SECTOR, SECTOR, |bytes| {
                assert_eq!(bytes[0], stored, "block {block}: what was before is kept");
            });
        }
    }
}

fn a_read_keeps_nothing_that_a_write_overtook() {
    every_order(|| {
        let cached = Cached::new();
        let reader = Arc::clone(&cached);
        let reader = thread::spawn(move || reader.read(0));
        cached.write(0, 1);
        assert_eq!(cached.read(0), 1, "answered before, and not there");
        reader.join().unwrap();
        cached.is_coherent();
    });
}

fn nothing_is_kept_before_the_last_of_two_writes_ends_and_all_after_it() {
    every_order(|| {
        let cached = Cached::new();
        let writer = Arc::clone(&cached);
        let writer = thread::spawn(move || writer.write(0, 1));
        cached.write(1, 2);
        cached.read(0);
        writer.join().unwrap();
        cached.is_coherent();
        assert_eq!((cached.read(0), cached.read(1)), (1, 2));
        assert!(cached.blocks.read(0, 2 * SECTOR, |_| ()), "quiet again, and not kept");
    });
}

/// A chunk of a disk, its replica, and whether the map records it.
struct Replicated {
    disk: AtomicU8,
    replica: AtomicU8,
    chunks: Chunks,
    on_record: Mutex<bool>,
}

const CHUNK: Span = Span { first: 0, last: 0 };

impl Replicated {
    fn new() -> Arc<Self> {
        let (disk, replica) = (AtomicU8::new(0), AtomicU8::new(0));
        let (chunks, on_record) = (Chunks::new(1), Mutex::new(false));
        chunks.on_record();
        Arc::new(Self { disk, replica, chunks, on_record })
    }

    /// Changes the disk as a queue does, and marks as the marker does.
    fn change(&self, value: u8) {
        self.begin();
        self.disk.store(value, SeqCst);
        self.chunks.end(CHUNK);
    }

    fn begin(&self) {
        if !self.chunks.begin(CHUNK) {
            let mut on_record = self.on_record.lock().unwrap();
            *on_record = true;
            self.chunks.mark(CHUNK, 1);
        }
    }

    /// The same, watched.
    fn write(&self, value: u8) {
        self.begin();
        assert_eq!(self.chunks.first_clean(0, 0), None, "it was marked and is not");
        self.is_on_record();
        self.disk.store(value, SeqCst);
        self.is_on_record();
        self.chunks.end(CHUNK);
    }

    /// Of a change in flight.
    fn is_on_record(&self) {
        assert!(*self.on_record.lock().unwrap(), "it is on the disk and not on record");
    }

    /// Copies the chunk as the copier does, and unmarks it as the map does.
    fn copy(&self) {
        let ticket = self.chunks.ticket(0);
        self.replica.store(self.disk.load(SeqCst), SeqCst);
        let mut on_record = self.on_record.lock().unwrap();
        if ticket.is_some_and(|ticket| self.chunks.unmark(0, ticket)) {
            *on_record = false;
        }
    }

    /// A chunk that is not recorded is equal, and a marked chunk is recorded.
    fn is_honest(&self) {
        let on_record = *self.on_record.lock().unwrap();
        let (disk, replica) = (self.disk.load(SeqCst), self.replica.load(SeqCst));
        assert!(on_record || disk == replica, "{disk} counts as {replica}");
        assert_eq!(self.chunks.marked(), u64::from(on_record));
    }
}

fn a_chunk_that_changes_while_it_is_copied_stays_marked() {
    every_order(|| {
        let replicated = Replicated::new();
        replicated.write(1);
        let writer = Arc::clone(&replicated);
        let writer = thread::spawn(move || writer.write(2));
        replicated.copy();
        writer.join().unwrap();
        replicated.is_honest();
        replicated.copy();
        replicated.is_honest();
        assert_eq!(replicated.chunks.marked(), 0, "quiet, copied and still marked");
    });
}

fn a_chunk_that_two_queues_change_while_it_is_copied_stays_marked() {
    every_order(|| {
        let replicated = Replicated::new();
        replicated.write(1);
        let writer = Arc::clone(&replicated);
        let writer = thread::spawn(move || writer.change(2));
        let copier = Arc::clone(&replicated);
        let copier = thread::spawn(move || copier.copy());
        replicated.change(3);
        writer.join().unwrap();
        copier.join().unwrap();
        replicated.is_honest();
    });
}

/// Two granules of a disk, and its dirty bitmaps.
struct BackedUp {
    disk: [AtomicU8; 2],
    marks: Marks,
}

/// The bitmaps' slots.
const ONE: usize = 0;
const NEXT: usize = 1;

impl BackedUp {
    /// With one bitmap.
    fn new() -> Arc<Self> {
        let marks = Marks::new(2 * SECTOR, SECTOR.trailing_zeros());
        marks.start(ONE);
        Arc::new(Self { disk: [0, 0].map(AtomicU8::new), marks })
    }

    /// Changes a granule as a queue does.
    fn change(&self, granule: usize, value: u8) {
        self.marks.changed(granule as u64 * SECTOR, SECTOR);
        self.disk[granule].store(value, SeqCst);
        self.marks.changed(granule as u64 * SECTOR, SECTOR);
    }

    fn is_dirty(&self, granule: usize, slot: usize) -> bool {
        let at = granule as u64 * SECTOR;
        self.marks.extent(slot, at, at + SECTOR).0
    }

    /// Of the first granule: the next backup finds every change that this one, which copied this state, misses.
    fn is_found_next(&self, copied: u8, slot: usize) {
        let now = self.disk[0].load(SeqCst);
        assert!(now == copied || self.is_dirty(0, slot), "{now} is in no backup, {copied} is");
    }
}

/// Begins a bitmap in this way, and copies everything, while a queue changes the disk.
fn is_backed_up(begin: fn(&Marks)) {
    every_order(move || {
        let disk = BackedUp::new();
        let writer = Arc::clone(&disk);
        let writer = thread::spawn(move || writer.change(0, 1));
        begin(&disk.marks);
        let copied = disk.disk[0].load(SeqCst);
        writer.join().unwrap();
        disk.is_found_next(copied, ONE);
    });
}

fn a_change_that_lands_after_a_bitmap_is_cleared_is_in_it() {
    is_backed_up(|marks| marks.clear(ONE));
}

fn a_change_that_lands_after_a_bitmap_is_started_is_in_it() {
    is_backed_up(|marks| {
        marks.stop(ONE);
        marks.start(ONE);
    });
}

fn a_change_that_lands_while_a_bitmap_replaces_another_is_in_one_of_them() {
    every_order(|| {
        let disk = BackedUp::new();
        let writer = Arc::clone(&disk);
        let writer = thread::spawn(move || writer.change(0, 1));
        disk.marks.start(NEXT);
        let copied = if disk.is_dirty(0, ONE) { disk.disk[0].load(SeqCst) } else { 0 };
        disk.marks.stop(ONE);
        writer.join().unwrap();
        disk.is_found_next(copied, NEXT);
    });
}

fn two_queues_that_mark_one_word_lose_no_marks() {
    every_order(|| {
        let disk = BackedUp::new();
        let writer = Arc::clone(&disk);
        let writer = thread::spawn(move || writer.change(0, 1));
        disk.change(1, 2);
        assert!(disk.is_dirty(1, ONE), "answered, and not dirty");
        writer.join().unwrap();
        assert!(disk.is_dirty(0, ONE) && disk.is_dirty(1, ONE), "unmarked by the other");
    });
}

/// Runs a model in every order.
fn every_order(model: impl Fn() + Send + Sync + 'static) {
    run(DfsScheduler::new(None, false), model);
}

/// Runs a model that has too many orders in those with at most this many preemptions.
fn few_preemptions(most: usize, model: impl Fn() + Send + Sync + 'static) {
    run(FewPreemptions::new(most), model);
}

fn run(scheduler: impl Scheduler + 'static, model: impl Fn() + Send + Sync + 'static) {
    let mut config = Config::new();
    config.silence_warnings = true;
    let runs = Runner::new(scheduler, config).run(model);
    assert!(runs > 1, "there was only one order");
    println!("{runs} orders");
}

type Model = (&'static str, fn());

const MODELS: [Model; 26] = [
    (
        "sectors_are_modified_alone_and_written_together",
        sectors_are_modified_alone_and_written_together,
    ),
    ("a_reader_notices_a_concurrent_modification", a_reader_notices_a_concurrent_modification),
    ("a_chain_that_sleeps_is_woken_by_news", waking::a_chain_that_sleeps_is_woken_by_news),
    (
        "a_chain_that_waits_for_a_sector_lock_is_woken_when_it_is_free",
        waking::a_chain_that_waits_for_a_sector_lock_is_woken_when_it_is_free,
    ),
    (
        "a_chain_that_waits_for_the_last_writer_is_woken_when_it_leaves",
        waking::a_chain_that_waits_for_the_last_writer_is_woken_when_it_leaves,
    ),
    (
        "a_write_over_two_stretches_takes_both_or_none",
        a_write_over_two_stretches_takes_both_or_none,
    ),
    (
        "admitted_requests_are_charged_and_the_debt_is_one_request_per_queue",
        admitted_requests_are_charged_and_the_debt_is_one_request_per_queue,
    ),
    (
        "a_tally_never_goes_back_and_loses_nothing_of_its_one_writer",
        a_tally_never_goes_back_and_loses_nothing_of_its_one_writer,
    ),
    ("a_counter_loses_nothing_of_anybody", a_counter_loses_nothing_of_anybody),
    ("a_read_keeps_nothing_that_a_write_overtook", a_read_keeps_nothing_that_a_write_overtook),
    (
        "a_chunk_that_changes_while_it_is_copied_stays_marked",
        a_chunk_that_changes_while_it_is_copied_stays_marked,
    ),
    (
        "a_chunk_that_two_queues_change_while_it_is_copied_stays_marked",
        a_chunk_that_two_queues_change_while_it_is_copied_stays_marked,
    ),
    (
        "nothing_is_kept_before_the_last_of_two_writes_ends_and_all_after_it",
        nothing_is_kept_before_the_last_of_two_writes_ends_and_all_after_it,
    ),
    (
        "a_change_that_lands_after_a_bitmap_is_cleared_is_in_it",
        a_change_that_lands_after_a_bitmap_is_cleared_is_in_it,
    ),
    (
        "a_change_that_lands_after_a_bitmap_is_started_is_in_it",
        a_change_that_lands_after_a_bitmap_is_started_is_in_it,
    ),
    (
        "a_change_that_lands_while_a_bitmap_replaces_another_is_in_one_of_them",
        a_change_that_lands_while_a_bitmap_replaces_another_is_in_one_of_them,
    ),
    ("two_queues_that_mark_one_word_lose_no_marks", two_queues_that_mark_one_word_lose_no_marks),
    (
        "a_queue_that_sleeps_until_it_is_woken_is_woken",
        worker::a_queue_that_sleeps_until_it_is_woken_is_woken,
    ),
    (
        "two_queues_that_sleep_until_they_are_woken_get_each_answer_once",
        worker::two_queues_that_sleep_until_they_are_woken_get_each_answer_once,
    ),
    (
        "a_queue_that_asks_while_it_is_answered_misses_nothing",
        worker::a_queue_that_asks_while_it_is_answered_misses_nothing,
    ),
    ("more_than_a_batch_is_done_to_the_last", worker::more_than_a_batch_is_done_to_the_last),
    (
        "a_queue_that_goes_waits_for_what_uses_its_memory",
        worker::a_queue_that_goes_waits_for_what_uses_its_memory,
    ),
    (
        "an_image_is_closed_once_after_the_last_request",
        worker::an_image_is_closed_once_after_the_last_request,
    ),
    (
        "an_image_of_which_nobody_asked_anything_is_closed_without_a_thread",
        worker::an_image_of_which_nobody_asked_anything_is_closed_without_a_thread,
    ),
    (
        "without_a_thread_a_request_is_refused_once_and_the_next_is_done",
        worker::without_a_thread_a_request_is_refused_once_and_the_next_is_done,
    ),
    (
        "one_queue_is_refused_and_another_that_finds_a_thread_is_not",
        worker::one_queue_is_refused_and_another_that_finds_a_thread_is_not,
    ),
];

/// Runs the models whose name holds the argument, and counts them as the usual harness does.
fn main() -> ExitCode {
    let mut words = std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    let word = words.next().unwrap_or_default();
    let models = MODELS.iter().filter(|(name, _)| name.contains(&word));
    let (good, bad): (Vec<&Model>, Vec<&Model>) = models.partition(|(name, model)| {
        let good = std::panic::catch_unwind(model).is_ok();
        println!("test {name} ... {}", if good { "ok" } else { "FAILED" });
        good
    });
    let outcome = if bad.is_empty() { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {outcome}. {} passed; {} failed; 0 ignored; 0 measured; {} filtered out\n",
        good.len(),
        bad.len(),
        MODELS.len() - good.len() - bad.len()
    );
    if bad.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
