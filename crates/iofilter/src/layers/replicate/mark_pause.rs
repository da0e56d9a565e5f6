//! Slows a guest that changes a mirrored disk faster than it is copied, so that the copy comes to an end: only the first
//! change of a clean chunk waits.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The first pause: a mark's own time or two, in microseconds.
const FIRST: u64 = 1000;

/// The longest: of thirty-two requests that all wait for marks the last waits eight seconds, which no guest takes for a
/// failure, and four marks a second are fewer than a copier without a lower rate unmarks.
const LONGEST: u64 = 250_000;

/// See the module.
#[derive(Debug)]
pub(super) struct MarkPause {
    /// The pause after each mark, in microseconds.
    pause: AtomicU64,
    /// How many chunks were marked when the last pass ended.
    before: AtomicU64,
}

impl Default for MarkPause {
    fn default() -> Self {
        Self { pause: AtomicU64::new(0), before: AtomicU64::new(u64::MAX) }
    }
}

impl MarkPause {
    /// A pass has ended, and this many chunks are marked again; with `most` or fewer the guest is slowed no further.
    pub(super) fn adjust(&self, marked: u64, most: u64) {
        let before = self.before.swap(marked, Ordering::Relaxed);
        let pause = self.pause.load(Ordering::Relaxed);
        let next = if marked <= most / 2 {
            if pause > FIRST { pause / 2 } else { 0 }
        } else if marked > most && marked > before / 2 {
            (pause * 2).clamp(FIRST, LONGEST)
        } else {
            pause
        };
        self.pause.store(next, Ordering::Relaxed);
    }

    /// Ends the pauses: nothing is copied for now. The next passes tell anew whether they are needed.
    pub(super) fn end(&self) {
        self.pause.store(0, Ordering::Relaxed);
        self.before.store(u64::MAX, Ordering::Relaxed);
    }

    /// How long the marker waits after a mark.
    pub(super) fn pause(&self) -> Duration {
        Duration::from_micros(self.pause.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_slowed_while_passes_do_not_halve_the_rest_and_let_go_when_little_is_left() {
        let (pause, most) = (MarkPause::default(), 32);
        let after = |marked| {
            pause.adjust(marked, most);
            pause.pause().as_micros() as u64
        };
        assert_eq!(after(1000), 0, "the first pass tells nothing");
        assert_eq!(after(500), 0, "halved");
        assert_eq!(after(400), FIRST);
        assert_eq!(after(400), FIRST * 2);
        assert_eq!(after(150), FIRST * 2, "that is enough");
        for _ in 0..20 {
            after(150);
        }
        assert_eq!(after(150), LONGEST);
        pause.end();
        assert_eq!(pause.pause(), Duration::ZERO, "nothing is copied");
        assert_eq!((after(150), after(150)), (0, FIRST), "the next passes tell anew");
        assert_eq!(
            (after(33), after(33)),
            (FIRST, FIRST * 2),
            "more may be left than a pivot takes"
        );
        assert_eq!((after(32), after(17)), (FIRST * 2, FIRST * 2), "it can pivot");
        for _ in 0..20 {
            after(150);
        }
        assert_eq!(after(32), LONGEST);
        assert_eq!(after(16), LONGEST / 2);
        for _ in 0..10 {
            after(0);
        }
        assert_eq!(after(0), 0);
    }
}
