//! The filter `replicate`: a second place gets what the disk has, later.
//!
//! ```text
//!  write, discard, write-zeroes    chunks marked ──> passed
//!                                  a clean chunk ──> waits ── [marker: on record, durably] ──> passed
//!  read, flush                     passed
//!
//!  copier   marked chunk: disk ──> replica ── both flushed ──> unmarked, if it has not changed meanwhile
//! ```
//! The guest is answered as storage answers; the replica is written by a thread of its own, from what lies below
//! this filter. Only the first change of a chunk that is clean waits, for the map beside the disk. What the
//! replica does not have is on record before it is on the disk, so a process that is killed at any instant is
//! followed by one that goes on. That one first has on record, durably, what it finds.
//!
//! The replica equals the disk when no chunk is marked. Until then its chunks are of different times: it is no
//! image of one instant. See docs/decisions/043.

pub mod blocking_disk;
pub mod chunks;
pub mod copier;
pub mod format;
pub mod map;
pub mod open;

pub mod threads;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use vmseal_api::filter::ReplicaStatus;
use vmseal_api::id::DiskId;

use crate::layers::replicate::blocking_disk::BlockingDisk;
use crate::layers::replicate::chunks::{Chunks, NEVER, Span};
use crate::layers::replicate::format::Geometry;
use crate::layers::replicate::map::{Copied, Map, MapLoad};
use crate::stack::chain::{Filter, Io, Limits};
use crate::stack::layer::{Counter, Layer};
use crate::stack::request::RequestId;
use crate::stack::waker::Waiters;

/// The name of the filter.
pub const KIND: &str = "replicate";

/// The memory that a replica takes, in bytes: tables, the copier's buffer, and for each of two threads what each
/// queue is reckoned with.
#[must_use]
pub fn memory(disk: DiskId, size: u64) -> u64 {
    /// A stack, tables of up to three chains, and what the allocator keeps for a thread.
    const THREAD_BYTES: usize = 2 << 20;
    let geometry = Geometry::new(disk, size);
    let tables = geometry.chunks() * 16 + geometry.map_bytes();
    (tables + copier::PIECE + 2 * THREAD_BYTES) as u64
}

/// What the replica cannot do at present, for the disk's status.
#[derive(Debug, Default)]
struct ReplicaErrors {
    copy: Option<String>,
    map: Option<String>,
}

/// What queues ask the marker, and who waits for what the threads do.
#[derive(Debug, Default)]
struct MarkRequests {
    /// To be marked.
    spans: Vec<Span>,
    /// Nobody has the disk any more, or the process ends.
    closed: bool,
}

/// What the queues, the marker and the copier of a disk share.
struct ReplicaState {
    geometry: Geometry,
    chunks: Chunks,
    map: Mutex<Map>,
    inbox: Mutex<MarkRequests>,
    /// Something came into the inbox, was marked, or all is to end.
    news: Condvar,
    /// The chains whose requests wait for marks.
    waiters: Waiters,
    clock: Clock,
    troubles: Mutex<ReplicaErrors>,
    counters: Counters,
}

#[derive(Debug, Default)]
struct Counters {
    /// Requests that waited for the map.
    held: Counter,
    /// Times that the map was made durable for requests that waited.
    recorded: Counter,
    /// Bytes written to the replica, zeroes included.
    copied: Counter,
    /// Attempts to copy that failed.
    failed: Counter,
}

/// Milliseconds since 1970, which never go back while the process runs.
#[derive(Debug)]
struct Clock {
    base: u64,
    since: Instant,
}

impl Clock {
    fn start() -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        // Not [`NEVER`], whatever the machine's clock says.
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

/// The layer: what a disk's queues have together.
#[derive(Clone)]
pub struct Replicate(Arc<ReplicaState>);

impl Replicate {
    /// Takes up the map of a disk, or begins one; and what was found.
    #[must_use]
    pub fn new(geometry: Geometry, map: BlockingDisk) -> (Self, MapLoad) {
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
            counters: Counters::default(),
        };
        shared.tell_of_the_map(&lock(&shared.map));
        (Self(Arc::new(shared)), found)
    }

    /// How the replica stands.
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

    /// Marks what queues wait for, if the map can be kept; false if something still waits. What the marker's
    /// thread does, for whoever has no thread.
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
        KIND
    }

    fn filter(&self) -> std::io::Result<Box<dyn Filter>> {
        let shared = Arc::clone(&self.0);
        Ok(Box::new(ReplicateFilter { shared, changes: Vec::new(), waiting: VecDeque::new() }))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let (shared, counters) = (&*self.0, &self.0.counters);
        let mut all = vec![
            ("held_requests", counters.held.get()),
            ("recorded_marks", counters.recorded.get()),
            ("copied_bytes", counters.copied.get()),
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

    /// How long ago all was done that the replica has; none if it was never complete.
    fn lag(&self) -> Option<u64> {
        let now = self.clock.now();
        let up_to = self.chunks.all_up_to(now);
        (up_to != NEVER).then(|| now.saturating_sub(up_to))
    }

    /// Has chunks marked; false if that cannot be now.
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
    }

    /// The replica is not what it was: everything is to be copied again. False if that cannot be recorded now.
    fn mark_all(&self) -> bool {
        let mut map = lock(&self.map);
        let marked = map.mark(&self.chunks, &[self.geometry.all()], NEVER);
        self.tell_of_the_map(&map);
        drop(map);
        self.waiters.wake();
        marked
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
            format!("the map of the replica cannot be written, {error}: {then}")
        });
        self.tell(|troubles| &mut troubles.map, told);
    }

    /// Notes what is wrong, or that nothing is, and logs it where that is news.
    fn tell(&self, which: fn(&mut ReplicaErrors) -> &mut Option<String>, what: Option<String>) {
        let mut troubles = lock(&self.troubles);
        let known = which(&mut troubles);
        if *known != what {
            match &what {
                Some(what) => tracing::warn!("{what}"),
                None => tracing::info!("the replica, or its map, is well again"),
            }
            *known = what;
        }
    }

    /// Wakes the threads and the chains that wait. A thread that was just about to sleep has the lock, so it is not
    /// missed.
    fn wake(&self) {
        drop(lock(&self.inbox));
        self.news.notify_all();
        self.waiters.wake();
    }

    fn is_closed(&self) -> bool {
        lock(&self.inbox).closed
    }

    /// Sleeps, but not beyond the end; whether it is not yet there.
    fn sleep(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut inbox = lock(&self.inbox);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if inbox.closed || left.is_zero() {
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
    /// What is before it is marked.
    clean: usize,
}

struct ReplicateFilter {
    shared: Arc<ReplicaState>,
    /// What is under way, by request.
    changes: Vec<Option<Span>>,
    waiting: VecDeque<Waiting>,
}

impl ReplicateFilter {
    /// Passes what waits and is marked by now.
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
            // For what was marked before that.
            self.pass_marked(io);
        }
        None
    }
}

impl Drop for ReplicateFilter {
    /// What was under way when the chain went is over: its backend has gone before.
    fn drop(&mut self) {
        self.changes.iter().flatten().for_each(|span| self.shared.chunks.end(*span));
    }
}
