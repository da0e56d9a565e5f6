//! The copy engine: the one loop by which a disk, or a part of it, goes from a source to a sink.
//!
//! ```text
//!  thread    source ── walk: the next part ── data: read into a free buffer ──> queue of pieces
//!                                                      ^                           │
//!                                                      └──── complete ─────────────┤
//!  caller    sink <── data, zeroes, or nothing of a piece <── pace, stop <─────────┘
//!              └── flushed ──> checkpoint
//!
//!  a piece of data    begun ──> in flight, while the next one is encrypted ──> complete: it counts, and its buffer is free
//! ```
//! What is not there and what is zero is not read. What is read is written as runs of data and of zeroes. The source reads ahead of
//! the sink, as far as there are buffers; the sink gets everything in order. The pace is kept at the sink, so that a copy that is
//! held back ends at once when the sink fails or a stop is asked for. What is told as durable was flushed before.
//!
//! A sink that is a chain has pieces in flight: storage writes one while the next one is encrypted. Nothing is in flight while a range is
//! made zero or passed, while the sink is flushed, while the copy sleeps for its pace or for its source, and when it ends, with an error,
//! too.
//!
//! Where the work rests beside a guest, one buffer goes round instead of all: what is read ahead would be read in the rests. Nothing is
//! in flight in these, either.
//!
//! Where source and sink are one file, or a part is too short for a thread, the same is done piece by piece
//! ([`Engine::in_turn`]).

use std::collections::VecDeque;
use std::fmt::Display;
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use vmseal_api::filter::CRYPT_SECTOR;

use crate::copy::filled::{Buffer, Filled, PAGE};
use crate::disk::pacing::Paced;
use crate::stack::stop::Stop;
use crate::storage::extent::{Own, OwnExtent};

/// How much is read at a time, in bytes: large enough for any device's own best.
pub const PIECE: usize = 1024 * 1024;

/// The unit in which zeroes are looked for, in bytes.
pub const UNIT: u64 = CRYPT_SECTOR as u64;

/// The longest part that is taken at once without being read, in bytes, so that a stop is noticed soon.
const UNREAD_MAX: u64 = 256 * 1024 * 1024;

/// The buffers: one that is read into, one that waits, and those in flight.
const DEPTH: usize = 2 + IN_FLIGHT;

/// The most pieces that a sink has in flight: one that storage writes, and one that is encrypted and handed over meanwhile. With more,
/// nothing more is done at once, as one thread encrypts.
const IN_FLIGHT: usize = 2;

/// How much is written between two flushes where the work rests, in bytes: the rests are as long as what was done before, and to
/// fill the page cache is not all that storage does for it.
const FLUSHED_BESIDE_GUEST: u64 = 16 << 20;

/// The stack size of the thread that reads: that of a disk's thread, as an image's reader needs it.
const STACK: usize = 512 * 1024;

/// The memory of a copy, in bytes.
pub const BYTES: usize = DEPTH * (PIECE + PAGE) + STACK;

/// What is copied.
pub trait Source {
    /// Why it cannot be read.
    type Error;

    /// What is at `at`, which is below `end`, up to `end` at most. Nothing: the sink has there what it should have. Data is read up
    /// to its end, however many pieces that takes, and not asked about again: a question may take longer than to read a piece.
    ///
    /// # Errors
    /// What there is cannot be told.
    fn part(&mut self, at: u64, end: u64) -> Result<OwnExtent, Self::Error>;

    /// Fills `bytes` with the data at `at`.
    ///
    /// # Errors
    /// It cannot be read.
    fn read(&mut self, bytes: &mut [u8], at: u64) -> Result<(), Self::Error>;
}

/// Where it is copied to. It gets all parts of the range, each once, from the beginning to the end. Nothing that was begun is in flight
/// while it is asked for anything else.
pub trait Sink {
    /// Why it cannot be written.
    type Error;

    /// Writes data.
    ///
    /// # Errors
    /// It cannot be written.
    fn write(&mut self, bytes: &mut [u8], at: u64) -> Result<(), Self::Error>;

    /// Has a range read as zeroes.
    ///
    /// # Errors
    /// It cannot be written.
    fn zero(&mut self, at: u64, length: u64) -> Result<(), Self::Error>;

    /// Passes a range of which the source has nothing.
    ///
    /// # Errors
    /// What the sink notes of it cannot be noted.
    fn leave(&mut self, _at: u64, _length: u64) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Takes what was read: its runs of zeroes and of data.
    ///
    /// # Errors
    /// It cannot be written.
    fn piece(&mut self, bytes: &mut [u8], at: u64) -> Result<(), Self::Error> {
        by_runs(self, bytes, at)
    }

