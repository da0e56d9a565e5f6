//! Locate (section 4.9): the keys that have certain attributes.

use super::create::{ApplicationInformation, name_attribute};
use super::{AnswerError, KeyId, Operation, Text};
use crate::OperationCode;
use crate::fields::{Fields, Violation};
use crate::ttlv::{Encoder, Tag, Value};

/// The maximum number of ids in an answer: they fit one message whatever their length. If an answer has
/// as many, there may be more.
pub const LOCATE_MAX: usize = 100;

/// Finds keys; without a criterion, all that this client may see, up to [`LOCATE_MAX`].
#[derive(Clone, Debug, Default)]
pub struct Locate {
    /// By their name.
    pub name: Option<Text>,
    /// By vmseal's name for them.
    pub application: Option<ApplicationInformation>,
}

impl Operation for Locate {
    const CODE: OperationCode = OperationCode::Locate;
    const REPEATABLE: bool = true;
    type Answer = Vec<KeyId>;

    fn encode(&self, payload: &mut Encoder) {
        payload.integer(Tag::MAXIMUM_ITEMS, LOCATE_MAX as i32);
        if let Some(name) = &self.name {
            name_attribute(payload, name);
        }
        if let Some(application) = &self.application {
            application.encode(payload);
        }
    }

    fn decode(&self, payload: Fields<'_, '_>) -> Result<Vec<KeyId>, AnswerError> {
        let wrong = Violation::WrongValue(Tag::UNIQUE_IDENTIFIER);
        let id = |value: &Value<'_>| match value {
            Value::TextString(id) => KeyId::from_server(id),
            _ => Err(wrong.clone()),
        };
        Ok(payload.all(Tag::UNIQUE_IDENTIFIER).map(id).collect::<Result<_, Violation>>()?)
    }
}
