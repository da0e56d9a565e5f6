//! The file engine on io_uring: one ring per queue, the files registered.
//!
//! ```text
//!  submit: entry into the submission queue     poll: io_uring_enter, reap, until nothing is left to hand over
//!  In flight --all of it--> complete  --short, EINTR, EAGAIN--> Again --next round of poll--> In flight
//!            --0 of a read--> truncated            --not supported (fallocate)--> Again, in another way
//! ```
//! A request's memory and its list of segments stay in place until its completion is reaped: the chain
//! keeps the slot, and `rest` is only rewritten between two submissions of the same request.
//!
//! A request whose data is in several places is moved place by place: a place that is done is like a short answer.
//!
//! The owner of the chain sleeps until the ring is readable, and it becomes readable only for entries that the kernel
//! has. So `poll` leaves no entry outside the kernel, unless it also says when it must be called
//! again ([`Storage::deadline`]): when `io_uring_enter` fails, and when a request makes no progress.
//!
//! The ring must not move data of FUSE files: when a read of one, or a direct write, comes back short, the kernel
//! moves the rest by itself, from or to the wrong place in the file, and reports success (docs/decisions/052). `vmseal-rbd` never
//! answers in part.
//!
//! What the file system cannot do otherwise, zeroes, is written by the ring as well: a system call would have the queue's thread wait for the
//! server of the file, and its requests could not fail meanwhile (docs/decisions/282).
//!
//! Where rings come from, and what they may do: [`super::rings`].

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use io_uring::{opcode, squeue, types};

use crate::stack::chain::{Io, Storage};
use crate::stack::memory::{Cursor, Segment, Segments};
use crate::stack::request::{IoError, Operation, Request, RequestId};
use crate::storage::rings::{self, LentRing, Ring};
use crate::storage::sync::{self, PUNCH, ZERO_RANGE};
use crate::storage::target::{FileTarget, LengthCheck, Place, ZERO, ZEROES};

/// The index of the disk's own file.
const FILE: types::Fixed = types::Fixed(0);

/// How often requests are handed over in one call of `poll`: a file that gives a page at a time must not keep
/// the queue's thread from its other work.
const ROUNDS: usize = 16;

/// The pause before a request that failed without progress is tried again: long against a system call, short against a
/// guest's timeout.
const RETRY: Duration = Duration::from_millis(1);

/// How often in a row a request is tried again without progress: half a minute, about a guest's disk timeout. A pass
/// tries twice, and so does the check before the thread sleeps for [`RETRY`].
const TRIES_MAX: u32 = 120_000;

/// How often the end of an engine tries to find out what the kernel still uses, [`RETRY`] apart, when
/// `io_uring_enter` fails for good.
const LAST_TRIES: u32 = 1000;

/// How often [`ZERO`] is in the list of one write of zeroes: 1 MiB, after which a request has its next turn.
const ZEROES_LISTED: usize = 16;

/// How a request gets its zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Zeroing {
    /// By a hole.
    Hole,
    /// By zeroes that keep their room.
    Range,
    /// By writing them.
    Written,
}

impl Zeroing {
    /// The cheapest way that is known to be there; none for a discard that changes nothing, and for what is no zeroes.
    fn of(target: &FileTarget, operation: Operation) -> Option<Self> {
        let punches = target.punches.load(Ordering::Relaxed);
        match operation {
            Operation::Read | Operation::Write | Operation::Flush => None,
            Operation::Discard => punches.then_some(Self::Hole),
            Operation::WriteZeroes { unmap: true } if punches => Some(Self::Hole),
            Operation::WriteZeroes { .. } if target.zeroes.load(Ordering::Relaxed) => {
                Some(Self::Range)
            }
            Operation::WriteZeroes { .. } => Some(Self::Written),
        }
    }
}

/// A request in flight.
#[derive(Debug, Default)]
struct InFlight {
    id: Option<RequestId>,
    /// How it gets its zeroes; none for other requests.
    zeroing: Option<Zeroing>,
    /// Where its data is; for requests without data, where its range begins.
    places: Vec<Place>,
    /// Which place is under way.
    place: usize,
    /// How much of that one is done.
    done: usize,
    /// How often in a row it came back without progress.
    tries: u32,
    rest: Segments,
}

/// See the module.
pub struct UringFile<R: Ring = LentRing> {
    ring: R,
    target: Arc<FileTarget>,
    intact: LengthCheck,
    flights: Vec<InFlight>,
    /// Requests that were submitted and are not completed.
    in_flight: usize,
    /// Those of them that the ring does not have: they are handed over in the next round.
    again: VecDeque<RequestId>,
    finished: Vec<(u64, i32)>,
    /// Whether a request has moved data or ended since this was cleared.
    progress: bool,
    deadline: Option<Instant>,
    /// Whether the last `io_uring_enter` failed: logged once.
    failing: bool,
}

