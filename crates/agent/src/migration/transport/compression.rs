//! Compression of a stream's bytes, where that gets them to the other host sooner (docs/decisions/204).
//!
//! ```text
//!  plain for a while ─► compressed for a while ─► the faster of both for longer ─┐
//!         ▲                                                                      │
//!         └──────────────────────────────────────────────────────────────────────┘
//! ```
//! What counts is the time from when a frame is full until the connection has taken it. A line or a rate that holds frames back makes
//! that long for what is plain, a processor that is busy for what is compressed.

use std::time::Duration;

use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};
use vmseal_seal::frame::{CONTENT_MAX, Kind};
use zeroize::Zeroizing;

/// A frame with compressed bytes: their length before that in 4 bytes, then an LZ4 block.
pub const COMPRESSED: Kind = Kind::new(5);

/// How much is sent in each of the two ways before they are compared, in bytes: sixteen full frames. On lines of several Gb/s the
/// buffers of a connection may hold as much.
const TRIAL_BYTES: u64 = 4 << 20;

/// How much is then sent in the faster way, in bytes: memory differs from place to place, and a trial costs a sixteenth of this.
const SETTLED_BYTES: u64 = 64 << 20;

const LENGTH_LEN: usize = 4;

/// Compresses what a thread sends, or does not.
pub struct Compression {
    choice: Choice,
    block: Zeroizing<Vec<u8>>,
}

impl Compression {
    pub fn new() -> Self {
        let block = Zeroizing::new(vec![0; get_maximum_output_size(CONTENT_MAX)]);
        Self { choice: Choice::default(), block }
    }

    /// Compresses the first `length` bytes of `content`, where that is to be tried; the frame's kind, and how long its content is.
    pub fn fill(&mut self, content: &mut [u8], length: usize) -> (Kind, usize) {
        let plain = (Kind::BYTES, length);
        if !self.choice.compresses() {
            return plain;
        }
        let Ok(compressed) = compress_into(&content[..length], &mut self.block) else {
            return plain;
        };
        let (Ok(before), all) = (u32::try_from(length), LENGTH_LEN + compressed) else {
            return plain;
        };
        if all >= length {
            return plain;
        }
        content[..LENGTH_LEN].copy_from_slice(&before.to_be_bytes());
        content[LENGTH_LEN..all].copy_from_slice(&self.block[..compressed]);
        (COMPRESSED, all)
    }

    /// The connection has taken a frame of so many bytes, as they were before, within this time.
    pub fn took(&mut self, bytes: usize, time: Duration) {
        self.choice.took(bytes, time);
    }
}

/// What is tried, or was found to be faster.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Plain,
    /// The rate of what was plain, in bytes a second.
    Compressed {
        plain: f64,
    },
    Settled {
        compresses: bool,
    },
}

#[derive(Debug)]
struct Choice {
    phase: Phase,
    /// What was sent in this phase.
    bytes: u64,
    time: Duration,
}

impl Default for Choice {
    fn default() -> Self {
        Self { phase: Phase::Plain, bytes: 0, time: Duration::ZERO }
    }
}

impl Choice {
    fn compresses(&self) -> bool {
        match self.phase {
            Phase::Plain => false,
            Phase::Compressed { .. } => true,
            Phase::Settled { compresses } => compresses,
        }
    }

    fn took(&mut self, bytes: usize, time: Duration) {
        self.bytes += bytes as u64;
        self.time += time;
        let enough = match self.phase {
            Phase::Settled { .. } => SETTLED_BYTES,
            Phase::Plain | Phase::Compressed { .. } => TRIAL_BYTES,
        };
        if self.bytes < enough {
            return;
        }
        let rate = self.bytes as f64 / self.time.as_secs_f64().max(f64::EPSILON);
        self.phase = match self.phase {
            Phase::Plain => Phase::Compressed { plain: rate },
            Phase::Compressed { plain } => Phase::Settled { compresses: rate > plain },
            Phase::Settled { .. } => Phase::Plain,
        };
        (self.bytes, self.time) = (0, Duration::ZERO);
    }
}

/// Gives back what was compressed.
#[derive(Default)]
pub struct Decompression(Zeroizing<Vec<u8>>);

