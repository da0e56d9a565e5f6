//! Keys of Ceph users (cephx), and the keyrings that they are written in.
//!
//! ```text
//! key, base64:  type (2, little-endian) ‖ time of creation (8) ‖ length (2, little-endian) ‖ secret
//! keyring:      [client.vmseal]
//!                   key = AQB…
//!                   caps osd = "profile rbd pool=vms"
//! ```

use std::ffi::CStr;
use std::fmt;
use std::io::{self, Read};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

use crate::bytes::SecretBytes;
use crate::memory::MemoryError;

/// The longest key, in bytes of base64: one of type 2 has 60.
pub const CEPHX_KEY_MAX: usize = 64;

/// The longest keyring that is read, in bytes: one with some hundred users.
pub const KEYRING_MAX: usize = 64 * 1024;

/// The types of keys, and how long the secret of each is (`CEPH_CRYPTO_AES`, `CEPH_CRYPTO_AES256KRB5`).
const TYPES: [(u16, usize); 2] = [(1, 16), (2, 32)];

/// What comes before the secret, in bytes.
const HEAD_LEN: usize = 12;

/// The longest key, in bytes; `decode_slice` asks for room for all that the base64 could have.
const BINARY_MAX: usize = CEPHX_KEY_MAX / 4 * 3;

/// Why there is no key. Nothing of what was read is in it.
#[derive(Debug, thiserror::Error)]
pub enum CephxKeyError {
    /// Something else than a key.
    #[error("it is not the key of a Ceph user, as ceph auth get-key prints it")]
    NotAKey,
    /// The keyring has other users.
    #[error("the keyring has no key of {0}: name its user, or take another keyring")]
    NoSuchUser(String),
    /// Something else than a keyring.
    #[error("it has more than {KEYRING_MAX} bytes: it is no keyring")]
    TooLong,
    /// No memory for the key.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// The key of a Ceph user, as base64. The zero byte behind it ends it for C.
pub struct CephxKey(SecretBytes);

impl CephxKey {
    /// A key by itself.
    ///
    /// # Errors
    /// [`CephxKeyError::NotAKey`]; there is no memory for it.
    pub fn bare(text: &[u8]) -> Result<Self, CephxKeyError> {
        let text = text.trim_ascii();
        if !is_key(text) {
            return Err(CephxKeyError::NotAKey);
        }
        let mut key = SecretBytes::zeroed(text.len() + 1)?;
        key.expose_mut()[..text.len()].copy_from_slice(text);
        Ok(Self(key))
    }

    /// The key of `user`, such as `client.vmseal`, in a file: a keyring, or the key by itself.
    ///
    /// # Errors
    /// [`CephxKeyError`].
    pub fn in_file(content: &[u8], user: &str) -> Result<Self, CephxKeyError> {
        let content = content.trim_ascii();
        if !content.contains(&b'[') {
            return Self::bare(content);
        }
        let (mut is_users, mut found) = (false, None);
        for line in content.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii) {
            if let Some(section) = line.strip_prefix(b"[") {
                let name = section.strip_suffix(b"]").unwrap_or_default();
                is_users = name.trim_ascii() == user.as_bytes();
                continue;
            }
            let mut parts = line.splitn(2, |byte| *byte == b'=');
            let (name, value) = (parts.next().unwrap_or_default(), parts.next());
            if let Some(value) = value.filter(|_| is_users && name.trim_ascii() == b"key") {
                // As Ceph reads it: the last one counts.
                found = Some(value);
            }
        }
        let found = found.ok_or_else(|| CephxKeyError::NoSuchUser(user.to_owned()))?;
        Self::bare(value_of(found))
    }

    /// The key of `user` in what is read, of which [`CephxKey::in_file`] has the form.
    ///
    /// # Errors
    /// Those of reading; `InvalidData`: there is no key of this user, or it is too long for a keyring.
    pub fn read_of(from: impl Read, user: &str) -> io::Result<Self> {
        let invalid = |error: CephxKeyError| io::Error::new(io::ErrorKind::InvalidData, error);
        // With room for all of it, so that no part is left where it grew.
        let mut content = Zeroizing::new(Vec::with_capacity(KEYRING_MAX + 64));
        from.take(KEYRING_MAX as u64 + 1).read_to_end(&mut content)?;
        if content.len() > KEYRING_MAX {
            return Err(invalid(CephxKeyError::TooLong));
        }
        Self::in_file(&content, user).map_err(invalid)
    }

    /// A key that somebody sends: all that is to be read is the key.
    ///
    /// # Errors
    /// Those of reading; `InvalidData`: it is not a key.
    pub fn read(from: impl Read) -> io::Result<Self> {
        // With room for all of it, so that no part is left where it grew.
        let mut text = Zeroizing::new(Vec::with_capacity(CEPHX_KEY_MAX + 2));
        from.take(CEPHX_KEY_MAX as u64 + 1).read_to_end(&mut text)?;
        Self::bare(&text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// The key, base64, as a secret without the zero byte.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn to_secret(&self) -> Result<SecretBytes, MemoryError> {
        SecretBytes::copy_of(self.expose())
    }

    /// The key, base64. Copies must not outlive this value.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        self.0.expose().strip_suffix(&[0]).unwrap_or_default()
    }