impl InFlight {
    fn begin(&mut self, places: impl IntoIterator<Item = Place>) {
        self.places.clear();
        self.places.extend(places);
        (self.place, self.done, self.tries) = (0, 0, 0);
        self.zeroing = None;
    }

    /// Lists the memory of what is left of the place that is under way, unless that is all of the request's.
    fn take_up(&mut self, request: &Request) {
        let Some(left) = self.left() else { return };
        if self.zeroing == Some(Zeroing::Written) {
            self.list_zeroes(left.length);
        } else if left.length < request.data.bytes() {
            let mut cursor = Cursor::default();
            cursor.skip(&request.data, left.from);
            self.rest.clear();
            self.rest.push_from(&request.data, &mut cursor, left.length);
        }
    }

    /// Lists zeroes for the next write of so many bytes, or of the first of them.
    fn list_zeroes(&mut self, mut left: usize) {
        self.rest.clear();
        for _ in 0..ZEROES_LISTED {
            let length = left.min(ZEROES);
            if length == 0 {
                return;
            }
            // SAFETY: a static, which is only read.
            self.rest.push(unsafe { Segment::new(ZERO.0.as_ptr().cast_mut(), length) });
            left -= length;
        }
    }

    /// What is left of the place that is under way: from where in the request, and the rest of it.
    fn left(&self) -> Option<Place> {
        let place = self.places.get(self.place)?;
        let done = self.done;
        Some(Place {
            from: place.from + done,
            length: place.length - done,
            at: place.at + done as u64,
            ..*place
        })
    }
}

impl UringFile {
    /// With further files, whose data it reads: their numbers are from 1 on. The kernel has all of them open, with their locks,
    /// until it has finished every request, also where the process is killed.
    pub(super) fn of_files(
        target: Arc<FileTarget>,
        others: &[Arc<FileTarget>],
    ) -> io::Result<Self> {
        let files: Vec<RawFd> =
            std::iter::once(&target).chain(others).map(|target| target.fd.as_raw_fd()).collect();
        let ring = rings::lend(&files).or_else(|error| {
            let ring = LentRing::unrestricted(&files)?;
            tracing::warn!(%error, "what a ring may do cannot be restricted");
            Ok::<_, io::Error>(ring)
        })?;
        Ok(Self::over(ring, target))
    }
}

impl<R: Ring> UringFile<R> {
    fn over(ring: R, target: Arc<FileTarget>) -> Self {
        Self {
            ring,
            target,
            intact: LengthCheck::default(),
            flights: Vec::new(),
            in_flight: 0,
            again: VecDeque::new(),
            finished: Vec::new(),
            progress: false,
            deadline: None,
            failing: false,
        }
    }

    /// Reads or writes at these places, wherever the disk begins. The caller has checked the files' lengths.
    pub(super) fn transfer_at(&mut self, id: RequestId, places: &[Place], io: &Io<'_>) {
        let flight = &mut self.flights[id.index()];
        flight.begin(places.iter().copied());
        flight.take_up(io.request(id));
        self.in_flight += 1;
        self.push(id, io);
    }

    fn entry(&self, request: &Request, id: RequestId) -> squeue::Entry {
        let flight = &self.flights[id.index()];
        let left = flight.left();
        let at = left.map_or(0, |place| place.at);
        let file = left.map_or(FILE, |place| types::Fixed(place.file as u32));
        let whole = left.is_some_and(|place| place.length == request.data.bytes());
        let list = if whole { request.data.as_slice() } else { flight.rest.as_slice() };
        let (iovecs, count) = (list.as_ptr().cast::<libc::iovec>(), list.len() as u32);
        let allocate =
            |mode| opcode::Fallocate::new(FILE, request.length).offset(at).mode(mode).build();
        let write = || opcode::Writev::new(file, iovecs, count).offset(at).build();
        let entry = match (request.operation, flight.zeroing) {
            (Operation::Read, _) => opcode::Readv::new(file, iovecs, count).offset(at).build(),
            (Operation::Write, _) => write(),
            (Operation::Flush, _) => {
                opcode::Fsync::new(FILE).flags(types::FsyncFlags::DATASYNC).build()
            }
            (Operation::WriteZeroes { .. }, Some(Zeroing::Written)) => write(),
            (Operation::WriteZeroes { .. }, Some(Zeroing::Range)) => allocate(ZERO_RANGE),
            (Operation::Discard | Operation::WriteZeroes { .. }, _) => allocate(PUNCH),
        };
        entry.user_data(id.index() as u64)
    }

