//! Headers of exported volumes: plain LUKS2, opened by a passphrase, without a token.

use uuid::Uuid;
use vmseal_secret::{DEK_LEN, SecretBytes};

use crate::error::HeaderError;
use crate::facts::DATA_OFFSET;
use crate::library::Device;
use crate::loaded::WorkingCopy;
use crate::session::check_len;
use crate::store::HeaderStore;

/// The unit in which the header area is written, in bytes; zeroes stay holes.
const BLOCK: usize = 4096;

/// Writes the header of a new volume that is encrypted with `dek` (64 bytes) and opens with `passphrase`;
/// its data begins at [`DATA_OFFSET`]. The store is new: all zero.
///
/// # Errors
/// [`HeaderError`]; what has been written is not a valid volume then.
pub fn create_for_passphrase(
    store: &mut impl HeaderStore,
    dek: &SecretBytes,
    passphrase: &SecretBytes,
) -> Result<(), HeaderError> {
    check_len("volume key", dek, DEK_LEN)?;
    let working = WorkingCopy::empty()?;
    let device = Device::format(&working, Uuid::new_v4(), dek)?;
    device.derive_slowly()?;
    device.add_slot(0, dek, passphrase)?;
    drop(device);
    let area = working.read(0, DATA_OFFSET as usize)?;
    for (index, block) in area.chunks(BLOCK).enumerate() {
        if block.iter().any(|byte| *byte != 0) {
            store.write_at(block, (index * BLOCK) as u64).map_err(HeaderError::Write)?;
        }
    }
    store.flush().map_err(HeaderError::Write)
}
