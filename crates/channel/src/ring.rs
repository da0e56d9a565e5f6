//! Requests and answers in shared memory, for one requester and one answerer.
//!
//! ```text
//!  word 0     submitted: how many requests have been put here           written by the requester
//!       8     taken: how many of them the answerer has seen             written by the answerer
//!       16    answered: how many answers have been put here             written by the answerer
//!       24    read: how many of them the requester has seen             written by the requester
//!       512   SLOTS requests, each of REQUEST_WORDS: slot and operation, offset, length, number of pieces, pieces
//!             SLOTS answers: slot and errno
//! ```
//! A request has a slot, a number below [`SLOTS`] that no other request in flight has. So neither list can overflow.
//!
//! Doorbells: who takes writes down how far it is only when it has taken all that it saw, and looks again after that; who gives looks how far
//! the other was. Between the write and the look of each stands a fence, so one of them sees the other's write: either the taker sees
//! what is new, or the giver sees that the taker had taken everything before, and rings.
//!
//! A requester that is awake looks for answers without writing down how far it is ([`Requester::try_next`]). Then the answerer sees an older
//! count, and does not ring: at most once for each count that is written down. So it writes it down before it sleeps
//! ([`Requester::next`]), and looks again after that, as above.
//!
//! All of it is read and written as atomic words: the other process may change it at any time. A request is read once, then checked.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::memory::SharedMemory;

/// The most requests in flight in one queue: that many 4 KiB requests keep a cluster busy.
pub const SLOTS: usize = 256;

/// The most parts of one request's memory: 4 MiB, the usual size of an object, in buffers of 64 KiB.
pub const PIECES_MAX: usize = 64;

const SUBMITTED: usize = 0;
const TAKEN: usize = 8;
const ANSWERED: usize = 16;
const READ: usize = 24;

/// Before the pieces of a request.
const HEAD_WORDS: usize = 4;
/// Whole cache lines.
const REQUEST_WORDS: usize = (HEAD_WORDS + 2 * PIECES_MAX).next_multiple_of(8);
const REQUESTS: usize = 512;
const ANSWERS: usize = REQUESTS + SLOTS * REQUEST_WORDS;
const WORDS: usize = ANSWERS + SLOTS;

/// The bytes of a ring: whole pages.
pub const RING_BYTES: usize = (WORDS * size_of::<u64>()).next_multiple_of(4096);

/// The greatest error number (linux/err.h, `MAX_ERRNO`).
const ERRNO_MAX: i32 = 4095;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Data, into the pieces.
    Read,
    /// Data is in the pieces.
    Write,
    /// What has been answered is to be durable.
    Flush,
    /// Zeroes that may be holes: a discard, too.
    Zero,
    /// Zeroes that take room.
    ZeroKeepingRoom,
}

impl Operation {
    fn number(self) -> u32 {
        match self {
            Self::Read => 1,
            Self::Write => 2,
            Self::Flush => 3,
            Self::Zero => 4,
            Self::ZeroKeepingRoom => 5,
        }
    }

    fn of(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Read),
            2 => Some(Self::Write),
            3 => Some(Self::Flush),
            4 => Some(Self::Zero),
            5 => Some(Self::ZeroKeepingRoom),
            _ => None,
        }
    }

    fn has_data(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }
}

/// A part of a shared region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which region.
    pub region: u32,
    /// How many bytes.
    pub length: u32,
    /// From where in the region.
    pub offset: u64,
}

/// A request, as the answerer sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submission {
    /// Its slot, for the answer.
    pub slot: u32,
    /// What it asks for.
    pub operation: Operation,
    /// Where in the file.
    pub offset: u64,
    /// How many bytes. The end is at most `u64::MAX`.
    pub length: u64,
    /// Where its data is: of a read or a write, `length` bytes, else nothing. Whether the regions exist and are that long is not checked.
    pub pieces: Vec<Piece>,
}

/// How the other side has broken the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The memory is no ring.
    #[error("the ring has {0} bytes, and not {expected}", expected = RING_BYTES)]
    Size(usize),
    /// A counter is out of range.
    #[error("{waiting} are said to wait, and at most {possible} can")]
    Count {
        /// How many, as the counter says.
        waiting: u64,
        /// How many there can be.
        possible: u64,
    },
    /// A request has the slot of one in flight, or none of the ring.
    #[error("a request has slot {0}, which is in use or is none")]
    Slot(u32),
    /// An answer to a slot that has no request.
    #[error("slot {0} is answered, and has no request")]
    Answer(u32),
    /// An answer that is none.
    #[error("slot {0} is answered by {1}, which is no error number")]
    Errno(u32, i32),
    /// A request makes no sense.
    #[error("the request in slot {slot} is none: {what}")]
    Request {
        /// Its slot.
        slot: u32,
        /// Why.
        what: &'static str,
    },
}

