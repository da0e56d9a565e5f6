//! The filters `replicate` and `mirror`: they keep a copy of the disk in a second place, with a delay.
//!
//! ```text
//!  write, discard, write-zeroes    chunks marked ──> passed
//!                                  a clean chunk ──> waits ── [marker: on record, durably] ──> passed
//!  read, flush                     passed
//!
//!  copier   marked chunk: disk ──> replica ── both flushed ──> unmarked, if it has not changed meanwhile
//! ```
//! The guest is answered as storage answers; a separate thread writes the replica, from the data below
//! this filter. Only the first change of a clean chunk waits, for the map beside the disk. A chunk is recorded as
//! different before it changes on the disk, so a process that is killed at any instant is followed by one that can
//! resume. The new process first records durably the marks that it finds.
//!
//! A mirror is the same, copied to another stack, until the disk pivots to it ([`mirror`]).
//!
//! The replica equals the disk when no chunk is marked. Until then its chunks are of different times, so it is not
//! an image of one instant. See docs/decisions/043.

mod busy_piece;
pub mod chunks;
pub mod copier;
pub mod format;
pub mod map;
mod mark_pause;
pub mod mirror;
pub mod open;
pub mod pace;
pub mod pipe;
pub mod threads;

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use vmseal_api::filter::ReplicaStatus;
use vmseal_api::id::DiskId;
use vmseal_api::pace::CopyPace;

use crate::layers::leg::LegChain;
use crate::layers::replicate::chunks::{Chunks, NEVER, Span};
use crate::layers::replicate::format::{Geometry, Purpose};
use crate::layers::replicate::map::{Copied, Map, MapLoad};
use crate::layers::replicate::mark_pause::MarkPause;
use crate::stack::chain::{Filter, Io, Limits};
use crate::stack::layer::{Counter, Layer, Place};
use crate::stack::request::RequestId;
use crate::stack::waker::Waiters;

/// The name of the filter that keeps a replica.
pub const KIND: &str = "replicate";

/// The name of the filter that copies what the disk is to pivot to.
pub const MIRROR: &str = "mirror";

/// The memory that a replica takes, in bytes: tables, the copier's buffer, and for each of two threads the same as for
/// each queue.
#[must_use]
pub fn memory(disk: DiskId, size: u64) -> u64 {
    /// A stack, tables of up to three chains, and the allocator's memory for a thread.
    const THREAD_BYTES: usize = 2 << 20;
    let geometry = Geometry::new(disk, size);
    let tables = geometry.chunks() * 16 + geometry.map_bytes();
    (tables + pipe::BYTES + 2 * THREAD_BYTES) as u64
}

/// What is wrong with the replica at present, for the disk's status.
#[derive(Debug, Default)]
struct ReplicaErrors {
    copy: Option<String>,
    map: Option<String>,
}

/// The queues' requests to the marker, and the chains that wait for the threads.
#[derive(Debug, Default)]
struct MarkRequests {
    /// Chunks to mark.
    spans: Vec<Span>,
    /// The disk is no longer in use, or the process ends.
    closed: bool,
    /// The guest waits for the copy: it makes no pauses, and has no rate.
    no_pauses: bool,
    /// How fast the copy may go otherwise.
    pace: CopyPace,
}

impl MarkRequests {
    /// Whether nothing is copied for now.
    fn is_paused(&self) -> bool {
        self.pace.paused && !self.no_pauses
    }

    /// The rate of the copy, where it has one.
    fn rate(&self) -> Option<u64> {
        self.pace.bytes_per_second.filter(|_| !self.no_pauses)
    }
}

/// Why a copier goes on, or does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waited {
    /// It may go on.
    Over,
    /// Its rate has changed.
    Changed,
    /// It is paused.
    Paused,
    /// The disk is no longer in use, or the process ends.
    Closed,
}

