//! The chain that a disk is: filters over storage. One chain serves one queue and is used by one
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
//! Layers do not call each other: they put work on the chain's list and [`Chain::poll`] runs it until
//! nothing is left but what the kernel has to finish. So a stack of any depth needs no recursion, and
//! a filter may complete from within `down`. Whoever waits (for a buffer, a lock, a time) keeps the
//! request's id in a list of its own, says so ([`Io::hold`]) and looks again in `up` or [`Filter::tick`].
//!
//! **Wake contract.** The chain's thread sleeps in [`Chain::wait`], on one wait set:
//! ```text
//!  the chain's eventfd         others write it: a sector lock is free, a chunk is marked, the thread of a qcow2
//!                              image has answered ([`crate::stack::waker`])
//!  the storage's descriptor    the kernel makes it readable: completions of io_uring
//!  the front end's own         a kick, a connection, a stop
//!  the next deadline           a time that means something: a delay, a budget that fills
//! ```
//! So a layer that waits for something has arranged to be woken before it looks for the last time and returns: by a
//! completion of its own requests, by [`Io::waker`] in the hands of whoever will have the news, or by the deadline that
//! it names in [`Filter::tick`]. Nobody counts on another pass, and nobody tries again after some time what somebody
//! could tell of. The kernel alone tells nobody when it can do again what it refused: the file engine then names a
//! deadline for the next attempt.
//!
//! The chain sees to it that a filter's defect stays one of that filter (docs/decisions/053). What a filter has neither
//! passed, ended, split nor held when it returns is ended with [`IoError::Forgotten`]; what is not its own it can
//! neither pass nor end; a request whose parts are under way goes up after the last of them, so that no memory of
//! the guest's is in use that it believes to have back; and it makes no more parts than it declared.
//!
//! Nothing here allocates or locks while requests flow: slots, lists and tables are made once, for
//! [`Limits::children`] children a filter.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use crate::stack::dirty::Bitmaps;
use crate::stack::memory::{Cursor, SEGMENTS_MAX, Segments};
use crate::stack::pool::{Buffer, Pool};
use crate::stack::request::{
    IoError, LOGICAL_BLOCK, Operation, Request, RequestId, Requests, Turn,
};
use crate::stack::waker::Waker;

mod wait;

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
    /// of looks for it here, after it has said whom to wake ([`Io::waker`]); and names the time at which it wants to
    /// be called again at the latest, if it waits for a time.
    fn tick(&mut self, _io: &mut Io<'_>) -> Option<Instant> {
        None
    }

    /// Told when the chain is being drained, and when it goes on: a filter that holds requests back for a
    /// time does not do so meanwhile.
    fn hasten(&mut self, _hastened: bool) {}
}

/// The end of a chain: where data rests. All calls come from the one thread that has the chain.
pub trait Storage: Send {
    /// Told once how many requests there can be.
    fn prepare(&mut self, capacity: usize);

