//! Reading the items of a structure by their tags, whatever their order: servers add items that later
//! versions or their vendors define, and those are passed over.

use crate::ttlv::{DecodeError, Item, Tag, Value};
use crate::{OperationCode, ProtocolVersion};

/// How a response departs from the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// It is not TTLV, or beyond the limits.
    #[error("it is no KMIP message: {0}")]
    Malformed(#[from] DecodeError),
    /// A field is missing.
    #[error("{structure} has no {field}")]
    Missing {
        /// Where.
        structure: Tag,
        /// What.
        field: Tag,
    },
    /// A field that may be there once is there more often.
    #[error("{structure} has more than one {field}")]
    Repeated {
        /// Where.
        structure: Tag,
        /// What.
        field: Tag,
    },
    /// A field has another type.
    #[error("{field} in {structure} is not of type {expected}")]
    WrongType {
        /// Where.
        structure: Tag,
        /// What.
        field: Tag,
        /// The type that it has to have.
        expected: &'static str,
    },
    /// A field has a value that it cannot have here.
    #[error("{0} has a value that it cannot have there")]
    WrongValue(Tag),
    /// The response is of a version that this crate does not speak.
    #[error("it is of KMIP {0}")]
    Version(ProtocolVersion),
    /// The header's count of batch items is wrong, or there are more than were asked for.
    #[error("it announces {announced} results and has {found}, where {asked} were asked for")]
    BatchCount {
        /// As the header says.
        announced: i32,
        /// As there are.
        found: usize,
        /// As there should be.
        asked: usize,
    },
    /// A result names no item of the request, or one that has its result.
    #[error("a result belongs to no item of the request")]
    WrongBatchItem,
    /// An item of the request has no result, though none was refused.
    #[error("an item of the request has no result")]
    NoResult,
    /// A result is of another operation.
    #[error("it answers {asked} with {answered}")]
    WrongOperation {
        /// What was asked.
        asked: OperationCode,
        /// What was answered.
        answered: OperationCode,
    },
    /// A result is about another object.
    #[error("it is about another object than was asked for")]
    OtherObject,
    /// The server wants to answer later, which it was not offered.
    #[error("the operation is pending, although the request was not asynchronous")]
    Pending,
}

/// A structure's items.
#[derive(Clone, Copy)]
pub struct Fields<'m, 'a> {
    structure: Tag,
    items: &'m [Item<'a>],
}

impl<'m, 'a> Fields<'m, 'a> {
    /// The items of a structure; `None` if it is none.
    #[must_use]
    pub fn of(item: &'m Item<'a>) -> Option<Self> {
        match &item.value {
            Value::Structure(items) => Some(Self { structure: item.tag, items }),
            _ => None,
        }
    }

    /// A structure without items.
    #[must_use]
    pub fn empty(structure: Tag) -> Self {
        Self { structure, items: &[] }
    }

    /// The values of all items with a tag.
    pub fn all(self, field: Tag) -> impl Iterator<Item = &'m Value<'a>> {
        self.items.iter().filter(move |item| item.tag == field).map(|item| &item.value)
    }

    /// The structures with a tag.
    ///
    /// # Errors
    /// [`Violation::WrongType`], one by one.
    pub fn structures(self, field: Tag) -> impl Iterator<Item = Result<Fields<'m, 'a>, Violation>> {
        self.items
            .iter()
            .filter(move |item| item.tag == field)
            .map(move |item| Fields::of(item).ok_or(self.wrong_type(field, "Structure")))
    }

    /// An item that may be there once.
    ///
    /// # Errors
    /// [`Violation::Repeated`].
    pub fn optional(self, field: Tag) -> Result<Option<&'m Value<'a>>, Violation> {
        let mut values = self.all(field);
        let first = values.next();
        if values.next().is_some() {
            return Err(Violation::Repeated { structure: self.structure, field });
        }
        Ok(first)
    }

    /// An item that has to be there once.
    ///
    /// # Errors
    /// [`Violation::Missing`], [`Violation::Repeated`].
    pub fn required(self, field: Tag) -> Result<&'m Value<'a>, Violation> {
        self.optional(field)?.ok_or(Violation::Missing { structure: self.structure, field })
    }

    fn wrong_type(self, field: Tag, expected: &'static str) -> Violation {
        Violation::WrongType { structure: self.structure, field, expected }
    }

    /// A structure that has to be there.
    ///
    /// # Errors
    /// [`Violation`], as all that follow.
    pub fn structure(self, field: Tag) -> Result<Fields<'m, 'a>, Violation> {
        match self.required(field)? {
            Value::Structure(items) => Ok(Fields { structure: field, items }),
            _ => Err(self.wrong_type(field, "Structure")),
        }
    }

    /// A structure that may be there.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn optional_structure(self, field: Tag) -> Result<Option<Fields<'m, 'a>>, Violation> {
        match self.optional(field)? {
            None => Ok(None),
            Some(_) => self.structure(field).map(Some),
        }
    }

    /// A text string that has to be there.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn text(self, field: Tag) -> Result<&'a str, Violation> {
        match self.required(field)? {
            Value::TextString(text) => Ok(text),
            _ => Err(self.wrong_type(field, "Text String")),
        }
    }

    /// A text string that may be there.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn optional_text(self, field: Tag) -> Result<Option<&'a str>, Violation> {
        match self.optional(field)? {
            None => Ok(None),
            Some(_) => self.text(field).map(Some),
        }
    }

    /// A byte string that has to be there.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn bytes(self, field: Tag) -> Result<&'a [u8], Violation> {
        match self.required(field)? {
            Value::ByteString(bytes) => Ok(bytes),
            _ => Err(self.wrong_type(field, "Byte String")),
        }
    }

    /// An integer that has to be there.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn integer(self, field: Tag) -> Result<i32, Violation> {
        match self.required(field)? {
            Value::Integer(value) => Ok(*value),
            _ => Err(self.wrong_type(field, "Integer")),
        }
    }

    /// An enumeration that has to be there.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn enumeration(self, field: Tag) -> Result<u32, Violation> {
        match self.required(field)? {
            Value::Enumeration(value) => Ok(*value),
            _ => Err(self.wrong_type(field, "Enumeration")),
        }
    }

    /// An enumeration that may be there.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn optional_enumeration(self, field: Tag) -> Result<Option<u32>, Violation> {
        match self.optional(field)? {
            None => Ok(None),
            Some(_) => self.enumeration(field).map(Some),
        }
    }

    /// A protocol version that is a structure here.
    ///
    /// # Errors
    /// [`Violation`].
    pub(crate) fn version(self) -> Result<ProtocolVersion, Violation> {
        Ok(ProtocolVersion {
            major: self.integer(Tag::PROTOCOL_VERSION_MAJOR)?,
            minor: self.integer(Tag::PROTOCOL_VERSION_MINOR)?,
        })
    }
}