    /// Begins to take what was read. It comes back if it is complete, and all before it is. Otherwise it is in flight: the sink keeps it
    /// until [`Sink::finish`], also when it is dropped before that.
    ///
    /// # Errors
    /// It cannot be written. It is not in flight then; those before it may be.
    fn begin(&mut self, piece: Filled) -> Result<Option<Filled>, Self::Error> {
        at_once(self, piece)
    }

    /// Waits until the first of the pieces in flight is complete, and gives it back; none where none is in flight.
    ///
    /// # Errors
    /// It could not be written. It is not in flight any more; those behind it may be.
    fn finish(&mut self) -> Result<Option<Filled>, Self::Error> {
        Ok(None)
    }

    /// Makes durable what it was given.
    ///
    /// # Errors
    /// Some of it may not be durable.
    fn flush(&mut self) -> Result<(), Self::Error>;
}

/// Why a copy did not come to its end. What was told as durable before is.
#[derive(Debug, thiserror::Error)]
pub enum CopyError<S, T> {
    /// The source cannot be read.
    #[error("at byte {at} of the disk: {error}")]
    Source {
        /// Where the piece begins.
        at: u64,
        /// Why.
        error: S,
    },
    /// The sink cannot be written or flushed.
    #[error("at byte {at} of the disk: {error}")]
    Sink {
        /// Where the piece begins, or how much of the disk was to be durable.
        at: u64,
        /// Why.
        error: T,
    },
    /// Asked to stop.
    #[error("the copy was stopped")]
    Stopped,
}

impl<S: Display, T: Display> CopyError<S, T> {
    /// The error that the copy's caller has for it; the place is logged.
    pub fn told<E>(self, stopped: E, source: impl FnOnce(S) -> E, sink: impl FnOnce(T) -> E) -> E {
        if !matches!(self, Self::Stopped) {
            tracing::warn!(error = %self, "a copy has failed");
        }
        match self {
            Self::Source { error, .. } => source(error),
            Self::Sink { error, .. } => sink(error),
            Self::Stopped => stopped,
        }
    }
}

/// How a copy from this source to this sink ends.
pub type Copied<S, T> = Result<(), CopyError<<S as Source>::Error, <T as Sink>::Error>>;

/// How far a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Up to where the sink has everything.
    pub done: u64,
    /// Up to where it was flushed: no power cut takes that.
    pub durable: u64,
}

/// How often a sink is flushed before the end.
#[derive(Clone, Copy, Debug)]
pub struct Flushes {
    /// After so many bytes of data.
    pub bytes: u64,
    /// After so long.
    pub every: Duration,
}

/// A copy to be made.
pub struct Engine<'a> {
    /// The part of the disk that is copied, in bytes.
    pub range: Range<u64>,
    /// What it goes at; what is not read does not count.
    pub pace: &'a mut Paced,
    /// Ends it between two pieces.
    pub stop: &'a Stop,
    /// When the sink is flushed; none is at the end only.
    pub flushes: Option<Flushes>,
}

impl Engine<'_> {
    /// Copies, and flushes; a thread reads ahead. `report` hears how far it is: at the beginning, after each piece, and at the end.
    ///
    /// # Errors
    /// [`CopyError`]. What the sink has after the part last told as durable is not known then.
    pub fn run<S, T>(
        self,
        source: &mut S,
        sink: &mut T,
        report: &mut dyn FnMut(Progress),
    ) -> Copied<S, T>
    where
        S: Source + Send,
        S::Error: Send,
        T: Sink,
    {
        let mut walk = Walk::new(source, &self.range);
        let mut writing = Writing::new(self, sink, report);
        let (most, reading) = (walk.most, &mut walk);
        let (free, buffers) = sync_channel(DEPTH);
        let (filled, pieces) = sync_channel(DEPTH);
        let span = tracing::Span::current();
        let ahead = thread::scope(|scope| {
            let read = move || span.in_scope(|| read_ahead(reading, &buffers, &filled));
            let builder = thread::Builder::new().name("copy".into()).stack_size(STACK);
            if let Err(error) = builder.spawn_scoped(scope, read) {
                tracing::warn!(%error, "no thread reads ahead for a copy, which takes longer");
                return None;
            }
            for _ in 0..DEPTH {
                // The reader may have come to its end already.
                let _ = free.send(Buffer::new(most));
            }
            Some(writing.take_all(pieces, free))
        });
        match ahead {
            Some(taken) => taken?,
            None => writing.one_by_one(&mut walk)?,
        }
        writing.end()
    }

    /// The same without a thread: a piece is written before the next one is read.
    ///
    /// # Errors
    /// As [`Engine::run`].
    pub fn in_turn<S: Source, T: Sink>(
        self,
        source: &mut S,
        sink: &mut T,
        report: &mut dyn FnMut(Progress),
    ) -> Copied<S, T> {
        let mut walk = Walk::new(source, &self.range);
        let mut writing = Writing::new(self, sink, report);
        writing.one_by_one(&mut walk)?;
        writing.end()
    }
}

