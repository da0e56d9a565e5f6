//! The chain that a disk is: filters over a backend. One chain serves one queue and is used by one
//! thread; a disk with several queues has several chains, whose filters may share atomics.
//!
//! ```text
//!  front end      submit ──┐                 ┌──> next_done
//!                          v                 |
//!  filter 0           down ── pass      up ── complete     align: whole, aligned sectors
//!                          v                 |
//!  filter 1           down ── pass      up ── complete     crypt
//!                          v                 |
//!  backend              submit ·········> complete         file, mem
//! ```
//!
//! A request is at exactly one layer at a time. The layer that has it does one of three things, at
//! once or later:
//! - **pass**: hand it down as it is; it comes back through [`Filter::up`];
//! - **complete**: end it here, with a result; the layer above gets it through [`Filter::up`];
//! - **split**: make children of it ([`Io::child`]), change them at will, pass them down, and complete
//!   it when they have come up again. A child comes up to its maker only, which releases it.
//!
//! Layers do not call each other: they put work on the chain's list and [`Chain::poll`] runs it until
//! nothing is left but what the kernel has to finish. So a stack of any depth needs no recursion, and
//! a filter may complete from within `down`. Whoever waits (for a buffer, a lock, a time) keeps the
//! request's id in a list of its own and looks again in `up` or [`Filter::tick`].
//!
//! Nothing here allocates or locks while requests flow: slots, lists and tables are made once, for
//! [`Limits::children`] children a filter.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::dirty::Bitmaps;
use crate::memory::{Cursor, SEGMENTS_MAX, Segment, Segments};
use crate::request::{IoError, LOGICAL_BLOCK, Operation, Request, RequestId, Requests};

/// The most requests of the front end that are under way in one chain. QEMU's rings have 128 entries
/// unless told otherwise; more than this wait in their ring.
pub const ROOTS_MAX: usize = 256;

/// How many requests a filter makes of its own at most, over those it is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Children alive at the same time.
    pub children: usize,
}

/// A link of a chain. All calls come from the one thread that has the chain.
pub trait Filter: Send {
    /// How many children it makes at most. Asked once, when the chain is built.
    fn limits(&self) -> Limits;

    /// Told once how many requests there can be, so that tables beside them can be made.
    fn prepare(&mut self, capacity: usize);