/// What the queues, the marker and the copier of a disk share.
struct ReplicaState {
    geometry: Geometry,
    chunks: Chunks,
    map: Mutex<Map>,
    inbox: Mutex<MarkRequests>,
    /// The inbox has something, a chunk was marked, or the threads must end.
    news: Condvar,
    /// The chains whose requests wait for marks.
    waiters: Waiters,
    clock: Clock,
    troubles: Mutex<ReplicaErrors>,
    counters: ReplicaCounters,
    mark_pause: MarkPause,
    /// How many requests the guest has made while the disk is mirrored: the copier yields to them.
    requests: AtomicU64,
}

#[derive(Debug, Default)]
struct ReplicaCounters {
    /// Requests that waited for the map.
    held: Counter,
    /// Times that the map was made durable for requests that waited.
    recorded: Counter,
    /// Bytes written to the replica, zeroes included.
    copied: Counter,
    /// Bytes that counted against the rate of the copy.
    paced: Counter,
    /// Attempts to copy that failed.
    failed: Counter,
}

/// Milliseconds since 1970, which never go backwards while the process runs.
#[derive(Debug)]
struct Clock {
    base: u64,
    since: Instant,
}

impl Clock {
    fn start() -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        // Never [`NEVER`], whatever the machine's clock says.
        Self { base: milliseconds(now).max(NEVER + 1), since: Instant::now() }
    }

    fn now(&self) -> u64 {
        self.base.saturating_add(milliseconds(self.since.elapsed()))
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The layer: what a disk's queues share.
#[derive(Clone)]
pub struct Replicate(Arc<ReplicaState>);

impl Replicate {
    /// Loads the map of a disk, or begins one; also returns what was found.
    #[must_use]
    pub fn new(geometry: Geometry, map: LegChain) -> (Self, MapLoad) {
        let chunks = Chunks::new(geometry.chunks());
        let (map, found) = Map::open(map, geometry, &chunks);
        let shared = ReplicaState {
            geometry,
            chunks,
            map: Mutex::new(map),
            inbox: Mutex::default(),
            news: Condvar::new(),
            waiters: Waiters::default(),
            clock: Clock::start(),
            troubles: Mutex::default(),
            counters: ReplicaCounters::default(),
            mark_pause: MarkPause::default(),
            requests: AtomicU64::new(0),
        };
        shared.tell_of_the_map(&lock(&shared.map));
        (Self(Arc::new(shared)), found)
    }

    /// The status of the replica.
    #[must_use]
    pub fn status(&self) -> ReplicaStatus {
        let shared = &*self.0;
        let troubles = lock(&shared.troubles);
        let last_error = [&troubles.map, &troubles.copy].into_iter().flatten().cloned();
        ReplicaStatus {
            dirty_bytes: shared.dirty_bytes(),
            lag_milliseconds: shared.lag(),
            last_error: last_error.reduce(|one, other| format!("{one}; {other}")),
        }
    }

    /// Copies at most so fast from now on, or not at all.
    pub fn set_pace(&self, pace: CopyPace) {
        lock(&self.0.inbox).pace = pace;
        if pace.paused {
            // Nothing is caught up with, so there is nothing to slow the guest for.
            self.0.mark_pause.end();
        }
        self.0.notify();
    }

    /// How fast it is copied.
    #[must_use]
    pub fn pace(&self) -> CopyPace {
        lock(&self.0.inbox).pace
    }

    /// Bytes copied since the process started, without holes.
    #[must_use]
    pub fn copied_bytes(&self) -> u64 {
        self.0.counters.paced.get()
    }

    /// Marks the chunks that queues wait for, if the map can be written; false if something still waits. The marker's
    /// thread calls it, and tests without that thread.
    pub fn mark_waiting(&self) -> bool {
        let spans = std::mem::take(&mut lock(&self.0.inbox).spans);
        let marked = self.0.mark(&spans);
        if !marked {
            lock(&self.0.inbox).spans.extend(spans);
        }
        marked
    }
}

impl fmt::Debug for Replicate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Replicate").field(&self.0.geometry).finish()
    }
}

