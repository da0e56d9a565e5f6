//! AES-256-XTS of AWS-LC, the cipher of disks: the only place that calls it.
//!
//! One context per direction, keyed once; per sector only the tweak is set (IEEE 1619; dm-crypt's
//! `plain64`: the tweak is the number of the sector's first 512-byte unit, little endian, 64 bits).
//! A context holds key schedules: AWS-LC cleanses it when it is freed.

use std::ffi::c_int;
use std::ptr::{self, NonNull};

use aws_lc_sys as aws;

/// The length of a key: the data key, then the tweak key.
pub const KEY_LENGTH: usize = 64;

/// The unit of encryption, in bytes.
pub const SECTOR: usize = 4096;

/// The unit that the tweak counts, in bytes; and the unit of encryption of a key slot of LUKS2.
pub const TWEAK_UNIT: usize = 512;

/// The cipher refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum XtsError {
    /// Not [`KEY_LENGTH`] bytes.
    #[error("an AES-256-XTS key is {KEY_LENGTH} bytes long")]
    KeyLength,
    /// The library refused the key; it does so if both halves are equal (NIST SP 800-38E).
    #[error("the cipher refused the key; its two halves must differ")]
    Key,
    /// The library failed.
    #[error("the cipher failed")]
    Failed,
}

/// The direction of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Plain to cipher.
    Encrypt,
    /// Cipher to plain.
    Decrypt,
}

/// A keyed cipher context.
pub struct Xts(NonNull<aws::EVP_CIPHER_CTX>);

// SAFETY: a context is used through `&mut self` only and is not bound to a thread.
unsafe impl Send for Xts {}

impl Xts {
    /// A context for `key`.
    ///
    /// # Errors
    /// [`XtsError`].
    pub fn new(key: &[u8], direction: Direction) -> Result<Self, XtsError> {
        if key.len() != KEY_LENGTH {
            return Err(XtsError::KeyLength);
        }
        // SAFETY: makes a new context or returns null.
        let context = unsafe { aws::EVP_CIPHER_CTX_new() };
        let context = Self(NonNull::new(context).ok_or(XtsError::Failed)?);
        let encrypt = c_int::from(direction == Direction::Encrypt);
        // SAFETY: a live context, the library's static cipher, and a key of the length it reads.
        let done = unsafe {
            aws::EVP_CipherInit_ex(
                context.0.as_ptr(),
                aws::EVP_aes_256_xts(),
                ptr::null_mut(),
                key.as_ptr(),
                ptr::null(),
                encrypt,
            )
        };
        if done == 1 { Ok(context) } else { Err(XtsError::Key) }
    }

    /// Works on one sector, [`SECTOR`] bytes of `from`, which is at `offset` bytes on the disk.
    ///
    /// # Errors
    /// [`XtsError::Failed`].
    pub fn one(
        &mut self,
        offset: u64,
        from: &[u8; SECTOR],
        to: &mut [u8; SECTOR],
    ) -> Result<(), XtsError> {
        // SAFETY: both are one sector long.
        unsafe { self.sector(offset, from.as_ptr(), to.as_mut_ptr()) }
    }

    /// Works on [`TWEAK_UNIT`] bytes that were encrypted by themselves; they are at this number of such units.
    ///
    /// # Errors
    /// [`XtsError::Failed`].
    pub fn unit(
        &mut self,
        number: u64,
        from: &[u8; TWEAK_UNIT],
        to: &mut [u8; TWEAK_UNIT],
    ) -> Result<(), XtsError> {
        // SAFETY: both are one unit long.
        unsafe { self.work(number, from.as_ptr(), to.as_mut_ptr(), TWEAK_UNIT) }
    }

