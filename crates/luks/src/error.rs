//! The errors of a header: a refusal names the wrong field.

use std::io;

use uuid::Uuid;
use vmseal_secret::MemoryError;
use vmseal_secret::derive::DeriveError;
use vmseal_secret::xts::XtsError;

/// How much of a text from a hostile header is quoted in a message, in characters.
const QUOTE_MAX: usize = 64;

/// Why a header was not made, opened or changed. Nothing has been written on any of these except
/// [`HeaderError::Write`] and [`HeaderError::ReadBackFailed`].
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The backend failed while it was read.
    #[error("the disk's header cannot be read")]
    Read(#[source] io::Error),
    /// The backend failed while it was written. The existing header still opens; repeat the operation.
    #[error("the disk's header cannot be written")]
    Write(#[source] io::Error),
    /// The image ends too early.
    #[error("the disk image is truncated: it has {found} bytes and needs {needed}")]
    Truncated {
        /// Its size, in bytes.
        found: u64,
        /// The size that header and data need, in bytes.
        needed: u64,
    },
    /// The disk's size is out of range.
    #[error("{0} bytes cannot be the size of an encrypted disk: it must be a multiple of 4096")]
    Size(u64),
    /// The inventory's description is unknown to this vmseal.
    #[error(
        "the inventory describes disk {0} in a way that this vmseal does not know: use a newer one"
    )]
    UnknownFacts(Uuid),
    /// Neither copy of the header can be used.
    #[error(
        "both copies of the disk's header are unusable: the first {primary}, the second {secondary}; restore the header from a backup"
    )]
    BothCopies {
        /// The first copy.
        primary: CopyFault,
        /// The second copy.
        secondary: CopyFault,
    },
    /// The header is intact but not as expected.
    #[error("the disk's header is refused: {0}")]
    Refused(#[from] Refusal),
    /// The image has an intact header of another disk where a new one should be made.
    #[error("the image holds the encrypted disk {0}: nothing was overwritten")]
    Occupied(String),
    /// The header is wrapped under other keys than the one that was given.
    #[error("the disk is encrypted under key {found}, not under key {wanted}")]
    OtherKey {
        /// Provider and key id that were given.
        wanted: String,
        /// Those that the header names; not authenticated.
        found: String,
    },
    /// The key has the right id but other bytes: its check value differs.
    #[error(
        "key {0} is not the key this disk was encrypted under: a provider gives another key for the same id"
    )]
    WrongKek(String),
    /// The check value matches, but the key slot does not open.
    #[error(
        "the key slot of key {0} does not open: it is damaged; restore the header from a backup"
    )]
    SlotDamaged(String),
    /// Another change of key must be finished first.
    #[error("the disk is under two keys already: drop the old one before another is added")]
    TwoKeys,
    /// The header that is read back differs from the one that was written.
    #[error(
        "the header was written for key {0} and does not open with it when it is read back: the datastore loses writes"
    )]
    ReadBackFailed(String),
    /// A DEK or KEK has a wrong length.
    #[error("a {0} has the wrong length: {1} bytes")]
    KeyLength(&'static str, usize),
    /// libcryptsetup failed.
    #[error("libcryptsetup failed in {call}: {source}{messages}")]
    Library {
        /// The function.
        call: &'static str,
        /// The error.
        source: io::Error,
        /// Its messages.
        messages: String,
    },
    /// The cipher of the key slot.
    #[error("the key slot cannot be decrypted: {0}")]
    Cipher(#[from] XtsError),
    /// A key could not be derived.
    #[error(transparent)]
    Derive(#[from] DeriveError),
    /// There is no memory for a secret.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Why a copy of the header cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyFault {
    /// It does not begin like a LUKS header.
    #[error("is not a LUKS header")]
    Magic,
    /// LUKS1, or a future version.
    #[error("has LUKS version {0}, not 2")]
    Version(u16),
    /// It has a size that vmseal never writes.
    #[error("says it is {0} bytes long, not 16384")]
    Length(u64),
    /// Its offset field is wrong.
    #[error("says it is at byte {0}, where it is not")]
    Offset(u64),
    /// Another checksum algorithm.
    #[error("has a checksum other than SHA-256")]
    ChecksumKind,
    /// The checksum does not match: torn or damaged.
    #[error("has a wrong checksum")]
    Checksum,
}

/// How a header differs from what is expected: damage that its checksum does not show, or a forgery. Texts
/// from the header are quoted and truncated.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Refusal {
    /// The JSON part is not valid JSON, or has fields that vmseal never writes.
    #[error("its metadata is not as vmseal writes it: {0}")]
    Json(String),
    /// It requires an unknown feature.
    #[error("it requires the feature {0}")]
    Requirement(String),
    /// The number of data segments is not one.
    #[error("it has {0} data segments instead of one")]
    Segments(usize),
    /// Another cipher.
    #[error("the data's cipher is {found} instead of {expected}")]
    Cipher {
        /// The header's value.
        found: String,
        /// The inventory's value.
        expected: String,
    },
    /// The data begins elsewhere.
    #[error("the data begins at byte {found} instead of {expected}")]
    Offset {
        /// The header's value.
        found: u64,
        /// The inventory's value.
        expected: u64,
    },
    /// Another sector size.
    #[error("the data's sector size is {found} instead of {expected}")]
    SectorSize {
        /// The header's value.
        found: u64,
        /// The inventory's value.
        expected: u32,
    },
    /// A key derivation that is too costly, or of another kind. It was not run.
    #[error("{place} demands {found} where {limit} is the limit; it was not run")]
    Kdf {
        /// `key slot` or `digest`.
        place: &'static str,
        /// The demand.
        found: String,
        /// The limit.
        limit: String,
    },
    /// A field with a value that vmseal never writes.
    #[error("{field} is {found} instead of {expected}")]
    Field {
        /// Its path.
        field: &'static str,
        /// Its value.
        found: String,
        /// The expected value.
        expected: String,
    },
    /// The token is of a version that this vmseal does not know.
    #[error("its token has version {0}: use a newer vmseal")]
    TokenVersion(u64),
    /// There is no `vmseal` token.
    #[error("it has no token of vmseal: a disk made by cryptsetup has to be adopted first")]
    NoToken,
    /// It belongs to another disk.
    #[error("it is the header of disk {found}, and disk {expected} was to be opened")]
    OtherDisk {
        /// The header's value.
        found: Uuid,
        /// The inventory's value.
        expected: Uuid,
    },
    /// It belongs to another VM.
    #[error("it is the header of a disk of VM {found}, and one of VM {expected} was to be opened")]
    OtherVm {
        /// The header's value.
        found: Uuid,
        /// The inventory's value.
        expected: Uuid,
    },
    /// The authentication code does not match: something it covers was changed.
    #[error("its authentication code does not match: somebody without the key has changed it")]
    Mac,
}

/// A text of the header for a message or a log: short, in quotes, control characters escaped.
pub(crate) fn quote(text: &str) -> String {
    let mut quoted: String = text.chars().take(QUOTE_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(QUOTE_MAX).is_some() {
        quoted.push('…');
    }
    format!("\"{quoted}\"")
}

/// A JSON error, as a refusal.
pub(crate) fn json(error: &serde_json::Error) -> Refusal {
    Refusal::Json(quote(&error.to_string()))
}
