//! How the merges of a busy guest's disk come to an end.
//!
//! ```text
//!   the active layer is large ──► a new one above it ──► it is merged beside the guest ──┐
//!      ▲                            (from the fourth time on the guest waits in turns,   │
//!      └──────────────────────────────────────── each time about twice as long) ◄────────┘
//!   it is small ──► merged while the guest waits ──► done
//!      ▲                          └── too long: it has to be a quarter of that size ──┐
//!      └───────────────────────────────────────────────────────────────────────────────┘
//! ```
//! If a guest writes faster than its storage merges, each round leaves a larger layer than the one before, and the merge never
//! ends. So the agent makes the guest's disk wait, longer in each round, until the layers become smaller. In the rounds before, the
//! merge rests for half of its time, for the guest's sake; from then on it does not, nor does the merge for which the guest waits.

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use vmseal_api::id::DiskId;

use crate::filter::{Control, Waiting};
use crate::storage::gate::Gate;

/// How much the active layer may have, in bytes, when it is merged while the guest waits: a fraction of a second's work on most
/// storage.
const SMALL_BYTES: u64 = 16 << 20;

/// The same where storage is so slow that this took too long: a few clusters and a layer's own tables.
const SMALLEST_BYTES: u64 = 1 << 20;

/// How often a layer is merged beside a guest that runs as it likes. Most need one round.
const FREE_ROUNDS: u32 = 3;

/// How long a guest that is slowed goes on before it waits again.
const TURN: Duration = Duration::from_millis(50);

/// The longest that such a guest waits at a time, which is 63 of 64 parts of its time. Linux gives a request 30 seconds.
const WAIT_MAX: Duration = Duration::from_millis(3150);

/// How long until a filter that did not have the disk wait is asked again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// What is known of the merges of a disk so far.
#[derive(Debug)]
pub struct Convergence {
    rounds: u32,
    small: u64,
}

impl Default for Convergence {
    fn default() -> Self {
        Self { rounds: 0, small: SMALL_BYTES }
    }
}

impl Convergence {
    /// Whether an active layer of so many bytes is to be merged beside the guest, below a new one.
    pub fn is_large(&self, bytes: u64) -> bool {
        bytes > self.small
    }

    /// A new layer has been put above the active one.
    pub fn begin_round(&mut self) {
        self.rounds = self.rounds.saturating_add(1);
    }

    /// An active layer could not be merged as long as the guest could wait.
    pub fn took_too_long(&mut self) {
        self.small = (self.small / 4).max(SMALLEST_BYTES);
    }

    /// How long the guest is to wait between two turns while a layer is merged; none if it need not.
    pub fn wait(&self) -> Option<Duration> {
        let doublings = self.rounds.checked_sub(FREE_ROUNDS).filter(|more| *more > 0)?;
        let turns = 1u32.checked_shl(doublings).map_or(u32::MAX, |turns| turns - 1);
        Some(TURN.saturating_mul(turns).min(WAIT_MAX))
    }

    /// Whether a merge beside the guest may rest, so that the guest has half of the storage's time. Not in rounds in which the guest
    /// is to wait for it, also where it cannot be had to.
    pub fn rests(&self) -> bool {
        self.wait().is_none()
    }
}

/// Slows a guest: the requests of a disk wait, go on for a moment, and wait again.
pub struct Slowdown {
    /// The guest's filter.
    pub control: Control,
    /// The disk.
    pub disk: DiskId,
    /// How long it waits at a time.
    pub wait: Duration,
}

impl Slowdown {
    /// Slows the guest until `work` has ended, but not while `gate` is paused. The disk does not wait when this returns.
    pub async fn during<T>(self, gate: &Gate, work: impl Future<Output = T>) -> T {
        tracing::info!(disk = %self.disk, wait = ?self.wait, "the guest is slowed: it writes faster than its layers are merged");
        let (ended, end) = watch::channel(());
        let work = async {
            let done = work.await;
            drop(ended);
            done
        };
        tokio::join!(work, self.turns(gate, end)).0
    }