/// A part of the disk, and its data, if it has any.
struct Piece {
    content: Own,
    at: u64,
    end: u64,
    /// Each piece has one: so there are never more pieces than buffers.
    buffer: Buffer,
}

/// What was read, or where and why it could not be.
type Read<E> = Result<Piece, (u64, E)>;

/// The way through the source.
struct Walk<'a, S> {
    source: &'a mut S,
    at: u64,
    end: u64,
    /// Up to where the source has called it data.
    data: u64,
    /// The longest piece that is read.
    most: usize,
}

impl<'a, S: Source> Walk<'a, S> {
    fn new(source: &'a mut S, range: &Range<u64>) -> Self {
        let length = range.end.saturating_sub(range.start);
        let most = usize::try_from(length).unwrap_or(PIECE).min(PIECE);
        Self { source, at: range.start, end: range.end, data: range.start, most }
    }

    /// The next piece, in this buffer; none at the end. An error comes with its place.
    fn next(&mut self, mut buffer: Buffer) -> Result<Option<Piece>, (u64, S::Error)> {
        let at = self.at;
        if at >= self.end {
            return Ok(None);
        }
        let OwnExtent { content, end } = self.part(at)?;
        let most = if content == Own::Data { self.most as u64 } else { UNREAD_MAX };
        let end = end.min(self.end).min(at.saturating_add(most));
        if content == Own::Data {
            let bytes = buffer.first((end - at) as usize);
            self.source.read(bytes, at).map_err(|error| (at, error))?;
        }
        self.at = end;
        Ok(Some(Piece { content, at, end, buffer }))
    }

    /// What is at `at`: the rest of what is known to be data, or what the source says.
    fn part(&mut self, at: u64) -> Result<OwnExtent, (u64, S::Error)> {
        if at < self.data {
            return Ok(OwnExtent { content: Own::Data, end: self.data });
        }
        let found = self.source.part(at, self.end).map_err(|error| (at, error))?;
        if found.end <= at {
            // The source has named an empty part, and would name it again. So the next piece is read as data, and the source is asked
            // about what follows it.
            return Ok(OwnExtent { content: Own::Data, end: self.end });
        }
        if found.content == Own::Data {
            self.data = found.end;
        }
        Ok(found)
    }
}

/// Reads until the end, an error, or until nobody gives buffers any more.
fn read_ahead<S: Source>(
    walk: &mut Walk<'_, S>,
    buffers: &Receiver<Buffer>,
    filled: &SyncSender<Read<S::Error>>,
) {
    for buffer in buffers {
        let Some(next) = walk.next(buffer).transpose() else { return };
        let failed = next.is_err();
        if filled.send(next).is_err() || failed {
            return;
        }
    }
}

/// The way into the sink.
struct Writing<'a, T> {
    sink: &'a mut T,
    report: &'a mut dyn FnMut(Progress),
    pace: &'a mut Paced,
    stop: &'a Stop,
    flushes: Option<Flushes>,
    progress: Progress,
    end: u64,
    /// Bytes of data that the sink got since the last flush, and when that was.
    written: u64,
    flushed: Instant,
    /// The pieces that the sink has in flight, in order.
    in_flight: VecDeque<Range<u64>>,
    /// How many of them there may be when the next one is taken.
    in_flight_max: usize,
    /// The buffers of complete pieces.
    free: Vec<Buffer>,
}

impl<'a, T: Sink> Writing<'a, T> {
    fn new(engine: Engine<'a>, sink: &'a mut T, report: &'a mut dyn FnMut(Progress)) -> Self {
        let Engine { range, pace, stop, flushes } = engine;
        let progress = Progress { done: range.start, durable: range.start };
        report(progress);
        let (written, flushed, end) = (0, Instant::now(), range.end);
        let (in_flight, in_flight_max) = (VecDeque::with_capacity(IN_FLIGHT), 0);
        let free = Vec::with_capacity(DEPTH);
        Self {
            sink,
            report,
            pace,
            stop,
            flushes,
            progress,
            end,
            written,
            flushed,
            in_flight,
            in_flight_max,
            free,
        }
    }