impl Layer for Replicate {
    fn kind(&self) -> &'static str {
        match self.0.geometry.purpose() {
            Purpose::Replica => KIND,
            Purpose::Mirror => MIRROR,
        }
    }

    fn filter(&self, _place: &Place) -> std::io::Result<Box<dyn Filter>> {
        let shared = Arc::clone(&self.0);
        Ok(Box::new(ReplicateFilter { shared, changes: Vec::new(), waiting: VecDeque::new() }))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let (shared, counters) = (&*self.0, &self.0.counters);
        let mut all = vec![
            ("held_requests", counters.held.get()),
            ("recorded_marks", counters.recorded.get()),
            ("copied_bytes", counters.copied.get()),
            ("paced_bytes", counters.paced.get()),
            ("failed_copies", counters.failed.get()),
            ("dirty_bytes", shared.dirty_bytes()),
        ];
        all.extend(shared.lag().map(|lag| ("lag_milliseconds", lag)));
        all
    }
}

impl ReplicaState {
    fn dirty_bytes(&self) -> u64 {
        let bytes = self.chunks.marked().saturating_mul(self.geometry.chunk());
        bytes.min(self.geometry.size())
    }

    /// The age of the state that the replica has completely; none if it was never complete.
    fn lag(&self) -> Option<u64> {
        let now = self.clock.now();
        let up_to = self.chunks.all_up_to(now);
        (up_to != NEVER).then(|| now.saturating_sub(up_to))
    }

    /// Asks for chunks to be marked; false if that is not possible now.
    fn mark(&self, spans: &[Span]) -> bool {
        let mut map = lock(&self.map);
        let marked = map.mark(&self.chunks, spans, self.clock.now());
        self.tell_of_the_map(&map);
        drop(map);
        self.counters.recorded.add(u64::from(marked && !spans.is_empty()));
        self.wake();
        marked
    }

    fn unmark(&self, copied: &[Copied]) {
        let mut map = lock(&self.map);
        map.unmark(&self.chunks, copied, self.clock.now());
        self.tell_of_the_map(&map);
        drop(map);
        // For a pivot that waits for the last one.
        self.notify();
    }

    /// The replica has lost data: everything must be copied again. False if that cannot be recorded now.
    fn mark_all(&self) -> bool {
        let mut map = lock(&self.map);
        let marked = map.mark(&self.chunks, &[self.geometry.all()], NEVER);
        self.tell_of_the_map(&map);
        drop(map);
        self.waiters.wake();
        marked
    }

    fn copy_trouble(&self) -> Option<String> {
        lock(&self.troubles).copy.clone()
    }

    fn tell_of_the_map(&self, map: &Map) {
        let told = map.failure().map(|error| {
            let then = if map.can_mark() {
                "the disk goes on, and the next filter copies everything"
            } else if !self.chunks.is_on_record() {
                "what the guest changes waits until it can"
            } else {
                "what the guest changes for the first time since it was copied waits until it can"
            };
            format!("the map of its copy cannot be written, {error}: {then}")
        });
        self.tell(|troubles| &mut troubles.map, told);
    }

    /// Notes what is wrong, or that nothing is, and logs it when that has changed.
    fn tell(&self, which: fn(&mut ReplicaErrors) -> &mut Option<String>, what: Option<String>) {
        let mut troubles = lock(&self.troubles);
        let known = which(&mut troubles);
        if *known != what {
            match &what {
                Some(what) => tracing::warn!("{what}"),
                None => tracing::info!("the copy, or its map, works again"),
            }
            *known = what;
            drop(troubles);
            self.notify();
        }
    }

    /// Wakes the threads and the chains that wait. A thread that is about to sleep holds the lock, so it does not miss
    /// this.
    fn wake(&self) {
        self.notify();
        self.waiters.wake();
    }

