//! PBKDF2 with HMAC-SHA256 (RFC 8018), as LUKS2 has it.

use std::num::NonZeroU32;

use aws_lc_rs::pbkdf2::{PBKDF2_HMAC_SHA256, derive};

use crate::bytes::SecretBytes;
use crate::memory::MemoryError;

/// `len` bytes that follow from a secret.
///
/// # Errors
/// [`MemoryError`]: there is no memory for the result.
pub fn pbkdf2_sha256(
    secret: &SecretBytes,
    salt: &[u8],
    iterations: NonZeroU32,
    len: usize,
) -> Result<SecretBytes, MemoryError> {
    let mut derived = SecretBytes::zeroed(len)?;
    derive(PBKDF2_HMAC_SHA256, iterations, salt, secret.expose(), derived.expose_mut());
    Ok(derived)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hex;

    /// RFC 7914, section 11.
    #[test]
    fn it_meets_the_known_answers() {
        let cases: [(&[u8], &[u8], u32, &str); 2] = [
            (
                b"passwd",
                b"salt",
                1,
                "55ac046e56e3089fec1691c22544b605f94185216dde0465e68b9d57c20dacbc\
                 49ca9cccf179b645991664b39d77ef317c71b845b1e30bd509112041d3a19783",
            ),
            (
                b"Password",
                b"NaCl",
                80000,
                "4ddcd8f60b98be21830cee5ef22701f9641a4418d04c0414aeff08876b34ab56\
                 a1d425a1225833549adb841b51c9b3176a272bdebba1d078478f62b397f33c8d",
            ),
        ];
        for (password, salt, iterations, expected) in cases {
            let secret = SecretBytes::from_wiped(&mut password.to_vec()).unwrap();
            let iterations = NonZeroU32::new(iterations).unwrap();
            let derived = pbkdf2_sha256(&secret, salt, iterations, 64).unwrap();
            assert_eq!(derived.expose(), hex(expected));
        }
    }
}
