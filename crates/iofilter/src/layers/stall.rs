//! The filter `stall`: where storage has not answered a request for too long, requests of the disk fail until it has answered all that
//! it was given (docs/decisions/282).
//!
//! ```text
//!              oldest request in flight older than the timeout
//!   Serving ──────────────────────────────────────────────────> Reported: all that is in flight fails to the guest,
//!      ^                                                         │         and all that comes fails at once
//!      └──── storage has answered everything it was given ───────┘
//! ```
//! So no write that has failed lands after one that was acknowledged later: between the two, storage has answered the first. The state is
//! the disk's, as writes of one queue land over those of another. The first flush of the guest after that fails once more: it must not take
//! it for the success of what has failed.
//!
//! What storage has asks for no memory of the guest's: each request that goes down is the filter's own, with buffers of its own
//! ([`Io::apart`]). The guest's is kept until its parts are back, or until it fails.
//!
//! ```text
//!  guest's    kept ── all parts are back ──> ended with their result        kept ── Reported ──> failed
//!  a part     counted, passed ── storage answers ──> copied to the guest, if its request is still kept; its buffers are free ──> counted off
//! ```

mod state;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmseal_api::filter::StallSpec;

use crate::layers::stall::state::StallState;
use crate::stack::buffer_queue::BufferQueue;
use crate::stack::chain::{Filter, Io, Limits, ROOTS_MAX};
use crate::stack::layer::{Layer, Place};
use crate::stack::memory::{Cursor, Segments};
use crate::stack::pool::{Buffer, Pool};
use crate::stack::request::{IoError, Operation, RequestId};

/// Its name.
pub const KIND: &str = "stall";

/// The buffers of one queue, in bytes: 2 large requests of 2 MiB at a time, or 1024 small ones.
pub const POOL_BYTES: usize = 4 << 20;

/// The most buffers of one part: 2 MiB go down in one piece, as storage elsewhere answers one large request sooner than many. A large one
/// leaves as much to others.
const PART_BUFFERS: usize = 32;

/// The most parts of one request in flight. So what is below gets no more requests at a time than a front end has, for which it has room:
/// the alignment fails those beyond.
const PARTS_MAX: u32 = 1;

/// A look that is so late says that this thread did not run (it was stopped, or its host was too busy): the threads and processes below
/// get as long to answer what they were given, as they may not have run either.
const LATE: Duration = Duration::from_secs(1);

/// The layer.
#[derive(Clone, Debug)]
pub struct Stall(Arc<StallState>);

impl Stall {
    /// A layer of a disk whose storage has answered everything.
    #[must_use]
    pub fn new(spec: StallSpec) -> Self {
        Self(Arc::new(StallState::new(Duration::from_millis(spec.milliseconds))))
    }
}

impl Layer for Stall {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn filter(&self, _place: &Place) -> io::Result<Box<dyn Filter>> {
        Ok(Box::new(StallFilter {
            disk: Arc::clone(&self.0),
            pool: Pool::new(POOL_BYTES)?,
            kept: Vec::new(),
            open: 0,
            last: 0,
            parts: Vec::new(),
            scratch: Vec::with_capacity(PART_BUFFERS),
            waiting: BufferQueue::default(),
            look_at: None,
            looks_again: false,
            listens: None,
        }))
    }

    fn fails_for(&self) -> Option<Duration> {
        self.0.fails_for()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("stalls", self.0.stalls()), ("failed_requests", self.0.failed.get())]
    }
}

/// A request from above that is neither ended nor failed.
#[derive(Debug)]
struct Kept {
    id: RequestId,
    /// Tells it from a later one in the same slot.
    number: u64,
    /// Bytes passed down.
    passed: u64,
    /// Parts in flight.
    parts: u32,
    failed: Option<IoError>,
}

/// A request of this filter's own.
#[derive(Debug, Default)]
struct Part {
    /// What it is of: the request and its number.
    of: Option<(RequestId, u64)>,
    buffers: Vec<Buffer>,
}

