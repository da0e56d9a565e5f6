//! The key slot of a sealed file: the file's key, wrapped under the VM's key, and which key that is.
//!
//! ```text
//! 0    state (1): 0 empty, 1 wrapped, 2 in the clear
//! 1    length of the key id (1)
//! 2    zero (6)
//! 8    provider (16)
//! 24   check value of the VM's key (16)
//! 40   file key: wrapped by AES-KWP (40), or in the clear (32) and zero (8)
//! 80   key id
//!      zero to 512
//! ```

use uuid::Uuid;
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::{CHECK_LEN, CheckValue, DERIVED_LEN, DeriveError, KeyContext, Purpose};
use vmseal_secret::derive::{check_value, derive};
use vmseal_secret::wrap::{WrapError, unwrap, wrap};

/// The length of a slot, in bytes: a sector, so that storage writes it as a whole or not at all.
pub const SLOT_LEN: usize = 512;

/// The length of a file key that is wrapped, in bytes.
const WRAPPED_LEN: usize = DERIVED_LEN + 8;

const EMPTY: u8 = 0;
const WRAPPED: u8 = 1;
const CLEAR: u8 = 2;

/// The VM's key, and what says which one it is.
pub struct VmKey<'a> {
    /// The key, 32 bytes.
    pub kek: &'a SecretBytes,
    /// Whose it is, and its id.
    pub context: KeyContext<'a>,
}

/// Which key opens a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotKey {
    /// The key provider.
    pub provider: Uuid,
    /// The key's id there.
    pub key_id: String,
    /// The key's check value.
    pub check: CheckValue,
}

/// What a slot holds, as its bytes say; nothing of it is authenticated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slot {
    /// Nothing.
    Empty,
    /// The file key under the VM's key with this reference.
    Wrapped(SlotKey),
    /// The file key in the clear: anybody can open the file.
    Clear,
    /// Bytes that no slot has.
    Damaged,
}

/// Why a slot was not made or opened.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// A key could not be derived, or the key id has a wrong length.
    #[error(transparent)]
    Derive(#[from] DeriveError),
    /// The file key could not be wrapped or unwrapped.
    #[error(transparent)]
    Wrap(#[from] WrapError),
}

/// A slot with the file key under the VM's key, or in the clear when the VM has none.
///
/// # Errors
/// [`SlotError`]: a length is wrong, or there is no memory.
pub fn make(file_key: &SecretBytes, key: Option<&VmKey<'_>>) -> Result<[u8; SLOT_LEN], SlotError> {
    let mut slot = [0; SLOT_LEN];
    let Some(VmKey { kek, context }) = key else {
        slot[0] = CLEAR;
        slot[40..40 + DERIVED_LEN].copy_from_slice(file_key.expose());
        return Ok(slot);
    };
    let wrapping = derive(kek, context, Purpose::Wrap)?;
    let wrapped = wrap(&wrapping, file_key)?;
    let id = context.key_id.as_bytes();
    slot[0] = WRAPPED;
    // The derivation has refused longer ones.
    slot[1] = u8::try_from(id.len()).map_err(|_| DeriveError::KeyId(id.len()))?;
    slot[8..24].copy_from_slice(&context.provider);
    slot[24..24 + CHECK_LEN].copy_from_slice(&check_value(kek, context)?.0);
    slot[40..40 + WRAPPED_LEN].copy_from_slice(&wrapped);
    slot[80..80 + id.len()].copy_from_slice(id);
    Ok(slot)
}

/// What a slot says of itself.
#[must_use]
pub fn read(slot: &[u8; SLOT_LEN]) -> Slot {
    let zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
    let id_end = 80 + usize::from(slot[1]);
    match slot[0] {
        EMPTY if zero(slot) => Slot::Empty,
        CLEAR if zero(&slot[1..40]) && zero(&slot[40 + DERIVED_LEN..]) => Slot::Clear,
        WRAPPED if id_end > 80 && zero(&slot[2..8]) && zero(&slot[id_end..]) => {
            let Ok(key_id) = std::str::from_utf8(&slot[80..id_end]) else { return Slot::Damaged };
            let (mut provider, mut check) = ([0; 16], [0; CHECK_LEN]);
            provider.copy_from_slice(&slot[8..24]);
            check.copy_from_slice(&slot[24..40]);
            Slot::Wrapped(SlotKey {
                provider: Uuid::from_bytes(provider),
                key_id: key_id.to_owned(),
                check: CheckValue(check),
            })
        }
        _ => Slot::Damaged,
    }
}

/// The file key in this slot; none when it is not for this key.
///
/// # Errors
/// [`SlotError`]: the slot names this key and does not open with it.
pub fn open(
    slot: &[u8; SLOT_LEN],
    key: Option<&VmKey<'_>>,
) -> Result<Option<SecretBytes>, SlotError> {
    match (read(slot), key) {
        // A VM with a key has no file in the clear: whoever put it there has another one's content in mind.
        (Slot::Clear, None) => {
            let mut bytes = slot[40..40 + DERIVED_LEN].to_vec();
            Ok(Some(SecretBytes::from_wiped(&mut bytes).map_err(WrapError::from)?))
        }
        (Slot::Wrapped(named), Some(VmKey { kek, context })) => {
            let this = named.provider.as_bytes() == &context.provider
                && named.key_id == context.key_id
                && named.check == check_value(kek, context)?;
            if !this {
                return Ok(None);
            }
            let wrapping = derive(kek, context, Purpose::Wrap)?;
            let file_key = unwrap(&wrapping, &slot[40..40 + WRAPPED_LEN])?;
            // Another length would be no key of a file.
            Ok((file_key.len() == DERIVED_LEN).then_some(file_key))
        }
        _ => Ok(None),
    }
}