    /// Wakes the threads alone.
    fn notify(&self) {
        drop(lock(&self.inbox));
        self.news.notify_all();
    }

    /// The rate of the copy now.
    fn rate(&self) -> Option<u64> {
        lock(&self.inbox).rate()
    }

    /// Whether the copier may go on.
    fn look(&self) -> Waited {
        let rate = self.rate();
        self.sleep_at(rate, Duration::ZERO)
    }

    /// Has the copier sleep, while its rate is this one and it is not paused.
    fn sleep_at(&self, rate: Option<u64>, time: Duration) -> Waited {
        let until = Instant::now().checked_add(time);
        let mut inbox = lock(&self.inbox);
        loop {
            let left = until.map_or(time, |it| it.saturating_duration_since(Instant::now()));
            if inbox.closed {
                return Waited::Closed;
            } else if inbox.is_paused() {
                return Waited::Paused;
            } else if inbox.rate() != rate {
                return Waited::Changed;
            } else if left.is_zero() {
                return Waited::Over;
            }
            let woken = self.news.wait_timeout(inbox, left);
            inbox = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sleeps, but not after the end was signalled, nor while the guest waits for the copy; true if it may go on.
    fn sleep(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut inbox = lock(&self.inbox);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if inbox.closed || inbox.no_pauses || left.is_zero() {
                return !inbox.closed;
            }
            let woken = self.news.wait_timeout(inbox, left);
            inbox = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// A change that waits for its chunks to be marked.
struct Waiting {
    id: RequestId,
    /// Chunks before this one are marked.
    clean: usize,
}

struct ReplicateFilter {
    shared: Arc<ReplicaState>,
    /// Changes in flight, by request.
    changes: Vec<Option<Span>>,
    waiting: VecDeque<Waiting>,
}

impl ReplicateFilter {
    /// Passes the waiting changes whose chunks are marked by now.
    fn pass_marked(&mut self, io: &mut Io<'_>) {
        let Self { shared, changes, waiting } = self;
        waiting.retain_mut(|waiting| {
            let Some(span) = changes[waiting.id.index()] else { return false };
            let clean = shared.chunks.first_clean(waiting.clean, span.last);
            match clean {
                Some(clean) => waiting.clean = clean,
                None => io.pass(waiting.id),
            }
            clean.is_some()
        });
    }
}

impl Filter for ReplicateFilter {
    fn limits(&self) -> Limits {
        Limits { children: 0 }
    }

    fn prepare(&mut self, capacity: usize) {
        self.changes.resize(capacity, None);
        self.waiting.reserve(capacity);
    }

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        let request = io.request(id);
        if self.shared.geometry.purpose() == Purpose::Mirror {
            self.shared.requests.fetch_add(1, Ordering::Relaxed);
        }
        if !request.operation.changes() {
            return io.pass(id);
        }
        let span = self.shared.geometry.span(request.offset, request.length);
        self.changes[id.index()] = Some(span);
        if self.shared.chunks.begin(span) {
            return io.pass(id);
        }
        self.shared.counters.held.add(1);
        io.hold(id);
        self.waiting.push_back(Waiting { id, clean: span.first });
        lock(&self.shared.inbox).spans.push(span);
        self.shared.news.notify_all();
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        if let Some(span) = self.changes[id.index()].take() {
            self.shared.chunks.end(span);
        }
        io.complete(id, io.request(id).result);
    }

    fn tick(&mut self, io: &mut Io<'_>) -> Option<Instant> {
        self.pass_marked(io);
        if !self.waiting.is_empty() {
            self.shared.waiters.add(io.waker());
            // For chunks that were marked before that.
            self.pass_marked(io);
        }
        None
    }
}

impl Drop for ReplicateFilter {
    /// Changes in flight when the chain is dropped are over: its backend was dropped first.
    fn drop(&mut self) {
        self.changes.iter().flatten().for_each(|span| self.shared.chunks.end(*span));
    }
}
