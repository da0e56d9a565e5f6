//! The chain of a disk: filters over storage. One chain serves one queue and is used by one
//! thread; a disk with several queues has several chains, whose filters may share atomics.
//!
//! ```text
//!  front end      submit ──┐                 ┌──> next_done
//!                          v                 |
//!  filter 0           down ── pass      up ── complete     align: whole, aligned sectors
//!                          v                 |
//!  filter 1           down ── pass      up ── complete     crypt
//!                          v                 |
//!  storage              submit ·········> complete         file, mem
//! ```
//!
//! A request is at exactly one layer at a time. The layer that has it does one of three things, at
//! once or later:
//! - **pass**: hand it down as it is; it comes back through [`Filter::up`];
//! - **complete**: end it here, with a result; the layer above gets it through [`Filter::up`];
//! - **split**: make children of it ([`Io::child`]), change them at will, pass them down, and complete
//!   it when they have come up again. A child comes up to its maker only, which releases it.
//!
//! A filter may also make requests **apart** from those that it was given ([`Io::apart`]), and complete these while the others are still
//! below. The front end has its answers then, and the chain is not idle ([`Chain::is_idle`]) before storage has answered as well.
//!
//! Layers do not call each other: they put work on the chain's list, and [`Chain::poll`] runs it until only the
//! kernel has work left. So a stack of any depth needs no recursion, and
//! a filter may complete from within `down`. A filter that waits (for a buffer, a lock, a time) keeps the
//! request's id in a list of its own, says so ([`Io::hold`]) and checks again in `up` or [`Filter::tick`].
//!
//! **Wake contract.** The chain's thread sleeps in [`Chain::wait`], on one wait set:
//! ```text
//!  the chain's eventfd         others write it: a sector lock is free, a chunk is marked, the thread of a qcow2
//!                              image has answered ([`crate::stack::waker`])
//!  the storage's descriptor    the kernel makes it ready: completions of io_uring, a connection to a server
//!  the front end's own         a kick, a connection, a stop
//!  the next deadline           a point in time: the end of a delay, a budget that fills
//! ```
//! So a layer that waits arranges to be woken before it checks for the last time and returns: by a completion of its
//! own requests, by handing [`Io::waker`] to the thread that will have the news, or by the deadline that
//! it returns from [`Filter::tick`]. A layer never relies on another pass, and never polls for an event that
//! another thread could announce. Only the kernel does not say when it can do again what it refused: the file engine
//! then sets a deadline for the next attempt.
//!
//! The chain confines a filter's defect to that filter (docs/decisions/053). A request that a filter has neither
//! passed, completed, split nor held when it returns is completed with [`IoError::Forgotten`]; a filter cannot pass
//! or complete a request that it does not have; a request with children in flight goes up after the last of them, so
//! that no guest memory is in use after the guest got it back; and a filter makes no more children than it declared.
//!
//! Nothing here allocates or locks while requests flow: slots, lists and tables are made once, for
//! [`Limits::children`] children a filter.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use nix::poll::PollFlags;

use crate::stack::dirty::Bitmaps;
use crate::stack::flight::Flight;
use crate::stack::memory::{Cursor, SEGMENTS_MAX, Segment, Segments};
use crate::stack::pool::{Buffer, Pool};
use crate::stack::request::{
    IoError, LOGICAL_BLOCK, Operation, Request, RequestId, Requests, Turn,
};
use crate::stack::waker::Waker;

mod wait;

/// The most requests of the front end in flight in one chain. QEMU's rings have 128 entries
/// unless told otherwise; further requests wait in their ring.
pub const ROOTS_MAX: usize = 256;

/// How many requests a filter makes itself at most, besides those it is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Children, and requests apart, alive at the same time.
    pub children: usize,
}

/// A filter of a chain. All calls come from the one thread that has the chain.
pub trait Filter: Send {
    /// How many children it makes at most. Asked once, when the chain is built.
    fn limits(&self) -> Limits;

    /// Called once with the number of slots, so that tables indexed by slot can be made.
    fn prepare(&mut self, capacity: usize);

