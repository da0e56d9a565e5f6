//! A secret sealed under a passphrase: Argon2id (RFC 9106) and AES-256-GCM, in a binary envelope that
//! docs/formats/native-key-file.md describes. The cost parameters are stored in it and are checked against
//! limits before they are used: a hostile file cannot demand gigabytes or hours.

use argon2::{Algorithm, Argon2, Block, Params, Version};
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use zeroize::Zeroizing;

use crate::bytes::SecretBytes;
use crate::memory::{MemoryError, SECRET_LEN_MAX};

const MAGIC: &[u8; 8] = b"vmsealpw";
const VERSION: u32 = 1;
const SALT_LEN: usize = 32;
const TAG_LEN: usize = 16;
const HEAD_LEN: usize = 68;

/// The length that the envelope adds to the secret, in bytes.
pub const ENVELOPE_OVERHEAD: usize = HEAD_LEN + TAG_LEN;

/// The least memory, in KiB: below it Argon2 protects little.
pub const MEMORY_KIB_MIN: u32 = 8 * 1024;
/// The most memory, in KiB: a server can spare 1 GiB for a second.
pub const MEMORY_KIB_MAX: u32 = 1024 * 1024;
/// The most passes over the memory: with the most memory some ten seconds.
pub const PASSES_MAX: u32 = 10;
/// The most lanes: RFC 9106 recommends 4.
pub const LANES_MAX: u32 = 4;

/// The cost of trying one passphrase. Always within the limits of this module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    memory_kib: u32,
    passes: u32,
    lanes: u32,
}

impl Cost {
    /// The second recommended option of RFC 9106 section 4: 64 MiB, 3 passes, 4 lanes.
    pub const RECOMMENDED: Self = Self { memory_kib: 64 * 1024, passes: 3, lanes: 4 };

    /// A cost within the limits of this module.
    ///
    /// # Errors
    /// [`PassphraseError::Cost`].
    pub fn new(memory_kib: u32, passes: u32, lanes: u32) -> Result<Self, PassphraseError> {
        if (MEMORY_KIB_MIN..=MEMORY_KIB_MAX).contains(&memory_kib)
            && (1..=PASSES_MAX).contains(&passes)
            && (1..=LANES_MAX).contains(&lanes)
        {
            Ok(Self { memory_kib, passes, lanes })
        } else {
            Err(PassphraseError::Cost { memory_kib, passes, lanes })
        }
    }
}