    /// Puts a request into the submission queue, or in line for it.
    fn push(&mut self, id: RequestId, io: &Io<'_>) {
        let entry = self.entry(io.request(id), id);
        self.flights[id.index()].id = Some(id);
        // SAFETY: the entry's memory stays valid until its completion; see the module.
        let pushed = self.again.is_empty() && unsafe { self.ring.push(&entry) };
        if !pushed {
            self.again.push_back(id);
        }
    }

    /// Moves the line into the submission queue, as far as it has room.
    fn push_again(&mut self, io: &Io<'_>) {
        while let Some(&id) = self.again.front() {
            let entry = self.entry(io.request(id), id);
            // SAFETY: the entry's memory stays valid until its completion; see the module.
            if !unsafe { self.ring.push(&entry) } {
                return;
            }
            self.again.pop_front();
        }
    }

    /// Hands over all entries that the kernel does not have.
    fn enter(&mut self) {
        if !self.ring.is_behind() {
            return;
        }
        match self.ring.enter(0) {
            Ok(_) => self.failing = false,
            Err(error) if passing(&error) => {}
            Err(error) => {
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::error!(%error, "io_uring_enter failed; tried again until it works");
                }
            }
        }
    }

    /// Handles all available completions.
    fn reap(&mut self, io: &mut Io<'_>) {
        let mut finished = std::mem::take(&mut self.finished);
        self.ring.reap(&mut finished);
        for (index, answer) in finished.drain(..) {
            self.reaped(index, answer, io);
        }
        self.finished = finished;
    }

    /// Handles a completion.
    fn reaped(&mut self, index: u64, answer: i32, io: &mut Io<'_>) {
        let Some(flight) = self.flights.get_mut(index as usize) else { return };
        let Some(id) = flight.id.take() else { return };
        let written = flight.zeroing == Some(Zeroing::Written);
        let operation = io.request(id).operation;
        match operation {
            _ if matches!(-answer, libc::EINTR | libc::EAGAIN) => self.try_again(id, answer, io),
            Operation::Read | Operation::Write => self.moved(id, answer, io),
            _ if written => self.moved(id, answer, io),
            Operation::Flush => {
                let answer = if answer < 0 { Err(self.target.error(-answer)) } else { Ok(()) };
                self.end(id, self.target.flushed(answer), io);
            }
            _ if answer >= 0 => self.end(id, Ok(()), io),
            Operation::Discard | Operation::WriteZeroes { .. } => self.fall_back(id, -answer, io),
        }
    }

    fn end(&mut self, id: RequestId, result: Result<(), IoError>, io: &mut Io<'_>) {
        self.in_flight -= 1;
        self.progress = true;
        io.complete(id, result);
    }

    /// A request came back without progress.
    fn try_again(&mut self, id: RequestId, answer: i32, io: &mut Io<'_>) {
        let flight = &mut self.flights[id.index()];
        flight.tries += 1;
        if flight.tries > TRIES_MAX {
            let error = self.target.error(-answer);
            return self.end(id, Err(error), io);
        }
        flight.id = Some(id);
        self.again.push_back(id);
    }

    fn moved(&mut self, id: RequestId, answer: i32, io: &mut Io<'_>) {
        let request = io.request(id);
        let write = request.operation != Operation::Read;
        let result = match answer {
            0 if write => Err(IoError::NoSpace),
            0 => Err(IoError::Truncated),
            moved if moved > 0 => {
                let flight = &mut self.flights[id.index()];
                (flight.done, flight.tries) = (flight.done + moved as usize, 0);
                if flight.left().is_some_and(|left| left.length == 0) {
                    (flight.place, flight.done) = (flight.place + 1, 0);
                }
                if flight.left().is_some() {
                    // Zeroes may take long, and those at the end would make a file as long as before that was truncated meanwhile.
                    if flight.zeroing.is_some()
                        && let Err(refusal) = self.intact.allows(&self.target, request)
                    {
                        return self.end(id, Err(refusal), io);
                    }
                    flight.take_up(request);
                    flight.id = Some(id);
                    self.progress = true;
                    return self.again.push_back(id);
                }
                Ok(())
            }
            _ => Err(self.target.error(-answer)),
        };
        self.end(id, result, io);
    }

    /// Does without the kind of `fallocate` that failed, if the file system lacks it.
    fn fall_back(&mut self, id: RequestId, errno: i32, io: &mut Io<'_>) {
        let failed = self.flights[id.index()].zeroing;
        let flag = match failed {
            Some(Zeroing::Range) => &self.target.zeroes,
            _ => &self.target.punches,
        };
        if !self.target.cannot(errno, flag) {
            let error = self.target.error(errno);
            return self.end(id, Err(error), io);
        }
        match Zeroing::of(&self.target, io.request(id).operation) {
            Some(next) if !self.moves_by_calls(next) => {
                // What has failed would not have made a file longer; writing may.
                if let Err(refusal) = self.intact.allows(&self.target, io.request(id)) {
                    return self.end(id, Err(refusal), io);
                }
                self.zero_by(id, next, io);
                self.flights[id.index()].id = Some(id);
                self.progress = true;
                self.again.push_back(id);
            }
            other => {
                let result = self.zeroed_here(other, io.request(id));
                self.end(id, result, io);
            }
        }
    }

    /// Whether the ring must not do it.
    fn moves_by_calls(&self, zeroing: Zeroing) -> bool {
        self.target.fuse && zeroing == Zeroing::Written
    }

    /// What is done without the ring: nothing, or writing to a file whose data the ring must not move.
    fn zeroed_here(&self, zeroing: Option<Zeroing>, request: &Request) -> Result<(), IoError> {
        match (zeroing, request.operation) {
            (Some(_), Operation::WriteZeroes { unmap }) => {
                sync::zero(&self.target, request.offset, request.length, unmap)
            }
            _ => Ok(()),
        }
    }

    /// Has a request get its zeroes in this way, all of them.
    fn zero_by(&mut self, id: RequestId, zeroing: Zeroing, io: &Io<'_>) {
        let request = io.request(id);
        let length = usize::try_from(request.length).unwrap_or(usize::MAX);
        let flight = &mut self.flights[id.index()];
        flight.begin([Place { from: 0, length, file: 0, at: self.target.offset + request.offset }]);
        flight.zeroing = Some(zeroing);
        flight.take_up(request);
    }
}

