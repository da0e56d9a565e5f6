//! From bytes to items. The only allocation is the list of items actually present, each of which took
//! at least 8 bytes of input; values are borrowed.

use super::{DEPTH_MAX, HEADER_LEN, ITEMS_MAX, Item, MESSAGE_LEN_MAX, Tag, Value};

/// Why bytes are not TTLV. `at` counts bytes from the beginning of the message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The message is longer than [`MESSAGE_LEN_MAX`], or claims to be.
    #[error("it has or claims {0} bytes; at most {MESSAGE_LEN_MAX} are accepted")]
    TooLong(u64),
    /// A message has a wrong beginning.
    #[error("it begins with {found:#010x}, not with the structure {expected}")]
    OtherBeginning {
        /// What was expected.
        expected: Tag,
        /// The first four bytes: tag and type.
        found: u32,
    },
    /// An item claims to be longer than the rest of its structure or message.
    #[error("the item at byte {at} claims {claimed} bytes, where {left} are left")]
    Truncated {
        /// Where the item begins.
        at: usize,
        /// What it needs, in bytes with header and padding.
        claimed: u64,
        /// What is left.
        left: usize,
    },
    /// Bytes after the message's end.
    #[error("{0} bytes follow its end")]
    Trailing(usize),
    /// None of the ten types.
    #[error("the item at byte {at} has the unknown type {found:#04x}")]
    UnknownType {
        /// Where the item begins.
        at: usize,
        /// Its type.
        found: u8,
    },
    /// A wrong length for a type of fixed length, or one that is not a multiple of 8 for a big integer or
    /// structure.
    #[error("the item at byte {at} has {found} bytes, which its type {kind:#04x} cannot have")]
    Length {
        /// Where the item begins.
        at: usize,
        /// Its type.
        kind: u8,
        /// Its length.
        found: u32,
    },
    /// A boolean that is neither 0 nor 1.
    #[error("the boolean at byte {at} is neither 0 nor 1")]
    Boolean {
        /// Where the item begins.
        at: usize,
    },
    /// A text string that is not UTF-8.
    #[error("the text string at byte {at} is not UTF-8")]
    Text {
        /// Where the item begins.
        at: usize,
    },
    /// Structures in structures beyond [`DEPTH_MAX`].
    #[error("structures are nested deeper than {DEPTH_MAX} levels")]
    TooDeep,
    /// More than [`ITEMS_MAX`].
    #[error("it has more than {ITEMS_MAX} items")]
    TooManyItems,
}

/// Decodes a message: one item, and nothing after it. Padding must be present; its content is not
/// checked, as the specification gives it no value.
///
/// # Errors
/// [`DecodeError`].
pub fn decode(message: &[u8]) -> Result<Item<'_>, DecodeError> {
    if message.len() > MESSAGE_LEN_MAX {
        return Err(DecodeError::TooLong(message.len() as u64));
    }
    let mut decoder = Decoder { message, at: 0, items: 0 };
    let item = decoder.item(message.len(), 0)?;
    match message.len() - decoder.at {
        0 => Ok(item),
        rest => Err(DecodeError::Trailing(rest)),
    }
}

/// The total length of a message, from its first [`HEADER_LEN`] bytes. Called before more is read.
///
/// # Errors
/// [`DecodeError`]: the message is not a structure with this tag, or is too long.
pub fn message_len(header: [u8; HEADER_LEN], tag: Tag) -> Result<usize, DecodeError> {
    let [a, b, c, kind, l0, l1, l2, l3] = header;
    if (u32::from_be_bytes([0, a, b, c]), kind) != (tag.0, STRUCTURE) {
        let found = u32::from_be_bytes([a, b, c, kind]);
        return Err(DecodeError::OtherBeginning { expected: tag, found });
    }
    let length = u32::from_be_bytes([l0, l1, l2, l3]);
    let whole = u64::from(length) + HEADER_LEN as u64;
    if !length.is_multiple_of(8) {
        return Err(DecodeError::Length { at: 0, kind, found: length });
    }
    match usize::try_from(whole) {
        Ok(whole) if whole <= MESSAGE_LEN_MAX => Ok(whole),
        _ => Err(DecodeError::TooLong(whole)),
    }
}

