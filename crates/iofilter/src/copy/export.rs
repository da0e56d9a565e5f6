//! Writing all of a disk to a file.
//!
//! ```text
//!  chain (decrypts) ─► runs of data ─► raw: written, zeroes stay holes
//!                  └─► runs of zeroes  qcow2: written, zeroes stay unallocated
//!                                      luks2: both encrypted under the volume's own key
//!                                      overlay: blocks with another sum than before
//! ```
//! Holes of the disk are not even read. The file is flushed at the end, and is unfinished before that: the caller gives it its name only
//! then.

use std::convert::identity;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use imago::qcow2::Qcow2;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatCreateBuilder, FormatDriverBuilder};
use vmseal_api::filter::{Direct, DiskActivity, Holes};

use crate::copy::engine::{Engine, PIECE, Progress, Sink, Source, UNIT, at_once, by_runs};
use crate::copy::filled::Filled;
use crate::copy::sums::{self, Content, Sums, Unchanged};
use crate::copy::to_chain::{ToChain, Zeroes};
use crate::disk::allocation::Allocation;
use crate::disk::status::DiskState;
use crate::disk::{Disk, DiskStorage, Encryption};
use crate::layers::crypt::CryptError;
use crate::stack::blocking;
use crate::stack::chain::Chain;
use crate::stack::request::{IoError, Operation};
use crate::stack::stop::Stop;
use crate::storage::extent::{Extent, Own, OwnExtent};
use crate::storage::file::{FileDisk, OpenError};

