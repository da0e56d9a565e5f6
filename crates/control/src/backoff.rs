//! Exponential backoff between attempts, with jitter: clients that failed together do not retry together.

use std::time::Duration;

/// The pause after `failures` failed attempts in a row (1 is the first): from `first`, doubled each time, up to
/// `longest`, with a jitter of a quarter.
pub fn pause(first: Duration, longest: Duration, failures: u32) -> Duration {
    let doubled = first.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(longest);
    let mut byte = [128];
    // Without random bytes there is no jitter.
    let _ = aws_lc_rs::rand::fill(&mut byte);
    doubled * 3 / 4 + doubled * u32::from(byte[0]) / 512
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_vary() {
        let (first, longest) = (Duration::from_secs(2), Duration::from_secs(60));
        for (failures, around) in [(0, 2), (1, 2), (2, 4), (5, 32), (6, 60), (u32::MAX, 60)] {
            let seen: Vec<_> = (0..50).map(|_| pause(first, longest, failures)).collect();
            let (low, high) =
                (Duration::from_secs(around) * 3 / 4, Duration::from_secs(around) * 5 / 4);
            assert!(seen.iter().all(|pause| (low..=high).contains(pause)), "{failures}: {seen:?}");
            assert!(seen.iter().any(|pause| *pause != seen[0]), "{failures}: no jitter");
        }
    }
}