pub(super) const STRUCTURE: u8 = 1;
pub(super) const INTEGER: u8 = 2;
pub(super) const LONG_INTEGER: u8 = 3;
pub(super) const BIG_INTEGER: u8 = 4;
pub(super) const ENUMERATION: u8 = 5;
pub(super) const BOOLEAN: u8 = 6;
pub(super) const TEXT_STRING: u8 = 7;
pub(super) const BYTE_STRING: u8 = 8;
pub(super) const DATE_TIME: u8 = 9;
pub(super) const INTERVAL: u8 = 10;

struct Decoder<'a> {
    message: &'a [u8],
    at: usize,
    items: usize,
}

/// Where an item begins, its type and its length, checked to be within the enclosing structure.
struct Header {
    at: usize,
    kind: u8,
    length: u32,
}

impl Header {
    fn fixed<const N: usize>(&self, value: &[u8]) -> Result<[u8; N], DecodeError> {
        value.try_into().map_err(|_| self.wrong_length())
    }

    fn wrong_length(&self) -> DecodeError {
        DecodeError::Length { at: self.at, kind: self.kind, found: self.length }
    }
}

impl<'a> Decoder<'a> {
    /// The item at `self.at`, which ends before `end`.
    fn item(&mut self, end: usize, depth: usize) -> Result<Item<'a>, DecodeError> {
        self.items += 1;
        if self.items > ITEMS_MAX {
            return Err(DecodeError::TooManyItems);
        }
        let at = self.at;
        let truncated = |claimed| DecodeError::Truncated { at, claimed, left: end - at };
        let Some(&[a, b, c, kind, l0, l1, l2, l3]) =
            self.message[at..end].first_chunk::<HEADER_LEN>()
        else {
            return Err(truncated(HEADER_LEN as u64));
        };
        let length = u32::from_be_bytes([l0, l1, l2, l3]);
        let padded = u64::from(length).next_multiple_of(8);
        let claimed = HEADER_LEN as u64 + padded;
        if claimed > (end - at) as u64 {
            return Err(truncated(claimed));
        }
        // Both fit: they are less than what is left of the message.
        let (start, length_in_bytes) = (at + HEADER_LEN, length as usize);
        let value = &self.message[start..start + length_in_bytes];
        let next = start + padded as usize;
        self.at = start;
        let value = self.value(&Header { at, kind, length }, value, depth)?;
        self.at = next;
        Ok(Item { tag: Tag(u32::from_be_bytes([0, a, b, c])), value })
    }

    fn value(
        &mut self,
        header: &Header,
        bytes: &'a [u8],
        depth: usize,
    ) -> Result<Value<'a>, DecodeError> {
        Ok(match header.kind {
            STRUCTURE if !bytes.len().is_multiple_of(8) => return Err(header.wrong_length()),
            STRUCTURE => self.structure(bytes.len(), depth)?,
            INTEGER => Value::Integer(i32::from_be_bytes(header.fixed(bytes)?)),
            LONG_INTEGER => Value::LongInteger(i64::from_be_bytes(header.fixed(bytes)?)),
            BIG_INTEGER if bytes.is_empty() || !bytes.len().is_multiple_of(8) => {
                return Err(header.wrong_length());
            }
            BIG_INTEGER => Value::BigInteger(bytes),
            ENUMERATION => Value::Enumeration(u32::from_be_bytes(header.fixed(bytes)?)),
            BOOLEAN => match u64::from_be_bytes(header.fixed(bytes)?) {
                0 => Value::Boolean(false),
                1 => Value::Boolean(true),
                _ => return Err(DecodeError::Boolean { at: header.at }),
            },
            TEXT_STRING => Value::TextString(
                std::str::from_utf8(bytes).map_err(|_| DecodeError::Text { at: header.at })?,
            ),
            BYTE_STRING => Value::ByteString(bytes),
            DATE_TIME => Value::DateTime(i64::from_be_bytes(header.fixed(bytes)?)),
            INTERVAL => Value::Interval(u32::from_be_bytes(header.fixed(bytes)?)),
            found => return Err(DecodeError::UnknownType { at: header.at, found }),
        })
    }

    fn structure(&mut self, len: usize, depth: usize) -> Result<Value<'a>, DecodeError> {
        if depth == DEPTH_MAX {
            return Err(DecodeError::TooDeep);
        }
        let end = self.at + len;
        let mut items = Vec::new();
        while self.at < end {
            items.push(self.item(end, depth + 1)?);
        }
        Ok(Value::Structure(items))
    }
}
