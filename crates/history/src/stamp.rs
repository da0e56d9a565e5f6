//! The written data: each unit records its disk, its place and its write, and the rest of it is computed from
//! these, so that no part of it can come from another.

/// The disk, place and write of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The number of the disk.
    pub disk: u64,
    /// The number of the unit on it.
    pub unit: u64,
    /// The number of the write.
    pub sequence: u64,
}

/// The content that a read found in a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing but zeroes.
    Zeroes,
    /// A write, by its sequence number.
    Write(u64),
    /// A whole unit that belongs elsewhere.
    Misplaced(Stamp),
    /// Neither zeroes nor any whole unit.
    Torn,
}

impl Stamp {
    /// Fills a unit.
    pub fn fill(&self, unit: &mut [u8]) {
        let mut state = self.disk ^ self.unit.rotate_left(20) ^ self.sequence.rotate_left(40);
        for (index, word) in unit.chunks_exact_mut(8).enumerate() {
            let value = match index {
                0 => self.disk,
                1 => self.unit,
                2 => self.sequence,
                _ => {
                    // splitmix64
                    state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                    mixed ^ (mixed >> 27)
                }
            };
            word.copy_from_slice(&value.to_le_bytes());
        }
    }
}

/// Identifies the content that was read at `unit` of `disk`.
///
/// # Panics
/// If a unit has less than three numbers of 8 bytes.
#[must_use]
pub fn find(bytes: &[u8], disk: u64, unit: u64) -> Found {
    if bytes.iter().all(|&byte| byte == 0) {
        return Found::Zeroes;
    }
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(word)
    };
    let stamp = Stamp { disk: word(0), unit: word(8), sequence: word(16) };
    let mut whole = vec![0; bytes.len()];
    stamp.fill(&mut whole);
    if whole != bytes {
        return Found::Torn;
    }
    if (stamp.disk, stamp.unit) == (disk, unit) {
        Found::Write(stamp.sequence)
    } else {
        Found::Misplaced(stamp)
    }
}

#[test]
fn a_unit_is_known_again_and_any_change_of_it_is_seen() {
    let stamp = Stamp { disk: 7, unit: 5, sequence: 9 };
    let mut unit = vec![0; 512];
    stamp.fill(&mut unit);
    assert_eq!(find(&unit, 7, 5), Found::Write(9));
    assert_eq!(find(&unit, 7, 6), Found::Misplaced(stamp));
    assert_eq!(find(&unit, 8, 5), Found::Misplaced(stamp));
    assert_eq!(find(&[0; 512], 7, 5), Found::Zeroes);
    let mut other = vec![0; 512];
    Stamp { sequence: 10, ..stamp }.fill(&mut other);
    for cut in [1, 8, 24, 32, 256, 504, 511] {
        let torn = [&unit[..cut], &other[cut..]].concat();
        // Below the sequence number the two are the same.
        let expected = if cut <= 16 { Found::Write(10) } else { Found::Torn };
        assert_eq!(find(&torn, 7, 5), expected, "cut at {cut}");
    }
}
