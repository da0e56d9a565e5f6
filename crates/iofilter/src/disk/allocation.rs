//! Which parts of a disk are known to be zeroes without reading them.

use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use vmseal_api::filter::CRYPT_SECTOR;

use crate::storage::DiskStorage;
use crate::storage::extent::Extent;
use crate::storage::file::FileDisk;
use crate::storage::qcow2::Extents;

/// The unit of a hole, in bytes. A smaller hole, which a file system with small blocks may have within an encrypted
/// sector, is no hole to the reader, as the sector's ciphertext is not all zeroes.
const UNIT: u64 = CRYPT_SECTOR as u64;

/// How to find a disk's holes.
#[derive(Clone, Debug)]
pub enum Allocation {
    /// Not at all: all of it may hold data.
    Unknown,
    /// The holes of this file read as zeroes.
    File(FileDisk),
    /// The clusters that neither this image nor the files below it have allocated, or that are marked as zeroes, read as zeroes; so do holes
    /// of a raw file below.
    Qcow2(Arc<Extents>),
}

/// The same of a disk whose storage may be exchanged.
#[derive(Debug)]
pub struct CurrentAllocation(RwLock<Allocation>);

impl From<Allocation> for CurrentAllocation {
    fn from(allocation: Allocation) -> Self {
        Self(allocation.into())
    }
}

impl CurrentAllocation {
    /// That of now.
    #[must_use]
    pub fn get(&self) -> Allocation {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes another one from now on.
    pub fn set(&self, allocation: Allocation) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = allocation;
    }
}

impl Allocation {
    /// The holes of a disk that is stored there. `zeroes`: whether zeroes there are zeroes to the reader. A hole in the file is
    /// one without encryption, and where the encryption says so; where all ciphertext is decrypted, it would read as noise.
    #[must_use]
    pub fn of(storage: &DiskStorage, zeroes: bool) -> Self {
        match storage {
            DiskStorage::File(file) if zeroes => Self::File(file.clone()),
            DiskStorage::Qcow2(image) if zeroes => match image.extents() {
                Ok(extents) => Self::Qcow2(Arc::new(extents)),
                Err(error) => {
                    tracing::warn!(%error, "the holes of the image are not known");
                    Self::Unknown
                }
            },
            DiskStorage::File(_)
            | DiskStorage::Qcow2(_)
            | DiskStorage::Nbd(_)
            | DiskStorage::Mem(_) => Self::Unknown,
        }
    }

    /// Data or a hole at `at`, which is below `end`, up to `end` at most; both are multiples of 512.
    ///
    /// # Errors
    /// As lseek.
    pub fn extent(&self, at: u64, end: u64) -> io::Result<Extent> {
        let found = self.ask(at, end)?;
        if !found.data {
            // Up to the last whole sector of the hole, or from the beginning of a sector.
            let inner = if found.end == end { end } else { found.end / UNIT * UNIT };
            let whole = at.is_multiple_of(UNIT) || self.is_hole(at / UNIT * UNIT, at)?;
            if whole && inner > at {
                return Ok(Extent { data: false, end: inner });
            }
        }
        // A hole that begins within a sector begins with the next one.
        let data_end = if found.data { found.end } else { at + 1 };
        Ok(Extent { data: true, end: data_end.next_multiple_of(UNIT).min(end) })
    }

    fn is_hole(&self, at: u64, end: u64) -> io::Result<bool> {
        let found = self.ask(at, end)?;
        Ok(!found.data && found.end == end)
    }

    fn ask(&self, at: u64, end: u64) -> io::Result<Extent> {
        match self {
            Self::Unknown => Ok(Extent { data: true, end }),
            Self::File(file) => file.extent(at, end),
            Self::Qcow2(image) => image.extent(at, end),
        }
    }

    /// Whether zeroes that may be holes need no writing.
    #[must_use]
    pub fn zeroes_fast(&self) -> bool {
        match self {
            Self::Unknown | Self::Qcow2(_) => false,
            Self::File(file) => file.punches(),
        }
    }
}
