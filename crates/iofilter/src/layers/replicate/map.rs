//! The map of a copy: records durably which chunks may differ. Only it marks and unmarks them.
//!
//! ```text
//!                                           loaded
//!                                                v
//!  Valid ── a write or flush of the map fails ──> Unknown ── rewritten ──> Valid
//!                                                    │ rewriting fails, but its first block can be wiped
//!                                                    v
//!                                                  Void ── rewritten ──> Valid
//! ```
//! - **Valid**: the file says of every marked chunk that it may differ.
//! - **Void**: the file says, durably, that it is invalid; the next process copies everything. Changed chunks
//!   are marked in memory only.
//! - **Unknown**: the file may look valid and be wrong. Nothing is marked any more, so changes of clean chunks wait.
//!
//! A map is Unknown when it is loaded, whatever it holds. The previous process may have been killed, or failed, between
//! a write of the map and its flush: then a mark is read that is in the kernel's memory only, and after a power cut
//! the file says that the chunk is clean. So no change is passed down, not even of a marked chunk, before the
//! map has been rewritten or wiped. A flush is not enough: after a failed flush the kernel may treat the pages as
//! written.
//!
//! A mark is durable before it is visible. Its removal need not be: a chunk that is copied once more does no
//! harm. But it is removed only after the copied data is durable, on the replica and on the disk itself: after a
//! power cut a disk may be older than the data that was read from it.

use std::fmt;

use crate::layers::leg::LegChain;
use crate::layers::replicate::chunks::{Chunks, CopyTicket, NEVER, Span};
use crate::layers::replicate::format::{BLOCK, Foreign, Geometry, Image, Purpose};
use crate::stack::memory::Segment;
use crate::stack::request::IoError;

/// Whether the file can be relied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MapValidity {
    Valid,
    Void,
    Unknown,
}

/// A copied chunk: the replica now durably has every change made before `began`.
#[derive(Clone, Copy, Debug)]
pub struct Copied {
    /// Which chunk.
    pub chunk: usize,
    /// None if a change was in flight when the copy began.
    pub ticket: Option<CopyTicket>,
    /// When the copy began, in milliseconds since 1970.
    pub began: u64,
}

/// What the file held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapLoad {
    /// A map; the copy resumes.
    Map {
        /// Damaged blocks, whose chunks are all copied again.
        damaged_blocks: usize,
    },
    /// A mirror's, and the disk has pivoted: the copy has the disk's data.
    Pivoted,
    /// No valid map: everything is copied. Of a mirror's map that is not new, nothing is concluded, and it is left as
    /// it is.
    Nothing(Foreign),
    /// The file cannot be read: everything is copied.
    Unreadable(IoError),
}

impl fmt::Display for MapLoad {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Map { damaged_blocks } => {
                write!(formatter, "{damaged_blocks} blocks are damaged")
            }
            Self::Pivoted => formatter.write_str("the disk has pivoted"),
            Self::Nothing(why) => why.fmt(formatter),
            Self::Unreadable(error) => error.fmt(formatter),
        }
    }
}

impl MapLoad {
    /// Whether it is known of a mirrored disk which place has its data.
    #[must_use]
    pub fn tells_the_place(&self) -> bool {
        match self {
            Self::Map { .. } | Self::Pivoted | Self::Nothing(Foreign::NoMap) => true,
            Self::Nothing(Foreign::Other | Foreign::Damaged) | Self::Unreadable(_) => false,
        }
    }
}

/// Why a disk has not pivoted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PivotError {
    /// The map says so: the disk's former place has its data.
    #[error("the map of its copy cannot be written: {0}; the disk is served as before")]
    NotRecorded(IoError),
    /// The next process that reads the map will know. Until then both places have the same data: no chunk is marked, so
    /// every change waits for the map, which can only be rewritten as one of a disk that has not pivoted.
    #[error(
        "the map of its copy cannot be written: {0}; the disk is served as before, and what the guest changes waits until it can"
    )]
    Unknown(IoError),
}

