//! One KEK, many keys: HKDF-SHA256 (RFC 5869), one key per purpose, bound to the VM, the provider and
//! the key's id. The encoding is described in docs/formats/key-derivation.md.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Salt};

use crate::bytes::{DEK_LEN, KEK_LEN, SecretBytes};
use crate::memory::MemoryError;

/// Says what is derived and how, so that a later version cannot derive the same key for another use.
const LABEL: &[u8] = b"vmseal key derivation v1";

/// The same for a key that comes from the DEK of a disk.
const DISK_LABEL: &[u8] = b"vmseal key derivation from a disk v1";

/// The same for what the server holds for a datastore.
const DATASTORE_LABEL: &[u8] = b"vmseal datastore key v1";

/// The same for what tells keys of pools apart.
const POOL_KEY_FINGERPRINT_LABEL: &[u8] = b"vmseal pool key fingerprint v1";

/// The same for the frames of a sealed file.
const SEALED_FILE_LABEL: &[u8] = b"vmseal sealed file v1";

/// The same for what a migration sends.
const MIGRATION_LABEL: &[u8] = b"vmseal migration v1";

/// The length of the salt of a stream of a migration, in bytes: the nonce of its spec, and 128 random bits of either end.
pub const MIGRATION_SALT_LEN: usize = 8 + 16 + 16;

/// The length of the salt of a sealed file, in bytes.
pub const SEALED_FILE_SALT_LEN: usize = 32;

/// The longest key id, in bytes: KMIP sets no limit; what servers hand out is far shorter.
pub const KEY_ID_MAX: usize = 255;

/// The length of a key for wrapping or authentication, in bytes.
pub const DERIVED_LEN: usize = 32;

/// The length of the fingerprint of a pool's key, in bytes: people compare it, and a pool has had a few keys.
const FINGERPRINT_LEN: usize = 4;

/// The length of a check value, in bytes: 128 bits tell any two keys apart, and reveal none.
pub const CHECK_LEN: usize = 16;

/// The purpose of a derived key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// AES-KWP of other keys (the VM home's DEK).
    Wrap,
    /// The MAC of a disk header.
    Header,
    /// The check value, which is public.
    Check,
    /// The MAC of a VM's descriptor.
    Descriptor,
    /// The MAC of the manifest of a backup.
    Backup,
}

impl Purpose {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Wrap => b"wrap",
            Self::Header => b"header",
            Self::Check => b"check",
            Self::Descriptor => b"descriptor",
            Self::Backup => b"backup",
        }
    }

    fn len(self) -> usize {
        match self {
            Self::Wrap | Self::Header | Self::Descriptor | Self::Backup => DERIVED_LEN,
            Self::Check => CHECK_LEN,
        }
    }
}

/// The context of a KEK. Every derived key depends on all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyContext<'a> {
    /// The VM's id: the 16 bytes of its UUID.
    pub vm: [u8; 16],
    /// The key provider's id: the 16 bytes of its UUID.
    pub provider: [u8; 16],
    /// The key's id at the provider, 1 to [`KEY_ID_MAX`] bytes.
    pub key_id: &'a str,
}

