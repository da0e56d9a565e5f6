//! HMAC-SHA256 (RFC 2104, FIPS 198-1).

use aws_lc_rs::hmac::{Context, HMAC_SHA256, Key};

use crate::bytes::SecretBytes;

/// The length of a MAC, in bytes.
pub const MAC_LEN: usize = 32;

/// A MAC that does not belong to the message and the key.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the authentication code does not match")]
pub struct MacMismatch;

fn context(key: &SecretBytes, parts: &[&[u8]]) -> Context {
    let mut context = Context::with_key(&Key::new(HMAC_SHA256, key.expose()));
    for part in parts {
        context.update(part);
    }
    context
}

/// The MAC of the parts, one after another: the caller's encoding must say where each one ends.
#[must_use]
pub fn mac(key: &SecretBytes, parts: &[&[u8]]) -> [u8; MAC_LEN] {
    let mut out = [0; MAC_LEN];
    out.copy_from_slice(context(key, parts).sign().as_ref());
    out
}

/// Checks a MAC in constant time.
///
/// # Errors
/// [`MacMismatch`], without a hint of where.
pub fn verify(key: &SecretBytes, parts: &[&[u8]], expected: &[u8]) -> Result<(), MacMismatch> {
    aws_lc_rs::constant_time::verify_slices_are_equal(&mac(key, parts), expected)
        .map_err(|_| MacMismatch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hex;

    /// RFC 4231 test cases 1, 2 (in two parts) and 6 (a key longer than a block).
    #[test]
    fn it_meets_the_test_cases_of_rfc_4231() {
        type Case = (&'static [u8], &'static [&'static [u8]], &'static str);
        let cases: [Case; 3] = [
            (
                &[0x0b; 20],
                &[b"Hi There"],
                "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7",
            ),
            (
                b"Jefe",
                &[b"what do ya want ", b"for nothing?"],
                "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
            ),
            (
                &[0xaa; 131],
                &[b"Test Using Larger Than Block-Size Key - Hash Key First"],
                "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
            ),
        ];
        for (key, parts, expected) in cases {
            let key = SecretBytes::copy_of(key).unwrap();
            assert_eq!(mac(&key, parts).as_slice(), hex(expected));
            assert_eq!(verify(&key, parts, &hex(expected)), Ok(()));
            assert_eq!(verify(&key, &[b"another"], &hex(expected)), Err(MacMismatch));
            assert_eq!(verify(&key, parts, &hex(expected)[..31]), Err(MacMismatch));
        }
    }
}