struct StallFilter {
    disk: Arc<StallState>,
    pool: Pool,
    /// By request from above.
    kept: Vec<Option<Kept>>,
    /// How many of those there are.
    open: usize,
    /// The number of the last one.
    last: u64,
    /// By request of its own.
    parts: Vec<Part>,
    /// The buffers of the part that is being made.
    scratch: Vec<Buffer>,
    /// Requests that wait for buffers.
    waiting: BufferQueue,
    /// No request is too old before.
    look_at: Option<Instant>,
    /// A request was too old at the last look. Storage has been asked for its answers since.
    looks_again: bool,
    /// At which stall this chain is woken by another queue's.
    listens: Option<u64>,
}

/// Which way data is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    FromGuest,
    ToGuest,
}

/// Copies `bytes` between memory of a guest, from `start` on, and buffers.
fn copy(pool: &Pool, buffers: &[Buffer], guest: &Segments, start: usize, bytes: usize, way: Way) {
    let mut cursor = Cursor::default();
    cursor.skip(guest, start);
    let mut left = bytes;
    for buffer in buffers {
        let mut own = pool.segment(buffer).part(0, left);
        left -= own.len();
        while !own.is_empty() {
            let Some(piece) = cursor.next(guest, own.len()) else { return };
            match way {
                Way::FromGuest => own.copy_from_segment(&piece),
                Way::ToGuest => piece.copy_from_segment(&own.part(0, piece.len())),
            }
            own = own.part(piece.len(), own.len());
        }
    }
}

impl StallFilter {
    /// Takes buffers for so many bytes, or for fewer; returns for how many.
    fn take_buffers(&mut self, wanted: u64) -> u64 {
        let mut taken = 0;
        while taken < wanted && self.scratch.len() < PART_BUFFERS {
            let left = usize::try_from(wanted - taken).unwrap_or(usize::MAX);
            let Some(buffer) = self.pool.take(left) else { break };
            taken += buffer.len() as u64;
            self.scratch.push(buffer);
        }
        taken.min(wanted)
    }

    /// Passes as much of a read or write as the buffers allow.
    fn pump(&mut self, id: RequestId, io: &mut Io<'_>) {
        loop {
            let Some(kept) = self.kept[id.index()].as_ref() else { return };
            let (number, passed, whole) = (kept.number, kept.passed, io.request(id));
            let (operation, offset) = (whole.operation, whole.offset + passed);
            let left = whole.length - passed;
            if kept.failed.is_some() || left == 0 || kept.parts == PARTS_MAX {
                return self.finish_if_back(id, io);
            }
            let bytes = self.take_buffers(left);
            if bytes == 0 {
                return self.waiting.wait(id, io);
            }
            if operation == Operation::Write {
                let data = &io.request(id).data;
                let (start, length) = (passed as usize, bytes as usize);
                copy(&self.pool, &self.scratch, data, start, length, Way::FromGuest);
            }
            match self.pass_part(id, number, (operation, offset, bytes), io) {
                Ok(()) => {}
                Err(IoError::Stalled) => return self.fail(id, io),
                Err(error) => {
                    if let Some(kept) = self.kept[id.index()].as_mut() {
                        kept.failed = Some(error);
                    }
                }
            }
        }
    }