/// Why no key could be derived.
#[derive(Debug, thiserror::Error)]
pub enum DeriveError {
    /// Not an AES-256 key.
    #[error("a key-encryption key is {KEK_LEN} bytes long; this one has {0}")]
    KekLength(usize),
    /// Not the key of a disk.
    #[error("the key of a disk is {DEK_LEN} bytes long; this one has {0}")]
    DekLength(usize),
    /// Not the key of a sealed file.
    #[error("the key of a sealed file is {DERIVED_LEN} bytes long; this one has {0}")]
    FileKeyLength(usize),
    /// Not the key of a migration.
    #[error("the key of a migration is {DERIVED_LEN} bytes long; this one has {0}")]
    MigrationKeyLength(usize),
    /// The key id is empty or too long.
    #[error("a key id is 1 to {KEY_ID_MAX} bytes long; this one has {0}")]
    KeyId(usize),
    /// AWS-LC refused.
    #[error("HKDF-SHA256 failed in AWS-LC")]
    Hkdf,
    /// No memory for the result.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// The length of HKDF's output, in the form that aws-lc-rs requires.
struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

fn hkdf_sha256(
    salt: &[u8],
    key: &[u8],
    info: &[u8],
    len: usize,
) -> Result<SecretBytes, DeriveError> {
    let mut out = SecretBytes::zeroed(len)?;
    Salt::new(HKDF_SHA256, salt)
        .extract(key)
        .expand(&[info], Length(len))
        .and_then(|okm| okm.fill(out.expose_mut()))
        .map_err(|_| DeriveError::Hkdf)?;
    Ok(out)
}

/// The key that wraps the key of a datastore in the server's inventory, from the private key of the server's authority (DER) and
/// the 16 bytes of the datastore's UUID.
///
/// # Errors
/// [`DeriveError`]: AWS-LC refused, or there is no memory.
pub fn datastore_wrapping_key(
    authority: &SecretBytes,
    datastore: [u8; 16],
) -> Result<SecretBytes, DeriveError> {
    hkdf_sha256(&[], authority.expose(), &fields(&[DATASTORE_LABEL, &datastore]), DERIVED_LEN)
}

/// Says to people which key of a pool it is, as hexadecimal digits that follow from the key (base64). Public: a key has 128 random bits or
/// more, so that it cannot be found by trying.
///
/// # Errors
/// [`DeriveError`]: AWS-LC refused, or there is no memory.
pub fn pool_key_fingerprint(key: &SecretBytes) -> Result<String, DeriveError> {
    let info = fields(&[POOL_KEY_FINGERPRINT_LABEL]);
    let derived = hkdf_sha256(&[], key.expose(), &info, FINGERPRINT_LEN)?;
    Ok(derived.expose().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Every field with its length before it, so that no two contexts have the same encoding.
fn fields(of: &[&[u8]]) -> Vec<u8> {
    let mut info = Vec::with_capacity(128);
    for field in of {
        // Every field is at most 255 bytes long.
        info.extend_from_slice(&(field.len() as u16).to_be_bytes());
        info.extend_from_slice(field);
    }
    info
}

fn info(context: &KeyContext<'_>, purpose: Purpose) -> Result<Vec<u8>, DeriveError> {
    let id = context.key_id.as_bytes();
    if id.is_empty() || id.len() > KEY_ID_MAX {
        return Err(DeriveError::KeyId(id.len()));
    }
    Ok(fields(&[LABEL, purpose.name(), &context.vm, &context.provider, id]))
}

/// The key of this purpose: [`DERIVED_LEN`] bytes, or [`CHECK_LEN`] for [`Purpose::Check`].
///
/// # Errors
/// [`DeriveError`]: the KEK or the key id has a wrong length, or there is no memory.
pub fn derive(
    kek: &SecretBytes,
    context: &KeyContext<'_>,
    purpose: Purpose,
) -> Result<SecretBytes, DeriveError> {
    if kek.len() != KEK_LEN {
        return Err(DeriveError::KekLength(kek.len()));
    }
    hkdf_sha256(&[], kek.expose(), &info(context, purpose)?, purpose.len())
}

/// The key under which what a VM's TPM keeps is encrypted: [`DERIVED_LEN`] bytes that follow from the DEK of the disk
/// with this id (the 16 bytes of its UUID).
///
/// # Errors
/// [`DeriveError`]: the DEK has a wrong length, or there is no memory.
pub fn tpm_key(dek: &SecretBytes, disk: [u8; 16]) -> Result<SecretBytes, DeriveError> {
    if dek.len() != DEK_LEN {
        return Err(DeriveError::DekLength(dek.len()));
    }
    hkdf_sha256(&[], dek.expose(), &fields(&[DISK_LABEL, b"tpm", &disk]), DERIVED_LEN)
}

/// The key under which the frames of a sealed file are: [`DERIVED_LEN`] bytes that follow from the file's own key, its salt, its
/// VM (the 16 bytes of its UUID), what kind of file it is, and its generation.
///
/// # Errors
/// [`DeriveError`]: the file's key has a wrong length, or there is no memory.
pub fn sealed_file_key(
    file_key: &SecretBytes,
    salt: &[u8; SEALED_FILE_SALT_LEN],
    vm: [u8; 16],
    kind: &'static str,
    generation: u64,
) -> Result<SecretBytes, DeriveError> {
    if file_key.len() != DERIVED_LEN {
        return Err(DeriveError::FileKeyLength(file_key.len()));
    }
    let info = fields(&[SEALED_FILE_LABEL, &vm, kind.as_bytes(), &generation.to_be_bytes()]);
    hkdf_sha256(salt, file_key.expose(), &info, DERIVED_LEN)
}

/// One direction of a stream of a migration: what both ends have to agree upon, or their keys differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MigrationStream {
    /// The version of the protocol.
    pub version: u16,
    /// The migration's id: the 16 bytes of its UUID.
    pub migration: [u8; 16],
    /// The direction's name.
    pub direction: &'static str,
    /// The number of the cipher.
    pub cipher: u8,
    /// The stream's number.
    pub stream: u16,
    /// How many streams there are.
    pub streams: u16,
}

fn checked_migration_key(key: &SecretBytes) -> Result<&[u8], DeriveError> {
    let length = key.len();
    if length == DERIVED_LEN {
        Ok(key.expose())
    } else {
        Err(DeriveError::MigrationKeyLength(length))
    }
}

/// The key under which the frames of one direction of one connection are: [`DERIVED_LEN`] bytes that follow from the key of the
/// migration's spec.
///
/// # Errors
/// [`DeriveError`]: the spec's key has a wrong length, or there is no memory.
pub fn migration_frames_key(
    spec_key: &SecretBytes,
    salt: &[u8; MIGRATION_SALT_LEN],
    of: &MigrationStream,
) -> Result<SecretBytes, DeriveError> {
    let info = fields(&[
        MIGRATION_LABEL,
        b"frames",
        &of.version.to_be_bytes(),
        &of.migration,
        of.direction.as_bytes(),
        &[of.cipher],
        &of.stream.to_be_bytes(),
        &of.streams.to_be_bytes(),
    ]);
    hkdf_sha256(salt, checked_migration_key(spec_key)?, &info, DERIVED_LEN)
}

/// The key by which an end of a connection proves that it has the spec of a migration: [`DERIVED_LEN`] bytes.
///
/// # Errors
/// As [`migration_frames_key`].
pub fn migration_proof_key(
    spec_key: &SecretBytes,
    nonce: u64,
    migration: [u8; 16],
) -> Result<SecretBytes, DeriveError> {
    let info = fields(&[MIGRATION_LABEL, b"proof", &migration]);
    hkdf_sha256(&nonce.to_be_bytes(), checked_migration_key(spec_key)?, &info, DERIVED_LEN)
}

/// The key under which the DEK of a disk's copy goes from host to host in a migration: [`DERIVED_LEN`] bytes that follow from the
/// VM's KEK, which both hosts have.
///
/// # Errors
/// [`DeriveError`]: the KEK has a wrong length, or there is no memory.
pub fn migrated_disk_key(
    kek: &SecretBytes,
    migration: [u8; 16],
    disk: [u8; 16],
) -> Result<SecretBytes, DeriveError> {
    if kek.len() != KEK_LEN {
        return Err(DeriveError::KekLength(kek.len()));
    }
    let info = fields(&[MIGRATION_LABEL, b"disk", &migration, &disk]);
    hkdf_sha256(&[], kek.expose(), &info, DERIVED_LEN)
}

/// Distinguishes a key from another one with the same id. Public: it is stored and shown as hex.
///
/// # Errors
/// As [`derive`].
pub fn check_value(kek: &SecretBytes, context: &KeyContext<'_>) -> Result<CheckValue, DeriveError> {
    let derived = derive(kek, context, Purpose::Check)?;
    let mut value = [0; CHECK_LEN];
    value.copy_from_slice(derived.expose());
    Ok(CheckValue(value))
}

/// A key's check value; public.
#[derive(Clone, Copy)]
pub struct CheckValue(pub [u8; CHECK_LEN]);

/// In constant time, so that nobody can find the value of a key by trying.
impl PartialEq for CheckValue {
    fn eq(&self, other: &Self) -> bool {
        aws_lc_rs::constant_time::verify_slices_are_equal(&self.0, &other.0).is_ok()
    }
}

impl Eq for CheckValue {}

impl fmt::Display for CheckValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for CheckValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CheckValue({self})")
    }
}

