//! TTLV: tag, type, length, value (KMIP 1.4 specification, section 9.1). No I/O.
//!
//! An item is 3 bytes of tag, 1 of type, 4 of length (without padding), and the value, padded to a
//! multiple of 8 bytes; a structure's value is items. All numbers are big-endian.
//!
//! A decoded [`Item`] borrows its bytes from the message, so that a key stays in the secret buffer it
//! was received into. `Debug` shows only the length of byte strings and big integers.

mod decode;
mod encode;
#[cfg(test)]
mod tests;

use std::fmt;

pub use decode::{DecodeError, decode, message_len};
pub use encode::{Encoder, TooLong};

/// The maximum length of a message, in bytes with its header: what fits one secret buffer. Requests
/// take some hundred bytes; the longest answer is that of Locate, with at most
/// [`crate::operation::LOCATE_MAX`] ids.
pub const MESSAGE_LEN_MAX: usize = vmseal_secret::SECRET_LEN_MAX;

/// How deep structures may be nested. The deepest one in an answer of KMIP 1.x has 9 levels: a key's
/// wrapping data with its cryptographic parameters.
pub const DEPTH_MAX: usize = 16;

/// How many items a message may have. The longest answers have about 500.
pub const ITEMS_MAX: usize = 4096;

/// The bytes of an item before its value: tag, type, length.
pub const HEADER_LEN: usize = 8;

/// The meaning of an item: 3 bytes (section 9.1.3.1). Those of the specification begin with 0x42.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub(crate) u32);

/// The value of an item: the ten types of section 9.1.1.4.
#[derive(Clone, PartialEq, Eq)]
pub enum Value<'a> {
    /// Type 1.
    Structure(Vec<Item<'a>>),
    /// Type 2.
    Integer(i32),
    /// Type 3.
    LongInteger(i64),
    /// Type 4: two's complement, big-endian, a multiple of 8 bytes.
    BigInteger(&'a [u8]),
    /// Type 5.
    Enumeration(u32),
    /// Type 6.
    Boolean(bool),
    /// Type 7.
    TextString(&'a str),
    /// Type 8. May be a key.
    ByteString(&'a [u8]),
    /// Type 9: seconds since 1970.
    DateTime(i64),
    /// Type 10: seconds.
    Interval(u32),
}

/// A tag and its value.
#[derive(Clone, PartialEq, Eq)]
pub struct Item<'a> {
    /// The tag.
    pub tag: Tag,
    /// Its value.
    pub value: Value<'a>,
}

macro_rules! tags {
    ($($name:ident = $number:literal, $words:literal;)*) => {
        #[expect(missing_docs, reason = "the specification's names, which the second column has")]
        impl Tag {
            $(pub const $name: Tag = Tag($number);)*

            /// The specification's name, for the tags that vmseal knows.
            #[must_use]
            pub fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($number => Some($words),)*
                    _ => None,
                }
            }
        }
    };
}

tags! {
    APPLICATION_DATA = 0x42_0002, "Application Data";
    APPLICATION_NAMESPACE = 0x42_0003, "Application Namespace";
    ATTRIBUTE = 0x42_0008, "Attribute";
    ATTRIBUTE_NAME = 0x42_000a, "Attribute Name";
    ATTRIBUTE_VALUE = 0x42_000b, "Attribute Value";
    BATCH_COUNT = 0x42_000d, "Batch Count";
    BATCH_ERROR_CONTINUATION_OPTION = 0x42_000e, "Batch Error Continuation Option";
    BATCH_ITEM = 0x42_000f, "Batch Item";
    COMPROMISE_OCCURRENCE_DATE = 0x42_0021, "Compromise Occurrence Date";
    CRYPTOGRAPHIC_ALGORITHM = 0x42_0028, "Cryptographic Algorithm";
    CRYPTOGRAPHIC_LENGTH = 0x42_002a, "Cryptographic Length";
    KEY_BLOCK = 0x42_0040, "Key Block";
    KEY_COMPRESSION_TYPE = 0x42_0041, "Key Compression Type";
    KEY_FORMAT_TYPE = 0x42_0042, "Key Format Type";
    KEY_MATERIAL = 0x42_0043, "Key Material";
    KEY_VALUE = 0x42_0045, "Key Value";
    KEY_WRAPPING_DATA = 0x42_0046, "Key Wrapping Data";
    MAXIMUM_ITEMS = 0x42_004f, "Maximum Items";
    MAXIMUM_RESPONSE_SIZE = 0x42_0050, "Maximum Response Size";
    NAME_TYPE = 0x42_0054, "Name Type";
    NAME_VALUE = 0x42_0055, "Name Value";
    OBJECT_TYPE = 0x42_0057, "Object Type";
    OPERATION = 0x42_005c, "Operation";
    PROTOCOL_VERSION = 0x42_0069, "Protocol Version";
    PROTOCOL_VERSION_MAJOR = 0x42_006a, "Protocol Version Major";
    PROTOCOL_VERSION_MINOR = 0x42_006b, "Protocol Version Minor";
    QUERY_FUNCTION = 0x42_0074, "Query Function";
    REQUEST_HEADER = 0x42_0077, "Request Header";
    REQUEST_MESSAGE = 0x42_0078, "Request Message";
    REQUEST_PAYLOAD = 0x42_0079, "Request Payload";
    RESPONSE_HEADER = 0x42_007a, "Response Header";
    RESPONSE_MESSAGE = 0x42_007b, "Response Message";
    RESPONSE_PAYLOAD = 0x42_007c, "Response Payload";
    RESULT_MESSAGE = 0x42_007d, "Result Message";
    RESULT_REASON = 0x42_007e, "Result Reason";
    RESULT_STATUS = 0x42_007f, "Result Status";
    REVOCATION_MESSAGE = 0x42_0080, "Revocation Message";
    REVOCATION_REASON = 0x42_0081, "Revocation Reason";
    REVOCATION_REASON_CODE = 0x42_0082, "Revocation Reason Code";
    SYMMETRIC_KEY = 0x42_008f, "Symmetric Key";
    TEMPLATE_ATTRIBUTE = 0x42_0091, "Template-Attribute";
    TIME_STAMP = 0x42_0092, "Time Stamp";
    UNIQUE_BATCH_ITEM_ID = 0x42_0093, "Unique Batch Item ID";
    UNIQUE_IDENTIFIER = 0x42_0094, "Unique Identifier";
    VENDOR_IDENTIFICATION = 0x42_009d, "Vendor Identification";
}

impl Tag {
    /// The three bytes as a number.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }

    /// A tag of any number below 2^24; `None` beyond.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        (number < 1 << 24).then_some(Self(number))
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "tag {:06x}", self.0),
        }
    }
}

impl fmt::Debug for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Structure(items) => f.debug_list().entries(items).finish(),
            Self::Integer(value) => write!(f, "{value}"),
            Self::LongInteger(value) | Self::DateTime(value) => write!(f, "{value}"),
            Self::BigInteger(bytes) => write!(f, "big integer of {} bytes", bytes.len()),
            Self::Enumeration(value) => write!(f, "{value:#x}"),
            Self::Boolean(value) => write!(f, "{value}"),
            Self::TextString(text) => write!(f, "{text:?}"),
            Self::ByteString(bytes) => write!(f, "{} bytes", bytes.len()),
            Self::Interval(seconds) => write!(f, "{seconds} s"),
        }
    }
}

impl fmt::Debug for Item<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:?}", self.tag, self.value)
    }
}
