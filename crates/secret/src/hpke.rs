//! HPKE (RFC 9180), base mode, single shot, by AWS-LC: DHKEM(X25519, HKDF-SHA256) and HKDF-SHA256. The only
//! module that calls AWS-LC's C functions: aws-lc-rs does not offer them.
//!
//! AWS-LC is used instead of the crate `hpke` because it is vmseal's only cryptographic library, and because
//! it wipes what it frees (`OPENSSL_free`), contexts and private keys included.

use std::ptr::NonNull;

use aws_lc_sys::{
    EVP_HPKE_AEAD, EVP_HPKE_CTX, EVP_HPKE_CTX_free, EVP_HPKE_CTX_new, EVP_HPKE_CTX_open,
    EVP_HPKE_CTX_seal, EVP_HPKE_CTX_setup_recipient, EVP_HPKE_CTX_setup_sender, EVP_HPKE_KEY,
    EVP_HPKE_KEY_free, EVP_HPKE_KEY_generate, EVP_HPKE_KEY_new, EVP_HPKE_KEY_public_key,
    EVP_hpke_aes_256_gcm, EVP_hpke_hkdf_sha256, EVP_hpke_x25519_hkdf_sha256,
};

/// The length of an X25519 public key and of `enc`, in bytes (RFC 9180 section 7.1).
pub(crate) const PUBLIC_LEN: usize = 32;

/// The length of AES-GCM's tag, in bytes.
pub(crate) const TAG_LEN: usize = 16;

/// AWS-LC refused: a wrong key, a damaged message, or no memory. It does not say which.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refused;

/// AWS-LC's functions answer 1 for success.
fn check(answer: i32) -> Result<(), Refused> {
    if answer == 1 { Ok(()) } else { Err(Refused) }
}

/// A private key; AWS-LC wipes it when it is freed.
pub(crate) struct PrivateKey(NonNull<EVP_HPKE_KEY>);

// SAFETY: the key is owned by this value alone, and AWS-LC's functions that take it `const` read only.
unsafe impl Send for PrivateKey {}
// SAFETY: as above.
unsafe impl Sync for PrivateKey {}

impl Drop for PrivateKey {
    fn drop(&mut self) {
        // SAFETY: made by EVP_HPKE_KEY_new, freed once.
        unsafe { EVP_HPKE_KEY_free(self.0.as_ptr()) };
    }
}

impl PrivateKey {
    fn empty() -> Result<Self, Refused> {
        // SAFETY: no arguments; NULL means no memory.
        NonNull::new(unsafe { EVP_HPKE_KEY_new() }).map(Self).ok_or(Refused)
    }

    pub(crate) fn generate() -> Result<Self, Refused> {
        let key = Self::empty()?;
        // SAFETY: `key` is a fresh key object, the KEM is static.
        check(unsafe { EVP_HPKE_KEY_generate(key.0.as_ptr(), EVP_hpke_x25519_hkdf_sha256()) })?;
        Ok(key)
    }

    /// A key pair from a known private key: for test vectors.
    #[cfg(test)]
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, Refused> {
        let key = Self::empty()?;
        // SAFETY: as in `generate`; the bytes are read during the call only, and their length checked.
        check(unsafe {
            aws_lc_sys::EVP_HPKE_KEY_init(
                key.0.as_ptr(),
                EVP_hpke_x25519_hkdf_sha256(),
                bytes.as_ptr(),
                bytes.len(),
            )
        })?;
        Ok(key)
    }

    pub(crate) fn public(&self) -> Result<[u8; PUBLIC_LEN], Refused> {
        let (mut public, mut len) = ([0; PUBLIC_LEN], 0);
        // SAFETY: at most `PUBLIC_LEN` bytes are written to `public`.
        check(unsafe {
            EVP_HPKE_KEY_public_key(self.0.as_ptr(), public.as_mut_ptr(), &mut len, PUBLIC_LEN)
        })?;
        if len == PUBLIC_LEN { Ok(public) } else { Err(Refused) }
    }
}

/// Which AEAD; vmseal uses one, RFC 9180's own vectors another.
#[derive(Clone, Copy)]
pub(crate) struct Aead(*const EVP_HPKE_AEAD);

impl Aead {
    pub(crate) fn aes_256_gcm() -> Self {
        // SAFETY: returns a static.
        Self(unsafe { EVP_hpke_aes_256_gcm() })
    }
}

struct Context(NonNull<EVP_HPKE_CTX>);

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by EVP_HPKE_CTX_new, freed once.
        unsafe { EVP_HPKE_CTX_free(self.0.as_ptr()) };
    }
}

impl Context {
    fn new() -> Result<Self, Refused> {
        // SAFETY: no arguments; NULL means no memory.
        NonNull::new(unsafe { EVP_HPKE_CTX_new() }).map(Self).ok_or(Refused)
    }

    /// Appends the ciphertext and its tag to `out`.
    fn seal(&self, aad: &[u8], plain: &[u8], out: &mut Vec<u8>) -> Result<(), Refused> {
        let (start, room) = (out.len(), plain.len() + TAG_LEN);
        out.resize(start + room, 0);
        let mut len = 0;
        // SAFETY: at most `room` bytes are written behind `start`, all of them in `out`.
        check(unsafe {
            EVP_HPKE_CTX_seal(
                self.0.as_ptr(),
                out[start..].as_mut_ptr(),
                &mut len,
                room,
                plain.as_ptr(),
                plain.len(),
                aad.as_ptr(),
                aad.len(),
            )
        })?;
        if len == room { Ok(()) } else { Err(Refused) }
    }
}

