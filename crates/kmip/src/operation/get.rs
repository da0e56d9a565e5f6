//! Get (section 4.11): copies the bytes of a key from the message into secret memory and nowhere else.

use vmseal_secret::{KEK_LEN, SecretBytes};

use super::{AnswerError, KeyId, Operation};
use crate::OperationCode;
use crate::enumeration::{ALGORITHM_AES, FORMAT_RAW, OBJECT_SYMMETRIC_KEY};
use crate::fields::{Fields, Violation};
use crate::ttlv::{Encoder, Tag, Value};

/// Why vmseal cannot use an object as a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnusableKey {
    /// Another kind of object.
    #[error("the object is not a symmetric key but of type {0:#x}")]
    ObjectType(u32),
    /// Wrapped, although the request did not ask for that.
    #[error("the server releases the key only wrapped")]
    Wrapped,
    /// Not the raw bytes.
    #[error("the server gives the key in format {0:#x} instead of raw bytes")]
    Format(u32),
    /// Compressed.
    #[error("the server gives the key compressed")]
    Compressed,
    /// For another algorithm.
    #[error("the key is not for AES but for algorithm {0:#x}")]
    Algorithm(u32),
    /// Of another length.
    #[error("the key has {found} bits; an AES-256 key is needed")]
    Length {
        /// Its bits.
        found: i64,
    },
}

/// Reads an AES-256 key.
#[derive(Clone, Debug)]
pub struct Get {
    /// Which.
    pub id: KeyId,
}

impl Operation for Get {
    const CODE: OperationCode = OperationCode::Get;
    const REPEATABLE: bool = true;
    type Answer = SecretBytes;

    fn encode(&self, payload: &mut Encoder) {
        self.id.encode(payload);
        payload.enumeration(Tag::KEY_FORMAT_TYPE, FORMAT_RAW);
    }

    fn decode(&self, payload: Fields<'_, '_>) -> Result<SecretBytes, AnswerError> {
        if payload.text(Tag::UNIQUE_IDENTIFIER)? != self.id.as_str() {
            return Err(Violation::OtherObject.into());
        }
        let object = payload.enumeration(Tag::OBJECT_TYPE)?;
        if object != OBJECT_SYMMETRIC_KEY {
            return Err(UnusableKey::ObjectType(object).into());
        }
        let block = payload.structure(Tag::SYMMETRIC_KEY)?.structure(Tag::KEY_BLOCK)?;
        check(block)?;
        let material = match block.required(Tag::KEY_VALUE)? {
            // How a wrapped key is given (section 2.1.4).
            Value::ByteString(_) => return Err(UnusableKey::Wrapped.into()),
            _ => block.structure(Tag::KEY_VALUE)?.bytes(Tag::KEY_MATERIAL)?,
        };
        if material.len() != KEK_LEN {
            return Err(UnusableKey::Length { found: material.len() as i64 * 8 }.into());
        }
        let mut key = SecretBytes::zeroed(KEK_LEN)?;
        key.expose_mut().copy_from_slice(material);
        Ok(key)
    }
}

/// The key's properties in the key block (section 2.1.3).
fn check(block: Fields<'_, '_>) -> Result<(), AnswerError> {
    if block.optional(Tag::KEY_WRAPPING_DATA)?.is_some() {
        return Err(UnusableKey::Wrapped.into());
    }
    match block.enumeration(Tag::KEY_FORMAT_TYPE)? {
        FORMAT_RAW => {}
        other => return Err(UnusableKey::Format(other).into()),
    }
    if block.optional(Tag::KEY_COMPRESSION_TYPE)?.is_some() {
        return Err(UnusableKey::Compressed.into());
    }
    match block.optional_enumeration(Tag::CRYPTOGRAPHIC_ALGORITHM)? {
        None | Some(ALGORITHM_AES) => {}
        Some(other) => return Err(UnusableKey::Algorithm(other).into()),
    }
    if block.optional(Tag::CRYPTOGRAPHIC_LENGTH)?.is_some() {
        let bits = block.integer(Tag::CRYPTOGRAPHIC_LENGTH)?;
        if i64::from(bits) != KEK_LEN as i64 * 8 {
            return Err(UnusableKey::Length { found: bits.into() }.into());
        }
    }
    Ok(())
}
