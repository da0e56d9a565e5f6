//! GetAttributes (section 4.12) for a key's state, and AddAttribute (section 4.14).

use super::create::attribute;
use super::{AnswerError, KeyId, Operation, Text};
use crate::fields::{Fields, Violation};
use crate::ttlv::{Encoder, Tag};
use crate::{OperationCode, State};

/// The name of the attribute.
const STATE: &str = "State";

/// Reads the state of a key.
#[derive(Clone, Debug)]
pub struct GetState {
    /// Which key.
    pub id: KeyId,
}

impl Operation for GetState {
    const CODE: OperationCode = OperationCode::GetAttributes;
    const REPEATABLE: bool = true;
    type Answer = State;

    fn encode(&self, payload: &mut Encoder) {
        self.id.encode(payload);
        payload.text(Tag::ATTRIBUTE_NAME, STATE);
    }

    fn decode(&self, payload: Fields<'_, '_>) -> Result<State, AnswerError> {
        self.id.answered_by(payload)?;
        for attribute in payload.structures(Tag::ATTRIBUTE) {
            let attribute = attribute?;
            if attribute.text(Tag::ATTRIBUTE_NAME)? == STATE {
                return Ok(State::from_number(attribute.enumeration(Tag::ATTRIBUTE_VALUE)?));
            }
        }
        Err(Violation::Missing { structure: Tag::RESPONSE_PAYLOAD, field: Tag::ATTRIBUTE }.into())
    }
}

/// Adds a custom text attribute, by which an operator finds a key at the server. Its name begins with
/// `x-` (section 3.35). Many servers refuse it.
#[derive(Clone, Debug)]
pub struct AddAttribute {
    /// The key.
    pub id: KeyId,
    /// Its name; sent with the prefix `x-`.
    pub name: Text,
    /// Its value.
    pub value: Text,
}

impl Operation for AddAttribute {
    const CODE: OperationCode = OperationCode::AddAttribute;
    /// Not repeatable: a second request may add a second attribute.
    const REPEATABLE: bool = false;
    type Answer = ();

    fn encode(&self, payload: &mut Encoder) {
        self.id.encode(payload);
        attribute(payload, &format!("x-{}", self.name), |value| {
            value.text(Tag::ATTRIBUTE_VALUE, self.value.as_str());
        });
    }

    fn decode(&self, payload: Fields<'_, '_>) -> Result<(), AnswerError> {
        Ok(self.id.answered_by(payload)?)
    }
}
