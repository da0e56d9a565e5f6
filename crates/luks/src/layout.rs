//! The binary part of a LUKS2 header ("LUKS2 On-Disk Format Specification" 1.1, section 2.1): two copies, each
//! a 4096-byte binary header, then JSON to the end of the copy; a SHA-256 checksum covers all of it.
//!
//! vmseal writes and reads one size: copies of 16 KiB at 0 and at 16 KiB, key slots behind them.

use std::fmt;

use aws_lc_rs::digest;
use vmseal_secret::MemoryError;

use crate::error::CopyFault;
use crate::facts::DATA_OFFSET;

/// The size of a copy, in bytes: cryptsetup's default, and far more than vmseal's metadata needs.
pub(crate) const COPY_LEN: usize = 16 * 1024;
/// The size of the binary part of a copy, in bytes.
pub(crate) const BINARY_LEN: usize = 4096;
/// The size of the JSON part of a copy, in bytes.
pub(crate) const JSON_LEN: usize = COPY_LEN - BINARY_LEN;
/// Where the key slots' areas begin, in bytes.
pub(crate) const SLOTS_OFFSET: u64 = 2 * COPY_LEN as u64;
/// The size of the room for key slots, in bytes.
pub(crate) const SLOTS_LEN: u64 = DATA_OFFSET - SLOTS_OFFSET;
/// The size of one key slot's area, in bytes: 64 bytes × 4000 stripes, in whole 4096-byte blocks.
pub(crate) const AREA_LEN: u64 = 258_048;

/// The places of the checksum and of its algorithm's name in the binary part.
const CHECKSUM: std::ops::Range<usize> = 0x1c0..0x200;
const CHECKSUM_NAME: std::ops::Range<usize> = 0x48..0x68;
/// The places of the salt, which makes the two copies' checksums differ, and of the copy's own offset.
const SALT: std::ops::Range<usize> = 0x68..0xa8;
const OFFSET: std::ops::Range<usize> = 0x100..0x108;

/// Which of the two copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copy {
    /// At the start of the image.
    Primary,
    /// Behind the first.
    Secondary,
}

impl Copy {
    pub(crate) fn offset(self) -> u64 {
        match self {
            Self::Primary => 0,
            Self::Secondary => COPY_LEN as u64,
        }
    }

    pub(crate) fn other(self) -> Self {
        match self {
            Self::Primary => Self::Secondary,
            Self::Secondary => Self::Primary,
        }
    }

    fn magic(self) -> &'static [u8; 6] {
        match self {
            Self::Primary => b"LUKS\xba\xbe",
            Self::Secondary => b"SKUL\xba\xbe",
        }
    }
}

impl fmt::Display for Copy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Primary => "first",
            Self::Secondary => "second",
        })
    }
}

/// The disk opened, but one copy of its header needs repair. Show it to operators until [`crate::repair`] has
/// been called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderNotice {
    /// It is damaged.
    #[error("the {copy} copy of the disk's header {fault}; the other one serves")]
    Damaged {
        /// Which one.
        copy: Copy,
        /// What is wrong with it.
        fault: CopyFault,
    },
    /// It is older than the other: a change was interrupted.
    #[error("the {copy} copy of the disk's header is older than the other, which serves")]
    Stale {
        /// Which one.
        copy: Copy,
    },
}

/// A copy with a valid checksum.
pub(crate) struct Valid<'a> {
    pub(crate) sequence: u64,
    pub(crate) json: &'a [u8],
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// The checksum of a copy: SHA-256 with the checksum field set to zero.
fn checksum(bytes: &[u8; COPY_LEN]) -> [u8; 32] {
    let mut context = digest::Context::new(&digest::SHA256);
    context.update(&bytes[..CHECKSUM.start]);
    context.update(&[0; CHECKSUM.end - CHECKSUM.start]);
    context.update(&bytes[CHECKSUM.end..]);
    let mut sum = [0; 32];
    sum.copy_from_slice(context.finish().as_ref());
    sum
}

/// Parses one copy.
pub(crate) fn parse(copy: Copy, bytes: &[u8; COPY_LEN]) -> Result<Valid<'_>, CopyFault> {
    let version = number(&bytes[6..8]) as u16;
    let (length, offset) = (number(&bytes[8..16]), number(&bytes[OFFSET]));
    if &bytes[..6] != copy.magic() {
        return Err(CopyFault::Magic);
    }
    if version != 2 {
        return Err(CopyFault::Version(version));
    }
    if length != COPY_LEN as u64 {
        return Err(CopyFault::Length(length));
    }
    if offset != copy.offset() {
        return Err(CopyFault::Offset(offset));
    }
    let name = &bytes[CHECKSUM_NAME];
    if !name.starts_with(b"sha256\0") {
        return Err(CopyFault::ChecksumKind);
    }
    if checksum(bytes) != bytes[CHECKSUM.start..CHECKSUM.start + 32] {
        return Err(CopyFault::Checksum);
    }
    Ok(Valid { sequence: number(&bytes[16..24]), json: &bytes[BINARY_LEN..] })
}

/// The other copy: the same except for its offset and its salt.
pub(crate) fn twin(copy: Copy, bytes: &[u8; COPY_LEN]) -> Result<Box<[u8; COPY_LEN]>, MemoryError> {
    let other = copy.other();
    let mut twin = Box::new(*bytes);
    twin[..6].copy_from_slice(other.magic());
    twin[OFFSET].copy_from_slice(&other.offset().to_be_bytes());
    aws_lc_rs::rand::fill(&mut twin[SALT]).map_err(|_| MemoryError::Random)?;
    set_checksum(&mut twin);
    Ok(twin)
}

/// The same copy with other JSON; none if it has no room.
pub(crate) fn with_json(bytes: &[u8; COPY_LEN], json: &[u8]) -> Option<Box<[u8; COPY_LEN]>> {
    let mut copy = Box::new(*bytes);
    copy[BINARY_LEN..].fill(0);
    // A byte of zero ends it.
    copy[BINARY_LEN..COPY_LEN - 1].get_mut(..json.len())?.copy_from_slice(json);
    set_checksum(&mut copy);
    Some(copy)
}

fn set_checksum(bytes: &mut [u8; COPY_LEN]) {
    let sum = checksum(bytes);
    bytes[CHECKSUM.start..CHECKSUM.start + sum.len()].copy_from_slice(&sum);
}
