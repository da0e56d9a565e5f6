//! The content of a disk under test: words computed from a seed and their offset, so that a block at the
//! wrong place, an old block and a damaged one are all noticed.

/// A disk's content as a function of the offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    seed: u64,
}

impl Pattern {
    /// The content of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The eight bytes at byte `position`, a multiple of 8: SplitMix64's finalizer of the position.
    fn word(self, position: u64) -> u64 {
        let mut z = self.seed.wrapping_add(position.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Fills `bytes`, whole words, with the content from byte `offset` on.
    pub fn fill(self, offset: u64, bytes: &mut [u8]) {
        let (words, rest) = bytes.as_chunks_mut::<8>();
        debug_assert!(rest.is_empty());
        for (position, word) in (offset..).step_by(8).zip(words) {
            *word = self.word(position).to_le_bytes();
        }
    }

    /// The first offset on the disk, in bytes, at which `bytes` read at `offset` differ from the content.
    #[must_use]
    pub fn mismatch(self, offset: u64, bytes: &[u8]) -> Option<u64> {
        let (words, rest) = bytes.as_chunks::<8>();
        debug_assert!(rest.is_empty());
        (offset..)
            .step_by(8)
            .zip(words)
            .find(|(position, word)| **word != self.word(*position).to_le_bytes())
            .map(|(position, _)| position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_recognised_only_at_its_place_and_unchanged() {
        let pattern = Pattern::new(7);
        let mut block = vec![0; 4096];
        pattern.fill(8192, &mut block);
        assert_eq!(pattern.mismatch(8192, &block), None);
        assert_eq!(pattern.mismatch(4096, &block), Some(4096), "another place");
        assert_eq!(Pattern::new(8).mismatch(8192, &block), Some(8192), "another seed");
        block[4095] ^= 1;
        assert_eq!(pattern.mismatch(8192, &block), Some(8192 + 4088), "one bit");
    }

    #[test]
    fn reading_in_other_pieces_gives_the_same_content() {
        let (mut whole, mut half) = (vec![0; 1024], vec![0; 512]);
        Pattern::new(1).fill(0, &mut whole);
        Pattern::new(1).fill(512, &mut half);
        assert_eq!(whole[512..], half);
    }
}