/// Errors of `io_uring_enter` that pass when completions are reaped.
fn passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

impl<R: Ring> Storage for UringFile<R> {
    fn prepare(&mut self, capacity: usize) {
        self.flights.resize_with(capacity, InFlight::default);
        self.again.reserve(capacity);
        self.finished.reserve(capacity);
    }

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        let operation = io.request(id).operation;
        if let Err(refusal) = self.intact.allows(&self.target, io.request(id)) {
            return io.complete(id, Err(refusal));
        }
        let request = io.request(id);
        let flight = &mut self.flights[id.index()];
        let (length, at) = (request.data.bytes(), self.target.offset + request.offset);
        flight.begin([Place { from: 0, length, file: 0, at }]);
        if self.target.fuse && matches!(operation, Operation::Read | Operation::Write) {
            let result = sync::transfer(&self.target, io.request(id), &mut flight.rest);
            return io.complete(id, result);
        }
        if matches!(operation, Operation::Read | Operation::Write | Operation::Flush) {
            self.in_flight += 1;
            return self.push(id, io);
        }
        match Zeroing::of(&self.target, operation) {
            Some(zeroing) if !self.moves_by_calls(zeroing) => {
                self.zero_by(id, zeroing, io);
                self.in_flight += 1;
                self.push(id, io);
            }
            other => {
                let result = self.zeroed_here(other, io.request(id));
                io.complete(id, result);
            }
        }
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        self.intact.next_pass();
        self.deadline = None;
        if self.in_flight == 0 {
            return;
        }
        self.progress = true;
        for _ in 0..ROUNDS {
            self.push_again(io);
            self.enter();
            let before = std::mem::replace(&mut self.progress, false);
            self.reap(io);
            if self.again.is_empty() && !self.ring.is_behind() {
                return;
            }
            if !before && !self.progress {
                break;
            }
        }
        self.deadline = Some(Instant::now() + if self.progress { Duration::ZERO } else { RETRY });
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        Some(self.ring.event())
    }

    fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    fn finish(&mut self) -> bool {
        let mut in_ring = self.in_flight - self.again.len();
        (self.in_flight, self.again) = (0, VecDeque::new());
        let mut tries = 0;
        while in_ring > 0 {
            let entered = self.ring.enter(1);
            self.finished.clear();
            self.ring.reap(&mut self.finished);
            in_ring -= self.finished.len().min(in_ring);
            if let Err(error) = entered
                && !passing(&error)
            {
                tries += 1;
                if tries > LAST_TRIES {
                    tracing::error!(%error, requests = in_ring, "requests cannot be waited for; their memory is kept");
                    self.ring.keep_from_others();
                    return false;
                }
                std::thread::sleep(RETRY);
            }
        }
        true
    }
}

impl<R: Ring> Drop for UringFile<R> {
    fn drop(&mut self) {
        self.finish();
    }
}

#[cfg(test)]
mod tests;
