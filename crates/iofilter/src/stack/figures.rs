//! Measurements while requests flow: latencies in fixed buckets, and the CPU time of the cipher.
//!
//! Nothing here locks or allocates per request. A queue's latencies are written by its own thread alone.
//! Clocks cost time: a queue reads one for each pass that takes requests and one for each that answers, not
//! two per request; and the thread's CPU clock, a system call, is read for one in
//! [`SAMPLED`] pieces of work on average.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vmseal_api::filter::{CipherFigures, Histogram, LATENCY_BUCKETS, LatencyFigures};

use crate::stack::request::Operation;
use crate::stack::tally::Tally;

/// One in this many pieces of encryption is timed, on average.
const SAMPLED: u64 = 64;

/// The upper bound of the first bucket: 2 to this power, in nanoseconds.
const FIRST_BUCKET: u32 = vmseal_api::filter::LATENCY_FIRST_BITS;

#[derive(Debug, Default)]
struct Buckets {
    counts: [Tally; LATENCY_BUCKETS],
    nanoseconds: Tally,
}

/// The bucket of a duration: those below 2^[`FIRST_BUCKET`] ns, then each twice as long, then all others.
fn bucket(nanoseconds: u64) -> usize {
    let bits = u64::BITS - nanoseconds.leading_zeros();
    (bits.saturating_sub(FIRST_BUCKET) as usize).min(LATENCY_BUCKETS - 1)
}

impl Buckets {
    fn add(&self, took: Duration) {
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket(nanoseconds)].add(1);
        self.nanoseconds.add(nanoseconds);
    }

    fn add_to(&self, sum: &mut Histogram) {
        for (to, from) in sum.counts.iter_mut().zip(&self.counts) {
            *to += from.get();
        }
        let nanoseconds = self.nanoseconds.get();
        sum.nanoseconds = sum.nanoseconds.saturating_add(nanoseconds);
    }
}

/// The latencies of one queue's requests. Only its own thread writes.
#[derive(Debug, Default)]
pub struct Latencies {
    read: Buckets,
    write: Buckets,
    flush: Buckets,
    discard: Buckets,
}

impl Latencies {
    /// Notes the latency of a request that succeeded.
    pub fn took(&self, operation: Operation, took: Duration) {
        let buckets = match operation {
            Operation::Read => &self.read,
            Operation::Write => &self.write,
            Operation::Flush => &self.flush,
            Operation::Discard | Operation::WriteZeroes { .. } => &self.discard,
        };
        buckets.add(took);
    }

    /// Adds them up.
    pub fn add_to(&self, sum: &mut LatencyFigures) {
        self.read.add_to(&mut sum.read);
        self.write.add_to(&mut sum.write);
        self.flush.add_to(&mut sum.flush);
        self.discard.add_to(&mut sum.discard);
    }
}

/// The CPU time that a disk's cipher has used, estimated from samples. All of a disk's queues add to it.
#[derive(Debug, Default)]
pub struct CipherTime {
    encrypt: AtomicU64,
    decrypt: AtomicU64,
}

impl CipherTime {
    /// The estimate so far.
    #[must_use]
    pub fn figures(&self) -> CipherFigures {
        CipherFigures {
            encrypt_nanoseconds: self.encrypt.load(Ordering::Relaxed),
            decrypt_nanoseconds: self.decrypt.load(Ordering::Relaxed),
        }
    }
}

/// A direction of the cipher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CipherWork {
    /// Of writes.
    Encrypt,
    /// Of reads.
    Decrypt,
}

/// Chooses which pieces of work are timed. One per queue.
#[derive(Debug)]
pub struct Sampler {
    /// How many are skipped before the next is timed.
    left: u64,
    random: u64,
    times: std::sync::Arc<CipherTime>,
}

/// Work that is being timed.
#[derive(Debug)]
pub struct Timed(u64);

