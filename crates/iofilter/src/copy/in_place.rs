//! Encrypting, decrypting or re-encrypting a disk in the file that it has, where there is no room for another one.
//!
//! ```text
//!  encrypt   the data moves up by the header's room: from the end to the beginning, part by part
//!            ...|plain|plain|░░░░░|sealed|sealed|      ░ moved already: overwritten by the next part but one
//!  decrypt   it moves down: from the beginning to the end
//!  re-encrypt  it stays: a part is saved in the journal, as it was, before it is written
//! ```
//! A part that moves is not longer than the distance, so where it goes is never what it is read from: until the journal says
//! that it has moved it can be moved again. Each part is flushed, then noted, and only then is the next one written, which
//! may overwrite what the former was read from. So whatever is cut off in the middle goes on from the journal, after any
//! number of power cuts. Nothing goes back.
//!
//! Holes stay holes. Where a hole takes the place of data, these are overwritten first, if the disk was in the clear.

pub mod journal;

use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use vmseal_api::filter::{CRYPT_SECTOR, DiskActivity, IN_PLACE_SAVED_MAX};
use vmseal_api::id::DiskId;

use self::journal::{Journal, JournalError, Plan, Position};
use crate::copy::import::run_of_zeroes_or_data;
use crate::disk::allocation::Allocation;
use crate::disk::status::DiskState;
use crate::stack::blocking;
use crate::stack::chain::Chain;
use crate::stack::request::{IoError, Operation};
use crate::stack::stop::Stop;
use crate::storage::extent::Extent;

/// How much is read at a time.
const CHUNK: u64 = 1024 * 1024;

/// The longest part between two notes, in bytes, where the distance is longer: seconds of work to do again.
pub const PART_MAX: u64 = 16 * 1024 * 1024;

/// The longest sleep of a conversion that is slowed, so that a stop is noticed soon.
const NAP: Duration = Duration::from_millis(100);