/// A text that is not a check value.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a check value is {} lower-case hexadecimal digits", CHECK_LEN * 2)]
pub struct NotACheckValue;

impl FromStr for CheckValue {
    type Err = NotACheckValue;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digit = |c: u8| match c {
            b'0'..=b'9' => Ok(c - b'0'),
            b'a'..=b'f' => Ok(c - b'a' + 10),
            _ => Err(NotACheckValue),
        };
        if text.len() != CHECK_LEN * 2 {
            return Err(NotACheckValue);
        }
        let mut value = [0; CHECK_LEN];
        for (byte, pair) in value.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Ok(Self(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hex;

    fn kek() -> SecretBytes {
        let mut bytes: Vec<u8> = (0..32).collect();
        SecretBytes::from_wiped(&mut bytes).unwrap()
    }

    const CONTEXT: KeyContext<'static> =
        KeyContext { vm: [0x11; 16], provider: [0x22; 16], key_id: "key-7" };

    #[test]
    fn hkdf_meets_the_test_cases_of_rfc_5869() {
        let basic = hkdf_sha256(
            &hex("000102030405060708090a0b0c"),
            &[0x0b; 22],
            &hex("f0f1f2f3f4f5f6f7f8f9"),
            42,
        );
        assert_eq!(
            basic.unwrap().expose(),
            hex(
                "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
            )
        );
        let no_salt = hkdf_sha256(&[], &[0x0b; 22], &[], 42);
        assert_eq!(
            no_salt.unwrap().expose(),
            hex(
                "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
            )
        );
    }

    /// The values come from another implementation (pyca/cryptography) and the written format.
    #[test]
    fn derived_keys_are_those_of_the_written_format() {
        for (purpose, expected) in [
            (Purpose::Wrap, "afef018718586a89a5d52c42dfd84099d64b0d03f97a903a0a496e7637f02444"),
            (Purpose::Header, "4739a3f46cd8013049667871544fbc822c378852a7834bf085ef33d0899a5db5"),
            (
                Purpose::Descriptor,
                "a749bb14b4d02d9b7d89bb205feb9abbf73ad7633acae132532799e36a63e4a0",
            ),
            // Python's hmac.
            (Purpose::Backup, "230d535a38ff0ce299c01ba287e9e3c6f9f268aac7ac2e693abc1c59aa4988c3"),
            (Purpose::Check, "3809a5ca04b9798c5d4bc062a91e188c"),
        ] {
            let derived = derive(&kek(), &CONTEXT, purpose).unwrap();
            assert_eq!(derived.expose(), hex(expected), "{purpose:?}");
        }
        let check = check_value(&kek(), &CONTEXT).unwrap();
        assert_eq!(check.to_string(), "3809a5ca04b9798c5d4bc062a91e188c");
    }

    /// The value comes from another implementation (Python's hmac) and the written format.
    #[test]
    fn the_key_of_a_tpm_is_that_of_the_written_format() {
        let mut bytes: Vec<u8> = (0..64).collect();
        let dek = SecretBytes::from_wiped(&mut bytes).unwrap();
        let key = tpm_key(&dek, [0x33; 16]).unwrap();
        assert_eq!(
            key.expose(),
            hex("4ce489f7c241449ba6108059ca386b02b4f766b0cdfefa1f06c60913ea5a5b07")
        );
        assert_ne!(tpm_key(&dek, [0x34; 16]).unwrap().expose(), key.expose());
        assert!(matches!(tpm_key(&kek(), [0x33; 16]), Err(DeriveError::DekLength(32))));
    }

    /// The value comes from another implementation (Python's hmac) and the written format.
    #[test]
    fn the_fingerprint_of_a_pools_key_is_that_of_the_written_format() {
        let key = |text: &str| SecretBytes::from_wiped(&mut text.as_bytes().to_vec()).unwrap();
        let one = key("AQAAAAAAAAAAABAABwcHBwcHBwcHBwcHBwcHBw==");
        assert_eq!(pool_key_fingerprint(&one).unwrap(), "eac94fe2");
        let other = key("AQAAAAAAAAAAABAACAgICAgICAgICAgICAgICA==");
        assert_ne!(pool_key_fingerprint(&other).unwrap(), pool_key_fingerprint(&one).unwrap());
    }

    #[test]
    fn every_part_of_the_context_changes_the_key() {
        let mut seen = vec![derive(&kek(), &CONTEXT, Purpose::Wrap).unwrap()];
        for context in [
            KeyContext { vm: [0x12; 16], ..CONTEXT },
            KeyContext { provider: [0x23; 16], ..CONTEXT },
            KeyContext { key_id: "key-8", ..CONTEXT },
        ] {
            let key = derive(&kek(), &context, Purpose::Wrap).unwrap();
            assert!(!seen.contains(&key));
            seen.push(key);
        }
    }

    #[test]
    fn wrong_lengths_are_refused() {
        let short = SecretBytes::zeroed(16).unwrap();
        let refused = derive(&short, &CONTEXT, Purpose::Wrap);
        assert!(matches!(refused, Err(DeriveError::KekLength(16))));
        for id in ["", &"x".repeat(KEY_ID_MAX + 1)] {
            let context = KeyContext { key_id: id, ..CONTEXT };
            let refused = derive(&kek(), &context, Purpose::Wrap);
            assert!(matches!(refused, Err(DeriveError::KeyId(len)) if len == id.len()));
        }
    }

    #[test]
    fn a_check_value_survives_text_and_other_texts_are_refused() {
        let check = check_value(&kek(), &CONTEXT).unwrap();
        assert_eq!(check.to_string().parse(), Ok(check));
        for bad in
            ["", "3809", "3809A5CA04B9798C5D4BC062A91E188C", &"g".repeat(32), &"ä".repeat(16)]
        {
            assert_eq!(bad.parse::<CheckValue>(), Err(NotACheckValue), "{bad}");
        }
    }
}
