//! The best that this machine could do with large requests, shown as another system: one core that copies
//! each byte once between a file in memory and a buffer, and encrypts or decrypts it once. In rates: 1 / (1 /
//! copy + 1 / xts).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use vmseal_secret::xts::{self, SECTOR, Xts, XtsError};

use crate::load::{Direction, Workload};
use crate::stop;

/// Its name in goals and results.
pub const ID: &str = "computed-limit";

/// From this request size on, costs other than copying and encryption hardly count.
const BLOCK_MIN: u32 = 512 * 1024;

/// Why it cannot be computed.
#[derive(Debug, thiserror::Error)]
pub enum ComputedLimitError {
    /// The file.
    #[error("the file that copying is measured with")]
    File(#[from] io::Error),
    /// The cipher.
    #[error(transparent)]
    Cipher(#[from] XtsError),
}

/// The resources of the computation.
pub struct ComputedLimit {
    file: File,
    size: u64,
    buffer: Vec<u8>,
}

/// The result.
pub struct LimitResult {
    /// Blocks that were copied and encrypted or decrypted.
    pub blocks: u64,
    /// The time of copying and encryption together.
    pub time: Duration,
    /// Of each block, in nanoseconds.
    pub latency: Histogram<u64>,
}

impl ComputedLimit {
    /// Whether it applies to this load: one of a single direction.
    #[must_use]
    pub fn is_of(workload: &Workload) -> bool {
        let mixed = matches!(workload.direction, Direction::Mixed(_));
        workload.block >= BLOCK_MIN && !mixed
    }

    /// Makes the file, fully allocated, in `directory`; it has no name.
    ///
    /// # Errors
    /// [`ComputedLimitError`]
    pub fn new(directory: &Path, size: u64) -> Result<Self, ComputedLimitError> {
        let file = tempfile::tempfile_in(directory)?;
        let buffer = vec![0x5a; BLOCK_MIN as usize];
        for at in (0..size).step_by(buffer.len()) {
            file.write_all_at(&buffer, at)?;
        }
        Ok(Self { file, size, buffer })
    }

    /// Works for about `time`, block by block as the load requires.
    ///
    /// # Errors
    /// [`ComputedLimitError`]
    pub fn measure(
        &mut self,
        workload: &Workload,
        time: Duration,
        mut latency: Histogram<u64>,
    ) -> Result<LimitResult, ComputedLimitError> {
        let block = workload.block as usize;
        self.buffer.resize(block, 0x5a);
        let key: Vec<u8> = (0..xts::KEY_LENGTH as u8).collect();
        let reads = workload.direction == Direction::Read;
        let way = if reads { xts::Direction::Decrypt } else { xts::Direction::Encrypt };
        let mut cipher = Xts::new(&key, way)?;
        let (mut at, mut blocks, mut spent) = (0, 0, Duration::ZERO);
        // What was measured does not count when the end was asked for.
        while spent < time && !stop::asked() {
            let began = Instant::now();
            if reads {
                self.file.read_exact_at(&mut self.buffer, at)?;
            }
            let data = self.buffer.as_mut_ptr();
            // SAFETY: the buffer has whole sectors and is worked on in place.
            unsafe { cipher.sectors(at, data, data, block / SECTOR)? };
            if !reads {
                self.file.write_all_at(&self.buffer, at)?;
            }
            let took = began.elapsed();
            latency.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
            spent += took;
            blocks += 1;
            at = (at + block as u64) % (self.size / block as u64 * block as u64);
        }
        Ok(LimitResult { blocks, time: spent, latency })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sections::SECTIONS;

    #[test]
    fn large_loads_have_a_limit_and_it_is_worked_for() {
        let of: Vec<_> =
            SECTIONS[0].workloads.iter().filter(|load| ComputedLimit::is_of(load)).collect();
        assert!(of.iter().all(|load| load.id.starts_with("512k")) && of.len() == 3);
        let mut computed_limit = ComputedLimit::new(Path::new("/dev/shm"), 2 << 20).unwrap();
        for load in of {
            let latency = Histogram::new_with_bounds(1, 60_000_000_000, 2).unwrap();
            let measured =
                computed_limit.measure(load, Duration::from_millis(20), latency).unwrap();
            assert!(measured.blocks > 0 && measured.time >= Duration::from_millis(20));
            assert_eq!(measured.latency.len(), measured.blocks);
        }
    }
}