    /// A request arrives from above.
    fn down(&mut self, id: RequestId, io: &mut Io<'_>);

    /// A request that was passed, or a child of this filter, comes back; its `result` says how it went.
    fn up(&mut self, id: RequestId, io: &mut Io<'_>);

    /// Called on every pass. A filter that waits for something other than a completion of this chain checks for it
    /// here, after it has arranged to be woken ([`Io::waker`]). If it waits for a point in time, it returns the
    /// latest time at which it must be called again.
    fn tick(&mut self, _io: &mut Io<'_>) -> Option<Instant> {
        None
    }

    /// Called when the chain starts or stops being drained: while it is drained, a filter that delays requests
    /// does not do so.
    fn hasten(&mut self, _hastened: bool) {}
}

/// The end of a chain: the place where data is stored. All calls come from the one thread that has the chain.
pub trait Storage: Send {
    /// Called once with the number of slots.
    fn prepare(&mut self, capacity: usize);

    /// Takes a request; completes it now or later. Requests in flight may be done in any order.
    fn submit(&mut self, id: RequestId, io: &mut Io<'_>);

    /// Called on every pass: hands all submitted requests to the kernel in one go and completes the finished
    /// ones. Never blocks.
    fn poll(&mut self, io: &mut Io<'_>);

    /// Called before the thread sleeps, after [`Storage::poll`] found nothing to do. The storage asks to be woken by the next
    /// answer, and then handles the answers that have come meanwhile. Never blocks.
    fn before_sleep(&mut self, _io: &mut Io<'_>) {}

    /// A descriptor that the kernel makes ready when [`Storage::poll`] has something to do; none if
    /// requests are completed within `submit`, or by a thread that uses the chain's waker.
    fn wait_handle(&self) -> Option<BorrowedFd<'_>>;

    /// What that descriptor is to be ready for.
    fn wait_events(&self) -> PollFlags {
        PollFlags::POLLIN
    }

    /// Whether requests are completed within `submit` or the next `poll`.
    fn works_at_once(&self) -> bool {
        self.wait_handle().is_none()
    }

    /// Waits until the kernel no longer uses the memory of requests; false if it cannot find out.
    fn finish(&mut self) -> bool {
        true
    }

    /// Whether another process has its buffers, too: then it moves what is in other memory that may be shared without
    /// copying it, and leaves what was read in its buffers where that is asked for.
    fn shares_memory(&self) -> bool {
        false
    }

    /// When [`Storage::poll`] must be called again even if nothing wakes the thread; asked for after each
    /// `poll`.
    fn deadline(&self) -> Option<Instant> {
        None
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Down(RequestId),
    Up(RequestId),
}

/// Checks what the filters do with requests.
#[derive(Debug)]
struct FilterAudit {
    /// How many children each filter may still make.
    left: Vec<usize>,
    /// Requests to check when the filter that was called returns.
    touched: Vec<RequestId>,
    /// How many requests there are that filters have made apart from those of the front end.
    apart: usize,
    /// How often a filter forgot a request, or misused one that it did not have.
    forgotten: u64,
    misused: u64,
}

impl FilterAudit {
    /// Logs the first time, the second, the fourth, and so on: a defect may occur with each request.
    fn misuse(&mut self, level: usize, what: &'static str) {
        self.misused += 1;
        if self.misused.is_power_of_two() {
            tracing::error!(filter = level, times = self.misused, what, "a filter has a defect");
        }
    }

    fn forgot(&mut self, level: usize) {
        self.forgotten += 1;
        if self.forgotten.is_power_of_two() {
            let forgotten = self.forgotten;
            tracing::error!(filter = level, forgotten, "a filter forgets requests; they fail");
        }
    }
}

/// What a layer can do with requests.
pub struct Io<'a> {
    requests: &'a mut Requests,
    work: &'a mut VecDeque<Step>,
    audit: &'a mut FilterAudit,
    flight: &'a Flight,
    waker: &'a Waker,
    level: usize,
}

impl Io<'_> {
    /// Wakes this chain's thread: for the thread that will have news for a waiting layer.
    #[must_use]
    pub fn waker(&self) -> &Waker {
        self.waker
    }

    /// The request.
    #[must_use]
    pub fn request(&self, id: RequestId) -> &Request {
        self.requests.get(id)
    }

    /// Whether this layer has the request and must act on it.
    fn owns(&self, id: RequestId) -> bool {
        let request = self.requests.get(id);
        request.turn == Turn::Layer && request.level == self.level
    }

    /// Hands a request on to the layer below.
    pub fn pass(&mut self, id: RequestId) {
        if !self.owns(id) {
            return self.audit.misuse(self.level, "it passed a request that it does not have");
        }
        let request = self.requests.get_mut(id);
        (request.level, request.turn, request.held) = (self.level + 1, Turn::Chain, false);
        self.work.push_back(Step::Down(id));
    }

    /// Completes a request at this layer. It goes up when all its children are released.
    pub fn complete(&mut self, id: RequestId, result: Result<(), IoError>) {
        if !self.owns(id) {
            return self.audit.misuse(self.level, "it ended a request that it does not have");
        }
        let request = self.requests.get_mut(id);
        (request.result, request.held) = (result, false);
        if request.children > 0 {
            request.turn = Turn::Parts;
            return;
        }
        request.turn = Turn::Chain;
        self.work.push_back(Step::Up(id));
    }

    /// Keeps a request for later: it must be passed or completed in another call of the filter.
    pub fn hold(&mut self, id: RequestId) {
        if !self.owns(id) {
            return self.audit.misuse(self.level, "it keeps a request that it does not have");
        }
        self.requests.get_mut(id).held = true;
    }

    /// The same of a request that is kept back on purpose: until [`Io::let_go`] its front end does not wait for storage.
    pub fn hold_back(&mut self, id: RequestId) {
        self.hold(id);
        if self.is_of_front_end(id) {
            self.flight.ended(id.index());
        }
    }

    /// Passes a request that was held back.
    pub fn let_go(&mut self, id: RequestId, now: Instant) {
        if self.is_of_front_end(id) {
            self.flight.began(id.index(), now);
        }
        self.pass(id);
    }

    /// Whether no filter has made it.
    fn is_of_front_end(&self, id: RequestId) -> bool {
        self.requests.get(id).maker.is_none()
    }

    /// Since when a request of the front end is in flight; none where the front end does not say so, or a filter keeps it back.
    pub(crate) fn began(&self, id: RequestId) -> Option<Instant> {
        self.flight.since(id.index())
    }

    /// Makes a request that belongs to no other one, without data, still at this layer. It comes up to its maker only, which releases
    /// it. None when the filter has more requests of its own than it declared ([`Limits`]).
    pub fn apart(&mut self, operation: Operation, offset: u64, length: u64) -> Option<RequestId> {
        let left = self.audit.left.get_mut(self.level).filter(|left| **left > 0)?;
        let id = self.requests.take()?;
        *left -= 1;
        let made = self.requests.get_mut(id);
        (made.operation, made.offset, made.length) = (operation, offset, length);
        (made.level, made.maker) = (self.level, Some(self.level));
        self.audit.apart += 1;
        self.audit.touched.push(id);
        Some(id)
    }

    /// Makes a child of `parent`, without data, still at this layer. None when the filter has more children than
    /// it declared ([`Limits`]), or does not have the parent.
    pub fn child(
        &mut self,
        parent: RequestId,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> Option<RequestId> {
        if !self.owns(parent) {
            self.audit.misuse(self.level, "it splits a request that it does not have");
            return None;
        }
        let left = self.audit.left.get_mut(self.level).filter(|left| **left > 0)?;
        let id = self.requests.take()?;
        *left -= 1;
        let whole = self.requests.get_mut(parent);
        (whole.children, whole.held) = (whole.children + 1, false);
        let child = self.requests.get_mut(id);
        (child.operation, child.offset, child.length) = (operation, offset, length);
        (child.parent, child.level, child.maker) = (Some(parent), self.level, Some(self.level));
        self.audit.touched.push(id);
        Some(id)
    }

    /// Adds the first `length` bytes of a buffer to a child. The pool's memory stays for as long as the child has it;
    /// the buffer itself is given back when the child has come up.
    pub fn lend(&mut self, child: RequestId, pool: &Pool, buffer: &Buffer, length: usize) {
        let segment = pool.segment(buffer).part(0, length);
        self.requests.get_mut(child).data.push_of(pool.arena(), segment);
    }

    /// Has storage leave what is read in buffers of its own, if it likes: what comes up is then in the request's list
    /// `lent`, until [`Io::return_lent`]. Only for the layer directly above storage that shares memory: any other one
    /// would have the layers between find nothing in the request's memory.
    pub(crate) fn take_lent(&mut self, id: RequestId) {
        self.requests.get_mut(id).takes_lent = true;
    }

    /// Adds a part of what was read, in a buffer of the storage, to a request that takes that.
    pub(crate) fn show_lent(&mut self, id: RequestId, segment: Segment) {
        self.requests.get_mut(id).lent.push(segment);
    }

    /// Gives the storage its buffers back.
    pub(crate) fn return_lent(&mut self, id: RequestId) {
        self.requests.get_mut(id).lent.clear();
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

    /// The parent of this child, if this layer made it.
    #[must_use]
    pub fn parent(&self, id: RequestId) -> Option<RequestId> {
        let request = self.requests.get(id);
        request.parent.filter(|_| request.maker == Some(self.level))
    }

    /// How many children of a request are not released.
    #[must_use]
    pub fn parts(&self, id: RequestId) -> u32 {
        self.requests.get(id).children
    }

    /// Releases a request that this layer made, which came up or was not passed down.
    pub fn release(&mut self, child: RequestId) {
        let made = self.requests.get(child);
        let (maker, parent, children) = (made.maker, made.parent, made.children);
        if maker != Some(self.level) || !self.owns(child) || children > 0 {
            return self.audit.misuse(self.level, "it forgets a part that it does not have");
        }
        self.requests.give(child);
        self.audit.left[self.level] += 1;
        let Some(parent) = parent else {
            self.audit.apart -= 1;
            return;
        };
        let whole = self.requests.get_mut(parent);
        whole.children -= 1;
        if whole.children > 0 {
            return;
        }
        if whole.turn == Turn::Parts {
            whole.turn = Turn::Chain;
            self.work.push_back(Step::Up(parent));
        } else {
            self.audit.touched.push(parent);
        }
    }

    /// Completes the requests that the filter left unhandled when it returned.
    fn settle(&mut self, called_with: Option<RequestId>) {
        self.audit.touched.extend(called_with);
        while let Some(id) = self.audit.touched.pop() {
            let request = self.requests.get(id);
            if !self.owns(id) || request.held || request.children > 0 {
                continue;
            }
            let made_here = request.maker == Some(self.level);
            self.audit.forgot(self.level);
            if made_here {
                self.release(id);
            } else {
                self.complete(id, Err(IoError::Forgotten));
            }
        }
    }
}

/// Marks a change in dirty bitmaps, if there are any.
fn mark(bitmaps: Option<&Bitmaps>, operation: Operation, offset: u64, length: u64) {
    if let (Some(bitmaps), true) = (bitmaps, operation.changes()) {
        bitmaps.changed(offset, length);
    }
}

fn sooner(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

/// A finished request of the front end.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// The front end's own number for it.
    pub tag: u64,
    /// The operation.
    pub operation: Operation,
    /// The offset.
    pub offset: u64,
    /// The length, in bytes.
    pub length: u64,
    /// The result.
    pub result: Result<(), IoError>,
}

/// A chain; see the module.
pub struct Chain {
    size: u64,
    read_only: bool,
    /// Declared before the filters, so dropped before them: the kernel may still write into their buffers until
    /// then.
    storage: Box<dyn Storage>,
    filters: Vec<Box<dyn Filter>>,
    requests: Requests,
    work: VecDeque<Step>,
    audit: Box<FilterAudit>,
    done: VecDeque<RequestId>,
    roots: usize,
    deadline: Option<Instant>,
    waker: Waker,
    bitmaps: Option<Arc<Bitmaps>>,
    /// Whether a filter holds requests back.
    holds_back: bool,
    flight: Arc<Flight>,
}

impl Chain {
    /// Puts a chain together, `filters` from the guest downwards, for a disk of `size` bytes.
    ///
    /// # Errors
    /// The system has no eventfd.
    pub fn new(
        size: u64,
        read_only: bool,
        mut filters: Vec<Box<dyn Filter>>,
        mut storage: Box<dyn Storage>,
    ) -> io::Result<Self> {
        let left: Vec<usize> = filters.iter().map(|filter| filter.limits().children).collect();
        let children: usize = left.iter().sum();
        let requests = Requests::new(u32::try_from(ROOTS_MAX + children).unwrap_or(u32::MAX));
        let capacity = requests.capacity();
        filters.iter_mut().for_each(|filter| filter.prepare(capacity));
        storage.prepare(capacity);
        Ok(Self {
            size,
            read_only,
            filters,
            storage,
            requests,
            work: VecDeque::with_capacity(capacity),
            audit: Box::new(FilterAudit {
                left,
                touched: Vec::with_capacity(capacity),
                apart: 0,
                forgotten: 0,
                misused: 0,
            }),
            done: VecDeque::with_capacity(ROOTS_MAX),
            roots: 0,
            deadline: None,
            waker: Waker::new()?,
            bitmaps: None,
            holds_back: false,
            flight: Arc::new(Flight::new(capacity)),
        })
    }

    /// The same chain, one of whose filters holds requests back, or none of which does.
    #[must_use]
    pub fn holding_back(mut self, holds_back: bool) -> Self {
        self.holds_back = holds_back;
        self
    }

    /// The same chain, with its changes marked in the disk's dirty bitmaps.
    #[must_use]
    pub fn marking(mut self, bitmaps: Arc<Bitmaps>) -> Self {
        self.bitmaps = Some(bitmaps);
        self
    }

    /// Marks its changes in these dirty bitmaps from now on, and no others. The chain has no request in flight.
    pub fn mark_in(&mut self, bitmaps: Arc<Bitmaps>) {
        self.bitmaps = Some(bitmaps);
    }

    /// The disk's size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether all changes of the disk are refused.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// How many slots for requests there are, children included.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.requests.capacity()
    }

    /// How many of the front end's requests are in flight or not yet fetched with [`Chain::next_done`].
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.roots
    }

    /// Whether storage has answered all that it was given, and the front end has fetched all answers. Without filters that make requests
    /// apart it is so when [`Chain::in_flight`] is 0.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.roots == 0 && self.audit.apart == 0
    }

    /// Notes that this process has asked for a request that has begun, and no guest.
    pub(crate) fn set_internal(&mut self, id: RequestId) {
        self.requests.get_mut(id).internal = true;
    }

    /// Since when its requests are in flight, for those whose front end says so ([`Chain::began`]).
    #[must_use]
    pub fn flight(&self) -> &Arc<Flight> {
        &self.flight
    }

    /// Notes since when a request is in flight that has begun.
    pub fn began(&self, id: RequestId, at: Instant) {
        self.flight.began(id.index(), at);
    }

    /// How many requests filters have forgotten; each has failed with [`IoError::Forgotten`].
    #[must_use]
    pub fn forgotten(&self) -> u64 {
        self.audit.forgotten
    }

    /// A slot for a new request, which must be submitted or cancelled; none while [`ROOTS_MAX`] are
    /// in flight.
    pub fn begin(&mut self) -> Option<RequestId> {
        if self.roots == ROOTS_MAX {
            return None;
        }
        let id = self.requests.take()?;
        self.requests.get_mut(id).turn = Turn::Chain;
        self.roots += 1;
        Some(id)
    }

    /// The memory of a request that has begun.
    pub fn data_mut(&mut self, id: RequestId) -> &mut Segments {
        &mut self.requests.get_mut(id).data
    }

    /// The memory of a request that has begun.
    #[must_use]
    pub fn data(&self, id: RequestId) -> &Segments {
        &self.requests.get(id).data
    }

    /// Cancels a request that has begun and was not submitted.
    pub fn cancel(&mut self, id: RequestId) {
        self.roots -= 1;
        self.flight.ended(id.index());
        self.requests.give(id);
    }

    /// Submits a request that has begun. The length of reads and writes is that of their memory; for other
    /// operations it is `length`.
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
                self.requests.get_mut(id).turn = Turn::Chain;
                self.work.push_back(Step::Down(id));
                self.mark(operation, offset, length);
            }
        }
    }