    /// A request arrives from above.
    fn down(&mut self, id: RequestId, io: &mut Io<'_>);

    /// A request that was passed, or a child of this filter, comes back; its `result` says how it went.
    fn up(&mut self, id: RequestId, io: &mut Io<'_>);

    /// Called on every pass. A filter that waits for something no completion of this chain will tell it
    /// of looks for it here, and says after how long it wants to be called again at the latest.
    fn tick(&mut self, _io: &mut Io<'_>) -> Option<Duration> {
        None
    }

    /// Told when the chain is being drained, and when it goes on: a filter that holds requests back for a
    /// time does not do so meanwhile.
    fn hasten(&mut self, _hastened: bool) {}
}

/// The end of a chain: where data rests. All calls come from the one thread that has the chain.
pub trait Backend: Send {
    /// Told once how many requests there can be.
    fn prepare(&mut self, capacity: usize);

    /// Takes a request; completes it now or later. Requests in flight may be done in any order.
    fn submit(&mut self, id: RequestId, io: &mut Io<'_>);

    /// Called on every pass: hands what was submitted to the kernel in one go and completes what is
    /// finished. Never blocks.
    fn poll(&mut self, io: &mut Io<'_>);

    /// A descriptor that becomes readable when [`Backend::poll`] has something to complete; none if
    /// requests are always completed within `submit`.
    fn wait_handle(&self) -> Option<BorrowedFd<'_>>;

    /// After how long [`Backend::poll`] is to be called again although [`Backend::wait_handle`] has not become
    /// readable; asked for after each `poll`.
    fn wake_after(&self) -> Option<Duration> {
        None
    }
}

#[derive(Clone, Copy, Debug)]
enum Work {
    Down(RequestId),
    Up(RequestId),
}

/// What a layer may do with requests.
pub struct Io<'a> {
    requests: &'a mut Requests,
    work: &'a mut VecDeque<Work>,
    level: usize,
}

impl Io<'_> {
    /// The request.
    #[must_use]
    pub fn request(&self, id: RequestId) -> &Request {
        self.requests.get(id)
    }

    /// Hands a request on to the layer below.
    pub fn pass(&mut self, id: RequestId) {
        self.requests.get_mut(id).level = self.level + 1;
        self.work.push_back(Work::Down(id));
    }

    /// Ends a request at this layer.
    pub fn complete(&mut self, id: RequestId, result: Result<(), IoError>) {
        let request = self.requests.get_mut(id);
        debug_assert_eq!(request.level, self.level);
        request.result = result;
        self.work.push_back(Work::Up(id));
    }

    /// Makes a part of `parent`, without data, still at this layer. None when the filter has more than
    /// it said it would ([`Limits`]).
    pub fn child(
        &mut self,
        parent: RequestId,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> Option<RequestId> {
        let id = self.requests.take()?;
        let child = self.requests.get_mut(id);
        (child.operation, child.offset, child.length) = (operation, offset, length);
        (child.parent, child.level, child.maker) = (Some(parent), self.level, Some(self.level));
        Some(id)
    }

    /// Adds memory to a child.
    pub fn add_segment(&mut self, child: RequestId, segment: Segment) {
        self.requests.get_mut(child).data.push(segment);
    }

    /// Adds `length` bytes of the parent's memory to a child, from the cursor on.
    pub fn add_from_parent(
        &mut self,
        parent: RequestId,
        child: RequestId,
        cursor: &mut Cursor,
        length: usize,
    ) {
        if let Some((from, to)) = self.requests.pair(parent, child) {
            to.data.push_from(&from.data, cursor, length);
        }
    }

    /// Whose child this is, if this layer made it.
    #[must_use]
    pub fn parent(&self, id: RequestId) -> Option<RequestId> {
        let request = self.requests.get(id);
        request.parent.filter(|_| request.maker == Some(self.level))
    }

    /// Forgets a child that came up, or was not passed down.
    pub fn release(&mut self, child: RequestId) {
        debug_assert_eq!(self.requests.get(child).maker, Some(self.level));
        self.requests.give(child);
    }
}

fn sooner(one: Option<Duration>, other: Option<Duration>) -> Option<Duration> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

/// A finished request of the front end.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// What the front end gave it.
    pub tag: u64,
    /// What was asked.
    pub operation: Operation,
    /// Where.
    pub offset: u64,
    /// How much, in bytes.
    pub length: u64,
    /// How it went.
    pub result: Result<(), IoError>,
}

/// A chain; see the module.
pub struct Chain {
    size: u64,
    read_only: bool,
    /// Before the filters, as it is dropped in this order: the kernel may still write into their buffers until
    /// it is gone.
    backend: Box<dyn Backend>,
    filters: Vec<Box<dyn Filter>>,
    requests: Requests,
    work: VecDeque<Work>,
    done: VecDeque<RequestId>,
    roots: usize,
    wake_after: Option<Duration>,
    bitmaps: Option<Arc<Bitmaps>>,
}

impl Chain {
    /// Puts a chain together, `filters` from the guest downwards, for a disk of `size` bytes.
    #[must_use]
    pub fn new(
        size: u64,
        read_only: bool,
        mut filters: Vec<Box<dyn Filter>>,
        mut backend: Box<dyn Backend>,
    ) -> Self {
        let children: usize = filters.iter().map(|filter| filter.limits().children).sum();
        let requests = Requests::new(u32::try_from(ROOTS_MAX + children).unwrap_or(u32::MAX));
        let capacity = requests.capacity();
        filters.iter_mut().for_each(|filter| filter.prepare(capacity));
        backend.prepare(capacity);
        Self {
            size,
            read_only,
            filters,
            backend,
            requests,
            work: VecDeque::with_capacity(capacity),
            done: VecDeque::with_capacity(ROOTS_MAX),
            roots: 0,
            wake_after: None,
            bitmaps: None,
        }
    }

    /// The same chain, whose changes are marked in the disk's dirty bitmaps.
    #[must_use]
    pub fn marking(self, bitmaps: Arc<Bitmaps>) -> Self {
        Self { bitmaps: Some(bitmaps), ..self }
    }

    /// The disk's size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether everything that changes the disk is refused.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// How many slots for requests there are, children included.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.requests.capacity()
    }

    /// How many of the front end's requests are under way or not yet fetched with [`Chain::next_done`].
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.roots
    }

    /// A slot for a new request, to be filled and submitted, or cancelled; none while [`ROOTS_MAX`] are
    /// under way.
    pub fn begin(&mut self) -> Option<RequestId> {
        if self.roots == ROOTS_MAX {
            return None;
        }
        let id = self.requests.take()?;
        self.roots += 1;
        Some(id)
    }

    /// The memory of a request that has begun.
    pub fn data_mut(&mut self, id: RequestId) -> &mut Segments {
        &mut self.requests.get_mut(id).data
    }