impl Decompression {
    /// The bytes of a frame of the kind [`COMPRESSED`]; none if it is not one: more than [`CONTENT_MAX`] bytes, or not as many as
    /// it says.
    pub fn bytes(&mut self, content: &[u8]) -> Option<&[u8]> {
        let (length, block) = content.split_first_chunk::<LENGTH_LEN>()?;
        let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
        if length > CONTENT_MAX {
            return None;
        }
        self.0.resize(CONTENT_MAX, 0);
        let bytes = &mut self.0[..length];
        (decompress_into(block, bytes).ok()? == length).then_some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: usize = 1 << 20;

    /// Sends as much as this at these rates, in bytes a second; how much of it was compressed.
    fn compressed(choice: &mut Choice, all: usize, plain: f64, compressed: f64) -> usize {
        let mut sum = 0;
        for _ in 0..all / MIB {
            let compresses = choice.compresses();
            let rate = if compresses { compressed } else { plain };
            sum += if compresses { MIB } else { 0 };
            choice.took(MIB, Duration::from_secs_f64(MIB as f64 / rate));
        }
        sum / MIB
    }

    #[test]
    fn the_faster_way_is_found_and_found_again_when_it_changes() {
        let mut choice = Choice::default();
        // A round is 4 and 4 MiB of trials, and 64 of the faster.
        assert_eq!(compressed(&mut choice, 2 * 72 * MIB, 100e6, 300e6), 2 * 68);
        assert_eq!(compressed(&mut choice, 2 * 72 * MIB, 1000e6, 300e6), 2 * 4);
        assert_eq!(compressed(&mut choice, 72 * MIB, 100e6, 101e6), 68);
    }

    fn compressing() -> Compression {
        let mut this = Compression::new();
        this.choice.phase = Phase::Compressed { plain: 0.0 };
        this
    }

    #[test]
    fn what_does_not_get_smaller_goes_as_it_is() {
        let mut noise = vec![0; CONTENT_MAX];
        aws_lc_rs::rand::fill(&mut noise).unwrap();
        let mut content = noise.clone();
        assert_eq!(compressing().fill(&mut content, CONTENT_MAX), (Kind::BYTES, CONTENT_MAX));
        assert_eq!(content, noise);
        let mut zeroes = vec![0; CONTENT_MAX];
        let (kind, length) = compressing().fill(&mut zeroes, CONTENT_MAX);
        assert!(kind == COMPRESSED && length < 2048, "{length}");
        assert_eq!(
            Compression::new().fill(&mut zeroes, 9),
            (Kind::BYTES, 9),
            "nothing is tried yet"
        );
    }

    #[test]
    fn a_frame_that_promises_too_much_or_too_little_is_refused() {
        let mut content = vec![7; CONTENT_MAX];
        let (_, length) = compressing().fill(&mut content, CONTENT_MAX);
        let frame = &content[..length];
        let mut bytes = Decompression::default();
        assert_eq!(bytes.bytes(frame).unwrap(), vec![7; CONTENT_MAX]);
        for promised in [0, 1, CONTENT_MAX - 1, CONTENT_MAX + 1, u32::MAX as usize] {
            let promised = u32::try_from(promised).unwrap().to_be_bytes();
            assert!(bytes.bytes(&[&promised, &frame[4..]].concat()).is_none());
        }
        assert!(bytes.bytes(&frame[..length - 1]).is_none());
        assert!(bytes.bytes(&frame[..3]).is_none() && bytes.bytes(b"").is_none());
    }

    proptest! {
        #[test]
        fn what_is_compressed_comes_back(
            parts in proptest::collection::vec((any::<u8>(), 1..600_usize, any::<bool>()), 1..40),
        ) {
            let part = |(byte, count, runs): (u8, usize, bool)| {
                (0..count).map(move |at| if runs { byte } else { byte.wrapping_mul(at as u8 | 1) })
            };
            let before: Vec<u8> = parts.into_iter().flat_map(part).collect();
            let mut content = before.clone();
            match compressing().fill(&mut content, before.len()) {
                (COMPRESSED, length) => {
                    prop_assert!(length < before.len());
                    let mut bytes = Decompression::default();
                    prop_assert_eq!(bytes.bytes(&content[..length]), Some(&before[..]));
                }
                _ => prop_assert_eq!(content, before),
            }
        }

        #[test]
        fn any_frame_is_read_or_refused(content in proptest::collection::vec(any::<u8>(), 0..3000)) {
            if let Some(bytes) = Decompression::default().bytes(&content) {
                prop_assert!(bytes.len() <= CONTENT_MAX);
            }
        }
    }
}