/// Why a secret was not sealed or opened.
#[derive(Debug, thiserror::Error)]
pub enum PassphraseError {
    /// It does not begin like an envelope, or has a wrong length.
    #[error("this is not a file sealed by vmseal under a passphrase")]
    NotAnEnvelope,
    /// A later vmseal made it.
    #[error("the file has version {0}; this vmseal knows version {VERSION}: use a newer one")]
    UnknownVersion(u32),
    /// The file (or the caller) asks for more, or for less, than is allowed.
    #[error(
        "the key derivation is to cost {memory_kib} KiB, {passes} passes, {lanes} lanes: the limits are {MEMORY_KIB_MIN} to {MEMORY_KIB_MAX} KiB, {PASSES_MAX} passes and {LANES_MAX} lanes"
    )]
    Cost {
        /// Memory, in KiB.
        memory_kib: u32,
        /// Passes over the memory.
        passes: u32,
        /// Lanes.
        lanes: u32,
    },
    /// Another passphrase, other associated data, or a changed byte: the three cannot be distinguished.
    #[error("the passphrase is wrong, or the file is damaged or belongs to something else")]
    WrongPassphraseOrDamaged,
    /// There is not enough memory for the key derivation.
    #[error("the key derivation needs {0} KiB of memory, which this machine does not give")]
    NotEnoughMemory(u32),
    /// Argon2 or AES-GCM failed for a reason other than those above.
    #[error("{0} failed")]
    Cipher(&'static str),
    /// No memory for the secret.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// The fixed part of an envelope; all of it is authenticated.
struct Head {
    cost: Cost,
    salt: [u8; SALT_LEN],
    nonce: [u8; NONCE_LEN],
}

impl Head {
    fn encode(&self) -> [u8; HEAD_LEN] {
        let mut head = [0; HEAD_LEN];
        head[..8].copy_from_slice(MAGIC);
        head[8..12].copy_from_slice(&VERSION.to_be_bytes());
        head[12..16].copy_from_slice(&self.cost.memory_kib.to_be_bytes());
        head[16..20].copy_from_slice(&self.cost.passes.to_be_bytes());
        head[20..24].copy_from_slice(&self.cost.lanes.to_be_bytes());
        head[24..56].copy_from_slice(&self.salt);
        head[56..68].copy_from_slice(&self.nonce);
        head
    }

    fn decode(head: &[u8; HEAD_LEN]) -> Result<Self, PassphraseError> {
        let number =
            |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if &head[..8] != MAGIC {
            return Err(PassphraseError::NotAnEnvelope);
        }
        if number(8) != VERSION {
            return Err(PassphraseError::UnknownVersion(number(8)));
        }
        let cost = Cost::new(number(12), number(16), number(20))?;
        let (mut salt, mut nonce) = ([0; SALT_LEN], [0; NONCE_LEN]);
        salt.copy_from_slice(&head[24..56]);
        nonce.copy_from_slice(&head[56..68]);
        Ok(Self { cost, salt, nonce })
    }

    /// Runs Argon2id; its memory, which holds data derived from the passphrase, is wiped.
    fn cipher(&self, passphrase: &SecretBytes) -> Result<LessSafeKey, PassphraseError> {
        let Cost { memory_kib, passes, lanes } = self.cost;
        let argon = |_| PassphraseError::Cipher("Argon2id");
        let mut key = SecretBytes::zeroed(32)?;
        let params = Params::new(memory_kib, passes, lanes, Some(key.len())).map_err(argon)?;
        let mut memory = Zeroizing::new(Vec::<Block>::new());
        memory
            .try_reserve_exact(params.block_count())
            .map_err(|_| PassphraseError::NotEnoughMemory(memory_kib))?;
        memory.resize(params.block_count(), Block::new());
        Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
            .hash_password_into_with_memory(
                passphrase.expose(),
                &self.salt,
                key.expose_mut(),
                &mut memory[..],
            )
            .map_err(argon)?;
        let key = UnboundKey::new(&AES_256_GCM, key.expose())
            .map_err(|_| PassphraseError::Cipher("AES-256-GCM"))?;
        Ok(LessSafeKey::new(key))
    }

    fn nonce(&self) -> Nonce {
        Nonce::assume_unique_for_key(self.nonce)
    }
}

/// Seals a secret under a passphrase. `associated` names the purpose of the secret and must be the same when
/// it is opened; it is not stored.
///
/// # Errors
/// [`PassphraseError`], only when memory is short.
pub fn seal_with_passphrase(
    secret: &SecretBytes,
    passphrase: &SecretBytes,
    associated: &[u8],
    cost: Cost,
) -> Result<Vec<u8>, PassphraseError> {
    let mut head = Head { cost, salt: [0; SALT_LEN], nonce: [0; NONCE_LEN] };
    for field in [&mut head.salt[..], &mut head.nonce[..]] {
        aws_lc_rs::rand::fill(field).map_err(|_| MemoryError::Random)?;
    }
    let encoded = head.encode();
    let mut sealed = secret.try_clone()?;
    let aad = Aad::from([&encoded[..], associated].concat());
    let tag = head
        .cipher(passphrase)?
        .seal_in_place_separate_tag(head.nonce(), aad, sealed.expose_mut())
        .map_err(|_| PassphraseError::Cipher("AES-256-GCM"))?;
    Ok([&encoded[..], sealed.expose(), tag.as_ref()].concat())
}

/// Opens what [`seal_with_passphrase`] made.
///
/// # Errors
/// [`PassphraseError`] distinguishes a wrong passphrase or damage from an unknown version, from a cost beyond
/// the limits, and from a file that is not an envelope.
pub fn open_with_passphrase(
    sealed: &[u8],
    passphrase: &SecretBytes,
    associated: &[u8],
) -> Result<SecretBytes, PassphraseError> {
    let (encoded, body) =
        sealed.split_first_chunk::<HEAD_LEN>().ok_or(PassphraseError::NotAnEnvelope)?;
    let head = Head::decode(encoded)?;
    let (ciphertext, tag) =
        body.split_last_chunk::<TAG_LEN>().ok_or(PassphraseError::NotAnEnvelope)?;
    if ciphertext.is_empty() || ciphertext.len() > SECRET_LEN_MAX {
        return Err(PassphraseError::NotAnEnvelope);
    }
    let mut secret = SecretBytes::zeroed(ciphertext.len())?;
    let aad = Aad::from([&encoded[..], associated].concat());
    head.cipher(passphrase)?
        .open_separate_gather(head.nonce(), aad, ciphertext, tag, secret.expose_mut())
        .map_err(|_| PassphraseError::WrongPassphraseOrDamaged)?;
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::hex;

    const CHEAP: Cost = Cost { memory_kib: MEMORY_KIB_MIN, passes: 1, lanes: 1 };

    fn secret(text: &str) -> SecretBytes {
        SecretBytes::copy_of(text.as_bytes()).unwrap()
    }

    #[test]
    fn argon2id_meets_the_test_vector_of_rfc_9106() {
        let params = argon2::ParamsBuilder::new()
            .m_cost(32)
            .t_cost(3)
            .p_cost(4)
            .data(argon2::AssociatedData::new(&[4; 12]).unwrap())
            .build()
            .unwrap();
        let argon =
            Argon2::new_with_secret(&[3; 8], Algorithm::Argon2id, Version::V0x13, params).unwrap();
        let mut tag = [0; 32];
        argon.hash_password_into(&[1; 32], &[2; 16], &mut tag).unwrap();
        let expected = "0d640df58d78766c08c037a34a8b53c9d01ef0452d75b65eb52520e96b01e659";
        assert_eq!(tag.as_slice(), hex(expected));
    }

    /// Made by this module's first version: it must open for ever.
    #[test]
    fn the_golden_file_opens() {
        let sealed = include_bytes!("../tests/golden/passphrase-v1.bin");
        let opened = open_with_passphrase(sealed, &secret("correct horse"), b"golden").unwrap();
        assert_eq!(opened.expose(), (0..32).collect::<Vec<u8>>());
    }

    #[test]
    fn it_opens_with_the_passphrase_and_the_associated_data_alone() {
        let key = SecretBytes::random(32).unwrap();
        let sealed = seal_with_passphrase(&key, &secret("right"), b"provider", CHEAP).unwrap();
        assert_eq!(sealed.len(), key.len() + ENVELOPE_OVERHEAD);
        assert_eq!(open_with_passphrase(&sealed, &secret("right"), b"provider").unwrap(), key);
        for (passphrase, associated) in [("wrong", &b"provider"[..]), ("right", b"backup")] {
            let refused = open_with_passphrase(&sealed, &secret(passphrase), associated);
            assert!(matches!(refused, Err(PassphraseError::WrongPassphraseOrDamaged)));
        }
    }

    #[test]
    fn any_changed_byte_is_refused_and_none_makes_it_panic() {
        let sealed = seal_with_passphrase(&secret("key"), &secret("right"), b"", CHEAP).unwrap();
        for byte in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[byte] ^= 0x80;
            open_with_passphrase(&changed, &secret("right"), b"").unwrap_err();
        }
        for len in 0..sealed.len() {
            open_with_passphrase(&sealed[..len], &secret("right"), b"").unwrap_err();
        }
    }

    #[test]
    fn a_hostile_cost_is_refused_before_it_is_spent() {
        let sealed = seal_with_passphrase(&secret("key"), &secret("right"), b"", CHEAP).unwrap();
        let started = Instant::now();
        for (at, value) in [
            (12, u32::MAX),
            (12, MEMORY_KIB_MAX + 1),
            (12, MEMORY_KIB_MIN - 1),
            (16, PASSES_MAX + 1),
            (16, 0),
            (20, LANES_MAX + 1),
            (20, 0),
        ] {
            let mut hostile = sealed.clone();
            hostile[at..at + 4].copy_from_slice(&value.to_be_bytes());
            let refused = open_with_passphrase(&hostile, &secret("right"), b"");
            assert!(matches!(refused, Err(PassphraseError::Cost { .. })), "{at} {value}");
        }
        assert!(started.elapsed() < Duration::from_secs(1));
    }

    #[test]
    fn other_files_and_other_versions_are_distinguished() {
        let mut sealed =
            seal_with_passphrase(&secret("key"), &secret("right"), b"", CHEAP).unwrap();
        sealed[11] = 2;
        let refused = open_with_passphrase(&sealed, &secret("right"), b"");
        assert!(matches!(refused, Err(PassphraseError::UnknownVersion(2))));
        sealed[0] = b'x';
        let refused = open_with_passphrase(&sealed, &secret("right"), b"");
        assert!(matches!(refused, Err(PassphraseError::NotAnEnvelope)));
    }
}
