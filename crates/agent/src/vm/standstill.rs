//! How long a guest may stand still while it is sent to another host. Each wait of its source from then on has its limit from here.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use vmseal_api::problem::Problem;

use super::internal;

/// How long the guest may stand still, beyond what it was to, until the other host has the rest of its memory; and from then on, until
/// that host has the rest of its disks. A connection that takes nothing counts as lost before
/// ([`crate::migration::transport::STALL_TIMEOUT`]). One that takes all and delivers nothing, or a byte now and then, does not: an
/// attacker between the hosts could hold the guest.
const STILL_MAX: Duration = Duration::from_secs(60);

/// How often QEMU is asked whether its guest stands still.
const ASK_INTERVAL: Duration = Duration::from_secs(1);

/// How long the last of the copied disks may take when all of the guest's requests are done: less than half of what its filter allows
/// itself for them.
const LAST_SECONDS: u64 = 4;

/// The least that may be left for that, in bytes: a filter copies disks in chunks.
const LAST_MIN: u64 = 1 << 20;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct StandStill {
    /// How long the guest is to stand still at most.
    downtime: Duration,
    /// How fast its memory was sent, in bytes a second; 0 where that was not measured.
    rate: u64,
    /// Since when all of its memory is sent.
    all_sent: Option<Instant>,
}

impl StandStill {
    /// That of a guest that is to stand still for so long at most.
    pub fn of(downtime_milliseconds: u32) -> Self {
        let downtime = Duration::from_millis(downtime_milliseconds.into());
        Self { downtime, rate: 0, all_sent: None }
    }

    /// How long it may stand still until all of its memory is sent.
    pub fn longest(&self) -> Duration {
        STILL_MAX + self.downtime
    }

    /// All of its memory is sent; the last of it so fast, in bytes a second.
    pub fn all_sent(&mut self, rate: u64) {
        self.rate = rate;
        self.all_sent = Some(Instant::now());
    }

    /// How long something may take that takes `least` at most on a line which holds nothing back, where so many bytes are to be sent
    /// for it: what they need at the rate of the memory comes to that, and how long the guest may stand still. `least` is left when
    /// all of the time is used.
    pub fn limit(&self, least: Duration, bytes: u64) -> Duration {
        let needed = bytes.checked_div(self.rate).map_or(Duration::ZERO, Duration::from_secs);
        let used = self.all_sent.map_or(Duration::ZERO, |since| since.elapsed());
        let left = self.longest().saturating_sub(used).max(least);
        least.saturating_add(self.downtime).saturating_add(needed).min(left)
    }

    /// How much of the copied disks may be left, of `most`, when they are completed.
    pub fn last_bytes(&self, most: u64) -> u64 {
        match self.rate {
            0 => most,
            rate => rate.saturating_mul(LAST_SECONDS).clamp(LAST_MIN.min(most), most),
        }
    }
}

/// Waits until a guest has stood still for so long. `stands_still` asks QEMU; it has no answer where QEMU has given another one, and
/// none comes while QEMU sends the rest of the memory: that counts as standing still from the question on.
pub async fn until_held<A>(longest: Duration, mut stands_still: impl FnMut() -> A) -> Problem
where
    A: Future<Output = Option<bool>>,
{
    let mut since: Option<Instant> = None;
    loop {
        sleep(ASK_INTERVAL).await;
        let asked = Instant::now();
        let left = longest.saturating_sub(since.map_or(Duration::ZERO, |since| since.elapsed()));
        match timeout(left, stands_still()).await {
            Ok(Some(false)) => since = None,
            Ok(Some(true)) => {
                since.get_or_insert(asked);
            }
            // Who waits for the stream is told of a QEMU that refuses to say it.
            Ok(None) => {}
            Err(_) => return held(longest),
        }
        if since.is_some_and(|since| since.elapsed() >= longest) {
            return held(longest);
        }
    }
}

fn held(longest: Duration) -> Problem {
    let seconds = longest.as_secs();
    internal(format!(
        "the connection to the other host: the guest has stood still for {seconds} s, and the other host does not have the rest of its memory"
    ))
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    const LEAST: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn a_wait_is_as_long_as_the_downtime_and_the_line_allow_and_no_longer() {
        let mut still = StandStill::of(2_000);
        assert_eq!(still.longest(), Duration::from_secs(62));
        assert_eq!(still.limit(LEAST, 1 << 30), Duration::from_secs(12), "no rate is known");
        still.all_sent(1 << 20);
        assert_eq!(still.limit(LEAST, 0), Duration::from_secs(12));
        assert_eq!(still.limit(LEAST, 30 << 20), Duration::from_secs(42));
        assert_eq!(still.limit(LEAST, u64::MAX), Duration::from_secs(62), "the bound");
        tokio::time::advance(Duration::from_secs(40)).await;
        assert_eq!(still.limit(LEAST, 30 << 20), Duration::from_secs(22), "all waits share it");
        tokio::time::advance(Duration::from_secs(40)).await;
        assert_eq!(still.limit(LEAST, 30 << 20), LEAST);
    }

    #[tokio::test]
    async fn a_slow_line_completes_less_at_the_end() {
        let mut still = StandStill::of(300);
        assert_eq!(still.last_bytes(16 << 20), 16 << 20, "no rate is known");
        for (rate, last) in [(1 << 40, 16 << 20), (2 << 20, 8 << 20), (1, 1 << 20)] {
            still.all_sent(rate);
            assert_eq!(still.last_bytes(16 << 20), last, "{rate}");
        }
        assert_eq!(still.last_bytes(4096), 4096);
    }

    /// After which time a guest counts as held that stands still so after each question.
    async fn held_after(answers: &[Option<bool>], then: Option<bool>) -> Duration {
        let (mut answers, begun) = (answers.iter().copied(), Instant::now());
        let longest = Duration::from_secs(30);
        let problem = until_held(longest, || ready(answers.next().unwrap_or(then))).await;
        assert!(problem.detail.contains("has stood still for 30 s"), "{problem}");
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_is_held_when_it_has_stood_still_without_a_break() {
        let still = Some(true);
        assert_eq!(held_after(&[], still).await, Duration::from_secs(31));
        // It has run in between; and QEMU has refused an answer.
        let broken = [still, still, Some(false)];
        assert_eq!(held_after(&broken, still).await, Duration::from_secs(34));
        assert_eq!(held_after(&[still, None, None], still).await, Duration::from_secs(31));
    }

    /// QEMU answers no question while it sends the rest.
    #[tokio::test(start_paused = true)]
    async fn a_qemu_that_does_not_answer_has_stopped_its_guest() {
        let begun = Instant::now();
        until_held(Duration::from_secs(30), pending::<Option<bool>>).await;
        assert_eq!(begun.elapsed(), Duration::from_secs(31));
        let (mut asked, begun) = (0, Instant::now());
        let stands_still = || {
            asked += 1;
            let answers = asked == 1;
            async move { if answers { Some(true) } else { pending().await } }
        };
        until_held(Duration::from_secs(30), stands_still).await;
        assert_eq!(begun.elapsed(), Duration::from_secs(31), "from the first answer on");
    }
}