/// The words of a ring.
struct Words(SharedMemory);

impl Words {
    fn at(&self, index: usize) -> &AtomicU64 {
        assert!(index < WORDS, "a word of the ring");
        // SAFETY: the memory has RING_BYTES and begins at a page, so the word is within and aligned. It is never accessed but as an atomic
        // word, and lives as long as `self`.
        unsafe { &*self.0.base().as_ptr().cast::<AtomicU64>().add(index) }
    }

    fn read(&self, index: usize) -> u64 {
        self.at(index).load(Ordering::Relaxed)
    }

    fn write(&self, index: usize, value: u64) {
        self.at(index).store(value, Ordering::Relaxed);
    }

    /// Shows a new count to the other side; whether that may sleep, which had taken `before`.
    fn give(&self, counter: usize, (before, count): (u64, u64), seen: usize) -> bool {
        self.at(counter).store(count, Ordering::Release);
        fence(Ordering::SeqCst);
        self.at(seen).load(Ordering::Relaxed) == before
    }

    /// Says that all that was seen is taken, and looks again; returns the other side's count.
    fn look(&self, seen: usize, taken: u64, counter: usize) -> u64 {
        self.at(seen).store(taken, Ordering::Release);
        fence(Ordering::SeqCst);
        self.at(counter).load(Ordering::Acquire)
    }
}

fn request_at(count: u64) -> usize {
    REQUESTS + (count % SLOTS as u64) as usize * REQUEST_WORDS
}