    /// Passes a part, with the buffers of the scratch.
    fn pass_part(
        &mut self,
        of: RequestId,
        number: u64,
        (operation, offset, bytes): (Operation, u64, u64),
        io: &mut Io<'_>,
    ) -> Result<(), IoError> {
        // Counted before it is passed: the disk does not come back while storage has it.
        let made = match self.disk.admit() {
            true => io.apart(operation, offset, bytes).ok_or_else(|| {
                self.disk.answered();
                IoError::Overload
            }),
            false => Err(IoError::Stalled),
        };
        let part = match made {
            Ok(part) => part,
            Err(error) => {
                self.scratch.drain(..).for_each(|buffer| self.pool.give(buffer));
                return Err(error);
            }
        };
        let mut left = bytes as usize;
        for buffer in &self.scratch {
            let length = left.min(buffer.len());
            left -= length;
            io.lend(part, &self.pool, buffer, length);
        }
        let place = &mut self.parts[part.index()];
        place.of = Some((of, number));
        std::mem::swap(&mut place.buffers, &mut self.scratch);
        if let Some(kept) = self.kept[of.index()].as_mut() {
            kept.passed += bytes;
            kept.parts += 1;
        }
        io.pass(part);
        Ok(())
    }

    /// Passes a request that has no data: the whole of it is one part.
    fn pass_whole(&mut self, id: RequestId, io: &mut Io<'_>) {
        let whole = io.request(id);
        let (operation, offset, length) = (whole.operation, whole.offset, whole.length);
        let of_guest = !whole.internal;
        if operation == Operation::Flush && of_guest && self.disk.owes_failure() {
            return self.fail(id, io);
        }
        let number = self.last;
        if let Err(error) = self.pass_part(id, number, (operation, offset, length), io) {
            self.end(id, Err(error), io);
        }
    }

    fn finish_if_back(&mut self, id: RequestId, io: &mut Io<'_>) {
        let Some(kept) = &self.kept[id.index()] else { return };
        if kept.parts == 0 {
            let result = kept.failed.map_or(Ok(()), Err);
            self.end(id, result, io);
        }
    }

    fn end(&mut self, id: RequestId, result: Result<(), IoError>, io: &mut Io<'_>) {
        if self.kept[id.index()].take().is_some() {
            self.open -= 1;
            if result == Err(IoError::Stalled) {
                self.disk.failed.add(1);
            }
            io.complete(id, result);
        }
    }

    fn fail(&mut self, id: RequestId, io: &mut Io<'_>) {
        self.end(id, Err(IoError::Stalled), io);
    }

    /// All that is in flight fails, while storage goes on with what it has.
    fn fail_all(&mut self, io: &mut Io<'_>) {
        self.waiting.clear();
        for slot in 0..self.kept.len() {
            if let Some(id) = self.kept[slot].as_ref().map(|kept| kept.id) {
                self.fail(id, io);
            }
        }
    }

    /// Storage has answered a part.
    fn part_up(&mut self, part: RequestId, io: &mut Io<'_>) {
        let answer = io.request(part);
        let (result, bytes, offset) = (answer.result, answer.length as usize, answer.offset);
        let of = self.parts[part.index()].of.take();
        let is_kept = |(id, number): &(RequestId, u64)| {
            self.kept[id.index()].as_ref().is_some_and(|kept| kept.number == *number)
        };
        let of = of.filter(is_kept).map(|(id, _)| id);
        if let (Some(id), Ok(())) = (of, result)
            && io.request(id).operation == Operation::Read
        {
            let (whole, buffers) = (io.request(id), &self.parts[part.index()].buffers);
            let start = (offset - whole.offset) as usize;
            copy(&self.pool, buffers, &whole.data, start, bytes, Way::ToGuest);
        }
        let buffers = &mut self.parts[part.index()].buffers;
        buffers.drain(..).for_each(|buffer| self.pool.give(buffer));
        io.release(part);
        self.disk.answered();
        if let Some(id) = of {
            self.go_on(id, result, io);
        }
        while let Some(next) = self.waiting.take_next() {
            self.pump(next, io);
            if self.waiting.stays_first(next) {
                return;
            }
        }
    }