    async fn turns(self, gate: &Gate, mut end: watch::Receiver<()>) {
        // The sender only ever goes.
        let mut ends_within = async |time| timeout(time, end.changed()).await.is_ok();
        while !ends_within(TURN).await {
            if gate.pace().paused {
                continue;
            }
            match self.drain().await {
                Some(waiting) => {
                    let ends = ends_within(self.wait).await;
                    let resumed = spawn_blocking(move || waiting.resume()).await;
                    if let Ok(Err(error)) = resumed {
                        tracing::debug!(disk = %self.disk, %error, "a disk that waited has gone on before");
                    }
                    if ends {
                        return;
                    }
                }
                None if ends_within(RETRY_INTERVAL).await => return,
                None => {}
            }
        }
    }

    async fn drain(&self) -> Option<Waiting> {
        let (control, disk) = (self.control.clone(), self.disk);
        let drained = spawn_blocking(move || control.drain(vec![disk])).await.ok()?;
        drained.inspect_err(|error| tracing::debug!(%disk, %error, "a guest is not slowed")).ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The longest that a guest waits for its active layer.
    const PATIENCE: f64 = 7.0;

    /// The size of the disk, in bytes: no layer has more.
    const DISK: f64 = 1e12;

    /// Merges a disk's active layer of so many bytes whose guest writes so many bytes a second as long as it need not wait;
    /// returns how many rounds that took.
    fn merge(mut bytes: f64, writes: f64, merges: f64) -> Option<u32> {
        let mut convergence = Convergence::default();
        for _ in 0..100 {
            if convergence.is_large(bytes as u64) {
                convergence.begin_round();
                let wait = convergence.wait().unwrap_or_default().as_secs_f64();
                let share = TURN.as_secs_f64() / (TURN.as_secs_f64() + wait);
                // It rests for as long as it works.
                let beside = if convergence.rests() { merges / 2.0 } else { merges };
                bytes = (writes * share * bytes / beside).min(DISK);
            } else if bytes / merges <= PATIENCE {
                return Some(convergence.rounds);
            } else {
                convergence.took_too_long();
                // Until it is tried again.
                bytes += writes * 10.0;
            }
        }
        None
    }

    proptest! {
        #[test]
        fn every_merge_ends(
            bytes in 0.0f64..DISK,
            writes in 0.0f64..1e9,
            // How much faster the guest writes.
            faster in 0.0f64..50.0,
        ) {
            let merges = (writes / faster).max(1e6);
            prop_assert!(merge(bytes, writes, merges).is_some());
        }
    }

    #[test]
    fn a_guest_that_writes_slowly_is_not_slowed() {
        assert!(merge(1e10, 1e7, 2e8).unwrap() <= FREE_ROUNDS);
        assert_eq!(merge(1e6, 1e9, 1e7), Some(0), "small ones are merged at once");
    }

    #[test]
    fn a_guest_waits_longer_in_each_round_up_to_a_limit() {
        let mut convergence = Convergence::default();
        let mut waits = Vec::new();
        for _ in 0..12 {
            convergence.begin_round();
            waits.push(convergence.wait().map(|wait| wait.as_millis()));
        }
        let most = Some(3150);
        let first = [None, None, None, Some(50), Some(150), Some(350), Some(750), Some(1550)];
        assert_eq!(waits[..8], first);
        assert_eq!(waits[8..], [most; 4]);
        convergence.rounds = u32::MAX;
        assert_eq!(convergence.wait(), Some(WAIT_MAX));
    }

    #[test]
    fn a_merge_rests_until_the_guest_has_to_wait_for_it() {
        let mut convergence = Convergence::default();
        let mut rests = vec![convergence.rests()];
        for _ in 0..5 {
            convergence.begin_round();
            rests.push(convergence.rests());
        }
        assert_eq!(rests, [true, true, true, true, false, false]);
        convergence.took_too_long();
        assert!(!convergence.rests());
    }

    #[test]
    fn what_took_too_long_has_to_be_smaller_the_next_time() {
        let mut convergence = Convergence::default();
        assert!(!convergence.is_large(SMALL_BYTES));
        convergence.took_too_long();
        assert!(convergence.is_large(SMALL_BYTES) && !convergence.is_large(SMALL_BYTES / 4));
        (0..9).for_each(|_| convergence.took_too_long());
        assert!(!convergence.is_large(SMALLEST_BYTES));
    }
}