fn answer_at(count: u64) -> usize {
    ANSWERS + (count % SLOTS as u64) as usize
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn unpair(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// The filter's side.
pub struct Requester {
    words: Words,
    pushed: u64,
    published: u64,
    /// Answers that have been taken, and that have been seen.
    taken: u64,
    seen: u64,
    in_flight: [bool; SLOTS],
    count: u64,
}

impl Requester {
    /// A ring without requests.
    ///
    /// # Panics
    /// The memory is not [`RING_BYTES`] long.
    #[must_use]
    pub fn new(ring: SharedMemory) -> Self {
        assert_eq!(ring.len(), RING_BYTES, "the length of a ring");
        Self {
            words: Words(ring),
            pushed: 0,
            published: 0,
            taken: 0,
            seen: 0,
            in_flight: [false; SLOTS],
            count: 0,
        }
    }

    /// Its memory's descriptor, for the answerer.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.words.0.fd()
    }

    /// Puts a request into the ring; false if there is no such slot, or it has a request already, or there are too many pieces.
    #[must_use]
    pub fn push(
        &mut self,
        slot: u32,
        operation: Operation,
        offset: u64,
        length: u64,
        pieces: &[Piece],
    ) -> bool {
        let Some(in_flight) = self.in_flight.get_mut(slot as usize) else { return false };
        if *in_flight || pieces.len() > PIECES_MAX {
            return false;
        }
        *in_flight = true;
        self.count += 1;
        let at = request_at(self.pushed);
        self.words.write(at, pair(slot, operation.number()));
        self.words.write(at + 1, offset);
        self.words.write(at + 2, length);
        self.words.write(at + 3, pieces.len() as u64);
        for (index, piece) in pieces.iter().enumerate() {
            let at = at + HEAD_WORDS + 2 * index;
            self.words.write(at, pair(piece.region, piece.length));
            self.words.write(at + 1, piece.offset);
        }
        self.pushed += 1;
        true
    }

    /// Makes what was pushed visible; true: the other side may sleep, ring its doorbell.
    #[must_use]
    pub fn publish(&mut self) -> bool {
        if self.published == self.pushed {
            return false;
        }
        let change = (self.published, self.pushed);
        self.published = self.pushed;
        self.words.give(SUBMITTED, change, TAKEN)
    }

    /// The next answer: its slot, and 0 or an error number. After none, a doorbell comes for the next one.
    ///
    /// # Errors
    /// The other side has broken the protocol.
    #[allow(clippy::should_implement_trait)] // After an error there is no next one.
    pub fn next(&mut self) -> Result<Option<(u32, i32)>, Broken> {
        if self.taken == self.seen {
            let answered = self.words.look(READ, self.taken, ANSWERED);
            self.see(answered)?;
        }
        self.take()
    }

    /// The next answer. After none, there need be no doorbell for the next one: who is to sleep asks [`Requester::next`] first.
    ///
    /// # Errors
    /// The other side has broken the protocol.
    pub fn try_next(&mut self) -> Result<Option<(u32, i32)>, Broken> {
        if self.taken == self.seen {
            let answered = self.words.at(ANSWERED).load(Ordering::Acquire);
            self.see(answered)?;
        }
        self.take()
    }

    /// Takes note of how many answers there are, as the other side says.
    fn see(&mut self, answered: u64) -> Result<(), Broken> {
        let waiting = answered.wrapping_sub(self.taken);
        if waiting > self.count {
            return Err(Broken::Count { waiting, possible: self.count });
        }
        self.seen = answered;
        Ok(())
    }

    /// The next answer of those that were seen.
    fn take(&mut self) -> Result<Option<(u32, i32)>, Broken> {
        if self.taken == self.seen {
            return Ok(None);
        }
        let (slot, errno) = unpair(self.words.read(answer_at(self.taken)));
        let errno = errno.cast_signed();
        match self.in_flight.get_mut(slot as usize).filter(|in_flight| **in_flight) {
            None => return Err(Broken::Answer(slot)),
            Some(_) if !(0..=ERRNO_MAX).contains(&errno) => {
                return Err(Broken::Errno(slot, errno));
            }
            Some(in_flight) => *in_flight = false,
        }
        self.taken += 1;
        self.count -= 1;
        Ok(Some((slot, errno)))
    }
}

/// The side of `vmseal-rbd`. One thread takes requests, and any thread answers them.
pub struct Answerer {
    words: Words,
    state: Mutex<Answering>,
}

struct Answering {
    /// Requests that have been taken, and that have been seen.
    taken: u64,
    seen: u64,
    answered: u64,
    in_flight: [bool; SLOTS],
    count: u64,
}

impl Answerer {
    /// The other side of a ring.
    ///
    /// # Errors
    /// The memory has not the length of a ring.
    pub fn new(ring: SharedMemory) -> Result<Self, Broken> {
        if ring.len() != RING_BYTES {
            return Err(Broken::Size(ring.len()));
        }
        let in_flight = [false; SLOTS];
        let state = Answering { taken: 0, seen: 0, answered: 0, in_flight, count: 0 };
        Ok(Self { words: Words(ring), state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, Answering> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next request. After none, a doorbell comes for the next one.
    ///
    /// # Errors
    /// The other side has broken the protocol.
    pub fn next(&self) -> Result<Option<Submission>, Broken> {
        let mut state = self.state();
        if state.taken == state.seen {
            let submitted = self.words.look(TAKEN, state.taken, SUBMITTED);
            let waiting = submitted.wrapping_sub(state.taken);
            let possible = SLOTS as u64 - state.count;
            if waiting > possible {
                return Err(Broken::Count { waiting, possible });
            }
            state.seen = submitted;
            if waiting == 0 {
                return Ok(None);
            }
        }
        let at = request_at(state.taken);
        let (slot, operation) = unpair(self.words.read(at));
        match state.in_flight.get_mut(slot as usize) {
            Some(in_flight) if !*in_flight => *in_flight = true,
            _ => return Err(Broken::Slot(slot)),
        }
        state.taken += 1;
        state.count += 1;
        drop(state);
        self.read(at, slot, operation).map(Some)
    }

    /// Reads the rest of a request.
    fn read(&self, at: usize, slot: u32, operation: u32) -> Result<Submission, Broken> {
        let wrong = |what| Broken::Request { slot, what };
        let operation = Operation::of(operation).ok_or_else(|| wrong("no such operation"))?;
        let (offset, length) = (self.words.read(at + 1), self.words.read(at + 2));
        offset.checked_add(length).ok_or_else(|| wrong("it has no end"))?;
        let count = usize::try_from(self.words.read(at + 3)).unwrap_or(usize::MAX);
        if count > PIECES_MAX {
            return Err(wrong("too many pieces"));
        }
        let piece = |index| {
            let at = at + HEAD_WORDS + 2 * index;
            let (region, length) = unpair(self.words.read(at));
            Piece { region, length, offset: self.words.read(at + 1) }
        };
        let pieces: Vec<Piece> = (0..count).map(piece).collect();
        // At most PIECES_MAX lengths of 32 bits.
        let bytes: u64 = pieces.iter().map(|piece| u64::from(piece.length)).sum();
        if operation.has_data() && bytes != length {
            return Err(wrong("its pieces have another length"));
        }
        if !operation.has_data() && count > 0 {
            return Err(wrong("it has no data, but pieces"));
        }
        Ok(Submission { slot, operation, offset, length, pieces })
    }

    /// Answers a request that was taken, by 0 or an error number; true: the other side may sleep, ring its doorbell.
    #[must_use]
    pub fn answer(&self, slot: u32, errno: i32) -> bool {
        let mut state = self.state();
        match state.in_flight.get_mut(slot as usize) {
            Some(in_flight) if *in_flight => *in_flight = false,
            // Answered already.
            _ => return false,
        }
        state.count -= 1;
        self.words.write(answer_at(state.answered), pair(slot, errno.cast_unsigned()));
        let change = (state.answered, state.answered + 1);
        state.answered += 1;
        // Under the lock: the counts of two answers come in their order.
        self.words.give(ANSWERED, change, READ)
    }
}

#[cfg(test)]
mod tests;