    /// A part of this request is back.
    fn go_on(&mut self, id: RequestId, result: Result<(), IoError>, io: &mut Io<'_>) {
        let whole = io.request(id);
        let (length, moves) = (whole.length, has_data(whole.operation));
        let Some(kept) = self.kept[id.index()].as_mut() else { return };
        kept.parts -= 1;
        kept.failed = kept.failed.or(result.err());
        let more = moves && kept.failed.is_none() && kept.passed < length;
        if !moves {
            self.finish_if_back(id, io);
        } else if !self.waiting.goes_behind(id, more, io) {
            self.pump(id, io);
        }
    }

    /// Has this chain be woken when another queue finds that storage stalls.
    fn listen(&mut self, io: &Io<'_>) {
        let stalls = self.disk.stalls();
        if self.listens != Some(stalls) {
            self.listens = Some(stalls);
            self.disk.wake_at_stall(io.waker());
        }
    }

    /// For how long the oldest request is in flight that has not ended. One that has ended counts no more, though its answer is not fetched.
    fn oldest(&self, now: Instant, io: &Io<'_>) -> Option<Duration> {
        let began = self.kept.iter().flatten().filter_map(|kept| io.began(kept.id)).min()?;
        Some(now.saturating_duration_since(began))
    }

    /// Looks whether the oldest request is too old; whether the disk fails.
    fn is_stalled(&mut self, io: &Io<'_>) -> bool {
        if self.disk.is_reported() {
            return true;
        }
        let Some(at) = self.look_at else { return false };
        let now = Instant::now();
        if at > now {
            return false;
        }
        let timeout = self.disk.timeout();
        let Some(age) = self.oldest(now, io) else {
            (self.look_at, self.looks_again) = (None, false);
            return false;
        };
        let looked = std::mem::replace(&mut self.looks_again, false);
        if age >= timeout && !looked {
            // Storage may have answered while this thread did not run, and is asked after this.
            self.looks_again = true;
            self.look_at = now.checked_add(pause(now.saturating_duration_since(at), timeout));
            return false;
        }
        if age >= timeout && self.disk.report(age) {
            return true;
        }
        // Where nothing is in storage that could be waited for, no sooner than in another while.
        let left = timeout.checked_sub(age).filter(|left| !left.is_zero()).unwrap_or(timeout);
        self.look_at = now.checked_add(left);
        false
    }
}

/// How long after a look that found a request too old the next one is, where that look was so late.
fn pause(late: Duration, timeout: Duration) -> Duration {
    if late > LATE { LATE.min(timeout) } else { Duration::ZERO }
}

fn has_data(operation: Operation) -> bool {
    matches!(operation, Operation::Read | Operation::Write)
}

impl Filter for StallFilter {
    fn limits(&self) -> Limits {
        // A part has a buffer of at least one block, or is all of a request without data.
        Limits { children: self.pool.blocks() + ROOTS_MAX }
    }

    fn prepare(&mut self, capacity: usize) {
        self.kept.resize_with(capacity, || None);
        self.parts.resize_with(capacity, Part::default);
        self.waiting.prepare(capacity);
    }

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        // Storage has it, and no guest's memory is in its hands.
        io.hold(id);
        self.last += 1;
        let kept = Kept { id, number: self.last, passed: 0, parts: 0, failed: None };
        self.kept[id.index()] = Some(kept);
        self.open += 1;
        if let Some(began) = io.began(id) {
            let too_old = began.checked_add(self.disk.timeout());
            self.look_at = self.look_at.map_or(too_old, |at| too_old.map(|other| at.min(other)));
        }
        if has_data(io.request(id).operation) {
            self.pump(id, io);
        } else {
            self.pass_whole(id, io);
        }
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        // Nothing but requests of its own goes down.
        self.part_up(id, io);
    }

    fn tick(&mut self, io: &mut Io<'_>) -> Option<Instant> {
        if self.open == 0 {
            self.looks_again = false;
            return None;
        }
        self.listen(io);
        if self.is_stalled(io) {
            self.fail_all(io);
            return None;
        }
        self.look_at
    }
}

#[cfg(test)]
mod tests;