    /// Takes what another thread reads, and gives the buffers back. Both channels are closed at the end, after an error, too: the
    /// reader sees that, and ends.
    fn take_all<E>(
        &mut self,
        pieces: Receiver<Read<E>>,
        free: SyncSender<Buffer>,
    ) -> Result<(), CopyError<E, T::Error>> {
        self.in_flight_max = IN_FLIGHT - 1;
        while let Some(piece) = self.next_piece(&pieces, &free)? {
            match piece {
                Ok(piece) => self.take::<E>(piece)?,
                Err((at, error)) => {
                    self.settle::<E>()?;
                    return Err(CopyError::Source { at, error });
                }
            }
            self.give_back(&free);
        }
        self.settle::<E>()
    }

    /// What the reader has next; none at the end.
    fn next_piece<E>(
        &mut self,
        pieces: &Receiver<Read<E>>,
        free: &SyncSender<Buffer>,
    ) -> Result<Option<Read<E>>, CopyError<E, T::Error>> {
        match pieces.try_recv() {
            Ok(piece) => Ok(Some(piece)),
            Err(TryRecvError::Disconnected) => Ok(None),
            Err(TryRecvError::Empty) => {
                // There is nothing to encrypt meanwhile, and the reader may wait for a buffer.
                self.settle::<E>()?;
                self.give_back(free);
                Ok(pieces.recv().ok())
            }
        }
    }

    /// Gives the reader the buffers of complete pieces. Where the work rests it has one at most; else it has all that are not in flight.
    fn give_back(&mut self, free: &SyncSender<Buffer>) {
        let most = if self.pace.rests() { 1 } else { DEPTH };
        while DEPTH - self.free.len() < most
            && let Some(buffer) = self.free.pop()
        {
            // The reader may have come to its end.
            let _ = free.send(buffer);
        }
    }

    fn one_by_one<S: Source>(&mut self, walk: &mut Walk<'_, S>) -> Copied<S, T> {
        let mut buffer = Buffer::new(walk.most);
        loop {
            let piece = match walk.next(buffer) {
                Ok(Some(piece)) => piece,
                Ok(None) => return Ok(()),
                Err((at, error)) => return Err(CopyError::Source { at, error }),
            };
            self.take::<S::Error>(piece)?;
            buffer = self.free.pop().unwrap_or_else(|| Buffer::new(walk.most));
        }
    }

    fn take<E>(&mut self, piece: Piece) -> Result<(), CopyError<E, T::Error>> {
        let length = piece.end - piece.at;
        let data = if piece.content == Own::Data { length } else { 0 };
        self.wait::<E>(data)?;
        match piece.content {
            Own::Data => self.begin::<E>(piece)?,
            Own::Zeroes | Own::Nothing => self.pass::<E>(piece)?,
        }
        self.written += data;
        let is_due = self.flushes.is_some_and(|flushes| {
            self.written >= flushes.bytes || self.flushed.elapsed() >= flushes.every
        });
        if is_due || (self.written >= FLUSHED_BESIDE_GUEST && self.pace.rests()) {
            self.flush::<E>()?;
        }
        (self.report)(self.progress);
        Ok(())
    }

    /// Waits until so many bytes may be written. What is in flight ends before the copy sleeps or is stopped.
    fn wait<E>(&mut self, bytes: u64) -> Result<(), CopyError<E, T::Error>> {
        if !self.stop.asked() && self.pace.goes_at_once(bytes) {
            return Ok(());
        }
        self.settle::<E>()?;
        if self.pace.wait(bytes, self.stop) { Ok(()) } else { Err(CopyError::Stopped) }
    }

    /// Has the sink begin with data, and waits until no more is in flight than may be.
    fn begin<E>(&mut self, piece: Piece) -> Result<(), CopyError<E, T::Error>> {
        let Piece { at, end, buffer, .. } = piece;
        match self.sink.begin(Filled::new(buffer, at, (end - at) as usize)) {
            Ok(None) => self.in_flight.push_back(at..end),
            Ok(Some(complete)) => {
                debug_assert!(self.in_flight.is_empty(), "a piece overtakes another one");
                self.free.push(complete.into_buffer());
                self.progress.done = end;
            }
            Err(error) => {
                self.settle::<E>()?;
                return Err(CopyError::Sink { at, error });
            }
        }
        let most = if self.pace.rests() { 0 } else { self.in_flight_max };
        while self.in_flight.len() > most {
            self.finish_first::<E>()?;
        }
        Ok(())
    }

