//! From items to bytes. Requests hold no secret: vmseal never sends a key to a server.

use super::decode::{
    BIG_INTEGER, BOOLEAN, BYTE_STRING, DATE_TIME, ENUMERATION, INTEGER, INTERVAL, LONG_INTEGER,
    STRUCTURE, TEXT_STRING,
};
use super::{Item, MESSAGE_LEN_MAX, Tag, Value};

/// The message would be longer than [`MESSAGE_LEN_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the message would be longer than {MESSAGE_LEN_MAX} bytes")]
pub struct TooLong;

/// Writes items one after the other. Items beyond the limit are dropped, and [`Encoder::finish`]
/// reports it.
#[derive(Default)]
pub struct Encoder {
    bytes: Vec<u8>,
    too_long: bool,
}

impl Encoder {
    /// An empty message.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The bytes.
    ///
    /// # Errors
    /// [`TooLong`].
    pub fn finish(self) -> Result<Vec<u8>, TooLong> {
        if self.too_long { Err(TooLong) } else { Ok(self.bytes) }
    }

    fn put(&mut self, tag: Tag, kind: u8, value: &[u8]) {
        let padded = value.len().next_multiple_of(8);
        if self.too_long || self.bytes.len() + super::HEADER_LEN + padded > MESSAGE_LEN_MAX {
            self.too_long = true;
            return;
        }
        self.bytes.extend_from_slice(&tag.0.to_be_bytes()[1..]);
        self.bytes.push(kind);
        self.bytes.extend_from_slice(&(value.len() as u32).to_be_bytes()); // below the limit
        self.bytes.extend_from_slice(value);
        self.bytes.resize(self.bytes.len() + padded - value.len(), 0);
    }

    /// A structure with the items that `content` writes.
    pub fn structure(&mut self, tag: Tag, content: impl FnOnce(&mut Self)) {
        self.put(tag, STRUCTURE, &[]);
        let start = self.bytes.len();
        content(self);
        if !self.too_long {
            let length = (self.bytes.len() - start) as u32; // below the limit
            self.bytes[start - 4..start].copy_from_slice(&length.to_be_bytes());
        }
    }

    /// An integer.
    pub fn integer(&mut self, tag: Tag, value: i32) {
        self.put(tag, INTEGER, &value.to_be_bytes());
    }

    /// An enumeration.
    pub fn enumeration(&mut self, tag: Tag, value: u32) {
        self.put(tag, ENUMERATION, &value.to_be_bytes());
    }

    /// A text string.
    pub fn text(&mut self, tag: Tag, value: &str) {
        self.put(tag, TEXT_STRING, value.as_bytes());
    }

    /// A byte string; not for secrets.
    pub fn bytes(&mut self, tag: Tag, value: &[u8]) {
        self.put(tag, BYTE_STRING, value);
    }

    /// A point in time, in seconds since 1970.
    pub fn date_time(&mut self, tag: Tag, value: i64) {
        self.put(tag, DATE_TIME, &value.to_be_bytes());
    }

    /// Any item.
    pub fn item(&mut self, item: &Item<'_>) {
        let tag = item.tag;
        match &item.value {
            Value::Structure(items) => {
                self.structure(tag, |encoder| items.iter().for_each(|item| encoder.item(item)));
            }
            Value::Integer(value) => self.integer(tag, *value),
            Value::LongInteger(value) => self.put(tag, LONG_INTEGER, &value.to_be_bytes()),
            Value::BigInteger(value) => self.put(tag, BIG_INTEGER, value),
            Value::Enumeration(value) => self.enumeration(tag, *value),
            Value::Boolean(value) => self.put(tag, BOOLEAN, &u64::from(*value).to_be_bytes()),
            Value::TextString(value) => self.text(tag, value),
            Value::ByteString(value) => self.bytes(tag, value),
            Value::DateTime(value) => self.date_time(tag, *value),
            Value::Interval(value) => self.put(tag, INTERVAL, &value.to_be_bytes()),
        }
    }
}
