//! The map of a replica: keeps on record, durably, which chunks may differ, and alone marks and unmarks them.
//!
//! ```text
//!                                            taken up
//!                                                v
//!  Valid ── a write or flush of the map fails ──> Unknown ── written anew ──> Valid
//!                                                    │ cannot be, but its first block can be wiped
//!                                                    v
//!                                                  Void ── written anew ──> Valid
//! ```
//! - **Valid**: the file says of every marked chunk that it may differ.
//! - **Void**: the file says, durably, that it is not to be believed; the next process copies everything. What
//!   changes is marked in memory alone.
//! - **Unknown**: the file may be believed and wrong. Nothing is marked any more, so changes of clean chunks wait.
//!
//! A map that is taken up is Unknown, whatever is read. The process before may have been killed, or failed, between
//! a write of the map and its flush: then a mark is read that is in the kernel's memory alone, and after a power cut
//! the file says that the chunk is clean. So no change goes down, not even of a chunk that is marked, before the
//! map has been written anew or wiped. A flush would not do: after one that has failed the kernel may take the pages
//! for written.
//!
//! A mark is durable before it is seen. The end of one need not be: a chunk that is copied once more does no
//! harm. But it comes after what was copied is durable, on the replica and on the disk itself: after a power
//! cut a disk may be older than what was read from it.

use crate::layers::replicate::blocking_disk::BlockingDisk;
use crate::layers::replicate::chunks::{Chunks, NEVER, Span, Ticket};
use crate::layers::replicate::format::{BLOCK, Foreign, Geometry, Image};
use crate::stack::memory::Segment;
use crate::stack::request::IoError;

/// What the file is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MapValidity {
    Valid,
    Void,
    Unknown,
}

/// A chunk that was copied: what was done before `began` the replica has now, durably.
#[derive(Clone, Copy, Debug)]
pub struct Copied {
    /// Which.
    pub chunk: usize,
    /// None if something was under way when the copy began.
    pub ticket: Option<Ticket>,
    /// When the copy began, in milliseconds since 1970.
    pub began: u64,
}

/// What was found in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapLoad {
    /// A map; the copy goes on.
    Map {
        /// Blocks of it whose chunks are all copied again.
        damaged_blocks: usize,
    },
    /// None that is to be believed: everything is copied.
    Nothing(Foreign),
    /// It cannot be read: everything is copied.
    Unreadable(IoError),
}

/// See the module.
pub struct Map {
    file: BlockingDisk,
    image: Image,
    worth: MapValidity,
    /// The first error since the file was last valid.
    failure: Option<IoError>,
}

impl Map {
    /// Reads the map, marks what it calls dirty, and writes a new one where there is none.
    pub fn open(file: BlockingDisk, geometry: Geometry, chunks: &Chunks) -> (Self, MapLoad) {
        let (mut map, found) = Self::read(file, geometry);
        let up_to = map.image.up_to();
        for chunk in (0..geometry.chunks()).filter(|chunk| map.image.is_dirty(*chunk)) {
            chunks.mark(Span { first: chunk, last: chunk }, up_to);
        }
        map.mend(chunks);
        (map, found)
    }

    fn read(mut file: BlockingDisk, geometry: Geometry) -> (Self, MapLoad) {
        let mut bytes = vec![0; geometry.map_bytes()];
        // SAFETY: the bytes outlive the read, which is over when the call returns.
        let read = file.read(0, unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) });
        let (image, found) = match read.map(|()| Image::read(geometry, &bytes)) {
            Ok(Ok((image, damaged_blocks))) => (image, MapLoad::Map { damaged_blocks }),
            Ok(Err(foreign)) => (Image::new(geometry), MapLoad::Nothing(foreign)),
            Err(error) => (Image::new(geometry), MapLoad::Unreadable(error)),
        };
        (Self { file, image, worth: MapValidity::Unknown, failure: None }, found)
    }

    /// Whether changes of clean chunks can be marked.
    #[must_use]
    pub fn can_mark(&self) -> bool {
        self.worth != MapValidity::Unknown
    }

    /// Why the map is not kept; none if it is.
    #[must_use]
    pub fn failure(&self) -> Option<IoError> {
        self.failure
    }

    /// Marks chunks that are about to change: on record first. The replica has of them what was done before `now`,
    /// or, if that is [`NEVER`], nothing. False if that cannot be recorded: ask again.
    pub fn mark(&mut self, chunks: &Chunks, spans: &[Span], now: u64) -> bool {
        let mut touched = Touched::default();
        for span in spans {
            touched.add(self.image.set(*span, true));
        }
        if touched.0.is_some() && chunks.marked() == 0 || now == NEVER {
            self.image.set_up_to(now);
            touched.add(Some((1, 1)));
        }
        if self.worth == MapValidity::Valid {
            let written = self.write(touched).and_then(|written| match written {
                true => self.file.flush(),
                false => Ok(()),
            });
            if let Err(error) = written {
                self.fail(error);
            }
        }
        self.mend(chunks);
        if !self.can_mark() {
            return false;
        }
        spans.iter().for_each(|span| chunks.mark(*span, now));
        true
    }

    /// Takes the marks of what was copied, where nothing has changed since the copy began.
    pub fn unmark(&mut self, chunks: &Chunks, copied: &[Copied], now: u64) {
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
        if self.worth == MapValidity::Valid
            && let Err(error) = self.write(touched)
        {
            self.fail(error);
        }
        self.mend(chunks);
    }

    fn fail(&mut self, error: IoError) {
        self.worth = MapValidity::Unknown;
        self.failure.get_or_insert(error);
    }

    /// Writes the whole map anew where the file is not valid, or else makes it void. After either all that is marked
    /// is on record: every process will copy it.
    fn mend(&mut self, chunks: &Chunks) {
        if self.worth == MapValidity::Valid {
            return;
        }
        match self.write_anew() {
            Ok(()) => (self.worth, self.failure) = (MapValidity::Valid, None),
            Err(error) => {
                self.failure.get_or_insert(error);
                if self.worth == MapValidity::Unknown && self.wipe().is_ok() {
                    self.worth = MapValidity::Void;
                }
            }
        }
        if self.can_mark() {
            chunks.on_record();
        }
    }

    /// Bits first: with its first block the file is believed, also when that could not be written well.
    fn write_anew(&mut self) -> Result<(), IoError> {
        (0..self.image.blocks()).for_each(|index| self.image.seal(index));
        self.put(1, self.image.blocks() - 1)?;
        self.file.flush()?;
        self.worth = MapValidity::Unknown;
        self.put(0, 0)?;
        self.file.flush()
    }

    fn wipe(&mut self) -> Result<(), IoError> {
        let mut zeroes = [0; BLOCK];
        // SAFETY: the zeroes outlive the write, which is over when the call returns.
        self.file.write(0, unsafe { Segment::new(zeroes.as_mut_ptr(), BLOCK) })?;
        self.file.flush()
    }

    /// Writes the blocks that have changed; whether there were any.
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

/// The blocks of a map that are to be written: one stretch, with what lies between.
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
