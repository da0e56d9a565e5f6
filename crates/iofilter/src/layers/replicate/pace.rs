//! Holds a copy to its rate, which may change while it waits.

use std::time::{Duration, Instant};

/// What has been taken ahead of the rate. There is no burst: a copy that has been idle gains nothing from that, as its bytes
/// would be felt by the guest at once.
#[derive(Debug)]
pub struct Bucket {
    /// Bytes that the rate has still to make up for.
    owed: f64,
    rate: Option<u64>,
    /// When `owed` was so much.
    since: Instant,
}

impl Bucket {
    /// Without a rate.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { owed: 0.0, rate: None, since: now }
    }

    /// How long to wait until more may be taken at this rate; none is no limit.
    pub fn wait(&mut self, rate: Option<u64>, now: Instant) -> Duration {
        let passed = now.saturating_duration_since(self.since).as_secs_f64();
        self.since = now;
        // At the rate that was in force until now.
        self.owed = match self.rate {
            Some(before) => (self.owed - before as f64 * passed).max(0.0),
            None => 0.0,
        };
        self.rate = rate;
        match rate {
            Some(rate) => {
                let seconds = self.owed / rate.max(1) as f64;
                Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
            }
            None => Duration::ZERO,
        }
    }

    /// Takes bytes, after [`Bucket::wait`].
    pub fn take(&mut self, bytes: u64) {
        if self.rate.is_some() {
            self.owed += bytes as f64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Takes pieces for so long, and returns how many bytes.
    fn taken(bucket: &mut Bucket, rate: Option<u64>, from: Instant, lasts: Duration) -> u64 {
        let (mut now, mut taken) = (from, 0);
        loop {
            now += bucket.wait(rate, now);
            if now >= from + lasts {
                return taken;
            }
            bucket.take(MIB / 2);
            taken += MIB / 2;
        }
    }

    #[test]
    fn no_more_is_taken_than_the_rate_allows_and_one_piece() {
        let start = Instant::now();
        let mut bucket = Bucket::new(start);
        let ten = Duration::from_secs(10);
        let first = taken(&mut bucket, Some(4 * MIB), start, ten);
        assert!((39 * MIB..=41 * MIB).contains(&first), "{first}");
        // A rest in between gains nothing.
        let later = start + ten * 10;
        let second = taken(&mut bucket, Some(4 * MIB), later, ten);
        assert!((39 * MIB..=41 * MIB).contains(&second), "{second}");
    }

    #[test]
    fn another_rate_counts_from_when_it_is_set() {
        let start = Instant::now();
        let mut bucket = Bucket::new(start);
        assert_eq!(bucket.wait(Some(MIB), start), Duration::ZERO);
        bucket.take(8 * MIB);
        let seconds = |duration: Duration| duration.as_secs_f64().round();
        let later = start + Duration::from_secs(4);
        assert_eq!(seconds(bucket.wait(Some(MIB), later)), 4.0, "half of it is made up for");
        assert_eq!(seconds(bucket.wait(Some(2 * MIB), later)), 2.0, "twice as fast");
        assert_eq!(bucket.wait(None, later), Duration::ZERO);
        bucket.take(100 * MIB);
        assert_eq!(bucket.wait(Some(MIB), later), Duration::ZERO, "what was taken without a rate");
    }
}
