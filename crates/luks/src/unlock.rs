//! Unwraps a DEK from its key slot ("LUKS2 On-Disk Format Specification" 1.1, sections 3.2 and 3.5), by parameters that
//! [`crate::metadata`] has checked:
//!
//! ```text
//!  KEK ── PBKDF2 ──> key of the area ── AES-XTS, 512 bytes at a time ──> stripes ── merged ──> DEK ── PBKDF2 ──> digest: as in the header?
//! ```
//! libcryptsetup would take several times as long (docs/decisions/186). What is wrong here cannot pass for a DEK: the digest and
//! the header's authentication code tell.

use vmseal_secret::xts::{Direction, KEY_LENGTH, TWEAK_UNIT, Xts};
use vmseal_secret::{DEK_LEN, SecretBytes, Stripes, pbkdf2_sha256};

use crate::error::HeaderError;
use crate::layout::AREA_LEN;
use crate::metadata::{Derivation, Metadata, STRIPES};

const _: () = assert!(TWEAK_UNIT.is_multiple_of(DEK_LEN), "stripes do not cross units");
const _: () = assert!(STRIPES * DEK_LEN as u64 <= AREA_LEN);

impl Derivation {
    fn derive(&self, secret: &SecretBytes, len: usize) -> Result<SecretBytes, HeaderError> {
        Ok(pbkdf2_sha256(secret, &self.salt, self.iterations, len)?)
    }
}

/// The DEK in the area of a slot; none if the KEK does not open it.
pub(crate) fn unlock(
    metadata: &Metadata,
    slot: u32,
    area: &[u8],
    kek: &SecretBytes,
) -> Result<Option<SecretBytes>, HeaderError> {
    let Some(derivation) = metadata.derivations.get(&slot) else { return Ok(None) };
    let key = derivation.derive(kek, KEY_LENGTH)?;
    let Some(dek) = merge(&key, area)? else { return Ok(None) };
    let digest = &metadata.digest;
    let found = digest.derivation.derive(&dek, digest.value.len())?;
    let same = aws_lc_rs::constant_time::verify_slices_are_equal(found.expose(), &digest.value);
    Ok(same.is_ok().then_some(dek))
}

/// Decrypts an area and merges its stripes; none without a whole area.
fn merge(key: &SecretBytes, area: &[u8]) -> Result<Option<SecretBytes>, HeaderError> {
    let mut cipher = Xts::new(key.expose(), Direction::Decrypt)?;
    let mut plain = SecretBytes::zeroed(TWEAK_UNIT)?;
    let (mut stripes, mut left) = (Stripes::new(DEK_LEN)?, STRIPES);
    for (number, unit) in area.as_chunks::<TWEAK_UNIT>().0.iter().enumerate() {
        let Some(into) = plain.expose_mut().first_chunk_mut() else { return Ok(None) };
        cipher.unit(number as u64, unit, into)?;
        for stripe in plain.expose().chunks_exact(DEK_LEN) {
            left -= 1;
            if left == 0 {
                return Ok(Some(stripes.finish(stripe)));
            }
            stripes.add(stripe);
        }
    }
    Ok(None)
}
