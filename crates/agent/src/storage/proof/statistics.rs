//! Whether bytes look like ciphertext.

use vmseal_api::proof::{CHI_SQUARE, SECTOR_BYTES};

/// A sector's bytes.
pub const SECTOR: usize = SECTOR_BYTES as usize;

/// The fewest bytes whose statistic means anything: four of each value.
pub const BYTES_MIN: usize = 1024;

/// How often each byte value occurs.
#[derive(Clone)]
pub struct Counts([u64; 256]);

impl Default for Counts {
    fn default() -> Self {
        Self([0; 256])
    }
}

impl Counts {
    /// Of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        // Four tables, so that equal bytes in a row do not wait for each other.
        let mut tables = [[0u32; 256]; 4];
        let mut chunks = bytes.chunks_exact(4);
        for chunk in chunks.by_ref() {
            for (table, byte) in tables.iter_mut().zip(chunk) {
                table[usize::from(*byte)] += 1;
            }
        }
        for byte in chunks.remainder() {
            tables[0][usize::from(*byte)] += 1;
        }
        let sum = |value: usize| tables.iter().map(|table| u64::from(table[value])).sum();
        Self(std::array::from_fn(sum))
    }

    /// Adds others.
    pub fn add(&mut self, others: &Self) {
        self.0.iter_mut().zip(&others.0).for_each(|(sum, more)| *sum += more);
    }

    fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The chi-square statistic against 256 values that are equally frequent, rounded; 0 for no bytes.
    #[must_use]
    pub fn chi_square(&self) -> u32 {
        let total = self.total();
        if total == 0 {
            return 0;
        }
        // The sum of (observed - expected)² / expected is 256 · Σ observed² / total - total.
        let squares: u128 = self.0.iter().map(|count| u128::from(*count).pow(2)).sum();
        let statistic = (squares * 256).saturating_sub(u128::from(total).pow(2));
        let total = u128::from(total);
        u32::try_from((statistic + total / 2) / total).unwrap_or(u32::MAX)
    }

    /// The entropy in thousandths of bits for each byte; none for no bytes.
    #[must_use]
    pub fn entropy(&self) -> Option<u32> {
        let total = self.total();
        if total == 0 {
            return None;
        }
        let bits = |count: &u64| {
            let share = *count as f64 / total as f64;
            -share * share.log2()
        };
        let sum: f64 = self.0.iter().filter(|count| **count > 0).map(bits).sum();
        // 0 to 8.
        Some((sum * 1000.0).round() as u32)
    }
}

/// Whether a statistic is one of ciphertext.
#[must_use]
pub fn is_random(chi_square: u32) -> bool {
    CHI_SQUARE.contains(&chi_square)
}

#[cfg(test)]
mod tests {
    use vmseal_secret::SecretBytes;

    use super::*;

    /// Random bytes.
    pub fn random(length: usize) -> Vec<u8> {
        let part = || SecretBytes::random(32).unwrap().expose().to_vec();
        std::iter::repeat_with(part).take(length.div_ceil(32)).flatten().take(length).collect()
    }

    #[test]
    fn random_bytes_look_like_ciphertext() {
        for _ in 0..500 {
            let counts = Counts::of(&random(SECTOR));
            assert!(is_random(counts.chi_square()), "{}", counts.chi_square());
            assert!(counts.entropy().unwrap() > 7900, "{:?}", counts.entropy());
        }
    }

    #[test]
    fn what_people_and_programs_write_does_not() {
        let text = b"It is a truth universally acknowledged, that a single man in possession of a good fortune".iter();
        let text: Vec<u8> = text.copied().cycle().take(SECTOR).collect();
        let numbers: Vec<u8> = (0..SECTOR).map(|at| at as u8).collect();
        let base64: Vec<u8> = random(SECTOR).iter().map(|byte| b'0' + byte % 64).collect();
        let mut mixed = random(SECTOR);
        mixed[100..300].fill(b'-');
        for (what, bytes) in
            [("text", text), ("numbers", numbers), ("base64", base64), ("mixed", mixed)]
        {
            let statistic = Counts::of(&bytes).chi_square();
            assert!(!is_random(statistic), "{what}: {statistic}");
        }
    }

    #[test]
    fn entropy_and_statistic_are_those_of_the_definition() {
        assert_eq!(Counts::of(&[]).entropy(), None);
        assert_eq!(Counts::of(&[7; 100]).entropy(), Some(0));
        assert_eq!(Counts::of(&[1, 2, 3, 4]).entropy(), Some(2000));
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!((Counts::of(&all).entropy(), Counts::of(&all).chi_square()), (Some(8000), 0));
        // All 256 bytes of one value: (256 - 1)² + 255 · 1.
        assert_eq!(Counts::of(&[9; 256]).chi_square(), 255 * 256);
        let mut sum = Counts::of(&[1, 2]);
        sum.add(&Counts::of(&[3, 4]));
        assert_eq!(sum.entropy(), Some(2000));
    }
}
