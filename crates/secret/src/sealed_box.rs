//! Secrets sealed to a public key, so that a KEK passes through HTTP and TLS buffers as ciphertext
//! only: HPKE (RFC 9180) base mode, DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, AES-256-GCM, one shot.
//!
//! The recipient makes a key pair that lives as long as its process; the mutually authenticated connection
//! that carries the box decides who may send.

use crate::bytes::SecretBytes;
use crate::hpke::{Aead, PUBLIC_LEN, PrivateKey, TAG_LEN, open, seal as hpke_seal};
use crate::memory::{MemoryError, SECRET_LEN_MAX};

/// Comes before the caller's `info`, so that a box of vmseal cannot be opened as anything else.
const LABEL: &[u8] = b"vmseal sealed box v1\0";

/// The length of a public key, in bytes.
pub const PUBLIC_KEY_LEN: usize = PUBLIC_LEN;

/// The length that sealing adds to a secret, in bytes.
pub const BOX_OVERHEAD: usize = PUBLIC_LEN + TAG_LEN;

/// The longest `info`, in bytes: some ids.
pub const BOX_INFO_MAX: usize = 1024;

/// Why a secret was not sealed or opened.
#[derive(Debug, thiserror::Error)]
pub enum BoxError {
    /// Not the length of a box.
    #[error("{0} bytes cannot be a sealed box")]
    Length(usize),
    /// More than [`BOX_INFO_MAX`].
    #[error("the context of a sealed box has {0} bytes; at most {BOX_INFO_MAX} are allowed")]
    InfoLength(usize),
    /// The public key is not one (a point of small order), or there is no memory.
    #[error("AWS-LC cannot seal to this public key")]
    Seal,
    /// No key pair could be made.
    #[error("AWS-LC cannot make a key pair")]
    Generate,
    /// It was sealed to another public key (the recipient has restarted since) or for another context, or was
    /// changed on the way.
    #[error("the sealed box is for another recipient or context, or is damaged")]
    Open,
    /// No memory for the secret.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// A sealed secret: `enc` (32 bytes) ‖ ciphertext ‖ tag (16 bytes). Not secret itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealedBox(Vec<u8>);

impl SealedBox {
    /// A box from bytes; only their length is checked.
    ///
    /// # Errors
    /// [`BoxError::Length`].
    pub fn from_bytes(bytes: impl Into<Vec<u8>>) -> Result<Self, BoxError> {
        let bytes = bytes.into();
        let allowed = BOX_OVERHEAD + 1..=BOX_OVERHEAD + SECRET_LEN_MAX;
        if allowed.contains(&bytes.len()) {
            Ok(Self(bytes))
        } else {
            Err(BoxError::Length(bytes.len()))
        }
    }

    /// The bytes, for sending.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

fn labelled(info: &[u8]) -> Result<Vec<u8>, BoxError> {
    if info.len() > BOX_INFO_MAX {
        return Err(BoxError::InfoLength(info.len()));
    }
    Ok([LABEL, info].concat())
}

/// Seals a secret to a public key. `info` names the purpose of the box and must be the same when it is
/// opened.
///
/// # Errors
/// [`BoxError`]: the public key is not valid, or `info` is too long.
pub fn seal(
    public: &[u8; PUBLIC_KEY_LEN],
    info: &[u8],
    secret: &SecretBytes,
) -> Result<SealedBox, BoxError> {
    hpke_seal(Aead::aes_256_gcm(), public, &labelled(info)?, &[], secret.expose())
        .map(SealedBox)
        .map_err(|_| BoxError::Seal)
}

/// The receiving end: a key pair that never leaves this process.
pub struct Recipient {
    key: PrivateKey,
    public: [u8; PUBLIC_KEY_LEN],
}

impl Recipient {
    /// A new key pair.
    ///
    /// # Errors
    /// [`BoxError::Generate`].
    pub fn generate() -> Result<Self, BoxError> {
        Self::with_key(PrivateKey::generate().map_err(|_| BoxError::Generate)?)
    }

    fn with_key(key: PrivateKey) -> Result<Self, BoxError> {
        let public = key.public().map_err(|_| BoxError::Generate)?;
        Ok(Self { key, public })
    }

    /// The key that the sender needs.
    #[must_use]
    pub fn public_key(&self) -> [u8; PUBLIC_KEY_LEN] {
        self.public
    }

    /// Opens a box that was sealed to [`Recipient::public_key`] with the same `info`.
    ///
    /// # Errors
    /// [`BoxError::Open`] when anything differs.
    pub fn open(&self, sealed: &SealedBox, info: &[u8]) -> Result<SecretBytes, BoxError> {
        let mut secret = SecretBytes::zeroed(sealed.0.len() - BOX_OVERHEAD)?;
        let out = secret.expose_mut();
        open(Aead::aes_256_gcm(), &self.key, &labelled(info)?, &[], &sealed.0, out)
            .map_err(|_| BoxError::Open)?;
        Ok(secret)
    }
}

impl std::fmt::Debug for Recipient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recipient").field("public", &self.public).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hex;

    #[test]
    fn a_box_opens_only_for_its_recipient_and_context_and_unchanged() {
        let (alice, bob) = (Recipient::generate().unwrap(), Recipient::generate().unwrap());
        let secret = SecretBytes::random(32).unwrap();
        let sealed = seal(&alice.public_key(), b"vm-7", &secret).unwrap();
        assert_eq!(alice.open(&sealed, b"vm-7").unwrap(), secret);
        assert!(matches!(bob.open(&sealed, b"vm-7"), Err(BoxError::Open)));
        assert!(matches!(alice.open(&sealed, b"vm-8"), Err(BoxError::Open)));
        for byte in 0..sealed.as_bytes().len() {
            let mut changed = sealed.clone();
            // The lowest bit: X25519 ignores the highest bit of a public key (RFC 7748 section 5).
            changed.0[byte] ^= 1;
            assert!(matches!(alice.open(&changed, b"vm-7"), Err(BoxError::Open)), "byte {byte}");
        }
    }

    /// The box comes from another implementation (pyca/cryptography 48, on OpenSSL), with this suite.
    #[test]
    fn a_box_of_another_implementation_opens() {
        let private: Vec<u8> = (0..32).collect();
        let recipient = Recipient::with_key(PrivateKey::from_bytes(&private).unwrap()).unwrap();
        let sealed = SealedBox::from_bytes(hex(concat!(
            "5c54a9727f4db165af5171940c8bc746ef6f544cffbc413e4d2776eeb0d7d07cf6ec3de6f33bcc74",
            "eb2532b5dfea1d4abd555de994452a8b95d70692f1eaf5df64f23c19ca595c3386b2d9c9a4a4c68a"
        )));
        let opened = recipient.open(&sealed.unwrap(), b"vm-7").unwrap();
        assert_eq!(opened.expose(), (100..132).collect::<Vec<u8>>());
    }

    #[test]
    fn invalid_boxes_are_refused() {
        for len in [0, BOX_OVERHEAD, BOX_OVERHEAD + SECRET_LEN_MAX + 1] {
            assert!(
                matches!(SealedBox::from_bytes(vec![0; len]), Err(BoxError::Length(l)) if l == len)
            );
        }
        let secret = SecretBytes::random(32).unwrap();
        assert!(matches!(seal(&[0; 32], b"", &secret), Err(BoxError::Seal)));
        let recipient = Recipient::generate().unwrap();
        let long = seal(&recipient.public_key(), &[0; BOX_INFO_MAX + 1], &secret);
        assert!(matches!(long, Err(BoxError::InfoLength(_))));
        assert!(!format!("{recipient:?}").contains("key:"));
    }
}