impl Sampler {
    /// Adds the measured time to `times`.
    #[must_use]
    pub fn new(times: std::sync::Arc<CipherTime>) -> Self {
        // Any number but zero will do.
        Self { left: 1, random: 0x9e37_79b9_7f4a_7c15, times }
    }

    /// Called before a piece of work.
    pub fn begin(&mut self) -> Option<Timed> {
        self.left -= 1;
        if self.left > 0 {
            return None;
        }
        // At random distances (xorshift), so that a guest's pattern is not sampled in step.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.left = 1 + self.random % (2 * SAMPLED - 1);
        Some(Timed(thread_nanoseconds()))
    }

    /// Called after it.
    pub fn end(&self, timed: Option<Timed>, work: CipherWork) {
        let Some(Timed(began)) = timed else { return };
        let sample = thread_nanoseconds().saturating_sub(began).saturating_mul(SAMPLED);
        let to = match work {
            CipherWork::Encrypt => &self.times.encrypt,
            CipherWork::Decrypt => &self.times.decrypt,
        };
        to.fetch_add(sample, Ordering::Relaxed);
    }
}

/// The CPU time of this thread.
fn thread_nanoseconds() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills the structure, which lives across the call.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn each_duration_is_in_the_first_bucket_that_bounds_it() {
        use vmseal_api::filter::latency_bound_seconds;
        for nanoseconds in [0, 1, 8191, 8192, 8193, 1 << 20, (1 << 33) - 1, 1 << 33, u64::MAX] {
            let index = bucket(nanoseconds);
            let seconds = nanoseconds as f64 / 1e9;
            if let Some(bound) = latency_bound_seconds(index) {
                assert!(seconds <= bound, "{nanoseconds} ns are in bucket {index}");
            } else {
                assert_eq!(index, LATENCY_BUCKETS - 1);
            }
            if index > 0 {
                let before = latency_bound_seconds(index - 1).unwrap();
                assert!(seconds >= before, "{nanoseconds} ns are in bucket {index}");
            }
        }
        let latencies = Latencies::default();
        latencies.took(Operation::Read, Duration::from_micros(20));
        latencies.took(Operation::Write, Duration::MAX);
        latencies.took(Operation::WriteZeroes { unmap: true }, Duration::ZERO);
        let mut sum = LatencyFigures::default();
        latencies.add_to(&mut sum);
        latencies.add_to(&mut sum);
        let counts = |histogram: &Histogram| histogram.counts.iter().sum::<u64>();
        assert_eq!((counts(&sum.read), sum.read.nanoseconds), (2, 40_000));
        assert_eq!((sum.read.counts[2], sum.write.counts[LATENCY_BUCKETS - 1]), (2, 2));
        assert_eq!((counts(&sum.flush), counts(&sum.discard)), (0, 2));
    }

    #[test]
    fn the_samples_estimate_the_whole() {
        let times = Arc::new(CipherTime::default());
        let mut sampler = Sampler::new(Arc::clone(&times));
        const WORKS: u32 = 64_000;
        let mut timed = 0;
        for _ in 0..WORKS {
            if sampler.begin().is_some() {
                timed += 1;
            }
        }
        let expected = WORKS / SAMPLED as u32;
        assert!((expected * 9 / 10..expected * 11 / 10).contains(&timed), "{timed} of {WORKS}");
        let began = Timed(thread_nanoseconds());
        while thread_nanoseconds() < began.0 + 1_000_000 {}
        sampler.end(Some(began), CipherWork::Decrypt);
        let figures = times.figures();
        assert!(figures.decrypt_nanoseconds >= 64 * 1_000_000, "{figures:?}");
        assert_eq!(figures.encrypt_nanoseconds, 0);
        let began = Timed(thread_nanoseconds());
        while thread_nanoseconds() < began.0 + 1_000_000 {}
        sampler.end(Some(began), CipherWork::Encrypt);
        let both = times.figures();
        assert!(both.encrypt_nanoseconds >= 64 * 1_000_000, "{both:?}");
        assert_eq!(both.decrypt_nanoseconds, figures.decrypt_nanoseconds);
    }
}
