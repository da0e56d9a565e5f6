//! Dirty bitmaps: the rules that the filter that keeps them, the hosts and the server share.

use crate::filter::{BITMAP_NAME_MAX, BITMAPS_BYTES_MAX, BITMAPS_MAX, BitmapChange};
use crate::problem::ErrorCode;

/// Why a bitmap cannot be changed as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BitmapError {
    /// The name is not valid.
    #[error(
        "a bitmap's name has 1 to {BITMAP_NAME_MAX} letters, digits, dots, dashes and underscores, and begins with a letter or digit"
    )]
    Name,
    /// The name is taken.
    #[error("there is a bitmap '{0}' already; clear it, or choose another name")]
    Exists(String),
    /// There is no bitmap of that name.
    #[error(
        "there is no bitmap '{0}'. A bitmap is lost when something else than the guest writes to its disk, and when the host crashes: make a full backup, and add a bitmap again"
    )]
    Unknown(String),
    /// The disk has the maximum number of bitmaps.
    #[error("the disk has {BITMAPS_MAX} bitmaps, which is all it can have; remove one")]
    TooMany,
    /// The limit of memory for bitmaps is reached.
    #[error(
        "the bitmaps of this VM take {BITMAPS_BYTES_MAX} bytes of memory, which is all they may; remove one of this disk, or stop and start the VM"
    )]
    Memory,
    /// The file that keeps the bitmaps cannot have room for another one.
    #[error("the run directory of the host has no room for another bitmap: make room there")]
    NoRoom,
    /// A client reads it.
    #[error("the bitmap '{0}' is being read by a backup; wait until that is done")]
    Read(String),
    /// The disk gets longer at this moment.
    #[error("the disk is being made longer at this moment; ask again")]
    Grows,
}

impl BitmapError {
    /// The error code.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Name => ErrorCode::InvalidRequest,
            Self::Exists(_) => ErrorCode::AlreadyExists,
            Self::Unknown(_) => ErrorCode::NotFound,
            Self::TooMany | Self::Memory => ErrorCode::LimitExceeded,
            Self::NoRoom => ErrorCode::NoSpace,
            Self::Read(_) | Self::Grows => ErrorCode::InUse,
        }
    }
}

/// What [`check_name`] accepts, as a regular expression of ECMA 262.
pub const NAME_PATTERN: &str = "^[A-Za-z0-9][A-Za-z0-9._-]*$";

/// Whether this is a valid name of a bitmap.
///
/// # Errors
/// [`BitmapError::Name`].
pub fn check_name(name: &str) -> Result<(), BitmapError> {
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let begins = name.starts_with(|first: char| first.is_ascii_alphanumeric());
    if !begins || name.len() > BITMAP_NAME_MAX || !name.bytes().all(valid) {
        return Err(BitmapError::Name);
    }
    Ok(())
}

/// Whether a change of a disk's bitmaps, which have these `names`, is allowed. Starting an existing bitmap is
/// refused, not repeated: a backup that relies on the old bitmap would miss the changes before the new one.
///
/// # Errors
/// [`BitmapError`].
pub fn check<'a>(
    names: impl IntoIterator<Item = &'a str>,
    name: &str,
    change: BitmapChange,
) -> Result<(), BitmapError> {
    check_name(name)?;
    let (mut count, mut found) = (0, false);
    for known in names {
        count += 1;
        found |= known == name;
    }
    match (change, found) {
        (BitmapChange::Start, true) => Err(BitmapError::Exists(name.into())),
        (BitmapChange::Start, false) if count >= BITMAPS_MAX => Err(BitmapError::TooMany),
        (BitmapChange::Clear | BitmapChange::Remove, false) => {
            Err(BitmapError::Unknown(name.into()))
        }
        _ => Ok(()),
    }
}

/// The file that keeps the bitmaps of a disk from one filter to the next. Numbers are of 64 bits, in the machine's byte order, at
/// multiples of their length.
///
/// ```text
///    0  magic | 8  the disk's size in bytes | 16  the granule, as a power of 2
///   64  for each of the 4 bitmaps, 128 bytes: in use 0 or 1 | since, in nanoseconds from 1970 on | the name's length | the name
/// 4096  for each of them: a bit for each granule, 1 if it is dirty, in words of 64 bits, the lowest first; up to a multiple of 4096
/// ```
pub mod file {
    use crate::filter::BITMAPS_MAX;

    /// Its first bytes.
    pub const MAGIC: [u8; 8] = *b"vmsealbm";

    /// Where the disk's size is.
    pub const SIZE_AT: usize = 8;

    /// Where the granule is.
    pub const SHIFT_AT: usize = 16;

    /// The length of all but the bits, in bytes.
    pub const HEADER: usize = 4096;

    /// Where, in a slot, it is said that it has a bitmap.
    pub const IN_USE_AT: usize = 0;

    /// Where, in a slot, it is said since when.
    pub const SINCE_AT: usize = 8;

    /// Where, in a slot, the length of its name is.
    pub const NAME_LENGTH_AT: usize = 16;

    /// Where, in a slot, its name is.
    pub const NAME_AT: usize = 24;

    /// Where a slot begins.
    #[must_use]
    pub const fn slot_at(slot: usize) -> usize {
        64 + slot * 128
    }

    /// How much room the bits of a slot have that take `bytes`.
    #[must_use]
    pub const fn stride(bytes: usize) -> usize {
        bytes.next_multiple_of(4096)
    }

    /// Whether a file has any bitmap.
    #[must_use]
    pub fn has_any(file: &[u8]) -> bool {
        let in_use = |slot| file.get(slot_at(slot) + IN_USE_AT..)?.first_chunk().copied();
        let mut slots = (0..BITMAPS_MAX).filter_map(in_use);
        file.starts_with(&MAGIC) && slots.any(|word| u64::from_ne_bytes(word) == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::BitmapChange::{Clear, Remove, Start};
    use super::*;

    #[test]
    fn names_need_no_quoting_in_tools_and_shells() {
        for good in ["a", "monday", "2026-11-21_full.1", &"a".repeat(BITMAP_NAME_MAX)] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        let long = "a".repeat(BITMAP_NAME_MAX + 1);
        for bad in ["", "a b", "a:b", "a/b", "ä", "a\n", "a*", "..", "-a", "_", &long] {
            assert_eq!(check_name(bad), Err(BitmapError::Name), "{bad}");
        }
    }

    #[test]
    fn a_bitmap_is_started_once_and_only_existing_ones_are_changed() {
        let four = ["a", "b", "c", "d"];
        assert_eq!(check(["a"], "b", Start), Ok(()));
        assert_eq!(check(["a"], "a", Start), Err(BitmapError::Exists("a".into())));
        assert_eq!(check(four, "e", Start), Err(BitmapError::TooMany));
        assert_eq!(check(four, "d", Start), Err(BitmapError::Exists("d".into())));
        for change in [Clear, Remove] {
            assert_eq!(check(four, "d", change), Ok(()));
            assert_eq!(check([], "d", change), Err(BitmapError::Unknown("d".into())));
            assert_eq!(check(four, "/", change), Err(BitmapError::Name));
        }
    }
}