    /// Takes a request; completes it now or later. Requests in flight may be done in any order.
    fn submit(&mut self, id: RequestId, io: &mut Io<'_>);

    /// Called on every pass: hands what was submitted to the kernel in one go and completes what is
    /// finished. Never blocks.
    fn poll(&mut self, io: &mut Io<'_>);

    /// A descriptor that the kernel makes readable when [`Storage::poll`] has something to complete; none if
    /// requests are completed within `submit`, or a thread completes them, which has the chain's waker.
    fn wait_handle(&self) -> Option<BorrowedFd<'_>>;

    /// Whether requests are completed within `submit` or the next `poll`.
    fn works_at_once(&self) -> bool {
        self.wait_handle().is_none()
    }

    /// Waits until the kernel uses no memory of requests any more; false if it cannot learn of that.
    fn finish(&mut self) -> bool {
        true
    }

    /// When [`Storage::poll`] is to be called again although nothing has woken the thread; asked for after each
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

/// What the chain knows of what its filters do.
#[derive(Debug)]
struct FilterAudit {
    /// How many children each filter may still make.
    left: Vec<usize>,
    /// Requests to look at when the filter that was called returns.
    touched: Vec<RequestId>,
    /// How often a filter forgot a request, or did something with one that was not its own.
    forgotten: u64,
    misused: u64,
}

impl FilterAudit {
    /// Says so the first time, the second, the fourth, and so on: a defect is met with each request.
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

/// What a layer may do with requests.
pub struct Io<'a> {
    requests: &'a mut Requests,
    work: &'a mut VecDeque<Step>,
    audit: &'a mut FilterAudit,
    waker: &'a Waker,
    level: usize,
}

impl Io<'_> {
    /// Wakes this chain's thread: for whoever will have news of what a layer waits for.
    #[must_use]
    pub fn waker(&self) -> &Waker {
        self.waker
    }

    /// The request.
    #[must_use]
    pub fn request(&self, id: RequestId) -> &Request {
        self.requests.get(id)
    }

    /// Whether it is this layer's turn to do something about a request.
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

    /// Ends a request at this layer. It goes up when all its parts are released.
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

    /// Keeps a request for later: to be passed or ended in another call of the filter.
    pub fn hold(&mut self, id: RequestId) {
        if !self.owns(id) {
            return self.audit.misuse(self.level, "it keeps a request that it does not have");
        }
        self.requests.get_mut(id).held = true;
    }

    /// Makes a part of `parent`, without data, still at this layer. None when the filter has more than
    /// it said it would ([`Limits`]), or does not have the parent.
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

    /// How many parts of a request there are that are not released.
    #[must_use]
    pub fn parts(&self, id: RequestId) -> u32 {
        self.requests.get(id).children
    }

    /// Forgets a child that came up, or was not passed down.
    pub fn release(&mut self, child: RequestId) {
        let parent = self.parent(child).filter(|_| self.owns(child));
        let Some(parent) = parent.filter(|_| self.requests.get(child).children == 0) else {
            return self.audit.misuse(self.level, "it forgets a part that it does not have");
        };
        self.requests.give(child);
        self.audit.left[self.level] += 1;
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

    /// Ends what the filter that has returned owes something to, and does not keep.
    fn settle(&mut self, called_with: Option<RequestId>) {
        self.audit.touched.extend(called_with);
        while let Some(id) = self.audit.touched.pop() {
            let request = self.requests.get(id);
            if !self.owns(id) || request.held || request.children > 0 {
                continue;
            }
            self.audit.forgot(self.level);
            if self.parent(id).is_some() {
                self.release(id);
            } else {
                self.complete(id, Err(IoError::Forgotten));
            }
        }
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
                forgotten: 0,
                misused: 0,
            }),
            done: VecDeque::with_capacity(ROOTS_MAX),
            roots: 0,
            deadline: None,
            waker: Waker::new()?,
            bitmaps: None,
        })
    }

    /// The same chain, whose changes are marked in the disk's dirty bitmaps.
    #[must_use]
    pub fn marking(mut self, bitmaps: Arc<Bitmaps>) -> Self {
        self.bitmaps = Some(bitmaps);
        self
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

    /// How many requests filters have forgotten; each has failed with [`IoError::Forgotten`].
    #[must_use]
    pub fn forgotten(&self) -> u64 {
        self.audit.forgotten
    }

    /// A slot for a new request, to be filled and submitted, or cancelled; none while [`ROOTS_MAX`] are
    /// under way.
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
                self.requests.get_mut(id).turn = Turn::Chain;
                self.work.push_back(Step::Down(id));
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
            self.deadline = None;
            let (requests, work, audit) = (&mut self.requests, &mut self.work, &mut self.audit);
            let mut io = Io { requests, work, audit, waker: &self.waker, level: 0 };
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
        let waker = &self.waker;
        match work {
            Step::Down(id) => {
                let request = requests.get_mut(id);
                request.turn = Turn::Layer;
                let level = request.level;
                let mut io = Io { requests, work: list, audit, waker, level };
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
                let mut io = Io { requests, work: list, audit, waker, level };
                self.filters[level].up(id, &mut io);
                io.settle(Some(id));
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

    /// When [`Chain::poll`] is to be called again even if nothing happens.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether what is asked of storage is done as it is asked for ([`Storage::works_at_once`]).
    #[must_use]
    pub fn works_at_once(&self) -> bool {
        self.storage.works_at_once()
    }
}

impl Drop for Chain {
    /// What the kernel may still write into is not freed, but lost to the process.
    fn drop(&mut self) {
        if !self.storage.finish() {
            std::mem::forget(std::mem::replace(&mut self.requests, Requests::new(0)));
        }
    }
}

#[cfg(test)]
mod tests;