/// Why an export failed.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The disk.
    #[error("the disk cannot be read: {0}")]
    Disk(#[from] IoError),
    /// The disk's image.
    #[error("the disk's image cannot be read: {0}")]
    Image(#[source] io::Error),
    /// The file.
    #[error("the file cannot be written: {0}")]
    Target(#[from] io::Error),
    /// The files of sums.
    #[error("the sums of blocks cannot be read or written: {0}")]
    Sums(#[source] io::Error),
    /// The LUKS2 volume.
    #[error("the volume cannot be written: {0}")]
    Volume(#[source] IoError),
    /// The file of the LUKS2 volume.
    #[error("the volume cannot be opened: {0}")]
    OpenVolume(#[from] OpenError),
    /// The cipher of the LUKS2 volume.
    #[error("the volume cannot be encrypted: {0}")]
    Crypt(#[from] CryptError),
    /// Asked to stop.
    #[error("the export was stopped")]
    Stopped,
}

/// The target of an export.
pub enum Target {
    /// A raw file.
    Raw(File),
    /// QEMU's format.
    Qcow2(Box<FormatAccess<imago::file::File>>),
    /// An overlay of QEMU's format: what is not written is as below it.
    Overlay(Box<FormatAccess<imago::file::File>>),
    /// Nothing is written.
    Nothing,
    /// A LUKS2 volume.
    Luks2(ToChain<Box<Chain>>),
    /// A disk as vmseal keeps it, which reads as zeroes.
    Disk(ToChain<Box<Chain>>),
}

impl Target {
    /// A file of QEMU's format for a disk of `size` bytes; `file` is empty.
    ///
    /// # Errors
    /// An error of writing it.
    pub fn qcow2(file: File, size: u64) -> Result<Self, ExportError> {
        let storage = imago::file::File::try_from(file)?;
        let builder = Qcow2::<imago::file::File>::create_builder(storage).size(size);
        let image = builder.create_open(DenyImplicitOpenGate::default(), |file| {
            Ok(Qcow2::builder(file).backing(None).write(true))
        })?;
        Ok(Self::Qcow2(Box::new(FormatAccess::new(image))))
    }

    /// An overlay of QEMU's format that has nothing yet. What it names as below it is not opened.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn overlay(file: File) -> Result<Self, ExportError> {
        let storage = imago::file::File::try_from(file)?;
        let image = Qcow2::<imago::file::File>::builder(storage)
            .backing(None)
            .write(true)
            .open(DenyImplicitOpenGate::default())?;
        Ok(Self::Overlay(Box::new(FormatAccess::new(image))))
    }

    /// A LUKS2 volume of `size` bytes, whose data segment begins at `offset`.
    ///
    /// # Errors
    /// The file is too short, or the key is not usable.
    pub fn luks2(
        file: File,
        offset: u64,
        size: u64,
        key: vmseal_secret::SecretBytes,
    ) -> Result<Self, ExportError> {
        let file = FileDisk::open(file.into(), offset, size, Direct::Auto, false)?;
        let encryption = Encryption { key, holes: Holes::Ciphertext };
        let disk = Disk::new(size, false, Some(encryption), DiskStorage::File(file), 2);
        Ok(Self::Luks2(ToChain::new(Box::new(disk.chain()?), Zeroes::Write)))
    }

    /// A disk of `size` bytes as vmseal keeps it, whose first byte is at `offset`.
    ///
    /// # Errors
    /// The file is too short, or the key is not usable.
    pub fn disk(
        file: File,
        offset: u64,
        size: u64,
        key: Option<vmseal_secret::SecretBytes>,
        keeps_room: bool,
    ) -> Result<Self, ExportError> {
        let file = FileDisk::open(file.into(), offset, size, Direct::Auto, false)?;
        if keeps_room {
            file.keep_room();
        }
        let encryption = key.map(|key| Encryption { key, holes: Holes::Zero });
        let disk = Disk::new(size, false, encryption, DiskStorage::File(file), 2);
        Ok(Self::Disk(ToChain::new(Box::new(disk.chain()?), Zeroes::Skip)))
    }

    /// Whether parts that are not written read as zeroes.
    fn has_holes(&self) -> bool {
        !matches!(self, Self::Luks2(_) | Self::Overlay(_))
    }
}

impl Sink for Target {
    type Error = ExportError;

    fn write(&mut self, bytes: &mut [u8], at: u64) -> Result<(), ExportError> {
        match self {
            Self::Raw(file) => Ok(file.write_all_at(bytes, at)?),
            Self::Qcow2(image) | Self::Overlay(image) => Ok(image.write(&*bytes, at)?),
            Self::Nothing => Ok(()),
            Self::Luks2(chain) | Self::Disk(chain) => {
                chain.write(bytes, at).map_err(ExportError::Volume)
            }
        }
    }

    /// Writes zeroes where a hole would not read as such.
    fn zero(&mut self, at: u64, length: u64) -> Result<(), ExportError> {
        match self {
            Self::Overlay(image) => Ok(image.write_zeroes(at, length)?),
            _ => Ok(()),
        }
    }

    /// Writes what is no zeroes, if zeroes need not be written.
    fn piece(&mut self, bytes: &mut [u8], at: u64) -> Result<(), ExportError> {
        if self.has_holes() { by_runs(self, bytes, at) } else { self.write(bytes, at) }
    }

    fn begin(&mut self, piece: Filled) -> Result<Option<Filled>, ExportError> {
        match self {
            Self::Luks2(chain) | Self::Disk(chain) => {
                chain.begin(piece).map_err(ExportError::Volume)
            }
            Self::Raw(_) | Self::Qcow2(_) | Self::Overlay(_) | Self::Nothing => {
                at_once(self, piece)
            }
        }
    }

    fn finish(&mut self) -> Result<Option<Filled>, ExportError> {
        match self {
            Self::Luks2(chain) | Self::Disk(chain) => chain.finish().map_err(ExportError::Volume),
            Self::Raw(_) | Self::Qcow2(_) | Self::Overlay(_) | Self::Nothing => Ok(None),
        }
    }

    fn flush(&mut self) -> Result<(), ExportError> {
        match self {
            Self::Raw(file) => Ok(file.sync_all()?),
            Self::Nothing => Ok(()),
            Self::Qcow2(image) | Self::Overlay(image) => {
                image.flush()?;
                Ok(image.sync()?)
            }
            Self::Luks2(chain) | Self::Disk(chain) => chain.flush().map_err(ExportError::Volume),
        }
    }
}

/// Writes all of the disk to `target`, and flushes. `allocation` says where the disk has holes.
///
/// # Errors
/// [`ExportError`]; the file's content is undefined then.
pub fn run(
    chain: &mut Chain,
    allocation: &Allocation,
    target: &mut Target,
    mut sums: Option<&mut Sums>,
    state: &DiskState,
    stop: &Stop,
) -> Result<(), ExportError> {
    let total = chain.size();
    let unchanged = sums.as_mut().map(|sums| sums.unchanged()).transpose();
    let unchanged = unchanged.map_err(ExportError::Sums)?.flatten();
    let unit = if sums.is_some() { sums::BLOCK } else { UNIT };
    // Sums note a hole, whatever it becomes.
    let notes_holes = target.has_holes() || sums.is_some();
    let unknown = Allocation::Unknown;
    let allocation = if notes_holes { allocation } else { &unknown };
    let mut disk = Exported { chain, allocation, unchanged, hole: 0, unit, state };
    let engine = Engine { range: 0..total, pace: &mut state.paced(), stop, flushes: None };
    let mut report = |progress: Progress| {
        state.set(DiskActivity::Exporting { done: progress.done, total });
    };
    let exported = match sums {
        None => engine.run(&mut disk, target, &mut report),
        Some(sums) => engine.run(&mut disk, &mut Summed { target, sums }, &mut report),
    };
    exported.map_err(|error| error.told(ExportError::Stopped, identity, identity))
}

/// A disk that is read for an export.
struct Exported<'a> {
    chain: &'a mut Chain,
    /// Where its holes are, which need not be read.
    allocation: &'a Allocation,
    unchanged: Option<Unchanged>,
    /// Where the hole ends that was found last. The engine takes a long one part by part, and what is exported does not change.
    hole: u64,
    /// The unit of holes.
    unit: u64,
    state: &'a DiskState,
}

impl Source for Exported<'_> {
    type Error = ExportError;

    /// What has not changed, a hole, or data; each from the beginning of a unit to that of another one, or to the end of the disk.
    fn part(&mut self, at: u64, end: u64) -> Result<OwnExtent, ExportError> {
        let (same, until) = match &self.unchanged {
            Some(unchanged) => unchanged.at(at, end),
            None => (false, end),
        };
        if same {
            return Ok(OwnExtent { content: Own::Nothing, end: until });
        }
        if at < self.hole {
            return Ok(OwnExtent { content: Own::Zeroes, end: self.hole });
        }
        let found = self.allocation.extent(at, end).map_err(ExportError::Image)?;
        let found = in_units(found, (at, end), until, self.unit);
        if found.content == Own::Zeroes {
            self.hole = found.end;
        }
        Ok(found)
    }

    fn read(&mut self, bytes: &mut [u8], at: u64) -> Result<(), ExportError> {
        blocking::read_in_parts(self.chain, bytes, at)?;
        self.state.counters(0).succeeded(Operation::Read, bytes.len() as u64);
        Ok(())
    }
}

/// A target that gets the blocks that are not as before. Each part begins with a block.
struct Summed<'a> {
    target: &'a mut Target,
    sums: &'a mut Sums,
}

impl Sink for Summed<'_> {
    type Error = ExportError;

    fn write(&mut self, bytes: &mut [u8], at: u64) -> Result<(), ExportError> {
        self.target.write(bytes, at)
    }

    fn zero(&mut self, at: u64, length: u64) -> Result<(), ExportError> {
        let end = at + length;
        for at in (at..end).step_by(sums::BLOCK as usize) {
            if self.sums.zeroed().map_err(ExportError::Sums)? {
                self.target.zero(at, sums::BLOCK.min(end - at))?;
            }
        }
        Ok(())
    }

    /// Notes blocks that have not changed.
    fn leave(&mut self, _at: u64, length: u64) -> Result<(), ExportError> {
        for _ in 0..length.div_ceil(sums::BLOCK) {
            self.sums.keep().map_err(ExportError::Sums)?;
        }
        Ok(())
    }

    fn piece(&mut self, bytes: &mut [u8], at: u64) -> Result<(), ExportError> {
        for (number, block) in bytes.chunks_mut(sums::BLOCK as usize).enumerate() {
            let at = at + number as u64 * sums::BLOCK;
            match self.sums.changed(block).map_err(ExportError::Sums)? {
                Some(Content::Data) => self.target.piece(block, at)?,
                Some(Content::Zeroes) => self.target.zero(at, block.len() as u64)?,
                None => {}
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), ExportError> {
        self.sums.finish().map_err(ExportError::Sums)?;
        self.target.flush()
    }
}

/// What was found at `at` of a disk that ends at `end`, in whole units: a hole of at least one, or data, up to `until` at most. A hole at the
/// end of the disk may be shorter. Data has at least the length of a piece: what is shorter is read with the holes behind it.
fn in_units(found: Extent, (at, end): (u64, u64), until: u64, unit: u64) -> OwnExtent {
    let hole = if found.end == end { end } else { found.end / unit * unit };
    if !found.data && hole > at {
        return OwnExtent { content: Own::Zeroes, end: hole };
    }
    let whole = if found.data { found.end.next_multiple_of(unit) } else { at };
    OwnExtent { content: Own::Data, end: whole.max(at + PIECE as u64).min(until) }
}

#[cfg(test)]
mod tests;