    /// Gives up a request that has begun and was not submitted.
    pub fn cancel(&mut self, id: RequestId) {
        self.roots -= 1;
        self.requests.give(id);
    }

    /// Submits a request that has begun. For reads and writes the length is that of its memory; it is
    /// `length` for the others.
    pub fn submit(
        &mut self,
        id: RequestId,
        operation: Operation,
        offset: u64,
        length: u64,
        tag: u64,
    ) {
        let request = self.requests.get_mut(id);
        let (offset, length) = match operation {
            Operation::Read | Operation::Write => (offset, request.data.bytes() as u64),
            Operation::Flush => (0, 0),
            Operation::Discard | Operation::WriteZeroes { .. } => (offset, length),
        };
        (request.operation, request.offset, request.length) = (operation, offset, length);
        request.tag = tag;
        let scattered = request.data.as_slice().len() > SEGMENTS_MAX;
        let checked =
            if scattered { Err(IoError::Scattered) } else { self.check(operation, offset, length) };
        match checked {
            Err(refusal) => {
                self.requests.get_mut(id).result = Err(refusal);
                self.done.push_back(id);
            }
            Ok(()) if length == 0 && operation != Operation::Flush => self.done.push_back(id),
            Ok(()) => {
                self.work.push_back(Work::Down(id));
                self.mark(operation, offset, length);
            }
        }
    }

    fn mark(&self, operation: Operation, offset: u64, length: u64) {
        if let (Some(bitmaps), true) = (&self.bitmaps, operation.changes()) {
            bitmaps.changed(offset, length);
        }
    }

    /// What no layer below has to check again.
    fn check(&self, operation: Operation, offset: u64, length: u64) -> Result<(), IoError> {
        if operation == Operation::Flush {
            return Ok(());
        }
        let end = offset.checked_add(length).ok_or(IoError::OutOfRange)?;
        if end > self.size || !(offset | length).is_multiple_of(LOGICAL_BLOCK) {
            return Err(IoError::OutOfRange);
        }
        if self.read_only && operation.changes() {
            return Err(IoError::ReadOnly);
        }
        Ok(())
    }

    /// Runs everything that can be done without waiting.
    pub fn poll(&mut self) {
        loop {
            while let Some(work) = self.work.pop_front() {
                self.run(work);
            }
            self.wake_after = None;
            for (level, filter) in self.filters.iter_mut().enumerate() {
                let mut io = Io { requests: &mut self.requests, work: &mut self.work, level };
                self.wake_after = sooner(self.wake_after, filter.tick(&mut io));
            }
            let level = self.filters.len();
            let mut io = Io { requests: &mut self.requests, work: &mut self.work, level };
            self.backend.poll(&mut io);
            self.wake_after = sooner(self.wake_after, self.backend.wake_after());
            if self.work.is_empty() {
                return;
            }
        }
    }

    fn run(&mut self, work: Work) {
        let (requests, list) = (&mut self.requests, &mut self.work);
        match work {
            Work::Down(id) => {
                let level = requests.get(id).level;
                let mut io = Io { requests, work: list, level };
                match self.filters.get_mut(level) {
                    Some(filter) => filter.down(id, &mut io),
                    None => self.backend.submit(id, &mut io),
                }
            }
            Work::Up(id) => {
                let request = requests.get_mut(id);
                let Some(level) = request.level.checked_sub(1) else {
                    return self.done.push_back(id);
                };
                request.level = level;
                self.filters[level].up(id, &mut Io { requests, work: list, level });
            }
        }
    }

    /// The next finished request.
    pub fn next_done(&mut self) -> Option<Done> {
        let id = self.done.pop_front()?;
        let request = self.requests.get(id);
        let done = Done {
            tag: request.tag,
            operation: request.operation,
            offset: request.offset,
            length: request.length,
            result: request.result,
        };
        // Once more, for bitmaps that have begun since it was submitted.
        self.mark(done.operation, done.offset, done.length);
        self.cancel(id);
        Some(done)
    }

    /// Says whether the chain is being drained ([`Filter::hasten`]).
    pub fn hasten(&mut self, hastened: bool) {
        self.filters.iter_mut().for_each(|filter| filter.hasten(hastened));
    }

    /// After how long [`Chain::poll`] is to be called again even if nothing happens.
    #[must_use]
    pub fn wake_after(&self) -> Option<Duration> {
        self.wake_after
    }

    /// A descriptor that becomes readable when [`Chain::poll`] has something to do.
    #[must_use]
    pub fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        self.backend.wait_handle()
    }
}