/// Why a conversion did not come to its end. The file is openable as what it is: a conversion under way.
#[derive(Debug, thiserror::Error)]
pub enum InPlaceError {
    /// The file system does not tell where the image has holes.
    #[error("the holes of the image cannot be found: {0}")]
    Holes(#[from] io::Error),
    /// A read of the image failed.
    #[error("the image cannot be read: {0}")]
    Read(#[source] IoError),
    /// A write to the image failed.
    #[error("the image cannot be written: {0}")]
    Write(#[source] IoError),
    /// The journal cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The distance by which data would move is not a multiple of the sector size.
    #[error("data cannot move by {0} bytes: give a multiple of {CRYPT_SECTOR}")]
    Distance(u64),
    /// The process was asked to end.
    #[error("the conversion was stopped")]
    Stopped,
}

/// Where a file has data and holes, as a disk sees it.
pub trait Parts: Send {
    /// Data or a hole at `at`, which is below `end`, up to `end` at most.
    ///
    /// # Errors
    /// As lseek.
    fn extent(&self, at: u64, end: u64) -> io::Result<Extent>;
}

impl Parts for Allocation {
    fn extent(&self, at: u64, end: u64) -> io::Result<Extent> {
        Self::extent(self, at, end)
    }
}

/// The disk as it was, or as it is to be, in the one file.
pub struct Side {
    /// Reads or writes it.
    pub chain: Chain,
    /// Where its data is.
    pub parts: Box<dyn Parts>,
    /// Where its first byte is in the file, in bytes.
    pub offset: u64,
}

/// A conversion.
pub struct InPlace {
    /// As it was.
    pub from: Side,
    /// As it is to be.
    pub to: Side,
    /// What `from` has, as it is stored.
    pub stored: Chain,
    /// The journal, of [`vmseal_api::filter::IN_PLACE_JOURNAL`] bytes.
    pub journal: Chain,
    /// Whether data is overwritten before a hole takes its place: it is in the clear.
    pub overwrites: bool,
    /// Whether the file keeps its room where it is zero.
    pub keeps_room: bool,
    /// The highest rate, in bytes a second.
    pub rate: Option<u64>,
    /// The longest part between two notes, in bytes: [`PART_MAX`], or less.
    pub part: u64,
}

/// Which way the data goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// To higher places, from the end on.
    Up,
    /// To lower places, from the beginning on.
    Down,
    /// It stays.
    Stays,
}

impl InPlace {
    /// Converts a disk, or goes on where an earlier conversion was cut off. `disk` is what the journal is of.
    ///
    /// # Errors
    /// [`InPlaceError`]; another attempt goes on.
    pub fn run(self, disk: DiskId, state: &DiskState, stop: &Stop) -> Result<(), InPlaceError> {
        let Self { from, to, stored, journal, overwrites, keeps_room, rate, part } = self;
        let (size, distance) = (from.chain.size(), from.offset.abs_diff(to.offset));
        if !distance.is_multiple_of(u64::from(CRYPT_SECTOR)) {
            return Err(InPlaceError::Distance(distance));
        }
        let (way, part) = match from.offset.cmp(&to.offset) {
            std::cmp::Ordering::Less => (Way::Up, distance.min(part)),
            std::cmp::Ordering::Greater => (Way::Down, distance.min(part)),
            std::cmp::Ordering::Equal => (Way::Stays, part.min(IN_PLACE_SAVED_MAX)),
        };
        let saved = if way == Way::Stays { part.min(size) as usize } else { 0 };
        let disk = disk.0.into_bytes();
        let plan = Plan { disk, size, from: from.offset, to: to.offset };
        let (journal, position) = Journal::open(journal, plan, saved)?;
        let mut work = Work {
            from,
            to,
            stored,
            journal,
            overwrites: overwrites && way == Way::Up,
            keeps_room,
            way,
            part,
            size,
            noted: None,
            overwritten: Vec::new(),
            buffer: vec![0; CHUNK as usize],
            pace: Pace { rate, begun: Instant::now(), moved: 0 },
        };
        work.run(position, state, stop)
    }
}

struct Work {
    from: Side,
    to: Side,
    stored: Chain,
    journal: Journal,
    overwrites: bool,
    keeps_room: bool,
    way: Way,
    part: u64,
    size: u64,
    /// The position that the journal has.
    noted: Option<u64>,
    /// What was overwritten in this part and is to be a hole.
    overwritten: Vec<Range<u64>>,
    buffer: Vec<u8>,
    pace: Pace,
}

impl Work {
    fn run(
        &mut self,
        position: Option<Position>,
        state: &DiskState,
        stop: &Stop,
    ) -> Result<(), InPlaceError> {
        let (total, mut done) = (self.size, position.map_or(0, |position| position.done));
        self.noted = position.map(|position| position.done);
        if let Some(Position { saved, .. }) = position.filter(|position| position.saved > 0) {
            self.put_back(done, saved)?;
        }
        while done < total {
            state.set(DiskActivity::Converting { done, total });
            self.pace.wait(stop)?;
            let part = self.part_after(done);
            let length = part.end - part.start;
            // Where nothing is written nothing is noted: what comes before the next write does that.
            if !self.is_hole_in_both(&part)? {
                self.convert_part(done, part)?;
                self.pace.moved += length;
            }
            done += length;
        }
        if self.noted != Some(total) {
            self.note(Position { done: total, saved: 0 })?;
        }
        state.set(DiskActivity::Converting { done: total, total });
        Ok(())
    }

    /// The part that is converted when this much is.
    fn part_after(&self, done: u64) -> Range<u64> {
        let length = self.part.min(self.size - done);
        match self.way {
            Way::Up => self.size - done - length..self.size - done,
            Way::Down | Way::Stays => done..done + length,
        }
    }

    /// Writes again what a part was, which may have been half written.
    fn put_back(&mut self, done: u64, saved: usize) -> Result<(), InPlaceError> {
        let bytes = self.journal.saved(saved);
        blocking::move_bytes(&mut self.stored, Operation::Write, bytes, done)
            .and_then(|()| blocking::flush(&mut self.stored))
            .map_err(InPlaceError::Write)
    }

    fn note(&mut self, position: Position) -> Result<(), InPlaceError> {
        self.journal.note(position)?;
        self.noted = Some(position.done);
        Ok(())
    }

    fn is_hole_in_both(&self, part: &Range<u64>) -> Result<bool, InPlaceError> {
        let is_hole = |parts: &dyn Parts| {
            let found = parts.extent(part.start, part.end)?;
            Ok::<_, io::Error>(!found.data && found.end == part.end)
        };
        Ok(is_hole(&*self.from.parts)? && is_hole(&*self.to.parts)?)
    }

    fn convert_part(&mut self, done: u64, part: Range<u64>) -> Result<(), InPlaceError> {
        if self.way == Way::Stays {
            let saved = (part.end - part.start) as usize;
            let bytes = self.journal.saved(saved);
            blocking::move_bytes(&mut self.stored, Operation::Read, bytes, part.start)
                .map_err(InPlaceError::Read)?;
            self.note(Position { done, saved })?;
        } else if self.noted != Some(done) {
            self.note(Position { done, saved: 0 })?;
        }
        self.write_part(&part)?;
        blocking::flush(&mut self.to.chain).map_err(InPlaceError::Write)?;
        let overwritten = std::mem::take(&mut self.overwritten);
        if !overwritten.is_empty() && !self.keeps_room {
            for range in overwritten {
                self.make_zero(true, &range)?;
            }
            blocking::flush(&mut self.to.chain).map_err(InPlaceError::Write)?;
        }
        if self.way != Way::Stays {
            self.note(Position { done: done + (part.end - part.start), saved: 0 })?;
        }
        Ok(())
    }

    fn write_part(&mut self, part: &Range<u64>) -> Result<(), InPlaceError> {
        let mut at = part.start;
        while at < part.end {
            let extent = self.from.parts.extent(at, part.end)?;
            let end = if extent.data { extent.end.min(at + CHUNK) } else { extent.end };
            if extent.data {
                self.write_data(at, end)?;
            } else {
                self.zero(at..end)?;
            }
            at = end;
        }
        Ok(())
    }

    fn write_data(&mut self, at: u64, end: u64) -> Result<(), InPlaceError> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let bytes = &mut buffer[..(end - at) as usize];
        let read = blocking::move_bytes(&mut self.from.chain, Operation::Read, bytes, at);
        read.map_err(InPlaceError::Read)?;
        let mut start = 0;
        while let Some((end, zero)) = run_of_zeroes_or_data(bytes, start) {
            let (from, to) = (at + start as u64, at + end as u64);
            if zero {
                self.zero(from..to)?;
            } else {
                let run = &mut bytes[start..end];
                blocking::move_bytes(&mut self.to.chain, Operation::Write, run, from)
                    .map_err(InPlaceError::Write)?;
            }
            start = end;
        }
        // It may have been in the clear.
        buffer.fill(0);
        self.buffer = buffer;
        Ok(())
    }

    /// Has a range read as zeroes.
    fn zero(&mut self, range: Range<u64>) -> Result<(), InPlaceError> {
        let mut at = range.start;
        while at < range.end {
            let extent = self.to.parts.extent(at, range.end)?;
            let part = at..extent.end;
            if extent.data {
                self.make_zero(!self.overwrites, &part)?;
                if self.overwrites {
                    self.overwritten.push(part);
                }
            }
            at = extent.end;
        }
        Ok(())
    }

    /// Writes zeroes, or gives room back where the file does that.
    fn make_zero(&mut self, unmap: bool, range: &Range<u64>) -> Result<(), InPlaceError> {
        let chain = &mut self.to.chain;
        let id = chain.begin().ok_or(InPlaceError::Write(IoError::Overload))?;
        let operation = Operation::WriteZeroes { unmap };
        chain.submit(id, operation, range.start, range.end - range.start, 0);
        blocking::drain(chain).map_err(InPlaceError::Write)
    }
}

/// Holds a conversion back.
struct Pace {
    rate: Option<u64>,
    begun: Instant,
    moved: u64,
}

impl Pace {
    /// Waits until the next part may be written.
    fn wait(&self, stop: &Stop) -> Result<(), InPlaceError> {
        loop {
            if stop.asked() {
                return Err(InPlaceError::Stopped);
            }
            let Some(rate) = self.rate.filter(|rate| *rate > 0) else { return Ok(()) };
            let due = Duration::from_secs_f64(self.moved as f64 / rate as f64);
            let early = due.saturating_sub(self.begun.elapsed());
            if early.is_zero() {
                return Ok(());
            }
            std::thread::sleep(early.min(NAP));
        }
    }
}