/// `enc ‖ ciphertext ‖ tag` for the holder of `public`'s private key (RFC 9180 section 6.1, `SealBase`).
pub(crate) fn seal(
    aead: Aead,
    public: &[u8; PUBLIC_LEN],
    info: &[u8],
    aad: &[u8],
    plain: &[u8],
) -> Result<Vec<u8>, Refused> {
    let (context, mut out, mut len) = (Context::new()?, vec![0; PUBLIC_LEN], 0);
    // SAFETY: at most `PUBLIC_LEN` bytes are written to `out`, which has that many; the statics and
    // slices are read during the call only.
    check(unsafe {
        EVP_HPKE_CTX_setup_sender(
            context.0.as_ptr(),
            out.as_mut_ptr(),
            &mut len,
            PUBLIC_LEN,
            EVP_hpke_x25519_hkdf_sha256(),
            EVP_hpke_hkdf_sha256(),
            aead.0,
            public.as_ptr(),
            public.len(),
            info.as_ptr(),
            info.len(),
        )
    })?;
    context.seal(aad, plain, &mut out)?;
    Ok(out)
}

/// Opens `sealed` into `out`, which has the plaintext's length: that of `sealed` less
/// [`PUBLIC_LEN`] and [`TAG_LEN`] (RFC 9180 section 6.1, `OpenBase`).
pub(crate) fn open(
    aead: Aead,
    key: &PrivateKey,
    info: &[u8],
    aad: &[u8],
    sealed: &[u8],
    out: &mut [u8],
) -> Result<(), Refused> {
    let (enc, ciphertext) = sealed.split_at_checked(PUBLIC_LEN).ok_or(Refused)?;
    let (context, mut len) = (Context::new()?, 0);
    // SAFETY: the statics and slices are read during the call only; the key is whole.
    check(unsafe {
        EVP_HPKE_CTX_setup_recipient(
            context.0.as_ptr(),
            key.0.as_ptr(),
            EVP_hpke_hkdf_sha256(),
            aead.0,
            enc.as_ptr(),
            enc.len(),
            info.as_ptr(),
            info.len(),
        )
    })?;
    // AWS-LC requires room for the ciphertext without its tag, no more.
    if ciphertext.len() != out.len() + TAG_LEN {
        return Err(Refused);
    }
    // SAFETY: at most `out.len()` bytes are written to `out`.
    check(unsafe {
        EVP_HPKE_CTX_open(
            context.0.as_ptr(),
            out.as_mut_ptr(),
            &mut len,
            out.len(),
            ciphertext.as_ptr(),
            ciphertext.len(),
            aad.as_ptr(),
            aad.len(),
        )
    })?;
    if len == out.len() { Ok(()) } else { Err(Refused) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hex;

    /// RFC 9180 appendix A.1.1 (base mode), sequence number 0. Its AEAD is AES-128-GCM.
    #[test]
    fn it_meets_the_test_vector_of_rfc_9180() {
        // SAFETY: returns a static.
        let aead = Aead(unsafe { aws_lc_sys::EVP_hpke_aes_128_gcm() });
        let info = hex("4f6465206f6e2061204772656369616e2055726e");
        let plain = hex("4265617574792069732074727574682c20747275746820626561757479");
        let ephemeral = hex("52c4a758a802cd8b936eceea314432798d5baf2d7e9235dc084ab1b9cfa2f736");
        let private = hex("4612c550263fc8ad58375df3f557aac531d26850903e55a9f23f21d8534e8ac8");
        let public = hex("3948cfe0ad1ddb695d780e59077195da6c56506b027329794ab02bca80815c4d");
        let expected = hex(concat!(
            "37fda3567bdbd628e88668c3c8d7e97d1d1253b6d4ea6d44c150f741f1bf4431",
            "f938558b5d72f1a23810b4be2ab4f84331acc02fc97babc53a52ae8218a355a96d8770ac83d07bea87e13c512a"
        ));
        let (context, mut sealed, mut len) = (Context::new().unwrap(), vec![0; PUBLIC_LEN], 0);
        // SAFETY: as in `seal`.
        let answer = unsafe {
            aws_lc_sys::EVP_HPKE_CTX_setup_sender_with_seed_for_testing(
                context.0.as_ptr(),
                sealed.as_mut_ptr(),
                &mut len,
                PUBLIC_LEN,
                EVP_hpke_x25519_hkdf_sha256(),
                EVP_hpke_hkdf_sha256(),
                aead.0,
                public.as_ptr(),
                public.len(),
                info.as_ptr(),
                info.len(),
                ephemeral.as_ptr(),
                ephemeral.len(),
            )
        };
        assert_eq!(check(answer), Ok(()));
        context.seal(b"Count-0", &plain, &mut sealed).unwrap();
        assert_eq!(sealed, expected);

        let key = PrivateKey::from_bytes(&private).unwrap();
        assert_eq!(key.public().unwrap().as_slice(), public);
        let mut opened = vec![0; plain.len()];
        open(aead, &key, &info, b"Count-0", &expected, &mut opened).unwrap();
        assert_eq!(opened, plain);
        let wrong = open(aead, &key, &info, b"Count-1", &expected, &mut opened);
        assert_eq!(wrong, Err(Refused));
    }
}