    /// Works on `sectors` sectors, the first at `offset` bytes on the disk, from `from` to `to`, which
    /// are the same or do not overlap.
    ///
    /// # Errors
    /// [`XtsError::Failed`].
    ///
    /// # Safety
    /// `from` may be read and `to` written for `sectors * SECTOR` bytes.
    pub unsafe fn sectors(
        &mut self,
        offset: u64,
        from: *const u8,
        to: *mut u8,
        sectors: usize,
    ) -> Result<(), XtsError> {
        for sector in 0..sectors {
            let at = sector * SECTOR;
            // SAFETY: the caller's promise; `at` is within it.
            unsafe { self.sector(offset + at as u64, from.add(at), to.add(at)) }?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`Self::sectors`], for one.
    unsafe fn sector(&mut self, offset: u64, from: *const u8, to: *mut u8) -> Result<(), XtsError> {
        // SAFETY: the caller's promise.
        unsafe { self.work(offset / TWEAK_UNIT as u64, from, to, SECTOR) }
    }

    /// # Safety
    /// As [`Self::sectors`], for `length` bytes.
    #[inline]
    unsafe fn work(
        &mut self,
        number: u64,
        from: *const u8,
        to: *mut u8,
        length: usize,
    ) -> Result<(), XtsError> {
        let mut tweak = [0u8; 16];
        tweak[..8].copy_from_slice(&number.to_le_bytes());
        let (mut written, length): (c_int, c_int) = (0, length as c_int);
        // SAFETY: the context has its key and cipher and keeps them when only the tweak is given (-1
        // keeps the direction); XTS writes exactly as many bytes as it is given, which the caller
        // promised there are.
        let done = unsafe {
            aws::EVP_CipherInit_ex(
                self.0.as_ptr(),
                ptr::null(),
                ptr::null_mut(),
                ptr::null(),
                tweak.as_ptr(),
                -1,
            ) == 1
                && aws::EVP_CipherUpdate(self.0.as_ptr(), to, &raw mut written, from, length) == 1
        };
        if done && written == length { Ok(()) } else { Err(XtsError::Failed) }
    }
}

impl Drop for Xts {
    fn drop(&mut self) {
        // SAFETY: the context is ours and not used again; freeing it cleanses it.
        unsafe { aws::EVP_CIPHER_CTX_free(self.0.as_ptr()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_comes_back_at_its_own_offset_only() {
        let key: Vec<u8> = (0..64).collect();
        let mut encrypt = Xts::new(&key, Direction::Encrypt).unwrap();
        let mut decrypt = Xts::new(&key, Direction::Decrypt).unwrap();
        let (plain, mut sealed, mut opened) = ([7; SECTOR], [0; SECTOR], [0; SECTOR]);
        encrypt.one(8192, &plain, &mut sealed).unwrap();
        assert_ne!(sealed, plain);
        decrypt.one(8192, &sealed, &mut opened).unwrap();
        assert_eq!(opened, plain);
        decrypt.one(4096, &sealed, &mut opened).unwrap();
        assert_ne!(opened, plain);
    }

    /// It begins as the sector that begins there.
    #[test]
    fn a_unit_comes_back_at_its_own_number_only() {
        let key: Vec<u8> = (0..64).collect();
        let mut encrypt = Xts::new(&key, Direction::Encrypt).unwrap();
        let mut decrypt = Xts::new(&key, Direction::Decrypt).unwrap();
        let plain = [7; TWEAK_UNIT];
        let (mut sealed, mut opened) = ([0; TWEAK_UNIT], [0; TWEAK_UNIT]);
        encrypt.unit(3, &plain, &mut sealed).unwrap();
        let (whole, mut sector) = ([7; SECTOR], [0; SECTOR]);
        encrypt.one(3 * TWEAK_UNIT as u64, &whole, &mut sector).unwrap();
        assert_eq!(sealed, sector[..TWEAK_UNIT], "the tweak is another one");
        decrypt.unit(3, &sealed, &mut opened).unwrap();
        assert_eq!(opened, plain);
        decrypt.unit(4, &sealed, &mut opened).unwrap();
        assert_ne!(opened, plain);
    }

    #[test]
    fn keys_of_a_wrong_length_or_with_equal_halves_are_refused() {
        let refused = |key: &[u8]| Xts::new(key, Direction::Decrypt).err();
        assert_eq!(refused(&[1; 32]), Some(XtsError::KeyLength));
        assert_eq!(refused(&[1; KEY_LENGTH]), Some(XtsError::Key));
    }
}
