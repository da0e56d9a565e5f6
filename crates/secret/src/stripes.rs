//! The anti-forensic splitter of LUKS with SHA-256 ("LUKS1 On-Disk Format Specification" 1.2.3, section 2.4), the way back:
//! a key from the stripes that it was split into.
//!
//! ```text
//!  sum = 0;  for each stripe but the last:  sum = diffuse(sum xor stripe);   key = sum xor the last stripe
//!  diffuse(block 0 ‖ block 1 ‖ …) = SHA-256(0 ‖ block 0) ‖ SHA-256(1 ‖ block 1) ‖ …    numbers of 4 bytes, big endian
//! ```

use aws_lc_sys as aws;

use crate::bytes::SecretBytes;
use crate::digest::SHA256_LEN;
use crate::memory::MemoryError;

/// The length of the number before a block, in bytes.
const NUMBER_LEN: usize = 4;

/// A key that is put together.
pub struct Stripes {
    sum: SecretBytes,
    /// A block with its number before it.
    block: SecretBytes,
}

impl Stripes {
    /// For a key of `len` bytes, a multiple of [`SHA256_LEN`]: all keys of LUKS2 disks here are.
    ///
    /// # Errors
    /// [`MemoryError`]
    pub fn new(len: usize) -> Result<Self, MemoryError> {
        debug_assert!(len.is_multiple_of(SHA256_LEN));
        let block = SecretBytes::zeroed(NUMBER_LEN + SHA256_LEN)?;
        Ok(Self { sum: SecretBytes::zeroed(len)?, block })
    }

    /// Goes on with a stripe that is not the last one, as long as the key.
    pub fn add(&mut self, stripe: &[u8]) {
        self.combine(stripe);
        let block = self.block.expose_mut();
        for (number, part) in self.sum.expose_mut().chunks_exact_mut(SHA256_LEN).enumerate() {
            block[..NUMBER_LEN].copy_from_slice(&(number as u32).to_be_bytes());
            block[NUMBER_LEN..].copy_from_slice(part);
            // SAFETY: reads a block and writes SHA256_LEN bytes, which `part` has. It cleanses its own state.
            unsafe { aws::SHA256(block.as_ptr(), block.len(), part.as_mut_ptr()) };
        }
    }

    /// The key, with the last stripe.
    #[must_use]
    pub fn finish(mut self, last: &[u8]) -> SecretBytes {
        self.combine(last);
        self.sum
    }

    fn combine(&mut self, stripe: &[u8]) {
        for (sum, byte) in self.sum.expose_mut().iter_mut().zip(stripe) {
            *sum ^= byte;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::sha256;

    /// Splits a key as the specification says, by other means than the code under test.
    fn split(key: &[u8], stripes: usize) -> Vec<Vec<u8>> {
        let (mut all, mut sum) = (Vec::new(), vec![0; key.len()]);
        let xor = |a: &[u8], b: &[u8]| a.iter().zip(b).map(|(a, b)| a ^ b).collect::<Vec<u8>>();
        for number in 1..stripes {
            let stripe: Vec<u8> = (0..key.len()).map(|at| (number * 7 + at * 3) as u8).collect();
            let mixed = xor(&sum, &stripe);
            let hash = |(at, block): (usize, &[u8])| {
                sha256(&[&(at as u32).to_be_bytes()[..], block].concat())
            };
            sum = mixed.chunks(SHA256_LEN).enumerate().flat_map(hash).collect();
            all.push(stripe);
        }
        all.push(xor(&sum, key));
        all
    }

    #[test]
    fn what_was_split_is_put_together_again_only_from_all_stripes() {
        let key: Vec<u8> = (0..64).collect();
        let mut split = split(&key, 40);
        let merged = |split: &[Vec<u8>]| {
            let mut stripes = Stripes::new(key.len()).unwrap();
            let (last, others) = split.split_last().unwrap();
            others.iter().for_each(|stripe| stripes.add(stripe));
            stripes.finish(last)
        };
        assert_eq!(merged(&split).expose(), key);
        split[0][63] ^= 1;
        assert_ne!(merged(&split).expose(), key);
    }
}
