//! The operations that vmseal asks of a server (KMIP 1.4 specification, section 4): their payloads,
//! both ways. No I/O.

mod attributes;
mod create;
mod get;
mod lifecycle;
mod locate;
mod server;

use std::fmt;

use vmseal_secret::MemoryError;

use crate::OperationCode;
use crate::fields::{Fields, Violation};
use crate::ttlv::{Encoder, Tag};

pub use attributes::{AddAttribute, GetState};
pub use create::{ApplicationInformation, Create};
pub use get::{Get, UnusableKey};
pub use lifecycle::{Activate, Destroy, Revoke};
pub use locate::{LOCATE_MAX, Locate};
pub use server::{DiscoverVersions, Query, ServerDescription};

/// The maximum length of an id, name or attribute, in bytes: that of a key id for which keys can be
/// derived. Servers' ids are numbers or UUIDs.
pub const TEXT_LEN_MAX: usize = vmseal_secret::derive::KEY_ID_MAX;

/// One operation with its parameters.
pub trait Operation {
    /// Its number.
    const CODE: OperationCode;
    /// Whether a second request has no further effect and the same answer. Only such an operation is
    /// repeated when a connection turns out to be dead.
    const REPEATABLE: bool;
    /// The server's answer.
    type Answer;

    /// Writes the request payload.
    fn encode(&self, payload: &mut Encoder);

    /// Reads the response payload.
    ///
    /// # Errors
    /// [`AnswerError`].
    fn decode(&self, payload: Fields<'_, '_>) -> Result<Self::Answer, AnswerError>;
}

/// Why an answer is unusable.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    /// It violates the protocol.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// vmseal cannot use the key.
    #[error(transparent)]
    Key(#[from] UnusableKey),
    /// No memory for the key.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// A text that cannot be sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a KMIP id, name or attribute has 1 to {TEXT_LEN_MAX} bytes and no control characters")]
pub struct InvalidText;

/// A text for a server: an id, a name, an attribute. Not empty, not long, and printable.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Text(String);

impl Text {
    /// Checks a text.
    ///
    /// # Errors
    /// [`InvalidText`].
    pub fn new(text: impl Into<String>) -> Result<Self, InvalidText> {
        let text = text.into();
        let good =
            !text.is_empty() && text.len() <= TEXT_LEN_MAX && !text.chars().any(char::is_control);
        if good { Ok(Self(text)) } else { Err(InvalidText) }
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The unique identifier that a server gave a key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId(Text);

impl KeyId {
    /// Checks an id.
    ///
    /// # Errors
    /// [`InvalidText`].
    pub fn new(id: impl Into<String>) -> Result<Self, InvalidText> {
        Text::new(id).map(Self)
    }

    /// The id.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    fn encode(&self, payload: &mut Encoder) {
        payload.text(Tag::UNIQUE_IDENTIFIER, self.as_str());
    }

    fn from_server(id: &str) -> Result<Self, Violation> {
        Self::new(id).map_err(|InvalidText| Violation::WrongValue(Tag::UNIQUE_IDENTIFIER))
    }

    /// Checks that an answer is about this key. An answer without other content may leave the id out.
    fn answered_by(&self, payload: Fields<'_, '_>) -> Result<(), Violation> {
        match payload.optional_text(Tag::UNIQUE_IDENTIFIER)? {
            Some(id) if id != self.as_str() => Err(Violation::OtherObject),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
