//! Which parts of a file are read.

use std::fs::File;
use std::io;
use std::ops::Range;

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use vmseal_api::proof::{SAMPLE_BYTES, SECTOR_BYTES};

/// The length of a part of a sample, in bytes.
const PART: u64 = 64 * 1024;

/// The most allocated ranges that are told apart, 16 bytes of memory each; what comes after counts as one.
const RANGES_MAX: usize = 1 << 20;

/// The allocated parts of a file from an offset on, in whole sectors but for the file's end.
///
/// # Errors
/// As the file system.
pub fn allocated(file: &File, from: u64) -> io::Result<Vec<Range<u64>>> {
    let length = file.metadata()?.len();
    let (mut ranges, mut at): (Vec<Range<u64>>, u64) = (Vec::new(), from);
    while at < length {
        let start = match seek(file, at, Whence::SeekData) {
            Ok(start) => start,
            // Nothing but a hole is left.
            Err(Errno::ENXIO) => break,
            // The file system cannot tell.
            Err(Errno::EINVAL) => at,
            Err(error) => return Err(error.into()),
        };
        let end = match seek(file, start, Whence::SeekHole) {
            // A pool has looked no further: it is a hole so far, and a question from there on has it look on.
            Ok(end) if end == start && start > at => {
                at = start;
                continue;
            }
            Ok(end) if end > start && ranges.len() + 1 < RANGES_MAX => end,
            Ok(_) | Err(Errno::EINVAL | Errno::ENXIO) => length,
            Err(error) => return Err(error.into()),
        };
        let start = (start - start % SECTOR_BYTES).max(at);
        let end = end.next_multiple_of(SECTOR_BYTES).min(length);
        ranges.push(start..end);
        at = end;
    }
    Ok(ranges)
}

fn seek(file: &File, at: u64, whence: Whence) -> Result<u64, Errno> {
    let at = i64::try_from(at).map_err(|_| Errno::EOVERFLOW)?;
    lseek(file, at, whence).map(i64::unsigned_abs)
}

/// How many bytes ranges have.
#[must_use]
pub fn bytes(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// The parts to read: all, or parts of [`PART`] bytes that are [`SAMPLE_BYTES`] together. One is at a random place in each
/// equal piece of the whole; the seed decides the places.
#[must_use]
pub fn choose(ranges: Vec<Range<u64>>, all: bool, seed: u64) -> Vec<Range<u64>> {
    let total = bytes(&ranges);
    if all || total <= SAMPLE_BYTES {
        return ranges;
    }
    let count = SAMPLE_BYTES / PART;
    let piece = total / count;
    let mut parts = Vec::new();
    // The number of bytes before the range that is looked at.
    let (mut index, mut before) = (0, 0);
    for number in 0..count {
        let slack = piece.saturating_sub(PART) + 1;
        let mut place = number * piece + mixed(seed.wrapping_add(number)) % slack;
        place -= place % SECTOR_BYTES;
        while index < ranges.len() && before + (ranges[index].end - ranges[index].start) <= place {
            before += ranges[index].end - ranges[index].start;
            index += 1;
        }
        let Some(range) = ranges.get(index) else { break };
        let start = range.start + (place - before);
        parts.push(start - start % SECTOR_BYTES..range.end.min(start + PART));
    }
    parts
}

/// A number that follows from another as if by chance (SplitMix64).
fn mixed(seed: u64) -> u64 {
    let mut mixed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn holes_are_left_out_and_what_is_before_the_data() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(&[1; 8192], 0).unwrap();
        file.write_all_at(&[1; 4096], 32 << 20).unwrap();
        file.write_all_at(&[1; 100], 64 << 20).unwrap();
        let ranges = allocated(&file, 4096).unwrap();
        let has = |at: u64| ranges.iter().any(|range| range.contains(&at));
        assert!(!has(0) && has(4096) && has(32 << 20) && has((64 << 20) + 99), "{ranges:?}");
        assert!(bytes(&ranges) < 4 << 20, "{ranges:?}");
        assert_eq!(allocated(&file, 65 << 20).unwrap(), []);
    }

    #[test]
    fn a_sample_is_spread_evenly_and_follows_from_its_seed() {
        let whole = 0..1u64 << 40;
        let sample = |seed| choose(vec![whole.clone()], false, seed);
        let one = sample(1);
        assert_eq!(bytes(&one), SAMPLE_BYTES);
        assert_eq!((one.clone(), one != sample(2)), (sample(1), true));
        let piece = whole.end / one.len() as u64;
        for (part, at) in one.iter().zip((0..).step_by(piece as usize)) {
            assert!(part.start >= at && part.end <= at + piece + PART, "{part:?} {at}");
            assert!(part.start.is_multiple_of(SECTOR_BYTES));
        }
    }

    #[test]
    fn small_files_and_all_of_large_ones_are_read_as_they_are() {
        let small = vec![4096..8192, 1 << 20..2 << 20];
        assert_eq!(choose(small.clone(), false, 7), small);
        let large = Vec::from_iter([0..SAMPLE_BYTES, SAMPLE_BYTES * 2..SAMPLE_BYTES * 3]);
        assert_eq!(choose(large.clone(), true, 7), large);
    }

    #[test]
    fn a_sample_of_many_ranges_stays_within_them() {
        let ranges: Vec<_> = (0..5000u64).map(|at| at * 1_000_000 / 4096 * 4096).collect();
        let ranges: Vec<_> = ranges.iter().map(|at| *at..at + 65536).collect();
        for part in choose(ranges.clone(), false, 3) {
            let within = |range: &Range<u64>| range.start <= part.start && part.end <= range.end;
            assert!(part.start < part.end && ranges.iter().any(within), "{part:?}");
        }
    }
}
