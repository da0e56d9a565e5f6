//! SHA-256 (FIPS 180-4) of what is no secret.

use aws_lc_rs::digest::{Context, SHA256};

/// The length of a SHA-256, in bytes.
pub const SHA256_LEN: usize = 32;

/// A SHA-256 that is being made.
pub struct Sha256(Context);

impl Default for Sha256 {
    fn default() -> Self {
        Self(Context::new(&SHA256))
    }
}

impl Sha256 {
    /// Of nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Goes on with these bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all of them.
    #[must_use]
    pub fn finish(self) -> [u8; SHA256_LEN] {
        let mut digest = [0; SHA256_LEN];
        digest.copy_from_slice(self.0.finish().as_ref());
        digest
    }
}

/// The digest of some bytes.
#[must_use]
pub fn sha256(bytes: &[u8]) -> [u8; SHA256_LEN] {
    let mut digest = Sha256::new();
    digest.update(bytes);
    digest.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hex;

    /// The examples of FIPS 180-2, appendix B, and the empty message.
    #[test]
    fn it_meets_the_known_answers() {
        let cases: [(&[u8], &str); 3] = [
            (b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (
                b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
            ),
        ];
        for (message, expected) in cases {
            assert_eq!(sha256(message).as_slice(), hex(expected));
        }
    }
}