    /// The same for a C library.
    #[must_use]
    pub fn expose_c(&self) -> &CStr {
        CStr::from_bytes_with_nul(self.0.expose()).unwrap_or_default()
    }
}

impl fmt::Debug for CephxKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CephxKey")
    }
}

/// The value of a line as Ceph reads it: without a comment behind it, or quotation marks around it.
fn value_of(line: &[u8]) -> &[u8] {
    let end = line.iter().position(|byte| matches!(byte, b'#' | b';')).unwrap_or(line.len());
    let value = line[..end].trim_ascii();
    let quoted = value.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\""));
    quoted.unwrap_or(value)
}

/// Whether it is a key: base64 of a type that is known, with a secret of its length.
fn is_key(text: &[u8]) -> bool {
    if text.len() > CEPHX_KEY_MAX {
        return false;
    }
    let mut binary = Zeroizing::new([0_u8; BINARY_MAX]);
    let Ok(length) = STANDARD.decode_slice(text, &mut binary[..]) else { return false };
    let [t0, t1, _, _, _, _, _, _, _, _, l0, l1, ..] = *binary;
    let (kind, secret) = (u16::from_le_bytes([t0, t1]), u16::from_le_bytes([l0, l1]));
    let secret = usize::from(secret);
    TYPES.contains(&(kind, secret)) && length == HEAD_LEN + secret
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key of this type with a secret of `length` bytes, and of `there` bytes in fact.
    fn key(kind: u16, length: u16, there: usize) -> String {
        let mut binary = kind.to_le_bytes().to_vec();
        binary.extend([7; 8]);
        binary.extend(length.to_le_bytes());
        binary.extend(vec![9; there]);
        STANDARD.encode(binary)
    }

    #[test]
    fn keys_of_both_types_are_taken_and_nothing_else_is() {
        for good in [key(1, 16, 16), key(2, 32, 32)] {
            let read = CephxKey::bare(format!("{good}\n").as_bytes()).unwrap();
            assert_eq!(read.expose(), good.as_bytes());
            assert_eq!(read.expose_c().to_bytes(), good.as_bytes());
            assert_eq!(CephxKey::read(good.as_bytes()).unwrap().expose(), good.as_bytes());
            assert!(!format!("{read:?}").contains(&good[..8]));
        }
        let long = "A".repeat(CEPHX_KEY_MAX + 1);
        let none = String::new();
        for bad in
            [&key(1, 16, 15), &key(1, 32, 32), &key(3, 16, 16), &key(1, 16, 17), &long, &none]
        {
            assert!(matches!(CephxKey::bare(bad.as_bytes()), Err(CephxKeyError::NotAKey)), "{bad}");
        }
        assert!(CephxKey::bare(b"%%%%").is_err());
        assert!(CephxKey::read(&b"AQ\0A"[..]).is_err());
    }

    #[test]
    fn a_keyring_gives_the_key_of_its_user() {
        let (ours, other) = (key(1, 16, 16), key(2, 32, 32));
        let keyring = format!(
            "# made by hand\n[client.admin]\n\tkey = {other}\n[client.vmseal]\n\tkey={ours}\n\tcaps mon = \"profile rbd\"\n"
        );
        let of = |user| CephxKey::in_file(keyring.as_bytes(), user);
        assert_eq!(of("client.vmseal").unwrap().expose(), ours.as_bytes());
        assert_eq!(of("client.admin").unwrap().expose(), other.as_bytes());
        let missing = of("client.other").unwrap_err();
        assert!(missing.to_string().contains("no key of client.other"), "{missing}");
        assert_eq!(CephxKey::in_file(ours.as_bytes(), "x").unwrap().expose(), ours.as_bytes());
        for line in [format!("\"{ours}\""), format!("{ours} ; of 2026"), format!("{ours} # ours")] {
            let keyring = format!("[client.a]\n\tkey = {line}\n");
            let read = CephxKey::read_of(keyring.as_bytes(), "client.a").unwrap();
            assert_eq!(read.expose(), ours.as_bytes());
        }
        let long = "#".repeat(KEYRING_MAX + 1);
        for (not, why) in [(&long, "it is no keyring"), (&keyring, "no key of client.a")] {
            let refused = CephxKey::read_of(not.as_bytes(), "client.a").unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
            assert!(refused.to_string().contains(why), "{refused}");
        }
        let damaged = CephxKey::in_file(b"[client.a]\nkey = secret\n", "client.a").unwrap_err();
        assert!(!damaged.to_string().contains("secret"), "{damaged}");
    }
}