    /// Has the sink make zero, or pass, what is not data.
    fn pass<E>(&mut self, piece: Piece) -> Result<(), CopyError<E, T::Error>> {
        self.settle::<E>()?;
        let Piece { content, at, end, buffer } = piece;
        let passed = match content == Own::Zeroes {
            true => self.sink.zero(at, end - at),
            false => self.sink.leave(at, end - at),
        };
        passed.map_err(|error| CopyError::Sink { at, error })?;
        self.free.push(buffer);
        self.progress.done = end;
        Ok(())
    }

    /// Waits until nothing is in flight. Nothing is, after an error, too.
    fn settle<E>(&mut self) -> Result<(), CopyError<E, T::Error>> {
        while !self.in_flight.is_empty() {
            self.finish_first::<E>()?;
        }
        Ok(())
    }

    /// Waits until the first piece in flight is complete. After an error nothing is in flight.
    fn finish_first<E>(&mut self) -> Result<(), CopyError<E, T::Error>> {
        let Some(piece) = self.in_flight.pop_front() else { return Ok(()) };
        match self.sink.finish() {
            Ok(complete) => {
                self.free.extend(complete.map(Filled::into_buffer));
                self.progress.done = piece.end;
                (self.report)(self.progress);
                Ok(())
            }
            Err(error) => {
                // Those behind it end as well, and do not count.
                while self.in_flight.pop_front().is_some() {
                    let _ = self.sink.finish();
                }
                Err(CopyError::Sink { at: piece.start, error })
            }
        }
    }

    /// Makes durable what the sink has, and only then says so.
    fn flush<E>(&mut self) -> Result<(), CopyError<E, T::Error>> {
        self.settle::<E>()?;
        let at = self.progress.done;
        if let Err(error) = self.sink.flush() {
            return Err(CopyError::Sink { at, error });
        }
        self.progress.durable = at;
        (self.written, self.flushed) = (0, Instant::now());
        Ok(())
    }

    fn end<E>(mut self) -> Result<(), CopyError<E, T::Error>> {
        debug_assert!(self.progress.done == self.end, "a copy ends early");
        self.flush::<E>()?;
        (self.report)(self.progress);
        Ok(())
    }
}

/// Has a sink take a piece that is complete then.
///
/// # Errors
/// The sink's.
pub fn at_once<T: Sink + ?Sized>(
    sink: &mut T,
    mut piece: Filled,
) -> Result<Option<Filled>, T::Error> {
    let at = piece.at();
    sink.piece(piece.bytes_mut(), at)?;
    Ok(Some(piece))
}

/// Gives a sink the runs of zeroes and of data in `bytes`.
///
/// # Errors
/// The sink's.
pub fn by_runs<T: Sink + ?Sized>(sink: &mut T, bytes: &mut [u8], at: u64) -> Result<(), T::Error> {
    let mut start = 0;
    while let Some((end, zero)) = next_run(bytes, start, at) {
        let place = at + start as u64;
        if zero {
            sink.zero(place, (end - start) as u64)?;
        } else {
            sink.write(&mut bytes[start..end], place)?;
        }
        start = end;
    }
    Ok(())
}

/// Where the run of zeroes or of data that begins at `start` ends, in units of the disk, and whether it is zeroes; none at the end.
/// `bytes` are those at `at`; a unit whose beginning is not among them counts as data.
pub fn next_run(bytes: &[u8], start: usize, at: u64) -> Option<(usize, bool)> {
    let rest = bytes.get(start..).filter(|rest| !rest.is_empty())?;
    let place = at + start as u64;
    let to_a_unit = (place.next_multiple_of(UNIT) - place) as usize;
    let (head, rest) = rest.split_at(to_a_unit.min(rest.len()));
    let is_zero = |unit: &[u8]| unit.iter().all(|byte| *byte == 0);
    let mut units = rest.chunks(UNIT as usize).peekable();
    let zero = head.is_empty() && units.peek().is_some_and(|unit| is_zero(unit));
    let same = units.take_while(|unit| is_zero(unit) == zero).map(<[u8]>::len).sum::<usize>();
    Some((start + head.len() + same, zero))
}

#[cfg(test)]
mod tests;