    fn mark(&self, operation: Operation, offset: u64, length: u64) {
        mark(self.bitmaps.as_deref(), operation, offset, length);
    }

    /// Checks that no layer below has to repeat.
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

    /// Does all work that needs no waiting.
    pub fn poll(&mut self) {
        loop {
            while let Some(work) = self.work.pop_front() {
                self.run(work);
            }
            self.deadline = None;
            let (requests, work, audit) = (&mut self.requests, &mut self.work, &mut self.audit);
            let (flight, waker) = (&*self.flight, &self.waker);
            let mut io = Io { requests, work, audit, flight, waker, level: 0 };
            for (level, filter) in self.filters.iter_mut().enumerate() {
                io.level = level;
                self.deadline = sooner(self.deadline, filter.tick(&mut io));
                io.settle(None);
            }
            io.level = self.filters.len();
            self.storage.poll(&mut io);
            self.deadline = sooner(self.deadline, self.storage.deadline());
            if self.work.is_empty() {
                return;
            }
        }
    }

    fn run(&mut self, work: Step) {
        let (requests, list, audit) = (&mut self.requests, &mut self.work, &mut self.audit);
        let (flight, waker) = (&*self.flight, &self.waker);
        match work {
            Step::Down(id) => {
                let request = requests.get_mut(id);
                request.turn = Turn::Layer;
                let level = request.level;
                let mut io = Io { requests, work: list, audit, flight, waker, level };
                match self.filters.get_mut(level) {
                    Some(filter) => {
                        filter.down(id, &mut io);
                        io.settle(Some(id));
                    }
                    None => self.storage.submit(id, &mut io),
                }
            }
            Step::Up(id) => {
                let request = requests.get_mut(id);
                let Some(level) = request.level.checked_sub(1) else {
                    return self.done.push_back(id);
                };
                (request.level, request.turn) = (level, Turn::Layer);
                if request.maker == Some(level) && request.parent.is_none() {
                    // The front end may have its answer since long, and bitmaps were started after that.
                    let (operation, offset) = (request.operation, request.offset);
                    mark(self.bitmaps.as_deref(), operation, offset, request.length);
                }
                let mut io = Io { requests, work: list, audit, flight, waker, level };
                self.filters[level].up(id, &mut io);
                io.settle(Some(id));
            }
        }
    }

