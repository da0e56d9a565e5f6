//! The facts about a disk that the inventory pins, so that nothing on the datastore has to be trusted.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::HeaderError;

/// The version of vmseal's use of LUKS2: of the token, its MAC and the parameters below.
pub const FORMAT_VERSION: u32 = 1;

/// The version of the token of a disk whose data key others may have: a vmseal that does not know that says so, instead of serving the disk
/// like another one.
pub(crate) const SHARED_VERSION: u32 = 2;

/// The version of the token of a disk that is not for its guest's data, whether others may have its key or not.
pub(crate) const ROLE_VERSION: u32 = 3;

/// The offset of the data segment, in bytes: cryptsetup's default, 16 MiB.
pub const DATA_OFFSET: u64 = 16 << 20;

/// The unit of encryption, in bytes.
pub const SECTOR_SIZE: u32 = 4096;

/// The length of the DEK, in bits.
pub const KEY_BITS: u32 = 512;

/// The cipher, as dm-crypt names it.
pub const CIPHER: &str = "aes-xts-plain64";

/// The smallest and largest disk, in bytes: one sector, and what fits a file offset with room to spare.
const SIZE_MIN: u64 = SECTOR_SIZE as u64;
const SIZE_MAX: u64 = 1 << 60;

/// The facts of a disk: stored in the inventory at its creation, compared at each opening. Not secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// Version 1 of the format.
    pub version: u32,
    /// The disk's id.
    pub disk: Uuid,
    /// The size that the guest sees, in bytes. The header does not contain it (`size: dynamic`).
    pub size: u64,
    /// The offset of the guest's first byte, in bytes.
    pub data_offset: u64,
    /// The unit of encryption, in bytes.
    pub sector_size: u32,
    /// The length of the DEK, in bits.
    pub key_bits: u32,
    /// The cipher, as dm-crypt names it.
    pub cipher: String,
}

impl Facts {
    /// A disk as this version makes it.
    ///
    /// # Errors
    /// [`HeaderError::Size`]: the size is no multiple of the sector size, or out of range.
    pub fn new(disk: Uuid, size: u64) -> Result<Self, HeaderError> {
        let facts = Self {
            version: FORMAT_VERSION,
            disk,
            size,
            data_offset: DATA_OFFSET,
            sector_size: SECTOR_SIZE,
            key_bits: KEY_BITS,
            cipher: CIPHER.to_owned(),
        };
        facts.check()?;
        Ok(facts)
    }

    /// Whether this vmseal supports such a disk: the inventory may come from a newer one.
    pub(crate) fn check(&self) -> Result<(), HeaderError> {
        if !(SIZE_MIN..=SIZE_MAX).contains(&self.size)
            || !self.size.is_multiple_of(SECTOR_SIZE.into())
        {
            return Err(HeaderError::Size(self.size));
        }
        let known = self.version == FORMAT_VERSION
            && self.data_offset == DATA_OFFSET
            && self.sector_size == SECTOR_SIZE
            && self.key_bits == KEY_BITS
            && self.cipher == CIPHER;
        if known { Ok(()) } else { Err(HeaderError::UnknownFacts(self.disk)) }
    }
}

/// The id of a disk, how its holes read, whether others may have its key, and what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The disk's id.
    pub disk: Uuid,
    /// How holes read.
    pub holes: Holes,
    /// Whether disks of other VMs may have its data key. Authenticated by the token's MAC.
    pub shared: bool,
    /// What it is for. Authenticated likewise.
    pub role: Role,
}

/// What a disk is for: for who has nothing left of a VM but its disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Its guest's data.
    #[default]
    Data,
    /// The documents that cloud-init reads.
    CloudInit,
    /// The variables of a UEFI firmware.
    UefiVariables,
    /// The same of one with Secure Boot.
    SecureBootVariables,
    /// The key of what a TPM keeps.
    Tpm,
}

impl Role {
    pub(crate) fn is_data(&self) -> bool {
        *self == Self::Data
    }

    /// Its field of the token's MAC; none for data.
    pub(crate) fn field(self) -> Option<&'static [u8]> {
        match self {
            Self::Data => None,
            Self::CloudInit => Some(b"role cloud_init"),
            Self::UefiVariables => Some(b"role uefi_variables"),
            Self::SecureBootVariables => Some(b"role secure_boot_variables"),
            Self::Tpm => Some(b"role tpm"),
        }
    }
}

/// The meaning of a sector of zeroes on the datastore. Authenticated by the token's MAC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Holes {
    /// It was never written or was discarded, and reads as zeroes.
    Zero,
    /// It is ordinary ciphertext, as in dm-crypt.
    Ciphertext,
}
