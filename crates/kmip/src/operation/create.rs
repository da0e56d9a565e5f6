//! Create (section 4.1): a new AES-256 key.

use super::{AnswerError, KeyId, Operation, Text};
use crate::OperationCode;
use crate::enumeration::{
    ALGORITHM_AES, NAME_UNINTERPRETED_TEXT, OBJECT_SYMMETRIC_KEY, USAGE_ENCRYPT_DECRYPT,
};
use crate::fields::Fields;
use crate::ttlv::{Encoder, Tag};

/// The length of new keys, in bits.
const KEY_BITS: i32 = 256;

/// An application's name for a key (section 3.36): Locate finds the key by it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApplicationInformation {
    /// The namespace of the application.
    pub namespace: Text,
    /// The application's name for the key.
    pub data: Text,
}

impl ApplicationInformation {
    /// The attribute.
    pub(super) fn encode(&self, payload: &mut Encoder) {
        attribute(payload, "Application Specific Information", |value| {
            value.structure(Tag::ATTRIBUTE_VALUE, |value| {
                value.text(Tag::APPLICATION_NAMESPACE, self.namespace.as_str());
                value.text(Tag::APPLICATION_DATA, self.data.as_str());
            });
        });
    }
}

/// Creates a key for encryption and decryption, in state Pre-Active. The default is without a name,
/// like vCenter's.
#[derive(Clone, Debug, Default)]
pub struct Create {
    /// A name, which must be unique at the server.
    pub name: Option<Text>,
    /// vmseal's name for the key. Not every server has this attribute.
    pub application: Option<ApplicationInformation>,
}

/// An attribute whose value `value` writes with [`Tag::ATTRIBUTE_VALUE`].
pub(super) fn attribute(payload: &mut Encoder, name: &str, value: impl FnOnce(&mut Encoder)) {
    payload.structure(Tag::ATTRIBUTE, |attribute| {
        attribute.text(Tag::ATTRIBUTE_NAME, name);
        value(attribute);
    });
}

/// The `Name` attribute (section 3.2).
pub(super) fn name_attribute(payload: &mut Encoder, name: &Text) {
    attribute(payload, "Name", |value| {
        value.structure(Tag::ATTRIBUTE_VALUE, |value| {
            value.text(Tag::NAME_VALUE, name.as_str());
            value.enumeration(Tag::NAME_TYPE, NAME_UNINTERPRETED_TEXT);
        });
    });
}

impl Operation for Create {
    const CODE: OperationCode = OperationCode::Create;
    /// Not repeatable: a second request creates a second key.
    const REPEATABLE: bool = false;
    type Answer = KeyId;

    fn encode(&self, payload: &mut Encoder) {
        payload.enumeration(Tag::OBJECT_TYPE, OBJECT_SYMMETRIC_KEY);
        payload.structure(Tag::TEMPLATE_ATTRIBUTE, |template| {
            attribute(template, "Cryptographic Algorithm", |value| {
                value.enumeration(Tag::ATTRIBUTE_VALUE, ALGORITHM_AES);
            });
            attribute(template, "Cryptographic Length", |value| {
                value.integer(Tag::ATTRIBUTE_VALUE, KEY_BITS);
            });
            attribute(template, "Cryptographic Usage Mask", |value| {
                value.integer(Tag::ATTRIBUTE_VALUE, USAGE_ENCRYPT_DECRYPT);
            });
            if let Some(name) = &self.name {
                name_attribute(template, name);
            }
            if let Some(application) = &self.application {
                application.encode(template);
            }
        });
    }

    fn decode(&self, payload: Fields<'_, '_>) -> Result<KeyId, AnswerError> {
        Ok(KeyId::from_server(payload.text(Tag::UNIQUE_IDENTIFIER)?)?)
    }
}