    /// The memory that the next finished request was to fill; it may be filled in part, or not at all. None if that
    /// request is not a read.
    #[must_use]
    pub fn next_filled(&self) -> Option<&Segments> {
        let request = self.requests.get(*self.done.front()?);
        (request.operation == Operation::Read).then_some(&request.data)
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
        // Once more, for bitmaps that were started after it was submitted.
        self.mark(done.operation, done.offset, done.length);
        self.cancel(id);
        Some(done)
    }

    /// Sets whether the chain is being drained ([`Filter::hasten`]).
    pub fn hasten(&mut self, hastened: bool) {
        self.filters.iter_mut().for_each(|filter| filter.hasten(hastened));
    }

    /// Puts other storage under the filters; returns the former. The chain is idle.
    ///
    /// # Panics
    /// A request is in flight, or was not fetched.
    pub fn exchange_storage(&mut self, mut storage: Box<dyn Storage>) -> Box<dyn Storage> {
        assert!(self.is_idle(), "storage is exchanged under a request");
        storage.prepare(self.requests.capacity());
        std::mem::replace(&mut self.storage, storage)
    }

    /// When [`Chain::poll`] must be called again even if nothing happens.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether requests are completed as they are submitted: by storage ([`Storage::works_at_once`]), and no filter holds them back.
    #[must_use]
    pub fn works_at_once(&self) -> bool {
        !self.holds_back && self.storage.works_at_once()
    }
}

impl Drop for Chain {
    /// Memory that the kernel may still write into is leaked, not freed.
    fn drop(&mut self) {
        if !self.storage.finish() {
            std::mem::forget(std::mem::replace(&mut self.requests, Requests::new(0)));
        }
    }
}

#[cfg(test)]
mod tests;