/// See the module.
pub struct Map {
    file: LegChain,
    image: Image,
    validity: MapValidity,
    /// The first error since the file was last valid.
    failure: Option<IoError>,
}

impl Map {
    /// Reads the map, marks the chunks that it calls dirty, and writes a new map where there is none.
    pub fn open(file: LegChain, geometry: Geometry, chunks: &Chunks) -> (Self, MapLoad) {
        let (mut map, found) = Self::read(file, geometry);
        if geometry.purpose() == Purpose::Mirror && !found.tells_the_place() {
            return (map, found);
        }
        if found == MapLoad::Pivoted {
            // Perhaps in the kernel's memory only. It is never wiped: the disk's former place is out of date.
            match map.rewrite() {
                Ok(()) => map.validity = MapValidity::Valid,
                Err(error) => map.failure = Some(error),
            }
            return (map, found);
        }
        let up_to = map.image.up_to();
        for chunk in (0..geometry.chunks()).filter(|chunk| map.image.is_dirty(*chunk)) {
            chunks.mark(Span { first: chunk, last: chunk }, up_to);
        }
        map.repair(chunks);
        (map, found)
    }

    fn read(mut file: LegChain, geometry: Geometry) -> (Self, MapLoad) {
        let mut bytes = vec![0; geometry.map_bytes()];
        // SAFETY: the bytes outlive the read, which is over when the call returns.
        let read = file.read(0, unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) });
        let (image, found) = match read.map(|()| Image::read(geometry, &bytes)) {
            Ok(Ok((image, _))) if image.is_pivoted() => (image, MapLoad::Pivoted),
            Ok(Ok((image, damaged_blocks))) => (image, MapLoad::Map { damaged_blocks }),
            Ok(Err(foreign)) => (Image::new(geometry), MapLoad::Nothing(foreign)),
            Err(error) => (Image::new(geometry), MapLoad::Unreadable(error)),
        };
        (Self { file, image, validity: MapValidity::Unknown, failure: None }, found)
    }

    /// Whether changes of clean chunks can be marked.
    #[must_use]
    pub fn can_mark(&self) -> bool {
        self.validity != MapValidity::Unknown
    }

    /// Why the map cannot be kept up to date; none if it is.
    #[must_use]
    pub fn failure(&self) -> Option<IoError> {
        self.failure
    }

    /// Marks chunks that are about to change: recorded first. The replica has every change of them made before `now`,
    /// or, if that is [`NEVER`], nothing. False if that cannot be recorded: ask again.
    pub fn mark(&mut self, chunks: &Chunks, spans: &[Span], now: u64) -> bool {
        if self.image.is_pivoted() {
            // What was asked for before the pivot, by a request that another one's mark let pass.
            return true;
        }
        let mut touched = Touched::default();
        for span in spans {
            touched.add(self.image.set(*span, true));
        }
        if touched.0.is_some() && chunks.marked() == 0 || now == NEVER {
            self.image.set_up_to(now);
            touched.add(Some((1, 1)));
        }
        if self.validity == MapValidity::Valid {
            let written = self.write(touched).and_then(|written| match written {
                true => self.file.flush(),
                false => Ok(()),
            });
            if let Err(error) = written {
                self.fail(error);
            }
        }
        self.repair(chunks);
        if !self.can_mark() {
            return false;
        }
        spans.iter().for_each(|span| chunks.mark(*span, now));
        true
    }

    /// Unmarks copied chunks that have not changed since the copy began.
    pub fn unmark(&mut self, chunks: &Chunks, copied: &[Copied], now: u64) {
        if self.image.is_pivoted() {
            return;
        }
        let mut touched = Touched::default();
        for Copied { chunk, ticket, began } in copied {
            if ticket.is_some_and(|ticket| chunks.unmark(*chunk, ticket)) {
                touched.add(self.image.set(Span { first: *chunk, last: *chunk }, false));
            } else {
                chunks.copied(*chunk, *began);
            }
        }
        self.image.set_up_to(chunks.all_up_to(now));
        touched.add(Some((1, 1)));
        if self.validity == MapValidity::Valid
            && let Err(error) = self.write(touched)
        {
            self.fail(error);
        }
        self.repair(chunks);
    }

    /// Whether the file is as this value has it, durably.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.validity == MapValidity::Valid
    }

    /// Records durably that the disk has pivoted to its copy; false if that lacks something. Nothing is marked or written
    /// after that.
    ///
    /// # Errors
    /// [`PivotError`].
    pub fn pivot(&mut self, chunks: &Chunks) -> Result<bool, PivotError> {
        if chunks.marked() > 0 {
            return Ok(false);
        }
        self.image.set_pivoted(true);
        let Err(error) = self.put(0, 0).and_then(|()| self.file.flush()) else { return Ok(true) };
        self.image.set_pivoted(false);
        self.fail(error);
        // After that the file says that the disk has not pivoted, or nothing.
        self.repair(chunks);
        if self.can_mark() {
            Err(PivotError::NotRecorded(error))
        } else {
            Err(PivotError::Unknown(error))
        }
    }

    fn fail(&mut self, error: IoError) {
        self.validity = MapValidity::Unknown;
        self.failure.get_or_insert(error);
    }

    /// Rewrites the whole map where the file is not valid, or else makes it void. After either, all marks are
    /// recorded: every process will copy those chunks.
    fn repair(&mut self, chunks: &Chunks) {
        if self.validity == MapValidity::Valid {
            return;
        }
        match self.rewrite() {
            Ok(()) => (self.validity, self.failure) = (MapValidity::Valid, None),
            Err(error) => {
                self.failure.get_or_insert(error);
                if self.validity == MapValidity::Unknown && self.wipe().is_ok() {
                    self.validity = MapValidity::Void;
                }
            }
        }
        if self.can_mark() {
            chunks.on_record();
        }
    }

    /// Bits first: the first block makes the file valid, even if its own write reports an error.
    fn rewrite(&mut self) -> Result<(), IoError> {
        (0..self.image.blocks()).for_each(|index| self.image.seal(index));
        self.put(1, self.image.blocks() - 1)?;
        self.file.flush()?;
        self.validity = MapValidity::Unknown;
        self.put(0, 0)?;
        self.file.flush()
    }

    fn wipe(&mut self) -> Result<(), IoError> {
        let mut zeroes = [0; BLOCK];
        // SAFETY: the zeroes outlive the write, which is over when the call returns.
        self.file.write(0, unsafe { Segment::new(zeroes.as_mut_ptr(), BLOCK) })?;
        self.file.flush()
    }

    /// Writes the blocks that have changed; true if there were any.
    fn write(&mut self, touched: Touched) -> Result<bool, IoError> {
        let Some((first, last)) = touched.0 else { return Ok(false) };
        (first..=last).for_each(|index| self.image.seal(index));
        self.put(first, last)?;
        Ok(true)
    }

    fn put(&mut self, first: usize, last: usize) -> Result<(), IoError> {
        let bytes = &self.image.bytes()[first * BLOCK..(last + 1) * BLOCK];
        // SAFETY: a write only reads the bytes, and is over when the call returns.
        let segment = unsafe { Segment::new(bytes.as_ptr().cast_mut(), bytes.len()) };
        self.file.write((first * BLOCK) as u64, segment)
    }
}

/// The blocks of a map that must be written: one range, gaps included.
#[derive(Clone, Copy, Debug, Default)]
struct Touched(Option<(usize, usize)>);

impl Touched {
    fn add(&mut self, blocks: Option<(usize, usize)>) {
        self.0 = match (self.0, blocks) {
            (Some((first, last)), Some((from, to))) => Some((first.min(from), last.max(to))),
            (one, other) => one.or(other),
        };
    }
}
