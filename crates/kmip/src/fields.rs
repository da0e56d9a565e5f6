//! Reads the items of a structure by their tags, in any order, and ignores unknown items: servers add
//! items that later versions or their vendors define.

use crate::ttlv::{DecodeError, Item, Tag, Value};
use crate::{OperationCode, ProtocolVersion};

/// How a response violates the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// It is not TTLV, or exceeds the limits.
    #[error("it is not a KMIP message: {0}")]
    Malformed(#[from] DecodeError),
    /// A field is missing.
    #[error("{structure} has no {field}")]
    Missing {
        /// Where.
        structure: Tag,
        /// What.
        field: Tag,
    },
    /// A field is repeated that may occur once.
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
        /// The type that it must have.
        expected: &'static str,
    },
    /// A field has an invalid value.
    #[error("{0} has an invalid value")]
    WrongValue(Tag),
    /// The response is of a version that this crate does not speak.
    #[error("it is of KMIP {0}")]
    Version(ProtocolVersion),
    /// The header's count of batch items is wrong, or there are more than were asked for.
    #[error("it announces {announced} results and has {found}, where {asked} were asked for")]
    BatchCount {
        /// The header's count.
        announced: i32,
        /// The actual count.
        found: usize,
        /// The count of items in the request.
        asked: usize,
    },
    /// A result names no item of the request, or one that already has its result.
    #[error("a result belongs to no item of the request")]
    WrongBatchItem,
    /// An item of the request has no result, although none was refused.
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
    /// The server wants to answer later, which the request did not allow.
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
    /// The items of a structure; `None` for another value.
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
    /// [`Violation::WrongType`], for each of them.
    pub fn structures(self, field: Tag) -> impl Iterator<Item = Result<Fields<'m, 'a>, Violation>> {
        self.items
            .iter()
            .filter(move |item| item.tag == field)
            .map(move |item| Fields::of(item).ok_or(self.wrong_type(field, "Structure")))
    }

    /// An optional item.
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

    /// A mandatory item.
    ///
    /// # Errors
    /// [`Violation::Missing`], [`Violation::Repeated`].
    pub fn required(self, field: Tag) -> Result<&'m Value<'a>, Violation> {
        self.optional(field)?.ok_or(Violation::Missing { structure: self.structure, field })
    }

    fn wrong_type(self, field: Tag, expected: &'static str) -> Violation {
        Violation::WrongType { structure: self.structure, field, expected }
    }

    /// A mandatory structure.
    ///
    /// # Errors
    /// [`Violation`], as for all that follow.
    pub fn structure(self, field: Tag) -> Result<Fields<'m, 'a>, Violation> {
        match self.required(field)? {
            Value::Structure(items) => Ok(Fields { structure: field, items }),
            _ => Err(self.wrong_type(field, "Structure")),
        }
    }

    /// An optional structure.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn optional_structure(self, field: Tag) -> Result<Option<Fields<'m, 'a>>, Violation> {
        match self.optional(field)? {
            None => Ok(None),
            Some(_) => self.structure(field).map(Some),
        }
    }

    /// A mandatory text string.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn text(self, field: Tag) -> Result<&'a str, Violation> {
        match self.required(field)? {
            Value::TextString(text) => Ok(text),
            _ => Err(self.wrong_type(field, "Text String")),
        }
    }

    /// An optional text string.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn optional_text(self, field: Tag) -> Result<Option<&'a str>, Violation> {
        match self.optional(field)? {
            None => Ok(None),
            Some(_) => self.text(field).map(Some),
        }
    }

    /// A mandatory byte string.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn bytes(self, field: Tag) -> Result<&'a [u8], Violation> {
        match self.required(field)? {
            Value::ByteString(bytes) => Ok(bytes),
            _ => Err(self.wrong_type(field, "Byte String")),
        }
    }

    /// A mandatory integer.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn integer(self, field: Tag) -> Result<i32, Violation> {
        match self.required(field)? {
            Value::Integer(value) => Ok(*value),
            _ => Err(self.wrong_type(field, "Integer")),
        }
    }

    /// A mandatory enumeration.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn enumeration(self, field: Tag) -> Result<u32, Violation> {
        match self.required(field)? {
            Value::Enumeration(value) => Ok(*value),
            _ => Err(self.wrong_type(field, "Enumeration")),
        }
    }

    /// An optional enumeration.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn optional_enumeration(self, field: Tag) -> Result<Option<u32>, Violation> {
        match self.optional(field)? {
            None => Ok(None),
            Some(_) => self.enumeration(field).map(Some),
        }
    }

    /// A protocol version that is an item of this structure.
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
