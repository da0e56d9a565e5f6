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

use std::convert::identity;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use vmseal_api::filter::{CRYPT_SECTOR, DiskActivity, IN_PLACE_SAVED_MAX};
use vmseal_api::id::DiskId;
use vmseal_api::pace::CopyPace;

use self::journal::{Journal, JournalError, Plan, Position};
use crate::copy::engine::{Engine, Sink, Source};
use crate::disk::allocation::Allocation;
use crate::disk::pacing::{Paced, WorkPace};
use crate::disk::status::DiskState;
use crate::stack::blocking;
use crate::stack::chain::Chain;
use crate::stack::request::{IoError, Operation};
use crate::stack::stop::Stop;
use crate::storage::extent::{Extent, Own, OwnExtent};

/// The longest part between two notes, in bytes, where the distance is longer: seconds of work to do again.
pub const PART_MAX: u64 = 16 * 1024 * 1024;

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
    /// The system refuses what it takes to wait.
    #[error("the rate of the conversion cannot be kept: {0}")]
    Rate(#[source] io::Error),
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
        let pace = pace_at(rate).map_err(InPlaceError::Rate)?;
        let disk = disk.0.into_bytes();
        let plan = Plan { disk, size, from: from.offset, to: to.offset };
        let (journal, position) = Journal::open(journal, plan, saved)?;
        let mut work = Work {
            from,
            to: Rewritten { to, overwrites: overwrites && way == Way::Up, overwritten: Vec::new() },
            stored,
            journal,
            keeps_room,
            way,
            part,
            size,
            noted: None,
            pace,
        };
        work.run(position, state, stop)
    }
}

/// The pace of a conversion at this rate.
fn pace_at(rate: Option<u64>) -> io::Result<Paced> {
    let Some(rate) = rate.filter(|rate| *rate > 0) else { return Ok(Paced::new(None)) };
    let pace = WorkPace::new()?;
    pace.set(CopyPace { paused: false, bytes_per_second: Some(rate) });
    Ok(Paced::new(Some(Arc::new(pace))))
}

struct Work {
    from: Side,
    to: Rewritten,
    stored: Chain,
    journal: Journal,
    keeps_room: bool,
    way: Way,
    part: u64,
    size: u64,
    /// The position that the journal has.
    noted: Option<u64>,
    /// Kept between parts: none is half written while it waits.
    pace: Paced,
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
            self.wait(0, stop)?;
            let part = self.part_after(done);
            let length = part.end - part.start;
            // Where nothing is written nothing is noted: what comes before the next write does that.
            if !self.is_hole_in_both(&part)? {
                self.wait(length, stop)?;
                self.convert_part(done, part, stop)?;
            }
            done += length;
        }
        if self.noted != Some(total) {
            self.note(Position { done: total, saved: 0 })?;
        }
        state.set(DiskActivity::Converting { done: total, total });
        Ok(())
    }

    /// Waits until the rate allows so many bytes.
    fn wait(&mut self, bytes: u64, stop: &Stop) -> Result<(), InPlaceError> {
        if self.pace.wait(bytes, stop) { Ok(()) } else { Err(InPlaceError::Stopped) }
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
        Ok(is_hole(&*self.from.parts)? && is_hole(&*self.to.to.parts)?)
    }

    fn convert_part(
        &mut self,
        done: u64,
        part: Range<u64>,
        stop: &Stop,
    ) -> Result<(), InPlaceError> {
        let length = part.end - part.start;
        if self.way == Way::Stays {
            let saved = length as usize;
            let bytes = self.journal.saved(saved);
            blocking::move_bytes(&mut self.stored, Operation::Read, bytes, part.start)
                .map_err(InPlaceError::Read)?;
            self.note(Position { done, saved })?;
        } else if self.noted != Some(done) {
            self.note(Position { done, saved: 0 })?;
        }
        let mut pace = Paced::new(None);
        let engine = Engine { range: part, pace: &mut pace, stop, flushes: None };
        let written = engine.in_turn(&mut self.from, &mut self.to, &mut |_| ());
        written.map_err(|error| error.told(InPlaceError::Stopped, identity, identity))?;
        let overwritten = std::mem::take(&mut self.to.overwritten);
        if !overwritten.is_empty() && !self.keeps_room {
            for range in overwritten {
                self.to.make_zero(true, &range)?;
            }
            self.to.flush()?;
        }
        if self.way != Way::Stays {
            self.note(Position { done: done + length, saved: 0 })?;
        }
        Ok(())
    }
}

impl Source for Side {
    type Error = InPlaceError;

    fn part(&mut self, at: u64, end: u64) -> Result<OwnExtent, InPlaceError> {
        let Extent { data, end } = self.parts.extent(at, end)?;
        Ok(OwnExtent { content: if data { Own::Data } else { Own::Zeroes }, end })
    }

    fn read(&mut self, bytes: &mut [u8], at: u64) -> Result<(), InPlaceError> {
        blocking::move_bytes(&mut self.chain, Operation::Read, bytes, at)
            .map_err(InPlaceError::Read)
    }
}

/// The disk as it is to be, which is written.
struct Rewritten {
    to: Side,
    overwrites: bool,
    /// What was overwritten in this part and is to be a hole.
    overwritten: Vec<Range<u64>>,
}

impl Rewritten {
    /// Writes zeroes, or gives room back where the file does that.
    fn make_zero(&mut self, unmap: bool, range: &Range<u64>) -> Result<(), InPlaceError> {
        let length = range.end - range.start;
        blocking::write_zeroes(&mut self.to.chain, range.start, length, unmap)
            .map_err(InPlaceError::Write)
    }
}

impl Sink for Rewritten {
    type Error = InPlaceError;

    fn write(&mut self, bytes: &mut [u8], at: u64) -> Result<(), InPlaceError> {
        blocking::move_bytes(&mut self.to.chain, Operation::Write, bytes, at)
            .map_err(InPlaceError::Write)
    }

    fn zero(&mut self, at: u64, length: u64) -> Result<(), InPlaceError> {
        let (mut at, end) = (at, at + length);
        while at < end {
            let extent = self.to.parts.extent(at, end)?;
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

    fn flush(&mut self) -> Result<(), InPlaceError> {
        blocking::flush(&mut self.to.chain).map_err(InPlaceError::Write)
    }
}
