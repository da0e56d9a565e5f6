//! Keys wrapped under keys: AES-256 key wrap with padding (AES-KWP, RFC 5649, NIST SP 800-38F).

use aws_lc_rs::key_wrap::{AES_256, AesKek, KeyWrapPadded};

use crate::bytes::{KEK_LEN, SecretBytes};
use crate::memory::MemoryError;

/// The most that AES-KWP adds, in bytes: 8 of integrity check and up to 7 of padding.
pub const WRAP_OVERHEAD_MAX: usize = 15;

/// The longest key that is wrapped, in bytes; no key of vmseal has more than 64.
pub const WRAPPED_KEY_MAX: usize = 256;

/// Why a key was not wrapped or unwrapped.
#[derive(Debug, thiserror::Error)]
pub enum WrapError {
    /// Not an AES-256 key.
    #[error("a wrapping key is {KEK_LEN} bytes long; this one has {0}")]
    WrappingKeyLength(usize),
    /// The key to wrap is too long, or the input to unwrap has no length of a wrapped key.
    #[error("{0} bytes cannot be a key to wrap (at most {WRAPPED_KEY_MAX}) or a wrapped key")]
    Length(usize),
    /// The integrity check failed.
    #[error("the wrapped key was made with another wrapping key, or is damaged")]
    WrongKeyOrDamaged,
    /// AWS-LC refused.
    #[error("AES-KWP failed in AWS-LC")]
    Wrap,
    /// No memory for the result.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

fn cipher(wrapping: &SecretBytes) -> Result<AesKek, WrapError> {
    AesKek::new(&AES_256, wrapping.expose())
        .map_err(|_| WrapError::WrappingKeyLength(wrapping.len()))
}

/// Wraps `key` under `wrapping` (32 bytes).
///
/// # Errors
/// [`WrapError`]: a length is not allowed, or AWS-LC refused.
pub fn wrap(wrapping: &SecretBytes, key: &SecretBytes) -> Result<Vec<u8>, WrapError> {
    if key.len() > WRAPPED_KEY_MAX {
        return Err(WrapError::Length(key.len()));
    }
    let mut out = vec![0; key.len() + WRAP_OVERHEAD_MAX];
    let wrapped = cipher(wrapping)?
        .wrap_with_padding(key.expose(), &mut out)
        .map_err(|_| WrapError::Wrap)?
        .len();
    out.truncate(wrapped);
    Ok(out)
}

/// Unwraps what [`wrap`] made.
///
/// # Errors
/// [`WrapError`]: another wrapping key, damage, or an impossible length.
pub fn unwrap(wrapping: &SecretBytes, wrapped: &[u8]) -> Result<SecretBytes, WrapError> {
    if !(16..=WRAPPED_KEY_MAX + WRAP_OVERHEAD_MAX).contains(&wrapped.len())
        || !wrapped.len().is_multiple_of(8)
    {
        return Err(WrapError::Length(wrapped.len()));
    }
    let mut padded = SecretBytes::zeroed(wrapped.len())?;
    let len = cipher(wrapping)?
        .unwrap_with_padding(wrapped, padded.expose_mut())
        .map_err(|_| WrapError::WrongKeyOrDamaged)?
        .len();
    Ok(SecretBytes::copy_of(&padded.expose()[..len])?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hex;

    fn secret(bytes: &[u8]) -> SecretBytes {
        SecretBytes::copy_of(bytes).unwrap()
    }

    /// RFC 5649 section 6 has vectors for a 192-bit KEK only, which aws-lc-rs does not offer and vmseal
    /// never uses: they are run through the function of AWS-LC that is beneath it.
    #[test]
    fn it_meets_the_test_vectors_of_rfc_5649() {
        let kek = hex("5840df6e29b02af1ab493b705bf16ea1ae8338f4dcc176a8");
        for (key, wrapped) in [
            (
                "c37b7e6492584340bed12207808941155068f738",
                "138bdeaa9b8fa7fc61f97742e72248ee5ae6ae5360d1ae6a5f54f373fa543b6a",
            ),
            ("466f7250617369", "afbeb0f07dfbf5419200f2ccb50bb24f"),
        ] {
            let (key, mut out, mut len) = (hex(key), [0; 64], 0);
            // SAFETY: an AES_KEY is plain integers; the first call fills it, the second writes at most
            // `out.len()` bytes to `out`.
            unsafe {
                let mut schedule = std::mem::zeroed();
                assert_eq!(aws_lc_sys::AES_set_encrypt_key(kek.as_ptr(), 192, &mut schedule), 0);
                let done = aws_lc_sys::AES_wrap_key_padded(
                    &schedule,
                    out.as_mut_ptr(),
                    &mut len,
                    out.len(),
                    key.as_ptr(),
                    key.len(),
                );
                assert_eq!(done, 1);
            }
            assert_eq!(out[..len], hex(wrapped));
        }
    }

    /// The value comes from another implementation (pyca/cryptography, on OpenSSL).
    #[test]
    fn it_meets_a_vector_of_another_implementation() {
        let (wrapping, key) = (secret(&Vec::from_iter(0..32)), secret(&Vec::from_iter(100..121)));
        let expected = hex("fa3adb5bf3486edba33afbf9c7ee24efff2fd023156b1f5903a36439b3f28b61");
        assert_eq!(wrap(&wrapping, &key).unwrap(), expected);
        assert_eq!(unwrap(&wrapping, &expected).unwrap(), key);
    }

    #[test]
    fn every_length_round_trips() {
        let wrapping = SecretBytes::random(KEK_LEN).unwrap();
        for len in 1..=WRAPPED_KEY_MAX {
            let key = SecretBytes::random(len).unwrap();
            let wrapped = wrap(&wrapping, &key).unwrap();
            assert_eq!(wrapped.len(), len.div_ceil(8) * 8 + 8);
            assert_eq!(unwrap(&wrapping, &wrapped).unwrap(), key);
        }
    }

    #[test]
    fn any_changed_bit_or_other_key_is_noticed() {
        let (wrapping, key) = (secret(&[1; KEK_LEN]), secret(&[2; 64]));
        let good = wrap(&wrapping, &key).unwrap();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(unwrap(&wrapping, &bad), Err(WrapError::WrongKeyOrDamaged)));
        }
        let other = unwrap(&secret(&[3; KEK_LEN]), &good);
        assert!(matches!(other, Err(WrapError::WrongKeyOrDamaged)));
    }

    #[test]
    fn impossible_lengths_are_refused() {
        let wrapping = secret(&[1; KEK_LEN]);
        for len in [0, 8, 15, 17, WRAPPED_KEY_MAX + 24] {
            assert!(
                matches!(unwrap(&wrapping, &vec![0; len]), Err(WrapError::Length(l)) if l == len)
            );
        }
        let long = SecretBytes::zeroed(WRAPPED_KEY_MAX + 1).unwrap();
        assert!(matches!(wrap(&wrapping, &long), Err(WrapError::Length(257))));
        let short = secret(&[1; 16]);
        assert!(matches!(wrap(&short, &wrapping), Err(WrapError::WrappingKeyLength(16))));
    }
}
