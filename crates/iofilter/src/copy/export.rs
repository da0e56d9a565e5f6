//! Writing all of a disk to a file.
//!
//! ```text
//!  chain (decrypts) ─► runs of data ─► raw: written, zeroes stay holes
//!                  └─► runs of zeroes  qcow2: written, zeroes stay unallocated
//!                                      luks2: both encrypted under the volume's own key
//!                                      overlay: blocks with another sum than before
//! ```
//! Holes in the disk's own image are not even read. The file is flushed at the end, and is unfinished
//! before that: the caller gives it its name only then.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use imago::qcow2::Qcow2;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatCreateBuilder, FormatDriverBuilder};
use vmseal_api::filter::{CRYPT_SECTOR, Direct, DiskActivity, Holes};

use crate::copy::import::run_of_zeroes_or_data;
use crate::copy::sums::{self, Content, Sums};
use crate::disk::status::DiskState;
use crate::disk::{Disk, DiskStorage, Encryption};
use crate::layers::crypt::CryptError;
use crate::stack::blocking;
use crate::stack::chain::Chain;
use crate::stack::request::{IoError, Operation};
use crate::stack::stop::Stop;
use crate::storage::extent::raw_extent;
use crate::storage::file::{FileDisk, OpenError};

/// How much is read at a time.
const CHUNK: usize = 1024 * 1024;

/// The unit in which zeroes are looked for.
const UNIT: u64 = CRYPT_SECTOR as u64;

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
    Luks2(Box<Chain>),
    /// A disk as vmseal keeps it, which reads as zeroes.
    Disk(Box<Chain>),
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
        Ok(Self::Luks2(Box::new(disk.chain()?)))
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
        Ok(Self::Disk(Box::new(disk.chain()?)))
    }

    /// Whether parts that are not written read as zeroes.
    fn has_holes(&self) -> bool {
        !matches!(self, Self::Luks2(_) | Self::Overlay(_))
    }

    /// Writes zeroes where a hole would not read as such.
    fn write_zeroes(&self, at: u64, length: u64) -> Result<(), ExportError> {
        match self {
            Self::Overlay(image) => Ok(image.write_zeroes(at, length)?),
            _ => Ok(()),
        }
    }

    fn write(&mut self, bytes: &mut [u8], at: u64) -> Result<(), ExportError> {
        match self {
            Self::Raw(file) => Ok(file.write_all_at(bytes, at)?),
            Self::Qcow2(image) | Self::Overlay(image) => Ok(image.write(&*bytes, at)?),
            Self::Nothing => Ok(()),
            Self::Luks2(chain) | Self::Disk(chain) => {
                blocking::move_bytes(chain, Operation::Write, bytes, at)
                    .map_err(ExportError::Volume)
            }
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
            Self::Luks2(chain) | Self::Disk(chain) => {
                blocking::flush(chain).map_err(ExportError::Volume)
            }
        }
    }
}

/// The disk's own image, where its holes are known to be zeroes: the file, and the offset of the disk in
/// it.
pub struct Sparse(pub File, pub u64);

/// Writes all of the disk to `target`, and flushes.
///
/// # Errors
/// [`ExportError`]; the file's content is undefined then.
pub fn run(
    chain: &mut Chain,
    sparse: Option<&Sparse>,
    target: &mut Target,
    mut sums: Option<&mut Sums>,
    state: &DiskState,
    stop: &Stop,
) -> Result<(), ExportError> {
    let total = chain.size();
    let unit = if sums.is_some() { sums::BLOCK } else { UNIT };
    let (mut buffer, mut paced) = (vec![0; CHUNK], state.paced());
    // What is not read is known by the block.
    let chunk = match &sums {
        Some(sums) if sums.knows_changes() => sums::BLOCK as usize,
        _ => CHUNK,
    };
    let mut at = 0;
    while at < total {
        state.set(DiskActivity::Exporting { done: at, total });
        // For the rate what is not read does not count.
        if !paced.wait(0, stop) {
            return Err(ExportError::Stopped);
        }
        if let Some(sums) = &mut sums
            && let Some(end) = keep(sums, at, total)?
        {
            at = end;
            continue;
        }
        if (target.has_holes() || sums.is_some())
            && let Some(end) = hole(sparse, at, total, unit).map_err(ExportError::Image)?
        {
            if let Some(sums) = &mut sums {
                note_hole(target, sums, at, end)?;
            }
            at = end;
            continue;
        }
        let length = (total - at).min(chunk as u64) as usize;
        if !paced.wait(length as u64, stop) {
            return Err(ExportError::Stopped);
        }
        let part = &mut buffer[..length];
        blocking::move_bytes(chain, Operation::Read, part, at)?;
        state.counters(0).succeeded(Operation::Read, length as u64);
        match &mut sums {
            Some(sums) => write_changed(target, sums, part, at)?,
            None => write_data(target, part, at)?,
        }
        at += length as u64;
    }
    state.set(DiskActivity::Exporting { done: total, total });
    if let Some(sums) = sums {
        sums.finish().map_err(ExportError::Sums)?;
    }
    target.flush()
}

/// Writes what is no zeroes, if zeroes need not be written.
fn write_data(target: &mut Target, part: &mut [u8], at: u64) -> Result<(), ExportError> {
    let mut start = 0;
    while let Some((end, zero)) = run_of_zeroes_or_data(part, start) {
        if !zero || !target.has_holes() {
            target.write(&mut part[start..end], at + start as u64)?;
        }
        start = end;
    }
    Ok(())
}

/// Writes the blocks that are not as before. `at` is a multiple of their length.
fn write_changed(
    target: &mut Target,
    sums: &mut Sums,
    part: &mut [u8],
    at: u64,
) -> Result<(), ExportError> {
    for (number, block) in part.chunks_mut(sums::BLOCK as usize).enumerate() {
        let at = at + number as u64 * sums::BLOCK;
        match sums.changed(block).map_err(ExportError::Sums)? {
            Some(Content::Data) => write_data(target, block, at)?,
            Some(Content::Zeroes) => target.write_zeroes(at, block.len() as u64)?,
            None => {}
        }
    }
    Ok(())
}

/// Notes blocks that have not changed; returns where the next one begins that may have, if it is another one.
fn keep(sums: &mut Sums, at: u64, total: u64) -> Result<Option<u64>, ExportError> {
    let Some(end) = sums.unchanged_until(at, total) else { return Ok(None) };
    let mut kept = at;
    while kept < end && sums.kept().map_err(ExportError::Sums)? {
        kept = (kept + sums::BLOCK).min(total);
    }
    Ok((kept > at).then_some(kept))
}

/// Deals with a hole from the beginning of a block to that of another, or to the end of the disk.
fn note_hole(target: &Target, sums: &mut Sums, from: u64, to: u64) -> Result<(), ExportError> {
    for at in (from..to).step_by(sums::BLOCK as usize) {
        if sums.zeroed().map_err(ExportError::Sums)? {
            target.write_zeroes(at, sums::BLOCK.min(to - at))?;
        }
    }
    Ok(())
}

/// Where the hole at `at` ends, if there is one of at least a unit; a hole at the end of the disk may be shorter.
fn hole(sparse: Option<&Sparse>, at: u64, total: u64, unit: u64) -> io::Result<Option<u64>> {
    let Some(Sparse(file, offset)) = sparse else { return Ok(None) };
    let extent = raw_extent(file, offset + at, offset + total)?;
    let end = extent.end - offset;
    let end = if end == total { end } else { end / unit * unit };
    Ok((!extent.data && end > at).then_some(end))
}
