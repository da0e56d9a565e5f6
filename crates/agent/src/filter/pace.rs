//! How often a filter that works is asked how far it is: often at first, so that the end of short work is noticed when it
//! comes, and seldom when the work takes long.

use std::time::{Duration, Instant};

/// The shortest pause: an answer takes a fraction of a millisecond, of which the filter spends some.
const SHORTEST: Duration = Duration::from_millis(5);

/// The part of the time since the beginning that a pause has: what has taken a second is noticed to have ended 60 ms later at
/// most.
const PART: u32 = 16;

/// See the module.
pub struct Pace {
    begun: Instant,
    longest: Duration,
}

impl Pace {
    /// From now on; no pause is longer than `longest`, as somebody wants to see the progress.
    pub fn up_to(longest: Duration) -> Self {
        Self { begun: Instant::now(), longest }
    }

    /// The next pause.
    pub async fn pause(&self) {
        tokio::time::sleep(self.next()).await;
    }

    fn next(&self) -> Duration {
        (self.begun.elapsed() / PART).clamp(SHORTEST, self.longest.max(SHORTEST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_the_work() {
        let since = |seconds| Pace {
            begun: Instant::now().checked_sub(Duration::from_secs(seconds)).unwrap(),
            longest: Duration::from_millis(500),
        };
        assert_eq!(since(0).next(), SHORTEST);
        assert!((60..80).contains(&since(1).next().as_millis()));
        assert_eq!(since(100).next(), Duration::from_millis(500));
        let none = Pace { longest: Duration::ZERO, ..since(100) };
        assert_eq!(none.next(), SHORTEST);
    }
}
